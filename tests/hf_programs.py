"""Tiny models of Hugging Face transformers, a batch, what one device computes; and what gloo processes run."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.distributed as dist
from oracle import relative
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ringlearn as rl
from ringlearn.nn.hugging_face import register, split

VOCABULARY = 61
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,  # scores far from uniform
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LAYOUTS = rl.layouts.LAYOUTS


def make_model(name="Llama", dtype=torch.float64, attention="ringlearn", model=None, **options):
    """A random decoder. RMSNorm of transformers rounds to float32; these, which compute the same, do not."""
    import transformers

    register()
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    kind = getattr(transformers, model or f"{name}ForCausalLM")
    torch.manual_seed(1)
    model = kind._from_config(config, attn_implementation=attention, experts_implementation="eager").to(dtype)
    for owner in list(model.modules()):
        for child, norm in list(owner.named_children()):
            if type(norm).__name__ in ("LlamaRMSNorm", "GptOssRMSNorm"):
                setattr(owner, child, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype))
            elif type(norm).__name__ == "Gemma2RMSNorm":
                setattr(owner, child, GemmaNorm(norm.weight.shape, eps=norm.eps, dtype=dtype))
    return model.eval()


class GemmaNorm(torch.nn.RMSNorm):
    """Its weights count from 1."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def make_batch(S, B=2, seed=0):
    """Tokens and labels (B, S), as transformers wants them: not shifted, some of them ignored."""
    torch.manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (B, S))
    return tokens, tokens.where(torch.rand(B, S) < 0.8, -100)


def packed(S):
    """An attention_mask that numbers the documents of two rows, which are packed differently."""
    return torch.stack([1 + (torch.arange(S) >= start) for start in (5, 8)])


def gradients(model):
    grads = {}
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        grads[name.removeprefix("module.")] = grad.clone()
    return grads


def one_device(model, tokens, labels, attention="sdpa", **arguments):
    """Logits, mean loss and gradients by SDPA, or transformers' eager attention; the labels are shifted here."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    logits = model(tokens, use_cache=False, **arguments).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    model.set_attn_implementation("ringlearn")
    grads = gradients(model)
    model.zero_grad()
    return logits.detach(), loss.item(), grads


def step(model, world, tokens, labels, factor=1, **options):
    """Full logits, this process's part of the loss and its gradients, before any reduction."""
    batch = split(model, world, tokens, labels, **options)
    logits = model(**batch).logits
    loss = batch.loss(logits)
    (factor * loss).backward()
    return batch.unshard(logits.detach()), loss.item()


# What gloo processes run


def cases():
    """Every number of ranks and layout; gradients summed by hand, by DDP and by FSDP2."""
    torch.set_num_threads(1)
    results = {}
    for P in (1, 2, 3, 4):
        group = dist.new_group(range(P))
        if dist.get_rank() >= P:
            continue
        world, mesh = rl.DistributedWorld(group), None
        for layout, S in (("contiguous", 21), ("zigzag", 21), ("zigzag", 3)):
            model = make_model()
            logits, loss = step(model, world, *make_batch(S), layout=LAYOUTS[layout])
            rl.nn.sum_gradients(model.parameters(), group)
            results[P, layout, S, "summed"] = logits, loss, gradients(model)
            if S == 21:
                model = make_model()
                logits, loss = step(model, world, *make_batch(S), layout=LAYOUTS[layout], attention_mask=packed(S))
                rl.nn.sum_gradients(model.parameters(), group)
                results[P, layout, S, "packed"] = logits, loss, gradients(model)
    world, mesh = rl.DistributedWorld(), init_device_mesh("cpu", (dist.get_world_size(),))
    for how in ("DDP", "FSDP2"):
        model = make_model()
        if how == "DDP":
            model = DistributedDataParallel(model)
        else:
            model.gradient_checkpointing_enable()
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
            model.train()
        logits, loss = step(model, world, *make_batch(21), factor=world.size)
        results[4, "zigzag", 21, how] = logits, loss, gradients(model)
    return results


def refusals():
    """What each rank says when one of them, rank 1, does what is not supported."""
    torch.set_num_threads(1)
    world, said = rl.DistributedWorld(timeout=20), {}
    tokens, labels = make_batch(21)
    odd = world.rank == 1

    def attempt(name, call):
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    model = make_model(attention_dropout=0.1)
    attempt("dropout", lambda: model.train(odd)(**split(model, world, tokens, labels)))
    model.eval()
    batch = split(model, world, tokens, labels)
    hidden = batch | {"attention_mask": batch["attention_mask"] * (0 if odd else 1)}
    attempt("padding", lambda: model(**hidden))
    dense = batch | {"attention_mask": torch.ones(2, 1, 21, 21, dtype=torch.bool) if odd else batch["attention_mask"]}
    attempt("dense mask", lambda: model(**dense))
    attempt("cache", lambda: model(**batch | {"use_cache": odd}))
    attempt("count", lambda: split(model, world, tokens, labels, count=40 + odd))
    attempt("tokens", lambda: split(model, world, tokens + odd, labels))
    padding = torch.ones_like(tokens)
    padding[:, 3] = 0 if odd else 1
    attempt("padding between tokens", lambda: split(model, world, tokens, labels, padding))
    given = rl.documents([6, 15] if odd else [5, 16])
    positions = rl.positions_in_documents(torch.arange(21), [5, 16])[None]
    attempt("documents", lambda: split(model, world, tokens, labels, position_ids=positions, mask=given))
    attempt("too many", lambda: split(model, world, tokens + 1000 * odd, labels))
    attempt("labels", lambda: model(**split(model, world, tokens), labels=tokens))
    model.set_attn_implementation("sdpa" if odd else "ringlearn")
    attempt("another attention", lambda: split(model, world, tokens, labels))
    return said


def printed(blocks):
    """What the blocks of docs/decoding.md print on this rank, one after the other."""
    torch.set_num_threads(1)
    names, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for block in blocks:
            exec(block, names)
    return out.getvalue()


def example(source):
    """What the blocks of docs/your_model.md print on this rank, and how far two of their models' gradients are off."""
    torch.set_num_threads(1)
    program, head, trial, own = source
    names, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, names)
        exec(head, names)
        exec(trial, names)
    classifier = names["classifier"]
    got = gradients(classifier)
    classifier.set_attn_implementation("sdpa")
    classifier.zero_grad()
    F.cross_entropy(classifier(names["tokens"], use_cache=False).logits, names["kinds"]).backward()
    errors = [relative(got[name], g) for name, g in gradients(classifier).items()]

    exec(own, names)
    model, parts = names["model"], [x.split(names["lengths"], 1) for x in (names["tokens"], names["targets"])]
    got = gradients(model)
    model.zero_grad()
    for tokens, targets in zip(*parts, strict=True):  # each document alone
        places = torch.arange(tokens.shape[1])
        logits = model(tokens, places, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        (F.cross_entropy(logits[0], targets[0], reduction="sum") / (names["targets"] != -100).sum()).backward()
    return out.getvalue(), max(errors), max(relative(got[name], g) for name, g in gradients(model).items())

"""Generation with models of transformers: on one device, and as ranks of any world do it together."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import torch
import torch.distributed as dist
from hf_programs import VOCABULARY, make_model

import ringlearn as rl
from ringlearn.nn.hugging_face import prefill

MODELS = {
    "Llama": {},
    "Mistral": dict(sliding_window=5),  # so short that every rank keeps the window
    "Mistral, a long window": dict(sliding_window=17),  # so long that ranks share it out
    "Qwen3": dict(head_dim=8),
    "Gemma3Text": dict(
        model="Gemma3ForCausalLM",
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "GptOss": dict(
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Gemma2": dict(head_dim=8, sliding_window=4, attn_logit_softcapping=3.0, query_pre_attn_scalar=8),
}
SAMPLED = dict(do_sample=True, temperature=1.3, top_k=20, top_p=0.9)
# Name: the prompt's length, how many tokens of each row are padding, arguments of generate.
CASES = {
    "greedy": (21, [0], {}),
    "sampled": (21, [0], SAMPLED),
    "a padded batch": (21, [0, 13, 20], {}),
    "a padded batch, sampled": (16, [10, 0, 15], SAMPLED),
    "shorter than the ranks": (3, [0], {}),
    "one token": (1, [0, 0], {}),
    "padding before one token": (4, [3, 3], {}),
}
NEW = 14


def model_of(name: str):
    return make_model(name.partition(",")[0], **MODELS[name])


def prompt_of(case: str):
    S, pads, options = CASES[case]
    torch.manual_seed(S)
    tokens = torch.randint(3, VOCABULARY, (len(pads), S))
    mask = (torch.arange(S) >= torch.tensor(pads)[:, None]).long()
    return tokens * mask, mask, dict(max_new_tokens=NEW, pad_token_id=0) | options


def one_device(model, case: str, **options):
    tokens, mask, more = prompt_of(case)
    # What has sinks or caps its scores has them in transformers' eager attention alone.
    eager = type(model).__name__ in ("GptOssForCausalLM", "Gemma2ForCausalLM")
    model.set_attn_implementation("eager" if eager else "sdpa")
    torch.manual_seed(7)
    tokens, mask = tokens.to(model.device), mask.to(model.device)
    out = model.generate(tokens, attention_mask=mask, **more | options)
    model.set_attn_implementation("ringlearn")
    return out


def together(model, world, case: str, **options):
    tokens, mask, more = prompt_of(case)
    prompt = prefill(model, world, tokens, mask, new_tokens=NEW)
    torch.manual_seed(7 + world.ranks[0])  # only rank 0 has the seed of the one device
    return model.generate(**prompt, **more | options)


# What gloo processes run


def cases(names):
    """(P, model, case): the tokens, for those numbers of ranks, models and cases."""
    torch.set_num_threads(1)
    found = {}
    for P in (2, 3, 4):
        group = dist.new_group(range(P))
        if dist.get_rank() >= P:
            continue
        world = rl.DistributedWorld(group)
        for name, case in names[P]:
            found[P, name, case] = together(model_of(name), world, case)
    return found


def ends():
    """A stop by a clock that only rank 0 has, a text that rank 0 prints, and plain generate without rank 0's word."""
    torch.set_num_threads(1)
    world, model, found = rl.DistributedWorld(), make_model(), {}
    tokens, mask, more = prompt_of("greedy")

    def stop(ids, scores):
        return torch.full((len(ids),), world.rank == 0 and ids.shape[1] == 25)

    found["stopped"] = together(model, world, "sampled", stopping_criteria=[stop])
    text = io.StringIO()
    with redirect_stdout(text):
        prompt = prefill(model, world, tokens, mask, new_tokens=2 * NEW, streamer=Streamer())
        turn = model.generate(**prompt, **more)
    found["text"] = text.getvalue()
    said = torch.cat([turn, torch.tensor([[7, 8, 9]])], 1)
    found["next turn"] = model.generate(**prompt.followed_by(said), max_new_tokens=5, pad_token_id=0)
    prompt, compared, exchange = prefill(model, world, tokens, mask), [], world._exchange
    world._exchange = lambda op, *known: (compared.append(op), exchange(op, *known))[1]
    model.generate(**prompt, **more)
    found["compared"], world._exchange = compared, exchange
    prompt = prefill(model, world, tokens, mask)
    plain = {"attention_mask": mask, prompt.name: prompt.cache}
    found["plain"] = model.generate(tokens, **plain, **more)
    return found


class Streamer:
    def put(self, tokens):
        print(tokens.flatten().tolist())

    def end(self):
        print("end")


def told():
    """What each rank hears when rank 1 does something else, or all do what cannot be; and if the cache is whole."""
    torch.set_num_threads(1)
    world, model, said = rl.DistributedWorld(timeout=20), make_model(attention_dropout=0.1), {}
    odd = world.rank == 1
    tokens, mask, more = prompt_of("a padded batch")

    def attempt(name, call):
        try:
            call()
            said[name] = "no error"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("other prompts", lambda: prefill(model, world, tokens + odd, mask))
    attempt("room", lambda: prefill(model, world, tokens, mask, new_tokens=7 + odd))
    attempt("right", lambda: prefill(model, world, tokens, mask.flip(1) if odd else mask))
    prompt = prefill(model, world, tokens, mask, new_tokens=NEW)
    cache = prompt.cache
    whole = [[x.clone() for x in (layer.store.cache.k[0], layer.store.cache.v[0])] for layer in cache.layers]
    plain = {prompt.name: cache} | more
    attempt("other tokens", lambda: model.generate(tokens + odd, attention_mask=mask, **plain))
    attempt("other padding", lambda: model.generate(tokens, attention_mask=mask.roll(int(odd), 0), **plain))
    attempt("fewer rows", lambda: model.generate(tokens[:2], attention_mask=mask[:2], **plain))
    late = torch.cat([mask, torch.zeros(3, 1, dtype=torch.int64)], 1)
    attempt("a pad on the right", lambda: model.generate(tokens[:, [*range(21), 0]], attention_mask=late, **plain))
    attempt("beams", lambda: model.generate(**prompt, **more, num_beams=2))
    attempt("dropout", lambda: model.train(odd) and model.generate(tokens, attention_mask=mask, **plain))
    model.eval()
    model.set_attn_implementation("sdpa")
    attempt("attention", lambda: model.generate(tokens, attention_mask=mask, **plain))
    model.set_attn_implementation("ringlearn")
    said["lengths"] = [cache.seen, list(cache.lengths), [layer.store.cache.lengths for layer in cache.layers]]
    said["whole"] = all(
        torch.equal(a, b)
        for layer, kept in zip(cache.layers, whole, strict=True)
        for a, b in zip((layer.store.cache.k[0], layer.store.cache.v[0]), kept, strict=True)
    )
    said["goes on"] = model.generate(**prompt, **more)
    attempt("full", lambda: model.generate(**prompt.followed_by(said["goes on"]), max_new_tokens=5, pad_token_id=0))
    said["full, lengths"] = [cache.seen, list(cache.lengths), [layer.store.cache.lengths for layer in cache.layers]]
    return said

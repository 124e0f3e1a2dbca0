"""Models, batches and an independent oracle for the tests of ringlearn.nn; and what their gloo processes run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from oracle import dense_attention
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ringlearn as rl
from ringlearn import nn as rnn

ALL_ON_0 = rl.Layout("all on rank 0", lambda S, P, rank: (range(S),) if rank == 0 else ())
LAYOUTS = rl.layouts.LAYOUTS | {ALL_ON_0.name: ALL_ON_0}
CONFIG = rnn.Config(vocabulary=31, width=16, layers=2, heads=4, kv_heads=2, block=5)


def make_model(dtype=torch.float64, **options):
    torch.manual_seed(1)
    model = rnn.Transformer(rnn.Config(**CONFIG.__dict__ | options)).to(dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)  # far from the initial symmetry
    return model


def make_batch(S, B=2, ignored="some", seed=0):
    """tokens, targets (B, S); ignored: how the targets that do not count are spread."""
    torch.manual_seed(seed)
    tokens = torch.randint(31, (B, S))
    targets = rnn.next_tokens(tokens)
    if ignored == "some":
        targets = targets.where(torch.rand(B, S) < 0.7, rnn.IGNORE)
    elif ignored == "all but the first":
        targets[:, 2:] = rnn.IGNORE
    elif ignored == "all of one half":
        targets[:, : S // 2] = rnn.IGNORE
    elif ignored == "all":
        targets[:] = rnn.IGNORE
    return tokens, targets


def oracle(model, batches):
    """The mean loss over all tokens, written anew: dense attention, no blocks, RoPE as complex numbers."""
    p, config = dict(model.named_parameters()), model.config
    D = config.width // config.heads

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def turned(x):  # (B, H, S, D)
        position, i = torch.arange(x.shape[2]).double(), torch.arange(D // 2).double()
        angle = torch.outer(position, config.rope_base ** (-2 * i / D))
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    def heads(x, name):
        return (x @ p[name].T).unflatten(-1, (-1, D)).transpose(1, 2)

    total, count = 0.0, 0
    for tokens, targets in batches:
        x = p["embedding.weight"][tokens]
        for n in range(config.layers):
            y, at = norm(x, p[f"layers.{n}.norm1.gain"]), f"layers.{n}.attention."
            q, k, v = (heads(y, f"{at}{name}.weight") for name in "qkv")
            attended, _ = dense_attention(turned(q), turned(k), v, rl.causal)
            x = x + attended.transpose(1, 2).flatten(2) @ p[f"{at}out.weight"].T
            y = norm(x, p[f"layers.{n}.norm2.gain"])
            hidden = F.gelu(y @ p[f"layers.{n}.feed_forward.up.weight"].T)
            x = x + hidden @ p[f"layers.{n}.feed_forward.down.weight"].T
        log = (norm(x, p["norm.gain"]) @ p["head.weight"].T).log_softmax(-1)
        counts = targets != rnn.IGNORE
        total = total - log.gather(-1, targets.clamp(min=0)[..., None])[..., 0][counts].sum()
        count += int(counts.sum())
    return total / max(count, 1), count


def gradients(model):
    """Full gradients by name, whatever wraps the model."""
    full = {}
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        full[name.removeprefix("module.")] = grad.detach().clone()
    return full


# What gloo processes run


def step(world, group, model, batches, layout, plain=False, max_norm=None):
    """The loss and the gradients of one step over (tokens, targets), full ones, the same on all ranks of the world."""
    if plain:  # this rank's own tokens
        mine = [layout.positions(x.shape[1], world.size, world.rank) for x, _ in batches]
        parts = [(x[:, m], y[:, m]) for (x, y), m in zip(batches, mine, strict=True)]
        loss = rnn.backward(model, parts, group, layout=layout, world=world)
    else:
        loss = rnn.backward(model, [rnn.shard_tokens(world, x, y, layout=layout) for x, y in batches], group)
    norm = None if max_norm is None else rnn.clip(model, max_norm)
    return loss.mean, loss.tokens, norm, gradients(model)


def wrapped(how, model, mesh):
    """The model as it is, in DDP, or sharded layer by layer by FSDP2, over all ranks of a one-dimensional mesh."""
    if how == "DDP":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if how == "FSDP2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def cp_steps(cases):
    """All ranks share each sequence."""
    torch.set_num_threads(1)
    world, mesh = rl.DistributedWorld(timeout=60), init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for how, plain, layout, ignored, S, options in cases:
        model = wrapped(how, make_model(**options), mesh)
        results.append(step(world, mesh.get_group(), model, [make_batch(S, ignored=ignored)], LAYOUTS[layout], plain))
    return results


def dp_cp_steps(cases):
    """2 x 2: two groups of two ranks; the ranks of a group share each sequence. Two micro-batches, clipped."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    world = rl.DistributedWorld(mesh.get_group("cp"), timeout=60)
    results = []
    for how, batches, layout in cases:
        if how == "HSDP":  # sharded over cp, replicated over dp
            model = make_model()
            for part in (*model.layers, model):
                fully_shard(part, mesh=mesh)
        else:
            model = wrapped(how, make_model(), everyone)
        mine = [(x[mesh.get_local_rank("dp") :: 2], y[mesh.get_local_rank("dp") :: 2]) for x, y in batches]
        results.append(step(world, everyone.get_group(), model, mine, LAYOUTS[layout], max_norm=0.5))
    return results


def targets_on_one_rank_are_plain():
    """Rank 1 passes its own targets in place of Shards; the others go on, into attention."""
    torch.set_num_threads(1)
    world = rl.DistributedWorld(timeout=20)
    tokens, targets = rnn.shard_tokens(world, *make_batch(8), layout=rl.zigzag)
    try:
        make_model()(tokens, targets.local if world.rank == 1 else targets)
    except ValueError as error:
        return str(error)
    return "no error"


def mistakes():
    """What backward says if ranks have different numbers of micro-batches, and if DDP covers some ranks only."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    world, said = rl.DistributedWorld(mesh.get_group("cp"), timeout=20), []
    batch = rnn.shard_tokens(world, *make_batch(8), layout=rl.zigzag)
    for model, batches in (
        (make_model(), [batch] * (2 if dist.get_rank() == 3 else 1)),
        (DistributedDataParallel(make_model(), process_group=mesh.get_group("dp")), [batch]),
        (FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")), [batch]),
    ):
        try:
            rnn.backward(model, batches, dist.group.WORLD)
        except ValueError as error:
            said.append(str(error))
    return said


def kept(world, S, d, layers, **options):
    """What a forward keeps for the backward in this process, in units of S x d."""
    torch.manual_seed(0)
    config = rnn.Config(vocabulary=200, width=d, layers=layers, heads=2, kv_heads=1, block=32, **options)
    model, tokens = rnn.Transformer(config), torch.randint(200, (1, S))
    batch = (tokens, rnn.next_tokens(tokens))
    batch = batch if world is None else rnn.shard_tokens(world, *batch, layout=rl.zigzag)
    with rnn.Kept(model) as kept:
        loss = model(*batch)
    loss.backward()  # no rank is left waiting
    return kept.nbytes / (4 * S * d)


def kept_by_a_rank():
    """Of two ranks and of four; the same with layers that are computed anew."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    # Without the check: it makes gloo's receive buffers larger than what they receive.
    worlds = [rl.DistributedWorld(group, timeout=60, check=False) for group in (mesh.get_group("cp"), None)]
    return [kept(world, 512, 16, 2, checkpoint=anew) for anew in (False, True) for world in worlds]


def curve(steps, layout):
    """Losses of a few steps of AdamW."""
    torch.set_num_threads(1)
    return train_curve(rl.DistributedWorld(timeout=60), dist.group.WORLD, steps, layout)


def train_curve(world, group, steps, layout, strategy=rl.ring_attention):
    torch.manual_seed(2)
    model = rnn.Transformer(CONFIG, strategy=strategy).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for n in range(steps):
        x, y = make_batch(23, seed=n)
        x[:, 1::2] = x[:, ::2][:, : x[:, 1::2].shape[1]]  # something to learn: each token comes twice
        y = rnn.next_tokens(x).where(y != rnn.IGNORE, rnn.IGNORE)
        batch = (x, y) if world is None else rnn.shard_tokens(world, x, y, layout=LAYOUTS[layout])
        optimizer.zero_grad()
        losses.append(rnn.backward(model, [batch], group).mean)
        rnn.clip(model, 1.0)
        optimizer.step()
    return losses


def uncached(model, tokens, temperature, new=12, seed=5):
    """What a model generates on one device that computes all tokens anew each time. seed: None for the present one."""
    if seed is not None:
        torch.manual_seed(seed)
    for _ in range(new):
        logits = model(tokens)[:, -1]
        if temperature:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], 1)
    return tokens


def generated(model, tokens, world, temperature, **options):
    torch.manual_seed(5 + world.ranks[0])  # only rank 0 has the seed
    return model.generate(tokens, 12, world, temperature=temperature, **options)


def generate_on_gloo():
    """What ranks generate, and what each says when rank 1 gives other tokens, to a prompt and to a decode step."""
    torch.set_num_threads(1)
    world, model, said = rl.DistributedWorld(timeout=20), make_model().requires_grad_(False), []
    tokens = make_batch(23)[0]
    out = generated(model, tokens, world, 0.7)
    cache = model.new_cache(world, 2, 30)
    model(rnn.shard_tokens(world, tokens), cache=cache)
    for call in (
        lambda: model.generate(tokens + (world.rank == 1), 3, world),
        lambda: model(tokens[:, :1] + (world.rank == 1), cache=cache),
        lambda: model(tokens[:, : 8 if world.rank == 1 else 1], cache=cache),
    ):
        try:
            call()
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return out, said, [c.lengths for c in cache]

"""What ranks run in tests/test_bench.py: attention to compare with, and parts of the measurement."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather  # with gradients

from ringlearn import DistributedWorld
from ringlearn.bench import __main__ as bench
from ringlearn.bench import calls, peers, rows
from ringlearn.bench import options as bench_options
from ringlearn.bench.masks import mask_choice
from ringlearn.layouts import LAYOUTS
from ringlearn.masks import Mask


def gathered(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    P, S = dist.get_world_size(group), q.shape[2] * dist.get_world_size(group)
    positions = [LAYOUTS[layout].positions(S, P, rank) for rank in range(P)]
    k, v = (torch.cat(all_gather(t.contiguous(), group=group), dim=2) for t in (k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    visible = torch.cat(positions)[None, :] <= positions[dist.get_rank(group)][:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def masked(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup, mask: Mask) -> Tensor:
    P, rank, S = dist.get_world_size(group), dist.get_rank(group), q.shape[2] * dist.get_world_size(group)
    positions = [LAYOUTS[layout].positions(S, P, r) for r in range(P)]
    k, v = (torch.cat(all_gather(t.contiguous(), group=group), dim=2) for t in (k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(positions[rank][:, None], torch.cat(positions)))


def own_keys_only(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def not_on_this_machine(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    raise NotImplementedError("needs another machine")


def of_another_shape(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    return own_keys_only(q, k, v, layout, group).sum(-1, keepdim=True)


def values_only(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def lengths_drawn(argv: list[str], limits: list[str]) -> list[tuple[list[int], bool]]:
    """The lengths of all random tensors of a measurement, and whether it has errors, for each of these limits."""
    world, numbers, found = DistributedWorld(check=False), rows.numbers, []
    drawn: list[int] = []

    def noted(shape, *args, **kwargs):
        drawn.append(shape[2])
        return numbers(shape, *args, **kwargs)

    rows.numbers = noted
    try:
        for limit in limits:
            drawn.clear()
            options = bench_options.parse([*argv, "--error-tokens", limit])
            measured = rows.measure(options.tokens[0], options, {"gloo": world})
            found.append((list(drawn), all("error" in row for row in measured)))
    finally:
        rows.numbers = numbers
    return found


def masks(argv: list[str]) -> dict[str, list[rows.Row]]:
    """The rows of each mask."""
    world, options = DistributedWorld(check=False), bench_options.parse(argv)
    return {x.name: rows.measure(options.tokens[0], options, {"gloo": world}, x) for x in options.choices}


def meshes(argv: list[str]) -> tuple[list[str], list[rows.Row]]:
    """What the worlds of a measurement are called, and its rows."""
    options = bench_options.parse(argv)
    worlds, _ = bench._worlds(options)
    return list(worlds), rows.measure(options.tokens[0], options, worlds)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf) if is_causal else scores


def _forward(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    scores, seed = _scores(q, k, is_causal, scale), torch.zeros((), dtype=torch.int64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1), seed, seed.clone()


def _backward(dout, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None):
    p = (_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout, None


def torchs_own() -> dict[str, float]:
    """The largest error of torch's context parallel, by rotation and layout.

    It knows no kernel of a CPU. The memory-efficient one, which CPUs do not have, gets a few lines that compute it.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")

    def sdpa(q, k, v, is_causal):
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        return op(q, k, v, None, True, is_causal=is_causal)[0]

    world, ours, found = DistributedWorld(), F.scaled_dot_product_attention, {}
    generator = torch.Generator().manual_seed(0)
    *full, dout = (torch.randn(1, heads, 32, 8, generator=generator) for heads in (4, 2, 2, 4))
    leaves = [t.clone().requires_grad_() for t in full]
    want = ours(*leaves, is_causal=True, enable_gqa=True)
    want = [want, *torch.autograd.grad(want, leaves, dout)]
    F.scaled_dot_product_attention = sdpa
    try:
        for name in ("torch_context_parallel", "torch_context_parallel_allgather"):
            for layout in ("zigzag", "contiguous"):
                own = LAYOUTS[layout].positions(32, world.size, world.rank)
                shards = [t[:, :, own].clone().requires_grad_() for t in full]
                out = getattr(peers, name)(*shards, layout=layout, group=world.group)
                got = [out, *torch.autograd.grad(out, shards, dout[:, :, own])]
                pairs = zip(got, want, strict=True)
                found[f"{name}, {layout}"] = max(float((a - b[:, :, own]).detach().abs().max()) for a, b in pairs)
    finally:
        F.scaled_dot_product_attention = ours
    return found


def torchs_flex(argv: list[str]) -> dict[str, dict[str, float]]:
    """The largest error of torch's context parallel for FlexAttention, by balancer and mask.

    What it compiles runs as it is, in Python.
    """
    compiled, torch.compile = torch.compile, lambda fn=None, **how: fn
    world, found = DistributedWorld(), {}
    generator = torch.Generator().manual_seed(0)
    *full, dout = (torch.randn(1, heads, 512, 16, generator=generator) for heads in (4, 2, 2, 4))
    try:
        for name in argv:
            choice = mask_choice(name)
            mask = choice.mask(choice.lengths(256, 2, share=2))
            want = calls.exact([*full, dout], mask, backward=False)  # it has no backward on CPUs
            for function, layout in [("context_parallel", "zigzag"), ("context_parallel", "contiguous"),
                                     ("per_document", "zigzag")]:  # fmt: skip
                peer = getattr(peers, f"torch_flex_{function}")
                where = LAYOUTS[layout].positions(512, world.size, world.rank)
                if hasattr(peer, "positions"):
                    where = peer.positions(mask, 512, world.size, world.rank)
                attention = partial(peer, layout=layout, group=world.group, mask=mask)
                errors = calls.errors(attention, [*full, dout], want, where, world)
                found[f"{name}, {function}, {layout}"] = max(errors.values())
    finally:
        torch.compile = compiled
    return found


# For --decode: one query in each sequence, and this rank's run of the keys.


def one_query_gathered(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    k, v = (_all(t, group) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def one_query_own_keys(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def one_query_not_here(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    raise NotImplementedError("needs another machine")


def one_query_prepared(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    k, v = (_all(t, group) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _expanded(k: Tensor, v: Tensor, H: int) -> list[Tensor]:
    return [t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v)]


def _all(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The runs of all ranks, of which the last may be a token shorter: they are padded for the message."""
    sizes: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, t.shape[2], group=group)
    padded = F.pad(t, (0, 0, 0, max(sizes) - t.shape[2]))
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded.contiguous(), group=group)
    return torch.cat([x[:, :, :s] for x, s in zip(found, sizes)], 2)


one_query_prepared.prepare = _expanded

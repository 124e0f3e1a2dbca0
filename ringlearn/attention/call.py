"""What users call: every input check, the agreement between ranks, and the one autograd node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..layouts import Layout
from ..tiles import shift
from ..worlds.uncompiled import uncompiled
from ..worlds.world import PerRank, Shards, World, check_grad_mode, describe
from .inputs import _check_call, _check_kind, _check_strategy, _parts
from .strategy import Spec, Strategy


@uncompiled
def attend(
    op: str, strategy: Strategy, q, k, v, mask, scale, kernel, q_start, return_lse, layout, world, unsupported
) -> Any:
    """What every attention function over ranks does, whatever its strategy: check, agree, run as one autograd node."""
    world = _world(op, (q, k, v), world)
    plain = isinstance(q, Tensor)
    problem, same, own = None, {}, {}
    try:
        _check_kind(op, q, k, v, world, layout, unsupported)
        _check_strategy(op, strategy, world, kernel)
        tensors = [_autocast(t) for t in (q, k, v)]
        chosen = _check_call(op, tensors, mask, scale, kernel, q_start)
        more = strategy.check(op, mask, *tensors) if strategy.check else {}
        if world.check:  # else nobody reads it, and a mask that holds a GPU tensor makes the host wait for it
            same = {"strategy": strategy.name} | more
            same |= _signature(tensors, mask, scale, chosen, q_start, return_lse, layout, world)
        own = {
            "requires_grad": torch.is_grad_enabled() and any(t.requires_grad for x in tensors for t in _parts(x)),
            "grad mode": torch.is_grad_enabled(),
            "inference": any(t.is_inference() for x in tensors for t in _parts(x)),
            "lengths": [t.shape[-2] for t in (_parts(tensors[0])[0], _parts(tensors[1])[0])],
        }
    except Exception as error:  # a TypeError too, or one from a kernel or layout of the user's: the others must hear
        problem = error
    known = world.agree(op, same, own, problem)
    needs_grad = any(rank["requires_grad"] for rank in known)
    check_grad_mode(op, known)
    if plain:
        # From here on every rank knows the same lengths, so an error is the same error on all of them.
        tensors = _as_shards(op, tensors, layout, world, [rank["lengths"] for rank in known])
    mask.check(q_start + tensors[0].length, tensors[1].length)
    spec = Spec(
        mask,
        tuple(shift(ranges, q_start) for ranges in tensors[0].ranges),
        tensors[1].ranges,
        1 / math.sqrt(_parts(tensors[0])[0].shape[-1]) if scale is None else float(scale),
        chosen,
    )
    if strategy.prepare:
        spec = strategy.prepare(op, spec, world, *tensors)
    if strategy.largest_message:
        world.reserve(strategy.largest_message(spec, *(_parts(t)[0] for t in tensors[1:]), needs_grad))
    outs, lses = _apply(op, strategy, world, spec, needs_grad, return_lse, [t.tensors for t in tensors])
    q_shards = tensors[0]
    out = Shards(outs, world, q_shards.layout, q_shards.length)
    lse = Shards(lses, world, q_shards.layout, q_shards.length, dim=-1)
    if plain:
        out, lse = out.local, lse.local
    return (out, lse) if return_lse else out


# --- checks --------------------------------------------------------------------------------------------------------


def _world(op: str, inputs: Sequence[Any], world: World | None) -> World:
    """The world of a call; without one there is nobody to tell, so errors here are local."""
    worlds = [x.world for x in inputs if isinstance(x, Shards)]
    if world is None and not worlds:
        raise ValueError(
            f"{op}: expected Shards, got {', '.join(type(x).__name__ for x in inputs)}; split them first, "
            f"q, k, v = world.shard(q, k, v, layout=rl.zigzag), or in a distributed world pass this rank's shards with "
            f"layout= and world="
        )
    world = world or worlds[0]
    if not isinstance(world, World):
        raise ValueError(f"{op}: expected world to be a SimulatedWorld or a DistributedWorld, got {world!r}")
    return world


def _signature(tensors, mask, scale, kernel, q_start, return_lse, layout, world) -> dict[str, str]:
    q, k, v = (_parts(x)[0] for x in tensors)
    B, H, _, D_k = q.shape
    same = {
        "B, H, G, D_k, D_v": f"{B}, {H}, {k.shape[1]}, {D_k}, {v.shape[-1]}",
        "dtype": str(q.dtype),
        "device type": q.device.type,
        "mask": mask.signature(),
        "scale": repr(scale),
        "kernel": kernel.name,
        "q_start": str(q_start),
        "return_lse": str(bool(return_lse)),
    }
    if isinstance(tensors[0], Shards):
        for name, x in zip("qk", tensors, strict=False):
            same[f"layout of {name}"] = describe(x.layout, x.length, world.size)
    else:
        same["layout"] = str(layout)
    return same


def _as_shards(op: str, tensors: list[Tensor], layout: Layout, world: World, lengths: list[list[int]]) -> list[Shards]:
    """Plain local tensors as Shards: the full lengths are the sums of what the ranks have said."""
    if len(lengths) == 1:  # nobody was asked: shards are taken to be as long everywhere
        lengths = lengths * world.size
    shards = []
    for i, name in enumerate(("q", "k", "v")):
        per_rank = [rank[min(i, 1)] for rank in lengths]
        total = sum(per_rank)
        expected = [sum(map(len, ranges)) for ranges in layout.ranges(total, world.size)]
        if per_rank != expected:
            raise ValueError(
                f"{op}: the ranks hold {per_rank} tokens of {name}; for {total} in all, layout {layout} has "
                f"{expected}. Split with world.shard(..., layout=rl.{layout}) or layout.positions(S, P, rank)"
            )
        shards.append(Shards([tensors[i]], world, layout, total))
    return shards


def _autocast(x: Shards | Tensor) -> Shards | Tensor:
    """Under autocast q, k and v are cast as SDPA casts them: all but float64 to the autocast dtype."""
    if isinstance(x, Shards):
        return x.map(_autocast)
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return x.to(torch.get_autocast_dtype(kind))
    return x


def _no_autocast(kind: str) -> AbstractContextManager:
    """Programs and kernels see the dtypes that they are given."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


# --- the autograd node ---------------------------------------------------------------------------------------------


def _apply(
    op: str,
    strategy: Strategy,
    world: World,
    spec: Spec,
    needs_grad: bool,
    return_lse: bool,
    tensors: list[list[Tensor]],
) -> tuple[list, list]:
    n = len(world.ranks)
    flat = [t for parts in tensors for t in parts]
    if needs_grad and torch.is_grad_enabled():
        # The node must be there on every rank or on none, or some rank would wait in the backward for one that never
        # comes. A rank whose own inputs need no gradient hangs its output on this empty tensor.
        flows = torch.empty(0, device=flat[0].device, requires_grad=True)
        results = _Attention.apply(op, strategy, world, spec, return_lse, flows, *flat)
    else:
        results = _forward(strategy, world, spec, [t.detach() for t in flat])
    return list(results[:n]), list(results[n : 2 * n])


def _forward(strategy: Strategy, world: World, spec: Spec, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the forward program: the owned ranks' outputs in the input dtype, their lse, and what the backward needs."""
    n = len(world.ranks)
    q, k, v = (PerRank(flat[i * n : (i + 1) * n]) for i in range(3))
    with torch.no_grad(), _no_autocast(q[0].device.type):
        results = world.run(strategy.forward, q, k, v, spec)
        partials, *kept = zip(*results, strict=True)
        return *(p.out.to(t.dtype) for p, t in zip(partials, q, strict=True)), *(p.lse for p in partials), *chain(*kept)


class _Attention(torch.autograd.Function):
    """All ranks that this process owns as one node: its inputs are all their q, k and v.

    One node per process cannot deadlock in the autograd engine, however many ranks it simulates.
    """

    @staticmethod
    def forward(ctx, op, strategy, world, spec, return_lse, flows, *flat):
        results = _forward(strategy, world, spec, flat)
        ctx.op, ctx.strategy, ctx.world, ctx.spec, ctx.return_lse = op, strategy, world, spec, return_lse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat, *results)
        return results[: 2 * len(world.ranks)]

    @staticmethod
    def backward(ctx, *grads):
        n = len(ctx.world.ranks)
        saved = ctx.saved_tensors
        q, k, v, out, lse, *kept = (PerRank(saved[i : i + n]) for i in range(0, len(saved), n))
        dout = PerRank(torch.zeros_like(o) if g is None else g for g, o in zip(grads[:n], out, strict=True))
        dlse = PerRank(grads[n:])
        known = ctx.world.agree(f"backward of {ctx.op}", {}, {"dlse": any(g is not None for g in dlse)})
        unasked = len(known) * n < ctx.world.size  # without the check nobody knows about the others
        if ctx.strategy.moves_dlse and ctx.return_lse and (unasked or any(rank["dlse"] for rank in known)):
            dlse = PerRank(torch.zeros_like(x) if g is None else g for g, x in zip(dlse, lse, strict=True))
        with torch.no_grad(), _no_autocast(q[0].device.type):
            results = ctx.world.run(ctx.strategy.backward, dout, q, k, v, out, lse, dlse, *kept, ctx.spec)
            flat = [
                g.to(t.dtype) for i, x in enumerate((q, k, v)) for g, t in zip((r[i] for r in results), x, strict=True)
            ]
        if torch.is_grad_enabled():  # create_graph=True: a second differentiation must not be silently wrong
            flat = _NoDoubleBackward.apply(
                ctx.op, len(flat), *flat, *saved[: 3 * n], *(g for g in grads if g is not None)
            )
        return None, None, None, None, None, None, *flat


class _NoDoubleBackward(torch.autograd.Function):
    """The identity, with a backward that says what is not there."""

    @staticmethod
    def forward(ctx, op, n, *tensors):
        ctx.op = op
        return tuple(t.clone() for t in tensors[:n])

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{ctx.op}: a gradient of its gradient is not supported; for second derivatives use dense attention "
            f"(SDPA's math backend), or drop create_graph=True"
        )

"""Ulysses: before attention, ranks trade heads for rows, so that each has whole rows of some heads; then back again.

    shards: all heads, s rows   -- all-to-all -->   whole rows: some heads, S rows   -- all-to-all -->   shards

In between, every rank computes attention as on one device. The number of heads need not be divisible by the number of
ranks: a rank's heads are a plan, a list of (query heads, key/value head). A key/value head that several ranks need goes
to all of them, and its gradients are summed in rank order; ranks beyond the number of query heads compute nothing.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..partial import Partial, accumulation_dtype
from ..worlds.comm import Comm
from .call import attention_function
from .gathered import Gathered, gathered
from .ring import RING
from .strategy import Gradients, Spec, Strategy

Plan = tuple[tuple[range, int], ...]  # of one rank: query heads, and the key/value head that they use


@attention_function()
def ulysses_attention() -> Strategy:
    """Exact attention over a sequence that is split over ranks, each of which computes whole rows of some heads.

    Arguments, result and errors are those of ``ring_attention``. Any number of heads works on any number of ranks:
    H query heads keep at most H ranks busy, and a key/value head is sent to every rank that has a query head of its
    group. The rows that a rank has received are kept for the backward.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", section 3.

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, h, 50, 8) for h in (6, 2, 2))
    >>> shards = rl.SimulatedWorld(4).shard(q, k, v, layout=rl.zigzag)
    >>> out = rl.ulysses_attention(*shards, mask=rl.causal).unshard()
    >>> torch.allclose(out, rl.ring_attention(*shards, mask=rl.causal).unshard(), atol=1e-5)
    True
    """
    return ULYSSES


# --- who computes which heads --------------------------------------------------------------------------------------


def head_plan(H: int, G: int, P: int) -> tuple[Plan, ...]:
    """Which heads each of P ranks computes: for each rank a tuple of (query heads, the key/value head that they use).

    Query heads are dealt out in blocks that differ by at most one head; ranks beyond H get none.

    >>> head_plan(8, 2, 4)
    (((range(0, 2), 0),), ((range(2, 4), 0),), ((range(4, 6), 1),), ((range(6, 8), 1),))
    >>> head_plan(6, 2, 4)[1], head_plan(2, 1, 3)
    (((range(2, 3), 0), (range(3, 4), 1)), (((range(0, 1), 0),), ((range(1, 2), 0),), ()))
    """
    each, more = divmod(H, P)
    ends = [each * r + min(r, more) for r in range(P + 1)]
    group = max(1, H // G)
    return tuple(
        tuple(
            (range(max(a, g * group), min(b, (g + 1) * group)), g) for g in range(a // group, -(-b // group)) if a < b
        )
        for a, b in zip(ends, ends[1:], strict=False)
    )


def calls(plan: Plan) -> list[tuple[slice, slice]]:
    """A rank's heads as attention calls: query heads and key/value heads, counted from the rank's first ones.

    In one call every key/value head has equally many query heads.

    >>> calls(head_plan(8, 2, 1)[0])
    [(slice(0, 8, None), slice(0, 2, None))]
    >>> calls(head_plan(8, 2, 3)[1])
    [(slice(0, 1, None), slice(0, 1, None)), (slice(1, 3, None), slice(1, 2, None))]
    """
    made: list[tuple[slice, slice]] = []
    for heads, g in plan:
        a, b = (x - plan[0][0].start for x in (heads.start, heads.stop))
        g -= plan[0][1]
        last_q, last_g = made[-1] if made else (slice(0, 0), slice(0, 0))
        if made and b - a == (last_q.stop - last_q.start) // (last_g.stop - last_g.start):
            made[-1] = slice(last_q.start, b), slice(last_g.start, g + 1)
        else:
            made.append((slice(a, b), slice(g, g + 1)))
    return made


# --- the trade -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Queries, or keys and values, in a trade: which of their heads each rank computes, and whose rows go where."""

    heads: tuple[slice, ...]
    whole: Gathered

    @property
    def shared(self) -> bool:
        """Whether several ranks compute with the same head."""
        taken = [h for h in self.heads if h.start < h.stop]
        return any(b.start < a.stop for a, b in zip(taken, taken[1:], strict=False))


def sides(H: int, G: int, spec: Spec, ranks: Sequence[int]) -> tuple[Side, Side]:
    """The two sides of the trade among these ranks: queries, and keys with values."""
    plan = head_plan(H, G, len(ranks))
    q_heads = tuple(slice(p[0][0].start, p[-1][0].stop) if p else slice(0, 0) for p in plan)
    k_heads = tuple(slice(p[0][1], p[-1][1] + 1) if p else slice(0, 0) for p in plan)
    q_rows, k_rows = (gathered(tuple(ranges[r] for r in ranks)) for ranges in (spec.q_ranges, spec.k_ranges))
    return Side(q_heads, q_rows), Side(k_heads, k_rows)


async def to_heads(comm: Comm, tensors: Sequence[Tensor], of: Sequence[Side]) -> list[Tensor]:
    """Shards of all heads in, whole rows of this rank's heads out. (B, heads, rows, D), as one message to each rank."""
    P, mine = comm.size, [side.heads[comm.rank] for side in of]
    if P == 1:
        return list(tensors)
    kinds = [
        (x.shape[0], h.stop - h.start, side.whole.lengths, x.shape[-1])
        for x, h, side in zip(tensors, mine, of, strict=True)
    ]
    arrived = await _trade(
        comm,
        [[x[:, side.heads[r]] for x, side in zip(tensors, of, strict=True)] for r in range(P)],
        [[(B, heads, lengths[r], D) for B, heads, lengths, D in kinds] for r in range(P)],
    )
    gathered: list[Tensor] = []
    for dtype in dict.fromkeys(x.dtype for x in tensors):  # tensors of one dtype share a buffer
        shapes = [(B, h, sum(s), D) for (B, h, s, D), x in zip(kinds, tensors, strict=True) if x.dtype == dtype]
        gathered += comm.buffers(shapes, dtype, tensors[0].device, "gathered")
    return [side.whole.join([parts[i] for parts in arrived], gathered[i]) for i, side in enumerate(of)]


async def to_shards(comm: Comm, tensors: Sequence[Tensor], of: Sequence[Side]) -> list[list[Tensor]]:
    """Whole rows of this rank's heads in; out, for each tensor, what each rank has computed for this rank's rows."""
    P = comm.size
    if P == 1:
        return [[x] for x in tensors]
    split = [side.whole.split(x) for x, side in zip(tensors, of, strict=True)]
    arrived = await _trade(
        comm,
        [[parts[r] for parts in split] for r in range(P)],
        [
            [
                (x.shape[0], side.heads[r].stop - side.heads[r].start, side.whole.lengths[comm.rank], x.shape[-1])
                for x, side in zip(tensors, of, strict=True)
            ]
            for r in range(P)
        ],
    )
    return [[parts[i] for parts in arrived] for i in range(len(tensors))]


async def _trade(
    comm: Comm, sends: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """An all-to-all of several tensors, wider dtypes first: they travel as bits of the narrowest, in one message."""
    dtypes = [x.dtype for x in sends[comm.rank]]
    bits = dtypes[-1]
    times = [dtype.itemsize // bits.itemsize for dtype in dtypes]
    received = await comm.exchange(
        {r: tuple(x if x.dtype == bits else x.contiguous().view(bits) for x in xs) for r, xs in enumerate(sends)},
        {
            r: tuple((*shape[:-1], shape[-1] * n) for shape, n in zip(expected, times, strict=True))
            for r, expected in enumerate(shapes)
        },
        name="trade heads and rows",
    )
    return [
        [x if x.dtype == dtype else x.view(dtype) for x, dtype in zip(received[r], dtypes, strict=True)]
        for r in range(comm.size)
    ]


# --- the programs --------------------------------------------------------------------------------------------------


async def ulysses_forward(comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Any, ...]:
    """Partial(out, lse) of this rank's queries over all keys, and the whole rows of its heads for the backward."""
    return await forward_by_heads(comm, comm.only([comm.rank]), RING, q, k, v, spec)


async def ulysses_backward(comm: Comm, *args: Any) -> Gradients:
    """dq, dk, dv of this rank's shards."""
    return await backward_by_heads(comm, comm.only([comm.rank]), RING, *args)


async def forward_by_heads(
    inner: Comm, outer: Comm, strategy: Strategy, q: Tensor, k: Tensor, v: Tensor, spec: Spec
) -> tuple[Any, ...]:
    """Trade heads for rows among the inner ranks, attend with a strategy over the outer ones, and trade back."""
    (B, H, _, _), G, D_v = q.shape, k.shape[1], v.shape[-1]
    plan, (Q, K) = head_plan(H, G, inner.size), sides(H, G, spec, _ranks(inner, outer.rank))
    rows = _rows(inner, outer, spec).of_heads(Q.heads[inner.rank])
    q, k, v = await to_heads(inner, (q, k, v), (Q, K, K))
    outs, lses, kept = [], [], []
    for h, g in calls(plan[inner.rank]):
        call = q[:, h], k[:, g], v[:, g], rows.of_heads(h)
        (out, lse), *more = await strategy.forward_with_sinks(outer, *call)
        outs, lses, kept = [*outs, out], [*lses, lse], [*kept, *more]
    out = _side_by_side(outs, (B, 0, q.shape[2], D_v), q.dtype, q.device).to(q.dtype)
    lse = _side_by_side(lses, (B, 0, q.shape[2]), accumulation_dtype(q.dtype), q.device)
    lse_shards, out_shards = await to_shards(inner, (lse.unsqueeze(-1), out), (Q, Q))
    result = Partial(torch.cat(out_shards, 1), torch.cat(lse_shards, 1).squeeze(-1))
    kept += [q.new_empty(0)] * (max(map(len, map(calls, plan))) * (strategy.keeps or 0) - len(kept))  # equally many
    return result, q, k, v, out, lse, *kept


async def backward_by_heads(
    inner: Comm, outer: Comm, strategy: Strategy, dout, q, k, v, out, lse, dlse, *kept_and_spec: Any
) -> Gradients:
    """The same trades the other way round: dout to whole rows, dq, dk, dv back to shards."""
    (_, H, _, _), G, wide = q.shape, k.shape[1], accumulation_dtype(k.dtype)
    q, k, v, out, lse, *kept, spec = kept_and_spec  # from here on of this rank's heads, as the forward has left them
    Q, K = sides(H, G, spec, _ranks(inner, outer.rank))
    rows = _rows(inner, outer, spec).of_heads(Q.heads[inner.rank])
    if dlse is None:
        (dout,) = await to_heads(inner, (dout,), (Q,))
    else:
        dlse, dout = await to_heads(inner, (dlse.unsqueeze(-1), dout), (Q, Q))
        dlse = dlse.squeeze(-1)
    grads = []
    for i, (h, g) in enumerate(calls(head_plan(H, G, inner.size)[inner.rank])):
        dlse_h = None if dlse is None else dlse[:, h]
        more = kept[i * strategy.keeps : (i + 1) * strategy.keeps]
        call = dout[:, h], q[:, h], k[:, g], v[:, g], out[:, h], lse[:, h], dlse_h, *more, rows.of_heads(h)
        grads.append(await strategy.backward(outer, *call))
    like = zip((q, k, v), (q.dtype, *[wide if K.shared else k.dtype] * 2), strict=True)
    dq, dk, dv = (
        _side_by_side([found[i] for found in grads], (x.shape[0], 0, *x.shape[2:]), dtype, x.device).to(dtype)
        for i, (x, dtype) in enumerate(like)
    )
    dk_shards, dv_shards, dq_shards = await to_shards(inner, (dk, dv, dq), (K, K, Q))
    return torch.cat(dq_shards, 1), _sum_heads(dk_shards, K, G, wide), _sum_heads(dv_shards, K, G, wide)


def _sum_heads(shards: list[Tensor], side: Side, G: int, dtype: torch.dtype) -> Tensor:
    """The gradients of this rank's keys: heads that several ranks computed with are summed, in rank order."""
    if not side.shared:
        return torch.cat(shards, 1)
    B, _, s, D = shards[0].shape
    total = torch.zeros(B, G, s, D, dtype=dtype, device=shards[0].device)
    for heads, found in zip(side.heads, shards, strict=True):
        total[:, heads] += found
    return total


def _ranks(inner: Comm, row: int) -> list[int]:
    """The ranks of a row of the world, which trade with each other."""
    return [row * inner.size + place for place in range(inner.size)]


def _rows(inner: Comm, outer: Comm, spec: Spec) -> Spec:
    """The call as the outer ranks see it: each holds the rows of all ranks of its row."""
    q_ranges, k_ranges = (
        tuple(gathered(tuple(ranges[r] for r in _ranks(inner, row))).ranges for row in range(outer.size))
        for ranges in (spec.q_ranges, spec.k_ranges)
    )
    return spec.over(q_ranges, k_ranges)


def _side_by_side(parts: list[Tensor], none: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The heads of several calls in one tensor; a tensor without heads if there was no call."""
    return (
        torch.cat(parts, 1) if len(parts) > 1 else parts[0] if parts else torch.empty(none, dtype=dtype, device=device)
    )


ULYSSES = Strategy("ulysses", ulysses_forward, ulysses_backward, keeps=None, moves_dlse=True, takes_sinks=True)

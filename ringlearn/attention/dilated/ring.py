"""Dilated attention on a ring: as ring.py, but only rows that some head keeps travel.

Why chunks and dilation do not fit together. A rank that treats its chunk as a sequence, and keeps every r-th row of it,
starts counting again at its own first row. Unless every chunk is a multiple of every segment it keeps other rows than
one device would, cuts a segment that two ranks share in two, and compares row numbers that are no positions, so that a
causal mask lets tokens see the future. Hence the rule that S be divisible by P times the longest segment, and the
failures where nobody checked it. Here whether a row is kept is a property of its global position, equation 1 of
``rows.py``, and every rank knows all positions: both ends of a hop know which rows come, and in which order, without a
word. Any S, any P and any layout will do.

Configurations are mixed by their softmax denominators (LongNet, section 2.2). That is what merging partial
results by lse does, so a configuration is only more tiles for the same queries, and a key that two configurations keep
counts twice: softmax over all (configuration, key) pairs. A tile's backward takes the global out and lse of that
softmax, so the gradient flows through the mixing weights too, without a line of its own.

Source: Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens", sections 2.2, 2.3 and 3.1. The
ring: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...flash import check_attention_inputs
from ...kernels import Kernel
from ...layouts import Layout, Ranges, contiguous
from ...masks import Mask, full
from ...partial import Partial, accumulation_dtype, identity, merge
from ...partial.accumulate import ALL, Accumulator, Sum
from ...worlds.comm import Comm, empty_packed
from ...worlds.simulated import SimulatedWorld
from ...worlds.uncompiled import uncompiled
from ...worlds.world import Shards, World
from ..call import attention_over_ranks
from ..inputs import Request
from ..strategy import Gradients, Spec, Strategy
from .rows import MOST_HEADS, Configuration, Part, check_mask, configure, kept_rows, plan_parts


async def dilated_forward(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: DilatedSpec
) -> tuple[Partial, Tensor, Tensor]:
    """Partial(out, lse) of this rank's queries over all that they see, and the k, v that came last.

    q: (B, H, n_q, D_k), k: (B, G, n_k, D_k), v: (B, G, n_k, D_v), this rank's shards. What travels is (B, rows, D), the
    kept rows of all heads of a rank one after the other.
    """
    P, dtype = comm.size, accumulation_dtype(q.dtype)
    k, v = (take(t, spec.kept(comm.rank)) for t in (k, v))  # (B, n, D)
    result = identity((*q.flatten(1, 2).shape[:2], v.shape[-1]), dtype, q.device)  # (B, H s_q, D_v)
    for step in range(P):
        source = (comm.rank - step) % P  # the keys that are here now are those of source
        if step < P - 1:
            arriving = comm.rotate(k, v, length=spec.k_length(source - 1))
        kernel = comm.traced(spec.kernel, origin=source)
        for part in spec.parts(comm.rank, source):
            rows = spec.q_rows(part, q)
            q_part, k_part, v_part = take(q, rows), take(k, part.k), take(v, part.k)  # (B, heads, rows, D)
            found = Accumulator((*q_part.shape[:-1], v.shape[-1]), dtype, q.device, parts=len(part.tiles))
            for tile in part.tiles:
                found.add(tile.q, kernel.forward(q_part, k_part, v_part, tile, spec.scale))
            merge_at(result, rows, found.partial)
        if step < P - 1:
            k, v = await arriving
    return Partial(result.out.unflatten(1, q.shape[1:3]), result.lse.unflatten(1, q.shape[1:3])), k, v


async def dilated_backward(comm: Comm, dout, q, k, v, out, lse, dlse, k_last, v_last, spec: DilatedSpec) -> Gradients:
    """dq, dk, dv of this rank's shards in the accumulation dtype; rows that nothing keeps have 0.

    The ring unwinds as in ``ring_backward``: kept keys go back the way they came, their gradients one hop behind them.
    """
    P, dtype = comm.size, accumulation_dtype(q.dtype)
    lse, dlse = lse.unsqueeze(-1), None if dlse is None else dlse.unsqueeze(-1)  # (B, H, n_q, 1)
    dq = torch.zeros(q.flatten(1, 2).shape, dtype=dtype, device=q.device)
    home, kept = (k.shape, v.shape), spec.kept(comm.rank)
    own, (k, v), travelling = (take(k, kept), take(v, kept)), (k_last, v_last), None
    for step in range(P):
        source = (comm.rank + 1 + step) % P
        length = spec.k_length(source + 1)  # of what comes next
        if step < P - 2:
            arriving = comm.rotate(k, v, length=length, back=True)
        kernel = comm.traced(spec.kernel, origin=source)
        dk, dv = (t.zero_() for t in empty_packed([k.shape, v.shape], dtype, k.device))  # (B, n, D)
        for part in spec.parts(comm.rank, source):
            rows = spec.q_rows(part, q)
            dout_part, q_part, out_part = (take(t, rows) for t in (dout, q, out))
            k_part, v_part, lse_part = take(k, part.k), take(v, part.k), take(lse, rows).squeeze(-1)
            dlse_part = None if dlse is None else take(dlse, rows).squeeze(-1)
            dq_part = Sum([q_part.shape], dtype, q.device)
            dkv_part = Sum([k_part.shape, v_part.shape], dtype, q.device)
            for tile in part.tiles:
                dq_tile, dk_tile, dv_tile = kernel.backward(
                    dout_part, q_part, k_part, v_part, out_part, lse_part, tile, spec.scale, dlse_part
                )
                dq_part.add(ALL, tile.q, dq_tile)
                dkv_part.add(ALL, tile.k, dk_tile, dv_tile)
            add_at(dq, rows, *dq_part.tensors)
            for total, found in zip((dk, dv), dkv_part.tensors, strict=True):
                add_at(total, part.k, found)
        if step > 0:
            for total, found in zip((dk, dv), await travelling, strict=True):
                total += found  # what the ranks before this one found for the same keys
        if step < P - 1:
            travelling = comm.rotate(dk, dv, length=length, back=True)
            k, v = await arriving if step < P - 2 else own
    return dq.view(q.shape), *(put(t, kept, shape) for t, shape in zip((dk, dv), home, strict=True))


# --- rows of all heads, counted through ----------------------------------------------------------------------------


def take(t: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` of t (B, heads, n, D) or (B, rows, D), counted through its heads: (B, *index.shape, D)."""
    return t.flatten(1, -2).index_select(1, index.flatten()).unflatten(1, index.shape)


def put(rows: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """The opposite: a (B, heads, n, D) with these rows, and 0 elsewhere."""
    full = torch.zeros(*shape, dtype=rows.dtype, device=rows.device)
    full.flatten(1, 2).index_copy_(1, index, rows)
    return full


def merge_at(result: Partial, index: Tensor, found: Partial) -> None:
    """Merge ``found`` into the rows ``index`` of the result."""
    rows = index.flatten()
    mine = Partial(result.out.index_select(1, rows), result.lse.index_select(1, rows))
    merged = merge(mine, Partial(found.out.flatten(1, 2), found.lse.flatten(1, 2)))
    result.out.index_copy_(1, rows, merged.out)
    result.lse.index_copy_(1, rows, merged.lse)


def add_at(total: Tensor, index: Tensor, found: Tensor) -> None:
    """Add to the rows ``index``, none of which occurs twice."""
    total.index_add_(1, index.flatten(), found.flatten(1, 2))


# --- what all ranks know -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which rows a call moves and computes with, and where they lie.

    lengths: how many rows each rank sends.  kept: by rank, which rows of its key/value heads these are, (n,), counted
    through (G, n_k).  parts: by rank and source, what rank's queries compute with source's keys. The last two only for
    ranks that this process owns.
    """

    lengths: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[tuple[int, int], tuple[Part, ...]] = field(default_factory=dict)


@lru_cache(maxsize=16)
def _plan(
    configurations: tuple[Configuration, ...],
    mask: Mask,
    q_ranges: tuple[Ranges, ...],
    k_ranges: tuple[Ranges, ...],
    owned: tuple[int, ...],
    heads: int,
    group: int,
    most: int,
    device: torch.device,
) -> Plan:
    """Remembered from call to call. Its tensors take about 16 bytes for each row of k and v."""
    lengths, kept, parts = [], {}, {}
    with torch.inference_mode(False):
        for source, ranges in enumerate(k_ranges):
            travels = kept_rows(configurations, heads, ranges)
            lengths.append(int(travels.sum()))
            if source in owned:
                kept[source] = travels.flatten().nonzero().flatten().to(device)
            number = travels.flatten().cumsum(0).sub(1).view(travels.shape)
            for rank in owned:
                planned = plan_parts(configurations, mask, q_ranges[rank], ranges, number, group, most)
                parts[rank, source] = tuple(Part(p.q.to(device), p.k.to(device), p.tiles) for p in planned)
    return Plan(tuple(lengths), kept, parts)


@dataclass(frozen=True)
class DilatedSpec(Spec):
    """One call of dilated attention: a Spec, and a plan of what travels and what is computed."""

    plan: Plan = Plan()
    group: int = 1  # query heads of each key/value head

    def kept(self, rank: int) -> Tensor:
        """Which rows of its key/value heads a rank sends, counted through."""
        return self.plan.kept[rank]

    def k_length(self, source: int) -> int:
        """The number of rows that a rank sends; ranks count modulo P, so -1 is the last."""
        return self.plan.lengths[source % len(self.plan.lengths)]

    def parts(self, rank: int, source: int) -> tuple[Part, ...]:
        """What rank's queries compute with source's keys."""
        return self.plan.parts[rank, source]

    def q_rows(self, part: Part, q: Tensor) -> Tensor:
        """Where the query rows of a part lie, counted through (H, n_q): (N * H / G, rows)."""
        heads = q.shape[2] * torch.arange(self.group, device=q.device)
        return (part.q.unsqueeze(1) + heads.unsqueeze(1)).flatten(0, 1)

    def largest_message(self, k: Tensor, v: Tensor, backward: bool) -> int:
        """Bytes of the largest message of a call, over all ranks."""
        itemsize = accumulation_dtype(k.dtype).itemsize if backward else k.dtype.itemsize
        return k.shape[0] * (k.shape[-1] + v.shape[-1]) * itemsize * max(self.plan.lengths)


def prepare(configurations: tuple[Configuration, ...], spec: Spec, world: World, q: Shards, k: Shards) -> DilatedSpec:
    """The spec of a call with these configurations."""
    (B, H), G, device = q.tensors[0].shape[:2], k.tensors[0].shape[1], q.tensors[0].device
    group = H // G
    most = max(1, MOST_HEADS // max(1, B * group))
    plan = _plan(configurations, spec.mask, spec.q_ranges, spec.k_ranges, tuple(world.ranks), G, group, most, device)
    call = spec.mask, spec.q_ranges, spec.k_ranges, spec.scale, spec.kernel
    return DilatedSpec(*call, scores=spec.scores, sinks=spec.sinks, plan=plan, group=group)


def dilated(segment_lengths: Sequence[int], dilation_rates: Sequence[int], mask: Mask, alibi: Any = None) -> Strategy:
    """A ring on which only the rows travel that these configurations keep. Raises ValueError if they are invalid.

    alibi: None, or it is refused.

    >>> dilated([8, 32], [1, 4], full).name
    'dilated, (segment length, dilation rate): (8, 1), (32, 4)'
    """
    configurations = configure("dilated_attention", segment_lengths, dilation_rates)
    check_mask("dilated_attention", mask)
    if alibi is not None:
        raise ValueError(
            "dilated_attention: ALiBi is not supported, because a kernel call puts the rows of several segments and "
            "heads side by side, which have neither one slope nor one distance; omit alibi="
        )
    pairs = ", ".join(f"({c.segment}, {c.rate})" for c in configurations)
    return Strategy(
        f"dilated, (segment length, dilation rate): {pairs}",
        dilated_forward,
        dilated_backward,
        keeps=2,
        rotates=True,
        prepare=partial(prepare, configurations),
    )


# --- what users call -----------------------------------------------------------------------------------------------


@uncompiled
def dilated_attention(
    q: Shards | Tensor,
    k: Shards | Tensor,
    v: Shards | Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    mask: Mask = full,
    scale: float | None = None,
    kernel: str | Kernel | None = None,
    *,
    q_start: int = 0,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    layout: Layout | None = None,
    world: World | None = None,
    **unsupported: Any,
) -> Any:
    """Dilated attention (LongNet), on one device or over a sequence that is split over ranks.

    q: (B, H, S_q, D_k), k: (B, G, S_k, D_k), v: (B, G, S_k, D_v): plain tensors of the full sequence, on one device;
    ``Shards`` (from ``world.shard``) for a ring, on which only kept rows of k and v travel, each of them once; or, in a
    distributed world, this rank's plain local tensors together with ``layout`` and ``world``.

    segment_lengths, dilation_rates: one w and one r for each configuration, 1 <= r <= w. The sequence is cut into
    segments of w positions, and key/value head j keeps every r-th row of each, starting with row j mod r; its query
    heads keep the same rows. A kept query sees the kept keys of its own segment, with mask=rl.causal only up to its own
    position. Configurations are mixed by their softmax denominators: the softmax is over all (configuration, key)
    pairs, so a key that two of them keep counts twice. The length need not be divisible by w, by r or by the number of
    ranks.

    mask: rl.full or rl.causal.  scale, kernel, q_start, return_lse, sinks, softcap: as for ``ring_attention``; a query
    that no configuration keeps sees only its sink.  alibi: not supported.

    Returns Shards if it was given Shards, plain tensors otherwise; the output is in the dtype of q. With return_lse it
    also returns lse (B, H, S_q). The gradient flows to q, k and v, including through the mixing weights; second
    derivatives are not supported. Queries that no configuration keeps give 0 and lse -inf.

    Raises ValueError on every rank if an argument is invalid or differs between ranks.

    Source: Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens", sections 2.2 and 2.3. Its offset
    is head mod r. LongNet has no grouped-query attention; here "head" is then the key/value head, since otherwise the
    query heads of a group would together need every row of its keys.

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    >>> configurations = {"segment_lengths": [8, 32], "dilation_rates": [1, 4]}
    >>> one_device = rl.dilated_attention(q, k, v, **configurations, mask=rl.causal)
    >>> world = rl.SimulatedWorld(3)
    >>> out = rl.dilated_attention(*world.shard(q, k, v, layout=rl.zigzag), **configurations, mask=rl.causal)
    >>> torch.allclose(out.unshard(), one_device, atol=1e-5)
    True
    >>> one_segment = rl.dilated_attention(q, k, v, segment_lengths=[50], dilation_rates=[1])
    >>> torch.allclose(one_segment, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
    True
    """
    op = "dilated_attention"
    alone = world is None and layout is None and all(isinstance(x, Tensor) for x in (q, k, v))
    if alone:  # one device is a ring of one rank
        check_attention_inputs(op, q, k, v)
        world = SimulatedWorld(1, device=q.device, count_memory=False)
        q, k, v = (Shards([t], world, contiguous, t.shape[2]) for t in (q, k, v))
    arguments = q, k, v, mask, scale, kernel, q_start, return_lse, layout, world, sinks, softcap, alibi, unsupported
    strategy_of = partial(dilated, segment_lengths, dilation_rates, mask, alibi=alibi)
    result = attention_over_ranks(Request(op, *arguments), strategy_of)
    if not alone:
        return result
    return tuple(x.local for x in result) if return_lse else result.local

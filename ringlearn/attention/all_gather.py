"""All-gather attention: every rank gathers all keys and values, and computes its own queries.

No step depends on the one before, so a rank makes a few large kernel calls. The price is memory: P shards of k and v.
Heads do not depend on each other, so gathering some at a time bounds it; the next ones travel while these are computed.

Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2 (context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import whole_number
from ..layouts import Ranges
from ..partial import Partial, accumulation_dtype
from ..partial.accumulate import ALL, Sum
from ..worlds.comm import Comm, Handle
from .call import attention_function
from .gathered import Gathered, gathered
from .strategy import Gradients, Spec, Strategy


@attention_function(heads_at_once=None)
def all_gather_attention(heads_at_once: int | None) -> Strategy:
    """Exact attention over a sequence that is split over ranks, each of which gathers all keys and values.

    Arguments, result and errors are those of ``ring_attention``. The backward gathers k and v again, and the rank that
    owns the keys sums their dk and dv, in rank order and in the accumulation dtype.

    heads_at_once: how many key/value heads, with their query heads, are gathered at a time; all of them if None. With
    fewer heads the gathered keys need less memory, and the bytes sent stay the same.

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2.

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, h, 50, 8) for h in (6, 2, 2))
    >>> shards = rl.SimulatedWorld(4).shard(q, k, v, layout=rl.zigzag)
    >>> out = rl.all_gather_attention(*shards, mask=rl.causal, heads_at_once=1).unshard()
    >>> torch.allclose(out, rl.ring_attention(*shards, mask=rl.causal).unshard(), atol=1e-5)
    True
    """
    return ALL_GATHER if heads_at_once is None else all_gather(heads_at_once)


async def all_gather_forward(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec, heads_at_once: int | None = None
) -> tuple[Partial]:
    """Partial(out, lse) of this rank's queries over all keys. out comes in the dtype of q."""
    whole, tiles = _whole(spec), _tiles(comm, spec)
    groups, results = _head_groups(q, k, heads_at_once), []
    arriving = _gather(comm, k, v, groups[0][1], whole)
    for i, (h, g) in enumerate(groups):
        k_all, v_all = _join(comm, await arriving, whole)
        if i + 1 < len(groups):
            arriving = _gather(comm, k, v, groups[i + 1][1], whole)
        kernel = comm.traced(spec.of_heads(h).kernel)
        result = spec.accumulator(q[:, h], v[:, g], parts=len(tiles))
        for tile in tiles:
            result.add(tile.q, kernel.forward(q[:, h], k_all, v_all, tile, spec.scale))
        results.append(result.partial)
        del k_all, v_all, result  # before the next heads are joined
    if len(results) == 1:
        return (results[0],)
    return (Partial(*(torch.cat(parts, 1) for parts in zip(*results, strict=True))),)


async def all_gather_backward(comm: Comm, dout, q, k, v, out, lse, dlse, spec: Spec, heads_at_once=None) -> Gradients:
    """dq, dk, dv of this rank's shards, each in the dtype of its tensor or in the accumulation dtype."""
    whole, tiles = _whole(spec), _tiles(comm, spec)
    dtype = accumulation_dtype(k.dtype)
    groups, dqs, dks, dvs, scattering = _head_groups(q, k, heads_at_once), [], [], [], None
    arriving = _gather(comm, k, v, groups[0][1], whole)
    for i, (h, _) in enumerate(groups):
        k_all, v_all = _join(comm, await arriving, whole)
        if i + 1 < len(groups):
            arriving = _gather(comm, k, v, groups[i + 1][1], whole)
        kernel = comm.traced(spec.of_heads(h).kernel)
        dq = Sum([q[:, h].shape], spec.sum_dtype(q, len(tiles)), q.device)
        dkv = Sum([k_all.shape, v_all.shape], dtype, k.device)
        for tile in tiles:
            dlse_h = None if dlse is None else dlse[:, h]
            dq_tile, dk_tile, dv_tile = kernel.backward(
                dout[:, h], q[:, h], k_all, v_all, out[:, h], lse[:, h], tile, spec.scale, dlse_h
            )
            dq.add(ALL, tile.q, dq_tile)
            dkv.add(ALL, tile.k, dk_tile, dv_tile)
            del dq_tile, dk_tile, dv_tile
        dqs += dq.tensors
        if scattering:
            _sum(await scattering, dks, dvs)
        scattering = _scatter(comm, dkv.tensors, whole)  # summed while the next heads are computed
        del k_all, v_all, dq, dkv
    _sum(await scattering, dks, dvs)
    return tuple(torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in (dqs, dks, dvs))


# --- steps ---------------------------------------------------------------------------------------------------------


def _whole(spec: Spec) -> Gathered:
    """All keys in the order of their positions; stripes stay apart, since queries have the step of a stripe."""
    return gathered(spec.k_ranges, interleave=False)


def _tiles(comm: Comm, spec: Spec) -> Sequence[Any]:
    """The tiles of this rank's queries and all keys."""
    ranges: Ranges = _whole(spec).ranges
    return spec.over((spec.q_ranges[comm.rank],), (ranges,)).tiles(0, 0)


def _head_groups(q: Tensor, k: Tensor, heads_at_once: int | None) -> list[tuple[slice, slice]]:
    """The query heads and key/value heads of each round."""
    H, G = q.shape[1], k.shape[1]
    n = heads_at_once or G
    return [(slice(g * H // G, min(g + n, G) * H // G), slice(g, min(g + n, G))) for g in range(0, G, n)]


def _gather(comm: Comm, k: Tensor, v: Tensor, g: slice, whole: Gathered) -> Handle:
    """Send some heads of k and v to every rank, and receive theirs."""
    mine = k[:, g], v[:, g]
    if mine[0].shape[1] < k.shape[1] and comm.size > 1:  # packed once, not again for each rank
        packed = comm.buffers([x.shape for x in mine], k.dtype, k.device, "in flight")
        mine = tuple(to.copy_(x) for to, x in zip(packed, mine, strict=True))
    shapes = [tuple((*x.shape[:2], s, x.shape[3]) for x in mine) for s in whole.lengths]
    return comm.exchange(
        dict.fromkeys(range(comm.size), mine),
        dict(enumerate(shapes)),
        name="gather k, v",
        finish=lambda received: received | {comm.rank: mine},  # so mine lives until then
    )


def _join(comm: Comm, arrived: dict[int, tuple[Tensor, ...]], whole: Gathered) -> Sequence[Tensor]:
    if comm.size == 1:
        return arrived[0]
    shapes = [(*x.shape[:2], whole.length, x.shape[3]) for x in arrived[0]]
    to = comm.buffers(shapes, arrived[0][0].dtype, arrived[0][0].device, "gathered")
    return [whole.join([arrived[r][i] for r in range(comm.size)], x) for i, x in enumerate(to)]


def _scatter(comm: Comm, dkv: Sequence[Tensor], whole: Gathered) -> Handle:
    """Send each rank the gradients of its keys, and receive those that all ranks have for this rank's keys."""
    shapes = tuple((*x.shape[:2], whole.lengths[comm.rank], x.shape[3]) for x in dkv)
    split = [whole.split(x) for x in dkv]
    sends = {r: tuple(parts[r] for parts in split) for r in range(comm.size)}
    return comm.exchange(sends, dict.fromkeys(range(comm.size), shapes), name="scatter dk, dv")


def _sum(arrived: dict[int, tuple[Tensor, ...]], *to: list[Tensor]) -> None:
    """The sums over all ranks, in rank order."""
    for i, sums in enumerate(to):
        total = arrived[0][i].clone()
        for rank in range(1, len(arrived)):
            total += arrived[rank][i]
        sums.append(total)


ALL_GATHER = Strategy("all-gather", all_gather_forward, all_gather_backward)


def all_gather(heads_at_once: int) -> Strategy:
    """All-gather attention, ``heads_at_once`` key/value heads at a time. Raises ValueError unless that is an int >= 1.

    >>> all_gather(2).name
    'all-gather, 2 heads at once'
    """
    at_once = whole_number(heads_at_once)
    if at_once is None or at_once < 1:
        raise ValueError(
            f"all_gather_attention: expected heads_at_once to be None or a number of key/value heads, an int >= 1, got "
            f"{heads_at_once!r}"
        )
    return Strategy(
        f"all-gather, {at_once} heads at once",
        partial(all_gather_forward, heads_at_once=at_once),
        partial(all_gather_backward, heads_at_once=at_once),
    )

"""Prefill after a cached prefix: new tokens, split over ranks, attend to each other and to what a cache holds.

Either keys and values go round, the cached and the new ones, and queries stay (pass-KV, today's ring); or queries go
round, every rank attends to what it owns, and partial results go home (pass-Q). The result is the same. With few new
tokens after a long prefix queries are far less to move; with many, pass-KV has nothing to bring home, and its hops
hide behind the attention.

Source: Yang et al. 2024, "Context Parallelism for Scalable Million-Token Inference", section 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...costs.decoding import prefill_seconds
from ...fingerprint import checksum
from ...layouts import count, positions_of
from ...masks import Mask, causal
from ...partial import Partial, accumulation_dtype
from ...partial.accumulate import ALL, Accumulator
from ...tiles import Kind, Tile
from ...worlds.comm import Comm
from ...worlds.trace import Hardware
from ...worlds.uncompiled import uncompiled
from ...worlds.world import PerRank, Shards, describe
from ..call import _no_autocast
from ..inputs import Request, check_arguments, check_inputs
from ..sinks import with_sinks
from ..strategy import Spec
from . import local
from .cache import BLOCK, KVCache
from .call import window_of

_OP = "prefill_attention"
# Seconds that the host needs to start the kernels and messages of a call, by type of device: with little to compute,
# pass-KV took 1.4 to 2.1 ms on two H200 (docs/measurements, decode-prefill-2-h200). On a CPU there is nothing to start.
HOST = {"cuda": 2e-3}


@dataclass(frozen=True)
class _Call:
    """What is the same on all ranks. spec: of the new tokens among themselves."""

    cache: KVCache
    spec: Spec
    window: int | None

    def result(self, q: Tensor, v: Tensor) -> Accumulator:
        return Accumulator((*q.shape[:-1], v.shape[-1]), accumulation_dtype(q.dtype), q.device)

    def slots(self, rank: int) -> int:
        """How many slots the longest sequence has on a rank; ranks count modulo P."""
        return max(self.cache.local_lengths(rank % self.cache.world.size))

    def largest_message(self, travels: str, q: Shards, v: Shards) -> int:
        """Bytes of the largest hop of a ring, the same on all ranks."""
        (B, H, _, D), D_v, itemsize = q.tensors[0].shape, v.tensors[0].shape[3], self.cache.dtype.itemsize
        ranks = range(self.cache.world.size)
        new = max(count(ranges) for ranges in self.spec.q_ranges)
        if travels == "pass-kv":
            return B * self.cache.heads * (D + D_v) * itemsize * max(new, *(self.slots(rank) for rank in ranks))
        home = (D_v + 1) * accumulation_dtype(self.cache.dtype).itemsize if len(ranks) == 2 else 0
        return B * H * max(D * itemsize, home) * new

    def to_cached(
        self, comm: Comm, result: Accumulator, kernel: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, owner: int
    ) -> None:
        """Add attention of rank's new queries to the slots k, v of a rank: a prefix hides nothing but by a window."""
        cache, lengths = self.cache, torch.tensor(self.cache.lengths)
        if not q.shape[2] or not k.shape[2]:
            return
        last = torch.tensor(cache.local_lengths(owner))[:, None].expand(-1, q.shape[2])
        first = torch.zeros_like(last)
        if self.window is not None:
            positions = lengths[:, None] + positions_of(self.spec.q_ranges[rank])
            first = torch.minimum(cache.ownership.count(owner, positions + 1 - self.window), last)
        if int(first.max()) == 0 and int(last.min()) == k.shape[2]:  # all see all: one call of a fused kernel
            everything = Tile(slice(0, q.shape[2]), slice(0, k.shape[2]), Kind.FULL)
            result.add(ALL, kernel.forward(q, k, v, everything, self.spec.scale))
            return
        comm.compute("cached", 2.0 * int((last - first).sum()) * q.shape[1] * (k.shape[-1] + v.shape[-1]))
        blocks = ((a, k[:, :, a : a + BLOCK], v[:, :, a : a + BLOCK]) for a in range(0, k.shape[2], BLOCK))
        edges = first.to(q.device), last.to(q.device)
        result.add(ALL, local.attend(q, blocks, *edges, self.spec.scale, self.spec.scores.softcap, v.shape[-1]))


async def pass_kv(comm: Comm, q: Tensor, k: Tensor, v: Tensor, index: int, call: _Call) -> Partial:
    """Keys and values go round, the new ones first, then the cached ones; queries stay."""
    rank, P, spec, kernel = comm.rank, comm.size, call.spec, comm.traced(call.spec.kernel)
    result = call.result(q, v)
    for step in range(P):  # the new keys that are here now are those of rank - step
        if step < P - 1:
            arriving = comm.rotate(k, v, length=spec.k_length(rank - step - 1))
        for tile in spec.tiles(rank, (rank - step) % P):
            result.add(tile.q, kernel.forward(q, k, v, tile, spec.scale))
        if step < P - 1:
            k, v = await arriving
    if not any(call.cache.lengths):
        return result.partial
    k, v = call.cache.whole(index)
    for step in range(P):
        if step < P - 1:
            arriving = comm.rotate(k, v, length=call.slots(rank - step - 1))
        call.to_cached(comm, result, kernel, q, k, v, rank, (rank - step) % P)
        if step < P - 1:
            k, v = await arriving
    return result.partial


async def pass_q(comm: Comm, q: Tensor, k: Tensor, v: Tensor, index: int, call: _Call) -> Partial:
    """Queries go round; every rank attends to its new and its cached keys for each, and partial results go home."""
    rank, P, spec, kernel = comm.rank, comm.size, call.spec, comm.traced(call.spec.kernel)
    k_cached, v_cached = call.cache.whole(index)
    found, mine = {}, (*q.shape[:-1], v.shape[-1])
    for step in range(P):  # the queries that are here now are those of rank - step
        source = (rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(q, length=count(spec.q_ranges[(source - 1) % P]))
        result = call.result(q, v)
        for tile in spec.tiles(source, rank):
            result.add(tile.q, kernel.forward(q, k, v, tile, spec.scale))
        call.to_cached(comm, result, kernel, q, k_cached, v_cached, source, rank)
        found[source] = result
        if step < P - 1:
            q = await arriving
    result = found.pop(rank)
    if P > 1:
        home = await comm.exchange(
            {owner: tuple(of_owner.partial) for owner, of_owner in found.items()},
            dict.fromkeys(found, (mine, mine[:-1])),
            dtype=accumulation_dtype(q.dtype),
            name="results come home",
            hop=int(P == 2),  # of two ranks each has one neighbour, which hops of a ring may reach without NCCL
        )
        for other in sorted(found):  # in rank order, so that both worlds end with the same bits
            result.add(ALL, Partial(*home[other]))
    return result.partial


PASSES: dict[str, Callable[..., Awaitable[Partial]]] = {"pass-kv": pass_kv, "pass-q": pass_q}


@uncompiled
def prefill_attention(
    q: Shards,
    k: Shards,
    v: Shards,
    cache: KVCache,
    mask: Mask = causal,
    scale: float | None = None,
    kernel: Any = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    travels: str | None = None,
    hardware: Hardware | None = None,
    return_lse: bool = False,
) -> Shards | tuple[Shards, Shards]:
    """Exact attention of many new tokens, split over ranks, to each other and to everything in a cache.

    q: (B, H, T, D_k), k: (B, G, T, D_k), v: (B, G, T, D_v), Shards of the new tokens in any layout. They follow
    what the cache holds of their sequence, and must *not* be in it yet: call ``cache.append(k, v)`` afterwards.
    mask: ``causal``, or ``causal & sliding_window(w)``.
    scale, kernel, sinks, softcap, return_lse: as in ``ring_attention``.
    travels: "pass-kv" (keys and values travel), "pass-q" (queries travel), or None for the one that should be faster on
    this hardware; see ``ringlearn.costs.decoding.prefill_seconds``.
    hardware: the rates on which this choice is based.

    Returns Shards (B, H, T, D_v). Raises ValueError on every rank if an argument is invalid or differs between
    ranks, or if a gradient is required.

    >>> import torch, ringlearn as rl
    >>> q, k, v = torch.randn(1, 4, 50, 8), torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    >>> world = rl.SimulatedWorld(3)
    >>> cache = rl.KVCache(world, batch=1, heads=2, dim=8, capacity=64)
    >>> cache.append(k[:, :, :40], v[:, :, :40])
    >>> new = world.shard(q[:, :, 40:], k[:, :, 40:], v[:, :, 40:], layout=rl.zigzag)
    >>> out = rl.prefill_attention(*new, cache).unshard()
    >>> cache.append(*new[1:])
    >>> torch.allclose(out, rl.decode_attention(q[:, :, 40:], cache), atol=1e-5)
    True
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"{_OP}: expected a KVCache, got {type(cache).__name__}; make one with rl.KVCache(world, ...)")
    world, problem, same, window = cache.world, None, {}, None
    try:
        request = Request(_OP, q, k, v, mask, scale, kernel, 0, return_lse, sinks=sinks, softcap=softcap)
        _check_inputs(request, cache)
        chosen, scores = check_arguments(request)
        window = window_of(mask, _OP)
        if travels not in (None, *PASSES):
            raise ValueError(f"{_OP}: expected travels to be None, {' or '.join(map(repr, PASSES))}, got {travels!r}")
        travels = travels or choose_pass(q, k, cache, hardware or Hardware())
        if world.check:
            same = {"layout": describe(q.layout, q.length, world.size), "cached lengths": str(cache.lengths)}
            same |= {"H": str(q.tensors[0].shape[1]), "mask": mask.signature(), "scale": repr(scale)}
            same |= {"kernel": chosen.name, "travels": travels, "return_lse": str(bool(return_lse))}
            same |= {"softcap": repr(softcap), "values of sinks": "None" if sinks is None else checksum(sinks)}
    except Exception as error:  # the other ranks must hear of it
        problem = error
    world.agree(_OP, same, {}, problem)
    scale = 1 / math.sqrt(cache.dim) if scale is None else float(scale)
    # Masks of a decoding see how far query and key are apart, so the new tokens count from 0 among themselves.
    call = _Call(cache, Spec(mask, q.ranges, k.ranges, scale, chosen, wide=True, scores=scores), window)
    world.reserve(call.largest_message(travels, q, v))
    with torch.no_grad(), _no_autocast(q.tensors[0].device.type):
        results = world.run(PASSES[travels], q, k, v, PerRank(range(len(world.ranks))), call)
        results = results if sinks is None else [with_sinks(result, sinks) for result in results]
    out = Shards([x.out.to(cache.dtype) for x in results], world, q.layout, q.length)
    lse = Shards([x.lse for x in results], world, q.layout, q.length, dim=-1)
    return (out, lse) if return_lse else out


def choose_pass(q: Shards, k: Shards, cache: KVCache, hardware: Hardware) -> str:
    """What travels by default: "pass-kv" or "pass-q", whichever should be faster; pass-KV if both take equally long."""
    B, H, _, D = q.tensors[0].shape
    seconds = prefill_seconds(
        *(q.length, max(cache.lengths), cache.world.size, H, cache.heads, D),
        flops=hardware.flops,
        bandwidth=hardware.bandwidth,
        latency=hardware.latency,
        host=HOST.get(cache.world.device.type, 0.0),
        B=B,
        itemsize=q.tensors[0].element_size(),
        accumulated=accumulation_dtype(q.tensors[0].dtype).itemsize,
    )
    return min(seconds, key=seconds.__getitem__)


def _check_inputs(request: Request, cache: KVCache) -> None:
    q, k, v = request.inputs
    if not all(isinstance(x, Shards) for x in request.inputs):
        got = ", ".join(type(x).__name__ for x in request.inputs)
        raise ValueError(f"{_OP}: expected Shards of the new tokens, got {got}; split them with cache.world.shard")
    check_inputs(request, cache.world)
    if q.length != k.length:
        raise ValueError(
            f"{_OP}: expected as many queries as keys, those of the new tokens, got {q.length}, {k.length}"
        )
    kept = (cache.batch, cache.heads)
    for t, d, name in ((k.tensors[0], cache.dim, "k"), (v.tensors[0], cache.v_dim, "v")):
        if t.dim() != 4 or (tuple(t.shape[:2]), t.shape[3], t.dtype) != (kept, d, cache.dtype):
            raise ValueError(
                f"{_OP}: expected {name} of shape ({cache.batch}, {cache.heads}, n, {d}) in {cache.dtype}, as the "
                f"cache is, got {tuple(t.shape)} in {t.dtype}"
            )
    given = [*(t for x in request.inputs for t in x.tensors), request.sinks]
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in given):
        raise ValueError(
            f"{_OP}: it records no gradient; call it under torch.no_grad(), or train with rl.ring_attention"
        )

"""A strategy for computing attention over ranks, and what every rank knows about one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import Kernel, Scores, with_scores
from ..kernels.scores import UNCHANGED
from ..layouts import Ranges, count
from ..masks import Mask
from ..partial import accumulation_dtype
from ..partial.accumulate import ALL, Accumulator
from ..tiles import Tile, plan, plan_steps
from ..tiles.located import located
from ..worlds.comm import Comm
from .needed import Route, route_of
from .sinks import with_sinks

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


@dataclass(frozen=True, repr=False)
class Strategy:
    """A strategy for computing attention when the sequence is split over ranks: two rank programs.

        forward(comm, q, k, v, spec)  ->  Partial, and any tensors to be kept for the backward
        backward(comm, dout, q, k, v, out, lse, dlse, *kept, spec)  ->  dq, dk, dv

    q, k, v: this rank's shards, (B, H or G, n, D). out: in the dtype of q or the accumulation dtype, lse in the latter.
    dout, dlse: the gradients of out and lse; dlse is None if lse has none. Gradients come in the dtype of their tensor
    or in the accumulation dtype.

    name: strategies with the same name must send the same messages; ranks compare it.
    keeps: how many tensors the forward keeps for the backward, None if that depends on the call.
    axes: 2 if it needs a world with two axes, nodes and ranks per node.
    rotates: whether its messages go to neighbours only, so that the world reserves memory for the largest of them.
    moves_dlse: whether the gradient of lse travels, so that it must exist on every rank or on none.
    takes_sinks: whether its programs apply ``spec.sinks``; otherwise sinks are applied to the result of its forward.
    has_kernel: False if it does not use a kernel, so that a request for one is refused.
    prepare(spec, world, q, k): makes the spec that the programs are given, if they need more than a ``Spec``.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    keeps: int | None = 0
    axes: int = 1
    rotates: bool = False
    moves_dlse: bool = False
    takes_sinks: bool = False
    has_kernel: bool = True
    prepare: Callable[..., Spec] | None = None

    def __repr__(self) -> str:
        return self.name

    async def forward_with_sinks(self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Any, ...]:
        """The forward of a whole call, sinks included. Do not use it for results that are merged further."""
        result, *kept = await self.forward(comm, q, k, v, spec)
        if spec.sinks is None or self.takes_sinks:
            return result, *kept
        return with_sinks(result, spec.sinks), *kept


def of_heads(heads: slice, *tensors: Tensor | None) -> Sequence[Tensor | None]:
    """Some heads of tensors (B, heads, ...); the tensors themselves if they are all of them, for a view costs time."""
    return tensors if heads == ALL else [None if t is None else t[:, heads] for t in tensors]


CALL_BYTES = 32 * 2**20  # of queries in a backward call; larger ones are made in two where memory is short


@dataclass(frozen=True)
class Spec:
    """What all ranks know about an attention call: mask, scale, kernel, and every rank's positions of queries and keys.

    wide: whether results are summed further elsewhere, so that they are not rounded here.
    scores: how scores are changed before the softmax. The kernel does this; a strategy without a kernel does it itself.
    sinks: (H,), the scores without values, which ``Strategy.forward_with_sinks`` applies.
    """

    mask: Mask
    q_ranges: tuple[Ranges, ...]
    k_ranges: tuple[Ranges, ...]
    scale: float
    kernel: Kernel
    wide: bool = False
    scores: Scores = UNCHANGED
    sinks: Tensor | None = field(default=None, compare=False)
    _tiles: dict[int, tuple[tuple[Tile, ...], ...]] = field(default_factory=dict, compare=False, repr=False)
    _others: dict[tuple[Any, ...], Spec] = field(default_factory=dict, compare=False, repr=False)
    _by_distance: dict[int, list[tuple[Tile, ...]]] = field(default_factory=dict, compare=False, repr=False)

    def over(self, q_ranges: tuple[Ranges, ...], k_ranges: tuple[Ranges, ...], wide: bool = False) -> Spec:
        """The same call between other shards: those of some ranks, or several joined into one. Made only once."""
        key, wide = (q_ranges, k_ranges, wide), wide or self.wide
        if key not in self._others:
            self._others[key] = replace(
                self, q_ranges=q_ranges, k_ranges=k_ranges, wide=wide, _tiles={}, _others={}, _by_distance={}
            )
        return self._others[key]

    def of_heads(self, heads: slice) -> Spec:
        """The same call for some of the query heads."""
        if self.scores.slopes is None and self.sinks is None or heads == ALL:
            return self
        scores, sinks = self.scores.of_heads(heads), None if self.sinks is None else self.sinks[heads]
        return replace(self, scores=scores, sinks=sinks, kernel=with_scores(self.kernel, scores), _others={})

    @cached_property
    def route(self) -> Route:
        """How far the rows of every rank's keys travel round a ring."""
        return route_of(self.mask, self.q_ranges, self.k_ranges)

    def reaching(self, rank: int) -> Spec:
        """The same call with only the keys that reach a rank."""
        return self if self.route.whole else self.over(self.q_ranges, self.route.held(rank))

    def tiles(self, rank: int, source: int) -> tuple[Tile, ...]:
        """The tiles of the queries of ``rank`` and the keys of ``source``, planned once for forward and backward."""
        if rank not in self._tiles:
            self._tiles[rank] = self._planned(self.q_ranges[rank])
        return self._tiles[rank][source]

    def tiles_by_distance(self, rank: int) -> list[tuple[Tile, ...]]:
        """For each distance d, the tiles of this rank's queries and the keys of rank - d."""
        found = self._by_distance.get(rank)
        if found is None:
            reaching, P = self.reaching(rank), len(self.k_ranges)
            found = [reaching.tiles(rank, (rank - far) % P) for far in range(self.route.hops + 1)]
            self._by_distance[rank] = found
        return found

    def _planned(self, q_ranges: Ranges) -> tuple[tuple[Tile, ...], ...]:
        if self.scores.slopes is None:
            return plan_steps(self.mask, q_ranges, self.k_ranges)
        # Where scores depend on positions, each tile has to know its own.
        pairs = ((q_ranges, k_ranges) for k_ranges in self.k_ranges)
        return tuple(tuple(located(tile, *pair) for tile in plan(self.mask, *pair)) for pair in pairs)

    def k_length(self, source: int) -> int:
        """The number of keys that a rank owns; ranks count modulo P, so -1 is the last."""
        return count(self.k_ranges[source % len(self.k_ranges)])

    def accumulator(self, q: Tensor, v: Tensor, parts: int) -> Accumulator:
        """An accumulator that merges ``parts`` partial results for the queries q into an output in their dtype."""
        shape, dtype = (*q.shape[:-1], v.shape[-1]), accumulation_dtype(q.dtype)
        return Accumulator(shape, dtype, q.device, parts=parts, final=dtype if self.wide else q.dtype)

    # The backward

    def sum_dtype(self, q: Tensor, parts: int) -> torch.dtype:
        """The dtype in which ``parts`` results are summed: that of q for two, since one sum is rounded only once."""
        return q.dtype if parts <= 2 and not self.wide else accumulation_dtype(q.dtype)

    def travel_dtype(self, k: Tensor, hops: int) -> torch.dtype:
        """The dtype in which dk and dv travel: for one hop they are one rank's results, for more they are sums."""
        return k.dtype if hops <= 1 and not self.wide else accumulation_dtype(k.dtype)

    def head_groups(self, q: Tensor, k: Tensor, few: bool) -> list[tuple[slice, slice]]:
        """The query heads, and the key/value heads that they use, of each kernel call.

        All at once; or in two calls, if ``few`` and there are more than ``CALL_BYTES`` of queries. A backward kernel
        holds several times as much as its queries (dq in float32, dk and dv of every query head), and the last step of
        a ring, when all sums are there and the last ones arrive, would decide how much memory it needs. A kernel that
        has a slope for each head gets all of them.
        """
        H, G = q.shape[1], k.shape[1]
        if not few or G < 2 or q.nbytes <= CALL_BYTES or self.scores.slopes is not None:
            return [(slice(None), slice(None))]
        half = G // 2
        return [(slice(0, half * H // G), slice(0, half)), (slice(half * H // G, H), slice(half, G))]

    def largest_message(self, k: Tensor, v: Tensor, backward: bool) -> int:
        """Bytes of the largest message of a call, over all ranks.  k, v: those of any rank."""
        (B, G), route = k.shape[:2], self.route
        itemsize = max(k.dtype.itemsize, self.travel_dtype(k, route.hops).itemsize if backward else 0)
        return B * G * (k.shape[-1] + v.shape[-1]) * itemsize * route.longest

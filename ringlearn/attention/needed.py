"""Who needs what: how far the rows of every rank's keys have to travel round a ring.

A hop carries only the rows that some later rank still needs, and the ring stops when nobody needs anything any more:

    a causal window of 4,096, contiguous shards of 8,192      one hop of 4,095 rows
    documents that end where shards end                       no hop at all
    full, causal, a mask from a user's function               every row goes to every rank, in P - 1 hops

It follows from the mask and the positions alone, so all ranks know it without asking, and a message that is left out is
left out by both of its sides. In a ring, rank + d is the d-th that the keys of a rank come to. They arrive there after
d hops, so what hop d carries of them is what the ranks d, d + 1, ... further on see:

    rows(source, d)  =  needed(source + d, source)  or  rows(source, d + 1)                            (1)

A query sees one interval of keys, whose ends only move forward from one position to the next. So what a whole range of
queries needs lies between what its first query and its last one see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

from torch import Tensor

from ..layouts import Ranges, count
from ..masks import Mask, causal, full
from ..partial.accumulate import ALL, Sum
from ..worlds.comm import Comm, Handle

MANY = 64  # ranges of positions on a rank, from which it takes longer to ask who needs what than it saves
KEPT = 2  # hops up to which the backward begins with the keys that came last; see ``Route.keeps``

Rows = tuple[tuple[int, int], ...]  # start and stop of each interval of local rows, in order; they do not touch


@dataclass(frozen=True, eq=False)
class Route:
    """How far the rows of every rank's keys travel round a ring.

    k_ranges: the positions of every rank's keys.
    needed: for each rank the rows that the ranks 0, 1, 2, ... further on need of it, as far as any does; None if every
    row goes to every rank.

    >>> import ringlearn as rl
    >>> ranges = rl.contiguous.ranges(32, 4)
    >>> route = route_of(rl.causal & rl.sliding_window(5), ranges, ranges)
    >>> route.hops, route.rows(0, 1), route.length(3, 1)
    (1, ((4, 8),), 0)
    """

    k_ranges: tuple[Ranges, ...]
    needed: tuple[tuple[Rows, ...], ...] | None = None
    _held: dict[int, tuple[Ranges, ...]] = field(default_factory=dict, repr=False)
    _lengths: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def whole(self) -> bool:
        """Whether every row goes to every rank."""
        return self.needed is None

    @cached_property
    def hops(self) -> int:
        """After how many hops nobody needs anything any more."""
        return len(self.k_ranges) - 1 if self.needed is None else max(map(len, self.needed)) - 1

    @property
    def keeps(self) -> bool:
        """Whether a rank keeps the keys that came last, for its backward.

        The backward of a ring that is not whole gets its keys from their homes, in messages that are copies of some
        rows. With the first ones at hand none of them has to be waited for. Where many rows make many hops, their
        memory is needed for these copies: else a rank would hold more than in a whole ring.
        """
        return self.whole or self.hops <= KEPT or 2 * self.longest <= min(map(count, self.k_ranges))

    def keep(self, *last: Tensor) -> tuple[Tensor, ...]:
        """What came last, or nothing."""
        return last if self.keeps else tuple(t.new_empty(0) for t in last)

    def shapes(self, own: Sequence[Tensor], source: int, distance: int) -> list[tuple[int, ...]]:
        """The shapes of source's keys and values that far on, from those of a rank's own."""
        return [(*t.shape[:2], self.length(source, distance), t.shape[3]) for t in own]

    @cached_property
    def _rows(self) -> tuple[tuple[Rows, ...], ...]:
        travelling = []
        for source, by_distance in enumerate(self.needed or ()):
            still: list[Rows] = []
            for rows in reversed(by_distance[1:]):
                still.append(_union(rows, still[-1]) if still else rows)
            travelling.append((_all_rows(self.k_ranges[source]), *reversed(still)))
        return tuple(travelling)

    def rows(self, source: int, distance: int) -> Rows:
        """The rows of source's keys that come to the rank so much further on; at distance 0, all of them."""
        source %= len(self.k_ranges)
        if self.needed is None or distance == 0:
            return _all_rows(self.k_ranges[source])
        return self._rows[source][distance] if distance < len(self._rows[source]) else ()

    def length(self, source: int, distance: int) -> int:
        """How many rows these are."""
        key = source % len(self.k_ranges), distance
        if key not in self._lengths:
            self._lengths[key] = sum(stop - start for start, stop in self.rows(source, distance))
        return self._lengths[key]

    @cached_property
    def longest(self) -> int:
        """The most rows that a hop carries."""
        return max((self.length(source, 1) for source in range(len(self.k_ranges))), default=0) if self.hops else 0

    def uses(self, source: int, distance: int) -> bool:
        """Whether the rank so much further on needs any of source's keys itself."""
        if self.needed is None:
            return True
        by_distance = self.needed[source % len(self.k_ranges)]
        return distance < len(by_distance) and bool(by_distance[distance])

    def within(self, source: int, distance: int, further: int) -> tuple[slice, ...]:
        """Where the rows that go further lie among those that come as far as ``distance``."""
        if self.needed is None:
            return (ALL,)
        outer, inner = self.rows(source, distance), self.rows(source, further)
        if inner == outer:
            return (ALL,)
        found, before = [], list(accumulate((stop - start for start, stop in outer), initial=0))
        for start, stop in inner:
            i = bisect_left(outer, start + 1, key=lambda pair: pair[0]) - 1
            place = before[i] + start - outer[i][0]
            found.append(slice(place, place + stop - start))
        return tuple(found)

    def held(self, rank: int) -> tuple[Ranges, ...]:
        """The positions of every rank's keys that come to a rank."""
        if rank not in self._held:
            P = len(self.k_ranges)
            self._held[rank] = tuple(
                _positions(ranges, self.rows(source, (rank - source) % P))
                for source, ranges in enumerate(self.k_ranges)
            )
        return self._held[rank]


def pass_on(comm: Comm, route: Route, here: tuple[Tensor, ...], distance: int) -> Handle:
    """Rotate the rows that a later rank still needs.  here: what has come from the rank so far before this one."""
    source = comm.rank - distance
    rows = comm.select(route.within(source, distance, distance + 1), *here)
    return comm.rotate(*rows, length=route.length(source - 1, distance + 1), skip_empty=not route.whole)


def keys_again(comm: Comm, route: Route, own: tuple[Tensor, ...], here: tuple[Tensor, ...], distance: int) -> Handle:
    """Bring the keys of the rank that is so far before this one, for the backward.

    In a whole ring the next rank has just used them, and they go back the way they came. Otherwise it has fewer rows
    than this rank needs, for the forward has dropped them on the way: they come from home, to those that need any.

    own: this rank's k, v.  here: those that are here now, empty if there are none yet.
    """
    rank, source = comm.rank, comm.rank - distance
    if route.whole and here:
        return comm.rotate(*here, length=route.length(source, distance), back=True)
    sent = route.within(rank, 0, distance) if route.uses(rank, distance) else ()
    length = route.length(source, distance) if route.uses(source, distance) else 0
    return comm.rotate(*comm.select(sent, *own), length=length, by=distance, skip_empty=True)


def gradients_back(comm: Comm, route: Route, found: tuple[Tensor, ...], distance: int) -> Handle:
    """Rotate the gradients of the keys of the rank so far before this one towards it."""
    length = route.length(comm.rank - distance + 1, distance)
    return comm.rotate(*found, length=length, back=True, skip_empty=not route.whole)


def add_found(dkv: Sum, rows: Sequence[slice], found: Sequence[Tensor]) -> None:
    """Add the gradients that the ranks further on have found to those rows of dk, dv that came as far."""
    if tuple(rows) == (ALL,):
        dkv.add(ALL, ALL, *found)
        return
    start = 0
    for place in rows:
        stop = start + place.stop - place.start
        dkv.add(ALL, place, *(t[:, :, start:stop] for t in found))
        start = stop


# --- from the mask to the rows --------------------------------------------------------------------------------------


def route_of(mask: Mask, q_ranges: tuple[Ranges, ...], k_ranges: tuple[Ranges, ...]) -> Route:
    """How far the rows of every rank's keys travel round a ring. The last answers are kept.

    A causal mask alone leaves the ring whole: zigzag and striped shards are needed by nearly all ranks, and of
    contiguous ones the last but one rank passes on everything anyway, and the others wait for it.
    """
    if len(k_ranges) == 1 or not mask.exact or mask in (full, causal) or max(map(len, (*q_ranges, *k_ranges))) > MANY:
        return Route(k_ranges)
    return _route(mask, q_ranges, k_ranges)


@lru_cache(maxsize=64)
def _route(mask: Mask, q_ranges: tuple[Ranges, ...], k_ranges: tuple[Ranges, ...]) -> Route:
    P, keys = len(k_ranges), _Keys(k_ranges)
    needed: list[list[Rows]] = [[()] * P for _ in range(P)]
    for rank, ranges in enumerate(q_ranges):
        for source, rows in keys.seen(_intervals(mask, ranges)).items():
            needed[source][(rank - source) % P] = _union(rows, ())
    if all(mine[-1] == _all_rows(ranges) for ranges, mine in zip(k_ranges, needed, strict=True)):
        return Route(k_ranges)  # the last rank that they come to needs all of them
    for by_distance in needed:
        while len(by_distance) > 1 and not by_distance[-1]:
            by_distance.pop()
    return Route(k_ranges, tuple(map(tuple, needed)))


def _intervals(mask: Mask, q_ranges: Ranges) -> Iterator[tuple[int, int]]:
    """The positions of keys that some queries see: start and stop for each range of queries."""
    for r in q_ranges:
        if len(r):
            first, last = (mask.pieces(p, p + 1)[0] for p in (r[0], r[-1]))
            yield first.lo.at(r[0]), last.hi.at(r[-1])


class _Keys:
    """The ranges of all ranks' keys by position, to find those in an interval without looking at all of them."""

    def __init__(self, k_ranges: tuple[Ranges, ...]):
        placed = []
        for source, ranges in enumerate(k_ranges):
            before = 0
            for r in ranges:
                placed.append((r.start, before, source, r))
                before += len(r)
        self._placed = sorted((p for p in placed if len(p[-1])), key=lambda p: p[:3])
        self._starts = [start for start, *_ in self._placed]
        self._reach = list(accumulate((r[-1] for *_, r in self._placed), max))

    def seen(self, intervals: Iterator[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
        """source -> the rows of its keys in these intervals of positions."""
        found: dict[int, list[tuple[int, int]]] = {}
        for lo, hi in intervals:
            for i in range(bisect_left(self._reach, lo), bisect_left(self._starts, hi)):
                _, before, source, r = self._placed[i]
                a, b = (min(len(r), max(0, -((r.start - x) // r.step))) for x in (lo, hi))
                if a < b:
                    found.setdefault(source, []).append((before + a, before + b))
        return found


def _union(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Rows:
    """The rows in either, as intervals that do not touch."""
    if a == b or not b and len(a) == 1:
        return tuple(a)
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((*a, *b)):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def _all_rows(ranges: Ranges) -> Rows:
    n = count(ranges)
    return ((0, n),) if n else ()


def _positions(ranges: Ranges, rows: Rows) -> Ranges:
    """The positions of some rows of a shard."""
    if rows == _all_rows(ranges):
        return ranges
    found, before = [], list(accumulate(map(len, ranges), initial=0))
    for start, stop in rows:
        for r, offset in zip(ranges, before, strict=False):
            part = r[max(0, start - offset) : max(0, stop - offset)]
            if len(part):
                found.append(part)
    return tuple(found)

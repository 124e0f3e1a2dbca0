"""Tiles: which rectangles of the score matrix have to be computed, and how.

``plan(mask, q_ranges, k_ranges)`` looks at the positions of some queries and keys and returns the kernel calls that
cover exactly what the mask lets them see:

    FULL      every query sees every key
    CAUSAL    a square: row i sees the columns j <= i
    SEGMENTS  rows and columns cut into segments, in each of which a row sees a band of columns: documents, windows
    PARTIAL   at most 512 x 512, needs the mask itself

Empty tiles are not there. It is all integer arithmetic, on ``range`` objects and small tensors on the CPU: no dense
mask, no GPU synchronisation.

Why two shards see each other so simply. Take queries ``q`` and keys ``k``, two ranges of equal step, and a causal mask.
Row i has position q.start + i * step, column j has k.start + j * step, so row i sees the columns j <= i + d with

    d = (q.start - k.start) // step                                                                    (1)

A pair of shards is therefore nothing, everything, or a FULL strip of the first d columns, a square CAUSAL tile, and a
FULL rest. With striped shards d is 0 or -1, and the `q[1:], k[:-1]` trick of Striped Attention (Brandon et al. 2023,
section 3) falls out by itself.

A window moves both ends of what a row sees, and documents cut the rows into many such pairs: that is one SEGMENTS tile,
rarely two (segments.py). Not every kernel has a form for it. ``Tile.cut`` covers the same scores with FULL and CAUSAL
tiles, and PARTIAL ones on the edges that no causal kernel covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate, takewhile
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..fingerprint import shown
from ..layouts import Dealt, Ranges, count, positions_of
from ..masks import Mask
from .segments import Call, Segment, calls_of_steps, is_plain, places
from .starts import upload_together
from .strips import Band, Strip, strips_of, strips_of_band

BLOCK = 512  # the largest side of a PARTIAL tile
LONG = 4 * BLOCK  # from more rows on a segment fills a GPU by itself
_Part = TypeVar("_Part", "Tile", Call)


class Kind(Enum):
    FULL = "full"
    CAUSAL = "causal"
    SEGMENTS = "segments"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Tile:
    """One kernel call: local query rows ``q``, local key columns ``k``, and what is visible between them.

    call: the segments of a SEGMENTS tile, or those that a PARTIAL tile is cut from.
    mask, q_positions, k_positions: the mask and the global positions, of other PARTIAL tiles.
    ``visible`` gives the bool tensor of any tile.
    """

    q: slice
    k: slice
    kind: Kind
    mask: Mask | None = None
    q_positions: range = range(0)
    k_positions: range = range(0)
    call: Call | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(query rows, key columns)"""
        return self.q.stop - self.q.start, self.k.stop - self.k.start

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The visible part of a FULL, CAUSAL or SEGMENTS tile, as bands at a certain row and column."""
        if self.call is not None:
            return self.call.segments
        rows, columns = self.shape
        hi = 0 if self.kind is Kind.CAUSAL else columns - 1
        return (Segment(self.q.start, self.k.start, Band(rows, columns, 1 - rows, hi)),)

    @property
    def area(self) -> int:
        """How many scores are computed for this tile: those that are visible, or all scores of a PARTIAL tile."""
        if self.kind is Kind.SEGMENTS:
            return self.call.area
        rows, columns = self.shape
        return self.segments[0].band.area if self.kind is Kind.CAUSAL else rows * columns

    def visible(self, device: torch.device | str | None = None) -> Tensor:
        """Which key each query sees: bool, (rows, columns)."""
        if self.call is not None:
            return self.call.visible(self.q, self.k, device)
        rows, columns = self.shape
        if self.kind is Kind.PARTIAL:
            q, k = (positions_of((r,), device) for r in (self.q_positions, self.k_positions))
            return self.mask(q[:, None], k[None, :])
        hi = 0 if self.kind is Kind.CAUSAL else columns - 1
        return torch.arange(columns, device=device) <= torch.arange(rows, device=device)[:, None] + hi

    @cached_property
    def cut(self) -> tuple[Tile, ...]:
        """The same scores in tiles that are FULL, CAUSAL or PARTIAL, for kernels that know no others."""
        if self.kind is not Kind.SEGMENTS:
            return (self,)
        strips = [strip for row, column, band in self.segments for strip in strips_of_band(band, row, column)]
        return tuple(_coalesce(list(_tiles_of_strips(self._partial, strips))))

    @cached_property
    def long_apart(self) -> tuple[Tile, ...]:
        """The same scores with FULL and CAUSAL tiles for the long segments, and a SEGMENTS tile for the others.

        For kernels that compute segments more slowly than others compute FULL and CAUSAL tiles. Only the first rows of
        a segment under a window, from which it hides nothing, can be one. The tiles share no rows but where a FULL one
        lies beside a CAUSAL one.
        """
        taken: dict[int, int] = {}
        tiles: list[Tile] = []
        for row, column, band in self.segments:
            strips = list(takewhile(lambda s: not s.lo_moves, strips_of_band(band, row, column)))
            rows = strips[-1].stop - row if strips else 0
            if rows > LONG:
                taken[row] = rows
                tiles += _tiles_of_strips(self._partial, strips)
        if not taken:
            return (self,)
        rest = self.call.without(taken)
        return *([] if rest is None else [_of_call(rest)]), *_coalesce(tiles)

    def _partial(self, rows: slice, columns: slice) -> Tile:
        return Tile(rows, columns, Kind.PARTIAL, call=self.call)

    def __repr__(self) -> str:
        text = f"{self.kind.name} q[{self.q.start}:{self.q.stop}] k[{self.k.start}:{self.k.stop}]"
        return f"{text} of {len(self.segments)}" if self.kind is Kind.SEGMENTS else text


def shift(ranges: Ranges, by: int) -> Ranges:
    """The same ranges, ``by`` positions later: the queries of a longer context start at ``q_start``."""
    return tuple(range(r.start + by, r.stop + by, r.step) for r in ranges) if by else ranges


def plan(mask: Mask, q_ranges: Ranges, k_ranges: Ranges) -> tuple[Tile, ...]:
    """The tiles that cover what queries at ``q_ranges`` see of keys at ``k_ranges``, each visible pair exactly once.

    >>> import ringlearn as rl
    >>> zig = rl.zigzag.ranges(16, 4)
    >>> plan(rl.causal, zig[1], zig[1]), plan(rl.causal, zig[1], zig[0]), plan(rl.causal, zig[0], zig[1])
    ((CAUSAL q[0:4] k[0:4],), (FULL q[0:4] k[0:2],), (FULL q[2:4] k[0:4],))
    >>> stripes = rl.striped.ranges(16, 4)
    >>> plan(rl.causal, stripes[0], stripes[1])
    (CAUSAL q[1:4] k[0:3],)

    Raises ValueError unless the mask is a mask and the positions are tuples of ranges, as layouts give them.
    """
    for name, ranges in (("q_ranges", q_ranges), ("k_ranges", k_ranges)):
        if not isinstance(ranges, tuple | Dealt) or not all(isinstance(r, range) for r in ranges):
            raise ValueError(
                f"plan: expected {name} to be a tuple of ranges, such as rl.zigzag.ranges(S, P)[rank], got {ranges!r}"
            )
    if not isinstance(mask, Mask):
        raise ValueError(f"plan: expected a mask such as rl.causal or rl.mask(fn), got {shown(mask)}")
    # A user's own mask is not kept: it can hold on to large tensors.
    return _remembered_plan(mask, q_ranges, k_ranges) if mask.exact else _plan(mask, q_ranges, k_ranges)


def plan_steps(mask: Mask, q_ranges: Ranges, k_ranges: tuple[Ranges, ...]) -> tuple[tuple[Tile, ...], ...]:
    """``plan`` for the keys of each of several ranks. What is kept on a GPU for all these tiles gets there in one copy.

    >>> import ringlearn as rl
    >>> shards = rl.contiguous.ranges(12, 2)
    >>> plan_steps(rl.causal & rl.documents([2, 3, 7]), shards[1], shards)
    ((FULL q[0:6] k[5:6],), (CAUSAL q[0:6] k[0:6],))
    """
    steps = _remembered_steps if mask.exact else _plan_steps
    return steps(mask, q_ranges, k_ranges)


def _plan_steps(mask: Mask, q_ranges: Ranges, k_ranges: tuple[Ranges, ...]) -> tuple[tuple[Tile, ...], ...]:
    steps = _plan_segments(mask, q_ranges, k_ranges) if mask.exact and not is_plain(mask) else None
    if steps is None:
        steps = [_plan_pairs(mask, q_ranges, k) for k in k_ranges]
    upload_together([tile.call.starts for tiles in steps for tile in tiles if tile.call])
    return tuple(map(tuple, steps))


def _plan(mask: Mask, q_ranges: Ranges, k_ranges: Ranges) -> tuple[Tile, ...]:
    return _plan_steps(mask, q_ranges, (k_ranges,))[0]


def _plan_pairs(mask: Mask, q_ranges: Ranges, k_ranges: Ranges) -> list[Tile]:
    """FULL, CAUSAL and PARTIAL tiles, for each range of queries and each of keys."""
    tiles, row = [], 0
    for q in q_ranges:
        column = 0
        for k in k_ranges:
            tiles += [_move(t, row, column) for t in _plan_pair(mask, q, k)]
            column += len(k)
        row += len(q)
    return _coalesce(tiles)


_remembered_plan = lru_cache(maxsize=4096)(_plan)
_remembered_steps = lru_cache(maxsize=128)(_plan_steps)  # what it keeps on a GPU for documents is a megabyte at most


def covered(tiles: tuple[Tile, ...], S_q: int, S_k: int) -> Tensor:
    """How often each (query, key) pair is computed: int tensor (S_q, S_k), the dense mask if the tiles are right."""
    out = torch.zeros(S_q, S_k, dtype=torch.int32)
    for tile in tiles:
        out[tile.q, tile.k] += tile.visible().int()
    return out


# --- one range of queries against one range of keys ----------------------------------------------------------------


def _plan_segments(mask: Mask, q_ranges: Ranges, k_ranges: tuple[Ranges, ...]) -> list[list[Tile]] | None:
    """For the keys of each rank SEGMENTS tiles, and FULL and CAUSAL ones where a single segment is one.

    None if they cannot be planned so.
    """
    steps: list[list[Tile]] = [[] for _ in k_ranges]
    parts = [(step, column, k) for step, ranges in zip(steps, k_ranges, strict=True) for column, k in _in_order(ranges)]
    for row, q in _in_order(q_ranges):
        found = calls_of_steps(mask, q, [k for _, _, k in parts])
        if found is None:
            return None
        for (step, column, _), of_step in zip(parts, found, strict=True):
            step += [_of_call(_move(call, row, column)) for call in of_step]
    return steps


def _in_order(ranges: Ranges) -> list[tuple[int, Ranges]]:
    """The ranges in parts that are in the order of positions (joined stripes are not), each with its first row."""
    if isinstance(ranges, Dealt) or places(ranges).in_order:
        return [(0, ranges)]
    parts: list[list[range]] = []
    for r in ranges:
        if len(r) and parts and parts[-1][-1][-1] < r[0]:
            parts[-1].append(r)
        elif len(r):
            parts.append([r])
    before = [0, *accumulate(count(tuple(part)) for part in parts)]
    return list(zip(before, map(tuple, parts), strict=False))


def _of_call(call: Call) -> Tile:
    rows, columns = call.shape
    edges = call.left, call.right
    if call.alone and edges == (None, None):
        return Tile(call.q, call.k, Kind.FULL)
    if call.alone and edges == (None, 0) and rows == columns:
        return Tile(call.q, call.k, Kind.CAUSAL)
    return Tile(call.q, call.k, Kind.SEGMENTS, call=call)


def _plan_pair(mask: Mask, q: range, k: range) -> list[Tile]:
    if not len(q) or not len(k):
        return []
    # A single position has no step of its own: it takes the other's.
    step = k.step if len(q) == 1 else q.step
    same_step = step == k.step or len(k) == 1
    if not (mask.exact and same_step):
        return list(_by_blocks(mask, q, k))

    def partial(rows: slice, columns: slice) -> Tile:
        return _partial(mask, q, k, rows, columns)

    return list(_tiles_of_strips(partial, list(strips_of(mask, q, k, step))))


Partially = Callable[[slice, slice], Tile]  # makes a PARTIAL tile of some rows and columns


def _tiles_of_strips(partial: Partially, strips: list[Strip]) -> Iterator[Tile]:
    """FULL and CAUSAL tiles, and PARTIAL ones for the other edges."""
    for group in _group(strips):
        # Two strips are no more than a causal edge and what lies below it, which need no PARTIAL tile.
        one_by_one = [t for strip in group for t in _tiles_of(partial, strip)]
        together = list(_tiles_of_group(partial, group)) if len(group) > 2 else one_by_one
        yield from together if len(together) < len(one_by_one) else one_by_one


class _Columns(NamedTuple):
    """What neighbouring strips see: columns start..stop-1 in all, of which every row sees body_start..body_stop-1."""

    start: int
    body_start: int
    body_stop: int
    stop: int


def _columns(group: list[Strip]) -> _Columns:
    """Ends never move to the left from one row to the next, so the first and the last row say it all."""
    first, last = group[0], group[-1]
    start, stop = first.first(first.start), last.last(last.stop - 1)
    body = last.first(last.stop - 1), first.last(first.start)
    touching = all(a.stop == b.start for a, b in zip(group, group[1:], strict=False))
    if touching and body[0] < body[1] and stop - start > BLOCK:
        return _Columns(start, *body, stop)
    return _Columns(start, stop, stop, stop)  # no body: one edge


def _group(strips: list[Strip]) -> Iterator[list[Strip]]:
    """Neighbouring small strips (short documents) share tiles instead of making kernel calls each.

    This bounds the number of tiles by the number of blocks, whatever the number of documents.
    """
    group: list[Strip] = []
    for strip in strips:
        c = _columns([*group, strip])
        edge = max(c.body_start - c.start, c.stop - c.body_stop)
        if group and max(strip.stop - group[0].start, edge) > BLOCK:
            yield group
            group = []
        group.append(strip)
    if group:
        yield group


def _tiles_of_group(partial: Partially, group: list[Strip]) -> Iterator[Tile]:
    """A few rows with one PARTIAL tile for each edge, and a FULL one for the columns that all of them see."""
    rows, c = slice(group[0].start, group[-1].stop), _columns(group)
    if c.start < c.body_start:
        yield partial(rows, slice(c.start, c.body_start))
    if c.body_start < c.body_stop:
        yield Tile(rows, slice(c.body_start, c.body_stop), Kind.FULL)
    if c.body_stop < c.stop:
        yield partial(rows, slice(c.body_stop, c.stop))


def _tiles_of(partial: Partially, strip: Strip) -> Iterator[Tile]:
    """Cover one strip. Columns of a row, from left to right: a lower triangle's edge, a body, an upper edge."""
    a, b = strip.start, strip.stop
    if not strip.lo_moves and not strip.hi_moves:
        yield Tile(slice(a, b), slice(strip.lo, strip.hi), Kind.FULL)
    elif not strip.lo_moves:
        # Causal edge only: FULL columns that row a sees before the diagonal, then the CAUSAL square.
        diagonal = strip.last(a) - 1
        if diagonal > strip.lo:
            yield Tile(slice(a, b), slice(strip.lo, diagonal), Kind.FULL)
        yield Tile(slice(a, b), slice(diagonal, diagonal + b - a), Kind.CAUSAL)
    elif not strip.hi_moves:
        yield from _anti_causal(partial, a, b, strip.first(a), strip.hi)
    else:
        # A band of constant width. Every `width` rows it is an anti-causal edge, then a CAUSAL square; a narrow band
        # is one PARTIAL tile for every half block of rows.
        width = strip.hi - strip.lo
        rows = max(width, BLOCK // 2)
        for start in range(a, b, rows):
            stop = min(b, start + rows)
            first, diagonal = strip.first(start), strip.last(start) - 1
            if stop - start + width - 1 <= BLOCK:
                yield partial(slice(start, stop), slice(first, strip.last(stop - 1)))
                continue
            yield from _anti_causal(partial, start, stop, first, diagonal)
            yield Tile(slice(start, stop), slice(diagonal, diagonal + stop - start), Kind.CAUSAL)


def _anti_causal(partial: Partially, a: int, b: int, first: int, end: int) -> Iterator[Tile]:
    """Rows a..b-1, where row a + i sees the columns first + i .. end-1: PARTIAL on the diagonal, FULL beside it."""
    for start in range(a, b, BLOCK):
        stop = min(b, start + BLOCK)
        left = first + start - a
        middle = min(end, left + stop - start)
        if left < middle:
            stop_row = min(stop, start + end - left)
            yield partial(slice(start, stop_row), slice(left, middle))
        if middle < end:
            yield Tile(slice(start, stop), slice(middle, end), Kind.FULL)


def _partial(mask: Mask, q: range, k: range, rows: slice, columns: slice) -> Tile:
    return Tile(rows, columns, Kind.PARTIAL, mask, q[rows], k[columns])


def _by_blocks(mask: Mask, q: range, k: range) -> Iterator[Tile]:
    """Any mask, any positions: evaluate the mask block by block, and keep what is not empty."""
    q_pos, k_pos = positions_of((q,)), positions_of((k,))
    for a in range(0, len(q), BLOCK):
        rows = slice(a, min(len(q), a + BLOCK))
        for c in range(0, len(k), BLOCK):
            columns = slice(c, min(len(k), c + BLOCK))
            seen = mask(q_pos[rows, None], k_pos[None, columns])
            if bool(seen.all()):
                yield Tile(rows, columns, Kind.FULL)
            elif bool(seen.any()):
                yield _partial(mask, q, k, rows, columns)


# --- putting tiles together ----------------------------------------------------------------------------------------


def moved(s: slice, by: int) -> slice:
    """The rows or columns that lie so many further on."""
    return slice(s.start + by, s.stop + by)


def _move(part: _Part, row: int, column: int) -> _Part:
    """A tile or a call so many rows and columns further on."""
    if row == column == 0:
        return part
    return replace(part, q=moved(part.q, row), k=moved(part.k, column))


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    """Neighbouring FULL tiles become one; CAUSAL, FULL below it and CAUSAL beside that become one CAUSAL tile."""
    tiles = _coalesce_causal(tiles)
    full = [t for t in tiles if t.kind is Kind.FULL]
    rest = [t for t in tiles if t.kind is not Kind.FULL]
    full = _coalesce_full(full, "q", "k")
    full = _coalesce_full(full, "k", "q")
    return sorted(full + rest, key=lambda t: (t.q.start, t.k.start))


def _coalesce_causal(tiles: list[Tile]) -> list[Tile]:
    def key(q: slice, k: slice) -> tuple[int, int, int, int]:
        return q.start, q.stop, k.start, k.stop

    full = {key(t.q, t.k): t for t in tiles if t.kind is Kind.FULL}
    causal = sorted((t for t in tiles if t.kind is Kind.CAUSAL), key=lambda t: t.q.start)
    joined: list[Tile] = []
    for tile in causal:
        last = joined[-1] if joined else None
        if last and last.q.stop == tile.q.start and last.k.stop == tile.k.start:
            below = full.pop(key(tile.q, last.k), None)
            if below:
                joined[-1] = Tile(slice(last.q.start, tile.q.stop), slice(last.k.start, tile.k.stop), Kind.CAUSAL)
                continue
        joined.append(tile)
    return joined + list(full.values()) + [t for t in tiles if t.kind not in (Kind.FULL, Kind.CAUSAL)]


def _coalesce_full(tiles: list[Tile], along: str, same: str) -> list[Tile]:
    """Join FULL tiles that have the same slice in one dim and touch in the other."""

    def order(t: Tile) -> tuple[int, int, int]:
        s, a = getattr(t, same), getattr(t, along)
        return s.start, s.stop, a.start

    out: list[Tile] = []
    for tile in sorted(tiles, key=order):
        last = out[-1] if out else None
        if (
            last
            and getattr(last, same) == getattr(tile, same)
            and getattr(last, along).stop == getattr(tile, along).start
        ):
            joined = slice(getattr(last, along).start, getattr(tile, along).stop)
            q, k = (joined, tile.k) if along == "q" else (tile.q, joined)
            out[-1] = Tile(q, k, Kind.FULL)
        else:
            out.append(tile)
    return out

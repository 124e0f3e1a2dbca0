"""Tiles: which rectangles of the score matrix have to be computed, and how.

``plan(mask, q_ranges, k_ranges)`` looks at the positions of some queries and keys and returns the kernel calls that
cover exactly what the mask lets them see:

    FULL     every query sees every key
    CAUSAL   a square: row i sees the columns j <= i
    PARTIAL  at most 512 x 512, needs the mask itself

Empty tiles are not there. It is all integer arithmetic on ``range`` objects: no dense mask, no GPU synchronisation.

Why two shards see each other so simply. Take queries ``q`` and keys ``k``, two ranges of equal step, and a causal mask.
Row i has position q.start + i * step, column j has k.start + j * step, so row i sees the columns j <= i + d with

    d = (q.start - k.start) // step                                                                    (1)

A pair of shards is therefore nothing, everything, or a FULL strip of the first d columns, a square CAUSAL tile, and a
FULL rest. With striped shards d is 0 or -1, and the `q[1:], k[:-1]` trick of Striped Attention (Brandon et al. 2023,
section 3) falls out by itself. Windows and documents move or bend the two edges of what a row sees; the edges that no
kernel covers become PARTIAL tiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import Ranges, positions_of
from .masks import Mask

BLOCK = 512  # the largest side of a PARTIAL tile


class Kind(Enum):
    FULL = "full"
    CAUSAL = "causal"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Tile:
    """One kernel call: local query rows ``q``, local key columns ``k``, and what is visible between them.

    ``mask`` and the global positions are there for PARTIAL tiles; ``visible`` gives the bool tensor of any tile.
    """

    q: slice
    k: slice
    kind: Kind
    mask: Mask | None = None
    q_positions: range = range(0)
    k_positions: range = range(0)

    @property
    def shape(self) -> tuple[int, int]:
        """(query rows, key columns)"""
        return self.q.stop - self.q.start, self.k.stop - self.k.start

    @property
    def area(self) -> int:
        """Scores that a kernel computes for this tile: half of the square (with its diagonal) for CAUSAL."""
        rows, columns = self.shape
        return rows * (rows + 1) // 2 if self.kind is Kind.CAUSAL else rows * columns

    def visible(self, device: torch.device | str | None = None) -> Tensor:
        """Which key each query sees: bool, (rows, columns)."""
        rows, columns = self.shape
        if self.kind is Kind.PARTIAL:
            q, k = (positions_of((r,), device) for r in (self.q_positions, self.k_positions))
            return self.mask(q[:, None], k[None, :])
        i, j = torch.arange(rows, device=device), torch.arange(columns, device=device)
        return j[None, :] <= (i if self.kind is Kind.CAUSAL else i + columns)[:, None]

    def __repr__(self) -> str:
        return f"{self.kind.name} q[{self.q.start}:{self.q.stop}] k[{self.k.start}:{self.k.stop}]"


def shift(ranges: Ranges, by: int) -> Ranges:
    """The same ranges, ``by`` positions later: the queries of a longer context start at ``q_start``."""
    return tuple(range(r.start + by, r.stop + by, r.step) for r in ranges)


def plan(mask: Mask, q_ranges: Ranges, k_ranges: Ranges) -> tuple[Tile, ...]:
    """The tiles that cover what queries at ``q_ranges`` see of keys at ``k_ranges``: each visible pair exactly once.

    >>> import ringlearn as rl
    >>> zig = rl.zigzag.ranges(16, 4)
    >>> plan(rl.causal, zig[1], zig[1]), plan(rl.causal, zig[1], zig[0]), plan(rl.causal, zig[0], zig[1])
    ((CAUSAL q[0:4] k[0:4],), (FULL q[0:4] k[0:2],), (FULL q[2:4] k[0:4],))
    >>> stripes = rl.striped.ranges(16, 4)
    >>> plan(rl.causal, stripes[0], stripes[1])
    (CAUSAL q[1:4] k[0:3],)

    Raises ValueError unless the mask is one and the positions are tuples of ranges, as layouts give them.
    """
    for name, ranges in (("q_ranges", q_ranges), ("k_ranges", k_ranges)):
        if not isinstance(ranges, tuple) or not all(isinstance(r, range) for r in ranges):
            raise ValueError(
                f"plan: expected {name} to be a tuple of ranges, such as rl.zigzag.ranges(S, P)[rank], got {ranges!r}"
            )
    if not isinstance(mask, Mask):
        raise ValueError(f"plan: expected a mask such as rl.causal or rl.mask(fn), got {mask!r}")
    # A user's own mask is not kept: it can hold on to large tensors.
    return _remembered_plan(mask, q_ranges, k_ranges) if mask.exact else _plan(mask, q_ranges, k_ranges)


def _plan(mask: Mask, q_ranges: Ranges, k_ranges: Ranges) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    columns = [0, *accumulate(map(len, k_ranges))]
    ordered = all(map(len, k_ranges)) and all(a[-1] < b[0] for a, b in zip(k_ranges, k_ranges[1:], strict=False))
    row = 0
    for q in q_ranges:
        for i in _in_reach(mask, q, k_ranges) if ordered else range(len(k_ranges)):
            tiles += [_move(t, row, columns[i]) for t in _plan_pair(mask, q, k_ranges[i])]
        row += len(q)
    return tuple(_coalesce(tiles))


def _in_reach(mask: Mask, q: range, k_ranges: Ranges) -> range:
    """Which of the ranges, in order, can be seen at all: of many documents' ranges, those of the same document."""
    if len(k_ranges) <= 4 or not len(q) or not mask.exact:  # of few, it takes longer to ask than to look
        return range(len(k_ranges))
    pieces = mask.pieces(q[0], q[-1] + 1)
    first = min(piece.lo.at(piece.start) for piece in pieces)
    stop = max(piece.hi.at(piece.stop - 1) for piece in pieces)
    return range(bisect_left(k_ranges, first, key=lambda k: k[-1]), bisect_left(k_ranges, stop, key=lambda k: k[0]))


_remembered_plan = lru_cache(maxsize=4096)(_plan)


def covered(tiles: tuple[Tile, ...], S_q: int, S_k: int) -> Tensor:
    """How often each (query, key) pair is computed: int tensor (S_q, S_k), the dense mask if the tiles are right."""
    out = torch.zeros(S_q, S_k, dtype=torch.int32)
    for tile in tiles:
        out[tile.q, tile.k] += tile.visible().int()
    return out


# --- one range of queries against one range of keys ----------------------------------------------------------------


class _Strip(NamedTuple):
    """Local rows start..stop-1 see the columns lo(i)..hi(i)-1, each end being constant or moving with the row."""

    start: int
    stop: int
    lo: int
    lo_moves: bool
    hi: int
    hi_moves: bool

    def first(self, row: int) -> int:
        return self.lo + row * self.lo_moves

    def last(self, row: int) -> int:
        """One past the last column that the row sees."""
        return self.hi + row * self.hi_moves


def _plan_pair(mask: Mask, q: range, k: range) -> list[Tile]:
    if not len(q) or not len(k):
        return []
    # A single position has no step of its own: it takes the other's.
    step = k.step if len(q) == 1 else q.step
    same_step = step == k.step or len(k) == 1
    if not (mask.exact and same_step):
        return list(_by_blocks(mask, q, k))
    strips = list(_strips(mask, q, k, step))
    tiles: list[Tile] = []
    for group in _group(strips):
        # Two strips are no more than a causal edge and what lies below it, which need no PARTIAL tile.
        one_by_one = [t for strip in group for t in _tiles_of(mask, q, k, strip)]
        together = list(_tiles_of_group(mask, q, k, group)) if len(group) > 2 else one_by_one
        tiles += together if len(together) < len(one_by_one) else one_by_one
    return tiles


def _strips(mask: Mask, q: range, k: range, step: int) -> Iterator[_Strip]:
    """Translate the mask's pieces from positions to rows and columns, and clip them to 0..len(k)."""
    n = len(k)

    def ceil(x: int) -> int:
        return -(-x // step)

    for piece in mask.pieces(q[0], q[-1] + 1):
        start, stop = ceil(piece.start - q.start), min(len(q), ceil(piece.stop - q.start))
        if start >= stop:
            continue
        # A moving end m(p) = p + offset is, for row i, the column ceil((q.start + i * step + offset - k.start) / step).
        lo = ceil(piece.lo.offset - k.start + q.start * piece.lo.slope)
        hi = ceil(piece.hi.offset - k.start + q.start * piece.hi.slope)
        strip = _Strip(start, stop, lo, bool(piece.lo.slope), hi, bool(piece.hi.slope))
        yield from _clip(strip, n)


def _clip(strip: _Strip, n: int) -> Iterator[_Strip]:
    """Cut a strip where a moving end enters or leaves 0..n, so that each part has simple ends; drop empty rows."""
    cuts = {strip.start, strip.stop}
    if strip.lo_moves:
        cuts |= {-strip.lo, n - strip.lo}
    if strip.hi_moves:
        cuts |= {-strip.hi, n - strip.hi + 1}  # the row that sees exactly n columns still belongs to the triangle
    edges = sorted(c for c in cuts if strip.start <= c <= strip.stop)
    for a, b in zip(edges, edges[1:], strict=False):
        lo, lo_moves, hi, hi_moves = strip.lo, strip.lo_moves, strip.hi, strip.hi_moves
        # Within a..b-1 an end is below 0, above n, or between them, throughout.
        if strip.first(b - 1) <= 0:
            lo, lo_moves = 0, False
        elif strip.first(a) >= n:
            continue
        if strip.last(a) > n or not hi_moves and hi >= n:
            hi, hi_moves = n, False
        elif strip.last(b - 1) <= 0:
            continue
        part = _Strip(a, b, lo, lo_moves, hi, hi_moves)
        # With lo constant and hi moving (or the other way round) the first or last rows can still be empty.
        if part.lo_moves == part.hi_moves:
            if part.first(a) < part.last(a):
                yield part
        elif hi_moves:
            a = max(a, lo - hi + 1)
            if a < b:
                yield part._replace(start=a)
        else:
            b = min(b, hi - lo)
            if a < b:
                yield part._replace(stop=b)


class _Columns(NamedTuple):
    """What neighbouring strips see: columns start..stop-1 in all, of which every row sees body_start..body_stop-1."""

    start: int
    body_start: int
    body_stop: int
    stop: int


def _columns(group: list[_Strip]) -> _Columns:
    """Ends never move to the left from one row to the next, so the first and the last row say it all."""
    first, last = group[0], group[-1]
    start, stop = first.first(first.start), last.last(last.stop - 1)
    body = last.first(last.stop - 1), first.last(first.start)
    touching = all(a.stop == b.start for a, b in zip(group, group[1:], strict=False))
    if touching and body[0] < body[1] and stop - start > BLOCK:
        return _Columns(start, *body, stop)
    return _Columns(start, stop, stop, stop)  # no body: one edge


def _group(strips: list[_Strip]) -> Iterator[list[_Strip]]:
    """Neighbouring small strips (short documents) share tiles instead of making kernel calls each.

    This bounds the number of tiles by the number of blocks, whatever the number of documents.
    """
    group: list[_Strip] = []
    for strip in strips:
        c = _columns([*group, strip])
        edge = max(c.body_start - c.start, c.stop - c.body_stop)
        if group and max(strip.stop - group[0].start, edge) > BLOCK:
            yield group
            group = []
        group.append(strip)
    if group:
        yield group


def _tiles_of_group(mask: Mask, q: range, k: range, group: list[_Strip]) -> Iterator[Tile]:
    """A few rows with one PARTIAL tile for each edge, and a FULL one for the columns that all of them see."""
    rows, c = slice(group[0].start, group[-1].stop), _columns(group)
    if c.start < c.body_start:
        yield _partial(mask, q, k, rows, slice(c.start, c.body_start))
    if c.body_start < c.body_stop:
        yield Tile(rows, slice(c.body_start, c.body_stop), Kind.FULL)
    if c.body_stop < c.stop:
        yield _partial(mask, q, k, rows, slice(c.body_stop, c.stop))


def _tiles_of(mask: Mask, q: range, k: range, strip: _Strip) -> Iterator[Tile]:
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
        yield from _anti_causal(mask, q, k, a, b, strip.first(a), strip.hi)
    else:
        # A band of constant width. Every `width` rows it is an anti-causal edge, then a CAUSAL square; a narrow band
        # is one PARTIAL tile for every half block of rows.
        width = strip.hi - strip.lo
        rows = max(width, BLOCK // 2)
        for start in range(a, b, rows):
            stop = min(b, start + rows)
            first, diagonal = strip.first(start), strip.last(start) - 1
            if stop - start + width - 1 <= BLOCK:
                yield _partial(mask, q, k, slice(start, stop), slice(first, strip.last(stop - 1)))
                continue
            yield from _anti_causal(mask, q, k, start, stop, first, diagonal)
            yield Tile(slice(start, stop), slice(diagonal, diagonal + stop - start), Kind.CAUSAL)


def _anti_causal(mask: Mask, q: range, k: range, a: int, b: int, first: int, end: int) -> Iterator[Tile]:
    """Rows a..b-1, where row a + i sees the columns first + i .. end-1: PARTIAL on the diagonal, FULL beside it."""
    for start in range(a, b, BLOCK):
        stop = min(b, start + BLOCK)
        left = first + start - a
        middle = min(end, left + stop - start)
        if left < middle:
            stop_row = min(stop, start + end - left)
            yield _partial(mask, q, k, slice(start, stop_row), slice(left, middle))
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


def _move(tile: Tile, row: int, column: int) -> Tile:
    q = slice(tile.q.start + row, tile.q.stop + row)
    k = slice(tile.k.start + column, tile.k.stop + column)
    return Tile(q, k, tile.kind, tile.mask, tile.q_positions, tile.k_positions)


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
    return joined + list(full.values()) + [t for t in tiles if t.kind is Kind.PARTIAL]


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

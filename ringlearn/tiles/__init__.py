"""Tiles: which rectangles of the score matrix have to be computed, and how.

``plan(mask, q_ranges, k_ranges)`` looks at the positions of some queries and keys and returns the kernel calls that
cover exactly what the mask lets them see:

    FULL     every query sees every key
    CAUSAL   a square: row i sees the columns j <= i
    WINDOW   a band: row i sees those of the columns i + lo .. i + hi that exist
    PACKED   several of these, side by side and one below the other: documents
    PARTIAL  at most 512 x 512, needs the mask itself

Empty tiles are not there. It is all integer arithmetic on ``range`` objects: no dense mask, no GPU synchronisation.

Why two shards see each other so simply. Take queries ``q`` and keys ``k``, two ranges of equal step, and a causal mask.
Row i has position q.start + i * step, column j has k.start + j * step, so row i sees the columns j <= i + d with

    d = (q.start - k.start) // step                                                                    (1)

A pair of shards is therefore nothing, everything, or a FULL strip of the first d columns, a square CAUSAL tile, and a
FULL rest. With striped shards d is 0 or -1, and the `q[1:], k[:-1]` trick of Striped Attention (Brandon et al. 2023,
section 3) falls out by itself.

A window moves both ends of what a row sees: that is a band, and one WINDOW tile. Short documents are small bands, and
one PACKED tile as long as the same rule holds for each of them: counted from its last row and column, ``left`` and
``right`` columns beyond the diagonal. Not every kernel has these two forms. ``Tile.cut`` covers the same scores with
FULL and CAUSAL tiles, and PARTIAL ones on the edges that no causal kernel covers; so is planned what is neither.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..fingerprint import shown
from ..layouts import Ranges, positions_of
from ..masks import Mask
from .strips import Band, Run, Strip, runs, strips_of, strips_of_band, without_causal_part

BLOCK = 512  # the largest side of a PARTIAL tile
SHORT = 4 * BLOCK  # the most rows of a document that shares a call with others: longer ones fill a GPU by themselves


class Kind(Enum):
    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"
    PACKED = "packed"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Tile:
    """One kernel call: local query rows ``q``, local key columns ``k``, and what is visible between them.

    lo, hi: of a WINDOW tile, whose row i sees the columns i + lo .. i + hi, both included.
    parts: of a PACKED tile, FULL, CAUSAL and WINDOW tiles in order, which share neither rows nor columns. Every row of
    a part sees a column of it, and ``edges`` are those of every part.
    mask, q_positions, k_positions: the mask and the global positions, of WINDOW, PACKED and PARTIAL tiles.
    ``visible`` gives the bool tensor of any tile.
    """

    q: slice
    k: slice
    kind: Kind
    mask: Mask | None = None
    q_positions: range = range(0)
    k_positions: range = range(0)
    lo: int = 0
    hi: int = 0
    parts: tuple[Tile, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(query rows, key columns)"""
        return self.q.stop - self.q.start, self.k.stop - self.k.start

    @property
    def band(self) -> Band:
        """lo and hi of a FULL, CAUSAL or WINDOW tile."""
        rows, columns = self.shape
        if self.kind is Kind.WINDOW:
            return Band(rows, columns, self.lo, self.hi)
        return Band(rows, columns, 1 - rows, 0 if self.kind is Kind.CAUSAL else columns - 1)

    @property
    def edges(self) -> tuple[int | None, int | None]:
        """left and right: row i sees the columns from i + d - left to i + d + right, where d = columns - rows.

        None where nothing is hidden on that side. So FlashAttention counts, from the last row and the last column; the
        parts of a PACKED tile have them in common.
        """
        if self.kind is not Kind.PACKED:
            return self.band.edges
        lefts, rights = zip(*(part.band.edges for part in self.parts), strict=True)
        left, right = ([x for x in given if x is not None] for given in (lefts, rights))
        return max(left, default=None), max(right, default=None)

    @property
    def area(self) -> int:
        """Scores that are computed for this tile: those that are visible, and all of a PARTIAL one."""
        if self.kind is Kind.PACKED:
            return sum(part.area for part in self.parts)
        rows, columns = self.shape
        return rows * columns if self.kind in (Kind.FULL, Kind.PARTIAL) else self.band.area

    def visible(self, device: torch.device | str | None = None) -> Tensor:
        """Which key each query sees: bool, (rows, columns)."""
        rows, columns = self.shape
        if self.kind is Kind.PARTIAL:
            q, k = (positions_of((r,), device) for r in (self.q_positions, self.k_positions))
            return self.mask(q[:, None], k[None, :])
        if self.kind is Kind.PACKED:
            seen = torch.zeros(rows, columns, dtype=torch.bool, device=device)
            for part in self.parts:
                part = _move(part, -self.q.start, -self.k.start)
                seen[part.q, part.k] = part.visible(device)
            return seen
        lo, hi = self.band[2:]
        i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
        return (j >= i + lo) & (j <= i + hi)

    @cached_property
    def cut(self) -> tuple[Tile, ...]:
        """The same scores in tiles that are FULL, CAUSAL or PARTIAL, for kernels that know no others."""
        if self.kind not in (Kind.WINDOW, Kind.PACKED):
            return (self,)
        strips = [
            strip
            for part in self.parts or (self,)
            for strip in strips_of_band(part.band, part.q.start - self.q.start, part.k.start - self.k.start)
        ]
        tiles = _coalesce(list(_tiles_of_strips(self.mask, self.q_positions, self.k_positions, strips)))
        return tuple(_move(tile, self.q.start, self.k.start) for tile in tiles)

    @cached_property
    def planned(self) -> tuple[Tile, ...]:
        """What ``plan`` would have made of a WINDOW tile: itself, but for rows or columns without anything visible."""
        strips = strips_of_band(self.band)
        tiles = _coalesce(list(_tiles_of_runs(self.mask, self.q_positions, self.k_positions, runs(strips))))
        return tuple(_move(tile, self.q.start, self.k.start) for tile in tiles)

    def __repr__(self) -> str:
        text = f"{self.kind.name} q[{self.q.start}:{self.q.stop}] k[{self.k.start}:{self.k.stop}]"
        if self.kind is Kind.WINDOW:
            return f"{text} j-i in {self.lo}..{self.hi}"
        return f"{text} of {len(self.parts)}" if self.kind is Kind.PACKED else text


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
        raise ValueError(f"plan: expected a mask such as rl.causal or rl.mask(fn), got {shown(mask)}")
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


def _plan_pair(mask: Mask, q: range, k: range) -> list[Tile]:
    if not len(q) or not len(k):
        return []
    # A single position has no step of its own: it takes the other's.
    step = k.step if len(q) == 1 else q.step
    same_step = step == k.step or len(k) == 1
    if not (mask.exact and same_step):
        return list(_by_blocks(mask, q, k))
    return list(_tiles_of_runs(mask, q, k, runs(list(strips_of(mask, q, k, step)))))


def _tiles_of_runs(mask: Mask, q: range, k: range, found: list[Run]) -> Iterator[Tile]:
    """WINDOW and PACKED tiles where they are worth a call: all that there is, or more than BLOCK rows of it.

    Not where a causal edge is all there is, which FULL and CAUSAL tiles cover as well.
    """
    rest: list[Strip] = []
    for pack in _packs(found):
        rows = pack[-1].row + pack[-1].band.rows - pack[0].row
        if rows <= BLOCK and len(pack) < len(found) or len(pack) == 1 and pack[0].band.edges[0] is None:
            rest += [strip for run in pack for strip in run.strips]
            continue
        yield from _tiles_of_strips(mask, q, k, rest)
        rest = []
        if len(pack) == 1 and pack[0].band.hi - pack[0].band.lo + 1 >= pack[0].band.columns:
            # A row sees every column. What is above it has at most a causal edge, for which there are faster kernels.
            below = without_causal_part(pack[0])
            if below.row - pack[0].row > BLOCK or not pack[0].band.fits(*pack[0].band.edges):
                yield from _tiles_of_strips(mask, q, k, [s for s in pack[0].strips if s.stop <= below.row])
                pack = [below]
        yield _window_or_packed(mask, q, k, pack)
    yield from _tiles_of_strips(mask, q, k, rest)


def _packs(found: list[Run]) -> Iterator[list[Run]]:
    """Put neighbouring short runs together as long as they have their edges in common and share no columns."""
    pack: list[Run] = []
    left: int | None = None
    right: int | None = None
    for run in found:
        own = run.band.edges
        both = own[0] if left is None else left, own[1] if right is None else right
        changed = pack if both != (left, right) else []
        if pack and not (
            max(pack[-1].band.rows, run.band.rows) <= SHORT
            and run.column >= pack[-1].column + pack[-1].band.columns
            and all(r.band.fits(*both) for r in [pack[0], *changed, run])
        ):
            yield pack
            pack, both = [], own
        pack.append(run)
        left, right = both
    if pack:
        yield pack


def _window_or_packed(mask: Mask, q: range, k: range, pack: list[Run]) -> Tile:
    parts = tuple(_part(run) for run in pack)
    rows, columns = slice(parts[0].q.start, parts[-1].q.stop), slice(parts[0].k.start, parts[-1].k.stop)
    what = {"mask": mask, "q_positions": q[rows], "k_positions": k[columns]}
    return replace(parts[0], **what) if len(parts) == 1 else Tile(rows, columns, Kind.PACKED, **what, parts=parts)


def _part(run: Run) -> Tile:
    """A run as a FULL, CAUSAL or WINDOW tile."""
    band = run.band
    rows, columns = (slice(a, a + n) for a, n in ((run.row, band.rows), (run.column, band.columns)))
    if band.edges == (None, None):
        return Tile(rows, columns, Kind.FULL)
    if band.edges == (None, 0) and band.rows == band.columns:
        return Tile(rows, columns, Kind.CAUSAL)
    return Tile(rows, columns, Kind.WINDOW, lo=band.lo, hi=band.hi)


def _tiles_of_strips(mask: Mask, q: range, k: range, strips: list[Strip]) -> Iterator[Tile]:
    """FULL and CAUSAL tiles, and PARTIAL ones for the other edges."""
    for group in _group(strips):
        # Two strips are no more than a causal edge and what lies below it, which need no PARTIAL tile.
        one_by_one = [t for strip in group for t in _tiles_of(mask, q, k, strip)]
        together = list(_tiles_of_group(mask, q, k, group)) if len(group) > 2 else one_by_one
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


def _tiles_of_group(mask: Mask, q: range, k: range, group: list[Strip]) -> Iterator[Tile]:
    """A few rows with one PARTIAL tile for each edge, and a FULL one for the columns that all of them see."""
    rows, c = slice(group[0].start, group[-1].stop), _columns(group)
    if c.start < c.body_start:
        yield _partial(mask, q, k, rows, slice(c.start, c.body_start))
    if c.body_start < c.body_stop:
        yield Tile(rows, slice(c.body_start, c.body_stop), Kind.FULL)
    if c.body_stop < c.stop:
        yield _partial(mask, q, k, rows, slice(c.body_stop, c.stop))


def _tiles_of(mask: Mask, q: range, k: range, strip: Strip) -> Iterator[Tile]:
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
    if row == column == 0:
        return tile
    q = slice(tile.q.start + row, tile.q.stop + row)
    k = slice(tile.k.start + column, tile.k.stop + column)
    return replace(tile, q=q, k=k, parts=tuple(_move(part, row, column) for part in tile.parts))


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

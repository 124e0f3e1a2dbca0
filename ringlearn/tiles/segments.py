"""Segments: all that a rank's queries see of another rank's keys, in one kernel call, or two.

A kernel of variable length, as FlashAttention has one, takes many small attentions in one call: *segments*, each with
rows and columns of its own, one below the other and side by side. In all of them row i sees the columns from i + d -
left to i + d + right, where d is the segment's columns less its rows: one pair of numbers for the whole call, counted
from the last row and column.

What a query sees of some keys is one interval of columns, whatever the layout, because local order is position order;
and both ends of it only move to the right from one row to the next. So the rows fall apart into *components* that
share no columns (documents, mostly), and nearly every component is one such segment:

    causal documents, a rank's own shard     one segment for each document, right = 0
    a window over another rank's keys        one segment
    causal, zigzag, another rank's keys      one segment, nothing hidden

What is none is cut into segments that share columns, and so cannot be in one call: a zigzag rank whose two blocks of
rows see the same keys at different distances needs two calls. Rows between segments see nothing, and columns between
them are seen by nobody: they become segments too, without columns or without rows, so that a call takes its rows and
columns as they lie in memory. Kernels give out 0 to the former and a gradient of 0 to the latter.

Everything is done for all documents at once, in a few operations on int64 tensors on the CPU: 2,000 documents in a
few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layouts import Dealt, Ranges
from ..masks import INFINITY, And, Causal, Documents, Full, Mask, SlidingWindow, _Both
from .starts import Starts
from .strips import Band

NONE = 1 << 40  # a window's edge that hides nothing
FEW = 4  # ranges, of which it is faster to look at each


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call: some rows, some columns, and the segments that they are cut into.

    q, k: the local rows and columns it takes, from the first that matters to the last.
    starts: where each segment begins, counted from q and k, and where the last one ends.
    longest: the most rows and the most columns of a segment.
    left, right: what a row sees, as above; None where nothing is hidden on that side.
    area: how many scores are visible, which are all that are computed.
    gaps: whether some rows see nothing; their lse is what the kernel says of such rows.
    """

    q: slice
    k: slice
    starts: Starts
    longest: tuple[int, int]
    left: int | None
    right: int | None
    area: int
    gaps: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        return self.q.stop - self.q.start, self.k.stop - self.k.start

    @property
    def alone(self) -> bool:
        """Whether it is one segment, which needs no variable lengths."""
        return len(self.starts.rows) == 2

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Those that have rows and columns, counted from the first row and column of the shards."""
        rows, columns = (self.starts.rows + self.q.start).tolist(), (self.starts.columns + self.k.start).tolist()
        spans = zip(rows, rows[1:], columns, columns[1:], strict=False)
        return tuple(Segment(a, c, self._band(b - a, d - c)) for a, b, c, d in spans if a < b and c < d)

    def _band(self, rows: int, columns: int) -> Band:
        d = columns - rows
        lo = 1 - rows if self.left is None else d - self.left
        return Band(rows, columns, lo, columns - 1 if self.right is None else d + self.right)

    def visible(
        self, q: slice | None = None, k: slice | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Which key each query sees: bool, (rows, columns); of all its rows and columns, or of some."""
        q, k = q or self.q, k or self.k
        rows, columns = self.starts.on(torch.device(device or "cpu"))
        i = torch.arange(q.start - self.q.start, q.stop - self.q.start, device=device)
        j = torch.arange(k.start - self.k.start, k.stop - self.k.start, device=device)
        segment = torch.bucketize(i, rows, right=True)  # one more than its number
        first, last = columns[segment - 1], columns[segment]
        diagonal = i - rows[segment] + last
        if self.left is not None:
            first = first.maximum(diagonal - self.left)
        if self.right is not None:
            last = last.minimum(diagonal + self.right + 1)
        return (j >= first[:, None]) & (j < last[:, None])

    def without(self, taken: dict[int, int]) -> Call | None:
        """The same without the first rows of some segments: their number, by the row at which the segment begins."""
        rest = []
        for row, column, band in self.segments:
            n = taken.get(row, 0)
            if n < band.rows:
                left, right = (NONE if x is None else x for x in (self.left, self.right))
                area = band.area - Band(n, band.columns, *band[2:]).area if n else band.area
                rest.append((row + n, row + band.rows, column, column + band.columns, left, right, area))
        return call_of(rest) if rest else None


class Segment(NamedTuple):
    """What a call computes in one piece: a band, and the local row and column at which it begins."""

    row: int
    column: int
    band: Band


def calls(mask: Mask, q_ranges: Ranges, k_ranges: Ranges) -> tuple[Call, ...] | None:
    """The calls that cover what queries at ``q_ranges`` see of keys at ``k_ranges``: each visible pair exactly once.

    q_ranges, k_ranges: each in the order of their positions.
    None if they cannot be planned so: under a mask from a user's function, or if the positions differ in their steps.

    >>> import ringlearn as rl
    >>> contiguous = rl.contiguous.ranges(12, 2)
    >>> (call,) = calls(rl.causal & rl.documents([2, 3, 7]), contiguous[0], contiguous[0])
    >>> call.starts.rows.tolist(), call.starts.columns.tolist(), call.left, call.right
    ([0, 2, 5, 6], [0, 2, 5, 6], None, 0)
    """
    (found,) = calls_of_steps(mask, q_ranges, (k_ranges,)) or (None,)
    return found


def calls_of_steps(mask: Mask, q_ranges: Ranges, k_ranges: Sequence[Ranges]) -> tuple[tuple[Call, ...], ...] | None:
    """``calls`` for the same queries and each of several ranks' keys; None if one of them cannot be planned so."""
    if not mask.exact:
        return None
    limits = _limits(mask)
    if limits is not None and _are_dealt(q_ranges, *k_ranges, limits=limits):
        return _calls_of_steps(_bands_of_documents(q_ranges, k_ranges, limits.hi), len(k_ranges))
    queries, *keys = map(places, (q_ranges, *k_ranges))
    steps = {p.step for p in (queries, *keys) if p.step and p.count}
    if len(steps) > 1 or -1 in steps:
        return None
    queries, *keys = (p._replace(step=max(steps, default=1)) for p in (queries, *keys))
    if not queries.count:
        return ((),) * len(keys)
    if limits is not None and all(len(p.first) == 1 for p in (queries, *keys)):
        bands = _bands_at_once(queries, keys, *limits)
    else:
        strips = None if limits is None else _strips_by_blocks(queries, keys, *limits)
        bands = _bands(_strips(mask, queries, keys) if strips is None else strips)
    return _calls_of_steps(bands, len(keys))


def _calls_of_steps(bands: Bands, steps: int) -> tuple[tuple[Call, ...], ...]:
    found: list[list[Call]] = [[] for _ in range(steps)]
    for number, call in _in_calls(bands):
        found[number].append(call)
    return tuple(map(tuple, found))


# --- positions, rows and columns -----------------------------------------------------------------------------------


class Places(NamedTuple):
    """The positions of some rows or columns: the first position of each range, and how many come before it."""

    first: Tensor
    before: Tensor  # one more than ranges: the last is how many there are
    step: int  # 0: any, there are single positions only; -1: they differ
    count: int

    def index(self, position: Tensor) -> Tensor:
        """How many of them lie before a position."""
        if len(self.first) <= FEW:
            found = [self._inside(position - a, n) for a, n in zip(self.first.tolist(), self._lengths.tolist())]
            return sum(found, start=torch.zeros_like(position))
        i = (torch.searchsorted(self.first, position, right=True) - 1).clamp(min=0)
        return self.before[i] + self._inside(position - self.first[i], self._lengths[i])

    def position(self, index: Tensor) -> Tensor:
        i = torch.searchsorted(self.before, index, right=True) - 1 if len(self.first) > 1 else torch.zeros_like(index)
        return self.first[i] + (index - self.before[i]) * self.step

    @property
    def in_order(self) -> bool:
        """Whether each range lies behind the one before it, and all have one step."""
        if self.step < 0 or len(self.first) < 2:
            return self.step >= 0
        last = self.first + (self._lengths - 1) * self.step
        return bool((last[:-1] < self.first[1:]).all())

    @property
    def _lengths(self) -> Tensor:
        return self.before[1:] - self.before[:-1]

    def _inside(self, beyond: Tensor, length: Tensor | int) -> Tensor:
        """How many of a range lie before the position that is so far beyond its first."""
        if self.step > 1:
            beyond = -torch.div(-beyond, self.step, rounding_mode="floor")
        return beyond.clamp(min=0).clamp(max=length) if isinstance(length, int) else beyond.clamp(min=0).minimum(length)


@lru_cache(maxsize=256)
def places(ranges: Ranges) -> Places:
    """The positions in some ranges."""
    if isinstance(ranges, Dealt):
        return _places_of(ranges.first, ranges.stop - ranges.first, 1, False)
    steps = {r.step for r in ranges}
    if len(steps) > 1:
        steps = {r.step for r in ranges if len(r) > 1}
    step = max(steps, default=1) if len(steps) < 2 else 0
    first, lengths = (torch.tensor(x, dtype=torch.int64) for x in ([r.start for r in ranges], list(map(len, ranges))))
    return _places_of(first, lengths, step, len(steps) > 1)


def _places_of(first: Tensor, lengths: Tensor, step: int, differ: bool) -> Places:
    if step and not bool((lengths > 1).any()):  # single positions fit every step
        step = 0
    before = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Places(first, before, -1 if differ else step, int(before[-1]))


# --- what each row sees --------------------------------------------------------------------------------------------


class Strips(NamedTuple):
    """Rows start..stop-1 see the columns from lo to hi; both ends are constant, or move by one column a row.

    lo, hi: of the first row. lo_last, hi_last: of the last.
    """

    start: Tensor
    stop: Tensor
    lo: Tensor
    hi: Tensor
    lo_last: Tensor
    hi_last: Tensor
    keys: Tensor  # the number of the rank whose keys they are, in order


def _take(rows: Any, which: Tensor) -> Any:
    """Some of the strips, or bands, by their numbers or by a bool for each of them."""
    if which.dtype == torch.bool:
        which = which.nonzero().flatten()
    return type(rows)(*(_at(t, which) for t in rows))


def _at(x: Tensor, which: Tensor) -> Tensor:
    """x[which] of one dim, in a quarter of the time."""
    return x.index_select(0, which)


def _strips(mask: Mask, queries: Places, keys: Sequence[Places]) -> Strips:
    """All rows that see something, cut wherever an end begins or ceases to move."""
    first, last = (queries.position(rows) for rows in _first_and_last(queries))
    known = _in_tensors(mask, int(first[0]), int(last[-1]))
    lo, hi = _ends(known, first)[0], _ends(known, last)[1]
    # Ends only move to the right, so no query between these sees anything before or beyond.
    seen = [p.count and bool((p.index(lo) < p.index(hi)).any()) for p in keys]
    found = [_strips_of(known, queries, p, i) for i, p in enumerate(keys) if seen[i]]
    return Strips(*map(torch.cat, zip(*found, strict=True))) if found else Strips(*[torch.zeros(0).long()] * 7)


def _first_and_last(queries: Places) -> tuple[Tensor, Tensor]:
    """The first and the last row of each range, or of all of them if there are many."""
    if len(queries.first) > FEW:
        return torch.tensor([0]), torch.tensor([queries.count - 1])
    return queries.before[:-1], queries.before[1:] - 1


def _strips_of(mask: Mask | _Pieces, queries: Places, keys: Places, number: int) -> Strips:
    ends = _boundaries(mask)
    bounds = torch.cat([ends, keys.first, keys.first + keys._lengths * keys.step])
    offsets = _offsets(mask)
    # Where an end moves along from offset 1 on, it meets the ends of documents at these themselves.
    cuts = [ends, queries.first, *((bounds if offset != 1 else bounds[len(ends) :]) - offset + 1 for offset in offsets)]
    rows = _distinct(queries.index(torch.cat(cuts)), queries.count)
    start, stop = rows[:-1], rows[1:]
    lo, hi = (keys.index(end) for end in _ends(mask, queries.position(start)))
    lo_last, hi_last = (keys.index(end) for end in _ends(mask, queries.position(stop - 1)))
    return _seeing(Strips(start, stop, lo, hi, lo_last, hi_last, torch.full_like(start, number)))


def _seeing(strips: Strips) -> Strips:
    """These strips without the rows that see nothing: where an end moves into the other, the first or the last."""
    start, stop, lo, hi, lo_last, hi_last, keys = strips
    blind = (lo - hi + 1).clamp(min=0)
    blind_last = (lo_last - hi_last + 1).clamp(min=0)
    first, last = start + blind, stop - blind_last
    lo, hi = (torch.where(end_last > end, end + blind, end) for end, end_last in ((lo, lo_last), (hi, hi_last)))
    lo_last, hi_last = (
        torch.where(end_last > end, end_last - blind_last, end_last) for end, end_last in ((lo, lo_last), (hi, hi_last))
    )
    return _take(Strips(first, last, lo, hi, lo_last, hi_last, keys), (first < last) & (lo < hi))


def _strips_by_blocks(
    queries: Places, keys: Sequence[Places], documents: Documents | None, lo: int, hi: int
) -> Strips | None:
    """The same without a window, from blocks of queries of one range and one document, if in each an end is constant or
    moves throughout: so it is where ranges of queries and of keys are the same or do not overlap. None if it is not so.
    """
    few = all(len(x.first) <= FEW for x in (queries, *keys))
    if not few or documents is None or queries.step != 1 or lo != -INFINITY or hi not in (1, INFINITY):
        return None

    def index(position: Tensor) -> Tensor:
        return torch.stack([x.index(position) for x in keys])

    ends = _with_rows(_document_ends(documents), queries)
    rows = _distinct(torch.cat([queries.index(ends), queries.before]), queries.count)
    start, stop = rows[:-1], rows[1:]
    p, columns = queries.position(start), index(ends)
    document = torch.searchsorted(ends, p, right=True)
    first, last = columns[:, document - 1], columns[:, document]
    n = stop - start
    if hi == INFINITY:
        end = last
    else:
        last, end = index(p + 1).minimum(last), index(p + n).minimum(last)
        if not bool(((end == last) | (end - last == n - 1)).all()):
            return None
    strips = start, stop, first, last, first, end, torch.arange(len(keys))[:, None]
    return _seeing(Strips(*(t.expand_as(first).flatten() for t in strips)))


class _Pieces(NamedTuple):
    """``Mask.pieces`` of a mask that is none of ringlearn's, in tensors: both ends are slope * position + offset."""

    start: Tensor
    lo_slope: Tensor
    lo_offset: Tensor
    hi_slope: Tensor
    hi_offset: Tensor

    def ends(self, p: Tensor) -> tuple[Tensor, Tensor]:
        _, *of_piece = (t[torch.searchsorted(self.start, p, right=True) - 1] for t in self)
        lo_slope, lo_offset, hi_slope, hi_offset = of_piece
        return lo_slope * p + lo_offset, hi_slope * p + hi_offset

    def moving(self) -> set[int]:
        return {*self.lo_offset[self.lo_slope > 0].tolist(), *self.hi_offset[self.hi_slope > 0].tolist()}

    def boundaries(self) -> Tensor:
        constant = torch.cat([self.lo_offset[self.lo_slope == 0], self.hi_offset[self.hi_slope == 0]])
        return torch.cat([self.start, constant[constant.abs() < INFINITY]])


def _in_tensors(mask: Mask, first: int, last: int) -> Mask | _Pieces:
    """The mask, with its pieces for queries first..last in place of a mask that is none of ringlearn's."""
    if isinstance(mask, _Both):
        return type(mask)(_in_tensors(mask.a, first, last), _in_tensors(mask.b, first, last))
    if isinstance(mask, Full | Causal | SlidingWindow | Documents):
        return mask
    pieces = mask.pieces(first, last + 1)
    return _Pieces(*torch.tensor([(p.start, *p.lo, *p.hi) for p in pieces]).T.contiguous())


def is_plain(mask: Mask) -> bool:
    """Whether it is at most causal: FULL and CAUSAL tiles cover what it shows, in any layout."""
    if isinstance(mask, _Both):
        return is_plain(mask.a) and is_plain(mask.b)
    if isinstance(mask, Full | Causal | SlidingWindow | Documents):
        return isinstance(mask, Full | Causal)
    pieces = mask.pieces(0, INFINITY)
    return len(pieces) == 1 and not pieces[0].lo.slope


def _distinct(rows: Tensor, count: int) -> Tensor:
    """The numbers among 0..count that are in ``rows``, and 0 and count, in order; marking is faster than sorting."""
    if count > 1 << 22:
        return torch.cat([rows.new_tensor([0, count]), rows]).unique()
    seen = torch.zeros(count + 1, dtype=torch.bool)
    seen[rows] = True
    seen[0] = seen[count] = True
    return seen.nonzero().flatten()


def _offsets(mask: Mask | _Pieces) -> set[int]:
    """How far the moving ends of a mask are from the query."""
    if isinstance(mask, _Both):
        return _offsets(mask.a) | _offsets(mask.b)
    if isinstance(mask, _Pieces):
        return mask.moving()
    if isinstance(mask, SlidingWindow):
        return {1 - mask.width, mask.width}
    return {1} if isinstance(mask, Causal) else set()


def _boundaries(mask: Mask | _Pieces) -> Tensor:
    """The positions at which constant ends jump: where documents begin and end."""
    if isinstance(mask, _Both):
        return torch.cat([_boundaries(mask.a), _boundaries(mask.b)])
    if isinstance(mask, _Pieces):
        return mask.boundaries()
    return _document_ends(mask) if isinstance(mask, Documents) else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=64)
def _document_ends(mask: Documents) -> Tensor:
    return torch.tensor([0, *mask.ends], dtype=torch.int64)


def _ends(mask: Mask | _Pieces, p: Tensor) -> tuple[Tensor, Tensor]:
    """Queries at positions p see the keys at lo .. hi - 1: ``Mask.pieces`` for many queries at once."""
    if isinstance(mask, _Both):
        (a, b), (c, d) = _ends(mask.a, p), _ends(mask.b, p)
        return (a.maximum(c), b.minimum(d)) if isinstance(mask, And) else (a.minimum(c), b.maximum(d))
    if isinstance(mask, _Pieces):
        return mask.ends(p)
    if isinstance(mask, SlidingWindow):
        return p + 1 - mask.width, p + mask.width
    if isinstance(mask, Documents):
        ends = _document_ends(mask)
        i = torch.searchsorted(ends, p, right=True)
        return ends[i - 1], torch.where(i < len(ends), ends[i.clamp(max=len(ends) - 1)], INFINITY)
    return torch.full_like(p, -INFINITY), p + 1 if isinstance(mask, Causal) else torch.full_like(p, INFINITY)


# --- one range of queries, one of keys -----------------------------------------------------------------------------


class _Limits(NamedTuple):
    """A query at p sees those keys of its own document that are from p + lo to p + hi - 1."""

    documents: Documents | None
    lo: int
    hi: int


def _limits(mask: Mask) -> _Limits | None:
    """The mask as one, if it is one."""
    if isinstance(mask, And):
        a, b = _limits(mask.a), _limits(mask.b)
        if a is None or b is None or None not in (a.documents, b.documents):
            return None
        return _Limits(a.documents or b.documents, max(a.lo, b.lo), min(a.hi, b.hi))
    if isinstance(mask, SlidingWindow):
        return _Limits(None, 1 - mask.width, mask.width)
    if isinstance(mask, Documents):
        return _Limits(mask, -INFINITY, INFINITY)
    if isinstance(mask, Full | Causal):
        return _Limits(None, -INFINITY, 1 if isinstance(mask, Causal) else INFINITY)
    return None


def _bands_at_once(queries: Places, keys: Sequence[Places], documents: Documents | None, lo: int, hi: int) -> Bands:
    """The segments of one range of queries and one of keys, one for each document, by equation (1) of tiles; for the
    keys of several ranks.

    Row i sees those columns of its document that are from i + lo_line to i + hi_line - 1.
    """
    step = queries.step
    k0 = torch.cat([p.first for p in keys])[:, None]
    lo_line, hi_line = (
        torch.full_like(k0, NONE if x > 0 else -NONE) if abs(x) == INFINITY else -((k0 - queries.first - x) // step)
        for x in (lo, hi)
    )
    counts = torch.tensor([p.count for p in keys])[:, None]
    if documents is None:
        top = torch.zeros(1, dtype=torch.int64)
        bottom, first, last = torch.tensor([queries.count]), torch.zeros_like(counts), counts
    else:
        ends = _with_rows(_document_ends(documents), queries)
        rows = queries.index(ends)
        columns = (-((k0 - ends) // step)).clamp(min=0).minimum(counts)
        top, bottom, first, last = rows[:-1], rows[1:], columns[:, :-1], columns[:, 1:]
    top, bottom = top.maximum(first - hi_line + 1), bottom.minimum(last - lo_line)
    first, last = first.maximum(top + lo_line), last.minimum(bottom - 1 + hi_line)
    d = last - bottom
    right = torch.where(top + hi_line >= last, NONE, hi_line - 1 - d)
    # The sum over all rows of min(last, i + hi_line) - max(first, i + lo_line).
    n = bottom - top
    below_last = (last - hi_line - top).clamp(min=0).minimum(n)
    up_to = n * last - below_last * (last - top - hi_line) + below_last * (below_last - 1) // 2
    if lo == -INFINITY:
        left, after = torch.full_like(d, NONE), n * first
    else:
        left = torch.where(bottom - 1 + lo_line <= first, NONE, d - lo_line)
        below_first = (first - lo_line - top).clamp(min=0).minimum(n)
        after = below_first * first + (n - below_first) * (top + lo_line)
        after += (n * (n - 1) - below_first * (below_first - 1)) // 2
    seen = (top < bottom) & (first < last) & (lo_line < hi_line)
    bands = top, bottom, first, last, left, right, up_to - after, torch.arange(len(keys))[:, None]
    return _take(Bands(*(t.expand_as(seen).flatten() for t in bands)), seen.flatten())


def _are_dealt(*ranges: Ranges, limits: _Limits) -> bool:
    """Whether they are those of a layout that deals out these documents, and the mask has no window."""
    if limits.documents is None or limits.lo != -INFINITY or limits.hi not in (1, INFINITY):
        return False
    return all(isinstance(r, Dealt) and r.lengths == limits.documents.lengths for r in ranges)


def _bands_of_documents(queries: Dealt, keys: Sequence[Dealt], hi: int) -> Bands:
    """The segments of a rank that has two blocks of each document, one early and one late, for the keys of such ranks.

    Under a causal mask all its queries see the early block of a rank with a smaller number; of one with a larger number
    the late queries see both blocks, and the early ones none. Its own blocks are causal.
    """
    rank, ranks = queries.rank, torch.tensor([r.rank for r in keys])[:, None]
    n, m = queries.sizes, torch.stack([r.sizes for r in keys])  # (documents, 2), (ranks, documents, 2)
    rows, columns = n.sum(1), m.sum(2)
    bottom, first = rows.cumsum(0).expand_as(columns), columns.cumsum(1) - columns
    top, right = bottom - rows, torch.full_like(first, NONE)
    if hi == 1:
        rows = torch.where(ranks > rank, n[:, 1], rows)
        columns = torch.where(ranks < rank, m[:, :, 0], columns)
        top = bottom - rows
        own = (ranks == rank) & (rows > 1)
        right = torch.where(own, 0, right)
    area = torch.where(right == 0, rows * (rows + 1) // 2, rows * columns)
    numbers = torch.arange(len(keys))[:, None]
    bands = top, bottom, first, first + columns, torch.full_like(first, NONE), right, area, numbers
    return _take(Bands(*(t.expand_as(first).flatten() for t in bands)), (area > 0).flatten())


def _with_rows(ends: Tensor, queries: Places) -> Tensor:
    """Where those documents begin and end that have queries, and perhaps others: what is beyond the last is one too."""
    ends = torch.cat([ends, ends.new_tensor([INFINITY])])
    if len(queries.first) > FEW:
        return ends
    last = queries.first + (queries._lengths - 1) * queries.step
    begin, end = (torch.searchsorted(ends, p, right=True).tolist() for p in (queries.first, last))
    return ends[torch.cat([torch.arange(i - 1, j + 1) for i, j in zip(begin, end, strict=True)]).unique()]


# --- from strips to segments ---------------------------------------------------------------------------------------


class Bands(NamedTuple):
    """Segments: rows top..bottom-1 and columns first..last-1, and what is hidden: NONE for nothing."""

    top: Tensor
    bottom: Tensor
    first: Tensor
    last: Tensor
    left: Tensor
    right: Tensor
    area: Tensor
    keys: Tensor  # the number of the rank whose columns they are, in order

    def fit(self, left: int, right: int) -> Tensor:
        """Which of them a kernel that is told left and right hides no more and no less of than they do."""
        rows, columns = self.bottom - self.top, self.last - self.first
        lefts = (self.left == left) | (self.left == NONE) & (left >= columns - 1)
        return lefts & ((self.right == right) | (self.right == NONE) & (right >= rows - 1))


def _bands(s: Strips) -> Bands:
    """Join neighbouring strips that share columns, if they are one band; keep the others, joined as far as they are."""
    apart = torch.ones_like(s.start, dtype=torch.bool)
    apart[1:] = (s.lo[1:] >= s.hi_last[:-1]) | (s.start[1:] != s.stop[:-1]) | (s.keys[1:] != s.keys[:-1])
    band, is_one = _joined(s, apart)
    if bool(is_one.all()):
        return band
    parts, group = [_take(band, is_one)], apart.cumsum(0) - 1
    for g in (~is_one).nonzero().flatten().tolist():  # a few at most: where a document lies in two blocks of a rank
        parts += _joined_greedily(_take(s, group == g))
    joined = Bands(*map(torch.cat, zip(*parts, strict=True)))
    joined = _take(joined, joined.top.argsort(stable=True))
    return _take(joined, joined.keys.argsort(stable=True))


def _joined_greedily(s: Strips) -> list[Bands]:
    found: list[Bands] = []
    begin, n = 0, len(s.start)
    while begin < n:
        end, best = begin + 1, None
        while end <= n:
            band, is_one = _joined(_take(s, torch.arange(begin, end)), torch.arange(end - begin) == 0)
            if not bool(is_one):
                break
            best, end = band, end + 1
        assert best is not None, "one strip is a band"
        found.append(best)
        begin = end - 1
    return found


def _joined(s: Strips, begins: Tensor) -> tuple[Bands, Tensor]:
    """Each group of strips as one band, and whether it is one.  begins: whether a strip is the first of its group.

    Ends only move to the right, so the first strip and the last one say what the others can only agree with.
    """
    group, head = begins.cumsum(0) - 1, begins.nonzero().flatten()
    tail = torch.cat([head[1:] - 1, head.new_tensor([len(begins) - 1])])[: len(head)]
    top, bottom, first, last = s.start[head], s.stop[tail], s.lo[head], s.hi_last[tail]
    # The diagonals that the ends lie on where something is hidden. If nothing is, any does that hides nothing.
    lo_line, hi_line = s.lo_last[tail] - bottom + 1, s.hi[head] - top
    fits = torch.ones_like(begins)
    for row, lo, hi in ((s.start, s.lo, s.hi), (s.stop - 1, s.lo_last, s.hi_last)):
        fits &= lo == (row + _at(lo_line, group)).maximum(_at(first, group))
        fits &= hi == (row + _at(hi_line, group)).minimum(_at(last, group))
    d = last - bottom
    left = torch.where(bottom - 1 + lo_line <= first, NONE, d - lo_line)
    right = torch.where(top + hi_line >= last, NONE, hi_line - 1 - d)
    widths = (s.hi - s.lo) + (s.hi_last - s.lo_last)
    area, wrong = (x.cumsum(0)[tail].diff(prepend=tail.new_zeros(1)) for x in (widths * (s.stop - s.start) // 2, ~fits))
    return Bands(top, bottom, first, last, left, right, area, s.keys[head]), wrong == 0


# --- from segments to calls ----------------------------------------------------------------------------------------


def _in_calls(bands: Bands) -> Iterator[tuple[int, Call]]:
    """As few calls as there are pairs of edges, and more only where segments share columns; each with its keys."""
    if not len(bands.keys):
        return
    of_keys = [Bands(*x) for x in zip(*(t.split(bands.keys.bincount().tolist()) for t in bands), strict=True)]
    edges = [next(_candidates(one)) if len(one.top) else (NONE, NONE) for one in of_keys]
    # Most often all segments have one pair of edges and no columns in common, and are calls as they are.
    left, right = torch.tensor(edges).T.index_select(1, bands.keys)
    wrong = ~bands.fit(left, right)
    wrong[1:] |= (bands.first[1:] < bands.last[:-1]) & (bands.keys[1:] == bands.keys[:-1])
    others = bands.keys[wrong].unique()
    if len(others):
        yield from _calls(_take(bands, ~torch.isin(bands.keys, others)), edges)
        for number in others.tolist():
            yield from _in_several(of_keys[number])
    else:
        yield from _calls(bands, edges)


def _in_several(bands: Bands) -> Iterator[tuple[int, Call]]:
    while len(bands.top):
        best = None
        for left, right in _candidates(bands):
            fits = bands.fit(left, right)
            if best is None or int(fits.sum()) > int(best[0].sum()):
                best = fits, left, right
            if bool(fits.all()):
                break
        fits, left, right = best
        # Of those that share columns the first is taken.
        ends = torch.where(fits, bands.last, 0).cummax(0).values
        fits[1:] &= bands.first[1:] >= ends[:-1]
        yield from _calls(_take(bands, fits), {int(bands.keys[0]): (left, right)})
        bands = _take(bands, ~fits)


def _candidates(bands: Bands) -> Iterator[tuple[int, int]]:
    """Pairs of edges that many of them may have in common: first one that all have if all have one."""
    lefts, rights = (torch.where(x == NONE, -1, x).max().item() for x in (bands.left, bands.right))
    yield tuple(NONE if x < 0 else x for x in (lefts, rights))
    lefts, rights = (x.unique().tolist() for x in (bands.left, bands.right))
    if len(lefts) * len(rights) <= 16:
        yield from ((left, right) for left in lefts for right in rights)
        return
    pairs, counts = torch.stack([bands.left, bands.right], dim=1).unique(dim=0, return_counts=True)
    yield from map(tuple, pairs[counts.topk(min(4, len(counts))).indices].tolist())


def call_of(segments: Sequence[tuple[int, ...]]) -> Call:
    """The call of some segments with one left and right edge, given as the numbers in ``Bands`` but for the keys."""
    ((_, call),) = _calls(Bands(*torch.tensor([(*segment, 0) for segment in segments]).T), {0: segments[0][4:6]})
    return call


def _calls(b: Bands, edges: Sequence[tuple[int, int]] | dict[int, tuple[int, int]]) -> Iterator[tuple[int, Call]]:
    """One call with all segments of each rank's keys, and the rank; left and right are given by the rank."""
    if not len(b.keys):
        return
    apart = b.keys[1:] != b.keys[:-1]
    tail = torch.cat([apart.nonzero().flatten(), apart.new_tensor([len(apart)], dtype=torch.int64)])
    head = torch.cat([tail.new_zeros(1), tail[:-1] + 1])
    # Each segment, then one of the rows up to the next, then one of the columns up to the next.
    following = torch.cat([b.top[1:], b.top[:1]])
    following[tail] = b.bottom[tail]
    rows, columns, keys = (
        torch.stack(x, dim=1).flatten()
        for x in ((b.top, b.bottom, following), (b.first, b.last, b.last), (b.keys, b.keys, b.keys))
    )
    new = torch.ones_like(rows, dtype=torch.bool)
    new[1:] = (rows[1:] > rows[:-1]) | (columns[1:] > columns[:-1]) | (keys[1:] > keys[:-1])
    kept = new.nonzero().flatten()
    rows, columns, keys = (_at(x, kept) for x in (rows, columns, keys))
    sizes = torch.stack([b.bottom - b.top, b.last - b.first, (following > b.bottom).long()])
    most = torch.stack([x.amax(1) for x in sizes.split((tail - head + 1).tolist(), dim=1)], dim=1)
    area = b.area.cumsum(0)[tail].diff(prepend=tail.new_zeros(1))
    of_calls = torch.stack([b.top[head], b.bottom[tail], b.first[head], b.last[tail], *most, area])
    by_keys = of_calls.new_zeros(len(of_calls), int(b.keys[-1]) + 1).index_copy_(1, b.keys[head], of_calls)
    starts = _in_pieces(rows - _at(by_keys[0], keys), columns - _at(by_keys[2], keys), keys, by_keys[4:6])
    for key, *of_call in zip(b.keys[head].tolist(), *starts, *of_calls.tolist(), strict=True):
        rows, columns, top, bottom, first, last, height, width, gaps, area = of_call
        left, right = (None if x == NONE else x for x in edges[key])
        where = slice(top, bottom), slice(first, last)
        yield key, Call(*where, Starts(rows, columns), (height, width), left, right, area, bool(gaps))


def _in_pieces(rows: Tensor, columns: Tensor, keys: Tensor, most: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The starts of each call. What lies between segments is cut into pieces no longer than they are at most, for
    kernels work on all up to the longest.
    """
    sizes = [x.diff(append=x[-1:]).clamp(min=0) for x in (rows, columns)]  # between two calls as if it were nothing
    most = [_at(x, keys) for x in most]
    if bool(((sizes[0] > most[0]) | (sizes[1] > most[1])).any()):
        pieces = (-(-sizes[0] // most[0])).maximum(-(-sizes[1] // most[1])).clamp(min=1)
        which = torch.arange(len(pieces)).repeat_interleave(pieces)
        beyond = torch.arange(len(which)) - _at(pieces.cumsum(0) - pieces, which)
        starts = zip((rows, columns), most, sizes, strict=True)
        rows, columns = (_at(x, which) + (beyond * _at(m, which)).minimum(_at(n, which)) for x, m, n in starts)
        keys = _at(keys, which)
    of_calls = [n for n in keys.bincount().tolist() if n]
    return rows.to(torch.int32).split(of_calls), columns.to(torch.int32).split(of_calls)

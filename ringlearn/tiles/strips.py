"""Strips and bands: what a range of queries sees of a range of keys of the same step, in rows and columns.

A mask says in positions what queries see (``Mask.pieces``). Rows and columns that are equally far apart in position
turn that into *strips*: neighbouring rows whose interval of columns has two simple ends, each of them constant or
moving by one column a row. Neighbouring strips often are one *band*: row i sees those of the columns i + lo .. i + hi
that exist. FULL, CAUSAL and a sliding window are bands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..masks import Mask


class Strip(NamedTuple):
    """Rows start..stop-1 see the columns lo(i)..hi(i)-1, each end being constant or moving with the row."""

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


class Band(NamedTuple):
    """Row i of ``rows`` sees those of ``columns`` columns that are i + lo .. i + hi, both included."""

    rows: int
    columns: int
    lo: int
    hi: int

    @property
    def edges(self) -> tuple[int | None, int | None]:
        """left and right: row i sees the columns i + d - left .. i + d + right, where d = columns - rows.

        None where nothing is hidden on that side.
        """
        d = self.columns - self.rows
        left = None if self.lo <= 1 - self.rows else d - self.lo
        return left, None if self.hi >= self.columns - 1 else self.hi - d

    def fits(self, left: int | None, right: int | None) -> bool:
        """Whether a kernel that is told left and right, as in ``edges``, hides no more and no less than this band.

        FlashAttention takes a right of ``columns`` or more, and none where there is a left, for ``columns``: with more
        rows than columns that hides some from the first rows.
        """
        own_left, own_right = self.edges
        if left != own_left and not (own_left is None and left >= self.columns - 1):
            return False
        if right is None:
            return own_right is None and (left is None or self.columns >= self.rows - 1)
        return right < self.columns and (right == own_right or own_right is None and right >= self.rows - 1)

    @property
    def area(self) -> int:
        """How many columns all rows see together."""

        def up_to(x: int) -> int:  # how many are no farther to the right than i + x
            return _sum_of_min(x + self.rows, self.columns) - _sum_of_min(x, self.columns)

        return up_to(self.hi) - up_to(self.lo - 1) if self.lo <= self.hi else 0


def _sum_of_min(m: int, n: int) -> int:
    """min(1, n) + min(2, n) + ... + min(m, n)"""
    k = max(0, min(m, n))
    return k * (k + 1) // 2 + max(0, m - n) * n


def strips_of(mask: Mask, q: range, k: range, step: int) -> Iterator[Strip]:
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
        strip = Strip(start, stop, lo, bool(piece.lo.slope), hi, bool(piece.hi.slope))
        yield from _clip(strip, n)


def _clip(strip: Strip, n: int) -> Iterator[Strip]:
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
        part = Strip(a, b, lo, lo_moves, hi, hi_moves)
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


def strips_of_band(band: Band, row: int = 0, column: int = 0) -> list[Strip]:
    """The strips of a band whose first row and column are these."""
    left, right = (edge is not None for edge in band.edges)
    whole = Strip(0, band.rows, band.lo if left else 0, left, band.hi + 1 if right else band.columns, right)
    return [
        Strip(
            s.start + row,
            s.stop + row,
            s.lo + column - row * s.lo_moves,
            s.lo_moves,
            s.hi + column - row * s.hi_moves,
            s.hi_moves,
        )
        for s in _clip(whole, band.columns)
    ]


class Run(NamedTuple):
    """Neighbouring strips that are one band, which begins at this row and column."""

    strips: tuple[Strip, ...]
    row: int
    column: int
    band: Band


def runs(strips: list[Strip]) -> list[Run]:
    """Put neighbouring strips together as long as they are one band."""
    found: list[Run] = []
    for strip in strips:
        longer = found and _run((*found[-1].strips, strip))
        if longer:
            found[-1] = longer
        else:
            found.append(_run((strip,)))
    return [run if run.band.edges[0] is not None else _without_lo(run) for run in found]


def without_causal_part(run: Run) -> Run:
    """What is left of a band with a lower edge, from the first row on that it hides a column from.

    Above there is at most a causal edge if the band is so wide that a row sees every column.
    """
    return _run(run.strips[[s.lo_moves for s in run.strips].index(True) :])


def _without_lo(run: Run) -> Run:
    """The same run, in which a lower end that moves for a single row only does not count as moving."""
    return run._replace(strips=tuple(s._replace(lo=run.column, lo_moves=False) for s in run.strips))


def _run(strips: tuple[Strip, ...]) -> Run | None:
    """These strips as one band, or None if they are none. Ends never move to the left from one row to the next."""
    if len(strips) > 1 and strips[-2].stop == strips[-1].start and strips[-2][2:] == strips[-1][2:]:
        strips = (*strips[:-2], strips[-2]._replace(stop=strips[-1].stop))
    top, bottom = strips[0].start, strips[-1].stop
    left, right = strips[0].first(top), strips[-1].last(bottom - 1)
    lows, highs = ({getattr(s, end) for s in strips if getattr(s, end + "_moves")} for end in ("lo", "hi"))
    if len(lows) > 1 or len(highs) > 1 or any(a.stop != b.start for a, b in zip(strips, strips[1:], strict=False)):
        return None
    # Where no strip's end moves, any line does that hides nothing.
    lo, hi = min(lows, default=left + 1 - bottom), min(highs, default=right - top)
    for s in strips:
        if max(left, s.start + lo) != s.first(s.start) or max(left, s.stop - 1 + lo) != s.first(s.stop - 1):
            return None
        if min(right, s.start + hi) != s.last(s.start) or min(right, s.stop - 1 + hi) != s.last(s.stop - 1):
            return None
    shift = top - left
    return Run(strips, top, left, Band(bottom - top, right - left, lo + shift, hi - 1 + shift))

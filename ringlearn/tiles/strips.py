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
    ends = ((s, s.lo + column - row * s.lo_moves, s.hi + column - row * s.hi_moves) for s in _clip(whole, band.columns))
    return [s._replace(start=s.start + row, stop=s.stop + row, lo=lo, hi=hi) for s, lo, hi in ends]

"""The outline of a tile: a rectangle, or what its rows see of one."""

from __future__ import annotations

from matplotlib.patches import Patch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path

from ...tiles import Kind, Tile

Points = list[tuple[float, float]]


def tile_patch(
    tile: Tile, x: float, y: float, column: float = 1.0, row: float = 1.0, stairs: bool = False, **style
) -> Patch:
    """A tile as it lies in a block whose first column and row begin at (x, y), and are so wide and so high.

    stairs: along the cells that are seen, instead of a line through those on the edge. style: of the patch.
    """

    def place(points: Points) -> Points:
        return [(x + i * column, y + j * row) for i, j in points]

    if tile.kind in (Kind.FULL, Kind.PARTIAL):
        rows, columns = tile.shape
        corner = x + tile.k.start * column, y + tile.q.start * row
        return Rectangle(corner, columns * column, rows * row, **style)
    outlines = [place(_stairs(part) if stairs else _slopes(part)) for part in tile.parts or (tile,)]
    if len(outlines) == 1:
        return Polygon(outlines[0], closed=True, **style)
    return PathPatch(Path.make_compound_path(*(Path([*o, o[0]], closed=True) for o in outlines)), **style)


def _stairs(tile: Tile) -> Points:
    """The cells that are seen: the steps on the right from the top down, those on the left back up."""
    rows, columns, lo, hi = tile.band
    top, left = tile.q.start, tile.k.start
    seen = [
        (i, max(0, lo + i), min(columns, hi + i + 1)) for i in range(rows) if max(0, lo + i) < min(columns, hi + i + 1)
    ]
    right_side = [(left + b, top + i + step) for i, _, b in seen for step in (0, 1)]
    left_side = [(left + a, top + i + step) for i, a, _ in reversed(seen) for step in (1, 0)]
    return right_side + left_side


def _slopes(tile: Tile) -> Points:
    """The same with straight edges; below a causal one the triangle under the diagonal."""
    rows, columns, lo, hi = tile.band
    half = 0 if tile.kind is Kind.CAUSAL else 0.5  # a band of one diagonal has some width

    def ends(i: float) -> tuple[float, float]:
        return min(columns, max(0.0, lo - half + i)), max(0.0, min(columns, hi + half + i))

    bends = {0, rows, *(b for b in (half - lo, columns - hi - half, columns - lo + half, -hi - half) if 0 < b < rows)}
    spans = [(i, *ends(i)) for i in sorted(bends)]
    spans = [(i, a, b) for i, a, b in spans if a <= b]
    top, left = tile.q.start, tile.k.start
    return [(left + b, top + i) for i, _, b in spans] + [(left + a, top + i) for i, a, _ in reversed(spans)]

"""Shared by all pictures: figures and captions, a colour for each rank, units, the outline of a tile."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path

from ...tiles import Kind, Tile
from ...tiles.segments import Segment
from ...worlds.trace import Event, Trace
from .style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

# Neighbours differ in lightness, and the first four are four steps apart, because a printed page may be grey.
RANKS = (BLUE, ORANGE, GREEN, YELLOW, VERMILION, SKY, PURPLE, GREY)

MOST_RANKS = 64


def new(columns: int, figsize: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes in a row, closed for pyplot: a notebook shows it once, where it is returned."""
    figure, axes = plt.subplots(1, columns, figsize=figsize, **{"layout": "constrained", **options})
    plt.close(figure)
    return figure, axes


def place(ax: Axes | None, figsize: tuple[float, float], **options: Any) -> tuple[Figure, Axes]:
    """The figure and axes to draw on: the caller's, or new ones."""
    return new(1, figsize, **options) if ax is None else (ax.figure, ax)


def caption(figure: Figure, text: str, drawn: bool = True) -> Figure:
    """Write a caption below a picture; ``figure.get_supxlabel()`` returns it.

    drawn: False if the picture is part of the caller's own figure, which gets no caption.
    """
    if drawn:
        lines = textwrap.fill(text, int(figure.get_figwidth() * 14.2))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize=9, linespacing=1.35)
    return figure


def colour(rank: int, size: int) -> str:
    """The colour of a rank, the same in every picture; beyond 8 ranks a scale whose lightness rises with the rank."""
    if size <= len(RANKS):
        return RANKS[rank]
    return to_hex(matplotlib.colormaps["cividis"](rank / (size - 1)))


def pale(colour: str) -> str:
    """The same colour, mostly white."""
    return to_hex([0.78 + 0.22 * c for c in to_rgb(colour)])


def ink(background: str) -> str:
    """Black or white, whichever is read more easily on a background."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background))
    return "black" if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 else "white"


def check_trace(name: str, trace: Any) -> Trace:
    """Check that a trace has events; the traces of several processes of a distributed world are joined.

    Raises ValueError, with the remedy, if it has none.
    """
    given = trace if isinstance(trace, Sequence) else [trace]
    traces = [getattr(t, "trace", t) for t in given]  # a world will do
    for t in traces:
        if not isinstance(t, Trace):
            raise ValueError(f"{name}: expected a trace, such as world.trace after a run, got {type(t).__name__}")
    trace = Trace(all(t.simulated for t in traces), [e for t in traces for e in t])
    if not trace.events:
        raise ValueError(
            f"{name}: expected a trace with events, got an empty one; run something first, such as rl.ring_attention "
            f"on shards of this world (each run starts a new trace; one rank with nothing to compute leaves it empty)"
        )
    if world_size(trace.events) > MOST_RANKS:
        raise ValueError(
            f"{name}: expected at most {MOST_RANKS} ranks, which is what a picture can show, got "
            f"{world_size(trace.events)}; draw a smaller world: the pattern is the same"
        )
    return trace


def world_size(events: Sequence[Event]) -> int:
    """One more than the highest rank that any event names."""
    return 1 + max(max(e.rank, e.peer or 0, e.origin or 0) for e in events)


def ranks(events: Sequence[Event]) -> list[int]:
    """The ranks that have events: all in a simulated world, one in a process of a distributed world."""
    return sorted({e.rank for e in events})


def scaled(largest: float, steps: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit that is not larger than a value; the smallest one for 0."""
    return next(((size, unit) for size, unit in reversed(steps) if largest >= size), steps[0])


SECONDS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
BYTES = ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"))
FLOPS = ((1.0, "FLOP"), (1e3, "kFLOP"), (1e6, "MFLOP"), (1e9, "GFLOP"), (1e12, "TFLOP"), (1e15, "PFLOP"))


def amount(value: float, steps: Sequence[tuple[float, str]]) -> str:
    """A value with its unit, three digits.

    >>> amount(65536, BYTES), amount(1.5e-5, SECONDS), amount(0, FLOPS)
    ('64 KiB', '15 µs', '0 FLOP')
    """
    size, unit = scaled(value, steps)
    number = value / size
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def tile_patch(tile: Tile, x: float, y: float, column: float = 1.0, row: float = 1.0, **style) -> Patch:
    """The shape of a tile in a block whose corner is at (x, y), with columns and rows of the given width and height.

    Its edges are straight lines through the cells on the edge; for a causal tile, it is the triangle below the
    diagonal.  style: of the patch.
    """

    if tile.kind in (Kind.FULL, Kind.PARTIAL):
        rows, columns = tile.shape
        corner = x + tile.k.start * column, y + tile.q.start * row
        return Rectangle(corner, columns * column, rows * row, **style)
    half = 0 if tile.kind is Kind.CAUSAL else 0.5  # a band of one diagonal has some width
    outlines = [[(x + i * column, y + j * row) for i, j in _slopes(part, half)] for part in tile.segments]
    if len(outlines) == 1:
        return Polygon(outlines[0], closed=True, **style)
    return PathPatch(Path.make_compound_path(*(Path([*o, o[0]], closed=True) for o in outlines)), **style)


def _slopes(segment: Segment, half: float) -> list[tuple[float, float]]:
    top, left, (rows, columns, lo, hi) = segment

    def ends(i: float) -> tuple[float, float]:
        return min(columns, max(0.0, lo - half + i)), max(0.0, min(columns, hi + half + i))

    bends = {0, rows, *(b for b in (half - lo, columns - hi - half, columns - lo + half, -hi - half) if 0 < b < rows)}
    spans = [(i, *ends(i)) for i in sorted(bends)]
    spans = [(i, a, b) for i, a, b in spans if a <= b]
    return [(left + b, top + i) for i, _, b in spans] + [(left + a, top + i) for i, a, _ in reversed(spans)]

"""Pictures of notebook 02: the grid of score tiles, peak memory against S, and a walk over the tiles with its bytes.

The walk is the order in which the tiled forward computes: a block of queries stays on the chip, all keys and values
that it sees pass by, then the next block. Its counters are for one query head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ...costs.one_device import ACCUMULATED, tile_bytes
from ...flash import flash_forward
from ...worlds.memory import LiveBytes
from .figure import BYTES, amount
from .style import BLACK, BLUE, GREY, ORANGE, cells, plain
from .widgets import Svg, Table, explore, log_slider, slider, switch

# ---- The walk: tile by tile, with counters --------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One tile of the walk.

    queries, keys: the positions of the tile. read, written: bytes between main memory and chip so far, this tile
    included. live: bytes that lie on the chip while this tile is computed.
    """

    queries: range
    keys: range
    read: int
    written: int
    live: int


@lru_cache(typed=True)
def walk(
    S: int, block_q: int, block_k: int, *, D: int = 64, itemsize: int = 2, causal: bool = False
) -> tuple[Step, ...]:
    """The tiles of one query head in the order in which they are computed, without those that the mask hides.

    Raises ValueError unless S, block_q and block_k are at least 1.

    >>> [(step.queries, step.keys) for step in walk(4, 2, 2, causal=True)][1:]
    [(range(2, 4), range(0, 2)), (range(2, 4), range(2, 4))]
    """
    for name, value in (("S", S), ("block_q", block_q), ("block_k", block_k)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"walk: expected {name} to be an int >= 1, got {value!r}")
    steps, read, written = [], 0, 0
    for i in range(0, S, block_q):
        queries = range(i, min(S, i + block_q))
        read += len(queries) * D * itemsize
        blocks = [range(j, min(S, j + block_k)) for j in range(0, S, block_k)]
        seen = [keys for keys in blocks if not causal or keys.start <= queries[-1]]
        for keys in seen:
            read += 2 * len(keys) * D * itemsize
            if keys == seen[-1]:  # out and lse leave the chip with the last tile of their rows
                written += len(queries) * (D * itemsize + ACCUMULATED)
            live = tile_bytes(len(queries), len(keys), D, itemsize=itemsize)
            steps.append(Step(queries, keys, read, written, live))
    return tuple(steps)


def walk_table(
    S: int,
    block_q: int,
    block_k: int,
    *,
    sizes: Sequence[tuple[int, int]] = (),
    D: int = 64,
    itemsize: int = 2,
    causal: bool = False,
) -> Table:
    """What :func:`tile_walk` shows, as text: each tile with the counters, then the totals for some sizes of a tile.

    >>> walk_table(4, 2, 2, D=8, causal=True)
    tile  queries     keys   read so far     written    on chip
       1      0-1      0-1            96          40        192
       2      2-3      0-1           192          40        192
       3      2-3      2-3           256          80        192
    """
    steps = walk(S, block_q, block_k, D=D, itemsize=itemsize, causal=causal)
    n = max(7, len(f"{S - 1}-{S - 1}"))
    lines = [f"tile  {'queries':>{n}}  {'keys':>{n}}  {'read so far':>12}  {'written':>10}  {'on chip':>9}"]
    for number, step in enumerate(steps, start=1):
        lines.append(
            f"{number:4d}  {_span(step.queries):>{n}}  {_span(step.keys):>{n}}  {step.read:12,}  {step.written:10,}  "
            f"{step.live:9,}"
        )
    if sizes:
        lines += ["", f"{'B_r':>5}  {'B_c':>5}  {'tiles':>5}  {'read in all':>12}  {'most on chip':>12}"]
    for rows, columns in sizes:
        steps = walk(S, rows, columns, D=D, itemsize=itemsize, causal=causal)
        most = max(step.live for step in steps)
        lines.append(f"{rows:5d}  {columns:5d}  {len(steps):5d}  {steps[-1].read:12,}  {most:12,}")
    return Table("\n".join(lines))


def _span(positions: range) -> str:
    return f"{positions[0]}-{positions[-1]}"


# ---- Figures --------------------------------------------------------------------------------------------------------

# The states of a tile: how it looks, and what the legend says.
_STATES = {
    "done": ({"facecolor": BLUE, "edgecolor": "white"}, "done: computed, merged, gone"),
    "live": ({"facecolor": ORANGE, "edgecolor": BLACK, "hatch": "//", "linewidth": 1.6}, "live: the only scores there"),
    "to come": ({"facecolor": "#DCE9F2", "edgecolor": "white"}, "to come"),
    "never built": ({"facecolor": "white", "edgecolor": GREY, "linestyle": ":"}, "never built: hidden by the mask"),
}


def _states(S: int, block_q: int, block_k: int, number: int, causal: bool) -> list[tuple[range, range, str]]:
    """Every tile of the grid and what it is while tile ``number`` (from 1) is computed."""
    steps = walk(S, block_q, block_k, causal=causal)
    place = {(step.queries, step.keys): n for n, step in enumerate(steps, start=1)}
    found = []
    for i in range(0, S, block_q):
        for j in range(0, S, block_k):
            tile = range(i, min(S, i + block_q)), range(j, min(S, j + block_k))
            n = place.get(tile)
            state = "never built" if n is None else "done" if n < number else "live" if n == number else "to come"
            found.append((*tile, state))
    return found


def grid(ax: Axes, S: int, block_q: int, block_k: int, number: int, *, causal: bool = True) -> None:
    """The S x S scores as tiles, while tile ``number`` of the walk is computed."""
    states = _states(S, block_q, block_k, number, causal)
    for queries, keys, state in sorted(states, key=lambda tile: tile[2] == "live"):  # its frame on top
        where = {"xy": (keys.start, queries.start), "width": len(keys), "height": len(queries)}
        ax.add_patch(Rectangle(**where, **_STATES[state][0], gid=state))
    shown = [state for state in _STATES if any(state == tile[2] for tile in states)]
    ax.legend(
        handles=[Patch(**_STATES[state][0], label=_STATES[state][1]) for state in shown],
        loc="upper left", bbox_to_anchor=(-0.28, -0.17), ncols=2, frameon=False, fontsize=9,
    )  # fmt: skip
    cells(ax, S, S, "key (position)", "query (position)")
    ticks = range(0, S + 1, max(1, S // 4))
    ax.set(xticks=ticks, yticks=ticks)


def peak_bytes(attention: Callable[..., Any], S: int, *, H: int = 1, D: int = 64) -> int:
    """The most bytes alive at once while ``attention(q, k, v)`` runs, beyond q, k and v, counted on the CPU.

    >>> peak_bytes(lambda q, k, v: q @ k.mT, 128)
    65536
    """
    q, k, v = (torch.zeros(1, H, S, D) for _ in range(3))
    with torch.no_grad(), LiveBytes() as memory:
        attention(q, k, v)
    return memory.peak


def _naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return p @ v


def overview(lengths: Sequence[int] = (128, 256, 512, 1024, 2048), *, block: int = 64, D: int = 128) -> Figure:
    """Left: the tiles of a causal forward in the middle of its walk. Right: peak memory against S, naive and tiled.

    lengths: S of the points at the right, which are counted. block, D: the size of the tiles and the head dim there.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", width_ratios=[1, 1.15])
    grid(left, 1024, 128, 128, 20)
    left.set_title("The S × S scores: one tile at a time", fontsize=10)
    tiled = partial(flash_forward, block_q=block, block_k=block)
    runs = (
        ("naive: all scores at once", _naive, 2, {"color": BLACK, "marker": "s"}),
        (f"tiled: {block} × {block} scores at a time", tiled, 1, {"color": BLUE, "marker": "o"}),
    )
    for label, attention, slope, look in runs:
        peaks = [peak_bytes(attention, S, D=D) for S in lengths]
        right.loglog(lengths, peaks, linewidth=1.8, markersize=6, label=label, **look)
        guide = [peaks[-1] * (S / lengths[-1]) ** slope for S in lengths]
        right.loglog(lengths, guide, color=GREY, linewidth=1.2, linestyle=":")
        middle = len(lengths) // 2
        offset = {"xytext": (-92, 6) if slope == 2 else (10, -18), "textcoords": "offset points", "fontsize": 10}
        right.annotate(f"dotted: slope {slope}", (lengths[middle], guide[middle]), **offset)
    right.set_xticks(lengths, [f"{S:,}" for S in lengths])
    right.minorticks_off()
    low, high = right.get_ylim()
    ticks = [2**n for n in range(10, 40, 2) if low <= 2**n <= high]
    right.set_yticks(ticks, [amount(n, BYTES) for n in ticks])
    right.set(xlabel="sequence length S (tokens)", ylabel="peak memory beyond q, k, v")
    right.set_title(f"One head of {D} numbers, float32: counted", fontsize=10)
    right.legend(loc="upper left", frameon=False, fontsize=9)
    plain(right)
    return figure


# ---- The widget -----------------------------------------------------------------------------------------------------


def tile_walk(S: int = 1024, *, D: int = 64, itemsize: int = 2, causal: bool = True, block: int = 256) -> Any:
    """Sliders for the step and the size of a tile, B_r queries by B_c keys; the grid and the counters follow.

    S: a power of two, at least 64. block: the size to start with.

    Returns a widget; without ipywidgets, ``walk_table``.
    """

    def draw(step: int, rows: float, columns: float, masked: bool) -> str:
        return svg(S, round(rows), round(columns), step, D=D, itemsize=itemsize, causal=masked)

    def tiles(values: dict[str, Any]) -> int:
        return len(walk(S, round(values["rows"]), round(values["columns"]), causal=values["masked"]))

    def static() -> Table:
        sizes = [(block // 2, block), (block, block), (block, block // 2)]
        return walk_table(S, block, block, sizes=sizes, D=D, itemsize=itemsize, causal=causal)

    exponent = S.bit_length() - 1
    least = max(0, exponent - 5)  # at most 32 x 32 tiles
    controls = {
        "step": slider("tile", 1, 1, len(walk(S, block, block, causal=causal))),
        "rows": log_slider("B_r (queries)", block, least, exponent, form=".0f"),
        "columns": log_slider("B_c (keys)", block, least, exponent, form=".0f"),
        "masked": switch("causal mask", causal),
    }
    return explore(draw, static, "three sliders and a switch", controls, most={"step": tiles})


_SIDE, _LEFT, _TOP = 300, 20, 26


def svg(S: int, block_q: int, block_k: int, number: int, *, D: int, itemsize: int, causal: bool) -> str:
    """The grid and the counters while tile ``number`` (from 1) is computed, as an SVG picture."""
    steps = walk(S, block_q, block_k, D=D, itemsize=itemsize, causal=causal)
    now, all_read, scale = steps[number - 1], steps[-1].read, _SIDE / S
    picture = Svg(_LEFT + _SIDE + 340, _TOP + _SIDE + 16, f"tile {number} of {len(steps)}")
    stripes = f'<rect width="6" height="6" fill="{ORANGE}"/><rect width="2" height="6" fill="black"/>'
    turned = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    picture.shape("pattern", stripes, id="live", **turned)
    picture.text(_LEFT, _TOP - 9, "keys →")
    picture.text(0, 0, "← queries", transform=f"translate({_LEFT - 6} {_TOP + _SIDE}) rotate(-90)")
    fills = {"done": BLUE, "live": "url(#live)", "to come": "#DCE9F2", "never built": "white"}
    for queries, keys, state in _states(S, block_q, block_k, number, causal):
        edge = {"stroke": GREY, "stroke_dasharray": "2 3"} if state == "never built" else {"stroke": "white"}
        place = [_LEFT + keys.start * scale, _TOP + queries.start * scale, len(keys) * scale, len(queries) * scale]
        picture.rect(*(round(x, 1) for x in place), fill=fills[state], **edge)
    lines = [
        f"tile {number} of {len(steps)}: queries {_span(now.queries)}, keys {_span(now.keys)}",
        f"read so far: {now.read:,} bytes",
        f"in the whole walk: {all_read:,} bytes",
        f"written so far: {now.written:,} bytes",
        f"live on the chip: {now.live:,} bytes",
        f"the S × S scores: {S * S * itemsize:,} bytes",
    ]
    left = _LEFT + _SIDE + 24
    for n, line in enumerate(lines):
        picture.text(left, _TOP + 16 + 24 * n, line)
    bars = ((now.read / all_read, BLUE, "read"), (now.live / (S * S * itemsize), ORANGE, "on chip / S × S"))
    for n, (share, fill, label) in enumerate(bars):
        y = _TOP + 172 + 46 * n
        picture.text(left, y, f"{label}: {share:.0%}")
        picture.rect(left, y + 6, 260, 12, fill="#eee")
        picture.rect(left, y + 6, round(260 * min(1.0, share), 1), 12, fill=fill)
    for n, (name, fill) in enumerate(fills.items()):
        x, y = left + 140 * (n % 2), _TOP + _SIDE - 34 + 22 * (n // 2)
        picture.rect(x, y, 14, 14, fill=fill, stroke=GREY)
        picture.text(x + 20, y + 12, name)
    return str(picture)

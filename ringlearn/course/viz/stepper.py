"""The ring of notebook 03, step by step: which block a rank holds, which tile of the mask it applies, what is right.

Everything shown is read from a run on simulated ranks, 4 tokens each, and from its trace. Two switches break the ring:

    other_way    the blocks travel to rank - 1, while the program still takes them for those of (rank - step) % P
    local_mask   every block that is seen at all gets the triangle of the rank's own block, as with is_causal=True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Polygon, Rectangle
from torch import Tensor

from ...flash import attend
from ...masks import Mask, causal, full
from ...partial import Partial, identity, merge
from ...worlds.simulated import SimulatedWorld
from ...worlds.world import PerRank
from .figure import caption, colour, ink, new
from .memory import entries, stack
from .style import BLACK, BLUE, GREY, ORANGE, SERIES, VERMILION, cells, plain
from .widgets import Svg, Table, explore, slider, switch

TOKENS = 4  # of each rank
MOST_RANKS = 8
RIGHT = 1e-12  # relative norm, in float64


@dataclass(frozen=True)
class Visit:
    """One step of one rank.

    held: the rank whose keys and values are here.  taken_for: the rank whose keys the program takes them for.  used:
    the tile of the mask that was applied, bool (4, 4).  due: the tile that these keys should get.  error: relative
    norm of the error in the merged result so far.
    """

    rank: int
    step: int
    held: int
    taken_for: int
    used: tuple[tuple[bool, ...], ...]
    due: tuple[tuple[bool, ...], ...]
    error: float

    @property
    def kind(self) -> str:
        """The tile that was applied: "all", "triangle", "nothing" or "some"."""
        if all(map(all, self.used)):
            return "all"
        if not any(map(any, self.used)):
            return "nothing"
        triangle = all(seen == (j <= i) for i, line in enumerate(self.used) for j, seen in enumerate(line))
        return "triangle" if triangle else "some"

    @property
    def as_due(self) -> bool:
        return self.used == self.due

    @property
    def right(self) -> bool:
        return self.error <= RIGHT


async def _ring(comm, q, k, v, positions, mask, other_way, local_mask) -> list[tuple[int, Tensor, Partial]]:
    """For each step: whose keys this rank takes them for, the tile it applies, and the result so far."""
    P, result, steps = comm.size, identity(q.shape, q.dtype), []
    to, source_rank = (comm.rank - 1) % P, (comm.rank + 1) % P  # of the other way
    for step in range(P):
        source = (comm.rank - step) % P
        if step < P - 1 and other_way:
            arriving = comm.exchange({to: (k, v)}, {source_rank: (k.shape, v.shape)})
        elif step < P - 1:
            arriving = comm.rotate(k, v)
        mine = positions[comm.rank]
        visible = mask(mine[:, None], positions[source][None, :])
        if local_mask and visible.any():
            visible = mask(mine[:, None], mine[None, :])
        result = merge(result, attend(q, k, v, visible, q.shape[-1] ** -0.5))
        steps.append((source, visible, result))
        if step < P - 1:
            received = await arriving
            k, v = received[source_rank] if other_way else received
    return steps


@lru_cache(typed=True)
def visits(
    P: int, mask: Mask = causal, *, other_way: bool = False, local_mask: bool = False
) -> tuple[tuple[Visit, ...], ...]:
    """A run of the ring on P simulated ranks: for each rank, its steps. Raises ValueError unless 1 <= P <= 8.

    >>> [[visit.held for visit in row] for row in visits(3)]
    [[0, 2, 1], [1, 0, 2], [2, 1, 0]]
    >>> [row[-1].right for row in visits(4, other_way=True)]
    [True, False, False, True]
    """
    if isinstance(P, bool) or not isinstance(P, int) or not 1 <= P <= MOST_RANKS:
        raise ValueError(f"stepper: expected a number of ranks from 1 to {MOST_RANKS}, got {P!r}")
    S = TOKENS * P
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, S, 4, generator=numbers, dtype=torch.float64) for _ in range(3))
    world = SimulatedWorld(P, count_memory=False)
    shards = (PerRank(x.split(TOKENS, -2)) for x in (q, k, v))
    positions = list(torch.arange(S).split(TOKENS))
    ran = world.run(_ring, *shards, positions, mask, other_way, local_mask)
    seen_by = mask(torch.arange(S)[:, None], torch.arange(S)[None, :])  # (S, S)
    rows = []
    for rank, steps in enumerate(ran):
        held = [rank, *(e.origin for e in world.trace.select("recv", rank))]
        here = torch.zeros(S, dtype=torch.bool)  # the keys that have been here
        row = []
        for step, (source, used, so_far) in enumerate(steps):
            here[positions[held[step]]] = True
            due = seen_by[positions[rank]][:, positions[held[step]]]
            want = _definition(q[:, :, positions[rank]], k, v, seen_by[positions[rank]] & here)
            error = float((so_far.out - want).norm() / (want.norm() or 1.0))
            row.append(Visit(rank, step, held[step], source, _tuple(used), _tuple(due), error))
        rows.append(tuple(row))
    return tuple(rows)


def _tuple(tile: Tensor) -> tuple[tuple[bool, ...], ...]:
    return tuple(map(tuple, tile.expand(TOKENS, TOKENS).tolist()))


def _definition(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys by its definition; 0 in rows that see none."""
    weight = torch.exp(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5) * visible
    return weight @ v / weight.sum(-1, keepdim=True).clamp(min=1e-300)


# ---- As text --------------------------------------------------------------------------------------------------------


def table(P: int = 4, mask: Mask = causal, *, other_way: bool = False, local_mask: bool = False) -> Table:
    """What :func:`ring` shows, as text: for each rank and step the block that is held and the tile that is applied.

    >>> table(2)
    rank | step 0       step 1       | result
       0 | 0 triangle   1 nothing    | right
       1 | 1 triangle   0 all        | right
    """
    rows = visits(P, mask, other_way=other_way, local_mask=local_mask)
    lines = ["rank | " + "".join(f"{f'step {t}':13}" for t in range(P)) + "| result"]
    for row in rows:
        cells = "".join(f"{f'{x.held} {x.kind}' + ('' if x.as_due else ' !'):13}" for x in row)
        verdict = "right" if row[-1].right else f"wrong, off by {row[-1].error:.1f}"
        lines.append(f"{row[0].rank:4d} | {cells}| {verdict}")
    if any(not x.as_due for row in rows for x in row):
        lines.append("(! not the tile that this block should get)")
    return Table("\n".join(lines))


# ---- As a drawing: ranks in a circle, and what travels between them --------------------------------------------------


def circle(P: int = 4) -> Figure:
    """The ring itself, one panel for each step: ranks in a circle with the keys and values that each holds.

    >>> figure = circle(3)
    """
    rows = visits(P, full)
    figure, axes = new(P, (2.6 * P, 3.2), squeeze=False)
    angles = [math.radians(135 - 360 * r / P) for r in range(P)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    look = {"ha": "center", "va": "center", "zorder": 3}
    for step, ax in enumerate(axes[0]):
        for r, ((x, y), row) in enumerate(zip(places, rows)):
            held = row[step].held
            ax.add_patch(Rectangle((x - 0.4, y - 0.36), 0.8, 0.72, facecolor="white", edgecolor=BLACK, zorder=2))
            ax.text(x, y + 0.21, f"rank {r}: $q_{r}$", fontsize=9, **look)
            fill = colour(held, P)
            keys = Rectangle((x - 0.33, y - 0.28), 0.66, 0.32, facecolor=fill, edgecolor=BLACK, linewidth=0.6, zorder=2)
            keys.set_gid(f"step {step} rank {r} holds {held}")
            ax.add_patch(keys)
            ax.text(x, y - 0.12, f"$k_{held}$, $v_{held}$", fontsize=10, color=ink(fill), **look)
            if step < P - 1 and P > 1:
                arrow = {"arrowstyle": "-|>", "mutation_scale": 14, "shrinkA": 33, "shrinkB": 33, "linewidth": 1.6}
                arrow |= {"color": fill, "connectionstyle": "arc3,rad=-0.25", "zorder": 1}
                ax.add_patch(FancyArrowPatch((x, y), places[(r + 1) % P], **arrow))
        ax.set(xlim=(-1.45, 1.45), ylim=(-1.12, 1.12) if P == 4 else (-1.45, 1.45), aspect="equal")
        ax.set_title(f"step {step}", fontsize=10)
        ax.axis("off")
    words = (
        f"Each box is a rank. Its queries stay where they are. After each step but the last, every rank sends the keys "
        f"and values that it holds to the next rank, and the last rank sends to rank 0. After {P} steps, all queries "
        f"have met all keys."
    )
    return caption(figure, words)


# ---- As a figure: which step computes which tile ---------------------------------------------------------------------


def coverage(P: int = 4, mask: Mask = causal) -> Figure:
    """All P x P tiles of the scores: the number is the step in which the rank of that row meets the block.

    >>> figure = coverage(4)
    """
    rows = visits(P, mask)
    size = min(0.75 * P, 5.0)
    figure, ax = new(1, (size + 4.2, size + 1.1))
    for row in rows:
        for x in row:
            left, top = x.held, x.rank
            box = {"edgecolor": BLACK, "linewidth": 0.8}
            where = f"rank {x.rank} block {x.held} step {x.step} {x.kind}"
            fill = BLUE if x.kind == "all" else "white"
            ax.add_patch(Rectangle((left, top), 1, 1, facecolor=fill, gid=where, **box))
            if x.kind in ("triangle", "some"):
                corners = [(left, top), (left, top + 1), (left + 1, top + 1)]
                ax.add_patch(Polygon(corners, closed=True, facecolor=ORANGE, hatch="//", **box))
            style = {"color": "white" if x.kind == "all" else BLACK if x.kind == "triangle" else "0.45"}
            place = (left + 0.32, top + 0.7) if x.kind == "triangle" else (left + 0.5, top + 0.5)
            back = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.2}} if x.kind == "triangle" else {}
            ax.text(*place, str(x.step), ha="center", va="center", fontsize=13, **style, **back)
    cells(ax, P, P, "block of keys and values", "rank (its queries)", margin=0.03)
    for set_ticks in (ax.set_xticks, ax.set_yticks):
        set_ticks([i + 0.5 for i in range(P)], range(P))
    ax.tick_params(length=0)
    kinds = {x.kind for row in rows for x in row}
    handles = {
        "all": Patch(facecolor=BLUE, edgecolor=BLACK, label="all keys of the block are seen"),
        "triangle": Patch(facecolor=ORANGE, edgecolor=BLACK, hatch="//", label="each query sees keys up to its own"),
        "nothing": Patch(facecolor="white", edgecolor=BLACK, label="no key is seen: nothing to compute"),
    }
    shown = [handle for kind, handle in handles.items() if kind in kinds]
    figure.legend(handles=shown, loc="outside right upper", frameon=False, fontsize=9, title="The number is the step.")
    return figure


# ---- As a widget ----------------------------------------------------------------------------------------------------


def ring(P: int = 4, mask: Mask = causal) -> Any:
    """Two sliders, steps and ranks, and three switches: causal mask, travel the other way, local mask.

    Returns a widget; without ipywidgets, ``table(P, mask)``.
    """
    visits(P, mask)  # refuses what cannot be shown

    def draw(step: int, ranks: int, masked: bool, other_way: bool, local_mask: bool) -> str:
        rows = visits(ranks, causal if masked else full, other_way=other_way, local_mask=local_mask)
        return svg(rows, step)

    controls = {
        "step": slider("step", 0, 0, P - 1),
        "ranks": slider("ranks", P, 2, 6),
        "masked": switch("causal mask", mask != full),
        "other_way": switch("travel the other way"),
        "local_mask": switch("local mask"),
    }

    most = {"step": lambda values: values["ranks"] - 1}
    return explore(draw, lambda: table(P, mask), "two sliders and three switches", controls, most=most)


CELL, GAP, LEFT, TOP = 64, 10, 62, 40


def svg(rows: Sequence[Sequence[Visit]], step: int) -> str:
    """The steps up to ``step`` of all ranks, as an SVG picture."""
    P, pitch = len(rows), CELL + GAP
    right, below = LEFT + P * pitch + 8, TOP + P * pitch
    picture = Svg(right + 182, below + 46, f"ring of {P} ranks, step {step}")
    for t in range(P):
        middle = {"text_anchor": "middle", "font_weight": "bold" if t == step else "normal"}
        picture.text(LEFT + t * pitch + CELL / 2, TOP - 14, f"step {t}", **middle)
    picture.text(right, TOP - 14, "result so far")
    for row in rows:
        top, now = TOP + row[0].rank * pitch, row[step]
        picture.text(LEFT - 10, top + CELL / 2 + 5, f"rank {row[0].rank}", text_anchor="end")
        for x in row:
            left = LEFT + x.step * pitch
            if x.step > step:
                picture.rect(left, top, CELL, CELL, fill="none", stroke=GREY, stroke_dasharray="2 4")
            else:
                _cell(picture, x, left, top, P)
        look = {"fill": "black"} if now.right else {"fill": VERMILION, "font_weight": "bold"}
        sign = "✓ right" if now.right else f"✗ off by {now.error:.1f}"
        picture.text(right, top + CELL / 2 + 5, sign, **look)
    picture.text(LEFT, below + 14, "number: whose keys are here; filled: scores that are computed", fill="#444")
    if any(not x.as_due for row in rows for x in row if x.step <= step):
        warning = "thick dashed frame and !: not the tile that these keys should get"
        picture.text(LEFT, below + 34, warning, fill=VERMILION)
    return str(picture)


def _cell(picture: Svg, x: Visit, left: float, top: float, P: int) -> None:
    unit = CELL / TOKENS
    picture.rect(left, top, CELL, CELL, fill="#f2f2f2", stroke="#777")
    for i, line in enumerate(x.used):
        for j, visible in enumerate(line):
            if visible:
                at = left + j * unit + 0.5, top + i * unit + 0.5
                picture.rect(*at, unit - 1, unit - 1, fill=colour(x.held, P))
    if not x.as_due:
        frame = {"stroke": VERMILION, "stroke_width": 4, "stroke_dasharray": "8 4"}
        picture.rect(left, top, CELL, CELL, fill="none", **frame)
    label = f"{x.held}{'' if x.as_due else ' !'}"
    for halo in ({"stroke": "white", "stroke_width": 4, "stroke_linejoin": "round"}, {}):
        place = left + CELL / 2, top + CELL / 2 + 6
        picture.text(*place, label, size=18, text_anchor="middle", font_weight="bold", **halo)


# ---- Memory against the number of ranks -----------------------------------------------------------------------------


def memory(peaks: dict[int, dict[str, int]]) -> Figure:
    """Peak bytes of a rank, by component, for several numbers of ranks; dashed, an equal share of what P = 1 takes.

    peaks: P -> bytes by component, as ``world.memory.peak(0)`` or ``costs.ring_memory`` give them; P = 1 among them.
    Raises ValueError without P = 1.

    >>> figure = memory({1: {"q": 2**20}, 2: {"q": 2**19, "in flight": 2**18}})
    """

    if 1 not in peaks:
        raise ValueError(f"memory: expected P = 1 among the numbers of ranks, got {list(peaks)}; the others are shares")
    names = {"scores": "result of the tile", "partial results": "results: running, and of the tile"}
    looks = dict(zip(dict.fromkeys(name for peak in peaks.values() for name in peak), SERIES))
    figure, ax = new(1, (8.5, 3.8))
    at, whole, highest = range(len(peaks)), sum(peaks[1].values()) / 2**20, 0.0
    for x, (P, peak) in enumerate(peaks.items()):
        height = stack(ax, x, peak, looks, 2**20, width=0.55, gid=f"P {P}", edgecolor="white")
        ax.plot([x - 0.4, x + 0.4], [whole / P] * 2, color=BLACK, linestyle="--", linewidth=1.5)
        ax.text(x, max(height, whole / P) + 0.02 * whole, f"{height:.1f}", ha="center", va="bottom", fontsize=10)
        highest = max(highest, height)
    (share,) = ax.plot([], [], color=BLACK, linestyle="--", linewidth=1.5, label="1/P of what P = 1 takes")
    ax.set_xticks(at, [f"{P}" for P in peaks])
    ax.set(xlabel="ranks P", ylabel="peak of a rank (MiB)", ylim=(0, 1.15 * max(highest, whole)))
    ax.legend(handles=[share, *entries(looks, names, edgecolor="white")], loc="upper right", frameon=False, fontsize=9)
    plain(ax)
    return figure

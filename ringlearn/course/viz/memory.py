"""Memory as stacked bars: what fills each rank at its fullest moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...worlds.memory import Memory
from .figure import BYTES, amount, caption, new, scaled
from .style import BLACK, SERIES, plain

# From the bottom up: what a rank is given, what travels, what it makes.
COMPONENTS = ("q", "k, v", "other inputs", "in flight", "partial results", "scores")
MOST_BARS = 40


def memory_strip(memory: Memory | Sequence[Memory]) -> Figure:
    """Peak bytes of each rank, stacked by component; several worlds stand side by side.

    memory: ``world.memory`` of a simulated world, or a list of them, for instance for P = 1, 2, 4 and 8 ranks; the
    worlds themselves are accepted too. With more than 40 ranks in all, only the fullest rank of each world is shown.

    Raises ValueError if nothing was counted.

    >>> import torch, ringlearn as rl
    >>> worlds = [rl.SimulatedWorld(P) for P in (1, 2, 4)]
    >>> for world in worlds:
    ...     out = rl.ring_attention(*world.shard(*(torch.randn(1, 1, 64, 8) for _ in range(3))))
    >>> figure = rl.viz.memory_strip(worlds)
    """
    memories = [_memory(m) for m in (memory if isinstance(memory, Sequence) else [memory])]
    if not memories:
        raise ValueError("memory_strip: expected the memory of at least one world, got an empty list")
    few = sum(m.size for m in memories) <= MOST_BARS
    groups = [list(range(m.size)) if few else [max(range(m.size), key=m.peak_bytes)] for m in memories]
    bars = sum(map(len, groups))
    unit, name = scaled(max(m.peak_bytes(r) for m, group in zip(memories, groups) for r in group), BYTES)
    figure, ax = new(1, (max(6.2, 0.42 * (bars + len(groups)) + 2.2), 4.6))
    found = {c for m, group in zip(memories, groups) for r in group for c in m.peak(r)}
    looks = dict(zip([*COMPONENTS, *sorted(found - set(COMPONENTS))], SERIES + SERIES))
    looks = {component: look for component, look in looks.items() if component in found}
    x, placed = 0.0, []  # each world, and where its bars stand: {rank: x}
    for m, group in zip(memories, groups):
        places = {rank: x + i for i, rank in enumerate(group)}
        for rank, at in places.items():
            look = {"width": 0.84, "gid": f"P {m.size} rank {rank}", "edgecolor": "white", "linewidth": 0.6}
            total = stack(ax, at, m.peak(rank), looks, unit, **look)
            if bars <= 16:
                style = {"ha": "center", "fontsize": 8, "textcoords": "offset points", "zorder": 5}
                style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                ax.annotate(f"{total:.3g}", (at, total), (0, 4), **style)
        where = {"xy": (mean(places.values()), 0), "xycoords": ("data", "axes fraction"), "xytext": (0, -18)}
        ax.annotate(f"P = {m.size}", **where, textcoords="offset points", ha="center", va="top", fontsize=9)
        placed.append((m, places))
        x += len(group) + 0.8
    _compare(ax, placed, unit)
    ticks = [(at, rank) for _, places in placed for rank, at in places.items()]
    ax.set_xticks([at for at, _ in ticks], [rank for _, rank in ticks], fontsize=8)
    spare = max(0, 4 - bars) / 2  # one bar alone is not as wide as the figure
    ax.set_xlim(-0.7 - spare, ticks[-1][0] + 0.7 + spare)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("rank" if few else "fullest rank of each world", labelpad=18)
    ax.set_ylabel(f"peak memory of the rank ({name})")
    ax.set_title("Memory at each rank's fullest moment", fontsize=11)
    ax.margins(y=0.08)
    plain(ax)
    handles, labels = ax.get_legend_handles_labels()
    stacked = entries(looks, edgecolor="white")[::-1]
    ax.legend(handles=stacked + handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    return caption(figure, _what_to_see(memories, compared=bool(handles)))


def _memory(given: Any) -> Memory:
    memory = getattr(given, "memory", given)
    if not isinstance(memory, Memory):
        raise ValueError(
            f"memory_strip: expected world.memory of a simulated world, or a list of them, got {type(given).__name__}"
        )
    if not memory.enabled:
        raise ValueError(
            "memory_strip: this world does not count its memory; make it with SimulatedWorld(P, count_memory=True)"
        )
    if not any(memory.peak_bytes(rank) for rank in range(memory.size)):
        raise ValueError(
            "memory_strip: expected a memory with something in it, got an empty one; run something in this world "
            "first, such as rl.ring_attention on its shards"
        )
    return memory


Looks = Mapping[str, tuple[str, str]]  # component -> colour and hatch, in the order in which they are stacked


def stack(
    ax: Axes, x: float, table: Mapping[str, float], looks: Looks, unit: float, *, width: float, gid: str, **style: Any
) -> float:
    """Draw a table of bytes as one bar, component upon component from the bottom up; returns its height in units."""
    top = 0.0
    for component, (colour, hatch) in looks.items():
        height = table.get(component, 0) / unit
        if height:
            ax.bar(x, height, width, top, color=colour, hatch=hatch, gid=f"{gid} {component}", **style)
            top += height
    return top


def entries(looks: Looks, names: Mapping[str, str] | None = None, **style: Any) -> list[Patch]:
    """The legend of such bars, from the bottom up. names: what a component is called, if not by its own name."""
    return [
        Patch(facecolor=colour, hatch=hatch, label=(names or {}).get(component, component), **style)
        for component, (colour, hatch) in looks.items()
    ]


def _inputs(m: Memory) -> int:
    return sum(m.peak(rank).get(c, 0) for rank in range(m.size) for c in ("q", "k, v", "other inputs"))


def _compare(ax: Axes, placed: Sequence[tuple[Memory, Mapping[int, float]]], unit: float) -> None:
    """Mark 1/P of the first world that has several ranks, provided that all worlds hold the same tensors."""
    several = [(m, list(places.values())) for m, places in placed if m.size > 1]
    if len({m.size for m, _ in several}) < 2 or len({_inputs(m) for m, _ in several}) > 1:
        return
    first, _ = several[0]
    level = max(first.peak_bytes(rank) for rank in range(first.size)) * first.size / unit
    for m, at in several:
        label = f"1/P, from P = {first.size}" if m is first else None
        ends = at[0] - 0.55, at[-1] + 0.55
        ax.plot(ends, [level / m.size] * 2, color=BLACK, linestyle="--", linewidth=1.2, label=label)


def _what_to_see(memories: list[Memory], compared: bool) -> str:
    peaks = [max(m.peak_bytes(rank) for rank in range(m.size)) for m in memories]
    text = "Each bar is one rank at the moment when it held most. "
    if len(memories) > 1:
        each = (f"{amount(peak, BYTES)} at P = {m.size}" for m, peak in zip(memories, peaks))
        text += f"The fullest rank: {', '.join(each)}. "
        if compared:
            text += "Dashed: what the fullest rank would hold if its memory shrank as 1/P. "
    return text + (
        "Counted is every tensor that torch sees; scratch inside a fused kernel is not seen, and not in the picture."
    )

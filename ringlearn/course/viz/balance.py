"""Pictures of notebook 07: when each rank of a ring works, under several layouts; and which rows its hops carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ...attention.needed import route_of
from ...costs.balance import Balance, ring_balance
from ...layouts import Layout, contiguous, striped, zigzag, zigzag_per_document
from ...masks import Mask, causal, documents, sliding_window
from .figure import colour, ink, new
from .style import BLACK, WAITS
from .widgets import Table, explore, log_slider, menu, slider

MOST_NUMBERED = 8  # ranks; of more, bars are too small for numbers
PLAIN = (contiguous, striped, zigzag)
IDLE = {**WAITS, "linewidth": 0.6}


def pace(balances: Sequence[Balance], names: Sequence[str] | None = None) -> Figure:
    """For each layout: when each rank computes with whose keys, and (hatched) when it has nothing to compute.

    Time is in even shares: what a rank would take if all had the same work. It is simulated, without message times.
    names: titles in place of the layouts'.

    >>> import ringlearn as rl
    >>> figure = pace([ring_balance(rl.causal, 64, 4, layout) for layout in (rl.contiguous, rl.zigzag)])
    """
    P, n = len(balances[0].scores), len(balances)
    figure, axes = new(n, (9, 0.9 + 0.2 * max(P, 5)), squeeze=False, sharex=True, sharey=True)
    for ax, balance, name in zip(axes[0], balances, names or [b.layout for b in balances], strict=True):
        _panel(ax, balance, name, P, fontsize=7 if n > 3 else 8)
    longest = max(balance.ratio for balance in balances)
    axes[0][0].set(xlim=(0, 1.02 * longest), ylim=(P - 0.4, -0.6))
    axes[0][0].set_yticks(range(P), [f"rank {r}" for r in range(P)], fontsize=8)
    figure.supxlabel("time in even shares (simulated, messages take no time)", fontsize=9)
    whose = "numbered rank" if P <= MOST_NUMBERED else "rank of this colour"
    entries = [Patch(facecolor=colour(0, P), edgecolor=BLACK, label=f"computing with the keys of the {whose}")]
    entries.append(Patch(**IDLE, label="nothing to compute"))
    figure.legend(handles=entries, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    return figure


def _panel(ax: Axes, balance: Balance, name: object, P: int, fontsize: int) -> None:
    mean = balance.mean or 1.0
    for rank, row in enumerate(balance.times):
        ax.add_patch(Rectangle((0, rank - 0.4), balance.makespan / mean, 0.8, **IDLE, gid=f"idle {rank}"))
        for step, (start, stop) in enumerate(row):
            if stop == start:
                continue
            origin = (rank - step) % P
            fill = colour(origin, P)
            where = {"xy": (start / mean, rank - 0.4), "width": (stop - start) / mean, "height": 0.8}
            ax.add_patch(Rectangle(**where, facecolor=fill, edgecolor=BLACK, linewidth=0.4, gid=f"work {rank} {step}"))
            if (stop - start) / mean > 0.1 and P <= MOST_NUMBERED:
                at = (start + stop) / 2 / mean
                plate = {"facecolor": fill, "edgecolor": "none", "pad": 0.6}  # or the dashed line runs through it
                ax.text(at, rank, str(origin), ha="center", va="center", fontsize=fontsize, color=ink(fill), bbox=plate)
    ax.axvline(1.0, color=BLACK, linewidth=1.2, linestyle="--")
    ax.set_title(f"{name}: {balance.ratio:.2f}", fontsize=9, loc="left")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def rows_carried(mask: Mask, S: int, P: int, layouts: Sequence[Layout]) -> Figure:
    """Which rows of every rank's keys each hop of a ring carries, for each layout.

    One row of cells for each rank and hop; a cell is one row of keys, in local order, and pale if it does not travel.

    >>> import ringlearn as rl
    >>> figure = rows_carried(rl.causal & rl.sliding_window(5), 64, 4, [rl.contiguous, rl.zigzag])
    """
    figure, axes = new(len(layouts), (9, 0.6 + 0.17 * P * P), squeeze=False)
    for ax, layout in zip(axes[0], layouts, strict=True):
        ranges = layout.ranges(S, P)
        route, labels = route_of(mask, ranges, ranges), {}
        for rank, hop in ((r, t) for r in range(P) for t in range(1, P)):
            y = rank * (P - 0.4) + hop - 1
            labels[y + 0.4] = f"rank {rank}'s keys, hop {hop}" if ax is axes[0][0] else ""
            travelling = {row for start, stop in route.rows(rank, hop) for row in range(start, stop)}
            for row in range(sum(map(len, ranges[rank]))):
                fill = colour(rank, P) if row in travelling else "0.93"
                ax.add_patch(Rectangle((row, y), 0.9, 0.8, facecolor=fill, gid=f"{row in travelling} {rank} {hop}"))
        ax.set(xlim=(-0.5, -(-S // P) + 0.5), ylim=(max(labels) + 0.8, -0.4), xlabel="row of keys")
        ax.set_yticks(list(labels), list(labels.values()), fontsize=7)
        ax.set_title(str(layout), fontsize=9, loc="left")
        ax.spines[:].set_visible(False)
        ax.tick_params(axis="y", length=0)
    return figure


def scene(kind: str, lengths: Sequence[int], width: int) -> tuple[Mask, tuple[Layout, ...]]:
    """A causal mask alone, with a window of ``width``, or within documents; and the layouts that can hold it."""
    if kind == "causal":
        return causal, PLAIN
    if kind == "causal window":
        return causal & sliding_window(width), PLAIN
    return causal & documents(lengths), (*PLAIN, zigzag_per_document(lengths))


KINDS = ("causal", "causal window", "causal documents")


def explorer_table(lengths: Sequence[int], P: int = 8, width: int = 4096) -> Table:
    """The explorer as text: for each mask and layout, how long a ring takes, and what is uneven.

    lengths: of the packed documents; their sum is the sequence.
    """
    S = sum(lengths)
    lines = [f"{S:,} tokens on {P} ranks; window {width:,}; {len(lengths)} documents", ""]
    lines += [f"{'mask':16}  {'layout':19}  time  busiest  worst step"]
    for kind in KINDS:
        mask, layouts = scene(kind, lengths, width)
        for layout in layouts:
            b = ring_balance(mask, S, P, layout, visible=True)
            row = f"{b.ratio:4.2f}  {b.busiest / b.mean:7.2f}  {max(b.per_step):10.2f}"
            lines.append(f"{kind:16}  {layout!s:19}  {row}")
    lines += [
        "",
        "In all columns 1.00 is even. time: of the whole ring, in even shares.",
        "busiest: the work of the busiest rank, in even shares.",
        "worst step: in the least even step, the most work of a rank, divided by the mean of that step.",
    ]
    return Table("\n".join(lines))


def explorer(lengths: Sequence[int]) -> Any:
    """A menu of masks and two sliders, ranks and the window's width; the pace of each layout follows them.

    Returns a widget; without ipywidgets, ``explorer_table``.
    """

    def draw(kind: str, ranks: int, width: float) -> Figure:
        mask, layouts = scene(kind, lengths, round(width))
        return pace([ring_balance(mask, sum(lengths), ranks, x, visible=True) for x in layouts])

    controls = {
        "kind": menu("mask", KINDS, "causal window"),
        "ranks": slider("ranks", 8, 2, 16),
        "width": log_slider("window (tokens)", 4096, 7, 16),
    }
    summary = "a choice of masks, two sliders and a picture"
    idle = {"width": lambda values: values["kind"] != "causal window"}
    return explore(draw, lambda: explorer_table(lengths), summary, controls, idle=idle)

"""Pictures of notebook 04: which sums cross ranks, the journey of a block, two orders of awaits, what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from ...worlds.trace import Trace
from .figure import BYTES, caption, check_trace, colour, ink, new, pale, ranks, scaled
from .gantt import timeline
from .memory import entries, stack
from .style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, plain

# Component: (colour, hatch), from the bottom up; and what the legend calls it.
COMPONENTS = {
    "q": (BLUE, ""),
    "k, v": (SKY, "\\\\"),
    "other inputs": (GREEN, ".."),
    "in flight": (VERMILION, "xx"),
    "partial results": (ORANGE, "//"),
    "scores": (PURPLE, "oo"),
}
NAMES = {
    "other inputs": "dout, out, lse",
    "partial results": "sums: out, lse or dq, dk, dv",
    "scores": "inside the kernel",
}


def two_sums(dq: Sequence[Sequence[float]], dv: Sequence[Sequence[float]]) -> Figure:
    """Contributions to dq beside those to dv, rank by block: dq adds along a row, on one rank, dv down a column.

    dq, dv: [rank][block], what the queries of a rank and the keys of a block add.

    >>> figure = two_sums([[1.0, 0.0], [0.5, 2.0]], [[3.0, 0.0], [1.0, 1.0]])
    """
    P = len(dq)
    figure, axes = new(2, (8.6, 0.62 * P + 1.5))
    for ax, name, table in zip(axes, ("dq", "dv"), (dq, dv), strict=True):
        for r, row in enumerate(table):
            for b, number in enumerate(row):
                fill = pale(colour(r if name == "dq" else b, P)) if number else "white"
                ax.add_patch(Rectangle((b - 0.5, r - 0.5), 1, 1, facecolor=fill, edgecolor="0.4", linewidth=0.8))
                ax.text(b, r, f"{number:g}", ha="center", va="center", fontsize=10, color="black" if number else "0.6")
        for i in range(P):
            along = sum(table[i]) if name == "dq" else sum(row[i] for row in table)
            start, end = ((P - 0.5, i), (P + 0.05, i)) if name == "dq" else ((i, P - 0.5), (i, P + 0.05))
            _arrow(ax, start, end, "black", "-", shrink=0)
            at = (P + 0.1, i) if name == "dq" else (i, P + 0.3)
            ax.text(*at, f"{along:g}", ha="left" if name == "dq" else "center", va="center", fontweight="bold")
        ax.set(xlim=(-0.55, P + 0.7), ylim=(P + 0.55, -0.55))
        ax.set_xticks(range(P), [f"block {b}" for b in range(P)])
        ax.set_yticks(range(P), [f"rank {r}" for r in range(P)])
        ax.xaxis.tick_top()
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        what = "along the row: it stays" if name == "dq" else "down the column: it must travel"
        ax.set_title(f"{name} adds {what}", fontsize=11, loc="left")
    return figure


def holders(trace: Trace) -> list[list[int]]:
    """holders(trace)[block][step]: the rank that computes with a block in a step, from the order of compute events."""
    trace = check_trace("journey", trace)
    order = {rank: [] for rank in ranks(trace.events)}
    for e in trace.select("compute"):
        if e.origin is not None and e.origin not in order[e.rank]:
            order[e.rank].append(e.origin)
    P = len(order)
    if any(sorted(blocks) != list(range(P)) for blocks in order.values()):
        raise ValueError(
            "journey: expected the trace of a ring in which every rank computes with every block, got one in which "
            "some do not; run it without a mask, such as rl.ring_attention(q, k, v) and its backward"
        )
    return [[next(r for r in order if order[r][step] == block) for step in range(P)] for block in range(P)]


def journey(trace: Trace, block: int = 0) -> Figure:
    """Step by rank, for one block: circles are k, v; boxes are dk, dv with the ranks that have contributed.

    trace: of the backward of a ring without a mask: ``world.trace`` after ``published_ring.gradients``, or after the
    ``.backward()`` of ``ring_attention``. The circles stand where a rank computes with the block, joined where it sends
    the block on; a box follows wherever the rank sent a message of gradients after that.
    Raises ValueError for a trace of something else, or a block that is not there.

    >>> import torch, ringlearn as rl
    >>> from ringlearn.course.published_ring import gradients
    >>> world = rl.SimulatedWorld(3)
    >>> grads = gradients(world, *(torch.randn(1, 1, 6, 4) for _ in range(4)))
    >>> figure = journey(world.trace, block=1)
    """
    where = holders(trace)
    P = len(where)
    if not 0 <= block < P:
        raise ValueError(f"journey: expected a block in 0..{P - 1}, got {block!r}")
    path = where[block]
    hops = len([e for e in trace.select("send", path[0]) if e.made and e.name.startswith("rotate")])
    passed_on = {(e.rank, e.peer) for e in trace.select("send") if e.origin == block and not e.made}
    figure, ax = new(1, (8.6, 0.62 * P + 1.7))
    fill = colour(block, P)
    for step, rank in enumerate(path):
        ax.axvspan(step - 0.22, step + 0.72, color="0.95", zorder=0)
        if step < P - 1 and (rank, path[step + 1]) in passed_on:
            _arrow(ax, (step, rank), (step + 1, path[step + 1]), fill, "-")
        ax.plot(step, rank, "o", markersize=25, color=fill, markeredgecolor="black", zorder=3)
        ax.text(step, rank, "k, v", ha="center", va="center", fontsize=8, color=ink(fill), zorder=4)
        _box(ax, step + 0.5, rank, " ".join(map(str, path[: step + 1])))
        if step < hops:
            target = path[step + 1] if step < P - 1 else path[0]
            _arrow(ax, (step + 0.5, rank), (step + 1.5, target), "black", "--")
    after = hops == P > 1  # a hop after the last step
    if after:
        _box(ax, P + 0.5, path[0], " ".join(map(str, path)))
    if after or path[-1] == block:
        ax.text(P - 0.5 + after, block + 0.42, "home", ha="center", va="center", fontsize=9, fontweight="bold")
    ax.set(xlim=(-0.45, P + 0.05 + after), ylim=(P - 0.4, -0.6))
    ticks = [(step + 0.25, f"step {step}") for step in range(P)] + [(P + 0.5, "after")] * after
    ax.set_xticks(*map(list, zip(*ticks, strict=True)))
    ax.set_yticks(range(P), [f"rank {r}" for r in range(P)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(f"Block {block} in the backward of a ring of {P}", fontsize=11, loc="left")
    return caption(
        figure,
        f"Follow block {block} from left to right. A circle is a rank that computes with its k, v, which hop along the "
        "solid arrows. A box is the sum of its dk, dv so far, and names the ranks whose contributions are in it. It "
        "makes each hop along the dashed arrows one step later than the keys.",
    )


def _arrow(ax, start, end, color, style, shrink=13) -> None:
    curve = 0.0 if end[1] >= start[1] else 0.12
    arrow = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=13, linestyle=style, linewidth=1.6, color=color,
        shrinkA=shrink, shrinkB=shrink, zorder=2, connectionstyle=f"arc3,rad={curve}",
    )  # fmt: skip
    ax.add_patch(arrow)


def _box(ax, x, y, text) -> None:
    ax.text(
        x, y, f"dk, dv\n{text}", ha="center", va="center", fontsize=7.5, zorder=3,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": GREY},
    )  # fmt: skip


def two_orders(traces: Mapping[str, Trace], rank: int = 0) -> Figure:
    """What one rank does in two or more runs, one above the other on one time axis.

    traces: title -> trace. Raises ValueError for a trace without events.

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(2)
    >>> out = rl.ring_attention(*world.shard(*(torch.randn(1, 1, 16, 4) for _ in range(3))))
    >>> figure = two_orders({"a ring": world.trace})
    """
    figure, axes = plt.subplots(len(traces), 1, figsize=(9, 1.95 * len(traces)), layout="constrained", squeeze=False)
    plt.close(figure)
    for ax, (title, trace) in zip(axes[:, 0], traces.items(), strict=True):
        trace = check_trace("two_orders", trace)
        timeline(Trace(trace.simulated, trace.select(rank=rank)), ax=ax)
        for note in list(ax.texts):
            if note.get_text().startswith("rank "):
                note.remove()
        ax.set_title(f"{title}, rank {rank}, simulated", fontsize=10, loc="left")
        if ax is not axes[-1, 0]:
            ax.set_xlabel("")
    widest = max(ax.get_xlim()[1] for ax in axes[:, 0])
    for ax in axes[:, 0]:
        ax.set_xlim(ax.get_xlim()[0], widest)
    return figure


def memory_bars(tables: Mapping[str, Mapping[int, Mapping[str, int]]]) -> Figure:
    """Peak bytes of a rank, a bar for each number of ranks, stacked by component; dashed: the first bar divided by P.

    tables: title -> number of ranks -> component -> bytes, as ``costs.ring_memory`` or ``world.memory.peak`` gives it.

    >>> from ringlearn.costs import ring_memory
    >>> figure = memory_bars({"forward": {P: ring_memory(64, P, 2, 1, 8) for P in (1, 2, 4)}})
    """
    figure, axes = new(len(tables), (9, 3.9), squeeze=False)
    totals = [sum(table.values()) for by_ranks in tables.values() for table in by_ranks.values()]
    unit, name = scaled(max(totals), BYTES)
    used = {c for by_ranks in tables.values() for table in by_ranks.values() for c in table}
    looks, edge = {c: look for c, look in COMPONENTS.items() if c in used}, {"edgecolor": "black", "linewidth": 0.5}
    for ax, (title, by_ranks) in zip(axes[0], tables.items(), strict=True):
        first = sum(next(iter(by_ranks.values())).values())
        for x, (P, table) in enumerate(by_ranks.items()):
            total = stack(ax, x, table, looks, unit, width=0.62, gid=f"{title} {P}", **edge)
            ax.text(x, total, f"{total:.1f}", ha="center", va="bottom", fontsize=9)
            ax.plot([x - 0.42, x + 0.42], [first / unit / P] * 2, color="black", linestyle="--", linewidth=1.4)
        ax.set_xticks(range(len(by_ranks)), [f"P = {P}" for P in by_ranks])
        ax.set_title(title, fontsize=11, loc="left")
        ax.set_ylim(0, 1.12 * max(sum(t.values()) for t in by_ranks.values()) / unit)
        plain(ax)
    axes[0, 0].set_ylabel(f"peak of one rank ({name})")
    axes[0, -1].legend(handles=entries(looks, NAMES, **edge), fontsize=8.5, frameon=False, reverse=True)
    return figure

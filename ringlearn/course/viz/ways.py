"""Pictures of notebook 08: what each way to split attention gives to a rank, and what it costs, with sliders.

Numbers come from ringlearn/costs/compare.py: bytes and memory are exact, times are predicted by its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullFormatter

from ...attention import double_ring_attention, ring_attention
from ...attention.ulysses import head_plan
from ...costs.compare import Problem, Row, compare
from ...worlds.simulated import SimulatedWorld
from .figure import BYTES, SECONDS, amount, caption, colour, ink, new, scaled
from .style import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, cells, lanes
from .widgets import Table, explore, log_slider, menu, slider

KINDS = ("forward", "forward_backward")  # as the bench calls what it times
DEFAULT = Problem(S=131_072, shape=(2, 8), H=32, G=8, D=128, outer_bandwidth=50e9)

# ---- Who computes what ----------------------------------------------------------------------------------------------


def shares(H: int = 8, nodes: int = 2, places: int = 2) -> Figure:
    """Which outputs each rank computes, heads by tokens, when tokens are split, or heads, or both.

    H: heads.  nodes, places: ranks are nodes x places.

    >>> figure = shares()
    """
    P = nodes * places
    figure, axes = new(3, (9, 2.9), sharey=True)
    meshes = {  # parts of the tokens by parts of the heads
        "all-gather, ring: by tokens": (P, 1),
        "Ulysses: by heads": (1, P),
        "hybrid: by both": (nodes, places),
    }
    for ax, (title, (of_tokens, of_heads)) in zip(axes, meshes.items(), strict=True):
        for rank in range(P):
            part, place = divmod(rank, of_heads)
            heads = [h for mine, _ in head_plan(H, H, of_heads)[place] for h in mine]
            _part(ax, rank, P, part / of_tokens, 1 / of_tokens, heads)
        ax.set(xlim=(0, 1), ylim=(H, 0))
        ax.set_xticks([0, 1], ["first", "last"])
        for label, side in zip(ax.get_xticklabels(), ("left", "right"), strict=True):
            label.set_ha(side)
        ax.set_xlabel("token")
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    axes[0].set_yticks([h + 0.5 for h in range(H)], range(H), fontsize=8)
    axes[0].set_ylabel("head")
    return figure


def _part(ax: Axes, rank: int, P: int, left: float, width: float, heads: Sequence[int]) -> None:
    if not heads:
        return
    fill = colour(rank, P)
    look = {"facecolor": fill, "edgecolor": BLACK, "linewidth": 0.8, "gid": f"rank {rank}"}
    ax.add_patch(Rectangle((left, heads[0]), width, len(heads), **look))
    for h in heads[1:]:
        ax.plot([left, left + width], [h, h], color=ink(fill), linewidth=0.4, alpha=0.5)
    where = left + width / 2, heads[0] + len(heads) / 2
    style = {"facecolor": fill, "edgecolor": "none", "pad": 1}
    ax.text(*where, f"rank {rank}", ha="center", va="center", fontsize=8, color=ink(fill), bbox=style)


# ---- What travels ---------------------------------------------------------------------------------------------------


def trade(H: int = 8, G: int = 4, P: int = 4) -> Figure:
    """Ulysses' two all-to-alls: who holds which heads of which tokens, and what each rank sends to which other rank.

    H, G, P: query heads, key/value heads, ranks. The head plan is the library's.

    >>> figure = trade()
    """
    plan = head_plan(H, G, P)
    of_q = [(rank, [h for heads, _ in mine for h in heads]) for rank, mine in enumerate(plan)]
    of_k = [(rank, [g for _, g in mine]) for rank, mine in enumerate(plan)]
    figure, axes = new(3, (9, 4.1))
    titles = ("q, k, v before", "q, k, v after the first all-to-all", "out after the second")
    for number, (ax, title) in enumerate(zip(axes, titles, strict=True)):
        top, names = 0.0, []
        for name, ranks in (("q", of_q), ("k, v", of_k)) if number < 2 else (("out", of_q),):
            for rank, heads in ranks:
                for part in range(P):
                    _block(ax, number, name, rank, part, top, len(heads), P)
                names += [(top + i + 0.5, f"{name} {h}") for i, h in enumerate(heads)]
                top += len(heads)
            top += 0.6
        ax.set(xlim=(0, P), ylim=(H + 0.6 + sum(len(heads) for _, heads in of_k), 0))
        ax.set_xticks([part + 0.5 for part in range(P)], [f"tokens\nof {part}" for part in range(P)], fontsize=8)
        ax.set_yticks([y for y, _ in names], [name for _, name in names], fontsize=7)
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    words = (
        "The colour of a block says which rank holds it. Rows are heads, and columns are tokens. Left: each rank holds "
        "its own tokens, a column; the label says to which rank a block goes. Middle: each rank holds all tokens of "
        "its heads, a row, and computes attention; the label says from which rank a block came. Right: the outputs are "
        "back on the ranks that hold their tokens."
    )
    return caption(figure, words)


def _block(ax: Axes, number: int, name: str, rank: int, part: int, top: float, heads: int, P: int) -> None:
    """The heads that the plan gives to a rank, of the tokens of a part: before (0), between (1) and after (2)."""
    if not heads:
        return
    fill = colour(rank if number == 1 else part, P)
    word = "stays" if rank == part else (f"to {rank}", f"from {part}", f"from {rank}")[number]
    look = {"facecolor": fill, "edgecolor": BLACK, "linewidth": 0.8, "gid": f"{number} {name}: {rank}, {part}"}
    ax.add_patch(Rectangle((part, top), 1, heads, **look))
    ax.text(part + 0.5, top + heads / 2, word, ha="center", va="center", fontsize=7.5, color=ink(fill))


def rings(nodes: int = 2, places: int = 4) -> Figure:
    """One ring over all ranks beside a double ring: whose keys each rank computes with, step by step, from traces.

    nodes, places: ranks are nodes x places.

    >>> figure = rings()
    """
    P = nodes * places
    figure, axes = new(2, (9, 3.9), sharey=True)
    ways = {"one ring": (ring_attention, P), "double ring": (double_ring_attention, (nodes, places))}
    for ax, (title, (attention, shape)) in zip(axes, ways.items(), strict=True):
        world = SimulatedWorld(shape, device="meta", count_memory=False)
        attention(*world.shard(*(torch.empty(1, 1, 4 * P, 4, device="meta") for _ in range(3))))
        for rank in range(P):
            step, came = 0, ""
            for event in world.trace.select(rank=rank):
                if event.kind == "recv" and not came:
                    came = "across" if event.peer // places != rank // places else ""
                elif event.kind == "compute":
                    _keys(ax, rank, step, event.origin, bool(came), P)
                    step, came = step + 1, ""
        for node in range(1, nodes):
            ax.axhline(node * places, color=BLACK, linewidth=1.5)
        cells(ax, P, P, "step", "rank", margin=0.05)
        ax.set_xticks([i + 0.5 for i in range(P)], range(P))
        ax.set_yticks([i + 0.5 for i in range(P)], range(P))
        ax.tick_params(length=0)
        ax.set_title(title, fontsize=10, loc="left")
    words = (
        f"A number and its colour say whose keys and values a rank computes with. {places} ranks make a node; the "
        "black line is the border. Thick frames mark keys that have just crossed it: in one ring, for the first rank "
        "of each node in every step but the first; in the double ring, for all ranks at once, after a whole turn "
        "inside the node."
    )
    return caption(figure, words)


def _keys(ax: Axes, rank: int, step: int, origin: int, crossed: bool, P: int) -> None:
    fill, gap = colour(origin, P), 0.08
    look = {"facecolor": fill, "edgecolor": BLACK, "linewidth": 2.6 if crossed else 0.5}
    name = f"{rank} {step} {origin}" + " across" * crossed
    ax.add_patch(Rectangle((step + gap, rank + gap), 1 - 2 * gap, 1 - 2 * gap, gid=name, **look))
    ax.text(step + 0.5, rank + 0.5, str(origin), ha="center", va="center", fontsize=9, color=ink(fill))


# ---- What it costs --------------------------------------------------------------------------------------------------


def _said(problem: Problem) -> str:
    nodes, places = problem.shape
    ranks = f"{places} rank{'s' * (places > 1)}" if nodes == 1 else f"{nodes} x {places} ranks"
    links = f"{problem.bandwidth / 1e9:.3g} GB/s" + (f", {problem.across / 1e9:.3g} across" if nodes > 1 else "")
    return f"{problem.S:,} tokens, H = {problem.H}, G = {problem.G}, D = {problem.D}; {ranks}, {links}"


def table(problem: Problem = DEFAULT) -> Table:
    """The explorer as text, a row per strategy. Bytes and memory are those of the worst rank; times are predicted.

    >>> table(Problem(S=4096, shape=(1, 4), H=8, G=2, D=64))
    4,096 tokens, H = 8, G = 2, D = 64; 4 ranks, 250 GB/s
    ...
    """
    lines = [_said(problem), ""]
    lines += [f"{'way':26}  messages  sent inside      across    held, backward  |  seconds     exposed"]
    for row in compare(problem):
        sent = [amount(row.sent[which], BYTES) for which in ("inner", "outer")]
        held = [amount(n, BYTES) for n in (row.total_memory, row.total_memory_backward)]
        said = "all hidden" if row.exposed < 1e-9 else f"{row.exposed:.1%}"
        lines.append(
            f"{row.name:26}  {row.messages:8}  {sent[0]:>11}  {sent[1]:>10}  {held[0]:>8}  {held[1]:>8}  |  "
            f"{amount(row.seconds, SECONDS):>7}  {said:>10}"
        )
    lines += [
        "",
        "Bytes are those of the rank that sends or holds most: in a ring, the last rank of a node sends everything",
        'across. No mask, bf16. Only the column "backward" is about the backward. Seconds are predicted, not measured.',
    ]
    return Table("\n".join(lines))


def measured(record: Mapping[str, Any]) -> Table:
    """What ``ringlearn.bench --strategies ... --overlap`` measured, a row for each length and strategy.

    record: what its --json wrote.  sent: counted from shapes.  ms: median of the slowest rank.  of one GPU: the rate
    as a fraction of that of SDPA on one GPU alone.  exposed: the fraction of the time in which messages are not hidden.
    peak: allocated beyond the inputs.  The last lines explain the columns.
    """
    device, ranks = record["hardware"]["device"], record["hardware"]["ranks"]
    H, G, D, mask = (record["shape"][name] for name in ("H", "G", "D", "mask"))
    lines = [f"{ranks} x {device}, H = {H}, G = {G}, D = {D}, {record['shape']['dtype']}, {mask}, {record['date']}", ""]
    titles = ("sent, MiB", "ms", "of one GPU", "exposed", "peak, MiB")
    below = [f"{'fwd':>6} {second:>6}" for second in ("bwd", *["both"] * 4)]
    lines += [f"{'tokens':8}{'':10}  " + " | ".join(f"{title:^13}" for title in titles)]
    lines += [f"per GPU {'way':10}  " + " | ".join(below)]
    for row in record["rows"]:
        if row["problem"] is None:
            sent = [row.get(f"{kind}_bytes") for kind in ("forward", "backward")]
            numbers = [
                [n and n / 2**20 for n in sent],
                *([row.get(f"{kind}_{what}") for kind in KINDS] for what in ("ms", "fraction")),
                [row.get("exposed", {}).get(kind) for kind in KINDS],
                [row.get(f"{kind}_peak_mib") for kind in KINDS],
            ]
            cells = [
                " ".join("     -" if n is None else f"{n:6{form}}" for n in pair)
                for pair, form in zip(numbers, (".0f", ".2f", ".0%", ".0%", ".0f"), strict=True)
            ]
            lines.append(f"{row['tokens_per_rank']:7,} {row['way']:10}  " + " | ".join(cells))
    lines += [
        "",
        "fwd, bwd, both: forward, backward, a forward with its backward.  sent: by a rank.",
        "of one GPU: scores per second, 100% is that of one GPU alone with its own tokens.",
        "exposed: the part of the time in which messages do not hide.  peak: beyond q, k, v.",
    ]
    return Table("\n".join(lines))


# What the colours of a panel say: (in words, colour, hatch).
LINKS = {"inner": ("inside a node", BLUE, ""), "outer": ("across nodes", ORANGE, "//")}
COMPONENTS = {"in flight": (ORANGE, "//"), "gathered": (GREEN, ".."), "scores": (PURPLE, "xx")}
TIMES = {"computes": ("computes", BLUE, ""), "waits": ("waits for messages", "white", "////")}

Bar = tuple[str, float, str, str]  # what it is, its length, colour, hatch


def picture(problem: Problem = DEFAULT) -> Figure:
    """The same as bars: bytes sent, memory held (on a logarithmic scale), and predicted time."""
    rows = compare(problem)
    figure, axes = new(3, (9, 3.5), sharey=True)
    unit, name = scaled(max(sum(row.sent.values()) for row in rows) or 1, BYTES)
    _panel(axes[0], rows, lambda row: [(f"sent {x}", row.sent[x] / unit, *LINKS[x][1:]) for x in LINKS])
    axes[0].set_xlabel(f"sent by a rank, forward ({name})")

    def held(row: Row) -> list[Bar]:
        largest = max(row.memory, key=row.memory.get, default="in flight")
        return [("held", max(row.total_memory, 1) / 2**20, *COMPONENTS[largest])]

    _panel(axes[1], rows, held)
    totals = [row.total_memory / 2**20 for row in rows if row.total_memory]
    axes[1].set(xscale="log", xlim=(min(totals, default=1) / 4, 2 * max(totals, default=1)))
    axes[1].xaxis.set_minor_formatter(NullFormatter())  # over less than a decade too many minor ticks have labels
    axes[1].set_xlabel("held by a rank, forward (MiB)")

    seconds, seconds_name = scaled(max(row.seconds for row in rows), SECONDS)

    def times(row: Row) -> list[Bar]:
        exposed = row.exposed * row.seconds
        lengths = {"computes": (row.seconds - exposed) / seconds, "waits": exposed / seconds}
        return [(x, lengths[x], *TIMES[x][1:]) for x in TIMES]

    _panel(axes[2], rows, times)
    axes[2].set_xlabel(f"time, predicted ({seconds_name})")
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes[0].set_ylim(len(rows) - 0.5, -0.6)
    legends = (LINKS.values(), [(what, *look) for what, look in COMPONENTS.items()], TIMES.values())
    for ax, legend in zip(axes, legends, strict=True):
        lanes(ax)
        ax.spines["left"].set_visible(True)
        entries = [Patch(facecolor=fill, edgecolor=_edge(fill), hatch=h, label=what) for what, fill, h in legend]
        ax.legend(
            handles=entries, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(entries), frameon=False,
            fontsize=7.5, handlelength=1.2, columnspacing=1.0,
        )  # fmt: skip
    figure.suptitle(_said(problem), fontsize=9, x=0.01, ha="left")
    return figure


def _panel(ax: Axes, rows: Sequence[Row], bars: Callable[[Row], list[Bar]]) -> None:
    """Draw the bars of each row end to end."""
    for y, row in enumerate(rows):
        left = 0.0
        for what, width, fill, hatch in bars(row):
            if width > 0:
                look = {"color": fill, "edgecolor": _edge(fill), "hatch": hatch, "linewidth": 0.6}
                ax.barh(y, width, 0.7, left, **look, gid=f"{what} {row.name}")
            left += width
    ax.autoscale(axis="x")
    ax.set_xlim(left=0)


def _edge(fill: str) -> str:
    return VERMILION if fill == "white" else BLACK


def explorer() -> Any:
    """Seven controls: tokens, nodes, ranks of a node, heads, and both kinds of links; the bars follow them.

    Returns a widget; without ipywidgets, ``table()``.
    """

    def draw(tokens: float, nodes: int, places: int, H: int, G: int, inner: float, outer: float) -> Figure:
        links = {"bandwidth": inner * 1e9, "outer_bandwidth": outer * 1e9}
        return picture(Problem(round(tokens), (nodes, places), H, G, DEFAULT.D, **links))

    controls = {
        "tokens": log_slider("tokens, S", DEFAULT.S, 10, 24),
        "nodes": slider("nodes", DEFAULT.shape[0], 1, 8),
        "places": slider("ranks of a node", DEFAULT.shape[1], 1, 8),
        "H": menu("query heads, H", [8, 16, 32, 64], DEFAULT.H),
        "G": menu("key/value heads, G", [1, 2, 4, 8], DEFAULT.G),
        "inner": log_slider("GB/s inside a node", DEFAULT.bandwidth / 1e9, 0, 3, base=10, step=0.1),
        "outer": log_slider("GB/s across nodes", DEFAULT.across / 1e9, 0, 3, base=10, step=0.1),
    }
    return explore(draw, table, "five sliders, two menus and a picture", controls)

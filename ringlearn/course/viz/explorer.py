"""Pictures of notebook 06: a ring on one time axis, a shard as a tile, a timeline to play with, measured steps.

The simulated pictures are drawn from traces of a ring that is rehearsed on the hardware model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ...costs.ring import hiding_threshold, step_work
from ...worlds.trace import Event, Hardware, Trace
from ..records import uncovered
from ..rehearsal import rehearse
from .figure import SECONDS, amount, caption, new, pale, scaled
from .flash_mechanism import arrow, box
from .gantt import draw_event
from .style import BLACK, BLUE, GREY, ORANGE, WAITS, lanes, plain
from .widgets import Table, explore, log_slider, menu, slider

P, H, D = 4, 32, 128  # of the explorer
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# ---- A ring on the hardware model -----------------------------------------------------------------------------------


def ring_trace(
    tokens: int,
    H: int = H,
    G: int = 8,
    *,
    hardware: Hardware | None = None,
    ranks: int = P,
    awaited_first: bool = False,
) -> Trace:
    """The trace of a ring's forward without a mask, bf16, head dim 128.  tokens: of each rank.

    >>> ring_trace(600, hardware=Hardware(latency=0.0)).makespan()
    3.9321...e-05
    """
    operations, nbytes = step_work(tokens, H, G, D)
    return rehearse(ranks, operations=operations, nbytes=nbytes, hardware=hardware, awaited_first=awaited_first)


# ---- One rank's timeline --------------------------------------------------------------------------------------------


def _lanes(ax: Axes, events: Sequence[Event], y: float, unit: float, size: int, total: float) -> None:
    """A lane of computing with the exposed waits hatched, and one of messages below it."""
    for e in events:
        lane = {"compute": y, "wait": y, "recv": y + 1}.get(e.kind)
        if lane is not None and not (e.kind == "wait" and e.seconds == 0):
            at, width = (e.start / unit, lane), e.seconds / unit
            draw_event(ax, e, at, width, size, 0.03 * total / unit, font=9, height=0.84)


def _time_axis(ax: Axes, longest: float, unit: str, names: Sequence[str], ys: Sequence[float]) -> None:
    ax.set(xlim=(0, 1.01 * longest), ylim=(max(ys) + 1.0, -0.25))
    ax.set_yticks([y + 0.42 for y in ys], names, fontsize=9)
    ax.set_xlabel(f"time ({unit}), simulated")
    lanes(ax)


EXPOSED = Patch(**WAITS, label="exposed: waits, computes nothing")


def twice(runs: Mapping[str, Trace], rank: int = 0, unit: str | None = None) -> Figure:
    """Several runs of the same ring on one time axis, seen from one rank.

    runs: label -> trace. In a ring without a mask all ranks look alike, so one is enough.  unit: what the
    clock's numbers are, if they are not seconds.
    """
    steps = ((1.0, unit),) if unit else SECONDS
    ends = {name: trace.makespan() for name, trace in runs.items()}
    total = max(ends.values())
    scale, unit_name = scaled(total, steps)
    figure, ax = new(1, (9, 1.15 * len(runs) + 1.15))
    names, ys = [], []
    for i, (name, trace) in enumerate(runs.items()):
        size = 1 + max(e.rank for e in trace)
        _lanes(ax, [e for e in trace if e.rank == rank], 2.6 * i, scale, size, total)
        names += [f"{name}: computing", "messages in"]
        ys += [2.6 * i, 2.6 * i + 1]
        end = ends[name] / scale
        ax.plot([end, end], [2.6 * i - 0.15, 2.6 * i + 2.0], color=BLACK, linewidth=1.4)
        ax.annotate(f" {amount(ends[name], steps)}", (end, 2.6 * i + 0.9), ha="left", va="center", fontsize=10)
    _time_axis(ax, total / scale, unit_name, names, ys)
    ax.set_xlim(0, 1.13 * total / scale)
    ax.legend(handles=[EXPOSED], loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    said = (
        f"This is rank {rank} of {size}. A number says whose keys and values this rank computes with, or a message "
        "brings. "
    )
    grey = any(e.made for trace in runs.values() for e in trace if e.rank == rank)
    said += "A grey message brings gradients. " * grey
    return caption(figure, said + "A black line marks the end of a run.")


def one_level_up() -> Figure:
    """Two drawings of the same mechanism: queries stay where they are computed, keys and values stream past.

    Left, flash attention: from main memory to a chip. Right, a ring: from a neighbour to a GPU.
    """
    figure, axes = new(2, (9, 3.0))
    sides = (
        ("flash attention, notebook 02", "main memory", "chip", "memory\nbandwidth", "block of $B_r$ queries\nstays"),
        ("a ring, this notebook", "neighbour's GPU", "this GPU", "link, $W$", "shard of $n$ queries\nstays"),
    )
    for ax, (title, source, place, link, queries) in zip(axes, sides, strict=True):
        ax.set(xlim=(0, 10), ylim=(0, 5))
        ax.axis("off")
        ax.set_title(title, fontsize=10, loc="left")
        for x, width, name in ((0.1, 3.0, source), (5.6, 4.3, place)):
            ax.add_patch(Rectangle((x, 0.2), width, 4.0, facecolor="0.96", edgecolor=BLACK))
            ax.text(x + width / 2, 4.35, name, ha="center", fontsize=9)
        for y in (0.5, 1.7, 2.9):
            box(ax, 0.5, y, 2.2, 1.0, "k, v", ORANGE if y == 1.7 else pale(ORANGE))
        box(ax, 5.9, 2.6, 3.7, 1.2, queries, BLUE)
        box(ax, 5.9, 0.6, 3.7, 1.2, "k, v pass by, and\nserve every query", ORANGE)
        arrow(ax, (3.1, 1.2), (5.6, 1.2))
        ax.text(4.35, 1.35, link, ha="center", va="bottom", fontsize=9)
        arrow(ax, (6.5, 2.6), (6.5, 1.8))
        ax.text(6.7, 2.2, "$F$ operations/s", va="center", fontsize=8)
    return figure


# ---- The explorer: one ring, five numbers ---------------------------------------------------------------------------


def _numbers(tokens: int, reuse: int, hardware: Hardware) -> dict[str, float]:
    """Seconds of a step's compute, of its message, and of the whole ring; and how many seconds rank 0 waits."""
    operations, nbytes = step_work(tokens, H, H // reuse, D)
    trace = ring_trace(tokens, H, H // reuse, hardware=hardware)
    return {
        "compute": operations / hardware.flops,
        "message": hardware.latency + nbytes / hardware.bandwidth,
        "total": trace.makespan(),
        "exposed": trace.seconds("wait", 0),
    }


def threshold(reuse: int, hardware: Hardware) -> float:
    """Tokens per rank that it takes to hide a hop, with reuse query heads for each key/value head.

    >>> threshold(4, Hardware(latency=0.0)), round(threshold(4, Hardware()))
    (600.0, 975)
    """
    return hiding_threshold(H, H // reuse, **vars(hardware), D=D)


def explorer_table(
    tokens: Sequence[int] = TOKENS, *, reuse: int = 4, flops: float = 600e12, bandwidth: float = 250e9,
    latency: float = 10e-6,
) -> Table:  # fmt: skip
    """What :func:`explorer` shows, as text: a ring of 4 ranks for some numbers of tokens per rank. Simulated.

    reuse: H / G, query heads for each key/value head.
    """
    hardware = Hardware(flops, bandwidth, latency)
    lines = [
        f"H/G {reuse}, {flops / 1e12:g} TFLOP/s, {bandwidth / 1e9:g} GB/s, latency {latency * 1e6:g} µs: "
        f"it takes {threshold(reuse, hardware):,.0f} tokens per rank to hide a hop",
        "",
        "tokens per rank    compute    message | whole ring    exposed",
    ]
    for count in tokens:
        n = _numbers(count, reuse, hardware)
        share = n["exposed"] / n["total"]
        lines.append(
            f"{count:15,d}  {amount(n['compute'], SECONDS):>9}  {amount(n['message'], SECONDS):>9} | "
            f"{amount(n['total'], SECONDS):>10}  {'hidden' if share < 1e-9 else f'{share:.0%}':>9}"
        )
    return Table("\n".join([*lines, "(times are simulated: they come from the hardware model, not from a clock)"]))


def picture(
    tokens: int = 1024, *, reuse: int = 4, flops: float = 600e12, bandwidth: float = 250e9, latency: float = 10e-6
) -> Figure:
    """A ring of 4 ranks on the hardware model: rank 0's timeline, and where its tokens stand relative to the threshold.

    tokens: per rank. reuse: H / G.
    """
    hardware = Hardware(flops, bandwidth, latency)
    trace, n = ring_trace(tokens, H, H // reuse, hardware=hardware), _numbers(tokens, reuse, hardware)
    border = threshold(reuse, hardware)
    figure, (left, right) = new(2, (9, 3.5), gridspec_kw={"width_ratios": [1.15, 1]})
    figure.get_layout_engine().set(wspace=0.06)
    unit, name = scaled(n["total"], SECONDS)
    _lanes(left, [e for e in trace if e.rank == 0], 0, unit, P, n["total"])
    _time_axis(left, n["total"] / unit, name, ["computing", "messages in"], [0, 1])
    share = n["exposed"] / n["total"]
    said = "all messages hidden" if share < 1e-9 else f"{share:.0%} of it exposed"
    left.set_title(f"{tokens:,} tokens per rank: {amount(n['total'], SECONDS)}, {said}", fontsize=10, loc="left")
    left.set_ylim(2.6, -0.25)  # room for the legend
    left.legend(handles=[EXPOSED], loc="lower left", frameon=False, fontsize=9)
    _border(right, tokens, reuse, hardware, border)
    return figure


def _border(ax: Axes, here: int, reuse: int, hardware: Hardware, border: float) -> None:
    """A step's compute and message time against tokens per rank, with the border between exposed and hidden."""
    lengths = [2 ** (i / 4) for i in range(4 * 5, 4 * 17 + 1)]
    rows, moved = step_work(1, H, H // reuse, D)
    compute = [1e6 * rows * x * x / hardware.flops for x in lengths]
    message = [1e6 * (hardware.latency + moved * x / hardware.bandwidth) for x in lengths]
    ax.loglog(lengths, compute, color=BLUE, linewidth=2, label="computing a step")
    ax.loglog(lengths, message, color=ORANGE, linewidth=2, linestyle="--", label="its message")
    ax.axvline(border, color=BLACK, linewidth=1.4, linestyle=":", label=f"n* = {border:,.0f} tokens")
    ax.axvline(here, color=GREY, linewidth=5, alpha=0.35, label=f"n = {here:,} tokens")
    ax.set(xlim=(lengths[0], lengths[-1]), ylim=(0.05, 2e6))
    ax.set(xlabel="tokens per rank, n", ylabel="time (µs), simulated")
    ax.set_title("hidden right of the dotted line", fontsize=10, loc="left")
    ax.legend(loc="lower right", framealpha=1, edgecolor="none", fontsize=8)
    plain(ax)


def explorer() -> Any:
    """Five controls: tokens per rank, heads, FLOP/s, bandwidth, latency; the timeline and the border follow them.

    Returns a widget; without ipywidgets, ``explorer_table()``.
    """

    def draw(tokens: float, reuse: int, flops: float, bandwidth: float, latency: int) -> Figure:
        machine = {"flops": flops * 1e12, "bandwidth": bandwidth * 1e9, "latency": latency * 1e-6}
        return picture(round(tokens), reuse=reuse, **machine)

    controls = {
        "tokens": log_slider("tokens per rank", 1024, 5, 17, step=0.25),
        "reuse": menu("H / G", [1, 2, 4, 8, 16, 32], 4),
        "flops": log_slider("TFLOP/s", 600, 0, 4, base=10, step=0.05),
        "bandwidth": log_slider("GB/s each way", 250, -1, 4, base=10, step=0.05, form=",.1f"),
        "latency": slider("latency (µs)", 10, 0, 200),
    }
    return explore(draw, explorer_table, "five sliders and a picture", controls)


# ---- What was measured ----------------------------------------------------------------------------------------------


def steps_measured(record: Mapping[str, Any], tokens: int, ways: Mapping[str, str], rank: int = 0) -> Figure:
    """Measured timelines of some steps, one below the other on one time axis; hatched is exposed communication.

    record: a measurement with ``timelines``. tokens: per GPU. ways: how the shard travels, by its name in the record
    -> label of its timeline.
    """
    found = {t["what"]: t["events"] for t in record["timelines"] if t["tokens_per_gpu"] == tokens and t["rank"] == rank}
    total = max(e["stop_us"] for how in ways for e in found[how])
    figure, ax = new(1, (9, 1.05 * len(ways) + 1.2))
    names, ys = [], []
    for i, (how, label) in enumerate(ways.items()):
        y = 2.5 * i
        for e in found[how]:
            lane, fill, hatch = (y, BLUE, "") if e["kind"] == "compute" else (y + 1, ORANGE, "..")
            where = {"xy": (e["start_us"], lane), "width": e["stop_us"] - e["start_us"], "height": 0.84}
            ax.add_patch(Rectangle(**where, facecolor=fill, hatch=hatch, edgecolor=BLACK, linewidth=0.5))
        message, compute = (
            [(e["start_us"], e["stop_us"]) for e in found[how] if e["kind"] == kind] for kind in ("message", "compute")
        )
        for start, stop in uncovered(message, compute):
            ax.add_patch(Rectangle((start, y), stop - start, 0.84, **WAITS, linewidth=0.8))
        names += [f"{label}: attention", "message"]
        ys += [y, y + 1]
    _time_axis(ax, total, "µs", names, ys)
    ax.set_xlabel("time (µs), measured")
    ax.legend(handles=[EXPOSED], loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    return figure


def rates(sizes: Sequence[float], seconds: Sequence[float], latency: float, bandwidth: float) -> Figure:
    """Measured bytes per second of messages against their size, and the curve V / (latency + V / bandwidth).

    sizes: bytes. latency in seconds, bandwidth in bytes per second: what was fitted.
    """
    figure, ax = new(1, (9, 3.3))
    mib = [size / 2**20 for size in sizes]
    grid = [mib[0] * (mib[-1] / mib[0]) ** (i / 60) for i in range(61)]
    model = [x * 2**20 / (latency + x * 2**20 / bandwidth) / 1e9 for x in grid]
    ax.semilogx(grid, model, color=BLUE, linewidth=1.6, label="V / (latency + V / W), fitted")
    measured = [size / took / 1e9 for size, took in zip(sizes, seconds)]
    ax.semilogx(mib, measured, "o", color=ORANGE, markeredgecolor=BLACK, label="measured")
    ax.axhline(bandwidth / 1e9, color=BLACK, linewidth=1.2, linestyle=":", label=f"W = {bandwidth / 1e9:.0f} GB/s")
    ax.set_xticks(mib, [f"{x:g}" for x in mib])
    ax.minorticks_off()
    ax.set(ylim=(0, 1.12 * bandwidth / 1e9), xlabel="size of the message (MiB)", ylabel="GB/s, each way")
    ax.legend(loc="lower right", frameon=False, fontsize=9)
    plain(ax)
    return figure

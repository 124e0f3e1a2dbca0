"""When each rank computed, sent, received and waited: a Gantt chart of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ...worlds.trace import Event, Trace
from .figure import BYTES, FLOPS, SECONDS, amount, caption, check_trace, colour, ink, place, ranks, scaled, world_size
from .style import BLACK, WAITS, lanes

LANES = ("compute", "send", "recv")
MADE = "0.7"  # messages with what was made in the run: gradients, partial results


def timeline(trace: Trace | Sequence[Trace], ax: Axes | None = None) -> Figure:
    """When each rank computes, sends and receives: time runs to the right, and each rank has a lane for each of these.

    Number and colour say whose block it is; messages with gradients are grey. A lane is hatched while its rank waits
    for a message and does nothing else: this communication is not hidden.

    trace: of any rank program, or the traces of all processes of a distributed world. In a simulated world the times
    come from its ``Hardware`` model, and the title says so.
    ax: axes to draw on, instead of a new figure.

    Raises ValueError for a trace that is empty or has more than 64 ranks.

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(2)
    >>> out = rl.ring_attention(*world.shard(*(torch.randn(1, 1, 16, 4) for _ in range(3))))
    >>> figure = rl.viz.timeline(world.trace)
    """
    trace = check_trace("timeline", trace)
    events = trace.events
    size, rows = world_size(events), ranks(events)
    kinds = [lane for lane in LANES if any(e.kind == lane for e in events)] or ["compute"]
    begin = min(e.start for e in events)
    unit, name = scaled(trace.makespan(), SECONDS)
    total = trace.makespan() / unit
    height = 0.24 if len(rows) <= 8 else 0.13
    own_figure = ax is None
    figure, ax = place(ax, (9.5, height * (len(kinds) + 0.8) * len(rows) + 2.0))
    pitch = len(kinds) + 0.8
    for y, rank in enumerate(rows):
        for e in events:
            if e.rank == rank and (e.kind in kinds or e.kind == "wait" and e.seconds > 0):
                lane = 0 if e.kind == "wait" else kinds.index(e.kind)  # a wait lies where the rank would compute
                at = (e.start - begin) / unit, y * pitch + lane
                draw_event(ax, e, at, e.seconds / unit, size, numbered=0.018 * total if len(rows) <= 8 else None)
        if y:
            ax.axhline(y * pitch - 0.4, color="0.85", linewidth=0.8)
    ax.set(xlim=(-0.002 * total, 1.005 * total or 1), ylim=(len(rows) * pitch - 0.6, -0.3))
    _labels(ax, trace, rows, kinds, pitch)
    ax.set_xlabel(f"time since the start of the run ({name})")
    lanes(ax)
    how = "simulated (a hardware model, not a clock)" if trace.simulated else "measured"
    ax.set_title(f"Timeline, {how}", fontsize=11, loc="left")
    entries = []
    if any(e.kind == "wait" and e.seconds > 0 for e in events):
        entries.append(Patch(**WAITS, label="exposed wait"))
    if any(e.made for e in events):
        entries.append(Patch(facecolor=MADE, edgecolor=BLACK, linewidth=0.5, label="gradients or results"))
    where = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.99), "borderaxespad": 0.2}
    if entries:
        ax.legend(handles=entries, **where, frameon=False, fontsize=9, ncols=2)
    return caption(figure, _what_to_see(trace, rows), own_figure)


def draw_event(
    ax: Axes,
    e: Event,
    at: tuple[float, float],
    width: float,
    size: int,
    numbered: float | None,
    *,
    font: float = 8,
    height: float = 0.86,
) -> None:
    """Draw a compute event, a message or a wait as a bar.

    numbered: from which width on it shows the number of its block; None for never.
    """
    where = {"xy": at, "width": width, "height": height}
    if e.kind == "wait":
        bar = Rectangle(**where, **WAITS, linewidth=0.8, zorder=1)
    else:
        fill = MADE if e.made else colour(e.rank if e.origin is None else e.origin, size)
        # The edge keeps a bar in sight that is too short to have a width.
        # Measured messages overlap, since they last until somebody waits for them: blocks lie above gradients.
        bar = Rectangle(**where, facecolor=fill, edgecolor=BLACK, linewidth=0.5, zorder=1.5 if e.made else 2)
        if numbered is not None and not e.made and e.origin is not None and width > numbered:
            style = {"ha": "center", "va": "center", "fontsize": font, "color": ink(fill), "clip_on": True}
            ax.text(at[0] + width / 2, at[1] + height / 2, str(e.origin), **style)
    bar.set_gid(f"rank {e.rank} {e.kind} {e.name}")
    ax.add_patch(bar)


def _labels(ax: Axes, trace: Trace, rows: list[int], lanes: list[str], pitch: float) -> None:
    if len(rows) > 8:
        ax.set_yticks([y * pitch + pitch / 2 - 0.4 for y in range(len(rows))], [f"rank {r}" for r in rows], fontsize=8)
        return
    ax.set_yticks(
        [y * pitch + lane + 0.43 for y in range(len(rows)) for lane in range(len(lanes))], lanes * len(rows), fontsize=8
    )
    for y, rank in enumerate(rows):
        lines = [f"rank {rank}", amount(trace.flops(rank), FLOPS)]
        if "send" in lanes:
            lines.append(f"{amount(trace.bytes_sent(rank), BYTES)} sent")
        middle = y * pitch + len(lanes) / 2
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "center"}
        ax.annotate("\n".join(lines), (0, middle), (-58, 0), **where, fontsize=8.5)


def _what_to_see(trace: Trace, rows: list[int]) -> str:
    total = trace.makespan()
    text = f"The run takes {amount(total, SECONDS)}. Number and colour: whose block it is. "
    if not trace.simulated:
        text += "Each rank has a clock of its own, and a message lasts from its post to the end of the wait for it. "
    waits = {rank: trace.seconds("wait", rank) for rank in rows}
    if not any(e.kind == "wait" for e in trace.events) or not total:
        return text + "Nothing is sent, so nobody waits."
    most = max(waits, key=lambda rank: waits[rank])
    if waits[most] == 0:
        return text + "Every message arrives before it is needed: communication is hidden entirely."
    mean = sum(waits.values()) / len(waits)
    return text + (
        f"Hatched time is spent waiting for a message: {mean / total:.0%} of the run on average, "
        f"{waits[most] / total:.0%} on rank {most}. Where nothing is hatched, computing hides the message."
    )

"""Which rank holds which block when, and how much each rank computes: drawn from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ...tiles import Kind
from ...worlds.trace import Event, Trace
from .figure import FLOPS, caption, check_trace, colour, ink, new, pale, place, ranks, scaled, tile_patch, world_size
from .style import BLACK, cells, plain


@dataclass(frozen=True)
class Turn:
    """What one rank did between the arrival of one block and the next.

    held: the ranks that the blocks came from; at step 0 of a forward, the rank itself.  computed: its compute events.
    """

    rank: int
    step: int
    held: tuple[int, ...]
    computed: tuple[Event, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """The ranks whose blocks it computed with, in that order."""
        origins = (self.held[0] if e.origin is None else e.origin for e in self.computed)
        return tuple(dict.fromkeys(origins))

    @property
    def flops(self) -> float:
        return sum(e.flops for e in self.computed)


def turns(trace: Trace | Sequence[Trace]) -> dict[int, list[Turn]]:
    """What each rank of a trace held and computed, step by step.

    A step begins when a block arrives (blocks that are awaited together begin one step), or when a rank computes with
    a block that it has neither received nor used in this run: the one that came last in the forward, or its own at the
    end of a backward. Messages that carry results of the run, such as gradients in a backward pass, do not count as
    blocks, unless a forward sends nothing else.  Raises ValueError if the trace is empty.

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(3)
    >>> out = rl.ring_attention(*world.shard(*(torch.randn(1, 1, 12, 4) for _ in range(3))), mask=rl.causal)
    >>> [(turn.held, turn.used) for turn in turns(world.trace)[1]]
    [((1,), (1,)), ((0,), (0,)), ((2,), ())]
    """
    events = check_trace("turns", trace).events
    backward = any(e.kind == "compute" and e.name == "backward" for e in events)
    only_made = not backward and all(e.made for e in events if e.kind == "recv")
    return {rank: _turns(rank, [e for e in events if e.rank == rank], only_made) for rank in ranks(events)}


def _turns(rank: int, events: Sequence[Event], only_made: bool) -> list[Turn]:
    out: list[Turn] = []
    held, computed, last = _first(rank, events), [], None
    seen: set[int] = set()  # received or used; a rank may send its own keys before it uses them
    for e in events:
        arrives = e.kind == "recv" and (only_made or not e.made)
        if arrives and last == "recv":
            held = (*held, e.origin)
        elif arrives or e.kind == "compute" and e.origin is not None and e.origin not in seen | set(held):
            out.append(Turn(rank, len(out), held, tuple(computed)))
            held, computed = (e.origin,), []
        if arrives:
            seen.update(held)
        if e.kind == "compute":
            computed.append(e)
            seen.add(e.origin)
        last = e.kind
    return [*out, Turn(rank, len(out), held, tuple(computed))]


def _first(rank: int, events: Sequence[Event]) -> tuple[int, ...]:
    """Whose block a rank has in step 0: the one that it first sends on or computes with."""
    for e in events:
        if e.kind == "recv":
            break
        if e.origin is not None and (e.kind == "compute" or e.kind == "send" and not e.made):
            return (e.origin,)
    return (rank,)


# --- blocks_held ---------------------------------------------------------------------------------------------------


def blocks_held(trace: Trace | Sequence[Trace], ax: Axes | None = None) -> Figure:
    """Rank by step: whose keys and values each rank holds, and which part of the scores it computes with them.

    One cell is the score matrix of a rank's queries (down) and of the keys that it holds (across). Its number and its
    colour are the rank that the keys came from. Pale is what is only held, solid what was computed: the tiles of the
    trace, drawn to scale.

    trace: of any rank program, such as ``world.trace`` after ``ring_attention``, or a list with the traces of all
    processes of a distributed world.  ax: axes to draw on, instead of a new figure.

    Raises ValueError for a trace that is empty or has more than 64 ranks.

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(4)
    >>> out = rl.ring_attention(*world.shard(*(torch.randn(1, 1, 16, 4) for _ in range(3))), mask=rl.causal)
    >>> figure = rl.viz.blocks_held(world.trace)
    """
    events = check_trace("blocks_held", trace).events
    size, rows = world_size(events), turns(trace)
    steps = max(len(row) for row in rows.values())
    cell = 1.05 if max(len(rows), steps) <= 5 else 0.8 if max(len(rows), steps) <= 8 else 9 / max(len(rows), steps)
    own_figure = ax is None
    figure, ax = place(ax, (max(6.4, cell * steps + 3.2), cell * len(rows) + 1.6), layout="compressed")
    font = min(13.0, 15 * cell)
    q_length = max((e.tile.q.stop for e in events if e.tile), default=1)
    k_length = max((e.tile.k.stop for e in events if e.tile), default=1)
    empty = {e.origin for e in events if e.kind in ("send", "recv") and not e.made and e.nbytes == 0}
    for y, row in enumerate(rows.values()):
        for turn in row:
            _cell(ax, turn, y, size, q_length, k_length, font, empty)
    cells(ax, steps, len(rows), "step (a new one begins when keys and values arrive)", "rank", margin=0.04)
    for set_ticks, names in ((ax.set_xticks, range(steps)), (ax.set_yticks, list(rows))):
        every = 1 if len(names) <= 16 else 4
        set_ticks([i + 0.5 for i in range(0, len(names), every)], names[::every])
    ax.tick_params(length=0)
    backward = ", backward" if any(e.name == "backward" for e in events) else ""
    ax.set_title(f"Whose keys each rank holds{backward}", fontsize=11)
    kinds = {e.tile.kind for e in events if e.tile}
    entries = [Patch(facecolor="0.45", edgecolor=BLACK, label="scores that are computed")]
    if Kind.PARTIAL in kinds:
        entries.append(Patch(facecolor="0.75", edgecolor=BLACK, hatch="////", label="computed under a mask"))
    if any(not turn.computed for row in rows.values() for turn in row) or kinds - {Kind.FULL, Kind.PARTIAL}:
        entries.append(Patch(facecolor="0.92", edgecolor="0.6", label="not needed by this rank"))
    if own_figure and len(entries) > 1:
        figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)
    return caption(figure, _what_is_held(rows), own_figure)


def _cell(ax: Axes, turn: Turn, y: int, size: int, q_length: int, k_length: int, font: float, empty: set) -> None:
    x, margin = turn.step, 0.04
    width = 1 - 2 * margin
    shown = turn.used or turn.held
    fill = colour(shown[0], size)
    where = f"rank {turn.rank} step {turn.step}"
    box = Rectangle((x + margin, y + margin), width, width, facecolor=pale(fill), edgecolor="0.6", linewidth=0.6)
    box.set_gid(f"{where} holds {','.join(map(str, turn.held))}")
    ax.add_patch(box)
    for e in turn.computed:
        block = colour(turn.held[0] if e.origin is None else e.origin, size)
        if e.tile:
            patch = tile_patch(e.tile, x + margin, y + margin, width / k_length, width / q_length)
        else:  # a program that only says how much it computes
            patch = Rectangle((x + margin, y + margin), width, width)
        partial = e.tile is not None and e.tile.kind is Kind.PARTIAL
        patch.set(facecolor=(block, 0.6) if partial else block, hatch="////" if partial else None)
        what = e.tile.kind.name if e.tile else e.name
        patch.set(edgecolor=BLACK, linewidth=0.6, gid=f"{where} computes {e.origin} {what}")
        ax.add_patch(patch)
    halo = [patheffects.withStroke(linewidth=2.5, foreground="white")]
    number = ",".join(map(str, shown)) if len(shown) <= 3 else f"{len(shown)} blocks"
    text = ax.text(x + 0.5, y + 0.5, number, ha="center", va="center", fontsize=font, path_effects=halo)
    text.set(gid=where, fontweight="bold" if turn.computed else "normal", color=BLACK if turn.computed else "0.45")
    if font < 8:
        return
    notes = []
    if turn.used and set(turn.used) != set(turn.held):
        notes.append(f"holds {','.join(map(str, turn.held))}")
    if empty.issuperset(turn.held):
        box.set_linestyle("--")
        notes.append("empty")
    elif not turn.computed:
        notes.append("nothing")
    if notes:
        style = {"fontsize": font * 0.62, "color": "0.35", "path_effects": halo, "ha": "center", "va": "center"}
        ax.text(x + 0.5, y + 0.82, ", ".join(notes), **style)


def _what_is_held(rows: dict[int, list[Turn]]) -> str:
    every = [turn for row in rows.values() for turn in row]
    idle = [turn for turn in every if not turn.computed]
    text = (
        "Each row is a rank, and each column is a step. The number and the colour of a cell say whose keys and values "
        "the rank holds. Read along a row to see which blocks pass by a rank, and down a diagonal to follow one block. "
    )
    if any(e.tile and e.tile.kind is not Kind.FULL for turn in every for e in turn.computed):
        text += (
            "A cell is a small matrix of scores, with the rank's queries from top to bottom and the keys that it holds "
            "from left to right. "
        )
    if idle:
        return text + (
            f"In {len(idle)} of {len(every)} cells everything is pale: none of the rank's queries sees this block. The "
            f"rank computes nothing, and still passes the block on, except in the last step."
        )
    return text + "Every rank computes something in every step."


# --- load ----------------------------------------------------------------------------------------------------------


def load(trace: Trace | Sequence[Trace]) -> Figure:
    """The work of each rank, step by step, in FLOPs: one bar per rank, one piece per block.

    trace, errors: as in ``blocks_held``.
    """
    events = check_trace("load", trace).events
    size, rows = world_size(events), turns(trace)
    totals = {rank: sum(turn.flops for turn in row) for rank, row in rows.items()}
    unit, name = scaled(max(totals.values()), FLOPS)
    figure, ax = new(1, (max(6.2, 0.42 * len(rows) + 2.4), 4.2))
    highest = max(totals.values()) or 1.0
    for x, row in enumerate(rows.values()):
        bottom = 0.0
        for turn in row:
            if not turn.flops:
                continue
            fill = colour(turn.used[0], size)
            look = {"color": fill, "edgecolor": "white", "linewidth": 1, "gid": f"rank {turn.rank} step {turn.step}"}
            ax.bar(x, turn.flops / unit, 0.8, bottom / unit, **look)
            if turn.flops > 0.05 * highest and len(rows) <= 16:
                middle = (bottom + turn.flops / 2) / unit
                number = ",".join(map(str, turn.used))
                style = {"color": ink(fill), "zorder": 5, "bbox": {"facecolor": fill, "edgecolor": "none", "pad": 1}}
                ax.text(x, middle, number, ha="center", va="center", fontsize=9, **style)
            bottom += turn.flops
    mean = sum(totals.values()) / len(totals)
    ax.axhline(mean / unit, color=BLACK, linestyle="--", linewidth=1.2)
    spare = max(0, 4 - len(rows)) / 2  # one bar alone is not as wide as the figure
    ax.text(len(rows) - 0.4 + spare, mean / unit, " mean", va="center", fontsize=9)
    every = 1 if len(rows) <= 16 else 4
    ax.set_xticks(range(0, len(rows), every), [str(r) for r in list(rows)[::every]])
    ax.set(xlim=(-0.6 - spare, len(rows) - 0.4 + spare), ylim=(0, 1.08 * highest / unit), xlabel="rank")
    ax.set_ylabel(f"work ({name})")
    ratio = f": the busiest has {max(totals.values()) / mean:.2f} times the mean" if mean else ""
    ax.set_title(f"Work of each rank{ratio}", fontsize=11)
    plain(ax)
    return caption(figure, _what_is_uneven(rows, mean))


def _what_is_uneven(rows: dict[int, list[Turn]], mean: float) -> str:
    text = (
        "Each bar is the work of a rank, its first step at the bottom and its last at the top. Number and colour say "
        "whose keys it computed with. "
    )
    if not mean:
        return text + "Nothing was computed."
    steps = max(len(row) for row in rows.values())
    pace = sum(max((row[s].flops for row in rows.values() if s < len(row)), default=0.0) for s in range(steps))
    return text + (
        f"In each step the busiest rank sets the pace, and the others wait for it: all steps together take "
        f"{pace / mean:.2f} times as long as if the work were spread evenly."
    )

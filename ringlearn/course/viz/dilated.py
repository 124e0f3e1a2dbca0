"""Pictures of notebook 09: the rows that dilated attention keeps, by head and rank; and which queries see the future.

What is shown is read from ``Configuration.kept``, the library's own rule. The switch ``by_row`` breaks it as chunks do:
each rank counts the rows of its own chunk from 0, where it should take positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ...attention.dilated.rows import configure
from ...layouts import Layout, contiguous, striped, zigzag
from .figure import colour, ink, new
from .style import BLACK, BLUE, GREY, VERMILION, cells
from .widgets import Table, explore, menu, slider, switch

LONGEST = 64  # positions that a picture can show

KEPT, LEFT, OTHER, MISSED = "x", ".", "!", "o"  # the last two: kept, and not kept, unlike on one device
_LOOKS = {  # a row that is kept as on one device has the colour of its rank
    KEPT: {"edgecolor": BLACK, "linewidth": 0.8},
    LEFT: {"facecolor": "white", "edgecolor": "0.8", "linewidth": 0.6},
    OTHER: {"facecolor": "white", "edgecolor": VERMILION, "hatch": "xxx", "linewidth": 1.4},
    MISSED: {"facecolor": "white", "edgecolor": BLACK, "linestyle": "--", "linewidth": 1.4},
}


def rows(
    S: int, P: int, heads: int, segment: int, rate: int, layout: Layout = contiguous, *, by_row: bool = False
) -> tuple[str, ...]:
    """For each head a mark per position: "x" kept, "." not; with by_row also "!" wrongly kept, "o" wrongly not kept.

    Raises ValueError if the numbers make no sense or S is too long to be shown.

    >>> rows(10, 2, 2, segment=4, rate=2)
    ('x.x.x.x.x.', '.x.x.x.x.x')
    >>> rows(10, 2, 1, segment=4, rate=2, by_row=True)
    ('x.x.x!o!o!',)
    """
    (configuration,) = configure("dilated", [segment], [rate])
    for name, n, most in (("S", S, LONGEST), ("P", P, 8), ("heads", heads, 8)):
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
            raise ValueError(f"dilated: expected {name} from 1 to {most}, got {n!r}")
    found = []
    for head in range(heads):
        right = {p for part in configuration.kept(head, S) for p in part}
        taken = right
        if by_row:
            taken = set()
            for rank in range(P):
                own = layout.positions(S, P, rank).tolist()
                taken |= {own[i] for part in configuration.kept(head, len(own)) for i in part}
        marks = {(True, True): KEPT, (True, False): OTHER, (False, True): MISSED, (False, False): LEFT}
        found.append("".join(marks[p in taken, p in right] for p in range(S)))
    return tuple(found)


def owners(S: int, P: int, layout: Layout = contiguous) -> str:
    """The rank of each position, a digit each.

    >>> owners(10, 3)
    '0001112222'
    """
    owner = {p: str(rank) for rank in range(P) for p in layout.positions(S, P, rank).tolist()}
    return "".join(owner[p] for p in range(S))


# ---- As text --------------------------------------------------------------------------------------------------------


def table(
    S: int = 20,
    P: int = 3,
    heads: int = 4,
    segment: int = 8,
    rate: int = 3,
    layout: Layout = contiguous,
    *,
    by_row: bool = False,
) -> Table:
    """What :func:`kept` shows, as text, a gap between segments.

    >>> table(10, 2, 2, segment=4, rate=2)
    position  0123 4567 89
    rank      0000 0111 11
    head 0    x.x. x.x. x.
    head 1    .x.x .x.x .x
    """
    marks = rows(S, P, heads, segment, rate, layout, by_row=by_row)

    def cut(line: str) -> str:
        return " ".join(line[i : i + segment] for i in range(0, S, segment))

    lines = [f"position  {cut(''.join(str(p % 10) for p in range(S)))}", f"rank      {cut(owners(S, P, layout))}"]
    lines += [f"head {head}    {cut(line)}" for head, line in enumerate(marks)]
    if any(OTHER in line or MISSED in line for line in marks):
        lines.append("(! kept, o not kept: both unlike one device)")
    return Table("\n".join(lines))


# ---- As pictures ----------------------------------------------------------------------------------------------------


def kept(
    S: int = 20,
    P: int = 3,
    heads: int = 4,
    segment: int = 8,
    rate: int = 3,
    layout: Layout = contiguous,
    *,
    by_row: bool = False,
) -> Figure:
    """Heads by positions: a filled cell is a row that the head keeps, in the colour of the rank that holds it.

    >>> figure = kept()
    """
    marks, rank_of = rows(S, P, heads, segment, rate, layout, by_row=by_row), owners(S, P, layout)
    figure, ax = new(1, (9, 0.34 * (heads + 1) + 1.35))
    for p in range(S):
        fill = colour(int(rank_of[p]), P)
        ax.add_patch(Rectangle((p, 0), 1, 0.8, facecolor=fill, edgecolor="white"))
        ax.text(p + 0.5, 0.4, rank_of[p], ha="center", va="center", fontsize=8, color=ink(fill))
        for head, line in enumerate(marks):
            look = {"facecolor": fill} | _LOOKS[line[p]]
            where = f"head {head} position {p} {line[p]}"
            ax.add_patch(Rectangle((p + 0.08, head + 1.08), 0.84, 0.84, gid=where, **look))
    for number, start in enumerate(range(0, S, segment)):
        ax.plot([start, start], [-0.75, heads + 1], color=BLACK, linewidth=1.6, clip_on=False)
        room = min(segment, S - start)
        name = f"segment {number}" if room * 9 / S > 0.9 else f"{number}"
        ax.text(start + room / 2, -0.4, name, ha="center", va="center", fontsize=9)
    ax.set(xlim=(-0.1, S + 0.1), ylim=(heads + 1.05, -0.75))
    ax.set_yticks([0.4, *(head + 1.5 for head in range(heads))], ["rank", *(f"head {head}" for head in range(heads))])
    step = next(n for n in (1, 2, 4, 8) if S / n <= 32)
    ax.set_xticks([p + 0.5 for p in range(0, S, step)], range(0, S, step), fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("position in the sequence")
    if any(OTHER in line or MISSED in line for line in marks):
        said = {KEPT: "kept", OTHER: "kept, unlike one device", MISSED: "not kept, unlike one device"}
        handles = [Patch(**{"facecolor": GREY} | _LOOKS[x] | {"linewidth": None}, label=said[x]) for x in said]
        figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure


def weights(tables: Mapping[str, Tensor], P: int) -> Figure:
    """Which queries see which keys: named (S, S) matrices of softmax weights, side by side, with borders of P chunks.

    A cell is filled where its weight is not 0: blue on and below the diagonal, hatched above it, in the future.

    >>> import torch
    >>> figure = weights({"causal": torch.ones(6, 6).tril(), "full": torch.ones(6, 6)}, P=2)
    """
    looks = {
        "past": {"facecolor": BLUE, "edgecolor": "white", "linewidth": 0.4},
        "future": {"facecolor": "white", "edgecolor": VERMILION, "hatch": "xxxx", "linewidth": 0.8},
    }
    figure, axes = new(len(tables), (9, 4.3), squeeze=False)
    for ax, (name, table) in zip(axes[0], tables.items()):
        S = len(table)
        for q, k in table.nonzero().tolist():
            side = "future" if k > q else "past"
            ax.add_patch(Rectangle((k, q), 1, 1, gid=f"{side} {q} {k}", **looks[side]))
        for border in (rank * S // P for rank in range(P + 1)):
            for across in (([0, S], [border] * 2), ([border] * 2, [0, S])):
                ax.plot(*across, color="0.6", linewidth=0.8)
        ax.plot([0, S], [0, S], color=BLACK, linewidth=1, linestyle="--")
        cells(ax, S, S, "key (position)", "query (position)")
        ticks = range(0, S + 1, max(1, S // P))
        ax.set(xticks=ticks, yticks=ticks)
        ax.set_title(name, fontsize=10)
    handles = [Patch(**looks["past"], label="seen: past"), Patch(**looks["future"], label="seen: FUTURE")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


# ---- As a widget ----------------------------------------------------------------------------------------------------


def explorer() -> Any:
    """Sliders for length, ranks, segment and rate, the layout, and a switch: each rank counts its own rows.

    Returns a widget; without ipywidgets, a ``table``.
    """
    layouts = {str(x): x for x in (zigzag, striped, contiguous)}

    def draw(S: int, P: int, layout: str, segment: int, rate: int, by_row: bool) -> Figure:
        return kept(S, P, 4, segment, min(rate, segment), layouts[layout], by_row=by_row)

    controls = {
        "S": slider("length S", 24, 8, 40),
        "P": slider("ranks P", 4, 1, 8),
        "layout": menu("layout", layouts, "contiguous"),
        "segment": slider("segment w", 24, 1, 40),
        "rate": slider("rate ρ", 4, 1, 8),
        "by_row": switch("each rank counts its own rows", True),
    }

    def static() -> Table:
        return table(24, 4, segment=24, rate=4, by_row=True)

    return explore(draw, static, "four sliders, a menu and a switch", controls)

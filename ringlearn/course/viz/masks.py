"""The mask with each cell in the colour of the rank that computes it: how a layout distributes the work."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ...layouts import Layout, Ranges, count, positions_of
from ...masks import Mask
from ...tiles import Kind, plan
from .figure import MOST_RANKS, caption, colour, ink, new, tile_patch
from .style import BLACK

LONGEST = 256


def mask_by_rank(
    mask: Mask,
    layout: Layout | Sequence[Layout],
    S: int,
    P: int,
    *,
    order: str = "position",
    tiles: bool | None = None,
    ax: Axes | Sequence[Axes] | None = None,
) -> Figure:
    """The S x S mask; what a query sees has the colour of the rank that owns the query, and so computes it.

    layout: one, or several to compare, side by side.  S: at most 256 positions, since the mask is drawn densely.
    order: "position" draws rows and columns in the order of the sequence, "rank" rank by rank, in the order in which
    ranks store them: there each pair of ranks is a rectangle, and one step of the ring fills one of them per rank.
    tiles: outline the tiles that ``plan`` makes, in rank order only (by default if S <= 64).
    ax: axes to draw on, one for each layout.

    Raises ValueError if an argument makes no sense or S is too large.

    >>> import ringlearn as rl
    >>> figure = rl.viz.mask_by_rank(rl.causal, [rl.contiguous, rl.zigzag], S=16, P=4)
    """
    layouts = [layout] if isinstance(layout, Layout) else list(layout) if isinstance(layout, Sequence) else [layout]
    _check(mask, layouts, S, P, order, tiles)
    tiles = (order == "rank" and S <= 64) if tiles is None else tiles
    if ax is None:
        figure, axes = new(len(layouts), (max(5.4, 0.6 + 3.9 * len(layouts)), 5.3), squeeze=False, layout="compressed")
        axes = list(axes[0])
    else:
        axes = [ax] if isinstance(ax, Axes) else list(ax)
        if len(axes) != len(layouts):
            raise ValueError(f"mask_by_rank: expected one ax for each of {len(layouts)} layouts, got {len(axes)}")
        figure = axes[0].figure
    seen = mask.dense(S, S)
    busiest = [_panel(a, mask, seen, chosen, S, P, order, tiles) for a, chosen in zip(axes, layouts)]
    axes[0].set_ylabel("query position" if order == "position" else "queries, rank by rank")
    if ax is None:
        some = range(P) if P <= 8 else sorted({(P - 1) * i // 7 for i in range(8)})
        entries = [Patch(facecolor=colour(r, P), edgecolor="0.4", label=f"rank {r}") for r in some]
        name = repr(mask)
        name = name[1:-1] if name.startswith("(") else name
        title = textwrap.fill(f"Who computes what: {name}, S = {S}, P = {P}", int(figure.get_figwidth() * 11))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)
    ranks = [x.ranges(S, P) for x in layouts] if tiles else []
    packed = any(t.kind is Kind.PACKED for own in ranks for q in own for k in own for t in plan(mask, q, k))
    return caption(figure, _what_to_see(layouts, busiest, order, tiles, packed), ax is None)


def _check(mask: Any, layouts: list[Any], S: Any, P: Any, order: Any, tiles: Any) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask_by_rank: expected a mask such as rl.causal, or rl.mask(fn) for a function of positions, got {mask!r}"
        )
    if not layouts or not all(isinstance(x, Layout) for x in layouts):
        raise ValueError(f"mask_by_rank: expected a layout such as rl.zigzag, or a list of layouts, got {layouts!r}")
    if isinstance(S, bool) or not isinstance(S, int) or not 1 <= S <= LONGEST:
        raise ValueError(
            f"mask_by_rank: expected S, an int in 1..{LONGEST} (every cell of the S x S mask is drawn), got {S!r}; "
            f"draw a shorter sequence: the pattern is the same"
        )
    if isinstance(P, bool) or not isinstance(P, int) or not 1 <= P <= MOST_RANKS:
        raise ValueError(f"mask_by_rank: expected P, a number of ranks in 1..{MOST_RANKS}, got {P!r}")
    if order not in ("position", "rank"):
        raise ValueError(f'mask_by_rank: expected order="position" or order="rank", got {order!r}')
    if tiles and order != "rank":
        raise ValueError(
            'mask_by_rank: tiles are rectangles of what ranks store, so outline them with order="rank"; got '
            'tiles=True with order="position"'
        )
    mask.check(S, S)


def _panel(ax, mask: Mask, seen, layout: Layout, S: int, P: int, order: str, tiles: bool) -> list[int]:
    """Draw one layout; return how many cells each rank computes."""
    ranges = layout.ranges(S, P)
    owner = torch.empty(S, dtype=torch.int64)
    for rank, own in enumerate(ranges):
        owner[positions_of(own)] = rank
    places = torch.arange(S) if order == "position" else torch.cat([positions_of(own) for own in ranges])
    owners = owner[places]
    # -1 where the mask hides the key, else the rank of the row.
    cells = torch.where(seen[places][:, places], owners[:, None], -1)
    colours = ListedColormap(["white", *(colour(r, P) for r in range(P))])
    ax.imshow(cells.numpy(), cmap=colours, vmin=-1.5, vmax=P - 0.5, interpolation="nearest", extent=(0, S, S, 0))
    if S <= 48:
        lines = {"colors": "white", "linewidth": 0.5}
        ax.vlines(range(1, S), 0, S, **lines)
        ax.hlines(range(1, S), 0, S, **lines)
    _margins(ax, owners.tolist(), S, P)
    if order == "rank":
        edges = [0]
        for own in ranges:
            edges.append(edges[-1] + count(own))
        for edge in sorted(set(edges)):
            ax.plot([0, S], [edge, edge], color="0.35", linewidth=0.8)
            ax.plot([edge, edge], [0, S], color="0.35", linewidth=0.8)
        if tiles:
            _outline(ax, mask, ranges, edges)
        ax.set_xticks([]), ax.set_yticks([])
    ax.set_xlabel("key position" if order == "position" else "keys, rank by rank")
    ax.spines[:].set_visible(False)
    work = [int((cells == rank).sum()) for rank in range(P)]
    mean = sum(work) / P
    ratio = f": busiest rank {max(work) / mean:.2f} × the mean" if mean else ": nothing to compute"
    ax.set_title(f"{layout}{ratio}", fontsize=10)
    return work


def _margins(ax: Axes, owners: list[int], S: int, P: int) -> None:
    """A strip of owners along both axes: colour, and the rank's number where there is room."""
    width = 0.055 * S
    start = 0
    for rank, run in groupby(owners):
        stop = start + len(list(run))
        fill = colour(rank, P)
        for x, y, w, h in ((-1.35 * width, start, width, stop - start), (start, -1.35 * width, stop - start, width)):
            ax.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor="white", linewidth=0.4))
            if (stop - start) >= 0.033 * S:
                ax.text(x + w / 2, y + h / 2, str(rank), ha="center", va="center", fontsize=8, color=ink(fill))
        start = stop
    ax.set_xlim(-1.45 * width, S), ax.set_ylim(S, -1.45 * width)


def _outline(ax: Axes, mask: Mask, ranges: Sequence[Ranges], edges: list[int]) -> None:
    for q_rank, q in enumerate(ranges):
        for k_rank, k in enumerate(ranges):
            for tile in plan(mask, q, k):
                style = {"fill": False, "edgecolor": BLACK, "linewidth": 1.4}
                hatch = "///" if tile.kind is Kind.PARTIAL else None
                # The diagonal's own cells are seen: the steps of the stairs, not a line through them.
                patch = tile_patch(tile, edges[k_rank], edges[q_rank], stairs=True, hatch=hatch, **style)
                patch.set_gid(f"tile {q_rank} {k_rank} {tile!r}")
                ax.add_patch(patch)


def _what_to_see(layouts: list[Layout], work: list[list[int]], order: str, tiles: bool, packed: bool) -> str:
    parts = [f"{layout}: {', '.join(map(str, cells))}" for layout, cells in zip(layouts, work) if len(cells) <= 8]
    text = "White is hidden by the mask. "
    if parts:
        text += f"Cells to compute, rank by rank: {'; '.join(parts)}. "
    if order == "rank":
        text += "Each rectangle of the grid is one rank's queries and one rank's keys: one step of that rank. "
        if tiles:
            text += "A black outline is one kernel call"
            text += ", or one document of a call that has several" if packed else ""
            text += ". If it is hatched, the kernel needs the mask itself. "
    return text.strip()

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
from torch import Tensor

from ...layouts import Layout, positions_of
from ...masks import Mask
from .figure import MOST_RANKS, caption, colour, ink, new

LONGEST = 256


def mask_by_rank(mask: Mask, layout: Layout | Sequence[Layout], S: int, P: int) -> Figure:
    """The S x S mask; what a query sees has the colour of the rank that owns the query, and so computes it.

    layout: one, or several to compare, side by side.  S: at most 256 positions, since every cell is drawn.
    Rows and columns are in the order of the sequence.

    Raises ValueError if an argument makes no sense or S is too large.

    >>> import ringlearn as rl
    >>> figure = rl.viz.mask_by_rank(rl.causal, [rl.contiguous, rl.zigzag], S=16, P=4)
    """
    layouts = [layout] if isinstance(layout, Layout) else list(layout) if isinstance(layout, Sequence) else [layout]
    _check(mask, layouts, S, P)
    figure, axes = new(len(layouts), (max(5.4, 0.6 + 3.9 * len(layouts)), 5.3), squeeze=False, layout="compressed")
    seen = mask.dense(S, S)
    work = [_panel(ax, seen, chosen, P) for ax, chosen in zip(axes[0], layouts)]
    axes[0][0].set_ylabel("query position")
    some = range(P) if P <= 8 else sorted({(P - 1) * i // 7 for i in range(8)})
    entries = [Patch(facecolor=colour(r, P), edgecolor="0.4", label=f"rank {r}") for r in some]
    name = repr(mask)
    name = name[1:-1] if name.startswith("(") else name
    title = textwrap.fill(f"Who computes what: {name}, S = {S}, P = {P}", int(figure.get_figwidth() * 11))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)
    text = "White is hidden by the mask. "
    if P <= 8:
        cells = "; ".join(f"{layout}: {', '.join(map(str, n))}" for layout, n in zip(layouts, work))
        text += f"Cells to compute, rank by rank: {cells}."
    return caption(figure, text.strip())


def _check(mask: Any, layouts: list[Any], S: Any, P: Any) -> None:
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
    mask.check(S, S)


def _panel(ax: Axes, seen: Tensor, layout: Layout, P: int) -> list[int]:
    """Draw one layout; return how many cells each rank computes."""
    S = len(seen)
    owners = torch.empty(S, dtype=torch.int64)
    for rank, own in enumerate(layout.ranges(S, P)):
        owners[positions_of(own)] = rank
    cells = torch.where(seen, owners[:, None], -1)  # the rank of the row where the mask shows the key
    colours = ListedColormap(["white", *(colour(r, P) for r in range(P))])
    ax.imshow(cells.numpy(), cmap=colours, vmin=-1.5, vmax=P - 0.5, interpolation="nearest", extent=(0, S, S, 0))
    if S <= 48:
        lines = {"colors": "white", "linewidth": 0.5}
        ax.vlines(range(1, S), 0, S, **lines)
        ax.hlines(range(1, S), 0, S, **lines)
    _margins(ax, owners.tolist(), S, P)
    ax.set_xlabel("key position")
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

"""Memory and time of a plan over lengths, or over numbers of GPUs, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from ..course.viz.figure import caption, new
from ..course.viz.style import SERIES, plain
from .hardware import GiB
from .search import Candidate


def over(found: Mapping[int, Candidate], what: str, capacity: int, title: str) -> Figure:
    """Stacked components of the best plan at each x, memory on the left, time on the right.

    found: by tokens or by GPUs, as ``what`` says.  capacity: bytes of a GPU, drawn as a line.
    """
    figure, axes = new(2, (10, 4.6))
    _stacked(axes[0], found, lambda c: {k: v / GiB for k, v in c.memory.items()})
    axes[0].axhline(capacity / GiB, color="black", linewidth=1, linestyle="--")
    axes[0].set_ylabel("GiB of the fullest GPU")
    _stacked(axes[1], found, lambda c: {k: v / c.step * 100 for k, v in c.seconds.items()})
    axes[1].set_ylabel("% of a step")
    for ax in axes:
        ax.set_xlabel(what)
        ax.set_xticks(range(len(found)), [f"{x:,}" for x in found], rotation=40, ha="right", fontsize=8)
        ax.legend(fontsize=7, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    plain(*axes)
    steps = "; ".join(f"{x:,}: {c.setup}, {c.step:.3g} s" for x, c in found.items())
    return caption(figure, f"{title}. Dashed: what a GPU has. The fastest setup at each: {steps}.")


def _stacked(ax: Any, found: Mapping[int, Candidate], parts: Callable[[Candidate], Mapping[str, float]]) -> None:
    rows = [parts(c) for c in found.values()]
    names: Sequence[str] = list(dict.fromkeys(name for row in rows for name in row))
    bottom = [0.0] * len(rows)
    for i, name in enumerate(names):
        heights = [row.get(name, 0.0) for row in rows]
        colour, hatch = SERIES[i % len(SERIES)][0], SERIES[i // len(SERIES) % len(SERIES)][1]
        ax.bar(range(len(rows)), heights, bottom=bottom, label=name, color=colour, hatch=hatch, edgecolor="white")
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]

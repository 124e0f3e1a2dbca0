"""Rates over sequence length, from what ``ringlearn.bench`` has measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from .figure import caption, new
from .style import SERIES, plain

MARKERS = "osD^vP*X"


def rates(records: Sequence[dict[str, Any]]) -> Figure:
    """TFLOP/s per rank against tokens per rank, forward on the left, forward and backward on the right.

    records: what ``--json`` wrote, one or several; a line for each way of computing.
    """
    figure, axes = new(2, (9, 4.2))
    lines: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for row in record["rows"]:
            name = row["way"] + (", CUDA graph" if row["graph"] else "")
            if row["way"] == "ring":
                name += f", {record['transport'].split()[0]}"
            lines.setdefault(name, []).append(row)
    for ax, what, title in zip(axes, ("forward", "forward_backward"), ("forward", "forward and backward")):
        for i, (name, rows) in enumerate(lines.items()):
            rows = sorted(rows, key=lambda row: row["tokens_per_rank"])
            colour = SERIES[i % len(SERIES)][0]
            x = [row["tokens_per_rank"] for row in rows]
            y = [row[f"{what}_tflops"] for row in rows]
            ax.plot(x, y, MARKERS[i % len(MARKERS)] + "-", color=colour, label=name, markersize=5)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("tokens per rank")
        ax.set_title(title, fontsize=10)
        ax.set_ylim(bottom=0)
        plain(ax)
    axes[0].set_ylabel("TFLOP/s per rank")
    axes[0].legend(frameon=False, fontsize=8)
    ranks = sorted({row["ranks"] for record in records for row in record["rows"]})
    device = ", ".join(sorted({record["hardware"]["device"] for record in records}))
    return caption(
        figure, f"Measured on {device}, {', '.join(map(str, ranks))} ranks; see the JSON files for versions."
    )

"""Rates, memory and overlap over the tokens per rank, from what ``ringlearn.bench`` has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from ..course.viz.figure import caption, new
from ..course.viz.style import BLACK, SERIES, plain
from .table import Row, label

KINDS = {"forward": "forward", "forward_backward": "forward and backward"}
MARKERS, DASHES = "osD^vP*X", ("-", "--", "-.", ":")
SIZE = (9, 4.6)


def rates(records: Sequence[Mapping[str, Any]]) -> Figure:
    """TFLOP/s per rank, forward on the left, forward and backward on the right; a line for each way of computing.

    records: what ``--json`` wrote, one or several.
    """
    figure = _draw(records, lambda row, kind: row.get(f"{kind}_tflops"), "TFLOP/s per rank")
    return caption(figure, f"Median of the slowest rank; black: SDPA on each rank alone. {_measured_on(records)}")


def memory(records: Sequence[Mapping[str, Any]]) -> Figure:
    """What a call allocates beyond its inputs, at its fullest moment.

    Raises ValueError if that was not measured: only GPUs say it.
    """
    figure = _draw(records, lambda row, kind: row.get(f"{kind}_peak_mib"), "peak beyond the inputs, MiB", log=True)
    return caption(figure, f"Fullest rank, including symmetric memory. {_measured_on(records)}")


def overlap(records: Sequence[Mapping[str, Any]]) -> Figure:
    """The fraction of the time that is exposed communication.

    Raises ValueError if that was not measured (``--overlap``).
    """
    figure = _draw(records, lambda row, kind: row.get("exposed", {}).get(kind), "exposed communication")
    for ax in figure.axes:
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    said = "How much longer the ring takes than the same kernel calls without messages, as a part of its time."
    return caption(figure, f"{said} {_measured_on(records)}")


def _draw(
    records: Sequence[Mapping[str, Any]], value: Callable[[Row, str], float | None], what: str, log: bool = False
) -> Figure:
    rows = [row for record in records for row in record["rows"]]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if any(value(row, kind) is not None for kind in KINDS):
            lines.setdefault(label(row, rows), []).append(row)
    if not lines:
        raise ValueError(f"none of these files says anything about {what}")
    kinds = [kind for kind in KINDS if any(value(row, kind) is not None for row in rows)]
    figure, axes = new(len(kinds), SIZE, squeeze=False, sharey=True)
    # One device is what the others are compared with: black, whatever else there is.
    others = [name for name in lines if lines[name][0]["way"] != "one device"]
    for ax, kind in zip(axes[0], kinds, strict=True):
        for name, of_a_way in lines.items():
            found = ((row["tokens_per_rank"], value(row, kind)) for row in of_a_way)
            points = sorted(point for point in found if point[1] is not None)
            colour, marker, dashes = BLACK, "", "-"
            if name in others:
                i = others.index(name)
                colour, marker = SERIES[i % len(SERIES)][0], MARKERS[i % len(MARKERS)]
                dashes = DASHES[i // len(SERIES) % len(DASHES)]
            elif "graph" in name:
                dashes = ":"
            ax.plot(*zip(*points, strict=True), marker or ".", linestyle=dashes, color=colour, label=name,
                    markersize=5, linewidth=1.4)  # fmt: skip
        ax.set_title(KINDS[kind], fontsize=10)
        _scales(ax, sorted({row["tokens_per_rank"] for row in rows}), log)
    axes[0][0].set_ylabel(what)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(3, len(names)), frameon=False, fontsize=8)
    return figure


def _scales(ax: Axes, tokens: Sequence[int], log: bool) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(tokens)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(round(x))))
    ax.set_xlabel("tokens per rank")
    if log:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    else:
        ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    plain(ax)


def _short(tokens: int) -> str:
    """A length as people say it.

    >>> _short(32768), _short(1048576), _short(64)
    ('32k', '1M', '64')
    """
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def _measured_on(records: Sequence[Mapping[str, Any]]) -> str:
    ranks = sorted({record["hardware"]["ranks"] for record in records})
    devices = ", ".join(sorted({record["hardware"]["device"] for record in records}))
    return f"{' and '.join(map(str, ranks))} ranks on {devices}; versions and commands are in the JSON files."

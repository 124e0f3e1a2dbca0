"""Pictures of notebook 05: orders of sends and receives, and what was measured on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..rendezvous import Mistake, Rendezvous
from .figure import new
from .style import BLACK, BLUE, GREY, ORANGE, VERMILION, WAITS, lanes, plain


def orders(P: int = 4, panels: int = 3) -> Figure:
    """One pass of a ring, three times: everybody sends first, even ranks send first, everything is posted at once.

    Drawn from runs on a simulated network that buffers nothing.  panels: how many of the three are shown.
    """
    runs = {
        "all send, then receive": _all_send_first,
        "even ranks send first": _even_send_first,
        "post all, then wait": _post_all,
    }
    figure, axes = new(panels, (0.6 + 2.8 * panels, 2.9), sharey=True, squeeze=False)
    for ax, (title, fn) in zip(axes[0], runs.items()):
        _panel(ax, title, _run(fn, P))
    figure.axes[0].set_yticks(range(P), [f"rank {r}" for r in range(P)])
    return figure


def _run(fn: Callable, P: int) -> Rendezvous:
    network = Rendezvous(P)
    try:
        network.run(fn, [(torch.zeros(1), rank, P) for rank in range(P)])
    except Mistake as mistake:
        if mistake.kind != "deadlock":
            raise
    return network


def _all_send_first(x, rank, P, first=True):
    calls = [(dist.send, x, (rank + 1) % P), (dist.recv, torch.empty_like(x), (rank - 1) % P)]
    for call, tensor, peer in calls if first else calls[::-1]:
        call(tensor, peer)


def _even_send_first(x, rank, P):
    _all_send_first(x, rank, P, first=rank % 2 == 0)


def _post_all(x, rank, P):
    handles = [dist.isend(x, (rank + 1) % P), dist.irecv(torch.empty_like(x), (rank - 1) % P)]
    for handle in handles:
        handle.wait()


def _panel(ax: Axes, title: str, network: Rendezvous) -> None:
    for source, to, start in network.transfers:
        colour, style = (BLUE, "-") if source % 2 == 0 else (ORANGE, "--")
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "linestyle": style}
        arrow |= {"shrinkA": 4, "shrinkB": 4, "mutation_scale": 14}
        if to < source:  # the last rank's message, all the way back
            arrow["connectionstyle"] = "arc3,rad=0.15"
        ax.annotate("", (start + 0.85, to), (start + 0.15, source), arrowprops=arrow)
    for rank, what in network.stuck.items():
        ax.add_patch(Rectangle((0, rank - 0.3), 3, 0.6, **WAITS, linewidth=0.8))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(1.5, rank, f"waits to {what}, for ever", ha="center", va="center", fontsize=8.5, bbox=box)
    turns = "no end" if network.stuck else f"{network.turns:g} turn{'s' * (network.turns != 1)}"
    ax.set_title(f"{title}: {turns}", fontsize=10, loc="left")
    ax.set(xlim=(0, 3), ylim=(network.size - 0.5, -0.5))
    ax.set_xticks(range(4))
    ax.set_xlabel("turns")
    lanes(ax)


def scaling(record: dict[str, Any]) -> Figure:
    """What ``ringlearn.measure.multi_gpu`` measured: SDPA on one GPU, the ring on one and on several, and the link."""
    figure, (time, memory, link) = new(3, (10.5, 3.5))
    many = max(row["gpus"] for row in record["scaling"])
    one = record["plain"]
    alone, ring = ([row for row in record["scaling"] if row["gpus"] == n] for n in (1, many))
    tokens = [row["tokens"] for row in one]
    bars = (
        (one, "SDPA, 1 GPU", GREY, ""),
        (alone, "ring, 1 GPU", ORANGE, ".."),
        (ring, f"ring, {many} GPUs", BLUE, "//"),
    )
    for ax, name, label in (
        (time, "forward_backward_ms", "forward + backward (ms)"),
        (memory, "peak_mib", "peak beyond inputs,\nper GPU (MiB)"),
    ):
        for n, (rows, who, colour, hatch) in enumerate(bars):
            values = [row[name] or 0 for row in rows]
            places = [i + 0.29 * (n - 1) for i in range(len(tokens))]
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            ax.bar(places, values, 0.27, label=who, **style)
            for x, value in zip(places, values):
                number = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
                above = {"textcoords": "offset points", "ha": "center", "va": "bottom", "rotation": 90}
                ax.annotate(number, (x, value), (0, 2), **above, fontsize=6.5)
        ax.set_xticks(range(len(tokens)), [f"{S:,}" for S in tokens], fontsize=8.5)
        ax.set(xlabel="tokens, in all", ylabel=label)
        plain(ax)
        ax.margins(y=0.22)
    time.legend(frameon=False, fontsize=8.5, loc="upper left")
    sizes = [row["mib"] for row in record["transfers"]]
    link.plot(sizes, [row["gb_per_s"] for row in record["transfers"]], "o", color=BLACK, label="measured")
    # Seconds of a small message: up to 1 MiB the size does not matter.
    alpha = median(row["ms"] for row in record["transfers"] if row["mib"] <= 1) / 1e3
    line = [n * 2**20 / alpha / 1e9 for n in sizes]
    link.plot(sizes, line, "--", color=VERMILION, label=f"{1e3 * alpha:.2f} ms each,\nwhatever the size")
    link.set_xscale("log", base=2)
    link.set(yscale="log", ylim=(min(line) / 2, 8 * max(line)))
    link.set_xticks(sizes, [f"{n:.3g}" for n in sizes], fontsize=8, rotation=45)
    link.minorticks_off()
    link.set(xlabel="message (MiB)", ylabel="rate (GB/s, each way)")
    plain(link)
    link.legend(frameon=False, fontsize=8, loc="upper left")
    return figure

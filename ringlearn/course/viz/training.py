"""Pictures of notebook 10: where a token's target is, the mesh of ranks, memory that training keeps, loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from ...costs.training import WAYS, kept_bytes, kept_numbers, state_bytes, weights
from ...layouts import Layout, zigzag
from .figure import colour, ink, new
from .memory import entries, stack
from .style import BLACK, SERIES, VERMILION, YELLOW, plain
from .widgets import Table, explore, log_slider, slider, switch

# A model with the widths of Llama 3.2 1B, but for the bytes as its vocabulary and one feed-forward of 4 d.
SIZES = {"layers": 16, "H": 32, "G": 8, "D": 64, "vocabulary": 256}
MARKERS = "os^Dvx"


def borders(S: int, P: int, layout: Layout = zigzag) -> int:
    """How many tokens have their next token on another rank.

    >>> borders(24, 1), borders(24, 3)
    (0, 4)
    """
    owner = {p: rank for rank in range(P) for p in layout.positions(S, P, rank).tolist()}
    return sum(owner[p] != owner[p + 1] for p in range(S - 1))


def targets(S: int = 24, P: int = 3, layout: Layout = zigzag) -> Figure:
    """Which rank holds each token and what its target is: hatched where the target is on another rank.

    >>> figure = targets(12, 2)
    """
    figure, ax = new(1, (9, 0.75 + 0.42 * P))
    owner = {p: rank for rank in range(P) for p in layout.positions(S, P, rank).tolist()}
    away = {"facecolor": "white", "hatch": "////"}
    for p, rank in owner.items():
        near = p + 1 == S or owner[p + 1] == rank
        look = {"facecolor": colour(rank, P)} if near else {**away, "edgecolor": VERMILION}
        ax.add_patch(Rectangle((p, rank - 0.4), 1, 0.8, **{"edgecolor": BLACK, **look}, gid=f"{p} {near}"))
        text = ax.text(p + 0.5, rank, "-" if p + 1 == S else str(p + 1), ha="center", va="center", fontsize=8)
        text.set_color(ink(colour(rank, P)) if near else BLACK)
        if not near:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    ax.set(xlim=(-0.1, S + 0.1), ylim=(P - 0.5, -0.5))
    ax.set_xticks([p + 0.5 for p in range(S)], range(S), fontsize=8)
    ax.set_yticks(range(P), [f"rank {r}" for r in range(P)], fontsize=9)
    ax.set_xlabel("position of the token; in its cell: the position of its target", fontsize=9)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    entries = [Patch(facecolor="0.7", edgecolor=BLACK, label="target on the same rank")]
    entries.append(Patch(**away, edgecolor=VERMILION, label="target on another rank"))
    figure.legend(handles=entries, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return figure


def mesh(dp: int = 2, cp: int = 3, S: int = 12, layout: Layout = zigzag) -> Figure:
    """A mesh of dp x cp ranks, numbered as ``init_device_mesh`` numbers them, with the tokens that each one holds.

    A row shares one sequence of S tokens; arrows show keys and values going round it. The frame around all ranks stands
    for what is added up over all of them.

    >>> figure = mesh(1, 2)
    """
    figure, ax = new(1, (9, 0.9 + 1.15 * dp))
    for group in range(dp):
        y = 1.5 * (dp - 1 - group)
        ax.text(-0.15, y + 0.45, f"sequence {group}", ha="right", va="center", fontsize=10)
        for place in range(cp):
            runs = [f"{r.start}-{r[-1]}" if len(r) > 1 else str(r.start) for r in layout.ranges(S, cp)[place] if len(r)]
            rank, fill = group * cp + place, colour(place, cp)
            ax.add_patch(Rectangle((2 * place, y), 1.5, 0.9, facecolor=fill, edgecolor=BLACK, gid=f"rank {rank}"))
            text = f"rank {rank}\ntokens {', '.join(runs)}"
            ax.text(2 * place + 0.75, y + 0.45, text, ha="center", va="center", fontsize=9, color=ink(fill))
        look = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0, "color": BLACK}
        for place in range(cp - 1):
            ax.add_patch(FancyArrowPatch((2 * place + 1.5, y + 0.45), (2 * place + 2, y + 0.45), **look))
        if cp > 1:
            back = "arc,angleA=-90,angleB=-90,armA=12,armB=12,rad=4"
            ax.add_patch(FancyArrowPatch((2 * cp - 1.25, y), (0.75, y), connectionstyle=back, **look))
    right, top = 2 * cp - 0.2, 1.5 * (dp - 1) + 1.2
    frame = Rectangle(
        (-1.5, -0.5), right + 1.5, top + 0.5, fill=False, edgecolor=VERMILION, linestyle="--", linewidth=1.6
    )
    ax.add_patch(frame)
    inside = "keys and values, and their gradients,\ntravel along the black arrows:\nwithin a row"
    ax.text(right + 0.2, 0.72 * top, inside, va="center", fontsize=9)
    over_all = "counts, losses and the gradients\nof the weights are added up\nover the whole dashed frame"
    ax.text(right + 0.2, 0.2 * top, over_all, va="center", fontsize=9, color=VERMILION)
    ax.set(xlim=(-1.6, right + 3.4), ylim=(-0.6, top + 0.1))
    ax.axis("off")
    return figure


def curves(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Loss by step. Further runs are drawn as markers at some steps, so that identical curves remain visible.

    >>> figure = curves({"one rank": [3.0, 2.0], "two": [3.0, 2.0]})
    """

    figure, ax = new(1, (7, 2.9))
    for i, (name, values) in enumerate(losses.items()):
        look = {"color": SERIES[i % len(SERIES)][0], "label": name}
        if i:  # a ring of its own around each point, larger for each run
            look |= {"linestyle": "none", "marker": MARKERS[i % len(MARKERS)], "markersize": 4 + 3 * i}
            look |= {"markerfacecolor": "none", "markevery": (i, 4)}
        ax.plot(range(1, len(values) + 1), values, **look)
    ax.set(xlabel="step", ylabel="loss (nats per byte)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(frameon=False, fontsize=9)
    plain(ax)
    return figure


# ---- Memory ---------------------------------------------------------------------------------------------------------


def memory_table(S: int = 131_072, sizes: Mapping[str, int] = SIZES, ranks: Sequence[int] = (1, 2, 4, 8, 16)) -> Table:
    """GiB per rank in float32: activations kept in three ways, and the weights' state, whole and sharded.

    >>> print(memory_table(1024, dict(layers=1, H=2, G=1, D=32)).text.splitlines()[0])
    1,024 tokens; layers 1, width 64, heads 2:1. GiB of each rank, float32
    """
    d, n = sizes["H"] * sizes["D"], weights(**sizes)
    lines = [
        f"{S:,} tokens; layers {sizes['layers']}, width {d:,}, heads {sizes['H']}:{sizes['G']}. "
        f"GiB of each rank, float32",
        "",
        "ranks |   whole  blocks  recompute | weights, gradients, AdamW   sharded (FSDP2)",
    ]
    for P in ranks:
        kept = [kept_bytes(S, P, way=way, **sizes) / 2**30 for way in WAYS]
        state = [state_bytes(n, P, fsdp=fsdp) / 2**30 for fsdp in (False, True)]
        lines.append(f"{P:5} | {kept[0]:7.2f} {kept[1]:7.2f} {kept[2]:10.2f} | {state[0]:25.2f} {state[1]:17.2f}")
    return Table("\n".join(lines))


def memory(S: int, P: int, sizes: Mapping[str, int] = SIZES, *, fsdp: bool = False) -> Figure:
    """What one rank keeps alone, and as one of P ranks: stacked by purpose, in three ways, with the sum above each bar.

    >>> figure = memory(4096, 4)
    """

    figure, axes = new(2, (9, 3.3), sharey=True)
    edge, state = {"edgecolor": "black", "linewidth": 0.5}, "weights, gradients, AdamW"
    looks = {state: ("0.75", "")}
    for ax, ranks in zip(axes, (1, P), strict=True):
        for x, way in enumerate(WAYS):
            numbers = kept_numbers(ranks, way=way, **sizes)
            scale = kept_bytes(S, ranks, way=way, **sizes) / sum(numbers.values())
            table = {state: state_bytes(weights(**sizes), ranks, fsdp=fsdp)}
            for name, n in numbers.items():
                looks.setdefault(name, (*SERIES, (YELLOW, "++"), ("white", "**"))[(len(looks) - 1) % 8])
                table[name] = n * scale
            order = {name: looks[name] for name in table}
            total = stack(ax, x, table, order, 2**30, width=0.8, gid=f"{ranks} {way}", **edge)
            text = f"{total:,.0f}" if total >= 100 else f"{total:.3g}"  # what is too low to be seen can be read
            ax.annotate(text, (x, total), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        ax.set_xticks(range(len(WAYS)), WAYS)
        ax.set_title(f"{ranks} rank{'s' * (ranks > 1)}", fontsize=10)
        plain(ax)
    axes[0].set_ylabel("GiB of each rank (float32)")
    handles = entries(looks, **edge)
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def explorer() -> Any:
    """Sliders for tokens, ranks and layers, and a switch for FSDP2: what a rank keeps, in three ways.

    Returns a widget; without ipywidgets, ``memory_table``.
    """

    def draw(tokens: float, ranks: float, layers: int, fsdp: bool) -> Figure:
        return memory(round(tokens), round(ranks), {**SIZES, "layers": layers}, fsdp=fsdp)

    controls = {
        "tokens": log_slider("tokens", 131_072, 12, 21),
        "ranks": log_slider("ranks", 8, 0, 7),
        "layers": slider("layers", 16, 1, 64),
        "fsdp": switch("shard the weights (FSDP2)"),
    }
    return explore(draw, memory_table, "three sliders and a switch", controls)

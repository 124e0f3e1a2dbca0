"""Pictures of notebook 10: whose token is the target of whose, what training keeps in memory, and loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...costs.training import WAYS, kept_bytes, kept_numbers, state_bytes, weights
from ...layouts import Layout, zigzag
from .widgets import Table, beside, box

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Who holds which token, and which token follows it: hatched where that one is on another rank.

    >>> figure = targets(12, 2)
    """
    from matplotlib.patches import Patch, Rectangle

    from .figure import colour, ink, new
    from .style import BLACK, VERMILION

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


def curves(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Loss by step; of each further run only some steps are marked, so that equal curves can be told apart.

    >>> figure = curves({"one rank": [3.0, 2.0], "two": [3.0, 2.0]})
    """
    from .figure import new
    from .style import SERIES, plain

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
    """GiB of a rank, in float32: activations in three ways, and the weights' state, whole and sharded.

    >>> print(memory_table(1024, dict(layers=1, H=2, G=1, D=32)).text.splitlines()[0])
    1,024 tokens; layers 1, width 64, heads 2:1. GiB of each rank, float32
    """
    d, n = sizes["H"] * sizes["D"], weights(**sizes)
    lines = [
        f"{S:,} tokens; layers {sizes['layers']}, width {d:,}, heads {sizes['H']}:{sizes['G']}. "
        f"GiB of each rank, float32",
        "",
        "ranks |   whole  blocks    anew | weights, gradients, AdamW   sharded (FSDP2)",
    ]
    for P in ranks:
        kept = [kept_bytes(S, P, way=way, **sizes) / 2**30 for way in WAYS]
        state = [state_bytes(n, P, fsdp=fsdp) / 2**30 for fsdp in (False, True)]
        lines.append(f"{P:5} | {' '.join(f'{x:7.2f}' for x in kept)} | {state[0]:25.2f} {state[1]:17.2f}")
    return Table("\n".join(lines))


def memory(S: int, P: int, sizes: Mapping[str, int] = SIZES, *, fsdp: bool = False) -> Figure:
    """For one rank and for each of P: what it keeps, by what it is for, in three ways; the sum above each.

    >>> figure = memory(4096, 4)
    """
    from .figure import new
    from .style import SERIES, YELLOW, plain

    figure, axes = new(2, (9, 3.3), sharey=True)
    parts: dict[str, tuple[str, str]] = {}
    for ax, ranks in zip(axes, (1, P), strict=True):
        for x, way in enumerate(WAYS):
            scale = kept_bytes(S, ranks, way=way, **sizes) / sum(kept_numbers(ranks, way=way, **sizes).values())
            bottom = state_bytes(weights(**sizes), ranks, fsdp=fsdp) / 2**30
            ax.bar(x, bottom, color="0.75", edgecolor="black", linewidth=0.5, label="weights, gradients, AdamW")
            for name, numbers in kept_numbers(ranks, way=way, **sizes).items():
                look = parts.setdefault(name, (*SERIES, (YELLOW, "++"), ("white", "**"))[len(parts) % 8])
                height = numbers * scale / 2**30
                ax.bar(x, height, bottom=bottom, color=look[0], hatch=look[1], edgecolor="black", linewidth=0.5,
                       label=name, gid=f"{ranks} {way} {name}")  # fmt: skip
                bottom += height
            total = f"{bottom:,.0f}" if bottom >= 100 else f"{bottom:.3g}"  # what is too low to be seen can be read
            ax.annotate(total, (x, bottom), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        ax.set_xticks(range(len(WAYS)), WAYS)
        ax.set_title(f"{ranks} rank{'s' * (ranks > 1)}", fontsize=10)
        plain(ax)
    axes[0].set_ylabel("GiB of each rank (float32)")
    found = dict(zip(*reversed(axes[0].get_legend_handles_labels())))
    figure.legend(found.values(), found.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def explorer() -> Any:
    """Sliders for tokens, ranks and layers, and a switch for FSDP2: what a rank keeps, in three ways.

    Returns a widget made of core ipywidgets (7 or 8); without ipywidgets, the static twin, ``memory_table``.
    """
    try:
        import ipywidgets as widgets
    except ImportError:
        return memory_table()
    from .explorer import png

    look = {"continuous_update": False, "layout": widgets.Layout(width="400px", max_width="100%")}
    power = {"base": 2, "step": 1, "readout_format": ",.0f"}
    tokens = widgets.FloatLogSlider(value=131_072, min=12, max=21, description="tokens", **power, **look)
    ranks = widgets.FloatLogSlider(value=8, min=0, max=7, description="ranks", **power, **look)
    layers = widgets.IntSlider(value=16, min=1, max=64, description="layers", **look)
    fsdp = widgets.Checkbox(value=False, description="shard the weights (FSDP2)", indent=False)
    image = widgets.Image(format="png", layout=widgets.Layout(width="810px", max_width="100%"))

    def update(_change=None):
        sizes = {**SIZES, "layers": layers.value}
        image.value = png(memory(round(tokens.value), round(ranks.value), sizes, fsdp=fsdp.value))

    for control in (tokens, ranks, layers, fsdp):
        control.observe(update, names="value")
    update()
    return box(
        [beside(widgets.VBox([tokens, ranks]), widgets.VBox([layers, fsdp])), image], "three sliders and a switch"
    )

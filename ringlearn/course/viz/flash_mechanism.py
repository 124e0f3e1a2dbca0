"""Pictures of how flash attention works: what lies on the chip, two paths into the loss, and what a chip can reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from .figure import caption, ink, new, pale
from .style import BLACK, BLUE, GREEN, GREY, ORANGE, SERIES, SKY, VERMILION, plain


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str, fill: str, **style) -> None:
    """Draw a labelled box on axes without a frame."""
    ax.add_patch(Rectangle((x, y), width, height, **{"facecolor": fill, "edgecolor": BLACK, "linewidth": 1.0} | style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=ink(to_hex(fill)))


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = BLACK, **style) -> None:
    """Draw an arrow."""
    look = {"arrowstyle": "-|>", "mutation_scale": 12, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, color=colour, **look | style))


def chip(blocks: int = 6, queries: int = 3, keys: int = 1) -> Figure:
    """Main memory and chip while one tile is computed: one block of queries stays, blocks of keys and values pass by.

    blocks: how many blocks q, k and v are cut into.  queries, keys: the block of each that is on the chip, from 0.
    """
    figure, ax = new(1, (9, 3.9))
    ax.set(xlim=(0, 12), ylim=(-0.35, 6.3))
    ax.axis("off")
    ax.add_patch(Rectangle((0, 0), 5.6, 5.7, facecolor="0.96", edgecolor=GREY))
    ax.add_patch(Rectangle((7.5, 0), 4.5, 5.7, facecolor="0.96", edgecolor=BLACK, linewidth=1.6))
    ax.text(2.8, 5.85, "main memory: large and slow", ha="center", fontsize=10)
    ax.text(9.75, 5.85, "chip: small and fast", ha="center", fontsize=10)
    for x, name, fill, here in ((0.4, "q", BLUE, queries), (1.7, "k", ORANGE, keys), (3.0, "v", GREEN, keys)):
        for i in range(blocks):
            label = f"{name}$_{i}$"
            box(ax, x, 4.9 - 0.8 * i, 1.0, 0.7, label, fill if i == here else pale(fill))
    for i in range(blocks):
        done = i < queries
        box(ax, 4.3, 4.9 - 0.8 * i, 1.0, 0.7, f"out$_{i}$" if done else "", pale(SKY) if done else "white",
             linestyle="-" if done else ":")  # fmt: skip
    box(ax, 7.9, 4.3, 1.2, 0.9, f"q$_{queries}$\nstays", BLUE)
    box(ax, 9.6, 4.3, 0.9, 0.9, f"k$_{keys}$", ORANGE)
    box(ax, 10.7, 4.3, 0.9, 0.9, f"v$_{keys}$", GREEN)
    box(ax, 7.9, 2.4, 3.7, 1.2, "one tile of scores,\nthen of weights", "white", hatch="//", edgecolor=ORANGE)
    ax.texts[-1].set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 2})
    box(ax, 7.9, 0.5, 3.7, 1.2, f"running out$_{queries}$, lse$_{queries}$:\nthe merge of all tiles so far", pale(SKY))
    arrow(ax, (5.6, 4.75), (7.5, 4.75))
    ax.text(6.55, 4.85, "read", ha="center", va="bottom", fontsize=9)
    arrow(ax, (7.5, 1.1), (5.6, 1.1))
    ax.text(6.55, 1.2, "write, once\na row is done", ha="center", va="bottom", fontsize=9)
    for x in (8.5, 10.05, 11.15):
        arrow(ax, (x, 4.3), (x, 3.6))
    arrow(ax, (9.75, 2.4), (9.75, 1.7))
    words = (
        "The chip holds one block of queries while blocks of keys and values pass by. The scores of a tile live only "
        "until their weighted values are merged into the running result; main memory never sees them."
    )
    return caption(figure, words)


def two_paths() -> Figure:
    """How a score reaches the loss when its row is computed in two blocks: through its block's out and through its lse.

    The numbers are those of the row with weights (1/2, 1/4, 1/4), values (1, 0, 4) and dout = 2.
    """
    figure, ax = new(1, (9, 3.7))
    ax.set(xlim=(0, 12), ylim=(-0.2, 6.2))
    ax.axis("off")
    for y, name, scores, out in ((3.6, "a", "scores 0, 1", "2/3"), (0.4, "b", "score 2", "4")):
        box(ax, 0.1, y + 0.5, 1.9, 1.2, scores, "0.94")
        box(ax, 4.0, y + 1.3, 2.0, 0.9, f"out$_{name}$ = {out}", pale(BLUE))
        box(ax, 4.0, y, 2.0, 0.9, f"lse$_{name}$", pale(VERMILION))
        arrow(ax, (2.0, y + 1.3), (4.0, y + 1.75), BLUE)
        arrow(ax, (2.0, y + 0.9), (4.0, y + 0.45), VERMILION, linestyle="--")
        arrow(ax, (6.0, y + 1.75), (8.0, 3.4 if name == "a" else 2.9), BLUE)
        arrow(ax, (6.0, y + 0.45), (8.0, 3.15 if name == "a" else 2.65), VERMILION, linestyle="--")
    box(ax, 8.0, 2.2, 1.5, 1.7, "merge:\nweights\n3/4, 1/4", "0.94")
    box(ax, 10.4, 2.6, 1.5, 0.9, "out = 1.5", pale(SKY))
    arrow(ax, (9.5, 3.05), (10.4, 3.05))
    where = {"fontsize": 9, "ha": "center"}
    ax.text(3.0, 5.6, "key 0: +1/3", color=BLUE, **where)
    ax.text(3.0, 3.72, "key 0: -5/6", color=VERMILION, **where)
    ax.text(3.0, 2.35, "key 2: 0", color=BLUE, **where)
    ax.text(3.0, 0.42, "key 2: +5/4", color=VERMILION, **where)
    words = (
        "A block hands two results to the merge, so each of its scores has two paths to the loss: through the block's "
        "out (solid) and through its lse (dashed). The numbers say what each path adds to the gradient of a score."
    )
    return caption(figure, words)


class Chip(NamedTuple):
    """A chip as its data sheet has it.

    flops: matrix operations per second, in 16 bits.  bandwidth: bytes per second of its main memory.
    fast: bytes of fast memory that one block of queries can have.
    """

    name: str
    flops: float
    bandwidth: float
    fast: int

    @property
    def balance(self) -> float:
        """Operations that it can do while a byte comes from main memory.

        >>> round(CHIPS[1].balance)
        153
        """
        return self.flops / self.bandwidth


# NVIDIA: data sheets of T4 (2019), A100 80GB SXM (2021), H100 SXM (2023), dense FP16 tensor operations, and the shared
# memory of a multiprocessor in the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
# Apple: press release of 6 June 2022, and the threadgroup memory of Metal Feature Set Tables.
CHIPS = (
    Chip("T4 (Colab)", 65e12, 320e9, 64 * 2**10),
    Chip("A100 80 GB", 312e12, 2039e9, 164 * 2**10),
    Chip("H100", 989e12, 3350e9, 228 * 2**10),
    Chip("laptop (Apple M2)", 3.6e12, 100e9, 32 * 2**10),
)


def roofline(chips: Sequence[Chip] = CHIPS, *, itemsize: int = 2) -> Figure:
    """The FLOP/s that each chip can reach if all keys and values come from main memory, over the rows of a block.

    itemsize: bytes per number of k and v.
    """
    figure, ax = new(1, (9, 4.2))
    rows = [2**n for n in range(2, 11)]
    for (colour, _), marker, one in zip(SERIES, "osD^vP", chips, strict=False):
        reached = [min(one.flops, 2 * n / itemsize * one.bandwidth) / 1e12 for n in rows]
        label = f"{one.name}: flat from {one.balance * itemsize / 2:.0f} rows on"
        ax.loglog(rows, reached, color=colour, marker=marker, markersize=5, linewidth=1.8, label=label)
    ax.set_xticks(rows, [f"{n:,}" for n in rows])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set(xlabel="rows of a block of queries", ylabel="TFLOP/s at most (data sheet)")
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    plain(ax)
    words = (
        "On the slope a chip waits for main memory, and twice the rows make it twice as fast; on the flat part it "
        "computes as fast as it can. These are limits computed from data sheets, not measurements."
    )
    return caption(figure, words)

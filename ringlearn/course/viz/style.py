"""The look of all pictures: Okabe and Ito's colours, each with a hatch so that greyscale works too; and axes."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#000000", "#8C8C8C"

# (colour, hatch): neighbours differ in lightness as well.
SERIES = ((BLUE, ""), (ORANGE, "//"), (GREEN, ".."), (PURPLE, "xx"), (SKY, "\\\\"), (VERMILION, "oo"))


# How a bar looks, in pictures and legends, while a rank waits or has nothing to compute.
WAITS = {"facecolor": "white", "edgecolor": VERMILION, "hatch": "////"}


def plain(*axes: Any) -> None:
    """Remove the frame lines that carry no information, and draw a light grid behind the data."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)


def lanes(*axes: Any) -> None:
    """The same for horizontal bars in rows: the grid lines are vertical, and the rows have no axis line."""
    for ax in axes:
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)


def cells(ax: Any, columns: float, rows: float, across: str, down: str, margin: float = 0.0) -> None:
    """Axes of square cells, counted from the top left, without a frame; across and down name what is counted."""
    ax.set(xlim=(-margin, columns + margin), ylim=(rows + margin, -margin), aspect="equal", xlabel=across)
    ax.set_ylabel(down)
    ax.spines[:].set_visible(False)

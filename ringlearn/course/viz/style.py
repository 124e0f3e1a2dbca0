"""One look for all pictures: Okabe and Ito's colours, with a hatch for each so that greyscale works too."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#000000", "#8C8C8C"

# (colour, hatch): neighbours differ in lightness as well.
SERIES = ((BLUE, ""), (ORANGE, "//"), (GREEN, ".."), (PURPLE, "xx"), (SKY, "\\\\"), (VERMILION, "oo"))


def plain(*axes: Any) -> None:
    """Take off the frame lines that say nothing, and put a light grid behind."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)

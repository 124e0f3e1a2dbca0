"""The box in which a widget stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def box(children: Sequence[Any], controls: str) -> Any:
    """Widgets one below the other. A page without a running kernel shows in their place what there would be to move.

    controls: "two sliders". Needs ipywidgets.
    """
    import ipywidgets as widgets

    class Box(widgets.VBox):
        def __repr__(self) -> str:
            return f"({controls}: they show when the notebook runs live)"

    return Box(children)


def beside(*children: Any) -> Any:
    """Widgets side by side; where the window is narrow, one below the other. Needs ipywidgets."""
    import ipywidgets as widgets

    return widgets.HBox(children, layout=widgets.Layout(flex_flow="row wrap"))


class Table:
    """A text table whose repr is itself."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

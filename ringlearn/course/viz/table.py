"""A table as text, which a notebook shows as it is: the static twin of a widget."""

from __future__ import annotations


class Table:
    """A text table whose repr is itself."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

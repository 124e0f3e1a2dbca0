"""Mistakes that checkers know, each by what it gives: an answer that gives just that is told the cause.

A mistake is a place to look, a likely cause, and the value that it gives on the very input that an answer was tried on.
The value is computed from the input, not from the answer's text, so a mistake is found in whatever words it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Reason = tuple[str, str]  # where to look, and the likely cause


def recognised(mistakes: Iterable[tuple[str, str, Any]], looks_like: Callable[[Any], Any], otherwise: Reason) -> Reason:
    """Where to look and the likely cause of the first mistake whose value an answer looks like; or ``otherwise``.

    >>> doubled_or_halved = ("the factor", "doubled", 8), ("the factor", "halved", 2)
    >>> recognised(doubled_or_halved, lambda value: value == 2, ("everything", "no known mistake"))
    ('the factor', 'halved')
    """
    return next(((where, cause) for where, cause, value in mistakes if looks_like(value)), otherwise)

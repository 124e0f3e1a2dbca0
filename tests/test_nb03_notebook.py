"""Notebook 03 as a learner leaves it: solved with its own solutions, with guesses made."""

from __future__ import annotations

from course import markdown, read
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "03"
    ANSWERS = [36, 1572864, 3, 2]
    QUIZ = [3, 6, 1, 8, 0]
    GIVEAWAYS = {"predict_tiles": ("36",), "predict_bytes": ("1,572,864",), "predict_direction": ("[1, 2]",)}


def test_every_comparison_of_the_notebook_holds(solved):
    """Sums, orders, the library: what prints a boolean prints True."""
    assert "False" not in solved and solved.count("True") == 10


def test_the_size_that_the_text_names_is_right():
    """A million tokens, 8 key heads, head dim 128, bfloat16: 4 GB of keys and values a layer."""
    assert "8 key heads, head dim 128, bfloat16) take 4 GB per layer" in markdown(read("03"))
    assert round(2 * 10**6 * 8 * 128 * 2 / 1e9) == 4

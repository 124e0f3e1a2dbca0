"""Notebook 03 as a learner leaves it: solved with its own solutions, with guesses made."""

from __future__ import annotations

from course import markdown, read
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "03"
    ANSWERS = [36, 1572864, 3, 2]
    QUIZ = [3, 6, 1, 8, 0, 23]
    SPOILERS = {
        "exercise-3a": (r"(rank|\br) - (step|t)\b", r"kv\[-1:\]", r"\\bmod"),
        "exercise-3b": (r"length=len", r"mask\(positions\[", r"visible\.any\(\)"),
        "predict-tiles": (r"(?<![-\d])36\b", r"P ?\(P ?\+ ?1\)"),
        "predict-bytes": (r"1,?572,?864",),
        "predict-shards": (r"\b(3|three) shards", r"\\min\(2"),
        "predict-direction": (r"\[1, 2\]", r"ranks 1 and 2", r"\| wrong, off by"),
        "quiz": (r"\b23\b",),
    }


def test_every_comparison_of_the_notebook_holds(solved):
    """Sums, orders, the library: what prints a boolean prints True."""
    assert "False" not in solved and solved.count("True") == 10


def test_the_size_that_the_text_names_is_right():
    """A million tokens, 8 key heads, head dim 128, bfloat16: 4 GB of keys and values a layer."""
    assert "`2 * 1_000_000 * 8 * 128 * 2` bytes, about 4 GB per layer" in markdown(read("03"))
    assert round(2 * 10**6 * 8 * 128 * 2 / 1e9) == 4

"""Notebook 03 as a learner leaves it: solved with its own solutions, with guesses made."""

from __future__ import annotations

import pytest
from course import collapsed_answers, markdown, printed, read, run, solve

from ringlearn.checks import nb03

GUESSES = {
    "predict_tiles": "36",
    "predict_bytes": "1572864",
    "predict_shards": "3",
    "predict_direction": "2",
    "quiz": "[3, 6, 1, 8, 0]",
}
ASKED = (nb03.predict_tiles, nb03.predict_bytes, nb03.predict_shards, nb03.predict_direction)


@pytest.fixture(scope="module")
def solved() -> str:
    return run(solve(read("03"), GUESSES))


@pytest.mark.parametrize("exercise", ["3a list_ring", "3b ring_forward"])
def test_the_solutions_that_the_notebook_shows_pass_its_checkers(solved, exercise):
    assert f"{exercise}: correct" in solved


def test_right_guesses_are_told_so(solved):
    assert solved.count(": right.") == 4 + 5
    assert "Quiz 03: 5 of 5." in solved
    assert "not written yet" not in solved and "first." not in solved


def test_every_comparison_of_the_notebook_holds(solved):
    """Sums, orders, the library: what prints a boolean prints True."""
    assert "False" not in solved and solved.count("True") == 10


def test_as_shipped_nothing_is_solved_and_no_prediction_is_given_away():
    cells = [cell for cell in read("03").cells if cell.cell_type == "code"]
    text = printed(read("03"))
    assert text.count("not written yet") == 2
    assert text.count("write your guess first") == 4 and text.count("write your answers first") == 1
    for prediction, giveaway in (
        ("predict_tiles", "36"),
        ("predict_bytes", "1,572,864"),
        ("predict_direction", "[1, 2]"),
    ):
        before = [cell.source for cell in cells].index(f"guess = None\nrl.checks.nb03.{prediction}(guess)")
        shown = "".join(output.get("text", "") for cell in cells[:before] for output in cell.outputs)
        assert giveaway not in shown


def test_the_collapsed_answers_are_the_computed_ones():
    assert collapsed_answers(read("03")) == [str(prediction.answer()) for prediction in ASKED]


def test_the_size_that_the_text_names_is_right():
    """A million tokens, 8 key heads, head dim 128, bfloat16: 4 GB of keys and values a layer."""
    assert "8 key heads, head dim 128, bfloat16) take 4 GB per layer" in markdown(read("03"))
    assert round(2 * 10**6 * 8 * 128 * 2 / 1e9) == 4

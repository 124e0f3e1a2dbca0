"""Notebook 02 as a learner leaves it: solved with its own solutions, and with guesses made; and as it is shipped."""

from __future__ import annotations

import re

import pytest
from course import collapsed_answers, printed, read, run, solve

from ringlearn.checks import nb02

ASKED = {
    "predict_terabytes": nb02.predict_terabytes,
    "predict_ds": nb02.predict_ds,
    "predict_exact": nb02.predict_exact,
    "predict_block": nb02.predict_block,
}
GUESSES = {
    "predict_terabytes": "4",
    "predict_ds": "1.25",
    "predict_exact": "'dv'",
    "predict_block": "130",
    "quiz": "[34_078_720, 32, 2.5, -0.5, 3.9]",
}


@pytest.fixture(scope="module")
def solved() -> str:
    return run(solve(read("02"), GUESSES))


@pytest.mark.parametrize("exercise", ["2a tiled_forward", "2b row_backward", "2c tiled_backward", "2d traffic"])
def test_the_solutions_that_the_notebook_shows_pass_its_checkers(solved, exercise):
    assert f"{exercise}: correct" in solved


def test_right_guesses_are_told_so(solved):
    assert solved.count(": right.") == 4 + 5
    assert "Quiz 02: 5 of 5." in solved
    assert "not written yet" not in solved and "first." not in solved


def test_as_shipped_nothing_is_solved_and_no_prediction_is_given_away():
    text = printed(read("02"))
    assert text.count("not written yet") == 4
    assert text.count("write your guess first") == 4 and text.count("write your answers first") == 1
    cells = [cell for cell in read("02").cells if cell.cell_type == "code"]
    for name, prediction in ASKED.items():
        for cell in cells:
            if name in cell.source:
                break
            shown = "".join(output.get("text", "") for output in cell.outputs)
            assert not re.search(rf"(?<![\w.,]){re.escape(str(prediction.answer()))}(?![\w.,])", shown), name


def test_the_collapsed_answers_are_the_computed_ones():
    assert collapsed_answers(read("02")) == [str(prediction.answer()) for prediction in ASKED.values()]


def test_a_delta_per_block_shows_its_signature_and_so_does_a_local_mask():
    text = printed(read("02"))
    off = {what: re.search(rf"{what} +per block: off by (.*)", text)[1] for what in ("neither", "delta", "lse")}
    assert off["neither"] == "dq 0.00 dk 0.00 dv 0.00"
    assert off["delta"].endswith("dv 0.00") and "0.00" not in off["delta"][:-4]
    assert "0.00" not in off["lse"]
    assert "delta from each block: ds  0.33 -0.33  0.00   sum over the row 0.00" in text
    assert "S =  64: off by 0.00" in text and "byte 855 has changed: True" in text

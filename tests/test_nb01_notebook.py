"""Notebook 01 as a learner leaves it: solved with its own solutions, with guesses made, and without ipywidgets."""

from __future__ import annotations

import re
import sys

import pytest
from course import collapsed_answers, printed, read, run, solve


@pytest.fixture(scope="module")
def solved() -> str:
    return run(solve(read("01"), GUESSES))


GUESSES = {
    "predict_overflow": "89",
    "predict_moves": "7",
    "predict_order": "'descending'",
    "predict_weight": "0.75",
    "quiz": "[0.9, 2, 3, 524288, 4096]",
}


@pytest.mark.parametrize("exercise", ["1a online_softmax", "1b merge", "1c blockwise"])
def test_the_solutions_that_the_notebook_shows_pass_its_checkers(solved, exercise):
    assert f"{exercise}: correct" in solved


def test_right_guesses_are_told_so(solved):
    assert solved.count(": right.") == 4 + 5
    assert "Quiz 01: 5 of 5." in solved
    assert "not written yet" not in solved and "first." not in solved


def test_as_shipped_nothing_is_solved_and_no_prediction_is_given_away():
    cells = [cell for cell in read("01").cells if cell.cell_type == "code"]
    text = printed(read("01"))
    assert text.count("not written yet") == 3
    assert text.count("write your guess first") == 4 and text.count("write your answers first") == 1
    for cell in cells:
        if "predict_overflow" in cell.source:
            break
        assert "89" not in "".join(output.get("text", "") for output in cell.outputs)


def test_the_collapsed_answers_are_the_computed_ones():
    from ringlearn.checks import nb01

    asked = (nb01.predict_overflow, nb01.predict_moves, nb01.predict_order, nb01.predict_weight)
    assert collapsed_answers(read("01")) == [str(prediction.answer()) for prediction in asked]


def test_without_ipywidgets_the_stepper_is_its_static_twin(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from ringlearn.viz import softmax

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    scores, values = torch.tensor([0.0, 1.0, -torch.inf, 2.0]), torch.tensor([1.0, 0.0, 5.0, 1.0])
    twin = softmax.stepper(scores, values)
    assert repr(twin) == repr(softmax.stepper_table(scores, values, [0, 1, 2, 3, 4]))
    assert "nan" not in repr(twin)


def test_the_stepper_moves_its_state_and_never_its_result():
    torch = pytest.importorskip("torch")
    pytest.importorskip("ipywidgets")
    from ringlearn.viz import softmax

    scores, values = torch.tensor([0.0, 1.0, 3.0, -torch.inf, 2.0]), torch.tensor([1.0, 0.0, 0.5, 9.0, 1.0])
    stepper = softmax.stepper(scores, values)
    seen, state, split, parts = stepper.children
    seen.value = 3
    assert "read key 2: score 3.0" in state.value and "0.1353 &nbsp;the maximum moved" in state.value
    seen.value = 4
    assert "read key 3: score -inf" in state.value and "maximum moved" not in state.value
    table = repr(softmax.stepper_table(scores, values, [2]))
    assert "  4    2.0    1.0 |    3.0   1.0000   1.5530   0.9177 |   0.5909" in table
    results = set()
    for split.value in range(6):
        results.add(re.search(r"([\d.]+) &nbsp;\(never moves\)", parts.value)[1])
        assert f"left, {split.value} keys" in parts.value
    want = float(torch.softmax(scores, -1) @ values)
    assert results == {f"{want:.4f}"}

"""Notebook 09 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

import pytest
from course import collapsed_answers, printed, read, run, solve

from ringlearn.checks import nb09

GUESSES = {
    "predict_weight": "67",
    "predict_rows": "4",
    "predict_leaks": "3",
    "predict_bytes": "100",
    "predict_exact": "'dv'",
    "quiz": "[7, 512, 50, 0.69, 24]",
}


@pytest.fixture(scope="module")
def solved() -> str:
    return run(solve(read("09"), GUESSES))


@pytest.mark.parametrize("exercise", ["9a seen", "9b dilated_ring"])
def test_the_solutions_that_the_notebook_shows_pass_its_checkers(solved, exercise):
    assert f"{exercise}: correct" in solved


def test_right_guesses_are_told_so(solved):
    assert solved.count(": right.") == 5 + 5
    assert "Quiz 09: 5 of 5." in solved
    assert "not written yet" not in solved and "first." not in solved


def test_as_shipped_nothing_is_solved_and_no_prediction_is_given_away():
    nb = read("09")
    text = printed(nb)
    assert text.count("not written yet") == 2
    assert text.count("write your guess first") == 5 and text.count("write your answers first") == 1
    before = {}
    for cell in nb.cells:  # what is printed above each prediction
        asked = re.search(r"nb09\.(predict_\w+)\(", cell.source)
        if asked:
            before[asked[1]] = "".join(before.get("", []))
        elif cell.cell_type == "code":
            before.setdefault("", []).extend(output.get("text", "") for output in cell.outputs)
    assert "67" not in before["predict_weight"]
    assert "same keys" not in before["predict_rows"] and "!" not in before["predict_leaks"]
    assert "100.0%" not in before["predict_bytes"] and "dv" not in before["predict_exact"].replace("positions", "")


def test_the_collapsed_answers_are_the_computed_ones():
    asked = ("weight", "rows", "leaks", "bytes", "exact")
    assert collapsed_answers(read("09")) == [str(getattr(nb09, f"predict_{name}").answer()) for name in asked]


def test_what_the_cells_print_is_what_the_text_says(solved):
    lines = {line[:14].strip(): line for line in solved.splitlines() if line.startswith("S = ")}
    assert "same keys: True " in lines["S = 32, full"] and "off by 0.00" in lines["S = 32, full"]
    assert "ahead: 0" not in lines["S = 32, causal"] and "ahead: 0" not in lines["S = 24, causal"]
    assert "same keys: False" in lines["S = 24, full"]
    assert "all below 1e-12: True" in solved
    assert "not one bit of what comes before: True" in solved
    assert re.search(r"\[\(7, 3\)\].* 33\.9%", solved) and re.search(r"\[\(64, 1\), \(256, 16\)\].* 100\.0%", solved)
    assert "dv: detached, off by 0.00   library right: True" in solved
    assert not re.search(r"d[qk]: detached, off by 0\.0", solved)
    for line in re.findall(r"\[\(.*%", solved):
        counted, computed = re.findall(r" ([\d,]{5,}) ", line)
        assert counted == computed

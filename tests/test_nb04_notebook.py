"""Notebook 04 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import pytest
from course import collapsed_answers, printed, read, run, solve

from ringlearn.checks import nb04

GUESSES = {
    "predict_home": "6",
    "predict_messages": "15",
    "predict_wire": "'grows'",
    "predict_exposed": "1",
    "predict_unwound": "13",
    "predict_half": "67",
    "quiz": "[3, 5767168, 46, 2654208, 0]",
}


@pytest.fixture(scope="module")
def solved() -> str:
    return run(solve(read("04"), GUESSES))


@pytest.mark.parametrize("exercise", ["4a ring_backward", "4b predict"])
def test_the_solutions_that_the_notebook_shows_pass_its_checkers(solved, exercise):
    assert f"{exercise}: correct" in solved


def test_right_guesses_are_told_so(solved):
    assert solved.count(": right.") == 6 + 5
    assert "Quiz 04: 5 of 5." in solved
    assert "not written yet" not in solved and "first." not in solved


def test_as_shipped_nothing_is_solved_and_no_prediction_is_given_away():
    text = printed(read("04"))
    assert text.count("not written yet") == 2
    assert text.count("write your guess first") == 6 and text.count("write your answers first") == 1
    assert "grows" not in text and "67" not in text and "15" not in text and "13" not in text


def test_the_collapsed_answers_are_the_computed_ones():
    asked = ("home", "messages", "wire", "exposed", "unwound", "half")
    nb = read("04")
    assert collapsed_answers(nb) == [str(getattr(nb04, f"predict_{name}").answer()) for name in asked]


def test_what_the_cells_print_is_what_the_text_says(solved):
    table = solved.partition("wrong are")[2].partition("no hop home gives")[0].splitlines()[1:]
    rows = {line[:19].strip(): [line[i : i + 13].strip() for i in range(19, 19 + 4 * 13, 13)] for line in table if line}
    assert len(rows) == 5
    assert all(row[0] == "-" for row in rows.values()), "one rank: nothing is found"
    assert rows["other direction"] == ["-", "-", "-", "dq dk dv"]
    assert rows["delta per step"][3] == "dq dk", "dv is exact"
    assert all(row[3] != "-" for row in rows.values()), "P = 4, causal finds all five"
    assert "wrong dk passes allclose(atol=1e-2): True   off by 100%: True" in solved

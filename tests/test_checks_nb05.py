"""The checkers of notebook 05 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import time

import pytest
from zoo.nb05 import RIGHT, WRONG

from ringlearn.checks import nb05
from ringlearn.launch import Pool

CHECKERS = {"5a": nb05.ring_pass, "5b": nb05.ring_exchange, "5c": nb05.ring}


@pytest.fixture(scope="module")
def pool():
    with Pool(4, backend=None) as pool:
        yield pool


def _name(answer):
    return "-".join(fn.__name__ for fn in answer) if isinstance(answer, tuple) else answer.__name__


WRONG_CASES = [
    pytest.param(key, *case, id=f"{key}-{n}-{_name(case[0])}") for key in WRONG for n, case in enumerate(WRONG[key])
]
RIGHT_CASES = [pytest.param(key, fn, id=f"{key}-{_name(fn)}") for key in RIGHT for fn in RIGHT[key]]


@pytest.mark.parametrize(("exercise", "answer", "stage", "word"), WRONG_CASES)
def test_a_wrong_answer_is_rejected_at_its_stage_with_a_message_that_helps(exercise, answer, stage, word, pool):
    began = time.monotonic()
    result = CHECKERS[exercise](answer, pool, help=2)
    assert not result
    assert (result.status, result.stage) == ("failed", stage), result.message
    assert word in result.message, result.message
    for line in ("what happens", "smallest input", "where to look", "likely cause"):
        assert line in result.message
    assert max(map(len, result.message.splitlines())) < 300
    assert time.monotonic() - began < 15  # never a hang: a message in seconds


@pytest.mark.parametrize(("exercise", "answer"), RIGHT_CASES)
def test_a_right_answer_passes_in_whatever_words(exercise, answer, pool):
    result = CHECKERS[exercise](answer, pool)
    assert result, result.message
    assert result.message.count("\n") == 0


@pytest.mark.parametrize("exercise", CHECKERS)
def test_the_zoo_has_at_least_five_wrong_answers_that_are_all_different(exercise):
    answers = [case[0] for case in WRONG[exercise]]
    assert len(set(answers)) == len(answers) >= 5

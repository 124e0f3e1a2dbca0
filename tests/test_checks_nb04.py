"""The checkers of notebook 04 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.nb04 import RIGHT, WRONG

from ringlearn.checks import nb04

CHECKERS = {"4a": nb04.ring_backward, "4b": nb04.predict}


def _cases(zoo):
    return [
        pytest.param(key, *_tuple(case), id=f"{key}-{_tuple(case)[0].__name__}") for key in zoo for case in zoo[key]
    ]


def _tuple(case):
    return case if isinstance(case, tuple) else (case,)


@pytest.mark.parametrize(("exercise", "fn", "stage", "word"), _cases(WRONG))
def test_a_wrong_answer_is_rejected_at_its_stage_with_a_message_that_helps(exercise, fn, stage, word):
    result = CHECKERS[exercise](fn, help=2)
    assert not result
    assert (result.status, result.stage) == ("failed", stage), result.message
    assert word in result.message
    for line in ("what happens", "smallest input", "where to look", "likely cause"):
        assert line in result.message


@pytest.mark.parametrize(("exercise", "fn"), _cases(RIGHT))
def test_a_right_answer_passes_in_whatever_words(exercise, fn):
    result = CHECKERS[exercise](fn)
    assert result, result.message
    assert result.message.count("\n") == 0


@pytest.mark.parametrize("exercise", CHECKERS)
def test_the_zoo_has_at_least_five_wrong_answers_that_are_all_different(exercise):
    functions = [case[0] for case in WRONG[exercise]]
    assert len(set(functions)) == len({fn.__name__ for fn in functions}) == len(functions) >= 5


def test_an_untouched_stub_prints_one_calm_line(capsys):
    async def program(comm, dout, q, k, v, out, lse, positions, mask):
        dq = ...
        return dq, ..., ...

    async def nothing_async(comm, dout, q, k, v, out, lse, positions, mask): ...

    def nothing(S, P, H, G, D, e): ...

    def blanks(S, P, H, G, D, e):
        kv = ...
        return (P - 1) * kv, ..., ..., ...

    for exercise, stub in (("4a", program), ("4a", nothing_async), ("4b", nothing), ("4b", blanks)):
        result = CHECKERS[exercise](stub)
        assert (result.status, result.stage) == ("unwritten", None)
        printed = capsys.readouterr().out
        assert printed.count("\n") == 1 and "not written yet" in printed


def test_predictions_tell_nothing_before_a_guess_and_are_right_about_the_answer(capsys):
    asked = [getattr(nb04, name) for name in dir(nb04) if name.startswith("predict_")]
    assert len(asked) == 5
    for prediction in asked:
        assert prediction(None).status == "unwritten"
        assert capsys.readouterr().out == f"{prediction.question}: write your guess first.\n"
        assert prediction(prediction.answer())
        capsys.readouterr()


def test_the_quiz_is_computed():
    assert [question.answer() for question in nb04.quiz.questions] == [3, 5767168, 46.0, 2654208, 0]

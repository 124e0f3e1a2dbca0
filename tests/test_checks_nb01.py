"""The checkers of notebook 01 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.rules import ZooRules

from ringlearn.course.checks import Checker, Prediction, nb01
from ringlearn.course.checks.checker import Wrong, call


class TestZoo(ZooRules):
    NUMBER = "01"


def _value(fn):
    if call(fn, 1, input="1") != 2:
        raise Wrong("it is not 2", input="1", where="the plus", cause="it is a minus")


def test_the_cause_is_told_at_the_second_failure_in_a_row_or_when_asked_for():
    check = Checker("0 add one", value=_value)
    first, second = check(lambda x: x - 1), check(lambda x: x - 1)
    assert "minus" not in first.message and "minus" in second.message
    assert check(lambda x: x + 1)
    assert "minus" not in check(lambda x: x - 1).message
    assert "minus" in Checker("0 add one", value=_value)(lambda x: x - 1, help=2).message


def test_stages_run_in_order_and_stop_at_the_first_failure():
    ran = []

    def cost(fn):
        ran.append("cost")

    assert not Checker("0", value=_value, cost=cost)(lambda x: x) and ran == []
    assert Checker("0", value=_value, cost=cost)(lambda x: x + 1) and ran == ["cost"]
    with pytest.raises(ValueError, match="in that order"):
        Checker("0", cost=cost, value=_value)


def test_an_exception_in_the_answer_becomes_a_message():
    result = Checker("0", value=_value)(lambda x: 1 / 0)
    assert result.stage == "value" and "ZeroDivisionError" in result.message
    assert Checker("0", value=_value)(lambda x: x + ...).status == "unwritten"


def test_a_call_in_place_of_a_function_says_so():
    with pytest.raises(ValueError, match=r"without \(\)"):
        nb01.merge((1, 2))


def test_one_move_too_few_is_wrong_and_the_mean_itself_is_right():
    assert not nb01.predict_moves(6) and not nb01.predict_moves(8)
    assert nb01.predict_moves(7) and nb01.predict_moves(7.05)


def test_a_prediction_tells_nothing_before_a_guess(capsys):
    prediction = Prediction("0 sum", answer=lambda: 42, why="Because.", tolerance=1)
    assert prediction(None).status == "unwritten"
    assert capsys.readouterr().out == "0 sum: write your guess first.\n"
    assert prediction(42) and prediction(41) and not prediction(12) and not prediction("many")
    assert "42" in prediction(12).message
    assert prediction("42")
    assert prediction("many").message == "0 sum: write a number, not 'many'."

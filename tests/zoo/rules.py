"""What holds for every zoo: a wrong answer is rejected at its stage with a message that helps, a right one passes.

A test file of a notebook's checkers says ``class TestZoo(ZooRules)`` with three attributes: CHECKERS, exercise ->
checker; WRONG, exercise -> [(function, stage, word of the message)]; RIGHT, exercise -> [function].
"""

from __future__ import annotations

import pytest


class ZooRules:
    CHECKERS: dict
    WRONG: dict
    RIGHT: dict

    def pytest_generate_tests(self, metafunc):
        if "stage" in metafunc.fixturenames:
            cases = [(key, *case) for key in self.WRONG for case in self.WRONG[key]]
            metafunc.parametrize(("exercise", "fn", "stage", "word"), [_named(case) for case in cases])
        elif "fn" in metafunc.fixturenames:
            metafunc.parametrize(
                ("exercise", "fn"), [_named((key, fn)) for key in self.RIGHT for fn in self.RIGHT[key]]
            )
        elif "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", list(self.CHECKERS))

    def test_a_wrong_answer_is_rejected_at_its_stage_with_a_message_that_helps(self, exercise, fn, stage, word):
        result = self.CHECKERS[exercise](fn, help=2)
        assert not result
        assert (result.status, result.stage) == ("failed", stage), result.message
        assert word in result.message
        for line in ("what happens", "smallest input", "where to look", "likely cause"):
            assert line in result.message

    def test_a_right_answer_passes_in_whatever_words(self, exercise, fn):
        result = self.CHECKERS[exercise](fn)
        assert result, result.message
        assert result.message.count("\n") == 0

    def test_the_zoo_has_at_least_five_wrong_answers_that_are_all_different(self, exercise):
        functions = [case[0] for case in self.WRONG[exercise]]
        assert len(set(functions)) == len({fn.__name__ for fn in functions}) == len(functions) >= 5
        assert self.RIGHT[exercise]


def assert_unwritten(result, capsys) -> None:
    """A checker's answer to a stub that nobody has touched: one calm line."""
    assert (result.status, result.stage) == ("unwritten", None), result.message
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "not written yet" in printed


def _named(case):
    return pytest.param(*case, id=f"{case[0]}-{case[1].__name__}")

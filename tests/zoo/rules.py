"""What holds for every zoo: a wrong answer is rejected at its stage with a message that helps, a right one passes.

A test file of a notebook's checkers says ``class TestZoo(ZooRules)`` with NUMBER, the notebook's.
"""

from __future__ import annotations

import importlib

import pytest

from ringlearn.course.checks import Checker


def _blank(*arguments):
    x = ...
    return x * arguments[-1]


def _blank_inside(*arguments):
    return [[max(...)] for _ in arguments]


def _docstring(*arguments):
    """Not written."""
    ...


async def _program(comm, *arguments):
    share = ...
    return share, ...


class ZooRules:
    NUMBER: str

    @classmethod
    def zoo(cls):
        return importlib.import_module(f"zoo.nb{cls.NUMBER}")

    @classmethod
    def checkers(cls) -> dict[str, Checker]:
        """Exercise, "1a" -> its checker."""
        module = importlib.import_module(f"ringlearn.checks.nb{cls.NUMBER}")
        return {x.exercise.split()[0]: x for x in vars(module).values() if isinstance(x, Checker)}

    def pytest_generate_tests(self, metafunc):
        wrong, right = self.zoo().WRONG, self.zoo().RIGHT
        if "stage" in metafunc.fixturenames:
            cases = [(key, *case) for key in wrong for case in wrong[key]]
            metafunc.parametrize(("exercise", "fn", "stage", "word"), [_named(case) for case in cases])
        elif "fn" in metafunc.fixturenames:
            metafunc.parametrize(("exercise", "fn"), [_named((key, fn)) for key in right for fn in right[key]])
        elif "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", list(self.checkers()))

    def check(self, exercise, fn, **options):
        return self.checkers()[exercise](fn, **options)

    def test_a_wrong_answer_is_rejected_at_its_stage_with_a_message_that_helps(self, exercise, fn, stage, word):
        result = self.check(exercise, fn, help=2)
        assert not result
        assert (result.status, result.stage) == ("failed", stage), result.message
        assert word in result.message
        for line in ("what happens", "smallest input", "where to look", "likely cause"):
            assert line in result.message

    def test_a_right_answer_passes_in_whatever_words(self, exercise, fn):
        result = self.check(exercise, fn)
        assert result, result.message
        assert result.message.count("\n") == 0

    @pytest.mark.parametrize("stub", [_blank, _blank_inside, _docstring, _program])
    def test_an_untouched_stub_prints_one_calm_line(self, exercise, stub, capsys):
        assert_unwritten(self.check(exercise, stub), capsys)

    def test_the_zoo_has_at_least_five_wrong_answers_that_are_all_different(self, exercise):
        functions = [case[0] for case in self.zoo().WRONG.get(exercise, [])]
        assert len(set(functions)) == len(set(map(_name, functions))) == len(functions)
        assert len(functions) >= 5 and self.zoo().RIGHT.get(exercise), f"WRONG and RIGHT of {self.zoo().__name__}"


def assert_unwritten(result, capsys) -> None:
    """A checker's answer to a stub that nobody has touched: one calm line."""
    assert (result.status, result.stage) == ("unwritten", None), result.message
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "not written yet" in printed


def _named(case):
    return pytest.param(*case, id=f"{case[0]}-{_name(case[1])}")


def _name(answer):
    return "-".join(fn.__name__ for fn in answer) if isinstance(answer, tuple) else answer.__name__

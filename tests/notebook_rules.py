"""What holds for every notebook as a learner leaves it, solved and with guesses made, and for it as it is shipped.

A test file of a notebook says ``class TestNotebook(NotebookRules)`` with these attributes:

    NUMBER      the notebook, "01"
    ANSWERS     what its predictions should be answered with, in the order in which it asks
    QUIZ        the same for its quiz
    SPOILERS    id of an exercise's, prediction's or quiz's cell -> regular expressions that would give it away: no
                text, source, output, caption or alternative text above it, or in the two cells after it, may match one
                (folded boxes may)

The fixture ``solved``, which is for the other tests of the file too, is all that the notebook prints when it is solved.
"""

from __future__ import annotations

import importlib
import re

import pytest
from course import collapsed_answers, predictions, printed, read, told

from ringlearn.course.checks import Checker


class NotebookRules:
    NUMBER: str
    ANSWERS: list
    QUIZ: list
    SPOILERS: dict[str, tuple[str, ...]]

    def pytest_generate_tests(self, metafunc):
        if "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", [checker.exercise for checker in self.checkers()])
        if "spoilers" in metafunc.fixturenames:
            metafunc.parametrize(("cell_id", "spoilers"), list(self.SPOILERS.items()))

    @classmethod
    def module(cls):
        return importlib.import_module(f"ringlearn.checks.nb{cls.NUMBER}")

    @classmethod
    def checkers(cls) -> list[Checker]:
        return [x for x in vars(cls.module()).values() if isinstance(x, Checker)]

    @classmethod
    def guesses(cls) -> dict[str, str]:
        """For ``course.solve``: what to guess where."""
        answers = zip(predictions(read(cls.NUMBER)), cls.ANSWERS, strict=True)
        return {name: repr(answer) for name, answer in answers} | {"quiz": repr(cls.QUIZ)}

    @pytest.fixture
    def checks(self):
        return self.module()

    @property
    def asked(self) -> list[str]:
        return predictions(read(self.NUMBER))

    def test_the_solutions_that_the_notebook_shows_pass_its_checkers(self, solved, exercise):
        assert f"{exercise}: correct" in solved

    def test_right_guesses_are_told_so(self, solved, checks):
        questions = len(checks.quiz.questions)
        assert len(re.findall(r": right( \(near enough to .*\))?\.", solved)) == len(self.asked) + questions
        assert f"Quiz {self.NUMBER}: {questions} of {questions}." in solved
        assert "not written yet" not in solved and "first." not in solved

    def test_a_prediction_says_nothing_before_a_guess_and_its_answer_is_computed(self, checks, capsys):
        for name, answer in zip(self.asked, self.ANSWERS, strict=True):
            prediction = getattr(checks, name)
            assert prediction(None).status == "unwritten"
            assert capsys.readouterr().out == f"{prediction.question}: write your guess first.\n"
            assert prediction(answer), capsys.readouterr().out
            capsys.readouterr()
        assert checks.quiz(self.QUIZ), capsys.readouterr().out

    def test_as_shipped_nothing_is_solved(self):
        text = printed(read(self.NUMBER))
        assert text.count("not written yet") == len(self.checkers())
        assert text.count("write your guess first") == len(self.asked) and text.count("write your answers first") == 1

    def test_nothing_around_a_question_gives_it_away(self, cell_id, spoilers):
        seen = told(read(self.NUMBER), cell_id)
        assert not [
            (spoiler, seen[max(0, hit.start() - 60) : hit.end() + 60])
            for spoiler in spoilers
            if (hit := re.search(spoiler, seen))
        ]

    def test_every_question_says_what_would_give_it_away(self):
        code = [cell.id for cell in read(self.NUMBER).cells if cell.cell_type == "code"]
        assert {name for name in code if re.match(r"exercise-|predict-|quiz", name)} <= set(self.SPOILERS)

    def test_the_collapsed_answers_are_the_computed_ones(self, checks):
        assert collapsed_answers(read(self.NUMBER)) == [str(getattr(checks, name).answer()) for name in self.asked]

"""Questions that a reader answers before running the next cell, and quizzes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .checker import Result


class Prediction:
    """A question to answer before the next cell is run: ``prediction(guess)``, where guess is None at first.

    answer: a function that computes the answer by running the real thing. why: what the answer teaches. It is told
    only after a guess. tolerance: how far a numeric guess may be off and still count.

    >>> two = Prediction("0 sum", answer=lambda: 2, why="One and one.")
    >>> result = two(None)
    0 sum: write your guess first.
    >>> result = two(3)
    0 sum: you said 3, it is 2. One and one.
    """

    def __init__(self, question: str, answer: Callable[[], Any], why: str, tolerance: float = 0.0):
        self.question, self.answer, self.why, self.tolerance = question, answer, why, tolerance

    def __call__(self, guess: Any) -> Result:
        result = self._judge(guess)
        print(result.message)
        return result

    def _judge(self, guess: Any) -> Result:
        if guess is None or guess is Ellipsis:
            return Result(self.question, "unwritten", f"{self.question}: write your guess first.")
        answer = self.answer()
        if isinstance(answer, str):
            right = str(guess).strip().lower() == answer.lower()
        else:
            if isinstance(guess, str):
                try:
                    guess = float(guess.replace(",", ""))
                except ValueError:
                    return Result(self.question, "failed", f"{self.question}: write a number, not {guess!r}.")
            try:
                right = abs(guess - answer) <= self.tolerance
            except TypeError:
                right = False
        shown = f"{answer:,}" if isinstance(answer, int) else f"{answer}"
        if right:
            close = "" if guess == answer or isinstance(answer, str) else f" (near enough to {shown})"
            return Result(self.question, "passed", f"{self.question}: right{close}. {self.why}")
        return Result(self.question, "failed", f"{self.question}: you said {guess}, it is {shown}. {self.why}")


class Quiz:
    """A few predictions at once: ``quiz([None, None, None])``, each None replaced by an answer.

    questions: of each the answer, why, and perhaps a tolerance, as for a ``Prediction``; they are numbered from 1.

    >>> quiz = Quiz("quiz 0", (lambda: 2, "One and one."))
    >>> result = quiz([None])
    quiz 0: write your answers first.
    >>> result = quiz([2])
    quiz 0, question 1: right. One and one.
    quiz 0: 1 of 1.
    """

    def __init__(self, name: str, *questions: tuple):
        self.name = name
        self.questions = tuple(Prediction(str(n), *given) for n, given in enumerate(questions, 1))

    def __call__(self, answers: Sequence[Any]) -> Result:
        if not isinstance(answers, list | tuple) or len(answers) != len(self.questions):
            raise ValueError(
                f"{self.name}: expected a list of {len(self.questions)} answers, None where you pass, got {answers!r}"
            )
        results = [question._judge(answer) for question, answer in zip(self.questions, answers)]
        given = [result for result in results if result.status != "unwritten"]
        if not given:
            result = Result(self.name, "unwritten", f"{self.name}: write your answers first.")
        else:
            right = sum(map(bool, results))
            lines = [f"{self.name}, question {result.message}" for result in given]
            lines.append(f"{self.name}: {right} of {len(results)}.")
            status = "passed" if right == len(results) else "failed"
            result = Result(self.name, status, "\n".join(lines))
        print(result.message)
        return result

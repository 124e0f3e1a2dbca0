"""Questions that a reader answers before running the next cell, and quizzes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from .checker import Result

UNITS = {
    **{"%": 0.01, "percent": 0.01, "b": 1, "byte": 1, "bytes": 1},
    **{f"{letter}{i}b": (1024 if i else 1000) ** n for n, letter in enumerate("kmgt", 1) for i in ("", "i")},
    **{"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9},
}


def readings(guess: Any, unit: str = "") -> list[float]:
    """The numbers that a guess may stand for, counted in the question's unit; none if it is no number.

    A text may be a fraction and may have a unit. Where the question does not say in which unit it counts, a unit in
    the guess may be the question's own or not, so both readings are given. A fraction of 1 may stand for a percentage.

    >>> readings("1,536"), readings("3/4"), readings("512 KiB"), readings("0.5 MiB", "KiB"), readings("many")
    ([1536.0], [0.75], [512.0, 524288.0], [512.0], [])
    >>> readings(0.67, "%"), readings("67 %", "%"), readings("3/4", "%")
    ([0.67, 67.0], [67.0], [0.75, 75.0])
    """
    below, said = None, ""
    if isinstance(guess, str):
        found = re.fullmatch(r"([-+]?[\d.,]*\d(?:e[-+]?\d+)?)(?:\s*/\s*(\d+))?\s*(%|[^\W\d_]*)", guess.strip(), re.I)
        if not found:
            return []
        guess, below, said = found[1].replace(",", ""), found[2], found[3].lower()
    try:
        number = float(guess) / float(below or 1)
    except (TypeError, ValueError, ZeroDivisionError):
        return []
    scale, own = UNITS.get(said), UNITS.get(unit.lower())
    if scale is None:
        return [number, 100 * number] if unit == "%" and 0 < number <= 1 else [number]
    return [number, number * scale] if own is None else [number * scale / own]


class Prediction:
    """A question to answer before the next cell is run: ``prediction(guess)``, where guess is None at first.

    answer: a function that computes the answer by running the real thing. why: what the answer teaches. It is shown
    only after a guess. tolerance: how far off a numeric guess may be and still count. unit: the unit of the answer,
    such as "bytes", "MiB", "ms" or "%"; a guess may be in another unit (see ``readings``).

    >>> two = Prediction("0 sum", answer=lambda: 2, why="One and one.")
    >>> result = two(None)
    0 sum: write your guess first.
    >>> result = two(3)
    0 sum: you said 3, it is 2. One and one.
    """

    def __init__(self, question: str, answer: Callable[[], Any], why: str, tolerance: float = 0.0, unit: str = ""):
        self.question, self.answer, self.why, self.tolerance, self.unit = question, answer, why, tolerance, unit

    def __call__(self, guess: Any) -> Result:
        result = self._judge(guess)
        print(result.message)
        return result

    def _judge(self, guess: Any) -> Result:
        if guess is None or guess is Ellipsis:
            return Result(self.question, "unwritten", f"{self.question}: write your guess first.")
        answer = self.answer()
        if isinstance(answer, str):
            right = exact = str(guess).strip().lower() == answer.lower()
        else:
            numbers = readings(guess, self.unit)
            if isinstance(guess, str) and not numbers:
                return Result(self.question, "failed", f"{self.question}: write a number, not {guess!r}.")
            rounding = 1e-9 * abs(answer)  # of a conversion between units
            exact = any(abs(number - answer) <= rounding for number in numbers)
            right = any(abs(number - answer) <= max(self.tolerance, rounding) for number in numbers)
        shown = f"{answer:,}" if isinstance(answer, int) else f"{answer}"
        if right:
            close = "" if exact else f" (near enough to {shown})"
            return Result(self.question, "passed", f"{self.question}: right{close}. {self.why}")
        return Result(self.question, "failed", f"{self.question}: you said {guess}, it is {shown}. {self.why}")


class Quiz:
    """A few predictions at once: ``quiz([None, None, None])``, each None replaced by an answer.

    questions: for each a tuple of the answer, why, and optionally a tolerance and a unit, as in ``Prediction``; they
    are numbered from 1.

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

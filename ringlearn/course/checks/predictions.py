"""Questions that a reader answers before running the next cell, and quizzes."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from .checker import Result

# What a guess may be given in: the kind of quantity, and its size in the kind's own unit.
UNITS = {"byte": ("bytes", Fraction(1)), "b": ("bytes", Fraction(1)), "%": ("a share", Fraction(1, 100))}
UNITS |= {"percent": UNITS["%"], "per cent": UNITS["%"], "second": ("seconds", Fraction(1))}
UNITS |= {f"{x}b": ("bytes", Fraction(1000**n)) for n, x in enumerate("kmgtp", 1)}
UNITS |= {f"{x}ib": ("bytes", Fraction(1024**n)) for n, x in enumerate("kmgtp", 1)}
UNITS |= {x: ("seconds", Fraction(1, 1000**n)) for x, n in (("s", 0), ("ms", 1), ("us", 2), ("µs", 2), ("ns", 3))}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def read(text: str, unit: str = "") -> float:
    """The number that a text says: "3/4", "4 * 2^30", "34,078,720", and with a unit "512 KiB", "67%", "2 hops".

    unit: what the number is asked for in; "" if it has none. Words that are no unit, such as "hops", are ignored.
    Raises ValueError, which says what to write, for other texts and for a unit of another kind.

    >>> read("3/4"), read("512 KiB", "bytes"), read("4e12 bytes", "TB"), read("75%"), read("2/3 hops")
    (0.75, 524288.0, 4.0, 0.75, 0.6666666666666666)
    """
    problem = f"write a number{' of ' * (unit not in ('', '%'))}{unit if unit != '%' else ' in per cent'}, not {text!r}"
    plain = re.sub(r"(?<=\d)[,_ ](?=\d{3}(?!\d))", "", text.strip().lower().removeprefix("~").rstrip("."))
    plain = re.sub(r"\^", "**", re.sub(r"(?<=\d)\s*[x×·]\s*(?=\d)", "*", plain.replace("−", "-")))
    try:
        return float(_value(plain))
    except (ValueError, SyntaxError, ZeroDivisionError):
        found = re.fullmatch(r"(.*[\d.)])\s*(%|[a-zµ][a-zµ ]*)", plain)
    try:
        number, word = _value(found[1]), found[2]
    except (ValueError, SyntaxError, ZeroDivisionError, TypeError):
        raise ValueError(problem) from None
    kind, size = UNITS.get(word) or UNITS.get(word.removesuffix("s")) or (None, Fraction(1))
    due, of = UNITS.get(unit.lower()) or UNITS.get(unit.lower().removesuffix("s")) or ("a share", Fraction(1))
    if kind not in (None, due):
        raise ValueError(problem)
    return float(number if kind is None else number * size / of)


def _value(text: str) -> Fraction:
    """The value of a text with numbers, + - * / and powers; ValueError or SyntaxError for anything else."""

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and abs(value(node.right)) <= 64:
            return Fraction(value(node.left) ** value(node.right))
        raise ValueError(text)

    return value(ast.parse(text.strip(), mode="eval").body)


class Prediction:
    """A question to answer before the next cell is run: ``prediction(guess)``, where guess is None at first.

    answer: a function that computes the answer by running the real thing. why: what the answer teaches. It is told
    only after a guess. tolerance: how far a numeric guess may be off and still count. unit: what the answer is in, such
    as "bytes", "GiB", "ms" or "%"; a guess may then be a text in another unit of the kind, and 0.67 counts as 67%.

    >>> two = Prediction("0 sum", answer=lambda: 2, why="One and one.")
    >>> result = two(None)
    0 sum: write your guess first.
    >>> result = two(3)
    0 sum: you said 3, it is 2. One and one.
    >>> result = Prediction("0 size", answer=lambda: 2048, why="Two to the eleventh.", unit="bytes")("2 KiB")
    0 size: right. Two to the eleventh.
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
        answer, value = self.answer(), guess
        if isinstance(answer, str):
            right = exact = str(guess).strip().lower() == answer.lower()
        else:
            if isinstance(guess, str):
                try:
                    value = read(guess, self.unit)
                except ValueError as problem:
                    return Result(self.question, "failed", f"{self.question}: {problem}.")
            try:
                if self.unit == "%" and 0 < value < 1 < answer and "%" not in str(guess):
                    value = 100 * value  # a share in place of per cent
                right, exact = abs(value - answer) <= self.tolerance, value == answer
            except TypeError:
                right = exact = False
        shown = f"{answer:,}" if isinstance(answer, int) else f"{answer}"
        shown += self.unit if self.unit == "%" else f" {self.unit}" * bool(self.unit)
        if right:
            close = "" if exact else f" (near enough to {shown})"
            return Result(self.question, "passed", f"{self.question}: right{close}. {self.why}")
        return Result(self.question, "failed", f"{self.question}: you said {guess}, it is {shown}. {self.why}")


class Quiz:
    """A few predictions at once: ``quiz([None, None, None])``, each None replaced by an answer.

    questions: of each the answer, why, and perhaps a tolerance and a unit, as for a ``Prediction``; numbered from 1.

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

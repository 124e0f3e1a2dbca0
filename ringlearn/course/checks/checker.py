"""How an exercise is checked: stages in a fixed order, each a function that raises Wrong at the first mistake.

    value        the smallest inputs that show whether the idea is there
    adversarial  inputs that break an almost right answer: -inf, 1e4, ragged sizes, another order
    gradient     what autograd finds when it goes through the answer
    cost         reads, messages, bytes, live memory
    processes    the same once more, on several processes

An exercise has the stages that it teaches, and no others.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STAGES = ("value", "adversarial", "gradient", "cost", "processes")


_tried: ContextVar[str] = ContextVar("tried", default="any")


def trying(input: str) -> None:
    """Note which input the learner's function is about to get: whatever is found wrong next is found on that input."""
    _tried.set(input)


def tried_input() -> str:
    """What was noted last."""
    return _tried.get()


class Wrong(Exception):
    """What a stage raises: the symptom, where to look, the likely cause, and the smallest input that shows it.

    The cause is shown only at the second failure: looking for it is the exercise. ``input`` is by default the last one
    that the learner's function was given.
    """

    def __init__(self, symptom: str, where: str, cause: str, input: str | None = None):
        super().__init__(symptom)
        self.symptom, self.where, self.cause = symptom, where, cause
        self.input = _tried.get() if input is None else input


@dataclass(frozen=True)
class Result:
    """What a checker found. True if the answer passed; ``status`` is "passed", "failed" or "unwritten".

    ``stage`` is the stage that failed, None otherwise. ``message`` is the text that was printed.
    """

    exercise: str
    status: str
    message: str
    stage: str | None = None

    def __bool__(self) -> bool:
        return self.status == "passed"

    def _ipython_display_(self) -> None:
        """Nothing: the message was printed, and a notebook cell need not show it again."""


class Checker:
    """Checks a learner's function: ``checker(my_function)`` prints what it finds and returns a Result.

    exercise: such as "1a online_softmax". stages: functions that take the learner's function and raise Wrong, named as
    in STAGES and run in that order. The first failure shows the symptom, the input and where to look; the second one in
    a row, or ``help=2``, also the likely cause. A function with a blank ``...`` in it gets one fixed line.

    >>> def value(fn):
    ...     if call(fn, 2, input="2") != 4:
    ...         raise Wrong("2 gives another number than 4", where="the exponent", cause="you doubled")
    >>> check = Checker("0a square", value=value)
    >>> bool(check(lambda x: x * x))
    0a square: correct (value).
    True
    """

    def __init__(self, exercise: str, **stages: Callable[[Callable], None]):
        names = tuple(stages)
        if tuple(name for name in STAGES if name in stages) != names:
            raise ValueError(f"stages must be some of {STAGES}, in that order, got {names}")
        self.exercise, self.stages = exercise, tuple(stages.items())
        self.failures = 0

    def __call__(self, fn: Callable, *, help: int = 1) -> Result:
        result = self._check(fn, help)
        print(result.message)
        return result

    def _check(self, fn: Callable, help: int) -> Result:
        if not callable(fn):
            raise ValueError(f"{self.exercise}: expected your function, got {type(fn).__name__}; pass it without ()")
        if self._unwritten(fn):
            text = f"{self.exercise}: not written yet. Fill in every `...`, then run this cell again."
            return Result(self.exercise, "unwritten", text)
        for stage, run in self.stages:
            try:
                with torch.enable_grad():
                    run(fn)
            except Wrong as wrong:
                self.failures += 1
                return Result(self.exercise, "failed", self._explain(stage, wrong, help), stage)
        self.failures = 0
        done = ", ".join(name for name, _ in self.stages)
        return Result(self.exercise, "passed", f"{self.exercise}: correct ({done}).")

    def _unwritten(self, fn: Callable) -> bool:
        return has_blank(fn)

    def _explain(self, stage: str, wrong: Wrong, help: int) -> str:
        lines = [
            f"{self.exercise}: not yet. Stage: {stage}.",
            f"  what happens   {wrong.symptom}",
            f"  smallest input {wrong.input}",
            f"  where to look  {wrong.where}",
        ]
        if help >= 2 or self.failures >= 2:
            lines.append(f"  likely cause   {wrong.cause}")
        else:
            lines.append("  (run it again, or with help=2, for the likely cause)")
        return "\n".join(lines)


def call(
    fn: Callable, *args: Any, input: str, where: str = "", cause: str = "", shapes: tuple[str, str] | None = None
) -> Any:
    """fn(*args); an exception, or no result, becomes Wrong, so that no traceback hides the message.

    where, cause: what this input is about. shapes: where to look and the cause if shapes do not fit, which is another
    mistake than the one that the input is about.
    """
    trying(input)
    try:
        result = fn(*args)
    except Exception as error:
        raise raised(error, where, cause, shapes) from error
    return returned(result)


def cases(check: Callable, *inputs: tuple) -> Callable[[Callable], None]:
    """A stage that makes check(fn, *input), which raises Wrong, for one input after the other."""

    def stage(fn: Callable) -> None:
        for each in inputs:
            check(fn, *each)

    return stage


def raised(
    error: Exception, where: str, cause: str, shapes: tuple[str, str] | None = None, line: str = "", at: str = ""
) -> Wrong:
    """What is said of an exception.

    where, cause, shapes: as for ``call``.  line: the learner's own, where it is known; at: of a rank program, the rank.
    """
    text = str(error).splitlines()[0].removesuffix(", but expected one of:") if str(error) else "no message"
    if re.search("'tuple' object has no attribute '(out|lse)'", text):
        where, cause = "what is passed to merge", "a plain pair has no .out, no .lse: make it rl.Partial(out, lse)"
    elif isinstance(error, AttributeError | NameError | TypeError):  # a slip of the pen, not of the idea
        where = cause = ""
    elif "Boolean value of Tensor" in text:
        where = "an `if`, `and`, `or`, `not`, max() or min() that takes a tensor"
        cause = (
            "many rows are neither true nor false. Combine comparisons with & and |, each in parentheses; torch.where "
            "and torch.maximum work row by row"
        )
    elif shapes and isinstance(error, RuntimeError) and re.search("shape|size", text):
        where, cause = shapes
    return Wrong(
        f"{at} your function raises {type(error).__name__}: {text}".strip(),
        where or line or "the line that raises: call your function yourself to see it",
        cause or _why(error, text),
    )


def returned(result: Any, whose: str = "your function") -> Any:
    """The result, or Wrong if there is none."""
    if result is None:
        cause = "there is no return statement, or it stands where it is not reached"
        raise Wrong(f"{whose} returns None", "its last line", cause)
    return result


def _why(error: Exception, text: str) -> str:
    """The cause of an exception of which no more is known than its type and text."""
    if isinstance(error, IndexError):
        return "an index, or a part of a list, that is not there: print the shape or the length of what is indexed"
    if re.search("shape|size|dimension|unpack", text):
        return "shapes that do not fit: print those of the tensors in this line"
    if isinstance(error, AttributeError | NameError | TypeError):
        return "a name, an argument or a method that is not there, as the message says"
    return "as the message says"


def has_blank(answer: Callable | str) -> bool:
    """Whether a function, or a text, still has a `...` in it that stands for code, not for the dims of an index.

    >>> def pass_on(token):
    ...     arrived = ...
    ...     return arrived[..., 0]
    >>> has_blank(pass_on)
    True
    """
    try:
        tree = ast.parse(answer if isinstance(answer, str) else textwrap.dedent(inspect.getsource(answer)))
    except (OSError, TypeError, SyntaxError):
        return False
    index = {id(n) for s in ast.walk(tree) if isinstance(s, ast.Subscript) for n in ast.walk(s.slice)}
    return any(isinstance(n, ast.Constant) and n.value is ... and id(n) not in index for n in ast.walk(tree))


def parts(result: Any, names: str, returns: str = "your function returns") -> tuple[Any, ...]:
    """The parts of what the learner returned, as many as there are names in "dq, dk, dv"; or Wrong."""
    count = names.count(",") + 1
    if not isinstance(result, tuple | list) or len(result) != count:
        what = type(result).__name__ + (f" of {len(result)}" if isinstance(result, tuple | list) else "")
        due = {2: "the pair", 3: "the three values", 4: "the four numbers"}[count]
        partial = ", or with a Partial, which is such a pair" if names == "out, lse" else ""
        cause = f"it should end with `return {names}`{partial}"
        raise Wrong(f"{returns} {what}, not {due} ({names})", "the return statement", cause)
    return tuple(result)


def per_rank(result: Any, P: int, entry: str) -> Sequence[Any]:
    """What the learner returned, if it is a list with an entry for each rank; or Wrong.  entry: what it should be."""
    if not isinstance(result, list | tuple):
        what = f"your function returns {type(result).__name__}, not a list with an entry for each rank"
        raise Wrong(what, "the return statement", f"a list: for each rank {entry}")
    if len(result) != P:
        what = f"your function returns {len(result)} entries for {P} ranks"
        raise Wrong(
            what, "the list that is returned", f"{entry} for each rank; an empty list for one that gets nothing"
        )
    return result


def number(got: Any, cause: str, subject: str = "your function returns") -> float:
    """A number that the learner returned, or Wrong; cause: what it should be."""
    try:
        return float(None if isinstance(got, str) else got)
    except (TypeError, ValueError):
        raise Wrong(f"{subject} {type(got).__name__}, not a number", "the return statement", cause) from None


def difference(name: str, got: Tensor, want: Tensor, tolerance: float) -> str | None:
    """In words, how got differs from want; None if it does not, beyond tolerance (a relative norm)."""
    if not isinstance(got, Tensor):
        return f"{name} is a {type(got).__name__}, not a tensor"
    if got.shape != want.shape:
        return f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    if got.isnan().any() and not want.isnan().any():
        return f"{name} is {show(got)}, expected {show(want)}" if got.numel() <= 4 else f"{name} has NaN in it"
    same_inf = (got == want) & want.isinf()
    if ((got.isinf() | want.isinf()) & ~same_inf).any():
        return f"{name} is {show(got)}, expected {show(want)}"
    finite = ~want.isinf()
    error, size = (got[finite] - want[finite]).norm(), want[finite].norm()
    if error <= tolerance * max(float(size), 1.0 if float(size) == 0 else 0.0):
        return None
    if got.numel() <= 4:
        return f"{name} is {show(got)}, expected {show(want)}"
    return f"{name} is off by {float(error / size) if size else float(error):.2g} (relative norm)"


def show(x: Tensor) -> str:
    """A small tensor in one line: 0.25, [1, 2.5], [[0, -inf]]."""
    if x.ndim == 0:
        return f"{float(x):.6g}"
    return "[" + ", ".join(show(part) for part in x) + "]"

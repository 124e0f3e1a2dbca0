"""How the zoo's answers are written: what each must be told beside it, and a slip in another answer as that slip."""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
from collections.abc import Callable


def edited(answer: Callable, name: str, *changes: tuple[str, str]) -> Callable:
    """An answer with some of its text changed: pairs of what stands there, and of what is written instead.

    What stands there must occur once. Where it is several lines, their indentation does not matter; new lines are
    indented as the one that they follow. The result has a source that ``inspect`` and tracebacks show.

    >>> def double(x):
    ...     y = 2 * x
    ...     return y
    >>> edited(double, "triple", ("2 * x", "3 * x"))(5)
    15
    """
    source = textwrap.dedent(inspect.getsource(answer))
    source = re.sub(r"\A(@.*\n|    .*\n|\)\n)+", "", source).replace(f"def {answer.__name__}(", f"def {name}(", 1)
    for old, new in changes:
        found = list(re.finditer(r"\n *".join(re.escape(line.strip()) for line in old.split("\n")), source))
        if len(found) != 1:
            raise ValueError(f"edited: {name}: expected {old!r} once in {answer.__name__}, found it {len(found)} times")
        begin, end = found[0].span()
        line = source[source.rfind("\n", 0, begin) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        source = source[:begin] + new.replace("\n", "\n" + indent) + source[end:]
    file = f"<{answer.__module__}.{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), answer.__globals__)
    return answer.__globals__[name]


def slips(wrong: Callable, exercise: str, answer: Callable) -> Callable:
    """What enters slips in this answer among the wrong ones: it takes a name, a word of its message, and the changes.

    Each is to be rejected at the stage "value", unless ``stage`` says otherwise.
    """

    def enter(name: str, word: str, *changes: tuple[str, str], stage: str = "value") -> None:
        wrong(exercise, stage, word)(edited(answer, name, *changes))

    return enter


def registry(*exercises: str) -> tuple[dict[str, list[tuple]], Callable]:
    """WRONG, exercise -> [(answer, what it must be told)], and the decorator that enters an answer there.

    >>> WRONG, wrong = registry("0a")
    >>> @wrong("0a", "value", "the exponent")
    ... def double(x):
    ...     return 2 * x
    >>> WRONG == {"0a": [(double, "value", "the exponent")]}
    True
    """
    answers: dict[str, list[tuple]] = {exercise: [] for exercise in exercises}

    def wrong(exercise: str, *told: str) -> Callable:
        if exercise not in answers:
            raise ValueError(f"wrong: expected one of the exercises {', '.join(answers)}, got {exercise!r}; name it in "
                             f"registry(...) at the top of this zoo")  # fmt: skip

        def enter(answer: Callable) -> Callable:
            answers[exercise].append((answer, *told))
            return answer

        return enter

    return answers, wrong

"""Wrong answers that differ from another answer in a line or two: what is changed is written down, and nothing else."""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable


def edited(answer: Callable, name: str, *changes: tuple[str, str]) -> Callable:
    """An answer with lines of it changed: pairs of what stands there and of what is written instead.

    What stands there may be several lines. It must occur once; its indentation does not matter, and the new lines are
    indented from there on. The result has a source that ``inspect`` and tracebacks show, as if it had been written out.

    >>> def double(x):
    ...     y = 2 * x
    ...     return y
    >>> edited(double, "triple", ("y = 2 * x", "y = 3 * x"))(5)
    15
    """
    lines = textwrap.dedent(inspect.getsource(answer)).splitlines()
    lines[0] = lines[0].replace(f"def {answer.__name__}(", f"def {name}(")
    for old, new in changes:
        wanted = [line.strip() for line in old.splitlines()]
        stripped = [line.strip() for line in lines]
        places = [i for i in range(len(lines)) if stripped[i : i + len(wanted)] == wanted]
        if len(places) != 1:
            raise ValueError(f"edited: {name}: expected {old!r} once in {answer.__name__}, found it {len(places)} times")
        start = lines[places[0]]
        indent = start[: len(start) - len(start.lstrip())]
        lines[places[0] : places[0] + len(wanted)] = [indent + line for line in new.splitlines()]
    source, file = "\n".join(lines) + "\n", f"<{answer.__module__}.{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), answer.__globals__)
    return answer.__globals__[name]

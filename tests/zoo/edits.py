"""Wrong answers that differ from another answer in a slip or two: what is changed is written down, and nothing else."""

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
    source = textwrap.dedent(inspect.getsource(answer)).replace(f"def {answer.__name__}(", f"def {name}(", 1)
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

"""Show the source of a library function in a notebook."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable


def source(*functions: Callable) -> None:
    """Print the source of each function without its docstring, which ``help(function)`` shows.

    >>> from ringlearn.partial import accumulation_dtype
    >>> source(accumulation_dtype)
    def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32
    """
    print("\n\n".join(_without_docstring(function) for function in functions))


def _without_docstring(function: Callable) -> str:
    text = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(text).body[0]
    lines = text.rstrip().splitlines()
    first = definition.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines)

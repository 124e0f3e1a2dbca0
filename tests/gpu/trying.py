"""What the programs in this folder do with a check: run it, capture its calls, and keep what came out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ringlearn.bench import timing


def tried(fn: Callable[[], Any]) -> tuple[bool, Any, float]:
    """Whether a check holds, what it returns or how it failed, and its seconds. fn raises an error if it is wrong."""
    start = time.monotonic()
    try:
        note, good = fn(), True
    except Exception as error:
        note, good = f"{type(error).__name__}: {error}", False
    return good, note, time.monotonic() - start


def captured(fn: Callable[[], Any], calls: int = 1) -> tuple[Callable[[], None], Any]:
    """What replays a CUDA graph of so many calls, and the result of the last one, which each replay writes anew."""
    results = []
    replay = timing.captured(timing.repeated(lambda: results.append(fn()), calls))
    return replay, results[-1]

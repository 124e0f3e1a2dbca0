"""What the programs in this folder do with a check: run it, and keep what came out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def tried(fn: Callable[[], Any]) -> tuple[bool, Any, float]:
    """Whether a check holds, what it returns or how it failed, and its seconds. fn raises an error if it is wrong."""
    start = time.monotonic()
    try:
        note, good = fn(), True
    except Exception as error:
        note, good = f"{type(error).__name__}: {error}", False
    return good, note, time.monotonic() - start

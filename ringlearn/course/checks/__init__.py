"""Checkers for the notebooks' exercises: one module per notebook, ``rl.checks.nb01``, ``rl.checks.nb02``, ...

A checker takes your function and tells you the first thing that is wrong with it, on the smallest input that shows it,
and where to look. If you ask twice, or with ``help=2``, it also gives the likely cause.

>>> import ringlearn as rl
>>> result = rl.checks.nb01.online_softmax(lambda scores: ...)
1a online_softmax: not written yet. Fill in every `...`, then run this cell again.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from .checker import Checker, Result, Wrong
from .predictions import Prediction, Quiz

__all__ = ["Checker", "Prediction", "Quiz", "Result", "Wrong"]


def __getattr__(name: str) -> Any:
    # A notebook loads its own checkers only.
    if name.startswith("nb") and any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Pictures and widgets of the course, one module per subject: ``rl.viz.softmax``, ... They need matplotlib.

Colours are Okabe and Ito's, which people with any kind of colour vision tell apart; whatever a colour says, a hatch,
a marker or a label says too, so that every picture works in greyscale.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from .source import source

__all__ = ["source"]


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

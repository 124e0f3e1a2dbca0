"""Pictures and widgets of the course. They need matplotlib: ``pip install 'ringlearn[plots]'``.

Pictures of a run are drawn from its trace, its memory or its tiles, never by hand. Each is a function that returns a
matplotlib ``Figure`` with its caption and does not display it: end a notebook cell with the call, or use ``savefig``.

    blocks_held(trace)                 rank by step: whose keys each rank holds, and what it computes with them
    load(trace)                        the work of each rank
    mask_by_rank(mask, layout, S, P)   the mask, each cell in the colour of the rank that computes it
    timeline(trace)                    when each rank computes, sends, receives and waits
    memory_strip(memory)               peak bytes of each rank, by component

Pictures for a single notebook are in modules such as ``rl.viz.softmax``.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart. Whatever a colour says
is also said by a hatch, a marker or a label, so every picture works in greyscale.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from .source import source

_PICTURES = {
    "blocks_held": "blocks",
    "load": "blocks",
    "mask_by_rank": "masks",
    "memory_strip": "memory",
    "timeline": "gantt",
}

__all__ = ["source", *_PICTURES]


def __getattr__(name: str) -> Any:
    # Loaded on first use: import of ringlearn needs no matplotlib.
    if name in _PICTURES:
        return getattr(_load(_PICTURES[name]), name)
    if not name.startswith("_") and any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return _load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(module: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError("pictures need matplotlib, which is not installed: pip install 'ringlearn[plots]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

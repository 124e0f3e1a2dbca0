"""Attention over a sequence that is split over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .all_gather import all_gather
from .dilated.ring import dilated_attention, dilated_backward, dilated_forward
from .hybrid import hybrid
from .ring import ring_backward, ring_forward
from .strategy import Spec, Strategy
from .table import STRATEGIES
from .ulysses import head_plan

# A strategy's function, such as ring_attention, and its programs, such as RING: a line in the table makes them public.
FUNCTIONS = {entry.function.__name__: entry.function for entry in STRATEGIES.values()}
PROGRAMS = {name.upper().replace("-", "_"): entry.strategy for name, entry in STRATEGIES.items()}
globals().update(FUNCTIONS | PROGRAMS)

if TYPE_CHECKING:
    from .decoding import KVCache, decode_attention, prefill_attention
# Loaded when they are first used: a program that only trains does not decode.
DECODING = ("KVCache", "decode_attention", "prefill_attention")

__all__ = [
    *FUNCTIONS,
    "KVCache",
    "STRATEGIES",
    "Spec",
    "Strategy",
    "all_gather",
    "decode_attention",
    "dilated_attention",
    "dilated_backward",
    "dilated_forward",
    "head_plan",
    "hybrid",
    "prefill_attention",
    "ring_backward",
    "ring_forward",
]


def __getattr__(name: str) -> Any:
    if name in DECODING:
        return getattr(import_module(f"{__name__}.decoding"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

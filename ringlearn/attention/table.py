"""The strategies, by the names that command lines, the bench, the training program and the tests know them by.

A new strategy is a file beside this one, a file in ``ringlearn/costs/``, a line here and a line in docs/api.md. Its
function is then public in ``ringlearn``, and what computes with every strategy computes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .all_gather import ALL_GATHER, all_gather_attention
from .double_ring import DOUBLE_RING, double_ring_attention
from .hybrid import hybrid, hybrid_attention
from .ring import RING, ring_attention
from .ring_self_attention import RING_SELF_ATTENTION, ring_self_attention
from .strategy import Strategy
from .ulysses import ULYSSES, ulysses_attention


class Entry(NamedTuple):
    """A strategy's function, which has ring_attention's arguments, and the rank programs that it runs."""

    function: Callable[..., Any]
    strategy: Strategy


STRATEGIES: dict[str, Entry] = {
    "ring": Entry(ring_attention, RING),
    "all-gather": Entry(all_gather_attention, ALL_GATHER),
    "ulysses": Entry(ulysses_attention, ULYSSES),
    "ring-self-attention": Entry(ring_self_attention, RING_SELF_ATTENTION),
    "hybrid": Entry(hybrid_attention, hybrid(RING)),
    "double-ring": Entry(double_ring_attention, DOUBLE_RING),
}
TWO_AXES = tuple(name for name, entry in STRATEGIES.items() if entry.strategy.axes == 2)  # nodes, and ranks of a node

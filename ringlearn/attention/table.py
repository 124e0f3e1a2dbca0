"""The strategies, by the names that command lines, the bench, the training program and the tests know them by.

A new strategy is a file beside this one, a file in ``ringlearn/costs/``, a line here and a line in docs/api.md. Its
function is then public in ``ringlearn``, and what computes with every strategy computes with it; the planner has a list
of its own, in ``plan/setup.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..costs.all_gather import ALL_GATHER_COSTS
from ..costs.double_ring import DOUBLE_RING_COSTS
from ..costs.problem import Costs
from ..costs.ring import RING_COSTS
from ..costs.ring_self_attention import RING_SELF_ATTENTION_COSTS
from ..costs.ulysses import HYBRID_COSTS, ULYSSES_COSTS
from .all_gather import ALL_GATHER, all_gather_attention
from .double_ring import DOUBLE_RING, double_ring_attention
from .hybrid import hybrid, hybrid_attention
from .ring import RING, ring_attention
from .ring_self_attention import RING_SELF_ATTENTION, ring_self_attention
from .strategy import Strategy
from .ulysses import ULYSSES, ulysses_attention


class Entry(NamedTuple):
    """A strategy: the function that users call, the rank programs that it runs, and its rows in the table of costs."""

    function: Callable[..., Any]
    strategy: Strategy
    costs: tuple[Costs, ...]


STRATEGIES: dict[str, Entry] = {  # in the order of notebook 08
    "all-gather": Entry(all_gather_attention, ALL_GATHER, ALL_GATHER_COSTS),
    "ring-self-attention": Entry(ring_self_attention, RING_SELF_ATTENTION, (RING_SELF_ATTENTION_COSTS,)),
    "ring": Entry(ring_attention, RING, (RING_COSTS,)),
    "ulysses": Entry(ulysses_attention, ULYSSES, (ULYSSES_COSTS,)),
    "hybrid": Entry(hybrid_attention, hybrid(RING), (HYBRID_COSTS,)),
    "double-ring": Entry(double_ring_attention, DOUBLE_RING, (DOUBLE_RING_COSTS,)),
}
TWO_AXES = tuple(name for name, entry in STRATEGIES.items() if entry.strategy.axes == 2)  # nodes, and ranks of a node

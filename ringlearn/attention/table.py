"""The strategies, by the names that command lines, the bench, the training program and notebook 08 know them by.

A new strategy is a file beside this one, a file in ``ringlearn/costs/``, a line here and a line in docs/api.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Known:
    """A strategy's function, which has ring_attention's signature, and the rank programs that it runs.

    costs: its rows in the comparison of all strategies.  rotates: whether its messages go to neighbours only, so that
    all of them can take the copy engine.
    """

    call: Callable[..., Any]
    strategy: Strategy
    costs: tuple[Costs, ...]
    rotates: bool = False


# All are exact; tests/test_nn.py holds each to the gradients of one device. In the order of notebook 08.
STRATEGIES: dict[str, Known] = {
    "all-gather": Known(all_gather_attention, ALL_GATHER, ALL_GATHER_COSTS),
    "ring-self-attention": Known(ring_self_attention, RING_SELF_ATTENTION, (RING_SELF_ATTENTION_COSTS,)),
    "ring": Known(ring_attention, RING, (RING_COSTS,), rotates=True),
    "ulysses": Known(ulysses_attention, ULYSSES, (ULYSSES_COSTS,)),
    "hybrid": Known(hybrid_attention, hybrid(RING), (HYBRID_COSTS,)),
    "double-ring": Known(double_ring_attention, DOUBLE_RING, (DOUBLE_RING_COSTS,)),
}
TWO_AXES = tuple(name for name, known in STRATEGIES.items() if known.strategy.axes == 2)  # nodes, and ranks of a node

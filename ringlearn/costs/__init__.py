"""What attention takes in FLOPs, bytes, memory and time, computed from shapes alone: one file per strategy.

Names: B batch, H query heads, G key/value heads, S sequence length, n tokens of a rank, D head dim (of keys and
values), P ranks; ``shape`` is (nodes, ranks per node); ``itemsize`` is bytes per element, 2 for bfloat16. What is
summed over ranks travels in the accumulation dtype. A formula may also be called with a ``costs.problem.Problem``.

Bytes are exact integers for one rank and one call, those that ``world.trace`` counts. Memory is what
``world.memory.most(rank)`` reports for these components, each at its own fullest moment, for k and v that are adjacent
in memory, as ``world.shard`` puts them:

    in flight   packed messages, and buffers that a message arrives or has arrived in
    gathered    rows of all ranks, put together from what arrived
    scores      whole rows of scores

Seconds are those of a forward without a mask, on hardware that reaches its peak. They equal the virtual clock of a
simulated world if all ranks have the same number of tokens; otherwise the largest number is taken for all ranks, and
the result is an upper bound.

Forward on 4 ranks, 8 query heads, 2 key/value heads:

>>> call = dict(S=4096, G=2, D=64, itemsize=2)
>>> all_gather_bytes(P=4, **call), ulysses_bytes(P=4, H=8, **call), double_ring_bytes(shape=(2, 2), **call)
(1572864, 2383872, {'inner': 1048576, 'outer': 524288})
"""

# ruff: noqa: F401 (every function that is imported here is offered to others, see __all__)
from types import FunctionType

from .all_gather import all_gather_bytes, all_gather_memory, all_gather_seconds
from .double_ring import double_ring_bytes, double_ring_memory, double_ring_seconds
from .one_device import attention_flops, flash_traffic, intensity, naive_traffic, saved_bytes, tile_bytes
from .ring import (
    dilated_bytes,
    dilated_pairs,
    hiding_threshold,
    published_backward_bytes,
    ring_bytes,
    ring_memory,
    ring_seconds,
    step_work,
)
from .ring_self_attention import ring_self_attention_bytes, ring_self_attention_memory, ring_self_attention_seconds
from .ulysses import hybrid_bytes, hybrid_memory, hybrid_seconds, ulysses_bytes, ulysses_memory, ulysses_seconds

__all__ = [name for name, value in globals().items() if isinstance(value, FunctionType)]

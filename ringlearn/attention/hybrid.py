"""Hybrid attention: Ulysses inside a node, any other strategy across nodes.

Ranks of a node trade heads for rows, as in Ulysses. Then rank p of every node holds the same heads, of its own node's
rows, and a ring (or another outer strategy) over these ranks does the rest. So P may be far larger than the
number of heads, and only the ring's messages cross nodes, each of which hides behind compute of a whole node's rows.

Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", section 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..worlds.comm import Comm
from .call import attention_function
from .ring import RING
from .strategy import Gradients, Strategy
from .ulysses import backward_by_heads, forward_by_heads


@attention_function(outer=RING)
def hybrid_attention(outer: Strategy) -> Strategy:
    """Exact attention over a sequence that is split over nodes and ranks: Ulysses inside a node, ``outer`` across them.

    Arguments, result and errors are those of ``ring_attention``, except that the world must have two axes: a
    ``SimulatedWorld((nodes, ranks per node))``, or a ``DistributedWorld(mesh)`` of a DeviceMesh whose last axis is
    inside a node. Zigzag is balanced here too: a node's rows are again one early block and one late one.

    outer: the strategy across nodes: ``rl.attention.RING``, ``ALL_GATHER``, ``RING_SELF_ATTENTION``, or your own
    strategy over one axis.

    Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI".

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, h, 50, 8) for h in (6, 2, 2))
    >>> shards = rl.SimulatedWorld((2, 3)).shard(q, k, v, layout=rl.zigzag)
    >>> out = rl.hybrid_attention(*shards, mask=rl.causal).unshard()
    >>> torch.allclose(out, rl.ring_attention(*shards, mask=rl.causal).unshard(), atol=1e-5)
    True
    """
    return hybrid(outer)


def hybrid(outer: Strategy) -> Strategy:
    """Ulysses on the inner axis of a world, another strategy on its outer axis.

    Raises ValueError unless the outer strategy has one axis and keeps a fixed number of tensors.

    >>> hybrid(RING).name
    'ulysses x ring'
    """
    if not isinstance(outer, Strategy):
        raise ValueError(f"hybrid_attention: expected a strategy such as rl.attention.RING, got {outer!r}")
    if outer.axes != 1 or outer.keeps is None:
        raise ValueError(
            f"hybrid_attention: {outer.name} cannot be the outer strategy, which has one axis of the world for itself "
            f"and keeps a fixed number of tensors; take rl.attention.RING"
        )

    async def forward(comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> tuple[Any, ...]:
        return await forward_by_heads(comm.along(1), comm.along(0), outer, q, k, v, spec)

    async def backward(comm: Comm, dout, q, k, v, out, lse, dlse, *kept_and_spec) -> Gradients:
        args = dout, q, k, v, out, lse, dlse, *kept_and_spec
        return await backward_by_heads(comm.along(1), comm.along(0), outer, *args)

    return Strategy(
        f"ulysses x {outer.name}",
        forward,
        backward,
        keeps=None,
        axes=2,
        moves_dlse=True,
        takes_sinks=True,
        has_kernel=outer.has_kernel,
    )

"""Hybrid attention: Ulysses inside a node, any other strategy across nodes.

Ranks of a node trade heads for rows, as in Ulysses. Then rank p of every node holds the same heads, of its own node's
rows, and a ring (or what else the outer strategy is) over these ranks does the rest. So P may be far larger than the
number of heads, and only the ring's messages cross nodes, each of which hides behind compute of a whole node's rows.

Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", section 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layouts import Layout
from ..masks import Mask, full
from ..worlds.comm import Comm
from ..worlds.world import Shards, World
from .call import attend
from .ring import RING
from .strategy import Strategy
from .ulysses import backward_by_heads, forward_by_heads


def hybrid_attention(
    q: Shards | Tensor,
    k: Shards | Tensor,
    v: Shards | Tensor,
    mask: Mask = full,
    scale: float | None = None,
    kernel: Any = None,
    *,
    outer: Strategy = RING,
    q_start: int = 0,
    return_lse: bool = False,
    layout: Layout | None = None,
    world: World | None = None,
    **unsupported: Any,
) -> Any:
    """Exact attention over a sequence that is split over nodes and ranks: Ulysses inside a node, ``outer`` across them.

    Arguments, result and errors are those of ``ring_attention``, but that the world has two axes: a
    ``SimulatedWorld((nodes, ranks of a node))``, or a ``DistributedWorld(mesh)`` of a DeviceMesh whose last axis is
    inside a node. Zigzag is balanced here too: a node's rows are again one early block and one late one.

    outer: what happens across nodes, ``rl.attention.RING``, ``ALL_GATHER``, ``RING_SELF_ATTENTION``, or a strategy of
    your own over one axis.

    Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI".

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, h, 50, 8) for h in (6, 2, 2))
    >>> shards = rl.SimulatedWorld((2, 3)).shard(q, k, v, layout=rl.zigzag)
    >>> out = rl.hybrid_attention(*shards, mask=rl.causal).unshard()
    >>> torch.allclose(out, rl.ring_attention(*shards, mask=rl.causal).unshard(), atol=1e-5)
    True
    """
    strategy = hybrid(outer) if isinstance(outer, Strategy) else outer
    return attend(
        "hybrid_attention", strategy, q, k, v, mask, scale, kernel, q_start, return_lse, layout, world, unsupported
    )


def hybrid(outer: Strategy) -> Strategy:
    """Ulysses on the inner axis of a world, another strategy on its outer axis.

    >>> hybrid(RING).name
    'ulysses x ring'
    """

    async def forward(comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> tuple[Any, ...]:
        return await forward_by_heads(comm.along(1), comm.along(0), outer, q, k, v, spec)

    async def backward(comm: Comm, dout, q, k, v, out, lse, dlse, *kept_and_spec) -> tuple[Tensor, Tensor, Tensor]:
        args = dout, q, k, v, out, lse, dlse, *kept_and_spec
        return await backward_by_heads(comm.along(1), comm.along(0), outer, *args)

    return Strategy(
        f"ulysses x {outer.name}",
        forward,
        backward,
        keeps=None,
        axes=2,
        moves_dlse=True,
        has_kernel=outer.has_kernel,
        problem=None
        if outer.axes == 1 and outer.keeps is not None
        else f"{outer.name} cannot be the outer strategy, which has one axis of the world for itself and keeps a fixed "
        f"number of tensors; take rl.attention.RING",
    )

"""Rehearse a ring: its messages and computation run on the hardware model, with tensors that hold no numbers.

Finding out what a ring of 64 ranks and a million tokens would do takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..worlds.comm import Comm
from ..worlds.simulated import SimulatedWorld
from ..worlds.trace import Hardware, Trace

Operations = float | Callable[[int, int], float]


async def _ring(comm: Comm, kv: Tensor, operations: Operations, awaited_first: bool) -> None:
    for step in range(comm.size):
        last = step == comm.size - 1
        if not last:
            arriving = comm.rotate(kv)
            if awaited_first:
                following = await arriving
        flops = operations(comm.rank, step) if callable(operations) else operations
        comm.compute("forward", flops, origin=(comm.rank - step) % comm.size)
        if not last:
            kv = following if awaited_first else await arriving


def rehearse(
    P: int, *, operations: Operations, nbytes: int, hardware: Hardware | None = None, awaited_first: bool = False
) -> Trace:
    """The trace of a ring of P ranks whose every step computes ``operations`` and sends ``nbytes`` to the next rank.

    operations: the same for all, or those of a rank in a step, operations(rank, step).
    awaited_first: await each message as soon as it is posted, instead of after the compute of its step.

    >>> units = Hardware(flops=1, bandwidth=1, latency=0)
    >>> rehearse(4, operations=5, nbytes=4, hardware=units).makespan()
    20.0
    >>> rehearse(4, operations=5, nbytes=4, hardware=units, awaited_first=True).makespan()
    32.0
    """
    world = SimulatedWorld(P, hardware=hardware, device="meta", count_memory=False)
    kv = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    world.run(_ring, kv, operations, awaited_first)
    return world.trace

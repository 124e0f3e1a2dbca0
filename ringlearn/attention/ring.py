"""Ring attention: queries stay, keys and values go round (Liu, Zaharia and Abbeel 2023, algorithm 1).

Each rank holds a shard of q, k and v. In P steps the k, v shards pass every rank; each rank computes its queries
against the keys that it holds at the moment, and merges. While it computes, the next shard arrives.

    step     rank 0   rank 1   rank 2   rank 3
    0        kv 0     kv 1     kv 2     kv 3        each at home
    1        kv 3     kv 0     kv 1     kv 2        every shard has moved on to rank + 1
    2        kv 2     kv 3     kv 0     kv 1
    3        kv 1     kv 2     kv 3     kv 0

A mask makes some tiles disappear, never a message: a rank that has nothing to compute still passes on what it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..partial import Accumulator, Partial, accumulation_dtype
from ..worlds.comm import Comm, zeros_packed
from .spec import Spec


async def ring_forward(comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Partial:
    """Partial(out, lse) of this rank's queries over all keys, in the accumulation dtype.

    q: (B, H, s_q, D_k), k: (B, G, s_k, D_k), v: (B, G, s_k, D_v), this rank's shards.
    """
    P, kernel = comm.size, comm.traced(spec.kernel)
    result = Accumulator((*q.shape[:-1], v.shape[-1]), accumulation_dtype(q.dtype), q.device)
    for step in range(P):
        source = (comm.rank - step) % P  # whose keys are here now
        if step < P - 1:
            arriving = comm.rotate(k, v, length=spec.k_length(source - 1))
        for tile in spec.tiles(comm.rank, source):
            result.add(tile.q, kernel.forward(q, k, v, tile, spec.scale))
        if step < P - 1:
            k, v = await arriving
    return result.partial


def add_(dk: Tensor, dv: Tensor, found: tuple[Tensor, Tensor]) -> None:
    """Add in place what arrived; a function of its own, so that no name keeps the received buffer alive."""
    dk += found[0]
    dv += found[1]


async def ring_backward(
    comm: Comm,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shards, in the accumulation dtype.

    k and v go round once more. Their gradients travel one hop behind them, take in what each rank finds, and arrive
    home after P hops. A rank adds its own share *before* it waits for what the others found, so this message hides too.
    """
    P, kernel = comm.size, comm.traced(spec.kernel)
    dtype = accumulation_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    travelling = None  # dk, dv of the keys that were here one step ago
    for step in range(P):
        source = (comm.rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=spec.k_length(source - 1))
        dk, dv = zeros_packed((k.shape, v.shape), dtype, q.device)
        for tile in spec.tiles(comm.rank, source):
            dq_tile, dk_tile, dv_tile = kernel.backward(dout, q, k, v, out, lse, tile, spec.scale, dlse)
            dq[:, :, tile.q] += dq_tile
            dk[:, :, tile.k] += dk_tile
            dv[:, :, tile.k] += dv_tile
            del dq_tile, dk_tile, dv_tile  # or they would live on through the next kernel call
        if step > 0:
            add_(dk, dv, await travelling)  # what the ranks before this one found for the same keys
        travelling = comm.rotate(dk, dv, length=spec.k_length(source - 1))
        if step < P - 1:
            k, v = await arriving
    dk, dv = await travelling
    return dq, dk, dv

"""Exercise 05, ring attention backward: k and v go round once more, and their gradients travel home.

Goal    `ring_backward` returns dq, dk, dv of this rank's shards.
Given   attend_backward(dout, q, k, v, lse, delta, visible, scale) -> what one tile adds to dq, dk, dv; comm as in 04.
Mind    dq stays at home. dk and dv belong to the keys that are here now, and travel with them: k and v make P - 1
        hops, dk and dv make P, the last of them home. Compute your own share, *then* await what the ranks before you
        found for the same keys, add, and send on.
        lse and delta are those of whole rows, over all keys: they are never computed from one block.

Run     torchrun --nproc-per-node 4 notebooks/exercises/05_ring_backward.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank: on simulated ranks first, then for real.
"""

import torch

import ringlearn as rl
from ringlearn.checks import exercises
from ringlearn.flash import attend_backward


async def ring_backward(comm, dout, q, k, v, out, lse, positions, mask):
    """dq, dk, dv, in the shapes of q, k, v. dout, out: (B, H, n, D), lse: (B, H, n), as the forward gave them."""
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    dq = torch.zeros_like(q)
    # ---- your code: delta, then P steps ----
    delta = (dout * out).sum(-1)
    for step in range(P):
        source = (rank - step) % P
        length = len(positions[(source - 1) % P])  # what rank - 1 holds in this step
        if step < P - 1:
            arriving = comm.rotate(k, v, length=length)
        visible = mask(positions[rank][:, None], positions[source][None, :])
        dq_tile, dk, dv = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        dq += dq_tile
        if step > 0:
            dk_found, dv_found = await travelling
            dk, dv = dk + dk_found, dv + dv_found
        travelling = comm.rotate(dk, dv, length=length)
        if step < P - 1:
            k, v = await arriving
    dk, dv = await travelling
    # ---- end of your code ----
    return dq, dk, dv


if __name__ == "__main__":
    exercises.ring_backward(ring_backward)

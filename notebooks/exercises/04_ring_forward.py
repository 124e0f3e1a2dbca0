"""Exercise 04, ring attention forward: your ring of notebook 03, on real processes.

Goal    `ring_forward` returns (out, lse) of this rank's queries over the keys of all ranks, which go round.
Given   attend(q, k, v, visible, scale) -> Partial(out, lse) over the keys at hand, rl.merge(a, b) -> Partial,
        comm.rank, comm.size, and comm.rotate(k, v, length=n): sends to rank + 1, and is awaited for the n tokens that
        rank - 1 sends: `k, v = await arriving`.
Mind    Shards differ in length, and one may be empty. A mask can hide a whole block: that saves the computation,
        never the message. P shards take P - 1 rotates, and what stands between a rotate and its await overlaps.

Run     torchrun --nproc-per-node 4 notebooks/exercises/04_ring_forward.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank: on simulated ranks first, then for real.
"""

import torch

import ringlearn as rl
from ringlearn.checks import exercises
from ringlearn.flash import attend


async def ring_forward(comm, q, k, v, positions, mask):
    """out (B, H, n, D) and lse (B, H, n). q: (B, H, n, D), k, v: (B, G, n, D), the shards of this rank.

    positions: for each rank a tensor of the positions of its tokens. mask(q_pos[:, None], k_pos[None, :]): bool, what
    is visible, such as rl.causal.
    """
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    result = rl.identity(q.shape, q.dtype, q.device)  # attention to no key: out 0, lse -inf
    # ---- your code: P steps, each merges attention to the keys that are here into `result` ----
    ...
    # ---- end of your code ----
    return result.out, result.lse


if __name__ == "__main__":
    exercises.ring_forward(ring_forward)

"""Exercise 08, Ulysses: trade rows of all heads for all rows of some heads, attend, and trade back.

Goal    `ulysses` returns (out, lse) of this rank's rows and all heads. In between, this rank attends with H / P query
        heads over all rows: heads need nothing of each other.
Given   attend(q, k, v, visible, scale) -> Partial(out, lse), and comm.all_to_all(tensors, shapes): sends tensors[r] to
        rank r; returns at once, and is awaited for the list of what each rank sent here, in rank order. shapes[r]: of
        what comes from rank r. `q_heads[r]` and `k_heads[r]`: which heads rank r computes with.
Mind    Shards differ in length, so what arrives from another rank has its number of rows. All rows lie in the order of
        the ranks, which need not be that of the text: mind the mask. A key/value head may go to several ranks.
        H is divisible by P, and G by P or P by G.

Run     torchrun --nproc-per-node 4 notebooks/exercises/08_ulysses.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank: on four simulated ranks, then for real.
"""

import torch

from ringlearn.checks import exercises
from ringlearn.flash import attend


async def ulysses(comm, q, k, v, positions, mask):
    """out (B, H, n, D) and lse (B, H, n). q: (B, H, n, D), k, v: (B, G, n, D), the shards of this rank.

    positions: for each rank a tensor of the positions of its tokens. mask(q_pos[:, None], k_pos[None, :]): bool, what
    is visible, such as rl.causal.
    """
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    (B, H, n, D), G = q.shape, k.shape[1]
    lengths = [len(p) for p in positions]  # rows of each rank; lengths[rank] is n
    q_heads = [slice(r * H // P, (r + 1) * H // P) for r in range(P)]
    k_heads = [slice(r * G // P, max((r + 1) * G // P, r * G // P + 1)) for r in range(P)]
    # ---- your code: the trade of q, k and v, attention, and the trade of out and lse ----
    ...
    # ---- end of your code ----
    return out, lse


if __name__ == "__main__":
    exercises.ulysses(ulysses)

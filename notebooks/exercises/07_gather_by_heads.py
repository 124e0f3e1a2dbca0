"""Exercise 07, gather by heads: all-gather attention, one key/value head at a time, and the memory that it takes.

Goal    `gather_by_heads` returns (out, lse) of this rank's queries over the keys of all ranks, which are gathered: of
        one key/value head at a time, so that no rank ever holds all heads of all rows.
Given   attend(q, k, v, visible, scale) -> Partial(out, lse), and comm.all_gather(x, lengths), which returns at once and
        is awaited for the list of every rank's x (B, heads, s, D), in rank order; lengths: how many rows each has.
Mind    Gather head g + 1 while you compute with head g: two heads are here at a time, not all of them.
        H / G query heads use one key/value head. The gathered rows lie in the order of the ranks, and what the mask
        needs is where they stand in the text. In the end it says what was held, beside a ring and the formulas.

Run     torchrun --nproc-per-node 4 notebooks/exercises/07_gather_by_heads.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank: on four simulated ranks, then for real.
"""

import torch

from ringlearn.checks import exercises
from ringlearn.flash import attend


async def gather_by_heads(comm, q, k, v, positions, mask):
    """out (B, H, n, D) and lse (B, H, n). q: (B, H, n, D), k, v: (B, G, n, D), the shards of this rank.

    positions: for each rank a tensor of the positions of its tokens. mask(q_pos[:, None], k_pos[None, :]): bool, what
    is visible, such as rl.causal.
    """
    H, G, scale = q.shape[1], k.shape[1], q.shape[-1] ** -0.5
    lengths = [len(p) for p in positions]
    visible = mask(positions[comm.rank][:, None], torch.cat(positions)[None, :])  # own rows x all rows
    outs, lses = [], []  # of the query heads, in order
    # ---- your code: gather one key/value head after the other, and attend with its query heads ----
    ...
    # ---- end of your code ----
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


if __name__ == "__main__":
    exercises.gather_by_heads(gather_by_heads)

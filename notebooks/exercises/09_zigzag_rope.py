"""Exercise 09, zigzag and RoPE: shards that balance a causal ring, and positions that follow the tokens.

Goal    `zigzag_rope` returns (out, mine): attention of the whole text with rotary positions, rows in the order of the
        text, the same on every rank; and the positions of the tokens that this rank has computed.
        The text is cut into 2P blocks, and rank r computes on blocks r and 2P - 1 - r: an early one and a late one.
Given   block(S, P, i): the positions in block i. rope(x, positions) turns each row by its position. ring_forward(comm,
        q, k, v, positions, mask) -> Partial(out, lse): the ring of exercise 04. comm.all_gather(x, lengths), awaited
        for the list of every rank's x (B, heads, s, D).
Mind    One list, the positions of each rank's tokens, says which rows a rank takes, what rope turns, what the mask
        compares, and where each row of the output belongs. Blocks differ in length, and may be empty.

Run     torchrun --nproc-per-node 4 notebooks/exercises/09_zigzag_rope.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank: on four simulated ranks, then for real.
"""

import torch

import ringlearn as rl
from ringlearn.checks import exercises
from ringlearn.course.published_ring import ring_forward
from ringlearn.nn import rope


def block(S, P, i):
    """Given: the positions in block i of 2P, whose lengths differ by one at most."""
    return torch.arange(S * i // (2 * P), S * (i + 1) // (2 * P))


async def zigzag_rope(comm, q, k, v):
    """out (B, H, S, D) and mine (n,). q: (B, H, S, D), k, v: (B, G, S, D), the whole text, the same on every rank."""
    P, rank, S, device = comm.size, comm.rank, q.shape[2], q.device
    out = q.new_empty(q.shape)
    # ---- your code: all ranks' positions, own rows, rope, the ring, and the rows back in place ----
    ...
    # ---- end of your code ----
    return out, mine


if __name__ == "__main__":
    exercises.zigzag_rope(zigzag_rope)

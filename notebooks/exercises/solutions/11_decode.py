"""Exercise 11, decode: new tokens, proposed together, attend to a cache that is shared out over ranks.

Goal    `decode` puts the keys and values of the T newest tokens into the cache, each on the rank that owns it, and
        gives (out, lse) of their queries over all tokens up to each query's own: the same bits on every rank.
Given   `length` tokens are cached, on all ranks together; token j, counted in the whole text, is on rank
        j // interleave % P, and a rank keeps its tokens in the order of the text. q, k and v of the new tokens, which
        come next, are on every rank. `attend(q, k, v, visible, scale)` is attention in one piece, with visible a bool
        tensor (T, keys); it gives 0 and -inf to a query that sees no key, and works without any keys, too.
Mind    Some ranks own none of the new tokens, and at first no token at all. A query must not see the tokens behind it.
        One message to each other rank, whatever `length` is.

Run     torchrun --nproc-per-node 4 notebooks/exercises/11_decode.py
        Any number of ranks, on CPUs or GPUs. It checks every step on every rank and says what it found.
"""

import torch

import ringlearn as rl
from ringlearn.checks import exercises
from ringlearn.flash import attend


async def decode(comm, q, k, v, k_own, v_own, length: int, interleave: int):
    """(out, lse, k_own, v_own): the last two with those of the new tokens that this rank owns.

    q (1, H, T, D), k, v (1, G, T, D) of the new tokens; k_own, v_own (1, G, n, D) of the cached ones on this rank.
    """
    # ---- your code: append what is yours, attend, exchange, merge ----
    P, rank, T = comm.size, comm.rank, q.shape[2]
    positions = torch.arange(length + T, device=q.device)
    own = positions[positions // interleave % P == rank]  # of all tokens on this rank, the new ones included
    new = own[own >= length] - length
    k_own, v_own = torch.cat([k_own, k[:, :, new]], 2), torch.cat([v_own, v[:, :, new]], 2)

    visible = own <= positions[length:, None]  # (T, keys)
    mine = attend(q, k_own, v_own, visible, q.shape[-1] ** -0.5)
    packed = torch.cat([mine.out, mine.lse.unsqueeze(-1)], -1)
    parts = [part.split([q.shape[-1], 1], -1) for part in await comm.all_gather(packed)]
    out, lse = parts[0][0], parts[0][1].squeeze(-1)
    for part in parts[1:]:  # in rank order, on every rank
        out, lse = rl.merge(rl.Partial(out, lse), rl.Partial(part[0], part[1].squeeze(-1)))
    # ---- end of your code ----
    return out, lse, k_own, v_own


if __name__ == "__main__":
    exercises.decode(decode)

"""Exercise 02, all-reduce from a ring: every rank ends up with the sum of all ranks' tensors.

Goal    `all_reduce` returns the sum, over all ranks, of their `x` (one dim, any length), the same on every rank.
How     Cut x into P parts. In P - 1 steps each rank passes one part on and adds the one that arrives to its own: then
        each rank has the whole sum of one part (reduce-scatter). In P - 1 more steps these sums go round (all-gather).
        Each rank sends 2 (P - 1) parts, 2 (P - 1) / P of its tensor: less than twice its size, for any P.
Given   `pass_on`, and the parts: part i of P may be an element longer than part j, or empty.
Mind    Which part leaves in step t? The one that this rank added to last. It helps to write it down for P = 3.

Run     torchrun --nproc-per-node 4 notebooks/exercises/02_all_reduce.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank and says what it found.
"""

import torch
import torch.distributed as dist

from ringlearn.checks import exercises


def pass_on(part: torch.Tensor, into: torch.Tensor, rank: int, size: int) -> None:
    """Given: send `part` to rank + 1, receive what rank - 1 sends `into` a tensor of the right size; wait for both."""
    send = dist.P2POp(dist.isend, part, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, into, (rank - 1) % size)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()


def all_reduce(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The sum of x over all ranks. `rank` is this rank, `size` the number of ranks P."""
    parts = list(x.clone().tensor_split(size))  # views of a copy: writing to a part leaves x as it is
    # ---- your code: two loops of size - 1 steps, each step one pass_on ----
    for step in range(size - 1):  # a part grows on its way: rank r begins with part r
        leaving, arriving = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        found = torch.empty_like(arriving)
        pass_on(leaving, found, rank, size)
        arriving += found
    for step in range(size - 1):  # rank r now has all of part r + 1
        leaving, arriving = parts[(rank - step + 1) % size], parts[(rank - step) % size]
        pass_on(leaving, arriving, rank, size)
    # ---- end of your code ----
    return torch.cat(parts)


if __name__ == "__main__":
    exercises.all_reduce(all_reduce)

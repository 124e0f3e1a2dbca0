"""Exercise 01, ring pass: every rank hands its token to the next one, with plain sends and receives.

Goal    `ring_pass` sends `token` to rank + 1 and returns what rank - 1 sent. After it, `token` is what it was.
Given   `dist.send(tensor, peer)` returns when the tensor has been taken, `dist.recv(tensor, peer)` when it is there.
        `dist.isend` and `dist.irecv` only post a message and return a handle; `handle.wait()` returns when it is done.
        On NCCL, large messages that are posted one by one hang. `dist.batch_isend_irecv` posts a list of
        `dist.P2POp(dist.isend, tensor, peer)` and `dist.P2POp(dist.irecv, tensor, peer)` together, and returns handles.
Mind    If every rank sends first, nobody receives. And nobody can send to itself: think of one rank alone.
        It is to take at most 2 turns (3 if the number of ranks is odd), however many ranks there are.

Run     torchrun --nproc-per-node 4 notebooks/exercises/01_ring_pass.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank and says what it found.
"""

import torch
import torch.distributed as dist

from ringlearn.checks import exercises


def ring_pass(token: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The token of rank - 1. `rank` is this rank, `size` the number of ranks; rank 0 follows the last one."""
    following, previous = (rank + 1) % size, (rank - 1) % size
    arrived = torch.empty_like(token)
    # ---- your code: what this rank sends and receives, in which order ----
    ...
    # ---- end of your code ----
    return arrived


if __name__ == "__main__":
    exercises.ring_pass(ring_pass)

"""Exercise 03, overlap: the next shard travels while this one is computed on.

Goal    `overlaps` returns what `waits_first` returns, the sum of compute(shard) over the shards of all ranks, but each
        message is on its way during a computation: post, compute, and only then wait.
Given   `post` and `waits_first`. In the last step nothing needs to be sent: P - 1 messages are enough for P shards.
Mind    A tensor that is being sent must not be written, one that is arriving not be read, before handle.wait().
        The order decides whether you are right. The times are measured and printed, and do not: if the ranks share
        few CPU cores, messages and computation compete for them, and there is little to gain.

Run     torchrun --nproc-per-node 4 notebooks/exercises/03_overlap.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank and says what it found.
"""

import torch
import torch.distributed as dist

from ringlearn.checks import exercises


def post(x: torch.Tensor, arriving: torch.Tensor, rank: int, size: int) -> list:
    """Given: start to send x to rank + 1, and to receive `arriving` from rank - 1; returns the handles at once."""
    send = dist.P2POp(dist.isend, x, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % size)
    return dist.batch_isend_irecv([send, receive])


def waits_first(x, compute, rank: int, size: int):
    """Given: right, but a rank that waits does not compute, and while it computes nothing travels."""
    total = 0
    for step in range(size):
        arriving = torch.empty_like(x)
        if step < size - 1:
            for handle in post(x, arriving, rank, size):
                handle.wait()
        total = total + compute(x)
        x = arriving
    return total


def overlaps(x, compute, rank: int, size: int):
    """The same sum. x: this rank's shard. compute(x): a tensor. rank: this rank. size: the number of ranks."""
    total = 0
    for step in range(size):
        # ---- your code: one step, with its message hidden behind its computation ----
        ...
        # ---- end of your code ----
    return total


if __name__ == "__main__":
    exercises.overlap(overlaps, waits_first)

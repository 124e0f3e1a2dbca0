"""Exercise 10, train sharded: several ranks train a model, and every gradient is that of one process, to 1e-10.

Goal    `train_sharded` makes each step on all ranks as one process would make it alone: the loss is the mean over all
        tokens that count, in all sequences of all micro-batches; its gradient is clipped; the optimizer steps once.
Given   A mesh of dp x cp ranks. The cp ranks of `world` share each sequence, in zigzag: rank r of them holds the
        positions rl.zigzag.positions(S, cp, r, world.device). The dp groups take a sequence each: yours is number
        `dp_rank` of every micro-batch. All ranks are in the default process group: `dist.all_reduce(t)` sums over them.
Mind    In one step the optimizer sees the gradients of all micro-batches together. Ranks have differently many tokens
        that count, some of them none. Targets are shifted already; IGNORE, -100, does not count.

Run     torchrun --nproc-per-node 4 notebooks/exercises/10_train_sharded.py
        Any number of ranks, on CPUs or GPUs: 4 are a mesh of 2 x 2, 2 and 3 share each sequence. It checks every
        step's gradient on every rank and says what it found.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringlearn as rl
from ringlearn.checks import exercises


def train_sharded(model, optimizer, steps, max_norm: float, world: rl.DistributedWorld, dp_rank: int) -> list[float]:
    """The loss of each step, the same on every rank. Afterwards the weights are those that one process would have.

    model(tokens, positions, attention) gives logits (n, vocabulary) for n tokens. steps: each is a list of
    micro-batches, and each of these a list of dp pairs (tokens, targets), both (S,); all ranks have all of them.
    """

    def attention(q, k, v):
        return rl.ring_attention(q, k, v, mask=rl.causal, layout=rl.zigzag, world=world)

    losses = []
    for step in steps:
        # ---- your code: the shards, the loss, backward, the sums over the ranks, clipping, the optimizer's step ----
        ...
        # ---- end of your code ----
        losses.append(torch.as_tensor(loss).item())
    return losses


if __name__ == "__main__":
    exercises.train_sharded(train_sharded)

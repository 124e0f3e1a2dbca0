"""Exercise 06, a training step: the gradients of many ranks equal those of one process, to 1e-10.

Goal    `training_step` calls backward so that every rank's `p.grad` is the gradient of the loss of the *whole* text,
        and returns that loss. The loss is the mean of -log p over the tokens that count, which are tokens[prompt:].
Given   The model (embedding, rotary positions, two blocks of attention) and ring attention between the ranks: the
        gradients of keys and values find their way home by themselves. What each rank adds up for the *weights* is
        the share of its own tokens. `dist.all_reduce(t)` puts the sum of all ranks' t into each t, outside of autograd.
Mind    Ranks hold differently many tokens, and on some of them none may count.
        Four things can go wrong: positions, targets at the end of a shard, what the loss is divided by, and the sum
        over the ranks. With one rank, most of that does not show.

Run     torchrun --nproc-per-node 4 notebooks/exercises/06_training_step.py
        Any number of ranks, on CPUs or GPUs. It checks itself on every rank and says what it found.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringlearn as rl
from ringlearn.checks import exercises


def training_step(model, tokens: torch.Tensor, prompt: int, world: rl.DistributedWorld) -> torch.Tensor:
    """The loss of the whole text, the same on every rank; afterwards p.grad is its gradient, on every rank.

    model(tokens, positions, attention) gives logits (n, vocabulary) for n tokens. tokens: (S + 1,), the whole text:
    each of the first S is an input, and what follows it is its target. prompt: tokens[:prompt] are no targets.
    """
    S = len(tokens) - 1
    mine = rl.contiguous.positions(S, world.size, world.rank, world.device)  # (n,): the inputs of this rank

    def attention(q, k, v):
        return rl.ring_attention(q, k, v, mask=rl.causal, layout=rl.contiguous, world=world)

    # ---- your code: logits, loss, backward, and the sums over the ranks ----
    logits = model(tokens[mine], mine, attention)
    counts = mine + 1 >= prompt
    share = F.cross_entropy(logits[counts], tokens[mine + 1][counts], reduction="sum") / (len(tokens) - prompt)
    share.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    loss = share.detach().clone()
    dist.all_reduce(loss)
    # ---- end of your code ----
    return loss


if __name__ == "__main__":
    exercises.training_step(training_step)

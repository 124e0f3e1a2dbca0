"""Exercise 12, packed step: every rank reads its own part of rows of packed documents, and all take one step together.

Goal    `packed_step` leaves in p.grad, on every rank, the gradient that one process would find which computes each
        document by itself, to 1e-10; it returns the loss, the mean over all tokens of all rows that have a target.
Given   A mesh of dp x cp ranks. Row number `group` is shared by the cp ranks of `world`, in zigzag: rank r of them
        holds the places rl.zigzag.positions(S, cp, r, world.device). `borders[row]` says where the documents of a row
        begin, [0, 5, 12, S]; every rank knows the borders of all rows, but only `read(row, places)` gives tokens, for a
        tensor of places. All ranks are in the default process group: `dist.all_reduce(t)` sums over them.
        `rl.documents(lengths)` is the mask of documents with these lengths (notebook 07).
Mind    A document may begin, and go on, on another rank. Read no more than you need. Some ranks may have no target.

Run     torchrun --nproc-per-node 4 notebooks/exercises/12_packed_step.py
        Any number of ranks, on CPUs or GPUs: 4 are a mesh of 2 x 2, 2 and 3 share one row. It checks loss, gradient
        and what was read on every rank, and says what it found.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringlearn as rl
from ringlearn.checks import exercises


def packed_step(model, read, borders, world: rl.DistributedWorld, group: int) -> float:
    """The loss of the step, the same on every rank; the gradients are in p.grad of each parameter.

    model(tokens, positions, attention) gives logits (n, vocabulary) for n tokens. You write attention(q, k, v), too: it
    gets this rank's q, k and v, (1, heads, n, D), with q and k already turned by RoPE, and returns out.
    """
    # ---- your code: what is read, the mask, positions, targets, the loss, backward, the sums over the ranks ----
    cuts = torch.tensor(borders[group], device=world.device)
    S, mask = int(cuts[-1]), rl.causal & rl.documents(cuts.diff().tolist())

    def attention(q, k, v):
        return rl.ring_attention(q, k, v, mask=mask, layout=rl.zigzag, world=world)

    own = rl.zigzag.positions(S, world.size, world.rank, world.device)
    start = cuts[torch.bucketize(own, cuts, right=True) - 1]  # where the document of each token begins
    goes_on = ~torch.isin(own + 1, cuts)
    tokens = read(group, own)
    targets = torch.full_like(tokens, -100)
    targets[goes_on] = read(group, own[goes_on] + 1)
    N = goes_on.sum()
    dist.all_reduce(N)
    loss = F.cross_entropy(model(tokens, own - start, attention), targets, reduction="sum") / N
    loss.backward()  # on a rank without a target, too: its gradients are zeros, and its messages are not
    for p in model.parameters():
        dist.all_reduce(p.grad)
    loss = loss.detach()
    dist.all_reduce(loss)
    # ---- end of your code ----
    return float(loss)


if __name__ == "__main__":
    exercises.packed_step(packed_step)

"""The language model's loss, in blocks of the sequence, as a sum that adds up over ranks.

A rank returns the *sum* of the losses of its own tokens. Means do not add up: ranks hold different numbers of tokens
that count, and the mean of their means is another number.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from .blocks import each_block
from .split import IGNORE


def loss_sum(logits_of: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, *, block: int) -> Tensor:
    """The sum of the cross-entropies of ``block`` tokens at a time: never logits of shape (B, S, vocabulary).

    logits_of: from (B, block, width) to (B, block, vocabulary).  x: (B, s, width), the model's last activations.
    targets: int64 (B, s), IGNORE where there is none. Returns a float32 (float64) number, 0 with a gradient of 0 if no
    token counts.

    >>> import torch
    >>> x, head, targets = torch.zeros(1, 5, 2), torch.zeros(2, 256), torch.tensor([[1, 2, 3, 4, IGNORE]])
    >>> loss_sum(lambda x: x @ head, x, targets, block=2)  # four times log(256)
    tensor(22.1807)
    """

    if targets.shape != x.shape[:2]:
        raise ValueError(
            f"loss_sum: expected a target for each token, (B, s) = {tuple(x.shape[:2])}, got {tuple(targets.shape)}"
        )

    def one_block(x: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(x)
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    return sum(each_block(one_block, x, targets, block=block))

"""The feed-forward layer of a transformer, in blocks of the sequence."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .blockwise import blockwise, cat_blocks


class FeedForward(nn.Module):
    """down(gelu(up(x))) of each token, for ``block`` tokens at a time: never (B, S, hidden), forward or backward.

    width: of the model.  hidden: 4 width if None.

    >>> import torch
    >>> FeedForward(8, block=16)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(self, width: int, hidden: int | None = None, *, block: int = 512):
        super().__init__()
        self.block = block
        self.up = nn.Linear(width, hidden or 4 * width, bias=False)
        self.down = nn.Linear(hidden or 4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cat_blocks(blockwise(self._one_block, x, block=self.block))

    def _one_block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

"""The feed-forward layer of a transformer: four times as wide inside as outside, so it is called in blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .inputs import check_sizes


class FeedForward(nn.Module):
    """down(gelu(up(x))) of each token.

    width: of the model.  hidden: 4 width if None. ``in_blocks`` calls it for some tokens at a time. Raises ValueError
    unless both are ints >= 1.

    >>> import torch
    >>> FeedForward(8)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(self, width: int, hidden: int | None = None):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        check_sizes("FeedForward", width=width, hidden=hidden)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

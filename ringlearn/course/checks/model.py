"""A language model small enough to train in a test: what the exercise about a training step trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .oracle import numbers

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class TinyModel(nn.Module):
    """Two blocks of grouped-query attention with rotary positions, in float64: ``model(tokens, positions, attention)``.

    tokens: (n,) int64 below ``vocabulary``.  positions: (n,) where in the text they stand.  attention: takes q
    (1, H, n, D), k and v (1, G, n, D), and gives (1, H, n, D), causal.  Returns logits (n, vocabulary): what follows
    each token. The weights are the same on every machine.

    >>> model = TinyModel()
    >>> model(torch.arange(5), torch.arange(5), dense_causal).shape
    torch.Size([5, 11])
    """

    def __init__(self, vocabulary: int = 11, H: int = 4, G: int = 2, D: int = 4, blocks: int = 2):
        super().__init__()
        self.H, self.G, self.D = H, G, D
        width = H * D
        self.embedding = _weight(1, vocabulary, width)
        self.to_qkv = nn.ParameterList(_weight(10 + i, width, (H + 2 * G) * D) for i in range(blocks))
        self.to_out = nn.ParameterList(_weight(20 + i, width, width) for i in range(blocks))
        self.head = _weight(2, width, vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embedding[tokens]  # (n, H D)
        for to_qkv, to_out in zip(self.to_qkv, self.to_out):
            q, k, v = (x @ to_qkv).view(1, len(tokens), -1, self.D).transpose(1, 2).split([self.H, self.G, self.G], 1)
            out = attention(rope(q, positions), rope(k, positions), v)  # (1, H, n, D)
            x = x + out.transpose(1, 2).reshape(len(tokens), -1) @ to_out
        return x @ self.head


def _weight(seed: int, rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(numbers(seed, rows, columns).double() / rows**0.5)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, section 3.4.2): dims d and d + D/2 turn by position * 100^(-2 d / D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def dense_causal(q: Tensor, k: Tensor, v: Tensor, document: Tensor | None = None) -> Tensor:
    """Causal attention of one process, written out.  document: (n,) of which document each token is, if they differ."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    if document is not None:
        hidden |= document != document[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

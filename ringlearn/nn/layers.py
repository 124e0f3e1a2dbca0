"""RMSNorm: every token's vector is scaled to root mean square 1, then by a learnt gain.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last dim; computed in float32 or wider, returned in the dtype of x.

    >>> RMSNorm(4)(torch.full((1, 4), 3.0))
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=<...>)
    """

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain).to(x.dtype)

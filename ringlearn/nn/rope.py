"""Rotary position embedding (RoPE): queries and keys are turned by angles that grow with their position.

The score of a query at p and a key at p' then depends on p - p' alone. A rank needs nothing but the global positions of
its own tokens, whatever the layout; the local index is right on rank 0 of a contiguous layout only.

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turn the pair (x[i], x[i + D/2]) by the angle position * base^(-2i / D).

    x: (B, H, s, D) with D even.  positions: (s,), global.  base: > 0. Returns the shape and dtype of x. The angles are
    made in float64: at position 1,000,000 a float32 angle is off by 0.06.  Raises ValueError if these do not fit.

    >>> x = torch.randn(1, 1, 2, 8)
    >>> torch.equal(rope(x, torch.tensor([0, 0])), x)
    True
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"rope: it turns pairs, so the head dim D must be even, got x {tuple(x.shape)}")
    if positions.shape != x.shape[-2:-1]:
        raise ValueError(
            f"rope: expected a position for each token, ({x.shape[-2]},), got {tuple(positions.shape)} for x "
            f"{tuple(x.shape)}"
        )
    if not base > 0:
        raise ValueError(f"rope: expected base to be a number > 0, got {base!r}")
    wide = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=x.device) / D)
    angles = positions[:, None] * frequencies  # (s, D/2)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

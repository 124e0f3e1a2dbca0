"""The oracle: dense attention in float64, the whole score matrix at once, with plain autograd for its gradients.

And a kernel that minds what it is handed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringlearn.kernels.reference import Reference
from ringlearn.masks import Mask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None = None,
    q_start: int = 0,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, H, S_q, D_v) and lse (B, H, S_q) in float64; rows that see no key give 0 and -inf, with no gradients.

    With sinks a row has one more score, whose value is 0.
    """
    q, k, v = q.double(), k.double(), v.double()
    H, G = q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    visible = mask.dense(q.shape[2], k.shape[2], q_start, device=q.device)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        i, j = torch.arange(q.shape[2], device=q.device) + q_start, torch.arange(k.shape[2], device=q.device)
        slopes = torch.as_tensor(alibi, dtype=torch.float64, device=q.device)
        scores = scores - slopes[:, None, None] * (i[:, None] - j).abs()
    scores = scores.masked_fill(~visible, -torch.inf)
    seen = visible.any(-1).expand(scores.shape[:-1])
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores, v = torch.cat([scores, column], -1), torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
        seen = torch.ones_like(seen)
    # Rows without keys: softmax over one made-up score, whose result is thrown away, so that no NaN reaches a gradient.
    safe = torch.where(seen[..., None], scores, torch.zeros_like(scores))
    out = torch.where(seen[..., None], safe.softmax(-1) @ v, torch.zeros((), dtype=torch.float64, device=q.device))
    lse = (
        torch.where(seen, safe.logsumexp(-1), -torch.inf)
        if scores.shape[-1]
        else torch.full(q.shape[:3], -torch.inf, device=q.device)
    )
    return out, lse


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over the norm of the oracle b; 0 if both are 0 or empty."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    both_empty = (a == -torch.inf) & (b == -torch.inf)  # lse of rows without keys
    a, b = a.masked_fill(both_empty, 0.0), b.masked_fill(both_empty, 0.0)
    norm = float(b.norm())
    error = float((a - b).norm())
    return error / norm if norm else error


class Picky(Reference):
    """Fails if it is handed nothing to do."""

    name = "picky"

    def forward(self, q, k, v, tile, scale):
        assert min(tile.shape) > 0 and q[:, :, tile.q].numel() and k[:, :, tile.k].numel()
        return super().forward(q, k, v, tile, scale)

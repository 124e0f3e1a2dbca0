"""Attention sinks: for each query head one learnt score without a value, which only takes weight from the others.

A sink z is one more column of the softmax. Its value is 0, so it changes a finished result alone:

    lse'  =  log(exp(lse) + exp(z)),      out'  =  exp(lse - lse') out                                      (1)

No kernel and no message knows of it, and every row gets it once, after the last merge. From there on lse' and out' are
the row's global lse and out, with which every tile's backward is right as it is. The sink's own gradient is that of any
score, ds = p (dp - delta + dlse), with p = exp(z - lse') and, because its value is 0, dp = 0:

    dz  =  sum over rows of  exp(z - lse') (dlse - delta),      delta = (dout * out').sum(-1)               (2)

A rank has some rows, so what it finds is its share of dz.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (section 2.2); the name is of Xiao et al. 2024, "Efficient
Streaming Language Models with Attention Sinks", whose sinks are tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fingerprint import shown
from ..partial import Partial, merge_weights


def with_sinks(result: Partial, sinks: Tensor) -> Partial:
    """A finished result and its sinks (H,): equation (1). A row that sees no key has lse' = z and out' = 0.

    >>> row = Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> with_sinks(row, torch.zeros(1)).out
    tensor([[[[0.5000, 0.5000]]]])
    """
    lse, weight, _ = merge_weights(result.lse, _rows(sinks, result.lse))
    return Partial((result.out * weight.unsqueeze(-1)).to(result.out.dtype), lse)


def gradient_of_sinks(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sinks: Tensor) -> Tensor:
    """Equation (2) over the rows at hand: (H,) in the dtype of lse.  out, lse: with the sinks.  dlse: None for 0."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    p = torch.exp(_rows(sinks, lse) - lse.masked_fill(lse == -torch.inf, 0.0))  # a row without anything: no sink either
    return (p * ((0.0 if dlse is None else dlse) - delta)).sum((0, 2))


def _rows(sinks: Tensor, lse: Tensor) -> Tensor:
    """As one score for each row of lse (B, H, S)."""
    return sinks.to(lse.dtype)[None, :, None].expand_as(lse)


def check_sinks(op: str, sinks: Any, H: int, device: torch.device) -> None:
    """Raise ValueError unless sinks are None or a tensor with one score for each query head, on the queries' device."""
    if sinks is None:
        return
    expected = f"{op}: expected sinks of shape ({H},), one score for each query head, in a floating dtype on {device}"
    if not isinstance(sinks, Tensor):
        raise ValueError(f"{expected}, got {shown(sinks)}")
    if tuple(sinks.shape) != (H,) or not sinks.is_floating_point() or sinks.device.type != device.type:
        raise ValueError(f"{expected}, got {tuple(sinks.shape)} in {sinks.dtype} on {sinks.device}")

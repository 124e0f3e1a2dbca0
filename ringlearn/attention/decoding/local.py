"""Attention of some queries to the tokens that one rank owns, to be read; any device and dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...flash import attend_to_scores, scores
from ...kernels.scores import Scores
from ...partial import Partial, accumulation_dtype
from ...partial.accumulate import ALL, Accumulator


def attend(
    q: Tensor,
    blocks: Iterable[tuple[int, Tensor, Tensor]],
    first: Tensor,
    last: Tensor,
    scale: float,
    softcap: float | None,
    D_v: int,
) -> Partial:
    """Partial(out, lse) of queries (B, H, n, D_k) over one rank's tokens, in the accumulation dtype.

    blocks: (the first slot, k (B, G, s, D_k), v (B, G, s, D_v)), some of the rank's slots at a time. They are what
    split-K gives to different parts of a GPU; here they come one after the other.
    first, last: (B, n), each query sees the slots first <= slot < last. Without any, out is 0 and lse is -inf, as it
    must be for a rank that owns nothing yet: a merge then leaves the others' results as they are.
    """
    B, H, n, _ = q.shape
    wide = accumulation_dtype(q.dtype)
    q = q.to(wide)
    result = Accumulator((B, H, n, D_v), wide, q.device)
    for start, k, v in blocks:
        slots = torch.arange(start, start + k.shape[2], device=q.device)
        visible = (first[..., None] <= slots) & (slots < last[..., None])  # (B, n, s)
        # What nobody sees may be anything, such as what was there before; its weight is 0, but 0 * NaN is NaN.
        seen = visible.any(1)[:, None, :, None]
        v = v.to(wide).masked_fill(~seen, 0.0)
        s = Scores(softcap).capped(scores(q, k.to(wide), scale))
        result.add(ALL, attend_to_scores(s.masked_fill(~visible[:, None], -torch.inf), v))
    return result.partial

"""What becomes of a score before the softmax: it is capped, or lowered with the distance of query and key.

    s  <-  c tanh(s / c)        softcap c: no score is above c or below -c                                  (1)
    s  <-  s - m |i - j|        ALiBi: i and j are the global positions of query and key, m is the slope    (2)
                                of the query head

The scale comes before both, the mask after them. In the backward (1) passes on 1 - (capped / c)^2 of the gradient of a
score, and (2) all of it. Under a causal mask |i - j| is i - j, as ALiBi was published; without one it counts in both
directions, as in FlashAttention.

Source: Press, Smith and Lewis 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation" (section 3); Gemma Team 2024, "Gemma 2" (section 2, logit soft-capping).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import shown
from ..flash import attend_to_scores, is_scale, scores, sum_over_queries, weighted_sum
from ..masks import on_device
from ..partial import Partial


@dataclass(frozen=True)
class Scores:
    """How the scores of a call are changed, the same on all ranks; falsy if they are left unchanged.

    softcap: c of equation (1).  slopes: m of equation (2), one for each query head.

    >>> bool(Scores()), str(Scores(softcap=50.0)), str(Scores(slopes=(0.5, 0.25)))
    (False, 'softcap', 'ALiBi')
    """

    softcap: float | None = None
    slopes: tuple[float, ...] | None = None

    def __bool__(self) -> bool:
        return self.softcap is not None or self.slopes is not None

    def __str__(self) -> str:
        names = [name for name, x in (("softcap", self.softcap), ("ALiBi", self.slopes)) if x is not None]
        return " and ".join(names) or "scores as they are"

    def of_heads(self, heads: slice) -> Scores:
        """The same for some of the query heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])

    def capped(self, s: Tensor) -> Tensor:
        """Scores after equation (1)."""
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def passed_on(self, capped: Tensor) -> Tensor | float:
        """The derivative of equation (1), computed from the scores after it."""
        return 1.0 if self.softcap is None else 1 - (capped / self.softcap) ** 2

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor | float:
        """What equation (2) adds: (H, rows, columns), from int64 (rows,) and (columns,)."""
        if self.slopes is None:
            return 0.0
        distance = (q_positions[:, None] - k_positions).abs()
        return on_device(self.slopes, dtype, distance.device)[:, None, None] * -distance.to(dtype)


UNCHANGED = Scores()


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, change: Scores, bias: Tensor | float
) -> Partial:
    """``flash.attend`` with changed scores.  bias: of the block, as ``Scores.bias`` gives it."""
    s = change.capped(scores(q, k, scale)) + bias
    return attend_to_scores(s if visible is None else s.masked_fill(~visible, -torch.inf), v)


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    visible: Tensor | None,
    scale: float,
    change: Scores,
    bias: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``flash.attend_backward`` with changed scores: its equations (1) to (4), then back through the cap, then (5)."""
    capped = change.capped(scores(q, k, scale))
    s = capped + bias
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    ds = p * (scores(dout, v, 1.0) - delta.unsqueeze(-1)) * change.passed_on(capped)
    G = k.shape[1]
    return weighted_sum(ds, k) * scale, sum_over_queries(ds, q, G) * scale, sum_over_queries(p, dout, G)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi, one for each query head, for ``alibi=`` of the attention functions.

    A geometric sequence from 2^(-8 / heads) to 2^-8. If heads is not a power of two, the slopes for the next smaller
    power of two come first, then every other slope for the next larger one, as in the authors' code.
    Raises ValueError unless heads is an int >= 1.

    Source: Press, Smith and Lewis 2022, "Train Short, Test Long", section 3.

    >>> alibi_slopes(4), alibi_slopes(3)
    ((0.25, 0.0625, 0.015625, 0.00390625), (0.0625, 0.00390625, 0.25))
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"alibi_slopes: expected heads, the number of query heads, to be an int >= 1, got {heads!r}")
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)))


def scores_of(op: str, H: int, softcap: Any, alibi: Any) -> Scores:
    """The arguments softcap= and alibi= of a call with H query heads. Raises ValueError if they make no sense."""
    if softcap is not None and not is_scale(softcap):
        raise ValueError(f"{op}: expected softcap to be None or a finite number > 0, got {shown(softcap)}")
    return Scores(None if softcap is None else float(softcap), None if alibi is None else _slopes(op, H, alibi))


def _slopes(op: str, H: int, alibi: Any) -> tuple[float, ...]:
    expected = f"{op}: expected alibi to be {H} finite slopes, one for each query head, such as rl.alibi_slopes({H})"
    if isinstance(alibi, Tensor):
        if alibi.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{expected}, got a tensor that requires a gradient, which slopes do not get; detach it")
        slopes = alibi.tolist() if alibi.dim() == 1 and alibi.device.type != "meta" else None
    else:
        slopes = list(alibi) if isinstance(alibi, Sequence) and not isinstance(alibi, str) else None
    if slopes is None or len(slopes) != H or not all(_is_number(x) for x in slopes):
        raise ValueError(f"{expected}, got {shown(alibi)}")
    return tuple(map(float, slopes))


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)

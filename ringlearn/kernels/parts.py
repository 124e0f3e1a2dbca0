"""A tile that a kernel does not know, from tiles that it knows: partial results merge, gradients add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..partial import Accumulator, Partial, accumulation_dtype
from ..tiles import Tile

if TYPE_CHECKING:
    from .fused import Fused


def forward_in_parts(
    kernel: Fused, q: Tensor, k: Tensor, v: Tensor, tile: Tile, parts: tuple[Tile, ...], scale: float
) -> Partial:
    """The tile's Partial(out, lse) in the accumulation dtype. Rows in none of the parts see nothing."""
    shape = *q.shape[:2], tile.shape[0], v.shape[-1]
    result = Accumulator(shape, accumulation_dtype(q.dtype), q.device, parts=len(parts))
    for part in parts:
        result.add(_within(tile.q, part.q), kernel.checked_forward(q, k, v, part, scale))
    return result.partial


def backward_in_parts(
    kernel: Fused,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    parts: tuple[Tile, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's dq, dk, dv in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    where = (q, tile.q), (k, tile.k), (v, tile.k)
    sums = tuple(t.new_zeros((*t.shape[:2], s.stop - s.start, t.shape[-1]), dtype=dtype) for t, s in where)
    for part in parts:
        grads = kernel.checked_backward(dout, q, k, v, out, lse, part, scale)
        places = _within(tile.q, part.q), _within(tile.k, part.k), _within(tile.k, part.k)
        for total, grad, place in zip(sums, grads, places, strict=True):
            total[:, :, place] += grad
    return sums


def _within(whole: slice, part: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)

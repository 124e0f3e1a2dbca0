"""The reference kernel: plain torch, any mask, any dtype, any device (meta too), readable and slow.

It walks a tile in blocks of at most 512 x 512, so that even here no S x S tensor exists.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import flash
from ..partial import Partial, accumulation_dtype
from ..partial.accumulate import Accumulator
from ..tiles import BLOCK, Kind, Tile, moved
from . import scores
from .scores import UNCHANGED, Scores


class Reference:
    """Attention of a tile as in flash.py, in the accumulation dtype.

    scores: how they are changed before the softmax. For ALiBi tiles have to be ``Located``.
    """

    name = "reference"

    def __init__(self, scores: Scores = UNCHANGED):
        self._scores = scores

    def with_scores(self, scores: Scores) -> Reference:
        return Reference(scores)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        dtype = accumulation_dtype(q.dtype)
        rows, _ = tile.shape
        result = Accumulator((*q.shape[:2], rows, v.shape[-1]), dtype, q.device)
        change = self._changes(tile, q)
        q, k, v = q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k]
        attend = scores.attend if self._scores else flash.attend
        for i, j, visible in _blocks(tile, q):
            block = (t.to(dtype) for t in (q[:, :, i], k[:, :, j], v[:, :, j]))
            result.add(i, attend(*block, visible, scale, *change(i, j)))
        return result.partial

    def backward(self, dout, q, k, v, out, lse, tile, scale, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        q, k, v = q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k]
        dout, out, lse = dout[:, :, tile.q], out[:, :, tile.q], lse[..., tile.q]
        delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
        if dlse is not None:  # d lse / d s_j = p_j, so a gradient of lse only shifts delta
            delta = delta - dlse[..., tile.q].to(dtype)
        dq, dk, dv = (t.new_zeros(t.shape, dtype=dtype) for t in (q, k, v))
        change = self._changes(tile, q)
        attend_backward = scores.attend_backward if self._scores else flash.attend_backward
        for i, j, visible in _blocks(tile, q):
            block = (t.to(dtype) for t in (dout[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j]))
            of_rows = lse[..., i], delta[..., i]
            dq_ij, dk_ij, dv_ij = attend_backward(*block, *of_rows, visible, scale, *change(i, j))
            dq[:, :, i] += dq_ij
            dk[:, :, j] += dk_ij
            dv[:, :, j] += dv_ij
        return dq, dk, dv

    def _changes(self, tile: Tile, q: Tensor) -> Callable[[slice, slice], tuple]:
        """What ``scores.attend`` is told beside ``flash.attend``, for some rows and columns of the tile."""
        if not self._scores:
            return lambda i, j: ()
        if self._scores.slopes is None:
            return lambda i, j: (self._scores, 0.0)
        rows, columns = tile.positions(q.device)
        dtype = accumulation_dtype(q.dtype)
        return lambda i, j: (self._scores, self._scores.bias(rows[i], columns[j], dtype))


def _blocks(tile: Tile, q: Tensor):
    """The blocks of a tile that are not empty: local rows, local columns, and what is visible (None: everything)."""
    for part in tile.cut:
        row, column = part.q.start - tile.q.start, part.k.start - tile.k.start
        rows, columns = part.shape
        for a in range(0, rows, BLOCK):
            i = slice(a, min(rows, a + BLOCK))
            for c in range(0, columns, BLOCK):
                j = slice(c, min(columns, c + BLOCK))
                visible = part.visible(q.device) if part.kind is Kind.PARTIAL else None
                if part.kind is Kind.CAUSAL:
                    if j.start >= i.stop:
                        continue
                    # Blocks of a CAUSAL square are on one grid: below the diagonal everything is visible.
                    corner = Tile(slice(0, i.stop - i.start), slice(0, j.stop - j.start), Kind.CAUSAL)
                    visible = corner.visible(q.device) if a == c else None
                yield moved(i, row), moved(j, column), visible

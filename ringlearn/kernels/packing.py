"""How a PACKED tile becomes one call of a kernel with variable lengths, and how the results come back.

Such a kernel takes the rows of all sequences one below the other, (B * rows, H, D), and ``cu_seqlens``: where each of
them begins. Rows and columns of a tile that belong to none of its parts are left out, by one gather, only where there
are any.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..masks import on_device
from ..tiles import Tile


class Packing:
    """How the rows and columns of a PACKED tile lie in packed tensors.

    t: any tensor of the call, (B, heads, ..., D): only its batch and its device matter.
    """

    def __init__(self, tile: Tile, t: Tensor):
        self.rows = _Side(tuple((p.q.start - tile.q.start, p.q.stop - tile.q.start) for p in tile.parts), t)
        self.columns = _Side(tuple((p.k.start - tile.k.start, p.k.stop - tile.k.start) for p in tile.parts), t)


class _Side:
    """The rows, or the columns, of a tile."""

    def __init__(self, spans: tuple[tuple[int, int], ...], t: Tensor):
        self._B, self._size = t.shape[0], spans[-1][1]
        starts, longest, gaps = _places(spans, self._B)
        self.starts = on_device(starts, torch.int32, t.device)
        self.longest = max(2, longest)  # with 1, FlashAttention takes another way, which mixes up the heads of lse
        self._index = on_device(gaps, torch.int64, t.device) if gaps else None

    def pack(self, t: Tensor) -> Tensor:
        """(B, heads, S, D) -> (B * rows, heads, D)"""
        t = t.transpose(1, 2)
        return (t if self._index is None else t.index_select(1, self._index)).flatten(0, 1)

    def unpack(self, t: Tensor) -> Tensor:
        """(B * rows, heads, D) -> (B, heads, S, D), 0 in what was left out"""
        t = t.unflatten(0, (self._B, -1))
        if self._index is not None:
            t = t.new_zeros((self._B, self._size, *t.shape[2:])).index_copy_(1, self._index, t)
        return t.transpose(1, 2)

    def pack_lse(self, lse: Tensor) -> Tensor:
        """(B, H, S) -> (H, B * rows), contiguous"""
        lse = lse if self._index is None else lse.index_select(2, self._index)
        return lse.transpose(0, 1).flatten(1).contiguous()

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """(H, B * rows) -> (B, H, S), -inf in what was left out"""
        lse = lse.unflatten(1, (self._B, -1)).transpose(0, 1)
        if self._index is not None:
            lse = lse.new_full((*lse.shape[:2], self._size), -torch.inf).index_copy_(2, self._index, lse)
        return lse


@lru_cache(maxsize=1024)
def _places(spans: tuple[tuple[int, int], ...], B: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Where each sequence of each batch begins, and one past the last; the longest; what to gather, if not all."""
    lengths = [b - a for a, b in spans]
    total = sum(lengths)
    starts = [0]
    for length in lengths * B:
        starts.append(starts[-1] + length)
    gather = tuple(i for a, b in spans for i in range(a, b)) if total < spans[-1][1] else ()
    return tuple(starts), max(lengths), gather

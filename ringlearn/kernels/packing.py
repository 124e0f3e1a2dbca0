"""How a SEGMENTS tile becomes one call of a kernel with variable lengths, and how the results come back.

Such a kernel takes the rows of all segments one below the other, (B * rows, H, D), and ``cu_seqlens``: where each of
them begins. The rows of a tile already lie so, for those that see nothing are segments too: of one sequence nothing is
copied, and of a batch each tensor once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..tiles import Tile


class Sequences(NamedTuple):
    """Where each segment of each row of the batch begins, int32 on the device, and how long the longest is."""

    rows: Tensor
    columns: Tensor
    most_rows: int
    most_columns: int


def sequences(tile: Tile, t: Tensor) -> Sequences:
    """t: any tensor of the call, (B, heads, ..., D): only its batch and its device matter."""
    rows, _ = tile.call.longest
    # With 1, FlashAttention takes another way, which mixes up the heads of lse.
    return Sequences(*tile.call.starts.on(t.device, t.shape[0]), max(2, rows), max(2, most_columns(tile)))


def most_columns(tile: Tile) -> int:
    """The most columns of a segment, or so many more that FlashAttention 2 takes the limits as they are.

    It takes a limit of as many columns or more for none, and none beside another for that number.
    """
    rows, columns = tile.call.longest
    left, right = tile.call.left, tile.call.right
    if right is None:
        return columns if left is None else max(columns, rows)
    return max(columns, right + 1)


def pack(t: Tensor) -> Tensor:
    """(B, heads, S, D) -> (B * S, heads, D)"""
    return t.transpose(1, 2).flatten(0, 1)


def unpack(t: Tensor, like: Tensor) -> Tensor:
    """(B * S, heads, D) -> (B, heads, S, D), with as many B as ``like`` has"""
    return t.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def pack_lse(lse: Tensor) -> Tensor:
    """(B, H, S) -> (H, B * S), contiguous"""
    return lse.transpose(0, 1).flatten(1).contiguous()


def unpack_lse(lse: Tensor, like: Tensor) -> Tensor:
    """(H, B * S) -> (B, H, S), with as many B as ``like`` has"""
    return lse.unflatten(1, (like.shape[0], -1)).transpose(0, 1)

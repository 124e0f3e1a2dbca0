"""Where the newest tokens of each sequence go in the pages of a rank, worked out on the device that holds them.

The host knows it too, but a CUDA graph is captured once and replayed while the sequences grow: what changes from one
replay to the next must come from the device's own memory. ``gpu.append`` is the same in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ownership import Ownership


def own_rows(
    n: int,
    heads: int,
    page: int,
    pages: int,
    table: Tensor,
    lengths: Tensor,
    room: Tensor,
    counts: Tensor | None,
    rank: int,
    ownership: Ownership,
) -> Tensor:
    """The row of each of the next n tokens, int64 (B, heads, n), in (pages, heads, page, D) laid out as rows of D.

    Tokens that the rank does not keep get the row behind the last one: those of other ranks, those that come after the
    first ``counts`` (B,), and those at positions from ``room`` (B,) on, for which there is no page.
    table: (B, pages of a sequence).  lengths: (B,), how many tokens each sequence has now.

    >>> table, lengths, room = torch.tensor([[1, 0]]), torch.tensor([3]), torch.tensor([8])
    >>> own_rows(4, 1, 2, 2, table, lengths, room, None, 0, Ownership(ranks=2, interleave=1))  # 4 is nowhere
    tensor([[[4, 0, 4, 1]]])
    """
    new, head = torch.arange(n, device=lengths.device), torch.arange(heads, device=lengths.device)
    positions = lengths[:, None] + new  # (B, n)
    kept = (ownership.owner(positions) == rank) & (positions < room[:, None])
    if counts is not None:
        kept &= new < counts[:, None]
    slots = ownership.slot(positions)
    column = (slots // page).clamp(max=table.shape[1] - 1)  # of what is not kept, any will do
    first = table.gather(1, column).long() * heads
    rows = (first[:, None] + head[:, None]) * page + (slots % page)[:, None]
    return rows.where(kept[:, None], pages * heads * page)

"""Packed documents: who holds what when several documents share one sequence, and where each of their tokens stands.

A pack is a sequence of documents that do not see each other: ``rl.documents(lengths)``. Zigzag over the whole pack
knows nothing of them. A rank's two blocks may then lie in long documents, whose late tokens see many keys, or in short
ones, whose tokens see few; and in most steps of the ring, a rank meets keys of documents that it has no query of.
Dealing every document out by itself makes all ranks alike, in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .layouts import Layout, Ranges, count, zigzag
from .masks import documents


@dataclass(frozen=True)
class _PerDocument:
    """The rule of a layout that deals documents out one by one; a value, so that layouts compare and can be sent."""

    lengths: tuple[int, ...]

    def __call__(self, length: int, world_size: int, rank: int) -> Ranges:
        if length != sum(self.lengths):
            raise ValueError(
                f"layout zigzag per document: the lengths add up to {sum(self.lengths)}, the sequence has {length}; "
                f"give the lengths of all documents in it, padding too"
            )
        return _deal(self.lengths, world_size)[rank]


def zigzag_per_document(lengths: Iterable[int]) -> Layout:
    """A layout for packed documents: each document is cut in zigzag by itself, so that every rank has a part of each.

    Under a causal mask within documents all ranks then have the same work in every step of a ring, up to a few rows
    per document, whatever the lengths; the price is a kernel call per document and step. Lengths need not divide by
    anything. Where they do not, the longer parts go to the ranks that have the fewest tokens so far, so that shards
    differ by two tokens at most. For one document it is ``zigzag``.

    lengths: as in ``documents``; they add up to the sequence. Raises ValueError unless they are ints >= 0.

    >>> zigzag_per_document([8, 4]).ranges(12, 2)[0]
    (range(0, 2), range(6, 8), range(8, 9), range(11, 12))
    """
    mask = documents(lengths)
    if mask.rows is not None:
        raise ValueError(
            f"zigzag_per_document: a layout deals all rows of a batch alike, got lengths for {mask.rows} rows; take "
            f"layout=rl.zigzag with documents that differ from row to row"
        )
    return Layout("zigzag per document", _PerDocument(mask.lengths))


@lru_cache(maxsize=64)
def _deal(lengths: tuple[int, ...], P: int) -> tuple[Ranges, ...]:
    """Part r of a document: its blocks r and 2P - 1 - r. Who gets which part makes no difference in any step."""
    shards: list[list[range]] = [[] for _ in range(P)]
    tokens, start = [0] * P, 0
    for length in lengths:
        parts = zigzag.ranges(length, P)
        ranks = list(range(P))
        if len(set(tokens)) > 1:  # the longest part to the rank with the fewest tokens: sorts keep ties in order
            ranks.sort(key=lambda rank: tokens[rank])
            parts = sorted(parts, key=count, reverse=True)
        for rank, part in zip(ranks, parts, strict=True):
            shards[rank] += [range(start + r.start, start + r.stop) for r in part]
            tokens[rank] += count(part)
        start += length
    return tuple(map(tuple, shards))


def positions_in_documents(positions: Tensor, lengths: Iterable[int]) -> Tensor:
    """Positions counted from the start of each token's own document, from global ones; int64, the same shape.

    What rotary position embeddings (RoPE) need if they start again in every document. Attention within documents is
    the same with global ones, for RoPE turns scores by the distance of query and key; numbers stay smaller.

    positions: what ``Layout.positions`` or ``Shards.positions`` give.  lengths: as in ``documents``; of lists for each
    row of a batch, positions are (s,) or (B, s), and the result is (B, s).
    Raises ValueError for a position outside of all documents, or what is no tensor of whole numbers.

    >>> positions_in_documents(torch.tensor([0, 2, 3, 4]), [3, 5])
    tensor([0, 2, 0, 1])
    """
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        got = f"one of {positions.dtype}" if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(
            f"positions_in_documents: expected a tensor of one rank's positions, such as layout.positions(S, P, rank), "
            f"or shards.positions[0], got {got}"
        )
    mask = documents(lengths)
    if mask.rows is not None:
        if positions.dim() > 2 or positions.dim() == 2 and positions.shape[0] != mask.rows:
            raise ValueError(
                f"positions_in_documents: expected positions (s,) or ({mask.rows}, s) for the lengths of {mask.rows} "
                f"rows, got {tuple(positions.shape)}"
            )
        of_rows = zip(positions.expand(mask.rows, -1), mask.of_rows, strict=True)
        return torch.stack([positions_in_documents(row, documents.lengths) for row, documents in of_rows])
    ends = torch.tensor(mask.ends, dtype=torch.int64, device=positions.device)
    total = int(ends[-1]) if len(ends) else 0
    if positions.numel() and not (0 <= int(positions.min()) and int(positions.max()) < total):
        raise ValueError(
            f"positions_in_documents: the documents hold positions in 0..{total - 1}, got "
            f"{int(positions.min())}..{int(positions.max())}; give global positions"
        )
    starts = torch.cat([ends.new_zeros(1), ends])
    return positions - starts[torch.bucketize(positions, ends, right=True)]

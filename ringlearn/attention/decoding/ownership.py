"""Which rank owns which token of a cache that grows: blocks of positions, dealt out in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ownership:
    """Blocks of ``interleave`` (K) positions go to ranks 0, 1, ..., P - 1, 0, 1, ... in turn.

    Who owns a token depends on its position alone, so a sequence can grow without moving what is there, and
    however long it becomes, the ranks hold the same number of tokens up to one block. On its rank a token has a *slot*:
    the tokens of a rank fill its slots 0, 1, 2, ... in the order of their positions.

    All methods take ints or int64 tensors and return the same type.

    >>> own = Ownership(ranks=3, interleave=2)
    >>> [own.owner(position) for position in range(8)]
    [0, 0, 1, 1, 2, 2, 0, 0]
    >>> own.slot(7), own.count(0, length=8), own.count(1, length=8)
    (3, 4, 2)
    """

    ranks: int
    interleave: int

    def owner(self, position):
        """The rank that owns a position."""
        return position // self.interleave % self.ranks

    def slot(self, position):
        """Where a token lies among those of its owner."""
        return position // (self.ranks * self.interleave) * self.interleave + position % self.interleave

    def count(self, rank: int, length):
        """How many of the first ``length`` positions a rank owns; 0 for a length below 0.

        Since slots follow positions, it is also the first slot of the rank that lies at or after position ``length``.
        So a query at position p sees the slots below ``count(rank, p + 1)``, and with a window of w tokens those from
        ``count(rank, p + 1 - w)`` on: an interval, whatever the interleaving.
        """
        length = _between(length, 0, None)
        turn = self.ranks * self.interleave
        return length // turn * self.interleave + _between(length % turn - rank * self.interleave, 0, self.interleave)

    def room(self, slots: int) -> int:
        """How long a sequence can be if each rank has that many slots for it: until rank 0 has filled its slots."""
        return slots // self.interleave * self.ranks * self.interleave + slots % self.interleave

    def positions(self, rank: int, length: int) -> Tensor:
        """The positions below ``length`` that a rank owns, in the order of its slots; int64."""
        slots = torch.arange(self.count(rank, length))
        turns, places = slots // self.interleave, slots % self.interleave
        return (turns * self.ranks + rank) * self.interleave + places


def _between(x, low: int, high: int | None):
    if isinstance(x, Tensor):
        return x.clamp(low, high)
    return max(low, x if high is None else min(x, high))

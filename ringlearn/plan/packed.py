"""Packed batches: documents of unequal lengths in one sequence, which see only themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, log2

from ..costs.balance import ring_balance
from ..fingerprint import whole_number
from ..layouts import zigzag, zigzag_per_document
from ..masks import causal, documents

COUNTED = 32  # ranks up to which balance is counted tile by tile


@dataclass(frozen=True)
class Packing:
    """Lengths of the documents of one sequence, in tokens.

    >>> p = Packing((4, 4))
    >>> p.tokens, round(p.density, 3)  # 20 pairs of the 36 that one document of 8 tokens has
    (8, 0.556)
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        found = tuple(whole_number(n) for n in self.lengths)
        if not found or any(n is None or n < 1 for n in found):
            raise ValueError(f"Packing: expected lengths of documents, numbers of at least 1, got {self.lengths!r}")
        object.__setattr__(self, "lengths", found)

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def density(self) -> float:
        """The part of the causal pairs of the whole sequence that its documents see."""
        return sum(n * (n + 1) for n in self.lengths) / (self.tokens * (self.tokens + 1))

    def layout(self, ranks: int) -> str:
        """The layout whose busiest rank has less to do: zigzag or zigzag per document."""
        return min(("zigzag", "zigzag per document"), key=lambda name: _ratio(self.lengths, ranks, name))

    def busiest(self, ranks: int) -> float:
        """Pairs of the busiest rank divided by those that it would have without packing, in the better layout.

        Counted for up to 32 ranks; beyond that, zigzag per document is assumed to be even, as it is up to a token or
        two.
        """
        if ranks == 1 or ranks > COUNTED:
            return self.density
        return self.density * _ratio(self.lengths, ranks, self.layout(ranks))

    def ranks_of_each(self, longest: int) -> list[int]:
        """How many ranks each document needs if a rank holds ``longest`` tokens: powers of two, for most documents 1.

        Megatron-LM schedules documents over such groups ("dynamic context parallelism", hybrid_cp_schedule.py).

        >>> Packing((1000, 9000)).ranks_of_each(4096)
        [1, 4]
        """
        return [2 ** max(0, ceil(log2(n / longest))) for n in self.lengths]


@lru_cache(maxsize=256)
def _ratio(lengths: tuple[int, ...], ranks: int, layout: str) -> float:
    chosen = zigzag if layout == "zigzag" else zigzag_per_document(list(lengths))
    return ring_balance(causal & documents(list(lengths)), sum(lengths), ranks, chosen).ratio

"""What all ranks have agreed on before an attention program starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kernels import Kernel
from ..layouts import Ranges, count
from ..masks import Mask
from ..tiles import Tile, plan


@dataclass(frozen=True)
class Spec:
    """One attention call, the same on every rank.

    q_ranges, k_ranges: the global positions of the queries and of the keys of each rank.
    mask, scale, kernel: as in ``ring_attention``, with the scale filled in.
    """

    mask: Mask
    q_ranges: tuple[Ranges, ...]
    k_ranges: tuple[Ranges, ...]
    scale: float
    kernel: Kernel
    _tiles: dict[tuple[int, int], tuple[Tile, ...]] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, rank: int, source: int) -> tuple[Tile, ...]:
        """What the queries of ``rank`` see of the keys of ``source``; the backward finds what the forward planned."""
        if (rank, source) not in self._tiles:
            self._tiles[rank, source] = plan(self.mask, self.q_ranges[rank], self.k_ranges[source])
        return self._tiles[rank, source]

    def k_length(self, source: int) -> int:
        """How many keys a rank owns; ranks count modulo P, so that -1 is the last."""
        return count(self.k_ranges[source % len(self.k_ranges)])

"""Tiles that say where their rows and columns are, for scores that depend on the distance of query and key."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..layouts import Ranges, positions_of
from . import Tile


@dataclass(frozen=True, repr=False)
class Located(Tile):
    """A tile of any kind with the global positions of a rank's queries and of the keys that it has."""

    q_ranges: Ranges = ()
    k_ranges: Ranges = ()

    def positions(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """The global positions of the tile's rows (rows,) and columns (columns,), int64."""
        return positions_of(self.q_ranges, device)[self.q], positions_of(self.k_ranges, device)[self.k]


def located(tile: Tile, q_ranges: Ranges, k_ranges: Ranges) -> Located:
    """The same tile, of queries at q_ranges and keys at k_ranges.

    >>> import ringlearn as rl
    >>> shards = rl.zigzag.ranges(8, 2)
    >>> (tile,) = rl.plan_tiles(rl.causal, shards[0], shards[1])
    >>> tile, located(tile, shards[0], shards[1]).positions()
    (FULL q[2:4] k[0:4], (tensor([6, 7]), tensor([2, 3, 4, 5])))
    """
    what = {field.name: getattr(tile, field.name) for field in fields(Tile)}
    return Located(**what, q_ranges=q_ranges, k_ranges=k_ranges)

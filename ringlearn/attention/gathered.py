"""The shards of several ranks as one tensor: where each rank's rows go, in exact index arithmetic.

When a rank gathers the shards of others, the rows arrive rank by rank. Sorted by position they form few ranges and so
need few tiles: the shards of all ranks, under any layout, are the whole sequence, whose causal mask is one CAUSAL tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..layouts import Ranges, count


@dataclass(frozen=True)
class Gathered:
    """The rows of several shards in one tensor.

    ranges: the positions of all rows, in the order in which they lie.  rows: for each shard the slices of that tensor
    which its rows are, in local order.

    >>> import ringlearn as rl
    >>> whole = gathered(rl.zigzag.ranges(8, 2))
    >>> whole.ranges, whole.rows[0]
    ((range(0, 8),), (slice(0, 2, 1), slice(6, 8, 1)))
    >>> x, y = (torch.tensor(shard).view(1, 1, 4, 1) for shard in ([0, 1, 6, 7], [2, 3, 4, 5]))
    >>> whole.join([x, y], torch.empty(1, 1, 8, 1, dtype=torch.int64)).flatten()
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """

    ranges: Ranges
    rows: tuple[tuple[slice, ...], ...]

    @property
    def length(self) -> int:
        return count(self.ranges)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of rows in each shard."""
        return tuple(sum(len(range(s.start, s.stop, s.step)) for s in slices) for slices in self.rows)

    def join(self, shards: Sequence[Tensor], to: Tensor) -> Tensor:
        """Shards (B, heads, n, D) in rank order, written to where their rows belong in ``to`` (B, heads, S, D)."""
        for shard, slices in zip(shards, self.rows, strict=True):
            start = 0
            for s in slices:
                part = to[:, :, s]
                part.copy_(shard[:, :, start : start + part.shape[2]])
                start += part.shape[2]
        return to

    def split(self, whole: Tensor) -> list[Tensor]:
        """The shards of (B, heads, S, D) in rank order: views, or copies of those that lie in several places."""
        return [
            whole[:, :, slices[0]]
            if len(slices) == 1
            else torch.cat([whole[:, :, s] for s in slices or (slice(0, 0),)], dim=2)
            for slices in self.rows
        ]


@lru_cache(maxsize=1024)
def gathered(shards: tuple[Ranges, ...], interleave: bool = True) -> Gathered:
    """Several shards as one: neighbouring ranges are joined, and interleaved ones if together they form a single range.

    interleave: if False, stripes stay apart, so that they have the same step as other stripes.

    >>> import ringlearn as rl
    >>> gathered(rl.striped.ranges(10, 4)).ranges, gathered(rl.striped.ranges(10, 4)[:2]).ranges
    ((range(0, 10),), (range(0, 9, 4), range(1, 10, 4)))
    """
    found = sorted((r for ranges in shards for r in ranges), key=lambda r: r.start)
    whole = _progression(found) if interleave else None
    ranges = _neighbours(found) if whole is None else (whole,)
    return Gathered(ranges, tuple(tuple(_slice(r, ranges) for r in mine) for mine in shards))


def _progression(found: Sequence[range]) -> range | None:
    """The range that holds exactly these positions, or None if there is none."""
    n = count(tuple(found))
    if n < 2:
        return None
    first, last = found[0].start, max(r[-1] for r in found)
    step, rest = divmod(last - first, n - 1)
    # There are as many places as positions, and no position occurs twice, so it is enough that each is on a place.
    if rest or any((r.start - first) % step or len(r) > 1 and r.step % step for r in found):
        return None
    return range(first, last + 1, step)


def _neighbours(found: Sequence[range]) -> Ranges:
    """The same positions, with ranges joined where one continues another."""
    ranges: list[range] = []
    for r in found:
        last = ranges[-1] if ranges else range(0)
        step = last.step if len(last) > 1 else r.step if len(r) > 1 else 1
        if len(last) and r.start == last[-1] + step and (len(r) == 1 or r.step == step):
            ranges[-1] = range(last.start, r[-1] + 1, step)
        else:
            ranges.append(r)
    return tuple(ranges)


def _slice(r: range, ranges: Ranges) -> slice:
    """Where the positions r lie among the ranges."""
    before = 0
    for whole in ranges:
        if r.start in whole and r[-1] in whole:
            start = before + (r.start - whole.start) // whole.step
            step = max(1, r.step // whole.step) if len(r) > 1 else 1
            return slice(start, start + (len(r) - 1) * step + 1, step)
        before += len(whole)
    raise AssertionError(f"{r} is in none of {ranges}")

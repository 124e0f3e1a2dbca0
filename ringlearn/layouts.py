"""Layouts: which positions of the sequence each rank owns.

A layout maps a sequence length and a number of ranks to ``range`` objects of global positions, and everything
else is derived from them: shard and unshard, positions for RoPE, tiles, pictures. Any length works for any number of
ranks; shards may differ in length by a few tokens, and ranks beyond the sequence own nothing.

S = 16, P = 4 (the digit is the owner of the position):

    contiguous  0000 1111 2222 3333    plain blocks; a causal mask starves the first ranks
    striped     0123 0123 0123 0123    token by token (Brandon et al. 2023, "Striped Attention")
    zigzag      0011 2233 3322 1100    one early block and its mirror image (Llama 3 training, section 3.3.2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from .arguments import whole_number

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Layout:
    """A named rule ``(length, world_size, rank) -> ranges of global positions``, in local order.

    The ranges of all ranks must cover 0..length-1, each position once, and be increasing within a rank, so that
    local order is position order; ``ranges`` checks it and raises ValueError otherwise.

    >>> zigzag.ranges(16, 4)[1]
    (range(2, 4), range(12, 14))
    >>> all_on_rank_0 = Layout("all on rank 0", lambda S, P, rank: (range(S),) if rank == 0 else ())
    >>> all_on_rank_0.ranges(8, 2)
    ((range(0, 8),), ())
    """

    name: str
    rule: Callable[[int, int, int], Ranges] = field(repr=False)

    def ranges(self, length: int, world_size: int) -> tuple[Ranges, ...]:
        """The positions of every rank: a tuple over ranks of tuples of non-empty ranges."""
        S, P = whole_number(length), whole_number(world_size)
        if S is None or S < 0:
            raise ValueError(f"layout {self.name}: length must be an int >= 0, got {length!r}")
        if P is None or P < 1:
            raise ValueError(f"layout {self.name}: world_size must be an int >= 1, got {world_size!r}")
        return _ranges(self, S, P)

    def positions(self, length: int, world_size: int, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions of a rank's tokens in local order: int64, (s,). What RoPE needs.

        >>> striped.positions(10, 4, 1)
        tensor([1, 5, 9])
        """
        return positions_of(self.ranges(length, world_size)[rank], device)

    def __str__(self) -> str:
        return self.name


def positions_of(ranges: Ranges, device: torch.device | str | None = None) -> Tensor:
    """The positions in some ranges as one int64 tensor, in order."""
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def count(ranges: Ranges) -> int:
    """How many positions some ranges hold.

    >>> count((range(0, 3), range(9, 12)))
    6
    """
    return sum(len(r) for r in ranges)


@lru_cache(maxsize=1024)
def _ranges(layout: Layout, length: int, world_size: int) -> tuple[Ranges, ...]:
    ranks = []
    for rank in range(world_size):
        given = layout.rule(length, world_size, rank)
        if not isinstance(given, tuple | list) or not all(isinstance(r, range) for r in given):
            raise ValueError(
                f"layout {layout.name}: expected the rule to return a tuple of ranges of positions, such as "
                f"(range(rank, length, world_size),), got {given!r} for rank {rank}"
            )
        # A range's stop is normalised to one past its last element, so that equal sets of positions are equal objects.
        ranks.append(tuple(range(r.start, r[-1] + 1, r.step) for r in given if len(r)))
    _check_partition(layout, length, ranks)
    return tuple(ranks)


def _check_partition(layout: Layout, length: int, ranks: list[Ranges]) -> None:
    remedy = "return ranges that cover 0..length-1, each position once, increasing within a rank"
    for rank, ranges in enumerate(ranks):
        for a, b in zip(ranges, ranges[1:], strict=False):
            if a[-1] >= b[0]:
                raise ValueError(f"layout {layout.name}: rank {rank} owns {a} before {b}; {remedy}")
        for r in ranges:
            if r.step < 1 or r[0] < 0 or r[-1] >= length:
                raise ValueError(f"layout {layout.name}: rank {rank} owns {r} of a sequence of {length}; {remedy}")
    if length > 1 << 24:  # planning a billion tokens must not allocate a billion counters: only count them
        owned = sum(count(ranges) for ranges in ranks)
        if owned != length:
            raise ValueError(f"layout {layout.name}: the ranks own {owned} of {length} positions; {remedy}")
        return
    seen = torch.zeros(length, dtype=torch.int32)
    for ranges in ranks:
        for r in ranges:
            seen[r.start : r.stop : r.step] += 1
    if not bool((seen == 1).all()):
        bad = int((seen != 1).nonzero()[0])
        raise ValueError(f"layout {layout.name}: position {bad} of {length} is owned {int(seen[bad])} times; {remedy}")


def _block(length: int, blocks: int, i: int) -> range:
    """Block i of the sequence cut into ``blocks`` blocks whose sizes differ by at most one."""
    return range(length * i // blocks, length * (i + 1) // blocks)


# Functions with names, so that a layout can be sent to another process: launch(fn, 4, rl.zigzag).


def _contiguous(length: int, P: int, rank: int) -> Ranges:
    return (_block(length, P, rank),)


def _striped(length: int, P: int, rank: int) -> Ranges:
    return (range(rank, length, P),)


def _zigzag(length: int, P: int, rank: int) -> Ranges:
    return _block(length, 2 * P, rank), _block(length, 2 * P, 2 * P - 1 - rank)


contiguous = Layout("contiguous", _contiguous)
striped = Layout("striped", _striped)
zigzag = Layout("zigzag", _zigzag)

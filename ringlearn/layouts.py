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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .fingerprint import whole_number
from .masks import documents

Ranges = tuple[range, ...]  # or what behaves like one, ``Dealt``


@dataclass(frozen=True)
class Layout:
    """A named rule ``(length, world_size, rank) -> ranges of global positions``, in local order.

    The ranges of all ranks must cover 0..length-1, each position once, and increase within a rank, so that
    local order is position order; ``ranges`` checks this and raises ValueError otherwise.

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
        """Global positions of a rank's tokens in local order, int64 (n,), as RoPE needs them.

        >>> striped.positions(10, 4, 1)
        tensor([1, 5, 9])
        """
        return positions_of(self.ranges(length, world_size)[rank], device)

    def __str__(self) -> str:
        return self.name


def positions_of(ranges: Ranges, device: torch.device | str | None = None) -> Tensor:
    """The positions in some ranges as one int64 tensor, in order."""
    if isinstance(ranges, Dealt):
        lengths = ranges.stop - ranges.first
        return (torch.arange(ranges.total) + (ranges.stop - lengths.cumsum(0)).repeat_interleave(lengths)).to(device)
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def count(ranges: Ranges) -> int:
    """The number of positions in some ranges.

    >>> count((range(0, 3), range(9, 12)))
    6
    """
    total = getattr(ranges, "total", None)
    return sum(map(len, ranges)) if total is None else total


class _Kept(tuple):
    """Ranges that remember how many positions they hold, and their hash: plans are kept by ranges."""

    @cached_property
    def total(self) -> int:
        return sum(map(len, self))

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:  # in another process the hash may be another one
        return _Kept, (tuple(self),)


class Dealt(Sequence[range]):
    """The ranges of a rank that has two blocks of each document, as ``zigzag_per_document`` deals them out.

    It compares and behaves as a tuple of ranges that are not empty. To make thousands of them takes longer than to plan
    with them, so it is done when somebody looks at one.

    lengths: of the documents.  P, rank: it has blocks rank and 2P - 1 - rank of each document.
    starts, sizes: where its two blocks of each begin, and how long they are, int64 (documents, 2).
    """

    def __init__(self, lengths: tuple[int, ...], P: int, rank: int, starts: Tensor, sizes: Tensor):
        self.lengths, self.rank, self.starts, self.sizes = lengths, rank, starts, sizes
        self._made_from = lengths, P, rank
        self._hash = hash(self._made_from)
        self.total, self._len = int(sizes.sum()), int(sizes.count_nonzero())

    @cached_property
    def first(self) -> Tensor:
        """Where each range begins, int64 (ranges,)."""
        return self.starts[self.sizes > 0]

    @cached_property
    def stop(self) -> Tensor:
        """Where each range ends."""
        return self.first + self.sizes[self.sizes > 0]

    @cached_property
    def _ranges(self) -> tuple[range, ...]:
        return tuple(map(range, self.first.tolist(), self.stop.tolist()))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, i):
        return self._ranges[i]

    def __iter__(self) -> Iterator[range]:
        return iter(self._ranges)

    def __add__(self, other: Ranges) -> Ranges:
        return self._ranges + tuple(other)

    def __radd__(self, other: Ranges) -> Ranges:
        return tuple(other) + self._ranges

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dealt) and self._made_from == other._made_from:
            return True
        return isinstance(other, tuple | Dealt) and self._ranges == tuple(other)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._ranges)

    def __reduce__(self) -> tuple:
        return _dealt, self._made_from


@lru_cache(maxsize=1024)
def _ranges(layout: Layout, length: int, world_size: int) -> tuple[Ranges, ...]:
    if isinstance(layout.rule, _PerDocument):  # right by itself, and checking thousands of ranges takes long
        return layout.rule.deal(length, world_size)
    ranks = []
    for rank in range(world_size):
        given = layout.rule(length, world_size, rank)
        if not isinstance(given, tuple | list) or not all(isinstance(r, range) for r in given):
            raise ValueError(
                f"layout {layout.name}: expected the rule to return a tuple of ranges of positions, such as "
                f"(range(rank, length, world_size),), got {given!r} for rank {rank}"
            )
        # A range's stop is normalised to one past its last element, so that equal sets of positions are equal objects.
        ranks.append(_Kept(range(r.start, r[-1] + 1, r.step) for r in given if len(r)))
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
# A layout in this table is public in ``ringlearn``, and known to command lines, ``best_layout`` and the tests. So its
# name has to be a Python name, and its shards may differ by two tokens at most. (With several blocks on each rank,
# ``_block`` can put the tokens that are left over into blocks of the same rank.)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (contiguous, striped, zigzag)}


@dataclass(frozen=True)
class _PerDocument:
    """The rule of a layout that splits each document by itself; a dataclass, so that it compares and can be pickled."""

    lengths: tuple[int, ...]

    def __call__(self, length: int, world_size: int, rank: int) -> Ranges:
        return self.deal(length, world_size)[rank]

    def deal(self, length: int, world_size: int) -> tuple[Ranges, ...]:
        """The positions of every rank, in ranges that are not empty."""
        if length != sum(self.lengths):
            raise ValueError(
                f"layout zigzag per document: the lengths add up to {sum(self.lengths)}, the sequence has {length}; "
                f"give the lengths of all documents in it, padding too"
            )
        return _deal(self.lengths, world_size)


def zigzag_per_document(lengths: Iterable[int]) -> Layout:
    """A layout for packed documents: each document is cut in zigzag by itself, so that every rank has a part of each.

    Under a causal mask within documents all ranks then have the same work in every step of a ring, up to a few rows
    per document, whatever the lengths. A kernel with variable lengths computes a step in one call; the price is that
    other kernels need a call for each document, and that nearly all keys travel: with short documents, contiguous
    shards were faster on two H200s (docs/measurements.md). Lengths need not be divisible by anything: tokens that are
    left over are dealt to one rank after the other, so that shards differ by at most one token. For a single document
    whose length is a multiple of 2P it is ``zigzag``.

    lengths: as in ``documents``; they add up to the length of the sequence. Raises ValueError unless they are ints >=
    0.

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
    """Rank r gets blocks r and 2P - 1 - r of each document. Tokens that are left over go to one rank after the other.

    Every training step has new documents, so all of them are dealt at once. In every other document what is left over
    goes to the late block first: if it were always the early one, the last rank would have more work.
    """
    length = torch.tensor(lengths, dtype=torch.int64)
    size, rest = length // (2 * P), length % (2 * P)
    turn = torch.arange(P) - ((rest.cumsum(0) - rest) % P)[:, None]  # when each rank's turn comes in each document
    turn = torch.where(turn < 0, turn + P, turn)
    one, two = (rest[:, None] > turn + n for n in (0, P))  # whether the rank gets one token more, and a second one
    odd = torch.arange(len(length))[:, None] % 2 > 0
    early, late = torch.where(odd, two, one), torch.where(odd, one, two)
    sizes = size[:, None] + torch.cat([early, late.flip(1)], dim=1)  # (documents, blocks)
    starts = (length.cumsum(0) - length)[:, None] + sizes.cumsum(1) - sizes
    starts, sizes = (torch.stack([x[:, :P], x[:, P:].flip(1)], dim=-1).transpose(0, 1) for x in (starts, sizes))
    return tuple(map(Dealt, [lengths] * P, [P] * P, range(P), starts, sizes))


def _dealt(lengths: tuple[int, ...], P: int, rank: int) -> Dealt:
    return _deal(lengths, P)[rank]


def positions_in_documents(positions: Tensor, lengths: Iterable[int]) -> Tensor:
    """Positions counted from the start of each token's own document, from global ones; int64, the same shape.

    Rotary position embeddings (RoPE) need them if positions restart in every document. Attention within documents is
    the same with global positions, since with RoPE a score depends only on the distance between query and key; local
    positions keep the numbers smaller.

    positions: as ``Layout.positions`` or ``Shards.positions`` give them.  lengths: as in ``documents``; with a list for
    each row of a batch, positions are (n,) or (B, n), and the result is (B, n).
    Raises ValueError for a position outside all documents, and for anything but a tensor of integers.

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
                f"positions_in_documents: expected positions (n,) or ({mask.rows}, n) for the lengths of {mask.rows} "
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

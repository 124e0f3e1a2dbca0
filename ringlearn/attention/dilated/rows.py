"""Dilated attention: which rows a configuration keeps, and how few kernel calls compute what they see.

A configuration (w, r) cuts the sequence into segments of w positions and keeps every r-th row of each. Key/value head
j, and the query heads that use it, start at j mod r, so that the heads together cover every position:

    head j keeps position p    <=>    (p mod w) mod r = j mod r                                             (1)

A kept query sees the kept keys of its own segment. w = 8, r = 2:

    head 0    x.x.x.x. x.x.x.x.
    head 1    .x.x.x.x .x.x.x.x

(1) is about positions, so it does not matter who owns them. A segment may begin on one rank and end on another, or lie
on all of them (striped), and nothing needs to be divisible by w, P or r: what a rank keeps of a segment is the
intersection of two arithmetic progressions, its own positions and the segment's, and this is a ``range`` again, found
with integer arithmetic.

Seen from its first kept row, every full segment of every head looks the same. ``plan_parts`` puts the (head, segment)
pairs that look the same side by side, as the heads of one kernel call.

Source: Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens", sections 2.2 (segments and rates) and
2.3 (offsets of heads).
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fingerprint import shown, whole_number
from ...layouts import Ranges, count
from ...masks import Causal, Full, Mask
from ...tiles import Tile, plan, shift

MOST_HEADS = 65_535  # of one kernel call, over the batch: GPUs count them in 16 bits


class Rows(NamedTuple):
    """What a rank keeps of one segment for one head.

    places: positions as seen from the first row that the head keeps of the segment.  rows: the rank's local rows.
    """

    places: Ranges
    rows: Ranges


@dataclass(frozen=True)
class Configuration:
    """Segments of ``segment`` positions, of which every ``rate``-th row is kept.

    >>> Configuration(segment=8, rate=3).kept(head=1, length=20)
    (range(1, 8, 3), range(9, 16, 3), range(17, 20, 3))
    """

    segment: int
    rate: int

    def kept(self, head: int, length: int) -> tuple[range, ...]:
        """The positions that a key/value head keeps of each segment of a sequence: equation (1)."""
        return tuple(
            range(start + head % self.rate, min(start + self.segment, length), self.rate)
            for start in range(0, length, self.segment)
        )

    def rows(self, head: int, ranges: Ranges) -> dict[int, Rows]:
        """By segment, what the owner of the positions ``ranges`` keeps for a head; only segments with such rows.

        >>> import ringlearn as rl
        >>> Configuration(8, 2).rows(head=1, ranges=rl.striped.ranges(16, 3)[0])  # it owns 0, 3, 6, 9, 12, 15
        {0: Rows(places=(range(2, 7, 6),), rows=(range(1, 3, 2),)),
         1: Rows(places=(range(0, 7, 6),), rows=(range(3, 7, 2),))}
        """
        found: dict[int, Rows] = {}
        before = 0  # rows in the ranges before
        for own in ranges:
            for i in range(own[0] // self.segment, own[-1] // self.segment + 1):
                first = i * self.segment + head % self.rate
                kept = intersect(own, range(first, (i + 1) * self.segment, self.rate))
                if kept:
                    start, step = before + (kept[0] - own[0]) // own.step, kept.step // own.step
                    rows = range(start, start + step * len(kept), step)
                    places, earlier = found.get(i, Rows((), ()))
                    found[i] = Rows(places + shift((kept,), -first), (*earlier, rows))
            before += len(own)
        return found


def configure(op: str, segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> tuple[Configuration, ...]:
    """The configurations (w, r). Raises ValueError, with a text that begins with ``op``, if they are invalid."""
    found: list[list[int]] = []
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        found.append([])
        if not isinstance(values, Sized) or isinstance(values, Tensor) and not values.dim():
            raise ValueError(
                f"{op}: expected {name} to be a list of ints >= 1, one for each configuration, got {shown(values)}"
            )
        for n in values:
            size = whole_number(n)
            if size is None or size < 1:
                raise ValueError(f"{op}: expected {name} to be ints >= 1, got {n!r} in {shown(values)}")
            found[-1].append(size)
    segments, rates = found
    if len(segments) != len(rates):
        raise ValueError(
            f"{op}: expected as many dilation_rates as segment_lengths, one of each for a configuration, got "
            f"{len(rates)} dilation_rates and {len(segments)} segment_lengths"
        )
    if not segments:
        raise ValueError(f"{op}: expected at least one segment length with its dilation rate, got none")
    for w, r in zip(segments, rates, strict=True):
        if r > w:
            raise ValueError(
                f"{op}: expected dilation rates of at most the segment length, got a dilation rate of {r} for a "
                f"segment of {w}, of which not every head would keep a row"
            )
    return tuple(map(Configuration, segments, rates))


def check_mask(op: str, mask: Mask) -> None:
    """Raise ValueError unless the mask is one that means the same in every segment."""
    if not isinstance(mask, Full | Causal):
        raise ValueError(
            f"{op}: expected mask=rl.full or mask=rl.causal, got {mask!r}; the segments are the window, so other masks "
            f"are not supported"
        )


def intersect(a: range, b: range) -> range:
    """The numbers that two increasing ranges share: a range, whose step is the least common multiple of theirs.

    >>> intersect(range(1, 100, 4), range(3, 50, 6))
    range(9, 46, 12)
    """
    common = gcd(a.step, b.step)
    if not a or not b or (b.start - a.start) % common:
        return range(0)
    # a.start + a.step * n = b.start modulo b.step, for the smallest n >= 0 (the Chinese remainder theorem)
    n = (b.start - a.start) // common * pow(a.step // common, -1, b.step // common) % (b.step // common)
    step = a.step // common * b.step
    first = a.start + a.step * n
    first += max(0, -(-(b.start - first) // step)) * step
    return range(first, max(first, min(a[-1], b[-1]) + 1), step)


# --- what travels --------------------------------------------------------------------------------------------------


def kept_rows(configurations: Sequence[Configuration], heads: int, ranges: Ranges) -> Tensor:
    """Which rows of which heads a rank sends: bool (heads, n), True where at least one configuration keeps the row.

    heads: the number G of key/value heads.
    """
    kept = torch.zeros(heads, count(ranges), dtype=torch.bool)
    for c in configurations:
        for offset in range(min(c.rate, heads)):
            for found in c.rows(offset, ranges).values():
                for r in found.rows:
                    kept[offset :: c.rate, r.start : r.stop : r.step] = True
    return kept


# --- what is computed ----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some (head, segment) pairs that look the same: they are the N key/value heads of one kernel call for each tile.

    q: (N, rows), where each query row lies in (G, H / G, n_q), counted through, for the first query head of its group.
    k: (N, columns), where each key lies in what travels.  tiles: of these rows and columns.
    """

    q: Tensor
    k: Tensor
    tiles: tuple[Tile, ...]


def plan_parts(
    configurations: Sequence[Configuration],
    mask: Mask,
    q_ranges: Ranges,
    k_ranges: Ranges,
    number: Tensor,
    group: int,
    most: int,
) -> tuple[Part, ...]:
    """What queries at ``q_ranges`` have to compute with the kept keys at ``k_ranges``.

    number: (G, n_k), where each kept row of each key/value head lies in what travels.  group: H / G, query heads of
    each.  most: (head, segment) pairs of a part.
    """
    heads, s_k, s_q = *number.shape, count(q_ranges)
    parts = []
    for c in configurations:
        alike: dict[Any, tuple[list, list, tuple[Tile, ...]]] = {}
        for offset in range(min(c.rate, heads)):
            queries, keys = c.rows(offset, q_ranges), c.rows(offset, k_ranges)
            for segment, q in queries.items():
                k = keys.get(segment)
                tiles = plan(mask, q.places, k.places) if k else ()
                if tiles:
                    key = (_form(q.rows), _form(k.rows), tuple(map(_described, tiles)))
                    q_starts, k_starts, _ = alike.setdefault(key, ([], [], tiles))
                    for head in range(offset, heads, c.rate):
                        q_starts.append([head * group * s_q + r.start for r in q.rows])
                        k_starts.append([head * s_k + r.start for r in k.rows])
        for (q_form, k_form, _), (q_starts, k_starts, tiles) in alike.items():
            q_index, k_index = _index(q_starts, q_form), number.flatten()[_index(k_starts, k_form)]
            parts += [Part(*some, tiles) for some in zip(q_index.split(most), k_index.split(most), strict=True)]
    return tuple(parts)


def _form(rows: Ranges) -> tuple[tuple[int, int], ...]:
    return tuple((len(r), r.step) for r in rows)


def _described(t: Tile) -> tuple:
    """What makes two tiles the same call."""
    return t.q.start, t.q.stop, t.k.start, t.k.stop, t.kind, t.q_positions, t.k_positions


def _index(starts: list[list[int]], form: tuple[tuple[int, int], ...]) -> Tensor:
    """(N, rows): N times some ranges, all of one form, that start elsewhere."""
    first = torch.tensor(starts)
    return torch.cat([first[:, i, None] + step * torch.arange(n) for i, (n, step) in enumerate(form)], dim=1)

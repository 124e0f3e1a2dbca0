"""Load balance: how much each rank of a ring computes in each step, counted from tiles without computing them.

In step t, rank r has the keys of rank r - t. Which of them its queries see follows from the mask and the layout, by
``plan``. Every rank passes keys on in every step, so the ring is only as fast as the ranks that have the most to do:

    causal, P = 8, busiest over mean:  contiguous (2P - 1) / P = 1.88   striped P (n + 1) / (S + 1)   zigzag 1

(Brandon et al. 2023, "Striped Attention", section 3.) Windows and packed documents have no such formula, so their work
has to be counted.

>>> import ringlearn as rl
>>> [round(ring_balance(rl.causal, 4096, 8, layout).ratio, 3) for layout in (rl.contiguous, rl.striped, rl.zigzag)]
[1.875, 1.002, 1.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layouts import LAYOUTS, Layout, contiguous
from ..masks import Mask
from ..tiles import Kind, Tile, plan

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Balance:
    """The work of a ring: ``scores[rank][step]`` scores per head, computed in ``calls[rank][step]`` kernel calls.

    Steps are those of the forward; a backward does 2.5 times the work of each step, in the opposite order. The unit of
    time is the time in which a rank computes one score.
    """

    layout: Layout
    scores: Table
    calls: Table

    @property
    def per_rank(self) -> tuple[int, ...]:
        """The total work of each rank."""
        return tuple(map(sum, self.scores))

    @property
    def total(self) -> int:
        """The total work of all ranks."""
        return sum(self.per_rank)

    @property
    def kernel_calls(self) -> int:
        return sum(map(sum, self.calls))

    @property
    def mean(self) -> float:
        """The average work of a rank. No layout can finish sooner."""
        return self.total / len(self.scores)

    @property
    def busiest(self) -> int:
        """The work of the rank that has the most."""
        return max(self.per_rank)

    @property
    def times(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """When each rank begins and ends each step, by the rules of a simulated world, if messages take no time.

        A rank begins a step when it has finished the previous one and its neighbour has begun that one too, and so has
        passed on its keys. So two neighbours drift apart by less than two steps.
        """
        begun, steps = [0] * len(self.scores), []
        for work in self._steps:
            done = [start + n for start, n in zip(begun, work, strict=True)]
            steps.append(tuple(zip(begun, done, strict=True)))
            begun = [max(done[rank], begun[rank - 1]) for rank in range(len(done))]
        return tuple(zip(*steps, strict=True))

    @property
    def makespan(self) -> int:
        """When the last rank finishes."""
        return max(stop for row in self.times for _, stop in row)

    @property
    def lockstep(self) -> int:
        """The makespan if all ranks waited for each other after every step: the sum of each step's largest work."""
        return sum(map(max, self._steps))

    @property
    def per_step(self) -> tuple[float, ...]:
        """For each step the largest work over the mean; 1 is even."""
        return tuple(_over(max(step), sum(step) / len(step)) for step in self._steps)

    @property
    def ratio(self) -> float:
        """Makespan divided by mean: how many times longer the ring takes than with evenly shared work; 1 at best."""
        return _over(self.makespan, self.mean)

    @property
    def idle(self) -> float:
        """The fraction of all ranks' time in which they have nothing to compute."""
        return 1 - 1 / self.ratio

    @property
    def _steps(self) -> list[tuple[int, ...]]:
        return list(zip(*self.scores, strict=True))

    def table(self) -> str:
        """The scores as a text table, a row per rank and a column per step, with how uneven each step is.

        >>> import ringlearn as rl
        >>> print(ring_balance(rl.causal, 8, 2, rl.contiguous).table())
        contiguous | step 0  step 1 |    all
        rank 0     |     10       0 |     10
        rank 1     |     10      16 |     26
        max / mean |   1.00    2.00 |   1.44
        """
        heads = [f"step {t}" for t in range(len(self.scores))]
        rows = [[f"{n:,}" for n in row] for row in self.scores]
        last, totals = [f"{x:.2f}" for x in self.per_step], [f"{n:,}" for n in self.per_rank]
        width = max(len(cell) for row in [heads, *rows, last] for cell in row)
        wide = max(6, *map(len, totals))
        names = [str(self.layout), *(f"rank {r}" for r in range(len(rows))), "max / mean"]
        margin = max(map(len, names))
        lines = [
            f"{name:<{margin}} | {'  '.join(f'{cell:>{width}}' for cell in row)} | {total:>{wide}}"
            for name, row, total in zip(names, [heads, *rows, last], ["all", *totals, f"{self.ratio:.2f}"], strict=True)
        ]
        return "\n".join(lines)


def _over(most: float, mean: float) -> float:
    return most / mean if mean else 1.0  # nothing to do is evenly done


def ring_balance(
    mask: Mask, S: int, P: int, layout: Layout = contiguous, *, visible: bool = False, cut: bool = False
) -> Balance:
    """What every rank computes in every step of ring attention over S tokens on P ranks.

    cut: count the tiles for kernels that support neither windows nor packed documents (``Tile.cut``).
    visible: count the scores that the mask leaves visible instead of those that are computed. They differ in PARTIAL
    tiles, which are computed whole although the mask hides a part of them; these arise mostly when tiles are cut.

    This is integer arithmetic, even for a million tokens; only a mask from a function (``rl.mask``) is evaluated.
    Raises ValueError if an argument is invalid, and wherever ``Layout.ranges`` and ``Mask.check`` do.

    >>> import ringlearn as rl
    >>> ring_balance(rl.causal, 16, 4, rl.contiguous).per_rank
    (10, 26, 42, 58)
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"ring_balance: expected a layout such as rl.zigzag, got {layout!r}")
    if not isinstance(mask, Mask):
        raise ValueError(f"ring_balance: expected a mask such as rl.causal or rl.mask(fn), got {mask!r}")
    ranges = layout.ranges(S, P)
    mask.check(S, S)
    tiles = [[plan(mask, ranges[rank], ranges[(rank - step) % P]) for step in range(P)] for rank in range(P)]
    if cut:
        tiles = [[[part for tile in step for part in tile.cut] for step in row] for row in tiles]

    def work(tile: Tile) -> int:
        return int(tile.visible().sum()) if visible and tile.kind is Kind.PARTIAL else tile.area

    scores = tuple(tuple(sum(map(work, step)) for step in row) for row in tiles)
    return Balance(layout, scores, tuple(tuple(map(len, row)) for row in tiles))


def best_layout(
    mask: Mask, S: int, P: int, layouts: Sequence[Layout] = tuple(LAYOUTS.values()), *, cut: bool = False
) -> Layout:
    """The layout with which a ring finishes first; in a tie, the one with the fewest kernel calls, then the first.

    Between layouts that differ by only a few rows, fewer kernel calls may matter more: see ``Balance.kernel_calls``.
    cut: as in ``ring_balance``. Raises ValueError without a layout.

    >>> import ringlearn as rl
    >>> best_layout(rl.causal, 4096, 8).name
    'zigzag'
    """
    if isinstance(layouts, Layout):
        raise ValueError(f"best_layout: expected several layouts to choose from, got {layouts} alone; give a list")
    found = [ring_balance(mask, S, P, layout, cut=cut) for layout in layouts]
    if not found:
        raise ValueError("best_layout: expected at least one layout, such as rl.zigzag, got none")
    return min(found, key=lambda balance: (balance.makespan, balance.kernel_calls)).layout

"""What one attention call of each strategy sends and holds on the fullest rank: the formulas of ``ringlearn.costs``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..attention.table import STRATEGIES
from ..costs.problem import Problem
from ..costs.ring import ring_memory

EXACT = 32  # ranks up to which every one of them is asked


@dataclass(frozen=True)
class Traffic:
    """One call, forward or backward, of the rank that sends or holds most.

    inner, outer: bytes sent inside a node and to other nodes. held: bytes of messages, gathered rows and partial
    results. hidden: whether messages travel while attention computes; else the GPU waits for them. Of two kinds of
    messages, hybrid's outer ones hide.
    """

    inner: int
    outer: int
    held: int
    messages: int
    hidden: bool


@lru_cache(maxsize=8192)
def traffic(strategy: str, p: Problem) -> Traffic:
    """A call of ``strategy``, forward or backward as the problem says.

    Bytes are those of ``world.trace`` and ``world.memory`` of a simulated world, exactly. Beyond 32 ranks they are
    continued along a line through two smaller numbers of ranks with as many tokens each: with shards of one length
    all of them grow by the same amount with every rank, or every node.

    >>> from ..costs import ring_bytes
    >>> t = traffic("ring", Problem(4096, (1, 4), 8, 2, 64, itemsize=4))
    >>> t.inner == ring_bytes(4096, 4, G=2, D=64, itemsize=4), t.messages
    (True, 3)
    """
    if p.ranks <= EXACT or strategy == "ulysses":
        return _counted(strategy, p)
    (nodes, places), s = p.shape, -(-p.S // p.ranks)
    steps = (4, 6) if nodes > 1 < places else (16, 32)  # of nodes, or of ranks where all are in one
    shapes = [(n, places) if nodes > 1 else (1, n) for n in steps]
    a, b = (_counted(strategy, replace(p, S=s * n * m, shape=(n, m))) for n, m in shapes)

    def at(name: str) -> int:
        low, high = getattr(a, name), getattr(b, name)
        return round(high + (high - low) / (steps[1] - steps[0]) * ((nodes if nodes > 1 else places) - steps[1]))

    return Traffic(*map(at, ("inner", "outer", "held", "messages")), a.hidden)


def _counted(strategy: str, p: Problem) -> Traffic:
    costs = STRATEGIES[strategy].costs[0]
    ranks = [replace(p, rank=rank) for rank in _differ(strategy, p)]
    inner, outer = (max(costs.sent(rank)[where] for rank in ranks) for where in ("inner", "outer"))
    held = (ring_memory(rank) if strategy == "ring" else costs.memory(rank) for rank in ranks)
    most = max(sum(n for name, n in x.items() if name not in ("q", "k, v", "other inputs")) for x in held)
    return Traffic(inner, outer, most, costs.messages(p), strategy in ("ring", "hybrid", "double-ring"))


def _differ(strategy: str, p: Problem) -> Iterable[int]:
    """Ranks of which one sends or holds most. With shards of one length, only heads make ranks differ."""
    P = p.ranks
    if P == 1 or p.S % (2 * P):
        return range(P)
    return {0, 1, P // 2, P - 1} if strategy in ("ulysses", "hybrid") else {0}


def imbalance(layout: str, S: int, P: int) -> float:
    """Work of the busiest rank over the mean, under a causal mask (Brandon et al. 2023, "Striped Attention").

    >>> round(imbalance("contiguous", 4096, 8), 3), imbalance("zigzag", 4096, 8)
    (1.875, 1.0)
    """
    if P == 1 or layout == "zigzag":
        return 1.0
    if layout == "contiguous":
        return (2 * P - 1) / P
    return P * (-(-S // P) + 1) / (S + 1)

"""What one attention call of each strategy sends and holds on the fullest rank: the formulas of ``ringlearn.costs``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .. import costs
from ..layouts import contiguous, striped, zigzag

EXACT = 32  # ranks up to which every one of them is asked
_LAYOUTS = {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}


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
def traffic(
    strategy: str,
    S: int,
    shape: tuple[int, int],
    H: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    layout: str = "contiguous",
) -> Traffic:
    """A call of ``strategy`` on shape = (nodes, ranks of a node); names as in ``ringlearn.costs``.

    Bytes are those of ``world.trace`` and ``world.memory`` of a simulated world, exactly. Beyond 32 ranks they are
    continued along a line through two smaller numbers of ranks with as many tokens each: with shards of one length
    all of them grow by the same amount with every rank, or every node.

    >>> t = traffic("ring", 4096, (1, 4), 8, 2, 64, itemsize=4)
    >>> t.inner == costs.ring_bytes(4096, 4, G=2, D=64, itemsize=4), t.messages
    (True, 3)
    """
    call = dict(B=B, itemsize=itemsize, backward=backward, layout=layout)
    if shape[0] * shape[1] > EXACT and strategy != "ulysses":
        return _continued(strategy, S, shape, (H, G, D), **call)
    return _counted(strategy, S, shape, (H, G, D), **call)


def _counted(strategy: str, S: int, shape: tuple[int, int], heads: tuple[int, int, int], **call: Any) -> Traffic:
    (nodes, places), (H, G, D) = shape, heads
    P = nodes * places
    call |= dict(S=S, G=G, D=D, layout=_LAYOUTS[call["layout"]])
    both = [_of_rank(strategy, shape, H, rank, call) for rank in _differ(strategy, S, P)]
    inner, outer, held = (max(each) for each in zip(*both, strict=True))
    messages = {"ulysses": 2 * (P - 1), "hybrid": 2 * (places - 1) + nodes - 1}.get(strategy, P - 1)
    return Traffic(inner, outer, held, messages, strategy in ("ring", "hybrid", "double-ring"))


def _differ(strategy: str, S: int, P: int) -> Iterable[int]:
    """Ranks of which one sends or holds most. With shards of one length, only heads make ranks differ."""
    if P == 1 or S % (2 * P):
        return range(P)
    return {0, 1, P // 2, P - 1} if strategy in ("ulysses", "hybrid") else {0}


def _continued(strategy: str, S: int, shape: tuple[int, int], heads: tuple[int, int, int], **call: Any) -> Traffic:
    """The line through two numbers of nodes, or of ranks where all are in one, with as many tokens on each rank."""
    s = -(-S // (shape[0] * shape[1]))
    many, places = shape if shape[0] > 1 else (shape[1], 1)
    steps = (4, 6) if places > 1 else (16, 32)
    shapes = [(n, places) if shape[0] > 1 else (1, n) for n in steps]
    a, b = (_counted(strategy, s * n * places, at, heads, **call) for n, at in zip(steps, shapes, strict=True))

    def at(name: str) -> int:
        low, high = getattr(a, name), getattr(b, name)
        return round(high + (high - low) / (steps[1] - steps[0]) * (many - steps[1]))

    return Traffic(*map(at, ("inner", "outer", "held", "messages")), a.hidden)


def _of_rank(strategy: str, shape: tuple[int, int], H: int, rank: int, call: dict) -> tuple[int, int, int]:
    """Bytes sent inside a node and across, and bytes held beside the inputs, of one rank."""
    nodes, P = shape[0], shape[0] * shape[1]
    if strategy == "ring":
        sent = costs.ring_bytes(P=P, rank=rank, **call)
        held = costs.ring_memory(P=P, H=H, rank=rank, **call)
        own = {"q", "k, v", "other inputs"}
        return *((0, sent) if nodes > 1 else (sent, 0)), sum(n for name, n in held.items() if name not in own)
    if strategy == "all-gather":
        sent = costs.all_gather_bytes(P=P, rank=rank, **call)
        across = sent * (P - shape[1]) // (P - 1) if P > 1 else 0  # a part of what goes to all others
        return sent - across, across, sum(costs.all_gather_memory(P=P, rank=rank, **call).values())
    if strategy == "ulysses":
        sent = costs.ulysses_bytes(P=P, H=H, rank=rank, **call)
        across = sent * (P - shape[1]) // (P - 1) if P > 1 else 0
        return sent - across, across, sum(costs.ulysses_memory(P=P, H=H, rank=rank, **call).values())
    if strategy == "hybrid":
        sent, held = (f(shape=shape, H=H, rank=rank, **call) for f in (costs.hybrid_bytes, costs.hybrid_memory))
    else:
        sent, held = (f(shape=shape, rank=rank, **call) for f in (costs.double_ring_bytes, costs.double_ring_memory))
    return sent["inner"], sent["outer"], sum(held.values())


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

"""All ways to split one attention call, side by side: messages, bytes, memory and seconds, from shapes alone.

Messages and bytes are those of the rank that sends most, and memory that of the rank that holds most: packed messages,
arriving buffers and gathered rows, and rows of scores where a way keeps them. Each of these counts at its own fullest
moment, so a sum of them is a bound. A forward without a mask, seconds on hardware that reaches its peak.

Ranks lie in nodes. A link to a rank of the own node has one bandwidth, one to another node a lower one; every rank has
both. Ways that know nothing of nodes send across them what happens to go there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from ..attention.ulysses import calls, head_plan
from . import all_gather, double_ring, ring, ring_self_attention, ulysses

Bytes = dict[str, int]  # "inner" and "outer": inside a node, and to other nodes


@dataclass(frozen=True)
class Problem:
    """One attention call, the ranks that share it, and their links.

    S tokens, H query heads, G key/value heads, head dim D, batch B, itemsize bytes per element; shape is (nodes, ranks
    of a node). flops: operations per second of a rank.  bandwidth: bytes per second of a rank's link inside its node.
    outer_bandwidth: of its link to other nodes; the same if None.  latency: seconds of a message.

    >>> Problem(32768, (2, 4), 32, 8, 128).ranks
    8
    """

    S: int
    shape: tuple[int, int]
    H: int
    G: int
    D: int
    B: int = 1
    itemsize: int = 2
    flops: float = 600e12
    bandwidth: float = 250e9
    outer_bandwidth: float | None = None
    latency: float = 10e-6

    @property
    def ranks(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def across(self) -> float:
        """Bytes per second between nodes."""
        return self.bandwidth if self.outer_bandwidth is None else self.outer_bandwidth

    @property
    def without_messages(self) -> Problem:
        """The same on links that take no time."""
        return replace(self, bandwidth=inf, outer_bandwidth=inf, latency=0.0)

    def keys(self) -> dict[str, Any]:
        """The arguments of formulas that only look at keys and values."""
        return dict(S=self.S, G=self.G, D=self.D, B=self.B, itemsize=self.itemsize)

    def heads(self) -> dict[str, Any]:
        return self.keys() | dict(H=self.H)

    def machine(self, slow: bool = False) -> dict[str, float]:
        """slow: everything goes at the pace of the slower links, those between nodes if there are any."""
        bandwidth = min(self.across, self.bandwidth) if slow and self.shape[0] > 1 else self.bandwidth
        return dict(flops=self.flops, bandwidth=bandwidth, latency=self.latency)


@dataclass(frozen=True)
class Row:
    """What a way costs.

    sent, sent_backward: bytes inside the node and across.  memory, memory_backward: by component.  seconds: of the
    forward, and compute: how many of them the rank with the most heads and tokens computes.  busy: ranks that compute
    anything.
    """

    name: str
    messages: int
    sent: Bytes
    sent_backward: Bytes
    memory: dict[str, int]
    memory_backward: dict[str, int]
    seconds: float
    compute: float
    busy: int

    @property
    def exposed(self) -> float:
        """The part of the time in which messages do not hide behind computing."""
        return max(0.0, self.seconds - self.compute) / self.seconds if self.seconds else 0.0

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())

    @property
    def total_memory_backward(self) -> int:
        return sum(self.memory_backward.values())


def compare(problem: Problem) -> list[Row]:
    """A row for each way, in the order of the notebook on them.

    >>> rows = compare(Problem(S=4096, shape=(1, 4), H=8, G=2, D=64))
    >>> {row.name: row.sent["inner"] for row in rows if row.name in ("all-gather", "ring", "ulysses")}
    {'all-gather': 1572864, 'ring': 1572864, 'ulysses': 2383872}
    """
    return [row(problem) for row in _ROWS.values()]


def _worst(found: Callable[..., Any], P: int, size: Callable[[Any], int] = int, /, **call: Any) -> Any:
    """Of the rank for which it is largest."""
    return max((found(rank=rank, **call) for rank in _some(P)), key=size)


def _some(P: int) -> list[int]:
    """Ranks among which is the one with the longest shard and the most heads; all of them, if they are few."""
    return list(range(P)) if P <= 8 else [0, 1, P // 2, P - 1]


def _both(seconds: Callable[[Problem], float], problem: Problem) -> tuple[float, float]:
    """Seconds, and those of them that are computing."""
    return seconds(problem), seconds(problem.without_messages)


def _two(found: Callable[..., Any], P: int, size: Callable[[Any], int] = int, /, **call: Any) -> list[Any]:
    """Of the forward and of the backward."""
    return [_worst(found, P, size, backward=b, **call) for b in (False, True)]


def _total(found: Mapping[str, int]) -> int:
    return sum(found.values())


def _collective(problem: Problem, nbytes: int) -> Bytes:
    """What goes to all other ranks alike, inside the node and across: a mean, where heads do not divide."""
    P, places = problem.ranks, problem.shape[1]
    across = nbytes * (P - places) // (P - 1) if P > 1 else 0
    return {"inner": nbytes - across, "outer": across}


def _collective_seconds(seconds: Callable[..., float], problem: Problem, **options: Any) -> float:
    """A way that sends to all ranks alike: its two kinds of links work side by side, and the slower decides."""
    P, places = problem.ranks, problem.shape[1]
    share = (P - places) / (P - 1) if P > 1 else 0.0
    slowest = max((1 - share) / problem.bandwidth, share / problem.across)
    machine = problem.machine() | dict(bandwidth=1 / slowest if slowest else inf)
    return seconds(P=P, **problem.heads(), **machine, **options)


def _neighbours(problem: Problem, nbytes: int) -> Bytes:
    """Of a ring of all ranks: the last rank of a node sends everything to the next node."""
    return {"inner": 0, "outer": nbytes} if problem.shape[0] > 1 else {"inner": nbytes, "outer": 0}


def _all_gather(problem: Problem, heads_at_once: int | None = None) -> Row:
    P, keys = problem.ranks, problem.keys()
    sent = _two(all_gather.all_gather_bytes, P, P=P, **keys)
    seconds = partial(_collective_seconds, all_gather.all_gather_seconds, heads_at_once=heads_at_once)
    n = heads_at_once or problem.G
    return Row(
        "all-gather" if heads_at_once is None else f"all-gather, {n} head{'s' * (n > 1)} at once",
        (P - 1) * -(-problem.G // n),
        *(_collective(problem, nbytes) for nbytes in sent),
        *_two(all_gather.all_gather_memory, P, _total, P=P, heads_at_once=heads_at_once, **keys),
        *_both(seconds, problem),
        P,
    )


def _ring(problem: Problem) -> Row:
    P = problem.ranks
    sent = _two(ring.ring_bytes, P, P=P, **problem.keys())
    flying = _two(double_ring.double_ring_memory, P, _total, shape=(1, P), **problem.keys())  # a ring of one node

    def seconds(problem: Problem) -> float:
        call = problem.heads() | dict(s=-(-problem.S // P))
        del call["S"]
        return ring.ring_seconds(P=P, **call, **problem.machine(slow=True))

    return Row(
        "ring",
        P - 1,
        *(_neighbours(problem, nbytes) for nbytes in sent),
        *flying,
        *_both(seconds, problem),
        P,
    )


def _ring_self_attention(problem: Problem) -> Row:
    P, call = problem.ranks, problem.heads()
    keys = problem.keys()

    def seconds(problem: Problem) -> float:
        return ring_self_attention.ring_self_attention_seconds(P=P, **call, **problem.machine(slow=True))

    sent = _two(ring_self_attention.ring_self_attention_bytes, P, P=P, **keys)
    return Row(
        "ring self-attention",
        2 * (P - 1),
        *(_neighbours(problem, nbytes) for nbytes in sent),
        *_two(ring_self_attention.ring_self_attention_memory, P, _total, P=P, **call),
        *_both(seconds, problem),
        P,
    )


def _ulysses(problem: Problem) -> Row:
    P, call = problem.ranks, problem.heads()
    sent = _two(ulysses.ulysses_bytes, P, P=P, **call)
    return Row(
        "ulysses",
        2 * (P - 1),
        *(_collective(problem, nbytes) for nbytes in sent),
        *_two(ulysses.ulysses_memory, P, _total, P=P, **call),
        *_both(partial(_collective_seconds, ulysses.ulysses_seconds), problem),
        min(P, problem.H),
    )


def _hybrid(problem: Problem) -> Row:
    (nodes, places), call = problem.shape, problem.heads() | dict(shape=problem.shape)
    rings = max(len(calls(mine)) for mine in head_plan(problem.H, problem.G, places))
    return Row(
        "hybrid",
        2 * (places - 1) + rings * (nodes - 1),
        *_two(ulysses.hybrid_bytes, problem.ranks, _total, **call),
        *_two(ulysses.hybrid_memory, problem.ranks, _total, **call),
        *_both(lambda p: ulysses.hybrid_seconds(**call, outer_bandwidth=p.across, **p.machine()), problem),
        nodes * min(places, problem.H),
    )


def _double_ring(problem: Problem) -> Row:
    (nodes, places), call = problem.shape, problem.keys() | dict(shape=problem.shape)

    def seconds(p: Problem) -> float:
        return double_ring.double_ring_seconds(**call, H=p.H, outer_bandwidth=p.across, **p.machine())

    return Row(
        "double ring",
        nodes * (places - 1) + nodes - 1,
        *_two(double_ring.double_ring_bytes, problem.ranks, _total, **call),
        *_two(double_ring.double_ring_memory, problem.ranks, _total, **call),
        *_both(seconds, problem),
        problem.ranks,
    )


_ROWS: dict[str, Callable[[Problem], Row]] = {
    "all-gather": _all_gather,
    "all-gather by heads": partial(_all_gather, heads_at_once=1),
    "ring self-attention": _ring_self_attention,
    "ring": _ring,
    "ulysses": _ulysses,
    "hybrid": _hybrid,
    "double ring": _double_ring,
}

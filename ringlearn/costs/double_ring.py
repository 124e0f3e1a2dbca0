"""A ring inside every node and a ring of nodes: what it sends, what it holds, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable

from ..layouts import Layout, contiguous
from .ring import _most, ring_seconds, shard_lengths, travelling


def _shards_before(S: int, shape: tuple[int, int], rank: int, layout: Layout) -> Callable[[int, int], int]:
    """How many tokens the shard has that lies t nodes and u places before a rank's own."""
    nodes, places = shape
    node, place = divmod(rank, places)
    lengths = shard_lengths(S, nodes * places, layout)
    return lambda t, u: lengths[(node - t) % nodes * places + (place - u) % places]


def double_ring_bytes(
    S: int,
    shape: tuple[int, int],
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that one rank sends inside its node and across nodes in double-ring attention.

    In each of N steps of the outer ring, n - 1 hops inside a node; N - 1 hops across nodes. Backward: as many of k and
    v, but that the own ones need not come home, and as many of dk and dv.

    >>> double_ring_bytes(4096, (2, 4), G=8, D=64), double_ring_bytes(4096, (2, 4), G=8, D=64, backward=True)
    ({'inner': 6291456, 'outer': 1048576}, {'inner': 17825792, 'outer': 3145728})
    """
    (nodes, places), of = shape, _shards_before(S, shape, rank, layout)
    if not backward:
        inner = itemsize * sum(of(t, u) for t in range(nodes) for u in range(places - 1))
        outer = itemsize * sum(of(t, 0) for t in range(nodes - 1))
    else:
        w = travelling(itemsize, nodes * places)
        hops = [(t, u) for t in range(nodes) for u in range(1, places)]
        inner = sum((itemsize * ((t, u) != (0, 1)) + w) * of(t, u) for t, u in hops)
        outer = sum(itemsize * of(t, places - 1) + w * of(t, 0) for t in range(1, nodes))
    return {name: 2 * B * G * D * sent for name, sent in (("inner", inner), ("outer", outer))}


def double_ring_memory(
    S: int,
    shape: tuple[int, int],
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that a rank holds in messages in double-ring attention.

    Up to four shards of k, v, twice as many as in one ring: the one that an outer step began with, which is on its way
    to the next node, the one that comes from there, the one that is computed with, and the one that comes after it.
    Backward: the same, and of dk, dv as many: each ring has one on its way and one that comes. (Exact where every query
    sees every key.)

    >>> double_ring_memory(4096, (3, 4), G=8, D=64), double_ring_memory(4096, (1, 12), G=8, D=64)
    ({'in flight': 2797568}, {'in flight': 1398784})
    """
    (nodes, places), of = shape, _shards_before(S, shape, rank, layout)
    if backward:
        most = _double_ring_backward(of, nodes, places, itemsize, travelling(itemsize, nodes * places))
        return _most(in_flight=2 * B * G * D * most)
    moments = [
        (of(t, 0) if t else 0)
        + (of(t + 1, 0) if t < nodes - 1 else 0)
        + (of(t, u) if u else 0)
        + (of(t, u + 1) if u < places - 1 else 0)
        for t in range(nodes)
        for u in range(places)
    ]
    return _most(in_flight=2 * B * G * D * itemsize * max(moments))


def _double_ring_backward(of: Callable[[int, int], int], nodes: int, places: int, e: int, w: int) -> int:
    """The most that messages hold, for a shard of as many numbers as ``of`` says: the program's steps in order.

    w: bytes of an element of dk, dv on their way.
    """
    live: dict[str, int] = {}  # what is in flight, by what it is
    most = 0

    def hold(name: str, nbytes: int) -> None:
        nonlocal most
        live[name] = nbytes
        most = max(most, sum(live.values()))

    def drop(*names: str) -> None:
        for name in names:
            live.pop(name, None)

    for t in reversed(range(nodes)):
        if t > 0:
            hold("next node", e * of(t - 1, places - 1))
        for u in reversed(range(places)):
            home = (t, u) == (0, 1)  # the next keys are the own ones
            if u > 0 and not home:
                hold("next", e * of(t, u - 1))
            if u < places - 1:
                drop("inner sent", "inner coming")  # dk, dv of this node have come
            if u > 0:
                hold("inner sent", w * of(t, u))
                hold("inner coming", w * of(t, u - 1))
                drop("here")
                if t == 0:
                    drop("first here")  # else it is still on its way to the next node
                if not home:
                    live["here"] = live.pop("next")
        if t < nodes - 1:
            drop("outer sent", "outer coming")  # those of the nodes before
        if t > 0:
            hold("outer sent", w * of(t, 0))
            hold("outer coming", w * of(t - 1, 0))
            drop("here")
            live["first here"] = live.pop("next node")
    return most


def double_ring_seconds(
    S: int,
    shape: tuple[int, int],
    H: int,
    G: int,
    D: int,
    *,
    flops: float,
    bandwidth: float,
    outer_bandwidth: float,
    latency: float = 0.0,
    B: int = 1,
    itemsize: int = 2,
) -> float:
    """Seconds of double-ring attention: a hop between nodes has a whole turn inside a node to hide behind.

    The two kinds of links work side by side. (A simulated rank has one link for all, so there it is the same only as
    long as all messages hide.)

    >>> links = dict(flops=600e12, bandwidth=250e9, outer_bandwidth=50e9)
    >>> round(double_ring_seconds(32768, (2, 4), 32, 8, 128, **links) * 1e6)
    3665
    """
    nodes, places = shape
    s = max(shard_lengths(S, nodes * places, contiguous))
    turn = ring_seconds(s, places, H, G, D, flops=flops, bandwidth=bandwidth, latency=latency, B=B, itemsize=itemsize)
    across = latency + 2 * B * G * s * D * itemsize / outer_bandwidth
    return (nodes - 1) * max(turn, across) + turn

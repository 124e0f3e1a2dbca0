"""A ring inside every node and a ring of nodes: what it sends, what it holds, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..attention.double_ring import Turns
from .problem import Bytes, Costs, Problem, formula, held
from .ring import ring_seconds, routed


def _shards_before(p: Problem) -> Callable[[int, int], int]:
    """How many tokens the shard has that lies t nodes and u places before a rank's own."""
    (nodes, places), lengths = p.shape, p.lengths
    node, place = divmod(p.rank, places)
    return lambda t, u: lengths[(node - t) % nodes * places + (place - u) % places]


@formula("S shape G D", "B itemsize backward rank layout mask")
def double_ring_bytes(p: Problem) -> Bytes:
    """Bytes that one rank sends inside its node and across nodes in double-ring attention.

    Inside a node: in each step of the outer ring, one hop fewer than the node has ranks. Across nodes: one hop fewer
    than there are nodes. Backward: dk and dv make as many hops; k and v make the same, except for the last one, which
    would bring a rank its own.

    mask: as in ``ring_bytes``, in both rings. The backward is then that of a ring inside the node for the keys of each
    node, with dk, dv that travel as sums.

    >>> double_ring_bytes(4096, (2, 4), G=8, D=64), double_ring_bytes(4096, (2, 4), G=8, D=64, backward=True)
    ({'inner': 6291456, 'outer': 1048576}, {'inner': 17825792, 'outer': 3145728})
    """
    (nodes, places), of, e = p.shape, _shards_before(p), p.itemsize
    node, place = divmod(p.rank, places)
    turns = Turns(p.spec, p.shape, node)
    if not turns.whole:
        wide, between = nodes > 1, [turns.between(t).route for t in range(turns.count)]
        inner = sum(routed(p, route, place, kept=False, wide=wide) for route in between)
        outer = routed(p, turns.routes[place], node, kept=False, wide=True)
    elif not p.backward:
        inner = e * sum(of(t, u) for t in range(nodes) for u in range(places - 1))
        outer = e * sum(of(t, 0) for t in range(nodes - 1))
    else:
        w = p.travelling(p.ranks)
        hops = [(t, u) for t in range(nodes) for u in range(1, places)]
        inner = sum((e * ((t, u) != (0, 1)) + w) * of(t, u) for t, u in hops)
        outer = sum(e * of(t, places - 1) + w * of(t, 0) for t in range(1, nodes))
    return {"inner": p.kv * inner, "outer": p.kv * outer}


@formula("S shape G D", "B itemsize backward rank layout")
def double_ring_memory(p: Problem) -> dict[str, int]:
    """Bytes that a rank holds in messages in double-ring attention.

    Up to four shards of k, v, twice as many as in a single ring: the one with which an outer step began, which is being
    sent to the next node; the one that arrives from the previous node; the one in use; and the one that arrives next.
    Backward: the same, and as many of dk, dv: in each ring one is being sent and one arrives. (Exact if every query
    sees every key.)

    >>> double_ring_memory(4096, (3, 4), G=8, D=64), double_ring_memory(4096, (1, 12), G=8, D=64)
    ({'in flight': 2797568}, {'in flight': 1398784})
    """
    (nodes, places), of = p.shape, _shards_before(p)
    if p.backward:
        moments = _backward_moments(of, nodes, places, p.itemsize, p.travelling(p.ranks))
        return held(in_flight=p.kv * max(moments))
    moments = [
        (of(t, 0) if t else 0)
        + (of(t + 1, 0) if t < nodes - 1 else 0)
        + (of(t, u) if u else 0)
        + (of(t, u + 1) if u < places - 1 else 0)
        for t in range(nodes)
        for u in range(places)
    ]
    return held(in_flight=p.kv * p.itemsize * max(moments))


def _backward_moments(of: Callable[[int, int], int], nodes: int, places: int, e: int, w: int) -> Iterator[int]:
    """What messages hold whenever a new one is posted, for a shard of as many numbers as ``of`` says.

    e: bytes of an element of k, v.  w: of an element of dk, dv on their way.
    """
    for t in reversed(range(nodes)):
        ahead = e * of(t - 1, places - 1) if t else 0  # k, v that come from the next node
        first = e * of(t, places - 1) if t < nodes - 1 else 0  # k, v that came from there before this turn
        outer = w * (of(t + 1, 0) + of(t, 0)) if t < nodes - 1 else 0  # dk, dv between nodes, sent and coming
        yield ahead + first + outer
        for u in reversed(range(1, places)):
            here = e * of(t, u) if u < places - 1 else 0
            following = e * of(t, u - 1) if (t, u) != (0, 1) else 0  # else the rank's own, which are not sent
            kept = first if t or u == places - 1 else 0  # in the last turn they are not on their way to another node
            held_now = ahead + outer + kept + here + following
            yield held_now + (w * (of(t, u + 1) + of(t, u)) if u < places - 1 else 0)  # the hop before has not ended
            yield held_now + w * (of(t, u) + of(t, u - 1))
        if t:
            yield ahead + first + (e * of(t, 0) if places > 1 else 0) + w * (of(t, 0) + of(t - 1, 0))


@formula("S shape H G D", "flops bandwidth outer_bandwidth latency B itemsize")
def double_ring_seconds(p: Problem) -> float:
    """Seconds of double-ring attention: a hop between nodes has a whole turn inside a node to hide behind.

    The two kinds of links work in parallel. (A simulated rank has a single link, so its time is the same only as
    long as all messages hide.)

    >>> links = dict(flops=600e12, bandwidth=250e9, outer_bandwidth=50e9)
    >>> round(double_ring_seconds(32768, (2, 4), 32, 8, 128, **links) * 1e6)
    3665
    """
    nodes, places = p.shape
    turn = ring_seconds(replace(p, S=places * p.longest, shape=(1, places)))
    across = p.latency + p.kv * p.longest * p.itemsize / p.across
    return (nodes - 1) * max(turn, across) + turn


DOUBLE_RING_COSTS = Costs(
    "double ring",
    messages=lambda p: p.shape[0] * p.shape[1] - 1,
    sent=double_ring_bytes,
    memory=double_ring_memory,
    seconds=double_ring_seconds,
)

"""Ulysses, and hybrid attention, which is Ulysses inside a node and a ring of nodes: bytes, memory and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..attention.gathered import gathered
from ..attention.ulysses import calls, head_plan
from .problem import Bytes, Costs, Problem, formula, held
from .ring import ring_moments, ring_seconds, routed


class _Trade(NamedTuple):
    """Bytes that a rank sends and receives in an all-to-all, and those of what it sends that it has to pack.

    What lies in one piece is sent from where it is: all of a tensor, or with one key/value head the last query heads,
    whose k and v come behind them.
    """

    sent: int
    received: int
    packed: int

    @property
    def held(self) -> int:
        return self.received + self.packed


def _trades(p: Problem, lengths: Sequence[int], place: int, lse_grad: bool = False) -> tuple[_Trade, _Trade]:
    """When heads are traded for rows, and when they are traded back.

    lengths, place: rows of the ranks that trade, and which of them is meant.
    """
    B, H, G, D, itemsize, a = p.B, p.H, p.G, p.D, p.itemsize, p.accumulated
    plan = head_plan(H, G, len(lengths))
    q = [sum(len(heads) for heads, _ in mine) for mine in plan]
    k = [len(mine) for mine in plan]
    own, others = lengths[place], sum(lengths) - lengths[place]
    if p.backward:  # dout, and the gradient of lse; then dq, dk, dv
        there = [n * (D * itemsize + a * lse_grad) for n in q]
        dkv = a if sum(k) > G else itemsize
        back = [D * (n * itemsize + 2 * m * dkv) for n, m in zip(q, k, strict=True)]
    else:  # q, k, v; then out and lse
        there = [D * itemsize * (n + 2 * m) for n, m in zip(q, k, strict=True)]
        back = [n * (D * itemsize + a) for n in q]
    to_others = [sum(x) - x[place] for x in (there, back)]  # a row, in the heads of all other ranks
    strewn = 0  # of those in ``there`` what has to be packed
    for r, mine in enumerate(plan):
        first, last = (mine[0][0].start, mine[-1][0].stop) if mine else (0, 0)
        in_front = not lse_grad if p.backward else last == H and k[r] == G
        if r != place and not (in_front and (B == 1 or (first, last) == (0, H))):
            strewn += there[r]
    return (
        _Trade(B * own * to_others[0], B * others * there[place], B * own * strewn),
        _Trade(B * others * back[place], B * own * to_others[1], B * others * back[place]),
    )


@formula("S P H G D", "B itemsize backward rank layout lse_grad")
def ulysses_bytes(p: Problem, lse_grad: bool) -> int:
    """Bytes that one rank sends in Ulysses attention.

    Forward: of its own rows, the heads of q, k, v that other ranks compute; and of its own heads, the rows of out and
    lse that belong to other ranks. Backward: dout one way, and dq, dk, dv the other. A key/value head that several
    ranks use is sent to each of them, and its gradient comes back in the accumulation dtype.  lse_grad: whether lse has
    a gradient, which is then sent along with dout.

    >>> ulysses_bytes(4096, 4, 8, 8, 64), ulysses_bytes(4096, 8, 8, 8, 64)
    (3170304, 1849344)
    >>> ulysses_bytes(4096, 8, 8, 1, 64) == ulysses_bytes(4096, 8, 8, 8, 64)  # one key/value head, sent to all
    True
    """
    return hybrid_bytes(p, shape=(1, p.ranks), lse_grad=lse_grad)["inner"]


@formula("S P H G D", "B itemsize backward rank layout lse_grad")
def ulysses_memory(p: Problem, lse_grad: bool) -> dict[str, int]:
    """Bytes that a rank holds in messages and gathered tensors in Ulysses attention.

    What a rank sends in each of the two all-to-alls is packed, and what it receives needs buffers. "Gathered" are all
    rows of its own heads of q, k, v, which are kept for the backward, where those of dout are added.

    >>> [ulysses_memory(4096, P, 8, 8, 64)["gathered"] / 2**20 for P in (2, 4, 8)]
    [6.0, 3.0, 1.5]
    """
    return hybrid_memory(p, shape=(1, p.ranks), lse_grad=lse_grad)


@formula("S P H G D", "flops bandwidth latency B itemsize")
def ulysses_seconds(p: Problem) -> float:
    """Seconds of Ulysses attention: all-to-all, attention of some heads over all rows, all-to-all back; nothing hides.

    >>> round(ulysses_seconds(4096, 4, 32, 8, 128, flops=600e12, bandwidth=250e9) * 1e6)
    178
    """
    return hybrid_seconds(p, shape=(1, p.ranks))


# ---- Ulysses inside a node, a ring of nodes -------------------------------------------------------------------------


def _nodes(p: Problem) -> list[list[int]]:
    """For each node, how many rows each of its ranks has."""
    (nodes, places), lengths = p.shape, p.lengths
    return [lengths[n * places : (n + 1) * places] for n in range(nodes)]


@formula("S shape H G D", "B itemsize backward rank layout mask lse_grad")
def hybrid_bytes(p: Problem, lse_grad: bool) -> Bytes:
    """Bytes that one rank sends inside its node and across nodes in hybrid attention with a ring across nodes.

    Inside: the all-to-alls of Ulysses, over the rows of the node. Across: a rank's key/value heads of whole nodes go
    round, or only the rows of them that later nodes need under ``mask``.

    >>> hybrid_bytes(4096, (2, 4), 8, 8, 64), hybrid_bytes(4096, (4, 2), 8, 8, 64)
    ({'inner': 1585152, 'outer': 1048576}, {'inner': 1056768, 'outer': 3145728})
    """
    (nodes, places), rows = p.shape, _nodes(p)
    node, place = divmod(p.rank, places)
    there, back = _trades(p, rows[node], place, lse_grad)
    shards = p.layout.ranges(p.S, p.ranks)
    of_nodes = tuple(gathered(shards[n * places : (n + 1) * places]).ranges for n in range(nodes))
    across = routed(p, p.spec.over(of_nodes, of_nodes).route, node)
    mine = head_plan(p.H, p.G, places)[place]
    return {"inner": there.sent + back.sent, "outer": 2 * p.B * len(mine) * p.D * across}


@formula("S shape H G D", "B itemsize backward rank layout lse_grad")
def hybrid_memory(p: Problem, lse_grad: bool) -> dict[str, int]:
    """Bytes that a rank holds in messages and gathered tensors in hybrid attention with a ring across nodes.

    Gathered: the node's rows of the rank's own heads; in the backward also those of dout. In flight: the messages of
    the all-to-alls, and in the ring the k, v of two nodes. If these heads need several calls, each call packs them for
    its first hop and keeps what arrived last. The backward of a call holds what ``costs.ring_memory`` says of a ring of
    nodes.

    >>> hybrid_memory(4096, (2, 4), 8, 8, 64), hybrid_memory(4096, (4, 2), 8, 8, 64)
    ({'in flight': 2359296, 'gathered': 1572864}, {'in flight': 2097152, 'gathered': 1572864})
    """
    nodes, places = p.shape
    node, place = divmod(p.rank, places)
    inside, rows = _nodes(p)[node], [sum(lengths) for lengths in _nodes(p)]
    there, back = _trades(p, inside, place, lse_grad)
    mine = head_plan(p.H, p.G, places)[place]
    todo, kept, moments = calls(mine), 0, [there.held]
    for q, g in todo:
        call = replace(p, H=q.stop - q.start, G=g.stop - g.start)
        if p.backward:
            of_call = ring_moments(call, rows[node:] + rows[:node])
            moments += [kept + moment["in flight"] for moment in of_call]
            found, sent = p.accumulated, p.travelling(nodes)  # bytes of an element of dk, dv
            fused = call.G == call.H and not lse_grad  # else summed over a group, or found by the reference kernel
            if fused:
                found = p.itemsize
            if nodes > 1 and (found != sent or fused and call.H > 1):  # the fused kernel's heads lie side by side
                kept += call.kv * sent * rows[node]  # they are summed into the message that came
            continue
        row = call.kv * p.itemsize
        for step in range(nodes - 1):
            here = rows[(node - step) % nodes] if step or len(todo) > 1 else 0
            moments.append(kept + row * (here + rows[(node - step - 1) % nodes]))
        kept += row * rows[(node + 1) % nodes] if nodes > 1 else 0
    moments.append(kept + back.held)
    q, k = sum(len(heads) for heads, _ in mine), len(mine)
    row = q * (p.D * p.itemsize + p.accumulated * lse_grad) if p.backward else p.D * p.itemsize * (q + 2 * k)
    return held(in_flight=max(moments), gathered=p.B * rows[node] * row if places > 1 else 0)


@formula("S shape H G D", "flops bandwidth outer_bandwidth latency B itemsize")
def hybrid_seconds(p: Problem) -> float:
    """Seconds of hybrid attention: two all-to-alls inside a node, and between them a ring over the rows of whole nodes.

    bandwidth: of a rank's link inside its node.  outer_bandwidth: of its link to the next node.

    >>> links = dict(flops=600e12, bandwidth=250e9, outer_bandwidth=50e9)
    >>> round(hybrid_seconds(32768, (2, 4), 32, 8, 128, **links) * 1e6)
    3918
    """
    nodes, places = p.shape
    trades = [_trades(p, [p.longest] * places, place) for place in range(places)]
    exposed = sum(max(t[i].sent for t in trades) / p.bandwidth + p.latency for i in (0, 1)) if places > 1 else 0.0
    ring = replace(p, S=nodes * max(map(sum, _nodes(p))), shape=(1, nodes), bandwidth=p.across)
    rings = [
        sum(ring_seconds(ring, H=q.stop - q.start, G=g.stop - g.start) for q, g in calls(mine))
        for mine in head_plan(p.H, p.G, places)
    ]
    return exposed + max(rings)


ULYSSES_COSTS = Costs(
    "ulysses",
    messages=lambda p: 2 * (p.ranks - 1),
    sent=lambda p: p.to_all(ulysses_bytes(p)),
    memory=ulysses_memory,
    seconds=lambda p: ulysses_seconds(p.links_to_all),
    busy=lambda p: min(p.ranks, p.H),
)


def _most_calls(p: Problem) -> int:
    """Rings that a rank runs one after the other."""
    return max(len(calls(mine)) for mine in head_plan(p.H, p.G, p.shape[1]))


HYBRID_COSTS = Costs(
    "hybrid",
    messages=lambda p: 2 * (p.shape[1] - 1) + _most_calls(p) * (p.shape[0] - 1),
    sent=hybrid_bytes,
    memory=hybrid_memory,
    seconds=hybrid_seconds,
    busy=lambda p: p.shape[0] * min(p.shape[1], p.H),
)

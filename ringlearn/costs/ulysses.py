"""What each way to split a sequence sends and holds, from shapes alone: exact integers for one rank and one call.

Names as in costs.py: H query heads, G key/value heads, D head dim (of keys and values), P ranks; ``shape`` is (nodes,
ranks of a node); ``itemsize`` is bytes per element. What is summed over ranks travels in the accumulation dtype.

Bytes are those that ``world.trace`` counts. Memory is what ``world.memory.most(rank)`` says of these components, each
at its own fullest moment, for k, v that lie one behind the other, as ``world.shard`` puts them:

    in flight   packed messages, and buffers that a message arrives or has arrived in
    gathered    rows of all ranks, put together from what arrived
    scores      whole rows of them

Seconds are of a forward without a mask, on hardware that reaches its peak: those of the virtual clock of a simulated
world, if ranks have equal shares; else the largest shares are taken for all, and it is a bound.

Forward on 4 ranks, 8 query heads, 2 key/value heads:

>>> from ringlearn.costs import all_gather_bytes, double_ring_bytes
>>> call = dict(S=4096, G=2, D=64, itemsize=2)
>>> all_gather_bytes(P=4, **call), ulysses_bytes(P=4, H=8, **call), double_ring_bytes(shape=(2, 2), **call)
(1572864, 2383872, {'inner': 1048576, 'outer': 524288})
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..attention.ulysses import calls, head_plan
from ..layouts import Layout, contiguous
from .one_device import ACCUMULATED
from .ring import _most, backward_moments, ring_seconds, ring_sent, shard_lengths, travelling

# ---- All-gather -----------------------------------------------------------------------------------------------------


# ---- Ring self-attention --------------------------------------------------------------------------------------------


# ---- Ulysses --------------------------------------------------------------------------------------------------------


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


def _trades(
    lengths: Sequence[int],
    place: int,
    H: int,
    G: int,
    D: int,
    *,
    B: int,
    itemsize: int,
    backward: bool = False,
    lse_grad: bool = False,
) -> tuple[_Trade, _Trade]:
    """When heads are traded for rows, and when they are traded back.

    lengths, place: rows of the ranks that trade, and which of them is meant.
    """
    plan = head_plan(H, G, len(lengths))
    q = [sum(len(heads) for heads, _ in mine) for mine in plan]
    k = [len(mine) for mine in plan]
    own, others, a = lengths[place], sum(lengths) - lengths[place], max(itemsize, ACCUMULATED)
    if backward:  # dout, and the gradient of lse; then dq, dk, dv
        there = [n * (D * itemsize + a * lse_grad) for n in q]
        dkv = a if sum(k) > G else itemsize
        back = [D * (n * itemsize + 2 * m * dkv) for n, m in zip(q, k, strict=True)]
    else:  # q, k, v; then out and lse
        there = [D * itemsize * (n + 2 * m) for n, m in zip(q, k, strict=True)]
        back = [n * (D * itemsize + a) for n in q]
    to_others = [sum(x) - x[place] for x in (there, back)]  # a row, in all ranks' heads but the own
    strewn = 0  # of those in ``there`` what has to be packed
    for r, mine in enumerate(plan):
        first, last = (mine[0][0].start, mine[-1][0].stop) if mine else (0, 0)
        in_front = not lse_grad if backward else last == H and k[r] == G
        if r != place and not (in_front and (B == 1 or (first, last) == (0, H))):
            strewn += there[r]
    return (
        _Trade(B * own * to_others[0], B * others * there[place], B * own * strewn),
        _Trade(B * others * back[place], B * own * to_others[1], B * others * back[place]),
    )


def ulysses_bytes(
    S: int,
    P: int,
    H: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    lse_grad: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> int:
    """Bytes that one rank sends in Ulysses attention.

    Forward: of the own rows every other rank's heads of q, k, v; back of the other rows the own heads of out and lse.
    Backward: dout there, dq, dk, dv back. A key/value head that several ranks use is sent to each, and its gradient
    comes back in the accumulation dtype.  lse_grad: whether lse has a gradient, which then goes along with dout.

    >>> ulysses_bytes(4096, 4, 8, 8, 64), ulysses_bytes(4096, 8, 8, 8, 64)
    (3170304, 1849344)
    >>> ulysses_bytes(4096, 8, 8, 1, 64) == ulysses_bytes(4096, 8, 8, 8, 64)  # one key/value head, sent to all
    True
    """
    call = dict(B=B, itemsize=itemsize, backward=backward, lse_grad=lse_grad, rank=rank, layout=layout)
    return hybrid_bytes(S, (1, P), H, G, D, **call)["inner"]


def ulysses_memory(
    S: int,
    P: int,
    H: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    lse_grad: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that a rank holds in messages and gathered tensors in Ulysses attention.

    Each of the two trades is packed, and arrives. Gathered are all rows of the own heads of q, k, v, kept for the
    backward, where those of dout come to them.

    >>> [ulysses_memory(4096, P, 8, 8, 64)["gathered"] / 2**20 for P in (2, 4, 8)]
    [6.0, 3.0, 1.5]
    """
    call = dict(B=B, itemsize=itemsize, backward=backward, lse_grad=lse_grad, rank=rank, layout=layout)
    return hybrid_memory(S, (1, P), H, G, D, **call)


# ---- Nodes: hybrid and double ring ----------------------------------------------------------------------------------


def hybrid_bytes(
    S: int,
    shape: tuple[int, int],
    H: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    lse_grad: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that one rank sends inside its node and across nodes in hybrid attention with a ring outside.

    Inside: the trades of Ulysses, over the rows of the node. Across: the own key/value heads of whole nodes go round.

    >>> hybrid_bytes(4096, (2, 4), 8, 8, 64), hybrid_bytes(4096, (4, 2), 8, 8, 64)
    ({'inner': 1585152, 'outer': 1048576}, {'inner': 1056768, 'outer': 3145728})
    """
    nodes, places = shape
    node, place = divmod(rank, places)
    lengths = shard_lengths(S, nodes * places, layout)
    rows = [lengths[n * places : (n + 1) * places] for n in range(nodes)]
    there, back = _trades(rows[node], place, H, G, D, B=B, itemsize=itemsize, backward=backward, lse_grad=lse_grad)
    across = ring_sent(list(map(sum, rows)), node, itemsize, travelling(itemsize, nodes) if backward else None)
    return {"inner": there.sent + back.sent, "outer": 2 * B * len(head_plan(H, G, places)[place]) * D * across}


def hybrid_memory(
    S: int,
    shape: tuple[int, int],
    H: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    lse_grad: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that a rank holds in messages and gathered tensors in hybrid attention, a ring outside.

    Gathered: the rows of the node, of the own heads; in the backward those of dout. In flight: the trades, and in the
    ring the k, v of two nodes. If the own heads need several calls, each is packed for its first hop, and keeps what
    came last. The backward of a call holds what ``costs.ring_memory`` says of a ring of nodes.

    >>> hybrid_memory(4096, (2, 4), 8, 8, 64), hybrid_memory(4096, (4, 2), 8, 8, 64)
    ({'in flight': 2359296, 'gathered': 1572864}, {'in flight': 2097152, 'gathered': 1572864})
    """
    nodes, places = shape
    node, place = divmod(rank, places)
    lengths = shard_lengths(S, nodes * places, layout)
    rows = [sum(lengths[n * places : (n + 1) * places]) for n in range(nodes)]
    inside = lengths[node * places : (node + 1) * places]
    there, back = _trades(inside, place, H, G, D, B=B, itemsize=itemsize, backward=backward, lse_grad=lse_grad)
    mine = head_plan(H, G, places)[place]
    todo, kept, moments = calls(mine), 0, [there.held]
    for q, g in todo:
        if backward:
            turned = rows[node:] + rows[:node]
            heads, groups = q.stop - q.start, g.stop - g.start
            of_call = backward_moments(turned, B, heads, groups, D, itemsize)
            moments += [kept + moment["in flight"] for moment in of_call]
            found, sent = max(itemsize, ACCUMULATED), travelling(itemsize, nodes)  # bytes of an element of dk, dv
            if groups == heads and not lse_grad:
                found = itemsize  # else summed over a group, or found by the reference kernel
            if nodes > 1 and found != sent:
                kept += 2 * B * groups * D * sent * rows[node]  # they are summed into the message that came
            continue
        per_row = 2 * B * (g.stop - g.start) * D * itemsize
        for step in range(nodes - 1):
            here = rows[(node - step) % nodes] if step or len(todo) > 1 else 0
            moments.append(kept + per_row * (here + rows[(node - step - 1) % nodes]))
        kept += per_row * rows[(node + 1) % nodes] if nodes > 1 else 0
    moments.append(kept + back.held)
    q, k = sum(len(heads) for heads, _ in mine), len(mine)
    row = q * (D * itemsize + max(itemsize, ACCUMULATED) * lse_grad) if backward else D * itemsize * (q + 2 * k)
    gathered = B * rows[node] * row if places > 1 else 0
    return _most(in_flight=max(moments), gathered=gathered)


# ---- Seconds --------------------------------------------------------------------------------------------------------


def ulysses_seconds(
    S: int,
    P: int,
    H: int,
    G: int,
    D: int,
    *,
    flops: float,
    bandwidth: float,
    latency: float = 0.0,
    B: int = 1,
    itemsize: int = 2,
) -> float:
    """Seconds of Ulysses attention: a trade, whole rows of the own heads, a trade back; nothing hides.

    >>> round(ulysses_seconds(4096, 4, 32, 8, 128, flops=600e12, bandwidth=250e9) * 1e6)
    178
    """
    call = dict(outer_bandwidth=bandwidth, bandwidth=bandwidth, flops=flops, latency=latency, B=B, itemsize=itemsize)
    return hybrid_seconds(S, (1, P), H, G, D, **call)


def hybrid_seconds(
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
    """Seconds of hybrid attention: the trades inside a node, and between them a ring of whole nodes' rows.

    bandwidth: of a rank's link inside its node.  outer_bandwidth: of its link to the next node.

    >>> links = dict(flops=600e12, bandwidth=250e9, outer_bandwidth=50e9)
    >>> round(hybrid_seconds(32768, (2, 4), 32, 8, 128, **links) * 1e6)
    3918
    """
    nodes, places = shape
    lengths = shard_lengths(S, nodes * places, contiguous)
    node = max(sum(lengths[n * places : (n + 1) * places]) for n in range(nodes))
    longest = [max(lengths)] * places
    trades = [_trades(longest, place, H, G, D, B=B, itemsize=itemsize) for place in range(places)]
    exposed = sum(max(t[i].sent for t in trades) / bandwidth + latency for i in (0, 1)) if places > 1 else 0.0
    rings = [
        sum(
            ring_seconds(
                node, nodes, q.stop - q.start, g.stop - g.start, D, flops=flops, bandwidth=outer_bandwidth,
                latency=latency, B=B, itemsize=itemsize,
            )
            for q, g in calls(mine)
        )
        for mine in head_plan(H, G, places)
    ]  # fmt: skip
    return exposed + max(rings)

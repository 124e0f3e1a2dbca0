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

>>> call = dict(S=4096, G=2, D=64, itemsize=2)
>>> all_gather_bytes(P=4, **call), ulysses_bytes(P=4, H=8, **call), double_ring_bytes(shape=(2, 2), **call)
(1572864, 2383872, {'inner': 1048576, 'outer': 524288})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..attention.ulysses import calls, head_plan
from ..layouts import Layout, contiguous
from .ring import ring_seconds
from .ring_moments import ACCUMULATED, backward_moments, ring_sent, shard_lengths, travelling


def _most(**components: int) -> dict[str, int]:
    return {name.replace("_", " "): nbytes for name, nbytes in components.items() if nbytes}


# ---- All-gather -----------------------------------------------------------------------------------------------------


def all_gather_bytes(
    S: int,
    P: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> int:
    """Bytes that one rank sends in all-gather attention, however many heads are gathered at once.

    Forward: the own k, v to P - 1 ranks. Backward: the same, and to each rank dk, dv of its keys.

    >>> all_gather_bytes(4096, 4, G=2, D=64), all_gather_bytes(4096, 4, G=2, D=64, backward=True)
    (1572864, 4718592)
    """
    own = shard_lengths(S, P, layout)[rank]
    sent = (P - 1) * own * itemsize
    if backward:
        sent += (S - own) * max(itemsize, ACCUMULATED)
    return 2 * B * G * D * sent


def all_gather_memory(
    S: int,
    P: int,
    G: int,
    D: int,
    *,
    heads_at_once: int | None = None,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that a rank holds in messages and gathered tensors in all-gather attention.

    In a turn of n key/value heads k, v of all S rows are gathered; meanwhile those of the next turn arrive. Some of the
    heads do not lie one behind the other, so the own ones are packed. Backward: also dk, dv of all rows leave and those
    of the own rows arrive from P - 1 ranks.

    >>> all_gather_memory(4096, 4, G=8, D=64), all_gather_memory(4096, 4, G=8, D=64, heads_at_once=1)
    ({'in flight': 6291456, 'gathered': 8388608}, {'in flight': 1048576, 'gathered': 1048576})
    """
    if P == 1:
        return {}
    own, n = shard_lengths(S, P, layout)[rank], heads_at_once or G
    turns = [min(n, G - g) for g in range(0, G, n)]
    gather = [2 * B * t * D * itemsize * (S if t < G else S - own) for t in turns]
    scatter = [2 * B * t * D * max(itemsize, ACCUMULATED) * ((P - 1) * own + S - own) for t in turns]
    moments = list(gather)
    if backward:
        moments += [arriving + leaving for arriving, leaving in zip([*gather[1:], 0], scatter, strict=True)]
    return _most(in_flight=max(moments), gathered=2 * B * turns[0] * D * itemsize * S)


# ---- Ring self-attention --------------------------------------------------------------------------------------------


def ring_self_attention_bytes(
    S: int,
    P: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> int:
    """Bytes that one rank sends in ring self-attention: k goes round, then v.

    Forward: P - 1 hops of each. Backward: P - 2 hops of each, and P - 1 of their gradients, on the way back.

    >>> ring_self_attention_bytes(4096, 4, G=2, D=64), ring_self_attention_bytes(4096, 4, G=2, D=64, backward=True)
    (1572864, 4194304)
    """
    gradient = max(itemsize, ACCUMULATED) if backward else None
    return 2 * B * G * D * ring_sent(shard_lengths(S, P, layout), rank, itemsize, gradient)


def ring_self_attention_memory(
    S: int,
    P: int,
    H: int,
    G: int,
    D: int,
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> dict[str, int]:
    """Bytes that a rank holds in messages and scores in ring self-attention.

    Its queries' scores with all S keys; in the backward the weights that they became, and their gradient.

    >>> [ring_self_attention_memory(4096, P, 8, 2, 64)["scores"] / 2**20 for P in (1, 2, 4)]
    [512.0, 256.0, 128.0]
    """
    a, lengths = max(itemsize, ACCUMULATED), shard_lengths(S, P, layout)

    def of(distance: int) -> int:
        return lengths[(rank + distance) % P]

    moments = [0]
    for step in range(P):
        if not backward and step < P - 1:  # while v goes round, the k that came last is kept
            moments.append(itemsize * (of(1) + (of(-step) if step else 0) + of(-step - 1)))
        if backward:
            here = itemsize * (of(1 + step) if 1 <= step <= P - 2 else 0)
            arriving = itemsize * (of(2 + step) if step < P - 2 else 0)
            moments.append(here + arriving + (a * of(1 + step) if step else 0))
            moments.append(here + arriving + (a * of(2 + step) if step < P - 1 else 0))
    scores = (2 if backward else 1) * B * H * of(0) * S * a
    return _most(in_flight=B * G * D * max(moments), scores=scores)


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


# ---- Seconds --------------------------------------------------------------------------------------------------------


def _products(rows: int, columns: int, heads: int, D: int, B: int) -> int:
    """Operations of scores and weighted values: a multiply-add counts as two."""
    return 4 * B * heads * D * rows * columns


def all_gather_seconds(
    S: int,
    P: int,
    H: int,
    G: int,
    D: int,
    *,
    flops: float,
    bandwidth: float,
    latency: float = 0.0,
    heads_at_once: int | None = None,
    B: int = 1,
    itemsize: int = 2,
) -> float:
    """Seconds of all-gather attention: the first heads are gathered in the open, the next while these are computed.

    >>> hardware = dict(flops=600e12, bandwidth=250e9)
    >>> [round(all_gather_seconds(4096, 4, 32, 8, 128, heads_at_once=n, **hardware) * 1e6) for n in (8, 1)]
    [165, 121]
    """
    s, n = max(shard_lengths(S, P, contiguous)), heads_at_once or G
    turns = [min(n, G - g) for g in range(0, G, n)]
    compute = [_products(s, S, t * H // G, D, B) / flops for t in turns]
    gather = [latency + 2 * B * t * D * itemsize * (P - 1) * s / bandwidth if P > 1 else 0.0 for t in turns]
    return gather[0] + sum(max(c, g) for c, g in zip(compute, [*gather[1:], 0.0], strict=True))


def ring_self_attention_seconds(
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
    """Seconds of ring self-attention: k goes round behind half of the products, then v behind the other half.

    >>> round(ring_self_attention_seconds(4096, 4, 32, 8, 128, flops=600e12, bandwidth=250e9) * 1e6)
    115
    """
    s = max(shard_lengths(S, P, contiguous))
    compute, message = _products(s, s, H, D, B) / 2 / flops, latency + B * G * s * D * itemsize / bandwidth
    return 2 * ((P - 1) * max(compute, message) + compute)


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

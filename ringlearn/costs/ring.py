"""Ring attention: what it sends and holds, how long it takes, and when a message hides behind compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

from ..attention.dilated.rows import configure, kept_rows
from ..attention.needed import Route
from ..attention.strategy import CALL_BYTES
from .one_device import ACCUMULATED, attention_flops
from .problem import Costs, Problem, formula, held

# ---- Bytes ----------------------------------------------------------------------------------------------------------


@formula("S P G D", "B itemsize backward rank layout mask")
def ring_bytes(p: Problem) -> int:
    """Bytes that one rank sends in one call of ring attention.

    Forward: the rank sends the k, v shards of P - 1 ranks. Backward: it begins with the k, v that arrived last, so
    there are P - 2 hops of k, v, and P - 1 hops of dk, dv in float32; with P = 2, where dk, dv are not sums yet, they
    are in the dtype of k. P = 1 sends nothing. Shards may differ by a token, so ranks may differ.

    mask: a hop carries only the rows that later ranks need, in either direction (attention/needed.py). The backward of
    such a ring sends the keys out again from their owners, except those that arrived last in the forward and were kept.
    After a single hop dk, dv are in the dtype of k.

    >>> ring_bytes(4096, 4, G=2, D=64, itemsize=4), ring_bytes(4096, 4, G=2, D=64, itemsize=4, backward=True)
    (3145728, 5242880)
    >>> import ringlearn as rl
    >>> ring_bytes(4096, 4, G=2, D=64, itemsize=4, mask=rl.causal & rl.sliding_window(257)) == 256 * 2 * 2 * 64 * 4
    True
    """
    return p.kv * routed(p, p.spec.route, p.rank)


@formula("S P G D", "B itemsize rank layout")
def published_backward_bytes(p: Problem) -> int:
    """Bytes that one rank sends in the backward of the published ring (course/published_ring.py).

    k, v make P - 1 hops, as in the forward, and dk, dv, in float32, make P hops, because they go home. (Its forward
    sends what ``ring_bytes`` says.)

    >>> published_backward_bytes(4096, 4, G=2, D=64, itemsize=4)
    7340032
    """
    if p.ranks == 1:
        return 0
    return p.kv * (p.itemsize * (p.S - p.lengths[(p.rank + 1) % p.ranks]) + p.accumulated * p.S)


@formula("S P G D segment_lengths dilation_rates", "B itemsize backward rank layout")
def dilated_bytes(p: Problem, segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> int:
    """Bytes that one rank sends in one call of dilated attention: as ``ring_bytes``, but only for kept rows.

    A row of a head travels once, however many configurations keep it. dk, dv travel in float32, even with P = 2.

    >>> dilated_bytes(4096, 4, 2, 64, [64], [1], itemsize=4) == ring_bytes(4096, 4, G=2, D=64, itemsize=4)
    True
    >>> dilated_bytes(4096, 4, 2, 64, [64], [4], itemsize=4) * 4 == ring_bytes(4096, 4, G=2, D=64, itemsize=4)
    True
    """
    configurations = configure("dilated_bytes", segment_lengths, dilation_rates)
    rows = [int(kept_rows(configurations, p.G, ranges).sum()) for ranges in p.layout.ranges(p.S, p.ranks)]
    return 2 * p.B * p.D * ring_sent(p, rows, p.rank, p.accumulated)


def dilated_pairs(S: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *, head: int = 0) -> int:
    """How many (query, key) pairs dilated attention scores for a key/value head without a mask; S * S without dilation.

    >>> dilated_pairs(4096, [4096], [1]) == 4096**2, dilated_pairs(4096, [512, 4096], [1, 8])
    (True, 2359296)
    """
    configurations = configure("dilated_pairs", segment_lengths, dilation_rates)
    return sum(len(rows) ** 2 for c in configurations for rows in c.kept(head, S))


def step_work(
    n: int, H: int, G: int, D: int, *, B: int = 1, itemsize: int = 2, causal: bool = False, backward: bool = False
) -> tuple[int, int]:
    """One step of a ring in which every rank holds n tokens: its operations, and the bytes it sends meanwhile.

    causal: a step of the zigzag layout, where half of the scores are visible, whichever shard is present (n / 2 more in
    the step with the rank's own shard). backward: k, v and float32 dk, dv travel, and there are five matrix products.
    (The first and the last hop of a backward carry only one of the two pairs, so both travel together only from P = 4.)

    >>> step_work(600, 32, 8, 128)
    (5898240000, 2457600)
    """
    operations = attention_flops(n, H, D, B=B, backward=backward) // (2 if causal else 1)
    per_number = itemsize + max(itemsize, ACCUMULATED) if backward else itemsize
    return operations, 2 * B * n * G * D * per_number


@formula("n P H G D", "flops bandwidth latency B itemsize awaited_first")
def ring_seconds(p: Problem, awaited_first: bool) -> float:
    """Seconds of a ring's forward without a mask, with n tokens on each of P ranks, on hardware that reaches its peak.

    There are P steps of computation, and P - 1 messages that hide behind the first P - 1 steps: each of these takes as
    long as the longer of the two. awaited_first: each message is awaited as soon as it is posted, so the two add up.

    >>> hardware = dict(flops=600e12, bandwidth=250e9)
    >>> round(ring_seconds(600, 4, 32, 8, 128, **hardware) * 1e6, 2)
    39.32
    """
    operations, nbytes = step_work(p.longest, p.H, p.G, p.D, B=p.B, itemsize=p.itemsize)
    compute, message = operations / p.flops, p.latency + nbytes / p.bandwidth
    return (p.ranks - 1) * (compute + message if awaited_first else max(compute, message)) + compute


@formula("S P H G D", "B itemsize backward rank layout")
def ring_memory(p: Problem) -> dict[str, int]:
    """Bytes that a rank holds at the fullest moment of ring attention, by component, as ``world.memory.peak(rank)``.

    This is for the ring of attention/ring.py with the CPU's fused kernel, whose score tile torch does not see. It is
    exact if every query sees every key and every shard holds at least two tokens (for a single query the kernel returns
    gradients with another memory layout, and a rank holds less); under a mask that hides keys it is an upper bound.

    Forward: a rank's own q, k, v; from step 1 on the k, v that it works on; and in all steps but the last those that
    arrive. Backward: also the k, v that arrived last, dout, out, lse, dq, and dk, dv: those of this step, those of the
    previous step that are being sent, packed into a message, and those that arrive. (k and v are adjacent in memory, as
    ``world.shard`` puts them; otherwise they are packed for the first hop, and step 0 of the forward holds one shard
    more.)

    >>> ring_memory(4096, 4, 8, 2, 64, itemsize=4)
    {'q': 2097152, 'k, v': 1048576, 'in flight': 2097152, 'partial results': 4325376}
    >>> [sum(ring_memory(4096, P, 8, 2, 64, itemsize=4).values()) / 2**20 for P in (1, 2, 4, 8)]
    [20.25, 16.25, 9.125, 4.5625]
    """
    lengths, own = p.lengths, p.lengths[p.rank]
    kept = own + (lengths[(p.rank + 1) % p.ranks] if p.backward and p.ranks > 1 else 0)
    fullest = max(ring_moments(p), key=lambda moment: sum(moment.values()))
    return held(q=p.B * p.H * own * p.D * p.itemsize) | held(**{"k, v": p.kv * p.itemsize * kept}, **fullest)


def hiding_threshold(
    H: int,
    G: int,
    *,
    flops: float,
    bandwidth: float,
    itemsize: int = 2,
    causal: bool = False,
    backward: bool = False,
    latency: float = 0.0,
    D: int | None = None,
    B: int = 1,
) -> float:
    """Tokens per rank from which a hop of the ring hides behind the attention that is computed meanwhile.

    A step computes 4 n^2 H D operations at ``flops`` per second; its message has 2 n G D itemsize bytes and moves at
    ``bandwidth`` bytes per second. They take equally long at n* = (itemsize / 2) (G / H) flops / bandwidth, whatever D
    is. Causal in a balanced layout: half the operations, so twice n*. Backward: 10 n^2 H D operations, and the message
    also has dk, dv in float32, 2 n G D (itemsize + 4) bytes in all: n* = (itemsize + 4) / 5 (G / H) flops / bandwidth.
    That is true of the steps in which both pairs travel; a ring of two or three ranks has none, and there a hop hides
    earlier. (Liu et al. 2023, section 3, for H = G and itemsize 2.)

    latency: seconds before the first byte arrives. With it the threshold depends on D and B too, and is the root of
    operations(n) / flops = latency + bytes(n) / bandwidth. Raises ValueError for a latency without D.

    >>> hiding_threshold(32, 8, flops=600e12, bandwidth=250e9)
    600.0
    >>> round(hiding_threshold(32, 8, flops=600e12, bandwidth=250e9, latency=10e-6, D=128))
    975
    """
    per_token = (itemsize + max(itemsize, ACCUMULATED)) / 5 if backward else itemsize / 2
    threshold = per_token * G / H * flops / bandwidth * (2 if causal else 1)
    if latency == 0:
        return threshold
    if D is None:
        raise ValueError("hiding_threshold: a latency makes the threshold depend on the head dim; pass it as D=...")
    per_square = attention_flops(1, H, D, B=B, backward=backward) / (2 if causal else 1)
    return threshold / 2 + sqrt((threshold / 2) ** 2 + latency * flops / per_square)


def ring_sent(p: Problem, rows: Sequence[int], place: int, gradient: int) -> int:
    """Bytes that go round a ring in one direction of a call, from one place in it, for each number of a row of k or v.

    Forward: the rows of all places but the next pass through it. Backward: it begins with the rows that came last, so
    their hops are one fewer, and those of their gradients one more.

    rows: of each place.  gradient: bytes of an element of dk, dv on their way.

    >>> there, back = (Problem(S=4, shape=(1, 4), H=1, G=1, D=1, itemsize=2, backward=b) for b in (False, True))
    >>> ring_sent(there, [1, 1, 1, 1], 0, gradient=4), ring_sent(back, [1, 1, 1, 1], 0, gradient=4)
    (6, 16)
    """
    P = len(rows)
    if not p.backward:
        return p.itemsize * sum(rows[(place - step) % P] for step in range(P - 1))
    passed_on = [rows[(place + 1 + step) % P] for step in range(P - 1)]  # whose rows are sent after which step
    return p.itemsize * sum(passed_on[:-1]) + gradient * sum(passed_on)


def routed(p: Problem, route: Route, place: int, kept: bool = True, wide: bool = False) -> int:
    """Bytes that one place in a ring sends for each number of a row of k or v, if a mask decides how far rows go.

    kept: whether what came last in the forward is at hand in the backward.  wide: dk, dv travel as sums at any rate.
    """
    hops, gradient = range(1, route.hops + 1), p.accumulated if wide else p.travelling(route.hops + 1)
    if not p.backward:
        return p.itemsize * sum(route.length(place - far + 1, far) for far in hops)
    if route.whole:  # they go back the way they came
        again = sum(route.length(place - far, far) for far in hops[1:]) + (not kept) * route.length(place, route.hops)
    else:
        again = sum(route.length(place, far) for far in hops[: -1 if kept and route.keeps else None]
                    if route.uses(place, far))  # fmt: skip
    return p.itemsize * again + gradient * sum(route.length(place - far, far) for far in hops)


# ---- Memory, moment by moment ---------------------------------------------------------------------------------------


def ring_moments(p: Problem, lengths: Sequence[int] = ()) -> Iterator[dict[str, int]]:
    """What a place in a ring holds besides its inputs, each time something new is added.

    lengths: the tokens of this place, of the next one, and so on round the ring; by default, those from rank on.
    """
    lengths = lengths or p.lengths[p.rank :] + p.lengths[: p.rank]
    if p.backward:
        yield from _backward_moments(p, lengths)
        return
    P, rows, D, e, a = len(lengths), p.B * p.H * lengths[0], p.D, p.itemsize, p.accumulated
    for step in range(P):
        flying = (lengths[-step] if step else 0) + (lengths[-step - 1] if step < P - 1 else 0)
        kv = p.kv * e * flying
        mine, to = e if step <= 1 else a, e if step == P - 1 else a  # bytes of an element of out, before and after
        so_far = rows * (D * mine + a) if step else 0
        # The kernel's result, and lse once more: it does not come contiguous.
        yield {"in flight": kv, "partial results": so_far, "scores": rows * (D * e + 2 * a)}
        if step:
            # The merge: two numbers a row at a time, then one, the weight, and outputs in another dtype.
            share = D * a * ((a > e) + (to < a) + (mine < a and to < a))
            merge = (D * to if mine != to else 0) + max(2 * a, a + share)
            yield {"in flight": kv, "partial results": so_far + rows * (D * e + a + merge)}


def _backward_moments(p: Problem, lengths: Sequence[int]) -> Iterator[dict[str, int]]:
    P, B, H, G, D, e, a = len(lengths), p.B, p.H, p.G, p.D, p.itemsize, p.accumulated
    rows, pair, t = B * H * lengths[0], p.kv, p.travelling(P)
    summed = a if G < H else e  # bytes of an element of dk, dv as the kernel returns them
    dq = message = 0  # the sum, and what travels of dk, dv

    def moment(flying: int, made: int, scores: int = 0) -> dict[str, int]:
        inputs = rows * (2 * D * e + a)
        return {"other inputs": inputs, "in flight": flying, "partial results": made, "scores": scores}

    for step in range(P):
        here, coming = lengths[(1 + step) % P], lengths[(2 + step) % P]
        kv = pair * e * ((here if 0 < step < P - 1 else 0) + (coming if step < P - 2 else 0))
        two = step == P - 1 and G > 1 and rows * D * e > CALL_BYTES
        first = 0  # of two calls: what the first has found
        for g in (G // 2, G - G // 2) if two else (G,):
            tile_q, found = rows * g // G * D * e, pair * g // G * summed * here
            heads = 2 * B * H * g // G * D * e * here  # dk, dv of all query heads, before they are summed over groups
            regrouped = max(tile_q if g > 1 else 0, found) if G < H else 0  # dq in the order of H heads; then dk, dv
            copied = 0  # of the inputs: some heads of several batches are not contiguous in memory
            if two and B > 1:
                regroup = 3 * tile_q + pair * g // G * e * here if 1 < g and G < H else 0
                copied = rows * g // G * a + regroup
            yield moment(kv + message, dq + first, copied + tile_q + heads + regrouped)
            if two and not first:
                first = found + (tile_q if P == 1 else 0)
            elif two:
                if P == 1:
                    yield moment(0, first + tile_q + found + rows * D * e)
                    dq, first = rows * D * e, first - (rows * D * e - tile_q)
                yield moment(message, dq + first + tile_q + found + pair * t * here)
        if step == 1 and P > 2 and e < a:  # the second result: from now on a sum
            yield moment(kv + message, dq + tile_q + found + rows * D * a)
        dq = rows * D * (a if step and P > 2 else e)
        own = two or summed == t  # whether the sum is what this rank has found, or what has come to it
        if not own and step == 0:
            yield moment(kv, dq + found + pair * t * here)
        if step < P - 1:
            message = pair * t * (here + coming)
            # As tensors too, until the next step makes its own, but for sums that have come and are sent as they are.
            yield moment(kv + message, dq + (pair * t * here if own or step == 0 else 0))


def busiest_messages(p: Problem) -> int:
    """How many messages the rank sends that sends most in a forward: those of its hops that are not empty."""
    route = p.spec.route
    if route.whole:
        return route.hops
    return max(
        sum(route.length(rank - far + 1, far) > 0 for far in range(1, route.hops + 1)) for rank in range(p.ranks)
    )


RING_COSTS = Costs(
    "ring",
    messages=busiest_messages,
    sent=lambda p: p.to_next(ring_bytes(p)),
    memory=lambda p: held(in_flight=max(moment["in flight"] for moment in ring_moments(p))),
    seconds=lambda p: ring_seconds(p.links_to_next),
)

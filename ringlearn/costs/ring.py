"""What attention costs, computed from shapes alone: operations, bytes, and when a message hides behind compute.

Counts are exact integers for one call; times are for an ideal machine that reaches its peak. Names: B batch, H query
heads, G key/value heads, S sequence length, D head dim, P ranks; ``itemsize`` is bytes per element (2 for bfloat16).

>>> attention_flops(S=4096, H=8, D=64, causal=True)
17184063488
>>> ring_bytes(S=4096, P=4, G=2, D=64, itemsize=4)
3145728
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from ..attention.dilated.rows import configure, kept_rows
from ..layouts import Layout, contiguous
from .ring_moments import ACCUMULATED, backward_moments, forward_moments, ring_sent, shard_lengths, travelling

# ---- One device: flash attention against the S x S matrix -----------------------------------------------------------


def attention_flops(S: int, H: int, D: int, *, B: int = 1, causal: bool = False, backward: bool = False) -> int:
    """Floating-point operations of the matrix products: two forward (scores, p v), five backward.

    A multiply-add counts as two. Backward makes the scores again and adds dp, dq, dk, dv (Dao 2023, "FlashAttention-2",
    section 4.1: 2.5 times forward). causal: only the S (S + 1) / 2 scores that are visible.

    >>> attention_flops(2, 1, 8), attention_flops(2, 1, 8, causal=True), attention_flops(2, 1, 8, backward=True)
    (128, 96, 320)
    """
    scores = S * (S + 1) // 2 if causal else S * S
    return (5 if backward else 2) * 2 * B * H * D * scores


def naive_traffic(S: int, H: int, G: int, D: int, *, B: int = 1, itemsize: int = 2) -> int:
    """Bytes between main memory and chip when each step of attention reads its inputs and writes its result.

    scores = q k^T: q, k in, scores out. p = softmax(scores): in, out. out = p v: p, v in, out out.
    (Dao et al. 2022, "FlashAttention", algorithm 0.)

    >>> naive_traffic(4, 1, 1, 8, itemsize=2)
    384
    """
    q = B * H * S * D
    kv = 2 * B * G * S * D
    scores = B * H * S * S
    return itemsize * (q + kv + q + 4 * scores)


def flash_traffic(
    S: int, H: int, G: int, D: int, *, block_q: int, block_k: int, B: int = 1, itemsize: int = 2, causal: bool = False
) -> int:
    """Bytes between main memory and chip of the tiled forward: one block of queries stays, all keys and values pass.

    Per query head: q is read once and out written once; k and v are read once for every block of queries, of which
    there are ceil(S / block_q); lse is written once, in float32. The heads of a group each read their k and v.
    block_k does not count: it decides how much lies on the chip, not how much passes. (Dao 2023, algorithm 1.)

    causal: tiles of which the mask hides everything are never built, and their k and v not read. A tile on the border
    is read whole, so here block_k counts a little.

    >>> flash_traffic(4, 1, 1, 8, block_q=2, block_k=2)
    400
    >>> flash_traffic(97, 4, 2, 16, block_q=32, block_k=16) == 4 * (2 * 97 * 16 * 2 + 4 * 2 * 97 * 16 * 2 + 97 * 4)
    True
    >>> flash_traffic(4, 1, 1, 8, block_q=2, block_k=2, causal=True)
    336
    """
    rows = 2 * S * D * itemsize + ACCUMULATED * S
    ends = [min(S, start + block_q) for start in range(0, S, block_q)]  # of the blocks of queries
    keys = sum(min(S, ceil(end / block_k) * block_k) if causal else S for end in ends)
    return B * H * (rows + keys * 2 * D * itemsize)


def tile_bytes(block_q: int, block_k: int, D: int, *, itemsize: int = 2) -> int:
    """Bytes that lie on the chip while the tiled forward computes a tile, for one query head.

    A block of q, one of k and one of v as they came; in float32 the tile's scores (the weights overwrite them), the
    running out, and two numbers a row for lse. The other half of the choice whose first half is flash_traffic.

    >>> tile_bytes(2, 3, 8)
    232
    """
    inputs = itemsize * D * (block_q + 2 * block_k)
    return inputs + ACCUMULATED * (block_q * block_k + block_q * D + 2 * block_q)


def saved_bytes(S: int, H: int, D: int, *, B: int = 1, itemsize: int = 2, naive: bool = False) -> int:
    """Bytes that the forward keeps for the backward besides q, k, v: out and lse; naively, the S x S weights.

    Per query row D numbers of out and a float32 lse, or S weights.

    >>> saved_bytes(1024, 1, 64), saved_bytes(1024, 1, 64, naive=True)
    (135168, 2097152)
    """
    return B * H * S * (S * itemsize if naive else D * itemsize + ACCUMULATED)


# ---- A ring: bytes sent, and when a hop hides -----------------------------------------------------------------------


def ring_bytes(
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
    """Bytes that one rank sends in one call of ring attention.

    Forward: the k, v shards of P - 1 ranks pass through it. Backward: it begins with the k, v that came last, so P - 2
    hops of k, v, and P - 1 of dk, dv, in float32; with P = 2, where what travels is no sum yet, in the dtype of k.
    P = 1 sends nothing. Shards may differ by a token, so ranks may differ.

    >>> ring_bytes(4096, 4, G=2, D=64, itemsize=4), ring_bytes(4096, 4, G=2, D=64, itemsize=4, backward=True)
    (3145728, 5242880)
    """
    gradient = travelling(itemsize, P) if backward else None
    return 2 * B * G * D * ring_sent(shard_lengths(S, P, layout), rank, itemsize, gradient)


def published_backward_bytes(
    S: int, P: int, G: int, D: int, *, B: int = 1, itemsize: int = 2, rank: int = 0, layout: Layout = contiguous
) -> int:
    """Bytes that one rank sends in the backward of the published ring, that of published_ring.py.

    k, v go round as in the forward, P - 1 hops, and dk, dv, in float32, make P, because they go home. (Its forward
    sends what ``ring_bytes`` says.)

    >>> published_backward_bytes(4096, 4, G=2, D=64, itemsize=4)
    7340032
    """
    if P == 1:
        return 0
    lengths = shard_lengths(S, P, layout)
    passed_on = [lengths[(rank - step) % P] for step in range(P)]
    return 2 * B * G * D * (itemsize * sum(passed_on[:-1]) + max(itemsize, ACCUMULATED) * sum(passed_on))


def dilated_bytes(
    S: int,
    P: int,
    G: int,
    D: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    B: int = 1,
    itemsize: int = 2,
    backward: bool = False,
    rank: int = 0,
    layout: Layout = contiguous,
) -> int:
    """Bytes that one rank sends in one call of dilated attention: as ``ring_bytes``, but of kept rows only.

    A row of a head travels once, however many configurations keep it. dk, dv travel in float32 at P = 2 too.

    >>> dilated_bytes(4096, 4, 2, 64, [64], [1], itemsize=4) == ring_bytes(4096, 4, G=2, D=64, itemsize=4)
    True
    >>> dilated_bytes(4096, 4, 2, 64, [64], [4], itemsize=4) * 4 == ring_bytes(4096, 4, G=2, D=64, itemsize=4)
    True
    """
    configurations = configure("dilated_bytes", segment_lengths, dilation_rates)
    rows = [int(kept_rows(configurations, G, ranges).sum()) for ranges in layout.ranges(S, P)]
    return 2 * B * D * ring_sent(rows, rank, itemsize, max(itemsize, ACCUMULATED) if backward else None)


def dilated_pairs(S: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *, head: int = 0) -> int:
    """How many (query, key) pairs dilated attention scores for a key/value head, without a mask; S * S if not dilated.

    >>> dilated_pairs(4096, [4096], [1]) == 4096**2, dilated_pairs(4096, [512, 4096], [1, 8])
    (True, 2359296)
    """
    configurations = configure("dilated_pairs", segment_lengths, dilation_rates)
    return sum(len(rows) ** 2 for c in configurations for rows in c.kept(head, S))


def intensity(rows: int, *, reuse: float = 1, itemsize: int = 2) -> float:
    """Operations per byte of keys and values, when a block of ``rows`` queries stays and all keys pass by.

    One key and its value: 2 D itemsize bytes, and 4 D operations with each row that uses them. reuse: how many query
    heads use the same read. In the tiled loop of one device, where each head reads its own, it is 1 and rows is
    block_q; in a ring it is H / G and rows is the shard's length s. What passes hides behind compute where this is
    at least FLOP/s over bytes/s (Williams et al. 2009, "Roofline", section 3).

    >>> intensity(128), intensity(600, reuse=32 / 8)
    (128.0, 2400.0)
    """
    return 2 * rows * reuse / itemsize


def step_work(
    s: int, H: int, G: int, D: int, *, B: int = 1, itemsize: int = 2, causal: bool = False, backward: bool = False
) -> tuple[int, int]:
    """One step of a ring in which every rank holds s tokens: its operations, and the bytes it sends meanwhile.

    causal: a step of the zigzag layout, where half of the scores are visible, whichever shard is there (the step with
    the own shard has s / 2 rows of them more). backward: k, v and float32 dk, dv; five matrix products. (The first
    and the last hop of a backward carry one of the two alone, so both travel together from P = 4 on.)

    >>> step_work(600, 32, 8, 128)
    (5898240000, 2457600)
    """
    operations = attention_flops(s, H, D, B=B, backward=backward) // (2 if causal else 1)
    per_number = itemsize + max(itemsize, ACCUMULATED) if backward else itemsize
    return operations, 2 * B * s * G * D * per_number


def ring_seconds(
    s: int,
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
    awaited_first: bool = False,
) -> float:
    """Seconds of a ring's forward without a mask, with s tokens on each of P ranks, on hardware that reaches its peak.

    P steps of compute, and P - 1 messages that hide behind the first P - 1 of them: each of these takes as long as the
    longer of the two. awaited_first: each message is awaited as soon as it is posted, so that the two add up.

    >>> hardware = dict(flops=600e12, bandwidth=250e9)
    >>> round(ring_seconds(600, 4, 32, 8, 128, **hardware) * 1e6, 2)
    39.32
    """
    operations, nbytes = step_work(s, H, G, D, B=B, itemsize=itemsize)
    compute, message = operations / flops, latency + nbytes / bandwidth
    return (P - 1) * (compute + message if awaited_first else max(compute, message)) + compute


def ring_memory(
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
    """Bytes that a rank holds at the fullest moment of ring attention, by component, as ``world.memory.peak(rank)``.

    For the ring of attention/ring.py above the CPU's fused kernel, whose score tile torch does not see. Exact where
    every query sees every key and every shard holds tokens; under a mask that hides keys it is the same or less.

    Forward: a rank's own q, k, v; from step 1 on the k, v that it works on; and in all steps but the last those that
    arrive. Backward: also the k, v that came last, dout, out, lse, dq, and dk, dv: those of this step, those that were
    sent on after the last one, packed into a message, and those that arrive. (k and v lie one behind
    the other, as ``world.shard`` puts them; from two places they are packed for the first hop, and step 0 of the
    forward holds one shard more.)

    >>> ring_memory(4096, 4, 8, 2, 64, itemsize=4)
    {'q': 2097152, 'k, v': 1048576, 'in flight': 2097152, 'partial results': 4497408}
    >>> [sum(ring_memory(4096, P, 8, 2, 64, itemsize=4).values()) / 2**20 for P in (1, 2, 4, 8)]
    [20.25, 16.578125, 9.2890625, 4.64453125]
    """
    lengths = shard_lengths(S, P, layout)
    lengths = lengths[rank:] + lengths[:rank]  # of rank, rank + 1, ...
    kept = 2 * B * G * D * itemsize * (lengths[0] + (lengths[1] if backward and P > 1 else 0))
    moments = (backward_moments if backward else forward_moments)(lengths, B, H, G, D, itemsize)
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    table = {"q": B * H * lengths[0] * D * itemsize, "k, v": kept, **fullest}
    return {name: nbytes for name, nbytes in table.items() if nbytes}


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

    Compute of a step: 4 s^2 H D operations at ``flops`` per second; its message: 2 s G D itemsize bytes at
    ``bandwidth`` bytes per second. They are equal at s* = (itemsize / 2) (G / H) flops / bandwidth, independent of D.
    Causal in a balanced layout: half the compute, so twice s*. Backward: 10 s^2 H D operations, and the message holds
    dk, dv in float32 too, 2 s G D (itemsize + 4) bytes: s* = (itemsize + 4) / 5 (G / H) flops / bandwidth. That holds
    in the steps in which both travel, which a ring of two or three ranks does not have: there a hop hides earlier.
    (Liu et al. 2023, section 3, for H = G and itemsize 2.)

    latency: seconds before the first byte arrives. With it the threshold depends on D and B too, and is the root of
    operations(s) / flops = latency + bytes(s) / bandwidth. Raises ValueError for a latency without D.

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
        raise ValueError("hiding_threshold: with a latency the threshold depends on the head dim too: say D=...")
    per_square = attention_flops(1, H, D, B=B, backward=backward) / (2 if causal else 1)
    return threshold / 2 + sqrt((threshold / 2) ** 2 + latency * flops / per_square)

"""What attention costs, computed from shapes alone: operations, bytes, and when a message hides behind compute.

Counts are exact integers for one call; times are for an ideal machine that reaches its peak. Names: B batch, H query
heads, G key/value heads, S sequence length, D head dim, P ranks; ``itemsize`` is bytes per element (2 for bfloat16).

>>> attention_flops(S=4096, H=8, D=64, causal=True)
17184063488
>>> ring_bytes(S=4096, P=4, G=2, D=64, itemsize=4)
3145728
"""

from __future__ import annotations

from math import ceil

from .layouts import Layout, contiguous, count

ACCUMULATED = 4  # bytes of an element of out, lse, dk, dv: float32


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


def flash_traffic(S: int, H: int, G: int, D: int, *, block_q: int, block_k: int, B: int = 1, itemsize: int = 2) -> int:
    """Bytes between main memory and chip of the tiled forward: one block of queries stays, all keys and values pass.

    Per query head: q is read once and out written once; k and v are read once for every block of queries, of which
    there are ceil(S / block_q); lse is written once, in float32. The heads of a group each read their k and v.
    block_k does not count: it decides how much lies on the chip, not how much passes. (Dao 2023, algorithm 1.)

    >>> flash_traffic(4, 1, 1, 8, block_q=2, block_k=2)
    400
    >>> flash_traffic(97, 4, 2, 16, block_q=32, block_k=16) == 4 * (2 * 97 * 16 * 2 + 4 * 2 * 97 * 16 * 2 + 97 * 4)
    True
    """
    rows = 2 * S * D * itemsize + ACCUMULATED * S
    passes = ceil(S / block_q) * 2 * S * D * itemsize
    return B * H * (rows + passes)


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

    Forward: the k, v shards of P - 1 ranks pass through it. Backward: the same once more, and dk, dv, which are float32
    and make P hops because they go home. P = 1 sends nothing. Shards may differ by a token, so ranks may differ.

    >>> ring_bytes(4096, 4, G=2, D=64, itemsize=4), ring_bytes(4096, 4, G=2, D=64, itemsize=4, backward=True)
    (3145728, 7340032)
    """
    if P == 1:
        return 0
    lengths = [count(ranges) for ranges in layout.ranges(S, P)]
    passed_on = [lengths[(rank - step) % P] for step in range(P)]  # whose shard is sent after which step
    sent = itemsize * sum(passed_on[:-1])
    if backward:
        sent += max(itemsize, ACCUMULATED) * sum(passed_on)
    return 2 * B * G * D * sent


def hiding_threshold(
    H: int, G: int, *, flops: float, bandwidth: float, itemsize: int = 2, causal: bool = False, backward: bool = False
) -> float:
    """Tokens per rank from which a hop of the ring hides behind the attention that is computed meanwhile.

    Compute of a step: 4 s^2 H D operations at ``flops`` per second; its message: 2 s G D itemsize bytes at
    ``bandwidth`` bytes per second. They are equal at s* = (itemsize / 2) (G / H) flops / bandwidth, independent of D.
    Causal in a balanced layout: half the compute, so twice s*. Backward: 10 s^2 H D operations, and the message holds
    dk, dv in float32 too, 2 s G D (itemsize + 4) bytes: s* = (itemsize + 4) / 5 (G / H) flops / bandwidth.
    (Liu et al. 2023, section 3, for H = G and itemsize 2.)

    >>> hiding_threshold(32, 8, flops=600e12, bandwidth=250e9)
    600.0
    """
    per_token = (itemsize + 4) / 5 if backward else itemsize / 2
    return per_token * G / H * flops / bandwidth * (2 if causal else 1)

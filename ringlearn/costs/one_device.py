"""Attention on one device: FLOPs, bytes moved between memory and chip, bytes kept for the backward."""

from __future__ import annotations

from math import ceil


def attention_flops(S: int, H: int, D: int, *, B: int = 1, causal: bool = False, backward: bool = False) -> int:
    """Floating-point operations of the matrix products: two in the forward (scores, p v), five in the backward.

    A multiply-add counts as two. The backward recomputes the scores and adds dp, dq, dk, dv (Dao 2023,
    "FlashAttention-2", section 4.1: 2.5 times the forward). causal: count only the S (S + 1) / 2 visible scores.

    >>> attention_flops(2, 1, 8), attention_flops(2, 1, 8, causal=True), attention_flops(2, 1, 8, backward=True)
    (128, 96, 320)
    """
    scores = S * (S + 1) // 2 if causal else S * S
    return (5 if backward else 2) * 2 * B * H * D * scores


def naive_traffic(S: int, H: int, G: int, D: int, *, B: int = 1, itemsize: int = 2) -> int:
    """Bytes between main memory and chip when each step of attention reads its inputs and writes its result.

    scores = q k^T reads q and k and writes the scores; p = softmax(scores) reads and writes S x S; out = p v reads p
    and v and writes out.
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
    """Bytes between main memory and chip in the tiled forward: a block of queries stays, all keys and values pass.

    Per query head: q is read once and out written once; k and v are read once for every block of queries, of which
    there are ceil(S / block_q); lse is written once, in float32. The heads of a group each read k and v again.
    block_k does not matter: it determines how much is on the chip, not how much passes. (Dao 2023, algorithm 1.)

    causal: tiles that the mask hides completely are skipped, and their k and v are not read. A tile on the border
    is read whole, so here block_k matters a little.

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

    A block each of q, k and v in their own dtype; in float32 the tile's scores (the weights overwrite them), the
    running out, and two numbers per row for lse. Together with flash_traffic this decides which tile to choose.

    >>> tile_bytes(2, 3, 8)
    232
    """
    inputs = itemsize * D * (block_q + 2 * block_k)
    return inputs + ACCUMULATED * (block_q * block_k + block_q * D + 2 * block_q)


def saved_bytes(S: int, H: int, D: int, *, B: int = 1, itemsize: int = 2, naive: bool = False) -> int:
    """Bytes that the forward keeps for the backward besides q, k, v: out and lse; naively, the S x S weights.

    For each query row these are D numbers of out and a float32 lse, or S weights.

    >>> saved_bytes(1024, 1, 64), saved_bytes(1024, 1, 64, naive=True)
    (135168, 2097152)
    """
    return B * H * S * (S * itemsize if naive else D * itemsize + ACCUMULATED)


def intensity(rows: int, *, reuse: float = 1, itemsize: int = 2) -> float:
    """Operations per byte of keys and values, when a block of ``rows`` queries stays and all keys pass by.

    A key and its value take 2 D itemsize bytes, and cause 4 D operations for each row that uses them. reuse: how many
    query heads use the same read. In the tiled loop of one device, where each head reads its own keys, reuse is 1 and
    rows is block_q; in a ring reuse is H / G and rows is n, the tokens of a rank. Moving the bytes hides behind
    computation if the result is at least FLOP/s divided by bytes/s (Williams et al. 2009, "Roofline", section 3).

    >>> intensity(128), intensity(600, reuse=32 / 8)
    (128.0, 2400.0)
    """
    return 2 * rows * reuse / itemsize


ACCUMULATED = 4  # bytes of an element of out, lse, dk, dv: float32

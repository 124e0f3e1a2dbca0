"""Ring self-attention, scores first: what it sends, what it holds, and how long it takes.

Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective".
"""

from __future__ import annotations

from ..layouts import Layout, contiguous
from .one_device import ACCUMULATED
from .ring import _most, _products, ring_sent, shard_lengths


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

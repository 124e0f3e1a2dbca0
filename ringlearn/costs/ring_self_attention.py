"""Ring self-attention, scores first: what it sends, what it holds, and how long it takes.

Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective".
"""

from __future__ import annotations

from .problem import Costs, Problem, formula, held
from .ring import busiest_messages, routed


@formula("S P G D", "B itemsize backward rank layout mask")
def ring_self_attention_bytes(p: Problem) -> int:
    """Bytes that one rank sends in ring self-attention: k goes round, then v.

    Forward: P - 1 hops of each. Backward: P - 2 hops of each, and P - 1 of their gradients, on the way back.
    mask: as in ``ring_bytes``.

    >>> ring_self_attention_bytes(4096, 4, G=2, D=64), ring_self_attention_bytes(4096, 4, G=2, D=64, backward=True)
    (1572864, 4194304)
    """
    return p.kv * routed(p, p.spec.route, p.rank, wide=True)


@formula("S P H G D", "B itemsize backward rank layout")
def ring_self_attention_memory(p: Problem) -> dict[str, int]:
    """Bytes that a rank holds in messages and scores in ring self-attention.

    The scores of its queries with all S keys; in the backward the weights computed from them, and their gradient.

    >>> [ring_self_attention_memory(4096, P, 8, 2, 64)["scores"] / 2**20 for P in (1, 2, 4)]
    [512.0, 256.0, 128.0]
    """
    P, e, a, lengths = p.ranks, p.itemsize, p.accumulated, p.lengths

    def of(distance: int) -> int:
        return lengths[(p.rank + distance) % P]

    moments = [0]
    for step in range(P):
        if not p.backward and step < P - 1:  # while v goes round, the k that came last is kept
            moments.append(e * (of(1) + (of(-step) if step else 0) + of(-step - 1)))
        if p.backward:
            here = e * (of(1 + step) if 1 <= step <= P - 2 else 0)
            arriving = e * (of(2 + step) if step < P - 2 else 0)
            moments.append(here + arriving + (a * of(1 + step) if step else 0))
            moments.append(here + arriving + (a * of(2 + step) if step < P - 1 else 0))
    scores = (2 if p.backward else 1) * p.B * p.H * of(0) * p.S * a
    return held(in_flight=p.B * p.G * p.D * max(moments), scores=scores)


@formula("S P H G D", "flops bandwidth latency B itemsize")
def ring_self_attention_seconds(p: Problem) -> float:
    """Seconds of ring self-attention: k goes round behind half of the products, then v behind the other half.

    >>> round(ring_self_attention_seconds(4096, 4, 32, 8, 128, flops=600e12, bandwidth=250e9) * 1e6)
    115
    """
    s = p.longest
    compute = p.products(s, s, p.H) / 2 / p.flops
    message = p.latency + p.B * p.G * s * p.D * p.itemsize / p.bandwidth
    return 2 * ((p.ranks - 1) * max(compute, message) + compute)


RING_SELF_ATTENTION_COSTS = Costs(
    "ring self-attention",
    messages=lambda p: 2 * busiest_messages(p),
    sent=lambda p: p.to_next(ring_self_attention_bytes(p)),
    memory=ring_self_attention_memory,
    seconds=lambda p: ring_self_attention_seconds(p.links_to_next),
)

"""Decoding and prefill over a cache that is shared out: bytes and seconds of a step, and what should travel.

new, cached: tokens of a sequence. The new ones are split as ``layout`` says, those in the cache by blocks of
``interleave``. accumulated: bytes per element of partial results, 4, or 8 for float64.
"""

from __future__ import annotations

from ..layouts import count
from .problem import Problem, formula


def decode_bytes(
    P: int, H: int, D: int, *, n: int = 1, B: int = 1, exchange: str = "all-gather", rank: int = 0, accumulated: int = 4
) -> int:
    """Bytes that one rank sends in ``decode_attention``: independent of the length of the sequence.

    All-gather: its partial result to P - 1 ranks. Tree: one message up, unless it is rank 0, and one down to each rank
    that has sent it one.

    >>> decode_bytes(8, 32, 128), [decode_bytes(8, 32, 128, exchange="tree", rank=r) for r in (0, 1, 4)]
    (115584, [49536, 16512, 49536])
    """
    message = B * H * n * (D + 1) * accumulated
    if exchange == "all-gather":
        return (P - 1) * message
    distances = [2**hop for hop in range((P - 1).bit_length())]
    below = sum(rank % (2 * distance) == 0 and rank + distance < P for distance in distances)
    return (below + (rank > 0)) * message


def exchange_hops(P: int, exchange: str = "all-gather") -> int:
    """How many messages follow each other until every rank has the result: each of them waits for a latency.

    In a tree, the longest way up is that of a rank with many ones in its binary digits: rank 7 = 111 has three hops.

    >>> [(exchange_hops(P), exchange_hops(P, "tree")) for P in (1, 2, 7, 8, 9)]
    [(0, 0), (1, 2), (1, 4), (1, 6), (1, 6)]
    """
    if exchange == "all-gather":
        return int(P > 1)
    return 2 * (P.bit_length() - 1)


@formula("S P H G D", "read bandwidth latency n B itemsize exchange interleave accumulated")
def decode_seconds(
    p: Problem, read: float, n: int, exchange: str, interleave: int, accumulated: int
) -> dict[str, float]:
    """Seconds of one ``decode_attention`` of n queries in each of B sequences with S cached tokens, by component.

    read: bytes per second of a rank's own memory.  bandwidth, latency: of its link to the others. "keys and values" is
    what the rank with the most tokens takes to read them once; "exchange" is that of the partial results. They follow
    each other, because nothing can be sent before it is computed. Arithmetic is left out: it takes less time than
    reading as long as 2 n H / (G itemsize) is below the operations per byte of the GPU.

    >>> gpu = dict(read=4.28e12, bandwidth=288e9, latency=21e-6)
    >>> for P in (1, 2, 8):
    ...     found = decode_seconds(1_000_000, P, 32, 8, 128, **gpu)
    ...     print({name: round(1e6 * seconds) for name, seconds in found.items()})
    {'keys and values': 957, 'exchange': 0}
    {'keys and values': 479, 'exchange': 21}
    {'keys and values': 120, 'exchange': 21}
    """
    turn = p.ranks * interleave
    most = p.S // turn * interleave + min(interleave, p.S % turn)  # of rank 0, which no rank exceeds
    message = p.B * p.H * n * (p.D + 1) * accumulated
    hops = exchange_hops(p.ranks, exchange)
    on_the_link = (p.ranks - 1) * message if exchange == "all-gather" else hops * message
    return {
        "keys and values": p.kv * p.itemsize * most / read,
        "exchange": hops * p.latency + on_the_link / p.bandwidth,
    }


def tokens_to_shard(
    P: int, H: int, G: int, D: int, *, read: float, bandwidth: float, latency: float, B: int = 1, itemsize: int = 2
) -> float:
    """From how many cached tokens of each of B sequences on P ranks read their shares faster than one reads them all.

    >>> round(tokens_to_shard(2, 32, 8, 128, read=4.28e12, bandwidth=288e9, latency=21e-6), -2)
    44000.0
    """
    each = 2 * B * G * D * itemsize / read
    fixed = decode_seconds(0, P, H, G, D, read=read, bandwidth=bandwidth, latency=latency, B=B, itemsize=itemsize)[
        "exchange"
    ]
    return fixed / (each * (1 - 1 / P))


@formula("new cached P G D", "B itemsize layout interleave rank")
def pass_kv_bytes(p: Problem, new: int, cached: int, interleave: int) -> int:
    """Bytes that one rank sends if keys and values go round, cached and new: those of P - 1 ranks pass through it.

    >>> pass_kv_bytes(1024, 4096, 4, G=2, D=64)
    1966080
    """
    P, turn = p.ranks, p.ranks * interleave
    fresh = [count(ranges) for ranges in p.layout.ranges(new, P)]
    held = [cached // turn * interleave + max(0, min(interleave, cached % turn - r * interleave)) for r in range(P)]
    passing = ((p.rank - step) % P for step in range(P - 1))
    return p.kv * p.itemsize * sum(fresh[r] + held[r] for r in passing)


@formula("new P H D", "B itemsize layout rank accumulated")
def pass_q_bytes(p: Problem, new: int, accumulated: int) -> int:
    """Bytes that one rank sends if queries go round: those of P - 1 ranks, and then (out, lse) home to each of them.

    Whatever is cached.

    >>> pass_q_bytes(1024, 4, H=8, D=64)
    2383872
    """
    fresh = [count(ranges) for ranges in p.layout.ranges(new, p.ranks)]
    queries = p.D * p.itemsize * sum(fresh[(p.rank - step) % p.ranks] for step in range(p.ranks - 1))
    return p.B * p.H * (queries + (p.D + 1) * accumulated * (new - fresh[p.rank]))


@formula("new cached P H G D", "flops bandwidth latency B itemsize accumulated")
def waiting_seconds(p: Problem, new: int, cached: int, accumulated: int) -> dict[str, float]:
    """Seconds of messages that do not hide behind attention, if keys and values travel, and if queries do.

    A hop hides behind the attention of a step, 4 B H D (new / P) ((new + cached) / P) operations; the way home of
    pass-Q's results hides behind nothing. (Both kinds compute the same, so nothing else decides.)
    latency: seconds that each message takes in addition to its bytes; in each step pass-KV has one hop for the new keys
    and one for the cached keys.

    Source: Yang et al. 2024, "Context Parallelism for Scalable Million-Token Inference", equations 2 to 4; there
    results travel in the dtype of the queries, and messages have no latency.

    >>> model = dict(P=4, H=128, G=8, D=128, flops=510e12, bandwidth=26e9)
    >>> for new in (1280, 12800):
    ...     print({name: round(1e6 * s) for name, s in waiting_seconds(new, 128_000 - new, **model).items()})
    {'pass-kv': 11176, 'pass-q': 2439}
    {'pass-kv': 0, 'pass-q': 24387}
    """
    P, D, rows = p.ranks, p.D, p.B * p.H * new
    step = p.products(new, new + cached, p.H) / P**2 / p.flops
    kv = p.kv * p.itemsize * (new + cached) / P / p.bandwidth + p.latency * (1 + (cached > 0))
    q = rows * D * p.itemsize / P / p.bandwidth + p.latency
    home = rows * (D + 1) * accumulated / P / p.bandwidth
    home_at_all = p.latency if P > 1 else 0.0
    return {
        "pass-kv": (P - 1) * max(0.0, kv - step),
        "pass-q": (P - 1) * (max(0.0, q - step) + home) + home_at_all,
    }


def prefill_seconds(
    new: int, cached: int, P: int, H: int, G: int, D: int, *, flops: float, host: float = 0.0, B: int = 1, **link: float
) -> dict[str, float]:
    """Seconds of a prefill, if keys and values travel and if queries travel.

    It is the time of the devices (attention and waiting) or that of the host, whichever is longer.
    host: seconds that the host needs to start the kernels and messages of a call.  link: bandwidth, latency and the
    other arguments of ``waiting_seconds``.

    >>> gpus = dict(P=2, H=32, G=8, D=128, flops=600e12, bandwidth=250e9, latency=10e-6, host=2e-3)
    >>> for cached in (32_768, 524_288):
    ...     print({name: round(1e6 * s) for name, s in prefill_seconds(256, cached, **gpus).items()})
    {'pass-kv': 2000, 'pass-q': 2000}
    {'pass-kv': 5234, 'pass-q': 2000}
    """
    waits = waiting_seconds(new, cached, P, H, G, D, flops=flops, B=B, **link)
    attention = 4 * B * H * D * new * (new + cached) / P / flops
    return {name: max(host, attention + wait) for name, wait in waits.items()}


def published_rule(
    new: int, cached: int, P: int, H: int, G: int, *, flops: float, bandwidth: float, itemsize: int = 2
) -> str:
    """What the published heuristic lets travel: "pass-kv" if its hops hide or are the shorter ones, else "pass-q".

    new >= P flops G itemsize / (2 H bandwidth)   or   new / (new + cached) >= 2 G / H

    It leaves out the way home of pass-Q's results, which ``waiting_seconds`` counts.

    Source: Yang et al. 2024, "Context Parallelism for Scalable Million-Token Inference", algorithm 1.

    >>> model = dict(P=4, H=128, G=8, flops=510e12, bandwidth=26e9)
    >>> [published_rule(new, 128_000 - new, **model) for new in (1280, 4800, 5000)]
    ['pass-q', 'pass-q', 'pass-kv']
    """
    hides = new >= P * flops * G * itemsize / (2 * H * bandwidth)
    return "pass-kv" if hides or new * H >= 2 * G * (new + cached) else "pass-q"

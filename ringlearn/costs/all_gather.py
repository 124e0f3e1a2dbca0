"""All-gather of keys and values: what it sends, what it holds, and how long it takes."""

from __future__ import annotations

from ..layouts import Layout, contiguous
from .one_device import ACCUMULATED
from .ring import _most, _products, shard_lengths


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

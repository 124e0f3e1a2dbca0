"""All-gather of keys and values: what it sends, what it holds, and how long it takes."""

from __future__ import annotations

from .problem import Costs, Problem, formula, held


@formula("S P G D", "B itemsize backward rank layout")
def all_gather_bytes(p: Problem) -> int:
    """Bytes that one rank sends in all-gather attention, however many heads are gathered at once.

    Forward: the rank's own k, v, sent to P - 1 ranks. Backward: the same, and dk, dv of each other rank's keys, sent to
    it.

    >>> all_gather_bytes(4096, 4, G=2, D=64), all_gather_bytes(4096, 4, G=2, D=64, backward=True)
    (1572864, 4718592)
    """
    own = p.lengths[p.rank]
    sent = (p.ranks - 1) * own * p.itemsize
    if p.backward:
        sent += (p.S - own) * p.accumulated
    return p.kv * sent


@formula("S P G D", "B itemsize backward rank layout heads_at_once")
def all_gather_memory(p: Problem, heads_at_once: int | None) -> dict[str, int]:
    """Bytes that a rank holds in messages and gathered tensors in all-gather attention.

    In each turn, k and v of some heads are gathered for all S rows, while those of the next turn arrive. When the heads
    are taken in turns they are not contiguous in memory, so the rank's own k and v are packed. Backward: dk and dv of
    all rows are sent as well, and those of the rank's own rows arrive from P - 1 ranks.

    >>> all_gather_memory(4096, 4, G=8, D=64), all_gather_memory(4096, 4, G=8, D=64, heads_at_once=1)
    ({'in flight': 6291456, 'gathered': 8388608}, {'in flight': 1048576, 'gathered': 1048576})
    """
    if p.ranks == 1:
        return {}
    own, turns = p.lengths[p.rank], _turns(p, heads_at_once)
    row = 2 * p.B * p.D  # numbers of a token's k and v, for a head
    gather = [row * n * p.itemsize * (p.S if n < p.G else p.S - own) for n in turns]
    scatter = [row * n * p.accumulated * ((p.ranks - 1) * own + p.S - own) for n in turns]
    moments = list(gather)
    if p.backward:
        moments += [arriving + leaving for arriving, leaving in zip([*gather[1:], 0], scatter, strict=True)]
    return held(in_flight=max(moments), gathered=row * turns[0] * p.itemsize * p.S)


@formula("S P H G D", "flops bandwidth latency B itemsize heads_at_once")
def all_gather_seconds(p: Problem, heads_at_once: int | None) -> float:
    """Seconds of all-gather attention: the first gather is exposed, the others hide behind computation.

    >>> hardware = dict(flops=600e12, bandwidth=250e9)
    >>> [round(all_gather_seconds(4096, 4, 32, 8, 128, heads_at_once=n, **hardware) * 1e6) for n in (8, 1)]
    [165, 121]
    """
    s, turns = p.longest, _turns(p, heads_at_once)
    compute = [p.products(s, p.S, n * p.H // p.G) / p.flops for n in turns]
    nbytes = [2 * p.B * n * p.D * p.itemsize * (p.ranks - 1) * s for n in turns]
    gather = [p.latency + n / p.bandwidth if p.ranks > 1 else 0.0 for n in nbytes]
    return gather[0] + sum(max(c, g) for c, g in zip(compute, [*gather[1:], 0.0], strict=True))


def _turns(p: Problem, heads_at_once: int | None) -> list[int]:
    """How many key/value heads are gathered in each turn."""
    n = heads_at_once or p.G
    return [min(n, p.G - g) for g in range(0, p.G, n)]


def _costs(name: str, heads_at_once: int | None) -> Costs:
    return Costs(
        name,
        messages=lambda p: (p.ranks - 1) * len(_turns(p, heads_at_once)),
        sent=lambda p: p.to_all(all_gather_bytes(p)),
        memory=lambda p: all_gather_memory(p, heads_at_once=heads_at_once),
        seconds=lambda p: all_gather_seconds(p.links_to_all, heads_at_once=heads_at_once),
    )


ALL_GATHER_COSTS = (_costs("all-gather", None), _costs("all-gather, 1 head at once", 1))

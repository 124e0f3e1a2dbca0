"""Parts of the formulas of costs.py and costs.py: what a ring sends, and what it holds moment by moment.

``lengths`` are the rows that each rank holds; bytes are exact integers. Names are those of costs.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..attention.spec import CALL_BYTES
from ..layouts import Layout, count

ACCUMULATED = 4  # bytes of an element of out, lse, dk, dv: float32


def shard_lengths(S: int, P: int, layout: Layout) -> list[int]:
    """How many tokens each rank holds.

    >>> from ringlearn import contiguous
    >>> shard_lengths(10, 4, contiguous)
    [2, 3, 2, 3]
    """
    return [count(ranges) for ranges in layout.ranges(S, P)]


def travelling(itemsize: int, P: int) -> int:
    """Bytes of an element of dk, dv on their way: between two ranks they hold what one of them has found."""
    return itemsize if P <= 2 else max(itemsize, ACCUMULATED)


def ring_sent(lengths: Sequence[int], rank: int, itemsize: int, gradient: int | None = None) -> int:
    """Bytes that a rank sends in a ring for each number of a row of k or v: forward, or backward if gradient is given.

    Forward: the rows of P - 1 ranks pass through it. Backward: it begins with the rows that came last, so P - 2 hops of
    them, and P - 1 of their gradients.  gradient: bytes of an element of dk, dv on their way.

    >>> ring_sent([1, 1, 1, 1], 0, 2), ring_sent([1, 1, 1, 1], 0, 2, gradient=4)
    (6, 16)
    """
    P = len(lengths)
    if gradient is None:
        return itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    passed_on = [lengths[(rank + 1 + step) % P] for step in range(P - 1)]  # whose rows are sent after which step
    return itemsize * sum(passed_on[:-1]) + gradient * sum(passed_on)


def forward_moments(lengths: list[int], B: int, H: int, G: int, D: int, e: int) -> Iterator[dict[str, int]]:
    """What a rank holds beside its inputs whenever something new comes to it. lengths: of rank, rank + 1, ..."""
    P, rows, a = len(lengths), B * H * lengths[0], max(e, ACCUMULATED)
    for step in range(P):
        flying = (lengths[-step] if step else 0) + (lengths[-step - 1] if step < P - 1 else 0)
        kv = 2 * B * G * D * e * flying
        mine, to = e if step <= 1 else a, e if step == P - 1 else a  # bytes of an element of out, before and after
        so_far = rows * (D * mine + a) if step else 0
        # The kernel's result, and lse once more: it does not come contiguous.
        yield {"in flight": kv, "partial results": so_far, "scores": rows * (D * e + 2 * a)}
        if step:
            # What merges with it: 7 numbers and a bool a row, then 3 numbers and outputs in another dtype.
            share = D * a * ((a > e) + (to < a) + (mine < a and to < a))
            merge = (D * to if mine != to else 0) + max(7 * a + 1, 3 * a + share)
            yield {"in flight": kv, "partial results": so_far + rows * (D * e + a + merge)}


def backward_moments(lengths: list[int], B: int, H: int, G: int, D: int, e: int) -> Iterator[dict[str, int]]:
    """The same in the backward."""
    P, rows, a, t = len(lengths), B * H * lengths[0], max(e, ACCUMULATED), travelling(e, len(lengths))
    summed = a if G < H else e  # bytes of an element of dk, dv as the kernel returns them
    pair = 2 * B * G * D  # numbers of a token's k, v, or dk, dv
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
            copied = 0  # of the inputs: some heads of several batches do not lie one behind the other
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

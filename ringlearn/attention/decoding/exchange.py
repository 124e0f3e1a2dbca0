"""How ranks make one result of the partial results that each has for the same queries: one exchange of (out, lse).

However long the sequence, a rank sends B * H * n * (D_v + 1) numbers at a time. Every rank must end with the same bits:
the next token is computed from them on every rank, and ranks that differ in the last one choose different tokens some
day, after which they decode different texts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...partial import Partial, merge, merge_all
from ...worlds.comm import Comm


async def all_gather(comm: Comm, mine: Partial) -> Partial:
    """Every rank gets all partial results and merges them in rank order: one hop, P - 1 messages to each rank.

    The same bits everywhere, because all ranks do the same arithmetic in the same order. Of two ranks each has one
    neighbour, so this is a hop of a ring, which GPUs of one host send without NCCL: it can be captured as a CUDA graph.
    """
    if comm.size == 1:
        return mine
    shapes = tuple(tuple(t.shape) for t in mine)
    received = await comm.exchange(
        dict.fromkeys(range(comm.size), tuple(mine)),  # one message that all get
        dict.fromkeys(range(comm.size), shapes),
        name="gather partial results",
        hop=int(comm.size == 2),
    )
    return merge_all(Partial(*received[rank]) for rank in range(comm.size))


async def tree(comm: Comm, mine: Partial) -> Partial:
    """Partial results merge pairwise on their way to rank 0, and the result goes back the way they came.

    At most ceil(log2 P) hops each way, 2 (P - 1) messages in all. The same bits everywhere, because rank 0 alone has
    the last word. (If the ranks of a pair both merged what they swap, they would have to agree on which comes first.)
    """
    rank, shapes = comm.rank, tuple(tuple(t.shape) for t in mine)
    distances = [2**hop for hop in range((comm.size - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            await comm.exchange({rank - distance: tuple(mine)}, {}, name="to rank 0")
        elif rank % (2 * distance) == 0 and rank + distance < comm.size:
            other = rank + distance
            received = await comm.exchange({}, {other: shapes}, dtype=mine.lse.dtype, name="to rank 0")
            mine = merge(mine, Partial(*received[other]))
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            other = rank - distance
            received = await comm.exchange({}, {other: shapes}, dtype=mine.lse.dtype, name="back from rank 0")
            mine = Partial(*received[other])
        elif rank % (2 * distance) == 0 and rank + distance < comm.size:
            await comm.exchange({rank + distance: tuple(mine)}, {}, name="back from rank 0")
    return mine


EXCHANGES: dict[str, Callable[[Comm, Partial], Awaitable[Partial]]] = {"all-gather": all_gather, "tree": tree}

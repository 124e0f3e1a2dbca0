"""All strategies for one attention call, side by side: messages, bytes, memory and seconds, from shapes alone.

Messages and bytes are those of the rank that sends most, and memory is that of the rank that holds most: packed
messages, receive buffers, gathered rows, and rows of scores where a strategy keeps them. Each of these is counted at
its own fullest moment, so their sum is an upper bound. Seconds are of a forward without a mask, on hardware that
reaches its peak.

Ranks belong to nodes. Each rank has two links: one to the ranks of its node, and one, usually slower, to other nodes.
Strategies that do not distinguish nodes send over the slow links whatever happens to be addressed to another node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..attention.table import STRATEGIES
from .problem import Bytes, Problem


@dataclass(frozen=True)
class Row:
    """What a strategy costs.

    sent, sent_backward: bytes inside the node and across.  memory, memory_backward: bytes by component.  seconds: of
    the forward; compute: the part of them that the rank with the most heads and tokens spends computing.  busy: how
    many ranks compute anything.
    """

    name: str
    messages: int
    sent: Bytes
    sent_backward: Bytes
    memory: dict[str, int]
    memory_backward: dict[str, int]
    seconds: float
    compute: float
    busy: int

    @property
    def exposed(self) -> float:
        """The fraction of the time in which messages are not hidden behind computation."""
        return max(0.0, self.seconds - self.compute) / self.seconds if self.seconds else 0.0

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())

    @property
    def total_memory_backward(self) -> int:
        return sum(self.memory_backward.values())


def compare(problem: Problem) -> list[Row]:
    """A row for each strategy, in the order of notebook 08.

    >>> rows = compare(Problem(S=4096, shape=(1, 4), H=8, G=2, D=64))
    >>> {row.name: row.sent["inner"] for row in rows if row.name in ("all-gather", "ring", "ulysses")}
    {'all-gather': 1572864, 'ring': 1572864, 'ulysses': 2383872}
    """
    P = problem.ranks
    some = range(P) if P <= 8 else (0, 1, P // 2, P - 1)  # the longest shard and the most heads are among them

    def most(found: Callable[[Problem], Mapping[str, int]], backward: bool) -> dict[str, int]:
        ranks = (replace(problem, rank=rank, backward=backward) for rank in some)
        return max((dict(found(rank)) for rank in ranks), key=lambda table: sum(table.values()))

    return [
        Row(
            costs.name,
            costs.messages(problem),
            *(most(found, backward) for found in (costs.sent, costs.memory) for backward in (False, True)),
            seconds=costs.seconds(problem),
            compute=costs.seconds(problem.without_messages),
            busy=costs.busy(problem),
        )
        for strategy in STRATEGIES.values()
        for costs in strategy.costs
    ]

"""All ways to split one attention call, side by side: messages, bytes, memory and seconds, from shapes alone.

Messages and bytes are those of the rank that sends most, and memory that of the rank that holds most: packed messages,
arriving buffers and gathered rows, and rows of scores where a way keeps them. Each of these counts at its own fullest
moment, so a sum of them is a bound. A forward without a mask, seconds on hardware that reaches its peak.

Ranks lie in nodes. A link to a rank of the own node has one bandwidth, one to another node a lower one; every rank has
both. Ways that know nothing of nodes send across them what happens to go there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..attention.table import STRATEGIES
from .problem import Bytes, Costs, Problem


@dataclass(frozen=True)
class Row:
    """What a way costs.

    sent, sent_backward: bytes inside the node and across.  memory, memory_backward: by component.  seconds: of the
    forward, and compute: how many of them the rank with the most heads and tokens computes.  busy: ranks that compute
    anything.
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
        """The part of the time in which messages do not hide behind computing."""
        return max(0.0, self.seconds - self.compute) / self.seconds if self.seconds else 0.0

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())

    @property
    def total_memory_backward(self) -> int:
        return sum(self.memory_backward.values())


def compare(problem: Problem) -> list[Row]:
    """A row for each way, in the order of the notebook on them.

    >>> rows = compare(Problem(S=4096, shape=(1, 4), H=8, G=2, D=64))
    >>> {row.name: row.sent["inner"] for row in rows if row.name in ("all-gather", "ring", "ulysses")}
    {'all-gather': 1572864, 'ring': 1572864, 'ulysses': 2383872}
    """
    return [_row(costs, problem) for strategy in STRATEGIES.values() for costs in strategy.costs]


def _row(costs: Costs, problem: Problem) -> Row:
    two_ways = [replace(problem, backward=backward) for backward in (False, True)]
    return Row(
        costs.name,
        costs.messages(problem),
        *(_of_the_rank_with_most(costs.sent, one) for one in two_ways),
        *(_of_the_rank_with_most(costs.memory, one) for one in two_ways),
        seconds=costs.seconds(problem),
        compute=costs.seconds(problem.without_messages),
        busy=costs.busy(problem),
    )


def _of_the_rank_with_most(found: Callable[[Problem], Mapping[str, int]], problem: Problem) -> dict[str, int]:
    P = problem.ranks
    some = range(P) if P <= 8 else (0, 1, P // 2, P - 1)  # the longest shard and the most heads are among them
    return max((dict(found(replace(problem, rank=rank))) for rank in some), key=lambda table: sum(table.values()))

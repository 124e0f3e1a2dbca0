"""Checkers of notebook 07: the pace of a ring, zigzag for any length, packed documents dealt out.

Oracles: the virtual clock of a simulated ring for the pace; the dense mask, counted rank by rank and step by step, for
what a layout makes of the load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...costs.balance import ring_balance
from ...layouts import contiguous, striped, zigzag
from ...masks import Mask, causal, documents, full, sliding_window
from ...worlds.trace import Hardware
from .. import records
from ..rehearsal import rehearse
from .checker import Checker, Wrong, call, cases, number, per_rank, trying
from .mistakes import Reason
from .predictions import Prediction, Quiz
from .simulate import who

Work = Sequence[Sequence[float]]

# Twenty documents, the lengths of which add up to 131,072 tokens.
PACK = (932, 907, 2236, 1862, 5228, 607, 2042, 18325, 4588, 2453, 12170, 3748, 11526, 14036, 7400, 1236, 7294, 10118,
        21333, 3031)  # fmt: skip

MASKS = "2026-11-29-masks-2-h200.json"  # measured on two GPUs

# ---- 7a: makespan(work) -> when the last rank of a ring is done ------------------------------------------------------


def simulated(work: Work) -> float:
    """The makespan of a ring with this work, by the virtual clock, on a wire that takes no time."""
    no_wire = Hardware(flops=1.0, bandwidth=1e300, latency=0.0)
    return rehearse(len(work), operations=lambda rank, t: work[rank][t], nbytes=4, hardware=no_wire).makespan()


def _also(work: Work) -> tuple[tuple[str, float, str, str], ...]:
    """Other quantities of this work, what they are, where to look ("": as the case), and what returning them means."""
    mean = sum(map(sum, work)) / len(work)
    return (
        (
            "the mean of all ranks' work",
            mean,
            "",
            "that is an even share, the time it would take if all ranks had the same work; here they do not",
        ),
        ("all work of all ranks", sum(map(sum, work)), "", "ranks work at the same time: their times do not add up"),
        (
            "the work of the busiest rank",
            max(map(sum, work)),
            "",
            "a rank also waits: it cannot begin a step before its neighbour rank - 1 has begun the step before, since "
            "that is when its keys leave",
        ),
        (
            "the sum of each step's longest",
            sum(map(max, zip(*work))),
            "",
            "nobody waits for *all* others: a rank waits for its own work and for its neighbour rank - 1 only",
        ),
        (
            "what it takes if work[step][rank] is read",
            simulated(list(zip(*work))),
            "the order of the two indices",
            "work[rank][step]: the first index is the rank, the second the step",
        ),
        (
            "the work of the last rank",
            sum(work[-1]),
            "the maximum over which ranks?",
            "the last to finish need not be the last rank: take the maximum",
        ),
    )


def _waiting_for_both(work: Work) -> float:
    """The makespan if a message could leave only when its receiver is there."""
    P, begin = len(work), [0.0] * len(work)
    ends = [x[0] for x in work]
    for t in range(1, P):
        begin = [max(ends[r], begin[r - 1], begin[(r + 1) % P]) for r in range(P)]
        ends = [b + x[t] for b, x in zip(begin, work)]
    return max(ends)


def _check_makespan(
    fn: Callable, work: list[list[float]], where: str, cause: str, named: bool = True
) -> None:  # fmt: skip
    """named: whether to say so, in place of the cause, if the result is another quantity of this work."""
    shown = f"work = {work}" if len(work) <= 4 else f"the work of {len(work)} ranks: rl.checks.nb07.example()"
    got = call(fn, [list(row) for row in work], input=shown, where=where, cause=cause)
    got = number(got, "the time at which the last rank ends its last step: one number")
    want = simulated(work)
    if abs(got - want) <= 1e-9 * max(1.0, want):
        return
    symptom = f"you give {got:g}, the simulated ring takes {want:g}"
    both = (
        "what it takes if a rank also waits for rank + 1",
        _waiting_for_both(work),
        "whom a rank waits for",
        "a rank does not wait for rank + 1 to be there: only its own end and the beginning of rank - 1 count",
    )
    for name, value, look, why in (*(_also(work) if named else ()), both):
        if abs(got - value) < 1e-9 and value != want:
            raise Wrong(f"{symptom}; {got:g} is {name}", look or where, why)
    raise Wrong(symptom, where, cause)


def example() -> list[list[int]]:
    """The scores of twenty packed documents on 8 ranks in zigzag: work that is uneven in all ways."""
    found = ring_balance(causal & documents(PACK), sum(PACK), 8, zigzag, visible=True)
    return [list(row) for row in found.scores]


_makespan_value = cases(
    _check_makespan,
    ([[3]], "a single rank: no neighbour but itself", "one rank works through its steps: their sum"),
    (
        [[2, 2, 2], [2, 2, 2], [2, 2, 2]],
        "the return statement: what does each rank do after another?",
        "all have the same, so nobody waits: three steps of 2",
    ),
    (
        [[1, 0, 0], [1, 2, 0], [1, 2, 2]],
        "which rank ends last, and what it did until then",
        "a causal mask on three contiguous shards: the last rank always has something to do, 1 + 2 + 2",
    ),
)


def _makespan_adversarial(fn: Callable) -> None:
    check = partial(_check_makespan, fn)
    check(
        [[0, 0, 0, 0], [0, 5, 0, 0], [5, 0, 0, 0], [1, 0, 0, 0]],
        "for whom rank 1 waits before its step 1",
        "for its own step 0 and for rank 0 to begin that step. Neither takes any time, so rank 1 works from 0 to 5, "
        "at the same time as rank 2",
    )
    check(
        [[0, 5], [5, 1]],
        "what rank 0 waits for before its step 1: does rank 1 have to be done, or only to have begun?",
        "rank 1 passes its keys on when it *begins* step 0, not when it is done: rank 0 begins its step 1 at once",
        named=False,
    )
    check(
        [[5, 0, 0], [0, 0, 4], [0, 0, 0]],
        "what rank 1 waits for before its step 2",
        "rank 0 begins its step 1 at 5, and only then passes on the keys that rank 1 needs: so it is 9",
    )
    check(
        [[0, 0, 4], [0, 0, 0], [5, 0, 0]],
        "rank 0's neighbour: the ring is closed",
        "rank 0 receives from the last rank: index -1, or (rank - 1) % P",
    )
    check([[0, 0, 0], [5, 0, 0], [0, 0, 0]], "the maximum over which ranks?", "rank 1 is the last, at 5")
    check(
        [[0, 0, 4, 0], [6, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 3]],
        "from whom a rank receives; how far a delay has come after each step",
        "keys come from rank - 1, and a delay travels one rank per step: compute the beginnings of a step from those "
        "of the step before, not from those that you have just computed",
        named=False,
    )
    check(
        [[7, 1, 1, 1], [1, 1, 1, 9], [1, 1, 1, 1], [1, 1, 1, 1]],
        "the beginnings of a step: from which numbers?",
        "begin[rank] = max(own end, begin of rank - 1), both in the step before. If you write over the list while you "
        "read from it, a delay travels several ranks at once",
    )
    check(
        [[0.5, 2.5, 0.25], [1.5, 0.0, 3.0], [0.0, 4.5, 0.75]],
        "times that are no whole numbers",
        "the same rule; nothing rounded",
    )
    check(example(), "many ranks: a delay that travels on", "the same rule for every rank and step")


makespan = Checker("7a makespan", value=_makespan_value, adversarial=_makespan_adversarial)

# ---- What a layout of the learner's makes of the load ----------------------------------------------------------------


TWICE = (
    "where a block begins, and whose it is",
    "each position belongs to one rank: blocks begin where the one before ends, and each is given once",
)
LEFT_OVER = (
    "what is left over when the length is divided",
    "block i of n goes from S * i // n to S * (i + 1) // n: together they cover everything, some are a token longer",
)
BEYOND = ("where a block ends", "the last block ends at S; a range excludes its stop")
NOT_NUMBERS = (
    "what is put into a rank's list: positions?",
    "here all blocks are equally long, so none is cut short: give all positions of a block, not its number",
)


def _owned(
    result: Any,
    S: int,
    P: int,
    twice: Reason = TWICE,
    missing: Reason = LEFT_OVER,
    beyond: Reason = BEYOND,
) -> list[list[int]]:
    """The positions of each rank as lists; Wrong unless each position is owned once, increasing within a rank.

    twice, missing, beyond: where to look and the cause if a position is held twice, or by nobody, or does not exist.
    """
    ranks = [_numbers(entry, rank) for rank, entry in enumerate(per_rank(result, P, "its positions"))]
    for rank, own in enumerate(ranks):
        outside = [p for p in own if not 0 <= p < S]
        if outside:
            raise Wrong(f"rank {rank} holds position {outside[0]}, outside of 0..{S - 1}", *beyond)
    held = sorted(p for own in ranks for p in own)
    if len(set(held)) < len(held):
        again = next(a for a, b in zip(held, held[1:]) if a == b)
        both = who([r for r, own in enumerate(ranks) if again in own])
        raise Wrong(f"position {again} is held twice, by {both}", *twice)
    if S and not held:
        raise Wrong(
            f"every rank's list is empty: nobody holds any of the {S} positions",
            "the body of the loop",
            "nothing is put into the lists",
        )
    if len(held) < S:
        first = next(p for p in range(S) if p not in set(held))
        raise Wrong(f"nobody holds position {first}; {S - len(held)} of {S} are missing", *missing)
    for rank, own in enumerate(ranks):
        if own != sorted(own):
            raise Wrong(
                f"rank {rank} holds its positions in the order {own[:6]}{' ...' if len(own) > 6 else ''}",
                "the order in which a rank's parts are put together",
                "local order is position order, as the kernels' causal tiles need it: early parts first",
            )
    return ranks


def _numbers(entry: Any, rank: int) -> list[int]:
    if isinstance(entry, Tensor):
        entry = entry.tolist()
    try:
        flat = [p for part in entry for p in (part if isinstance(part, range | list | tuple) else [part])]
        return [int(p) for p in flat]
    except (TypeError, ValueError):
        raise Wrong(
            f"the entry of rank {rank} is {type(entry).__name__}, not positions",
            "what is put into the list for each rank",
            "a list of ints, a tensor, or a list of ranges",
        ) from None


def _steps(ranks: list[list[int]], mask: Mask, S: int) -> list[list[int]]:
    """The scores of each rank in each step, counted in the dense mask."""
    seen, P = mask.dense(S, S), len(ranks)
    own = [torch.tensor(positions, dtype=torch.int64) for positions in ranks]
    return [[int(seen[own[r]][:, own[(r - t) % P]].sum()) for t in range(P)] for r in range(P)]


def _uneven(work: list[list[int]]) -> tuple[float, int]:
    """The largest ratio of most to mean over the steps, and in which step."""
    ratios = [max(step) * len(step) / sum(step) if sum(step) else 1.0 for step in zip(*work)]
    return max((ratio, -step) for step, ratio in enumerate(ratios))[0], ratios.index(max(ratios))


# ---- 7b: zigzag(S, P) -> the positions of each rank ------------------------------------------------------------------


def _call_zigzag(fn: Callable, S: int, P: int) -> list[list[int]]:
    cause = "there are 2 P blocks, from 0 on, some of which may be empty (torch.chunk leaves those out)"
    result = call(fn, S, P, input=f"S = {S}, P = {P}", where="an index that is out of range", cause=cause)
    twice = (TWICE[0], TWICE[1] + ". There are 2 P blocks; torch.chunk may give fewer") if S % (2 * P) else TWICE
    return _owned(result, S, P, twice, missing=LEFT_OVER if S % (2 * P) else NOT_NUMBERS)


def _zigzag_value(fn: Callable) -> None:
    for S, P in ((4, 1), (8, 2), (16, 4), (36, 3)):
        ranks = _call_zigzag(fn, S, P)
        n = S // (2 * P)
        for rank, own in enumerate(ranks):
            late = 2 * P - 1 - rank
            want = [*range(n * rank, n * rank + n), *range(n * late, n * late + n)]
            if own != want:
                raise Wrong(
                    f"rank {rank} holds {own}, expected {want}",
                    "which two of the 2 P blocks a rank gets",
                    f"blocks {rank} and {late}: block r from the front, and block r from the back, 2 P - 1 - r",
                )


def _zigzag_adversarial(fn: Callable) -> None:
    for S, P in ((9, 2), (10, 2), (7, 4), (3, 4), (1, 3), (0, 2), (97, 5), (130, 8)):
        ranks = _call_zigzag(fn, S, P)
        tokens = [len(own) for own in ranks]
        if max(tokens) - min(tokens) > 2:
            raise Wrong(
                f"the ranks hold {tokens} tokens: they differ by {max(tokens) - min(tokens)}",
                "who gets what is left over when S is divided by 2 P",
                "spread it: with block i from S * i // (2 P) to S * (i + 1) // (2 P), no block is more than a "
                "token longer than another",
            )


def _zigzag_cost(fn: Callable) -> None:
    for S, P in ((1003, 5), (515, 8)):
        ranks = _call_zigzag(fn, S, P)
        ratio, step = _uneven(_steps(ranks, causal, S))
        if ratio > 1.06:
            raise Wrong(
                f"under a causal mask, in step {step} the busiest rank has {ratio:.2f} times the mean to compute",
                "which blocks belong together",
                "an early block and its mirror image: r and 2 P - 1 - r, for any S",
            )


zigzag_layout = Checker("7b zigzag", value=_zigzag_value, adversarial=_zigzag_adversarial, cost=_zigzag_cost)

# ---- 7c: deal(lengths, P) -> the positions of each rank, for packed documents ---------------------------------------


def _call_deal(fn: Callable, lengths: list[int], P: int) -> list[list[int]]:
    shown = f"lengths = {lengths}, P = {P}" if len(lengths) <= 8 else f"{len(lengths)} documents, P = {P}"
    result = call(
        fn, list(lengths), P, input=shown, where="a document that is empty or short", cause="a part may be empty"
    )
    start = (
        "start: of which document?",
        "positions are counted in the pack: a document's begin where the one before ends. Add start to what is counted "
        "in the document, and move it on by the length after that",
    )
    every = ("which documents are dealt, and which of their blocks", "all blocks of every document go to some rank")
    beyond = (
        "where a block ends, and when start moves on",
        "a range excludes its stop; and start is moved on by the length after the document has been dealt, not before",
    )
    twice = start if len(lengths) > 1 else TWICE
    missing = LEFT_OVER if any(n % (2 * P) for n in lengths) else every
    return _owned(result, sum(lengths), P, twice, missing, beyond)


def _check_even(ranks: list[list[int]], lengths: list[int], most: float) -> None:
    ratio, step = _uneven(_steps(ranks, causal & documents(lengths), sum(lengths)))
    if ratio > most:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        without = [
            (rank, i)
            for i, (start, n) in enumerate(zip(starts, lengths))
            for rank, own in enumerate(ranks)
            if n >= 2 * len(ranks) and not any(start <= p < start + n for p in own)
        ]
        more = f"; rank {without[0][0]} has nothing of document {without[0][1]}" if without else ""
        raise Wrong(
            f"causal within documents, in step {step} the busiest rank has {ratio:.2f} times the mean to compute{more}",
            "what each rank gets of *each* document",
            "each document is a sequence of its own: its blocks r and 2 P - 1 - r, counted from its own start, "
            "go to rank r",
        )


def _deal_value(fn: Callable) -> None:
    for lengths, P in (([8], 2), ([8, 4], 2), ([16, 32, 8], 4), ([12, 36], 3)):
        ranks = _call_deal(fn, lengths, P)
        _check_even(ranks, lengths, 1.0)


def _deal_cost(fn: Callable) -> None:
    lengths = [max(1, n // 32) for n in PACK]
    ranks = _call_deal(fn, lengths, 8)
    trying("lengths = [max(1, n // 32) for n in rl.checks.nb07.PACK], P = 8")
    tokens = [len(own) for own in ranks]
    if max(tokens) - min(tokens) > 2 * len(lengths):
        raise Wrong(
            f"the ranks hold {tokens} tokens",
            "what is left over of each document",
            "block i of a document of n tokens goes from n * i // (2 P) to n * (i + 1) // (2 P)",
        )
    _check_even(ranks, lengths, 1.1)


deal = Checker(
    "7c deal",
    value=_deal_value,
    adversarial=cases(_call_deal, ([5, 3], 2), ([0, 9, 0, 4], 2), ([1, 1, 1, 2], 3), ([17, 6, 30], 4), ([40, 1, 7], 1)),
    cost=_deal_cost,
)

# ---- Predictions and quiz -------------------------------------------------------------------------------------------


def half_of_a_pair(P: int) -> str:
    """How much of another rank's shard a zigzag rank computes in a step, under a causal mask."""
    n = 128
    work = ring_balance(causal, P * n, P, zigzag).scores
    shares = {row[t] / n**2 for row in work for t in range(1, P)}
    return {0.0: "nothing", 0.5: "half", 1.0: "all"}[shares.pop()] if len(shares) == 1 else "differs"


def steps_with_work(mask: Mask, S: int, P: int) -> int:
    """In how many steps of a contiguous ring anybody has something to compute."""
    return sum(any(step) for step in zip(*ring_balance(mask, S, P, contiguous).scores))


def measured(mask: str, way: str, layout: str | None = None) -> dict[str, Any]:
    """A row of the record of masks on two GPUs; of several kernels, the fastest one's."""
    rows = [r for r in records.load(MASKS)["rows"] if (r["mask"], r["way"], r["layout"]) == (mask, way, layout)]
    return min(rows, key=lambda row: row["forward_backward_ms"])


predict_contiguous = Prediction(
    "Contiguous, 8 ranks",
    lambda: round(ring_balance(causal, 2**20, 8, contiguous).ratio, 3),
    "(2P - 1) / P: the last rank computes its triangle and seven whole squares; an even share is half of eight "
    "squares.",
    tolerance=0.05,
)
predict_pair = Prediction(
    "Of another rank's scores",
    lambda: half_of_a_pair(8),
    "All queries see the other's early block and not its late one, or the late queries see both and the early "
    "ones none.",
)
predict_pack = Prediction(
    "Twenty documents in zigzag",
    lambda: round(ring_balance(causal & documents(PACK), sum(PACK), 8, zigzag, visible=True).ratio, 2),
    "Zigzag mirrors the whole pack; a document's late tokens may lie anywhere in it.",
    tolerance=0.3,
)
predict_measured = Prediction(
    "Rate of two GPUs with contiguous shards, in per cent (0 to 100)",
    lambda: round(100 * measured("causal", "ring", "contiguous")["forward_backward_fraction"]),
    "(2P - 1) / P = 1.5 for two ranks: the busier GPU has 1.5 even shares, so the rate is at most 1 / 1.5 = 67%.",
    tolerance=4,
)
predict_window = Prediction(
    "Steps with work",
    lambda: steps_with_work(causal & sliding_window(4096), sum(PACK), 8),
    "A window shorter than a shard reaches into the shard before, and no further.",
)

quiz = Quiz(
    "Quiz 07",
    (lambda: round(ring_balance(causal, 2**20, 16, contiguous).ratio, 2), "(2P - 1) / P = 31/16.", 0.01),
    (
        lambda: round(100 * ring_balance(causal, 2**20, 64, contiguous).idle),
        "1 - P / (2P - 1): nearly one half for many ranks.",
        1,
        "%",
    ),
    (lambda: zigzag.ranges(1600, 8)[3][1].start, "16 blocks of 100; block 2P - 1 - 3 = 12."),
    (
        lambda: round(ring_balance(causal, 12, 4, striped).ratio, 2),
        "P (n + 1) / (S + 1) = 4 * 4 / 13: with few tokens the diagonal counts.",
        0.02,
    ),
    (
        lambda: steps_with_work(documents([100] * 8), 800, 8),
        "Each document lies on one rank, and sees nobody else's keys.",
    ),
    (
        lambda: len({round(ring_balance(full, 4096, 8, x).ratio, 6) for x in (contiguous, striped, zigzag)}),
        "Without a mask every rank computes everything that it meets: all layouts are even.",
    ),
)

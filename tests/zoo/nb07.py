"""Answers to the exercises of notebook 07, wrong and right. Each wrong one has the stage that must reject it and a word
of the message."""

from __future__ import annotations

import torch

from ringlearn.costs.balance import Balance
from ringlearn.layouts import contiguous, zigzag, zigzag_per_document

from .edits import registry

WRONG, wrong = registry("7a", "7b", "7c")

# ---- 7a makespan ----------------------------------------------------------------------------------------------------


def makespan_solution(work):
    P = len(work)
    begin, end = [0] * P, [0] * P
    for step in range(P):
        if step > 0:
            begin = [max(end[rank], begin[rank - 1]) for rank in range(P)]
        end = [begin[rank] + work[rank][step] for rank in range(P)]
    return max(end)


def makespan_by_recursion(work):
    """From the last step back: when does this step begin?"""

    def begin(rank, step):
        if step == 0:
            return 0
        return max(end(rank, step - 1), begin((rank - 1) % len(work), step - 1))

    def end(rank, step):
        return begin(rank, step) + work[rank][step]

    return max(end(rank, len(work) - 1) for rank in range(len(work))) if len(work) < 8 else makespan_by_library(work)


def makespan_by_library(work):
    return Balance(contiguous, tuple(map(tuple, work)), ()).makespan


def makespan_by_tensors(work):
    work = torch.tensor(work, dtype=torch.float64)
    begin = torch.zeros(len(work), dtype=torch.float64)
    for step in range(len(work)):
        end = begin + work[:, step]
        begin = torch.maximum(end, begin.roll(1))
    return end.max()


@wrong("7a", "value", "an even share")
def makespan_mean(work):
    return sum(map(sum, work)) / len(work)


@wrong("7a", "value", "do not add up")
def makespan_total(work):
    return sum(map(sum, work))


@wrong("7a", "adversarial", "the work of the busiest rank")
def makespan_busiest(work):
    return max(map(sum, work))


@wrong("7a", "adversarial", "nobody waits for *all* others")
def makespan_lockstep(work):
    return sum(map(max, zip(*work)))


@wrong("7a", "adversarial", "the maximum over which ranks?")
def makespan_last_rank(work):
    return _with(work)[-1]


@wrong("7a", "value", "which rank ends last")
def makespan_first_rank(work):
    return _with(work)[0]


@wrong("7a", "value", "the simulated ring takes 6")
def makespan_longest_step(work):
    return max(map(max, work))


@wrong("7a", "value", "the first index is the rank")
def makespan_transposed(work):
    return makespan_solution([list(row) for row in zip(*work)])


@wrong("7a", "value", "returns None")
def makespan_no_return(work):
    makespan_solution(work)


@wrong("7a", "value", "not a number")
def makespan_of_each_rank(work):
    return _with(work)


def _with(work, neighbour=-1, closed=True, done=False, own=True, in_place=False):
    """The end of every rank, with something about the waiting changed."""
    P = len(work)
    begin, end = [0] * P, [0] * P
    for step in range(P):
        if step > 0:
            before, after = list(begin), list(end)
            for rank in range(P):
                source = begin if in_place else before
                other = (after if done else source)[(rank + neighbour) % P]
                if not closed and rank == 0:
                    other = 0
                begin[rank] = max(after[rank] if own else 0, other)
        end = [begin[rank] + work[rank][step] for rank in range(P)]
    return end


@wrong("7a", "adversarial", "the simulated ring takes 9")
def makespan_other_neighbour(work):
    return max(_with(work, neighbour=1))


@wrong("7a", "adversarial", "not when it is done")
def makespan_waits_until_done(work):
    return max(_with(work, done=True))


@wrong("7a", "adversarial", "the ring is closed")
def makespan_open_ring(work):
    return max(_with(work, closed=False))


@wrong("7a", "adversarial", "does not wait for rank + 1")
def makespan_waits_for_both(work):
    P, begin = len(work), [0.0] * len(work)
    ends = [row[0] for row in work]
    for t in range(1, P):
        begin = [max(ends[r], begin[r - 1], begin[(r + 1) % P]) for r in range(P)]
        ends = [b + row[t] for b, row in zip(begin, work)]
    return max(ends)


@wrong("7a", "adversarial", "that you have just computed")
def makespan_written_over(work):
    return max(_with(work, in_place=True))


@wrong("7a", "value", "three steps of 2")
def makespan_forgets_own_end(work):
    return max(_with(work, own=False))


# ---- 7b zigzag ------------------------------------------------------------------------------------------------------


def _block(S, n, i):
    return range(S * i // n, S * (i + 1) // n)


def zigzag_solution(S, P):
    blocks = [list(range(S * i // (2 * P), S * (i + 1) // (2 * P))) for i in range(2 * P)]
    return [blocks[rank] + blocks[2 * P - 1 - rank] for rank in range(P)]


def zigzag_as_ranges(S, P):
    return [[_block(S, 2 * P, r), _block(S, 2 * P, 2 * P - 1 - r)] for r in range(P)]


def zigzag_by_tensor_split(S, P):
    """torch.tensor_split makes the first blocks longer, where the library spreads what is left over."""
    blocks = torch.arange(S).tensor_split(2 * P)
    return [torch.cat([blocks[r], blocks[-1 - r]]) for r in range(P)]


def zigzag_by_library(S, P):
    return zigzag.ranges(S, P)


@wrong("7b", "value", "2 P - 1 - r")
def zigzag_contiguous(S, P):
    return [list(_block(S, P, r)) for r in range(P)]


@wrong("7b", "value", "which two of the 2 P blocks")
def zigzag_striped(S, P):
    return [list(range(r, S, P)) for r in range(P)]


@wrong("7b", "value", "expected [0, 1, 6, 7]")
def zigzag_not_mirrored(S, P):
    return [[*_block(S, 2 * P, r), *_block(S, 2 * P, P + r)] for r in range(P)]


@wrong("7b", "value", "expected [0, 1, 6, 7]")
def zigzag_neighbours(S, P):
    return [[*_block(S, 2 * P, 2 * r), *_block(S, 2 * P, 2 * r + 1)] for r in range(P)]


@wrong("7b", "value", "IndexError")
def zigzag_off_by_one(S, P):
    blocks = [_block(S, 2 * P, i) for i in range(2 * P)]
    return [[*blocks[r], *blocks[2 * P - r]] for r in range(P)]


@wrong("7b", "value", "local order is position order")
def zigzag_late_first(S, P):
    return [[*_block(S, 2 * P, 2 * P - 1 - r), *_block(S, 2 * P, r)] for r in range(P)]


@wrong("7b", "value", "rank 0 holds")
def zigzag_ranks_turned_round(S, P):
    return zigzag_solution(S, P)[::-1]


@wrong("7b", "adversarial", "nobody holds position")
def zigzag_drops_the_rest(S, P):
    n = S // (2 * P)
    return [[*range(n * r, n * r + n), *range(n * (2 * P - 1 - r), n * (2 * P - r))] for r in range(P)]


@wrong("7b", "adversarial", "left over")
def zigzag_rest_to_rank_0(S, P):
    n = S // (2 * P)
    out = [list(x) for x in zigzag_drops_the_rest(S, P)]
    out[0] += range(2 * P * n, S)
    return out


@wrong("7b", "adversarial", "outside of 0..8")
def zigzag_rounds_up(S, P):
    n = -(-S // (2 * P))
    blocks = [range(n * i, n * i + n) for i in range(2 * P)]
    return [[*blocks[r], *blocks[2 * P - 1 - r]] for r in range(P)]


@wrong("7b", "value", "a range excludes its stop")
def zigzag_stop_included(S, P):
    blocks = [range(S * i // (2 * P), S * (i + 1) // (2 * P) + 1) for i in range(2 * P)]
    return [[*blocks[r], *blocks[2 * P - 1 - r]] for r in range(P)]


@wrong("7b", "value", "not its number")
def zigzag_block_numbers(S, P):
    return [[rank, 2 * P - 1 - rank] for rank in range(P)]


@wrong("7b", "adversarial", "torch.chunk leaves those out")
def zigzag_by_chunk(S, P):
    """torch.chunk gives fewer blocks than asked for where there are not enough tokens."""
    blocks = torch.arange(S).chunk(2 * P)
    return [torch.cat([blocks[r], blocks[2 * P - 1 - r]]) for r in range(P)]


@wrong("7b", "value", "entries for 1 ranks")
def zigzag_one_rank(S, P):
    return list(range(S))


@wrong("7b", "cost", "times the mean")
def zigzag_contiguous_if_it_does_not_divide(S, P):
    return zigzag_solution(S, P) if S % (2 * P) == 0 else zigzag_contiguous(S, P)


@wrong("7b", "value", "is int, not positions")
def zigzag_counts_only(S, P):
    return [len(own) for own in zigzag_solution(S, P)]


@wrong("7b", "value", "returns dict")
def zigzag_as_dict(S, P):
    return dict(enumerate(zigzag_solution(S, P)))


# ---- 7c deal --------------------------------------------------------------------------------------------------------


def deal_solution(lengths, P):
    ranks, start = [[] for _ in range(P)], 0
    for length in lengths:
        for rank in range(P):
            for i in (rank, 2 * P - 1 - rank):
                ranks[rank] += range(start + length * i // (2 * P), start + length * (i + 1) // (2 * P))
        start += length
    return ranks


def _dealt(lengths, P, owned, start_moves=True):
    """Of each document what each rank owns of a sequence of its length, counted from where the document starts."""
    ranks, start = [[] for _ in range(P)], 0
    for length in lengths:
        for rank, own in enumerate(owned(length, P)):
            ranks[rank] += [start + p for p in own]
        start += length * start_moves
    return ranks


def deal_by_library(lengths, P):
    return zigzag_per_document(lengths).ranges(sum(lengths), P)


def deal_with_zigzag(lengths, P):
    """7b's function, once per document, in tensors."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [
        [start + torch.tensor(own, dtype=torch.int64) for own in zigzag_solution(n, P)]
        for start, n in zip(starts, lengths)
    ]
    return [torch.cat([part[rank] for part in parts]) if parts else [] for rank in range(P)]


def deal_by_torch_cat(lengths, P):
    """A list of parts for each rank, put together at the end."""
    parts, start = [[] for _ in range(P)], 0
    for length in lengths:
        blocks = (start + torch.arange(length)).tensor_split(2 * P)
        for rank in range(P):
            parts[rank] += [blocks[rank], blocks[-1 - rank]]
        start += length
    return [torch.cat(part) for part in parts]


@wrong("7c", "value", "each document is a sequence of its own")
def deal_whole_pack(lengths, P):
    return zigzag_solution(sum(lengths), P)


@wrong("7c", "value", "times the mean")
def deal_contiguous(lengths, P):
    return zigzag_contiguous(sum(lengths), P)


@wrong("7c", "value", "times the mean")
def deal_striped(lengths, P):
    return zigzag_striped(sum(lengths), P)


@wrong("7c", "value", "held twice")
def deal_from_zero(lengths, P):
    ranks = [[] for _ in range(P)]
    for length in lengths:
        for rank, own in enumerate(zigzag_solution(length, P)):
            ranks[rank] += own
    return ranks


@wrong("7c", "value", "start: of which document?")
def deal_start_stays(lengths, P):
    return _dealt(lengths, P, zigzag_solution, start_moves=False)


@wrong("7c", "value", "every rank's list is empty")
def deal_nothing(lengths, P):
    """The stub, with its last line written, and nothing in the loop."""
    ranks = [[] for _ in range(P)]
    for _length in lengths:
        pass
    return ranks


@wrong("7c", "value", "has nothing of document")
def deal_round_robin(lengths, P):
    """Whole documents, one to each rank in turn."""
    ranks, start = [[] for _ in range(P)], 0
    for i, length in enumerate(lengths):
        ranks[i % P] += range(start, start + length)
        start += length
    return ranks


@wrong("7c", "value", "has nothing of document")
def deal_whole_to_the_emptiest(lengths, P):
    ranks, start = [[] for _ in range(P)], 0
    for length in lengths:
        min(ranks, key=len).extend(range(start, start + length))
        start += length
    return ranks


@wrong("7c", "value", "times the mean")
def deal_contiguous_per_document(lengths, P):
    return _dealt(lengths, P, zigzag_contiguous)


@wrong("7c", "value", "times the mean")
def deal_every_second_turned_round(lengths, P):
    """Contiguous per document, the ranks in turn from the front and from the back: even in all for equal documents."""
    ranks, start = [[] for _ in range(P)], 0
    for i, length in enumerate(lengths):
        for part in range(P):
            rank = part if i % 2 == 0 else P - 1 - part
            ranks[rank] += range(start + length * part // P, start + length * (part + 1) // P)
        start += length
    return ranks


@wrong("7c", "value", "all blocks of every document")
def deal_first_document_only(lengths, P):
    return zigzag_solution(lengths[0], P) if lengths else [[] for _ in range(P)]


@wrong("7c", "value", "early parts first")
def deal_late_parts_last(lengths, P):
    early, late, start = [[] for _ in range(P)], [[] for _ in range(P)], 0
    for length in lengths:
        for rank in range(P):
            early[rank] += [start + p for p in _block(length, 2 * P, rank)]
            late[rank] += [start + p for p in _block(length, 2 * P, 2 * P - 1 - rank)]
        start += length
    return [a + b for a, b in zip(early, late)]


@wrong("7c", "adversarial", "some are a token longer")
def deal_drops_the_rest(lengths, P):
    return _dealt(lengths, P, zigzag_drops_the_rest)


@wrong("7c", "cost", "what is left over of each document")
def deal_rest_to_rank_0(lengths, P):
    return _dealt(lengths, P, zigzag_rest_to_rank_0)


@wrong("7c", "value", "after the document has been dealt")
def deal_starts_too_late(lengths, P):
    ranks, start = [[] for _ in range(P)], 0
    for length in lengths:
        start += length
        for rank, own in enumerate(zigzag_solution(length, P)):
            ranks[rank] += [start + p for p in own]
    return ranks


@wrong("7c", "adversarial", "an empty document")
def deal_fails_on_empty(lengths, P):
    assert all(lengths), "an empty document"
    return deal_solution(lengths, P)


RIGHT = {
    "7a": [makespan_solution, makespan_by_recursion, makespan_by_library, makespan_by_tensors],
    "7b": [zigzag_solution, zigzag_as_ranges, zigzag_by_tensor_split, zigzag_by_library],
    "7c": [deal_solution, deal_by_library, deal_with_zigzag, deal_by_torch_cat],
}

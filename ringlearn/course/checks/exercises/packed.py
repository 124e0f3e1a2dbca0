"""The check of torchrun exercise 12: a step on rows of packed documents, of which each rank reads its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ....layouts import contiguous, zigzag
from ..checker import Wrong, difference, number, returned
from ..mistakes import recognised
from ..model import TinyModel, dense_causal
from .runner import Exercise, Rank, said_of_few
from .training import (
    AFTER,
    COUNTED,
    IGNORE,
    UNKNOWN,
    _flat,
    _mesh,
    _multiple,
    _nan,
    _off_by_a_factor,
    world_of_a_row,
)

Rows = tuple[Tensor, list[list[int]]]  # tokens (dp, S), and the borders of each row


class Text:
    """The rows as an answer may read them, ``read(row, places)``; it notes what was read."""

    def __init__(self, rows: Tensor):
        self.rows, self.seen = rows, set()

    def __call__(self, row: int, places: Tensor) -> Tensor:
        where = torch.as_tensor(places, device=self.rows.device)
        found = self.rows[row][where]
        self.seen |= {(int(row), int(place)) for place in where.flatten().tolist()}
        return found


def _rows(dp: int, cp: int, device: torch.device, *, idle: bool) -> Rows:
    """A row for each group. idle: the tokens of the last rank are documents of their own, so none has a target."""
    S = 6 * cp + 4
    at = torch.arange(S, device=device)
    rows = torch.stack([(at**2 + (3 + g) * at + 2 * g) % 11 for g in range(dp)])
    borders = [sorted({0, 2 + g, S // 2 + 1 + g, S - g, S}) for g in range(dp)]  # the second row has one more document
    if idle and cp > 1:
        alone = zigzag.positions(S, cp, cp - 1).tolist()
        borders = [sorted({*cuts, *alone, *(p + 1 for p in alone)}) for cuts in borders]
    return rows, borders


def _numbers(cuts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each place in a row: the number of its document, and where that begins."""
    ends = torch.tensor(cuts, device=device)
    document = torch.bucketize(torch.arange(cuts[-1], device=device), ends, right=True) - 1
    return document, ends[document]


def _targets(tokens: Tensor, document: Tensor) -> Tensor:
    late = tokens.roll(-1)
    late[:-1][document[1:] != document[:-1]] = IGNORE
    late[-1] = IGNORE
    return late


def _losses(
    model: TinyModel,
    tokens: Tensor,
    cuts: list[int],
    *,
    positions: Tensor | None = None,
    document: Tensor | None = None,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each place of a row, 0 without a target, and whether it has one. The options are mistakes."""
    own, start = _numbers(cuts, tokens.device)
    positions = torch.arange(len(tokens), device=tokens.device) - start if positions is None else positions
    targets = _targets(tokens, own) if targets is None else targets
    logits = model(tokens, positions, partial(dense_causal, document=own if document is None else document))
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE), targets != IGNORE


def alone(rows: Tensor, borders: list[list[int]]) -> tuple[Tensor, float]:
    """What one process finds, which computes each document by itself: the gradient, and the loss."""
    model = TinyModel().to(rows.device)
    total, count = torch.zeros((), dtype=torch.float64, device=rows.device), 0
    for tokens, cuts in zip(rows, borders):
        for a, b in zip(cuts, cuts[1:]):
            losses, counts = _losses(model, tokens[a:b], [0, b - a])
            total, count = total + losses.sum(), count + int(counts.sum())
    (total / count).backward()
    return _flat(model), float(total.detach()) / count


def _mistakes(rows: Tensor, borders: list[list[int]], cp: int) -> Iterator[tuple[str, str, Tensor]]:
    """Where to look, the likely cause, and the direction that a mistake gives to the gradient."""
    S, device = rows.shape[1], rows.device
    at, owns = torch.arange(S, device=device), [zigzag.positions(S, cp, r, device) for r in range(cp)]

    def direction(
        change: Callable[[Tensor, list[int]], dict[str, Tensor]] = lambda tokens, cuts: {},
        weigh: Callable[[Tensor, Tensor, int], Tensor] = lambda losses, counts, row: losses.sum(),
    ) -> Tensor:
        model = TinyModel().to(device)
        for row, (tokens, cuts) in enumerate(zip(rows, borders)):
            given = {"tokens": tokens} | change(tokens, cuts)
            weigh(*_losses(model, cuts=cuts, **given), row).backward()
        return _flat(model)

    yield (
        "the mask of attention",
        "documents of a row see each other: rl.causal & rl.documents(lengths), the same on every rank of the row",
        direction(lambda tokens, cuts: {"document": torch.zeros_like(at)}),
    )
    local = torch.zeros_like(at)
    for own in owns:
        local[own] = torch.arange(len(own), device=device)
    yield (
        "the positions that the model gets",
        "they are counted on the rank. A document may begin on another rank: count from its border",
        direction(lambda tokens, cuts: {"positions": local}),
    )
    across = "the last token of a document has the next document's first one for a target: it has none, -100"
    yield "the targets", across, direction(lambda tokens, cuts: {"targets": F.pad(tokens[1:], (0, 1), value=IGNORE)})
    for ends in (True, False):

        def shifted(tokens: Tensor, cuts: list[int], ends: bool = ends) -> dict[str, Tensor]:
            late = torch.full_like(tokens, IGNORE)
            for own in owns:
                late[own[:-1]] = tokens[own[1:]]
            right = _targets(tokens, _numbers(cuts, device)[0])
            return {"targets": torch.where(right == IGNORE, right, late) if ends else late}

        cause = "the shift was done on the rank. The next token of a run's last one is on another rank: read it"
        yield "the targets", cause, direction(shifted)
    for row in range(len(rows)):
        of_one = direction(weigh=lambda losses, counts, this, row=row: losses.sum() * (this == row))
        yield "which row a rank reads", "all groups read the same one: yours is `group`", of_one

    def by_rank(losses: Tensor, counts: Tensor, row: int) -> Tensor:
        return sum(losses[own].sum() / counts[own].sum().clamp(min=1) for own in owns)  # type: ignore[return-value]

    divided = "what the sum of the losses is divided by"
    yield divided, "each rank divides by its own count: all_reduce the count first", direction(weigh=by_rank)
    by_group = direction(weigh=lambda losses, counts, row: losses.sum() / counts.sum())
    yield divided, "each group divides by its own count: sum it over all ranks", by_group
    taken = torch.zeros_like(at)
    parts = [contiguous.positions(S, cp, r, device) for r in range(cp)]
    if [len(x) for x in parts] == [len(x) for x in owns]:
        taken[torch.cat(owns)] = torch.cat(parts)

        def moved(tokens: Tensor, cuts: list[int]) -> dict[str, Tensor]:
            document, start = _numbers(cuts, device)
            known = {"positions": (at - start)[taken], "targets": _targets(tokens, document)[taken]}
            return known | {"tokens": tokens[taken]}

        cause = "they are contiguous's, and attention takes them for zigzag's"
        yield "which tokens a rank takes", cause, direction(moved)


def _check(rank: Rank, answer: Callable) -> str:
    dp, cp = _mesh(rank.size)
    shared = world_of_a_row(rank, dp, cp)
    for idle in (False, True):
        about = "the last rank of each group reads documents of one token each" if idle else "counts differ"
        input = f"{dp} x {cp} ranks (dp x cp), rows of {6 * cp + 4} tokens: {about}"
        rank.case(lambda i=idle: _step(rank, answer, shared, (dp, cp), i), input)
    return said_of_few(rank, 4)


def _step(rank: Rank, answer: Callable, world: Any, mesh: tuple[int, int], idle: bool) -> None:
    dp, cp = mesh
    group, place = divmod(rank.rank, cp)
    rows, borders = _rows(dp, cp, rank.device, idle=idle)
    model, read = TinyModel().to(rank.device), Text(rows)
    loss = number(returned(answer(model, read, borders, world, group)), "the loss of the step: one number")
    got = _flat(model)
    everyone = [torch.empty_like(got) for _ in range(rank.size)]
    dist.all_gather(everyone, got)
    want, want_loss = alone(rows, borders)
    problem = difference("the gradient", got, want, 1e-10)
    if problem:
        raise Wrong(problem, *_reason(everyone, want, rows, borders, mesh, rank))
    if not abs(loss - want_loss) < 1e-10:
        raise Wrong(
            f"the gradient is right; the loss is {loss:.4f}, expected {want_loss:.4f}",
            "what is returned",
            "this rank's share is no loss of the step: sum the detached shares of all ranks",
        )
    own = set(zigzag.positions(rows.shape[1], cp, place).tolist())
    enough = {(group, p) for p in own | {p + 1 for p in own}}
    if read.seen - enough:
        row, p = min(read.seen - enough)
        raise Wrong(
            f"loss and gradient are right, but rank {rank.rank} reads {len(read.seen)} tokens, among them place {p} of "
            f"row {row}; its own and those that follow them are enough",
            "what is read",
            "the whole row is read. At a million tokens a rank reads its own part, and one more at the end of a run",
        )


def _reason(
    everyone: list[Tensor],
    want: Tensor,
    rows: Tensor,
    borders: list[list[int]],
    mesh: tuple[int, int],
    rank: Rank,
) -> tuple[str, str]:
    """Where to look and the likely cause: the known mistake that gives this very gradient, up to a factor."""
    (dp, cp), got = mesh, everyone[rank.rank]
    if any(x.isnan().any() for x in everyone):
        return _nan(COUNTED)

    def same(ranks: list[int]) -> bool:
        return all((everyone[r] - everyone[ranks[0]]).norm() <= 1e-9 * want.norm() for r in ranks)

    groups = [[d * cp + c for c in range(cp)] for d in range(dp)]
    if not all(map(same, groups)):
        return (
            AFTER,
            "they differ between ranks of a row: each has the part of its own tokens. Sum p.grad over all ranks",
        )
    if not same([g[0] for g in groups]):
        return AFTER, "they differ between the rows' groups: sum over all ranks, not over those of a row alone"
    found = _off_by_a_factor(got, want, dp * cp, COUNTED)
    if found:
        return found
    place = "tokens, positions, mask, targets, the divisor, the sums over the ranks, one by one"
    return recognised(_mistakes(rows, borders, cp), partial(_multiple, got), (place, UNKNOWN))


STUCK = (
    "whether every rank calls the model, backward and each all_reduce, equally often and in the same order",
    "a rank leaves one of them out, perhaps because none of its tokens has a target; the others wait for it there",
)
packed_step = Exercise("12 packed step", _check, STUCK)

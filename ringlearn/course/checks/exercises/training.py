"""The checks of torchrun exercises 06 and 10: a training step, and a loop on a mesh of ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ....layouts import contiguous, striped, zigzag
from ....worlds.distributed.world import DistributedWorld
from ..checker import Wrong, difference, returned
from ..mistakes import recognised
from ..model import TinyModel, dense_causal
from .runner import Exercise, Rank, said_of_few

IGNORE = -100
LR = 0.5

Steps = list[list[list[tuple[Tensor, Tensor]]]]


class Recorder(torch.optim.SGD):
    """Plain gradient descent, which forgives no factor; it notes the gradients that each step sees."""

    def __init__(self, model: TinyModel):
        super().__init__(model.parameters(), lr=LR)
        self.model = model
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(_flat(self.model))
        super().step()


def _flat(model: TinyModel) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in model.parameters()])


def _mesh(size: int) -> tuple[int, int]:
    return (2, size // 2) if size >= 4 and size % 2 == 0 else (1, size)


def world_of_a_row(rank: Rank, dp: int, cp: int) -> DistributedWorld:
    """The world of the cp ranks that share this rank's row of tokens; all ranks make those of all dp rows."""

    def world() -> DistributedWorld:
        groups = [dist.new_group([d * cp + c for c in range(cp)]) for d in range(dp)]
        return rank.world(groups[rank.rank // cp])

    return rank.case(world, hangs_after=60.0)


def _steps(dp: int, cp: int, device: torch.device, *, idle: bool) -> Steps:
    """Two steps of two micro-batches. idle: on the last rank of each group no token counts."""
    S = 6 * cp + 3
    steps = []
    for step in range(2):
        micros = []
        for m in range(2):
            pairs = []
            for g in range(dp):
                p = torch.arange(S + 1, device=device)
                text = (p**2 + (3 + g) * p + step + 5 * m) % 11
                tokens, targets = text[:-1], text[1:].clone()
                targets[: (2 + 5 * g + 4 * m) % S] = IGNORE
                if idle and cp > 1:
                    targets[zigzag.positions(S, cp, cp - 1, device)] = IGNORE
                pairs.append((tokens, targets))
            micros.append(pairs)
        steps.append(micros)
    return steps


def _summed(model: TinyModel, pair: tuple[Tensor, Tensor], own: Tensor | None = None) -> Tensor:
    """The sum of the losses of a sequence, or of the tokens ``own`` of it."""
    tokens, targets = pair
    at = torch.arange(len(tokens), device=tokens.device)
    if own is not None:
        keep = torch.zeros_like(at, dtype=torch.bool)
        keep[own] = True
        targets = torch.where(keep, targets, IGNORE)
    return F.cross_entropy(model(tokens, at, dense_causal), targets, reduction="sum", ignore_index=IGNORE)


def _count(pair: tuple[Tensor, Tensor], own: Tensor | None = None) -> int:
    targets = pair[1] if own is None else pair[1][own]
    return int((targets != IGNORE).sum())


def alone(steps: Steps, max_norm: float, device: torch.device) -> tuple[list[Tensor], list[float]]:
    """What one process finds: the gradient that each step's optimizer sees, and the losses."""
    model, losses = TinyModel().to(device), []
    optimizer = Recorder(model)
    for step in steps:
        optimizer.zero_grad()
        pairs = [pair for micro in step for pair in micro]
        loss = sum(_summed(model, pair) for pair in pairs) / sum(map(_count, pairs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return optimizer.seen, losses


def _pieces(step: list, cp: int, device: torch.device) -> list[list[list[tuple[Tensor, int]]]]:
    """[micro][group][rank]: the gradient of the sum of the losses of a rank's tokens, and how many count."""

    def grad(pair: tuple[Tensor, Tensor], own: Tensor) -> Tensor:
        model = TinyModel().to(device)
        _summed(model, pair, own).backward()
        return _flat(model)

    owns = [zigzag.positions(len(step[0][0][0]), cp, r, device) for r in range(cp)]
    return [[[(grad(pair, own), _count(pair, own)) for own in owns] for pair in micro] for micro in step]


def _direction(step: list, device: torch.device, change: Callable[[Tensor, Tensor], tuple]) -> Tensor:
    """The gradient of the sum of all losses; change: tokens, targets -> the model's tokens, positions and targets."""
    model = TinyModel().to(device)
    for tokens, at, targets in (change(*pair) for micro in step for pair in micro):
        F.cross_entropy(model(tokens, at, dense_causal), targets, reduction="sum").backward()
    return _flat(model)


def _means(groups: list[list[tuple[Tensor, int]]]) -> Tensor:
    """The sum over groups of the mean in each."""
    return sum(sum(g for g, _ in x) / max(sum(n for _, n in x), 1) for x in groups)


def _mistakes(step: list, cp: int, device: torch.device) -> Iterator[tuple[str, str, Tensor]]:
    """Where to look, the likely cause, and the direction that a mistake gives to the first step's gradient."""
    pieces, S = _pieces(step, cp, device), len(step[0][0][0])
    dp = range(len(pieces[0]))
    divided = "what the sum of the losses is divided by"
    means = "each rank divides by its own count, so its tokens weigh more where few count: all_reduce the count first"
    yield divided, means, _means([[piece] for micro in pieces for group in micro for piece in group])
    yield divided, means, _means([[micro[d][r] for micro in pieces] for d in dp for r in range(cp)])
    yield (
        divided,
        "each dp group divides by its own count: N is the count of all groups, so sum it over all ranks",
        _means([[x for micro in pieces for x in micro[d]] for d in dp]),
    )
    batches = "each micro-batch is divided by its own count. The step's loss is one mean, over all of them"
    by_micro = [[x for group in micro for x in group] for micro in pieces]
    yield divided, batches, _means([micro[d] for d in dp for micro in pieces])
    yield divided, batches, _means(by_micro)
    for b, which in ((0, "first"), (-1, "last")):
        cause = f"only the {which} micro-batch has an effect: zero_grad once per step"
        yield "the loop over micro-batches", cause, sum(g for g, _ in by_micro[b])
    for d in dp:
        cause = "all groups take the same one: yours is micro[dp_rank]"
        yield "which sequence a rank takes", cause, sum(g for micro in pieces for g, _ in micro[d])

    at, local = torch.arange(S, device=device), torch.zeros(S, dtype=torch.int64, device=device)
    owns = [zigzag.positions(S, cp, r, device) for r in range(cp)]
    for own in owns:
        local[own] = torch.arange(len(own), device=device)
    yield (
        "the positions that the model gets",
        "each rank counts its positions from 0; they are those in the whole sequence, zigzag.positions(...)",
        _direction(step, device, lambda tokens, targets: (tokens, local, targets)),
    )
    for layout in (contiguous, striped):
        taken = torch.zeros_like(at)
        others = [layout.positions(S, cp, r, device) for r in range(cp)]
        if list(map(len, others)) != list(map(len, owns)):
            continue  # such a mistake would not run on these shards
        taken[torch.cat(owns)] = torch.cat(others)
        cause = f"they are {layout}'s, and attention takes them for zigzag's: rl.zigzag.positions(S, cp, r)"
        direction = _direction(step, device, lambda tokens, targets, i=taken: (tokens[i], i, targets[i]))
        yield "which tokens a rank takes", cause, direction
    for runs in ([at], owns):  # shifted once more: the whole sequence, or each rank's own
        for rolled in (False, True):

            def shifted(tokens: Tensor, targets: Tensor, runs: list = runs, rolled: bool = rolled) -> tuple:
                late = targets.clone()
                for own in runs:
                    late[own] = targets[own].roll(-1)
                    if not rolled:
                        late[own[-1]] = IGNORE
                return tokens, at, late

            cause = "they are shifted once more; they came shifted: take targets[own]"
            yield "the targets", cause, _direction(step, device, shifted)


def _multiple(a: Tensor, b: Tensor) -> float:
    """c if a = c b, else 0."""
    c = float(a @ b / (b @ b)) if b.norm() else 0.0
    return c if (a - c * b).norm() <= 1e-8 * a.norm() else 0.0


AFTER, DIVISOR = "what happens to the gradients after backward", "what the loss is divided by"
UNKNOWN = "none of the usual mistakes alone"


def _off_by_a_factor(got: Tensor, want: Tensor, ranks: int, counted: str) -> tuple[str, str] | None:
    """Where to look and the likely cause if a gradient is the right one times a number; counted: what divides."""
    factor = _multiple(got, want)
    if not factor:
        return None
    if abs(factor * ranks - 1) < 1e-6:
        return AFTER, (
            f"{ranks} times too small: the shares of the ranks are to be summed. An average, as DDP makes, is right "
            "only if each rank's loss is multiplied by the number of ranks"
        )
    if abs(factor / ranks - 1) < 1e-6:
        return "what the loss goes through before backward", (
            f"{ranks} times too large: the loss was summed over the ranks inside autograd, whose backward sums the "
            "gradient once more, or multiplied by the number of ranks as if gradients were averaged. Sum detached "
            "numbers, after backward"
        )
    return DIVISOR, f"the gradient is {factor:.4g} times the right one: divide the sum by the number of {counted}"


def _nan(counted: str) -> tuple[str, str]:
    return DIVISOR, f"a rank on which no token counts divides 0 by 0: divide its sum by the number of {counted}"


COUNTED = "tokens that count on all ranks"
COUNTED_IN_ALL = f"{COUNTED}, in all micro-batches"


def _check(rank: Rank, answer: Callable) -> str:
    dp, cp = _mesh(rank.size)
    shared = world_of_a_row(rank, dp, cp)
    for idle, max_norm in ((False, 1e9), (True, 0.05)):
        about = "the last rank of each group has none" if idle else "counts differ"
        about += ", nothing to clip" if max_norm > 1 else f", max_norm = {max_norm}"
        input = f"{dp} x {cp} ranks (dp x cp), 2 steps of 2 micro-batches: {about}"
        rank.case(lambda i=idle, m=max_norm: _train(rank, answer, shared, (dp, cp), i, m), input)
    return said_of_few(rank, 4)


def _train(rank: Rank, answer: Callable, world: Any, mesh: tuple[int, int], idle: bool, max_norm: float) -> None:
    dp, cp = mesh
    steps = _steps(dp, cp, rank.device, idle=idle)
    model = TinyModel().to(rank.device)
    optimizer = Recorder(model)
    losses = returned(answer(model, optimizer, steps, max_norm, world, rank.rank // cp))
    if len(optimizer.seen) != len(steps):
        raise Wrong(
            f"optimizer.step() was called {len(optimizer.seen)} times in {len(steps)} steps",
            "the end of a step",
            "once per step, after all its micro-batches: their gradients add up in p.grad",
        )
    got = torch.stack(optimizer.seen)
    everyone = [torch.empty_like(got) for _ in range(rank.size)]
    dist.all_gather(everyone, got)
    want, want_losses = alone(steps, max_norm, rank.device)
    tolerance = 1e-10 if max_norm > 1 else 1e-5  # clip_grad_norm_ adds 1e-6 to the norm
    for i, right in enumerate(want):
        problem = difference(f"step {i + 1}: the gradient", got[i], right, tolerance)
        if problem:
            others = [x[i] for x in everyone]
            raise Wrong(problem, *_reason(others, want, i, steps, max_norm, (dp, cp), rank))
    if not isinstance(losses, list | tuple) or any(
        not abs(float(a) - b) < tolerance for a, b in zip(losses, want_losses, strict=True)
    ):
        raise Wrong(
            f"the gradients are right; losses are {[round(float(x), 4) for x in losses]}, expected "
            f"{[round(x, 4) for x in want_losses]}",
            "what is kept as loss",
            "this rank's share is no loss of the step: sum the shares of all micro-batches and ranks",
        )


def _reason(
    everyone: list[Tensor],
    want: list[Tensor],
    i: int,
    steps: Steps,
    max_norm: float,
    mesh: tuple[int, int],
    rank: Rank,
) -> tuple[str, str]:
    """Where to look and the likely cause: the known mistake that gives this very gradient, up to a factor."""
    (dp, cp), got, right = mesh, everyone[rank.rank], want[i]
    if any(x.isnan().any() for x in everyone):
        return _nan(COUNTED_IN_ALL)

    def same(ranks: list[int]) -> bool:
        return all((everyone[r] - everyone[ranks[0]]).norm() <= 1e-9 * right.norm() for r in ranks)

    early = "the order of sum and clipping", "each rank clips its own share before the sum: sum first, then clip"
    groups = [[d * cp + c for c in range(cp)] for d in range(dp)]
    if not all(map(same, groups)):
        if max_norm < 1 and all(abs(float(x.norm()) / float(everyone[0].norm()) - 1) < 1e-3 for x in everyone):
            return early
        return AFTER, (
            "they differ between ranks that share a sequence: each has the part of its own tokens. Sum p.grad over all "
            "ranks, dist.all_reduce(p.grad)"
        )
    if not same([g[0] for g in groups]):
        return (
            AFTER,
            "they differ between the dp groups, which have other sequences: sum over all ranks, not over cp alone",
        )
    if i > 0 and (difference("", got, right + want[i - 1], 1e-8) is None or _multiple(got - right, want[i - 1])):
        return "the beginning of a step", "the last step's gradients are still in p.grad: optimizer.zero_grad()"
    if max_norm < 1:
        whole = alone(steps[:1], 1e9, rank.device)[0][0]
        if _multiple(got, whole) and got.norm() > 1.01 * max_norm:
            return "the clipping", "nothing is clipped, or before the ranks' sum: clip_grad_norm_ after all_reduce"
        parts = whole.split([p.numel() for p in TinyModel().parameters()])
        each = torch.cat([g * min(1.0, max_norm / float(g.norm())) for g in parts])
        if difference("", got, each, 1e-4) is None:
            return "the clipping", "each parameter is clipped by a norm of its own; it is one norm, of all together"
        return early
    found = _off_by_a_factor(got, right, dp * cp, COUNTED_IN_ALL)
    if found:
        return found
    place = "tokens, positions, targets, the divisor, the sums over micro-batches and ranks, one by one"
    return recognised(_mistakes(steps[0], cp, rank.device) if i == 0 else (), partial(_multiple, got), (place, UNKNOWN))


STUCK = (
    "whether every rank calls the model, backward and each all_reduce, equally often and in the same order",
    "a rank leaves one of them out, perhaps because none of its tokens counts; the others wait for it there",
)
train_sharded = Exercise("10 train sharded", _check, STUCK)


def _training_step(rank: Rank, answer: Callable) -> str:
    world = rank.case(rank.world, hangs_after=60.0)
    P = rank.size
    S = 6 * P + 2 if P < 4 else 6 * P + 3  # uneven shards, for P > 1
    for prompt, about in (
        (3, "the first tokens do not count, so ranks count differently many"),
        (S // 2 + 2, "the first half does not count, so some ranks count none"),
    ):
        input = f"{S} tokens, prompt = {prompt}: {about}"
        rank.case(lambda prompt=prompt: _step_once(rank, answer, world, S, prompt), input)
    return said_of_few(rank)


def _step_once(rank: Rank, answer: Callable, world: Any, S: int, prompt: int) -> None:
    device = rank.device
    tokens = (torch.arange(S + 1) ** 2 % 11 * 7 % 11).to(device)
    model = TinyModel().to(device)
    loss = returned(answer(model, tokens, prompt, world))
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise Wrong(
            f"{len(missing)} of {len(names)} parameters have no gradient, such as {missing[0]}",
            "the line that calls backward",
            "loss.backward() is not called on this rank, or the loss does not depend on the model",
        )
    got = _flat(model)
    everyone = [torch.empty_like(got) for _ in range(rank.size)]
    dist.all_gather(everyone, got)
    want, want_loss, mistakes = _alone(S, prompt, rank.size, tokens)
    problem = difference("the gradient of all weights", got, want, 1e-10)
    if problem:
        raise Wrong(problem, *_step_reason(got, everyone, want, mistakes))
    if not isinstance(loss, Tensor | float) or not abs(float(loss) - float(want_loss)) < 1e-10:
        shown = f"{float(loss):.6g}" if isinstance(loss, Tensor | float) else type(loss).__name__
        raise Wrong(
            f"the gradients are right; the loss that is returned is {shown}, expected {float(want_loss):.6g}",
            "what is returned",
            "this rank's share is no loss of the text: sum the shares over the ranks, after backward",
        )


def _alone(S: int, prompt: int, P: int, tokens: Tensor) -> tuple[Tensor, Tensor, Iterator[tuple[str, str, Tensor]]]:
    """The gradient and the loss that one process finds alone; and the known mistakes, with their gradients."""
    device, shards = tokens.device, [contiguous.positions(S, P, r, tokens.device) for r in range(P)]
    at = torch.arange(S, device=device)
    counted = at + 1 >= prompt

    def grads(positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        model = TinyModel().to(device)
        logits = model(tokens[:-1], positions, dense_causal)
        loss = (F.cross_entropy(logits, tokens[1:], reduction="none") * weights).sum()
        loss.backward()
        return _flat(model), loss.detach()

    def mean(mask: Tensor) -> Tensor:
        return mask.double() / mask.sum()

    def means(mask: Tensor) -> Tensor:
        return torch.cat([mask[s].double() / mask[s].sum().clamp(min=1) for s in shards])

    def mistakes() -> Iterator[tuple[str, str, Tensor]]:
        local = torch.cat([torch.arange(len(s), device=device) for s in shards])
        inside = counted.clone()
        inside[[int(s[-1]) for s in shards if len(s)][:-1]] = False  # what follows these is on another rank
        cause = "each rank counts its positions from 0: the model needs where its tokens stand in the whole text"
        yield "the positions that the model gets", cause, grads(local, mean(counted))[0]
        for divide, then in ((mean, ""), (means, f", and then {DIVISOR}")):
            cause = (
                "each rank divides by the number of its own tokens, so tokens on ranks with few of them count more: "
            )
            yield DIVISOR, cause + "divide by the number of all ranks' tokens", grads(at, means(counted))[0]
            for where, mask, cause in (
                (
                    "the targets",
                    inside,
                    "the last token of each shard has no target: the targets were shifted inside the shard. What "
                    "follows it is the first token of the next shard, tokens[mine + 1]",
                ),
                (
                    "which tokens count",
                    torch.ones_like(counted),
                    "the prompt counts too: only the predictions of tokens[prompt:] are to",
                ),
                (
                    "which tokens count",
                    at >= prompt,
                    "tokens[prompt] does not count, and is to: it is what follows place prompt - 1, so mine + 1 >= "
                    "prompt",
                ),
            ):
                yield f"{where}{then}", cause, grads(at, divide(mask))[0]

    return *grads(at, mean(counted)), mistakes()


def _step_reason(
    got: Tensor, everyone: list[Tensor], want: Tensor, mistakes: Iterator[tuple[str, str, Tensor]]
) -> tuple[str, str]:
    """Where to look and the likely cause: the known mistake that gives this very gradient, up to a factor."""
    if got.isnan().any():
        return _nan(COUNTED)
    if any((other - got).norm() > 1e-9 * want.norm() for other in everyone):
        return AFTER, (
            "they differ between the ranks: each keeps the share of its own tokens. Sum p.grad over the ranks, with "
            "dist.all_reduce(p.grad)"
        )
    place = "which tokens, positions and targets each rank uses, the divisor, and the sum over ranks, one by one"
    unknown = place, f"{UNKNOWN}. With one rank, only tokens, targets and divisor can be wrong"
    found = _off_by_a_factor(got, want, len(everyone), COUNTED)
    return found or recognised(mistakes, partial(_multiple, got), unknown)


training_step = Exercise("06 training step", _training_step, STUCK)

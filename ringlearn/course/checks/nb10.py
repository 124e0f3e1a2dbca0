"""Exercises of notebook 10, training: 10a targets_of, 10b shared_loss, 10c step_gradients, 10d kept; predictions, quiz.

Oracles: positions and document numbers in plain Python for targets; float64 sums over all ranks at once for losses and
gradients; and for memory what the simulated ledger counts in a step of ``rl.nn.Transformer``. What known mistakes give
is computed the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import nn as rnn
from ...costs.training import kept_bytes, state_bytes
from ...layouts import Layout, contiguous, striped, zigzag
from ...nn import IGNORE
from ...worlds.simulated import SimulatedWorld
from ...worlds.world import PerRank
from ..viz.training import borders
from . import simulate
from .checker import Checker, Wrong, call, cases, difference, number, parts, per_rank
from .mistakes import recognised
from .oracle import numbers
from .predictions import Prediction, Quiz

# ---- 10a: targets(tokens, lengths, positions) -> a list, each rank's targets ----------------------------------------


def _documents(lengths: Sequence[int]) -> list[int]:
    """The number of the document of each position."""
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def _right_targets(tokens: Sequence[int], lengths: Sequence[int]) -> list[int]:
    own = _documents(lengths)
    return [tokens[p + 1] if p + 1 < len(tokens) and own[p + 1] == own[p] else IGNORE for p in range(len(tokens))]


def _target_mistakes(
    tokens: Sequence[int], lengths: Sequence[int], positions: Sequence[Sequence[int]]
) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Where to look, the cause, and what a mistake gives on each rank."""
    S, own, right = len(tokens), _documents(lengths), _right_targets(tokens, lengths)
    after = [*tokens[1:], IGNORE]
    owner = {p: rank for rank, held in enumerate(positions) for p in held}

    def split(full: Sequence[int]) -> list[list[int]]:
        return [[full[p] for p in held] for held in positions]

    inside = "which token follows the last one of a run of neighbours"
    shifted = (
        "the shift was done inside the shard. What follows its last token is on another rank: shift first, then split"
    )
    local = [[tokens[p] for p in held] for held in positions]
    yield inside, shifted, [[*x[1:], IGNORE] if x else [] for x in local]
    yield inside, shifted, [[*x[1:], *x[:1]] for x in local]
    ended = [
        [IGNORE if p + 1 < S and own[p] != own[p + 1] else t for p, t in zip(held, [*x[1:], IGNORE])]
        for held, x in zip(positions, local)
    ]
    yield inside, shifted, ended
    cause = "tokens whose target is on another rank are left out. They count as all others do: shift first"
    there = [[p + 1 == S or owner[p + 1] == rank for p in held] for rank, held in enumerate(positions)]
    yield inside, cause, [[right[p] if ok else IGNORE for p, ok in zip(*x)] for x in zip(positions, there)]
    end, roll = "the last token of a document", "torch.roll brings the first token of the pack to its end"
    each, start = [], 0
    for length in lengths:
        each, start = [*each, *tokens[start + 1 : start + length], IGNORE], start + length
    for where, cause, full in (
        (end, "the next document's first token is its target: the text goes on there, the document does not", after),
        (end, roll, [*tokens[1:], *tokens[:1]]),
        (end, roll, [*right[:-1], tokens[0]]),
        (end, "the last token of the pack is its own target; it has none: IGNORE", [*right[:-1], tokens[-1]]),
        (
            end,
            "the end of each document has no target; the mark stands one place late, at the next one's start",
            [IGNORE if p and own[p] != own[p - 1] else after[p] for p in range(S)],
        ),
        (
            end,
            "the mark stands one place too early: the last token but one still has a target",
            [IGNORE if p + 2 < S and own[p + 1] != own[p + 2] else after[p] for p in range(S)],
        ),
        ("the direction of the shift", "each token is to predict the one before it", [IGNORE, *tokens[:-1]]),
        ("the shift", "each token is its own target: nothing is shifted", tokens),
        ("the shift", "each token is its own target: nothing is shifted", [*tokens[:-1], IGNORE]),
        (end, "an empty document has no last token: nothing is to be marked for it", each),
    ):
        yield where, cause, split(full)
    edges = [0, *itertools.accumulate(map(len, positions))]
    cause = "they are dealt out in order. A layout may deal otherwise: positions[rank] says which ones are this rank's"
    yield "which targets a rank gets", cause, [right[a:b] for a, b in zip(edges, edges[1:])]


def _targets(fn: Callable, S: int, P: int, lengths: Sequence[int], layout: Layout, note: str = "") -> None:
    positions = [layout.positions(S, P, rank) for rank in range(P)]
    tokens = [(7 * p * p + 3 * p) % 89 + 10 for p in range(S)]
    several = f"documents of {', '.join(map(str, lengths))}" if len(lengths) > 1 else "one document"
    shown = f"{S} tokens, {several}, P = {P}, {layout}{note}"
    cause = "an index is beyond the last token: position S has none"
    if 0 in lengths:
        cause = "a document can be empty: start + length - 1 then lies before its start. Leave it out"
    got = call(
        fn, torch.tensor(tokens), list(lengths), positions, input=shown,
        where="the ends of documents and of the pack", cause=cause,
    )  # fmt: skip
    for rank, (mine, held) in enumerate(zip(per_rank(got, P, "a tensor, full[positions[r]]"), positions)):
        is_tensor = isinstance(mine, Tensor)
        shape = f"have shape {tuple(mine.shape)}" if is_tensor else f"are a {type(mine).__name__}, not a tensor"
        if not is_tensor or mine.shape != held.shape:
            raise Wrong(
                f"the targets of rank {rank} {shape}, expected {tuple(held.shape)}: one for each of its tokens",
                "how long the targets are",
                "a token without a target keeps its place, with IGNORE; then inputs and targets stay aligned",
            )
    want = _right_targets(tokens, lengths)
    have = [mine.tolist() for mine in got]
    if have == [[want[p] for p in held.tolist()] for held in positions]:
        return
    rank, p, t = next(
        (r, p, t) for r, held in enumerate(positions) for p, t in zip(held.tolist(), have[r]) if t != want[p]
    )
    name = {IGNORE: "IGNORE"}
    symptom = f"rank {rank}, position {p}: the target is {name.get(t, t)}, expected {name.get(want[p], want[p])}"
    unknown = (
        "what each position is to predict",
        "no common mistake fits. Make the targets of the whole pack first: position p has tokens[p + 1], and "
        "IGNORE at the end of each document; then take positions[rank]",
    )
    due = [[want[i] for i in held.tolist()] for held in positions]
    if want[p] == IGNORE and all(a == b or (b == IGNORE and a == t) for x, y in zip(have, due) for a, b in zip(x, y)):
        unknown = "the last token of a document", f"it is marked by {t}; the loss ignores IGNORE alone, {IGNORE}"
    known = _target_mistakes(tokens, lengths, [held.tolist() for held in positions])
    where, cause = recognised(known, lambda values: have == values, unknown)
    raise Wrong(symptom, where, cause)


targets_of = Checker(
    "10a targets_of",
    value=cases(_targets, (8, 2, [8], contiguous), (12, 3, [12], zigzag), (9, 3, [5, 4], contiguous)),
    adversarial=cases(
        _targets,
        (10, 3, [4, 1, 5], striped),
        (13, 4, [3, 0, 0, 9, 1], zigzag, ": two documents are empty"),
        (2, 3, [1, 1], zigzag, ": a rank without tokens"),
        (7, 1, [0, 7], contiguous),
    ),
)

# ---- Rank programs that sum over the ranks --------------------------------------------------------------------------


def _run(fn: Callable, size: int | tuple[int, int], *args: Any, input: str) -> simulate.Ran:
    """A run on simulated ranks; ranks that wait for ever do so in an all_reduce here, not in a ring."""
    instead = (
        (
            "deadlock",
            "which ranks get to each all_reduce, and how often",
            "some ranks leave one out, by `if` or an early return, such as those on which no token counts. The others "
            "wait for them there: add a zero, but add it",
        ),
        (
            "process group",
            "",
            "the ranks are simulated, and torch.distributed does not know them: await comm.all_reduce(t)",
        ),
    )
    try:
        return simulate.run(fn, size, *args, input=input, instead=instead)
    except Wrong as wrong:
        wrong.symptom = wrong.symptom.replace("all_to_all", "all_reduce")  # which is made of it
        raise


# ---- 10b: shared_loss(comm, losses, counts) -> share, mean ----------------------------------------------------------


def _loss_mistakes(losses: list[Tensor], counts: list[Tensor]) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Where to look, the cause, and the weight that a mistake gives to each token of each rank (up to no factor)."""
    P, N = len(losses), sum(int(c.sum()) for c in counts)
    S = sum(len(c) for c in counts)
    c = [x.double() for x in counts]
    divided = "what the sum of this rank's losses is divided by"
    means = (
        "each rank divides by the number of its own tokens that count, so tokens on ranks with few of them weigh more. "
        "Divide by the number on all ranks"
    )
    yield divided, means, [x / x.sum().clamp(min=1) for x in c]
    yield divided, means, [x / x.sum().clamp(min=1) / P for x in c]
    every = "which tokens are summed"
    ignored = "tokens that do not count are in the sum"
    yield every, ignored, [torch.ones_like(x) / N for x in c]
    yield every, ignored + ", and in the number that it is divided by", [torch.ones_like(x) / S for x in c]
    yield divided, "it is divided by the number of all tokens; only those that count are to", [x / S for x in c]
    yield (
        divided,
        "it is divided by P as well. The shares of the ranks are summed, not averaged",
        [x / N / P for x in c],
    )
    yield (
        "what the share is multiplied by",
        "P times too large. Only a wrapper that averages over the ranks wants that factor; here shares are summed",
        [x / N * P for x in c],
    )
    yield divided, "the sum is not divided: the gradient would grow with the number of tokens", c
    yield divided, "it is divided by the number of ranks, not of tokens", [x / P for x in c]


def _shared(fn: Callable, counted: Sequence[Sequence[int]], note: str = "") -> None:
    """counted: for each rank 0 or 1 for each token."""
    P = len(counted)
    counts = [torch.tensor(c, dtype=torch.bool) for c in counted]
    losses = [(numbers(r, len(c)).double().abs() + 1).requires_grad_() for r, c in enumerate(counted)]
    N = sum(int(c.sum()) for c in counts)
    words = ", ".join(str(int(c.sum())) for c in counts)
    shown = f"P = {P}, of {', '.join(str(len(c)) for c in counted)} tokens {words} count{note}"
    ran = _run(fn, P, PerRank(losses), PerRank(counts), input=shown)
    shares, means = [], []
    for rank, result in enumerate(ran.results):
        share, mean = parts(result, "share, mean")
        for name, x in (("share", share), ("mean", mean)):
            if not isinstance(x, Tensor | float | int) or isinstance(x, Tensor) and x.numel() != 1:
                what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise Wrong(
                    f"on rank {rank} {name} is {what}, not one number",
                    "the return statement",
                    "both are sums over this rank's tokens or over all ranks: .sum()",
                )
        shares.append(share)
        means.append(float(mean.detach() if isinstance(mean, Tensor) else mean))
    dead = [r for r, x in enumerate(shares) if not isinstance(x, Tensor) or not x.requires_grad]
    if dead:
        raise Wrong(
            f"the share of {simulate.who(dead)} has no gradient",
            "what is done to the share on its way out",
            "it was detached, made afresh from a number (torch.tensor, .item()), or is a plain 0 on a rank where "
            "nothing counts. That rank has to enter the backward too: losses[counts].sum() is 0 with a gradient",
        )
    if any(not torch.isfinite(x) for x in shares) or any(m != m for m in means):
        raise Wrong(
            "a share or a mean is NaN",
            "what is divided by what",
            "a rank on which no token counts divides 0 by 0: divide by the number on all ranks",
        )
    found = torch.autograd.grad(sum(shares), losses, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, losses)]
    want = [c.double() / N for c in counts]
    got, right = torch.cat(grads), torch.cat(want)
    if difference("", got, right, 1e-9):
        token = int((got - right).abs().argmax())
        problem = f"a token's loss weighs {float(got[token]):.4g}, expected {float(right[token]):.4g} = 1 / {N}"
        if right[token] == 0:
            problem = f"a token that does not count weighs {float(got[token]):.4g}"
        if not got[right != 0].all():
            raise Wrong(
                problem,
                "what goes through all_reduce",
                "a message is outside of autograd: the gradient of what it brings ends there. Keep this rank's "
                "sum for the share; reduce the count, and share.detach() for the mean",
            )
        unknown = (
            "the share: which losses are summed, and what the sum is divided by",
            "no common mistake fits. share = losses[counts].sum() / (the number that count on all ranks)",
        )
        same = partial(difference, "", got, tolerance=1e-9)
        known = _loss_mistakes(losses, counts)
        raise Wrong(problem, *recognised(known, lambda values: same(torch.cat(values)) is None, unknown))
    total = sum(float(x.detach()[c].sum()) for x, c in zip(losses, counts)) / N
    off = [r for r, m in enumerate(means) if abs(m - total) > 1e-9 * abs(total)]
    if off:
        own = all(abs(m - float(s.detach())) < 1e-9 for m, s in zip(means, shares))
        cause = "The mean of the whole text is the sum of all ranks' shares: all_reduce the detached share"
        if own:
            cause = "it is this rank's own share. " + cause
        elif all(abs(m * P - total) < 1e-9 * abs(total) for m in means):
            cause = "it is P times too small: shares are summed, not averaged"
        raise Wrong(
            f"the shares are right; the mean on {simulate.who(off)} is {means[off[0]]:.4g}, expected {total:.4g}",
            "what is returned as mean",
            cause,
        )
    for rank in range(P):
        if isinstance(ran.results[rank][1], Tensor) and ran.results[rank][1].requires_grad:
            raise Wrong(
                f"the mean on rank {rank} still has a gradient",
                "what goes through all_reduce",
                "somebody will call backward on it, and get P times the gradient, or in real processes a graph "
                "that ends at the message. Reduce share.detach()",
            )


shared_loss = Checker(
    "10b shared_loss",
    value=cases(_shared, ([[1, 1, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0]],)),
    adversarial=cases(
        _shared,
        ([[0, 0, 0], [1, 0, 1], [1, 1, 1]], ": none on rank 0"),
        ([[1, 1], [], [0, 1, 1]], ": rank 1 holds no token"),
        ([[0, 1, 1, 0]], ": a single rank"),
    ),
)

# ---- 10c: step_gradients(comm, micro, max_norm) -> grads, norm ------------------------------------------------------

Micro = list[tuple[list[Tensor], int]]
CLOSE = 1e-5  # clip_grad_norm_ adds 1e-6 to the norm


class Step(NamedTuple):
    """What each rank of a (dp, cp) mesh has accumulated: for each micro-batch the gradients of its sum, and a count."""

    mesh: tuple[int, int]
    micro: list[Micro]
    max_norm: float


def _step(mesh: tuple[int, int], batches: int, max_norm: float, even: bool = False, seed: int = 0) -> Step:
    ranks, micro = prod(mesh), []
    for rank in range(ranks):
        own: Micro = []
        for b in range(batches):
            grads = [numbers(seed + 100 * rank + 10 * b + i, *shape).double() for i, shape in enumerate(((2, 3), (4,)))]
            count = 5 if even else (7 * rank + 3 * b) % 11 + 1
            own.append(([g * count for g in grads], count))
        micro.append(own)
    return Step(mesh, micro, max_norm)


def _flat(grads: Sequence[Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1).double() for g in grads])


def _clipped(g: Tensor, most: float) -> Tensor:
    return g * min(1.0, most / max(float(g.norm()), 1e-300))


def _step_mistakes(step: Step, rank: int) -> Iterator[tuple[str, str, Tensor, float | None]]:
    """Where to look, the cause, what a mistake gives on a rank, and the norm that it reports (None: any)."""
    (dp, cp), micro, most = step
    R, K = dp * cp, len(micro[0])
    sums = [sum(_flat(g) for g, _ in own) for own in micro]
    counts = [sum(n for _, n in own) for own in micro]
    N, total = max(sum(counts), 1), sum(sums)
    right = total / N

    def whole(g: Tensor) -> tuple[Tensor, float]:
        return _clipped(g, most), float(g.norm())

    def mean(sums: Iterable[tuple[Tensor, int]]) -> Tensor:
        """Summed over (sum, count): the mean of each."""
        return sum(g / max(n, 1) for g, n in sums)

    over, divided, cut = "over which ranks is summed", "what the sum is divided by", "the clipping"
    node, place = divmod(rank, cp)
    for group, cause in (
        (
            [node * cp + i for i in range(cp)],
            "only the cp ranks, which share a sequence, are summed. Other dp groups have other sequences, and the same "
            "parameters: sum over all ranks",
        ),
        (
            [i * cp + place for i in range(dp)],
            "only over dp is summed, as before there was a cp axis. Ranks that share a sequence hold other tokens of "
            "it: sum over all ranks",
        ),
    ):
        some, n = sum(sums[r] for r in group), max(sum(counts[r] for r in group), 1)
        for g in (some / N, some / n, some / n / (R / len(group))):
            yield over, cause, *whole(g)
    for n in {dp, cp, R} - {1}:
        twice = "an axis is summed twice: all ranks are dp times cp, so one all_reduce over all of them is enough"
        yield over, twice, *whole(right * n)
    alone = "nothing is summed over the ranks: each has the gradient of its own tokens"
    yield over, alone, *whole(sums[rank] / N)
    yield over, alone, *whole(sums[rank] / max(counts[rank], 1))
    ddp = "the sum is divided by the number of ranks too, as DDP and FSDP2 do. N alone is the divisor"
    yield divided, ddp, *whole(right / R)
    own = mean(zip(sums, counts))
    for g in (own, own / R):
        cause = "each rank divides by its own count: a mean of means. Sum first, counts too, then divide"
        yield divided, cause, *whole(g)
    each = mean((_flat(g), n) for own in micro for g, n in own)
    for g in (each, each / R, each / (R * K), each / K):
        cause = "each micro-batch is divided by its own count, though they differ. Add up sums and counts of all "
        yield divided, cause + "micro-batches, then divide once", *whole(g)
    batches = [(sum(_flat(x[b][0]) for x in micro), sum(x[b][1] for x in micro)) for b in range(K)]
    for g in (mean(batches), mean(batches) / K):
        cause = "each micro-batch has a mean of its own. All of them are one step: divide once, by all counts"
        yield divided, cause, *whole(g)
    for b, which in ((0, "first"), (-1, "last")):
        some, n = batches[b]
        for g in (some / max(n, 1), some / N):
            cause = f"only the {which} micro-batch has an effect: gradients add up"
            yield "the loop over micro-batches", cause, *whole(g)
    yield divided, "it is divided by the number of micro-batches too: N counts their tokens already", *whole(right / K)
    yield divided, "it is not divided: this is the gradient of the sum of all losses", *whole(total)
    of_cp = [sum(counts[i * cp : (i + 1) * cp]) for i in range(dp)]
    of_dp = [sum(counts[i::cp]) for i in range(cp)]
    for n in (counts[rank], of_cp[node], of_dp[place]):
        cause = f"the count is summed over some ranks only: it is {n} here, {N} in all"
        yield divided, cause, *whole(total / max(n, 1))
    for axis, ns in (("cp", [of_cp[r // cp] for r in range(R)]), ("dp", [of_dp[r % cp] for r in range(R)])):
        cause = f"each rank divides by the count of its {axis} group. Sum the counts over all ranks, as the gradients"
        yield divided, cause, *whole(mean(zip(sums, ns)))

    tensors = [sum(g[i].double() for x in micro for g, _ in x) / N for i in range(len(micro[0][0][0]))]
    norm, mine = float(right.norm()), float((sums[rank] / N).norm())
    for cause, value in (
        ("no clipping: scale by max_norm / norm if the norm is larger", right),
        (
            "gradients with a norm below max_norm are scaled up to it: scale by min(1, max_norm / norm)",
            right * most / norm,
        ),
        (
            "each tensor is clipped by its own norm. It is one norm, over all parameters together",
            _flat([_clipped(t, most) for t in tensors]),
        ),
        (
            "each number is clipped. The norm of all gradients together is to be at most max_norm",
            right.clamp(-most, most),
        ),
        (
            "each rank clips its own share before the sum: reduce first, then clip",
            sum(_clipped(s / N, most) for s in sums),
        ),
        (
            "norms do not add up: take the square root of the sum of their squares",
            right * min(1, most / sum(float(t.norm()) for t in tensors)),
        ),
        ("the norm is the square root of the sum of squares; the root is missing", right * min(1, most / norm**2)),
        (
            "the norm is that of this rank's own gradient, before the sum",
            right * min(1, most / max(mine, 1e-300)),
        ),
    ):
        yield cut, cause, value, None


def _is(got: Tensor, told: float, value: Tensor, reported: float | None) -> bool:
    """Whether a rank's answer is what a mistake gives there."""
    same = difference("", got, value, 1e-5) is None
    return same and (reported is None or abs(told - reported) < 1e-5 * reported)


def _run_step(fn: Callable, step: Step, shown: str) -> simulate.Ran:
    given = [[([t.clone() for t in grads], n) for grads, n in own] for own in step.micro]
    return _run(fn, step.mesh, PerRank(given), step.max_norm, input=shown)


def _check_step(fn: Callable, step: Step, note: str = "") -> None:
    (dp, cp), micro, most = step
    counts = [sum(n for _, n in own) for own in micro]
    batches = f"{len(micro[0])} micro-batch{'es' * (len(micro[0]) > 1)}"
    shown = f"{dp} x {cp} ranks (dp x cp), {batches}, counts {counts}, max_norm {most:g}{note}"
    ran = _run_step(fn, step, shown)
    N = sum(counts)
    right = sum(_flat(g) for own in micro for g, _ in own) / N
    norm, want = float(right.norm()), _clipped(right, most)
    gots, tolds = [], []
    for rank, result in enumerate(ran.results):
        grads, told = parts(result, "grads, norm")
        due = [g.shape for g in micro[rank][0][0]]
        if not isinstance(grads, list | tuple) or [getattr(g, "shape", None) for g in grads] != due:
            raise Wrong(
                f"on rank {rank} grads are not a list of tensors with the parameters' shapes",
                "the return statement",
                "one gradient for each parameter, in the order and the shapes that came: `return grads, norm`",
            )
        gots.append(_flat(grads))
        tolds.append(number(told, "the norm is one number: `return grads, norm`", "norm is"))
    bad = simulate.wrong_ranks("", gots, [want] * len(gots), CLOSE)
    if bad:
        rank = next(iter(bad))
        symptom = f"on {simulate.who(list(bad))} the gradients are wrong (rank {rank}{bad[rank]})"
        if gots[rank].isnan().any():
            raise Wrong(
                symptom,
                "what is divided by what",
                "a rank or a micro-batch without tokens divides 0 by 0: sum the counts first",
            )
        unknown = (
            "the sums over micro-batches and ranks, the divisor, and the clipping, one by one",
            "no common mistake fits. Add up, all_reduce gradients and count, divide once, then clip",
        )
        by_rank = zip(*(_step_mistakes(step, r) for r in range(dp * cp)), strict=True)
        known = ((*each[0][:2], [gives for _, _, *gives in each]) for each in by_rank)
        raise Wrong(symptom, *recognised(known, lambda gives: all(map(_is, gots, tolds, *zip(*gives))), unknown))
    off = [r for r, told in enumerate(tolds) if not abs(told - norm) <= 1e-6 * norm]
    if off:
        unknown = (
            "what the norm is taken of",
            "it is one norm over all parameters together: the root of the sum of the squares of all their numbers",
        )

        def same(norms: list[float]) -> bool:
            return all(abs(told - n) < 1e-5 * n for told, n in zip(tolds, norms))

        raise Wrong(
            f"the gradients are right; the norm on {simulate.who(off)} is wrong (rank {off[0]}: {tolds[off[0]]:.4g}, "
            f"expected {norm:.4g})",
            *recognised(_norm_mistakes(step), same, unknown),
        )


def _norm_mistakes(step: Step) -> Iterator[tuple[str, str, list[float]]]:
    """Where to look, the cause, and the norm that each rank reports, beside gradients that are right."""
    (dp, cp), micro, most = step
    sums = [sum(_flat(g) for g, _ in own) for own in micro]
    N = sum(n for own in micro for _, n in own)
    norm = float(sum(sums).norm()) / N
    tensors = [float(sum(g[i] for own in micro for g, _ in own).norm()) / N for i in range(len(micro[0][0][0]))]
    cause = "return the norm before clipping: what it was says whether training is healthy"
    yield "when the norm is taken", cause, [min(norm, most)] * len(sums)
    several = (
        "squares are summed over ranks if each has a piece of the gradient. Here every rank has all of it, and it is "
        "counted several times"
    )
    own = "the norm is that of this rank's own part: sum first"
    for cause, norms in (
        *((several, [many**0.5 * norm] * len(sums)) for many in {dp, cp, dp * cp} - {1}),
        ("the norm is of the sum over all tokens, before the division by N", [norm * N] * len(sums)),
        *((own, [float(s.norm()) / divisor for s in sums]) for divisor in (1, N)),
        ("norms do not add up: take the square root of the sum of their squares", [sum(tensors)] * len(sums)),
        ("the norm is the square root of the sum of squares; the root is missing", [norm**2] * len(sums)),
    ):
        yield "what the norm is taken of", cause, norms


def _step_adversarial(fn: Callable) -> None:
    empty = _step((2, 3), 3, 0.25, seed=7)
    for rank in (1, 4):
        for b in range(3):
            grads, _ = empty.micro[rank][b]
            empty.micro[rank][b] = ([torch.zeros_like(g) for g in grads], 0)
    _check_step(fn, empty, ": ranks 1 and 4 have none")
    _check_step(fn, _step((3, 1), 1, 0.1, seed=3))
    _check_step(fn, _step((1, 1), 2, 0.1, seed=5), ": a single rank")


def _step_cost(fn: Callable) -> None:
    step = _step((2, 2), 4, 1.0)
    shown = "2 x 2 ranks, 4 micro-batches, 10 numbers in two parameters"
    sent = _run_step(fn, step, shown).world.trace.bytes_sent(0)
    once = _sent_once()
    if sent > 2 * once:
        raise Wrong(
            f"the values are right, but rank 0 sends {sent:,} bytes; summed once, gradients and count take {once:,}",
            "what is inside the loop over micro-batches",
            "the ranks' sums travel for every micro-batch. Add up on the rank, and all_reduce once for a step",
        )


@lru_cache
def _sent_once() -> int:
    async def reduce(comm: Any, micro: Micro, max_norm: float):
        for i in range(len(micro[0][0])):
            await comm.all_reduce(micro[0][0][i])
        await comm.all_reduce(torch.zeros(1, dtype=torch.float64))
        return 0

    step, world = _step((2, 2), 4, 1.0), SimulatedWorld((2, 2))
    world.run(reduce, PerRank(step.micro), 1.0)
    return world.trace.bytes_sent(0)


step_gradients = Checker(
    "10c step_gradients",
    value=cases(
        _check_step,
        (_step((2, 2), 1, 1e9), ": nothing to clip"),
        (_step((2, 3), 2, 1e9), ": nothing to clip"),
        (_step((2, 2), 2, 0.5),),
    ),
    adversarial=_step_adversarial,
    cost=_step_cost,
)

# ---- 10d: kept(S, P, layers, H, G, D, recompute) -> bytes ------------------------------------------------------


@lru_cache(maxsize=32)
def counted(S: int, P: int, layers: int, H: int, G: int, D: int, recompute: bool) -> int:
    """Bytes of activations that a rank keeps for the backward, as the simulated ledger counts them (rank 0)."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (1, S))
    config = rnn.Config(width=H * D, layers=layers, heads=H, kv_heads=G, block=S, checkpoint=recompute)
    model = rnn.Transformer(config)
    batch = rnn.shard_tokens(SimulatedWorld(P), tokens, rnn.next_tokens(tokens), layout=zigzag)
    with rnn.Activations(model, *batch) as held:
        loss = model(*batch)
        kept = held.live(0)
    del loss
    return kept


LOGITS = "logits are counted. In blocks of the sequence they are computed again"


def _kept_mistakes(
    S: int, P: int, layers: int, H: int, G: int, D: int, recompute: bool
) -> Iterator[tuple[str, str, float]]:
    """Where to look, the cause, and the numbers of each token that a mistake gives, times tokens."""
    d, s, last = H * D, S // P, 1 if P == 1 else 2
    layer = 7 * d + 2 * G * D * last
    right = layers * layer + d if not recompute else (layers + 1) * d

    def each(numbers: float) -> float:
        """If each layer keeps so many numbers of a token."""
        return s * (layers * numbers + d)

    if P > 1:
        yield "how many tokens a rank holds", "all S tokens are counted; a rank holds S / P of them", right * S
    yield "how wide a number is", "numbers are counted: in float32 each has 4 bytes", right * s / 4
    yield "how wide a number is", "each number is counted with 2 bytes; these are float32, 4 bytes", right * s / 2
    if recompute:
        yield "layers that are computed again", "only their inputs are kept, d numbers of a token", each(layer)
        yield "what is kept of all layers", "one layer is counted; each keeps its input", s * 2 * d
        if P > 1:
            cause = "the keys and values that came last are counted. The layer runs its ring again, so they come again"
            yield "layers that are computed again", cause, each(d + 2 * G * D)
        yield "the loss", LOGITS, s * ((layers + 1) * d + 256)
        yield (
            "what comes after the last layer",
            "its output is kept too, for the loss: layers + 1 in all",
            s * layers * d,
        )
        return
    yield "what is kept of layers that are not computed again", "only their inputs are counted", s * (layers + 1) * d
    yield "what is kept of all layers", "one layer is counted; each keeps its own", s * (layer + d)
    if G < H:
        yield "how wide k and v are", "k and v have G heads of D numbers, not H", each(7 * d + 2 * d * last)
    kv, ff = "k and v", "the feed-forward"
    if P > 1:
        cause = "the ring keeps the keys and values that came last, too: its backward begins with them"
        yield kv, cause, each(7 * d + 2 * G * D)
        cause = "k and v of all ranks are counted. They pass by: a rank keeps its own, and those that came last"
        yield kv, cause, each(7 * d + 2 * G * D * P)
    else:
        cause = "nothing arrives there: the keys that came last are its own"
        yield "k and v on a single rank", cause, each(7 * d + 4 * G * D)
    yield "what comes after the last layer", "its output is kept too, for the loss: d more", s * layers * layer
    yield kv, "keys and values are missing", each(7 * d)
    for where, cause, more in (
        (ff, "its inside is counted, 4 d before and after the GELU. In blocks it is computed again", 8 * d),
        (ff, "its inside is counted, 4 d. In blocks it is computed again", 4 * d),
        (ff, "its inside and its norm are counted. In blocks both are computed again", 10 * d),
        ("the loss", LOGITS, 256 / layers),
        ("attention", "scores are counted; no tile of them is kept, only q, k, v, out and lse", H * S),
        (
            "what a layer keeps",
            "one d is missing. out is kept twice: as attention's result, and with its heads joined. So is the first "
            "norm: before the gain and after it. And the feed-forward keeps its input, x after attention",
            -d,
        ),
        ("the norm", "a product keeps both factors: the norm is kept before the gain and after it, beside x", -2 * d),
        ("what a layer keeps", "a layer keeps 7 d and keys and values; count the list again", d),
    ):
        yield where, cause, each(layer + more)


def _kept(fn: Callable, S: int, P: int, layers: int, H: int, G: int, D: int, recompute: bool) -> None:
    shown = f"S = {S}, P = {P}, layers = {layers}, H = {H}, G = {G}, D = {D}, recompute = {recompute}"
    got = call(fn, S, P, layers, H, G, D, recompute, input=shown)
    got = number(got, "bytes: multiply tokens, numbers and 4 bytes")
    want = counted(S, P, layers, H, G, D, recompute)
    if 0.968 < got / want < 1.012:  # small terms are 2.5 per cent, counted or left out
        return
    symptom = f"{got:,.0f} bytes, {got / want:.2f} times the {want:,} that were counted in a simulated step"
    known = _kept_mistakes(S, P, layers, H, G, D, recompute)
    off, where, cause = min((abs(got / (4 * many) - 1), where, cause) for where, cause, many in known)
    if off > 0.012:
        where = "the list of what a layer keeps"
        cause = (
            "no common mistake fits. A layer keeps 7 d numbers of each token, keys and values, and those that came "
            "last; then comes the last layer's output"
        )
    raise Wrong(symptom, where, cause)


kept = Checker(
    "10d kept",
    value=cases(_kept, (480, 1, 4, 16, 4, 16, True), (480, 1, 4, 16, 4, 16, False)),
    adversarial=cases(
        _kept,
        (480, 4, 2, 16, 16, 16, True),
        (480, 4, 2, 16, 16, 16, False),
        (480, 4, 3, 16, 16, 16, False),
        (480, 1, 1, 16, 2, 16, False),
    ),
)

# ---- Predictions and the quiz ---------------------------------------------------------------------------------------


def weight_ratio(few: int, many: int) -> float:
    """How many times as much a token weighs on a rank with few tokens that count, if each rank takes its own mean."""
    a, b = (torch.ones(n, dtype=torch.float64, requires_grad=True) for n in (few, many))
    ((a.mean() + b.mean()) / 2).backward()
    return round(float(a.grad[0] / b.grad[0]), 6)


def ddp_factor(dp: int, cp: int) -> int:
    """What a loss is multiplied by before the backward, under a wrapper that averages over all ranks."""
    share = torch.eye(dp * cp, dtype=torch.float64)  # the gradient of each rank's share
    return round(float(share.sum(0)[0] / share.mean(0)[0]))


def percent_kept(P: int, layers: int = 2, H: int = 4, G: int = 2, D: int = 12) -> int:
    """Of what one rank keeps, per cent that each of P keeps, in blocks."""
    sizes = dict(layers=layers, H=H, G=G, D=D)
    return round(100 * kept_bytes(960, P, **sizes) / kept_bytes(960, 1, **sizes))


def _gradient_factor(P: int) -> int:
    """By how much gradients are too large if the loss is summed over ranks where autograd sees it."""
    shares = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(P)]
    total = sum(shares)
    for _ in range(P):  # each rank's backward
        total.backward(retain_graph=True)
    return round(float(shares[0].grad))


predict_borders = Prediction(
    "Tokens whose target is elsewhere",
    lambda: borders(64 * 64 * 2, 64),
    "2 P runs have 2 P - 1 borders, and one of them lies inside the last rank.",
)
predict_weight = Prediction(
    "Times as much", lambda: round(weight_ratio(10, 990)), "1 / (2 * 10) against 1 / (2 * 990)."
)
predict_factor = Prediction(
    "The factor",
    lambda: ddp_factor(2, 4),
    "The wrapper divides by all the ranks that it reduces over, those that share a sequence as well.",
)
predict_kept = Prediction(
    "Per cent of one rank's",
    lambda: percent_kept(2),
    "Half of everything, and in each layer the keys and values that came last.",
    tolerance=4,
    unit="%",
)
quiz = Quiz(
    "Quiz 10",
    (lambda: borders(1000, 1, striped) + borders(1000, 8, contiguous), "P - 1 borders."),
    (lambda: weight_ratio(100, 400), "1 / 100 against 1 / 400."),
    (lambda: _gradient_factor(4), "Each rank's backward runs through all ranks' shares."),
    (lambda: ddp_factor(4, 2), "It reduces over all of them."),
    (
        lambda: state_bytes(10**9, 8, fsdp=True) // 10**9,
        "16 bytes of each parameter, an eighth of them on each rank.",
        0.0,
        "GB",
    ),
)

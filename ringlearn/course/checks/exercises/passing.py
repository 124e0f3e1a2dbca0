"""The checks of the torchrun exercises, notebooks/exercises/: what each rank tries, and what it says.

The oracles are what one process computes alone, from the tensors of all ranks: they are made by formula, so every rank
knows them all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ....layouts import contiguous
from ..checker import Wrong, difference, show
from ..model import TinyModel, dense_causal
from ..oracle import numbers
from .messages import Messages, explain, replay
from .runner import Exercise, Rank, returned

FEW = "Run it with 4 ranks too: with fewer, some mistakes do not show."


def _few(rank: Rank) -> str:
    return FEW if rank.size < 3 else ""


def _try(rank: Rank, answer: Callable, *args: Any, input: str, note: bool = True) -> tuple[Any, Messages]:
    """What the answer returns, and the messages that it posted."""
    with Messages(rank.rank, rank.size, rank.note if note else lambda event: None, input) as messages:
        result = returned(answer(*args))
        rank.synchronize()
    messages.finish()
    return result, messages


def _compare_orders(rank: Rank, input: str) -> int:
    """The turns that the last case's messages take. Raises Wrong if they fit together only with luck."""
    problem = explain(rank.events(), input)
    if problem:
        raise problem
    return replay(rank.events()).turns


# ---- 01 ring pass ---------------------------------------------------------------------------------------------------


def _ring_pass(rank: Rank, answer: Callable) -> str:
    r, P = rank.rank, rank.size
    for n, input in ((1, "a token of one number, 100 + rank"), (1 << 22, "a token of 16 MiB, filled with 100 + rank")):

        def one(n: int = n, input: str = input) -> None:
            token = torch.full((n,), 100.0 + r, device=rank.device)
            got, _ = _try(rank, answer, token, r, P, input=input)
            _token(rank, got, token, n, input)

        rank.case(one)
        turns = rank.case(lambda input=input: _compare_orders(rank, input))
    best = min(P - 1, 1) * (2 + P % 2)

    def quick() -> None:
        if turns > max(best, 0):
            raise Wrong(
                f"right, but the tokens take {turns} turns, one after another",
                input=f"{P} ranks",
                where="how many ranks can send at the same time",
                cause=f"each rank waits for the one before it. If every second rank sends first while the others "
                f"receive, {best} turns are enough for any number of ranks",
            )

    rank.case(quick)

    def home() -> None:
        token = torch.tensor([100.0 + r], device=rank.device)
        for _ in range(P):
            token, _ = _try(rank, answer, token, r, P, input="a token passed on P times", note=False)
        if float(token) != 100 + r:
            raise Wrong(
                f"after P passes this rank's token is {float(token):g}, not its own, {100 + r}",
                input=f"{P} passes, each of what the last one returned",
                where="tensors that are kept from one call to the next",
                cause="what is returned must not depend on earlier calls",
            )

    rank.case(home)
    return _few(rank)


def _token(rank: Rank, got: Any, token: Tensor, n: int, input: str) -> None:
    r, P = rank.rank, rank.size
    own, want = 100.0 + r, 100.0 + (r - 1) % P
    if not isinstance(got, Tensor) or got.shape != (n,):
        what = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise Wrong(
            f"what is returned is {what}, expected a tensor of shape ({n},)",
            input=input,
            where="the return statement",
            cause="what arrived has the shape of what is sent",
        )
    if not bool((got == want).all()):
        first = float(got[0])
        if first == want:
            raise Wrong(
                f"{int((got != want).sum()):,} of {n:,} numbers are not those of rank {(r - 1) % P}",
                input=input,
                where="the size of what is sent",
                cause="a part of the token was sent: gloo takes a message that is too short without a word",
            )
        causes = {
            100.0 + (r + 1) % P: "the tokens travel the other way: rank + 1 receives, rank - 1 is received from",
            100.0 + (r - 2) % P: "rank - 1 has sent what it had just received, not its own token",
            own: "what is returned is this rank's own token: return the tensor that received",
        }
        cause = causes.get(first, "the buffer that is returned is not the one that the message was received into")
        raise Wrong(
            f"got {first:g}, expected {want:g}, the token of rank {(r - 1) % P}",
            input=input,
            where="who sends to whom, and which tensor receives",
            cause=cause,
        )
    if not bool((token == own).all()):
        raise Wrong(
            f"the token of this rank is {float(token[0]):g} afterwards, it was {own:g}",
            input=input,
            where="the tensor that receives",
            cause="the message was received into the tensor that is sent: receive into one of its own",
        )


ring_pass = Exercise(
    "01 ring pass",
    _ring_pass,
    (
        "which rank sends first and which receives first",
        "when every rank sends first, none gets to its receive: let even ranks send first and odd ranks receive first. "
        "(NCCL moves the messages of two ranks one after another, isend and irecv too, unless batch_isend_irecv posts "
        "them together.)",
    ),
)

# ---- 02 all-reduce --------------------------------------------------------------------------------------------------


def _all_reduce(rank: Rank, answer: Callable) -> str:
    r, P = rank.rank, rank.size
    for n in (P, 12 * P, 12 * P + P // 2 + 1, 1):
        input = f"a tensor of {n} whole numbers on each of {P} ranks"

        def one(n: int = n, input: str = input) -> None:
            all_x = [torch.arange(n, dtype=torch.float64, device=rank.device) * 10 + 1 + i for i in range(P)]
            x = all_x[r].clone()
            got, messages = _try(rank, answer, x, r, P, input=input)
            _sum(rank, got, all_x, input)
            if not torch.equal(x, all_x[r]):
                raise Wrong(
                    "x is another tensor afterwards",
                    input=input,
                    where="which tensors are written to",
                    cause="the parts are views of a copy of x: work with them, and leave x as it is",
                )
            if n % P == 0:
                _traffic(rank, messages, n, input)

        rank.case(one)
        rank.case(lambda input=input: _compare_orders(rank, input))
    return _few(rank)


def _sum(rank: Rank, got: Any, all_x: list[Tensor], input: str) -> None:
    P, want = rank.size, torch.stack(all_x).sum(0)
    if isinstance(got, Tensor) and got.shape == want.shape and not torch.equal(got, want):
        pairs = list(zip(got.tensor_split(P), want.tensor_split(P)))
        right = [i for i, (a, b) in enumerate(pairs) if torch.equal(a, b)]
        alone = [any(torch.equal(a, x.tensor_split(P)[i]) for x in all_x) for i, (a, _) in enumerate(pairs)]
        where, cause = (
            "which part leaves and which one arrives, in each step",
            (
                "in step t the part that leaves is the one that this rank added to in step t - 1, and what arrives is "
                "the part that rank - 1 added to"
            ),
        )
        if torch.allclose(got * P, want):
            where, cause = "what is returned", "this is the mean: an all-reduce gives the sum"
        elif all(alone):
            cause = (
                "each part is one rank's alone: what arrives is not added, or the all-gather begins with a part that "
                "has no sum yet"
            )
        elif len(right) == 1:
            where = "what happens after the first P - 1 steps"
            cause = (
                "one part has its whole sum here, the reduce-scatter; the all-gather is missing, or sends other parts"
            )
        some = f"parts {right} of {P} are right" if right else f"none of the {P} parts is right"
        numbers = f": {show(got)}, expected {show(want)}" if got.numel() <= 4 else ""
        raise Wrong(f"{some}{numbers}", input=input, where=where, cause=cause)
    problem = difference("the sum", got, want, 0.0)
    if problem:
        raise Wrong(
            problem,
            input=input,
            where="the return statement",
            cause="the result has the shape of x, all parts in order",
        )


def _traffic(rank: Rank, messages: Messages, n: int, input: str) -> None:
    P, sent = rank.size, messages.sent
    nbytes, want = 8 * sum(e[4] for e in sent), 8 * 2 * (P - 1) * (n // P)
    others = sorted({e[3] for e in sent} - {(rank.rank + 1) % P})
    if others:
        raise Wrong(
            f"the sum is right, but messages go to rank {', '.join(map(str, others))}",
            input=input,
            where="who this rank sends to",
            cause="in a ring a rank sends to rank + 1 only: each link carries the same",
        )
    if nbytes != want:
        raise Wrong(
            f"the sum is right, but this rank sends {nbytes:,} bytes in {len(sent)} messages; {want:,} are enough",
            input=input,
            where="how much each step sends",
            cause="whole tensors go round, or a step more than P - 1. A step sends one part, n / P elements, and there "
            "are 2 (P - 1) of them",
        )


all_reduce = Exercise(
    "02 all-reduce",
    _all_reduce,
    (
        "how many steps each rank makes, and whether all ranks make each of them",
        "a rank makes a pass_on more or less than its neighbours; every rank makes 2 (P - 1) of them",
    ),
)

# ---- 03 overlap -----------------------------------------------------------------------------------------------------


def _overlap(rank: Rank, answer: Callable, waits_first: Callable) -> str:
    r, P = rank.rank, rank.size
    input = f"a shard of 4 x 4 numbers on each of {P} ranks"
    shards = [numbers(i, 4, 4).double().to(rank.device) for i in range(P)]
    weight = numbers(99, 4, 4).double().to(rank.device)

    def value() -> Messages:
        with Messages(r, P, rank.note, input) as messages:

            def compute(x: Tensor) -> Tensor:
                messages.compute(x)
                return x @ weight

            got = returned(answer(shards[r].clone(), compute, r, P))
            rank.synchronize()
        messages.finish()
        problem = difference("the sum", got, sum(x @ weight for x in shards), 1e-12)
        if problem:
            computed = sum(e[0] == "compute" for e in messages.events)
            cause = "a shard is computed on twice, or one is left out: after each step x is what arrived"
            if computed != P:
                cause = f"compute is called {computed} times; there are {P} shards, this rank's own and what arrives"
            raise Wrong(problem, input=input, where="what x is in each step", cause=cause)
        return messages

    messages = rank.case(value)
    rank.case(lambda: _compare_orders(rank, input))
    rank.case(lambda: _order(rank, messages, input))
    if P == 1:
        return "One rank has nothing to send. " + FEW
    return rank.case(lambda: _measured(rank, answer, waits_first))


def _order(rank: Rank, messages: Messages, input: str) -> None:
    """Each message must be posted before a computation and waited for after it: the order of events decides."""
    P, events = rank.size, messages.events
    if len(messages.sent) > P - 1:
        raise Wrong(
            f"the sum is right, but {len(messages.sent)} messages are sent",
            input=input,
            where="the last step",
            cause=f"for {P} shards {P - 1} messages are enough: in the last step nobody needs what would arrive",
        )
    for post in (e for e in events if e[0] == "post"):
        begin, end = events.index(post), events.index(["wait", post[1]])
        if not any(e[0] == "compute" for e in events[begin:end]):
            before = any(e[0] == "compute" for e in events[:begin])
            after = any(e[0] == "compute" for e in events[end:])
            late = before and events[begin - 1][0] != "wait"
            raise Wrong(
                f"the sum is right, but nothing is computed while a message of the {_step(messages, post)} is on its "
                f"way ({post[2]})",
                input=input,
                where="what stands between post and handle.wait()",
                cause="the message is posted when the computation is over: post it first"
                if late or not after
                else "handle.wait() stands before compute: the message is posted early enough, but awaited at once",
            )


def _step(messages: Messages, post: list[Any]) -> str:
    same = [e for e in messages.events if e[0] == "post" and e[2] == post[2]]
    return f"{('first', 'second', 'third')[same.index(post)]} step" if same.index(post) < 3 else "last steps"


def _measured(rank: Rank, answer: Callable, waits_first: Callable) -> str:
    """What the clock says, in milliseconds; nothing depends on it."""
    cuda = rank.device.type == "cuda"
    n, repeats, dtype = (4096, 4, torch.bfloat16) if cuda else (512, 1, torch.float32)
    x, weight = (numbers(i, n, n).to(rank.device, dtype) / n**0.5 for i in range(2))

    def compute(y: Tensor) -> Tensor:
        for _ in range(repeats):
            y = y @ weight
        return y

    def alone(y: Tensor, compute: Callable, rank: int, size: int) -> Tensor:
        return sum(compute(y) for _ in range(size))

    times: dict[Callable, list[float]] = {alone: [], waits_first: [], answer: []}
    for trial in range(6):
        for program in times:
            dist.barrier()
            rank.synchronize()
            begin = time.perf_counter()
            program(x, compute, rank.rank, rank.size)
            rank.synchronize()
            if trial:  # the first one warms up
                times[program].append(1000 * (time.perf_counter() - begin))
    only, first, yours = (median(times[program]) for program in times)
    hardware = torch.cuda.get_device_name() if cuda else "CPU"
    text = (
        f"Measured on rank 0, {hardware}, messages of {x.numel() * x.element_size() / 2**20:g} MiB: {only:.3g} ms "
        f"computing alone, {first:.3g} ms with waits_first, {yours:.3g} ms with yours."
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not cuda and cores < 2 * rank.size:
        text += f" ({rank.size} ranks share {cores} cores, which messages need too: such times say little.)"
    return text


overlap = Exercise(
    "03 overlap",
    _overlap,
    (
        "whether every message that is posted is sent and received by all ranks",
        "some rank posts a message more or less than its neighbours; each posts P - 1 of them",
    ),
)

# ---- 06 training step -----------------------------------------------------------------------------------------------


def _training_step(rank: Rank, answer: Callable) -> str:
    world = rank.case(rank.world, patience=60.0)
    P = rank.size
    S = 6 * P + 2 if P < 4 else 6 * P + 3  # uneven shards, for P > 1
    for prompt, about in (
        (3, "the first tokens do not count, so ranks count differently many"),
        (S // 2 + 2, "the first half does not count, so some ranks count none"),
    ):
        input = f"{S} tokens, prompt = {prompt}: {about}"
        rank.case(lambda prompt=prompt, input=input: _step_once(rank, answer, world, S, prompt, input))
    return _few(rank)


def _step_once(rank: Rank, answer: Callable, world: Any, S: int, prompt: int, input: str) -> None:
    device = rank.device
    tokens = (torch.arange(S + 1) ** 2 % 11 * 7 % 11).to(device)
    model = TinyModel().to(device)
    loss = returned(answer(model, tokens, prompt, world))
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise Wrong(
            f"{len(missing)} of {len(names)} parameters have no gradient, such as {missing[0]}",
            input=input,
            where="the line that calls backward",
            cause="loss.backward() is not called on this rank, or the loss does not depend on the model",
        )
    got = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(got) for _ in range(rank.size)]
    dist.all_gather(everyone, got)
    known = _alone(S, prompt, rank.size, tokens)
    want, want_loss = known["right"]
    problem = difference("the gradient of all weights", got, want, 1e-10)
    if problem:
        where, cause = _reason(got, everyone, known)
        raise Wrong(problem, input=input, where=where, cause=cause)
    if not isinstance(loss, Tensor | float) or not abs(float(loss) - float(want_loss)) < 1e-10:
        shown = f"{float(loss):.6g}" if isinstance(loss, Tensor | float) else type(loss).__name__
        raise Wrong(
            f"the gradients are right; the loss that is returned is {shown}, expected {float(want_loss):.6g}",
            input=input,
            where="what is returned",
            cause="this rank's share is no loss of the text: sum the shares over the ranks, after backward",
        )


def _alone(S: int, prompt: int, P: int, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The gradient and the loss that one process finds alone; right, and as known mistakes change them."""
    device, shards = tokens.device, [contiguous.positions(S, P, r, tokens.device) for r in range(P)]
    at = torch.arange(S, device=device)
    counted = at + 1 >= prompt
    last = torch.zeros_like(counted)
    last[[int(s[-1]) for s in shards if len(s)][:-1]] = True  # of each shard but the last: what follows is elsewhere
    local = torch.cat([torch.arange(len(s), device=device) for s in shards])
    inside = counted & ~last

    def grads(positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        model = TinyModel().to(device)
        logits = model(tokens[:-1], positions, dense_causal)
        loss = (F.cross_entropy(logits, tokens[1:], reduction="none") * weights).sum()
        loss.backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()]), loss.detach()

    def mean(mask: Tensor) -> Tensor:
        return mask.double() / mask.sum()

    def means(mask: Tensor) -> Tensor:
        return torch.cat([mask[s].double() / mask[s].sum().clamp(min=1) for s in shards])

    every, late = torch.ones_like(counted), at >= prompt
    return {
        "right": grads(at, mean(counted)),
        "local positions": grads(local, mean(counted)),
        "targets inside the shard": grads(at, mean(inside)),
        "the prompt counts": grads(at, mean(every)),
        "one place late": grads(at, mean(late)),
        "means": grads(at, means(counted)),
        "means, the prompt counts": grads(at, means(every)),
        "means, one place late": grads(at, means(late)),
        "means, targets inside the shard": grads(at, means(inside)),
    }


def _reason(got: Tensor, everyone: list[Tensor], known: dict[str, tuple[Tensor, Tensor]]) -> tuple[str, str]:
    """Where to look and the likely cause: the known mistake that gives this very gradient, up to a factor."""
    P, want = len(everyone), known["right"][0]
    if got.isnan().any():
        return "what the loss is divided by", (
            "a rank on which no token counts divides 0 by 0: divide its sum by the number of tokens that count on all "
            "ranks"
        )
    if any((other - got).norm() > 1e-9 * want.norm() for other in everyone):
        return "what happens to the gradients after backward", (
            "they differ between the ranks: each keeps the share of its own tokens. Sum p.grad over the ranks, with "
            "dist.all_reduce(p.grad)"
        )
    factor = _multiple(got, want)
    if factor and abs(factor * P - 1) < 1e-6:
        return "what happens to the gradients after backward", (
            "P times too small: the shares of the ranks are to be summed. An average, as DDP makes, is right only if "
            "each rank's loss is multiplied by P"
        )
    if factor and abs(factor / P - 1) < 1e-6:
        return "what the loss goes through before backward", (
            "P times too large: the loss was summed over the ranks inside autograd, whose backward sums the gradient "
            "once more. Sum detached numbers, after backward"
        )
    if factor:
        return "what the loss is divided by", (
            f"it is {factor:.4g} times the right one: divide the sum by the number of tokens that count on all ranks"
        )
    for name, reason in REASONS.items():
        if _multiple(got, known[name][0]):
            return reason
    return "which tokens, positions and targets each rank uses, the divisor, and the sum over ranks, one by one", (
        "none of the usual mistakes alone. With one rank, only tokens, targets and divisor can be wrong"
    )


def _multiple(a: Tensor, b: Tensor) -> float:
    """c if a = c b, else 0."""
    c = float(a @ b / (b @ b))
    return c if (a - c * b).norm() <= 1e-8 * a.norm() else 0.0


TARGETS = (
    "the last token of each shard has no target: the targets were shifted inside the shard. What follows it is the "
    "first token of the next shard, tokens[mine + 1]"
)
MEANS = (
    "each rank divides by the number of its own tokens, so tokens on ranks with few of them count more: divide by the "
    "number of all ranks' tokens"
)

COUNTS = "the prompt counts too: only the predictions of tokens[prompt:] are to"
LATE = "tokens[prompt] does not count, and is to: it is what follows place prompt - 1, so mine + 1 >= prompt"
LOCAL = "each rank counts its positions from 0: the model needs where its tokens stand in the whole text"
REASONS = {
    "local positions": ("the positions that the model gets", LOCAL),
    "targets inside the shard": ("the targets", TARGETS),
    "the prompt counts": ("which tokens count", COUNTS),
    "one place late": ("which tokens count", LATE),
    "means": ("what the loss is divided by", MEANS),
    "means, the prompt counts": ("which tokens count, and then what the loss is divided by", COUNTS),
    "means, one place late": ("which tokens count, and then what the loss is divided by", LATE),
    "means, targets inside the shard": ("the targets, and then what the loss is divided by", TARGETS),
}

training_step = Exercise(
    "06 training step",
    _training_step,
    (
        "whether every rank calls the model, backward and each all_reduce, in the same order",
        "a rank leaves one of them out, perhaps because none of its tokens counts; the others wait for it there",
    ),
)

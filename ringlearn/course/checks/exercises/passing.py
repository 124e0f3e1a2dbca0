"""The checks of the torchrun exercises 01 to 03: messages that are passed on in a ring of ranks.

The oracles are what one process computes alone, from the tensors of all ranks: they are made by formula, so every rank
knows them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....launch.machine import cores
from ..checker import Wrong, difference, returned, show
from ..oracle import numbers
from .messages import Messages, replay
from .runner import FEW, Exercise, Rank, said_of_few


def _try(rank: Rank, answer: Callable, *args: Any, note: bool = True) -> tuple[Any, Messages]:
    """What the answer returns, and the messages that it posted."""
    with Messages(rank.rank, rank.size, rank.note if note else lambda event: None) as messages:
        result = returned(answer(*args))
        rank.synchronize()
    return result, messages


# ---- 01 ring pass ---------------------------------------------------------------------------------------------------


def _ring_pass(rank: Rank, answer: Callable) -> str:
    r, P = rank.rank, rank.size
    for n, input in ((1, "a token of one number, 100 + rank"), (1 << 22, "a token of 16 MiB, filled with 100 + rank")):

        def one(n: int = n) -> None:
            token = torch.full((n,), 100.0 + r, device=rank.device)
            got, _ = _try(rank, answer, token, r, P)
            _token(rank, got, token, n)

        rank.case(one, input)
        turns = rank.case(lambda: replay(rank.events()))
    best = min(P - 1, 1) * (2 + P % 2)

    def quick() -> None:
        if turns > max(best, 0):
            raise Wrong(
                f"right, but the tokens take {turns} turns, one after another",
                "how many ranks can send at the same time",
                f"each rank waits for the one before it. If every second rank sends first while the others "
                f"receive, {best} turns are enough for any number of ranks",
            )

    rank.case(quick, f"{P} ranks")

    def home() -> None:
        token = torch.tensor([100.0 + r], device=rank.device)
        for _ in range(P):
            token, _ = _try(rank, answer, token, r, P, note=False)
        if float(token) != 100 + r:
            raise Wrong(
                f"after P passes this rank's token is {float(token):g}, not its own, {100 + r}",
                "tensors that are kept from one call to the next",
                "what is returned must not depend on earlier calls",
            )

    rank.case(home, f"{P} passes, each of what the last one returned")
    return said_of_few(rank)


def _token(rank: Rank, got: Any, token: Tensor, n: int) -> None:
    r, P = rank.rank, rank.size
    own, want = 100.0 + r, 100.0 + (r - 1) % P
    if not isinstance(got, Tensor) or got.shape != (n,):
        what = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise Wrong(
            f"what is returned is {what}, expected a tensor of shape ({n},)",
            "the return statement",
            "what arrived has the shape of what is sent",
        )
    if not bool((got == want).all()):
        first = float(got[0])
        if first == want:
            raise Wrong(
                f"{int((got != want).sum()):,} of {n:,} numbers are not those of rank {(r - 1) % P}",
                "the size of what is sent",
                "a part of the token was sent: gloo takes a message that is too short without a word",
            )
        causes = {
            100.0 + (r + 1) % P: "the tokens travel the other way: rank + 1 receives, rank - 1 is received from",
            100.0 + (r - 2) % P: "rank - 1 has sent what it had just received, not its own token",
            own: "what is returned is this rank's own token: return the tensor that received",
        }
        cause = causes.get(first, "the buffer that is returned is not the one that the message was received into")
        raise Wrong(
            f"got {first:g}, expected {want:g}, the token of rank {(r - 1) % P}",
            "who sends to whom, and which tensor receives",
            cause,
        )
    if not bool((token == own).all()):
        raise Wrong(
            f"the token of this rank is {float(token[0]):g} afterwards, it was {own:g}",
            "the tensor that receives",
            "the message was received into the tensor that is sent: receive into one of its own",
        )


ring_pass = Exercise(
    "01 ring pass",
    _ring_pass,
    (
        "which rank sends first and which receives first",
        "when every rank sends first, none gets to its receive: let even ranks send first and odd ranks receive first, "
        "or post both messages together with batch_isend_irecv. (On NCCL, isend and irecv one by one hang when "
        "messages are large: a GPU runs its messages with another GPU one after another.)",
    ),
)

# ---- 02 all-reduce --------------------------------------------------------------------------------------------------


def _all_reduce(rank: Rank, answer: Callable) -> str:
    r, P = rank.rank, rank.size
    for n in (P, 12 * P, 12 * P + P // 2 + 1, 1):
        input = f"a tensor of {n} whole numbers on each of {P} ranks"

        def one(n: int = n) -> None:
            all_x = [torch.arange(n, dtype=torch.float64, device=rank.device) * 10 + 1 + i for i in range(P)]
            x = all_x[r].clone()
            got, messages = _try(rank, answer, x, r, P)
            _sum(rank, got, all_x)
            if not torch.equal(x, all_x[r]):
                raise Wrong(
                    "x is another tensor afterwards",
                    "which tensors are written to",
                    "the parts are views of a copy of x: work with them, and leave x as it is",
                )
            if n % P == 0:
                _traffic(rank, messages, n)

        rank.case(one, input)
        rank.case(lambda: replay(rank.events()))  # they may have fitted together only with luck
    return said_of_few(rank)


def _sum(rank: Rank, got: Any, all_x: list[Tensor]) -> None:
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
        raise Wrong(f"{some}{numbers}", where, cause)
    problem = difference("the sum", got, want, 0.0)
    if problem:
        raise Wrong(problem, "the return statement", "the result has the shape of x, all parts in order")


def _traffic(rank: Rank, messages: Messages, n: int) -> None:
    P, sent = rank.size, messages.sent
    nbytes, want = 8 * sum(e[4] for e in sent), 8 * 2 * (P - 1) * (n // P)
    others = sorted({e[3] for e in sent} - {(rank.rank + 1) % P})
    if others:
        raise Wrong(
            f"the sum is right, but messages go to rank {', '.join(map(str, others))}",
            "who this rank sends to",
            "in a ring a rank sends to rank + 1 only: each link carries the same",
        )
    if nbytes != want:
        raise Wrong(
            f"the sum is right, but this rank sends {nbytes:,} bytes in {len(sent)} messages; {want:,} are enough",
            "how much each step sends",
            "whole tensors go round, or a step more than P - 1. A step sends one part, n / P elements, and there "
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
        with Messages(r, P, rank.note) as messages:

            def compute(x: Tensor) -> Tensor:
                messages.compute(x)
                return x @ weight

            got = returned(answer(shards[r].clone(), compute, r, P))
            rank.synchronize()
        problem = difference("the sum", got, sum(x @ weight for x in shards), 1e-12)
        if problem:
            computed = sum(e[0] == "compute" for e in messages.events)
            cause = "a shard is computed on twice, or one is left out: after each step x is what arrived"
            if computed != P:
                cause = f"compute is called {computed} times; there are {P} shards, this rank's own and what arrives"
            raise Wrong(problem, "what x is in each step", cause)
        return messages

    messages = rank.case(value, input)
    rank.case(lambda: replay(rank.events()))
    rank.case(lambda: _order(rank, messages))
    if P == 1:
        return "One rank has nothing to send. " + FEW
    return rank.case(lambda: _measured(rank, answer, waits_first))


def _order(rank: Rank, messages: Messages) -> None:
    """Each message must be posted before a computation and waited for after it: the order of events decides."""
    P, events = rank.size, messages.events
    if len(messages.sent) > P - 1:
        raise Wrong(
            f"the sum is right, but {len(messages.sent)} messages are sent",
            "the last step",
            f"for {P} shards {P - 1} messages are enough: in the last step nobody needs what would arrive",
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
                "what stands between post and handle.wait()",
                "the message is posted when the computation is over: post it first"
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
    if not cuda and cores() < 2 * rank.size:
        text += f" ({rank.size} ranks share {cores()} cores, which messages need too: such times say little.)"
    return text


overlap = Exercise(
    "03 overlap",
    _overlap,
    (
        "whether every message that is posted is sent and received by all ranks",
        "some rank posts a message more or less than its neighbours; each posts P - 1 of them",
    ),
)

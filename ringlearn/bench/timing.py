"""How calls are measured: their times in turn with each other, their peak memory, and as CUDA graphs.

A GPU's clock changes with its load, so timing all calls of one candidate before those of the next is unfair. Here every
candidate has its turn in every round, in an order that changes, and the ranks begin each turn together.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..worlds import DistributedWorld, WorldError
from ..worlds.distributed import symmetric
from .calls import Call

MIB = 2**20
LONG = 0.2  # seconds; within a call this long the host runs ahead of the GPU by itself


def everyone(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather a value from every rank, in rank order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def attempt(call: Callable[[], Any], group: dist.ProcessGroup) -> tuple[Any, str | None]:
    """The result of a call, and the reason if it failed on this rank or on another; the reason is the same on all.

    If a rank fails while others wait for its messages, that is an error of the world, which is raised; and so is the
    error itself on the rank that failed, if its connections are gone with it.
    """
    value = failure = problem = None
    try:
        value = call()
    except WorldError:
        raise
    except Exception as error:  # of any function that is compared
        failure = error
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    try:
        problems = [p for p in everyone(problem, group) if p]
    except dist.DistError as lost:
        raise (failure or lost) from None
    return (None, problems[0]) if problems else (value, None)


def meet(device: torch.device, group: dist.ProcessGroup) -> None:
    """Wait until all ranks are here and their devices are idle."""
    if device.type == "cuda":
        symmetric.meet(group, device)
    else:
        dist.barrier(group)


def once(call: Call, device: torch.device) -> float:
    """Seconds until a call is complete, by the host's clock."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def clocked(call: Call, device: torch.device) -> Callable[[], float]:
    """Make a call; returns a function that gives its milliseconds, once the device has been synchronized.

    Times are taken with CUDA events on a GPU, so that the host may run ahead; otherwise with the host's clock.
    """
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        return lambda: start.elapsed_time(stop)
    ms = 1e3 * once(call, device)
    return lambda: ms


def in_a_loop(call: Call, repeats: int, device: torch.device) -> float:
    """Median milliseconds of a call that is repeated back to back, after two calls to warm up."""
    found = [clocked(call, device) for _ in range(repeats + 2)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return median(ms() for ms in found[2:])


def in_turn(calls: Sequence[Call], lead: Sequence[bool], rounds: int, world: DistributedWorld) -> list[list[float]]:
    """Milliseconds of each call in each round on this rank.

    lead: whether to make each call once before the one that is timed, so that the host is as far ahead as in a loop.
    """
    marks: list[list[Callable[[], float]]] = [[] for _ in calls]
    for number in range(rounds):
        turns = list(zip(calls, lead, marks, strict=True))
        random.Random(number).shuffle(turns)  # alike on all ranks; what came before heats or rests a GPU
        for call, first, found in turns:
            meet(world.device, world.group)
            if first:
                call()
            found.append(clocked(call, world.device))
    meet(world.device, world.group)
    return [[ms() for ms in found] for found in marks]


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """For each call and round the time of the slowest rank: only then is the call complete.

    >>> slowest([[[1.0, 4.0]], [[2.0, 3.0]]])
    [[2.0, 4.0]]
    """
    return [[max(times) for times in zip(*rounds, strict=True)] for rounds in zip(*ranks, strict=True)]


def repeated(call: Call, times: int) -> Call:
    """A call that makes another one several times in a row.

    >>> repeated(lambda: print("called"), 2)()
    called
    called
    """

    def all_of_them() -> None:
        for _ in range(times):
            call()

    return call if times == 1 else all_of_them


def captured(call: Call) -> Call:
    """The call as one CUDA graph. It is made three times first, so that nothing is set up during the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def tidy(worlds: Iterable[DistributedWorld], inputs: Iterable[Tensor]) -> None:
    """Free what earlier calls left behind: gradients, receive buffers for the next call, graphs and their pools."""
    for t in inputs:
        t.grad = None
    for world in worlds:
        world._buffers.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak(call: Call, tensors: Sequence[Tensor], world: DistributedWorld | None) -> tuple[float, int | None]:
    """Seconds of a call, and on a GPU the bytes allocated beyond its inputs at its fullest moment.

    Buffers that are kept from call to call count too.  tensors: q, k, v and dout, which do not count.  world: the one
    whose symmetric memory is added, since no allocator sees it.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return once(call, device), None
    for t in tensors:
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = once(call, device)
    inputs = sum(t.nbytes for t in tensors)
    return seconds, torch.cuda.max_memory_allocated() - inputs + (world.reserved if world else 0)

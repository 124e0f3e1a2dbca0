"""What is measured for one length: a row for each way."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..attention.table import STRATEGIES
from ..costs.one_device import attention_flops
from ..layouts import LAYOUTS
from ..worlds import DistributedWorld
from .calls import Call, calls, errors, exact, numbers
from .timing import LONG, MIB, attempt, captured, everyone, in_turn, once, peak, repeated, slowest, tidy
from .ways import MASKS, Way, sent_bytes, ways

Row = dict[str, Any]


def measure(s: int, options: argparse.Namespace, worlds: Mapping[str, DistributedWorld]) -> list[Row]:
    """The rows for s tokens per rank. All ranks call it together; times and peaks are those of the worst rank.

    Memory first, before any graph keeps some; then errors; then times.
    """
    world = next(iter(worlds.values()))
    H, G, D = options.heads
    dtype = getattr(torch, options.dtype)
    q, k, v, dout = (  # drawn here, not cut out of a full tensor, which might not fit
        numbers((options.batch, n, s, D), dtype, world.device, seed=4 * world.rank + i)
        for i, n in enumerate((H, G, G, H))
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    kinds = ("forward", "forward_backward") if options.backward else ("forward",)
    runs = []
    for way in ways(s, options, worlds):
        tidy(worlds.values(), inputs)
        run = Run(way, calls(way.call, inputs, dout), _named(way, s, world.size))
        runs.append(run)
        for kind in kinds:
            _first(run, kind, [*inputs, dout], world)
    rows = [run.row for run in runs]
    runs = [run for run in runs if run.row["problem"] is None]
    tidy(worlds.values(), inputs)
    if s * world.size <= options.error_tokens:
        _errors(s * world.size, runs, options, world)
        tidy(worlds.values(), inputs)
    _times(runs, kinds, inputs, dout, options, world)
    tidy(worlds.values(), inputs)
    for run in runs:
        _derive(run, options)
    fractions(rows)
    return rows


@dataclass
class Run:
    """A way, what is called, what was found so far, and about how many seconds each call takes."""

    way: Way
    calls: Mapping[str, Call]
    row: Row
    seconds: dict[str, float] = field(default_factory=dict)


def _named(way: Way, s: int, P: int) -> Row:
    names = {"way": way.name, "layout": way.layout, "kernel": way.kernel, "transport": way.transport}
    names["mesh"] = list(way.world.shape) if way.world and len(way.world.shape) == 2 else None
    return names | {"tokens_per_rank": s, "ranks": P, "graph": False, "not_captured": None, "problem": None}


def _first(run: Run, kind: str, tensors: Sequence[Tensor], world: DistributedWorld) -> None:
    """Peak and about the time of a second call, after a first that sets up what the way needs; or why it fails."""
    if run.row["problem"]:
        return

    def measured() -> tuple[float, int | None]:
        once(run.calls[kind], world.device)
        return peak(run.calls[kind], tensors, run.way.world)

    numbers, run.row["problem"] = attempt(measured, world.group)
    if numbers:
        seconds, peaks = zip(*everyone(numbers, world.group), strict=True)
        run.seconds[kind] = max(seconds)
        run.row[f"{kind}_peak_mib"] = None if None in peaks else max(peaks) / MIB


def _errors(S: int, runs: Sequence[Run], options: argparse.Namespace, world: DistributedWorld) -> None:
    """The error of each way over the tokens of all ranks; that of one device for one SDPA call."""
    H, G, D = options.heads
    dtype = getattr(torch, options.dtype)
    full = [numbers((options.batch, n, S, D), dtype, world.device, seed=i) for i, n in enumerate((H, G, G, H))]
    want = exact(full, options.mask == "causal", options.backward)
    for run in runs:
        layout = LAYOUTS[run.way.layout] if run.way.layout else None
        run.row["error"] = errors(run.way.call, full, want, layout, world)


# ---- Times ----------------------------------------------------------------------------------------------------------


def _times(
    runs: Sequence[Run],
    kinds: Sequence[str],
    inputs: Sequence[Tensor],
    dout: Tensor,
    options: argparse.Namespace,
    world: DistributedWorld,
) -> None:
    timed: list[tuple[Call, float]] = []  # and about how long it takes
    still: dict[tuple[int, bool], dict[str, int]] = {}  # a way without messages, as a graph or not -> where it is
    for run in runs:
        if options.graph:
            run.row["not_captured"] = run.way.not_captured
            if not run.way.not_captured:
                run.calls, run.row["not_captured"] = _graphs(run.calls, kinds, world)
            run.row["graph"] = run.row["not_captured"] is None
        n = run.way.in_a_row
        timed += [(repeated(run.calls[kind], n), n * run.seconds[kind]) for kind in kinds]
    for run in runs if options.overlap else ():
        if run.way.still and _key(run) not in still:
            alone: Mapping[str, Call] = calls(run.way.still, inputs, dout)
            if run.row["graph"]:
                alone, problem = _graphs(alone, kinds, world)
                if problem:  # times of a graph are not compared with those of calls
                    continue
            for kind in kinds:
                alone[kind]()  # as the others, it was called before it is timed
            still[_key(run)] = {kind: len(timed) + i for i, kind in enumerate(kinds)}
            timed += [(alone[kind], run.seconds[kind]) for kind in kinds]
    lead = [seconds < LONG for _, seconds in timed]
    times = slowest(everyone(in_turn([call for call, _ in timed], lead, options.repeats, world), world.group))
    places = iter(times)
    for run in runs:
        for kind, rounds in zip(kinds, places, strict=False):
            each = [ms / run.way.in_a_row for ms in rounds]
            run.row[f"{kind}_ms"], run.row[f"{kind}_range_ms"] = median(each), [min(each), max(each)]
    for run in runs:
        if _key(run) in still:
            without = {kind: median(times[i]) for kind, i in still[_key(run)].items()}
            run.row["exposed"] = {kind: exposed(run.row[f"{kind}_ms"], ms) for kind, ms in without.items()}


def _key(run: Run) -> tuple[int, bool]:
    return id(run.way.still), run.row["graph"]


def _graphs(
    eager: Mapping[str, Call], kinds: Sequence[str], world: DistributedWorld
) -> tuple[Mapping[str, Call], str | None]:
    """The calls as CUDA graphs, or as they are, and why."""
    replays, problem = attempt(lambda: {kind: captured(eager[kind]) for kind in kinds}, world.group)
    return (eager, problem) if problem else (replays, None)


def exposed(with_messages: float, without: float) -> float:
    """The part of a time that is communication in the open.

    >>> exposed(10.0, 9.0)
    0.1
    """
    return (with_messages - without) / with_messages


# ---- What follows from it -------------------------------------------------------------------------------------------


def _derive(run: Run, options: argparse.Namespace) -> None:
    way, row = run.way, run.row
    H, _, D = options.heads
    shape = dict(B=options.batch, causal=options.mask == "causal")
    forward, backward = (attention_flops(way.tokens, H, D, **shape, backward=b) / way.ranks for b in (False, True))
    for kind, flops in (("forward", forward), ("forward_backward", forward + backward)):
        if f"{kind}_ms" in row:
            row[f"{kind}_tflops"] = flops / row[f"{kind}_ms"] / 1e9
    if way.name in STRATEGIES:
        sent = sent_bytes(
            STRATEGIES[way.name],
            LAYOUTS[way.layout],
            MASKS[options.mask],
            way.world.shape,
            row["tokens_per_rank"],
            options.heads,
            options.batch,
            getattr(torch, options.dtype),
            options.backward,
        )
        row |= dict(zip(("forward_bytes", "backward_bytes"), sent, strict=False))


def fractions(rows: Sequence[Row]) -> None:
    """Add to each row its rates as parts of those of the first row, which is one device alone."""
    for row in rows:
        for kind in ("forward", "forward_backward"):
            if f"{kind}_tflops" in row and f"{kind}_tflops" in rows[0]:
                row[f"{kind}_fraction"] = row[f"{kind}_tflops"] / rows[0][f"{kind}_tflops"]

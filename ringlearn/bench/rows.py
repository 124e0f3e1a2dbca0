"""Measuring one sequence length: a row for each candidate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..attention.table import STRATEGIES
from ..costs.balance import ring_balance
from ..costs.problem import Problem
from ..worlds import DistributedWorld
from .calls import Call, calls, errors, exact, numbers
from .candidates import Candidate, candidates, sent_bytes
from .masks import MaskChoice, mask_choice
from .timing import LONG, MIB, attempt, captured, everyone, in_turn, once, peak, repeated, slowest, tidy

Row = dict[str, Any]
CAUSAL = mask_choice("causal")


def measure(
    tokens: int, options: argparse.Namespace, worlds: Mapping[str, DistributedWorld], choice: MaskChoice = CAUSAL
) -> list[Row]:
    """The rows for so many tokens per rank. All ranks call it together; times and peaks are those of the worst rank.

    Memory is measured first, before a graph holds on to some, then errors, then times.
    """
    world = next(iter(worlds.values()))
    H, G, D = options.heads
    dtype = getattr(torch, options.dtype)
    q, k, v, dout = (  # drawn here, not cut out of a full tensor, which might not fit
        numbers((options.batch, n, tokens, D), dtype, world.device, seed=4 * world.rank + i)
        for i, n in enumerate((H, G, G, H))
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    kinds = ("forward", "forward_backward") if options.backward else ("forward",)
    runs: list[Run] = []
    for candidate in candidates(tokens, choice, options, worlds):
        tidy(worlds.values(), inputs)
        run = Run(candidate, calls(candidate.call, inputs, dout), _new_row(candidate, tokens, world.size, choice))
        runs.append(run)
        for kind in kinds:
            _measure_peak(run, kind, [*inputs, dout], world)
    rows = [run.row for run in runs]
    runs = [run for run in runs if run.row["problem"] is None]
    tidy(worlds.values(), inputs)
    if tokens * world.size <= options.error_tokens:
        _errors(tokens, runs, choice, options, world)
        tidy(worlds.values(), inputs)
    if world.rank == 0:
        turns = sum(run.candidate.calls_per_turn * sum(run.seconds.values()) for run in runs)
        about = 2 * turns * options.repeats * (2 if options.overlap else 1)  # most calls are made twice in a turn
        print(
            f"  {len(runs)} ways, {options.repeats} rounds: about {max(1, round(about))} s", file=sys.stderr, flush=True
        )
    _times(runs, kinds, inputs, dout, options, world)
    tidy(worlds.values(), inputs)
    for run in runs:
        _derive(run, choice, options)
    fractions(rows)
    return rows


@dataclass
class Run:
    """A candidate with the calls that are timed, its row so far, and roughly how many seconds each call takes."""

    candidate: Candidate
    calls: Mapping[str, Call]
    row: Row
    seconds: dict[str, float] = field(default_factory=dict)


def _new_row(candidate: Candidate, tokens: int, P: int, choice: MaskChoice) -> Row:
    mesh = list(candidate.world.shape) if candidate.world and len(candidate.world.shape) == 2 else None
    what = {"way": candidate.name, "layout": candidate.layout, "kernel": candidate.kernel, "mesh": mesh}
    what |= {"transport": candidate.transport, "mask": choice.name, "tokens_per_rank": tokens, "ranks": P}
    return what | {"graph": False, "not_captured": None, "problem": None}


def _measure_peak(run: Run, kind: str, tensors: Sequence[Tensor], world: DistributedWorld) -> None:
    """Measure the peak and rough time of a second call, after one that sets things up; or record why it fails."""
    if run.row["problem"]:
        return

    def measured() -> tuple[float, int | None]:
        once(run.calls[kind], world.device)
        return peak(run.calls[kind], tensors, run.candidate.world)

    numbers, run.row["problem"] = attempt(measured, world.group)
    if numbers:
        seconds, peaks = zip(*everyone(numbers, world.group), strict=True)
        run.seconds[kind] = max(seconds)
        run.row[f"{kind}_peak_mib"] = None if None in peaks else max(peaks) / MIB


def _errors(
    tokens: int, runs: Sequence[Run], choice: MaskChoice, options: argparse.Namespace, world: DistributedWorld
) -> None:
    """Add each candidate's error over the tokens of all ranks; on one device, that of a single call over them."""
    (H, G, D), S = options.heads, tokens * world.size
    dtype = getattr(torch, options.dtype)
    full = [numbers((options.batch, n, S, D), dtype, world.device, seed=i) for i, n in enumerate((H, G, G, H))]
    want = exact(full, choice.mask(choice.lengths(tokens, world.size, share=world.size)), options.backward)
    for run in runs:
        where = run.candidate.where and run.candidate.where().to(world.device)
        run.row["error"] = errors(run.candidate.on_all_tokens or run.candidate.call, full, want, where, world)


# ---- Times ----------------------------------------------------------------------------------------------------------


def _times(
    runs: Sequence[Run],
    kinds: Sequence[str],
    inputs: Sequence[Tensor],
    dout: Tensor,
    options: argparse.Namespace,
    world: DistributedWorld,
) -> None:
    timed: list[tuple[Call, float]] = []  # and roughly how many seconds it takes
    silent: dict[tuple[int, bool], dict[str, int]] = {}  # calls without messages -> where they stand among the timed
    for run in runs:
        if options.graph:
            run.row["not_captured"] = run.candidate.not_captured
            if not run.candidate.not_captured:
                run.calls, run.row["not_captured"] = _graphs(run.calls, kinds, world)
            run.row["graph"] = run.row["not_captured"] is None
        n = run.candidate.calls_per_turn
        timed += [(repeated(run.calls[kind], n), n * run.seconds[kind]) for kind in kinds]
    for run in runs if options.overlap else ():
        if run.candidate.without_messages and _silent_key(run) not in silent:
            alone: Mapping[str, Call] = calls(run.candidate.without_messages, inputs, dout)
            if run.row["graph"]:
                alone, problem = _graphs(alone, kinds, world)
                if problem:  # times of a graph are not compared with those of calls
                    continue
            for kind in kinds:
                alone[kind]()  # like the others, it is called once before it is timed
            silent[_silent_key(run)] = {kind: len(timed) + i for i, kind in enumerate(kinds)}
            timed += [(alone[kind], run.seconds[kind]) for kind in kinds]
    lead = [seconds < LONG for _, seconds in timed]
    times = slowest(everyone(in_turn([call for call, _ in timed], lead, options.repeats, world), world.group))
    places = iter(times)
    for run in runs:
        for kind, rounds in zip(kinds, places, strict=False):
            each = [ms / run.candidate.calls_per_turn for ms in rounds]
            run.row[f"{kind}_ms"], run.row[f"{kind}_range_ms"] = median(each), [min(each), max(each)]
    for run in runs:
        if _silent_key(run) in silent:
            without = {kind: median(times[i]) for kind, i in silent[_silent_key(run)].items()}
            run.row["exposed"] = {kind: 1 - ms / run.row[f"{kind}_ms"] for kind, ms in without.items()}


def _silent_key(run: Run) -> tuple[int, bool]:
    """Candidates that compute the same without messages share that measurement: as graphs, or as calls."""
    return id(run.candidate.without_messages), run.row["graph"]


def _graphs(
    eager: Mapping[str, Call], kinds: Sequence[str], world: DistributedWorld
) -> tuple[Mapping[str, Call], str | None]:
    """The calls as CUDA graphs; or, where that fails, as they are, and the reason."""
    replays, problem = attempt(lambda: {kind: captured(eager[kind]) for kind in kinds}, world.group)
    return (eager, problem) if problem else (replays, None)


# ---- What follows from it -------------------------------------------------------------------------------------------


def _derive(run: Run, choice: MaskChoice, options: argparse.Namespace) -> None:
    candidate, row, (H, G, D) = run.candidate, run.row, options.heads
    product = 2 * options.batch * H * D * candidate.scores / candidate.ranks
    for kind, flops in (("forward", 2 * product), ("forward_backward", 7 * product)):  # and 5 backward
        if f"{kind}_ms" in row:
            row[f"{kind}_tflops"] = flops / row[f"{kind}_ms"] / 1e9
    if candidate.name in STRATEGIES:
        itemsize = getattr(torch, options.dtype).itemsize
        mesh = tuple(candidate.world.shape) if row["mesh"] else (1, candidate.ranks)
        how = dict(B=options.batch, itemsize=itemsize, backward=options.backward, layout=candidate.split)
        problem = Problem(candidate.tokens, mesh, H, G, D, **how)
        sent = sent_bytes(STRATEGIES[candidate.name], choice, problem)
        row |= dict(zip(("forward_bytes", "backward_bytes"), sent, strict=False))
        if candidate.name == "ring" and candidate.ranks > 1:
            mask = choice.mask(choice.lengths(row["tokens_per_rank"], candidate.ranks, share=candidate.ranks))
            row["balance"] = ring_balance(mask, candidate.tokens, candidate.ranks, how["layout"]).ratio


def fractions(rows: Sequence[Row]) -> None:
    """Add to each row its rates as fractions of the best ones of one device alone."""
    for kind in ("forward", "forward_backward"):
        alone = [row[f"{kind}_tflops"] for row in rows if row.get("way") == "one device" and f"{kind}_tflops" in row]
        for row in rows:
            if alone and f"{kind}_tflops" in row:
                row[f"{kind}_fraction"] = row[f"{kind}_tflops"] / max(alone)

"""What is measured for one length, a row for each way, and the table of the rows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..costs import attention_flops
from ..worlds import DistributedWorld
from .options import LAYOUTS
from .timing import LONG, MIB, Call, attempt, captured, everyone, in_turn, median, once, peak, repeated, slowest, tidy
from .ways import MASKS, STRATEGIES, Way, sent_bytes, ways

Row = dict[str, Any]


def measure(s: int, options: argparse.Namespace, worlds: Mapping[str, DistributedWorld]) -> list[Row]:
    """The rows for s tokens per rank. All ranks call it together; times and peaks are those of the worst rank.

    Memory first, before any graph keeps some; then errors; then times.
    """
    world = next(iter(worlds.values()))
    H, G, D = options.heads
    dtype = getattr(torch, options.dtype)
    q, k, v, dout = (  # drawn here, not cut out of a full tensor, which might not fit
        _numbers((options.batch, n, s, D), dtype, world.device, seed=4 * world.rank + i)
        for i, n in enumerate((H, G, G, H))
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    kinds = ("forward", "forward_backward") if options.backward else ("forward",)
    runs = []
    for way in ways(s, options, worlds):
        tidy(worlds.values(), inputs)
        run = Run(way, _calls(way.call, inputs, dout), _named(way, s, world.size))
        runs.append(run)
        for kind in kinds:
            _first(run, kind, [*inputs, dout], world)
    rows = [run.row for run in runs]
    runs = [run for run in runs if run.row["problem"] is None]
    tidy(worlds.values(), inputs)
    if s * world.size <= options.error_tokens:
        _errors(s, runs, options, world)
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


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _calls(attention: Any, inputs: Sequence[Tensor], dout: Tensor) -> dict[str, Call]:
    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def forward_backward() -> None:
        for t in inputs:
            t.grad = None
        attention(*inputs).backward(dout)

    return {"forward": forward, "forward_backward": forward_backward}


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
            calls = _calls(run.way.still, inputs, dout)
            if run.row["graph"]:
                calls, problem = _graphs(calls, kinds, world)
                if problem:  # times of a graph are not compared with those of calls
                    continue
            for kind in kinds:
                calls[kind]()  # as the others, it was called before it is timed
            still[_key(run)] = {kind: len(timed) + i for i, kind in enumerate(kinds)}
            timed += [(calls[kind], run.seconds[kind]) for kind in kinds]
    lead = [seconds < LONG for _, seconds in timed]
    times = slowest(everyone(in_turn([call for call, _ in timed], lead, options.repeats, world), world.group))
    places = iter(times)
    for run in runs:
        for kind, rounds in zip(kinds, places, strict=False):
            each = [ms / run.way.in_a_row for ms in rounds]
            run.row[f"{kind}_ms"], run.row[f"{kind}_range_ms"] = median(each), [min(each), max(each)]
    for run in runs:
        if _key(run) in still:
            alone = {kind: median(times[i]) for kind, i in still[_key(run)].items()}
            run.row["exposed"] = {kind: exposed(run.row[f"{kind}_ms"], ms) for kind, ms in alone.items()}


def _key(run: Run) -> tuple[int, bool]:
    return id(run.way.still), run.row["graph"]


def _graphs(
    calls: Mapping[str, Call], kinds: Sequence[str], world: DistributedWorld
) -> tuple[Mapping[str, Call], str | None]:
    """The calls as CUDA graphs, or as they are, and why."""
    replays, problem = attempt(lambda: {kind: captured(calls[kind]) for kind in kinds}, world.group)
    return (calls, problem) if problem else (replays, None)


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


# ---- Errors ---------------------------------------------------------------------------------------------------------


def _errors(s: int, runs: Sequence[Run], options: argparse.Namespace, world: DistributedWorld) -> None:
    """The error of each way against float32, over the tokens of all ranks; that of one device for one SDPA call."""
    H, G, D = options.heads
    dtype, S = getattr(torch, options.dtype), s * world.size
    full = [_numbers((options.batch, n, S, D), dtype, world.device, seed=i) for i, n in enumerate((H, G, G, H))]
    exact = _exact(full, options.mask == "causal", options.backward)
    for run in runs:
        way, row = run.way, run.row
        if way.layout is None:
            tensors, want = full, exact
        else:
            where = LAYOUTS[way.layout].positions(S, world.size, world.rank, world.device)
            tensors, want = ([t[:, :, where].contiguous() for t in some] for some in (full, exact))
        *inputs, dout = tensors
        inputs = [t.detach().requires_grad_() for t in inputs]
        out = way.call(*inputs)
        # A function of --compare may overlook an input: its gradient is zeros, which is an error of 100 %.
        grads = torch.autograd.grad(out, inputs, dout, materialize_grads=True) if options.backward else ()
        row["error"] = {}
        for name, a, b in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), want, strict=False):
            sums = torch.stack([(a.double() - b.double()).square().sum(), b.double().square().sum()])
            dist.all_reduce(sums, group=world.group)
            row["error"][name] = float((sums[0] / sums[1]).sqrt())


def _exact(full: Sequence[Tensor], is_causal: bool, backward: bool) -> list[Tensor]:
    q, k, v, dout = (t.detach().float() for t in full)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if backward else ())]


# ---- The table ------------------------------------------------------------------------------------------------------


def label(row: Row, rows: Sequence[Row]) -> str:
    """A row's way, with what tells it from the others.

    >>> row = {"way": "ring", "transport": "nccl", "layout": "zigzag", "kernel": "auto", "graph": True}
    >>> label(row, [row])
    'ring, nccl, graph'
    >>> label({**row, "way": "double-ring", "mesh": [2, 4]}, [row])
    'double-ring 2 x 4, nccl, graph'
    """
    mesh = " x ".join(map(str, row.get("mesh") or ()))
    parts = [f"{row['way']} {mesh}".rstrip(), row["transport"]]
    for name in ("layout", "kernel"):
        if len({other[name] for other in rows if other["layout"] and other[name]}) > 1 and row["layout"]:
            parts.append(row[name])
    return ", ".join(filter(None, [*parts, "graph" if row.get("graph") else None]))


def table(rows: Sequence[Row]) -> str:
    """The rows as text; pairs of columns are the forward, and forward and backward."""
    names = [label(row, rows) for row in rows]
    width = max(map(len, names))
    pairs = [
        ("ms", "ms", ".3f", 9),
        ("TFLOP/s per rank", "tflops", ".1f", 8),
        ("of one device", "fraction", ".1%", 7),
        ("peak MiB", "peak_mib", ".0f", 7),
        ("exposed", None, ".1%", 7),
    ]
    if not any("exposed" in row for row in rows):
        pairs.pop()
    top = " " * (13 + width)
    second = f"{'tokens/rank':>11}  {'way':<{width}}"
    for title, _, _, w in pairs:
        top += f"  {title:^{2 * w + 1}}"
        second += f"  {'fwd':>{w}} {'fwd+bwd':>{w}}"
    lines = [top + "  " + f"{'error':^17}", second + f"  {'out':>8} {'grads':>8}"]
    for text, row in zip(names, rows, strict=True):
        line = f"{row['tokens_per_rank']:>11,}  {text:<{width}}"
        if row["problem"]:
            lines.append(f"{line}  {row['problem']}")
            continue
        for _, name, form, w in pairs:
            for kind in ("forward", "forward_backward"):
                value = row.get(f"{kind}_{name}") if name else row.get("exposed", {}).get(kind)
                line += ("  " if kind == "forward" else " ") + f"{'-' if value is None else format(value, form):>{w}}"
        error = row.get("error") or {}
        grads = [error[gradient] for gradient in ("dq", "dk", "dv") if gradient in error]
        line += f"  {format(error['out'], '.1e') if error else '-':>8} {format(max(grads), '.1e') if grads else '-':>8}"
        lines.append(line)
    reasons = [
        f"{text}: no graph: {row['not_captured']}"
        for text, row in zip(names, rows, strict=True)
        if row.get("not_captured")
    ]
    return "\n".join([*lines, *dict.fromkeys(reasons)])

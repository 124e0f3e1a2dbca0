"""Times documents and windows in a ring of two, on one GPU: the kernel calls of each rank, without any messages.

    python tools/measure_segments.py --out segments.json
    python tools/measure_segments.py --plan           the planning alone, on the CPU

Each of two ranks holds 32,768 of 65,536 tokens, bfloat16, 32 query heads, 8 key/value heads, head dim 128. One GPU has
half the documents in 32,768 tokens, in one call of a kernel with variable lengths; the ring has each of them twice, so
documents are equally long. Lengths are log-normal, from seed 0, or all equal.

A row for each mask, layout and kernel: the most calls in a step; the busier rank's work over the mean; milliseconds of
the busier rank forward, and forward and backward, merging included, the median of several; the same as a CUDA graph;
TFLOP/s per GPU of visible scores (a backward counts 2.5 times a forward), and what share of one GPU's rate that is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import ringlearn as rl  # noqa: E402
from ringlearn import kernels  # noqa: E402
from ringlearn.kernels import sdpa  # noqa: E402
from ringlearn.partial.accumulate import ALL, Accumulator, Sum  # noqa: E402
from ringlearn.tiles import Kind, Tile, plan_steps  # noqa: E402

H, G, D, P = 32, 8, 128, 2
LAYOUTS = {"contiguous": rl.contiguous, "zigzag": rl.zigzag, "striped": rl.striped}


def lengths_of(n: int, total: int, equal: bool, seed: int = 0) -> list[int]:
    """n documents, equally long or log-normal, that add up to ``total``."""
    sample = random.Random(seed)
    weights = [1.0 if equal else sample.lognormvariate(0, 1) for _ in range(n)]
    lengths = [max(1, int(w / sum(weights) * total)) for w in weights]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return lengths


def twice(lengths: list[int], seed: int = 1) -> list[int]:
    both = lengths * 2
    random.Random(seed).shuffle(both)
    return both


def cases(s: int) -> dict[str, tuple[rl.Mask, rl.Mask, list[int] | None]]:
    """For each row: the mask of one GPU, that of a ring of two, and the ring's documents."""
    window, short = rl.sliding_window(4096), rl.sliding_window(1024)
    found: dict[str, tuple] = {
        "1 document": (rl.causal & rl.documents([s]), rl.causal & rl.documents([2 * s]), [2 * s])
    }
    for kind, equal in (("log-normal", False), ("equal", True)):
        for n in (8, 64, 512):
            half = lengths_of(n // 2, s, equal)
            found[f"{n} documents, {kind}"] = (rl.causal & rl.documents(half), None, twice(half))
        half = lengths_of(8, s, equal)
        found[f"16 documents, window 1,024, {kind}"] = (rl.causal & short & rl.documents(half), short, twice(half))
    found["window 4,096"] = (rl.causal & window, rl.causal & window, None)
    for name, (one, more, lengths) in found.items():
        if lengths is not None:
            ring = rl.causal & rl.documents(lengths)
            found[name] = (one, ring if more is None or name == "1 document" else ring & more, lengths)
    return found


Steps = list[tuple[Tensor, Tensor, tuple[Tile, ...]]]  # keys and values of a step, and the tiles


def forward(kernel, q: Tensor, steps: Steps, scale: float):
    parts = sum(len(tiles) for _, _, tiles in steps)
    result = Accumulator(q.shape, torch.float32, q.device, parts=parts, final=q.dtype)
    for k, v, tiles in steps:
        for tile in tiles:
            result.add(tile.q, kernel.forward(q, k, v, tile, scale))
    return result.partial


def both(kernel, q: Tensor, dout: Tensor, steps: Steps, scale: float):
    out, lse = forward(kernel, q, steps, scale)
    parts = sum(len(tiles) for _, _, tiles in steps)
    dq = Sum([q.shape], q.dtype if parts <= 2 else torch.float32, q.device)
    sums = []
    for k, v, tiles in reversed(steps):
        dkv = Sum([k.shape, v.shape], k.dtype, k.device)
        for tile in tiles:
            dq_tile, dk_tile, dv_tile = kernel.backward(dout, q, k, v, out, lse, tile, scale)
            dq.add(ALL, tile.q, dq_tile)
            dkv.add(ALL, tile.k, dk_tile, dv_tile)
        sums += dkv.tensors
    return out, lse, *dq.tensors, *sums


def milliseconds(function: Callable[[], object], repeats: int = 7) -> float:
    for _ in range(2):
        function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def as_graph(function: Callable[[], object]) -> float | str:
    """Milliseconds as a CUDA graph, or why there is none."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = function()
        found = milliseconds(graph.replay)
        del kept, graph
        return found
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def measured(kernel, ranks: list[tuple[Tensor, Tensor, Steps]]) -> dict:
    """Milliseconds of the busier rank."""
    found: dict = {"forward": 0.0, "both": 0.0, "forward graph": 0.0, "both graph": 0.0}
    scale = D**-0.5
    for q, dout, steps in ranks:
        run = {
            "forward": lambda q=q, steps=steps: forward(kernel, q, steps, scale),
            "both": lambda q=q, dout=dout, steps=steps: both(kernel, q, dout, steps, scale),
        }
        for name, function in run.items():
            found[name] = max(found[name], milliseconds(function))
            graph = as_graph(function)
            before = found[f"{name} graph"]
            found[f"{name} graph"] = (
                graph if isinstance(graph, str) else before if isinstance(before, str) else max(before, graph)
            )
    return found


def tflops(area: float, ms: float | str, times: float) -> float:
    return 0.0 if isinstance(ms, str) or not ms else 2 * area * H * 2 * D * times / ms / 1e9


def show(row: dict) -> None:
    def ms(name: str) -> str:
        return f"{row['ms'][name]:6.2f}" if isinstance(row["ms"][name], float) else " error"

    tflops, share = row["tflops"], row["share"]
    print(
        f"{row['mask']:<33} {row['way']:<11} {row['layout']:<19} {row['calls']:>2} {row['balance']:5.2f} | "
        f"{ms('forward')} {ms('forward graph')} | {ms('both')} {ms('both graph')} | "
        f"{tflops['forward']:4.0f} {tflops['both']:4.0f} {tflops['both graph']:4.0f} | "
        f"{share['forward']:4.0%} {share['both']:4.0%} {share['both graph']:4.0%}",
        flush=True,
    )
    for name, found in row["ms"].items():
        if isinstance(found, str):
            print(f"    {name}: {found}", flush=True)


def measure(s: int, only: str) -> list[dict]:
    torch.manual_seed(0)
    tensors = [[torch.randn(1, h, s, D, device="cuda", dtype=torch.bfloat16) for h in (H, G, G, H)] for _ in range(P)]
    every, rows = sdpa.FUSED, []
    has_fa4 = kernels.choose("fa4").unsupported(*tensors[0][:3], Kind.FULL) is None
    ways = {"fa4": every} if has_fa4 else {}
    ways["without fa4"] = tuple(kernel for kernel in every if kernel.name != "fa4")
    print(
        "mask, kernels, layout, most calls in a step, balance | ms forward, as a graph | both, as a graph | "
        "TFLOP/s forward, both, as a graph | shares of one GPU's rate"
    )
    for (name, (one, ring, lengths)), (way, fused) in product(cases(s).items(), ways.items()):
        if only not in name:
            continue
        sdpa.FUSED, base = fused, None
        layouts: dict[str, rl.Layout | None] = {"one GPU, one call": None, **LAYOUTS}
        if lengths is not None and len(lengths) > 1:
            layouts["zigzag per document"] = rl.zigzag_per_document(lengths)
        for layout in layouts.values():
            if layout is None:
                kernel, mask, shards = kernels.choose("fa4" if way == "fa4" else "cuda_flash"), one, ((range(s),),)
            else:
                kernel, mask, shards = kernels.choose(), ring, layout.ranges(2 * s, P)
            steps = [plan_steps(mask, mine, shards) for mine in shards]
            ranks = [
                (q, dout, [(*tensors[r - t][1:3], steps[r][r - t]) for t in range(len(shards))])  # as in a ring
                for r, (q, _, _, dout) in enumerate(tensors[: len(shards)])
            ]
            areas = [sum(tile.area for tiles in of_rank for tile in tiles) for of_rank in steps]
            mean = sum(areas) / len(areas)
            with torch.no_grad():
                ms = measured(kernel, ranks)
            rates = {what: tflops(mean, ms[what], 3.5 if "both" in what else 1.0) for what in ms}
            base = base or rates
            rows.append(
                {
                    "mask": name,
                    "way": way,
                    "layout": "one GPU, one call" if layout is None else layout.name,
                    "calls": max(len(tiles) for of_rank in steps for tiles in of_rank),
                    "balance": max(areas) / mean,
                    "ms": ms,
                    "tflops": rates,
                    "share": {what: rates[what] / base[what] if base[what] else 0.0 for what in rates},
                }
            )
            show(rows[-1])
    sdpa.FUSED = every
    return rows


def measure_planning(documents: int = 2000, S: int = 131072) -> list[dict]:
    """Milliseconds of a CPU to plan all steps of one rank for a mask and a layout that nobody has seen before."""
    torch.set_num_threads(1)  # as torchrun does; the time of all threads would count
    rows = []
    for P in (2, 4, 8):
        for name in (*LAYOUTS, "zigzag per document"):
            times = []
            for seed in range(5):
                lengths = lengths_of(documents, S, False, seed + 10 * P)
                mask = rl.causal & rl.documents(lengths)
                layout = LAYOUTS.get(name) or rl.zigzag_per_document(lengths)
                start = time.process_time()
                ranges = layout.ranges(S, P)
                shards = time.process_time()
                plan_steps(mask, ranges[1], ranges)
                planned = time.process_time()
                for _ in range(31):  # the other layers of a model
                    plan_steps(mask, ranges[1], layout.ranges(S, P))
                times.append([1e3 * x for x in (shards - start, planned - shards, time.process_time() - planned)])
            fastest = [min(column) for column in zip(*times, strict=True)]
            rows.append({"ranks": P, "layout": name, "milliseconds": fastest})
            print(
                f"{documents} documents, {P} ranks, {name:<20} positions {fastest[0]:6.2f} ms, all steps "
                f"{fastest[1]:6.2f} ms, 31 more layers {fastest[2]:6.2f} ms",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--length", type=int, default=32768, help="tokens of each rank")
    parser.add_argument("--only", default="", help="only the masks whose name has this in it")
    parser.add_argument("--plan", action="store_true", help="time the planning alone; needs no GPU")
    options = parser.parse_args()
    results = measure_planning() if options.plan else measure(options.length, options.only)
    if options.out:
        machine = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

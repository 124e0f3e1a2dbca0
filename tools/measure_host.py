"""How long an eager call keeps the host busy, and with what: a ring of short shards, of which the GPU computes less.

    torchrun --standalone --nproc-per-node 2 tools/measure_host.py --out docs/measurements/<date>-host-2-<gpu>.json
    torchrun --standalone --nproc-per-node 1 tools/measure_host.py --loopback --profile host.txt
    torchrun --standalone --nproc-per-node 2 tools/measure_host.py --tokens 8192 --kernel fa4
    torchrun --standalone --nproc-per-node 2 tools/measure_host.py --compare other.py:zhuzilin_zigzag   (docs/bench.md)

32:8 heads, D 128, bfloat16, causal, zigzag, plain tensors. The time of a call is taken by the host's clock until it
returns, after a synchronisation, so that a GPU that lags behind is not counted; the median of many. With ``--loopback``
a single process runs rank 0 of two, whose neighbour is itself: the same work for the host on one GPU, wrong numbers.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import io
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringlearn as rl
from ringlearn.bench.options import load
from ringlearn.kernels.sdpa import FUSED
from ringlearn.launch.machine import hardware, versions
from ringlearn.worlds.distributed.symmetric import SymmetricWire


class Loopback(SymmetricWire):
    """Rank 0 of two, with its own memory for its neighbour's."""

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.capacity:
            self.capacity = -(-nbytes // 2**21) * 2**21
            self._memory = torch.empty(self.slots * self.capacity, dtype=torch.uint8, device=self.device)
            self._words = torch.tensor([1, 0] * self.slots, dtype=torch.int32, device=self.device)
            self._slots, self._flags = [self._memory.data_ptr()] * 2, [self._words.data_ptr()] * 2
            self._prepare()
            torch.cuda.synchronize()


def looped(world: rl.DistributedWorld) -> rl.DistributedWorld:
    """A world of one rank as rank 0 of two."""
    world.size, world.shape, world.check = 2, (2,), False
    world._symmetric = Loopback(dist.group.WORLD, 0, 2, world.device)
    world.transport = "symmetric, to itself"
    return world


def microseconds(call: Callable[[], Any], repeats: int) -> list[float]:
    for _ in range(20):
        call()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return found


def profile(call: Callable[[], Any], repeats: int, name: str) -> tuple[str, float]:
    """Where the time goes, as text, and how many Python functions a call runs."""
    profiler = cProfile.Profile()
    for _ in range(repeats):
        torch.cuda.synchronize()
        profiler.enable()
        call()
        profiler.disable()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(60)
    stats.sort_stats("cumulative").print_stats(60)
    return f"=== {name}, {repeats} calls\n{text.getvalue()}", stats.total_calls / repeats


def cases(
    world: rl.DistributedWorld, tokens: int, kernel: str | None = None, others: dict[str, Callable] | None = None
) -> dict[str, Callable[[], Any]]:
    def tensors(grad: bool) -> list[torch.Tensor]:
        return [
            torch.randn(1, H, tokens, 128, dtype=torch.bfloat16, device=world.device, requires_grad=grad)
            for H in (32, 8, 8)
        ]

    given, leaves = tensors(False), tensors(True)
    dout = torch.randn_like(given[0])
    sdpa = FUSED[2]
    cudnn = sdpa.unsupported(*given, rl.kernels.Kind.CAUSAL) is None

    def ring(q, k, v):
        return rl.ring_attention(q, k, v, rl.causal, kernel=kernel, layout=rl.zigzag, world=world)

    def both() -> None:
        torch.autograd.grad(ring(*leaves), leaves, dout)

    def one_thread() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            both()

    found = {"forward": lambda: ring(*given), "forward and backward": both}
    found["forward and backward in one thread of autograd"] = one_thread  # torch gives each GPU a thread of its own
    if cudnn:  # what the kernels of such a ring cost by themselves
        aten = torch.ops.aten._scaled_dot_product_cudnn_attention
        found["one cuDNN forward"] = lambda: aten(*given, None, True, 0.0, True, False, scale=0.1)
    for name, other in (others or {}).items():
        found[f"{name}, forward"] = lambda other=other: other(*given, "zigzag", world.group)
        found[f"{name}, forward and backward"] = lambda other=other: torch.autograd.grad(
            other(*leaves, "zigzag", world.group), leaves, dout
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of one rank (default: 2048)")
    parser.add_argument("--kernel", help="of rl.kernels; default: the one that is chosen")
    parser.add_argument("--compare", nargs="+", default=[], help="other functions, as those of ringlearn.bench")
    parser.add_argument("--repeats", type=int, default=300, help="calls of each kind (default: 300)")
    parser.add_argument("--loopback", action="store_true", help="one process as rank 0 of two, on one GPU")
    parser.add_argument("--profile", type=Path, help="write where the time goes to this file")
    parser.add_argument("--out", type=Path, help="write a record to this file")
    options = parser.parse_args()
    results, profiles, others = {}, [], {name: load(name) for name in options.compare}
    worlds = {"check=False": rl.DistributedWorld(check=False)}
    rank = worlds["check=False"].rank
    if options.loopback:
        worlds = {name: looped(world) for name, world in worlds.items()}
    else:
        worlds["check=True"] = rl.DistributedWorld()
    for name, world in worlds.items():
        for case, call in cases(world, options.tokens, options.kernel, others).items():
            found = microseconds(call, options.repeats)
            low, middle, high = statistics.quantiles(found, n=4)
            row = {"median_us": round(middle, 1), "quartiles_us": [round(low, 1), round(high, 1)]}
            text, calls = profile(call, 50, f"{case}, {name}")
            row["python_calls"] = round(calls)
            profiles.append(text)
            results[f"{case}, {name}"] = row
            if rank == 0:
                print(f"{case}, {name}: {row}", flush=True)
    if rank == 0:
        some = next(iter(worlds.values()))
        record = {
            "what": "host time of an eager ring_attention call, of rank 0",
            "date": datetime.date.today().isoformat(),
            "command": f"torchrun --standalone --nproc-per-node {dist.get_world_size()} tools/measure_host.py "
            + " ".join(sys.argv[1:]),
            "setup": {"tokens_per_rank": options.tokens, "heads": [32, 8], "D": 128, "dtype": "bfloat16",
                      "kernel": options.kernel, "ranks": some.size, "transport": some.transport,
                      "mask": "causal", "layout": "zigzag"},
            "hardware": hardware(dist.get_world_size()),
            "versions": versions(),
            "results": results,
        }  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
        if options.profile:
            options.profile.write_text("\n".join(profiles))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

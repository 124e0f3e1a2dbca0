"""Why a hop that should hide does not: a step of the ring with the host in the way, without it, and without NCCL.

    torchrun --nproc-per-node 2 tools/measure_hiding.py --out docs/measurements/hiding.json

The step is one of a zigzag ring under a causal mask: s queries against s / 2 keys, 32 query heads, 8 key/value heads,
head dim 128, bfloat16, while k and v (s tokens) travel to the next rank. Buffers are allocated once, and nothing is
noted in a trace, so what is measured is the hardware, torch and NCCL. Three ways of timing 16 steps in a row:

    host_ms     until the host has posted them: Python, torch, launches
    eager_ms    on the GPU, started at once, as a program does it
    queued_ms   on the GPU, started only when the host has posted all of them: without the host

How k and v travel:

    nccl        batch_isend_irecv, posted before the tile and awaited after it
    priority    the same on a stream of high priority
    head start  the same, and the tile starts some 10 microseconds after the message was posted
    copy        pulled from the neighbour's memory by the GPU's copy engine, on a stream of its own (the same shard
                again and again, so that ranks need not wait for each other)

"attention" is the tile without a message, "... alone" a message without the tile. ``timelines``: when the kernels and
copies of four queued steps started and stopped, on each rank, from torch.profiler.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from ringlearn import kernels
from ringlearn.launch.machine import hardware, versions
from ringlearn.tiles import Kind, Tile

H, G, D, DTYPE, STEPS = 32, 8, 128, torch.bfloat16, 16
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
WHAT = ("attention", "nccl alone", "nccl", "priority", "head start", "copy alone", "copy")
PAUSE = 20_000  # cycles, about 10 microseconds
SLEEP = 60_000_000  # cycles, about 30 ms: longer than the host needs to post 16 steps


@functools.cache
def cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart" in line))


class Step:
    """One rank's step, with everything that it needs allocated."""

    def __init__(self, s: int, copy_engine: bool, groups: dict[str, dist.ProcessGroup]):
        self.q = torch.randn(1, H, s, D, device="cuda", dtype=DTYPE)
        self.kv = torch.randn(2, 1, G, s, D, device="cuda", dtype=DTYPE)
        self.arrived = torch.empty_like(self.kv)
        self.tile = Tile(slice(0, s), slice(0, s // 2), Kind.FULL)
        self.kernel, self.side, self.groups = kernels.choose(), torch.cuda.Stream(), groups
        rank, size = dist.get_rank(), dist.get_world_size()
        self.to, self.source = (rank + 1) % size, (rank - 1) % size
        self.theirs = None
        if copy_engine:  # CUDA opens the neighbour's shard in this process; it must stay alive there
            shards = [None] * size
            dist.all_gather_object(shards, reduce_tensor(self.kv))
            rebuild, arguments = shards[self.source]
            self.theirs = rebuild(*arguments)
            self.arrived.copy_(self.theirs)  # lets the two GPUs reach each other's memory
            torch.cuda.synchronize()

    def compute(self) -> None:
        self.kernel.forward(self.q, *self.kv, self.tile, D**-0.5)

    def post(self, how: str):
        if how in self.groups:
            group = self.groups[how]
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.kv, self.to, group=group),
                    dist.P2POp(dist.irecv, self.arrived, self.source, group=group),
                ]
            )
        self.side.wait_stream(torch.cuda.current_stream())
        # copy_ would run on a stream of the neighbour's GPU, where another process computes: pull on one of our own.
        here, there = self.arrived.device.index, self.theirs.device.index
        error = cudart().cudaMemcpyPeerAsync(
            *(ctypes.c_void_p(self.arrived.data_ptr()), here, ctypes.c_void_p(self.theirs.data_ptr()), there),
            *(ctypes.c_size_t(self.arrived.nbytes), ctypes.c_void_p(self.side.cuda_stream)),
        )
        if error:
            raise RuntimeError(f"cudaMemcpyPeerAsync: error {error}")
        return []

    def wait(self, how: str, works) -> None:
        for work in works:
            work.wait()
        if how == "copy":
            torch.cuda.current_stream().wait_stream(self.side)

    def run(self, what: str) -> None:
        """what: "attention", or how the shard travels, beside the tile or "alone"."""
        how = what.removesuffix(" alone")
        works = self.post(how) if how != "attention" else []
        if what == "head start":
            torch.cuda._sleep(PAUSE)
        if not what.endswith("alone"):
            self.compute()
        if how != "attention":
            self.wait(how, works)


def measure(step: Step, what: str, repeats: int) -> dict[str, float]:
    found = {"host_ms": [], "eager_ms": [], "queued_ms": []}
    for i in range(repeats + 2):
        for queued in (False, True):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if queued:
                torch.cuda._sleep(SLEEP)
            begin.record()
            clock = time.perf_counter()
            for _ in range(STEPS):
                step.run(what)
            posted = 1e3 * (time.perf_counter() - clock)
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                found["queued_ms" if queued else "eager_ms"].append(begin.elapsed_time(end) / STEPS)
                if queued:
                    found["host_ms"].append(posted / STEPS)
    mine = {name: statistics.median(values) for name, values in found.items()}
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return {name: round(max(one[name] for one in everybody), 5) for name in mine}


def timeline(step: Step, what: str, steps: int = 4) -> list[dict]:
    """The GPU's work in a few queued steps on this rank, in microseconds from the first start."""
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        dist.barrier()
        torch.cuda._sleep(SLEEP)
        for _ in range(steps):
            step.run(what)
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")]
    posted = max(e["ts"] + e["dur"] for e in work if "spin" in e["name"] and e["dur"] > 1000)  # the end of the sleep
    work = [e for e in work if e["ts"] >= posted and "spin" not in e["name"]]
    first = min(e["ts"] for e in work)
    return [
        {
            "kind": "message" if "nccl" in e["name"] or e["cat"] == "gpu_memcpy" else "compute",
            "name": e["name"][:60],
            "start_us": round(e["ts"] - first, 2),
            "stop_us": round(e["ts"] - first + e["dur"], 2),
            "blocks": e["args"].get("grid"),
            "stream": e["args"].get("stream"),
        }
        for e in sorted(work, key=lambda e: e["ts"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a JSON file")
    parser.add_argument("--append", type=Path, help="add the steps to a JSON file that is there")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--what", nargs="+", default=WHAT)
    parser.add_argument("--timelines", type=int, nargs="*", default=[2048, 8192], help="of these tokens")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    high = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    groups = {how: dist.group.WORLD for how in ("nccl", "head start")}
    groups["priority"] = dist.new_group(pg_options=high)
    limit, steps, timelines = os.environ.get("NCCL_MAX_CTAS"), [], []
    with torch.no_grad():
        for s in options.tokens:
            step = Step(s, any(what.startswith("copy") for what in options.what), groups)
            for what in options.what:
                found = {"tokens_per_gpu": s, "what": what, "nccl_max_ctas": int(limit) if limit else None}
                steps.append({**found, **measure(step, what, options.repeats)})
                if dist.get_rank() == 0:
                    print(json.dumps(steps[-1]), flush=True)
                if s in options.timelines and what in groups | {"copy": None}:
                    everybody = [None] * dist.get_world_size()
                    dist.all_gather_object(everybody, timeline(step, what))
                    timelines += [
                        {"tokens_per_gpu": s, "what": what, "rank": rank, "events": events}
                        for rank, events in enumerate(everybody)
                    ]
    if dist.get_rank() == 0:
        target = options.append or options.out
        if options.append and options.append.exists():
            record = json.loads(options.append.read_text())
        else:
            record = {
                "date": datetime.date.today().isoformat(),
                "command": [],
                "hardware": hardware(dist.get_world_size()),
                "versions": versions(),
                "shape": {"B": 1, "H": H, "G": G, "D": D, "dtype": "bfloat16"},
                "steps": [],
                "timelines": [],
            }
        arguments = shlex.join(["tools/measure_hiding.py", *sys.argv[1:]])
        command = f"torchrun --nproc-per-node {dist.get_world_size()} {arguments}"
        record["command"].append(f"NCCL_MAX_CTAS={limit} {command}" if limit else command)
        record["steps"] += steps
        record["timelines"] += timelines
        if target:
            target.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

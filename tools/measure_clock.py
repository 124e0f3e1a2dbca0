"""Why a ring of two GPUs is a little slower than the GPU alone when everything hides: kernels, clock, power, links.

    torchrun --nproc-per-node 2 tools/measure_clock.py --out docs/measurements/clock.json

Forward and backward at one length (32 query heads, 8 key/value heads, head dim 128, bfloat16, causal, zigzag), each in
turn, in an order that changes, once before the call that counts, and at what clock and power that call ran:

    one device        SDPA over the tokens of one rank, as often as there are ranks, so that all compute as much
    ring              ring_attention
    without messages  the same kernels, merges and sums; nothing travels
    small messages    the same, and where the ring posts a message the copy engine writes 4 KiB into the neighbour's
                      memory; nobody waits for them
    large messages    the same with as many bytes as the ring's message
    local copies      the same bytes, from one place of the GPU's own memory to another
    ..., links awake  one device and the ring, while 4 KiB are written into the neighbour's memory every millisecond

``parts``: of calls in a row, from torch.profiler, the milliseconds in attention kernels, in other kernels, and in
neither.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

import ringlearn as rl
from ringlearn.attention import RING
from ringlearn.attention.call import attention_over_ranks
from ringlearn.attention.inputs import Request
from ringlearn.bench.calls import one_device
from ringlearn.bench.silent import Silent, without_messages
from ringlearn.bench.timing import everyone, meet
from ringlearn.launch.machine import hardware, versions
from ringlearn.worlds import DistributedWorld
from ringlearn.worlds.distributed.symmetric import _Driver as Driver

H, G, D, DTYPE = 32, 8, 128, torch.bfloat16
SMALL = 4096  # bytes
COLUMNS = ("ms", "forward ms", "backward ms", "MHz", "W")  # of each turn
Call = Callable[[], Any]


class Gauge:
    """Clock in MHz and power in W of a GPU, read again and again by a thread of its own."""

    def __init__(self, device: torch.device):
        self.device, self.read, self.running = device, [], True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.running:
            self.read.append(
                (time.perf_counter(), torch.cuda.clock_rate(self.device), torch.cuda.power_draw(self.device) / 1e3)
            )
            time.sleep(0.003)

    def between(self, start: float, stop: float) -> tuple[float, float]:
        found = [(clock, power) for at, clock, power in self.read if start <= at <= stop]
        return tuple(statistics.mean(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)

    def stop(self) -> None:
        self.running = False
        self.thread.join()


class Waker:
    """While it is on, a function is called every millisecond, in a thread of its own."""

    def __init__(self, device: torch.device, function: Callable[[], None]):
        self.device, self.function, self.on = device, function, False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        torch.cuda.set_device(self.device)  # of this thread
        while True:
            if self.on:
                self.function()
            time.sleep(1e-3)


class Posting(Silent):
    """No messages; instead of each one something else happens."""

    def __init__(self, comm: Any, instead: Callable[[int], None]):
        super().__init__(comm)
        self.instead = instead

    def _post(self, post):
        self.instead(sum(t.nbytes for tensors in post.sends.values() for t in tensors))
        return super()._post(post)


def ring_with(instead: Callable[[int], None], world: DistributedWorld):
    """ring_attention whose messages are something else."""
    strategy = without_messages(RING, partial(Posting, instead=instead))
    where = dict(layout=rl.zigzag, world=world)
    return lambda q, k, v: attention_over_ranks(Request("posting", q, k, v, rl.causal, **where), lambda: strategy)


def copies(nbytes: int, world: DistributedWorld) -> tuple[dict[str, Callable[[int], None]], Callable[[], None]]:
    """What happens in place of a message, by name; and a small message that waits for nothing.

    nbytes: of the largest message.
    """
    mine = symmetric.empty(nbytes, dtype=torch.uint8, device=world.device)
    there = symmetric.rendezvous(mine, world.group).buffer_ptrs[(world.rank + 1) % world.size]
    here, own = (torch.empty(nbytes, dtype=torch.uint8, device=world.device) for _ in range(2))
    side, apart, driver = torch.cuda.Stream(), torch.cuda.Stream(), Driver()

    def copy(to: int, n: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        driver.copy(to, own.data_ptr(), n, side.cuda_stream)

    def at_once() -> None:
        driver.copy(there, own.data_ptr(), SMALL, apart.cuda_stream)

    copy.memory = mine, here, own  # alive as long as somebody copies
    instead = {
        "without messages": lambda n: None,
        "small messages": lambda n: copy(there, SMALL),
        "large messages": lambda n: copy(there, n),
        "local copies": lambda n: copy(here.data_ptr(), n),
    }
    return instead, at_once


def parts(call: Call, world: DistributedWorld) -> dict[str, float]:
    """Milliseconds of the last of three calls in a row, on the stream that computes."""
    meet(world.device, world.group)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in found.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in e.name and "nccl" not in e.name
    )
    attention = [e for e in events if any(word in e[2] for word in ("fprop", "bprop"))]
    last = attention[-len(attention) // 3 :]
    start, stop = last[0][0], events[-1][1]
    sums = {"forward kernels": 0.0, "backward kernels": 0.0, "other kernels": 0.0}
    for begin, end, name in events:
        if begin >= start:
            kind = "forward" if "fprop" in name else "backward" if "bprop" in name else "other"
            sums[f"{kind} kernels"] += (end - begin) / 1e3
    return sums | {"neither": (stop - start) / 1e3 - sum(sums.values()), "all": (stop - start) / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32768, help="of each rank")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    world = DistributedWorld(check=False)
    device, s = world.device, options.tokens
    generator = torch.Generator(device=device).manual_seed(world.rank)
    q, k, v, dout = (torch.randn(1, n, s, D, dtype=DTYPE, device=device, generator=generator) for n in (H, G, G, H))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    marks: list[torch.cuda.Event] = []

    def both(attention, times: int = 1) -> Call:
        def call() -> None:
            for _ in range(times):
                for t in inputs:
                    t.grad = None
                out = attention(*inputs)
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                out.backward(dout)
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()

        return call

    def ring(q, k, v):
        return rl.ring_attention(q, k, v, mask=rl.causal, layout=rl.zigzag, world=world)

    alone = one_device([SDPBackend.CUDNN_ATTENTION], is_causal=True)
    calls = {"one device": both(alone, world.size), "ring": both(ring)}
    instead, small_message = copies(2 * k.nbytes, world)
    calls |= {name: both(ring_with(how, world)) for name, how in instead.items()}
    calls |= {f"{name}, links awake": calls[name] for name in ("one device", "ring")}
    for call in calls.values():
        call()
    waker = Waker(device, small_message)
    gauge = Gauge(device)
    found: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(options.rounds):
        names = list(calls)
        random.Random(number).shuffle(names)
        for name in names:
            meet(device, world.group)
            waker.on = name.endswith("links awake")
            calls[name]()
            marks.clear()
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            while not start.query():
                time.sleep(1e-4)
            began = time.perf_counter()
            torch.cuda.synchronize()
            ended = time.perf_counter()
            waker.on = False
            times = [a.elapsed_time(b) for a, b in zip([start, *marks], marks, strict=False)]
            found[name].append([sum(times), sum(times[::2]), sum(times[1::2]), *gauge.between(began, ended)])
    gauge.stop()
    profiles = {
        name: [parts(calls[name], world) for _ in range(5)] for name in ("one device", "ring", "without messages")
    }
    mine = {
        "turns": {name: [[float(f"{x:.5g}") for x in row] for row in rows] for name, rows in found.items()},
        "parts": {
            name: {part: round(statistics.median(row[part] for row in rows), 3) for part in rows[0]}
            for name, rows in profiles.items()
        },
    }
    ranks = everyone(mine, world.group)
    record = {
        "date": datetime.date.today().isoformat(),
        "command": f"torchrun --nproc-per-node {world.size} tools/measure_clock.py {shlex.join(sys.argv[1:])}",
        "hardware": hardware(world.size),
        "versions": versions(),
        "transport": world.transport,
        "tokens": s,
        "columns": COLUMNS,
        "slowest_ms": {
            name: statistics.median(map(max, zip(*([row[0] for row in r["turns"][name]] for r in ranks), strict=True)))
            for name in calls
        },
        "ranks": ranks,
    }  # fmt: skip
    if world.rank == 0:
        for name, ms in record["slowest_ms"].items():
            print(f"{name:18} {ms:.2f} ms on the slower rank")
            for r in ranks:
                medians = (statistics.median(column) for column in zip(*r["turns"][name], strict=True))
                print(
                    "   ",
                    *(f"{what} {x:.1f}" for what, x in zip(COLUMNS, medians, strict=True)),
                    r["parts"].get(name, ""),
                )
        if options.out:
            options.out.write_text(json.dumps(record) + "\n")
    dist.barrier(device_ids=[device.index])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Checks the distributed world on real GPUs with NCCL (or, without GPUs, with gloo); run from the repository's root:

    torchrun --nproc-per-node 2 tests/gpu/check_distributed.py --out distributed.json

One line for each check; the JSON file has the hardware and versions beside them; the exit status is 1 if one failed.
First what works: collectives, buffers, agreement. Then what breaks: for each fault it starts two processes of its own,
in which one rank is killed, stopped, raises or never comes, and reads what the others say and when.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import programs  # noqa: E402
from trying import tried  # noqa: E402

import ringlearn as rl  # noqa: E402
from ringlearn.worlds import WorldError  # noqa: E402

TIMEOUT = 8.0
FAULTS = {  # name: (what the live rank must say, the debug argument)
    "killed": ("rank 1 shows no sign of life", False),
    "stalled": ("rank 1 shows no sign of life", False),
    "raising": ("rank 1 raised KeyError", False),
    "absent": ("rank 1 never entered run of ring_with", False),
    "busy": ("rank 1 sends nothing", False),
    "debug-killed": ("rank 1 shows no sign of life", True),
    "debug-stalled": ("rank 1 shows no sign of life", True),
}
RESULTS: list[dict[str, Any]] = []


def check(name: str, fn: Callable[[], Any]) -> None:
    """Run on every rank; rank 0 prints and keeps it. fn returns what to note, and raises if it is wrong."""
    good, note, seconds = tried(fn)
    keep(name, good, seconds, note)


def keep(name: str, good: bool, seconds: float, note: Any) -> None:
    RESULTS.append({"check": name, "passed": good, "seconds": round(seconds, 3), "note": note})
    if int(os.environ["RANK"]) == 0 or not good:
        print(
            f"{'ok  ' if good else 'FAIL'} {name:<44} {seconds:7.2f} s  {note if note is not None else ''}", flush=True
        )


def same(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape and torch.equal(a.cpu(), b.cpu()), f"{path} differs: {a} and {b}"
    elif isinstance(a, dict):
        for key in a:
            same(a[key], b[key], f"{path} {key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{path}[{i}]")
    else:
        assert a == b, f"{path}: {a} and {b}"


# What works ------------------------------------------------------------------------------------------------------


def collectives(dtype: torch.dtype, **options: Any) -> None:
    world = rl.DistributedWorld(timeout=20, **options)
    same(world.run(programs.collectives, dtype)[0], expected(world.size, dtype)[world.rank])


def expected(size: int, dtype: torch.dtype) -> Any:
    return rl.SimulatedWorld(size).run(programs.collectives, dtype)


def axes() -> Any:
    """Worlds of two axes: on GPUs each axis has a communicator of its own."""
    size, kind = dist.get_world_size(), "cuda" if dist.get_backend() == "nccl" else "cpu"
    shapes = [(n, size // n) for n in range(1, size + 1) if size % n == 0]
    for shape in shapes:
        world = rl.DistributedWorld(init_device_mesh(kind, shape), timeout=20)
        same(world.run(programs.both_axes)[0], rl.SimulatedWorld(shape).run(programs.both_axes)[world.rank])
    return f"shapes {shapes}"


def subgroup() -> None:
    members = [dist.get_world_size() - 1]
    found = programs.run_on_subgroup(members, torch.float32)
    if found is not None:
        same(found[1], expected(1, torch.float32)[0])


def buffers() -> Any:
    wrong, kept, places, inference = programs.run_buffers()
    assert max(wrong) == 0.0 and kept == 1 and places <= 2 and not inference, (wrong, kept, places, inference)
    return f"{places} buffers for 40 messages"


def shards(src: int | None) -> None:
    full, grad, _ = programs.run_shards(src)
    x = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(5))
    (x * x * weight).sum().backward()
    same(full, (x * x).detach())
    if src is None or dist.get_rank() == src:
        same(grad, x.grad)


def agreement() -> Any:
    heard = programs.mismatches()
    for name, (kind, text, seconds) in heard.items():
        if name == "in the end":
            assert kind == "", text
        else:
            own = name == "kernel" or name == "kind of error" or name == "problem" and dist.get_rank() == 1
            assert own or kind == "ValueError" and "rank 1" in text, (name, text)
            assert seconds < 2, (name, seconds)
    return heard["mask"][1]


def twins() -> Any:
    if not torch.cuda.is_available() or dist.get_backend() != "nccl":
        return "no GPUs"
    kind, text, _ = programs.caught(lambda: rl.DistributedWorld(timeout=10, device="cuda:0"))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    assert kind == "ValueError" and "on one GPU" in text, text
    return text[:80]


def costs() -> Any:
    """Milliseconds of one agreement, and of one rotate of 8 bytes, waited for on the host."""
    world = rl.DistributedWorld(timeout=20)

    def each(fn: Callable[[], Any], n: int = 200) -> float:
        fn()
        start = time.perf_counter()
        for _ in range(n):
            fn()
        synchronize()
        return (time.perf_counter() - start) / n * 1e3

    x = torch.zeros(2, device=world.device)
    free = rl.DistributedWorld(timeout=20, check=False)
    return {
        "agree": round(each(lambda: world.agree("call", {"a": "b"})), 3),
        "run of 20 rotates, check": round(each(lambda: world.run(programs.many, x, 20), 50), 3),
        "run of 20 rotates, no check": round(each(lambda: free.run(programs.many, x, 20), 50), 3),
    }


def trace() -> Any:
    events, times = programs.run_trace()
    kinds = {kind for kind, *_ in events}
    assert kinds == {"compute", "send", "recv", "wait"}, kinds
    assert all(0 <= start <= stop < 60 for start, stop in times), times
    return f"{len(events)} events"


def capture() -> Any:
    """The monitor asks for events on another thread while this one captures a CUDA graph."""
    if not torch.cuda.is_available() or dist.get_backend() != "nccl":
        return "no GPUs"
    world = rl.DistributedWorld(timeout=20)
    a = torch.randn(8192, 8192, device=world.device)
    torch.mm(a, a)
    torch.cuda.synchronize()
    for _ in range(200):  # the message waits behind a second of work, so the monitor has something to ask for
        torch.mm(a, a)
    world.run(programs.many, a[0], 2)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        b = a[0] * 2
        time.sleep(1.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(b, a[0] * 2)
    return None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# What breaks: one rank of two processes of their own -------------------------------------------------------------


def fault(mode: str, transport: str) -> None:
    """What each of the two processes runs: rank 1 misbehaves, rank 0 says what it hears, and when."""
    faulthandler.dump_traceback_later(50, exit=False)  # what is silent for so long says where it is
    world = rl.DistributedWorld(timeout=TIMEOUT, debug=FAULTS[mode][1], transport=transport)
    world.reserve(2**20)  # with symmetric memory, so that this ring's messages go that way
    how = mode.removeprefix("debug-")
    victim = world.rank == 1
    world.run(programs.ring_with, None)
    start = time.monotonic()

    def act(rank: int) -> None:
        if victim:
            time.sleep(0.5)
            if how == "raising":
                raise KeyError("a bug of mine")
            if how == "busy":
                time.sleep(100)
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    try:
        if victim and how == "absent":
            time.sleep(100)
        world.run(programs.ring_with, act)
        synchronize()
    except WorldError as error:
        print(f"WorldError after {time.monotonic() - start:.1f} s: {error}", file=sys.stderr, flush=True)
        synchronize()
        sys.exit(3)


def run_fault(mode: str, nccl: bool, transport: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives its ranks
    started = time.monotonic()
    outputs = [tempfile.TemporaryFile() for _ in range(2)]
    processes = []
    for rank in range(2):
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        command = [sys.executable, __file__, "--fault", mode, "--transport", transport]
        processes.append(subprocess.Popen(command, env=env, stdout=outputs[rank], stderr=outputs[rank]))
    try:
        code: int | None = processes[0].wait(60)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - started
    for process in processes:
        process.kill()
        process.wait()
    outputs[0].seek(0)
    said = outputs[0].read().decode(errors="replace")
    wanted, debug = FAULTS[mode]
    limit = TIMEOUT + (15 if nccl and not debug else 2)
    at = next((line for line in said.splitlines() if wanted in line), "")
    # A WorldError says the time since the fault; of the monitor's report only the time since the start is known.
    after = float(at.split()[2]) if at.startswith("WorldError after") else max(0.0, seconds - 6)
    good = bool(at) and code not in (0, None) and after <= limit and (not debug or at.startswith("WorldError"))
    keep(f"fault: {mode}, {transport}", good, seconds, at or f"exit code {code}, output: {said[-3000:]}")
    RESULTS[-1] |= {"seconds until the report": after, "limit": limit, "exit code": code, "output": said[-4000:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--transport", help="of one process that --fault starts")
    parser.add_argument("--faults", help="only these, such as killed:symmetric,busy:nccl")
    options = parser.parse_args()
    if options.fault:
        fault(options.fault, options.transport)
        return
    world = rl.DistributedWorld(timeout=60)
    rank, nccl = world.rank, world.device.type == "cuda"
    if rank == 0:
        print(f"{world}, torch {torch.__version__}, {dist.get_backend()}")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        check(f"collectives, {dtype}", lambda dtype=dtype: collectives(dtype))
    check("collectives, no check", lambda: collectives(torch.float32, check=False))
    check("collectives, debug", lambda: collectives(torch.float32, debug=True))
    check("collectives, trace", lambda: collectives(torch.float32, trace=True))
    check("both axes of a mesh", axes)
    check("subgroup of one", subgroup)
    check("buffers", buffers)
    check("shard and unshard", lambda: shards(None))
    check("shard from rank 0", lambda: shards(0))
    check("agreement", agreement)
    check("two ranks on one GPU", twins)
    check("trace", trace)
    check("monitor beside a graph capture", capture)
    check("costs in ms", costs)
    faults = [(mode, "nccl" if nccl else "auto") for mode in FAULTS]
    if world.transport == "symmetric":
        faults += [(mode, "symmetric") for mode, (_, debug) in FAULTS.items() if not debug]
    if options.faults:
        faults = [tuple(name.split(":")) for name in options.faults.split(",")]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, [r for r in RESULTS if not r["passed"]])
    RESULTS.extend({"rank": r} | result for r, results in enumerate(everyone) for result in results if r != rank)
    del world
    dist.destroy_process_group()
    if rank == 0:
        for mode, transport in faults:
            run_fault(mode, nccl, transport)
        failed = [r for r in RESULTS if not r["passed"]]  # those of other ranks too
        print(f"{len(RESULTS) - len(failed)} of {len(RESULTS)} passed")
        if options.out:
            gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            about = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": " ".join(sys.argv),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "gpus": gpus,
                "backend": "nccl" if nccl else "gloo",
                "timeout": TIMEOUT,
            }
            options.out.write_text(json.dumps({"about": about, "results": RESULTS}, indent=1) + "\n")
        sys.exit(bool(failed))


if __name__ == "__main__":
    main()

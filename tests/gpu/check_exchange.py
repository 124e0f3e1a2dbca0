"""Checks the exchange of decoding in one kernel, between GPUs of one host; run from the root of the repository:

    torchrun --standalone --nproc-per-node 2 tests/gpu/check_exchange.py --out exchange.json
    torchrun --standalone --nproc-per-node 2 tests/gpu/check_exchange.py --silent-rank

One line for each check, with any number of ranks: results equal those of the readable exchange and have the same bits
on all ranks; 2,000 replays of a captured graph whose inputs alternate; graphs and calls of several shapes in turn,
while the boxes grow; and the waiting ends when a world fails. The exit status is 1 if one is wrong.
The second command lets the last rank end while rank 0 waits for it in a kernel: within 20 seconds rank 0 must name it
and end, so here an exit status of 1, with that text, is right.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from oracle import relative  # noqa: E402
from trying import captured, tried  # noqa: E402

import ringlearn as rl  # noqa: E402

RESULTS: list[dict[str, Any]] = []
# B, H, G, n, tokens, dtype: few rows and many, one split and many, fewer tokens than ranks
SHAPES = [
    (1, 32, 8, 1, 8192, torch.bfloat16),
    (1, 32, 8, 1, 200_000, torch.bfloat16),
    (8, 32, 8, 1, 4096, torch.bfloat16),
    (32, 32, 8, 5, 300, torch.float16),
    (3, 6, 2, 3, 1000, torch.float32),
    (2, 5, 5, 1, 1, torch.float32),
]


class Case:
    """A cache with random keys and a query; ``call`` decodes, and ``readable`` with the exchange that is to be read."""

    def __init__(self, world: rl.DistributedWorld, B, H, G, n, S, dtype):
        self.world = world
        torch.manual_seed(S)  # the same on every rank
        make = dict(dtype=dtype, device=world.device)
        self.cache = rl.KVCache(world, B, G, 128, S, dtype=dtype)
        self.cache.append(*(torch.randn(B, G, S, 128, **make) for _ in "kv"))
        self.q = torch.randn(B, H, n, 128, **make)

    def call(self, q: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return rl.decode_attention(self.q if q is None else q, self.cache)

    def readable(self, q: Tensor | None = None) -> Tensor:
        boxes, self.world._mailboxes = self.world._mailboxes, None
        try:
            return self.call(q)
        finally:
            self.world._mailboxes = boxes


def check(name: str, fn: Callable[[], str]) -> None:
    good, note, seconds = tried(fn)
    RESULTS.append({"name": name, "passed": good, "note": note, "seconds": round(seconds, 1)})
    print(f"rank {dist.get_rank()} {'ok  ' if good else 'FAIL'} {name}: {note}", flush=True)


def same_bits(x: Tensor) -> bool:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return all(torch.equal(found[0], other) for other in found[1:])


def values(world: rl.DistributedWorld) -> str:
    worst = 0.0
    for shape in SHAPES:
        case = Case(world, *shape)
        out, wanted = case.call(), case.readable()
        off = relative(out, wanted)
        worst = max(worst, off / (1e-5 if shape[-1] == torch.float32 else 5e-3))
        assert same_bits(out), f"{shape}: ranks differ"
        assert worst <= 1, f"{shape}: off by {off:.1e}"
    return f"{len(SHAPES)} shapes, at most {worst:.2f} of the limit"


def replays(world: rl.DistributedWorld, number: int = 2000) -> str:
    """A layer's call six times in a graph, so that the ranks run ahead of each other; every result is compared."""
    case = Case(world, *SHAPES[0])
    inputs = [case.q, torch.randn_like(case.q)]
    dist.broadcast(inputs[1], 0)
    wanted = [case.call(q) for q in inputs]
    assert not torch.equal(*wanted)
    q, wrong = case.q.clone(), torch.zeros((), dtype=torch.int64, device=world.device)
    with world.settled():
        replay, out = captured(lambda: torch.stack([case.call(q) for _ in range(6)]))
    for i in range(number):
        if random.random() < 0.01:
            time.sleep(0.002 * random.random())  # differs between ranks
        q.copy_(inputs[i % 2])
        replay()
        wrong += (out != wanted[i % 2]).sum()
    assert int(wrong) == 0, f"{int(wrong)} numbers are wrong"
    return f"{number} replays of 6 calls"


def interleaved(world: rl.DistributedWorld, rounds: int = 300) -> str:
    """Graphs that were captured with small boxes go on while later, larger calls have made new ones."""
    cases, ways = [Case(world, *shape) for shape in SHAPES[:5]], []
    for case in cases:
        wanted = case.call()
        with world.settled():
            replay, out = captured(case.call)
        ways += [(lambda replay=replay, out=out: (replay(), out)[1], wanted), (case.call, wanted)]
    choose, wrong = random.Random(0), 0  # the same order on every rank
    with world.settled():
        for _ in range(rounds):
            way, wanted = choose.choice(ways)
            wrong += int(not torch.equal(way(), wanted))
    assert not wrong, f"{wrong} results are wrong"
    return f"{rounds} calls and replays of {len(cases)} shapes, {world.reserved / 2**20:.1f} MiB"


async def _raise(comm: Any) -> None:
    raise ValueError("meant to fail")


def released(world: rl.DistributedWorld) -> str:
    """Rank 0 alone starts exchanges, which wait in vain until its world fails. The world is of no use afterwards."""
    store = dist.distributed_c10d._get_default_store()
    case = Case(world, *SHAPES[0])
    case.call(), torch.cuda.synchronize()
    if world.rank:
        store.wait(["released"], datetime.timedelta(seconds=60))
        return "rank 0 has been released"
    with world.settled():
        for _ in range(3):
            case.call()
        time.sleep(0.5)
        assert not torch.cuda.current_stream().query(), "nothing waits"
        start = time.monotonic()
        try:
            world.run(_raise)
        except ValueError:
            pass
        torch.cuda.synchronize()
    seconds = time.monotonic() - start
    store.set("released", "yes")
    assert seconds < 5, f"it took {seconds:.1f} s"
    return f"after {seconds:.2f} s"


def silent_rank(rank: int) -> None:
    world = rl.DistributedWorld(timeout=5, check=False)
    case = Case(world, *SHAPES[0])
    case.call(), torch.cuda.synchronize()
    if rank == dist.get_world_size() - 1:
        time.sleep(1)
        os._exit(0)
    case.call()
    print(f"rank {rank} waits", flush=True)
    torch.cuda.synchronize()
    print(f"rank {rank}: FAIL: the kernel has ended by itself", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--silent-rank", action="store_true", help="let a rank end while the others wait for it")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    if options.silent_rank:
        silent_rank(rank)
        return 1
    world = rl.DistributedWorld(timeout=60)
    if world.mailboxes(0) is None:
        print(f"there is no exchange in one kernel here: transport {world.transport}, NVLink is needed")
        return 1
    check("equal to the readable exchange, the same bits on all ranks", lambda: values(world))
    check("a captured graph with inputs that alternate", lambda: replays(world))
    check("graphs and calls of several shapes in turn", lambda: interleaved(world))
    check("a failure ends all waiting", lambda: released(world))
    if rank == 0 and options.out:
        record = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "ranks": world.size}
        options.out.write_text(json.dumps(record | {"torch": torch.__version__, "checks": RESULTS}, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(int(not all(r["passed"] for r in RESULTS)))  # the world has failed, as it was meant to


if __name__ == "__main__":
    sys.exit(main())

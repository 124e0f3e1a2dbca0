"""Checks the copy-engine transport and CUDA graphs on real GPUs; run from the repository's root:

    torchrun --nproc-per-node 2 tests/gpu/check_symmetric.py --out symmetric.json

Everything is compared with the same call over NCCL, bit for bit: which way bytes travel must not matter. (The kernels
sum dq in no fixed order, so dq is compared to 1e-4.) One line for each check; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from trying import captured, tried  # noqa: E402

import ringlearn as rl  # noqa: E402

RESULTS: list[dict[str, Any]] = []


def check(name: str, fn: Callable[[], Any]) -> None:
    good, note, seconds = tried(fn)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (good, note))
    note = next((n for g, n in everyone if not g), note)
    RESULTS.append({"seconds": round(seconds, 1)} | {"name": name, "passed": all(g for g, _ in everyone), "note": note})
    if dist.get_rank() == 0:
        print(f"{'ok  ' if RESULTS[-1]['passed'] else 'FAIL'} {name}, {seconds:.1f} s: {note or ''}", flush=True)


def inputs(S: int, world: Any, layout: Any, H: int = 8, G: int = 2, D: int = 64, seed: int = 0) -> list[Tensor]:
    """This rank's q, k, v, dout."""
    generator = torch.Generator().manual_seed(seed)
    where = layout.positions(S, world.size, world.rank)
    full = (torch.randn(1, h, S, D, generator=generator).bfloat16() for h in (H, G, G, H))
    q, k, v, dout = (t[:, :, where].to(world.device) for t in full)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def call(
    x: list[Tensor], world: Any, layout: Any, mask: Any = rl.causal, kernel: str | None = "cuda_flash"
) -> list[Tensor]:
    """out, dq, dk, dv.  cuDNN compiles for every shape, for a second each; FlashAttention does not."""
    q, k, v, dout = x
    out = rl.ring_attention(q, k, v, mask=mask, layout=layout, world=world, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        if name == "dq":
            off = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
            assert off < 1e-4, f"dq differs by {off:.1e}"
        else:
            assert torch.equal(a, b), f"{name} differs"


def ring(pull: Any, nccl: Any) -> str:
    cases = list(itertools.product((64, 257, 1000, 4096), (rl.contiguous, rl.striped, rl.zigzag)))
    for S, layout in cases:
        # Of the last two, ranks send some rows, or none, and not all ranks equally many.
        for mask in (rl.causal, rl.full, rl.causal & rl.sliding_window(30), rl.documents([S // 3, S - S // 3])):
            x = inputs(S, pull, layout)
            same(call(x, pull, layout, mask), call(x, nccl, layout, mask))
    return f"{4 * len(cases)} calls"


def no_tokens(pull: Any, nccl: Any) -> None:
    x = inputs(1, pull, rl.contiguous)  # one token: the other ranks have none
    same(call(x, pull, rl.contiguous), call(x, nccl, rl.contiguous))


async def crosswise(comm: Any, big: int) -> list[Tensor]:
    """Messages both ways round, awaited in another order, of sizes that fit into the slots and that do not."""
    mine = [torch.full((1, 1, n, 4), 100.0 * comm.rank + n, device=comm.device) for n in (3, 5, big, 7)]
    handles = [comm.rotate(t, back=back) for t, back in itertools.product(mine, (False, True))]
    order = torch.randperm(len(handles), generator=torch.Generator().manual_seed(comm.rank)).tolist()
    found = {i: await handles[i] for i in order}
    return [found[i].clone() for i in range(len(handles))]


def program(pull: Any, nccl: Any) -> str:
    for big in (9, pull.reserved // 4, pull.reserved):
        got, want = pull.run(crosswise, big)[0], nccl.run(crosswise, big)[0]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), big
    return "8 messages at once, some larger than a slot"


async def rotated(comm: Any, tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in await comm.rotate(*tensors)]


def allocations(pull: Any, nccl: Any) -> str:
    """One message of tensors that lie one behind the other in memory, each in an allocation of its own."""
    torch.cuda.empty_cache()
    found = [torch.full((1, 1, 2**19, 32), float(i + 100 * pull.rank), device=pull.device) for i in range(8)]
    found.sort(key=lambda t: t.data_ptr())
    touching = sum(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(found))
    pull.reserve(sum(t.nbytes for t in found))
    got, want = pull.run(rotated, found)[0], nccl.run(rotated, found)[0]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return f"{touching} of 7 neighbours touch"


def many(pull: Any, nccl: Any) -> str:
    """A race would show in some of many calls in a row, with a rank that lags behind."""
    layout, x = rl.zigzag, inputs(2048, pull, rl.zigzag)
    want = call(x, nccl, layout)
    for i in range(200):
        if i % 7 == pull.rank:
            torch.cuda._sleep(3_000_000)
        got = call(x, pull, layout)
        if i % 20 == 0:
            same(got, want)
    same(got, want)
    return "200 calls"


def graphs(pull: Any, nccl: Any) -> str:
    """Captured forward, and forward and backward; replayed with new numbers, between eager calls, after slots grew."""
    for layout, mask in ((rl.contiguous, rl.causal & rl.sliding_window(300)), (rl.zigzag, rl.causal)):
        replays(pull, nccl, layout, mask)
    return "5 replays of each, of a causal mask and of a window"


def replays(pull: Any, nccl: Any, layout: Any, mask: Any) -> None:
    x = inputs(1024, pull, layout)
    q, k, v, dout = x

    def forward() -> Tensor:  # with the kernel of the library's choice
        with torch.no_grad():
            return rl.ring_attention(q, k, v, mask=mask, layout=layout, world=pull)

    replay_forward, out = captured(forward)
    replay_both, results = captured(lambda: call(x, pull, layout, mask, kernel=None))
    for seed in range(1, 6):
        with torch.no_grad():
            for t, new in zip(x, inputs(1024, pull, layout, seed=seed), strict=True):
                t.copy_(new)
        replay_forward()
        if seed == 3:
            larger = inputs(16384, pull, layout)
            same(call(larger, pull, layout), call(larger, nccl, layout))
        replay_both()
        want = call(x, nccl, layout, mask, kernel=None)
        assert torch.equal(out, want[0])
        same(results, want)


def events() -> str:
    world = rl.DistributedWorld(timeout=20, trace=True)
    for _ in range(3):
        call(inputs(32768, world, rl.zigzag, H=32, G=8, D=128), world, rl.zigzag, kernel=None)
    trace = world.trace
    computing, waiting = trace.seconds("compute", world.rank), trace.seconds("wait", world.rank)
    assert trace.messages(world.rank) == 2 * world.size - 3 and 0 < computing < trace.makespan()
    assert waiting < computing / 2, (waiting, computing)
    return f"backward computes {computing * 1e3:.2f} ms, waits {waiting * 1e3:.2f} ms"


def compiled(pull: Any, nccl: Any) -> None:
    """A module that calls the library, under torch.compile and under activation checkpointing."""
    layout, x = rl.zigzag, inputs(512, pull, rl.zigzag)
    q, k, v, dout = x

    def block(q: Tensor, k: Tensor, v: Tensor, world: Any) -> Tensor:
        return torch.nn.functional.gelu(rl.ring_attention(q * 2, k, v, mask=rl.causal, layout=layout, world=world))

    def grads(fn: Callable[..., Tensor], world: Any) -> list[Tensor]:
        out = fn(q, k, v, world)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def checkpointed(*args: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)

    want = grads(block, nccl)
    for fn in (torch.compile(block), checkpointed):
        for a, b in zip(grads(fn, pull), want, strict=True):
            off = float((a.float() - b.float()).norm() / b.float().norm())
            assert off < 5e-3, off


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(60, exit=False)
    pull = rl.DistributedWorld(timeout=30, check=False)
    if pull.transport != "symmetric":
        print(f"nothing to check here: {pull.transport}")
        return
    nccl = rl.DistributedWorld(timeout=30, check=False, transport="nccl")
    # Shards of different lengths need the ranks to agree; an agreement cannot be captured in a graph.
    agreeing = [rl.DistributedWorld(timeout=30, transport=transport) for transport in ("symmetric", "nccl")]
    check("ring attention", lambda: ring(*agreeing))
    check("a rank without tokens", lambda: no_tokens(*agreeing))
    for name, fn in (
        ("allocations that touch", allocations), ("many calls", many), ("a rank program", program),
        ("CUDA graphs", graphs), ("torch.compile and checkpointing", compiled),
    ):  # fmt: skip
        check(name, lambda fn=fn: fn(pull, nccl))
    check("trace by CUDA events", events)
    failed = [r for r in RESULTS if not r["passed"]]
    if pull.rank == 0 and options.out:
        about = {
            "date": datetime.date.today().isoformat(),
            "command": f"torchrun --nproc-per-node {pull.size} tests/gpu/check_symmetric.py",
            "gpus": [torch.cuda.get_device_name(i) for i in range(pull.size)],
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({"about": about, "results": RESULTS}, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(bool(failed))


if __name__ == "__main__":
    main()

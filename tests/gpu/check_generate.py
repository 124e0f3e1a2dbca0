"""Checks generation on real GPUs with NCCL (or, without GPUs, with gloo); run from the repository's root:

    torchrun --nproc-per-node 2 tests/gpu/check_generate.py --out generate.json

One line for each check: what the ranks generate together equals, token for token in float64, what one device does, for
the transformer of rl.nn and, where transformers is installed, for its models. Then times in bfloat16: to the first
token, and tokens per second, by all ranks and by one. Last a decode step over all ranks as a CUDA graph, which is
replayed 1,000 times; since NCCL may hang in a capture, the file is written before, and the program ends itself after
a minute. The exit status is 1 if a check failed. It takes two minutes.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from nn_programs import generated, make_batch, make_model, uncached  # noqa: E402
from oracle import relative  # noqa: E402

import ringlearn as rl  # noqa: E402
from ringlearn import nn as rnn  # noqa: E402

CASES = ("greedy", "sampled", "a padded batch, sampled", "shorter than the ranks", "one token")
RESULTS: list[dict[str, Any]] = []
WORLD: rl.DistributedWorld


def check(name: str, fn: Callable[[], str | None]) -> None:
    start = time.monotonic()
    try:
        note, good = fn() or "", True
    except Exception as error:
        note, good = f"{type(error).__name__}: {error}", False
    RESULTS.append({"check": name, "passed": good, "seconds": round(time.monotonic() - start, 2), "note": note})
    if WORLD.rank == 0 or not good:
        print(f"{'ok  ' if good else 'FAIL'} {name:<58} {RESULTS[-1]['seconds']:7.2f} s  {note}", flush=True)


def own(temperature: float) -> None:
    model, tokens = make_model().to(WORLD.device).requires_grad_(False), make_batch(23)[0].to(WORLD.device)
    got = generated(model, tokens, WORLD, temperature)
    if WORLD.rank == 0:  # only rank 0 has the seed of the one device
        want = uncached(model, tokens, temperature)
        assert torch.equal(got, want), f"{got.tolist()} and not {want.tolist()}"


def hugging_face(name: str, case: str) -> None:
    from generate_programs import model_of, one_device, together

    model = model_of(name).to(WORLD.device)
    got = together(model, WORLD, case)
    want = one_device(model, case)
    assert torch.equal(got, want), f"{got.tolist()} and not {want.tolist()}"


def timed(S: int, alone: bool, new: int = 65) -> str:
    """Time to the first token, and tokens per second after it."""
    torch.manual_seed(0)
    model = rnn.Transformer(rnn.Config(width=2048, layers=8, heads=16, kv_heads=4)).to(WORLD.device, torch.bfloat16)
    world = rl.SimulatedWorld(1, device=WORLD.device, count_memory=False) if alone else WORLD
    times: list[float] = []
    tokens = torch.randint(256, (1, S), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first one compiles
        times.clear(), torch.cuda.synchronize() if WORLD.device.type == "cuda" else None
        start = time.perf_counter()
        model.generate(tokens, new, world, on_token=lambda token: (token.tolist(), times.append(time.perf_counter())))
    if not times:
        return ""
    return f"first token {times[0] - start:.3f} s, then {(new - 1) / (times[-1] - times[0]):,.1f} tokens/s"


def captured(tokens: int = 1000) -> str:
    """Append, attention and the exchange of all ranks in one graph; at the end compared with one rank."""
    world = rl.DistributedWorld(check=False)
    H, G, D = 32, 8, 128
    torch.manual_seed(0)
    cache, whole = (
        rl.KVCache(w, 1, G, D, tokens + 40_000, dtype=torch.bfloat16, page=256)
        for w in (world, rl.SimulatedWorld(1, device=world.device, count_memory=False))
    )
    k, v = (torch.randn(1, G, 32_768, D, dtype=torch.bfloat16, device=world.device) for _ in range(2))
    cache.append(k, v), whole.append(k, v)
    new = [torch.randn(1, h, 1, D, dtype=torch.bfloat16, device=world.device) for h in (H, G, G)]

    def step() -> torch.Tensor:
        cache.append(*new[1:])
        return rl.decode_attention(new[0], cache)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side), torch.cuda.synchronize()
    cache.truncate(32_768), cache.reserve(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(tokens):
        graph.replay()
    stop.record(), stop.synchronize()
    whole.append(*(x.expand(-1, -1, tokens, -1) for x in new[1:]))
    off = relative(out, rl.decode_attention(new[0], whole))
    assert cache.lengths == whole.lengths == (32_768 + tokens,) and off < 1e-2, (cache.lengths, off)
    return f"{1e3 * start.elapsed_time(stop) / tokens:.1f} us a token, off by {off:.1e}, {world.transport}"


def main() -> int:
    global WORLD
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args()
    WORLD = rl.DistributedWorld(timeout=30)
    for temperature in (0.0, 0.7):
        check(f"rl.nn, temperature {temperature}", lambda t=temperature: own(t))
    try:
        import transformers
        from generate_programs import MODELS

        for name in MODELS:
            for case in CASES[: 2 if name == "Gemma2" else None]:
                check(f"{name}: {case}", lambda name=name, case=case: hugging_face(name, case))
        version = transformers.__version__
    except ImportError:
        version = None
    gpu = WORLD.device.type == "cuda"
    for S in (32_768, 262_144) if gpu else (64,):
        for alone in (False, True):
            who = "one rank" if alone else f"{WORLD.size} ranks"
            check(f"{S:,} tokens, bfloat16, {who}", lambda S=S, alone=alone: timed(S, alone))
    write(options.out, version)
    if gpu:
        dist.barrier()
        faulthandler.dump_traceback_later(60, exit=True)
        check("a decode step of all ranks as a graph, 1,000 tokens", captured)
        write(options.out, version)
        faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    return int(not all(r["passed"] for r in RESULTS))


def write(path: Path | None, version: str | None) -> None:
    if path is None or WORLD.rank:
        return
    name = torch.cuda.get_device_name() if WORLD.device.type == "cuda" else "CPU"
    record = {"date": datetime.date.today().isoformat(), "device": name, "ranks": WORLD.size}
    record |= {"torch": torch.__version__, "transformers": version, "checks": RESULTS}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""What ring attention costs on the GPUs of this machine: scaling, transfers, overlap and error, measured in one run.

    python -m ringlearn.measure --out docs/measurements/multi-gpu.json

The shape is that of Llama 3.1 8B: 32 query heads, 8 key/value heads, head dim 128, bfloat16, causal, zigzag. Without
GPUs the same runs on gloo processes with sizes that a CPU can do: that says how it works, and nothing about speed.
Times are medians of several calls, the largest over the ranks; agreement between ranks is off, as in a hot loop.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..attention import ring_attention
from ..costs.one_device import attention_flops
from ..launch.machine import hardware, versions
from ..launch.pool import Pool
from ..layouts import zigzag
from ..masks import causal
from ..tiles import Kind, Tile
from ..worlds import DistributedWorld
from ..worlds.comm import Comm, empty_packed
from .calls import calls, errors, exact, fastest, numbers, one_device
from .timing import MIB, in_a_loop, peak

H, G, D, DTYPE = 32, 8, 128, torch.bfloat16
HOPS = 16  # of one timed run of ``_overlap`` and ``_transfers``


def multi_gpu(
    gpus: int | None = None,
    *,
    tokens: Sequence[int] = (8192, 32768, 65536),
    tokens_per_gpu: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384),
    mib: Sequence[float] = (0.0625, 0.25, 1, 4, 16, 64, 256),
    error_tokens: int = 4096,
    repeats: int = 9,
) -> dict[str, Any]:
    """Measure a ring on one GPU and on ``gpus`` GPUs, by default all of them; the result can be written as JSON.

    tokens: total sequence lengths for the scaling table.  tokens_per_gpu: lengths of a rank's shard for overlap.
    mib: sizes of messages.  error_tokens: the length at which results are compared with float32.

    Returns ``hardware``, ``versions`` and
      scaling    for 1 and ``gpus`` GPUs and each length: forward_ms, forward_backward_ms, tflops_per_gpu (forward and
                 backward together), peak_mib (beyond q, k, v and dout; including buffers that are kept from call
                 to call, and symmetric memory) and inputs_mib per GPU; None on CPUs
      plain      the same for one GPU that calls SDPA without a ring, with torch's fastest kernel there
      transfers  for each size, all ranks sending to the next rank over NCCL (or gloo): ms and gb_per_s, each way
      overlap    for each length one step of the ring, whose tile has n queries and n / 2 keys: attention_ms and
                 transfer_ms alone, both_ms when the message is posted before the tile and awaited after it, and
                 awaited_first_ms when it is awaited at once
      error      of out, dq, dk, dv against float32, as relative norms

    Raises ValueError if there are fewer GPUs than asked for, or fewer than two ranks.
    """
    there = torch.cuda.device_count()
    gpus = max(there, 2) if gpus is None else gpus
    if gpus < 2:
        raise ValueError(f"multi_gpu: expected at least 2 GPUs for a ring, got gpus={gpus}")
    if (there or max(os.cpu_count() or 2, 2)) < gpus:  # a process for each
        what = f"the {there} GPUs" if there else f"the {os.cpu_count()} cores, since there is no GPU,"
        raise ValueError(f"multi_gpu: expected at most {what} of this machine, got gpus={gpus}")
    with Pool(1) as one, Pool(gpus) as all_of_them:
        scaling = []
        for pool in (one, all_of_them):
            scaling += [_worst(pool.run(_scaling, S, repeats, timeout=600)) for S in tokens]
        plain = [_worst(one.run(_scaling, S, repeats, True, timeout=600)) for S in tokens]
        return {
            "hardware": hardware(gpus),
            "versions": versions(),
            "shape": {"B": 1, "H": H, "G": G, "D": D, "dtype": "bfloat16", "mask": "causal", "layout": "zigzag"},
            "scaling": scaling,
            "plain": plain,
            "transfers": [_worst(all_of_them.run(_transfers, size, repeats)) for size in mib],
            "overlap": [_worst(all_of_them.run(_overlap, length, repeats)) for length in tokens_per_gpu],
            "error": _worst(all_of_them.run(_error, error_tokens)),
        }


def _worst(ranks: list[dict[str, float | None]]) -> dict[str, float | None]:
    """The slowest and largest of what the ranks measured; of rates, the lowest."""
    worst = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        best = min if name in ("gb_per_s", "tflops_per_gpu") else max
        worst[name] = None if None in values else best(values)
    return worst


# ---- What each rank runs --------------------------------------------------------------------------------------------


def _numbers(world: DistributedWorld, heads: int, tokens: int, seed: int) -> Tensor:
    return numbers((1, heads, tokens, D), DTYPE, world.device, seed)


def _scaling(S: int, repeats: int, plain: bool = False) -> dict[str, float | None]:
    world = DistributedWorld(check=False)
    tokens = S // world.size
    inputs = [_numbers(world, heads, tokens, 4 * world.rank + i).requires_grad_() for i, heads in enumerate((H, G, G))]
    dout = _numbers(world, H, tokens, 4 * world.rank + 3)
    attention = (
        one_device(fastest(world.device, DTYPE), is_causal=True)
        if plain
        else partial(ring_attention, mask=causal, layout=zigzag, world=world)
    )
    timed = calls(attention, inputs, dout)
    forward_ms, both_ms = (in_a_loop(call, repeats, world.device) for call in timed.values())
    flops = attention_flops(S, H, D, causal=True) + attention_flops(S, H, D, causal=True, backward=True)
    peak_mib = held_mib = None
    if world.device.type == "cuda":
        gc.collect()  # what the lengths before have left
        peak_mib = peak(timed["forward_backward"], [*inputs, dout], world)[1] / MIB
        held_mib = sum(t.nbytes for t in (*inputs, dout)) / MIB
    return {
        "gpus": world.size,
        "tokens": S,
        "forward_ms": forward_ms,
        "forward_backward_ms": both_ms,
        "tflops_per_gpu": flops / world.size / both_ms / 1e9,
        "peak_mib": peak_mib,
        "inputs_mib": held_mib,
    }


async def _pass_on(comm: Comm, x: Tensor) -> None:
    for _ in range(HOPS):
        x = await comm.rotate(x)


def _transfers(mib: float, repeats: int) -> dict[str, float]:
    world = DistributedWorld(check=False, transport="nccl")
    x = torch.zeros(int(mib * MIB) // DTYPE.itemsize, dtype=DTYPE, device=world.device)
    ms = in_a_loop(lambda: world.run(_pass_on, x), repeats, world.device) / HOPS
    return {"mib": mib, "ms": ms, "gb_per_s": x.nbytes / ms / 1e6}


async def _steps(comm: Comm, q: Tensor, k: Tensor, v: Tensor, how: str) -> None:
    """Some steps of a zigzag ring: all queries against the earlier half of another rank's keys."""
    tokens, kernel, scale = q.shape[2], kernels.choose(), D**-0.5
    tile = Tile(slice(0, tokens), slice(0, tokens // 2), Kind.FULL)
    for _ in range(HOPS):
        if how != "attention":
            arriving = comm.rotate(k, v)
        if how in ("transfer", "awaited first"):
            k, v = await arriving
        if how != "transfer":
            kernel.forward(q, k, v, tile, scale)
        if how == "both":
            k, v = await arriving


def _overlap(tokens: int, repeats: int) -> dict[str, float]:
    world = DistributedWorld(check=False, transport="nccl")
    q = _numbers(world, H, tokens, world.rank)
    k, v = empty_packed([(1, G, tokens, D)] * 2, DTYPE, world.device)  # one message without a copy
    found: dict[str, float] = {"tokens_per_gpu": tokens}
    for how in ("attention", "transfer", "both", "awaited first"):
        with torch.no_grad():
            ms = in_a_loop(lambda how=how: world.run(_steps, q, k, v, how), repeats, world.device)
        found[f"{how.replace(' ', '_')}_ms"] = ms / HOPS
    return found


def _error(S: int) -> dict[str, float]:
    world = DistributedWorld()  # shards may differ in length: the ranks tell each other
    full = [_numbers(world, heads, S, seed) for seed, heads in enumerate((H, G, G, H))]
    ring = partial(ring_attention, mask=causal, layout=zigzag, world=world)
    where = zigzag.positions(S, world.size, world.rank, world.device)
    return errors(ring, full, exact(full, causal, backward=True), where, world)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ringlearn.measure", description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, help="how many GPUs (default: all of them)")
    parser.add_argument("--out", type=Path, help="also write the result to this JSON file")
    options = parser.parse_args()
    sizes: dict[str, Any] = {}
    if not torch.cuda.is_available():
        sizes = dict(tokens=(256, 512), tokens_per_gpu=(64, 128), mib=(0.0625, 1), error_tokens=256, repeats=3)
    command = "python -m ringlearn.measure" + (f" --gpus {options.gpus}" if options.gpus else "")
    try:
        if options.out:
            options.out.open("a").close()  # tried before minutes of measuring
        found = multi_gpu(options.gpus, **sizes)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    record = {"date": datetime.date.today().isoformat(), "command": command, **found}
    text = json.dumps(record, indent=1)
    print(text)
    if options.out:
        try:
            options.out.write_text(text + "\n")
        except OSError as error:  # a disk that has become full; the result stands on the screen
            parser.error(f"--out {options.out}: {error}; the results are printed above instead")

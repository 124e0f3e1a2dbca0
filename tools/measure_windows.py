"""Times windows and packed documents as one kernel call and cut into the tiles that every kernel takes; needs a GPU.

    python tools/measure_windows.py --out windows.json

One GPU's own attention over S tokens, bfloat16, 32 query heads, 8 key/value heads, head dim 128: forward, and forward
and backward, in milliseconds, the median of several; FLOPs of what is visible.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from measure_segments import milliseconds  # noqa: E402

import ringlearn as rl  # noqa: E402
from ringlearn import kernels  # noqa: E402
from ringlearn.partial.accumulate import ALL, Accumulator, Sum  # noqa: E402
from ringlearn.tiles import Kind, plan  # noqa: E402
from ringlearn.worlds.trace import tile_flops  # noqa: E402


def documents(n: int, S: int):
    weights = torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.05
    lengths = (weights / weights.sum() * S).int().tolist()
    lengths[0] += S - sum(lengths)
    return rl.documents(lengths)


def forward(kernel, q, k, v, tiles, scale):
    result = Accumulator(q.shape, torch.float32, q.device, parts=len(tiles), final=q.dtype)
    for tile in tiles:
        result.add(tile.q, kernel.forward(q, k, v, tile, scale))
    return result.partial


def both(kernel, q, k, v, dout, tiles, scale):
    out, lse = forward(kernel, q, k, v, tiles, scale)
    dq, dkv = Sum([q.shape], torch.float32, q.device), Sum([k.shape, v.shape], torch.float32, q.device)
    for tile in tiles:
        a, b, c = kernel.backward(dout, q, k, v, out, lse, tile, scale)
        dq.add(ALL, tile.q, a)
        dkv.add(ALL, tile.k, b, c)
    return (out, lse, *dq.tensors, *dkv.tensors)


def cases(S: int) -> dict:
    """(mask, queries' positions, keys' positions): a whole sequence, or one step of one rank among eight."""
    whole = ((range(S),), (range(S),))
    striped = rl.striped.ranges(8 * S, 8)
    return {
        "causal": (rl.causal, *whole),
        "causal window 512": (rl.causal & rl.sliding_window(512), *whole),
        "causal window 4096": (rl.causal & rl.sliding_window(4096), *whole),
        "causal window 16384": (rl.causal & rl.sliding_window(16384), *whole),
        "20 causal documents": (rl.causal & documents(20, S), *whole),
        "200 causal documents": (rl.causal & documents(200, S), *whole),
        "2000 causal documents": (rl.causal & documents(2000, S), *whole),
        "200 causal documents, striped, 1 step of 8 ranks": (rl.causal & documents(200, 8 * S), striped[1], striped[2]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--length", type=int, default=32768)
    options = parser.parse_args()
    S, (H, G, D) = options.length, (32, 8, 128)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, h, S, D, device="cuda", dtype=torch.bfloat16) for h in (H, G, G, H))
    results = []
    for name, (mask, q_ranges, k_ranges) in cases(S).items():
        tiles = plan(mask, q_ranges, k_ranges)
        ways = {"as planned, sdpa": ("sdpa", tiles), "cut, sdpa": ("sdpa", tuple(c for t in tiles for c in t.cut))}
        if Kind.FULL in {t.kind for t in tiles} or Kind.CAUSAL in {t.kind for t in tiles}:
            ways["as planned, cuda_flash"] = ("cuda_flash", tiles)
        flops, first = sum(tile_flops(q, v, t) for t in tiles), None
        for way, (kernel, these) in ways.items():
            kernel = kernels.choose(kernel)
            if any(kernel.unsupported(q, k, v, t.kind) for t in these):
                continue
            with torch.no_grad():
                got = both(kernel, q, k, v, dout, these, D**-0.5)
                first = first or got
                seen = first[1] > -torch.inf
                gap = max(
                    float((a.float() - b.float()).masked_fill(~seen, 0).norm() / b.float().masked_fill(~seen, 0).norm())
                    if a.shape == seen.shape
                    else float((a.float() - b.float()).norm() / b.float().norm())
                    for a, b in zip(got, first, strict=True)
                )
                ms = milliseconds(lambda: forward(kernel, q, k, v, these, D**-0.5), 5)  # noqa: B023
                ms_both = milliseconds(lambda: both(kernel, q, k, v, dout, these, D**-0.5), 3)  # noqa: B023
            kinds = [t.kind.name for t in these]
            results.append(
                {
                    "mask": name,
                    "way": way,
                    "tiles": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                    "forward_ms": ms,
                    "both_ms": ms_both,
                    "forward_tflops": flops / ms / 1e9,
                    "both_tflops": 3.5 * flops / ms_both / 1e9,
                    "apart": gap,
                }
            )
            r = results[-1]
            print(
                f"{name:<50} {way:<24} {ms:8.3f} ms {r['forward_tflops']:5.0f} TFLOP/s, both {ms_both:8.3f} ms "
                f"{r['both_tflops']:5.0f} TFLOP/s, apart {gap:.1e} {r['tiles']}",
                flush=True,
            )
    if options.out:
        machine = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "length": S,
        }
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

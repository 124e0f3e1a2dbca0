"""Checks every kernel of a CUDA machine against dense float64 attention; run from the root of the repository:

    python tests/gpu/check_kernels.py --out kernels.json

One line for each case: relative errors of out, lse, dq, dk, dv, and whether each is within its limit (1e-5 in float32;
twice the error of one SDPA call in float16 and bfloat16). The exit status is 1 if one is not. ``--all`` takes every
combination instead of every pair.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernel_cases import MASKS, MEMORY, NAMES, errors, exact, inputs, limits, run  # noqa: E402
from pairwise import pairwise, product  # noqa: E402

import ringlearn as rl  # noqa: E402
from ringlearn import kernels  # noqa: E402
from ringlearn.tiles import Kind, Tile, plan  # noqa: E402

HALF = [torch.bfloat16, torch.float16]
# What each kernel is checked with: masks that lead to tiles it takes.
KERNELS = {
    "cudnn": {"mask": ["full", "causal"], "dtype": HALF},
    "cuda_flash": {"mask": ["full", "causal"], "dtype": HALF},
    "efficient": {"mask": list(MASKS), "dtype": [*HALF, torch.float32]},
    "reference": {"mask": list(MASKS), "dtype": [*HALF, torch.float32, torch.float64]},
    "sdpa": {"mask": list(MASKS), "dtype": [*HALF, torch.float32, torch.float64]},
}
GRID = {
    "S": [(600, 600), (97, 97), (7, 7), (1, 97), (97, 7), (1024, 1024), (704, 704)],
    "heads": [(4, 4), (8, 2), (4, 1)],
    "dims": [(64, 64), (128, 128), (24, 40), (33, 7), (96, 96), (192, 128), (256, 256)],
    "memory": list(MEMORY),
    "pieces": [1, 3],
}


def short(value) -> str:
    return str(value).removeprefix("torch.")


def check(kernel, case) -> dict:
    """errors and limits, or why the case is skipped"""
    (S_q, S_k), mask_name = case["S"], case["mask"]
    if mask_name == "documents" and S_q > S_k:
        return {"skipped": "documents end with the keys"}
    q, k, v, dout = inputs(S_q, S_k, case["heads"], case["dims"], case["memory"], case["dtype"], "cuda")
    if case["memory"] == "expanded":
        q = torch.randn_like(q)
    mask, scale = MASKS[mask_name](max(S_q, S_k)), q.shape[-1] ** -0.5
    kinds = {tile.kind for tile in plan(mask, (range(S_q),), (range(S_k),))}
    reason = next(filter(None, (kernel.unsupported(q, k, v, kind) for kind in kinds)), None)
    if reason:
        return {"skipped": reason}
    got = run(kernel, q, k, v, dout, mask, scale, case["pieces"])
    oracle = exact(q, k, v, dout, mask, scale)
    off, allowed = errors(got, oracle), limits(q, k, v, dout, mask, scale, oracle)
    same_rows = torch.equal(got["lse"] == -torch.inf, oracle["lse"] == -torch.inf)
    return {"errors": off, "limits": allowed, "passed": same_rows and all(off[n] <= allowed[n] for n in off)}


def check_large_logits(kernel, mask_name, dtype) -> dict:
    q, k, v, dout = inputs(200, 200, (4, 2), (64, 64), dtype=dtype, device="cuda")
    scale = 1e4 / float((q.double() @ k.repeat_interleave(2, 1).double().mT).abs().max())
    got = run(kernel, q, k, v, dout, MASKS[mask_name](200), scale)
    off = errors(got, exact(q, k, v, dout, MASKS[mask_name](200), scale))
    limit = 8 * 1e4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + 4 * torch.finfo(dtype).eps
    return {"errors": off, "limits": dict.fromkeys(NAMES, limit), "passed": all(e <= limit for e in off.values())}


def check_blind_tile(kernel, dtype) -> dict:
    q, k, v, dout = inputs(50, 60, (4, 2), (64, 64), dtype=dtype, device="cuda")
    nothing = rl.mask(lambda q, k: (q < 0) & (k < 0), "nothing")
    tile = Tile(slice(3, 40), slice(5, 60), Kind.PARTIAL, nothing, range(37), range(55))
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, tile, 0.3)
        grads = kernel.backward(dout, q, k, v, dout * 0, lse.new_full(q.shape[:3], -torch.inf), tile, 0.3)
    zeros = all(bool((t == 0).all()) for t in (out, *grads))
    return {"errors": {}, "passed": zeros and bool((lse == -torch.inf).all())}


def check_small_tiles(kernel, dtype) -> dict:
    """Tiles of one row and of one column inside larger tensors: cuDNN takes neither."""
    q, k, v, dout = inputs(64, 64, (4, 2), (64, 64), dtype=dtype, device="cuda")
    worst: dict[str, float] = {}
    for rows, columns in ((slice(5, 6), slice(0, 64)), (slice(0, 64), slice(5, 6)), (slice(5, 6), slice(9, 10))):
        part = q[:, :, rows], k[:, :, columns], v[:, :, columns], dout[:, :, rows]
        oracle, tile = exact(*part, rl.full, 0.125), Tile(rows, columns, Kind.FULL)
        with torch.no_grad():
            out, lse = kernel.forward(q, k, v, tile, 0.125)
            whole_out, whole_lse = torch.zeros_like(dout), torch.zeros(q.shape[:3], dtype=lse.dtype, device="cuda")
            whole_out[:, :, rows], whole_lse[..., rows] = out.to(dtype), lse
            grads = kernel.backward(dout, q, k, v, whole_out, whole_lse, tile, 0.125)
        got = dict(zip(NAMES, (out, lse, *grads), strict=True))
        allowed = {n: max(torch.finfo(dtype).eps, 1e-5) for n in NAMES}
        for name in NAMES:
            # A single key: the gradients of its score are 0, and rounding is all that is left of them.
            size = float(oracle[name].norm()) or float(dout.double().norm())
            off = float((got[name].double() - oracle[name]).masked_fill(oracle[name] == -torch.inf, 0).norm()) / size
            worst[name] = max(worst.get(name, 0.0), off)
    return {"errors": worst, "limits": allowed, "passed": all(worst[n] <= allowed[n] for n in worst)}


def check_no_sync(kernel, mask_name, dtype) -> dict:
    """Nothing waits for the GPU: torch raises if something does."""
    q, k, v, dout = inputs(600, 600, (4, 2), (64, 64), dtype=dtype, device="cuda")
    run(kernel, q, k, v, dout, MASKS[mask_name](600), 0.125)  # first calls may load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(kernel, q, k, v, dout, MASKS[mask_name](600), 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"errors": {}, "passed": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--all", action="store_true", help="every combination, instead of every pair")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_kernels: needs a CUDA machine, and torch sees none")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    print(json.dumps(machine))
    tensors = [torch.empty(1, 8, 1000, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    print(kernels.explain(*tensors), kernels.explain(*(t.float() for t in tensors)), sep="\n")
    results = []

    def report(name: str, what: str, function, *args) -> None:
        torch.manual_seed(0)
        try:
            result = function(kernels.choose(name), *args)
        except Exception as error:  # one broken case must not hide the others
            result = {"passed": False, "failure": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        state = "SKIP" if "skipped" in result else "PASS" if result["passed"] else "FAIL"
        results.append({"kernel": name, "case": what, "state": state, **result})
        text = result.get("skipped") or result.get("failure")
        if text is None:
            marks = {n: "" if e <= result["limits"][n] else "!" for n, e in result["errors"].items()}
            text = " ".join(f"{n} {e:.1e}{marks[n]}" for n, e in result["errors"].items())
        print(f"{state} {name:<10} {what}: {text}", flush=True)

    for name in options.kernels:
        start, first = time.perf_counter(), len(results)
        takes = KERNELS[name]
        for case in (product if options.all else pairwise)(GRID | takes):
            what = " ".join(short(value) for value in case.values())
            report(name, what, check, case)
        for dtype in takes["dtype"]:
            for mask in takes["mask"]:
                report(name, f"logits of 1e4, {mask} {short(dtype)}", check_large_logits, mask, dtype)
                if mask != "documents":  # this mask copies the ends of its documents to the GPU
                    report(name, f"no synchronisation, {mask} {short(dtype)}", check_no_sync, mask, dtype)
            if "blind rows" in takes["mask"]:
                report(name, f"a tile that nobody sees, {short(dtype)}", check_blind_tile, dtype)
            report(name, f"tiles of one row or column, {short(dtype)}", check_small_tiles, dtype)
        states = [r["state"] for r in results[first:]]
        counts = ", ".join(f"{states.count(s)} {s}" for s in ("PASS", "SKIP", "FAIL"))
        print(f"---- {name}: {counts} in {time.perf_counter() - start:.0f} s", flush=True)
    failed = [r for r in results if r["state"] == "FAIL"]
    print(
        f"{len(results) - len(failed)} of {len(results)} without failure"
        + "".join(f"\nFAIL {r['kernel']} {r['case']}: {r.get('failure', '')}" for r in failed)
    )
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

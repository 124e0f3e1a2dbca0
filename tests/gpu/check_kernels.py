"""Checks every kernel of a CUDA machine against dense float64 attention; run from the root of the repository:

    python tests/gpu/check_kernels.py --out kernels.json

FlashAttention 4 is among them where it is installed. One line for each case: relative errors of out, lse, dq, dk, dv,
and whether each is within its limit (1e-5 in float32; twice the error of one SDPA call in float16 and bfloat16). The
exit status is 1 if one is not. ``--all`` takes every combination instead of every pair, ``--share 1/8`` every eighth
case, for several processes at once: FlashAttention 4 compiles a kernel for nearly every case.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernel_cases import (  # noqa: E402
    BANDS,
    MASKS,
    MEMORY,
    NAMES,
    ODD,
    Diagonals,
    errors,
    exact,
    inputs,
    limits,
    mask_of,
    one_tile,
    run,
    segments_tile,
)
from oracle import dense_attention  # noqa: E402
from pairwise import pairwise, product  # noqa: E402

import ringlearn as rl  # noqa: E402
from ringlearn import kernels  # noqa: E402
from ringlearn.kernels import fa4  # noqa: E402
from ringlearn.kernels.fa4 import Fa4  # noqa: E402
from ringlearn.layouts import LAYOUTS, positions_of  # noqa: E402
from ringlearn.partial import merge  # noqa: E402
from ringlearn.partial.accumulate import Accumulator  # noqa: E402
from ringlearn.tiles import Kind, Tile, plan, plan_steps  # noqa: E402

HALF = [torch.bfloat16, torch.float16]
FLASH = ["full", "causal", "window", "wide window", "documents", "documents, whole", "documents, window"]
# What each kernel is checked with: masks that lead to tiles it takes.
KERNELS = {
    "fa4": {"mask": FLASH, "dtype": HALF, "heads": [(4, 4), (8, 2), (6, 2)]},
    "cudnn": {"mask": ["full", "causal"], "dtype": HALF},
    "cuda_flash": {"mask": FLASH, "dtype": HALF},
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


def packs(S: int) -> dict[str, rl.Mask]:
    """Documents that divide by nothing, and windows."""
    few, many = (
        rl.documents([S // 3, 0, S // 4, S - S // 3 - S // 4]),
        rl.documents([7, 60, 2, 31] * (S // 100) + [S % 100]),
    )
    return {
        "documents": rl.causal & few,
        "many documents": rl.causal & many,
        "window": rl.causal & rl.sliding_window(S // 7),
        "window on both sides": rl.sliding_window(S // 9),
        "documents, window": rl.causal & few & rl.sliding_window(S // 11),
        "many documents, whole": many & rl.sliding_window(40),
    }


# Rings of several ranks; dims and heads that share compiled kernels with the cases above.
RING = {
    "mask": list(packs(1013)),
    "layout": list(LAYOUTS),
    "P": [1, 2, 3, 4, 8],
    "B": [1, 2],
    "heads": [(4, 4), (8, 2)],
    "dims": [(64, 64), (128, 128), (96, 64)],
}


def short(value) -> str:
    return str(value).removeprefix("torch.")


def check(kernel, case) -> dict:
    """errors and limits, or why the case is skipped"""
    (S_q, S_k), mask_name = case["S"], case["mask"]
    if mask_name.startswith("documents") and S_q > S_k:
        return {"skipped": "documents end with the keys"}
    q, k, v, dout = inputs(S_q, S_k, case["heads"], case["dims"], case["memory"], case["dtype"], "cuda")
    if case["memory"] == "expanded":
        q = torch.randn_like(q)
    mask, scale = MASKS[mask_name](max(S_q, S_k)), q.shape[-1] ** -0.5
    ends = [i * S_k // case["pieces"] for i in range(case["pieces"] + 1)]
    shards = [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    kinds = {tile.kind for shard in shards for tile in plan(mask, (range(S_q),), (shard,))}
    reason = next(filter(None, (kernel.unsupported(q, k, v, kind) for kind in kinds)), None)
    if reason:
        return {"skipped": reason}
    got, again = (run(kernel, q, k, v, dout, mask, scale, case["pieces"]) for _ in range(2))
    same = all(torch.equal(got[name], again[name]) for name in ("out", "lse"))  # FlashAttention 4 has a shorter way
    oracle = exact(q, k, v, dout, mask, scale)
    off, allowed = errors(got, oracle), limits(q, k, v, dout, mask, scale, oracle)
    same_rows = torch.equal(got["lse"] == -torch.inf, oracle["lse"] == -torch.inf)
    return {"errors": off, "limits": allowed, "passed": same and same_rows and all(off[n] <= allowed[n] for n in off)}


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


def check_overflow(kernel, dtype) -> dict:
    """Rows whose scores over all keys of a tile are beyond float32: these keys weigh nothing, or the row is NaN."""
    if dtype == torch.float16:
        return {"skipped": "no product of float16 numbers is beyond float32"}
    q, k, v, _ = inputs(64, 64, (4, 4), (64, 64), dtype=dtype, device="cuda")
    q, k = q.abs() * 1e-20, k.abs() * 1e-20
    q[:, :, ::2], k[:, :, :32] = 1e20, -1e20
    tiles = (Tile(slice(0, 64), columns, Kind.FULL) for columns in (slice(0, 32), slice(32, 64)))
    out = merge(*(kernel.forward(q, k, v, tile, 0.125) for tile in tiles)).out
    right, numbers = dense_attention(q, k, v, rl.full, 0.125)[0], out.isfinite()
    error = float((out - right).where(numbers, 0.0).norm() / right.norm())
    passed = error < 2e-2 and bool(numbers[:, :, 1::2].all())
    return {
        "errors": {"out": error},
        "limits": {"out": 2e-2},
        "passed": passed,
        "finite": float(numbers.double().mean()),
    }


def check_odd_segments(kernel, name, heads, B, dtype) -> dict:
    tile = segments_tile(slice(3, 900), slice(5, 1200), **ODD[name])
    q, k, v, dout = inputs(tile.q.stop + 9, tile.k.stop + 5, heads, (64, 64), dtype=dtype, device="cuda", B=B)
    got, oracle = one_tile(kernel, tile, q, k, v, dout, 0.125)
    visible = tile.visible("cuda")
    blind, unseen = ~visible.any(-1), ~visible.any(-2)
    right = torch.equal(got["lse"] == -torch.inf, oracle["lse"] == -torch.inf)
    zero = (got["out"][:, :, blind], got["dq"][:, :, blind], got["dk"][:, :, unseen], got["dv"][:, :, unseen])
    part = q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k], dout[:, :, tile.q]
    off, allowed = errors(got, oracle), limits(*part, mask_of(tile), 0.125, oracle)
    passed = right and all(bool((t == 0).all()) for t in zero) and all(off[n] <= allowed[n] for n in off)
    return {"errors": off, "limits": allowed, "passed": passed}


def check_band(kernel, band, heads, dtype) -> dict:
    q, k, v, dout = inputs(37, 37, heads, (64, 64), dtype=dtype, device="cuda")
    mask = Diagonals(*band)
    got, oracle = run(kernel, q, k, v, dout, mask, 0.125), exact(q, k, v, dout, mask, 0.125)
    blind = ~mask.dense(37, 37, device="cuda").any(-1)
    right = bool((got["out"][:, :, blind] == 0).all()) and torch.equal(
        got["lse"] == -torch.inf, oracle["lse"] == -torch.inf
    )
    if blind.all():
        return {"errors": {}, "passed": right and all(bool((got[n] == 0).all()) for n in ("dq", "dk", "dv"))}
    off, allowed = errors(got, oracle), limits(q, k, v, dout, mask, 0.125, oracle)
    # A row that sees one key alone has no gradient but rounding.
    alone = bool((mask.dense(37, 37).sum(-1) <= 1).all())
    right &= all(off[n] <= allowed[n] or alone and n in ("dq", "dk") for n in off)
    return {"errors": off, "limits": allowed, "passed": right}


def check_ring(kernel, mask_name, layout, P, B, heads, dims, dtype) -> dict:
    """All steps of all ranks of a ring, each in one call, or two; forward and backward."""
    S = 1013
    q, k, v, dout = inputs(S, S, heads, dims, dtype=dtype, device="cuda", B=B)
    mask, scale, ranges = packs(S)[mask_name], dims[0] ** -0.5, LAYOUTS[layout].ranges(S, P)
    oracle, allowed = exact(q, k, v, dout, mask, scale), None
    got = {n: torch.zeros_like(t) for n, t in oracle.items()}
    calls = 0
    with torch.no_grad():
        at = [positions_of(r, "cuda") for r in ranges]
        shards = [[t[:, :, rows].contiguous() for t in (q, k, v, dout)] for rows in at]
        for rank, rows in enumerate(at):
            steps = plan_steps(mask, ranges[rank], ranges)
            calls = max(calls, *map(len, steps))
            mine, d = shards[rank][0], shards[rank][3]
            result = Accumulator((*mine.shape[:3], dims[1]), torch.float32, "cuda")
            for source, tiles in enumerate(steps):
                for tile in tiles:
                    result.add(tile.q, kernel.forward(mine, *shards[source][1:3], tile, scale))
            out, lse = result.partial
            got["out"][:, :, rows], got["lse"][:, :, rows] = out.double(), lse.double()
            for source, tiles in enumerate(steps):
                for tile in tiles:
                    grads = kernel.backward(d, mine, *shards[source][1:3], out, lse, tile, scale)
                    for n, g, where, part in zip(
                        ("dq", "dk", "dv"), grads, (rank, source, source), (tile.q, tile.k, tile.k)
                    ):
                        got[n][:, :, at[where][part]] += g.double()
    off, allowed = errors(got, oracle), limits(q, k, v, dout, mask, scale, oracle)
    # As many roundings to 16 bits as there are parts.
    allowed = {n: x if n == "lse" else max(x, torch.finfo(dtype).eps) for n, x in allowed.items()}
    # A window on both sides that the end of a document or of a block cuts has no edges in common with others.
    two_sided = mask_name in ("window on both sides", "many documents, whole")
    few = calls <= (3 if two_sided else 2 if layout == "zigzag" else 1)
    return {"errors": off, "limits": allowed, "passed": few and all(off[n] <= allowed[n] for n in off)}


def check_fresh_documents(kernel, dtype) -> dict:
    """A mask that was never seen waits for nothing; in a CUDA graph the second call computes the same."""
    q, k, v, dout = inputs(600, 600, (4, 2), (64, 64), dtype=dtype, device="cuda")
    fresh = [rl.causal & rl.documents([100 + i, 200, 300 - i]) for i in range(2)]
    run(kernel, q, k, v, dout, fresh[0], 0.125)  # first calls may load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = run(kernel, q, k, v, dout, fresh[1], 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(kernel, q, k, v, dout, fresh[1], 0.125)
    graph.replay()
    torch.cuda.synchronize()
    off = {
        n: float((captured[n].double() - eager[n].double()).norm() / eager[n].double().norm())
        for n in ("out", "dq", "dk", "dv")
    }
    allowed = dict.fromkeys(off, torch.finfo(dtype).eps)
    return {"errors": off, "limits": allowed, "passed": all(off[n] <= allowed[n] for n in off)}


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


def check_softcap(kernel, mask_name, dtype, D) -> dict:
    """FlashAttention 4 alone has it. The scores are about as large as the cap. D need not be one that is taken yet."""
    q, k, v, dout = inputs(300, 300, (4, 2), (D, D), dtype=dtype, device="cuda")
    mask, scale, cap = MASKS[mask_name](300), D**-0.5, 2.0
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, scale, softcap=cap)
    oracle = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout.double())), strict=True))
    oracle["lse"] = lse
    taken, fa4.SOFTCAP_DIMS = fa4.SOFTCAP_DIMS, (*fa4.DIMS, 256)
    try:
        off = errors(run(Fa4(softcap=cap), q, k, v, dout, mask, scale), oracle)
    finally:
        fa4.SOFTCAP_DIMS = taken
    # tanh is an approximate instruction, good to about 11 bits.
    allowed = {n: max(2 * torch.finfo(dtype).eps, 2e-3) for n in off} | {"lse": 1e-3}
    return {"errors": off, "limits": allowed, "passed": all(off[n] <= allowed[n] for n in off)}


def check_gradient_of_lse(kernel, mask_name, dtype) -> dict:
    q, k, v, dout = inputs(300, 300, (4, 2), (64, 64), dtype=dtype, device="cuda")
    mask = MASKS[mask_name](300)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, 0.125)
    dlse = torch.randn_like(lse)
    names = ("dq", "dk", "dv")
    oracle = dict(zip(names, torch.autograd.grad((out, lse), leaves, (dout.double(), dlse)), strict=True))
    got = {name: torch.zeros_like(t) for name, t in zip(names, leaves, strict=True)}
    for tile in plan(mask, (range(300),), (range(300),)):
        reason = kernel.unsupported(q, k, v, tile.kind, lse_grad=True)
        if reason:
            return {"skipped": reason}
        args = dout, q, k, v, out.detach().to(dtype), lse.detach().float(), tile, 0.125, dlse.float()
        for name, grad, where in zip(names, kernel.backward(*args), (tile.q, tile.k, tile.k), strict=True):
            got[name][:, :, where] += grad
    off = errors(got, oracle)
    allowed = dict.fromkeys(names, torch.finfo(dtype).eps)
    return {"errors": off, "limits": allowed, "passed": all(off[n] <= allowed[n] for n in off)}


def check_deterministic(kernel, mask_name, dtype) -> dict:
    """Twice the same, to the last bit, if torch is told so."""
    q, k, v, dout = inputs(2048, 2048, (8, 2), (128, 128), dtype=dtype, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        reasons = (kernel.unsupported(q, k, v, kind) for kind in (Kind.FULL, Kind.CAUSAL))
        reason = next(filter(None, reasons), None)
        if reason:
            return {"skipped": reason}
        first, second = (run(kernel, q, k, v, dout, MASKS[mask_name](2048), 0.125) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    return {"errors": {}, "passed": all(torch.equal(first[n], second[n]) for n in NAMES)}


OF_SEGMENTS = (check_fresh_documents, check_odd_segments, check_band, check_ring)


def share(text: str) -> tuple[int, int]:
    i, n = map(int, text.split("/"))
    if not 1 <= i <= n:
        raise ValueError
    return i, n


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), help="all that are installed, by default")
    parser.add_argument("--only", default="", help="only cases whose names have this in them, such as softcap")
    parser.add_argument("--share", type=share, default=(1, 1), help="1/8 to 8/8: every eighth case")
    parser.add_argument("--all", action="store_true", help="every combination, instead of every pair")
    parser.add_argument("--segments", action="store_true", help="only what concerns documents and windows in a ring")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_kernels: needs a CUDA machine, and torch sees none")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = {
        "command": shlex.join(["python3", "tests/gpu/check_kernels.py", *sys.argv[1:]]),
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
    results, asked = [], 0
    (this, shares), names = options.share, options.kernels or list(KERNELS)
    if not options.kernels and kernels.choose("fa4").unsupported(*tensors, Kind.FULL):
        names.remove("fa4")

    def report(name: str, what: str, function, *args) -> None:
        nonlocal asked
        if options.only not in what:
            return
        asked += 1
        if asked % shares != this % shares or options.segments and function not in OF_SEGMENTS:
            return
        torch.manual_seed(0)
        try:
            result = function(kernels.choose(name), *args)
        except Exception as error:  # one broken case must not hide the others
            result = {"passed": False, "failure": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        state = "SKIP" if "skipped" in result else "PASS" if result["passed"] else "FAIL"
        rounded = {n: {k: float(f"{x:.3g}") for k, x in result[n].items()} for n in ("errors", "limits") if n in result}
        results.append({"kernel": name, "case": what, "state": state} | result | rounded)
        text = result.get("skipped") or result.get("failure")
        if text is None:
            marks = {n: "" if e <= result["limits"][n] else "!" for n, e in result["errors"].items()}
            text = " ".join(f"{n} {e:.1e}{marks[n]}" for n, e in result["errors"].items())
        print(f"{state} {name:<10} {what}: {text}", flush=True)

    for name in names:
        start, first = time.perf_counter(), len(results)
        takes = KERNELS[name]
        for case in (product if options.all else pairwise)(GRID | takes):
            what = " ".join(short(value) for value in case.values())
            report(name, what, check, case)
        for dtype in takes["dtype"]:
            for mask in takes["mask"]:
                report(name, f"logits of 1e4, {mask} {short(dtype)}", check_large_logits, mask, dtype)
                report(name, f"no synchronisation, {mask} {short(dtype)}", check_no_sync, mask, dtype)
            for mask in ("causal", "documents", "window") if name == "fa4" else ():
                for D in (40, 64, 96, 128, 256) if dtype is torch.bfloat16 else (64,):
                    report(name, f"softcap, {mask} {short(dtype)} D {D}", check_softcap, mask, dtype, D)
                report(name, f"a gradient of lse, {mask} {short(dtype)}", check_gradient_of_lse, mask, dtype)
                report(name, f"deterministic, {mask} {short(dtype)}", check_deterministic, mask, dtype)
            if "blind rows" in takes["mask"]:
                report(name, f"a tile that nobody sees, {short(dtype)}", check_blind_tile, dtype)
            report(name, f"scores beyond float32, {short(dtype)}", check_overflow, dtype)
            report(name, f"tiles of one row or column, {short(dtype)}", check_small_tiles, dtype)
            if name not in ("fa4", "cuda_flash", "sdpa"):
                continue
            report(name, f"fresh documents, {short(dtype)}", check_fresh_documents, dtype)
            for what in ODD:
                for heads, B in (((4, 4), 1), ((8, 2), 2)):
                    report(
                        name, f"{what}, heads {heads}, B {B}, {short(dtype)}", check_odd_segments, what, heads, B, dtype
                    )
            for band in BANDS:
                report(name, f"j-i in {band}, {short(dtype)}", check_band, band, (8, 2), dtype)
            for case in pairwise(RING):
                what = " ".join(short(value) for value in case.values())
                report(name, f"ring, {what}, {short(dtype)}", check_ring, *case.values(), dtype)
        states = [r["state"] for r in results[first:]]
        counts = ", ".join(f"{states.count(s)} {s}" for s in ("PASS", "SKIP", "FAIL"))
        print(f"---- {name}: {counts} in {time.perf_counter() - start:.0f} s", flush=True)
    failed = [r for r in results if r["state"] == "FAIL"]
    print(
        f"{len(results) - len(failed)} of {len(results)} without failure"
        + "".join(f"\nFAIL {r['kernel']} {r['case']}: {r.get('failure', '')}" for r in failed)
    )
    if options.out:
        lines = ",\n".join(json.dumps(result) for result in results)
        options.out.write_text(f'{{"machine": {json.dumps(machine)},\n"results": [\n{lines}\n]}}\n')
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Ring attention on the processes of torchrun, on GPUs with NCCL or on CPUs with gloo, against SDPA in float32.

    torchrun --nproc-per-node 2 tests/gpu/check_ring.py --out docs/measurements/ring.json

Runs the README example and cases in other dtypes, layouts and masks; prints the relative error of out, dq, dk and dv
and ends with an error if one is larger than 1e-5 (float32), or than twice the error that one SDPA call in that dtype
has itself. The JSON file has the hardware, versions and command beside the numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ringlearn as rl  # noqa: E402

# name: (shape B, H, G, S, D), dtype, layout, mask
CASES = {
    "README example": ((1, 8, 8, 1000, 64), torch.float32, rl.zigzag, rl.causal),
    "fp32, GQA, uneven": ((2, 8, 2, 997, 64), torch.float32, rl.striped, rl.full),
    "bf16, 32:8 heads": ((1, 32, 8, 4096, 128), torch.bfloat16, rl.zigzag, rl.causal),
    "bf16, contiguous": ((1, 32, 8, 4096, 128), torch.bfloat16, rl.contiguous, rl.causal),
    "bf16, striped": ((1, 32, 8, 4096, 128), torch.bfloat16, rl.striped, rl.causal),
    "bf16, window": ((1, 8, 2, 4001, 128), torch.bfloat16, rl.zigzag, rl.causal & rl.sliding_window(700)),
    # What nobody needs is not sent: rank 0 sends some rows and rank 1 none, both send some of either end,
    # or nobody sends anything.
    "bf16, contiguous window": (
        (1, 32, 8, 4096, 128),
        torch.bfloat16,
        rl.contiguous,
        rl.causal & rl.sliding_window(700),
    ),
    "bf16, two-sided window": ((2, 8, 2, 4001, 128), torch.bfloat16, rl.zigzag, rl.sliding_window(300)),
    "fp32, contiguous documents": (
        (1, 8, 2, 3000, 64),
        torch.float32,
        rl.contiguous,
        rl.causal & rl.documents([1000, 0, 900, 1100]),
    ),
    "bf16, no messages": (
        (1, 8, 2, 4096, 64),
        torch.bfloat16,
        rl.contiguous,
        rl.causal & rl.documents([1048, 1000, 2048]),
    ),
    "fp16, documents": (
        (1, 8, 2, 3000, 64),
        torch.float16,
        rl.zigzag,
        rl.causal & rl.documents([1000, 0, 500, 1500]),
    ),
}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.to(b.device).double(), b.double()
    return float((a - b).norm() / b.norm())


def one_call(q, k, v, dout, mask) -> list[torch.Tensor]:
    """out, dq, dk, dv of one SDPA call on this device."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    k_all, v_all = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    with torch.nn.attention.sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        if mask == rl.causal and q.dtype != torch.float32:
            out = sdpa(q, k_all, v_all, is_causal=True)
        else:
            out = sdpa(q, k_all, v_all, attn_mask=mask.dense(q.shape[2], k.shape[2], device=q.device))
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def run(world: rl.DistributedWorld | rl.SimulatedWorld, shape, dtype, layout, mask) -> dict[str, dict[str, float]]:
    """Relative errors of this rank's ring, and of one SDPA call in the same dtype, against SDPA in float32."""
    B, H, G, S, D = shape
    torch.manual_seed(0)  # on the CPU, as in the README: world.shard moves what it is given to the world's device
    q, k, v = (torch.randn(B, h, S, D).to(dtype).requires_grad_() for h in (H, G, G))
    dout = torch.randn(B, H, S, D).to(dtype)
    out = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=mask).unshard()
    out.backward(dout.to(out.device))
    ring = [out.detach(), q.grad, k.grad, v.grad]
    q, k, v, dout = (t.to(world.device) for t in (q, k, v, dout))
    exact = one_call(*(t.float() for t in (q, k, v, dout)), mask)
    single = one_call(q, k, v, dout, mask)
    names = ("out", "dq", "dk", "dv")
    return {
        "ring": {name: relative(a, b) for name, a, b in zip(names, ring, exact)},
        "one SDPA call": {name: relative(a, b) for name, a, b in zip(names, single, exact)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a JSON file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    world = rl.DistributedWorld(timeout=60)
    if world.rank == 0:
        print("relative error of the ring (of one SDPA call in the same dtype) against SDPA in float32")
    gpu = world.device.type == "cuda"
    results, ok = {}, True
    worlds = [(name, world, case) for name, case in CASES.items()]
    for P in (2, 4, 8, 16):  # drift with the number of merges: all ranks on this one device
        worlds.append((f"simulated, P = {P}", rl.SimulatedWorld(P, device=world.device), CASES["bf16, 32:8 heads"]))
    for name, where, case in worlds:
        errors = run(where, *case)
        gathered = [None] * world.size
        dist.all_gather_object(gathered, errors["ring"])
        worst = {key: max(rank[key] for rank in gathered) for key in errors["ring"]}
        single = errors["one SDPA call"]
        bound = {key: 1e-5 if case[1] == torch.float32 else 2 * single[key] for key in single}
        good = all(worst[key] <= bound[key] for key in worst)
        ok &= good
        results[name] = {"ring": worst, "one SDPA call": single, "ok": good}
        if world.rank == 0:
            shown = "  ".join(f"{key} {value:.2e} ({single[key]:.2e})" for key, value in worst.items())
            print(f"{'ok  ' if good else 'FAIL'} {name:<18} {shown}", flush=True)
    if world.rank == 0 and options.out:
        record = {
            "what": "relative error norms against SDPA in float32: of the ring, the worst over ranks; of one SDPA call",
            "date": datetime.date.today().isoformat(),
            "command": f"torchrun --nproc-per-node {world.size} {shlex.join(sys.argv)}",
            "hardware": [torch.cuda.get_device_name(i) for i in range(world.size)] if gpu else platform.processor(),
            "backend": "nccl" if gpu else "gloo",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
            "ringlearn": rl.__version__,
            "results": results,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()
    sys.exit(not ok)


if __name__ == "__main__":
    main()

"""The longest sequence that a plan says fits on the GPUs of this machine: it is trained on, and 1.15 times it is not.

    python3 tools/measure_longest.py --out longest.json

Each case is a model and a way to train it with ``ringlearn.train``. The plan counts bytes from shapes, with its reserve
for CUDA, NCCL and what the allocator cannot use; the run makes two steps, the second with the optimizer's moments.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from ringlearn.launch.machine import hardware, versions  # noqa: E402
from ringlearn.plan.hardware import GPU, gpu  # noqa: E402
from ringlearn.plan.models import Model  # noqa: E402
from ringlearn.plan.search import longest_sequence  # noqa: E402
from ringlearn.plan.setup import Setup  # noqa: E402

STEP = 256  # tokens
BEYOND = 1.15  # times the longest sequence: it must not fit

# Name: width, layers, H, G, sequences, whether layers are computed again, whether parameters are sharded.
CASES = {
    "everything kept": (1024, 8, 8, 2, 16, False, False),
    "layers computed again": (1024, 8, 8, 2, 384, True, False),
    "wide, parameters sharded": (4096, 8, 32, 8, 8, False, True),
}


def planned(case: tuple[int, int, int, int, int, bool, bool], gpus: int, device: GPU) -> int:
    """Tokens of the longest sequence that the plan says fits."""
    width, layers, H, G, sequences, again, fsdp = case
    model = Model("", layers, width, H, G, 4 * width, 256, width // H, gated=False)
    how = dict(recompute="full" if again else "none", fsdp=3 if fsdp else 0, tiled_loss=True, tiled_mlp=True)
    setup = Setup(cp=gpus, sequences=sequences, framework="ringlearn", **how)
    return longest_sequence(model, setup, device, step=STEP)


def run(case: tuple[int, int, int, int, int, bool, bool], tokens: int, gpus: int) -> dict[str, Any]:
    """Whether two steps fit, and the most that a rank has held."""
    width, layers, H, G, sequences, again, fsdp = case
    flags = f"--width {width} --layers {layers} --heads {H} {G} --batch {sequences} --tokens {tokens} --steps 2"
    flags += " --dtype bfloat16 --timeout 60" + " --checkpoint-layers" * again + " --fsdp" * fsdp
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command += ["-m", "ringlearn.train", *flags.split(), "--record", str(record)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        steps = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    out_of_memory = "out of memory" in done.stderr
    if done.returncode and not out_of_memory:
        print(done.stderr[-3000:], file=sys.stderr)
    return {"tokens": tokens, "fits": not done.returncode, "out_of_memory": out_of_memory, "command": flags,
            "mib": max((step["MiB"] for step in steps), default=None)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    gpus, total = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
    device = replace(gpu("this"), memory=total)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": "python3 tools/measure_longest.py",
        "hardware": hardware(gpus),
        "memory_gib": total / 2**30,
        "versions": versions(),
        "cases": [],
    }
    for name in options.cases:
        longest = planned(CASES[name], gpus, device)
        beyond = int(longest * BEYOND) // STEP * STEP
        runs = [run(CASES[name], tokens, gpus) for tokens in (longest, beyond)]
        record["cases"].append({"case": name, "longest": longest, "runs": runs})
        print(name, *runs, sep="\n  ", flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

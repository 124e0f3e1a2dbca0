"""What training takes on one GPU and on all of them: tokens per second, memory, the longest sequence, loss curves.

    python3 tools/measure_training.py --out training.json

Every number comes from ringlearn.train itself, run in processes as torchrun starts them. Rates are medians over the
steps after the first two; memory is the most that a rank has held, with parameters, optimizer state and the slots of
symmetric memory. The longest sequence is the longest multiple of 8,192 tokens whose steps stay within a budget of
memory, which stands for a smaller GPU; the next one was run too, and did not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from ringlearn.launch.machine import hardware, versions  # noqa: E402
from ringlearn.launch.pool import Pool  # noqa: E402
from ringlearn.train.options import parse  # noqa: E402
from ringlearn.train.run import train  # noqa: E402

MODEL = "--width 1024 --layers 8 --heads 8 2 --block 8192 --dtype bfloat16 --batch 1 --layout zigzag"
SMALL = "--width 128 --layers 2 --heads 4 2 --tokens 1000 --batch 2 --dtype float64 --layout zigzag"
GRID = 8192  # tokens
BUDGET = 16 * 1024  # MiB


def steps(commands: list[str]) -> list[list[dict[str, float]]]:
    """What each step was, of runs with these options, one after the other; every process calls it."""
    found = []
    for command in commands:
        gc.collect()  # what the run before has left
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "steps.jsonl"
            with contextlib.redirect_stdout(io.StringIO()):
                train(parse([*command.split(), "--record", str(record)]))
            found.append([json.loads(line) for line in record.read_text().splitlines()] if record.exists() else [])
    return found


def run(gpus: int, *commands: str) -> list[list[dict[str, float]]]:
    """In fresh processes, as torchrun's are."""
    with Pool(gpus) as pool:
        return pool.run(steps, list(commands), timeout=300)[0]


def rate(gpus: int, tokens: int, found: list[dict[str, float]]) -> dict[str, Any]:
    per_second = statistics.median(step["tokens/s"] for step in found[2:])
    row = {"gpus": gpus, "tokens": tokens, "tokens_per_s": per_second, "step_ms": 1e3 * tokens / per_second,
           "peak_mib": found[-1]["MiB"]}  # fmt: skip
    print(row, flush=True)
    return row


def longest(gpus: int, rows: list[dict[str, Any]], budget: float) -> dict[str, Any]:
    """By a line through what two lengths needed; then one step up or down until the border is found."""
    short, long = rows[-2:]
    slope = (long["peak_mib"] - short["peak_mib"]) / (long["tokens"] - short["tokens"])
    n = int((long["tokens"] + (budget - long["peak_mib"]) / slope) // GRID)
    peaks: dict[int, float] = {}
    while True:
        missing = [m for m in (n, n + 1) if m not in peaks]
        found = run(gpus, *(f"{MODEL} --tokens {m * GRID} --steps 3" for m in missing))
        peaks |= {m: rows[-1]["MiB"] for m, rows in zip(missing, found, strict=True)}
        if peaks[n] <= budget < peaks[n + 1]:
            break
        n += 1 if peaks[n + 1] <= budget else -1
    found = {"gpus": gpus, "budget_mib": budget, "tokens": n * GRID, "peak_mib": peaks[n],
             "next_peak_mib": peaks[n + 1], "mib_per_1024_tokens": 1024 * slope}  # fmt: skip
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 131072])
    parser.add_argument("--budget", type=float, default=BUDGET, help="MiB")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": "python3 tools/measure_training.py",
        "hardware": hardware(gpus),
        "versions": versions(),
        "model": MODEL,
        "small": SMALL,
        "rates": [],
        "longest": [],
        "losses": {},
    }
    curves = {"float64": f"{SMALL} --steps 50", "bfloat16": f"{MODEL} --tokens 8192 --steps 50"}
    for size in (1, gpus):
        lengths = (f"{MODEL} --tokens {tokens} --steps 6" for tokens in options.tokens)
        *found, float64, bfloat16 = run(size, *lengths, *curves.values())
        here = [rate(size, tokens, rows) for tokens, rows in zip(options.tokens, found, strict=True)]
        record["rates"] += here
        for name, rows in ("float64", float64), ("bfloat16", bfloat16):
            record["losses"][f"{name}, {size}"] = [step["loss"] for step in rows]
        record["longest"].append(longest(size, here, options.budget))
        options.out.write_text(json.dumps(record, indent=1) + "\n")  # a run that is cut off leaves what it has
    for name in ("float64", "bfloat16"):
        pair = zip(*(record["losses"][f"{name}, {size}"] for size in (1, gpus)), strict=True)
        print(name, "largest difference of the losses:", max(abs(a - b) for a, b in pair))


if __name__ == "__main__":
    main()

"""What NCCL does with messages in a careless order: who hangs, who gets what. For docs/measurements.

    python tools/measure_order.py --out docs/measurements/<date>-order-2-<gpu>.json

Needs two GPUs. Each case runs on fresh messages of a two-rank group; one that has not ended after
``HANGS_AFTER_SECONDS``, device included, hangs, and its processes are replaced.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringlearn.launch.machine import hardware, versions
from ringlearn.launch.pool import LaunchError, Pool

HANGS_AFTER_SECONDS = 10.0
SIZES = (4, 64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20)  # bytes


def one(case: str, nbytes: int) -> dict[str, Any]:
    """On each rank: whether it got what the other sent, and how long the host was held up."""
    rank, P = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % P, (rank - 1) % P
    # The connections first, as a group's first message needs all ranks.
    for work in _batch(torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"), following, previous):
        work.wait()
    torch.cuda.synchronize()
    x = torch.full((nbytes // 4,), float(rank), device="cuda")
    received = torch.full_like(x, -1.0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    got = _do(case, x, received, rank, following, previous)
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return {"right": bool((got == previous).all()), "host_ms": round(1e3 * host, 3)}


def _batch(x, received, following, previous):
    ops = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, received, previous)]
    return dist.batch_isend_irecv(ops)


def _do(case: str, x, received, rank: int, following: int, previous: int):
    if case == "all send first":
        dist.send(x, following)
        dist.recv(received, previous)
    elif case == "even ranks send first":
        calls = [lambda: dist.send(x, following), lambda: dist.recv(received, previous)]
        for call in calls if rank % 2 == 0 else calls[::-1]:
            call()
    elif case == "isend, irecv, wait for both":
        for handle in (dist.isend(x, following), dist.irecv(received, previous)):
            handle.wait()
    elif case == "batch_isend_irecv":
        for handle in _batch(x, received, following, previous):
            handle.wait()
    elif case == "batch, no wait":
        _batch(x, received, following, previous)
        return received.clone()
    elif case == "batch, receive into x":
        for handle in _batch(x, x, following, previous):
            handle.wait()
        return x
    return received


CASES = (
    "even ranks send first",
    "isend, irecv, wait for both",
    "batch_isend_irecv",
    "batch, no wait",
    "batch, receive into x",
    "all send first",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = []
    with Pool(2, backend="nccl") as pool:
        for case in CASES:
            for nbytes in SIZES:
                row: dict[str, Any] = {"case": case, "bytes": nbytes}
                try:
                    ranks = pool.run(
                        "tools/measure_order.py:one", case, nbytes, timeout=HANGS_AFTER_SECONDS + 20 * (not rows)
                    )
                    row |= {"ended": True, "right": all(r["right"] for r in ranks)}
                    row["host_ms"] = max(r["host_ms"] for r in ranks)
                except LaunchError as error:
                    row |= {"ended": False, "statuses": [r.status for r in error.reports]}
                rows.append(row)
                print(row, flush=True)
    record = {
        "what": "messages between two GPUs over NCCL in several orders: whether they arrived",
        "date": datetime.date.today().isoformat(),
        "command": "python tools/measure_order.py",
        "patience_s": HANGS_AFTER_SECONDS,
        "hardware": hardware(2),
        "versions": versions(),
        "results": rows,
    }
    if out:
        lines = ",\n  ".join(json.dumps(row) for row in record.pop("results"))
        text = json.dumps(record, indent=1)[:-2] + f',\n "results": [\n  {lines}\n ]\n}}\n'
        json.loads(text)
        out.write_text(text)


if __name__ == "__main__":
    main()

"""What this machine can run a ring on: the first cell of every notebook prints it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def ladder() -> tuple[str, ...]:
    """The ways of running ranks that this machine has, the closest to real hardware first.

    >>> ladder()[-1]
    'simulated ranks in one process'
    """
    rungs, gpus = [], torch.cuda.device_count()
    if gpus >= 2 and dist.is_available() and dist.is_nccl_available():
        rungs.append(f"NCCL with {gpus} GPUs")
    elif gpus >= 1:
        rungs.append("one GPU")
    if dist.is_available() and dist.is_gloo_available():
        rungs.append("gloo processes on the CPU")
    return (*rungs, "simulated ranks in one process")

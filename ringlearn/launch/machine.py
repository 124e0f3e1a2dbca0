"""What a record of a measurement says of the machine: its devices, and the versions of what ran on them."""

from __future__ import annotations

import platform
from typing import Any

import torch


def hardware(gpus: int) -> dict[str, Any]:
    """The devices that the ranks ran on."""
    if not torch.cuda.is_available():
        return {"device": platform.machine(), "gpus": 0, "ranks": gpus, "backend": "gloo"}
    names = sorted({torch.cuda.get_device_name(i) for i in range(gpus)})
    direct = all(torch.cuda.can_device_access_peer(i, j) for i in range(gpus) for j in range(gpus) if i != j)
    return {"device": ", ".join(names), "gpus": gpus, "ranks": gpus, "backend": "nccl", "peer_access": direct}


def versions() -> dict[str, str | None]:
    """Of this package, of torch, and of what torch brings for GPUs; None where there is no GPU."""
    from .. import __version__

    gpu = torch.cuda.is_available()
    return {
        "ringlearn": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": str(torch.backends.cudnn.version()) if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    }

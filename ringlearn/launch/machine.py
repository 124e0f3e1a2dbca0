"""What a record of a measurement says of the machine: its devices, and the versions of what ran on them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..tiles import Kind

VERSION = "0.1.0"  # of ringlearn; pyproject.toml says the same


def hardware(gpus: int) -> dict[str, Any]:
    """The devices that the ranks ran on."""
    if not torch.cuda.is_available():
        return {"device": platform.machine(), "gpus": 0, "ranks": gpus, "backend": "gloo"}
    names = sorted({torch.cuda.get_device_name(i) for i in range(gpus)})
    direct = all(torch.cuda.can_device_access_peer(i, j) for i in range(gpus) for j in range(gpus) if i != j)
    return {"device": ", ".join(names), "gpus": gpus, "ranks": gpus, "backend": "nccl", "peer_access": direct}


def versions() -> dict[str, str | None]:
    """Of this package, of torch, and of what torch brings for GPUs; None where there is no GPU."""
    gpu = torch.cuda.is_available()
    return {
        "ringlearn": VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": str(torch.backends.cudnn.version()) if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    }


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


PACKAGES = {"matplotlib": "plots", "ipywidgets": "notebooks", "jupyterlab": "notebooks"}  # and the extra that has it


def machine() -> dict[str, Any]:
    """What is here: versions, GPUs and their links, backends, cores, packages; ready for JSON.

    >>> machine()["ranks"][-1]
    'simulated ranks in one process'
    """
    there = dist.is_available()
    return {
        "ringlearn": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if _has_nccl() else None,
        "gpus": gpus(),
        "links": links(),
        "gpus_out_of_reach": 0 if torch.cuda.is_available() else _gpus_of_the_driver(),
        "cores": _cores(),
        "backends": [name for name in ("nccl", "gloo") if there and getattr(dist, f"is_{name}_available")()],
        "ranks": list(ladder()),
        "kernels": _kernels(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def gpus() -> list[dict[str, Any]]:
    """Name, memory in GiB and compute capability of each GPU that torch can use."""
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gib = round(p.total_memory / 2**30, 1)
        found.append({"name": p.name, "memory_gib": gib, "capability": f"{p.major}.{p.minor}"})
    return found


def links() -> list[dict[str, Any]]:
    """For each pair of GPUs: ``link``, "NVLink (NV18)", "PCIe (PHB)" or "unknown", and whether one reads the other's
    memory directly (``peer_access``)."""
    n = torch.cuda.device_count()
    if n < 2:
        return []
    numbers, names = _physical_numbers(n), link_names(_nvidia_smi("topo", "-m"))
    return [
        {
            "gpus": [i, j],
            "link": names.get((numbers[i], numbers[j]), "unknown") if numbers else "unknown",
            "peer_access": torch.cuda.can_device_access_peer(i, j) and torch.cuda.can_device_access_peer(j, i),
        }
        for i in range(n)
        for j in range(i + 1, n)
    ]


def link_names(topology: str) -> dict[tuple[int, int], str]:
    """What ``nvidia-smi topo -m`` prints, by pair of GPUs.

    >>> link_names("        GPU0  GPU1  CPU Affinity\\nGPU0     X    NV18  0-95\\nGPU1    NV18   X    0-95")
    {(0, 1): 'NVLink (NV18)', (1, 0): 'NVLink (NV18)'}
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)  # some versions underline the head
    heads = re.search(r"^\s*(GPU\d+\b.*)$", plain, flags=re.M)
    columns = [int(n) for n in re.findall(r"GPU(\d+)", heads[1])] if heads else []
    found = {}
    for row, cells in re.findall(r"^GPU(\d+)\s+((?:X|NV\d+|PIX|PXB|PHB|NODE|SYS)\b.*)$", plain, flags=re.M):
        for column, cell in zip(columns, cells.split()):
            if cell != "X":
                found[int(row), column] = f"{'NVLink' if cell.startswith('NV') else 'PCIe'} ({cell})"
    return found


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _physical_numbers(n: int) -> list[int] | None:
    """nvidia-smi's number of each GPU that torch sees; None if that cannot be told."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(n))
    chosen = [part.strip() for part in visible.split(",")]
    return [int(part) for part in chosen[:n]] if all(part.isdigit() for part in chosen[:n]) else None


def _gpus_of_the_driver() -> int:
    return len(re.findall(r"^GPU \d+:", _nvidia_smi("-L"), flags=re.M))


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kernels() -> dict[str, str]:
    """The kernel that computes whole tiles of bfloat16 and float32, with 128 numbers per head."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.empty(1, 1, 128, 128, dtype=dtype, device=device)
        found[str(dtype).removeprefix("torch.")] = kernels.choose().pick(q, q, q, Kind.FULL).name
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

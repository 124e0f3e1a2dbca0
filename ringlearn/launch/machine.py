"""What this machine has: its GPUs and how they are linked, the versions installed, and how it can run ranks."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..tiles import Kind

VERSION = "0.1.0"  # of ringlearn; pyproject.toml says the same


def hardware(ranks: int, device: str | None = None) -> dict[str, Any]:
    """The devices of this host on which this number of ranks runs, for the record of a measurement.

    device: "cpu" or "cuda"; by default "cuda" if there is a GPU.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return {"device": platform.machine(), "gpus": 0, "ranks": ranks, "backend": "gloo"}
    gpus = range(min(ranks, torch.cuda.device_count()))
    names = sorted({torch.cuda.get_device_name(i) for i in gpus})
    direct = all(torch.cuda.can_device_access_peer(i, j) for i in gpus for j in gpus if i != j)
    devices = {"device": ", ".join(names), "gpus": len(gpus), "ranks": ranks}
    return {**devices, "backend": "nccl", "peer_access": direct}


def versions() -> dict[str, str | None]:
    """The versions of this package, of torch, and of what torch brings for GPUs; None for those without a GPU.

    FlashAttention 4 is named where it is installed.
    """
    gpu, more = torch.cuda.is_available(), {}
    with suppress(metadata.PackageNotFoundError):
        more["flash-attn-4"] = metadata.version("flash-attn-4")
    return {
        "ringlearn": VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": str(torch.backends.cudnn.version()) if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    } | more


def available_backends() -> tuple[str, ...]:
    """The ways in which this machine can run ranks, the closest to real hardware first.

    >>> available_backends()[-1]
    'simulated ranks in one process'
    """
    found, gpus = [], torch.cuda.device_count()
    if gpus >= 2 and dist.is_available() and dist.is_nccl_available():
        found.append(f"NCCL with {gpus} GPUs")
    elif gpus >= 1:
        found.append("one GPU")
    if dist.is_available() and dist.is_gloo_available():
        found.append("gloo processes on the CPU")
    return (*found, "simulated ranks in one process")


ladder = available_backends  # its former name, which notebooks that readers have saved import from ringlearn.ladder
# Optional packages, and the extra that installs each.
PACKAGES = {"matplotlib": "plots", "ipywidgets": "notebooks", "jupyterlab": "notebooks"}


def machine() -> dict[str, Any]:
    """Everything about this machine in a form that JSON can hold: versions, GPUs, links, backends, cores, packages.

    >>> machine()["ranks"][-1]
    'simulated ranks in one process'
    """
    there = dist.is_available()
    return {
        "ringlearn": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "nccl": versions()["nccl"] if dist.is_available() and dist.is_nccl_available() else None,
        "gpus": gpus(),
        "links": links(),
        "gpus_out_of_reach": 0 if torch.cuda.is_available() else _gpus_of_the_driver(),
        "cores": cores(),
        "backends": [name for name in ("nccl", "gloo") if there and getattr(dist, f"is_{name}_available")()],
        "ranks": list(available_backends()),
        "kernels": _kernels(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def gpus() -> list[dict[str, Any]]:
    """Name, memory in GiB and compute capability of each GPU that torch can use."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
        for p in found
    ]


def links() -> list[dict[str, Any]]:
    """How each pair of GPUs is linked.

    ``link`` is "NVLink (NV18)", "PCIe (PHB)" or the like, or "unknown"; ``peer_access`` says whether each GPU can read
    the other's memory directly.
    """
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
    """The link of each pair of GPUs, from the output of ``nvidia-smi topo -m``.

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
    """nvidia-smi's number for each GPU that torch sees; None if CUDA_VISIBLE_DEVICES does not use numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(n))
    chosen = [part.strip() for part in visible.split(",")]
    return [int(part) for part in chosen[:n]] if all(part.isdigit() for part in chosen[:n]) else None


def _gpus_of_the_driver() -> int:
    return len(re.findall(r"^GPU \d+:", _nvidia_smi("-L"), flags=re.M))


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kernels() -> dict[str, str]:
    """The kernel that computes unmasked tiles in bfloat16 and in float32, with a head dim of 128."""
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

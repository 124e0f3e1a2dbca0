"""What a GPU and its links can do, in bytes, seconds and operations: of data sheets, or as you have measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GiB = 2**30
INSIDE = 0.67  # of a link's bandwidth inside a node: docs/measurements, 2 x H200, messages of 256 MiB, 303 of 450 GB/s


@dataclass(frozen=True)
class GPU:
    """A GPU, and how it is connected.

    memory: bytes that PyTorch sees. bf16, fp8: dense operations per second of the tensor cores; fp8 is 0 where there
    are none. bandwidth: bytes per second of its own memory. link, network: bytes per second in one direction to the
    GPUs of its node, and to those of other nodes. node: GPUs of a node. host: bytes of the host's memory for each of
    them (1.9 TB for 8 on AWS p5). latency, network_latency: seconds until a small message reaches a neighbour,
    inside a node (docs/measurements, copies of 512 tokens: 17 us) and between nodes; all_to_all_latency: of a
    collective between nodes (arXiv 2411.01783, table 8: 32 and 80 us). kernels: the fraction of the bf16 peak that
    causal attention reaches, forward and backward together, by kernel.
    """

    name: str
    memory: int
    bf16: float
    fp8: float
    bandwidth: float
    link: float
    network: float
    node: int = 8
    latency: float = 17e-6
    network_latency: float = 32e-6
    all_to_all_latency: float = 80e-6
    host: int = 237 * GiB
    kernels: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def peak(self, precision: str) -> float:
        """Operations per second of matrix products in this precision.

        >>> GPUS["h100"].peak("bf16"), GPUS["h100"].peak("fp8")
        (989000000000000.0, 1979000000000000.0)
        """
        if precision == "bf16":
            return self.bf16
        if not self.fp8:
            able = ", ".join(name for name, gpu in GPUS.items() if gpu.fp8)
            raise ValueError(f"plan: {self.name} has no FP8 tensor cores; use bf16, or one of {able}.")
        return self.fp8


# Hopper: docs/measurements, one device, 32,768 tokens, forward and backward: cuDNN 545 TFLOP/s, FlashAttention-2 324;
# FlashAttention-4 611 with the same shapes. FlashAttention-3: Shah et al. 2024, figure 6, causal, head dim 128.
_HOPPER = {"fa2": 0.33, "cudnn": 0.55, "fa3": 0.55, "fa4": 0.61}
FORWARD = 1.08  # rate of a forward alone over that of forward and backward: the same record, cuDNN 588 TFLOP/s
# Dao 2023, "FlashAttention-2", figure 4: 187 TFLOP/s on A100, causal, head dim 128, forward and backward.
_AMPERE = {"fa2": 0.60}
# Taken to be Hopper's until it is measured.
_BLACKWELL = {"cudnn": 0.55, "fa4": 0.61}

GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("a100", int(79.1 * GiB), 312e12, 0, 2.039e12, 300e9, 25e9, kernels=_AMPERE, source="A100 80GB SXM sheet"),
        GPU("h100", int(79.1 * GiB), 989e12, 1979e12, 3.35e12, 450e9, 50e9, kernels=_HOPPER, source="H100 SXM sheet"),
        # 96 GB of HBM2e, 500 W: 800 TFLOP/s at peak (Yang et al. 2024, arXiv 2411.01783); FP8 twice that.
        GPU(
            "h100-96", int(95.0 * GiB), 800e12, 1600e12, 2.4e12, 450e9, 50e9, kernels=_HOPPER,
            source="arXiv 2411.01783, section 4.1",
        ),
        GPU("h200", int(139.8 * GiB), 989e12, 1979e12, 4.8e12, 450e9, 50e9, kernels=_HOPPER, source="H200 SXM sheet"),
        GPU("b200", int(178.4 * GiB), 2250e12, 4500e12, 8e12, 900e9, 50e9, kernels=_BLACKWELL, source="HGX B200 sheet"),
    )
}  # fmt: skip


def gpu(which: str | Path | GPU) -> GPU:
    """A GPU by its name, or as measured in a file of ``python -m ringlearn.measure --out FILE``.

    The measurement supplies the rate of attention and the bandwidth of the links; memory and peaks are the data
    sheet's.
    Raises ValueError for an unknown name, or a file without measurements of GPUs.

    >>> gpu("h200").memory // 2**30
    139
    """
    if isinstance(which, GPU):
        return which
    if str(which).lower() in GPUS:
        return GPUS[str(which).lower()]
    if which == "this":
        return _of_name(_here(), "this")
    path = Path(which)
    if path.is_file():
        return _measured(path)
    raise ValueError(
        f"gpu: there is no GPU {str(which)!r}. Known are {', '.join(GPUS)}; 'this' is the one in this machine, and "
        "a file of `python -m ringlearn.measure --out FILE` stands for the GPUs that it was measured on."
    )


def _here() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"gpu: 'this' needs a GPU in this machine, and there is none; use one of {', '.join(GPUS)}.")
    return torch.cuda.get_device_name(0)


def gpu_named(device: str) -> GPU | None:
    """The GPU that CUDA calls so, or None if there is no data sheet of it here.

    >>> gpu_named("NVIDIA H200").name, gpu_named("Tesla T4"), gpu_named("NVIDIA H100 PCIe")
    ('h200', None, None)
    """
    words = device.lower().replace("-", " ").split()
    if {"pcie", "nvl", "40gb", "mig"} & set(words):  # they have less memory, bandwidth or power, or are a part of one
        return None
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def _of_name(device: str, said: str) -> GPU:
    known = gpu_named(device)
    if known is None:
        raise ValueError(f"gpu: {said} is {device!r}, and only these are known: {', '.join(GPUS)}.")
    return known


def _measured(path: Path) -> GPU:
    try:
        record = json.loads(path.read_text())
        sheet = _of_name(record["hardware"]["device"], str(path))
        seconds = [r["forward_backward_ms"] / 1e3 for r in record["plain"]]
        rates = [_operations(record["shape"], r["tokens"]) / s for r, s in zip(record["plain"], seconds, strict=True)]
        link = max(row["gb_per_s"] for row in record["transfers"]) * 1e9
    except (ValueError, KeyError, TypeError) as problem:
        if isinstance(problem, ValueError) and "gpu:" in str(problem):
            raise
        raise ValueError(
            f"gpu: expected {path} to be a file of `python -m ringlearn.measure --out FILE` on GPUs, got {problem!r}"
        ) from None
    kernels = {**sheet.kernels, "cudnn": max(rates) / sheet.bf16}
    return replace(sheet, link=link / INSIDE, kernels=kernels, source=str(path))  # plans multiply it by INSIDE


def _operations(shape: Mapping[str, Any], tokens: int) -> float:
    """Of causal attention, forward and backward."""
    return 14 * shape.get("B", 1) * shape["H"] * shape["D"] * tokens**2 / 2

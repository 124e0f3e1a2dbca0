"""What the fused kernels for NVIDIA GPUs have in common: which GPUs, dtypes and strides they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..tiles import Kind
from .fused import Fused, _reads


class Gpu(Fused):
    """A kernel for NVIDIA GPUs. They read 16 bytes at a time, so head dims and strides are multiples of 8."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    oldest = (8, 0)  # the compute capability that the kernel needs

    def _refuses(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        if q.device.type != "cuda" or torch.version.hip:
            return f"it runs on NVIDIA GPUs, got {q.device.type} tensors" + (" on ROCm" if torch.version.hip else "")
        if q.dtype not in self.dtypes:
            return f"it takes {' and '.join(str(t).removeprefix('torch.') for t in self.dtypes)}, got {q.dtype}"
        capability = capability_of(q.device)
        if capability < self.oldest:
            return f"it needs a GPU of compute capability {self.oldest[0]}.{self.oldest[1]}, got {dotted(capability)}"
        if q.dtype is torch.bfloat16 and capability < (8, 0):
            return f"bfloat16 needs a GPU of compute capability 8.0, got {dotted(capability)}"
        return self._refuses_dims(*self._dims(q.shape[-1], v.shape[-1]), capability)

    def _refuses_dims(self, D_k: int, D_v: int, capability: tuple[int, int]) -> str | None:
        raise NotImplementedError

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        D = round_up(max(D_k, D_v), 8)
        return D, D

    def _reads(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        eight = all(stride % 8 == 0 for stride, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1)
        return super()._reads(shape, strides) and eight

    def _readable(self, t: Tensor) -> bool:
        return t.data_ptr() % 16 == 0 and _reads(self, t.shape, t.stride())


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def no_dropout(q: Tensor) -> Tensor:
    """The state of a random generator that is never read."""
    return q.new_empty((), dtype=torch.int64)

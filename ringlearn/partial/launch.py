"""Starts Triton kernels with little work for the host.

In every call Triton inspects each argument to find the compiled kernel that fits. With thirty arguments this takes
longer than a small kernel runs. Steps of a ring or of a decoding make the same calls again and again, so the compiled
kernel is kept here, and a later call with arguments of the same kind starts it directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton

    # In earlier versions a compiled kernel is called without its constants.
    DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)
except ImportError:
    DIRECT = False

MOST = 1000  # compiled kernels that are kept
_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **constants: Any
) -> None:
    """Run a kernel on the tensors' GPU. Its parameters must be tensors, numbers and constants, in this order.

    constants: these may include num_warps and num_stages, which are options and not parameters of the kernel.
    """
    device = tensors[0].device
    if device.index == torch._C._cuda_getDevice() if device.type == "cuda" else True:
        _launch(kernel, grid, tensors, numbers, constants)
        return
    with torch.cuda.device(device):
        _launch(kernel, grid, tensors, numbers, constants)


def _launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: dict[str, Any]) -> None:
    # Triton compiles anew for other dtypes, constants, and alignments of addresses, and for some values of integers.
    like = [(t.dtype, t.data_ptr() % 16) for t in tensors]
    key = (id(kernel), tensors[0].device, *like, *(x for x in numbers if type(x) is int), *constants.values())
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) >= MOST:
            _COMPILED.clear()
        compiled = kernel[grid](*tensors, *numbers, **constants)
        if DIRECT and compiled is not None:  # it is None if Triton only interprets
            _COMPILED[key] = compiled
        return
    values = [x for name, x in constants.items() if name not in ("num_warps", "num_stages")]
    compiled[grid](*tensors, *numbers, *values)

"""What is timed: random tensors, and the calls of a way to compute attention on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Call = Callable[[], Any]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def calls(attention: Attention, inputs: Sequence[Tensor], dout: Tensor) -> dict[str, Call]:
    """The forward, without what a backward needs, and forward and backward; inputs: q, k, v, which require grad."""

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def forward_backward() -> None:
        for t in inputs:
            t.grad = None
        attention(*inputs).backward(dout)

    return {"forward": forward, "forward_backward": forward_backward}

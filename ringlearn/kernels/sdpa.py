"""The fused kernels inside torch that return lse, one short class for each, and ``Sdpa``, which picks among them.

``torch.nn.functional.scaled_dot_product_attention`` runs these kernels too, but keeps lse to itself; the operators under
``torch.ops.aten`` return it. On Hopper GPUs cuDNN's kernel is 1.6 to 1.9 times as fast as flash, so it comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..partial import Partial
from ..tiles import Kind, Tile
from .fused import Fused, recording
from .reference import Reference

aten = torch.ops.aten


class CpuFlash(Fused):
    """Flash attention on the CPU: every dtype and kind of tile.

    Without grouped heads, and with D_k = D_v only. It leaves lse = 0.0 in rows that see nothing.
    """

    name = "cpu_flash"
    grouped = False

    def _refuses(self, q: Tensor, v: Tensor, kind: Kind) -> str | None:
        return None if q.device.type == "cpu" else f"it runs on CPU tensors, got {q.device.type}"

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        return max(D_k, D_v), max(D_k, D_v)

    def _forward(self, q, k, v, causal, bias, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)

    def _backward(self, dout, q, k, v, out, lse, causal, bias, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )


FUSED: tuple[Fused, ...] = (CpuFlash(),)  # the first that supports a tile computes it


class Sdpa:
    """For each tile the first fused kernel that supports it, else the reference kernel."""

    name = "sdpa"

    def __init__(self) -> None:
        self._reference = Reference()

    def pick(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False):
        """The kernel that computes such a tile. While autograd is recording it is the reference kernel, whose every
        step is differentiable; a fused one would lose the gradient through lse."""
        if not recording(q, k, v):
            for kernel in FUSED:
                if kernel.unsupported(q, k, v, kind, lse_grad) is None:
                    return kernel
        return self._reference

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        return self.pick(q, k, v, tile.kind).forward(q, k, v, tile, scale)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        scale: float,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self.pick(q, k, v, tile.kind, lse_grad=dlse is not None)
        return kernel.backward(dout, q, k, v, out, lse, tile, scale, dlse)

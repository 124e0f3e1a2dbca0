"""Kernels: how one tile of attention is computed, forward and backward.

A kernel is handed the local q, k, v and a tile, and returns the partial result of the tile's rows over its columns:

    forward(q, k, v, tile, scale)                              -> Partial(out, lse)
    backward(dout, q, k, v, out, lse, tile, scale, dlse=None)  -> dq, dk, dv  (of the tile's rows and columns)

One convention for all of them: lse is the natural-log logsumexp of the scaled scores, float32 or wider, and a row that sees
no key has out 0 and lse -inf. In the backward ``out`` and ``lse`` are the *global* results of the rows, after all merges.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..partial import Partial
from ..tiles import Kind, Tile
from .reference import Reference
from .sdpa import FUSED, Sdpa


class Kernel(Protocol):
    """What computes a tile."""

    name: str

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> str | None:
        """Why this kernel cannot compute such a tile (a sentence for the user), or None if it can.

        lse_grad: whether a gradient flows into lse, which the backward then has to take into account.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        """Partial(out (B, H, rows, D_v), lse (B, H, rows)); q (B, H, s_q, D_k), k (B, G, s_k, D_k), v (B, G, s_k, D_v)."""

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
        """dq (B, H, rows, D_k), dk (B, G, columns, D_k), dv (B, G, columns, D_v); dout, out, lse, dlse of all s_q rows."""


_KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Sdpa(), *FUSED, Reference())}


def choose(kernel: str | Kernel | None = None) -> Kernel:
    """The kernel of that name.

    None, "auto" or "sdpa": for each tile the first fused kernel that supports it, else the reference kernel.
    "reference", or the name of a fused kernel: that one for every tile; a fused one raises ValueError, with the reason, at
    a tile that it does not support. An object with the methods of ``Kernel`` is returned as it is.

    >>> choose().name, choose("reference").name
    ('sdpa', 'reference')
    """
    if kernel is None or kernel == "auto":
        return _KERNELS["sdpa"]
    if isinstance(kernel, str) and kernel in _KERNELS:
        return _KERNELS[kernel]
    if not isinstance(kernel, str) and all(callable(getattr(kernel, m, None)) for m in ("forward", "backward", "unsupported")):
        return kernel
    raise ValueError(
        f"kernel: expected None, 'auto', {', '.join(map(repr, _KERNELS))}, or an object with the methods of "
        f"ringlearn.kernels.Kernel, got {kernel!r}"
    )

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

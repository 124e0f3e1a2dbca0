"""The fused kernels inside torch that return lse, one short class for each, and ``Sdpa``, which picks among them.

``torch.nn.functional.scaled_dot_product_attention`` runs these kernels too, but keeps lse to itself; the operators
under ``torch.ops.aten`` return it. Each class says what its kernel takes, and owns what is peculiar to it.

    kernel       runs on                 dtypes              head dims             FULL, CAUSAL and
    cpu_flash    CPU                     every               D_k = D_v in 16 bits  PARTIAL
    fa4          GPUs of 9.x and 10.x    float16, bfloat16   to 128, 256, 192/128  SEGMENTS
    cudnn        GPUs of 9.x and 10.x    float16, bfloat16   up to 128, 192 / 128
    cuda_flash   GPUs from 8.0           float16, bfloat16   up to 256             SEGMENTS
    efficient    every GPU               those and float32   every                 PARTIAL

This is also the order of preference: on an H100 and an H200 cuDNN's kernel is 1.6 to 1.9 times as fast as flash, and
FlashAttention 4 (fa4.py), where it is installed, is faster still. What takes PARTIAL tiles takes SEGMENTS ones too, cut
into several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..partial import Partial
from ..tiles import Kind, Tile
from .fa4 import Fa4
from .fused import Fused, backward_in_parts, cut, forward_in_parts, recording
from .gpu import Gpu, dotted, no_dropout, round_up
from .packing import most_columns, pack, pack_lse, sequences, unpack, unpack_lse
from .reference import Reference
from .scores import UNCHANGED, Scores

aten = torch.ops.aten
REMEMBERED = 4096  # choices of a kernel


# --- CPU -----------------------------------------------------------------------------------------------------------


class CpuFlash(Fused):
    """Flash attention on the CPU.

    It wants D_k = D_v and as many key heads as query heads. It leaves lse = 0.0 in rows that see nothing, and takes a
    row whose scores are all NaN or -inf for one of these: a merge would then make plausible numbers of a NaN, and let
    keys count whose scores are too far below the others to be written as a number.
    """

    name = "cpu_flash"
    grouped = False

    def _beside(self, q: Tensor, rows: int) -> int:
        # lse comes with its heads side by side and is copied; else there is the one bool of a check.
        B, H = q.shape[:2]
        return B * H * rows * (8 if q.dtype == torch.float64 else 4) if H > 1 and rows > 1 else 1

    def _misread(self, q: Tensor, k: Tensor, tile: Tile, lse: Tensor, scale: float, backward: bool = False) -> bool:
        # After the forward, rows that it has misread have lse 0. In the backward they have what another kernel gave
        # them, which is not finite. Only then is it worth looking at q and k, which are much larger than lse.
        if isfinite(lse.sum().item()) if backward else lse.all():
            return False
        largest = [max(-x.item(), y.item()) for x, y in (cut(q, tile.q).aminmax(), cut(k, tile.k).aminmax())]
        score = max(1.0, scale) * q.shape[-1] * largest[0] * largest[1]  # at most; NaN or inf if an input is
        return not score <= torch.finfo(lse.dtype).max

    def _refuses(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        if q.device.type != "cpu":
            return f"it runs on CPU tensors, got {q.device.type} tensors"
        if q.shape[-1] != v.shape[-1] and q.dtype in (torch.float16, torch.bfloat16):
            # Its backward takes delta from the rounded out; SDPA, which has no fused kernel for this, is more exact.
            return f"in {q.dtype} it takes D_k = D_v only, got D_k = {q.shape[-1]}, D_v = {v.shape[-1]}"
        return None

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        return max(D_k, D_v), max(D_k, D_v)

    def _forward(self, q, k, v, tile, bias, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.kind is Kind.CAUSAL, attn_mask=bias, scale=scale
        )

    def _backward(self, dout, q, k, v, out, lse, tile, bias, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.kind is Kind.CAUSAL, attn_mask=bias, scale=scale
        )


# --- NVIDIA GPUs ---------------------------------------------------------------------------------------------------


class Cudnn(Gpu):
    """cuDNN's flash attention, the fastest kernel on Hopper and data-center Blackwell GPUs.

    Its backward sums in no fixed order. It takes neither a single query nor a single key, and no expanded tensors.
    """

    name = "cudnn"
    oldest = (9, 0)
    least_rows = least_columns = 2
    forms = Kind.FULL, Kind.CAUSAL
    # Until torch 2.13 lse has a trailing dim of 1, and the backward wants it back; the forward looks which it is.
    _trailing_dim = True

    def _refuses(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        reason = super()._refuses(q, k, v, kind)
        if reason:
            return reason
        if q.shape[2] == 1 or k.shape[2] == 1:
            return f"it needs at least 2 queries and 2 keys, got {q.shape[2]} and {k.shape[2]}"
        if torch.are_deterministic_algorithms_enabled():
            return "its backward is not deterministic, and torch.use_deterministic_algorithms(True) is on"
        version = _cudnn_version()
        if version <= 91500:
            return f"it is wrong for some lengths before cuDNN 9.15.1, got {version}"
        return None

    def _refuses_dims(self, D_k: int, D_v: int, capability: tuple[int, int]) -> str | None:
        if capability[0] > 10:
            return f"it was measured on GPUs of compute capability 9.x and 10.x, got {dotted(capability)}"
        if max(D_k, D_v) > 128 and (D_k, D_v) != (192, 128):
            return f"it takes head dims up to 128, or D_k = 192 with D_v = 128, got D_k = {D_k}, D_v = {D_v}"
        return None

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        return (192, 128) if (D_k, D_v) == (192, 128) else super()._dims(D_k, D_v)

    def _reads(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        expanded = any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True))
        return super()._reads(shape, strides) and not expanded

    def _forward(self, q, k, v, tile, bias, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, tile.kind is Kind.CAUSAL, False, scale=scale
        )
        self._trailing_dim = lse.dim() == 4
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, tile, bias, scale):
        if self._trailing_dim:
            lse = lse.unsqueeze(-1)
        seed = no_dropout(q)
        given = dout, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0
        causal = tile.kind is Kind.CAUSAL
        return aten._scaled_dot_product_cudnn_attention_backward(*given, causal, scale=scale)


class CudaFlash(Gpu):
    """FlashAttention-2 (Dao 2023). Its own dim order is (B, S, H, D).

    Its window is two numbers of columns, ``Call.left`` and ``right``, counted from the last row and column; -1 is no
    limit. In rows that see nothing its lse is +inf.
    """

    name = "cuda_flash"
    forms = Kind.FULL, Kind.CAUSAL, Kind.SEGMENTS

    def _refuses_dims(self, D_k: int, D_v: int, capability: tuple[int, int]) -> str | None:
        # The backward needs the shared memory of a data-center GPU for larger ones.
        limit = 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192
        return f"it takes head dims up to {limit} on this GPU, got {D_k}" if D_k > limit else None

    def _forward(self, q, k, v, tile, bias, scale):
        causal, window = tile.kind is Kind.CAUSAL, _window(tile)
        if _has_sequences(tile):
            packed = pack(q), pack(k), pack(v), *sequences(tile, q)
            out, lse, *_ = aten._flash_attention_forward(*packed, 0.0, causal, False, scale=scale, **window)
            if tile.call.gaps:
                lse = lse.masked_fill(lse == torch.inf, -torch.inf)
            return unpack(out, q), unpack_lse(lse, q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale, **window
        )
        return out.transpose(1, 2), lse

    def _backward(self, dout, q, k, v, out, lse, tile, bias, scale):
        causal, window, seed = tile.kind is Kind.CAUSAL, _window(tile), no_dropout(q)
        if _has_sequences(tile):
            packed = pack(dout), pack(q), pack(k), pack(v), pack(out), pack_lse(lse), *sequences(tile, q)
            dq, dk, dv = aten._flash_attention_backward(*packed, 0.0, causal, seed, seed, scale=scale, **window)
            return unpack(dq, q), unpack(dk, k), unpack(dv, v)
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed, scale=scale, **window
        )
        return tuple(g.transpose(1, 2) for g in grads)


def _has_sequences(tile: Tile) -> bool:
    """Whether it takes the form with variable lengths, for several segments, or for limits that mislead the other."""
    return tile.call is not None and (not tile.call.alone or most_columns(tile) > tile.shape[1])


def _window(tile: Tile) -> dict[str, int]:
    """FlashAttention's window arguments for a tile; none for FULL and CAUSAL tiles, which need no window."""
    if tile.call is None:
        return {}
    left, right = (-1 if x is None else x for x in (tile.call.left, tile.call.right))
    return {"window_size_left": left, "window_size_right": right}


class Efficient(Gpu):
    """Memory-efficient attention (Rabe and Staats 2021, as in xFormers): older GPUs, float32, any mask, D_k != D_v.

    Its lse is padded to a multiple of 32 rows, with inf. Its backward assumes, without checking, that out lies in
    memory as (B, S, H, D).
    """

    name = "efficient"
    grouped = False
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    oldest = (5, 0)

    def _refuses_dims(self, D_k: int, D_v: int, capability: tuple[int, int]) -> str | None:
        return None

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        return round_up(D_k, 8), round_up(D_v, 8)

    def _reads(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        return super()._reads(shape, strides) and strides[2] % 8 == 0  # of a single row too, whose stride nobody needs

    def _forward(self, q, k, v, tile, bias, scale):
        bias = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, tile.kind is Kind.CAUSAL, scale=scale
        )
        return out, lse[..., : q.shape[2]]

    def _backward(self, dout, q, k, v, out, lse, tile, bias, scale):
        bias = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
        rows = q.shape[2]
        lse = pad(lse, (0, round_up(rows, 32) - rows), value=torch.inf)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        seed = no_dropout(q)
        given = dout, q, k, v, bias, out, lse, seed, seed, 0.0, (True, True, True, False)  # no gradient of bias
        causal = tile.kind is Kind.CAUSAL
        return aten._scaled_dot_product_efficient_attention_backward(*given, causal, scale=scale)[:3]


@cache
def _cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0


# --- all of them ---------------------------------------------------------------------------------------------------

FUSED: tuple[Fused, ...] = (CpuFlash(), Fa4(), Cudnn(), CudaFlash(), Efficient())


class Sdpa:
    """For each tile the first fused kernel that supports it and is not passed over, else the reference kernel."""

    name = "sdpa"

    def __init__(self, scores: Scores = UNCHANGED) -> None:
        self._scores, self._reference = scores, Reference(scores)
        self._picked: dict[Any, Fused | Reference] = {}

    def with_scores(self, scores: Scores) -> Sdpa:
        return Sdpa(scores)

    @property
    def fused(self) -> tuple[Fused, ...]:
        """The fused kernels, in the order of preference; with changed scores those that have a form for them."""
        if not self._scores:
            return FUSED
        changed = (kernel.with_scores(self._scores) for kernel in FUSED)
        return tuple(kernel for kernel in changed if kernel is not None)

    def pick(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> Fused | Reference:
        """The kernel that computes such a tile.

        While autograd is recording that is the reference kernel, whose every step is differentiable; a fused one
        would lose the gradient through lse.
        """
        if recording(q, k, v):
            return self._reference
        # A choice is kept by everything that a kernel may ask of its tensors, and by the one switch that it may ask of
        # torch: to ask them all takes as long as to launch a small one.
        deterministic = torch.are_deterministic_algorithms_enabled()
        key = q.device, q.dtype, q.shape, k.shape, v.shape, kind, lse_grad, deterministic, FUSED
        found = self._picked.get(key)
        if found is None:
            if len(self._picked) >= REMEMBERED:
                self._picked.clear()
            found = self._picked[key] = self._first(q, k, v, kind, lse_grad)
        return found

    def _first(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool) -> Fused | Reference:
        for kernel in self.fused:
            if kernel.unsupported(q, k, v, kind, lse_grad) is None and kernel.passed_over(q, k, v, kind) is None:
                return kernel
        return self._reference

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> str | None:
        """None: what no fused kernel supports, the reference kernel computes."""
        return None

    def apart(self, kernel: Fused | Reference, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> bool:
        """Whether the long segments of a SEGMENTS tile, for which ``kernel`` was picked, are left to cuDNN one by one.

        FlashAttention 2 would be slower there; FlashAttention 4 is not.
        """
        return (
            kind is Kind.SEGMENTS and isinstance(kernel, CudaFlash) and isinstance(self.pick(q, k, v, Kind.FULL), Cudnn)
        )

    def scratch(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, *of_rows: Tensor) -> int | None:
        """How many bytes a call holds at most beside what it returns; None if that is not known beforehand.

        of_rows: dout, out and lse, of a backward.
        """
        kernel = self.pick(q, k, v, tile.kind)
        return kernel.scratch(q, k, v, tile, *of_rows) if isinstance(kernel, Fused) else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        """The tile's Partial(out, lse), from the kernel that ``pick`` gives."""
        kernel = self.pick(q, k, v, tile.kind)
        if self.apart(kernel, q, k, v, tile.kind) and len(tile.long_apart) > 1:
            return forward_in_parts(self.forward, q, k, v, tile, tile.long_apart, scale, twice=True)
        if isinstance(kernel, Fused):
            return kernel.checked_forward(q, k, v, tile, scale)
        return kernel.forward(q, k, v, tile, scale)

    def backward(self, dout, q, k, v, out, lse, tile, scale, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's dq, dk, dv, from the kernel that ``pick`` gives."""
        kernel = self.pick(q, k, v, tile.kind, lse_grad=dlse is not None)
        if self.apart(kernel, q, k, v, tile.kind) and len(tile.long_apart) > 1:
            parts = tile.long_apart
            return backward_in_parts(self.backward, dout, q, k, v, out, lse, tile, parts, scale, twice=True)
        if isinstance(kernel, Fused):
            return kernel.checked_backward(dout, q, k, v, out, lse, tile, scale, dlse)
        return kernel.backward(dout, q, k, v, out, lse, tile, scale, dlse)

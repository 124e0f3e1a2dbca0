"""Merge a partial result into a running one, or add to some rows of a sum, in one pass over a GPU's memory.

The eager code of ``partial.merge`` reads and writes every output several times.

    out[rows] = exp(lse[rows] - m) * out[rows] + exp(new.lse - m) * new.out,   m the merged lse

The kernel is written in Triton, which torch brings along on machines with GPUs. Where it is missing, ``available`` says
so and the eager code runs; the tests compare the two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .launch import launch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROWS = 16  # of one program


def available(*tensors: Tensor) -> bool:
    """Whether the one-pass kernel can take these: Triton, an NVIDIA GPU, no float64, and contiguous last dims."""
    if triton is None or torch.version.hip:
        return False
    for t in tensors:  # no generator: it is asked several times in every step of a ring
        if not t.is_cuda or t.dtype is torch.float64 or t.stride(-1) != 1 and t.shape[-1] != 1:
            return False
    return True


if triton is not None:

    @triton.jit
    def _merge(
        out, lse, new_out, new_lse, to, H, S, o0, o1, o2, l0, l1, n0, n1, n2, m0, m1, t0, t1, t2,
        IN_PLACE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        bh = tl.program_id(1).to(tl.int64)
        b, h = bh // H, bh % H
        s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
        d = tl.arange(0, BLOCK_D)
        row = s < S
        full = row[:, None] & (d < D)[None, :]
        a = tl.load(lse + b * l0 + h * l1 + s, mask=row, other=0.0)
        c = tl.load(new_lse + b * m0 + h * m1 + s, mask=row, other=0.0)
        top = tl.maximum(a, c)
        top = tl.where(top == -float("inf"), 0.0, top)
        wa, wc = tl.exp(a - top), tl.exp(c - top)
        total = wa + wc
        empty = total == 0
        total = tl.where(empty, 1.0, total)
        # Rows that see nothing new, as between documents, stay as they are: they are neither read nor written.
        new = full & (c != -float("inf"))[:, None]
        moved = new if IN_PLACE else full
        x = tl.load(out + b * o0 + h * o1 + s[:, None] * o2 + d[None, :], mask=moved, other=0.0).to(tl.float32)
        y = tl.load(new_out + b * n0 + h * n1 + s[:, None] * n2 + d[None, :], mask=new, other=0.0).to(tl.float32)
        z = (wa / total)[:, None] * x + (wc / total)[:, None] * y
        tl.store(to + b * t0 + h * t1 + s[:, None] * t2 + d[None, :], z.to(to.dtype.element_ty), mask=moved)
        merged = tl.where(empty, -float("inf"), top + tl.log(total))
        tl.store(lse + b * l0 + h * l1 + s, merged, mask=row)

    @triton.jit
    def _add(total, new, H, S, t0, t1, t2, n0, n1, n2, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
        bh = tl.program_id(1).to(tl.int64)
        b, h = bh // H, bh % H
        s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
        d = tl.arange(0, BLOCK_D)
        here = (s < S)[:, None] & (d < D)[None, :]
        to = total + b * t0 + h * t1 + s[:, None] * t2 + d[None, :]
        x = tl.load(to, mask=here, other=0.0).to(tl.float32)
        y = tl.load(new + b * n0 + h * n1 + s[:, None] * n2 + d[None, :], mask=here, other=0.0).to(tl.float32)
        tl.store(to, (x + y).to(total.dtype.element_ty), mask=here)


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, to: Tensor) -> None:
    """Merge (new_out, new_lse) into (out, lse) in one pass: the output goes to ``to``, which may be out; lse in place.

    out, new_out, to: (B, H, S, D) of any dtypes but float64.  lse, new_lse: (B, H, S), float32.
    """
    _launch(_merge, out, lse, new_out, new_lse, to, IN_PLACE=to.data_ptr() == out.data_ptr())


def add_(total: Tensor, new: Tensor) -> None:
    """total += new, in one pass whatever the strides and dtypes.  (B, H, S, D) both."""
    if total.dtype is new.dtype and total.is_contiguous() and new.is_contiguous() or not available(total, new):
        total += new
    else:
        _launch(_add, total, new)


def _launch(kernel: Any, *tensors: Tensor, **more: bool) -> None:
    """Run a kernel over all rows of tensors (B, H, S, D) and (B, H, S), of which the first has a D."""
    B, H, S, D = tensors[0].shape
    if not tensors[0].numel():
        return
    strides = [stride for t in tensors for stride in t.stride()[:-1]]
    blocks = {"D": D, "BLOCK_D": power_of_2(D), "BLOCK_S": ROWS}
    launch(kernel, (-(-S // ROWS), B * H, 1), tensors, (H, S, *strides), **more, **blocks)


@cache
def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return triton.next_power_of_2(n)

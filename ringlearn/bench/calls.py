"""What is timed: random tensors, and the calls of a way to compute attention on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..layouts import Layout
from ..worlds import DistributedWorld

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


def exact(full: Sequence[Tensor], is_causal: bool, backward: bool) -> list[Tensor]:
    """SDPA of q, k, v, dout (B, H or G, S, D) in float32: out, and for a backward dq, dk, dv."""
    q, k, v, dout = (t.detach().float() for t in full)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if backward else ())]


def errors(
    attention: Attention, full: Sequence[Tensor], want: Sequence[Tensor], layout: Layout | None, world: DistributedWorld
) -> dict[str, float]:
    """Relative norms of out, and of dq, dk, dv if they are wanted. All ranks call it together.

    full: q, k, v, dout of all tokens, the same on every rank, which computes with those that the layout gives it; with
    all of them if there is no layout.  want: what ``exact`` gives for them.
    """
    if layout is not None:
        where = layout.positions(full[0].shape[2], world.size, world.rank, world.device)
        full, want = ([t[:, :, where].contiguous() for t in some] for some in (full, want))
    *inputs, dout = full
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = attention(*inputs)
    # A function of --compare may overlook an input: its gradient is zeros, which is an error of 100 %.
    grads = torch.autograd.grad(out, inputs, dout, materialize_grads=True) if len(want) > 1 else ()
    found = {}
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), want, strict=False):
        sums = torch.stack([(a.double() - b.double()).square().sum(), b.double().square().sum()])
        dist.all_reduce(sums, group=world.group)
        found[name] = float((sums[0] / sums[1]).sqrt())
    return found

"""What is timed: an attention function on random tensors; and what it is held to: SDPA on one device, in float32."""

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
    """The two calls that are timed: a forward that saves nothing for a backward, and a forward with its backward.

    inputs: q, k, v, which require gradients.
    """

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def forward_backward() -> None:
        for t in inputs:
            t.grad = None
        attention(*inputs).backward(dout)

    return {"forward": forward, "forward_backward": forward_backward}


def fastest(device: torch.device, dtype: torch.dtype) -> list[SDPBackend]:
    """The backends of SDPA that one device is measured with: cuDNN from Hopper on, where it beats flash attention."""
    if device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device)[0] >= 9:
        return [SDPBackend.CUDNN_ATTENTION]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def one_device(backends: list[SDPBackend], is_causal: bool) -> Attention:
    """SDPA on this rank alone, with one of these backends."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=k.shape[1] < q.shape[1])

    return call


def exact(full: Sequence[Tensor], is_causal: bool, backward: bool) -> list[Tensor]:
    """SDPA in float32: out, and with a backward dq, dk, dv too. full: q, k, v, dout, each (B, H or G, S, D)."""
    q, k, v, dout = (t.detach().float() for t in full)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if backward else ())]


def errors(
    attention: Attention, full: Sequence[Tensor], want: Sequence[Tensor], layout: Layout | None, world: DistributedWorld
) -> dict[str, float]:
    """The relative error of out, and of dq, dk, dv if ``want`` has them. All ranks call it together.

    full: q, k, v, dout of all tokens, the same on every rank; a rank computes with the rows that the layout assigns to
    it, or with all of them if there is no layout.  want: the result of ``exact`` for them.
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

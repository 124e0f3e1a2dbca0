"""What is timed: an attention function on random tensors; and what it is held to: SDPA on one device, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..masks import Mask, causal
from ..masks import full as all_keys
from ..worlds import DistributedWorld
from .masks import MaskChoice

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


def packed_on_one_device(kernel: str, choice: MaskChoice, lengths: list[int], device: torch.device) -> Attention:
    """One device's own call for packed documents, a window, or both.

    kernel: "fa4" and "fa2" are FlashAttention in its form for variable lengths, as those who have one GPU call it;
    "dense mask" is SDPA with a mask of S x S, for CPUs.
    """
    if kernel == "dense mask":
        return lambda q, k, v: _dense(q, k, v, choice.mask(lengths))
    attention = {"fa4": _fa4, "fa2": _Fa2.apply}[kernel]
    window = -1 if choice.window is None else choice.window - 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B = q.shape[0]
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B * S, heads, D)
        out = attention(q, k, v, _starts(tuple(lengths), B, device), max(lengths), window, 0 if choice.causal else -1)
        return out.unflatten(0, (B, -1)).transpose(1, 2)

    return call


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...], B: int, device: torch.device) -> Tensor:
    ends = list(accumulate(lengths * B, initial=0))
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _fa4(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, left: int, right: int) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    edges = tuple(None if x < 0 else x for x in (left, right))
    form = {"causal": True} if edges == (None, 0) else {"window_size": edges}
    how = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest, **form)
    found = flash_attn_varlen_func(q, k, v, **how)
    return found[0] if isinstance(found, tuple) else found


class _Fa2(torch.autograd.Function):
    """The FlashAttention-2 inside torch: (tokens, heads, D), documents from each of ``starts`` to the next."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, left: int, right: int):
        ctx.how = dict(scale=q.shape[-1] ** -0.5)
        ctx.causal = (left, right) == (-1, 0)
        ctx.how |= {} if ctx.causal else {"window_size_left": left, "window_size_right": right}
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, ctx.causal, False, **ctx.how
        )
        ctx.longest = longest
        ctx.save_for_backward(q, k, v, out, lse, starts, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        q, k, v, out, lse, starts, seed, offset = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, starts, starts, ctx.longest, ctx.longest, 0.0, ctx.causal, seed, offset, **ctx.how
        )
        return *grads, None, None, None, None


def exact(full: Sequence[Tensor], mask: Mask, backward: bool) -> list[Tensor]:
    """SDPA in float32: out, and with a backward dq, dk, dv too. full: q, k, v, dout, each (B, H or G, S, D)."""
    q, k, v, dout = (t.detach().float() for t in full)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if not backward:
        return [_dense(q, k, v, mask).detach()]
    # Some queries at a time: a mask of S x S would not fit. What they add to dk and dv is summed.
    rows = max(1, (1 << 28) // q.shape[2]) if mask not in (causal, all_keys) else q.shape[2]
    outs = []
    for i in range(0, q.shape[2], rows):
        out = _dense(q[:, :, i : i + rows], k, v, mask, first=i)
        out.backward(dout[:, :, i : i + rows])
        outs.append(out.detach())
    return [torch.cat(outs, 2), *(t.grad for t in leaves)]


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask, first: int = 0) -> Tensor:
    """SDPA of queries from position ``first`` on, with the mask as a tensor unless SDPA has a word for it."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    whole = q.shape[2] == k.shape[2] and mask in (causal, all_keys)
    positions = [torch.arange(a, a + t.shape[2], device=q.device) for a, t in ((first, q), (0, k))]
    how = {"is_causal": mask == causal} if whole else {"attn_mask": mask(positions[0][:, None], positions[1])}
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return scaled_dot_product_attention(q, k, v, **how)


def errors(
    attention: Attention, full: Sequence[Tensor], want: Sequence[Tensor], where: Tensor | None, world: DistributedWorld
) -> dict[str, float]:
    """The relative error of out, and of dq, dk, dv if ``want`` has them. All ranks call it together.

    full: q, k, v, dout of all tokens, the same on every rank.  where: which of them this rank computes with; None for
    all.  want: the result of ``exact`` for all.
    """
    if where is not None:
        full, want = ([t[:, :, where].contiguous() for t in some] for some in (full, want))
    *inputs, dout = full
    inputs = [t.detach().requires_grad_(len(want) > 1) for t in inputs]
    out = attention(*inputs)
    # A function of --compare may overlook an input: its gradient is zeros, which is an error of 100 %.
    grads = torch.autograd.grad(out, inputs, dout, materialize_grads=True) if len(want) > 1 else ()
    found = {}
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), want, strict=False):
        sums = torch.stack([(a.double() - b.double()).square().sum(), b.double().square().sum()])
        dist.all_reduce(sums, group=world.group)
        found[name] = float((sums[0] / sums[1]).sqrt())
    return found

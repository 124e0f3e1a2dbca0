"""Other libraries' attention over ranks, for ``python -m ringlearn.bench --compare``.

Such a function takes this rank's q (B, H, n, D) and k, v (B, G, n, D), the name of their layout and the process group;
it returns this rank's output of causal attention, and gradients flow through it. A function with an argument
``mask`` is also given the mask over all tokens, and is measured under every mask.

With --decode a function takes one query of each sequence, q (B, H, 1, D), the same on every rank, this rank's run of
the keys and values, k, v (B, G, n, D), and the process group, and returns (B, H, 1, D). An attribute ``prepare`` is
called once, before anything is timed: prepare(k, v, H) returns k and v in the form that the function expects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as context_parallel
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..masks import Causal, Documents, Full, Mask, SlidingWindow
from ..nn.batch_documents import parts_of
from .calls import fastest


def torch_context_parallel(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    """PyTorch's own context parallel: SDPA on tensors that are sharded along the sequence, keys going round a ring.

    It does not support grouped queries, so k and v are expanded to the heads of q, as a part of the call. Its load
    balancer puts the same positions on a rank as the layout zigzag; without it shards are contiguous. Keys travel by
    all-to-all, and its kernel is the one with which one device is measured. It needs GPUs, and changes torch's
    context-parallel settings for the whole process.

    Raises ValueError for other layouts.
    """
    return _context_parallel(q, k, v, layout, group, "alltoall")


def torch_context_parallel_allgather(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    """PyTorch's context parallel in its default form: each rank first gathers all keys and values."""
    return _context_parallel(q, k, v, layout, group, "allgather")


def _context_parallel(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup, rotation: str) -> Tensor:
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f"torch's context parallel knows the layouts zigzag and contiguous, got {layout}")
    context_parallel._cp_options.enable_load_balance = layout == "zigzag"
    context_parallel.set_rotate_method(rotation)
    # Without the context manager, which ends before the backward: that needs what it switches on as well.
    context_parallel._enable_context_parallel_dispatcher()
    mesh, groups = _mesh(group, q.device.type), q.shape[1] // k.shape[1]
    expanded = (q, *(t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v)))
    shards = (DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in expanded)
    with sdpa_kernel(fastest(q.device, q.dtype)):
        return F.scaled_dot_product_attention(*shards, is_causal=True).to_local()


@lru_cache(maxsize=8)
def _mesh(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device)


def torch_flex_context_parallel(
    q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup, mask: Mask
) -> Tensor:
    """PyTorch's context parallel for FlexAttention: all keys are gathered, and a compiled kernel skips what is hidden.

    It supports contiguous shards, and zigzag with its head-and-tail balancer. The block mask would be made once for all
    layers of a model, so making it is not part of the call. Raises ValueError for other layouts and, as torch does, if
    the tokens per rank are not a multiple of 128.
    """
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f"torch's flex context parallel knows the layouts zigzag and contiguous, got {layout}")
    return _flex(q, k, v, group, mask, layout == "zigzag")


def torch_flex_per_document(
    q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup, mask: Mask
) -> Tensor:
    """The same with its document balancer, a zigzag per document; lengths must be divisible by twice the ranks.

    Its order of positions is none of this library's layouts; the attribute ``positions`` gives it.
    """
    return _flex(q, k, v, group, mask, "documents")


def _positions(mask: Mask, S: int, P: int, rank: int) -> Tensor:
    return _balancer(mask, S, P, "documents", "cpu")._generate_indices()[0].split(S // P)[rank]


torch_flex_per_document.positions = _positions  # type: ignore[attr-defined]


def _flex(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, mask: Mask, balance: bool | str) -> Tensor:
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    B, H, tokens, _ = q.shape
    block_mask = _block_mask(mask, B, tokens, balance, group, q.device.type)
    k, v = flex_cp_allgather(k.contiguous(), v.contiguous(), 2, group.group_name)
    return _compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=k.shape[1] < H)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def _block_mask(
    mask: Mask, B: int, tokens: int, balance: bool | str, group: dist.ProcessGroup, device: str
) -> BlockMask:
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask

    mesh = _mesh(group, device)
    S = tokens * mesh.size()
    context_parallel._cp_options.enable_load_balance = False  # what is not said here would be chosen by that
    balancer = _balancer(mask, S, mesh.size(), balance, device) if balance else None
    return _create_cp_block_mask(_mask_mod(mask, S, device), B, 1, S, S, mesh, load_balancer=balancer)


def _balancer(mask: Mask, S: int, P: int, balance: bool | str, device: str) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers

    if balance != "documents":
        return balancers._HeadTailLoadBalancer(S, P, device)
    lengths = [n for part in parts_of(mask) if isinstance(part, Documents) for n in part.lengths] or [S]
    if any(n % (2 * P) for n in lengths):
        raise ValueError(
            f"torch's document balancer takes documents whose lengths are divisible by {2 * P}, got {lengths[:8]}"
        )
    return balancers._PerDocumentHeadTailLoadBalancer([lengths], P, device)


def _mask_mod(mask: Mask, S: int, device: str) -> Callable[..., Tensor]:
    """The mask as FlexAttention takes it: a function of two positions."""
    parts = list(parts_of(mask))
    if not all(isinstance(part, Full | Causal | SlidingWindow | Documents) for part in parts):
        raise ValueError(f"expected causal, windows and documents, joined by &, got {mask!r}")
    positions = torch.arange(S, device=device)
    ends = [torch.tensor(part.ends, device=device) for part in parts if isinstance(part, Documents)]
    numbers = [torch.bucketize(positions, x, right=True) for x in ends]
    widths = [part.width for part in parts if isinstance(part, SlidingWindow)]
    is_causal = any(isinstance(part, Causal) for part in parts)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j if is_causal else (i >= 0)
        for number in numbers:
            seen = seen & (number[i] == number[j])
        for width in widths:
            seen = seen & (i - j < width) & (j - i < width)
        return seen

    return sees


def tree_attn_decode(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """lucidrains' tree attention for decoding, from ring-attention-pytorch, with its Triton kernel on GPUs.

    It does not support grouped queries, so k and v are expanded to the heads of q before anything is timed; it
    therefore reads H / G times as many bytes. Its three all-reduces go over the default group, all ranks of the run.

    Raises ImportError without that package, or without the distribution triton-nightly, which its kernel requires;
    ValueError for 2^31 or more numbers of expanded keys, where its kernel's 32-bit addresses would overflow.
    """
    if q.is_cuda:
        if k.numel() >= 2**31:
            raise ValueError(f"expected fewer than 2^31 numbers of expanded keys for its kernel, got {k.numel():,}")
        try:
            version("triton-nightly")
        except PackageNotFoundError:  # the package would end the process
            raise ImportError("the kernel of ring-attention-pytorch needs triton-nightly") from None
    return _tree(q, k, v, None)


def tree_attn_decode_plain(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same with its local attention in plain torch, which needs only the package itself."""
    return _tree(q, k, v, False)


def _tree(q: Tensor, k: Tensor, v: Tensor, use_triton: bool | None) -> Tensor:
    from ring_attention_pytorch import tree_attn_decode

    return tree_attn_decode(q, k, v, shard_kv_seq=False, use_triton=use_triton).to(q.dtype)


def _expanded(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor]:
    return tuple(t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))


tree_attn_decode.prepare = tree_attn_decode_plain.prepare = _expanded  # type: ignore[attr-defined]

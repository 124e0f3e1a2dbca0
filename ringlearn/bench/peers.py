"""Other libraries' attention over ranks, for ``python -m ringlearn.bench --compare``.

Such a function takes this rank's q (B, H, s, D) and k, v (B, G, s, D), the name of their layout and the process group;
it returns this rank's output of causal attention, and gradients flow through it.
"""

from __future__ import annotations

from functools import lru_cache

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as context_parallel
from torch.nn.attention import sdpa_kernel

from .calls import fastest


def torch_context_parallel(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    """PyTorch's own context parallel: SDPA on tensors that are sharded along the sequence, keys going round a ring.

    It has no grouped queries, so k and v are expanded to the heads of q; that is part of the call. Its load balancer
    puts the same positions on a rank as the layout zigzag, without one they are contiguous. Keys travel by all-to-all,
    and its kernel is the one that one device is measured with. It needs GPUs, and changes torch's settings of context
    parallel for the whole process.

    Raises ValueError for other layouts.
    """
    return _context_parallel(q, k, v, layout, group, "alltoall")


def torch_context_parallel_allgather(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    """The same as PyTorch does it by default: each rank gathers all keys and values first."""
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

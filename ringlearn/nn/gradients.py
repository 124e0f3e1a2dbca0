"""One optimizer step's gradients, right by construction: those of the mean loss over all tokens of all ranks.

With N tokens that count, in all micro-batches on all ranks together, the loss is

    L  =  (1 / N)  sum over ranks r  of  (sum of the losses of r's tokens)                                 (1)

so its gradient is the *sum* over ranks of each rank's own gradient, and N must be known before the first backward. The
backward of attention already brings every rank the gradients of the others' losses with respect to its keys and values;
only the parameters' gradients are left to add up. There are three ways to get this wrong:

* mean of means: each rank divides by its own number of tokens. This is wrong as soon as these numbers differ.
* a gradient that is multiplied or divided by P: DDP and FSDP2 divide the sum by the number of ranks, so the loss that
  they see must be multiplied by it. That is true for ranks that share a sequence, too: they hold different tokens.
* an all-reduce of the loss before the backward: autograd does not see it, or counts it P times.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..attention.inputs import parts
from .split import IGNORE


@dataclass(frozen=True)
class Loss:
    """The loss of one optimizer step, the same on every rank.

    mean: the mean loss over all tokens that count, nan if there are none.  tokens: how many there are.
    said: what each rank passed as ``say``.
    """

    mean: float
    tokens: int
    said: tuple[int, ...] = (0,)


def backward(
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    group: dist.ProcessGroup | None = None,
    *,
    autocast: torch.dtype | None = None,
    say: int = 0,
    **where: Any,
) -> Loss:
    """Add the gradients of the mean loss over all tokens of all micro-batches on all ranks to the parameters' ``grad``.

    model: called as ``model(tokens, targets, **where)``, it returns the sum of the losses of this process's tokens. It
    may be a plain module, wrapped in DDP, or sharded with ``fully_shard`` (FSDP2) with the default gradient divide
    factor. After this call the gradients are reduced, ready to be clipped.
    batches: (tokens, targets) of each micro-batch, Shards or tensors; the same number on every rank.
    group: the processes that hold the other tokens, over all axes of the mesh (dp and cp); None if there are none.
    autocast: the dtype in which matrix products and attention run in the forward, such as torch.bfloat16; None for no
    autocast.  say: a small number to send to the other ranks, for example to say that this rank was asked to stop.

    Raises ValueError on every rank if the numbers of micro-batches differ, or if DDP or FSDP2 reduce over another
    number of ranks than the group has.

    >>> from ringlearn.nn import Config, Transformer, next_tokens
    >>> model, tokens = Transformer(Config(width=16, layers=1, heads=2)), torch.randint(256, (2, 30))
    >>> loss = backward(model, [(tokens, next_tokens(tokens))])
    >>> loss.tokens, loss.mean > 5, all(p.grad is not None for p in model.parameters())
    (58, True, True)
    """
    device = next(model.parameters()).device
    count = sum(int((t != IGNORE).sum()) for _, targets in batches for t in parts(targets))
    known = _gather(torch.tensor([count, len(batches), say], device=device), group)
    tokens = sum(int(rank[0]) for rank in known)
    if len({int(rank[1]) for rank in known}) > 1:
        raise ValueError(
            f"backward: every rank needs the same number of micro-batches, or some would wait in attention for others; "
            f"got {[int(rank[1]) for rank in known]}. A rank without tokens passes empty ones"
        )
    averaged_over = reduced_over(model)
    if averaged_over not in (None, len(known)):
        raise ValueError(
            f"backward: {len(known)} processes hold tokens of this step, but the model's gradients are reduced over "
            f"{averaged_over}. Give DDP or fully_shard all of them, over dp and cp: mesh['dp', 'cp']._flatten()"
        )
    # DDP and FSDP2 divide by the number of ranks; (1) has no such factor.
    scale = (averaged_over or 1) / max(tokens, 1)
    local = torch.zeros((), dtype=torch.float64, device=device)
    for x, targets in batches:
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            loss = model(x, targets, **where)
        with torch.autograd.set_multithreading_enabled(False):  # a process has one GPU: no other thread need be woken
            (loss * scale).backward()
        local += loss.detach()
    if averaged_over is None and group is not None:
        sum_gradients(model.parameters(), group)
    mean = float(sum(_gather(local, group))) / tokens if tokens else float("nan")
    return Loss(mean, tokens, tuple(int(rank[2]) for rank in known))


def reduced_over(model: nn.Module) -> int | None:
    """Over how many ranks the model's own wrapper averages gradients; None if nothing reduces them."""
    if isinstance(model, FullyShardedDataParallel):
        raise ValueError("backward: FullyShardedDataParallel (FSDP1) is not supported; use fully_shard (FSDP2)")
    if isinstance(model, DistributedDataParallel):
        return model.process_group.size()
    sizes = {p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)}  # FSDP2's know their mesh
    if len(sizes) > 1:
        raise ValueError(f"backward: the model's parts are sharded over different numbers of ranks, {sorted(sizes)}")
    return sizes.pop() if sizes else None


def sum_gradients(parameters: Any, group: dist.ProcessGroup | None = None) -> None:
    """Add up every parameter's gradient over the ranks, in one message for each dtype.

    If a rank's loss did not use a parameter, its gradient counts as zero there. Without a process group, as in a
    simulated world, this process already has the whole gradient, and nothing is left to add.
    """
    if group is None and not dist.is_initialized():
        return
    parameters = [p for p in parameters if p.requires_grad]
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        own = [p for p in parameters if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own])
        dist.all_reduce(flat, group=group)
        for p, grad in zip(own, flat.split([p.numel() for p in own]), strict=True):
            p.grad = grad.view_as(p)


def clip(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm over *all* parameters is at most max_norm; return the norm before that.

    After ``backward`` each rank holds the reduced gradients, or its part of them (FSDP2), so the norm is the same on
    every rank. The norm of a rank's own gradients, before they are reduced, would scale each rank's share differently.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _gather(x: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """x of every rank, in rank order."""
    if group is None:
        return [x]
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, x, group=group)
    return everyone

"""What a way to split attention over ranks consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .spec import Spec


@dataclass(frozen=True)
class Strategy:
    """How keys and values, or heads, travel: two rank programs, and what they move.

        forward(comm, q, k, v, spec)  ->  Partial, and any tensors that the backward wants to be kept
        backward(comm, dout, q, k, v, out, lse, dlse, *kept, spec)  ->  dq, dk, dv

    q, k, v: this rank's shards; out in the dtype of q or the accumulation dtype, lse in the latter; gradients in the
    dtype of their tensor or the accumulation dtype. largest_message(spec, k, v, backward): bytes of the largest
    message to a neighbour, the same number on all ranks, for which the world gets ready.

    keeps: how many tensors the forward gives to be kept, None if that depends on the call.
    axes: 2 if it wants a world of nodes and ranks of a node.
    moves_dlse: the gradient of lse travels, so it must be there on every rank or on none.
    has_kernel: False if it has no use for a kernel, so that one that is asked for is refused.
    problem: why it cannot be used at all, if it was put together from what does not fit.

    For arguments that only this call takes: check(op, mask, q, k, v) raises ValueError if they make no sense, and gives
    the texts that must be equal on all ranks; prepare(op, spec, world, q, k, v) gives the spec that the programs get.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    largest_message: Callable[[Spec, Tensor, Tensor, bool], int] | None = None
    keeps: int | None = 0
    axes: int = 1
    moves_dlse: bool = False
    has_kernel: bool = True
    problem: str | None = None
    check: Callable[..., dict[str, str]] | None = None
    prepare: Callable[..., Spec] | None = None

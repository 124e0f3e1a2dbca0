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

    For arguments that only this call takes: check(op, mask, q, k, v) raises ValueError if they make no sense, and gives
    the texts that must be equal on all ranks; prepare(op, spec, world, q, k, v) gives the spec that the programs get.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    largest_message: Callable[[Spec, Tensor, Tensor, bool], int] | None = None
    check: Callable[..., dict[str, str]] | None = None
    prepare: Callable[..., Spec] | None = None

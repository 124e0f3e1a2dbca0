"""A strategy's rank program without its messages: how long it takes when communication is free.

Each message is replaced at once by what this rank itself sends, so shapes, kernel calls, merges and sums are those of
the strategy. The results are meaningless; only their time counts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from ..attention import Strategy
from ..worlds.comm import Comm, Post, Received


class Silent(Comm):
    """A rank that sends nothing: each message that it awaits is one of its own."""

    def __init__(self, comm: Comm):
        self.rank, self.size, self.shape = comm.rank, comm.size, comm.shape
        self.device, self.traced = comm.device, comm.traced

    def _post(self, post: Post) -> Received:
        own = list(post.sends.values())
        return {
            source: next(
                (tensors for tensors in own if [t.shape for t in tensors] == [torch.Size(s) for s in shapes]),
                tuple(torch.empty(shape, dtype=post.dtype, device=post.device) for shape in shapes),
            )
            for source, shapes in post.receives.items()
        }

    def _wait(self, ticket: Received) -> Generator[Any, None, Received]:
        return ticket
        yield  # never reached: makes this a generator that does not suspend


def without_messages(strategy: Strategy) -> Strategy:
    """The strategy, with rank programs that send nothing."""

    async def forward(comm: Comm, *args: Any) -> Any:
        return await strategy.forward(Silent(comm), *args)

    async def backward(comm: Comm, *args: Any) -> Any:
        return await strategy.backward(Silent(comm), *args)

    name = f"{strategy.name} without messages"
    return replace(strategy, name=name, forward=forward, backward=backward, rotates=False)

"""What both worlds have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compiling import uncompiled
from ..layouts import Layout, contiguous
from .shards import PerRank, Shards, shard
from .trace import Trace

_MESSAGES = ("rotate", "exchange", "send", "recv", "all_gather", "all_to_all", "all_reduce", "broadcast")
_OF_A_RANK = ("rank", "along", *_MESSAGES)


class World:
    """P ranks, of which this process owns some: all of them in a simulation, one under torch.distributed.

    size: P.  ranks: the ranks that this process owns.  device: where shards are put.  trace: what happened.
    shape: (P,), or (nodes, ranks of a node) of a world with two axes.
    check: whether ``agree`` compares what ranks say; in a simulation they are one process and cannot differ.
    """

    size: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    device: torch.device
    trace: Trace
    check: bool = False

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_RANK:  # a rank program that was given the world in place of a rank
            raise AttributeError(
                f"a world has no .{name}, its ranks have: it runs a rank program on each of them. Instead of "
                f"`await program(world, ...)` write world.run(program, ...)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> World:
        return self  # the ranks are there once, so a copy of what belongs to a world belongs to the same one

    def __deepcopy__(self, memo: Any) -> World:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} is this process's place among the ranks, and cannot be pickled, nor can Shards, "
            f"which belong to one; make the world in each process, and send tensors, shards.tensors or shards.unshard()"
        )

    def run(self, program: Callable[..., Awaitable[Any]], *args: Any) -> PerRank:
        """Run a rank program on every rank that this process owns; give what each returned.

        args: a ``Shards`` or ``PerRank`` argument gives each rank its own element, anything else is passed to all.
        """
        raise NotImplementedError

    def agree(
        self,
        op: str,
        same: Mapping[str, str],
        own: Mapping[str, Any] | None = None,
        problem: Exception | None = None,
    ) -> list[dict[str, Any]]:
        """Before any payload: raise on *every* rank if one has a problem or if ``same`` differs between ranks.

        op: the name of the call.  same: what must be equal on all ranks, by name.  own: small JSON values that may
        differ.
        problem: an error that this rank found in its own arguments. Returns every owned or known rank's ``own``.
        """
        raise NotImplementedError

    def reserve(self, nbytes: int) -> None:
        """Get ready for ring messages of up to so many bytes; all ranks say the same number."""

    @property
    def reserved(self) -> int:
        """Bytes that are held for such messages, which no allocator of torch counts."""
        return 0

    def watched(self) -> AbstractContextManager[None]:
        """Inside, the loss of another rank is noticed in any collective; a simulation loses none."""
        return nullcontext()

    def assemble(self, parts: Sequence[Tensor], layout: Layout, length: int, dim: int) -> Tensor:
        """The full tensor from the owned ranks' shards; in a distributed world every rank gets it."""
        raise NotImplementedError

    @uncompiled
    def shard(self, *tensors: Tensor, layout: Layout = contiguous, src: int | None = None) -> Any:
        """Split replicated tensors (..., S, D) along S; give one ``Shards`` for each (just one for one tensor).

        Every rank passes the same tensors; a distributed world raises ValueError if they differ, unless ``src`` names
        the rank whose tensors are used. They are moved to the world's device. The gradient that flows back is the
        full one, on every rank: ``shard`` and ``unshard`` are conjugate, so a loss computed from ``unshard()`` needs
        no scaling.

        >>> import torch, ringlearn as rl
        >>> q, k = rl.SimulatedWorld(3).shard(torch.randn(1, 2, 10, 4), torch.randn(1, 2, 7, 4), layout=rl.zigzag)
        >>> q.lengths, k.lengths
        ((3, 4, 3), (3, 2, 2))
        """
        return shard(self, tensors, layout, src)

    def replicate(self, tensors: Sequence[Tensor], src: int | None) -> list[Tensor]:
        """The tensors on the world's device, checked to be the same on all ranks, or rank src's on all."""
        raise NotImplementedError


def arguments(args: Sequence[Any], index: int, owned: int) -> list[Any]:
    """The arguments of the index-th of the owned ranks.

    Raises ValueError if some are for another number of them.
    """
    for a in args:
        n = len(a.tensors) if isinstance(a, Shards) else len(a) if isinstance(a, PerRank) else owned
        if n != owned:
            raise ValueError(
                f"run: expected one value for each of the {owned} ranks of this process, got {n} in {a!r:.80}; "
                f"shard with the same world"
            )
    return [a.tensors[index] if isinstance(a, Shards) else a[index] if isinstance(a, PerRank) else a for a in args]

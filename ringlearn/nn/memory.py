"""Memory of a training step: what each simulated rank holds (``Activations``), and what autograd keeps (``Kept``).

``world.memory`` counts inside one attention. A training step is more: embeddings, feed-forwards, the loss, and what
autograd keeps between forward and backward. In a simulated world all of this is in one process, so each
tensor has to be attributed to a rank. Inside a rank program the world knows which rank runs. Outside, a new tensor
belongs to the rank whose tensors it was made from: except in attention, ranks never mix.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..worlds import Shards, SimulatedWorld


class Activations(TorchDispatchMode):
    """A context manager that counts the bytes that each simulated rank holds, live and at the peak.

    model: its parameters and their gradients are not counted; they are recognised by their shapes.
    shards: the batch, which is counted. As in ``world.memory``, what a fused kernel uses internally is not seen.

    Raises ValueError if the shards are not of a simulated world, or if a tensor of tokens could have a weight's shape.

    >>> import torch, ringlearn as rl
    >>> from ringlearn.nn import Config, Transformer, backward, next_tokens, shard_tokens
    >>> model, tokens = Transformer(Config(width=32, layers=2, heads=4)), torch.randint(256, (1, 600))
    >>> batch = shard_tokens(rl.SimulatedWorld(3), tokens, next_tokens(tokens))
    >>> with Activations(model, *batch) as held:
    ...     loss = backward(model, [batch])
    >>> all(held.peak(rank) > 200 * 32 * 4 * 20 for rank in range(3))  # 200 tokens, float32
    True
    """

    def __init__(self, model: nn.Module, *shards: Shards):
        super().__init__()
        worlds = {id(x.world): x.world for x in shards if isinstance(x, Shards)}
        if len(worlds) != 1 or not isinstance(next(iter(worlds.values())), SimulatedWorld):
            raise ValueError("Activations: expected the Shards of a batch in one SimulatedWorld; see shard_tokens")
        (self.world,) = worlds.values()
        self._own = [0] * self.world.size
        self._peaks = [0] * self.world.size
        self._rank: dict[int, int | None] = {}  # storage id -> whose it is; None: nobody's yet, or of several ranks
        self._alive: dict[int, weakref.ref] = {}
        self._shapes = {tuple(sorted(p.shape)) for p in model.parameters()}
        rows = {n * t.shape[0] for x in shards for t, s in zip(x.tensors, x.lengths) for n in (s, _block(model, t, s))}
        if same := rows & {size for shape in self._shapes if len(shape) > 1 for size in shape}:
            raise ValueError(
                f"Activations: {min(same)} tokens of a rank, or of a block, are as many as a side of some weight, "
                f"whose gradient could not be told from activations; take another length or block"
            )
        for shard in shards:
            for rank, t in enumerate(shard.tensors):
                self._add(t, rank)

    def live(self, rank: int) -> int:
        """The bytes that a rank holds now; after the forward these are what it keeps for the backward."""
        return self._own[rank]

    def peak(self, rank: int) -> int:
        """The most bytes that a rank held at one time."""
        return self._peaks[rank]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        rank = self.world.running
        if rank is None:
            whose = {self._rank.get(id(t.untyped_storage())) for t in given} - {None}
            rank = whose.pop() if len(whose) == 1 else None
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._add(t, rank)
        if rank is not None and self.world.running is None:
            for t in given:  # such as positions, made from nothing: whose they are shows when they are used
                if self._rank.get(id(t.untyped_storage()), rank) is None:
                    self._charge(t, rank)
        return result

    def _add(self, t: Tensor, rank: int | None) -> None:
        """A storage that was not seen before."""
        storage = t.untyped_storage()
        key = id(storage)
        if key in self._alive or tuple(sorted(t.shape)) in self._shapes:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._release(key, storage_bytes))
        storage_bytes = storage.nbytes()
        self._rank[key] = None
        if rank is not None:
            self._charge(t, rank)

    def _charge(self, t: Tensor, rank: int) -> None:
        storage = t.untyped_storage()
        self._rank[id(storage)] = rank
        self._own[rank] += storage.nbytes()
        self._peaks[rank] = max(self._peaks[rank], self._own[rank])

    def _release(self, key: int, nbytes: int) -> None:
        self._alive.pop(key, None)
        rank: Any = self._rank.pop(key, None)
        if rank is not None:
            self._own[rank] -= nbytes


def _block(model: nn.Module, t: Tensor, s: int) -> int:
    config = getattr(model, "config", None)
    return min(s, config.tokens_at_a_time(t)) if hasattr(config, "tokens_at_a_time") else s


class Kept:
    """A context manager that counts the bytes that autograd keeps for the backward in this process, without parameters.

    nbytes: of all storages that were saved in the context, each counted once. With simulated ranks it is the sum over
    all ranks, without the inputs of layers that are recomputed (``Config.checkpoint``), which autograd does not see.

    >>> layer, x = nn.Linear(4, 4), torch.randn(8, 4)
    >>> with Kept(layer) as kept:
    ...     y = layer(x).exp()
    >>> kept.nbytes == x.nbytes + y.nbytes
    True
    """

    def __init__(self, model: nn.Module):
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the address of one that was counted

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())

    def __enter__(self) -> Kept:
        self._stack = ExitStack()
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._alive.clear()

    def _pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage.nbytes()
            self._alive.append(t.detach())
        return t

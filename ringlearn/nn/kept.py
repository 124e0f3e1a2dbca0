"""How much a forward keeps for its backward: the activation memory of training."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn


class Kept:
    """Counts the bytes that autograd keeps for the backward in this process, less the model's parameters.

    nbytes: of all storages that were saved under ``with``, each counted once. Of simulated ranks it is the sum of all,
    less the inputs of layers that are computed anew (``Config.checkpoint``), which autograd does not see there.

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

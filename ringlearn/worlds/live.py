"""How many bytes a learner's function keeps alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made under it and are still alive; remembers the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs or {}))}
        for x in _tensors(result):
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._known:  # a new storage, not a view of one
                self._known.add(key)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))

"""Memory of simulated ranks: every tensor that a rank makes is charged to it, by component, while it lives.

Counted are the storages that torch sees: inputs, receive buffers, results, scores of the reference kernel. Scratch that
a fused kernel uses inside (the score tile of CPU flash attention) is not seen by torch and therefore not in the table.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory:
    """Live and peak bytes of each rank, by component.

    Components: "q", "k, v", "other inputs", "in flight" (packed messages and receive buffers), "scores" (inside a
    kernel call, or rows of them that a program keeps), "gathered" (rows of all ranks, put together from what arrived),
    "partial results" (everything else that a rank makes: outputs, lse, gradients, and their sums).

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(4)
    >>> q, k, v = world.shard(*(torch.randn(1, 2, 256, 16) for _ in range(3)))
    >>> out = rl.ring_attention(q, k, v)
    >>> world.memory.peak(0)["in flight"]  # two shards of k and v: the one that is sent on and the one that arrives
    32768
    """

    def __init__(self, size: int, enabled: bool = True):
        self.size, self.enabled = size, enabled
        self._component = "partial results"
        self._paused = False
        self._owners: dict[Any, tuple[int, str, int]] = {}  # storage id -> (rank, component, bytes)
        self._alive: dict[int, weakref.ref] = {}
        self._inputs: set[int] = set()
        self._live: list[dict[str, int]] = [defaultdict(int) for _ in range(size)]
        self.clear()

    def clear(self) -> None:
        """Forget the peaks."""
        self._peaks: list[dict[str, int]] = [dict(live) for live in self._live]
        self._most: list[dict[str, int]] = [dict(live) for live in self._live]

    def live(self, rank: int) -> dict[str, int]:
        """Bytes that a rank holds now, by component."""
        return {name: n for name, n in self._live[rank].items() if n}

    def peak(self, rank: int) -> dict[str, int]:
        """Bytes by component at the moment when the rank held most in total."""
        return {name: n for name, n in self._peaks[rank].items() if n}

    def most(self, rank: int) -> dict[str, int]:
        """The most bytes of each component that the rank held, each at a moment of its own."""
        return {name: n for name, n in self._most[rank].items() if n}

    def peak_bytes(self, rank: int, without: tuple[str, ...] = ()) -> int:
        """The largest total that a rank held, less some components of that moment, such as its inputs."""
        return sum(n for name, n in self._peaks[rank].items() if name not in without)

    def table(self) -> str:
        """Peak bytes per rank and component, as text."""
        names = sorted({name for peak in self._peaks for name, n in peak.items() if n})
        rows = [["rank", *names, "total"]]
        for rank, peak in enumerate(self._peaks):
            rows.append([str(rank), *(f"{peak.get(n, 0):,}" for n in names), f"{sum(peak.values()):,}"])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)

    # What the scheduler does

    @contextmanager
    def component(self, name: str) -> Iterator[None]:
        """New storages belong to this component. Never held across an ``await``."""
        before, self._component = self._component, name
        try:
            yield
        finally:
            self._component = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The scheduler's own work is charged to nobody."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def counting(self, rank: int) -> TorchDispatchMode:
        return Counting(self, rank)

    def register(self, rank: int, names: Sequence[str], args: Sequence[Any]) -> None:
        """Charge a rank with the tensors that it is given; ``names`` are the parameters of its program."""
        if not self.enabled:
            return
        for name, arg in zip(names, args):
            component = {"q": "q", "k": "k, v", "v": "k, v", "weights": "scores"}.get(
                name.removesuffix("_last"), "other inputs"
            )
            for t in tree_leaves(arg):
                if isinstance(t, Tensor):
                    # Shards of one call share a storage: each tensor is charged with its own bytes, under its own id.
                    self._charge(rank, component, t.numel() * t.element_size(), key=(rank, id(t)))
                    self._inputs.add(id(t.untyped_storage()))

    def keep(self, result: Any) -> None:
        """What a kernel returns is a partial result from now on, no longer scores."""
        component = "partial results"
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                key = id(t.untyped_storage())
                if key in self._owners:
                    rank, old, nbytes = self._owners[key]
                    self._owners[key] = (rank, component, nbytes)
                    self._live[rank][old] -= nbytes
                    self._live[rank][component] += nbytes

    def end_run(self) -> None:
        """Results belong to the caller from now on: nothing is charged between runs."""
        self._inputs.clear()
        for key in list(self._owners):
            self._release(key)

    def _charge(self, rank: int, component: str, nbytes: int, key: Any) -> None:
        if key in self._owners:
            return
        self._owners[key] = (rank, component, nbytes)
        live = self._live[rank]
        live[component] += nbytes
        self._most[rank][component] = max(self._most[rank].get(component, 0), live[component])
        if sum(live.values()) > sum(self._peaks[rank].values()):
            self._peaks[rank] = dict(live)

    def _see(self, t: Tensor, rank: int, args: Any) -> None:
        """Charge the storage of a result, unless it is known or came in with the arguments."""
        storage = t.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._inputs or self._paused:
            return
        if any(isinstance(a, Tensor) and a.untyped_storage() is storage for a in tree_leaves(args)):
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._release(key))
        self._charge(rank, self._component, storage.nbytes(), key)

    def _release(self, key: Any) -> None:
        self._alive.pop(key, None)
        rank, component, nbytes = self._owners.pop(key, (0, "partial results", 0))
        self._live[rank][component] -= nbytes


class Counting(TorchDispatchMode):
    """Sees every tensor that an operation returns; a storage that is new belongs to the running rank."""

    def __init__(self, memory: Memory, rank: int):
        super().__init__()
        self.memory, self.rank = memory, rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for t in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(t, Tensor):
                self.memory._see(t, self.rank, (args, kwargs))
        return result


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

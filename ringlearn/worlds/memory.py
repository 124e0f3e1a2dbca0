"""Memory of simulated ranks: every tensor that a rank makes is charged to that rank, by component, while it lives.

Counted are the storages that torch sees: inputs, receive buffers, results, scores of the reference kernel. Scratch that
a fused kernel uses inside (the score tile of CPU flash attention) is not seen by torch and therefore not in the table.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves


class Memory:
    """Live and peak bytes of each rank, by component.

    Components: "q", "k, v", "other inputs", "in flight" (packed messages and receive buffers), "scores" (inside a
    kernel call, or rows of them that a program keeps), "gathered" (the rows of all ranks, assembled from messages),
    "partial results" (everything else that a rank creates: outputs, lse, gradients, and their sums).

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
        # storage id -> (rank, component, bytes, and what tells when the storage is freed)
        self._owners: dict[Any, tuple[int, str, int, weakref.ref | None]] = {}
        self._inputs: set[int] = set()
        self._live: list[dict[str, int]] = [defaultdict(int) for _ in range(size)]
        self._totals = [0] * size  # of what is live
        self.clear()

    def clear(self) -> None:
        """Forget the peaks."""
        self._peaks: list[dict[str, int]] = [dict(live) for live in self._live]
        self._peak_totals = list(self._totals)
        self._most: list[dict[str, int]] = [dict(live) for live in self._live]

    def live(self, rank: int) -> dict[str, int]:
        """The bytes that a rank holds now, by component."""
        return {name: n for name, n in self._live[rank].items() if n}

    def peak(self, rank: int) -> dict[str, int]:
        """Bytes by component at the moment when the rank held most in total."""
        return {name: n for name, n in self._peaks[rank].items() if n}

    def most(self, rank: int) -> dict[str, int]:
        """The most bytes that the rank held of each component, each at its own moment."""
        return {name: n for name, n in self._most[rank].items() if n}

    def peak_bytes(self, rank: int, without: tuple[str, ...] = ()) -> int:
        """The largest total that a rank held, without some components, such as its inputs."""
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

    def component(self, name: str) -> AbstractContextManager[None]:
        """A context in which new storages belong to this component. Do not hold it across an ``await``."""
        return _Component(self, name)

    def paused(self) -> AbstractContextManager[None]:
        """A context in which nothing is counted and counting takes no time, for the scheduler's own work."""
        return _Paused(self)

    def charge(self, rank: int, component: str, made: Tensor, of: Sequence[Tensor] = ()) -> None:
        """Charge a rank with a tensor that was made while counting was paused, unless it is a view.

        of: the tensors that it was made of.
        """
        if self.enabled and not _is_in(made.untyped_storage(), of):
            self._made(made.untyped_storage(), rank, component)

    def counting(self, rank: int) -> TorchDispatchMode:
        return Counting(self, rank)

    def register(self, rank: int, names: Sequence[str], args: Sequence[Any]) -> None:
        """Charge a rank with the tensors that it is given; ``names`` are the parameter names of its program."""
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
        """From now on count what a kernel has returned as partial results, no longer as scores."""
        component = "partial results"
        for t in _tensors(result):
            key = id(t.untyped_storage())
            if key in self._owners:
                rank, old, nbytes, freed = self._owners[key]
                self._owners[key] = rank, component, nbytes, freed
                self._live[rank][old] -= nbytes
                self._live[rank][component] += nbytes

    def end_run(self) -> None:
        """End a run: its results belong to the caller, and nothing is charged between runs."""
        self._inputs.clear()
        for key in list(self._owners):
            self._release(key)

    def _charge(self, rank: int, component: str, nbytes: int, key: Any, freed: weakref.ref | None = None) -> None:
        if key in self._owners:
            return
        self._owners[key] = rank, component, nbytes, freed
        live, most = self._live[rank], self._most[rank]
        live[component] = held = live[component] + nbytes
        if held > most.get(component, 0):
            most[component] = held
        total = self._totals[rank] = self._totals[rank] + nbytes
        if total > self._peak_totals[rank]:
            self._peaks[rank], self._peak_totals[rank] = dict(live), total

    def _made(self, storage: UntypedStorage, rank: int, component: str | None = None) -> None:
        """Charge a storage that an operation has returned, unless it is charged already."""
        key = id(storage)
        if key in self._owners or key in self._inputs:
            return
        freed = weakref.ref(storage, lambda _: self._release(key))
        self._charge(rank, component or self._component, storage.nbytes(), key, freed)

    def _release(self, key: Any) -> None:
        rank, component, nbytes, _ = self._owners.pop(key)
        self._live[rank][component] -= nbytes
        self._totals[rank] -= nbytes


class _Component:
    """What ``Memory.component`` gives: a class of its own, since a generator takes several times as long."""

    __slots__ = ("_memory", "_name")

    def __init__(self, memory: Memory, name: str):
        self._memory, self._name = memory, name

    def __enter__(self) -> None:
        self._memory._component, self._name = self._name, self._memory._component

    def __exit__(self, *_: object) -> None:
        self._memory._component = self._name


class _Paused:
    """What ``Memory.paused`` gives. The mode is taken off as well: one that looks away still costs time."""

    __slots__ = ("_before", "_memory", "_mode")

    def __init__(self, memory: Memory):
        self._memory = memory

    def __enter__(self) -> None:
        self._before, self._memory._paused = self._memory._paused, True
        self._mode = _pop_mode() if isinstance(_get_current_dispatch_mode(), Counting) else None

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            _push_mode(self._mode)
        self._memory._paused = self._before


class NewStorages(TorchDispatchMode):
    """Calls ``made(storage)`` for each new storage that an operation allocates; a view allocates none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap __torch_dispatch__, which takes longer than the counting itself

    def made(self, storage: UntypedStorage) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs) if kwargs else func(*args)
        makes = _MAKES.get(id(func))
        if makes is None:
            makes = _MAKES[id(func)] = _makes_tensors(func)
        if makes:
            for t in _tensors(result):
                storage = t.untyped_storage()
                if not (_is_in(storage, args) or kwargs and _is_in(storage, kwargs.values())):
                    self.made(storage)
        return result


_MAKES: dict[int, bool] = {}  # operators live as long as torch, and hashing one takes longer than looking up its id


def _makes_tensors(func: OpOverload) -> bool:
    """Whether an operation returns tensors that its schema does not declare to be views, or its own arguments."""
    return any(r.alias_info is None and "Tensor" in str(r.type) for r in func._schema.returns)


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors that an operation, or a kernel, has returned; torch's tree_leaves takes several times as long."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


def _is_in(storage: UntypedStorage, given: Iterable[Any]) -> bool:
    """Whether a tensor among an operation's arguments lies in this storage."""
    for x in given:
        if isinstance(x, Tensor):
            if x.untyped_storage() is storage:
                return True
        elif isinstance(x, list | tuple) and _is_in(storage, x):
            return True
    return False


class Counting(NewStorages):
    """Charges what is made to one rank."""

    def __init__(self, memory: Memory, rank: int):
        super().__init__()
        self.memory, self.rank = memory, rank

    def made(self, storage: UntypedStorage) -> None:
        if not self.memory._paused:
            self.memory._made(storage, self.rank)


class LiveBytes(NewStorages):
    """Counts the bytes of all tensors that were made inside it and are still alive, and remembers the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = Memory(1)

    def made(self, storage: UntypedStorage) -> None:
        self._memory._made(storage, 0)

    @property
    def live(self) -> int:
        return sum(self._memory.live(0).values())

    @property
    def peak(self) -> int:
        return self._memory.peak_bytes(0)

"""The trace of a real rank: wall-clock times on a CPU, CUDA events on a GPU, read only when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..trace import Event, Trace, TracedKernel


class Recorder:
    """Notes what one rank does. ``mark`` gives a moment; moments become seconds when the trace is read.

    On a GPU a moment is an event on the current stream, so nothing is synchronized while the program runs. The times of
    a message are from its post to the end of the wait for it: when its bytes really arrived, nobody outside sees.
    """

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self._trace = Trace(simulated=False)
        # Storage -> the rank whose shard it holds. Not only in this run: a backward begins with what came last.
        self._origins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.clear()

    def clear(self) -> None:
        self._trace.clear()
        self._pending: list[tuple[Any, Any, dict[str, Any]]] = []
        self._given: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storages of arguments, and of buffers they came in
        self._zero = self.mark()

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, start: Any, kind: str, name: str, step: int, **details: Any) -> None:
        self._pending.append((start, self.mark(), {"kind": kind, "name": name, "step": step, **details}))

    def trace(self) -> Trace:
        if self._pending and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for start, stop, details in self._pending:
            self._trace.events.append(Event(self.rank, start=self._seconds(start), stop=self._seconds(stop), **details))
        self._pending = []
        return self._trace

    def _seconds(self, moment: Any) -> float:
        return self._zero.elapsed_time(moment) / 1e3 if self.device.type == "cuda" else moment - self._zero

    # Whose keys are these? What a rotate brings was, on rank - 1, what a rotate brought before, or rank - 1's own;
    # and a rotate back brings from rank + 1.

    def origin(self, tensor: Tensor) -> int:
        return self._origins.get(tensor.untyped_storage(), self.rank)

    def given(self, args: Iterable[Any]) -> None:
        """What the program was given, so that messages with what it made can be told apart."""
        for t in tree_leaves(list(args)):
            if isinstance(t, Tensor):
                self._given[t.untyped_storage()] = True

    def made(self, tensors: Iterable[Tensor]) -> bool:
        return any(t.untyped_storage() not in self._given for t in tensors)

    def arrived(self, buffer: Tensor, origin: int, made: bool) -> None:
        storage = buffer.untyped_storage()  # of a buffer that may have held something else before
        self._origins[storage] = origin % self.size
        self._given.pop(storage, None)
        if not made:
            self._given[storage] = True

    def traced(self, kernel: Any, step: Callable[[], int], origin: int | None = None) -> TracedKernel:
        def record(name, flops, tile, k, run):
            start = self.mark()
            result = run()
            whose = self.origin(k) if origin is None else origin
            self.note(start, "compute", name, step(), flops=flops, tile=tile, origin=whose)
            return result

        return TracedKernel(kernel, record)

"""The trace of a real rank: wall-clock times on a CPU and CUDA events on a GPU, which are read only on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..trace import Event, Origins, Trace, TracedKernel


class Recorder:
    """Records what one rank does. ``mark`` gives a moment; moments become seconds when the trace is read.

    On a GPU a moment is an event on the current stream, so nothing is synchronized while the program runs. A message
    lasts from its post to the end of the wait for it: when its bytes really arrived cannot be seen from outside.
    """

    def __init__(self, rank: int, device: torch.device):
        self.rank, self.device = rank, device
        self._trace = Trace(simulated=False)
        self.origins = Origins()
        self.begin(())

    def begin(self, args: Any) -> None:
        """Begin a run of a program with these arguments, and a new trace."""
        self._trace.clear()
        self._pending: list[tuple[Any, Any, dict[str, Any]]] = []
        self.origins.begin(args)
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

    def traced(self, kernel: Any, step: Callable[[], int], origin: int | None = None) -> TracedKernel:
        def record(name, flops, tile, k, run, scratch):
            start = self.mark()
            result = run()
            whose = self.origins.of(k, self.rank) if origin is None else origin
            self.note(start, "compute", name, step(), flops=flops, tile=tile, origin=whose)
            return result

        return TracedKernel(kernel, record)

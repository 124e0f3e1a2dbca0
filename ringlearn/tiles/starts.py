"""Where segments begin, on the device that computes them: one upload for all steps of a rank, and for all layers.

A kernel of variable length reads from the device's memory where its segments begin. To copy that there, the host need
not wait if it is copied from pinned memory, but a copy costs the host more than a small kernel call does. So the starts
of all calls that are planned together lie in one tensor, which is copied when the first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_captured: list[_Uploaded] = []  # a CUDA graph reads these for as long as it is replayed, and nobody tells us when


class Starts:
    """Where the segments of one call begin, in rows and in columns, and where the last one ends.

    rows, columns: int32 (segments + 1,) on the CPU, counted from the first row and column of the call.

    >>> starts = Starts(torch.tensor([0, 2, 5]), torch.tensor([0, 4, 4]))
    >>> starts.on(torch.device("cpu"), batch=2)[0]
    tensor([ 0,  2,  5,  7, 10], dtype=torch.int32)
    """

    def __init__(self, rows: Tensor, columns: Tensor):
        self.rows, self.columns = rows.to(torch.int32), columns.to(torch.int32)
        self._group = _Group([self])

    def on(self, device: torch.device, batch: int = 1) -> tuple[Tensor, Tensor]:
        """The same on a device, with the segments of every row of a batch, one below the other.

        Raises RuntimeError if they are not there yet while a CUDA graph is captured.
        """
        if device.type == "cpu" and batch == 1:
            return self.rows, self.columns
        return self._group.on(device, batch)[self]


def upload_together(calls: Sequence[Starts]) -> None:
    """Copy the starts of these calls to a device all at once, when the first of them is asked for there."""
    group = _Group(list(calls))
    for starts in calls:
        starts._group = group


class _Group:
    def __init__(self, calls: list[Starts]):
        self._calls = calls
        self._found: dict[tuple[torch.device, int], _Uploaded] = {}

    def on(self, device: torch.device, batch: int) -> dict[Starts, tuple[Tensor, Tensor]]:
        found = self._found.get((device, batch))
        if found is None:
            found = self._found[device, batch] = _Uploaded(self._calls, device, batch)
        if device.type == "cuda":
            found.wait()
        return found.views


class _Uploaded:
    """One tensor on a device, and which part of it belongs to which call."""

    def __init__(self, calls: list[Starts], device: torch.device, batch: int):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and where the documents of this mask begin is not on the GPU yet, "
                "which a capture cannot hold; make the same call once, forward and backward, before you capture it"
            )
        with torch.inference_mode(False):
            parts = [_of_batch(t, batch) for starts in calls for t in (starts.rows, starts.columns)]
            packed = torch.cat(parts)
            self._event = None
            if device.type == "cuda":
                packed = packed.pin_memory().to(device, non_blocking=True)
                self._event = torch.cuda.current_stream(device).record_event()
            else:
                packed = packed.to(device)
            views = packed.split([len(t) for t in parts])
        self.views = dict(zip(calls, zip(views[::2], views[1::2], strict=True), strict=True))

    def wait(self) -> None:
        """Let the current stream wait until they have arrived: another one may have copied them."""
        if torch.cuda.is_current_stream_capturing():
            if not any(kept is self for kept in _captured):
                _captured.append(self)
        elif self._event is not None:
            if self._event.query():
                self._event = None
            else:
                torch.cuda.current_stream().wait_event(self._event)


def _of_batch(starts: Tensor, batch: int) -> Tensor:
    if batch == 1:
        return starts
    size = starts[-1]
    rows = torch.arange(batch, dtype=torch.int32)[:, None] * size + starts[:-1]
    return torch.cat([rows.flatten(), size[None] * batch])

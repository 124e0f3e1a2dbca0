"""A second transport between GPUs of one host: their copy engines move messages from memory to memory.

NCCL moves data with kernels. They take multiprocessors away from the attention that they should hide behind, or wait
until it frees some. Here each rank has a *slot* of symmetric memory for each way round the ring. A neighbour
writes into it, and the rank empties it, both by copy engines while kernels run. For that each rank has two streams:

    sending      wait for what is sent; wait for "free"; copy to the neighbour's slot; raise "ready" there
    receiving    wait for the buffer; wait for "ready"; copy the slot to the buffer; lower "ready", raise "free" there

All of it is work on streams: posting starts it, an await makes the current stream wait for it, and the host never
waits. Waiting takes no kernel either: flags are awaited and written by stream memory operations of the CUDA driver.
Message i waits for earlier messages only, in whatever order they are awaited, so nothing can wait in a circle. Only
what ``rotate`` moves goes this way, up to the size that all ranks have reserved together.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGN = 2 * 2**20  # bytes; the driver maps such pages
RELEASE_TIMEOUT = 5.0  # seconds that streams get to finish after a failure
WAIT_VALUE_32, WRITE_VALUE_32, WHEN_EQUAL = 1, 2, 1  # of the driver's enums


@cache
def symm_mem() -> ModuleType | None:
    """torch's symmetric memory; None in a torch without it. It is slow to import, and only GPUs need it."""
    try:
        return import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return None


def unavailable(device: torch.device, size: int) -> str | None:
    """Why ranks on this host cannot read each other's memory (half a sentence), or None if they can."""
    if device.type != "cuda":
        return f"it moves data between GPUs, and this world is on {device.type}"
    if size < 2:
        return "a single rank has no neighbour"
    if symm_mem() is None:
        return "this torch has no torch.distributed._symmetric_memory"
    gpus = torch.cuda.device_count()
    if gpus < size:
        return f"this process sees {gpus} of {size} GPUs"
    if not all(torch.cuda.can_device_access_peer(device.index, i) for i in range(gpus) if i != device.index):
        return "the GPUs cannot read each other's memory"
    try:
        _Driver()
    except OSError as error:
        return f"the CUDA driver cannot be called: {error}"
    return None


_streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream``, which takes several times as long to make an object that is there already."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _streams.get(key)
    if found is None:
        if len(_streams) >= 64:
            _streams.clear()
        found = _streams[key] = torch.cuda.current_stream(device)
    return found


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until all ranks are here and their GPUs are idle."""
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])
    torch.cuda.synchronize(device)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: wait for, or write, a word of memory."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class _Driver:
    """The CUDA driver's own calls, on raw addresses and streams: copies, and flags that no kernel has to wait for."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        number, size, stream = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        self._batch, self._copy = cuda.cuStreamBatchMemOp_v2, cuda.cuMemcpyDtoDAsync_v2
        self._batch.argtypes = [stream, number, ctypes.POINTER(_Operation), number]
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, size, stream]

    def batch(self, *operations: tuple[str, int, int]) -> Any:
        """Operations for ``submit``, in order: ("wait", address, value), ("write", address, value)."""
        made = [
            _Operation(WAIT_VALUE_32, address, value, WHEN_EQUAL)
            if what == "wait"
            else _Operation(WRITE_VALUE_32, address, value)
            for what, address, value in operations
        ]
        return (_Operation * len(made))(*made)

    def submit(self, stream: int, batch: Any) -> None:
        """Let the stream wait until words of memory have some values, and write others after all its earlier writes."""
        _raise_on("cuStreamBatchMemOp", self._batch(stream, len(batch), batch, 0))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes:
            _raise_on("cuMemcpyDtoDAsync", self._copy(to, source, nbytes, stream))


def _raise_on(call: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{call}: CUDA driver error {error}")


class Copied:
    """A message that is being copied. ``wait`` makes the current stream wait for it, not the host.

    done: recorded behind the copy, once.
    """

    def __init__(self, wire: SymmetricWire, stream: torch.cuda.Stream, sent: Sequence[Tensor] = ()):
        self.done = torch.cuda.Event()
        self.done.record(stream)
        self._wire, self._stream, self._sent = wire, stream, sent
        wire._last[id(stream)] = self

    def wait(self) -> None:
        self._wire._wait(self)
        self._sent = ()  # from here on the current stream may use their memory again


class SymmetricWire:
    """Sends messages to neighbours through symmetric memory, once all ranks have called ``reserve`` with one size."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device):
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self.slots = 1 if size == 2 else 2  # between two ranks both ways round are one
        self.capacity = 0  # bytes of a slot
        self._handle: object = None
        self._driver = _Driver()
        self._sending, self._receiving = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._raw = {id(stream): stream.cuda_stream for stream in (self._sending, self._receiving)}
        self._last: dict[int, Copied] = {}  # id of a stream -> its last message, if nobody has waited for it
        self._posted = torch.cuda.Event()  # what the current stream has done when a message is posted
        self._batches: dict[tuple[bool, str], Any] = {}  # operations on flags, which are the same for each message
        self._captured: dict[object, Tensor] = {}  # handle -> slots that CUDA graphs use: they stay when slots grow

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds, with the smaller slots that captured CUDA graphs use."""
        kept = sum(memory.nbytes for handle, memory in self._captured.items() if handle is not self._handle)
        return self.slots * self.capacity + kept

    def reserve(self, nbytes: int) -> None:
        """Make the slots at least this large. All ranks call it together, with the same number."""
        if nbytes <= self.capacity:
            return
        meet(self.group, self.device)  # nobody uses the old slots any more
        self.capacity = -(-nbytes // ALIGN) * ALIGN
        self._memory = symm_mem().empty(self.slots * self.capacity, dtype=torch.uint8, device=self.device)
        self._handle = symm_mem().rendezvous(self._memory, self.group)
        self._slots = list(self._handle.buffer_ptrs)  # addresses, by rank
        self._flags = list(self._handle.signal_pad_ptrs)
        self._prepare()
        free = [("write", self._flag(self.rank, slot, "free"), 1) for slot in range(self.slots)]
        self._driver.submit(self._sending.cuda_stream, self._driver.batch(*free))
        meet(self.group, self.device)

    def _prepare(self) -> None:
        for back in (False, True):
            slot = self._slot(back)
            to, source = (self.rank + (-1 if back else 1)) % self.size, (self.rank + (1 if back else -1)) % self.size
            free, ready = self._flag(self.rank, slot, "free"), self._flag(self.rank, slot, "ready")
            operations = {
                "take": [("wait", free, 1), ("write", free, 0)],
                "raise": [("write", self._flag(to, slot, "ready"), 1)],
                "await": [("wait", ready, 1)],
                # In this order: the sender may raise "ready" again as soon as it sees "free".
                "return": [("write", ready, 0), ("write", self._flag(source, slot, "free"), 1)],
            }
            for name, of_name in operations.items():
                self._batches[back, name] = self._driver.batch(*of_name)

    def _flag(self, rank: int, slot: int, name: str) -> int:
        """Address of a word in a rank's memory: "free" stands at the sender, "ready" at the receiver of a slot."""
        return self._flags[rank] + 4 * (2 * slot + (name == "ready"))

    def fits(self, nbytes: int) -> bool:
        """Whether a message of so many bytes goes this way; sender and receiver come to the same answer."""
        return 0 < nbytes <= self.capacity

    def _slot(self, back: bool) -> int:
        return int(back) if self.slots > 1 else 0

    def send(self, tensors: Sequence[Tensor], back: bool) -> Copied:
        """Send tensors to rank + 1, or back to rank - 1, as one message. They must not be written until it is there."""
        to = (self.rank + (-1 if back else 1)) % self.size
        tensors = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        # Recorded anew for each message: whoever waits for it, waits for what it was when the wait was posted.
        self._posted.record(current_stream(self.device))
        stream, address = self._begin(self._sending), self._slots[to] + self._slot(back) * self.capacity
        self._driver.submit(stream, self._batches[back, "take"])
        for source, nbytes in _pieces(tensors):
            self._driver.copy(address, source, nbytes, stream)
            address += nbytes
        self._driver.submit(stream, self._batches[back, "raise"])
        return Copied(self, self._sending, tensors)

    def receive(self, buffer: Tensor, back: bool, together: bool = False) -> Copied:
        """Receive a message from rank - 1, or one that comes back from rank + 1, into a flat buffer.

        The buffer must live until somebody has waited.  together: it was there already when the last message was sent.
        """
        if not together:
            self._posted.record(current_stream(self.device))
        stream, address = self._begin(self._receiving), self._slots[self.rank] + self._slot(back) * self.capacity
        self._driver.submit(stream, self._batches[back, "await"])
        self._driver.copy(buffer.data_ptr(), address, buffer.nbytes, stream)
        self._driver.submit(stream, self._batches[back, "return"])
        return Copied(self, self._receiving)

    def _begin(self, stream: torch.cuda.Stream) -> int:
        """Make a stream wait for what the current one does with a message's tensors; return the driver's handle."""
        if torch.cuda.is_current_stream_capturing():
            self._captured[self._handle] = self._memory
        self._posted.wait(stream)
        return self._raw[id(stream)]

    def _wait(self, copied: Copied) -> None:
        copied.done.wait(current_stream(self.device))
        if self._last.get(id(copied._stream)) is copied:
            del self._last[id(copied._stream)]

    def join(self) -> None:
        """Make the current stream wait for everything that is left to do here.

        Only for messages that nobody has waited for: in a capture, a rank that sends nothing has no part of the stream.
        """
        for copied in list(self._last.values()):
            self._wait(copied)

    def release(self) -> None:
        """After a failure, release the streams that wait for a neighbour. What they copy is garbage that nobody reads.

        Returns when they are done, since they write into buffers, or after some seconds.
        """
        if not self.capacity:
            return
        stream = torch.cuda.Stream(self.device)
        names = [(slot, name) for slot in range(self.slots) for name in ("free", "ready")]
        flags = self._driver.batch(*(("write", self._flag(self.rank, *name), 1) for name in names))
        last = time.monotonic() + RELEASE_TIMEOUT
        while time.monotonic() < last:  # flags are lowered again, and other waits may stand behind the first
            self._driver.submit(stream.cuda_stream, flags)
            stream.synchronize()
            if self._sending.query() and self._receiving.query():
                break
            time.sleep(1e-3)


def _pieces(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The address and the bytes of contiguous tensors; those that lie in order in one storage make one piece.

    The driver refuses a copy out of two allocations, even if the second begins where the first ends.
    """
    pieces: list[tuple[int, int]] = []
    storage = None
    for t in tensors:
        address, nbytes, before = t.data_ptr(), t.nbytes, storage
        storage = t.untyped_storage().data_ptr()
        if storage == before and sum(pieces[-1]) == address:
            pieces[-1] = pieces[-1][0], pieces[-1][1] + nbytes
        else:
            pieces.append((address, nbytes))
    return pieces

"""A second transport between GPUs of one host: the copy engine moves messages, from memory to memory.

NCCL moves data with kernels. They take multiprocessors away from the attention that they should hide behind, or wait
until it gives some back. Here each rank has *slots* of symmetric memory, into which its neighbours can write. The
sender's copy engine writes a message there, while kernels run; the receiver moves it to its buffer when it is awaited:

    sender     on a stream of its own: wait for "free", copy to the receiver's slot, raise "ready" at the receiver
    receiver   in the await: wait for "ready", copy from its slot, raise "free" at the sender

All of it is work on streams, so the host never waits, and waiting takes no kernel: flags are awaited and written by
stream memory operations of the CUDA driver. Only messages between neighbours go this way, up to the size that was
reserved on all ranks together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import torch.distributed._symmetric_memory as symm_mem
except ImportError:  # a torch without it
    symm_mem = None

ALIGN = 2 * 2**20  # bytes; the driver maps such pages
SLOTS = {"onward": (0,), "back": (1, 2)}  # by direction; a backward has keys and gradients under way, both back
WHEN_EQUAL = 1  # of cuStreamWaitValue32


def unavailable(device: torch.device, size: int) -> str | None:
    """Why ranks on this host cannot read each other's memory (half a sentence), or None if they can."""
    if device.type != "cuda":
        return f"it moves data between GPUs, and this world is on {device.type}"
    if size < 2:
        return "a single rank has no neighbour"
    if symm_mem is None:
        return "this torch has no torch.distributed._symmetric_memory"
    count = torch.cuda.device_count()
    if count < size:
        return f"this process sees {count} of {size} GPUs"
    if not all(torch.cuda.can_device_access_peer(device.index, i) for i in range(count) if i != device.index):
        return "the GPUs cannot read each other's memory"
    try:
        _Driver()
    except OSError as error:
        return f"the CUDA driver cannot be called: {error}"
    return None


class _Driver:
    """The CUDA driver's own calls, on raw addresses and streams: copies, and flags that no kernel has to wait for."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        address, word, size, stream = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        self._wait, self._write, self._copy = (
            cuda.cuStreamWaitValue32_v2, cuda.cuStreamWriteValue32_v2, cuda.cuMemcpyDtoDAsync_v2
        )  # fmt: skip
        self._wait.argtypes = self._write.argtypes = [stream, address, word, word]
        self._copy.argtypes = [address, address, size, stream]

    def await_and_lower(self, flag: int, stream: int) -> None:
        """Stream, wait until the word at this address is 1, and make it 0."""
        _check("cuStreamWaitValue32", self._wait(stream, flag, 1, WHEN_EQUAL))
        _check("cuStreamWriteValue32", self._write(stream, flag, 0, 0))

    def lift(self, flag: int, stream: int) -> None:
        """Stream, make the word at this address 1, when all before it is done and visible."""
        _check("cuStreamWriteValue32", self._write(stream, flag, 1, 0))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes:
            _check("cuMemcpyDtoDAsync", self._copy(to, source, nbytes, stream))


def _check(call: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{call}: CUDA driver error {error}")


class Work:
    """A message on its way. ``wait`` makes the current stream wait for it, not the host."""

    def __init__(self, wire: SymmetricWire, slot: int, source: int, buffer: Tensor, sent: torch.cuda.Event):
        self._wire, self._slot, self._source, self._buffer, self._sent = wire, slot, source, buffer, sent

    def wait(self) -> None:
        self._wire._take(self)

    def is_completed(self) -> bool:
        return self._sent.query()


class SymmetricWire:
    """Messages to a neighbour through symmetric memory. ``reserve`` first, with one size on all ranks."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device):
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self.slots = 1 if size == 2 else 3
        self.capacity = 0  # bytes of a slot
        self._driver = _Driver()
        self._stream = torch.cuda.Stream(device)
        self._posted = {"onward": 0, "back": 0}
        self._arriving: list[list[Work]] = [[] for _ in range(self.slots)]
        self._captured: list[object] = []  # what CUDA graphs read and write stays, even when slots grow

    @property
    def nbytes(self) -> int:
        """Symmetric memory that this rank holds."""
        return self.slots * self.capacity

    def reserve(self, nbytes: int) -> None:
        """Make the slots this large. All ranks call it together, with the same number."""
        if nbytes <= self.capacity:
            return
        self._meet()  # nobody uses the old slots any more
        self.capacity = -(-nbytes // ALIGN) * ALIGN
        self._memory = symm_mem.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._handle = symm_mem.rendezvous(self._memory, self.group)
        self._slots = list(self._handle.buffer_ptrs)  # addresses, by rank
        self._flags = list(self._handle.signal_pad_ptrs)
        for slot in range(self.slots):
            self._driver.lift(self._flag(self.rank, slot, "free"), self._stream.cuda_stream)
        self._meet()

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def _flag(self, rank: int, slot: int, name: str) -> int:
        """Address of a word in a rank's memory: "free" stands at the sender, "ready" at the receiver of a slot."""
        return self._flags[rank] + 4 * (2 * slot + (name == "ready"))

    def _direction(self, to: int, source: int) -> str | None:
        """Which way round the ring such a message goes; between two ranks both ways are one."""
        onward, back = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return "onward" if (to, source) == (onward, back) else "back" if (to, source) == (back, onward) else None

    def takes(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Tensor]) -> bool:
        """Whether such messages go this way.  receives: rank -> a flat buffer."""
        if len(sends) != 1 or len(receives) != 1:
            return False
        ((to, tensors),), ((source, buffer),) = sends.items(), receives.items()
        largest = max(sum(t.nbytes for t in tensors), buffer.nbytes)
        return self._direction(to, source) is not None and largest <= self.capacity

    def post(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Tensor]) -> Work:
        """Send tensors to a neighbour as one message, and receive one from the other into a flat buffer."""
        ((to, tensors),), ((source, buffer),) = sends.items(), receives.items()
        direction = self._direction(to, source)
        slots = SLOTS[direction]
        slot = slots[self._posted[direction] % len(slots)]
        self._posted[direction] += 1
        if torch.cuda.is_current_stream_capturing() and self._handle not in self._captured:
            self._captured += [self._handle, self._memory]
        tensors = [t.contiguous() for t in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        stream, address = self._stream.cuda_stream, self._slots[to] + slot * self.capacity
        self._driver.await_and_lower(self._flag(self.rank, slot, "free"), stream)
        for t in tensors:
            self._driver.copy(address, t.data_ptr(), t.nbytes, stream)
            t.record_stream(self._stream)  # it may be freed at once, and its memory used again after this copy
            address += t.nbytes
        self._driver.lift(self._flag(to, slot, "ready"), stream)
        sent = self._stream.record_event()
        work = Work(self, slot, source, buffer, sent)
        self._arriving[slot].append(work)
        return work

    def _take(self, work: Work) -> None:
        """Move a message from its slot to its buffer; those that came before it in the slot first, to empty it."""
        waiting, current = self._arriving[work._slot], torch.cuda.current_stream(self.device)
        stream = current.cuda_stream
        while work in waiting:
            first = waiting.pop(0)
            current.wait_event(first._sent)
            self._driver.await_and_lower(self._flag(self.rank, first._slot, "ready"), stream)
            source = self._slots[self.rank] + first._slot * self.capacity
            self._driver.copy(first._buffer.data_ptr(), source, first._buffer.nbytes, stream)
            self._driver.lift(self._flag(first._source, first._slot, "free"), stream)

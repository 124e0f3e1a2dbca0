"""A second transport between GPUs of one host: the copy engine moves messages, from memory to memory.

NCCL moves data with kernels. They take multiprocessors away from the attention that they should hide behind, or wait
until it gives some back. Here each rank has *slots* of symmetric memory, into which its neighbours can write. The
sender's copy engine writes a message there, while kernels run; the receiver moves it to its buffer when it is awaited:

    sender     on a stream of its own: wait for "free", copy to the receiver's slot, raise "ready" at the receiver
    receiver   in the await: wait for "ready", copy from its slot, raise "free" at the sender

All of it is work on streams, so the host never waits, and waiting takes no kernel: flags are awaited and written by
stream memory operations of the CUDA driver. Only what ``rotate`` moves goes this way, up to the size that was
reserved on all ranks together.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import torch.distributed._symmetric_memory as symm_mem
except ImportError:  # a torch without it
    symm_mem = None

ALIGN = 2 * 2**20  # bytes; the driver maps such pages
ONWARD, BACK = (0,), (1, 2)  # slots; a backward has keys and gradients under way, both back
WAIT_VALUE_32, WRITE_VALUE_32, WHEN_EQUAL = 1, 2, 1  # of the driver's enums


def unavailable(device: torch.device, size: int) -> str | None:
    """Why ranks on this host cannot read each other's memory (half a sentence), or None if they can."""
    if device.type != "cuda":
        return f"it moves data between GPUs, and this world is on {device.type}"
    if size < 2:
        return "a single rank has no neighbour"
    if symm_mem is None:
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

    def await_(self, flag: int, stream: int) -> None:
        """Stream, wait until the word at this address is 1."""
        self._run(stream, _Operation(WAIT_VALUE_32, flag, 1, WHEN_EQUAL))

    def write(self, stream: int, *words: tuple[int, int]) -> None:
        """Stream, make the word at each address this value: one after the other, after all that came before is seen."""
        self._run(stream, *(_Operation(WRITE_VALUE_32, flag, value) for flag, value in words))

    def _run(self, stream: int, *operations: _Operation) -> None:
        batch = (_Operation * len(operations))(*operations)
        _check("cuStreamBatchMemOp", self._batch(stream, len(operations), batch, 0))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes:
            _check("cuMemcpyDtoDAsync", self._copy(to, source, nbytes, stream))


def _check(call: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{call}: CUDA driver error {error}")


class Sent:
    """A message that is being copied to its receiver. ``wait`` makes the current stream wait for that, not the host."""

    def __init__(self, wire: SymmetricWire, number: int, done: torch.cuda.Event):
        self._wire, self._number, self._done = wire, number, done

    def wait(self) -> None:
        self._wire._take(self._number)  # the neighbours, who do likewise, may wait for a slot before they go on
        torch.cuda.current_stream(self._wire.device).wait_event(self._done)


class Received:
    """A message that comes into a slot. ``wait`` makes the current stream wait for it and move it to its buffer."""

    def __init__(self, wire: SymmetricWire, number: int, slot: int, source: int, buffer: Tensor):
        self._wire, self.number, self.slot, self.source, self.buffer = wire, number, slot, source, buffer

    def wait(self) -> None:
        self._wire._take(self.number)


class SymmetricWire:
    """Messages to a neighbour through symmetric memory. ``reserve`` first, with one size on all ranks."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device):
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self.slots = 1 if size == 2 else 3
        self.capacity = 0  # bytes of a slot
        self._handle: object = None
        self._driver = _Driver()
        self._stream, self._freeing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._sent, self._received = [0, 0], [0, 0]  # messages so far, onward and back
        self._numbers = count()  # of what was posted
        self._arriving: deque[Received] = deque()
        self._freed: dict[int, torch.cuda.Event] = {}  # by slot, in this run
        self._busy = False  # something on the stream that nobody has waited for
        self._captured: dict[object, Tensor] = {}  # handle -> slots that CUDA graphs use: they stay when slots grow

    @property
    def nbytes(self) -> int:
        """Symmetric memory that this rank holds, with the smaller slots that CUDA graphs were captured with."""
        kept = sum(memory.nbytes for handle, memory in self._captured.items() if handle is not self._handle)
        return self.slots * self.capacity + kept

    def reserve(self, nbytes: int) -> None:
        """Make the slots this large. All ranks call it together, with the same number."""
        if nbytes <= self.capacity:
            return
        self._meet()  # nobody uses the old slots any more
        self.capacity = -(-nbytes // ALIGN) * ALIGN
        self._memory = symm_mem.empty(self.slots * self.capacity, dtype=torch.uint8, device=self.device)
        self._handle = symm_mem.rendezvous(self._memory, self.group)
        self._slots = list(self._handle.buffer_ptrs)  # addresses, by rank
        self._flags = list(self._handle.signal_pad_ptrs)
        for slot in range(self.slots):
            self._driver.write(self._stream.cuda_stream, (self._flag(self.rank, slot, "free"), 1))
        self._meet()

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def _flag(self, rank: int, slot: int, name: str) -> int:
        """Address of a word in a rank's memory: "free" stands at the sender, "ready" at the receiver of a slot."""
        return self._flags[rank] + 4 * (2 * slot + (name == "ready"))

    def fits(self, nbytes: int) -> bool:
        """Whether a message of so many bytes goes this way: sender and receiver come to the same answer."""
        return 0 < nbytes <= self.capacity

    def _next_slot(self, counts: list[int], back: bool) -> int:
        """Between two ranks both ways round are one."""
        slots = BACK if back and self.size > 2 else ONWARD
        counts[slots is BACK] += 1
        return slots[counts[slots is BACK] % len(slots)]

    def send(self, tensors: Sequence[Tensor], back: bool) -> Sent:
        """Send tensors to rank + 1, or back to rank - 1, as one message. They may be freed at once, but not written."""
        slot, to = self._next_slot(self._sent, back), (self.rank + (-1 if back else 1)) % self.size
        self._keep_for_graphs()
        tensors = [t.contiguous() for t in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        stream, address = self._stream.cuda_stream, self._slots[to] + slot * self.capacity
        free = self._flag(self.rank, slot, "free")
        self._driver.await_(free, stream)
        self._driver.write(stream, (free, 0))
        for t in tensors:
            self._driver.copy(address, t.data_ptr(), t.nbytes, stream)
            t.record_stream(self._stream)  # if it is freed, its memory is not used again before this copy
            address += t.nbytes
        self._driver.write(stream, (self._flag(to, slot, "ready"), 1))
        self._busy = True
        return Sent(self, next(self._numbers), self._stream.record_event())

    def receive(self, buffer: Tensor, back: bool) -> Received:
        """Receive a message from rank - 1, or one that comes back from rank + 1, into a flat buffer."""
        slot, source = self._next_slot(self._received, back), (self.rank + (1 if back else -1)) % self.size
        self._keep_for_graphs()
        work = Received(self, next(self._numbers), slot, source, buffer)
        self._arriving.append(work)
        return work

    def _take(self, number: int) -> None:
        """Move all messages up to this one from their slots to their buffers, in the order in which they were posted.

        Whoever awaits a later message first must not leave earlier ones in their slots: the later one may need them.
        """
        current = torch.cuda.current_stream(self.device)
        stream = current.cuda_stream
        while self._arriving and self._arriving[0].number <= number:
            first = self._arriving.popleft()
            ready = self._flag(self.rank, first.slot, "ready")
            if first.slot in self._freed:  # else the flag may still be that of the message before
                current.wait_event(self._freed[first.slot])
            self._driver.await_(ready, stream)
            address = self._slots[self.rank] + first.slot * self.capacity
            self._driver.copy(first.buffer.data_ptr(), address, first.buffer.nbytes, stream)
            # Not on the current stream, where what follows would wait for it. Not on the one that sends either: there
            # it would stand behind a message that waits for such a flag of another rank, which does the same. And both
            # words on one stream: the sender may raise "ready" again as soon as it sees "free".
            self._freeing.wait_stream(current)
            self._driver.write(self._freeing.cuda_stream, (ready, 0), (self._flag(first.source, first.slot, "free"), 1))
            self._freed[first.slot] = self._freeing.record_event()
            self._busy = True

    def join(self) -> None:
        """Let the current stream wait for all that is left to do here."""
        if self._busy:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            current.wait_stream(self._freeing)
            self._freed.clear()
            self._busy = False

    def release(self) -> None:
        """After a failure: let streams go on that wait for a neighbour. What they copy is garbage, and nobody's."""
        if not self.capacity:
            return
        stream = torch.cuda.Stream(self.device)
        names = [(slot, name) for slot in range(self.slots) for name in ("free", "ready")]
        for _ in range(8):  # flags are lowered again, and other waits may stand behind the first
            self._driver.write(stream.cuda_stream, *((self._flag(self.rank, *name), 1) for name in names))
            stream.synchronize()
            time.sleep(1e-3)

    def _keep_for_graphs(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._captured[self._handle] = self._memory

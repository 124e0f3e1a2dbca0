"""Memory on every rank that kernels of all ranks can write to, for messages that are too small for a copy engine.

All ranks allocate it together, and after a failure it releases the kernels that wait. The kernel that uses it,
``attention.decoding.one_kernel``, explains the protocol.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist

from .symmetric import meet, symm_mem

CHANNELS = 128  # programs of the kernel; all of them must fit on the GPU at the same time
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
BEYOND = 2**62  # more than any epoch


def can_raise_flags(device: torch.device) -> bool:
    """Whether kernels on this GPU can use atomic operations on the memory of all others: over NVLink, not over PCIe."""
    if device.type != "cuda":
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    can = ctypes.c_int()
    for other in range(torch.cuda.device_count()):
        pair = device.index, other
        if other != device.index and (
            cuda.cuDeviceGetP2PAttribute(ctypes.byref(can), NATIVE_ATOMICS, *pair) or not can.value
        ):
            return False
    return True


class Mailboxes:
    """Two boxes per channel and sender in the memory of each rank of a host, once all ranks have called ``reserve``.

    addresses: int64 (P,), where each rank's memory begins in this rank's address space. It holds P flags per channel,
    int64, followed by the boxes.  room: how many float32 numbers fit into a box.  epochs: int64 (CHANNELS,).
    follow: called after each use, so that the world notices if a kernel never ends.
    """

    addresses: torch.Tensor
    epochs: torch.Tensor

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device, follow: Callable[[], None]
    ):
        self.group, self.rank, self.size, self.device, self._follow = group, rank, size, device, follow
        self.room = 0
        self._memory: torch.Tensor | None = None
        self._captured: dict[int, tuple] = {}  # what CUDA graphs use stays when the boxes grow

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds, with the smaller boxes that captured CUDA graphs use."""
        kept = {id(memory): memory.nbytes for memory, *_ in self._captured.values()}
        return sum((kept | ({} if self._memory is None else {id(self._memory): self._memory.nbytes})).values())

    def reserve(self, room: int) -> None:
        """Give every box room for so many numbers. All ranks call it together, with the same number."""
        if room <= self.room:
            return
        meet(self.group, self.device)  # no kernel uses the old boxes any more
        self.room = -(-room // 4) * 4  # a box begins at a multiple of 16 bytes
        flags = CHANNELS * self.size
        self._memory = symm_mem().empty(8 * flags + 4 * 2 * flags * self.room, dtype=torch.uint8, device=self.device)
        self._handle = symm_mem().rendezvous(self._memory, self.group)
        self.addresses = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=self.device)
        self.epochs = torch.zeros(CHANNELS, dtype=torch.int64, device=self.device)
        self._flags = self._memory[: 8 * flags].view(torch.int64)
        self._flags.zero_()
        self._beyond = torch.full_like(self._flags, BEYOND)
        meet(self.group, self.device)

    def used(self) -> None:
        """Record that a kernel that uses the boxes has been started."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured[id(self._memory)] = self._memory, self._handle, self._flags, self.addresses, self.epochs
        self._follow()

    def release(self) -> None:
        """After a failure, let this rank's waiting kernels end, and later ones too. Their results are garbage."""
        if self._memory is None:
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):  # by copies, because a new kernel might have to wait for those that wait
            for flags in (self._flags, *(kept[2] for kept in self._captured.values())):
                flags.copy_(self._beyond, non_blocking=True)
        stream.synchronize()

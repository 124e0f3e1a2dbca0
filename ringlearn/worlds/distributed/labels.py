"""A label on each message between CPUs, because gloo checks nothing.

gloo silently accepts a message that is shorter than expected, or of another dtype, and a longer one ends the process.
So the first bytes of each message say what it is, and the buffer has room for more than is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from ..comm import Shape

SIZE = 512  # bytes of a label; a multiple of every item size


def labelled(name: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One flat message of bytes: the label, then the tensors."""
    label = _label(name, [t.shape for t in tensors], dtype)
    return torch.cat([label, *(t.reshape(-1).contiguous().view(torch.uint8) for t in tensors)])


def capacity(shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Bytes of a receive buffer: enough that a message of twice the size is an error, not the end of the process."""
    return SIZE + 2 * dtype.itemsize * sum(map(prod, shapes)) + 1024


def unlabelled(
    message: Tensor, name: str, shapes: Sequence[Shape], dtype: torch.dtype, rank: int, source: int
) -> Tensor:
    """The flat payload behind the label. Raises ValueError if the label says that it is something else."""
    said, wanted = (bytes(label.tolist()).rstrip(b"\0") for label in (message[:SIZE], _label(name, shapes, dtype)))
    if said.split(b"|")[1:] != wanted.split(b"|")[1:]:
        its_name, what, _ = said.decode(errors="replace").split("|")
        raise ValueError(
            f"{name}: rank {rank} expects {wanted.decode().split('|')[1]} from rank {source}, which sent {what} in "
            f"{its_name}; shards may differ in length: say what arrives with length=..."
        )
    return message[SIZE : SIZE + dtype.itemsize * sum(map(prod, shapes))].view(dtype)


def _label(name: str, shapes: Sequence[Shape], dtype: torch.dtype) -> Tensor:
    what = f"shapes {[tuple(s) for s in shapes]} of {dtype}"
    text = f"{name[:60]}|{what[:400]}|{crc32(what.encode()):08x}"
    return torch.frombuffer(bytearray(text.encode()[:SIZE].ljust(SIZE, b"\0")), dtype=torch.uint8)

"""How bytes get from one process to another: gloo between CPUs, NCCL between GPUs, and the buffers they arrive in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Flat = dict[int, Tensor]  # rank -> one flat contiguous message


class GlooWire:
    """Sends messages between CPUs, over a gloo group that belongs to one world alone.

    gloo matches messages by order. In a separate group, no other messages can come between, and closing the group
    after a failure harms nobody else.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float):
        self.rank, self.size = rank, size
        self.group = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout))

    def post(self, sends: Flat, receives: Flat, tag: int = 0) -> list[Any]:
        works = [self.group.recv([_bytes(t)], source, tag) for source, t in receives.items()]
        return works + [self.group.send([_bytes(t)], to, tag) for to, t in sends.items()]

    def close(self) -> None:
        """Close all connections, so that whoever waits on one of them, here or elsewhere, gets an error at once.

        gloo has no call for this, but closes a group's connections when one wait times out.
        """
        try:
            if self.size > 1:
                self.group.recv([torch.empty(1)], (self.rank + 1) % self.size, 99).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass


class NcclWire:
    """Messages between GPUs over the user's NCCL group. ``wait`` on what it returns blocks the stream, not the host.

    ranks: which ranks of the world the group has, in the group's order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, ranks: range):
        self.group, self.device = group, device
        self.place = {rank: i for i, rank in enumerate(ranks)}

    def post(self, sends: Flat, receives: Flat) -> list[Any]:
        group, place = self.group, self.place
        ops = [dist.P2POp(dist.irecv, _bytes(t), group=group, group_peer=place[r]) for r, t in receives.items()]
        ops += [dist.P2POp(dist.isend, _bytes(t), group=group, group_peer=place[r]) for r, t in sends.items()]
        return dist.batch_isend_irecv(ops) if ops else []

    def close(self) -> None:
        """Make the kernels that wait for a message give up; the group cannot be used afterwards."""
        try:
            self.group._get_backend(self.device).abort()
        except RuntimeError:
            pass


def axis_wires(mesh: DeviceMesh, rank: int, device: torch.device) -> dict[int, NcclWire]:
    """A wire for each axis of a mesh of two.  rank: in the mesh, counted row by row.

    A communicator handles its messages one after the other. With one for each axis, messages across nodes do not
    hold up those inside a node.
    """
    nodes, places = mesh.shape
    node, place = divmod(rank, places)
    along = range(place, nodes * places, places), range(node * places, (node + 1) * places)
    return {axis: NcclWire(mesh.get_group(axis), device, ranks) for axis, ranks in enumerate(along)}


def _bytes(message: Tensor) -> Tensor:
    return message.view(torch.uint8)  # any dtype travels, bit by bit


class Buffers:
    """Receive buffers that are reused once nothing else holds them.

    A buffer is free when only this pool refers to it: its storage's use count is back to what it was when new. So a
    tensor that a program kept, or autograd saved, is never overwritten. A size that has not been asked for in
    ``keep`` runs is released.
    """

    def __init__(self, keep: int = 8):
        self.keep, self.run = keep, 0
        self._pool: dict[tuple, list[Any]] = {}  # key -> [last used in run, [(buffer, its use count when new), ...]]

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _new(numel, dtype, device)  # belongs to the graph
        key = numel, dtype, device
        known = self._pool.get(key)
        if known is None:
            known = self._pool[key] = [self.run, []]
        known[0] = self.run
        for flat, uses in known[1]:
            if _uses(flat) == uses:
                return flat.detach()
        flat = _new(numel, dtype, device)
        known[1].append((flat, _uses(flat)))
        return flat.detach()

    def end_run(self) -> None:
        self.run += 1
        for key in [key for key, (last, _) in self._pool.items() if self.run - last > self.keep]:
            del self._pool[key]

    def clear(self) -> None:
        self._pool.clear()


def _new(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be used outside later
        return torch.empty(numel, dtype=dtype, device=device)


def _uses(flat: Tensor) -> int:
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)

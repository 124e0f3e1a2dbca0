"""A world whose ranks are processes: this process owns one of them, and torch.distributed carries the messages.

The rank programs are the same as in a simulated world. Here ``await`` waits for the message and never suspends, so one
``send(None)`` drives a program from its first line to its return.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ... import fingerprint
from ...layouts import Layout, count
from ..comm import Comm, Post, Received, Shape, no_grad, packed, start, unpack
from ..trace import Trace
from ..world import PerRank, World, arguments
from . import agreement, symmetric
from .background import plain
from .faults import Faults, WorldError, is_connection_error
from .join import choose_interface, device_of, group_of, joined, stores
from .labels import capacity, labelled, unlabelled
from .mailboxes import Mailboxes, can_raise_flags
from .recorder import Recorder
from .symmetric import SymmetricWire, unavailable
from .wires import Buffers, GlooWire, NcclWire, axis_wires

SETUP = 10.0  # seconds more than its timeout that a world may take to be made: connections need name look-ups
AGREEMENT = 1  # the tag on the gloo group; messages have 0


@dataclass(eq=False)
class _Ticket:
    """Messages on their way. It keeps the buffers in flight alive."""

    name: str
    hop: int
    axis: int | None
    works: list[Any]
    sent: dict[int, Tensor]  # flat messages that must not be freed yet
    buffers: dict[int, Tensor]
    shapes: dict[int, tuple[Shape, ...]]
    dtype: torch.dtype
    posted: Any = None  # what follows is for a trace
    nbytes: dict[int, int] = field(default_factory=dict)  # rank -> what is sent to it
    origin: int = 0
    made: bool = False


class DistributedComm(Comm):
    """A rank's view of a distributed world."""

    def __init__(self, world: DistributedWorld):
        self.world, self.rank, self.size, self.device = world, world.rank, world.size, world.device
        self.shape, self.keeps_trace = world.shape, bool(world._recorder)
        self._tickets: list[_Ticket] = []

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"

    def _post(self, post: Post) -> _Ticket:
        world = self.world
        sends, receives, dtype = post.sends, post.receives, post.dtype
        world._faults.check()
        name, kind = self._numbered(post), world.device.type
        for tensors in sends.values():
            for t in tensors:
                if t.device.type != kind:
                    raise ValueError(f"{name}: expected tensors on {world.device}, as this world's are, got {t.device}")
        with no_grad():
            works, sent, buffers = self._start(name, post)
        ticket = _Ticket(name, post.hop, post.axis, works, sent, buffers, receives, dtype)
        if world._recorder:
            ticket.posted = world._recorder.mark()
            ticket.nbytes = {to: dtype.itemsize * sum(t.numel() for t in tensors) for to, tensors in sends.items()}
            given = post.given or tuple(t for tensors in sends.values() for t in tensors)
            ticket.origin = world._recorder.origins.of(given[0], self.rank) if given else self.rank
            ticket.made = world._recorder.origins.made(given)
        self._tickets.append(ticket)
        return ticket

    def _start(self, name: str, post: Post) -> tuple[list[Any], dict[int, Tensor], dict[int, Tensor]]:
        """Start an operation: the works to wait for, the messages to keep until then, and what arrives in them."""
        world, take, dtype = self.world, self.world._buffers.take, post.dtype
        outgoing, works = dict(post.sends), []
        if world._labels:
            outgoing = packed(outgoing, lambda tensors: labelled(name, tensors, dtype))
            sizes = {r: (capacity(shapes, dtype), torch.uint8) for r, shapes in post.receives.items()}
        else:
            sizes = {r: (sum(map(prod, shapes)), dtype) for r, shapes in post.receives.items()}
        buffers = {r: take(*size, world.device) for r, size in sizes.items()}
        by_wire = dict(buffers)
        if world._symmetric and abs(post.hop) == 1 and post.axis is None:
            works = world._post_symmetric(outgoing, by_wire, back=post.hop < 0)
        if outgoing or by_wire:
            outgoing = outgoing if world._labels else packed(outgoing)
            works += world._post(name, world._axes.get(post.axis, world._wire).post, outgoing, by_wire)
        return works, outgoing, buffers

    def _wait(self, ticket: _Ticket) -> Generator[Any, None, Received]:
        world, recorder = self.world, self.world._recorder
        before = recorder.mark() if recorder else None
        world._wait(ticket.works, ticket.name)
        received = {}
        for source, shapes in ticket.shapes.items():
            buffer = ticket.buffers[source]
            if world._labels:
                buffer = unlabelled(buffer, ticket.name, shapes, ticket.dtype, self.rank, source)
            received[source] = unpack(buffer, shapes)
        self._tickets.remove(ticket)
        if recorder:
            self._note(ticket, before)
        return received
        yield  # never reached: makes this a generator that does not suspend

    def _note(self, ticket: _Ticket, before: Any) -> None:
        recorder, itemsize = self.world._recorder, ticket.dtype.itemsize
        for to, nbytes in ticket.nbytes.items():
            details = {"nbytes": nbytes, "origin": ticket.origin, "made": ticket.made}
            recorder.note(ticket.posted, "send", ticket.name, self.step, peer=to, **details)
        for source, shapes in ticket.shapes.items():
            # Whoever the neighbour's message comes from is as far from it as the origin of this rank's is from here.
            origin = self._next_to(ticket.origin, source, ticket.axis) if ticket.hop else source
            # All ranks run one program: what was made here was made there.
            recorder.origins.arrived(ticket.buffers[source], origin, ticket.made)
            details = {"nbytes": itemsize * sum(map(prod, shapes)), "origin": origin, "made": ticket.made}
            recorder.note(ticket.posted, "recv", ticket.name, self.step, peer=source, **details)
        recorder.note(before, "wait", ticket.name, self.step)

    def _next_to(self, origin: int, source: int, axis: int | None) -> int:
        """The rank that is as far from ``source`` as ``origin`` is from this one; along each axis in a part's ring."""
        shape = (self.size,) if axis is None else self.shape
        far = [
            (o + s - r) % n
            for o, s, r, n in zip(*(_coordinates(x, shape) for x in (origin, source, self.rank)), shape, strict=True)
        ]
        return far[0] if len(far) == 1 else far[0] * shape[1] + far[1]

    def _derived(self, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
        if self.world._recorder:
            self.world._recorder.origins.derived(new, old, self.rank)

    def compute(self, name: str, flops: float = 0.0, **details: Any) -> None:
        if self.world._recorder:
            self.world._recorder.note(self.world._recorder.mark(), "compute", name, self.step, flops=flops, **details)

    def traced(self, kernel: Any, origin: int | None = None) -> Any:
        """The kernel itself, or one whose calls are shown in the trace if the world keeps one."""
        recorder = self.world._recorder
        return recorder.traced(kernel, lambda: self.step, origin) if recorder else kernel


def _coordinates(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (rank,) if len(shape) == 1 else divmod(rank, shape[1])


class DistributedWorld(World):
    """P ranks in P processes, of which this process owns one. All ranks of the group create it together.

    group: a torch.distributed process group, a DeviceMesh, or None for all ranks. A mesh of two axes makes a world of
    shape (nodes, ranks per node), which hybrid attention needs; with NCCL, messages of ``comm.along`` use the mesh's
    group for that axis, so that messages along one axis do not hold up those along the other. If torch.distributed has
    not been initialised but torchrun's environment variables are set, it is initialised here, with NCCL if each process
    has a GPU, otherwise with gloo.
    timeout: seconds after which a missing message is an error on every rank; 10 more while the world is created.
    check: compare every call's arguments over the ranks before it moves data (about half a millisecond). Without this
    check, a mismatch leads to a hang or to garbage.
    debug: with NCCL, wait for each message on the host, so that a failure is a Python exception at the exact step.
    trace: keep ``world.trace``, the events of the last run.
    transport: how messages of a ring travel between GPUs. "nccl"; "symmetric": written into the neighbour's memory
    by the copy engine, on GPUs of one host that can reach each other's memory; "auto": "symmetric" where possible.
    ``world.transport`` says which one is used, and why.
    device: where shards are put; by default the current CUDA device with NCCL, and "cpu" with gloo.

    rank: the rank that this process owns; ranks: (rank,).
    Raises RuntimeError if there is no group to join, ValueError if two ranks share a GPU or disagree, and WorldError if
    the other ranks do not arrive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout: float = 60.0,
        check: bool = True,
        debug: bool = False,
        trace: bool = False,
        transport: str = "auto",
        device: torch.device | str | None = None,
    ):
        if not fingerprint.is_timeout(timeout):
            raise ValueError(f"DistributedWorld: expected timeout > 0 seconds (and below 1e9), got {timeout!r}")
        if transport not in ("auto", "nccl", "symmetric"):
            raise ValueError(f'DistributedWorld: expected transport "auto", "nccl" or "symmetric", got {transport!r}')
        mesh = group if isinstance(group, DeviceMesh) else None
        self.group = group_of(mesh) if mesh else joined(group, timeout + SETUP)
        device = device or (mesh and mesh.device_type)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.shape = tuple(mesh.shape) if mesh else (self.size,)
        if self.rank < 0:
            raise ValueError(
                f"DistributedWorld: this process (rank {dist.get_rank()}) is not in the group of ranks "
                f"{dist.get_process_group_ranks(self.group)}; make the world only on the ranks of its group"
            )
        self.ranks, self.check, self.debug, self.timeout = (self.rank,), check, debug, timeout
        self.device = device_of(self.group, device)
        self._recorder = Recorder(self.rank, self.device) if trace else None
        self._buffers = Buffers()
        self._agreed = False
        cuda = self.device.type == "cuda"
        self._labels = check and not cuda  # each message says what it is
        self._goes_on = cuda and not debug  # the host does not wait for messages
        self._open: tuple[Any, ...] | None = None  # what ``conclude`` waits for

        store, root = stores(self.group, self.rank)
        self._faults = Faults(store, root, self.rank, self.size, timeout + SETUP, self.device if cuda else None)
        self._faults.members = dist.get_process_group_ranks(self.group)
        choose_interface()
        self._close = weakref.finalize(self, self._faults.close)
        try:
            self._side = GlooWire(dist.PrefixStore("gloo", store), self.rank, self.size, timeout + SETUP)
        except RuntimeError as error:
            raise WorldError(self._faults.why_incomplete(timeout + SETUP, error)) from None
        self._wire = NcclWire(self.group, self.device, range(self.size)) if cuda else self._side
        self._axes = axis_wires(mesh, self.rank, self.device) if cuda and len(self.shape) == 2 else {}
        self._symmetric: SymmetricWire | None = None
        self._mailboxes: Mailboxes | None = None
        self._introduce(transport)
        self._faults.timeout = timeout

    def __repr__(self) -> str:
        return f"DistributedWorld(rank {self.rank} of {self.size}, {self.device})"

    @property
    def trace(self) -> Trace:
        """What this rank did in the last run. Raises ValueError if the world was made without ``trace=True``."""
        if self._recorder is None:
            raise ValueError("world.trace: this world keeps no trace; make it with DistributedWorld(trace=True)")
        return self._recorder.trace()

    def reserve(self, nbytes: int) -> None:
        """Prepare for ring messages of up to ``nbytes`` bytes. All ranks call this together, with the same number."""
        if self._symmetric:
            self._symmetric.reserve(nbytes)

    def mailboxes(self, numbers: int) -> Mailboxes | None:
        """Memory that kernels of all ranks can write to, with boxes for this many float32 numbers.

        All ranks call it together, with the same number. None if the GPUs are not connected by NVLink within one host,
        or if the world keeps a trace, which shows messages.
        """
        if self._mailboxes and not self._recorder:
            self._mailboxes.reserve(numbers)
            return self._mailboxes
        return None

    @property
    def reserved(self) -> int:
        """The bytes of symmetric memory that this world holds; none of torch's allocators counts them."""
        return sum(held.nbytes for held in (self._symmetric, self._mailboxes) if held)

    def _choose_transport(self, transport: str, reasons: list[str], mailboxes: bool) -> None:
        """The same on every rank: all have heard all reasons against symmetric memory.

        mailboxes: whether kernels can raise flags there.
        """
        if transport == "symmetric" and reasons:
            raise ValueError(f'DistributedWorld: transport="symmetric" cannot be used: {reasons[0]}; omit transport=')
        if self.device.type == "cpu":
            self.transport = "gloo"
        elif transport == "nccl" or reasons:
            self.transport = "nccl" if transport == "nccl" else f"nccl ({reasons[0]})"
        else:
            self.transport = "symmetric"
            where = self.group or dist.group.WORLD, self.rank, self.size, self.device
            self._symmetric = SymmetricWire(*where)
            if mailboxes:
                self._mailboxes = Mailboxes(*where, partial(self._faults.follow, "merge over ranks", [None]))

    def _introduce(self, transport: str) -> None:
        """The first exchange: whether all ranks are here, with the same arguments, and each with a GPU of its own."""
        same = {name: str(getattr(self, name)) for name in ("check", "debug", "timeout")}
        same |= {
            "world size": str(self.size),
            "shape": str(self.shape),
            "device": self.device.type,
            "transport": transport,
        }
        host = socket.gethostname()
        own = {"host": host, "gpu": None, "no copy": unavailable(self.device, self.size)}
        own["mailboxes"] = can_raise_flags(self.device)
        if self.device.type == "cuda":
            own["gpu"] = str(torch.cuda.get_device_properties(self.device).uuid)
        known = self._exchange("DistributedWorld", same, own, None)
        for other in known:
            twins = [r for r, o in enumerate(known) if (o["host"], o["gpu"]) == (other["host"], other["gpu"])]
            if other["gpu"] and len(twins) > 1:
                raise ValueError(
                    f"DistributedWorld: expected a GPU for each rank, got ranks {twins} on one GPU of {other['host']}. "
                    f"Call torch.cuda.set_device(local rank) first, or pass device=; with fewer GPUs than ranks, gloo"
                )
        self._faults.hosts = [other["host"] for other in known]
        hosts = set(self._faults.hosts)
        reasons = [f"rank {r}: {other['no copy']}" for r, other in enumerate(known) if other["no copy"]]
        if self.debug:
            reasons.insert(0, "debug=True, which waits for each message on the host")
        if len(hosts) > 1:
            reasons.insert(0, f"the ranks are on {len(hosts)} hosts")
        self._choose_transport(transport, reasons, all(other["mailboxes"] for other in known))
        if self.device.type == "cuda":  # the first messages of an NCCL group need all of its ranks
            self._move(_hello)

    # Running programs

    def run(self, program: Callable[..., Any], *args: Any) -> PerRank:
        """Run a rank program on the rank that this process owns; return a list of its one result.

        The trace starts afresh in each run.  Raises WorldError if another rank fails, stalls or never arrives, and
        whatever the program raises; the other ranks then raise a WorldError that names this rank.
        """
        if not self._agreed:  # a call of the library has compared its arguments already
            self.agree(f"run of {getattr(program, '__name__', program)}", {})
        if self._recorder:
            self._recorder.begin(arguments(args, 0, 1))
        return PerRank([self._run(program, args)])

    def _run(self, program: Callable[..., Any], args: Sequence[Any]) -> Any:
        self._agreed = False
        comm = DistributedComm(self)
        coroutine = start(program, comm, arguments(args, 0, 1))
        try:
            coroutine.send(None)
            raise RuntimeError(
                f"rank {self.rank} awaited something that is not a message of its comm; a rank program awaits only "
                f"what comm.rotate, comm.all_gather and so on return"
            )
        except StopIteration as stop:
            result = stop.value
        except BaseException as error:
            self._break(error)
            raise
        finally:
            coroutine.close()
        if comm._tickets:
            error = RuntimeError(
                f"rank {self.rank} posted {comm._tickets[0].name} and never awaited it: its data never arrived, and "
                f"its buffers would stay in flight. Await every handle, or do not post the last message."
            )
            self._break(error)
            raise error
        if self._symmetric:
            self._symmetric.join()
        self._buffers.end_run()
        self._faults.end()
        return result

    def _move(self, program: Callable[..., Any], *args: Any) -> Any:
        """Leave the library's own messages around a call, such as gathering its result, out of the trace."""
        recorder, self._recorder = self._recorder, None
        try:
            return self._run(program, args)
        finally:
            self._recorder = recorder

    def _break(self, error: BaseException) -> None:
        """After a failure with messages on their way: tell the other ranks and release everything."""
        if not isinstance(error, WorldError):
            self._faults.fail(error)
        self._open = None
        for wire in (*self._axes.values(), self._wire, self._side):
            wire.close()
        for held in (self._mailboxes, self._symmetric):
            if held:
                held.release()
        self._buffers.clear()

    def _post(self, step: str, post: Callable[..., list[Any]], *messages: Any) -> list[Any]:
        try:
            return post(*messages)
        except RuntimeError as error:  # the connection to a peer has gone already
            self._faults.at(step, "running")
            self._faults.fail_waiting(plain(error))
            raise

    def _post_symmetric(
        self, sends: dict[int, Sequence[Tensor]], buffers: dict[int, Tensor], back: bool
    ) -> list[symmetric.Copied]:
        """Send through symmetric memory what of a rotate fits there, and remove it from what is left to post."""
        wire, works = self._symmetric, []
        for to, tensors in list(sends.items()):
            if wire.fits(sum([t.nbytes for t in tensors])):
                works.append(wire.send(sends.pop(to), back))
        for source, buffer in list(buffers.items()):
            if wire.fits(buffer.nbytes):
                works.append(wire.receive(buffers.pop(source), back, together=bool(works)))
        return works

    def _wait(self, works: Sequence[Any], step: str) -> None:
        if self.device.type == "cpu":
            if works:
                self._faults.wait(works, step)
            return
        if self.debug:
            self._faults.poll(works, step)
        for work in works:
            work.wait()
        if works:
            self._faults.at(step, "running")
            self._faults.follow(step, works)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which losing a rank is an error even while this rank waits in collectives outside the world.

        Use it around a training loop with DDP, FSDP2, ``rl.nn.backward`` or checkpoints, whose collectives would wait
        for half an hour; all ranks enter it together. If a rank has shown no sign of life for the world's timeout,
        because it was killed or cut off, all others end: with a WorldError that names it or, where a rank is stuck in a
        collective that cannot be interrupted, 3 seconds later with the same text on stderr and the end of the process.
        """
        faults = self._faults
        faults.begin("the watched part of the program")
        faults.enter()
        try:
            yield
        except WorldError as error:
            if faults.cause is None:  # it is of another world, whose ranks are some of this one's
                faults.fail_waiting(str(error).splitlines()[0])
            raise
        except Exception as error:
            if is_connection_error(error):
                faults.fail_waiting(plain(error))
            faults.fail(error)  # the others need not wait for it
            raise
        finally:
            faults.leave()

    # Agreement

    def agree(
        self,
        op: str,
        same: Mapping[str, str],
        own: Mapping[str, Any] | None = None,
        problem: Exception | None = None,
        later: bool = False,
    ) -> list[dict[str, Any]]:
        self._agreed = False
        if self.check and later and self._goes_on:
            self._open, known = self._tell(op, same, own, problem), [dict(own or {})]
        elif self.check:
            known = self._exchange(op, same, own, problem)
        elif problem is not None:
            raise problem
        else:
            self._begin(op)
            known = [dict(own or {})]
        self._agreed = True
        return known

    def _begin(self, op: str) -> None:
        try:
            self._faults.begin(op)
        except WorldError as error:
            self._break(error)
            raise

    def conclude(self) -> None:
        told, self._open = self._open, None
        if told is not None:
            try:
                self._hear(*told)
            except ValueError as error:  # the call's messages are on their way to ranks that do not expect them
                self._break(error)
                raise

    def _exchange(self, op: str, same: Mapping[str, str], own: Any, problem: Exception | None) -> list[dict[str, Any]]:
        known = self._hear(*self._tell(op, same, own, problem))
        self._faults.at("", "running")
        return known

    def _tell(self, op: str, same: Mapping[str, str], own: Any, problem: Exception | None) -> tuple[Any, ...]:
        """Post what this rank says; gives what ``_hear`` takes."""
        if not dist.is_initialized():
            raise RuntimeError(f"{op}: torch.distributed has been shut down; a world ends with its process group")
        self._begin(op)
        try:
            mine = agreement.encode(op, same, own or {}, problem)
        except ValueError as error:  # "own" is too long
            problem = error
            mine = agreement.encode(op, {}, {}, problem)
        messages = {r: torch.empty_like(mine) for r in range(self.size) if r != self.rank}
        try:
            works = self._post("agreement", self._side.post, {r: mine for r in messages}, messages, AGREEMENT)
        except BaseException as error:
            self._break(error)
            raise
        return messages | {self.rank: mine}, self._faults.start_waiting(works) if works else None, problem

    def _hear(self, messages: Mapping[int, Tensor], arrived: Any, problem: Exception | None) -> list[dict[str, Any]]:
        """Wait for what the others say, and compare it."""
        try:
            if arrived:
                self._faults.wait_for(arrived, "agreement")
        except BaseException as error:
            self._break(error)
            raise
        records = [agreement.decode(messages[r]) for r in range(self.size)]
        self._faults.end()
        agreement.compare(records, self.rank, problem)
        return [dict(record["own"]) for record in records]

    # What World asks for

    def replicate(self, tensors: Sequence[Tensor], src: int | None) -> list[Tensor]:
        full = super().replicate(tensors, src)
        if src is not None:
            return self._move(_broadcast, full, src)
        if self.check:
            self.agree("shard", {f"values of tensor {i}": fingerprint.checksum(t) for i, t in enumerate(full)})
        self._agreed = False
        return full

    def assemble(self, parts: Sequence[Tensor], layout: Layout, length: int, dim: int) -> Tensor:
        lengths = [count(ranges) for ranges in layout.ranges(length, self.size)]
        part = parts[0].to(self.device).unsqueeze(-1).movedim(dim - 1, -2).contiguous()
        gathered = self._move(_gather, part, lengths)
        return super().assemble([x.movedim(-2, dim - 1).squeeze(-1) for x in gathered], layout, length, dim)


# Rank programs


async def _hello(comm: Comm) -> None:
    for part in (comm, *(comm.along(axis) for axis in range(len(comm.shape)) if len(comm.shape) > 1)):
        await part.rotate(torch.zeros(1, device=comm.device))


async def _broadcast(comm: Comm, tensors: Sequence[Tensor], src: int) -> list[Tensor]:
    return [await comm.broadcast(t.contiguous(), src) for t in tensors]


async def _gather(comm: Comm, part: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return await comm.all_gather(part, lengths)

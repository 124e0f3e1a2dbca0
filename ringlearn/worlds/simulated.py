"""A world of P ranks in one process: each rank program is a coroutine, and a small scheduler runs them in turn.

It is deterministic, easy to debug (a rank's traceback is an ordinary traceback) and strict: messages are copied into
receive buffers, as on real hardware, and a deadlock, a message that nobody receives, and a write to a buffer in flight
are errors.

Nothing runs in parallel. Each rank has a virtual clock, which the ``Hardware`` model advances, to say when things would
happen.
"""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import whole_number
from .comm import Comm, Post, Received, Shape, empty_packed, packed, start, unpack
from .memory import Memory
from .trace import Event, Hardware, Origins, Trace, TracedKernel
from .world import PerRank, World, arguments


class DeadlockError(RuntimeError):
    """Every rank is waiting for a message that nobody will send."""


class InFlightError(RuntimeError):
    """A buffer was written while it was being sent."""


@dataclass(eq=False)
class _Message:
    """One message from ``source`` to ``to``: the n-th send of the one, matched with the n-th receive of the other."""

    source: int
    to: int
    number: int
    name: str = ""
    sent: tuple[Shape, ...] | None = None  # the shapes of what the sender gave
    sent_dtype: torch.dtype | None = None
    payload: Any = None  # the same as one flat message, or what the sender gave, if that is passed by reference
    writes: tuple[_Writes, ...] = ()
    sent_at: float = 0.0
    arrives_at: float = 0.0
    shapes: tuple[Shape, ...] | None = None  # what the receiver expects
    dtype: torch.dtype | None = None
    buffer: Tensor | None = None
    received_name: str = ""
    delivered: bool = False
    result: tuple[Tensor, ...] | None = None  # until the receiver has taken it
    origin: int = 0
    made: bool = False
    nbytes: int = 0

    @property
    def posted(self) -> bool:
        """Whether both sides have posted it, so that it can be delivered."""
        return self.sent is not None and self.shapes is not None


class _Writes:
    """Tells whether a tensor has been written to since this was made, without keeping the tensor's memory alive.

    Writing to the tensor, or to a view of it, raises its version counter, which an empty tensor can share. Inference
    tensors have no version counter: there the tensor is kept, and its checksum is compared.
    """

    def __init__(self, t: Tensor):
        if t.is_inference():
            self._counter, self._before = t, self._checksum(t)
        else:
            self._counter = t.detach()
            self._counter.data = _empty(t.dtype, t.device)
            self._before = t._version

    def __bool__(self) -> bool:
        t = self._counter
        return (self._checksum(t) if t.is_inference() else t._version) != self._before

    @staticmethod
    def _checksum(t: Tensor) -> float | None:
        return None if t.device.type == "meta" else t.double().nan_to_num().sum().item()


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


@dataclass(eq=False)
class _Ticket:
    """The messages that a rank waits for in one ``await``."""

    rank: int
    name: str
    posted_at: float
    sends: list[_Message] = field(default_factory=list)
    receives: list[_Message] = field(default_factory=list)

    def ready(self) -> bool:
        return all(m.posted for m in (*self.sends, *self.receives))

    def missing(self) -> str:
        """A line of the deadlock error: which posts of other ranks this one is waiting for."""
        waits = [f"rank {m.to} to receive" for m in self.sends if m.shapes is None]
        waits += [f"rank {m.source} to send" for m in self.receives if m.sent is None]
        return f"rank {self.rank} waits in {self.name} for {' and for '.join(waits)}"

    def __repr__(self) -> str:  # what asyncio shows when a rank program is awaited in a notebook cell
        return (
            f"<{self.name} of simulated rank {self.rank}: a rank program does not run under asyncio. "
            f"Run it with world.run(program, ...) instead of a top-level await>"
        )


class SimulatedComm(Comm):
    """A rank's view of a simulated world."""

    def __init__(self, world: SimulatedWorld, rank: int):
        self.world, self.rank, self.size, self.device = world, rank, world.size, world.device
        self.shape = world.shape
        self.clock = 0.0  # seconds of virtual time
        self._link_free = 0.0  # when the outgoing link has sent everything posted so far
        self._tickets: list[_Ticket] = []

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}, simulated>"

    # Messages

    def _post(self, post: Post) -> _Ticket:
        name, memory, copies = self._numbered(post), self.world.memory, self.world.wire == "copy"
        ticket = _Ticket(self.rank, name, self.clock)
        with memory.paused():
            payloads: dict[int, Any] = packed(post.sends) if copies else post.sends
            for to, tensors in post.sends.items():
                message = self.world._next_message(self.rank, to, sending=True)
                if copies:
                    memory.charge(self.rank, "in flight", payloads[to], tensors)
                    message.writes = tuple(map(_Writes, tensors))
                self._send(message, name, tensors, payloads[to])
                ticket.sends.append(message)
            for source, shapes in post.receives.items():
                message = self.world._next_message(source, self.rank, sending=False)
                message.shapes, message.received_name, message.dtype = shapes, name, post.dtype
                if copies:
                    message.buffer = torch.empty(sum(map(prod, shapes)), dtype=post.dtype, device=post.device)
                    memory.charge(self.rank, "in flight", message.buffer)
                ticket.receives.append(message)
        self._tickets.append(ticket)
        return ticket

    def _send(self, message: _Message, name: str, tensors: tuple[Tensor, ...], payload: Any) -> None:
        message.name, message.payload = name, payload
        message.sent = tuple(tuple(t.shape) for t in tensors)
        message.sent_dtype = tensors[0].dtype if tensors else None
        nbytes = message.nbytes = sum(t.nbytes for t in tensors)
        message.origin = self.world._origins.of(tensors[0], self.rank) if tensors else self.rank
        message.made = self.world._origins.made(tensors)
        hardware = self.world.hardware
        message.sent_at = max(self.clock, self._link_free)
        self._link_free = message.sent_at + nbytes / hardware.bandwidth
        message.arrives_at = self._link_free + hardware.latency
        self.world.trace.events.append(
            Event(self.rank, "send", name, message.sent_at, self._link_free, self.step, nbytes, peer=message.to,
                  origin=message.origin, made=message.made)
        )  # fmt: skip

    def _wait(self, ticket: _Ticket) -> Generator[_Ticket, None, Received]:
        while not ticket.ready():
            yield ticket
        received = {}
        with self.world.memory.paused():
            for message in ticket.receives:
                self.world._deliver(message)
                # From here on the buffer is the program's: nothing else keeps it alive.
                received[message.source], message.result, message.buffer = message.result, None, None
            for message in ticket.sends:
                # A sender whose await returns may write again, so the message has left by then.
                self.world._deliver(message)
                self.world._check_untouched(message)
                message.payload, message.writes = None, ()
        self._arrive(ticket)
        self._tickets.remove(ticket)
        return received

    def _arrive(self, ticket: _Ticket) -> None:
        """Advance the clock to the arrival of the ticket's last message, and record the wait."""
        events = self.world.trace.events
        for m in ticket.receives:
            arrival = max(m.arrives_at, ticket.posted_at)
            events.append(
                Event(self.rank, "recv", ticket.name, min(m.sent_at, arrival), arrival, self.step, m.nbytes,
                      peer=m.source, origin=m.origin, made=m.made)
            )  # fmt: skip
        ends = [max(m.arrives_at, ticket.posted_at) for m in ticket.receives]
        ends += [m.arrives_at - self.world.hardware.latency for m in ticket.sends]
        end = max([self.clock, *ends])
        events.append(Event(self.rank, "wait", ticket.name, self.clock, end, self.step))
        self.clock = end

    # Computation

    def buffers(
        self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str, component: str
    ) -> tuple[Tensor, ...]:
        with self.world.memory.component(component):
            return empty_packed(shapes, dtype, device)

    def _derived(self, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
        self.world._origins.derived(new, old, self.rank)

    def compute(self, name: str, flops: float = 0.0, **details: Any) -> None:
        begin, self.clock = self.clock, self.clock + flops / self.world.hardware.flops
        self.world.trace.events.append(
            Event(self.rank, "compute", name, begin, self.clock, self.step, flops=flops, **details)
        )

    def traced(self, kernel: Any, origin: int | None = None) -> TracedKernel:
        """The kernel, wrapped so that its calls advance the clock and appear in the trace and the memory table."""
        memory = self.world.memory

        def record(name, flops, tile, k, run, scratch):
            beside = scratch() if memory.enabled else None
            if beside is not None:  # what it makes is known without looking on
                with memory.paused():
                    result = run()
                    more = torch.empty(beside, dtype=torch.uint8)
                for t in (*result, more):
                    memory.charge(self.rank, "scores", t)
            else:
                with memory.component("scores"):
                    result = run()
            memory.keep(result)
            whose = self.world._origins.of(k, self.rank) if origin is None else origin
            self.compute(name, flops, tile=tile, origin=whose)
            return result

        return TracedKernel(kernel, record)


class SimulatedWorld(World):
    """P simulated ranks in this process.

    size: the number of ranks, or (nodes, ranks per node) for a world with two axes.
    hardware: the model behind the virtual clock.  device: where shards are put.
    wire: "copy" delivers messages into receive buffers, as hardware does. "reference" passes on the tensors
    themselves, so that plain autograd can run through a rank program: an oracle for hand-written backwards.
    count_memory: whether to count every new tensor for the rank that made it (``world.memory``).

    Raises ValueError if size is neither an int >= 1 nor two of them.

    >>> async def pass_on(comm, x):
    ...     return await comm.rotate(x)
    >>> world = SimulatedWorld(3)
    >>> world.run(pass_on, PerRank(torch.tensor([r]) for r in range(3)))
    [tensor([2]), tensor([0]), tensor([1])]
    >>> world.trace.messages(rank=0), world.trace.bytes_sent(rank=0)
    (1, 8)
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        hardware: Hardware | None = None,
        device: torch.device | str = "cpu",
        wire: str = "copy",
        count_memory: bool = True,
    ):
        shape = size if isinstance(size, tuple) and len(size) == 2 else (size,)
        shape = tuple(map(whole_number, shape))
        if any(n is None or n < 1 for n in shape):
            raise ValueError(
                f"SimulatedWorld: expected a number of ranks, an int >= 1, got {size!r}; two of them, (nodes, ranks of "
                f"a node), make a world with two axes"
            )
        if wire not in ("copy", "reference"):
            raise ValueError(f'SimulatedWorld: expected wire="copy" or wire="reference", got {wire!r}')
        self.shape, self.size = shape, prod(shape)
        self.ranks, self.device = tuple(range(self.size)), _present(device)
        self.hardware, self.wire = hardware or Hardware(), wire
        self.trace = Trace(simulated=True)
        self.memory = Memory(self.size, enabled=count_memory)
        self.running: int | None = None  # the rank whose code runs now
        self._running = False
        self._comms: list[SimulatedComm] = []
        self._channels: dict[tuple[int, int, bool], int] = {}
        self._messages: dict[tuple[int, int], dict[int, _Message]] = {}
        self._origins = Origins()

    def __repr__(self) -> str:
        return f"SimulatedWorld({self.size if len(self.shape) == 1 else self.shape})"

    # Running programs

    def run(self, program: Callable[..., Any], *args: Any) -> PerRank:
        """Run a rank program on all ranks, in turn, and return what each rank returned.

        The trace and the virtual clocks start afresh in each run; the memory table keeps the peak of all runs until
        ``world.memory.clear()``.  Raises DeadlockError if no rank can continue, InFlightError if a buffer was written
        while it was being sent, and whatever a rank program raises, with a note that names the rank.
        """
        if self._running:
            raise RuntimeError(
                "SimulatedWorld.run: this world is in the middle of a program. Inside a rank program await another "
                "program, `await ring_forward(comm, ...)`, or use a second world; in threads, use one world for each"
            )
        self._running = True
        try:
            return self._run(program, args)
        finally:
            self._running = False

    def _run(self, program: Callable[..., Any], args: Sequence[Any]) -> PerRank:
        self.trace.clear()
        self._comms = [SimulatedComm(self, rank) for rank in range(self.size)]
        self._channels, self._messages = defaultdict(int), defaultdict(dict)
        own = [arguments(args, rank, self.size) for rank in range(self.size)]
        self._origins.begin(own)
        if self.memory.enabled:
            names = _parameters(program, len(args))
            for rank in range(self.size):
                self.memory.register(rank, names, own[rank])
        try:
            results = self._schedule(program, own)
        finally:
            self.memory.end_run()
        self._check_nothing_left()
        return PerRank(results)

    def _schedule(self, program: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        results: list[Any] = [None] * self.size
        running, coroutines = [_Running(self, rank) for rank in range(self.size)], {}
        for rank in range(self.size):
            with running[rank]:
                coroutines[rank] = start(program, self._comms[rank], args[rank])
        waiting: dict[int, _Ticket] = {}
        turn = deque(range(self.size))
        try:
            while turn:
                rank = turn.popleft()
                try:
                    with running[rank]:
                        waiting[rank] = coroutines[rank].send(None)
                except StopIteration as stop:
                    results[rank] = stop.value
                    waiting.pop(rank, None)
                else:
                    if not isinstance(waiting[rank], _Ticket):
                        raise RuntimeError(
                            f"rank {rank} awaited something that is not a message of its comm ({waiting[rank]!r}); a "
                            f"rank program awaits only what comm.rotate, comm.all_gather and so on return"
                        )
                    turn.append(rank)
                    if all(r in waiting and not waiting[r].ready() for r in turn):
                        raise DeadlockError(self._describe_deadlock(waiting))
        finally:
            for coroutine in coroutines.values():
                coroutine.close()
        return results

    def _describe_deadlock(self, waiting: Mapping[int, _Ticket]) -> str:
        lines = [waiting[rank].missing() for rank in sorted(waiting)]
        finished = [r for r in range(self.size) if r not in waiting]
        if finished:
            lines.append(f"ranks that have returned: {finished}")
        return (
            "deadlock: no rank can go on.\n  "
            + "\n  ".join(lines)
            + "\nEvery rank must post the same messages: a rank "
            "that has nothing to compute still passes on what it holds (skip the computation, never the message)."
        )

    def _check_nothing_left(self) -> None:
        for comm in self._comms:
            for ticket in comm._tickets:
                raise RuntimeError(
                    f"rank {ticket.rank} posted {ticket.name} and never awaited it: its data never arrived, and its "
                    f"buffers would stay in flight. Await every handle, or do not post the last message."
                )
        for channel in self._messages.values():
            for m in channel.values():
                if not m.posted:
                    raise RuntimeError(
                        f"{m.name or m.received_name}: rank {m.source} and rank {m.to} disagree on how many messages "
                        f"pass between them"
                    )

    # Messages

    def _next_message(self, source: int, to: int, sending: bool) -> _Message:
        """The message that the next post from source to ``to`` belongs to: the n-th send meets the n-th receive."""
        n = self._channels[source, to, sending]
        self._channels[source, to, sending] += 1
        return self._messages[source, to].setdefault(n, _Message(source, to, n))

    def _deliver(self, m: _Message) -> None:
        """Copy the message into the receive buffer, once."""
        if m.delivered:
            return
        m.delivered = True
        self._check_untouched(m)
        sent_dtype = m.sent_dtype or m.dtype
        if m.sent != tuple(map(tuple, m.shapes)) or sent_dtype != m.dtype:
            raise ValueError(
                f"{m.received_name}: rank {m.to} expects shapes {[tuple(s) for s in m.shapes]} of {m.dtype} from rank "
                f"{m.source}, which sent {list(m.sent)} of {sent_dtype} in {m.name}; shards may differ in length: say "
                f"what arrives with length=..."
            )
        if self.wire == "reference":
            m.result = m.payload
            self._origins.passed_on(m.result, m.origin)
        else:
            m.buffer.copy_(m.payload)
            m.result = unpack(m.buffer, m.shapes)
            if m.result:
                self._origins.arrived(m.buffer, m.origin, m.made)
        del self._messages[m.source, m.to][m.number]

    def _check_untouched(self, m: _Message) -> None:
        if any(m.writes):
            raise InFlightError(
                f"rank {m.source} wrote to a tensor that {m.name} was still sending to rank {m.to}: on real hardware "
                f"the receiver gets a mixture of old and new values. Write after the await, or into another buffer."
            )


class _Running:
    """While a rank's code runs, charges new memory to that rank and names the rank in its errors.

    It is entered and left around every step of a coroutine, so no context ever spans an ``await``.
    """

    def __init__(self, world: SimulatedWorld, rank: int):
        self.world, self.rank = world, rank
        self.counting = world.memory.counting(rank) if world.memory.enabled else nullcontext()

    def __enter__(self) -> None:
        self.counting.__enter__()
        self.world.running = self.rank

    def __exit__(self, kind, error, traceback) -> None:
        self.world.running = None
        self.counting.__exit__(kind, error, traceback)
        if error is not None and not isinstance(error, StopIteration):
            comm = self.world._comms[self.rank]
            error.add_note(f"on simulated rank {self.rank} of {self.world.size}, after rotate {comm.step}")


def _present(device: torch.device | str) -> torch.device:
    """The device. Raises ValueError if this machine has none of that name."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"SimulatedWorld: expected a device such as 'cpu' or 'cuda', got {device!r} ({error})"
        ) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"SimulatedWorld: expected a device that this machine has, got {device!r}; torch finds "
            f"{torch.cuda.device_count() or 'no'} GPUs here, and device='cpu' works everywhere"
        )
    return found


def _parameters(program: Callable[..., Any], n: int) -> list[str]:
    """The names of a program's first n parameters after comm, by which the memory table recognises q, k and v."""
    try:
        names = list(inspect.signature(program).parameters)[1 : n + 1]
    except (TypeError, ValueError):  # a callable without a signature
        names = []
    return names + [""] * (n - len(names))

"""What a rank program works with: its rank, the number of ranks, and messages that it posts now and awaits later.

A *rank program* is an ``async def`` function that one rank runs. It is the same text in both worlds:

    async def ring(comm, x):
        total = x
        for step in range(comm.size - 1):
            arriving = comm.rotate(x)      # posts the send to rank + 1 and the receive from rank - 1, returns at once
            ...                            # what stands here overlaps with the message
            x = await arriving             # "I need the data now"
            total = total + x
        return total

In a simulated world ``await`` lets the other ranks run until the message has arrived; in a distributed world it waits
for it. Nothing here uses asyncio or threads.

Everything is built on one primitive, a point-to-point exchange; even a sum over ranks is an exchange and a local sum
in rank order, so that both worlds do the same arithmetic in the same order and agree bit for bit.

Receives match sends in the order in which they were *posted* between two ranks, not in which they are awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..partial import accumulation_dtype

Shape = tuple[int, ...]
Received = dict[int, tuple[Tensor, ...]]

AXES = ("outer", "inner")  # what messages along axis 0, across nodes, and axis 1, inside a node, are called


@dataclass
class Post:
    """The messages of one operation: what a rank sends to some other ranks, and what it receives from some.

    name: of the operation, for traces and errors.  sends: rank -> tensors for it.  receives: rank -> the shapes that
    come from it.  dtype, device: of what arrives.
    hop: how many ranks further they go if they are a hop of a ring: 1 to the next rank, -1 to the one before; else 0.
    given: what this rank gave to a hop, also where it is empty and therefore not sent.
    axis: 0 if they stay between the same place of all nodes, 1 if they stay inside a node, None if neither is known.
    """

    name: str
    sends: dict[int, tuple[Tensor, ...]]
    receives: dict[int, tuple[Shape, ...]]
    dtype: torch.dtype
    device: torch.device
    hop: int = 0
    given: tuple[Tensor, ...] = ()
    axis: int | None = None


def no_grad() -> AbstractContextManager[None]:
    """``torch.no_grad()``, or nothing where no gradient is recorded anyway: to enter it takes time."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


class Handle:
    """A message that was posted and has not arrived yet. ``await handle`` gives the tensors that arrived, once.

    It keeps the buffers in flight alive: until it has been awaited, the tensors that were sent must not be overwritten.
    Afterwards it holds nothing, so what arrived lives only as long as the program refers to it.
    """

    def __init__(self, comm: Comm, name: str, ticket: Any, finish: Callable[[Received], Any]):
        self._comm, self._name, self._ticket, self._finish = comm, name, ticket, finish
        self._awaited = False

    def __await__(self) -> Generator[Any, None, Any]:
        if self._awaited:
            raise RuntimeError(f"{self!r} was awaited before; a message arrives once: keep what the first await gave")
        self._awaited = True
        received = yield from self._comm._wait(self._ticket)
        self._ticket, finish, self._finish = None, self._finish, None
        return finish(received)

    def __repr__(self) -> str:
        return f"<{self._name} of rank {self._comm.rank}, {'awaited' if self._awaited else 'not awaited yet'}>"

    def _forgotten(self, use: str) -> TypeError:
        return TypeError(
            f"{use} the handle of {self._name} on rank {self._comm.rank}, not the data that it will bring: a message "
            f"arrives only when it is awaited. Write `await`, as in `k, v = await comm.rotate(k, v)`"
        )

    def __iter__(self):
        raise self._forgotten("tried to unpack")

    def __getitem__(self, index):
        raise self._forgotten("tried to index")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._forgotten(f"tried to use .{name} of")


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Several tensors of one dtype as one flat message: a view if they are adjacent in memory, else a copy.

    >>> buffer = torch.arange(6.0)
    >>> pack([buffer[:4].view(2, 2), buffer[4:]]).data_ptr() == buffer.data_ptr()
    True
    """
    first = tensors[0]
    end = first.storage_offset()
    storage = first.untyped_storage()
    for t in tensors:
        adjacent = t.untyped_storage().data_ptr() == storage.data_ptr() and t.device == first.device
        if not (t.is_contiguous() and adjacent and t.storage_offset() == end):
            return _copied(tensors)
        end += t.numel()
    if first.device.type == "meta" and len(tensors) > 1:  # meta storages have no address to compare
        return _copied(tensors)
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def _copied(tensors: Sequence[Tensor]) -> Tensor:
    if all(t.is_contiguous() for t in tensors):
        return torch.cat([t.reshape(-1) for t in tensors])
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        part.view(t.shape).copy_(t)  # strided tensors are copied once, not made contiguous first
    return flat


def packed(sends: dict[int, tuple[Tensor, ...]], how: Callable[[Sequence[Tensor]], Tensor] = pack) -> dict[int, Tensor]:
    """A flat message for each rank; ranks that get the same tensors share one message."""
    made = {id(tensors): how(tensors) for tensors in {id(tensors): tensors for tensors in sends.values()}.values()}
    return {to: made[id(tensors)] for to, tensors in sends.items()}


def unpack(message: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """The tensors of a flat message, without a copy.

    They are not views of it: those would share one version counter, so a write to one would count as a write to all.
    """
    parts = message.split_with_sizes([prod(shape) for shape in shapes])  # split is a wrapper in Python around this
    return tuple([part.view(shape).data for part, shape in zip(parts, shapes, strict=True)])


def empty_packed(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """New tensors that are adjacent in memory, so that sending them together needs no copy.

    >>> dk, dv = empty_packed([(2, 3), (2, 4)], torch.float32, "cpu")
    >>> pack([dk, dv]).data_ptr() == dk.data_ptr()
    True
    """
    return unpack(torch.empty(sum(map(prod, shapes)), dtype=dtype, device=device), shapes)


def _with_length(shape: Shape, length: int | None) -> Shape:
    return tuple(shape) if length is None else (*shape[:-2], length, shape[-1])


class Comm:
    """A rank's view of its world. Subclasses provide ``_post`` and ``_wait``; the rest is the same code in every world.

    rank: 0..size-1.  size: the number of ranks P.  device: where received tensors are created if nothing is sent.
    shape: (P,), or (nodes, ranks per node) in a world with two axes, where rank = node * shape[1] + index in the node.
    """

    rank: int
    size: int
    device: torch.device
    shape: tuple[int, ...]
    step: int = 0  # hops of a ring that this rank has posted
    keeps_trace: bool = True  # whether anybody reads what ``compute`` is told

    # What a world provides -----------------------------------------------------------------------------------------

    def _post(self, post: Post) -> Any:
        """Start sending to and receiving from *other* ranks; return a ticket for ``_wait``."""
        raise NotImplementedError

    def _wait(self, ticket: Any) -> Generator[Any, None, Received]:
        """Wait until everything of the ticket has been sent and received; return what was received, by rank."""
        raise NotImplementedError

    def traced(self, kernel: Any, origin: int | None = None) -> Any:
        """The kernel, wrapped so that each call is recorded as a compute event of this rank.

        origin: the rank whose keys the kernel is given; None infers it from the tensors, which works unless they are
        copies.
        """
        raise NotImplementedError

    def compute(self, name: str, flops: float = 0.0) -> None:
        """Record that this rank computes ``flops`` now: the virtual clock of a simulated world advances, and the trace
        shows it. The library's kernels do this themselves."""

    def buffers(
        self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str, component: str
    ) -> tuple[Tensor, ...]:
        """New tensors for a program to fill, shown under ``component`` in the memory table of a simulated world.

        The tensors are adjacent in memory, so that sending them together needs no copy.
        """
        return empty_packed(shapes, dtype, device)

    def _numbered(self, post: Post) -> str:
        """The name of an operation in a trace; hops of a ring are counted, and their number is appended."""
        if not post.hop:
            return post.name
        self.step += 1
        return f"{post.name} {self.step}"

    # Some of the ranks ---------------------------------------------------------------------------------------------

    def only(self, ranks: Sequence[int], name: str = "part") -> Comm:
        """A comm for some of the ranks, including this one, numbered 0, 1, ... in the order given.

        It sends through this comm under another name, and all of its ranks must make the same calls.
        Raises ValueError for ranks that do not exist, if this rank is missing, and for the names that ``along`` uses.
        """
        if name in AXES:
            raise ValueError(f"only: the names {' and '.join(AXES)} are those of the axes, got {name!r}; see along")
        return Part(self, ranks, name)

    def along(self, axis: int) -> Comm:
        """The ranks that differ from this one in one axis of the shape: 0 across nodes, 1 inside a node.

        In a world of shape (2, 3), rank 4 is in node 1; for it along(0) has the ranks 1, 4, and along(1) the ranks 3,
        4, 5.
        """
        nodes, places = self.shape
        node, place = divmod(self.rank, places)
        if axis == 0:
            return Part(self, range(place, nodes * places, places), AXES[0], axis)
        return Part(self, range(node * places, (node + 1) * places), AXES[1], axis)

    # Messages ------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        sends: dict[int, tuple[Tensor, ...]],
        receives: dict[int, tuple[Shape, ...]],
        *,
        dtype: torch.dtype | None = None,
        name: str = "exchange",
        hop: int = 0,
        skip_empty: bool = False,
        finish: Callable[[Received], Any] = lambda received: received,
    ) -> Handle:
        """Post messages to and from any ranks: everything else is built on this.

        sends: rank -> the tensors for it (one message).  receives: rank -> the shapes that arrive from it.
        hop: by how many ranks the message moves on, if this is a hop of a ring.
        skip_empty: neither send nor await empty messages, which both sides recognise by their shapes.
        ``await`` gives rank -> tensors. Raises ValueError for ranks that do not exist or mixed dtypes in a message.
        """
        for peer in (*sends, *receives):
            if not 0 <= peer < self.size:
                raise ValueError(f"{name}: expected a rank in 0..{self.size - 1}, got {peer}")
        sent = [t for tensors in sends.values() for t in tensors]
        if dtype is None:
            if not sent:
                raise ValueError(
                    f"{name}: nothing is sent, so the dtype of what is received is not known; pass dtype=..."
                )
            dtype = sent[0].dtype
        for t in sent:
            if t.dtype != dtype:
                raise ValueError(f"{name}: all tensors of a message must have one dtype, got {dtype} and {t.dtype}")
        device = sent[0].device if sent else self.device
        own = {self.rank: sends[self.rank]} if self.rank in receives else {}
        if self.rank in receives and self.rank not in sends:
            raise ValueError(f"{name}: rank {self.rank} receives from itself but sends itself nothing")
        to, source = ({r: x for r, x in given.items() if r != self.rank} for given in (sends, receives))
        if skip_empty:
            own |= {
                r: tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
                for r, shapes in source.items()
                if not any(map(prod, shapes))
            }
            to = {r: tensors for r, tensors in to.items() if any(t.numel() for t in tensors)}
            source = {r: shapes for r, shapes in source.items() if r not in own}
        ticket = self._post(Post(name, to, source, dtype, device, hop, tuple(sent)))
        return Handle(self, name, ticket, lambda received: finish({**received, **own}))

    def rotate(
        self, *tensors: Tensor, length: int | None = None, back: bool = False, by: int = 1, skip_empty: bool = False
    ) -> Handle:
        """Send tensors to rank + 1 and receive the same from rank - 1, as one message.

        length: the size of dim -2 (the sequence) of what arrives, if it differs from what is sent: shards may differ
        by a few tokens.  back: the other way round, to rank - 1 from rank + 1.  by: to rank + by, from rank - by.
        skip_empty: skip messages without rows; all ranks must pass the same value.
        ``await`` gives one tensor, or a tuple of as many as were sent.
        """
        size = self.size
        hop = -by if back else by if by < size - 1 or by == 1 else by - size
        to, source = (self.rank + hop) % size, (self.rank - hop) % size
        if not tensors:
            raise ValueError("rotate: expected at least one tensor, got none")
        dtype = getattr(tensors[0], "dtype", None)
        for t in tensors:
            if not isinstance(t, Tensor):
                raise ValueError(f"rotate: expected tensors, got {type(t).__name__}; send a number as torch.tensor(x)")
        name = "rotate" if hop == 1 else "rotate back" if hop == -1 else f"rotate by {hop}"
        shapes = tuple([_with_length(t.shape, length) for t in tensors])
        single = len(tensors) == 1  # the handle must not keep what was sent alive

        def finish(received: Received) -> Any:
            return received[source][0] if single else received[source]

        if to == self.rank or skip_empty or any(t.dtype != dtype for t in tensors):
            return self.exchange(
                {to: tensors}, {source: shapes}, name=name, hop=hop, skip_empty=skip_empty, finish=finish
            )
        ticket = self._post(Post(name, {to: tensors}, {source: shapes}, dtype, tensors[0].device, hop, tensors))
        return Handle(self, name, ticket, finish)

    def select(self, rows: Sequence[slice], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Some rows (dim -2) of tensors, ready to send: adjacent copies, or the tensors themselves for all rows."""
        if tuple(rows) == (slice(None),):
            return tensors
        if not rows:
            return tuple(t[..., :0, :] for t in tensors)
        n = sum(r.stop - r.start for r in rows)
        shapes = [_with_length(t.shape, n) for t in tensors]
        chosen = self.buffers(shapes, tensors[0].dtype, tensors[0].device, "in flight")
        for new, t in zip(chosen, tensors, strict=True):
            start = 0
            for r in rows:
                new[..., start : start + r.stop - r.start, :].copy_(t[..., r, :])
                start += r.stop - r.start
        self._derived(chosen, tensors)
        return chosen

    def _derived(self, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
        """Note, for a trace, that new tensors hold some of what these hold."""

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Send one tensor to a rank; ``await`` returns when the tensor may be overwritten."""
        return self.exchange({to: (tensor,)}, {}, name=f"send to {to}", finish=lambda received: None)

    def recv(self, shape: Shape, source: int, dtype: torch.dtype = torch.float32) -> Handle:
        """Receive one tensor of a known shape and dtype from a rank."""
        return self._receive(shape, source, dtype, f"recv from {source}")

    def _receive(self, shape: Shape, source: int, dtype: torch.dtype, name: str) -> Handle:
        due = {source: (tuple(shape),)}
        return self.exchange({}, due, dtype=dtype, name=name, finish=lambda received: received[source][0])

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Shape] | None = None) -> Handle:
        """Send tensors[r] to rank r; ``await`` gives the list of what each rank sent here, in rank order.

        shapes: the shapes that arrive from each rank, if they differ from what is sent to it. Sizes may be uneven and
        zero.
        """
        tensors = self._one_each("all_to_all", tensors)
        if shapes is None:
            shapes = [tuple(t.shape) for t in tensors]
        return self.exchange(
            {r: (t,) for r, t in enumerate(tensors)},
            {r: (tuple(shape),) for r, shape in enumerate(shapes)},
            name="all_to_all",
            finish=lambda received: [received[r][0] for r in range(self.size)],
        )

    def all_gather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> Handle:
        """``await`` gives a list of every rank's tensor, in rank order; lengths: their sizes in dim -2, if uneven."""
        shapes = [_with_length(tensor.shape, lengths[r] if lengths else None) for r in range(self.size)]
        return self.exchange(
            dict.fromkeys(range(self.size), (tensor,)),  # one message that all get
            {r: (shape,) for r, shape in enumerate(shapes)},
            name="all_gather",
            finish=lambda received: [received[r][0] for r in range(self.size)],
        )

    async def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum over all ranks of what each contributes to this rank; tensors[r] is its contribution to rank r.

        Summed in rank order in the accumulation dtype, and returned in the dtype of the tensors.
        """
        tensors = self._one_each("reduce_scatter", tensors)
        mine = tuple(tensors[self.rank].shape)
        received = await self.all_to_all(tensors, [mine] * self.size)
        return _sum(received)

    def _one_each(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        if isinstance(tensors, Tensor):
            raise ValueError(
                f"{name}: expected a list with one tensor for each of {self.size} ranks, got one of shape "
                f"{tuple(tensors.shape)}; cut it into a part for each"
            )
        tensors = list(tensors)
        if len(tensors) != self.size:
            raise ValueError(f"{name}: expected one tensor for each of {self.size} ranks, got {len(tensors)}")
        return tensors

    async def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor, the same bits on every rank: summed in rank order."""
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"all_reduce: expected a tensor, got {type(tensor).__name__}; send a number as torch.tensor(x)"
            )
        if tensor.dtype == torch.bool:
            raise ValueError("all_reduce: expected numbers, got bool; send how many are True, tensor.sum(), or .long()")
        flat = tensor.reshape(-1, 1)
        bounds = [flat.shape[0] * r // self.size for r in range(self.size + 1)]
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        part = await self.reduce_scatter([flat[a:b] for a, b in zip(bounds, bounds[1:], strict=False)])
        return torch.cat(await self.all_gather(part, lengths)).view(tensor.shape)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Handle:
        """``await`` gives the tensor of rank src; on other ranks ``tensor`` only gives the shape and dtype."""
        if not 0 <= src < self.size:
            raise ValueError(f"broadcast: expected a rank in 0..{self.size - 1}, got src={src}")
        if self.rank == src:
            others = dict.fromkeys((r for r in range(self.size) if r != src), (tensor,))
            return self.exchange(others, {}, dtype=tensor.dtype, name="broadcast", finish=lambda received: tensor)
        return self._receive(tensor.shape, src, tensor.dtype, "broadcast")


class Part(Comm):
    """A comm of some ranks of another one: it translates rank numbers, and the comm underneath moves the messages."""

    def __init__(self, whole: Comm, ranks: Sequence[int], name: str, axis: int | None = None):
        if whole.rank not in ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"only: expected different ranks, {whole.rank} among them, got {list(ranks)}")
        self._whole, self._ranks, self._name, self._axis = whole, list(ranks), name, axis
        self.rank, self.size, self.device = self._ranks.index(whole.rank), len(ranks), whole.device
        self.shape = (self.size,)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of ranks {self._ranks} of {self._whole!r}>"

    def _post(self, post: Post) -> Any:
        sends, receives = ({self._ranks[r]: x for r, x in given.items()} for given in (post.sends, post.receives))
        known = {"axis": self._axis} if self._axis is not None else {"hop": 0}  # what a hop of any ranks passes by
        name = f"{self._name} {post.name}"
        return self._whole._post(replace(post, name=name, sends=sends, receives=receives, **known))

    def _wait(self, ticket: Any) -> Generator[Any, None, Received]:
        received = yield from self._whole._wait(ticket)
        return {self._ranks.index(r): tensors for r, tensors in received.items()}

    def traced(self, kernel: Any, origin: int | None = None) -> Any:
        return self._whole.traced(kernel, None if origin is None else self._ranks[origin])

    def compute(self, name: str, flops: float = 0.0, **details: Any) -> None:
        self._whole.compute(name, flops, **details)

    def buffers(self, shapes, dtype, device, component):
        return self._whole.buffers(shapes, dtype, device, component)

    def _derived(self, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
        self._whole._derived(new, old)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].to(accumulation_dtype(tensors[0].dtype), copy=True)
    for t in tensors[1:]:
        total += t
    return total.to(tensors[0].dtype)


def start(program: Callable[..., Awaitable[Any]], comm: Comm, args: Sequence[Any]) -> Generator[Any, None, Any]:
    """Call a rank program and return its coroutine, or raise an error that says why it is not a rank program."""
    if not callable(program):
        raise ValueError(
            f"run: expected a rank program, got {type(program).__name__}; name it without calling it, as in "
            f"world.run(program, x)"
        )
    coroutine = program(comm, *args)
    if not hasattr(coroutine, "send"):
        name = getattr(program, "__name__", program)
        raise ValueError(
            f"run: expected a rank program, `async def {name}(comm, ...)`, got a function that returned "
            f"{type(coroutine).__name__}; write `async def` even if it awaits nothing"
        )
    return coroutine

"""torch.distributed's messages between two ranks, simulated in one process on a network that buffers nothing.

A send ends when its receive has been posted, as on gloo, and takes one *turn*. So a deadlock is found at once, together
with who waits for whom, and so is a buffer that is used while its message is under way, which is a race on hardware.

Each rank is a thread, but only one runs at a time, and ranks switch only where one waits for a message.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

COMPUTE_LIMIT = 5.0  # seconds that a rank may compute without a message
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single broadcast gather "
    "reduce reduce_scatter reduce_scatter_tensor scatter"
).split()


class Mistake(Exception):
    """A use of messages that no network allows.

    kind: "deadlock", "in flight", "not arrived", "dropped", "left over", "size", "itself", "nobody", "contiguous",
    "collective", "group" or "endless".  rank: who did it; None: all.  The text says what happened.
    """

    def __init__(self, kind: str, text: str, rank: int | None = None):
        super().__init__(text)
        self.kind, self.rank = kind, rank


class _Over(BaseException):
    """Ends a rank's thread when the run is over; not an Exception, so that no `except Exception` stops it."""


@dataclass(eq=False, repr=False)
class Message:
    """What isend and irecv return: half of a transfer, until the other rank has posted the other half."""

    network: Network
    kind: str  # "send" or "recv"
    rank: int
    peer: int | None  # None: a receive from whoever comes first
    tensor: Tensor
    posted: float = 0.0
    version: int = 0
    other: Message | None = None
    content: Tensor | None = None  # of a receive: what the sender held when both had posted
    waited: bool = False

    @property
    def start(self) -> float:
        return max(self.posted, self.other.posted)

    def __str__(self) -> str:
        way = "send to" if self.kind == "send" else "receive from"
        return f"{way} {'any rank' if self.peer is None else f'rank {self.peer}'}"

    def __post_init__(self) -> None:
        self.version = self.tensor._version

    def check_untouched(self) -> None:
        """Raises Mistake if what is sent was written since it was posted."""
        if self.tensor._version != self.version:
            text = f"rank {self.rank} wrote to a tensor while it was being sent: its {self} had not been waited for"
            raise Mistake("in flight", text, self.rank)

    def wait(self, timeout: Any = None) -> bool:
        self.network.wait(self)
        return True

    def is_completed(self) -> bool:
        if not self.waited:
            self.network.give_way()
        return self.waited  # as gloo has it: not before wait() has returned


@dataclass
class Op:
    """torch.distributed.P2POp: a message that batch_isend_irecv will post."""

    op: Callable
    tensor: Tensor
    peer: int | None = None
    group: Any = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        name = getattr(self.op, "__name__", repr(self.op)).lstrip("_")
        if name not in ("isend", "irecv"):
            raise TypeError(f"P2POp: expected dist.isend or dist.irecv as its first argument, got {name}")
        self.kind = name[1:]


class Network:
    """Something of ``size`` ranks that torch.distributed's functions mean while it is open.

    ``functions`` says which, by name.
    """

    size: int

    def functions(self) -> dict[str, Any]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        own = self.functions()
        self._saved = {name: getattr(dist, name) for name in own}
        for name, function in own.items():
            setattr(dist, name, function)
        return self

    def __exit__(self, *exc: Any) -> None:
        for name, function in self._saved.items():
            setattr(dist, name, function)

    def refused(self, name: str) -> Callable:
        def refused(*args: Any, **kwargs: Any) -> None:
            raise Mistake("collective", f"dist.{name} was called")

        return refused

    def check(self, kind: str, tensor: Any, peer: Any, rank: int, flying: Iterable[Message]) -> None:
        """Raises Mistake for a message that no network allows; flying: those that the rank has not waited for."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{kind}: expected a tensor, got {type(tensor).__name__}")
        if peer is None and kind == "send":
            raise TypeError("send: expected a destination rank, got None")
        if peer == rank:
            raise Mistake("itself", f"rank {rank} of {self.size} posts a {kind} with itself", rank)
        if peer is not None and not 0 <= peer < self.size:
            raise Mistake("nobody", f"rank {rank} posts a {kind} with rank {peer}, and there are {self.size}", rank)
        if not tensor.is_contiguous():
            raise Mistake("contiguous", f"rank {rank} posts a {kind} of a tensor that is not contiguous", rank)
        for m in flying:
            if not m.waited and "recv" in (kind, m.kind) and overlap(tensor, m.tensor):
                verb = "sends from" if kind == "send" else "receives into"
                text = f"rank {rank} {verb} the memory of its {m}, which has not been waited for"
                raise Mistake("not arrived" if kind == "send" else "in flight", text, rank)


class Rendezvous(Network):
    """A network of P ranks. ``run(fn, args)`` calls fn(*args[r]) on each rank r; while it runs, torch.distributed's
    functions mean this network.

    turns: when the last message arrived, where each takes one turn and may begin when both sides have posted it.
    transfers: (from, to, start) of every message, in the order in which they met.
    stuck: rank -> what it waits for, after a deadlock.  blocking: whether all messages were sent by send and recv.
    batched: whether all were posted by batch_isend_irecv.

    >>> def swap(x, rank):
    ...     handles = [dist.isend(x, 1 - rank), dist.irecv(y := torch.empty_like(x), 1 - rank)]
    ...     for handle in handles:
    ...         handle.wait()
    ...     return y
    >>> import torch
    >>> network = Rendezvous(2)
    >>> network.run(swap, [(torch.tensor([float(rank)]), rank) for rank in range(2)]), network.turns
    ([tensor([1.]), tensor([0.])], 1.0)
    """

    def __init__(self, size: int):
        self.size = size
        self.transfers: list[tuple[int, int, float]] = []
        self.stuck: dict[int, str] = {}
        self.turns = 0.0
        self.blocking = self.batched = True

    # Running

    def run(self, fn: Callable, args: Sequence[tuple]) -> list[Any]:
        """What fn returned on each rank. Raises Mistake, or what a rank raised, with ``rank`` as an attribute."""
        self.transfers, self.stuck, self.turns, self.blocking, self.batched = [], {}, 0.0, True, True
        self._clock = [0.0] * self.size
        self._unmatched: dict = defaultdict(list)
        self._flying: list[list[Message]] = [[] for _ in range(self.size)]
        self._events = 0  # messages met and ranks ended: whether anything moves
        self._results: list[Any] = [None] * self.size
        self._waiting: list[Callable[[], bool] | None] = [None] * self.size
        self._waits_for: list[str] = [""] * self.size
        self._error: BaseException | None = None
        self._over = False
        self._mine = threading.local()
        self._go = [threading.Semaphore(0) for _ in range(self.size)]
        self._back = threading.Semaphore(0)
        self._live = set(range(self.size))
        threads = [threading.Thread(target=self._rank, args=(fn, r, args[r]), daemon=True) for r in range(self.size)]
        with self:
            for thread in threads:
                thread.start()
            self._schedule(threads)
        left = [m for messages in self._unmatched.values() for m in messages]
        if left and self._error is None:
            self._error = Mistake("left over", f"rank {left[0].rank}'s {left[0]} was never met", left[0].rank)
        self.turns = max([0.0, *(start + 1 for *_, start in self.transfers)])
        if self._error is not None:
            raise self._error
        return self._results

    def _rank(self, fn: Callable, rank: int, args: tuple) -> None:
        self._mine.rank = rank
        self._go[rank].acquire()
        try:
            if not self._over:
                self._results[rank] = fn(*args)
                dropped = [m for m in self._flying[rank] if not m.waited]
                if dropped:
                    raise Mistake("dropped", f"rank {rank} returns, and its {dropped[0]} was never waited for", rank)
        except _Over:
            pass
        except BaseException as error:
            if not isinstance(error, Exception):  # such as sys.exit()
                error = RuntimeError(f"{type(error).__name__} on rank {rank}")
            if not hasattr(error, "rank"):
                error.rank = rank
            self._error = self._error or error
        self._live.discard(rank)
        self._events += 1
        self._back.release()

    def _schedule(self, threads: list[threading.Thread]) -> None:
        turn = 0
        while self._live and self._error is None:
            ready = [r for r in sorted(self._live) if self._waiting[r] is None or self._waiting[r]()]
            if not ready:
                self.stuck = {r: self._waits_for[r] for r in sorted(self._live)}
                ended = [str(r) for r in range(self.size) if r not in self._live]
                lines = [f"rank {r} waits to {what}" for r, what in self.stuck.items()]
                lines += [f"rank{'s' * (len(ended) > 1)} {', '.join(ended)} returned"] * bool(ended)
                self._error = Mistake("deadlock", ", ".join(lines))
                break
            turn = next((r for r in ready if r >= turn), ready[0])
            self._waiting[turn] = None
            self._go[turn].release()
            if not self._back.acquire(timeout=COMPUTE_LIMIT):
                text = f"rank {turn} computes for {COMPUTE_LIMIT:g} s without a message"
                self._error = Mistake("endless", text, turn)
                ident = ctypes.c_ulong(threads[turn].ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Over))
            turn = (turn + 1) % self.size
        self._over = True
        for r in range(self.size):
            self._go[r].release()
        for thread in threads:
            thread.join(1)

    def _block(self, until: Callable[[], bool], what: str) -> None:
        rank = self._mine.rank
        self._waiting[rank], self._waits_for[rank] = until, what
        self._back.release()
        self._go[rank].acquire()
        if self._over:
            raise _Over

    def give_way(self) -> None:
        """Let the others run until something has moved."""
        before = self._events
        self._block(lambda: self._events > before, "see a message completed")

    # Messages

    def post(self, kind: str, tensor: Any, peer: int | None, blocking: bool = False, batched: bool = False) -> Message:
        rank = self._mine.rank
        self.check(kind, tensor, peer, rank, self._flying[rank])
        message = Message(self, kind, rank, peer, tensor, self._clock[rank])
        self.blocking, self.batched = self.blocking and blocking, self.batched and batched
        self._flying[rank].append(message)
        pair = (rank, peer) if kind == "send" else (peer, rank)
        for key in [pair] if kind == "recv" and peer is not None else [pair, (None, peer)]:
            waiting = self._unmatched[key]
            if kind == "recv" and peer is None:
                waiting = next((w for (_, to), w in self._unmatched.items() if to == rank and w), [])
            if waiting and waiting[0].kind != kind:
                self._meet(message, waiting.pop(0))
                return message
        self._unmatched[pair].append(message)
        return message

    def _meet(self, a: Message, b: Message) -> None:
        a.other, b.other = b, a
        send, recv = (a, b) if a.kind == "send" else (b, a)
        both = (send.tensor, recv.tensor)
        if len({(t.numel(), t.dtype) for t in both}) > 1:
            sent, expected = (f"{t.numel()} elements of {str(t.dtype).removeprefix('torch.')}" for t in both)
            text = f"rank {send.rank} sends {sent} to rank {recv.rank}, whose buffer is for {expected}"
            raise Mistake("size", text, recv.rank)
        send.check_untouched()
        recv.content = send.tensor.detach().clone()
        self.transfers.append((send.rank, recv.rank, a.start))
        self._events += 1

    def wait(self, message: Message) -> None:
        rank = self._mine.rank
        if message.other is None:
            self._block(lambda: message.other is not None, str(message))
        if not message.waited:
            if message.kind == "send":
                message.check_untouched()
            else:
                message.tensor.detach().view(-1).copy_(message.content.view(-1))
        message.waited, message.content = True, None
        self._clock[rank] = max(self._clock[rank], message.start + 1)
        if message in self._flying[rank]:
            self._flying[rank].remove(message)

    # torch.distributed's functions, for as long as this runs

    def functions(self) -> dict[str, Any]:
        own = {"isend": self._isend, "irecv": self._irecv, "send": self._send, "recv": self._recv}
        own |= {"batch_isend_irecv": self._batch, "P2POp": Op, "is_initialized": lambda: True}
        own |= {"get_rank": lambda group=None: self._mine.rank, "get_world_size": lambda group=None: self.size}
        own |= {name: self.refused(name) for name in (*COLLECTIVES, "barrier", "monitored_barrier")}
        return own | {name: self._no_group for name in ("init_process_group", "destroy_process_group", "new_group")}

    def _isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        return self.post("send", tensor, group_dst if dst is None else dst)

    def _irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        return self.post("recv", tensor, group_src if src is None else src)

    def _send(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        self.wait(self.post("send", tensor, group_dst if dst is None else dst, blocking=True))

    def _recv(self, tensor, src=None, group=None, tag=0, group_src=None):
        message = self.post("recv", tensor, group_src if src is None else src, blocking=True)
        self.wait(message)
        return message.other.rank

    def _batch(self, ops: Sequence[Op]) -> list[Message]:
        peers = [op.group_peer if op.peer is None else op.peer for op in ops]
        return [self.post(op.kind, op.tensor, peer, batched=True) for op, peer in zip(ops, peers)]

    def _no_group(self, *args: Any, **kwargs: Any) -> None:
        raise Mistake("group", "a process group is made or ended, where the ranks are in one already")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory; meta tensors have none."""
    if a.device != b.device or a.is_meta or not a.numel() or not b.numel():
        return False
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]

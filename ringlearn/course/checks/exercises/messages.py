"""The messages that raw torch.distributed code posts, noted in order, and what follows from their order.

While ``Messages`` is open, ``dist.send``, ``recv``, ``isend``, ``irecv`` and ``batch_isend_irecv`` note each message
before they post it, and each wait before it begins. So the order is known even of ranks that hang, and ``replay`` can
say what a network that buffers nothing does with it: gloo and NCCL buffer more or less, depending on size and version.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..checker import Wrong

COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single broadcast gather "
    "reduce reduce_scatter reduce_scatter_tensor scatter"
).split()
Event = list[Any]  # ["post", number, "send" or "recv", peer, elements, dtype], ["wait", number] or ["compute"]


class Messages:
    """Note every message between two ranks while the ``with`` block runs.

    rank, size: of this process.  note: called with each event.  events: all of them.  Raises Wrong for a message to
    oneself, a collective, or a buffer in flight that is written.
    """

    def __init__(self, rank: int, size: int, note: Callable[[Event], None] = lambda event: None):
        self.rank, self.size, self._note = rank, size, note
        self.events: list[Event] = []
        self._flying: dict[int, tuple[str, Tensor, int]] = {}  # not waited for: kind, tensor, its version then
        self._works: list[Any] = []  # gloo takes a message back if its handle is dropped; here it goes on

    def __enter__(self) -> Messages:
        own = {"send": self.send, "recv": self.recv, "isend": self.isend, "irecv": self.irecv}
        own |= {"batch_isend_irecv": self.batch, "P2POp": self.op}
        own |= {name: self._refuse(name) for name in COLLECTIVES}
        self._saved = {name: getattr(dist, name) for name in own}
        for name, function in own.items():
            setattr(dist, name, function)
        return self

    def __exit__(self, *exc: Any) -> None:
        for name, function in self._saved.items():
            setattr(dist, name, function)

    def finish(self) -> None:
        """Raises Wrong if a message was posted and never waited for."""
        if self._flying:
            kinds = " and ".join(sorted({f"i{kind}" for kind, _, _ in self._flying.values()}))
            raise Wrong(
                f"what {kinds} posted was never waited for",
                "the handles that isend, irecv and batch_isend_irecv return",
                "a message has arrived, and a buffer may be used again, only after handle.wait()",
            )

    @property
    def sent(self) -> list[Event]:
        return [e for e in self.events if e[:1] == ["post"] and e[2] == "send"]

    def compute(self, x: Tensor) -> None:
        """Note that the answer computes on x now. Raises Wrong if x has not arrived."""
        if any(kind == "recv" and _overlap(x, flying) for kind, flying, _ in self._flying.values()):
            raise Wrong(
                "computes on a tensor that has not arrived",
                "what stands before the computation",
                "what irecv receives is there only after handle.wait()",
            )
        self._keep(["compute"])

    # What stands in for torch.distributed's functions

    def send(self, tensor: Tensor, dst: int | None = None, *args: Any, **kwargs: Any) -> Any:
        return self._now("send", tensor, dst, args, kwargs)

    def recv(self, tensor: Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
        return self._now("recv", tensor, src, args, kwargs)

    def isend(self, tensor: Tensor, dst: int | None = None, *args: Any, **kwargs: Any) -> Any:
        number = self._post("send", tensor, _peer(dst, kwargs))
        return _Handle(self, [number], self._saved["isend"](tensor, dst, *args, **kwargs))

    def irecv(self, tensor: Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
        number = self._post("recv", tensor, _peer(src, kwargs))
        return _Handle(self, [number], self._saved["irecv"](tensor, src, *args, **kwargs))

    def op(self, op: Callable, *args: Any, **kwargs: Any) -> Any:
        names = {self.isend: "isend", self.irecv: "irecv"}
        return self._saved["P2POp"](self._saved[names[op]] if op in names else op, *args, **kwargs)

    def batch(self, ops: Sequence[Any]) -> list[Any]:
        kinds = ["send" if op.op is self._saved["isend"] else "recv" for op in ops]
        numbers = [self._post(kind, op.tensor, op.peer) for kind, op in zip(kinds, ops)]
        works = self._saved["batch_isend_irecv"](ops)
        shares = [[n] for n in numbers] if len(works) == len(numbers) else [numbers] * len(works)  # NCCL: one for all
        return [_Handle(self, share, work) for share, work in zip(shares, works)]

    def _now(self, kind: str, tensor: Tensor, peer: int | None, args: tuple, kwargs: dict) -> Any:
        number = self._post(kind, tensor, _peer(peer, kwargs))
        self._keep(["wait", number])
        result = self._saved[kind](tensor, peer, *args, **kwargs)
        self._flying.pop(number)
        return result

    def _post(self, kind: str, tensor: Tensor, peer: int | None) -> int:
        if peer == self.rank:
            raise Wrong(
                f"a message from rank {self.rank} to itself",
                f"who rank {self.rank} of {self.size} sends to and receives from",
                "alone there is nobody to send to: what would arrive is what this rank has",
            )
        if peer is not None and not 0 <= peer < self.size:
            raise Wrong(
                f"a message between rank {self.rank} and rank {peer}, which is not there",
                "who the message goes to or comes from",
                "a ring closes: rank + 1 and rank - 1 are taken modulo the number of ranks, % size",
            )
        number = sum(e[0] == "post" for e in self.events)
        for other, flying, _ in self._flying.values():
            if isinstance(tensor, Tensor) and _overlap(tensor, flying) and "recv" in (kind, other):
                raise Wrong(
                    f"the {kind} {'reads from' if kind == 'send' else 'writes into'} the memory of a {other} that has "
                    f"not been waited for",
                    "which tensor is sent and which one receives",
                    "what arrives needs a buffer of its own: torch.empty_like(...)",
                )
        known = isinstance(tensor, Tensor)
        self._keep(["post", number, kind, peer, tensor.numel() if known else 0, str(tensor.dtype) if known else ""])
        self._flying[number] = (kind, tensor, tensor._version if known else 0)
        return number

    def _arrived(self, numbers: list[int]) -> None:
        """The answer waits for these messages now."""
        for number in numbers:
            if number in self._flying:
                kind, tensor, version = self._flying.pop(number)
                self._keep(["wait", number])
                if kind == "send" and tensor._version != version:
                    raise Wrong(
                        "a tensor was written while it was being sent",
                        "what is changed in place between a send and its wait",
                        "the network reads the tensor until handle.wait() returns: write to another one",
                    )

    def _refuse(self, name: str) -> Callable:
        def refused(*args: Any, **kwargs: Any) -> None:
            raise Wrong(
                f"dist.{name} was called",
                "the blank",
                "this exercise builds it from messages between neighbours: isend and irecv, or send and recv",
            )

        return refused

    def _keep(self, event: Event) -> None:
        self.events.append(event)
        self._note(event)


class _Handle:
    """What isend and irecv return, with each wait noted."""

    def __init__(self, messages: Messages, numbers: list[int], work: Any):
        self._messages, self._numbers, self._work = messages, numbers, work
        messages._works.append(work)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._messages._arrived(self._numbers)
        return self._work.wait(*args, **kwargs)

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._messages._arrived(self._numbers)
        else:
            time.sleep(0.01)  # who asks in a loop would take the core that the message needs
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _peer(peer: int | None, kwargs: dict[str, Any]) -> int | None:
    return peer if peer is not None else kwargs.get("group_dst", kwargs.get("group_src"))


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


@dataclass
class Replay:
    """What a network that buffers nothing does with the ranks' messages.

    turns: how many messages follow one after the other, at most.  waits: rank -> the message that it waits for, as
    (kind, peer), if it waits for ever.  pairs: (from, to) -> the messages sent and the messages expected, in order.
    """

    turns: int = 0
    waits: dict[int, tuple[str, int]] = field(default_factory=dict)
    pairs: dict[tuple[int, int], tuple[list[Event], list[Event]]] = field(default_factory=dict)


def replay(events: Sequence[Sequence[Event]]) -> Replay:
    """Run through each rank's events: a message moves when both sides have posted it, and takes one turn.

    >>> send, recv = ["post", 0, "send", 1, 8, "f"], ["post", 0, "recv", 0, 8, "f"]
    >>> replay([[send, ["wait", 0]], [recv, ["wait", 0]]]).turns
    1
    >>> replay([[send, ["wait", 0]], [["compute"]]]).waits
    {0: ('send', 1)}
    """
    size = len(events)
    pairs: dict = defaultdict(lambda: ([], []))
    times: dict[tuple[int, int], int] = {}  # (rank, number) -> when it was posted
    place: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}  # (rank, number) -> its pair, and which of it
    clock, at = [0] * size, [0] * size
    moved = True
    while moved:
        moved = False
        for r in range(size):
            while at[r] < len(events[r]):
                kind, *rest = events[r][at[r]]
                if kind == "post":
                    number, way, peer = rest[:3]
                    pair, side = ((r, peer), 0) if way == "send" else ((peer, r), 1)
                    place[r, number] = pair, len(pairs[pair][side])
                    pairs[pair][side].append([*events[r][at[r]], r])
                    times[r, number] = clock[r]
                elif kind == "wait":
                    pair, which = place[r, rest[0]]
                    if min(map(len, pairs[pair])) <= which:
                        break  # the other side has not posted it
                    both = [times[e[-1], e[1]] for e in (pairs[pair][0][which], pairs[pair][1][which])]
                    clock[r] = max(clock[r], max(both) + 1)
                at[r] += 1
                moved = True
    waits = {}
    for r in range(size):
        if at[r] < len(events[r]):
            post = next(e for e in events[r] if e[0] == "post" and e[1] == events[r][at[r]][1])
            waits[r] = (post[2], post[3])
    return Replay(max(clock, default=0), waits, dict(pairs))


def explain(events: Sequence[Sequence[Event]]) -> Wrong | None:
    """What is wrong with the messages of all ranks, if anything is: who waits for whom, or what does not fit."""
    if any(e[0] == "post" and e[3] is None for rank in events for e in rank):
        return None  # from whoever comes first: not for a replay
    found = replay(events)
    for (source, to), (sent, expected) in sorted(found.pairs.items()):
        for a, b in zip(sent, expected):
            if a[4:6] != b[4:6]:
                return Wrong(
                    f"rank {source} sends {a[4]} elements of {a[5]} to rank {to}, which expects {b[4]} of {b[5]}",
                    "the tensor that is sent, and the one that is to receive it",
                    "both ends of a message must agree on its size and dtype; with uneven parts they depend on "
                    "which part it is",
                )
    if found.waits:
        words = [f"rank {r} to {_way(kind)} rank {peer}" for r, (kind, peer) in sorted(found.waits.items())]
        kinds = {kind for kind, _ in found.waits.values()}
        if len(found.waits) == len(events) and len(kinds) == 1 and len(events) > 1:
            verb, other = ("send", "receive") if kinds == {"send"} else ("receive", "send")
            cause = (
                f"all ranks {verb} first, and none of them gets to its {other}. Let some {other} first, or post both "
                f"at once with isend and irecv and wait afterwards"
            )
        else:
            cause = "a send waits for its receive and a receive for its send: one of the two is never reached"
        return Wrong(f"waiting: {', '.join(words)}", "the order of sends and receives", cause)
    for (source, to), (sent, expected) in sorted(found.pairs.items()):
        if len(sent) != len(expected):
            return Wrong(
                f"rank {source} sends {len(sent)} messages to rank {to}, which receives {len(expected)}",
                "who sends to whom, and how often",
                "every send needs a receive on the other side",
            )
    return None


def _way(kind: str) -> str:
    return "send to" if kind == "send" else "receive from"

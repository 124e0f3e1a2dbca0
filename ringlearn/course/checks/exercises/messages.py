"""The messages that raw torch.distributed code posts, noted in order, and what follows from their order.

While ``Messages`` is open, ``dist.send``, ``recv``, ``isend``, ``irecv`` and ``batch_isend_irecv`` note each message
before they post it, and each wait before it begins. So the order is known even of ranks that hang, and ``replay`` can
say what a network that buffers nothing does with it: gloo and NCCL buffer more or less, depending on size and version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...rendezvous import COLLECTIVES, Message, Mistake, Network, Rendezvous, overlap
from ..checker import Wrong
from ..nb05 import explained

Event = list[Any]  # ["post", number, "send" or "recv", peer, elements, dtype], ["wait", number] or ["compute"]


class Messages(Network):
    """Note every message between two ranks while the ``with`` block runs.

    rank, size: of this process.  note: called with each event.  events: all of them.  Raises Wrong for a message to
    oneself, a collective, or a buffer in flight that is written.
    """

    def __init__(self, rank: int, size: int, note: Callable[[Event], None] = lambda event: None):
        self.rank, self.size, self._note = rank, size, note
        self.events: list[Event] = []
        self._flying: dict[int, Message] = {}  # not waited for
        self._works: list[Any] = []  # gloo takes a message back if its handle is dropped; here it goes on

    def functions(self) -> dict[str, Any]:
        self._own = {kind: partial(self._now, kind) for kind in ("send", "recv")}
        self._own |= {f"i{kind}": partial(self._begun, kind) for kind in ("send", "recv")}
        own = self._own | {"batch_isend_irecv": self.batch, "P2POp": self.op}
        return own | {name: self.refused(name) for name in COLLECTIVES}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__()
        if error is None and self._flying:
            first = next(iter(self._flying.values()))
            error = Mistake("dropped", f"its {first} was never waited for", self.rank)
        if isinstance(error, Mistake):
            wrong = explained(error, self.size)
            wrong.symptom = wrong.symptom.removeprefix(f"rank {self.rank} ")  # which is said before it
            raise wrong from None

    @property
    def sent(self) -> list[Event]:
        return [e for e in self.events if e[:1] == ["post"] and e[2] == "send"]

    def compute(self, x: Tensor) -> None:
        """Note that the answer computes on x now. Raises Wrong if x has not arrived."""
        if any(m.kind == "recv" and overlap(x, m.tensor) for m in self._flying.values()):
            raise Wrong(
                "computes on a tensor that has not arrived",
                "what stands before the computation",
                "what irecv receives is there only after handle.wait()",
            )
        self._keep(["compute"])

    # What stands in for torch.distributed's functions

    def op(self, op: Callable, *args: Any, **kwargs: Any) -> Any:
        real = next((self._saved[name] for name, function in self._own.items() if op is function), op)
        return self._saved["P2POp"](real, *args, **kwargs)

    def batch(self, ops: Sequence[Any]) -> list[Any]:
        kinds = ["send" if op.op is self._saved["isend"] else "recv" for op in ops]
        numbers = [self._post(kind, op.tensor, op.peer) for kind, op in zip(kinds, ops)]
        works = self._saved["batch_isend_irecv"](ops)
        shares = [[n] for n in numbers] if len(works) == len(numbers) else [numbers] * len(works)  # NCCL: one for all
        return [_Handle(self, share, work) for share, work in zip(shares, works)]

    def _now(self, kind: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        number = self._post(kind, tensor, _peer(args, kwargs))
        self._keep(["wait", number])
        result = self._saved[kind](tensor, *args, **kwargs)
        self._flying.pop(number)
        return result

    def _begun(self, kind: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        number = self._post(kind, tensor, _peer(args, kwargs))
        return _Handle(self, [number], self._saved[f"i{kind}"](tensor, *args, **kwargs))

    def _post(self, kind: str, tensor: Tensor, peer: int | None) -> int:
        self.check(kind, tensor, peer, self.rank, self._flying.values())
        number = sum(e[0] == "post" for e in self.events)
        self._keep(["post", number, kind, peer, tensor.numel(), str(tensor.dtype)])
        self._flying[number] = Message(self, kind, self.rank, peer, tensor)
        return number

    def _arrived(self, numbers: list[int]) -> None:
        """The answer waits for these messages now."""
        for number in numbers:
            if number in self._flying:
                message = self._flying.pop(number)
                self._keep(["wait", number])
                if message.kind == "send":
                    message.check_untouched()

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


def _peer(args: tuple, kwargs: dict[str, Any]) -> int | None:
    given = [*args[:1], *(kwargs.get(name) for name in ("dst", "src", "group_dst", "group_src"))]
    return next((peer for peer in given if peer is not None), None)


def replay(events: Sequence[Sequence[Event]]) -> int:
    """The turns that the ranks' messages take on a network that buffers nothing. Raises Wrong if they do not fit.

    >>> send, recv = ["post", 0, "send", 1, 8, "torch.int8"], ["post", 0, "recv", 0, 8, "torch.int8"]
    >>> replay([[send, ["wait", 0]], [recv, ["wait", 0]]])
    1
    """
    network = Rendezvous(len(events))

    def again(mine: Sequence[Event]) -> None:
        posted = {}
        for kind, *rest in mine:
            if kind == "post":
                number, way, peer, elements, dtype = rest
                dtype = getattr(torch, dtype.removeprefix("torch."))
                posted[number] = network.post(way, torch.empty(elements, dtype=dtype, device="meta"), peer)
            elif kind == "wait":
                network.wait(posted[rest[0]])
        for message in posted.values():  # of a rank that got no further
            message.waited = True

    try:
        network.run(again, [(mine,) for mine in events])
    except Mistake as mistake:
        cause = "a send waits for its receive and a receive for its send: one of the two is never reached"
        verbs = {what.split()[0] for what in network.stuck.values()}
        if len(network.stuck) == len(events) > 1 == len(verbs):
            verb, other = ("send", "receive") if verbs == {"send"} else ("receive", "send")
            cause = (
                f"all ranks {verb} first, and none of them gets to its {other}. Let some {other} first, or post both "
                f"together with batch_isend_irecv and wait afterwards (isend and irecv one by one hang on NCCL when "
                f"messages are large)"
            )
        raise explained(mistake, len(events), ("the order of sends and receives", cause)) from None
    return int(network.turns)


def explain(events: Sequence[Sequence[Event]]) -> Wrong | None:
    """What is wrong with the messages of all ranks, if anything is: who waits for whom, or what does not fit."""
    try:
        replay(events)
    except Wrong as wrong:
        return wrong
    return None

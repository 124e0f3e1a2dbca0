"""What happened, rank by rank: every compute tile, message and wait, with bytes, FLOPs and times.

Times of a simulated world are *simulated*: they come from the hardware model below, not from a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..partial import Partial
from ..tiles import Tile

if TYPE_CHECKING:
    from ..kernels import Kernel


@dataclass(frozen=True)
class Hardware:
    """The model that a simulated world's clock runs on.

    flops: FLOP/s of one rank.  bandwidth: bytes/s of the link from one rank to another, in each direction.
    latency: seconds before the first byte of a message arrives.

    The defaults are round numbers of the order of one H100 and its NVLink; they are not measurements.
    """

    flops: float = 600e12
    bandwidth: float = 250e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Hardware: expected {name} > 0, got {getattr(self, name)!r}")
        if not self.latency >= 0:
            raise ValueError(f"Hardware: expected latency >= 0 seconds, got {self.latency!r}")


class Event(NamedTuple):
    """One thing that one rank did. It is a named tuple because a simulation makes thousands of them.

    kind: "compute", "send", "recv" or "wait".  start, stop: seconds.  name: the operation, such as "rotate 2".
    step: how many rotates this rank had posted before.  peer: the other rank of a message.
    origin: the rank whose shard the keys or the message came from.
    tile: the local rows and columns of a compute event.
    made: whether a message carries something that was computed in this run, such as gradients of keys, rather than the
    ranks' inputs.
    """

    rank: int
    kind: str
    name: str
    start: float
    stop: float
    step: int = 0
    nbytes: int = 0
    flops: float = 0.0
    peer: int | None = None
    origin: int | None = None
    tile: Tile | None = None
    made: bool = False

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(repr=False)
class Trace:
    """The events of a world, in the order in which they were recorded.

    simulated: whether times come from the hardware model (True) or from a clock (False).
    """

    simulated: bool
    events: list[Event] = field(default_factory=list)

    def __repr__(self) -> str:
        ranks = len({e.rank for e in self.events})
        clock = "simulated" if self.simulated else "measured"
        return f"<trace of {len(self)} events on {ranks} ranks, {self.makespan():.3g} s {clock}>"

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def select(self, kind: str | None = None, rank: int | None = None) -> list[Event]:
        """The events of one kind, of one rank, or both."""
        return [e for e in self.events if (kind is None or e.kind == kind) and (rank is None or e.rank == rank)]

    def messages(self, rank: int) -> int:
        """How many messages a rank sent."""
        return len(self.select("send", rank))

    def bytes_sent(self, rank: int) -> int:
        return sum(e.nbytes for e in self.select("send", rank))

    def flops(self, rank: int) -> float:
        return sum(e.flops for e in self.select("compute", rank))

    def seconds(self, kind: str, rank: int) -> float:
        """The time that a rank spent on one kind of event; for "wait", the communication that was not hidden."""
        return sum(e.seconds for e in self.select(kind, rank))

    def makespan(self) -> float:
        """From the first start to the last stop over all ranks, in seconds."""
        return max((e.stop for e in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    def clear(self) -> None:
        self.events.clear()


class Origins:
    """Knows whose shard a tensor holds, and whether a program was given the tensor or has made it.

    Tensors are told apart by their memory. Origins are remembered from run to run, because a backward begins with the
    tensors that arrived last in the forward.
    """

    def __init__(self) -> None:
        self._ranks: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._given: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def begin(self, args: Any) -> None:
        """Begin a run whose programs are given these arguments."""
        self._given.clear()
        for t in tree_leaves(args):
            if isinstance(t, Tensor):
                self._given[t.untyped_storage()] = True

    def of(self, tensor: Tensor, rank: int) -> int:
        """The rank whose shard this is: the one from which it first came, or ``rank``, which holds it."""
        origin = self._ranks.get(tensor.untyped_storage())
        return self._ranks.get(tensor, rank) if origin is None else origin

    def made(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of them was made in this run."""
        return any(t.untyped_storage() not in self._given for t in tensors)

    def arrived(self, buffer: Tensor, origin: int, made: bool) -> None:
        """Note that a message has arrived in this buffer, which may have held something else before."""
        storage = buffer.untyped_storage()
        self._ranks[storage] = origin
        self._given.pop(storage, None)
        if not made:
            self._given[storage] = True

    def derived(self, new: Iterable[Tensor], old: Sequence[Tensor], rank: int) -> None:
        """New tensors hold some of what these, in the hands of ``rank``, hold."""
        for t in new:
            self.arrived(t, self.of(old[0], rank), self.made(old))

    def passed_on(self, tensors: Iterable[Tensor], origin: int) -> None:
        """Note that another rank has these tensors now. Ranks share their memory, so each tensor is noted by itself."""
        for t in tensors:
            self._ranks[t] = origin


def tile_flops(q: Tensor, v: Tensor, tile: Tile, backward: bool = False) -> float:
    """Floating-point operations of the matrix products of one tile.

    Forward: scores q k^T and output p v. Backward: scores again, dp = dout v^T, and dq, dk, dv: 2.5 times as many when
    D_k = D_v (Dao 2023, "FlashAttention-2", section 4.1).
    """
    B, H, D_k, D_v = q.shape[0], q.shape[1], q.shape[-1], v.shape[-1]
    per_score = 3 * D_k + 2 * D_v if backward else D_k + D_v
    return 2.0 * B * H * tile.area * per_score


class TracedKernel:
    """A kernel that records what it does: each call becomes one compute event of the rank.

    record: called as record(name, flops, tile, k, run, scratch) and must return run(); scratch() says how many
    bytes the call holds beside what it returns, None if that is not known beforehand.
    """

    def __init__(self, kernel: Kernel, record):
        self.kernel, self.record, self.name = kernel, record, kernel.name
        self._scratch = getattr(kernel, "scratch", lambda *_: None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        return self.record(
            "forward",
            tile_flops(q, v, tile),
            tile,
            k,
            lambda: self.kernel.forward(q, k, v, tile, scale),
            lambda: self._scratch(q, k, v, tile),
        )

    def backward(self, dout, q, k, v, out, lse, tile: Tile, scale: float, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
        return self.record(
            "backward",
            tile_flops(q, v, tile, backward=True),
            tile,
            k,
            lambda: self.kernel.backward(dout, q, k, v, out, lse, tile, scale, dlse),
            lambda: self._scratch(q, k, v, tile, dout, out, lse) if dlse is None else None,
        )

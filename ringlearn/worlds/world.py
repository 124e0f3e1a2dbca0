"""What both worlds share: ranks to run programs on, and tensors that are split over them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..layouts import Layout, Ranges, contiguous, count, positions_of
from .comm import unpack
from .trace import Trace
from .uncompiled import uncompiled

_MESSAGES = ("rotate", "exchange", "send", "recv", "all_gather", "all_to_all", "all_reduce", "broadcast")
_OF_A_RANK = ("rank", "along", *_MESSAGES)


class World:
    """P ranks, of which this process owns some: all of them in a simulation, one under torch.distributed.

    size: P.  ranks: the ranks that this process owns.  device: where shards are put.  trace: the events of the last
    run.
    shape: (P,), or (nodes, ranks per node) for a world with two axes.
    check: whether ``agree`` compares the ranks' arguments; in a simulation they cannot differ.
    """

    size: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    device: torch.device
    trace: Trace
    check: bool = False

    @cached_property
    def prepared(self) -> dict[Hashable, Any]:
        """Calls that were checked and planned before, by everything that they depend on."""
        return {}

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_RANK:  # a rank program that was given the world in place of a rank
            raise AttributeError(
                f"a world has no .{name}, its ranks have: it runs a rank program on each of them. Instead of "
                f"`await program(world, ...)` write world.run(program, ...)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> World:
        return self  # the ranks exist only once, so a copy of what belongs to a world belongs to the same world

    def __deepcopy__(self, memo: Any) -> World:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} is this process's place among the ranks, and cannot be pickled, nor can Shards, "
            f"which belong to one; make the world in each process, and send tensors, shards.tensors or shards.unshard()"
        )

    def run(self, program: Callable[..., Awaitable[Any]], *args: Any) -> PerRank:
        """Run a rank program on every rank that this process owns; return what each returned.

        args: a ``Shards`` or ``PerRank`` argument gives each rank its own element; anything else is passed to all
        ranks.
        """
        raise NotImplementedError

    def agree(
        self,
        op: str,
        same: Mapping[str, str],
        own: Mapping[str, Any] | None = None,
        problem: Exception | None = None,
        later: bool = False,
    ) -> list[dict[str, Any]]:
        """Before any data moves: raise on *every* rank if one has a problem or if ``same`` differs between ranks.

        op: the name of the call.  same: what must be equal on all ranks, by name.  own: small JSON values that may
        differ.  problem: an error that this rank has found in its own arguments.  later: the call may begin
        before the others have answered; where the host does not wait for messages, ``conclude`` makes the comparison.
        Returns the ``own`` of every rank from which this one has heard.
        """
        if problem is not None:
            raise problem
        return [dict(own or {})]

    def conclude(self) -> None:
        """Raise what an ``agree(later=True)`` has left open, before a call returns anything."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which calls do not compare their arguments, because the ranks already have."""
        before, self.check = self.check, False
        try:
            yield
        finally:
            self.check = before

    def reserve(self, nbytes: int) -> None:
        """Prepare for ring messages of up to ``nbytes`` bytes; all ranks pass the same number."""

    def mailboxes(self, numbers: int) -> Any:
        """Memory that kernels of all ranks can write to, or None; all ranks pass the same number of float32 numbers."""
        return None

    @property
    def reserved(self) -> int:
        """The bytes held for ring messages, which none of torch's allocators counts."""
        return 0

    def watched(self) -> AbstractContextManager[None]:
        """A context in which losing another rank is an error in any collective; a simulation cannot lose one."""
        return nullcontext()

    def assemble(self, parts: Sequence[Tensor], layout: Layout, length: int, dim: int) -> Tensor:
        """The full tensor from the owned ranks' shards; in a distributed world every rank gets it."""
        shape = list(parts[0].shape)
        shape[dim] = length
        full = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
        for part, ranges in zip(parts, layout.ranges(length, self.size), strict=True):
            start = 0
            for r in ranges:
                full.movedim(dim, 0)[r.start : r.stop : r.step] = part.movedim(dim, 0)[start : start + len(r)]
                start += len(r)
        return full

    @uncompiled
    def shard(self, *tensors: Tensor, layout: Layout = contiguous, src: int | None = None) -> Any:
        """Split replicated tensors (..., S, D) along S; return one ``Shards`` for each (a single one for one tensor).

        Every rank passes the same tensors. A distributed world raises ValueError if they differ, unless ``src`` names
        the rank whose tensors are to be used. They are moved to the world's device. The gradient that flows back is the
        full one, on every rank: ``shard`` and ``unshard`` are conjugate, so a loss computed from ``unshard()`` needs
        no scaling.

        >>> import torch, ringlearn as rl
        >>> q, k = rl.SimulatedWorld(3).shard(torch.randn(1, 2, 10, 4), torch.randn(1, 2, 7, 4), layout=rl.zigzag)
        >>> q.lengths, k.lengths
        ((3, 4, 3), (3, 2, 2))
        """
        problem, described = None, {}
        try:
            _check_sharding(self, tensors, layout, src)
            described = {
                "shapes": ", ".join(str(tuple(t.shape)) for t in tensors),
                "dtypes": ", ".join(str(t.dtype) for t in tensors),
                "layout": str([describe(layout, t.shape[-2], self.size) for t in tensors]),
                "src": str(src),
            }
        except Exception as error:  # from a layout of the user's, for example: the others must hear
            problem = error
        needs = problem is None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        known = self.agree("shard", described, {"requires_grad": needs, "grad mode": torch.is_grad_enabled()}, problem)
        check_grad_mode("shard", known)
        full = self.replicate([t.detach() for t in tensors], src)
        if any(rank["requires_grad"] for rank in known) and torch.is_grad_enabled():
            # A rank whose own tensors need no gradient has the node too: its backward sends what others wait for.
            flows = torch.empty(0, device=self.device, requires_grad=True)
            parts = _Shard.apply(self, layout, full, flows, *tensors)
        else:
            parts = _split(self, layout, full)
        n = len(self.ranks)
        shards = [Shards(parts[i * n : (i + 1) * n], self, layout, t.shape[-2]) for i, t in enumerate(full)]
        return shards[0] if len(shards) == 1 else tuple(shards)

    def replicate(self, tensors: Sequence[Tensor], src: int | None) -> list[Tensor]:
        """The tensors on the world's device, checked to be the same on all ranks, or rank src's on all."""
        return [t.to(self.device) for t in tensors]


def arguments(args: Sequence[Any], index: int, owned: int) -> list[Any]:
    """The arguments for the index-th of the ranks that this process owns.

    Raises ValueError if an argument is for a different number of ranks.
    """
    found = []
    for a in args:
        values = a.tensors if isinstance(a, Shards) else a if isinstance(a, PerRank) else None
        if values is not None and len(values) != owned:
            raise ValueError(
                f"run: expected one value for each of the {owned} ranks of this process, got {len(values)} in "
                f"{a!r:.80}; shard with the same world"
            )
        found.append(a if values is None else values[index])
    return found


class PerRank(list):
    """One value for each rank that this process owns."""


class Shards:
    """The shards of one tensor that this process owns, with the layout and the world they belong to.

    tensors: one (..., n, D) for each owned rank (all P ranks in a simulation, one in a distributed world).
    layout, length: the full sequence has ``length`` positions, assigned to ranks by ``layout``.  dim: the sequence dim,
    -2 (-1 for lse, which has no D).

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(2)
    >>> x = world.shard(torch.arange(6.0).view(6, 1), layout=rl.striped)
    >>> x.tensors[1].flatten(), x.positions[1]
    (tensor([1., 3., 5.]), tensor([1, 3, 5]))
    >>> x.map(lambda t: 10 * t).unshard().flatten()
    tensor([ 0., 10., 20., 30., 40., 50.])
    """

    def __init__(self, tensors: Sequence[Tensor], world: World, layout: Layout, length: int, dim: int = -2):
        self.tensors, self.world, self.layout, self.length, self.dim = list(tensors), world, layout, length, dim
        expected = [self.lengths[rank] for rank in world.ranks]
        if not all(isinstance(t, Tensor) for t in self.tensors):
            kinds = [type(t).__name__ for t in self.tensors]
            raise ValueError(f"Shards: expected a tensor for each rank, got {kinds}; what .map calls must return one")
        got = [t.shape[dim] if t.dim() >= -dim else None for t in self.tensors]
        if got != expected:
            raise ValueError(
                f"Shards: under layout {layout} and {world.size} ranks a sequence of {length} has local lengths "
                f"{expected} on ranks {list(world.ranks)} in dim {dim}, got {got}"
            )
        kinds = {(_without(t, dim), t.dtype) for t in self.tensors}
        if len(kinds) > 1:
            raise ValueError(
                f"Shards: expected one dtype, and shapes that differ in the sequence dim {dim} only, got "
                f"{', '.join(f'{tuple(t.shape)} {t.dtype}' for t in self.tensors)}"
            )

    @property
    def ranges(self) -> tuple[Ranges, ...]:
        """The positions of every rank of the world, whether this process owns it or not."""
        return self.layout.ranges(self.length, self.world.size)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The local sequence length of every rank."""
        return tuple(count(ranges) for ranges in self.ranges)

    @property
    def positions(self) -> list[Tensor]:
        """Global positions of the owned tokens in local order, int64 (n,) for each owned rank, as RoPE needs them."""
        return [
            positions_of(self.ranges[rank], t.device) for rank, t in zip(self.world.ranks, self.tensors, strict=True)
        ]

    @property
    def local(self) -> Tensor:
        """The one shard that this process owns. Raises ValueError in a simulated world of several ranks."""
        if len(self.tensors) != 1:
            raise ValueError(
                f"Shards.local: this process owns {len(self.tensors)} ranks; use .tensors, or .map(fn) for each of them"
            )
        return self.tensors[0]

    def alike(self, tensors: Sequence[Tensor], dim: int = -2) -> Shards:
        """The results of a call, for the same positions as these; used inside the library, so nothing is checked."""
        made = object.__new__(Shards)
        made.tensors, made.world, made.layout, made.length = list(tensors), self.world, self.layout, self.length
        made.dim = dim
        return made

    def map(self, fn: Callable[[Tensor], Tensor]) -> Shards:
        """Apply a function to every owned shard; it must keep the local sequence length."""
        return Shards([fn(t) for t in self.tensors], self.world, self.layout, self.length, self.dim)

    @uncompiled
    def unshard(self) -> Tensor:
        """The full tensor, on every rank; its gradient flows back to each rank's own positions."""
        self.world.agree(
            "unshard",
            {
                "layout": describe(self.layout, self.length, self.world.size),
                "dim": str(self.dim),
                "dtype": str(self.tensors[0].dtype),
                "shape but for the sequence": str(_without(self.tensors[0], self.dim)),
            },
        )
        return _Unshard.apply(self.world, self.layout, self.length, self.dim, *self.tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"Shards are not a tensor and have no .{name}: take .unshard() for the full tensor, .map(fn) for a "
            f"function of each shard, .tensors for the shards themselves"
        )

    def __repr__(self) -> str:
        first = self.tensors[0]
        return (
            f"Shards(length {self.length}, {self.layout}, {self.world.size} ranks, rank {self.world.ranks[0]}: "
            f"{tuple(first.shape)} {first.dtype})"
        )


def describe(layout: Layout, length: int, size: int) -> str:
    """A text that two ranks share only if they split a sequence in the same way."""
    ranges = layout.ranges(length, size)
    # Not hash(): that of a short range differs from process to process. Lengths of documents say as much as all ranges.
    told = repr(getattr(ranges[0], "lengths", ranges))
    return f"{layout} of {length} over {size}: {crc32(told.encode()):08x}"


def _without(t: Tensor, dim: int) -> tuple[int, ...]:
    """The sizes of all other dims."""
    shape = list(t.shape)
    del shape[dim]
    return tuple(shape)


def take(full: Tensor, ranges: Ranges, dim: int) -> Tensor:
    """The positions of one rank, as a new tensor."""
    return full.index_select(dim, positions_of(ranges, full.device))


def _check_sharding(world: World, tensors: Sequence[Any], layout: Any, src: int | None) -> None:
    if not tensors:
        raise ValueError("shard: expected at least one tensor (..., S, D), got none")
    if not isinstance(layout, Layout):
        raise ValueError(f"shard: expected a layout such as rl.contiguous, rl.striped or rl.zigzag, got {layout!r}")
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ValueError(f"shard: expected tensors (..., S, D), got {type(t).__name__}")
        if t.is_nested or t.layout != torch.strided:
            kind = "a nested tensor" if t.is_nested else f"one in layout {t.layout}"
            raise ValueError(f"shard: expected dense tensors (..., S, D), got {kind}; pad it, or call .to_dense()")
        if t.is_meta and world.device.type != "meta":
            raise ValueError(
                f"shard: expected tensors with values, got one on the meta device, which has none, for a world on "
                f"{world.device}; SimulatedWorld(P, device='meta') counts bytes and messages without values"
            )
        check_no_tangent("shard", t)
        if t.dim() < 2:
            raise ValueError(
                f"shard: expected tensors (..., S, D), which are split along S, got shape {tuple(t.shape)}; "
                f"give a (S,) tensor a last dim with unsqueeze(-1)"
            )
    if src is not None and not 0 <= src < world.size:
        raise ValueError(f"shard: expected src=None or a rank in 0..{world.size - 1}, got {src!r}")


def _split(world: World, layout: Layout, full: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor's shards, tensor by tensor; those of one rank and dtype lie in one buffer, in the order given."""
    parts: list[list[Tensor]] = [[] for _ in full]
    for rank in world.ranks:
        takes = [take(t, layout.ranges(t.shape[-2], world.size)[rank], -2) for t in full]
        if len({t.dtype for t in takes}) == 1 and len(takes) > 1:
            buffer = torch.cat([t.reshape(-1) for t in takes])
            takes = unpack(buffer, [t.shape for t in takes])
        for mine, t in zip(parts, takes, strict=True):
            mine.append(t)
    return [t for mine in parts for t in mine]


def check_grad_mode(op: str, known: Sequence[Mapping[str, Any]]) -> None:
    """Raise if one rank needs a gradient and another cannot record one: it would never enter the backward.

    known: what all ranks have said, so that all of them raise.
    """
    needing = [r for r, rank in enumerate(known) if rank["requires_grad"]]
    without = [r for r, rank in enumerate(known) if not rank["grad mode"]]
    frozen = [r for r, rank in enumerate(known) if rank.get("inference")]
    if needing and without:
        raise ValueError(
            f"{op}: ranks {needing} need a gradient, but ranks {without} call it under no_grad or inference_mode and "
            f"would never enter the backward; use the same mode on every rank"
        )
    if needing and frozen:
        raise ValueError(
            f"{op}: ranks {needing} need a gradient, but ranks {frozen} pass tensors made under torch.inference_mode, "
            f"which a backward cannot use; clone them outside it, or make them under no_grad"
        )


def check_no_tangent(op: str, *tensors: Tensor) -> None:
    """Raise if a tensor is inside a torch.func transform or carries a forward-mode derivative, which would be lost."""
    if torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return  # neither is in use
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise ValueError(
            f"{op}: the transforms of torch.func (grad, vjp, jvp, vmap) are not supported; use torch.autograd.grad or "
            f"backward, or dense attention"
        )
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise ValueError(
            f"{op}: forward-mode derivatives (torch.autograd.forward_ad) are not supported; use the backward mode, or "
            f"dense attention"
        )


class _Shard(torch.autograd.Function):
    """Full tensors to shards; the backward assembles the full gradient, on every rank."""

    @staticmethod
    def forward(ctx, world, layout, full, flows, *tensors):
        ctx.world, ctx.layout = world, layout
        ctx.like = [(t.shape[-2], t.device) for t in tensors]
        return tuple(_split(world, layout, full))

    @staticmethod
    def backward(ctx, *grads):
        n = len(ctx.world.ranks)
        full = []
        for i, (length, device) in enumerate(ctx.like):
            ctx.world.agree("backward of shard", {"tensor": str(i)})
            full.append(ctx.world.assemble(grads[i * n : (i + 1) * n], ctx.layout, length, -2).to(device))
        return None, None, None, None, *full


class _Unshard(torch.autograd.Function):
    """Shards to the full tensor; the backward gives each rank its own positions of the gradient."""

    @staticmethod
    def forward(ctx, world, layout, length, dim, *parts):
        ctx.world, ctx.layout, ctx.length, ctx.dim = world, layout, length, dim
        return world.assemble(parts, layout, length, dim)

    @staticmethod
    def backward(ctx, grad):
        ranges = ctx.layout.ranges(ctx.length, ctx.world.size)
        return None, None, None, None, *(take(grad, ranges[rank], ctx.dim) for rank in ctx.world.ranks)

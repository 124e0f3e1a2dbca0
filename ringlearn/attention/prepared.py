"""What of a call does not depend on the numbers in its tensors: found out once, and found again by what it depends on.

A training step makes the same call in every layer, and again in the next step. Its arguments have to be checked, its
tiles planned and its kernel chosen only when something changes: a shape, a dtype, a device, the layout, the mask, an
option, or a switch of torch's. A world keeps the last ``KEPT`` calls.

What a call holds on to is small: no tensor of the caller's is in it, and a mask from a user's function, which may hold
large ones, is never kept.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import checksum, whole_number
from ..kernels import Kernel, Scores
from ..layouts import Layout, Ranges
from ..masks import Mask, documents
from ..tiles import shift
from ..worlds.world import Shards, World, check_no_tangent, describe
from .inputs import Request, check_arguments, check_inputs, check_strategy, parts
from .strategy import Spec, Strategy

KEPT = 32  # calls of a world


@dataclass(frozen=True)
class Call:
    """A call that all ranks have agreed on: what its forward and its backward run, and what its results are.

    rows: how many rows of the batch lie in line, because the mask differs from row to row; None if they do not.
    """

    op: str
    strategy: Strategy
    world: World
    spec: Spec
    return_lse: bool
    layout: Layout
    length: int
    rows: int | None


class Prepared:
    """A call whose arguments were checked on this rank.

    kernel, scores: what computes it, and how scores are changed.
    """

    def __init__(self, request: Request, strategy: Strategy, world: World):
        """Raises ValueError, or what the user's own objects raise, if an argument is wrong."""
        check_inputs(request, world)
        check_strategy(request, strategy, world)
        self.kernel, self.scores = check_arguments(request)
        self._op, self._strategy, self._world = request.op, strategy, world
        self._mask, self._scale, self._return_lse = request.mask, request.scale, bool(request.return_lse)
        self._q_start = whole_number(request.q_start)
        self._plain = isinstance(request.q, Tensor)
        self._layout = request.layout if self._plain else request.q.layout
        self._head_dim = parts(request.q)[0].shape[-1]
        # A mask that holds a GPU tensor would make the host wait, so what nobody reads is not told.
        self._same = _signature(request, strategy, self.kernel, self.scores, world) if world.check else {}
        self._calls: dict[Hashable, Call] = {}
        self._largest: dict[Hashable, int] = {}

    def same(self, sinks: Tensor | None) -> dict[str, str]:
        """What must be the same on all ranks."""
        return self._same | {"sinks": _told(sinks)} if self._same else {}

    def call(self, request: Request, lengths: tuple[tuple[int, int], ...]) -> Call:
        """The call between ranks that hold so many queries and so many keys each."""
        found = self._calls.get(lengths)
        if found is None:
            found = self._calls[lengths] = self._between(request, lengths)
        if request.sinks is None:
            return found
        return replace(found, spec=replace(found.spec, sinks=request.sinks.detach(), _others={}))

    def _between(self, request: Request, lengths: tuple[tuple[int, int], ...]) -> Call:
        world, layout, mask, B = self._world, self._layout, self._mask, self._mask.rows
        S_q, S_k = self._totals(lengths) if self._plain else (request.q.length, request.k.length)
        mask.check(self._q_start + S_q, S_k)
        scale = 1 / math.sqrt(self._head_dim) if self._scale is None else float(self._scale)
        q_ranges = tuple(shift(ranges, self._q_start) for ranges in layout.ranges(S_q, world.size))
        k_ranges = layout.ranges(S_k, world.size)
        if B is not None:  # a mask that differs from row to row: the rows become one packed sequence
            mask = documents([S_k] * B) & mask.packed(B, S_k)
            q_ranges, k_ranges = (tuple(_rows_in_line(r, B, S_k) for r in x) for x in (q_ranges, k_ranges))
        spec = Spec(mask, q_ranges, k_ranges, scale, self.kernel, scores=self.scores)
        if self._strategy.prepare:
            q, k = (
                Shards([x], world, layout, S) if self._plain else x for x, S in ((request.q, S_q), (request.k, S_k))
            )
            spec = self._strategy.prepare(spec, world, q, k)
        return Call(self._op, self._strategy, world, spec, self._return_lse, layout, S_q, B)

    def _totals(self, lengths: tuple[tuple[int, int], ...]) -> list[int]:
        """The lengths of queries and keys, from those that the ranks hold."""
        world, layout, totals = self._world, self._layout, []
        if len(lengths) == 1:  # an unchecked world: every rank is taken to hold equally many tokens
            lengths = lengths * world.size
        for name, per_rank in zip("qk", zip(*lengths, strict=True), strict=True):
            total = sum(per_rank)
            expected = [sum(map(len, ranges)) for ranges in layout.ranges(total, world.size)]
            if list(per_rank) != expected:
                raise ValueError(
                    f"{self._op}: the ranks hold {list(per_rank)} tokens of {name}; for {total} in all, layout "
                    f"{layout} has {expected}. Split with world.shard(..., layout=rl.{layout}) or "
                    f"layout.positions(S, P, rank)"
                )
            totals.append(total)
        return totals

    def largest_message(self, call: Call, k: Tensor, v: Tensor, backward: bool) -> int:
        """Bytes of the largest message of a call, over all ranks.  k, v: those of any rank."""
        key = call.spec.k_ranges, backward
        if key not in self._largest:
            self._largest[key] = call.spec.largest_message(k, v, backward)
        return self._largest[key]


def prepared(request: Request, strategy: Strategy, world: World) -> Prepared:
    """The call, checked. Raises what ``Prepared`` raises."""
    key = _key(request, strategy, world)
    if key is None:
        return Prepared(request, strategy, world)
    found = world.prepared.get(key)
    if found is not None:
        # These belong to tensors, and leave no trace in their shapes.
        check_no_tangent(request.op, *(t for x in request.inputs for t in parts(x)))
        check_no_tangent(request.op, *([] if request.sinks is None else [request.sinks]))
        return found
    found = Prepared(request, strategy, world)
    while len(world.prepared) >= KEPT:
        del world.prepared[next(iter(world.prepared))]
    world.prepared[key] = found
    return found


def _key(request: Request, strategy: Strategy, world: World) -> Hashable | None:
    """Everything that the checks, the plan and the choice of a kernel depend on; None if the call is not to be kept.

    Numbers go in with their types: True and 1 are equal, and only one of them is a scale.
    """
    q, k, v = inputs = request.inputs
    mask, kernel, sinks, slopes = request.mask, request.kernel, request.sinks, request.alibi
    if type(q) is Shards and type(k) is Shards and type(v) is Shards:
        if not q.world is k.world is v.world is world:
            return None
        of_shards = tuple((x.layout, x.length, x.dim, *map(_kind, x.tensors)) for x in inputs)
    elif all(isinstance(x, Tensor) for x in inputs):
        of_shards = tuple(map(_kind, inputs))
    else:
        return None
    if (
        request.unsupported
        or strategy.prepare is not None
        or not (isinstance(mask, Mask) and mask.exact)
        or not (kernel is None or isinstance(kernel, str))
        or not (slopes is None or type(slopes) is tuple and all(type(x) is float for x in slopes))
        or not (sinks is None or isinstance(sinks, Tensor))
        or type(request.q_start) is not int
    ):
        return None
    key = (
        request.op,
        strategy,
        of_shards,
        mask,
        kernel,
        (type(request.scale), request.scale, type(request.softcap), request.softcap, slopes),
        (request.q_start, bool(request.return_lse), request.layout, world.check),
        None if sinks is None else _kind(sinks),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        hash(key)
    except TypeError:  # an argument that is wrong, or a mask of the user's
        return None
    return key


def _kind(t: Tensor) -> Hashable:
    return t.shape, t.dtype, t.device


def _signature(request: Request, strategy: Strategy, kernel: Kernel, scores: Scores, world: World) -> dict[str, str]:
    """What must be the same on all ranks, but for the sinks."""
    q, k, v = (parts(x)[0] for x in request.inputs)
    B, H, _, D_k = q.shape
    same = {
        "strategy": strategy.name,
        "B, H, G, D_k, D_v": f"{B}, {H}, {k.shape[1]}, {D_k}, {v.shape[-1]}",
        "dtype": str(q.dtype),
        "device type": q.device.type,
        "mask": request.mask.signature(),
        "scale": repr(request.scale),
        "kernel": kernel.name,
        "q_start": str(whole_number(request.q_start)),
        "return_lse": str(bool(request.return_lse)),
        "softcap": str(scores.softcap),
        "alibi": str(scores.slopes),
    }
    if isinstance(request.q, Tensor):
        return same | {"layout": str(request.layout)}
    sharded = {"q": request.q, "k": request.k}
    return same | {f"layout of {name}": describe(x.layout, x.length, world.size) for name, x in sharded.items()}


def _told(sinks: Tensor | None) -> str:
    """A text that is equal on two ranks only if they have the same sinks, and both or none of them a gradient of them.

    A gradient of which one rank has no share would be wrong on all of them once it is summed.
    """
    if sinks is None:
        return "None"
    wanted = torch.is_grad_enabled() and sinks.requires_grad
    return f"{sinks.dtype} {'with' if wanted else 'without'} a gradient, checksum {checksum(sinks)}"


def _rows_in_line(ranges: Ranges, B: int, S: int) -> Ranges:
    """The positions of a rank's tokens in such a sequence, where each row has S positions."""
    return tuple(r for b in range(B) for r in shift(ranges, b * S))


def lengths_of(known: Sequence[dict[str, Any]]) -> tuple[tuple[int, int], ...]:
    """How many queries and keys each rank says that it holds."""
    return tuple(tuple(rank["lengths"]) for rank in known)

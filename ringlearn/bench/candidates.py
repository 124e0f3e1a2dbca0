"""The candidates: the ways to compute attention that are measured against each other."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..attention.call import attention_over_ranks
from ..attention.inputs import Request
from ..attention.table import STRATEGIES, Entry
from ..costs.problem import Problem
from ..kernels.fa4 import missing
from ..layouts import Layout
from ..masks import Mask
from ..partial import Partial, accumulation_dtype
from ..tiles import Kind, Tile
from ..worlds import DistributedWorld, SimulatedWorld
from .calls import Attention, fastest, one_device, packed_on_one_device
from .masks import MaskChoice, layout_of
from .silent import without_messages

DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass
class Candidate:
    """One way to compute attention, called with this rank's q, k, v (B, H or G, n, D).

    name: its name in the rows of the record.  scores: how many the mask leaves in the whole problem.
    tokens: how many the whole problem has.  ranks: how many share it.
    on_all_tokens: the call that the errors are taken of, if it is another one: of one device, over all tokens.
    layout: its name.  split: the layout itself.  where: the positions that this rank holds.
    world: the one whose symmetric memory it uses.  not_captured: why no CUDA graph of it is made.
    without_messages: the same computation, with nothing sent.
    calls_per_turn: how many calls are timed together, so that all candidates compute equally long in a turn: a GPU's
    clock depends on how long it has been busy.
    """

    name: str
    call: Attention
    scores: int
    tokens: int
    ranks: int
    on_all_tokens: Attention | None = None
    layout: str | None = None
    split: Layout | None = None
    where: Callable[[], Tensor] | None = None
    kernel: str | None = None
    transport: str | None = None
    world: DistributedWorld | None = None
    not_captured: str | None = None
    without_messages: Attention | None = None
    calls_per_turn: int = 1


def candidates(
    tokens: int, choice: MaskChoice, options: argparse.Namespace, worlds: Mapping[str, DistributedWorld]
) -> list[Candidate]:
    """All candidates for so many tokens per rank, one device first.

    worlds: by name; the first has one axis, and a strategy is measured in each world that has as many axes as it needs.
    """
    world = next(iter(worlds.values()))
    S, P = tokens * world.size, world.size
    lengths = choice.lengths(tokens, P, share=P)
    mask, scores = choice.mask(lengths), choice.scores(lengths)
    no_gpu = None if world.device.type == "cuda" else "there is no GPU"
    found = _on_one_device(tokens, choice, options, world, no_gpu)
    for name in options.strategies:
        entry = STRATEGIES[name]
        for layout in options.layouts:
            split = layout_of(layout, lengths)
            where = partial(split.positions, S, P, world.rank, world.device)
            for kernel in options.kernel if entry.strategy.has_kernel else [None]:
                given = dict(mask=mask, layout=split, kernel=kernel)
                silent: dict[tuple[int, ...], Attention] = {}  # the same for all transports
                wires = set()
                for world in (w for w in worlds.values() if len(w.shape) == entry.strategy.axes):
                    wire = world.transport.split()[0]
                    if not entry.strategy.rotates:  # its messages do not use symmetric memory
                        wire = wire.replace("symmetric", "nccl")
                    if (world.shape, wire) in wires:
                        continue
                    wires.add((world.shape, wire))
                    silent.setdefault(world.shape, _without_messages(entry, world, given))
                    call = partial(entry.function, **given, world=world)
                    reason = no_gpu
                    if not reason and world.size > 1 and wire != "symmetric":
                        reason = f"the capture of messages over {wire} may hang"
                    how = dict(layout=layout, split=split, where=where, kernel=kernel, transport=wire)
                    how |= dict(world=world, not_captured=reason)
                    found.append(Candidate(name, call, scores, S, P, **how, without_messages=silent[world.shape]))
    for name, function in options.functions.items():
        for layout in options.layouts:
            given = dict(layout=layout, group=world.group)
            call = _checked(partial(_with_mask(function, choice, mask), **given))
            reason = no_gpu or (None if options.graph_compare else "only with --graph-compare")
            where = partial(layout_of(layout, lengths).positions, S, P, world.rank, world.device)
            if own := getattr(function, "positions", None):
                where = partial(own, mask, S, P, world.rank)
            how = dict(layout=layout, where=where, not_captured=reason)
            found.append(Candidate(name.rpartition(":")[2], call, scores, S, P, **how))
    return found


def _on_one_device(
    tokens: int, choice: MaskChoice, options: argparse.Namespace, world: DistributedWorld, no_gpu: str | None
) -> list[Candidate]:
    """One device over one rank's tokens, with each kernel that people would take for this mask."""
    own, everything = (choice.lengths(tokens, world.size, share=share) for share in (1, world.size))
    calls: dict[str, tuple[Attention, Attention]] = {}
    if not choice.documents and choice.window is None:
        backends = fastest(world.device, getattr(torch, options.dtype))
        alone = one_device(backends, is_causal=choice.causal)
        calls["cudnn" if backends == [SDPBackend.CUDNN_ATTENTION] else "torch's choice"] = alone, alone
    names = ["dense mask"] if no_gpu and not calls else []
    if not no_gpu:
        names = ([] if calls else ["fa2"]) + ([] if missing() else ["fa4"])
    for name in names:
        calls[name] = tuple(packed_on_one_device(name, choice, lengths, world.device) for lengths in (own, everything))
    what, how = (choice.scores(own), tokens, 1), dict(not_captured=no_gpu, calls_per_turn=world.size)
    return [
        Candidate("one device", alone, *what, on_all_tokens=on_all_tokens, kernel=name, **how)
        for name, (alone, on_all_tokens) in calls.items()
    ]


def _with_mask(function: Attention, choice: MaskChoice, mask: Mask) -> Attention:
    """A function from elsewhere under this mask, which it gets as ``mask``; those without computes causal attention."""
    if "mask" in inspect.signature(function).parameters:
        return partial(function, mask=mask)
    if choice.name == "causal":
        return function

    def refuse(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        raise NotImplementedError("it computes only causal attention, since it takes no mask=")

    return refuse


def _checked(function: Attention) -> Attention:
    """A function from elsewhere, whose result must have q's shape: with another one its error would mean nothing."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        if not isinstance(out, Tensor) or out.shape != q.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"expected a tensor of q's shape, {tuple(q.shape)}, got {got}")
        return out

    return call


def _without_messages(entry: Entry, world: DistributedWorld, given: Mapping[str, Any]) -> Attention:
    strategy = without_messages(entry.strategy)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_over_ranks(Request(strategy.name, q, k, v, **given, world=world), lambda: strategy)

    return call


class _NoWork:
    """A kernel whose results have the right shapes and nothing in them, for a rehearsal of messages."""

    name = "no work"

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        rows = *q.shape[:2], tile.shape[0]
        return Partial(q.new_empty(*rows, v.shape[-1]), q.new_empty(rows, dtype=accumulation_dtype(q.dtype)))

    def backward(self, dout, q, k, v, out, lse, tile, scale, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(t.new_empty(*t.shape[:2], n, t.shape[-1]) for t, n in zip((q, k, v), tile.shape + tile.shape[1:]))


def sent_bytes(entry: Entry, choice: MaskChoice, problem: Problem) -> list[int]:
    """Bytes that rank 0 sends in the forward, and in the backward if the problem has one.

    They are counted in a rehearsal: the same call on as many simulated ranks, on tensors that have a shape and no
    numbers, with a kernel that computes nothing.
    """
    nodes, places = problem.shape
    P, dtype = problem.ranks, DTYPES[problem.itemsize]
    world = SimulatedWorld((nodes, places) if entry.strategy.axes == 2 else P, device="meta", count_memory=False)
    shapes = [(problem.B, n, problem.S, problem.D) for n in (problem.H, problem.G, problem.G)]
    q, k, v = (torch.empty(x, dtype=dtype, device="meta", requires_grad=problem.backward) for x in shapes)
    mask = choice.mask(choice.lengths(problem.S // P, P, share=P))
    how = {"kernel": _NoWork()} if entry.strategy.has_kernel else {}
    out = entry.function(*world.shard(q, k, v, layout=problem.layout), mask=mask, **how)
    sent = [world.trace.bytes_sent(0)]
    if problem.backward:
        out = out.unshard()
        out.backward(torch.empty_like(out))
        sent.append(world.trace.bytes_sent(0))
    return sent

"""The candidates: the ways to compute attention that are measured against each other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
from ..layouts import LAYOUTS
from ..masks import Mask, causal, full
from ..worlds import DistributedWorld, SimulatedWorld
from .calls import Attention, fastest, one_device
from .silent import without_messages

MASKS: dict[str, Mask] = {"causal": causal, "full": full}
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass
class Candidate:
    """One way to compute attention, called with this rank's q, k, v (B, H or G, s, D).

    name: its name in the rows of the record.  tokens: how many the whole problem has.  ranks: how many share it.
    world: the one whose symmetric memory it uses.  not_captured: why no CUDA graph of it is made.
    without_messages: the same computation, with nothing sent.
    calls_per_turn: how many calls are timed together, so that all candidates compute equally long in a turn: a GPU's
    clock depends on how long it has been busy.
    """

    name: str
    call: Attention
    tokens: int
    ranks: int
    layout: str | None = None
    kernel: str | None = None
    transport: str | None = None
    world: DistributedWorld | None = None
    not_captured: str | None = None
    without_messages: Attention | None = None
    calls_per_turn: int = 1


def candidates(s: int, options: argparse.Namespace, worlds: Mapping[str, DistributedWorld]) -> list[Candidate]:
    """All candidates for s tokens per rank, one device first.

    worlds: by name; the first has one axis, and a strategy is measured in each world that has as many axes as it needs.
    """
    world = next(iter(worlds.values()))
    S, mask = s * world.size, MASKS[options.mask]
    no_gpu = None if world.device.type == "cuda" else "there is no GPU"
    backends = fastest(world.device, getattr(torch, options.dtype))
    alone = one_device(backends, is_causal=mask is causal)
    picked = "cudnn" if backends == [SDPBackend.CUDNN_ATTENTION] else "torch's choice"
    found = [Candidate("one device", alone, s, 1, kernel=picked, not_captured=no_gpu, calls_per_turn=world.size)]
    for name in options.strategies:
        entry = STRATEGIES[name]
        for layout in options.layouts:
            for kernel in options.kernel if entry.strategy.has_kernel else [None]:
                given = dict(mask=mask, layout=LAYOUTS[layout], kernel=kernel)
                silent: dict[tuple[int, ...], Attention] = {}  # the same for all transports
                for world in (w for w in worlds.values() if len(w.shape) == entry.strategy.axes):
                    silent.setdefault(world.shape, _without_messages(entry, world, given))
                    call = partial(entry.function, **given, world=world)
                    transport = world.transport.split()[0]
                    reason = no_gpu
                    wire = transport if entry.strategy.rotates else transport.replace("symmetric", "nccl")
                    if not reason and world.size > 1 and wire != "symmetric":
                        reason = f"the capture of messages over {wire} may hang"
                    how = layout, kernel, transport
                    found.append(Candidate(name, call, S, world.size, *how, world, reason, silent[world.shape]))
    for name, function in options.functions.items():
        for layout in options.layouts:
            call = _checked(partial(function, layout=layout, group=world.group))
            reason = no_gpu or (None if options.graph_compare else "only with --graph-compare")
            found.append(Candidate(name.rpartition(":")[2], call, S, world.size, layout, not_captured=reason))
    return found


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


def sent_bytes(entry: Entry, mask: Mask, problem: Problem) -> list[int]:
    """Bytes that rank 0 sends in the forward, and in the backward if the problem has one.

    They are counted in a rehearsal, and scaled up, since messages grow with the tokens: the same call on as many
    simulated ranks, with two tokens each, on tensors that have a shape and no numbers.
    """
    nodes, places = problem.shape
    P, dtype = problem.ranks, DTYPES[problem.itemsize]
    world = SimulatedWorld((nodes, places) if entry.strategy.axes == 2 else P, device="meta", count_memory=False)
    heads = problem.H, problem.G, problem.G
    shapes = [(problem.B, n, 2 * P, problem.D) for n in heads]
    q, k, v = (torch.empty(x, dtype=dtype, device="meta", requires_grad=problem.backward) for x in shapes)
    out = entry.function(*world.shard(q, k, v, layout=problem.layout), mask=mask)
    sent = [world.trace.bytes_sent(0)]
    if problem.backward:
        out = out.unshard()
        out.backward(torch.empty_like(out))
        sent.append(world.trace.bytes_sent(0))
    return [n * problem.S // P // 2 for n in sent]

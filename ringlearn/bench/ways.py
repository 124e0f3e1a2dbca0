"""The ways to compute attention that are measured."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..attention.call import attention_over_ranks
from ..attention.inputs import Request
from ..attention.table import STRATEGIES, Entry
from ..layouts import LAYOUTS, Layout
from ..masks import Mask, causal, full
from ..worlds import DistributedWorld, SimulatedWorld
from .calls import Attention
from .silent import without_messages

MASKS: dict[str, Mask] = {"causal": causal, "full": full}


@dataclass
class Way:
    """One way to compute attention, called with this rank's q, k, v (B, H or G, s, D).

    tokens: that the problem has, and ranks: that share it. in_a_row: how many calls are timed together, so that all
    ways compute as much: a GPU's clock depends on how long it has been busy. world: whose symmetric memory it uses.
    not_captured: why no CUDA graph of it is made. still: the same computing without messages.
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
    still: Attention | None = None
    in_a_row: int = 1


def ways(s: int, options: argparse.Namespace, worlds: Mapping[str, DistributedWorld]) -> list[Way]:
    """Everything that is measured with s tokens per rank, one device first.

    worlds: by what they are called; the first has one axis, and a strategy gets a row for each that has its axes.
    """
    world = next(iter(worlds.values()))
    S, mask = s * world.size, MASKS[options.mask]
    no_gpu = None if world.device.type == "cuda" else "there is no GPU"
    backends = fastest(world.device, getattr(torch, options.dtype))
    alone = one_device(backends, is_causal=mask is causal)
    picked = "cudnn" if backends == [SDPBackend.CUDNN_ATTENTION] else "torch's choice"
    found = [Way("one device", alone, s, 1, kernel=picked, not_captured=no_gpu, in_a_row=world.size)]
    for name in options.strategies:
        entry = STRATEGIES[name]
        for layout in options.layouts:
            for kernel in options.kernel:
                given = dict(mask=mask, layout=LAYOUTS[layout], kernel=kernel)
                still: dict[tuple[int, ...], Attention] = {}  # the same for all transports
                for world in (w for w in worlds.values() if len(w.shape) == entry.strategy.axes):
                    still.setdefault(world.shape, _still(entry, world, given))
                    call = partial(entry.function, **given, world=world)
                    transport = world.transport.split()[0]
                    reason = no_gpu
                    wire = transport if entry.strategy.rotates else transport.replace("symmetric", "nccl")
                    if not reason and world.size > 1 and wire != "symmetric":
                        reason = f"the capture of messages over {wire} may hang"
                    names = layout, kernel, transport
                    found.append(Way(name, call, S, world.size, *names, world, reason, still[world.shape]))
    for name, function in options.functions.items():
        for layout in options.layouts:
            call = _of_q_s_shape(partial(function, layout=layout, group=world.group))
            reason = no_gpu or (None if options.graph_compare else "only with --graph-compare")
            found.append(Way(name.rpartition(":")[2], call, S, world.size, layout, not_captured=reason))
    return found


def _of_q_s_shape(function: Attention) -> Attention:
    """Somebody else's function, held to what it should return: a difference to another shape would mean nothing."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        if not isinstance(out, Tensor) or out.shape != q.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"expected a tensor of q's shape, {tuple(q.shape)}, got {got}")
        return out

    return call


def fastest(device: torch.device, dtype: torch.dtype) -> list[SDPBackend]:
    """What one device is measured with: cuDNN's kernels where they are faster than flash, from Hopper on."""
    if device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device)[0] >= 9:
        return [SDPBackend.CUDNN_ATTENTION]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def one_device(backends: list[SDPBackend], is_causal: bool) -> Attention:
    """SDPA with these backends."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=k.shape[1] < q.shape[1])

    return call


def _still(entry: Entry, world: DistributedWorld, given: Mapping[str, Any]) -> Attention:
    strategy = without_messages(entry.strategy)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_over_ranks(Request(strategy.name, q, k, v, **given, world=world), lambda: strategy)

    return call


def sent_bytes(
    entry: Entry,
    layout: Layout,
    mask: Mask,
    shape: tuple[int, ...],
    s: int,
    heads: Sequence[int],
    B: int,
    dtype: torch.dtype,
    backward: bool,
) -> list[int]:
    """Bytes that rank 0 sends in the forward, and in the backward if there is one.  shape: that of the world.

    Counted in a rehearsal: the same call on as many simulated ranks with two tokens each, which have a shape and no
    numbers. Messages grow with the tokens.
    """
    (H, G, D), P = heads, prod(shape)
    world = SimulatedWorld(shape if len(shape) == 2 else P, device="meta", count_memory=False)
    full_size = [torch.empty(B, n, 2 * P, D, dtype=dtype, device="meta", requires_grad=backward) for n in (H, G, G)]
    out = entry.function(*world.shard(*full_size, layout=layout), mask=mask)
    sent = [world.trace.bytes_sent(0)]
    if backward:
        out = out.unshard()
        out.backward(torch.empty_like(out))
        sent.append(world.trace.bytes_sent(0))
    return [n * s // 2 for n in sent]

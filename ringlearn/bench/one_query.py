"""Measuring one decode_attention: one query in each sequence against a full cache, on one device and over ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..attention.decoding import KVCache, decode_attention
from ..worlds import DistributedWorld
from .cached import Sizes, exact, new_caches, one_rank
from .calls import Call, fastest, numbers, one_device
from .timing import LONG, attempt, captured, everyone, in_turn, once, slowest

Row = dict[str, Any]
SUM, ONE, SHARED = "a plain sum", "one device", "over the ranks"
OURS = (SUM, ONE, SHARED)
SMALL = 2**28  # bytes up to which a copy of k and v side by side is made, so that one kernel sums them
TURN = 2**30  # bytes that are read in a turn, at least
SDPA = {"SDPA flash": [SDPBackend.FLASH_ATTENTION], "SDPA cuDNN": [SDPBackend.CUDNN_ATTENTION]}


@dataclass
class Way:
    """One way to compute the attention of one layer.

    layers: a call for each layer.  ranks: how many share its bytes.  not_captured: why no CUDA graph of it is made.
    """

    name: str
    layers: Sequence[Callable[[], Any]]
    ranks: int = 1
    what: Mapping[str, Any] = field(default_factory=dict)
    not_captured: str | None = None


def measure(sizes: Sizes, options: argparse.Namespace, world: DistributedWorld) -> list[Row]:
    """The rows for one size. All ranks call it together; a time is that of the slowest rank."""
    H, _, D = sizes.heads
    q = numbers((sizes.B, H, 1, D), sizes.dtype, world.device, seed=2**31)
    alone = sizes.fits(1)
    worlds = [one_rank(world.device)] * alone + [world] * (world.size > 1)
    caches = new_caches(worlds, sizes, options.interleave)
    whole, shared = caches[0] if alone else [], caches[-1] if world.size > 1 else []
    layers = len(caches[0])
    want = exact(q, whole[0]) if alone and sizes.B * sizes.S <= options.error_tokens else None
    rows, timed = [], []
    for way in _ways(sizes, q, whole, shared, options, world):
        row = _new_row(way, sizes, layers)
        rows.append(row)
        row["error"], row["problem"] = attempt(partial(_error, way, q, want), world.group)
        if row["problem"]:
            continue
        if row["error"] is not None:
            row["error"] = max(everyone(row["error"], world.group))
        calls = layers * max(1, round(TURN / (layers * sizes.nbytes(1)))) if world.device.type == "cuda" else layers
        timed.append((row, _turn(way.layers, calls), calls))
        if options.graph:
            replay, row["not_captured"] = None, way.not_captured
            if not way.not_captured:
                replay, row["not_captured"] = attempt(partial(captured, timed[-1][1]), world.group)
            if replay:
                rows.append(row | {"graph": True})
                timed.append((rows[-1], replay, calls))
    seconds = [max(everyone(once(call, world.device), world.group)) for _, call, _ in timed]
    lead = [t < LONG for t in seconds]
    times = slowest(everyone(in_turn([call for _, call, _ in timed], lead, options.repeats, world), world.group))
    for (row, _, calls), rounds in zip(timed, times, strict=True):
        each = [ms / calls for ms in rounds]
        row["ms"], row["range_ms"] = median(each), [min(each), max(each)]
        row["gb_per_s"] = row["bytes"] / row["ms"] / 1e6
    derive(rows)
    return rows


def _turn(layers: Sequence[Callable[[], Any]], calls: int) -> Call:
    def run() -> None:
        with torch.no_grad():
            for i in range(calls):
                layers[i % len(layers)]()

    return run


def _new_row(way: Way, sizes: Sizes, layers: int) -> Row:
    row = {"way": way.name, "batch": sizes.B, "cached": sizes.S, "ranks": way.ranks, "layers": layers, **way.what}
    return row | {"bytes": sizes.nbytes(way.ranks), "graph": False, "not_captured": None, "problem": None}


def _error(way: Way, q: Tensor, want: Tensor | None) -> float | None:
    """The relative error of the first layer; its call also compiles what is compiled."""
    with torch.no_grad():
        out = way.layers[0]()
    if way.name == SUM:
        return None
    if not isinstance(out, Tensor) or out.shape != q.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"expected a tensor of q's shape, {tuple(q.shape)}, got {got}")
    return None if want is None else float((out.to(want.dtype) - want).norm() / want.norm())


def _ways(
    sizes: Sizes,
    q: Tensor,
    whole: list[KVCache],
    shared: list[KVCache],
    options: argparse.Namespace,
    world: DistributedWorld,
) -> list[Way]:
    no_gpu = None if world.device.type == "cuda" else "there is no GPU"
    found = [Way(SUM, sums(whole or shared), 1 if whole else world.size, not_captured=no_gpu)]
    if whole:
        found.append(Way(ONE, [partial(decode_attention, q, cache) for cache in whole], not_captured=no_gpu))
        for name, backends in SDPA.items() if not no_gpu else [("SDPA", fastest(world.device, sizes.dtype))]:
            calls = [partial(one_device(backends, is_causal=False), q, *cache.whole(0)) for cache in whole]
            found.append(Way(name, calls, not_captured=no_gpu))
    for exchange in options.exchange if shared else ():
        wire = world.transport.split()[0]
        if not can_be_captured(world, exchange):
            wire = wire.replace("symmetric", "nccl")
        reason = no_gpu or (None if wire == "symmetric" else f"the capture of messages over {wire} may hang")
        calls = [partial(decode_attention, q, cache, exchange=exchange) for cache in shared]
        found.append(Way(SHARED, calls, world.size, {"exchange": exchange, "transport": wire}, reason))
    for name, function in options.functions.items() if whole else ():
        reason = no_gpu or (None if options.graph_compare else "only with --graph-compare")
        prepare = getattr(function, "prepare", lambda k, v, H: (k, v))
        calls = []
        for cache in whole:
            k, v = (t.tensor_split(world.size, 2)[world.rank] for t in cache.whole(0))
            calls.append(_Other(function, prepare, q, k, v, world.group))
        found.append(Way(name.rpartition(":")[2], calls, world.size, {"transport": None}, reason))
    return found


def can_be_captured(world: DistributedWorld, exchange: str) -> bool:
    """Whether an exchange takes no NCCL: in one kernel, or between two ranks as a hop of a ring."""
    neighbours = world.size == 2 and world.transport == "symmetric"
    return exchange == "all-gather" and (neighbours or world.mailboxes(0) is not None)


class _Other:
    """A function from elsewhere. Its keys and values are prepared in its first call, which is never timed."""

    def __init__(self, function, prepare, q, k, v, group):
        self.function, self.prepare, self.q, self.kv, self.group = function, prepare, q, (k, v), group
        self.ready = False

    def __call__(self) -> Tensor:
        if not self.ready:
            self.kv, self.ready = self.prepare(*self.kv, self.q.shape[1]), True
        return self.function(self.q, *self.kv, group=self.group)


def sums(caches: Sequence[KVCache]) -> list[Callable[[], Any]]:
    """For each layer a sum of as many bytes as it has keys and values on this rank: what the memory can do."""
    found: list[Callable[[], Any]] = []
    for cache in caches:
        k, v = cache.k[0], cache.v[0]
        if 2 * k.nbytes > SMALL:
            found.append(lambda k=k, v=v: (k.sum(), v.sum()))
        else:
            found.append(torch.cat([k.flatten(), v.flatten()]).sum)
    return found


def derive(rows: Sequence[Row]) -> None:
    """Add to each row of one size its rate over that of the plain sum, and its time over that of one device."""
    for row in (row for row in rows if "ms" in row):
        alike = {other["way"]: other for other in rows if other["graph"] == row["graph"] and "ms" in other}
        row["of_sum"] = row["gb_per_s"] / alike[SUM]["gb_per_s"] if SUM in alike else None
        row["of_one"] = row["ms"] / alike[ONE]["ms"] if ONE in alike else None


def label(row: Mapping[str, Any]) -> str:
    """
    >>> label({"way": "over the ranks", "ranks": 2, "exchange": "tree", "transport": "nccl", "graph": True})
    'over 2 ranks, tree, nccl, graph'
    """
    way = f"over {row['ranks']} ranks" if row["way"] == SHARED else row["way"]
    parts = [way, row.get("exchange"), row.get("transport"), "graph" if row["graph"] else None]
    return ", ".join(filter(None, parts))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table."""
    width = max(len(label(row)) for row in rows)
    head = f"{'cached':>10} {'batch':>6}  {'way':<{width}} {'us':>10} {'GB/s per rank':>14} {'of the sum':>11}"
    lines = [f"{head} {'of one device':>14} {'error':>8}"]
    for row in rows:
        line = f"{row['cached']:>10,} {row['batch']:>6}  {label(row):<{width}}"
        if row["problem"]:
            lines.append(f"{line}  {row['problem']}")
            continue
        shares = (("-" if x is None else f"{x:.1%}") for x in (row["of_sum"], row["of_one"]))
        error = "-" if row["error"] is None else f"{row['error']:.1e}"
        rate = format(row["gb_per_s"], ",.0f" if row["gb_per_s"] >= 10 else ".2g")
        line += f" {1e3 * row['ms']:>10.1f} {rate:>14} {next(shares):>11} {next(shares):>14} {error:>8}"
        lines.append(line)
    why = [(label(row), row["not_captured"]) for row in rows if row["not_captured"] and not row["graph"]]
    return "\n".join([*lines, *dict.fromkeys(f"{text}: no graph: {reason}" for text, reason in why)])

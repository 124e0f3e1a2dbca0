"""Measuring decode steps, append and attention, while a cache grows; beside what formula (8) of notebook 11 says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..attention.decoding import EXCHANGES, KVCache, decode_attention, one_kernel
from ..costs.decoding import decode_seconds, exchange_hops
from ..partial import Partial, accumulation_dtype
from ..worlds import DistributedWorld
from ..worlds.comm import Comm
from .cached import Sizes, new_caches, one_rank
from .calls import Call, numbers
from .one_query import ONE, SHARED, Row, can_be_captured, label, sums
from .timing import attempt, captured, clocked, everyone, in_turn, meet, repeated, slowest

ROUNDS = 3
TOGETHER = 20  # exchanges that are timed in a row


def measure(sizes: Sizes, options: argparse.Namespace, world: DistributedWorld) -> list[Row]:
    """A row for one device and one for each exchange over the ranks, as calls and as graphs. All ranks call it.

    A step goes through all layers; its time and the formula's are those of one. The formula takes the rate of a plain
    sum over as many bytes, and the time of the exchange alone, both measured here. "apart" is not a time but the
    relative difference between the last output and that of one device.
    """
    H, G, D = sizes.heads
    new = [numbers((1, heads, 1, D), sizes.dtype, world.device, seed=i) for i, heads in enumerate((H, G, G))]
    symmetric = can_be_captured(world, "all-gather")
    wanted = [(one_rank(world.device), "all-gather")] * sizes.fits(1)
    wanted += [(world, exchange) for exchange in options.exchange] * (world.size > 1)
    steps: list[_Step] = []
    for where, exchange in wanted:
        can = options.graph and world.device.type == "cuda"
        can = can and (where.size == 1 or symmetric and exchange == "all-gather")
        steps += [_Step(where, exchange, graph, new) for graph in (False, True)[: 1 + can]]
    # Each has caches of its own: where a graph has been captured, a call must ask the device how long they are.
    caches = new_caches([step.world for step in steps], sizes, options.interleave, sizes.S + sizes.new + 8)
    for step, of_step in zip(steps, caches, strict=True):
        step.caches = of_step
        step.problem = attempt(step.prepare, world.group)[1]
    read, exchanges = _parts(steps, caches[0], options, world)
    steps_ms: list[list[float]] = [[] for _ in steps]
    for number in range(min(ROUNDS, options.repeats)):
        for step, found in zip(steps, steps_ms, strict=True):
            # Where graphs are measured too, one round of calls will do.
            again = number == 0 or step.graph or not options.graph
            if again and not step.problem:
                step.reset(sizes.S, sizes.new)
                meet(world.device, world.group)
                ms = clocked(repeated(step.call, sizes.new), world.device)
                meet(world.device, world.group)
                found.append(max(everyone(ms(), world.group)) / sizes.new / len(step.caches))
    rows = []
    for step, found in zip(steps, steps_ms, strict=True):
        P = step.world.size
        row = {"way": SHARED if P > 1 else ONE, "cached": sizes.S, "appends": sizes.new, "layers": len(caches[0])}
        row |= {"ranks": P, "exchange": step.exchange if P > 1 else None, "graph": step.graph, "problem": step.problem}
        if not step.problem:
            alone = exchanges[P, step.exchange, step.graph]
            row |= {"ms": median(found), "range_ms": [min(found), max(found)]}
            row |= {"read_gb_per_s": read / 1e9, "exchange_ms": 1e3 * alone}
            row["bytes"] = 2 * sizes.B * G * D * sizes.dtype.itemsize * -(-_middle(sizes) // P)
            row["formula_ms"] = 1e3 * formula_seconds(sizes, P, step.exchange, read, alone, options.interleave)
            apart, row["problem"] = attempt(partial(step.apart, steps[0], sizes), world.group)
            row["apart"] = None if row["problem"] else max(everyone(apart, world.group))
        rows.append(row)
    return rows


def formula_seconds(sizes: Sizes, P: int, exchange: str, read: float, alone: float, interleave: int) -> float:
    """Formula (8) in the middle of the appends. alone: seconds of the exchange, of which it knows no parts."""
    link = dict(bandwidth=float("inf"), latency=alone / max(1, exchange_hops(P, exchange)))
    how = dict(B=sizes.B, itemsize=sizes.dtype.itemsize, exchange=exchange, interleave=interleave)
    return sum(decode_seconds(_middle(sizes), P, *sizes.heads, read=read, **link, **how).values())


def _middle(sizes: Sizes) -> int:
    """Tokens in the cache in the middle of the appends."""
    return sizes.S + sizes.new // 2


def predict(rows: Sequence[Row]) -> None:
    """Add ``predicted_ms`` to each row: what two rows of one device predict for it. It is None for these two rows.

    A step takes a fixed time, for its launches, and time in proportion to the bytes that it reads. Both numbers come
    from one device with its shortest and its longest cache. They predict the other lengths, and the steps over ranks
    from the bytes of a rank and the time of the exchange alone.

    >>> rows = [{"ranks": P, "graph": True, "bytes": n, "ms": ms, "exchange_ms": 0.0, "problem": None}
    ...         for P, n, ms in ((1, 100, 2.0), (1, 900, 10.0), (2, 450, 6.0))]
    >>> predict(rows)
    >>> [row["predicted_ms"] for row in rows]
    [None, None, 5.5]
    """
    for graph in (False, True):
        alike = [row for row in rows if row["graph"] == graph and not row["problem"]]
        one = sorted((row for row in alike if row["ranks"] == 1), key=lambda row: row["bytes"])
        for row in alike:
            row["predicted_ms"] = None
            if len(one) > 1 and row is not one[0] and row is not one[-1]:
                each = (one[-1]["ms"] - one[0]["ms"]) / (one[-1]["bytes"] - one[0]["bytes"])
                row["predicted_ms"] = one[0]["ms"] + each * (row["bytes"] - one[0]["bytes"]) + row["exchange_ms"]


class _Step:
    """A decode step: one token, appended and attended to in each layer's cache.

    call: makes a step.  out: the last layer's result.
    """

    caches: Sequence[KVCache]
    out: Tensor
    problem: str | None

    def __init__(self, world: Any, exchange: str, graph: bool, new: Sequence[Tensor]):
        self.world, self.exchange, self.graph, self._new = world, exchange, graph, new
        self.call: Call = self._eager

    def _eager(self) -> None:
        q, k, v = self._new
        with torch.no_grad():
            for cache in self.caches:
                cache.append(k, v)
                self.out = decode_attention(q, cache, exchange=self.exchange)

    def prepare(self) -> None:
        self._eager()  # compiles what is compiled
        if self.graph:
            self.call = captured(self._eager)

    def reset(self, tokens: int, room: int) -> None:
        for cache in self.caches:
            cache.truncate(tokens)
            cache.reserve(room)

    def apart(self, other: _Step, sizes: Sizes) -> float:
        """How far the result after all appends is from another one's. Raises ValueError if tokens are missing."""
        lengths = {cache.lengths[0] for cache in self.caches}
        if lengths != {sizes.S + sizes.new}:
            raise ValueError(f"expected {sizes.S + sizes.new} tokens in every layer after the steps, got {lengths}")
        a, b = (x.out.double() for x in (self, other))
        return float((a - b).norm() / b.norm())


async def _exchange(comm: Comm, out: Tensor, lse: Tensor, exchange: str, boxes: Any) -> Partial:
    if boxes:  # as decode_attention does it, but for a single split
        return one_kernel.merge_over_ranks(Partial(out[..., None, :], lse[..., None]), boxes)
    return await EXCHANGES[exchange](comm, Partial(out, lse))


def _parts(
    steps: Sequence[_Step], caches: Sequence[KVCache], options: argparse.Namespace, world: DistributedWorld
) -> tuple[float, dict[tuple[int, str, bool], float]]:
    """Bytes per second of a plain sum, and seconds of each exchange alone: by ranks, name, and whether as a graph."""
    gpu = world.device.type == "cuda"
    reads = sums(caches)

    def read_all() -> None:
        for read in reads:
            read()

    q = steps[0]._new[0]
    wide = accumulation_dtype(q.dtype)
    out, lse = q.to(wide), q[..., 0].to(wide)
    calls: dict[Any, Call] = {"sum": captured(read_all) if gpu else read_all}
    found: dict[tuple[int, str, bool], float] = {}
    for step in steps:
        key = step.world.size, step.exchange, step.graph
        found[key] = 0.0
        if step.world.size > 1 and not step.problem:
            boxes = one_kernel.mailboxes(world, step.exchange, lse.numel(), q.shape[3])
            call = repeated(partial(world.run, _exchange, out, lse, step.exchange, boxes), TOGETHER)
            call()
            calls[key] = captured(call) if step.graph else call
    times = slowest(everyone(in_turn(list(calls.values()), [True] * len(calls), options.repeats, world), world.group))
    seconds = {key: median(ms) / 1e3 for key, ms in zip(calls, times, strict=True)}
    nbytes = sum(t.nbytes for cache in caches for t in (cache.k[0], cache.v[0]))
    found |= {key: s / TOGETHER for key, s in seconds.items() if key != "sum"}
    return nbytes / seconds["sum"], found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table."""
    width = max(len(label(row)) for row in rows)
    lines = [f"{'cached':>10} {'appends':>8}  {'way':<{width}} {'us a token':>11} {'exchange':>9} {'formula (8)':>12} "
             f"{'measured/(8)':>13} {'two lengths':>12} {'measured/them':>14} {'result off by':>14}"]  # fmt: skip
    for row in rows:
        line = f"{row['cached']:>10,} {row['appends']:>8,}  {label(row):<{width}}"
        if row["problem"]:
            lines.append(f"{line}  {row['problem']}")
            continue
        us = (f"{1e3 * row[name]:.1f}" for name in ("ms", "exchange_ms", "formula_ms"))
        line += f" {next(us):>11} {next(us):>9} {next(us):>12} {row['ms'] / row['formula_ms']:>13.2f}"
        said = row["predicted_ms"]
        two = ("taken", "") if said is None else (f"{1e3 * said:.1f}", f"{row['ms'] / said:.2f}")
        lines.append(f"{line} {two[0]:>12} {two[1]:>14} {row['apart']:>14.1e}")
    return "\n".join(lines)

"""Measuring a prefill after a cached prefix: what should travel, and does the library choose the faster option?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from ..attention.decoding import PASSES, prefill_attention
from ..attention.decoding.prefill import choose_pass
from ..costs.decoding import published_rule
from ..layouts import zigzag
from ..worlds import DistributedWorld
from ..worlds.trace import Hardware
from .cached import Sizes, new_caches
from .calls import numbers
from .one_query import Row
from .timing import LONG, attempt, everyone, in_turn, once, slowest

CLOSE = 0.05  # ways whose times differ by less are equally good


def measure(sizes: Sizes, options: argparse.Namespace, world: DistributedWorld) -> list[Row]:
    """The row for some new tokens after some cached ones: both options in turn. All ranks call it together."""
    H, G, D = sizes.heads
    ((cache,),) = new_caches([world], sizes, options.interleave, layers=1)
    full = [numbers((1, n, sizes.new, D), sizes.dtype, world.device, seed=i) for i, n in enumerate((H, G, G))]
    new = world.shard(*full, layout=zigzag)
    hardware = Hardware()
    row: Row = {"new": sizes.new, "cached": sizes.S, "ranks": world.size, "problem": None}
    row["chosen"] = choose_pass(new[0], new[1], cache, hardware)
    link = dict(flops=hardware.flops, bandwidth=hardware.bandwidth, itemsize=sizes.dtype.itemsize)
    row["published"] = published_rule(sizes.new, sizes.S, world.size, H, G, **link)
    calls = [partial(prefill_attention, *new, cache, travels=name) for name in PASSES]
    with torch.no_grad():
        outs, row["problem"] = attempt(lambda: [call() for call in calls], world.group)
        if outs:
            a, b = ([t.double() for t in out.tensors if t.numel()] for out in outs)
            apart = max([float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True)], default=0.0)
            row["apart"] = max(everyone(apart, world.group))
            seconds = [max(everyone(once(call, world.device), world.group)) for call in calls]
            lead = [s < LONG for s in seconds]
            times = slowest(everyone(in_turn(calls, lead, options.repeats, world), world.group))
            row["ms"] = {name: median(ms) for name, ms in zip(PASSES, times, strict=True)}
            row["range_ms"] = {name: [min(ms), max(ms)] for name, ms in zip(PASSES, times, strict=True)}
            row["faster"] = faster(row["ms"])
    return [row]


def faster(ms: Mapping[str, float]) -> str | None:
    """The faster way; None if the two are within 5 % of each other.

    >>> faster({"pass-kv": 1.0, "pass-q": 1.04}), faster({"pass-kv": 1.0, "pass-q": 1.06})
    (None, 'pass-kv')
    """
    best = min(ms, key=ms.__getitem__)
    return None if max(ms.values()) < (1 + CLOSE) * ms[best] else best


def right(rows: Sequence[Mapping[str, Any]], rule: str) -> tuple[int, int]:
    """In how many cases a rule ("chosen" or "published") picks the faster way, and of how many."""
    clear = [row for row in rows if row.get("faster")]
    return sum(row[rule] == row["faster"] for row in clear), len(clear)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table."""
    lines = [f"{'new':>7} {'cached':>9} {'pass-kv ms':>11} {'pass-q ms':>11}  {'faster':<8} {'chosen':<8} published"]
    for row in rows:
        line = f"{row['new']:>7,} {row['cached']:>9,}"
        if row["problem"]:
            lines.append(f"{line}  {row['problem']}")
            continue
        ms = " ".join(f"{row['ms'][name]:>11.3f}" for name in PASSES)
        lines.append(f"{line} {ms}  {row['faster'] or '-':<8} {row['chosen']:<8} {row['published']}")
    for rule, who in (("chosen", "the library chooses"), ("published", "the published rule chooses")):
        lines.append("{} the faster way in {} of {} cases that differ by 5 % or more".format(who, *right(rows, rule)))
    return "\n".join(lines)

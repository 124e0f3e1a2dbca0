"""A plan as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from .hardware import GPU, GiB
from .models import Model
from .search import Candidate
from .serving import Served

if TYPE_CHECKING:
    from . import Plan


def duration(seconds: float) -> str:
    """
    >>> duration(0.00021), duration(1.5), duration(320), duration(150000)
    ('0.21 ms', '1.5 s', '5.33 min', '41.7 h')
    """
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * size or size == 1 and seconds >= 1:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows below each other, the first of which is the head; numbers stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(cell[:1].isdigit() or not cell for cell in column[1:]) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def plan_table(p: Plan, most: int = 8) -> str:
    """The fastest candidate of each split and strategy, the best one by component, and why others fall out."""
    head = [*"dp tp cp pp ep strategy recompute FSDP GiB step sequences".split(), "tokens/s per GPU"]
    rows = [head]
    for c in p.distinct()[:most]:
        s = c.setup
        strategy = f"{s.strategy}, {s.layout}" if s.cp > 1 else "-"
        again = s.recompute + (", tiled MLP" if s.tiled_mlp else "")
        numbers = [f"{c.bytes / GiB:.1f}", duration(c.step), f"{c.sequences:,}", f"{c.tokens_per_second / p.gpus:,.0f}"]
        rows.append([*map(str, (s.dp, s.tp, s.cp, s.pp, s.ep)), strategy, again, str(s.fsdp), *numbers])
    if all(row[4] == "1" for row in rows[1:]):
        rows = [row[:4] + row[5:] for row in rows]
    device = f"{p.gpus:,} x {p.gpu.name} ({p.gpu.memory / GiB:.0f} GiB)"
    title = f"{p.model.name}, {p.model.parameters:,} parameters, {p.tokens:,} tokens on {device}"
    more = f"{len(p.ranked):,} setups fit; the fastest for each split and strategy:"
    parts = [title, *warned(p.warning), more, columns(rows), components(p.best), reasons(p.reasons)]
    return "\n\n".join(parts)


def components(c: Candidate) -> str:
    """Memory and time of one candidate side by side."""
    memory = [(name, f"{n / GiB:.2f}") for name, n in c.memory.items()] + [("in all", f"{c.bytes / GiB:.2f}")]
    seconds = [(name, duration(t)) for name, t in c.seconds.items()] + [("a step", duration(c.step))]
    rows = [["memory of a GPU", "GiB", "time of a step", ""]]
    for i in range(max(len(memory), len(seconds))):
        rows.append([*(memory[i] if i < len(memory) else ("", "")), *(seconds[i] if i < len(seconds) else ("", ""))])
    return f"the first one ({c.setup}), by component:\n" + columns(rows)


def reasons(found: Mapping[str, int], most: int = 6) -> str:
    if not found:
        return "Nothing falls out."
    lines = [f"{count:>7,}  {why}" for why, count in list(found.items())[:most]]
    return "setups that are ruled out, and why:\n" + "\n".join(lines)


def warned(warning: str) -> list[str]:
    return ["\n".join(wrap(warning, 110))] if warning else []


def served_table(m: Model, gpu: GPU, gpus: int, tokens: int, found: Sequence[Served], most: int = 8) -> str:
    head = ["copies", "tp", "cp", "first token", "each token", "sequences that fit", "tokens/s"]
    rows = [head] + [
        [f"{s.copies}", f"{s.setup.tp}", f"{s.setup.cp}", duration(s.first), duration(s.each), f"{s.sequences:,}",
         f"{s.tokens_per_second:,.0f}"]
        for s in found[:most]
    ]  # fmt: skip
    title = f"{m.name} served with {tokens:,} cached tokens on {gpus:,} x {gpu.name}, {found[0].batch} at a time a copy"
    return "\n\n".join([title, *warned(m.warning(tokens)), columns(rows)])

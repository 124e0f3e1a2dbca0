"""A plan as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from .hardware import GPU, GiB
from .models import Model
from .search import Candidate
from .seconds import model_flops
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


def few(x: float) -> str:
    """
    >>> few(2692.4), few(0.4369)
    ('2,692', '0.44')
    """
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


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
    """The fastest candidate of each split and strategy, the best one by component, and why others are ruled out."""
    head = [*"dp tp cp pp ep strategy recompute FSDP GiB step".split(), "sequences per step", "tokens/s per GPU"]
    rows, seen = [head], set()
    for c in p.distinct():
        s = c.setup
        strategy = f"{s.strategy}, {s.layout}" if s.cp > 1 else "-"
        again = s.recompute + (", tiled MLP" if s.tiled_mlp else "")
        numbers = [f"{c.bytes / GiB:.1f}", duration(c.step), f"{c.sequences:,}", few(c.tokens_per_second / p.gpus)]
        axes = [str(n) for n in (s.dp, s.tp, s.cp, s.pp, s.ep)]
        if (*axes, *numbers) not in seen and len(rows) <= most:  # a double ring whose ring waits for nothing is as fast
            rows.append([*axes, strategy, again, str(s.fsdp), *numbers])
        seen.add((*axes, *numbers))
    if all(row[4] == "1" for row in rows[1:]):
        rows = [row[:4] + row[5:] for row in rows]
    device = f"{p.gpus:,} x {p.gpu.name} ({p.gpu.memory / GiB:.0f} GiB)"
    title = f"{p.model.name}, {p.model.parameters:,} parameters, {p.tokens:,} tokens on {device}"
    more = f"{len(p.ranked):,} setups fit; the fastest for each split and strategy (of equals, the first):"
    parts = [title, *warned(p.warning), more, columns(rows) + "\n" + AXES, components(p.best) + rate(p)]
    parts.append(reasons(p.reasons))
    return "\n\n".join(parts)


AXES = """\
dp: groups, each with sequences of its own.  cp: ranks that share a sequence.  tp: ranks that share every matrix.
pp: ranks that share the layers.  ep: ranks that share the experts.
FSDP: what dp x cp ranks shard: 1 the optimizer's state, 2 the gradients too, 3 the weights too."""


def rate(p: Plan) -> str:
    """What the best candidate reaches, of the operations that the model needs."""
    if p.best.density != 1:  # packed documents need fewer
        return ""
    each = model_flops(p.model, p.tokens, p.best.sequences) / p.best.step / p.gpus
    share = f"{each / p.gpu.bf16:.0%}".replace("%", " %")
    return f"\n{each / 1e12:,.0f} TFLOP/s per GPU, {share} of its bf16 peak (MFU; recomputation not counted)"


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
        return "No setup is ruled out."
    lines = [f"{count:>7,}  {why}" for why, count in list(found.items())[:most]]
    return "setups that are ruled out, and why:\n" + "\n".join(lines)


def warned(warning: str) -> list[str]:
    return ["\n".join(wrap(warning, 110))] if warning else []


SERVED = """\
A copy of the model is on tp x cp GPUs: tp ranks share its matrices and heads, cp ranks the tokens of a sequence."""


def served_table(m: Model, gpu: GPU, gpus: int, tokens: int, found: Sequence[Served], most: int = 8) -> str:
    head = ["copies", "tp", "cp", "first token", "each token", "sequences that fit a copy", "tokens/s of all copies"]
    rows = [head] + [
        [f"{s.copies}", f"{s.setup.tp}", f"{s.setup.cp}", duration(s.first), duration(s.each), f"{s.sequences:,}",
         f"{s.tokens_per_second:,.0f}"]
        for s in found[:most]
    ]  # fmt: skip
    said = f"{found[0].batch:,} sequence{'s' * (found[0].batch > 1)} at a time"
    title = f"{m.name} served with {tokens:,} cached tokens on {gpus:,} x {gpu.name}; each copy decodes {said}"
    return "\n\n".join([title, *warned(m.warning(tokens)), columns(rows) + "\n" + SERVED])

"""Hold the planner against what others and we have measured: python tools/published_plans.py [--fit]

Writes the tables of docs/plan.md. Rows are in docs/published/configurations.json, each with its source and convention;
docs/published/fitted.json names the rows that constants are fitted on. --fit prints the constants anew.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from measurement_tables import TABLE, table

from ringlearn.plan import hardware, models, seconds, serving
from ringlearn.plan.constants import FITTED, Constants
from ringlearn.plan.memory import memory
from ringlearn.plan.models import Model
from ringlearn.plan.setup import Setup

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED, PAGE = ROOT / "docs" / "published", ROOT / "docs" / "plan.md"
OPTIONS = {f.name for f in fields(Setup)}


@dataclass(frozen=True)
class Row:
    """A configuration, what is said of it, and whose saying it is."""

    said: Mapping[str, Any]
    source: str
    counted: bool

    @property
    def id(self) -> str:
        return self.said["id"]

    @property
    def model(self) -> Model:
        which = self.said["model"]
        return models.model(which) if isinstance(which, str) else _small(which)

    @property
    def gpu(self) -> hardware.GPU:
        return hardware.gpu(self.said["gpu"])

    @property
    def setup(self) -> Setup:
        return Setup(**{name: value for name, value in self.said.items() if name in OPTIONS})

    @property
    def sequences(self) -> int:
        """Of a step, over all GPUs."""
        return self.setup.dp * self.setup.sequences * self.setup.microbatches


def _small(said: Mapping[str, int]) -> Model:
    D = said["width"] // said["heads"]
    sizes = dict(layers=said["layers"], width=said["width"], heads=said["heads"], kv_heads=said["heads"], head_dim=D)
    return Model("small", **sizes, ffn=said["ffn"], vocabulary=said["vocabulary"])


def rows() -> list[Row]:
    groups = json.loads((PUBLISHED / "configurations.json").read_text())
    return [
        Row(group["common"] | row, group["source"], group["quantity"] != "not counted")
        for group in groups
        for row in group["rows"]
    ]


@dataclass(frozen=True)
class Held:
    """A published number and the predicted one, in the published unit."""

    row: Row
    what: str
    unit: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def predicted_seconds(row: Row, constants: Constants = FITTED) -> float:
    call = row.model, row.setup, row.said["tokens"], row.gpu, constants
    if row.said["kind"] == "training":
        return sum(seconds.step_seconds(*call).values())
    if row.said["kind"] == "decode":
        return sum(serving.decode_seconds(*call).values())
    more = {name: row.said[name] for name in ("cached", "passing") if name in row.said}
    return sum(serving.prefill_seconds(*call, **more).values())


def times(row: Row, constants: Constants = FITTED) -> Iterator[Held]:
    said = row.said
    known = [name for name in ("tflops", "tokens_per_s", "seconds", "ms", "mfu") if name in said]
    for name in known:
        t = predicted_seconds(row, constants)
        rate = seconds.model_flops(row.model, said["tokens"], row.sequences) / t / row.setup.gpus
        unit, value = {
            "tflops": ("TFLOP/s per GPU", rate / 1e12),
            "tokens_per_s": ("tokens/s per GPU", row.sequences * said["tokens"] / t / row.setup.gpus),
            "seconds": ("s", t),
            "ms": ("ms", t * 1e3),
            "mfu": ("MFU", rate / row.gpu.bf16),
        }[name]
        yield Held(row, "time", unit, said[name], value)


def memories(row: Row, constants: Constants = FITTED) -> Iterator[Held]:
    said = row.said
    for name, unit, size in (
        ("allocated_mib", "MiB allocated", 2**20),
        ("reserved_gib", "GiB reserved", 2**30),
        ("device_gib", "GiB of the device", 2**30),
    ):
        if name in said:
            found = memory(row.model, row.setup, said["tokens"], constants)
            allocated = sum(found.values()) - found["reserve"]
            value = {
                "allocated_mib": allocated,
                "reserved_gib": allocated * constants.reserved,
                "device_gib": allocated * constants.reserved + constants.device_overhead,
            }[name]
            yield Held(row, "memory", unit, said[name], value / size)
    if said.get("longest"):
        yield Held(row, "longest sequence", "tokens", said["tokens"], longest(row, constants))


def longest(row: Row, constants: Constants = FITTED) -> int:
    """The longest sequence that fits, to a thousandth."""
    low, high = 1, 2**30
    while high > low * 1.001 + 1:
        middle = (low + high) // 2
        total = sum(memory(row.model, row.setup, middle, constants).values())
        low, high = (middle, high) if total <= row.gpu.memory else (low, middle)
    return low


def fit() -> Constants:
    """The constants under which the rows that are named for each have a ratio of one, in the geometric mean.

    One constant after the other, until none changes any more.
    """
    named = json.loads((PUBLISHED / "fitted.json").read_text())["rows"]
    known = {row.id: row for row in rows()}
    found = FITTED
    for _ in range(30):
        for name, ids in named.items():
            found = replace(found, **{name: _solved(name, [known[i] for i in ids], found)})
    return replace(found, **{name: float(f"{getattr(found, name):.4g}") for name in named})


BOUNDS = {
    "products_bf16": (0.2, 1.0),
    "products_fp8": (0.1, 1.0),
    "links": (0.1, 1.0),
    "host_per_layer": (0.0, 0.1),
    "device_overhead": (0.0, 12e9),
    "reserved": (1.0, 1.5),
}


def _solved(name: str, on: list[Row], others: Constants) -> float:
    """By bisection: more memory, more host time or slower hardware is monotonic in every constant."""
    of_memory = name in ("device_overhead", "reserved")

    def off(value: float) -> float:
        constants = replace(others, **{name: value})
        if of_memory:
            return sum(math.log(h.ratio) for row in on for h in memories(row, constants) if h.what == "memory")
        held = [h for row in on for h in times(row, constants)]
        return sum(math.log(h.ratio) * (1 if h.unit in ("s", "ms") else -1) for h in held)

    low, high = BOUNDS[name]
    rises = off(high) > off(low)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if (off(middle) > 0) == rises else (middle, high)
    return (low + high) / 2


def held() -> list[Held]:
    return [h for row in rows() for found in (times, memories) for h in found(row)]


def fitted() -> set[str]:
    """The rows of times, and of memories, that constants are fitted on: "id: time"."""
    named = json.loads((PUBLISHED / "fitted.json").read_text())["rows"]
    kinds = {name: "memory" if name in ("device_overhead", "reserved") else "time" for name in named}
    return {f"{i}: {kinds[name]}" for name, ids in named.items() for i in ids}


def within(ratios: list[float], limit: float) -> int:
    """How many are at most so far off, as the tables print them."""
    return sum(abs(round(ratio, 2) - 1) <= limit + 1e-9 for ratio in ratios)


def summary() -> str:
    """How many rows that were not fitted are within 10 and 25 %, at the first prediction and now."""
    first = json.loads((PUBLISHED / "first_prediction.json").read_text())
    lines = []
    for what in ("time", "memory", "longest sequence"):
        free = [h for h in held() if h.row.counted and h.what == what and f"{h.row.id}: {what}" not in fitted()]
        then = [first[f"{h.row.id}: {what}"] for h in free]
        now = [h.ratio for h in free]
        shares = [f"{n} ({n / len(now):.0%})".replace("%", " %") for n in (within(now, 0.1), within(now, 0.25))]
        counts = [f"{within(then, 0.1)}, {within(then, 0.25)}", *shares]
        lines.append((what, len(free), *counts))
    head = ("what", "rows that were not fitted", "within 10 %, 25 % at first", "within 10 % now", "within 25 % now")
    return table(head, lines)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def setup_of(row: Row) -> str:
    s = row.setup
    words = [f"{row.model.name}, {row.said['tokens']:,} tokens", str(s)]
    if "cached" in row.said:
        words.append(f"{row.said['cached']:,} cached, pass-{row.said['passing'].upper()}")
    words += [s.strategy] * (s.cp > 1 and row.said["kind"] == "training")
    words += [f"recompute {s.recompute}"] * (row.said["kind"] == "training" and s.recompute != "none")
    words += [s.precision] * (s.precision != "bf16") + ["async TP"] * s.async_tp + ["eager"] * (not s.compiled)
    words += ["tiled loss"] * s.tiled_loss + ["tiled MLP"] * s.tiled_mlp + [f"{s.stages} stages"] * (s.stages > 1)
    return ", ".join(words)


def compared(*whats: str, counted: bool = True) -> str:
    """A table for each source, under its convention."""
    found = [h for h in held() if h.what in whats and h.row.counted == counted]
    parts = []
    for source in dict.fromkeys(h.row.source for h in found):
        of_it = [h for h in found if h.row.source == source]
        group = next(g for g in json.loads((PUBLISHED / "configurations.json").read_text()) if g["source"] == source)
        lines = [
            (
                f"`{h.row.id}`",
                f"{h.row.gpu.name}: {setup_of(h.row)}",
                h.unit,
                shown(h.published),
                shown(h.predicted),
                f"{h.ratio:.2f}",
                "fitted" if f"{h.row.id}: {h.what}" in fitted() and counted else "",
            )
            for h in of_it
        ]
        head = ("row", "configuration", "unit", "published", "predicted", "ratio", "")
        parts.append(f"{source}. {group['convention']}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def constants() -> str:
    named = json.loads((PUBLISHED / "fitted.json").read_text())
    lines = [
        (f"`{name}`", f"{getattr(FITTED, name):.4g}", meaning, ", ".join(f"`{i}`" for i in named["rows"][name]))
        for name, meaning in named["constants"].items()
    ]
    return table(("constant", "value", "what it is", "fitted on"), lines)


def misses() -> str:
    """Rows of time and memory beyond 25 % (memory: beyond 10 %), by how far they are off."""
    limits = {"time": 0.25, "memory": 0.1}
    off = [
        h
        for h in held()
        if h.row.counted and h.what in limits and not within([h.ratio], limits[h.what])
    ]  # fmt: skip
    off.sort(key=lambda h: -abs(math.log(h.ratio)))
    return table(("row", "what", "ratio"), [(f"`{h.row.id}`", h.what, f"{h.ratio:.2f}") for h in off])


TABLES = {
    "constants": constants,
    "summary": summary,
    "misses": misses,
    "times": lambda: compared("time"),
    "memories": lambda: compared("memory"),
    "longest": lambda: compared("longest sequence"),
    "others": lambda: compared("time", "memory", "longest sequence", counted=False),
}


def page(text: str) -> str:
    """The page with its tables made anew."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    if "--fit" in sys.argv:
        print(fit())
    else:
        PAGE.write_text(page(PAGE.read_text()))

"""Write the tables of docs/measurements.md from the files in docs/measurements: python tools/measurement_tables.py

Of files that differ only in their date, the newest counts. A table stands between two comments, `<!-- scaling -->` and
`<!-- end -->`; what is between them is replaced. A test holds the page to the files.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ringlearn.attention.table import STRATEGIES
from ringlearn.bench import one_query
from ringlearn.bench.table import label

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measurements.md"
TABLE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", flags=re.S)


def newest(kind: str, folder: Path = ROOT / "docs" / "measurements") -> dict[str, dict[str, Any]]:
    """File name -> contents, of the newest file of each machine: "multi-gpu" is in DATE-multi-gpu-MACHINE.json."""
    latest = {}
    for path in sorted(folder.glob(f"????-??-??-{kind}-*.json")):
        latest[path.name[11:]] = path
    return {path.name: json.loads(path.read_text()) for path in latest.values()}


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head, rows = list(head), [list(map(str, row)) for row in rows]
    numbers = [all(re.fullmatch(r"[-\d.,e%/ ]*", cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [head, ["---:" if right else "---" for right in numbers], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link(name: str) -> str:
    return f"[{name}](measurements/{name})"


def machine(record: dict[str, Any]) -> str:
    here, versions = record["hardware"], record["versions"]
    fa4 = f", FlashAttention {versions['flash-attn-4']}" if "flash-attn-4" in versions else ""
    return (
        f"{here['gpus']} x {here['device']}, {here['backend'].upper()} {versions['nccl']}, torch {versions['torch']}, "
        f"cuDNN {versions['cudnn']}{fa4}. {record['date']}, `{record['command']}`"
    )


def scaling(name: str, record: dict[str, Any]) -> str:
    plain = {row["tokens"]: row for row in record["plain"]}
    found = [("SDPA", row) for row in record["plain"]] + [("ring_attention", row) for row in record["scaling"]]
    rows = [
        (
            row["gpus"],
            what,
            f"{row['tokens']:,}",
            f"{row['forward_ms']:.2f}",
            f"{row['forward_backward_ms']:.2f}",
            f"{row['forward_backward_ms'] / plain[row['tokens']]['forward_backward_ms']:.2f}",
            f"{row['tflops_per_gpu']:.0f}",
            f"{row['inputs_mib']:.0f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_mib'] / plain[row['tokens']]['peak_mib']:.2f}",
        )
        for what, row in found
    ]
    head = (
        "GPUs",
        "computed with",
        "tokens",
        "forward, ms",
        "forward and backward, ms",
        "time / SDPA's",
        "TFLOP/s per GPU",
        "inputs, MiB per GPU",
        "peak beyond inputs, MiB",
        "peak / SDPA's",
    )
    return f"{link(name)}: {machine(record)}\n\n{table(head, rows)}"


def digits(ms: float) -> str:
    """Four digits, or as many as stand before the point."""
    return f"{ms:,.{max(0, 3 - math.floor(math.log10(ms)))}f}"


def over_its_wire(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the transport of its messages: those that do not go to neighbours take NCCL in any world."""
    known = STRATEGIES.get(row["way"])
    return row | {"transport": "nccl"} if row["transport"] and known and not known.strategy.rotates else row


def rates(name: str, record: dict[str, Any]) -> str:
    """What ringlearn.bench has written: pairs are the forward, and forward and backward."""
    rows, measured = [], [over_its_wire(row) for row in record["rows"]]
    balanced = any(row.get("balance", 1.0) > 1.005 for row in measured)
    for row in measured:
        exposed, error = row.get("exposed") or {}, row.get("error") or {}
        pairs = [
            " / ".join(form(row[f"{kind}_{what}"]) for kind in KINDS)
            for what, form in (
                ("ms", digits),
                ("tflops", "{:.0f}".format),
                ("fraction", "{:.1%}".format),
                ("peak_mib", "{:,.0f}".format),
            )
        ]
        rows.append(
            (
                f"{row['tokens_per_rank']:,}",
                label(row, measured).replace("_", "\\_"),
                *pairs,
                " / ".join(f"{exposed[kind]:.1%}" for kind in KINDS) if exposed else "",
                f"{error['out']:.1e} / {max(error[g] for g in ('dq', 'dk', 'dv')):.1e}" if error else "",
                *([f"{row['balance']:.2f}" if "balance" in row else ""] if balanced else []),
            )
        )
    head = (
        "tokens per GPU",
        "way",
        "ms",
        "TFLOP/s per GPU",
        "of one GPU",
        "peak MiB",
        "exposed",
        "error: out, gradients",
        *["busiest / mean"] * balanced,
    )
    return f"{link(name)}: {machine(record)}\n\n{table(head, rows)}"


def segments(name: str, record: dict[str, Any]) -> str:
    """The kernels of the best layout for each mask, as CUDA graphs, and what share of one GPU's rate they reach."""
    here, rows = record["machine"], []
    for mask in dict.fromkeys(row["mask"] for row in record["results"]):
        for way in ("fa4", "without fa4"):
            one, *ring = (row for row in record["results"] if (row["mask"], row["way"]) == (mask, way))
            best = max(ring, key=lambda row: row["share"]["both graph"])
            zigzag = next(row for row in ring if row["layout"] == "zigzag")
            share = [f"{row['share']['both graph']:.0%}" for row in (best, zigzag)]
            rows.append(
                (mask, way, f"{one['tflops']['both graph']:.0f}", best["layout"], *share, f"{zigzag['balance']:.2f}")
            )
    head = ("mask", "kernels", "one GPU, TFLOP/s", "best layout", "of one GPU", "zigzag", "its balance")
    where = f"{here['gpu']}, torch {here['torch']}. {here['date'][:10]}, `{here['command']}`"
    return f"{link(name)}: {where}\n\n{table(head, rows)}"


def clock(name: str, record: dict[str, Any]) -> str:
    """Times and clocks of the ways, and where the milliseconds of some of them go, on each rank."""
    one, ranks = record["slowest_ms"]["one device"], record["ranks"]

    def medians(way: str, column: str) -> str:
        i = record["columns"].index(column)
        return " / ".join(f"{statistics.median(turn[i] for turn in r['turns'][way]):.0f}" for r in ranks)

    rows = [
        (way, f"{ms:.1f}", f"{ms / one:.3f}", medians(way, "MHz"), medians(way, "W"))
        for way, ms in record["slowest_ms"].items()
    ]
    head = ("way", "ms, slower rank", "of one device", "MHz of each GPU", "W of each GPU")
    parts = [
        (way, *(" / ".join(f"{r['parts'][way][part]:.2f}" for r in ranks) for part in found))
        for way, found in ranks[0]["parts"].items()
    ]
    parts_head = ("way", *(f"{part}, ms" for part in next(iter(ranks[0]["parts"].values()))))
    about = f"{link(name)}: {record['tokens']:,} tokens per GPU. {machine(record)}"
    return "\n\n".join((about, table(head, rows), table(parts_head, parts)))


def training(name: str, record: dict[str, Any]) -> str:
    rows = [
        (
            row["gpus"],
            f"{row['tokens']:,}",
            f"{row['step_ms']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_mib']:,.0f}",
        )
        for row in record["rates"]
    ]
    head = ("GPUs", "tokens of the sequence", "ms per step", "tokens/s", "peak, MiB per GPU")
    longest = [
        (row["gpus"], f"{row['budget_mib']:,.0f}", f"{row['tokens']:,}", f"{row['peak_mib']:,.0f}")
        for row in record["longest"]
    ]
    longest_head = ("GPUs", "memory allowed, MiB per GPU", "longest sequence, tokens", "peak, MiB per GPU")
    curves: dict[str, list[list[float]]] = {}
    for run, losses in record["losses"].items():
        curves.setdefault(run.split(",")[0], []).append(losses)
    apart = [
        (
            dtype,
            len(one),
            f"{one[0]:.4f}",
            f"{one[-1]:.4f}",
            f"{max(abs(a - b) for a, b in zip(one, all_, strict=True)):.1g}",
        )
        for dtype, (one, all_) in curves.items()
    ]
    apart_head = ("dtype", "steps", "first loss", "last loss, 1 GPU", "largest difference between 1 GPU and all")
    tables = (table(head, rows), table(longest_head, longest), table(apart_head, apart))
    return "\n\n".join([f"{link(name)}: {machine(record)}. `{record['model']}`", *tables])


def transfers(name: str, record: dict[str, Any]) -> str:
    rows = [(f"{row['mib']:g}", f"{row['ms']:.3f}", f"{row['gb_per_s']:.1f}") for row in record["transfers"]]
    return f"{link(name)}\n\n{table(('MiB', 'ms', 'GB/s each way'), rows)}"


def overlap(name: str, record: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['tokens_per_gpu']:,}",
            *(f"{row[what]:.3f}" for what in ("attention_ms", "transfer_ms", "both_ms", "awaited_first_ms")),
        )
        for row in record["overlap"]
    ]
    head = (
        "tokens per GPU",
        "attention alone, ms",
        "transfer alone, ms",
        "both, awaited after the computation, ms",
        "awaited first, ms",
    )
    return f"{link(name)}\n\n{table(head, rows)}"


WAYS = ("attention", "nccl alone", "nccl", "priority", "head start", "copy alone", "copy")


def hiding(name: str, record: dict[str, Any]) -> str:
    found = {(r["tokens_per_gpu"], r["what"]): r for r in record["steps"] if r["nccl_max_ctas"] is None}
    rows = []
    for s in sorted({s for s, _ in found}):
        queued = (f"{1e3 * found[s, way]['queued_ms']:.0f}" for way in WAYS)
        rows.append((f"{s:,}", *queued, f"{1e3 * found[s, 'nccl']['eager_ms']:.0f}"))
    head = ("tokens per GPU", *WAYS, "nccl, started at once")
    here, versions = record["hardware"], record["versions"]
    about = f"{here['gpus']} x {here['device']}, NCCL {versions['nccl']}, torch {versions['torch']}, {record['date']}"
    return f"{link(name)}: {about}\n\n{table(head, rows)}"


def order(name: str, record: dict[str, Any]) -> str:
    cases: dict[str, list[str]] = {}
    for r in record["results"]:
        cases.setdefault(r["case"], []).append("hangs" if not r["ended"] else "right" if r["right"] else "wrong")
    sizes = dict.fromkeys(r["bytes"] for r in record["results"])
    rows = ((case, *found) for case, found in cases.items())
    here, versions = record["hardware"], record["versions"]
    about = f"{here['gpus']} x {here['device']}, NCCL {versions['nccl']}, torch {versions['torch']}, {record['date']}"
    return f"{link(name)}: {about}\n\n{table(('order', *(f'{size:,} B' for size in sizes)), rows)}"


def errors(name: str, record: dict[str, Any]) -> str:
    head = ("case", "computed by", "out", "dq", "dk", "dv")
    rows = [
        (case, what, *(f"{error:.1e}".replace("e-0", "e-") if error else "0" for error in norms.values()))
        for case, found in record["results"].items()
        for what, norms in found.items()
        if isinstance(norms, dict) and any(norms.values())
    ]
    about = f"{len(record['hardware'])} x {record['hardware'][0]}, torch {record['torch']}, {record['date']}"
    return f"{link(name)}: {about}, `{record['command']}`\n\n{table(head, rows)}"


def kernels(name: str, record: dict[str, Any]) -> str:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in record["results"]:
        found.setdefault(result["kernel"], []).append(result)
    rows = [
        (
            f"`{kernel}`",
            sum(r["state"] == "PASS" for r in results),
            sum(r["state"] not in ("PASS", "FAIL") for r in results),
            sum(r["state"] == "FAIL" for r in results),
        )
        for kernel, results in found.items()
    ]
    about = f"{record['machine']['gpu']}, torch {record['machine']['torch']}, {record['machine']['date'][:10]}"
    head = ("kernel", "cases right", "cases rightly refused", "cases wrong")
    return f"{link(name)}: {about}, `{record['machine']['command']}`\n\n{table(head, rows)}"


def faults(name: str, record: dict[str, Any]) -> str:
    rows = [
        (r["check"].removeprefix("fault: "), f"{r['seconds until the report']:.1f}", r["note"].replace("|", "\\|"))
        for r in record["results"]
        if r["check"].startswith("fault: ")
    ]
    about = f"{len(record['about']['gpus'])} x {record['about']['gpus'][0]}, torch {record['about']['torch']}"
    head = ("rank 1 is", "reported after, s", "first message on rank 0")
    return (
        f"{link(name)}: {about}, {record['about']['date'][:10]}, `{record['about']['command']}`\n\n{table(head, rows)}"
    )


def decoding(name: str, record: dict[str, Any]) -> str:
    """What bench --decode has written, a table for each part; an attention row has all ways of a size."""
    parts = [f"{link(name)}: {machine(record)}"]
    sizes: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in record["attention"]:
        sizes.setdefault((row["cached"], row["batch"]), {})[one_query.label(row)] = row
    names = list(dict.fromkeys(label for ways in sizes.values() for label in ways))
    timed = [label for label in names if "graph" in label or f"{label}, graph" not in names or label == one_query.ONE]

    def cell(row: dict[str, Any] | None) -> str:
        if row is None or "ms" not in row:
            return ""
        return f"{digits(1e3 * row['ms'])} ({row['gb_per_s'] / 1e3:.2f})"

    rows = [
        (f"{cached:,}", batch, *(cell(ways.get(label)) for label in timed)) for (cached, batch), ways in sizes.items()
    ]
    if rows:
        head = ("cached tokens", "batch", *(label.replace("_", "\\_") for label in timed))
        parts.append(f"µs per call, and in parentheses TB/s per GPU:\n\n{table(head, rows)}")
    steps = [
        (
            f"{row['cached']:,}",
            one_query.label(row),
            *(digits(1e3 * row[what]) if row[what] else "" for what in ("ms", "exchange_ms", "formula_ms")),
            f"{row['ms'] / row['formula_ms']:.2f}",
        )
        for row in record["appends"]
        if not row["problem"]
    ]
    if steps:
        appended = max(row["appends"] for row in record["appends"])
        head = ("cached tokens", "way", "µs per token", "exchange, µs", "formula (8), µs", "measured / formula")
        parts.append(f"A decode step (append and attention), over {appended:,} appends:\n\n{table(head, steps)}")
    passes = [
        (
            f"{row['cached']:,}",
            f"{row['new']:,}",
            *(f"{row['ms'][way]:.3f}" for way in ("pass-kv", "pass-q")),
            row["faster"] or "within 5 %",
            row["chosen"],
            row["published"],
        )
        for row in record["prefill"]
        if not row["problem"]
    ]
    if passes:
        head = ("cached tokens", "new tokens", "pass-KV, ms", "pass-Q, ms", "faster", "library", "published rule")
        parts.append(f"New tokens after a cached prefix:\n\n{table(head, passes)}")
    return "\n\n".join(parts)


KINDS = ("forward", "forward_backward")
TABLES: dict[str, tuple[str, Callable[[str, dict[str, Any]], str]]] = {
    "scaling": ("multi-gpu", scaling),
    "rates": ("bench", rates),
    "fa4": ("fa4*", rates),
    "masks": ("masks*", rates),
    "segments": ("segments", segments),
    "strategies": ("strategies", rates),
    "decoding": ("decode", decoding),
    "clock": ("clock", clock),
    "training": ("training", training),
    "transfers": ("multi-gpu", transfers),
    "overlap": ("multi-gpu", overlap),
    "hiding": ("hiding", hiding),
    "order": ("order", order),
    "errors": ("ring", errors),
    "kernels": ("kernels", kernels),
    "faults": ("distributed", faults),
}


def files() -> str:
    """All files, the oldest first."""
    names = sorted(path.name for path in (ROOT / "docs" / "measurements").glob("*.json"))
    return "\n".join(f"* {link(name)}" for name in names)


def filled(page: str) -> str:
    """The page with its tables made anew. Raises KeyError for a table that nobody knows."""

    def fill(match: re.Match[str]) -> str:
        if match[2] == "files":
            return f"{match[1]}{files()}\n{match[3]}"
        kind, make = TABLES[match[2]]
        return match[1] + "\n\n".join(make(name, record) for name, record in newest(kind).items()) + "\n" + match[3]

    return TABLE.sub(fill, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

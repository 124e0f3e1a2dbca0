"""The table that a measurement prints, and the label of a row in tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def label(row: Row, rows: Sequence[Row]) -> str:
    """The name of a row's candidate, with whatever distinguishes it from the other rows.

    >>> row = {"way": "ring", "transport": "nccl", "layout": "zigzag", "kernel": "auto", "graph": True}
    >>> label(row, [row])
    'ring, nccl, graph'
    >>> label({**row, "way": "double-ring", "mesh": [2, 4]}, [row])
    'double-ring 2 x 4, nccl, graph'
    """
    mesh = " x ".join(map(str, row.get("mesh") or ()))
    parts = [f"{row['way']} {mesh}".rstrip(), row["transport"]]
    alike = [other for other in rows if bool(other["layout"]) == bool(row["layout"])]  # on several devices, or on one
    for name in ("mask", "layout", "kernel"):
        among = rows if name == "mask" else alike
        if len({other.get(name) for other in among if other.get(name)}) > 1:
            parts.append(row.get(name))
    return ", ".join(filter(None, [*parts, "graph" if row.get("graph") else None]))


def table(rows: Sequence[Row]) -> str:
    """The rows as a text table. Of each pair of columns the first is the forward, the second forward and backward."""
    names = [label(row, rows) for row in rows]
    width = max(map(len, names))
    pairs = [
        ("ms", "ms", ".3f", 9),
        ("TFLOP/s per rank", "tflops", ".1f", 8),
        ("of one device", "fraction", ".1%", 7),
        ("peak MiB", "peak_mib", ".0f", 7),
        ("exposed", None, ".1%", 7),
    ]
    if not any("exposed" in row for row in rows):
        pairs.pop()
    balanced = any(row.get("balance", 1.0) > 1.005 for row in rows)
    top = "".join(f"  {title:^{2 * w + 1}}" for title, _, _, w in pairs)
    second = "".join(f"  {'fwd':>{w}} {'fwd+bwd':>{w}}" for *_, w in pairs)
    lines = [f"{'':{13 + width}}{top}  {'error':^17}" + "  busiest" * balanced]
    lines += [f"{'tokens/rank':>11}  {'way':<{width}}{second}  {'out':>8} {'grads':>8}" + "   / mean" * balanced]
    for text, row in zip(names, rows, strict=True):
        line = f"{row['tokens_per_rank']:>11,}  {text:<{width}}"
        if row["problem"]:
            lines.append(f"{line}  {row['problem']}")
            continue
        for _, name, form, w in pairs:
            for kind in ("forward", "forward_backward"):
                value = row.get(f"{kind}_{name}") if name else row.get("exposed", {}).get(kind)
                small = name == "tflops" and value and value < 0.95  # on a CPU
                shown = "-" if value is None else format(value, ".1g" if small else form)
                line += ("  " if kind == "forward" else " ") + f"{shown:>{w}}"
        error = row.get("error") or {}
        grads = [error[gradient] for gradient in ("dq", "dk", "dv") if gradient in error]
        line += f"  {format(error['out'], '.1e') if error else '-':>8} {format(max(grads), '.1e') if grads else '-':>8}"
        lines.append(line + (f"  {row['balance']:>7.2f}" if balanced and "balance" in row else ""))
    why = [(text, row.get("not_captured")) for text, row in zip(names, rows, strict=True)]
    return "\n".join([*lines, *dict.fromkeys(f"{text}: no graph: {reason}" for text, reason in why if reason)])

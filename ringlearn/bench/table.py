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
    for name in ("layout", "kernel"):
        if len({other[name] for other in rows if other["layout"] and other[name]}) > 1 and row["layout"]:
            parts.append(row[name])
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
    top = "".join(f"  {title:^{2 * w + 1}}" for title, _, _, w in pairs)
    second = "".join(f"  {'fwd':>{w}} {'fwd+bwd':>{w}}" for *_, w in pairs)
    lines = [f"{'':{13 + width}}{top}  {'error':^17}"]
    lines += [f"{'tokens/rank':>11}  {'way':<{width}}{second}  {'out':>8} {'grads':>8}"]
    for text, row in zip(names, rows, strict=True):
        line = f"{row['tokens_per_rank']:>11,}  {text:<{width}}"
        if row["problem"]:
            lines.append(f"{line}  {row['problem']}")
            continue
        for _, name, form, w in pairs:
            for kind in ("forward", "forward_backward"):
                value = row.get(f"{kind}_{name}") if name else row.get("exposed", {}).get(kind)
                line += ("  " if kind == "forward" else " ") + f"{'-' if value is None else format(value, form):>{w}}"
        error = row.get("error") or {}
        grads = [error[gradient] for gradient in ("dq", "dk", "dv") if gradient in error]
        line += f"  {format(error['out'], '.1e') if error else '-':>8} {format(max(grads), '.1e') if grads else '-':>8}"
        lines.append(line)
    why = [(text, row.get("not_captured")) for text, row in zip(names, rows, strict=True)]
    return "\n".join([*lines, *dict.fromkeys(f"{text}: no graph: {reason}" for text, reason in why if reason)])

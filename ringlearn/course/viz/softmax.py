"""Pictures of notebook 01: an attention row, the running maximum, two blocks that merge, and a stepper over keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ...partial import Partial, merge_weights
from ...softmax import blockwise, two_pass
from .style import BLACK, BLUE, GREY, ORANGE, SERIES, VERMILION, plain
from .widgets import Player, Players, Table, box, explore, slider

# ---- Figures --------------------------------------------------------------------------------------------------------


def two_blocks(scores: Tensor, split: int) -> Figure:
    """Two blocks, each a softmax with its own denominator, and the one pair of weights that makes them one softmax.

    scores: (N,). split: how many keys are in block a.
    """
    parts = [two_pass(part) for part in (scores[:split], scores[split:])]
    lse, *weights = (x.item() for x in merge_weights(parts[0][1], parts[1][1]))
    keys = (range(split), range(split, len(scores)))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for name, where, (p, part_lse), weight, (colour, hatch) in zip("ab", keys, parts, weights, SERIES):
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "width": 0.85}
        left.bar(where, p.tolist(), label=f"block {name}: sums to 1, lse = {part_lse:.2f}", **style)
        right.bar(where, (weight * p).tolist(), label=f"block {name} × {weight:.2f}", **style)
    left.set_title("Each block alone, with its own denominator", fontsize=10)
    right.set_title("Merged: one weight per block, together they sum to 1", fontsize=10)
    left.set_ylabel("weight of the key (no unit)")
    for ax in (left, right):
        ax.axvline(split - 0.5, color=BLACK, linewidth=1, linestyle=":")
        ax.set(xlabel="key j", ylim=(0, 1.05))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(loc="upper left", frameon=False, fontsize=9)
    plain(left, right)
    return figure


def row(data: bytes, scores: Tensor, first: int, top: int = 7) -> Figure:
    """One query's scores over a text, and the weights that softmax makes of them.

    data: the text. scores: (N,), where key j stands for the byte at ``first + j``, which is what its value holds.
    top: how many of the heaviest keys get a letter.
    """
    p, _ = two_pass(scores)
    place = range(first, first + len(scores))
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    above.vlines(place, 0, scores.tolist(), color=GREY, linewidth=0.8)
    below.vlines(place, 0, p.tolist(), color=BLUE, linewidth=1.6)
    for j in sorted(p.topk(top).indices.tolist()):
        above.plot(first + j, float(scores[j]), "o", color=ORANGE, markeredgecolor=BLACK, markersize=5)
        style = {"textcoords": "offset points", "ha": "center", "fontsize": 10, "family": "monospace"}
        below.annotate(chr(data[first + j]), (first + j, float(p[j])), (0, 3), **style)
    above.set_ylabel("score $s_j$ (equal bytes)")
    below.set(ylabel="weight $p_j$", xlabel="position in the text (bytes); the letter is the byte that stands there")
    above.set_ylim(0, float(scores.max()) * 1.15)
    below.set_ylim(0, float(p.max()) * 1.3)
    plain(above, below)
    return figure


def running(scores: Tensor) -> Figure:
    """The running maximum m and denominator l over a row; l is scaled down whenever m moves.

    scores: (N,), N >= 1.
    """
    steps = list(_steps(scores, torch.zeros(len(scores))))
    moved = [step["j"] for step in steps if step["moves"]]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    above.vlines(range(len(scores)), 0, scores.tolist(), color="0.8", linewidth=0.8, label="score")
    above.step(range(len(scores)), [step["m"] for step in steps], where="post", color=BLUE, label="running maximum m")
    below.plot([step["l"] for step in steps], color=BLUE, label="denominator l")
    for ax, name in ((above, "m"), (below, "l")):
        ax.plot(moved, [steps[j][name] for j in moved], "v", color=VERMILION, markeredgecolor=BLACK, label="m moves")
        ax.legend(loc="center right", framealpha=1, edgecolor="none", fontsize=9)
    above.set_ylabel("m (unit of a score)")
    below.set(ylabel="l (no unit)", xlabel="keys read so far")
    plain(above, below)
    return figure


# ---- The stepper: (m, l, acc) key by key, and any split of the row --------------------------------------------------


def _steps(scores: Tensor, values: Tensor):
    """The online softmax as a learner would step through it, in Python floats, one dict per key."""
    m, l, acc = -math.inf, 0.0, 0.0
    for j, (s, v) in enumerate(zip(scores.tolist(), values.tolist())):
        m_new = max(m, s)
        rescale = math.exp(m - m_new) if m > -math.inf else (0.0 if m_new > -math.inf else 1.0)
        e = math.exp(s - m_new) if s > -math.inf else 0.0
        l, acc = l * rescale + e, acc * rescale + e * v
        yield {"j": j, "s": s, "v": v, "m": m_new, "rescale": rescale, "l": l, "acc": acc, "moves": m_new > m}
        m = m_new


def stepper_table(scores: Tensor, values: Tensor, splits: Sequence[int]) -> Table:
    """What :func:`stepper` shows, as text: the state after every key, then the result for some splits of the row.

    scores, values: (N,). splits: how many keys go to the left block.
    """
    lines = ["key      s      v |      m  rescale        l      acc | out = acc / l"]
    for step in _steps(scores, values):
        out = step["acc"] / step["l"] if step["l"] else 0.0
        flag = "*" if step["moves"] and step["j"] else " "
        lines.append(
            f"{step['j']:3d} {step['s']:6.1f} {step['v']:6.1f} | {step['m']:6.1f} {step['rescale']:8.4f}{flag}"
            f"{step['l']:8.4f} {step['acc']:8.4f} | {out:8.4f}"
        )
    lines += [
        "(* the maximum moved: l and acc were multiplied by the rescale factor; the first factor is exp(-inf) = 0)",
        "",
        "split  lse left  lse right | weight left  weight right |   out",
    ]
    for split in splits:
        (left, right), weights, merged = _split(scores, values, split)
        lines.append(
            f"{split:5d}  {left.lse:8.4f}  {right.lse:9.4f} | {weights[0]:11.4f}  {weights[1]:12.4f} | {merged:8.4f}"
        )
    return Table("\n".join(lines))


def _split(scores: Tensor, values: Tensor, split: int) -> tuple[list[Partial], tuple[float, float], float]:
    """The partial results left and right of a split, their weights, and the merged output."""
    halves = ((scores[part], values[part]) for part in (slice(split), slice(split, None)))
    parts = [blockwise(s, v.unsqueeze(-1), [len(s)]) for s, v in halves]
    _, *weights = merge_weights(parts[0].lse, parts[1].lse)
    merged = sum(float(w) * float(part.out) for w, part in zip(weights, parts))
    return parts, (float(weights[0]), float(weights[1])), merged


def stepper(scores: Tensor, values: Tensor) -> Any:
    """Two sliders: read the row key by key, and split it anywhere. The result bar never moves.

    scores, values: (N,).  Returns a widget; without ipywidgets, ``stepper_table(scores, values, [0, ..., N])``.
    """
    n, summary = len(scores), "two sliders"

    def static() -> Table:
        return stepper_table(scores, values, range(0, n + 1, max(1, n // 4)))

    halves = (
        (lambda seen: _state_html(scores, values, seen), {"seen": slider("keys read", 1, 1, n)}),
        (lambda split: _split_html(scores, values, split), {"split": slider("split after", n // 2, 0, n)}),
    )
    shown = [explore(draw, static, summary, controls) for draw, controls in halves]
    if isinstance(shown[0], Player):
        return Players(shown)
    return shown[0] if isinstance(shown[0], Table) else box([*shown[0].children, *shown[1].children], summary)


def _bar(fraction: float, colour: str, label: str, text: str, flash: bool = False) -> str:
    frame = f"border:2px solid {VERMILION};" if flash else "border:2px solid transparent;"
    return (
        f'<div style="display:flex;align-items:center;margin:2px 0;{frame}">'
        f'<span style="width:150px;font-family:monospace">{label}</span>'
        f'<span style="width:240px;background:#eee;margin-right:8px">'
        f'<span style="display:block;height:14px;background:{colour};width:{100 * fraction:.1f}%"></span></span>'
        f'<span style="font-family:monospace">{text}</span></div>'
    )


def _state_html(scores: Tensor, values: Tensor, seen: int) -> str:
    steps = list(_steps(scores, values))
    step, largest = steps[seen - 1], max(step["l"] for step in steps)
    top, bottom = float(scores.max()), min(0.0, float(scores[scores > -math.inf].min()))
    moved = step["moves"] and seen > 1
    factor = f"{step['rescale']:.4f}" + (" &nbsp;the maximum moved" if moved else "")
    out = step["acc"] / step["l"] if step["l"] else 0.0
    return (
        f'<div style="font-family:monospace;margin:4px 0">read key {step["j"]}: score {step["s"]:.1f}, '
        f"value {step['v']:.1f}</div>"
        + _bar((step["m"] - bottom) / max(top - bottom, 1e-9), BLUE, "m", f"{step['m']:.1f}")
        + _bar(step["rescale"], VERMILION, "rescale factor", factor, flash=moved)
        + _bar(step["l"] / largest, BLUE, "l", f"{step['l']:.4f}")
        + _bar(abs(step["acc"]) / largest, BLUE, "acc", f"{step['acc']:.4f}")
        + _bar(min(abs(out), 1), BLACK, "out = acc / l", f"{out:.4f}")
    )


def _split_html(scores: Tensor, values: Tensor, split: int) -> str:
    parts, weights, merged = _split(scores, values, split)
    text = [f"weight {w:.4f}, out {float(p.out):.4f}, lse {float(p.lse):.4f}" for p, w in zip(parts, weights)]
    return (
        _bar(weights[0], BLUE, f"left, {split} keys", text[0])
        + _bar(weights[1], ORANGE, f"right, {len(scores) - split} keys", text[1])
        + _bar(min(abs(merged), 1), BLACK, "merged out", f"{merged:.4f} &nbsp;(never moves)")
    )

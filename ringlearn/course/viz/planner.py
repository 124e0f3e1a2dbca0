"""Pictures of notebook 12: the way from a question to a run, a plan by hand beside the planner's, who reads what.

``planner`` is the widget: memory and time of the fastest plan, for a model, a length and some GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from ...layouts import zigzag
from ...plan import Plan, plan
from ...plan.hardware import GPUS, GiB
from ...plan.table import duration
from .figure import colour, ink, new, pale
from .style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES, SKY, VERMILION, YELLOW, plain
from .widgets import Player, Svg, Table, explore, log_slider, menu

# ---- The whole notebook in one picture -------------------------------------------------------------------------------

STEPS = (
    ("plan", "Does it fit?\nHow long does it take?", "by hand, and by\nrl.plan"),
    ("put it under\nyour model", "Who reads what?\nWho adds what?", "split, FSDP2,\nbf16"),
    ("compare", "Is it the same\nas on one device?", "logits, loss,\ngradients"),
    ("profile", "Where does\nthe time go?", "torch.profiler"),
    ("repair", "What is wrong?", "the recipe"),
    ("write", "Does it decode?", "prefill, generate"),
)


def overview() -> Figure:
    """From a question to a run that is checked: a box for each part of the notebook."""
    figure, ax = new(1, (9.6, 2.1))
    width, gap = 1.55, 0.35
    for i, ((name, question, how), fill) in enumerate(zip(STEPS, (BLUE, ORANGE, GREEN, YELLOW, VERMILION, SKY))):
        x = i * (width + gap)
        look = {"boxstyle": "round,pad=0.04", "facecolor": pale(fill), "edgecolor": fill, "linewidth": 1.5}
        ax.add_patch(FancyBboxPatch((x, 0), width, 1.1, **look))
        ax.text(x + width / 2, 0.82, name, ha="center", va="center", fontsize=10, fontweight="bold")
        ax.text(x + width / 2, 0.28, how, ha="center", va="center", fontsize=8)
        ax.text(x + width / 2, 1.5, question, ha="center", va="center", fontsize=8.5, style="italic")
        if i:
            ends = (x - gap + 0.06, 0.55), (x - 0.04, 0.55)
            ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=12, color=BLACK))
    ax.set(xlim=(-0.1, len(STEPS) * (width + gap)), ylim=(-0.1, 1.85))
    ax.axis("off")
    return figure


# ---- By hand, and as the planner has it ------------------------------------------------------------------------------


def bars(plans: Mapping[str, Mapping[str, float]], limit: float, unit: str = "GiB of a GPU") -> Figure:
    """Stacked bars, one below the other: of each plan its parts, and a line for what there is.

    plans: name -> part -> size.  limit: where the line is; 0 for none.
    """
    figure, ax = new(1, (8.4, 0.95 + 0.75 * len(plans)))
    names = list(dict.fromkeys(part for parts in plans.values() for part in parts))
    for row, parts in enumerate(plans.values()):
        left = 0.0
        for part, size in parts.items():
            fill, hatch = SERIES[names.index(part) % len(SERIES)]
            ax.barh(row, size, 0.62, left, color=fill, hatch=hatch, edgecolor="white", gid=f"{row} {part} {size:.6g}")
            left += size
        ax.text(left, row, f" {left:.1f}", va="center", fontsize=9)
    if limit:
        ax.axvline(limit, color=BLACK, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(plans)), plans)
    ax.invert_yaxis()
    ax.set(xlabel=unit, xlim=(0, 1.12 * max(limit, *(sum(parts.values()) for parts in plans.values()))))
    handles = [Patch(facecolor=SERIES[i % len(SERIES)][0], hatch=SERIES[i % len(SERIES)][1], edgecolor="white", label=x)
               for i, x in enumerate(names)]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8.5)
    plain(ax)
    return figure


# ---- Who reads what --------------------------------------------------------------------------------------------------


def who_reads(borders: Sequence[Sequence[int]], P: int) -> Figure:
    """Rows of packed documents: each token's position in its document, in the colour of the rank that reads it.

    borders: of each row where its documents begin, and its end.  P: ranks that share a row.
    """
    figure, ax = new(1, (9.2, 0.75 + 0.6 * len(borders)))
    R = P * len(borders)
    for row, cuts in enumerate(borders):
        for place in range(P):
            rank = row * P + place
            for position in zigzag.positions(cuts[-1], P, place).tolist():
                start = max(cut for cut in cuts if cut <= position)
                fill = colour(rank, R)
                gid = f"row {row} position {position} rank {rank}"
                ax.add_patch(Rectangle((position, 1.4 * row), 1, 1, facecolor=fill, edgecolor="white", gid=gid))
                middle = position + 0.5, 1.4 * row + 0.5
                ax.text(*middle, position - start, ha="center", va="center", fontsize=8, color=ink(fill))
        for cut in cuts:
            ax.plot([cut, cut], [1.4 * row - 0.12, 1.4 * row + 1.12], color=BLACK, linewidth=2.5)
        ax.text(-0.4, 1.4 * row + 0.5, f"row {row}", ha="right", va="center", fontsize=9)
    S = max(cuts[-1] for cuts in borders)
    ax.set(xlim=(-2.4, S + 0.3), ylim=(1.4 * len(borders) - 0.1, -0.3))
    ax.axis("off")
    handles = [Patch(facecolor=colour(rank, R), label=f"rank {rank}") for rank in range(R)]
    figure.legend(handles=handles, loc="outside lower center", ncols=R, frameon=False, fontsize=9)
    return figure


# ---- The widget: the planner with sliders ----------------------------------------------------------------------------

MODELS_SHOWN = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-8b", "qwen3-32b")
LENGTHS = tuple(2**i for i in range(13, 21))
FILLS = {
    "weights": BLUE, "optimizer": SKY, "gradients": PURPLE, "gathered weights": GREEN, "gathered gradients": GREEN,
    "activations": ORANGE, "checkpoints": ORANGE, "logits and loss": YELLOW, "one layer's backward": VERMILION,
    "buffers of the strategy": PURPLE, "reserve": GREY,
    "matrix products": BLUE, "attention": ORANGE, "elementwise": GREEN, "recomputation": SKY, "strategy": VERMILION,
    "tensor parallel": PURPLE, "FSDP": YELLOW, "pipeline": BLACK, "host": GREY,
}  # fmt: skip


def _said(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _found(model: str, tokens: int, gpus: int, gpu: str) -> Plan | str:
    """The plan, or the planner's reason why there is none."""
    try:
        return plan(model, tokens, gpus, gpu)
    except ValueError as problem:
        return str(problem).removeprefix("plan: ")


def planner_table(
    model: str = "llama-3.1-8b", gpus: int = 16, gpu: str = "h100", lengths: Sequence[int] = LENGTHS
) -> Table:
    """What :func:`planner` shows, as text: the fastest plan at each length.

    >>> planner_table(lengths=(2**17,))
    llama-3.1-8b on 16 x h100
    tokens  the fastest setup         GiB of 79  step of  it takes
      128k  cp 16, double-ring             57.3  1 x 128k  2.52 s
    """
    lines = [f"{model} on {gpus} x {gpu}"]
    lines.append(f"tokens  {'the fastest setup':24}  GiB of {GPUS[gpu].memory / GiB:.0f}  step of  it takes")
    for tokens in lengths:
        found = _found(model, tokens, gpus, gpu)
        if isinstance(found, str):
            lines.append(f"{_said(tokens):>6}  nothing fits")
            continue
        c = found.best
        how = f"{c.setup}" + (f", {c.setup.strategy}" if c.setup.cp > 1 else "")
        batch = f"{c.sequences} x {_said(tokens)}"
        lines.append(f"{_said(tokens):>6}  {how:24}  {c.bytes / GiB:9.1f}  {batch:7}  {duration(c.step)}")
    return Table("\n".join(lines))


def planner(model: str = "llama-3.1-8b", tokens: int = 2**17, gpus: int = 16, gpu: str = "h100") -> Any:
    """Two sliders, tokens and GPUs, and two menus, the model and the kind of GPU.

    Returns a widget; without ipywidgets, ``planner_player(model, gpus, gpu)``.
    """

    def draw(tokens: float, gpus: float, model: str, gpu: str) -> str:
        return str(_plan_svg(model, int(tokens), int(gpus), gpu))

    controls = {
        "tokens": log_slider("tokens", tokens, 12, 21),
        "gpus": log_slider("GPUs", gpus, 0, 9),
        "model": menu("model", MODELS_SHOWN, model),
        "gpu": menu("GPU", tuple(GPUS), gpu),
    }
    return explore(draw, lambda: planner_player(model, gpus, gpu), "two sliders and two menus", controls)


def planner_player(model: str = "llama-3.1-8b", gpus: int = 16, gpu: str = "h100") -> Player:
    """The fastest plan at one length after the other, in frames that a slider without a kernel shows."""
    frames = {f"{_said(n)} tokens": str(_plan_svg(model, n, gpus, gpu)) for n in LENGTHS}
    return Player(frames, str(planner_table(model, gpus, gpu)), first=LENGTHS.index(2**17))


WIDE, LEFT, RIGHT = 640, 70, 90


def _plan_svg(model: str, tokens: int, gpus: int, gpu: str) -> Svg:
    found = _found(model, tokens, gpus, gpu)
    title = f"{model}, {_said(tokens)} tokens on {gpus} x {gpu}"
    picture = Svg(WIDE, 222, title)
    picture.text(4, 18, title, font_weight="bold")
    if isinstance(found, str):
        words, line, y = found.split(), "", 44
        for word in words:
            if len(line) + len(word) > 88:
                picture.text(4, y, line, 12)
                line, y = "", y + 17
            line += word + " "
        picture.text(4, y, line, 12)
        return picture
    c = found.best
    strategy = f", {c.setup.strategy}" if c.setup.cp > 1 else ""
    how = f"{c.setup}{strategy}, FSDP {c.setup.fsdp}, recompute {c.setup.recompute}"
    rate = f"{c.tokens_per_second / gpus:,.0f} tokens/s per GPU"
    picture.text(4, 36, f"{how}; {c.sequences} sequence{'s' * (c.sequences > 1)} a step, {rate}", 12)
    capacity = found.gpu.memory / GiB
    memory = {name: n / GiB for name, n in c.memory.items()}
    _row(picture, 50, "memory", memory, capacity, f"{sum(memory.values()):.1f} of {capacity:.0f} GiB", "{:.1f} GiB")
    _row(picture, 146, "time", c.seconds, c.step, duration(c.step), None)
    return picture


def _row(
    picture: Svg, y: int, name: str, parts: Mapping[str, float], full: float, total: str, unit: str | None
) -> None:
    """A stacked bar, and below it what its parts are; parts too small to be seen have no entry."""
    scale = (WIDE - LEFT - RIGHT) / full
    picture.text(4, y + 20, name)
    x, at, below = float(LEFT), LEFT, y + 46
    for part, size in parts.items():
        fill = FILLS.get(part, GREY)
        width = size * scale
        picture.rect(round(x, 1), y, round(width, 1), 30, fill=fill, stroke="#fff", stroke_width=1)
        x += width
        if size < 0.01 * full:
            continue
        words = f"{part} {unit.format(size) if unit else duration(size)}"
        if at + 5.9 * len(words) + 14 > WIDE:
            at, below = LEFT, below + 17
        picture.rect(at, below - 9, 10, 10, fill=fill)
        picture.text(at + 14, below, words, 11)
        at += round(5.9 * len(words)) + 26
    picture.rect(LEFT, y, WIDE - LEFT - RIGHT, 30, fill="none", stroke="#000", stroke_dasharray="4 3")
    picture.text(WIDE - RIGHT + 6, y + 20, total, 11)

"""Pictures of notebook 11: a row of keys in parts, a roofline, a phantom key, who sees what, hops, when it pays.

Which rank owns a token is asked of the library's ``Ownership``, messages are those of a trace, and seconds those of
``ringlearn.costs.decoding``. ``cache`` is the widget: a cache over ranks as it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from torch import Tensor

from ...attention.decoding import EXCHANGES, Ownership
from ...costs.decoding import decode_seconds, waiting_seconds
from ...flash import attend
from ...partial import Partial
from ...plan.hardware import GPUS
from ...worlds.simulated import SimulatedWorld
from ...worlds.trace import Hardware
from ...worlds.world import PerRank
from .figure import colour, ink, new, pale
from .style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES, VERMILION, plain
from .widgets import Player, Svg, Table, explore, slider, switch

# ---- The whole notebook in one picture -------------------------------------------------------------------------------


def overview(tokens: int = 26, P: int = 4, interleave: int = 2) -> Figure:
    """One query, the keys of all ranks, their partial results, and the weight of each in the merged one."""
    own = Ownership(P, interleave)
    q, k, v = _numbers(tokens)
    lses = [float(attend(q, k[:, :, at], v[:, :, at], None, 0.5).lse) for at in _positions(own, tokens)]
    weights = torch.softmax(torch.tensor(lses), 0).tolist()
    figure, ax = new(1, (8.4, 2.5))
    for position in range(tokens):
        rank = own.owner(position)
        style = {"facecolor": colour(rank, P), "edgecolor": "white", "linewidth": 0.8}
        ax.add_patch(Rectangle((position, 0), 1, 1, **style))
        ax.add_patch(
            Rectangle((own.slot(position), 2.2 + 1.25 * rank), 1, 1, gid=f"key {position} rank {rank}", **style)
        )
        for y in (0, 2.2 + 1.25 * rank):
            x = position if y == 0 else own.slot(position)
            ax.text(x + 0.5, y + 0.5, position, ha="center", va="center", fontsize=8, color=ink(colour(rank, P)))
    for rank in range(P):
        y = 2.2 + 1.25 * rank + 0.5
        ax.text(-0.4, y, f"rank {rank}", ha="right", va="center", fontsize=9)
        start = max(own.count(r, tokens) for r in range(P)) + 0.4
        ax.add_patch(FancyArrowPatch((start, y), (start + 2.2, y), arrowstyle="-|>", mutation_scale=11, color=BLACK))
        box = {"boxstyle": "round,pad=0.35", "facecolor": pale(colour(rank, P)), "edgecolor": colour(rank, P)}
        ax.text(start + 4.1, y, "out, lse", ha="center", va="center", fontsize=9, bbox=box)
        ax.add_patch(
            FancyArrowPatch((start + 7.2, y), (start + 9.9, 4.6), arrowstyle="-|>", mutation_scale=11, color=BLACK)
        )
        ax.text(start + 6.5, y, f"{weights[rank]:.2f}", fontsize=9, ha="center", va="center")
    box = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": BLACK}
    ax.text(start + 11.9, 4.6, "out, lse\nof all keys", ha="center", va="center", fontsize=9, bbox=box)
    ax.text(-0.4, 0.5, "all keys", ha="right", va="center", fontsize=9)
    ax.set(xlim=(-3.4, tokens + 0.5), ylim=(7.4, -0.3))
    ax.axis("off")
    return figure


def _numbers(tokens: int, D: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, 1, n, D, generator=generator) for n in (1, tokens, tokens))  # type: ignore[return-value]


def _positions(own: Ownership, tokens: int) -> list[Tensor]:
    return [own.positions(rank, tokens) for rank in range(own.ranks)]


# ---- Bytes, not operations -------------------------------------------------------------------------------------------


def roofline(points: dict[str, float], gpu: str = "h200") -> Figure:
    """What a GPU of a data sheet can compute at an intensity, and where some workloads stand.

    points: name -> operations per byte of keys and values.
    """
    chip = GPUS[gpu]
    ridge = chip.bf16 / chip.bandwidth
    figure, ax = new(1, (7, 2.7))
    across = [0.5, ridge, 8 * max(ridge, *points.values())]
    ax.loglog(across, [min(chip.bf16, x * chip.bandwidth) / 1e12 for x in across], color=BLACK, linewidth=1.5)
    ax.axvline(ridge, color=GREY, linestyle=":", linewidth=1)
    ax.text(ridge * 1.1, 3, f"{ridge:.0f} operations\nper byte", fontsize=9, color="0.3")
    for (name, x), (fill, _), marker in zip(points.items(), SERIES, "osD^vP"):
        y = min(chip.bf16, x * chip.bandwidth) / 1e12
        ax.plot(x, y, marker, color=fill, markeredgecolor=BLACK, markersize=8, linestyle="none", gid=f"{name} {y:.4g}")
        ax.annotate(f"{name}: {y:,.0f} TFLOP/s", (x, y), (9, -11), textcoords="offset points", fontsize=9)
    ax.set(xlabel="operations per byte that is read", ylabel="TFLOP/s that can be reached", ylim=(1.5, 3000))
    plain(ax)
    return figure


# ---- A part without keys ---------------------------------------------------------------------------------------------


def phantom(lses: Sequence[float]) -> Figure:
    """The weight of each part in the merged result, rightly, and if a part without keys says lse = 0.

    lses: of each part; -inf of one without keys.
    """
    right = torch.softmax(torch.tensor(lses), 0)
    wrong = torch.softmax(torch.tensor([0.0 if x == float("-inf") else x for x in lses]), 0)
    figure, axes = new(2, (7.6, 2.3), sharey=True)
    for ax, weights, title in zip(
        axes, (right, wrong), ("lse = −∞: an empty split has no weight", "lse = 0: an empty split counts as a key")
    ):
        for i, (x, weight) in enumerate(zip(lses, weights.tolist())):
            empty = x == float("-inf")
            look = {"color": VERMILION, "hatch": "//"} if empty else {"color": BLUE}
            ax.bar(i, weight, width=0.8, edgecolor="white", gid=f"part {i} weight {weight:.6f}", **look)
            ax.text(i, weight + 0.02, f"{weight:.2f}", ha="center", fontsize=8)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="split", ylim=(0, 1.05), xticks=range(len(lses)))
    axes[0].set_ylabel("weight in the result")
    plain(*axes)
    return figure


# ---- Who sees what ---------------------------------------------------------------------------------------------------


def by_local_end(own: Ownership, rank: int, tokens: int, back: int) -> int:
    """The mistake: a query that is ``back`` tokens from the end sees all but a rank's own last ``back`` slots."""
    return max(0, own.count(rank, tokens) - back)


def by_position(own: Ownership, rank: int, tokens: int, back: int) -> int:
    """Slots of a rank that a query ``back`` tokens from the end sees: what the rank owns up to its position."""
    return own.count(rank, tokens - back)


def visible(tokens: int = 18, P: int = 3, n: int = 4, interleave: int = 1) -> Figure:
    """Which keys the newest n queries see: by their positions, and by each rank's own end."""
    own = Ownership(P, interleave)
    figure, axes = new(2, (9, 1.9))
    titles = ("counted from the query's position: right", "counted back from each rank's own end: wrong")
    for ax, slots, title in zip(axes, (by_position, by_local_end), titles):
        for row in range(n):
            back = n - 1 - row
            for position in range(tokens):
                rank = own.owner(position)
                seen, due = own.slot(position) < slots(own, rank, tokens, back), position < tokens - back
                fill = colour(rank, P) if seen else "white"
                style = {"facecolor": fill, "edgecolor": "0.75", "linewidth": 0.6}
                if seen != due:
                    style |= {"edgecolor": VERMILION, "hatch": "xxx", "linewidth": 1.4, "zorder": 3}
                ax.add_patch(Rectangle((position, row), 1, 1, gid=f"query {row} key {position} {seen} {due}", **style))
        ax.set_title(title, fontsize=10)
        ax.set(xlim=(0, tokens), ylim=(n, 0), xlabel="position of the key")
        ax.set_xticks([i + 0.5 for i in range(0, tokens, 3)], range(0, tokens, 3))
        ax.set_yticks([i + 0.5 for i in range(n)], [tokens - n + i for i in range(n)])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    axes[0].set_ylabel("position of the query")
    handles = [Patch(facecolor=colour(rank, P), label=f"seen, on rank {rank}") for rank in range(P)]
    handles.append(Patch(facecolor="white", edgecolor=VERMILION, hatch="xxx", label="missed"))
    figure.legend(handles=handles, loc="outside upper center", ncols=P + 1, frameon=False, fontsize=9)
    return figure


# ---- Two ways to exchange --------------------------------------------------------------------------------------------


def exchanges(P: int = 8) -> Figure:
    """All messages of an all-gather and of a tree on P simulated ranks, over a clock that counts latencies."""
    figure, axes = new(2, (7.6, 2.5), sharey=True)
    for ax, name in zip(axes, ("all-gather", "tree")):
        trace = exchange_trace(name, P)
        for event in trace.select("recv"):
            arrow = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
            ends = (event.start, event.peer), (event.stop, event.rank)
            ax.add_patch(
                FancyArrowPatch(*ends, color=colour(event.peer, P), gid=f"{event.peer} to {event.rank}", **arrow)
            )
        hops = round(trace.makespan())
        ax.set_title(f"{name}: {hops} hop{'s' * (hops > 1)}, {len(trace.select('send'))} messages", fontsize=10)
        ax.set(xlim=(-0.2, 6.4), ylim=(P - 0.6, -0.4), xlabel="time, in latencies", yticks=range(P))
    axes[0].set_ylabel("rank")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", color="0.9", linewidth=0.8)
    return figure


def exchange_trace(name: str, P: int) -> Any:
    """The trace of an exchange of small messages: a hop takes 1, and bytes nearly nothing."""
    world = SimulatedWorld(P, hardware=Hardware(1e12, 1e15, 1.0), count_memory=False)

    async def run(comm, out, lse):
        return await EXCHANGES[name](comm, Partial(out, lse))

    world.run(run, *(PerRank(torch.zeros(1, 1, 1, *d) for _ in range(P)) for d in ((4,), ())))
    return world.trace


# ---- Pass-KV or pass-Q -----------------------------------------------------------------------------------------------

# Yang et al. 2024, arXiv 2411.01783, table 4: new tokens of 128,000 -> milliseconds to the first token, if keys and
# values travel, and if queries do. Llama 3 405B, 126 layers, on 4 nodes of 8 H100: each GPU has 16 query heads and one
# key/value head. FLOP/s and bytes per second of a GPU follow from table 5.
PUBLISHED = {
    1_280: (1023.39, 898.71),
    3_200: (1110.18, 1046.43),
    4_160: (1298.92, 1280.1),
    6_400: (1305.56, 1302.01),
    12_800: (2080.67, 2205.27),
    25_600: (3353.02, 3617.02),
    38_400: (4629.23, 4922.52),
    64_000: (6845.21, 7367.99),
    128_000: (11462.15, 12360.57),
}
PUBLISHED_RUN = {"P": 4, "H": 16, "G": 1, "D": 128, "flops": 510e12, "bandwidth": 26e9, "accumulated": 2}
LAYERS = 126


def predicted(new_tokens: int) -> float:
    """Milliseconds by which pass-KV is slower than pass-Q in all layers of the published run; negative if faster."""
    waits = waiting_seconds(new_tokens, 128_000 - new_tokens, **PUBLISHED_RUN)
    return 1e3 * LAYERS * (waits["pass-kv"] - waits["pass-q"])


def prefill() -> Figure:
    """Published and computed differences between pass-KV and pass-Q, over the share of tokens that are new."""
    figure, ax = new(1, (7.6, 2.7))
    shares = [100 * n / 128_000 for n in PUBLISHED]
    published = [(kv - q) / q * 100 for kv, q in PUBLISHED.values()]
    computed = [predicted(n) / q * 100 for n, (_, q) in PUBLISHED.items()]
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.semilogx(shares, published, "o-", color=BLUE, label="published")
    ax.semilogx(shares, computed, "s--", color=ORANGE, markeredgecolor=BLACK, label="computed by formula (7)")
    ax.set_xticks(shares, [f"{x:.3g}" for x in shares], fontsize=8)
    ax.minorticks_off()
    ax.set(xlabel="new tokens, per cent of 128,000", ylabel="pass-KV slower by (%)")
    ax.text(33, 1, "above 0: queries should travel", fontsize=9)
    ax.text(1.05, -3.4, "below 0: keys and values\nshould travel", fontsize=9, va="top")
    ax.legend(frameon=False, fontsize=9)
    plain(ax)
    return figure


# ---- When it pays ----------------------------------------------------------------------------------------------------


def pays(
    measured: dict[int, float], *, read: float, bandwidth: float, latency: float, H: int, G: int, D: int
) -> Figure:
    """Seconds of one layer's attention to a cache, over its length, on 1, 2, 4 and 8 ranks.

    measured: cached tokens -> seconds on one GPU.
    """
    figure, ax = new(1, (7.2, 2.9))
    lengths = [2**i for i in range(12, 22)]
    link = {"read": read, "bandwidth": bandwidth, "latency": latency}
    for P, (fill, _), dash in zip(
        (1, 2, 4, 8), ((BLACK, ""), (BLUE, ""), (GREEN, ""), (PURPLE, "")), ("-", "--", "-.", ":")
    ):
        took = [1e6 * sum(decode_seconds(S, P, H, G, D, **link).values()) for S in lengths]
        ax.loglog(lengths, took, dash, color=fill, label=f"{P} rank{'s' * (P > 1)}, computed", base=2)
    at, took = list(measured), [1e6 * x for x in measured.values()]
    ax.plot(at, took, "o", color=ORANGE, markeredgecolor=BLACK, label="one H200, measured", zorder=3)
    ax.set_yscale("log", base=10)
    ax.set_xticks(lengths[::2], [f"{S // 1024}k" if S < 2**20 else "1M" for S in lengths[::2]])
    ax.set(xlabel="cached tokens", ylabel="µs for a layer")
    ax.legend(frameon=False, fontsize=9)
    plain(ax)
    return figure


# ---- The widget: a cache over ranks as it grows ----------------------------------------------------------------------

CAPACITY, PROMPT = 48, 24  # tokens of all ranks together, and those that a contiguous cache splits evenly


def held(tokens: int, P: int, interleave: int = 2, contiguous: bool = False) -> tuple[list[list[int]], int]:
    """The positions that each rank holds, and how many tokens find no place because their rank is full.

    contiguous: the prompt is split into equal parts, and what comes after it goes to the last rank.

    >>> held(8, 3), held(7, 3, 1)
    (([[0, 1, 6, 7], [2, 3], [4, 5]], 0), ([[0, 3, 6], [1, 4], [2, 5]], 0))
    >>> [len(mine) for mine in held(40, 4, contiguous=True)[0]], held(40, 4, contiguous=True)[1]
    ([6, 6, 6, 12], 10)
    """
    own, lost, ranks = Ownership(P, interleave), 0, [[] for _ in range(P)]
    for position in range(tokens):
        if not contiguous:
            ranks[own.owner(position)].append(position)
            continue
        rank = next((r for r in range(P) if position < PROMPT * (r + 1) // P), P - 1)
        if len(ranks[rank]) < CAPACITY // P:
            ranks[rank].append(position)
        else:
            lost += 1
    return ranks, lost


def cache_table(tokens: Sequence[int] = (8, 24, 30, 36, 48), P: int = 4, interleave: int = 2) -> Table:
    """What :func:`cache` shows, as text: tokens on each rank, dealt out in blocks, and in contiguous parts.

    >>> cache_table((24, 40))
    tokens | in blocks of 2 | a prompt of 24 in parts, the rest to the last rank
        24 | 6 6 6 6        | 6 6 6 6
        40 | 10 10 10 10    | 6 6 6 12, and no room for 10, with 18 places empty on other ranks
    """
    lines = [f"tokens | in blocks of {interleave} | a prompt of {PROMPT} in parts, the rest to the last rank"]
    for n in tokens:
        blocks, _ = held(n, P, interleave)
        parts, lost = held(n, P, contiguous=True)
        free = CAPACITY - sum(map(len, parts))
        full = f", and no room for {lost}, with {free} places empty on other ranks" if lost else ""
        cells = (" ".join(str(len(mine)) for mine in ranks) for ranks in (blocks, parts))
        lines.append(f"{n:6} | {next(cells):14} | {next(cells)}{full}")
    return Table("\n".join(lines))


def cache(P: int = 4) -> Any:
    """Three sliders, tokens, ranks and interleave, and a switch: contiguous parts.

    Returns a widget; without ipywidgets, ``cache_player(P)``.
    """

    def draw(tokens: int, ranks: int, interleave: int, contiguous: bool) -> str:
        return str(_cache_svg(tokens, ranks, interleave, contiguous))

    controls = {
        "tokens": slider("tokens", 30, 1, CAPACITY),
        "ranks": slider("ranks", P, 2, 6),
        "interleave": slider("interleave", 2, 1, 8),
        "contiguous": switch("contiguous parts"),
    }
    return explore(draw, lambda: cache_player(P), "three sliders and a switch", controls)


def cache_player(P: int = 4, interleave: int = 2, every: int = 6) -> Player:
    """The cache as it grows, in frames that a slider without a kernel shows: in blocks, and in contiguous parts."""
    frames = {}
    for tokens in range(every, CAPACITY + 1, every):
        both = (str(_cache_svg(tokens, P, interleave, contiguous)) for contiguous in (False, True))
        frames[f"{tokens} tokens"] = "<br>".join(both)
    return Player(frames, str(cache_table(range(every, CAPACITY + 1, every), P, interleave)), first=len(frames) // 2)


SLOT, LEFT = 26, 62


def _cache_svg(tokens: int, P: int, interleave: int, contiguous: bool) -> Svg:
    ranks, lost = held(tokens, P, interleave, contiguous)
    slots = CAPACITY // P if contiguous else Ownership(P, interleave).count(0, CAPACITY)
    width = LEFT + max(slots, 13) * SLOT + 78
    how = f"a prompt of {PROMPT} in contiguous parts, the rest to rank {P - 1}" if contiguous else (
        f"in blocks of {interleave}, dealt out in turn"
    )  # fmt: skip
    picture = Svg(width, 52 + P * (SLOT + 6), f"{tokens} tokens over {P} ranks, {how}")
    picture.text(4, 18, how[0].upper() + how[1:], font_weight="bold")
    for rank, mine in enumerate(ranks):
        y, fill = 28 + rank * (SLOT + 6), colour(rank, P)
        empty, full = range(len(mine), slots), range(len(mine))
        outline, filled = ("".join(f"M{LEFT + x * SLOT} {y}h24v24h-24z" for x in places) for places in (empty, full))
        picture.shape("path", d=outline, fill="none", stroke="#bbb")
        picture.shape("path", d=filled, fill=fill)
        if tokens - 1 in mine:
            picture.rect(LEFT + mine.index(tokens - 1) * SLOT, y, 24, 24, fill="none", stroke="#000", stroke_width=3)
        spans = "".join(f'<tspan x="{LEFT + 12 + x * SLOT}">{position}</tspan>' for x, position in enumerate(mine))
        picture.text(LEFT, y + 16, spans, 11, text_anchor="middle", fill=ink(fill))
        picture.text(4, y + 18, f"rank {rank}")
        look = {"fill": VERMILION, "font_weight": "bold"} if len(mine) == slots and lost else {"fill": "#000"}
        picture.text(LEFT + slots * SLOT + 6, y + 18, f"{len(mine)} of {slots}", **look)
    below = 28 + P * (SLOT + 6) + 14
    if lost:
        free = P * slots - sum(map(len, ranks))
        said = f"rank {P - 1} is full: no place for {lost} token{'s' * (lost > 1)}, and {free} empty places elsewhere"
        picture.text(4, below, said, fill=VERMILION, font_weight="bold")
    else:
        most, least = max(map(len, ranks)), min(map(len, ranks))
        differ = f"fullest and emptiest rank differ by {most - least}"
        picture.text(4, below, f"the newest token has a thick frame; {differ}", fill="#444")
    return picture

"""Draw the README's pictures from the trace of a simulated ring: python tools/draw_readme.py

docs/ring.svg shows whose keys each rank holds, and its time axis; docs/moving_ring.svg shows the ring turning.
"""

from __future__ import annotations

import math
import sys
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ringlearn as rl  # noqa: E402

PICTURE = ROOT / "docs" / "ring.svg"
MOVING = ROOT / "docs" / "moving_ring.svg"


def draw() -> bytes:
    """Four ranks, contiguous and causal: whose keys each rank holds at each step, and when it computes and waits."""
    world = rl.SimulatedWorld(4, device="meta")
    q, k, v = (torch.empty(1, heads, 8192, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8))
    rl.ring_attention(*world.shard(q, k, v, layout=rl.contiguous), mask=rl.causal)
    # White, on a dark page too; letters as shapes, so that it looks the same on every machine.
    with plt.rc_context({"svg.fonttype": "path", "svg.hashsalt": "ring", "path.simplify": True}):
        figure = plt.figure(figsize=(9.4, 4.2), layout="compressed", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        rl.viz.blocks_held(world.trace, ax=left)
        rl.viz.timeline(world.trace, ax=right)
        right.set_title("When it computes (simulated)", fontsize=11, loc="left")
        out = BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return out.getvalue()


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#F0E442")  # of the block of keys and values that each rank owns
INK = ("white", "black", "white", "black")


def draw_moving(P: int = 4, seconds: float = 14) -> bytes:
    """The ring as it turns: queries stay, blocks of keys and values pass by, and each result becomes whole.

    Whose block a rank meets at which step is read from the trace of a simulated run. The picture moves by itself,
    without a script; where motion is not wanted, it shows the end: every rank has met every block.
    """
    world = rl.SimulatedWorld(P, device="meta")
    rl.ring_attention(*world.shard(*(torch.empty(1, 1, 4 * P, 8, device="meta") for _ in range(3))))
    met = [[rank, *(e.origin for e in world.trace.select("recv", rank))] for rank in range(P)]
    assert all(row == [(rank - step) % P for step in range(P)] for rank, row in enumerate(met)), "it turns clockwise"

    wide, high, cx, cy, radius = 640, 444, 320, 208, 118
    share = 100 / (2 * P + 1)  # of the time: P steps and P - 1 hops, then a rest
    turns = [f"0%, {share:.1f}% {{ rotate: 0deg }}"]
    for hop in range(1, P):
        turns.append(f"{2 * hop * share:.1f}%, {(2 * hop + 1) * share:.1f}% {{ rotate: {hop * 360 // P}deg }}")
    turns.append(f"{100 - 0.1:.1f}% {{ rotate: {(P - 1) * 360 // P}deg }}")
    style = [
        "text { font-family: sans-serif; text-anchor: middle; dominant-baseline: central }",
        f".turn {{ animation: turn {seconds}s infinite; transform-origin: {cx}px {cy}px }}",
        f".upright {{ animation: upright {seconds}s infinite; transform-box: fill-box; transform-origin: center }}",
        "@keyframes turn { " + " ".join(turns) + " }",
        "@keyframes upright { " + " ".join(turns).replace("rotate: ", "rotate: -").replace("-0deg", "0deg") + " }",
    ]
    for step in range(P):
        at = (2 * step + 0.6) * share
        style.append(f".met{step} {{ animation: met{step} {seconds}s infinite }}")
        hidden, shown = f"0%, {at - share / 2:.1f}% {{ opacity: 0 }}", f"{at:.1f}%, 100% {{ opacity: 1 }}"
        style.append(f"@keyframes met{step} {{ {hidden} {shown} }}")
    style.append("@media (prefers-reduced-motion: reduce) { .turn, .upright, [class^=met] { animation: none } }")
    label = (
        "Four ranks on a circle. Each keeps its queries; the blocks of keys and values move on by one rank after each "
        "step, and after four steps every rank has met all four blocks."
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img" aria-label="{label}"><style>{" ".join(style)}</style>',
        f'<rect width="{wide}" height="{high}" rx="10" fill="white"/>',
        f'<circle cx="{cx}" cy="{cy}" r="{radius}" fill="none" stroke="#999" stroke-width="2" stroke-dasharray="5 6"/>',
        f'<text x="{cx}" y="{cy - 10}" font-size="15" fill="#444">keys and values</text>',
        f'<text x="{cx}" y="{cy + 12}" font-size="15" fill="#444">travel</text>',
    ]
    places = []
    for rank in range(P):
        angle = 2 * math.pi * rank / P
        places.append((math.sin(angle), -math.cos(angle)))
    out.append('<g class="turn">')
    for block, (x, y) in enumerate(places):
        x, y = cx + radius * x, cy + radius * y
        out.append(
            f'<g class="upright"><rect x="{x - 31:.1f}" y="{y - 17:.1f}" width="62" height="34" rx="6" '
            f'fill="{COLOURS[block]}" stroke="black"/><text x="{x:.1f}" y="{y:.1f}" font-size="14" '
            f'fill="{INK[block]}">k, v {block}</text></g>'
        )
    out.append("</g>")
    for rank, (x, y) in enumerate(places):
        x, y = cx + 1.98 * radius * x, cy + 1.42 * radius * y
        out.append(
            f'<g><rect x="{x - 74:.1f}" y="{y - 27:.1f}" width="148" height="54" rx="8" fill="#f3f3f3" stroke="#777"/>'
        )
        out.append(f'<text x="{x:.1f}" y="{y - 13:.1f}" font-size="13">rank {rank} keeps q {rank}</text>')
        for step, block in enumerate(met[rank]):
            left = x - 64 + 32 * block
            out.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="32" height="18" fill="white" stroke="#777"/>')
            out.append(
                f'<g class="met{step}"><rect x="{left:.1f}" y="{y:.1f}" width="32" height="18" '
                f'fill="{COLOURS[block]}" stroke="black"/><text x="{left + 16:.1f}" y="{y + 9.5:.1f}" font-size="12" '
                f'fill="{INK[block]}">{block}</text></g>'
            )
        out.append("</g>")
    out.append(
        f'<text x="{cx}" y="{high - 22}" font-size="14" fill="#444">Each rank merges one block per step into its '
        "result. After four steps it is whole.</text></svg>"
    )
    return "".join(out).encode()


if __name__ == "__main__":
    for file, drawn in ((PICTURE, draw()), (MOVING, draw_moving())):
        file.write_bytes(drawn)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")

"""Draw the README's picture, docs/ring.svg, from the trace of a simulated ring: python tools/draw_readme.py"""

from __future__ import annotations

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


if __name__ == "__main__":
    PICTURE.write_bytes(draw())
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")

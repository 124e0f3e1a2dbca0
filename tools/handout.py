"""Draw and fill in the teachers' handout, docs/handout.md: python tools/handout.py

It writes docs/four_steps.svg, the ring step by step, and docs/way_home.svg, a block in the backward, and puts what the
library's formulas say between the page's comments. Printed from the site, the page takes both sides of one sheet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from measurement_tables import TABLE, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ringlearn as rl  # noqa: E402
from ringlearn.costs.compare import compare  # noqa: E402
from ringlearn.costs.problem import Problem  # noqa: E402
from ringlearn.costs.ring import hiding_threshold  # noqa: E402
from ringlearn.course.published_ring import gradients  # noqa: E402

PAGE = ROOT / "docs" / "handout.md"
CALL = Problem(S=131_072, shape=(1, 8), H=32, G=8, D=128)  # an attention layer of Llama 3 8B, in bfloat16
WHAT = {  # strategy -> what travels
    "all-gather": "all keys and values, at once",
    "all-gather, 1 head at once": "the same, head by head",
    "ring": "keys and values, a shard per step",
    "ulysses": "all tokens of some heads, and back",
}


def four_steps() -> Figure:
    """Who holds which keys and values in the steps of a ring of four."""
    return rl.viz.stepper.circle(4)


def way_home() -> Figure:
    """How the gradients of one block travel in the published backward, from the trace of a run."""
    world = rl.SimulatedWorld(4)
    gradients(world, *(torch.ones(1, 1, 8, 4) for _ in range(4)))
    return rl.viz.backward.journey(world.trace, block=1)


PICTURES = {four_steps: 2.4, way_home: 3.3}  # inches high, without the caption: the page has its own


def svg(draw: Callable[[], Figure]) -> bytes:
    """The picture with letters as shapes, so that it looks the same on every machine."""
    with plt.rc_context({"svg.fonttype": "path", "svg.hashsalt": "ring"}):
        figure = draw()
        figure.supxlabel("")
        figure.set_figheight(PICTURES[draw])
        out = BytesIO()
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def threshold() -> str:
    rates = {"flops": CALL.flops, "bandwidth": CALL.bandwidth}
    plain, causal = (hiding_threshold(CALL.H, CALL.G, causal=causal, **rates) for causal in (False, True))
    return (
        f"For {CALL.H} query heads and {CALL.G} key/value heads in bfloat16, {CALL.flops / 1e12:,.0f} TFLOP/s and "
        f"{CALL.bandwidth / 1e9:,.0f} GB/s, that is {plain:,.0f} tokens, and {causal:,.0f} under a causal mask."
    )


def strategies() -> str:
    def mib(nbytes: int) -> str:
        return f"{nbytes / 2**20:,.0f}"

    head = ("strategy", "what travels", "messages", "sent", "backward", "held", "backward")
    rows = [
        (
            row.name,
            WHAT[row.name],
            row.messages,
            *(mib(sum(sent.values())) for sent in (row.sent, row.sent_backward)),
            *map(mib, (row.total_memory, row.total_memory_backward)),
        )
        for row in compare(CALL)
        if row.name in WHAT
    ]
    said = (
        f"One layer's attention to {CALL.S:,} tokens on {CALL.ranks} ranks, without a mask: {CALL.H} query heads, "
        f"{CALL.G} key/value heads, head dim {CALL.D}, bfloat16. In MiB: what one rank sends, and the most that it "
        "holds for this beside q, k, v and the results, each in the forward and in the backward. All numbers come from "
        "the library's formulas."
    )
    return f"{table(head, rows)}\n\n*{said}*"


def filled(page: str) -> str:
    """The page with what stands between its comments made anew."""
    made = {"threshold": threshold, "strategies": strategies}
    return TABLE.sub(lambda match: f"{match[1]}{made[match[2]]()}\n{match[3]}", page)


if __name__ == "__main__":
    for draw in PICTURES:
        (PAGE.parent / f"{draw.__name__}.svg").write_bytes(svg(draw))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

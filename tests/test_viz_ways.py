"""The pictures and the explorer of notebook 08 say what the comparison says."""

from __future__ import annotations

import re

import pytest
import torch

import ringlearn as rl
from ringlearn.costs.compare import Problem, compare

pytest.importorskip("matplotlib")
from ringlearn.course.viz import ways as pictures  # noqa: E402

SMALL = Problem(S=4096, shape=(2, 2), H=8, G=2, D=64, outer_bandwidth=25e9)


def bars(ax, name):
    return [p for p in ax.patches if p.get_gid() == name]


@pytest.mark.parametrize("H, nodes, places", [(8, 2, 2), (6, 2, 2), (3, 2, 4), (2, 1, 3)])
def test_shares_cover_every_output_once(H, nodes, places):
    figure = pictures.shares(H, nodes, places)
    P = nodes * places
    for ax, busy in zip(figure.axes, (P, min(H, P), nodes * min(H, places)), strict=True):
        parts = [p for p in ax.patches if (p.get_gid() or "").startswith("rank")]
        assert len({p.get_gid() for p in parts}) == busy
        assert sum(p.get_width() * p.get_height() for p in parts) == pytest.approx(H)


@pytest.mark.parametrize("H, G, P", [(8, 4, 4), (6, 2, 4), (8, 2, 4)])
def test_blocks_that_are_traded_are_the_bytes_that_a_run_sends(H, G, P):
    n, D = 6, 4
    world = rl.SimulatedWorld(P)
    rl.ulysses_attention(*world.shard(*(torch.randn(1, heads, n * P, D) for heads in (H, G, G))))
    moved = [0] * P  # numbers that leave each rank in the first trade, and in the second
    for number, ax in enumerate(pictures.trade(H, G, P).axes):
        for patch in ax.patches:
            name, rank, part = re.match(r"\d (.*): (\d), (\d)", patch.get_gid()).groups()
            if rank != part and number != 1:
                of_each = {"q": D, "k, v": 2 * D, "out": D + 1}[name]  # with an lse
                moved[int(part if number == 0 else rank)] += of_each * n * round(patch.get_height())
    assert [4 * numbers for numbers in moved] == [world.trace.bytes_sent(rank) for rank in range(P)]


def test_rings_show_every_key_once_on_every_rank_and_who_receives_across():
    one, double = pictures.rings(2, 3).axes
    for ax in (one, double):
        seen = [patch.get_gid().split()[:3] for patch in ax.patches]
        assert {(rank, origin) for rank, _, origin in seen} == {(f"{i}", f"{j}") for i in range(6) for j in range(6)}
    across = [{tuple(p.get_gid().split()[:2]) for p in ax.patches if "across" in p.get_gid()} for ax in (one, double)]
    assert across[0] == {(rank, f"{step}") for rank in "03" for step in range(1, 6)}
    assert across[1] == {(f"{rank}", "3") for rank in range(6)}


def test_the_table_has_a_row_for_each_way():
    text = repr(pictures.table(SMALL))
    assert "predicted" in text and "not measured" in text and "4,096 tokens" in text
    for row in compare(SMALL):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{row.name:26}"))
        assert line.split()[len(row.name.split())] == str(row.messages)
        assert line.rstrip().endswith(f"{row.exposed:.1%}" if row.exposed > 1e-9 else "all hidden")


def test_bars_are_as_long_as_the_rows_say():
    figure = pictures.picture(SMALL)
    sent, held, seconds = figure.axes
    for row in compare(SMALL):
        for link in ("inner", "outer"):
            found = bars(sent, f"sent {link} {row.name}")
            assert sum(p.get_width() for p in found) * 2**20 == pytest.approx(row.sent[link])
        (bar,) = bars(held, f"held {row.name}")
        assert bar.get_width() * 2**20 == pytest.approx(row.total_memory)
        unit = bars(seconds, f"computes {row.name}")[0].get_width() / row.compute
        waits = sum(p.get_width() for p in bars(seconds, f"waits {row.name}"))
        assert waits / unit == pytest.approx(row.seconds - row.compute)
    assert "predicted" in seconds.get_xlabel()


def test_one_rank_sends_and_holds_nothing():
    figure = pictures.picture(Problem(S=1024, shape=(1, 1), H=8, G=2, D=64))
    assert not [p for p in figure.axes[0].patches if (p.get_gid() or "").startswith("sent")]


SENT = {"forward_bytes": 2**23, "backward_bytes": 3 * 2**20, "exposed": {"forward": 0.1, "forward_backward": 0.2}}
RECORD = {
    "date": "2026-01-02",
    "hardware": {"device": "some GPU", "ranks": 2},
    "shape": {"H": 32, "G": 8, "D": 128, "B": 1, "dtype": "bfloat16", "mask": "causal"},
    "rows": [
        dict(
            way=way, transport=transport, layout=layout, kernel="auto", graph=False, problem=problem,
            tokens_per_rank=2048, forward_ms=1.5, forward_backward_ms=4.25, forward_fraction=0.5,
            forward_backward_fraction=0.75, forward_peak_mib=12.0, forward_backward_peak_mib=34.0,
            **(SENT if layout else {}),
        )
        for way, transport, layout, problem in (
            ("one device", None, None, None), ("ring", "nccl", "zigzag", None), ("ulysses", "nccl", "zigzag", "no")
        )
    ],
}  # fmt: skip


def test_measured_shows_what_a_record_says_and_leaves_out_what_failed():
    lines = repr(pictures.measured(RECORD)).splitlines()
    assert lines[0] == "2 x some GPU, H = 32, G = 8, D = 128, bfloat16, causal, 2026-01-02"
    assert max(map(len, lines)) <= 100 and "scores per second" in lines[-2]
    lines = lines[: lines.index("", 2)]
    assert lines[-2].split() == "2,048 one device - - | 1.50 4.25 | 50% 75% | - - | 12 34".split()
    assert lines[-1].split() == "2,048 ring 8 3 | 1.50 4.25 | 50% 75% | 10% 20% | 12 34".split()

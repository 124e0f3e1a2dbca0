"""The pictures and the explorer of notebook 06 say what the simulated clock and the measurements say."""

from __future__ import annotations

import re

import pytest

from ringlearn import costs
from ringlearn.course import records
from ringlearn.worlds.trace import Hardware

pytest.importorskip("matplotlib")
from ringlearn.course.viz import explorer, widgets  # noqa: E402

FAST = Hardware(latency=0.0)


def bars(ax, word):
    return [p for p in ax.patches if (p.get_gid() or "").startswith(f"rank 0 {word}")]


def test_twice_draws_each_run_to_its_end_and_hatches_only_waits():
    runs = {
        "before": explorer.ring_trace(700, hardware=FAST, awaited_first=True),
        "after": explorer.ring_trace(700, hardware=FAST),
    }
    ax = explorer.twice(runs).axes[0]
    assert len(bars(ax, "compute")) == 8 and len(bars(ax, "recv")) == 6 and len(bars(ax, "wait")) == 3
    assert all(bar.get_hatch() for bar in bars(ax, "wait"))
    ends = [max(bar.get_x() + bar.get_width() for bar in bars(ax, "compute")[4 * i : 4 * i + 4]) for i in range(2)]
    assert ends == pytest.approx([1e6 * trace.makespan() for trace in runs.values()])
    assert [text.get_text().strip() for text in ax.texts if "µs" in text.get_text()] == ["87.9 µs", "53.5 µs"]
    assert ax.get_xlabel() == "time (µs), simulated"


@pytest.mark.parametrize(("s", "exposed"), [(512, True), (4096, False)])
def test_picture_shows_the_border_and_what_is_exposed(s, exposed):
    left, right = explorer.picture(s).axes
    assert bool(bars(left, "wait")) == exposed
    assert ("exposed" in left.get_title(loc="left")) == exposed
    labels = [line.get_label() for line in right.lines]
    assert f"n* = {costs.hiding_threshold(32, 8, flops=600e12, bandwidth=250e9, latency=10e-6, D=128):,.0f} tokens" in (
        labels
    )
    compute, message, border, _ = right.lines
    at = border.get_xdata()[0]
    above = [x > at for x in compute.get_xdata()]
    assert above == [c > m for c, m in zip(compute.get_ydata(), message.get_ydata())]
    for ax in (left, right):
        assert ax.get_xlabel()


def test_table_has_the_threshold_and_one_row_per_length():
    text = repr(explorer.explorer_table([128, 1024], reuse=4, latency=0.0))
    assert "it takes 600 tokens per rank to hide a hop" in text and "simulated" in text
    rows = [line for line in text.splitlines() if re.match(r" +[\d,]+ ", line)]
    assert [row.split()[0] for row in rows] == ["128", "1,024"]
    assert rows[1].endswith("hidden") and rows[0].endswith("%")


@pytest.mark.parametrize("reuse", [1, 32])
@pytest.mark.parametrize(("tokens", "flops", "bandwidth"), [(32, 1e12, 1e13), (131072, 1e16, 1e8)])
def test_the_ends_of_the_sliders_can_be_drawn(tokens, reuse, flops, bandwidth):
    assert widgets.png(explorer.picture(tokens, reuse=reuse, flops=flops, bandwidth=bandwidth, latency=0.0))


def test_measured_steps_hatch_what_is_exposed():
    record = records.load("2026-11-28-hiding-2-h200.json")
    ax = explorer.steps_measured(record, 8192, {"nccl": "NCCL", "copy": "copy engine"}).axes[0]
    hatched = {lane: 0.0 for lane in (0, 2.5)}
    for bar in ax.patches:
        if bar.get_hatch() == "////":
            hatched[bar.get_y()] += bar.get_width()
    for what, lane in (("nccl", 0), ("copy", 2.5)):
        events = next(
            t["events"] for t in record["timelines"] if (t["what"], t["tokens_per_gpu"], t["rank"]) == (what, 8192, 0)
        )
        message, compute = (
            [(e["start_us"], e["stop_us"]) for e in events if e["kind"] == kind] for kind in ("message", "compute")
        )
        both = records.length(message + compute)
        assert hatched[lane] == pytest.approx(both - records.length(compute), abs=1e-6)
    assert "measured" in ax.get_xlabel()


def test_rates_draws_the_points_and_the_fitted_curve():
    ax = explorer.rates([2**21, 2**22], [3e-5, 4e-5], latency=2e-5, bandwidth=2e11).axes[0]
    model, points, peak = ax.lines
    assert list(points.get_ydata()) == pytest.approx([2**21 / 3e-5 / 1e9, 2**22 / 4e-5 / 1e9])
    assert model.get_ydata()[0] == pytest.approx(2**21 / (2e-5 + 2**21 / 2e11) / 1e9)
    assert peak.get_label() == "W = 200 GB/s"

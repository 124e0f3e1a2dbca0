"""The pictures of notebook 02 say what the numbers say."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from ringlearn import costs

plt = pytest.importorskip("matplotlib.pyplot")
flash = pytest.importorskip("ringlearn.viz.flash")
flash_mechanism = pytest.importorskip("ringlearn.viz.flash_mechanism")


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [(32, 16), (16, 32), (97, 97), (7, 40), (128, 128)])
def test_a_walk_covers_each_visible_score_once_and_moves_what_the_costs_say(blocks, causal):
    S, D = 97, 16
    steps = flash.walk(S, *blocks, D=D, itemsize=2, causal=causal)
    times = torch.zeros(S, S, dtype=torch.int64)
    for step in steps:
        times[step.queries.start : step.queries.stop, step.keys.start : step.keys.stop] += 1
    visible = torch.ones(S, S).tril().bool() if causal else torch.ones(S, S).bool()
    assert times.max() == 1 and bool((times[visible] == 1).all())
    for step in steps:  # a tile that is built has something to see
        assert visible[step.queries.start : step.queries.stop, step.keys.start : step.keys.stop].any()
    shape = {"block_q": blocks[0], "block_k": blocks[1]}
    moved = costs.flash_traffic(S, 1, 1, D, **shape, itemsize=2, causal=causal)
    assert steps[-1].read + steps[-1].written == moved
    assert max(step.live for step in steps) == costs.tile_bytes(min(S, blocks[0]), min(S, blocks[1]), D)
    assert [step.read for step in steps] == sorted(step.read for step in steps)


@pytest.mark.parametrize("bad", [(0, 1, 1), (4, 0, 1), (4, 1, 2.0), (True, 1, 1)])
def test_a_walk_refuses_sizes_below_one(bad):
    with pytest.raises(ValueError, match="int >= 1"):
        flash.walk(*bad)


def test_the_grid_shows_each_tile_in_its_state():
    figure, ax = plt.subplots()
    flash.grid(ax, 8, 2, 2, 4)  # 10 tiles are built of 16
    states = [patch.get_gid() for patch in ax.patches]
    assert {state: states.count(state) for state in set(states)} == {
        "done": 3, "live": 1, "to come": 6, "never built": 6,
    }  # fmt: skip
    looks = {(p.get_gid(), p.get_hatch(), p.get_facecolor()) for p in ax.patches}
    assert len(looks) == 4 and [p.get_hatch() for p in ax.patches if p.get_gid() == "live"] == ["//"]
    (live,) = (p for p in ax.patches if p.get_gid() == "live")
    assert (live.get_x(), live.get_y()) == (0, 4)  # the first tile of the third block of queries
    assert len(ax.get_legend().get_texts()) == 4


def test_the_grid_without_a_mask_has_no_tile_that_is_never_built():
    _, ax = plt.subplots()
    flash.grid(ax, 8, 2, 4, 8, causal=False)
    assert [patch.get_gid() for patch in ax.patches] == ["done"] * 7 + ["live"]
    assert len(ax.get_legend().get_texts()) == 2


def test_the_overview_plots_counted_peaks_with_slopes_two_and_one():
    left, right = flash.overview((64, 128, 256, 512), block=16, D=128).axes
    naive, guide_2, tiled, guide_1 = right.lines
    for line, slope in ((naive, 2), (tiled, 1)):
        a, b = line.get_ydata()[-2:]
        assert math.log2(b / a) == pytest.approx(slope, abs=0.15)
    for guide, slope in ((guide_2, 2), (guide_1, 1)):
        a, b = guide.get_ydata()[-2:]
        assert math.log2(b / a) == pytest.approx(slope)
    S, D = 512, 128
    q, k, v = (torch.zeros(1, 1, S, D) for _ in range(3))
    assert naive.get_ydata()[-1] >= 2 * (q @ k.mT).nbytes
    assert {text.get_text() for text in right.texts} == {"dotted: slope 2", "dotted: slope 1"}
    for ax in (left, right):
        assert ax.get_xlabel() and ax.get_ylabel()


def test_peak_bytes_counts_what_is_alive_beyond_the_inputs():
    S, D = 64, 16
    assert flash.peak_bytes(lambda q, k, v: q @ k.mT, S, D=D) == 4 * S * S
    assert flash.peak_bytes(lambda q, k, v: None, S) == 0


def test_the_table_ends_with_the_totals_of_each_size():
    text = repr(flash.walk_table(97, 32, 16, D=16, causal=True, sizes=[(97, 97), (32, 16)]))
    lines = text.splitlines()
    steps = flash.walk(97, 32, 16, D=16, causal=True)
    assert len(lines) == 1 + len(steps) + 2 + 2
    assert f"{steps[-1].read:,}" in lines[len(steps)] and f"{steps[-1].read:,}" in lines[-1]
    assert lines[len(steps)].split()[:3] == [str(len(steps)), "96-96", "96-96"]


def test_the_widget_follows_its_sliders():
    pytest.importorskip("ipywidgets")
    widget = flash.tile_walk(1024)
    step, rows, columns, masked, picture = widget.children
    assert step.max == 10 and "tile 1 of 10: queries 0-255, keys 0-255" in picture.value
    step.value = 3
    now = flash.walk(1024, 256, 256, causal=True)[2]
    assert f"read so far: {now.read:,} bytes" in picture.value
    assert f"live on the chip: {now.live:,} bytes" in picture.value
    masked.value = False
    assert step.max == 16 and "tile 3 of 16: queries 0-255, keys 512-767" in picture.value
    rows.value = 64
    assert step.max == 64
    columns.value = 1024
    assert step.max == 16 and "keys 0-1023" in picture.value
    step.value = 16
    rows.value = 1024  # one tile: the step slider must come back into its range
    assert step.max == 1 and "tile 1 of 1: queries 0-1023, keys 0-1023" in picture.value
    assert repr(widget) == "(three sliders and a switch: they show when the notebook runs live)"


def test_the_picture_of_two_paths_has_the_numbers_of_the_row():
    p, v, dout = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0.0, 4.0]), 2.0
    s = p.log().requires_grad_()
    (ds,) = torch.autograd.grad(dout * (s.softmax(0) @ v), s)
    texts = [text.get_text() for text in flash_mechanism.two_paths().axes[0].texts]
    paths = {key: [Fraction(t.split(": ")[1]) for t in texts if t.startswith(f"key {key}")] for key in (0, 2)}
    assert {key: float(sum(found)) for key, found in paths.items()} == {0: float(ds[0]), 2: float(ds[2])}
    assert "out = 1.5" in texts and float(p @ v) == 1.5


def test_a_chip_is_at_its_peak_from_the_rows_on_that_the_legend_says():
    figure = flash_mechanism.roofline()
    for one, line in zip(flash_mechanism.CHIPS, figure.axes[0].lines, strict=True):
        rows, reached = line.get_data()
        assert one.name in line.get_label() and f"{one.balance:.0f} rows" in line.get_label()
        for n, tflops in zip(rows, reached, strict=True):
            assert (tflops == one.flops / 1e12) == (n >= one.balance)
            assert n >= one.balance or tflops == pytest.approx(costs.intensity(n) * one.bandwidth / 1e12)


def test_the_chip_holds_one_block_of_each():
    texts = [text.get_text() for text in flash_mechanism.chip(5, 2, 1).axes[0].texts]
    assert sum(text.startswith("q$_") for text in texts) == 6 and "q$_2$\nstays" in texts
    assert [text for text in texts if text.startswith("out$_")] == ["out$_0$", "out$_1$"]  # written so far

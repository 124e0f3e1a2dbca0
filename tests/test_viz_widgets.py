"""Every widget follows each of its controls, and without ipywidgets it is a table that says the same."""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import pytest
import torch

from ringlearn.course.checks.nb07 import PACK
from ringlearn.course.viz import balance, dilated, explorer, flash, softmax, stepper, training, ways

SCORES, VALUES = torch.tensor([0.0, 1.0, -torch.inf, 2.0]), torch.tensor([1.0, 0.0, 5.0, 1.0])
SIZES = [(8, 16), (16, 16), (16, 8)]


@pytest.mark.parametrize(
    "widget, twin",
    [
        (lambda: softmax.stepper(SCORES, VALUES), lambda: softmax.stepper_table(SCORES, VALUES, range(5))),
        (lambda: flash.tile_walk(64, block=16), lambda: flash.walk_table(64, 16, 16, sizes=SIZES, causal=True)),
        (lambda: stepper.ring(3), lambda: stepper.table(3)),
        (explorer.explorer, explorer.explorer_table),
        (lambda: balance.explorer(PACK), lambda: balance.explorer_table(PACK)),
        (ways.explorer, ways.table),
        (dilated.explorer, lambda: dilated.table(24, 4, 4, 24, 4, by_row=True)),
        (training.explorer, training.memory_table),
    ],
)
def test_without_ipywidgets_a_widget_is_its_static_twin(widget, twin, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert repr(widget()) == repr(twin()) and "nan" not in repr(widget())


@pytest.mark.parametrize(
    "widget, values",
    [
        (explorer.explorer, (4096, 16, 60, 25, 90)),
        (ways.explorer, (2**14, 3, 4, 16, 2, 100.0, 10.0)),
        (dilated.explorer, (18, 3, "zigzag", 13, 3, False)),
        (training.explorer, (2**16, 4, 8, True)),
    ],
)
def test_each_control_changes_the_picture(widget, values):
    pytest.importorskip("ipywidgets")
    made = widget()
    *controls, image = made.children
    assert image.value[:8] == b"\x89PNG\r\n\x1a\n"
    seen = {bytes(image.value)}
    for control, value in zip(controls, values, strict=True):
        control.value = value
        assert bytes(image.value) not in seen, control.description
        seen.add(bytes(image.value))
    assert repr(made).endswith(": they show when the notebook runs live)")
    assert not plt.get_fignums()  # nothing is left open


def test_the_window_s_slider_moves_only_where_there_is_a_window():
    pytest.importorskip("ipywidgets")
    kind, ranks, width, image = balance.explorer([300, 500, 224]).children
    seen = {bytes(image.value)}
    for control, value in ((width, 128), (ranks, 4), (kind, "causal"), (kind, "causal documents")):
        assert not control.disabled
        control.value = value
        assert bytes(image.value) not in seen, control.description
        seen.add(bytes(image.value))
        assert width.disabled == (kind.value != "causal window")


def test_a_rate_above_the_segment_is_drawn_as_the_segment():
    pytest.importorskip("ipywidgets")
    _, _, _, segment, rate, _, image = dilated.explorer().children
    segment.value = 2
    before = bytes(image.value)
    rate.value = 3
    assert bytes(image.value) == before

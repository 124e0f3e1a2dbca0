"""The pictures of notebook 01 say what the numbers say."""

from __future__ import annotations

import pytest
import torch

from ringlearn import text

plt = pytest.importorskip("matplotlib.pyplot")
softmax = pytest.importorskip("ringlearn.viz.softmax")

SCORES = torch.tensor([1.0, 3.0, 2.0, 0.0, 4.0])


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def heights(ax):
    return [bar.get_height() for bar in ax.patches]


def test_two_blocks_each_sum_to_one_and_merge_to_the_softmax_of_the_row():
    left, right = softmax.two_blocks(SCORES, split=2).axes
    assert sum(heights(left)[:2]) == pytest.approx(1, abs=1e-6) and sum(heights(left)[2:]) == pytest.approx(1, abs=1e-6)
    assert heights(right) == pytest.approx(torch.softmax(SCORES, -1).tolist(), abs=1e-6)
    assert {bar.get_hatch() for bar in left.patches[:2]} != {bar.get_hatch() for bar in left.patches[2:]}  # greyscale


def test_row_names_the_bytes_at_its_heaviest_keys():
    above, below = softmax.row(b"..abcde", SCORES, first=2, top=2).axes
    assert [label.get_text() for label in below.texts] == ["b", "e"]
    assert [label.xy[0] for label in below.texts] == [3, 6]


def test_running_marks_every_move_of_the_maximum_and_ends_at_m_and_l():
    above, below = softmax.running(SCORES).axes
    moves = next(line for line in below.lines if line.get_label() == "m moves")
    assert list(moves.get_xdata()) == [0, 1, 4]
    m, l = SCORES.max(), torch.exp(SCORES - SCORES.max()).sum()
    assert (
        float(below.lines[0].get_ydata()[-1]) == pytest.approx(float(l)) and float(above.lines[0].get_ydata()[-1]) == m
    )


def test_every_axis_has_a_label():
    zen = text.zen()
    row = text.context_scores(zen, 655)
    for figure in (softmax.two_blocks(SCORES, 2), softmax.row(zen, row, first=8), softmax.running(row)):
        assert figure.axes[0].get_ylabel() and figure.axes[-1].get_xlabel()

"""The pictures, the table and the widget of notebook 10 say what layouts and costs say."""

from __future__ import annotations

import pytest

import ringlearn as rl
from ringlearn.costs.training import WAYS, kept_bytes, kept_numbers, state_bytes, weights
from ringlearn.course.viz import training

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
def test_targets_are_hatched_where_the_next_token_is_elsewhere(layout):
    figure = training.targets(23, 3, layout)
    cells = {int(p.get_gid().split()[0]): p for p in figure.axes[0].patches if p.get_gid()}
    assert sorted(cells) == list(range(23))
    owner = {p: r for r in range(3) for p in layout.positions(23, 3, r).tolist()}
    away = [p for p in range(22) if owner[p] != owner[p + 1]]
    assert [p for p, cell in sorted(cells.items()) if cell.get_hatch()] == away
    assert training.borders(23, 3, layout) == len(away)
    assert sorted(t.get_text() for t in figure.axes[0].texts) == sorted([*map(str, range(1, 23)), "-"])


@pytest.mark.parametrize("dp, cp, S", [(2, 3, 12), (1, 2, 7), (2, 1, 4)])
def test_a_mesh_shows_what_each_rank_holds_and_one_frame_around_all(dp, cp, S):
    ax = training.mesh(dp, cp, S).axes[0]
    ranks = {int(p.get_gid().split()[1]): p for p in ax.patches if p.get_gid()}
    assert sorted(ranks) == list(range(dp * cp))
    texts = {t.get_text().split("\n")[0]: t.get_text() for t in ax.texts}
    for rank in ranks:  # as init_device_mesh numbers them: rank = row * cp + column
        runs = texts[f"rank {rank}"].partition("tokens ")[2].split(", ")
        ends = [(int(run.split("-")[0]), int(run.split("-")[-1])) for run in runs]
        held = [p for first, last in ends for p in range(first, last + 1)]
        assert held == rl.zigzag.positions(S, cp, rank % cp).tolist()
    (frame,) = [p for p in ax.patches if p.get_linestyle() == "--"]
    x0, y0, x1, y1 = *frame.get_xy(), frame.get_x() + frame.get_width(), frame.get_y() + frame.get_height()
    for p in ranks.values():
        assert x0 < p.get_x() and p.get_x() + p.get_width() < x1 and y0 < p.get_y() < y1 - p.get_height()


def test_curves_have_a_line_for_the_first_run_and_marks_for_the_others():
    first, second = training.curves({"one": [2.0, 1.0], "two": [2.0, 1.5]}).axes[0].lines
    assert list(second.get_ydata()) == [2.0, 1.5] and first.get_marker() == "None" != second.get_marker()


def test_the_table_and_the_bars_are_the_costs():
    sizes = {"layers": 2, "H": 4, "G": 2, "D": 16}
    row = repr(training.memory_table(2**20, sizes, (4,))).splitlines()[-1].replace("|", " ").split()
    want = [kept_bytes(2**20, 4, way=way, **sizes) for way in WAYS]
    want += [state_bytes(weights(**sizes), 4, fsdp=fsdp) for fsdp in (False, True)]
    assert row == ["4", *(f"{x / 2**30:.2f}" for x in want)]
    figure = training.memory(2**20, 4, sizes, fsdp=True)
    for ax, P in zip(figure.axes, (1, 4), strict=True):
        for way in WAYS:
            bars = {b.get_gid(): b for b in ax.patches if (b.get_gid() or "").startswith(f"{P} {way} ")}
            assert len(bars) == 1 + len(kept_numbers(P, way=way, **sizes))  # and the weights' state
            top = max(b.get_y() + b.get_height() for b in bars.values()) * 2**30
            assert top == pytest.approx(
                kept_bytes(2**20, P, way=way, **sizes) + state_bytes(weights(**sizes), P, fsdp=True)
            )

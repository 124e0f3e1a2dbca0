"""The pictures and the explorer of notebook 07 say what the balance says."""

from __future__ import annotations

import pytest

import ringlearn as rl
from ringlearn.attention.needed import route_of
from ringlearn.costs.balance import ring_balance
from ringlearn.course.checks.nb07 import PACK

pytest.importorskip("matplotlib")
from ringlearn.course.viz import balance as pictures  # noqa: E402


def bars(ax, word):
    return [p for p in ax.patches if (p.get_gid() or "").startswith(word)]


def test_pace_draws_every_step_that_has_work_at_its_time():
    found = [ring_balance(rl.causal, 64, 4, layout) for layout in (rl.contiguous, rl.zigzag)]
    figure = pictures.pace(found)
    for ax, balance in zip(figure.axes, found, strict=True):
        work = {tuple(map(int, p.get_gid().split()[1:])): p for p in bars(ax, "work")}
        assert set(work) == {(r, t) for r in range(4) for t in range(4) if balance.scores[r][t]}
        for (r, t), bar in work.items():
            start, stop = (x / balance.mean for x in balance.times[r][t])
            assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((start, stop))
        assert all(p.get_hatch() for p in bars(ax, "idle")) and len(bars(ax, "idle")) == 4
        assert ax.get_title(loc="left") == f"{balance.layout}: {balance.ratio:.2f}"
    assert "simulated" in figure.get_supxlabel()


def test_pace_of_nothing_and_of_many_ranks():
    assert pictures.pace([ring_balance(rl.causal, 0, 3, rl.zigzag)]).axes
    few, many = (pictures.pace([ring_balance(rl.causal, 640, P, rl.striped)]) for P in (4, 16))
    assert len(bars(many.axes[0], "work")) == 256 and not many.axes[0].texts
    for figure, numbered in ((few, True), (many, False)):
        assert ("number" in figure.legends[0].texts[0].get_text()) == numbered == bool(figure.axes[0].texts)


def test_table_has_a_row_for_each_mask_and_layout():
    rows = repr(pictures.explorer_table(PACK)).splitlines()
    assert len([row for row in rows if row.startswith("causal")]) == 3 + 3 + 4
    for kind in pictures.KINDS:
        mask, layouts = pictures.scene(kind, PACK, 4096)
        for layout in layouts:
            b = ring_balance(mask, sum(PACK), 8, layout, visible=True)
            (row,) = (r for r in rows if r.startswith(f"{kind:16}  {layout!s:19}  "))
            assert row.split()[-3:] == [f"{x:.2f}" for x in (b.ratio, b.busiest / b.mean, max(b.per_step))]


def test_rows_carried_colours_those_that_the_route_carries():
    mask, layouts = rl.causal & rl.sliding_window(5), [rl.contiguous, rl.striped, rl.zigzag]
    figure = pictures.rows_carried(mask, 64, 4, layouts)
    for ax, layout in zip(figure.axes, layouts, strict=True):
        ranges = layout.ranges(64, 4)
        route = route_of(mask, ranges, ranges)
        for rank, hop in ((r, t) for r in range(4) for t in (1, 2, 3)):
            assert len(bars(ax, f"True {rank} {hop}")) == route.length(rank, hop)
            assert len(bars(ax, f"False {rank} {hop}")) == 16 - route.length(rank, hop)

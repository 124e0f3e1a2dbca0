"""The pictures of notebook 12 show what the planner and the layouts say."""

from __future__ import annotations

import re

import pytest

from ringlearn.course.checks import nb12
from ringlearn.layouts import zigzag
from ringlearn.plan import plan

pytest.importorskip("matplotlib")

from ringlearn.course.viz import planner  # noqa: E402


def gids(figure):
    return [x.get_gid() for ax in figure.axes for x in ax.patches if x.get_gid()]


def test_a_row_is_read_by_the_ranks_that_hold_its_zigzag_shards():
    borders = [[0, 5, 12], [0, 7, 12]]
    found = {tuple(map(int, re.findall(r"\d+", gid))) for gid in gids(planner.who_reads(borders, 2))}
    assert found == {
        (row, place, 2 * row + r) for row in range(2) for r in range(2) for place in zigzag.positions(12, 2, r).tolist()
    }
    numbers = [int(t.get_text()) for t in planner.who_reads(borders, 2).axes[0].texts if t.get_text().isdigit()]
    due = [i for row in range(2) for rank in range(2) for i in nb12.part_of(nb12._batch(borders, 2), 2 * row + rank)[1]]
    assert numbers == due


def test_bars_are_as_long_as_their_parts():
    found = [gid.split()[-1] for gid in gids(planner.bars({"a": {"x": 1.5, "y": 2}, "b": {"y": 3}}, 5))]
    assert found == ["1.5", "2", "3"]
    assert len(planner.overview().axes[0].texts) == 3 * len(planner.STEPS)


def test_the_widget_draws_the_fastest_plan_or_says_why_there_is_none():
    best = plan("llama-3.1-8b", "128k", 16, "h100").best
    drawn = str(planner._plan_svg("llama-3.1-8b", 2**17, 16, "h100"))
    assert str(best.setup) in drawn and f"{best.tokens_per_second / 16:,.0f} tokens/s" in drawn
    widths = [float(w) for w in re.findall(r'y="50" width="([\d.]+)" height="30" fill="#', drawn)]
    full = planner.WIDE - planner.LEFT - planner.RIGHT
    assert len(widths) == len(best.memory)
    assert sum(widths) == pytest.approx(full * best.bytes / plan("llama-3.1-8b", 4096, 16).gpu.memory, abs=1)
    none = re.sub("<[^>]*>", " ", str(planner._plan_svg("llama-3.1-405b", 2**17, 16, "h100")))
    assert "does not fit" in none and "What fits" in none


def test_the_player_has_a_frame_for_each_length_and_the_table_as_text():
    player = planner.planner_player()
    assert list(player.frames)[0] == "8k tokens" and list(player.frames)[player.first] == "128k tokens"
    assert repr(player) == str(planner.planner_table()) and len(player.frames) == len(planner.LENGTHS)
    assert "nothing fits" in repr(planner.planner_table("llama-3.1-405b", 8, lengths=(8192,)))

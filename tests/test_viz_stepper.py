"""The ring stepper of notebook 03: what it shows is what a ring does, right or broken."""

from __future__ import annotations

import re

import pytest

import ringlearn as rl
from ringlearn.course.viz import stepper
from ringlearn.course.viz.stepper import visits


@pytest.mark.parametrize("P", range(1, 7))
@pytest.mark.parametrize("mask", [rl.full, rl.causal], ids=["full", "causal"])
def test_a_sound_ring_meets_every_block_once_and_is_right_at_every_step(P, mask):
    for rank, row in enumerate(visits(P, mask)):
        assert [x.held for x in row] == [(rank - t) % P for t in range(P)]
        assert all(x.held == x.taken_for and x.as_due and x.right for x in row)
        kinds = {x.held: x.kind for x in row}
        if mask == rl.causal:
            assert [kinds[j] for j in range(P)] == ["all"] * rank + ["triangle"] + ["nothing"] * (P - 1 - rank)
        else:
            assert set(kinds.values()) == {"all"}


def wrong(P, mask=rl.causal, **switches):
    return [row[0].rank for row in visits(P, mask, **switches) if not row[-1].right]


def test_the_other_way_is_right_without_a_mask_on_two_ranks_and_on_the_first_and_last():
    assert wrong(4, rl.full, other_way=True) == wrong(2, other_way=True) == []
    assert [wrong(P, other_way=True) for P in (3, 4, 5)] == [[1], [1, 2], [1, 2, 3]]
    row = visits(4, other_way=True)[1]
    assert [x.held for x in row] == [1, 2, 3, 0] and [x.taken_for for x in row] == [1, 0, 3, 2]
    assert [x.as_due for x in row] == [True, False, True, False]
    assert [x.right for x in row] == [True, False, False, False]


def test_a_local_mask_is_right_on_rank_0_only_and_without_a_mask():
    assert [wrong(P, local_mask=True) for P in (2, 4)] == [[1], [1, 2, 3]]
    assert wrong(4, rl.full, local_mask=True) == []
    assert wrong(4, local_mask=True, other_way=True) == [1, 2, 3]


def test_the_table_says_what_the_visits_say():
    lines = repr(stepper.table(4, other_way=True)).splitlines()
    assert re.sub(" +", " ", lines[2]).startswith(" 1 | 1 triangle 2 all ! 3 nothing 0 nothing ! | wrong, off by")
    assert lines[1].endswith("| right") and "not the tile" in lines[-1]
    assert "!" not in repr(stepper.table(4))


@pytest.mark.parametrize("P", [0, 9, 2.0, True])
def test_a_number_of_ranks_that_cannot_be_shown_is_refused(P):
    with pytest.raises(ValueError, match="number of ranks from 1 to 8"):
        visits(P)


def test_the_picture_of_the_coverage_has_every_tile_with_its_step():
    figure = stepper.coverage(4)
    (ax,) = figure.axes
    gids = {patch.get_gid() for patch in ax.patches if patch.get_gid()}
    assert {f"rank {x.rank} block {x.held} step {x.step} {x.kind}" for row in visits(4) for x in row} == gids
    assert [t.get_text() for t in ax.texts] == [str(x.step) for row in visits(4) for x in row]
    assert ax.get_xlabel() and ax.get_ylabel()
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert len(labels) == 3 and len(stepper.coverage(3, rl.full).legends[0].get_texts()) == 1


def test_the_drawing_of_the_ring_shows_what_each_rank_holds_in_each_step():
    figure = stepper.circle(4)
    gids = {patch.get_gid() for ax in figure.axes for patch in ax.patches if patch.get_gid()}
    assert gids == {f"step {x.step} rank {x.rank} holds {x.held}" for row in visits(4, rl.full) for x in row}
    assert [sum("Arrow" in type(patch).__name__ for patch in ax.patches) for ax in figure.axes] == [4, 4, 4, 0]
    assert figure.get_supxlabel().endswith("all keys.")


def test_the_svg_draws_the_steps_so_far():
    first, last = (stepper.svg(visits(4, other_way=True), step) for step in (0, 3))
    assert "off by" not in first and "thick dashed" not in first
    assert last.count("off by") == 2 and last.count("✓ right") == 2
    assert first.count('stroke-dasharray="2 4"') == 12 and 'stroke-dasharray="2 4"' not in last
    scores = sum(sum(map(sum, x.used)) for row in visits(4, other_way=True) for x in row)
    assert last.count('width="15.0" height="15.0"') == scores


def test_the_widget_redraws_for_every_control():
    pytest.importorskip("ipywidgets")
    step, ranks, switches, picture = stepper.ring(4).children
    masked, other_way, local_mask = switches.children
    seen = [picture.value]

    def changed():
        seen.append(picture.value)
        return seen[-1] != seen[-2]

    step.value = 3
    assert changed() and picture.value.count("✓ right") == 4
    other_way.value = True
    assert changed() and picture.value.count("✓ right") == 2
    local_mask.value = True
    assert changed() and picture.value.count("✓ right") == 1
    local_mask.value = masked.value = False
    assert changed() and picture.value.count("✓ right") == 4
    ranks.value = 2
    assert changed() and step.value == step.max == 1 and picture.value.count("✓ right") == 2
    assert repr(stepper.ring(4)) == "(two sliders and three switches: they show when the notebook runs live)"


def test_the_memory_picture_stacks_what_it_is_given_and_marks_equal_shares():
    MiB = 2**20
    peaks = {1: {"q": 4 * MiB, "k, v": 2 * MiB}, 2: {"q": 2 * MiB, "k, v": MiB, "in flight": MiB}}
    (ax,) = stepper.memory(peaks).axes
    bars = {bar.get_gid(): (bar.get_y(), bar.get_height()) for bar in ax.patches}
    assert bars == {"P 1 q": (0, 4), "P 1 k, v": (4, 2)} | {
        f"P 2 {name}": place for name, place in {"q": (0, 2), "k, v": (2, 1), "in flight": (3, 1)}.items()
    }
    shares = [line.get_ydata()[0] for line in ax.lines if len(line.get_ydata())]
    assert shares == [6, 3] and [t.get_text() for t in ax.texts] == ["6.0", "4.0"]
    assert "MiB" in ax.get_ylabel() and ax.get_xlabel()
    with pytest.raises(ValueError, match="P = 1"):
        stepper.memory({2: {"q": 1}})

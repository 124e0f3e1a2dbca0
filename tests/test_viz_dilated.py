"""The pictures and the widget of notebook 09: what they show is what the library keeps, or what chunks would."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn.attention.dilated.rows import Configuration
from ringlearn.course.viz import dilated

LAYOUTS = [rl.contiguous, rl.striped, rl.zigzag]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("w, r", [(8, 3), (7, 2), (40, 4)])
def test_marks_by_position_do_not_depend_on_ranks(layout, w, r):
    for P in (1, 3, 8):
        for head, line in enumerate(dilated.rows(30, P, 4, w, r, layout)):
            kept = [p for rows in Configuration(w, r).kept(head, 30) for p in rows]
            assert [p for p, mark in enumerate(line) if mark == "x"] == kept
            assert set(line) <= {"x", "."}


def test_marks_by_row_are_those_of_each_chunk_by_itself():
    (line,) = dilated.rows(24, 4, 1, 24, 4, by_row=True)
    assert [p for p, mark in enumerate(line) if mark in "x!"] == [0, 4, 6, 10, 12, 16, 18, 22]
    assert [p for p, mark in enumerate(line) if mark in "xo"] == [0, 4, 8, 12, 16, 20]
    for S, P, w, r in ((32, 4, 32, 4), (32, 4, 8, 3), (30, 1, 7, 3)):  # where nothing shows
        assert dilated.rows(S, P, 4, w, r, by_row=True) == dilated.rows(S, P, 4, w, r)


@pytest.mark.parametrize("options", [dict(S=65), dict(P=9), dict(heads=0), dict(segment=2, rate=3), dict(S=8.0)])
def test_numbers_that_cannot_be_shown_are_refused(options):
    with pytest.raises(ValueError, match="dilated: expected"):
        dilated.rows(**{"S": 20, "P": 3, "heads": 2, "segment": 8, "rate": 2, **options})


@pytest.mark.parametrize("by_row", [False, True])
def test_the_picture_and_the_table_have_the_marks(by_row):
    marks = dilated.rows(24, 4, 3, 12, 4, rl.zigzag, by_row=by_row)
    figure = dilated.kept(24, 4, 3, 12, 4, rl.zigzag, by_row=by_row)
    gids = {patch.get_gid() for patch in figure.axes[0].patches if patch.get_gid()}
    assert gids == {f"head {j} position {p} {mark}" for j, line in enumerate(marks) for p, mark in enumerate(line)}
    assert len(figure.legends) == ("!" in "".join(marks))
    assert [t.get_text() for t in figure.axes[0].texts[:24]] == list(dilated.owners(24, 4, rl.zigzag))
    text = repr(dilated.table(24, 4, 3, 12, 4, rl.zigzag, by_row=by_row))
    for head, line in enumerate(marks):
        assert f"head {head}    {line[:12]} {line[12:]}" in text
    assert ("unlike one device" in text) == ("!" in "".join(marks))


def test_the_picture_of_weights_tells_future_from_past():
    figure = dilated.weights({"causal": torch.ones(4, 4).tril(), "all": torch.ones(4, 4)}, P=2)
    past, everything = ([p.get_gid() for p in ax.patches] for ax in figure.axes)
    assert len(past) == 10 and all(gid.startswith("past") for gid in past)
    assert sorted(gid for gid in everything if gid.startswith("future"))[0] == "future 0 1" and len(everything) == 16
    assert all(ax.get_xlabel() and ax.get_ylabel() and ax.get_title() for ax in figure.axes)

"""The pictures of notebook 11 show what the library and the trace say."""

from __future__ import annotations

import re

import pytest

from ringlearn.attention.decoding import Ownership
from ringlearn.costs.decoding import exchange_hops
from ringlearn.course import parrot
from ringlearn.course.viz import decoding


def gids(figure):
    return [p.get_gid() for ax in figure.axes for p in (*ax.patches, *ax.lines) if p.get_gid()]


def test_the_overview_has_every_key_on_its_owner():
    found = [tuple(map(int, re.findall(r"\d+", gid))) for gid in gids(decoding.overview(20, 3, 2))]
    assert sorted(found) == [(i, Ownership(3, 2).owner(i)) for i in range(20)]


def test_the_roofline_has_its_points_on_the_line():
    assert [gid.split()[-1] for gid in gids(decoding.roofline({"a": 4, "b": 2048}))] == ["19.2", "989"]


def test_phantoms_take_weight():
    lses = [0.0, 1.0, float("-inf"), float("-inf")]
    weights = [float(gid.split()[-1]) for gid in gids(decoding.phantom(lses))]
    assert sum(weights[:4]) == pytest.approx(1) and weights[2:4] == [0, 0] and min(weights[6:]) > 0.1


def test_what_is_missed_by_counting_from_the_own_end():
    seen = [gid.split()[-2:] for gid in gids(decoding.visible(18, 3, 4))]
    right, wrong = seen[: 18 * 4], seen[18 * 4 :]
    assert all(a == b for a, b in right)
    assert sum(a != b for a, b in wrong) == sum(3 * back - back for back in range(4))


@pytest.mark.parametrize("P", [1, 2, 5, 7, 8, 9])
def test_exchanges_are_those_of_the_trace(P):
    assert len(decoding.exchange_trace("all-gather", P).select("send")) == P * (P - 1)
    assert len(decoding.exchange_trace("tree", P).select("send")) == 2 * (P - 1)
    assert round(decoding.exchange_trace("tree", P).makespan()) == exchange_hops(P, "tree")
    if P > 1:
        assert len(gids(decoding.exchanges(P))) == P * (P - 1) + 2 * (P - 1)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("P", [2, 4, 5])
def test_a_cache_holds_every_token_once(P, contiguous):
    for tokens in range(1, decoding.CAPACITY + 1):
        ranks, lost = decoding.held(tokens, P, 2, contiguous)
        assert sorted(sum(ranks, [])) == list(range(tokens - lost))
        if not contiguous:
            assert lost == 0 and ranks == [Ownership(P, 2).positions(r, tokens).tolist() for r in range(P)]


def test_the_player_shows_one_frame_and_its_text_is_the_table():
    player = decoding.cache_player(4, 2, every=12)
    page = player._repr_html_()
    assert repr(player) == str(decoding.cache_table((12, 24, 36, 48)))
    assert page.count("data-name=") == 4 and page.count(" hidden>") == 3 and "oninput" in page
    assert page.count("<svg") == 8 and "no place for 6 tokens, and 18 empty places elsewhere" in page


def test_the_widget_and_the_other_pictures_are_drawn():
    assert "svg" in str(decoding._cache_svg(30, 4, 2, False))
    link = dict(read=4e12, bandwidth=3e11, latency=2e-5, H=32, G=8, D=128)
    assert len(decoding.pays({32768: 4e-5}, **link).axes[0].lines) == 5
    assert len(decoding.prefill().axes[0].lines) == 3


def test_the_parrot_writes_what_it_has_read_and_gibberish_with_phantoms():
    text = "The capital of France is Paris. And the capital of France is "
    assert parrot.write(text, 5) == "Paris" and parrot.write(text, 5, empty_lse=0.0) == "!!!!!"
    assert [parrot.look("-" * (S - 53) + text, 0.0)[0] for S in (53, 96, 97, 112, 113)] == [4, 2, 1, 1, 0]

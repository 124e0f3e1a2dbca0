"""Layouts: every position is owned once, whatever the length and the number of ranks."""

import pickle

import pytest
import torch
from cases import LAYOUTS

import ringlearn as rl
from ringlearn.layouts import count, positions_of


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_every_position_is_owned_once_for_any_length(layout, P):
    for S in range(0, 41):
        ranks = layout.ranges(S, P)
        owned = sorted(p for ranges in ranks for r in ranges for p in r)
        assert owned == list(range(S)), (S, P)
        lengths = [count(r) for r in ranks]
        assert max(lengths) - min(lengths) <= 2, f"shards of S={S}, P={P} should be nearly even, got {lengths}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_local_order_is_position_order(layout):
    for S, P in [(40, 4), (97, 5), (3, 8)]:
        for rank in range(P):
            positions = layout.positions(S, P, rank)
            assert positions.dtype == torch.int64
            assert torch.equal(positions, positions.sort().values)


def test_the_three_layouts_are_the_ones_of_the_papers():
    owner = {}
    for layout in (rl.contiguous, rl.striped, rl.zigzag):
        digits = [""] * 16
        for rank, ranges in enumerate(layout.ranges(16, 4)):
            for r in ranges:
                for p in r:
                    digits[p] = str(rank)
        owner[layout.name] = "".join(digits)
    assert owner == {"contiguous": "0000111122223333", "striped": "0123012301230123", "zigzag": "0011223333221100"}


def test_a_billion_tokens_cost_nothing():
    assert count(rl.zigzag.ranges(10**9, 256)[7]) == pytest.approx(10**9 / 256, abs=2)


@pytest.mark.parametrize("length, size, message", [
    (-1, 2, "length must be an int >= 0, got -1"),
    (2.0, 2, "length must be an int >= 0, got 2.0"),
    (4, 0, "world_size must be an int >= 1, got 0"),
    (True, 2, "length must be an int >= 0, got True"),
    (4, True, "world_size must be an int >= 1, got True"),
])  # fmt: skip
def test_numbers_that_make_no_sense(length, size, message):
    with pytest.raises(ValueError, match=message):
        rl.zigzag.ranges(length, size)


@pytest.mark.parametrize("rule, message", [
    (lambda S, P, r: (range(S),), "position 0 of 8 is owned 2 times"),
    (lambda S, P, r: (range(r * 4, r * 4 + 3),), "position 3 of 8 is owned 0 times"),
    (lambda S, P, r: (range(4 * r + 2, 4 * r + 4), range(4 * r, 4 * r + 2)), "before"),
    (lambda S, P, r: (range(4 * r, 4 * r + 5),), "of a sequence of 8"),
])  # fmt: skip
def test_a_layout_of_ones_own_is_checked(rule, message):
    with pytest.raises(ValueError, match=message):
        rl.Layout("mine", rule).ranges(8, 2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_travels_to_another_process(layout):
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize("wrong", [None, range(4), [0, 1], torch.arange(4), (torch.arange(4),), "01"], ids=repr)
def test_a_rule_that_gives_no_ranges(wrong):
    with pytest.raises(ValueError, match="layout mine: expected the rule to return a tuple of ranges of positions"):
        rl.Layout("mine", lambda S, P, rank: wrong).ranges(4, 1)


def test_what_stands_in_the_table_is_public_and_a_choice_everywhere():
    assert all(getattr(rl, name) is layout and name in rl.__all__ for name, layout in rl.layouts.LAYOUTS.items())
    assert rl.best_layout(rl.full, 64, 4, tuple(rl.layouts.LAYOUTS.values())) is rl.best_layout(rl.full, 64, 4)


def test_ranges_that_are_dealt_out_behave_as_a_tuple_of_them():
    layout = rl.zigzag_per_document([5, 0, 1, 9])
    for mine in layout.ranges(15, 2):
        listed = tuple(mine)
        assert mine == listed and listed == mine and mine != listed[1:] and repr(mine) == repr(listed)
        assert (*mine, *listed) == mine + listed == listed + mine and mine[1:] == listed[1:]
        assert len(mine) == len(listed) and count(mine) == count(listed)
        assert torch.equal(positions_of(mine), positions_of(listed))
        again = pickle.loads(pickle.dumps(mine))
        assert again == mine and hash(again) == hash(mine)
    assert layout.ranges(15, 2)[0] != layout.ranges(15, 2)[1] != layout.ranges(15, 3)[1]

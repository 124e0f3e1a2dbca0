"""The checkers of notebook 08 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.rules import ZooRules

import ringlearn as rl
from ringlearn.course.checks import nb08


class TestZoo(ZooRules):
    NUMBER = "08"


@pytest.mark.parametrize("attention, layout, want", [
    (rl.ring_attention, rl.contiguous, 1.75),
    (rl.all_gather_attention, rl.contiguous, 1.75),
    (rl.all_gather_attention, rl.zigzag, 1.0),
    (rl.ulysses_attention, rl.zigzag, 1.0),
], ids=["ring", "all-gather", "all-gather zigzag", "ulysses"])  # fmt: skip
def test_over_mean(attention, layout, want):
    assert nb08.over_mean(attention, 4, layout) == pytest.approx(want, abs=0.01)


def test_who_sends_more_across_nodes_where_they_differ():
    assert nb08._more_across(4096, (2, 8), 16, 2) == "hybrid"  # eight ranks of a node, two key/value heads

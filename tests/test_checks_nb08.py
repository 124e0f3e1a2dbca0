"""The checkers of notebook 08 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.nb08 import RIGHT, WRONG
from zoo.rules import ZooRules, assert_unwritten

import ringlearn as rl
from ringlearn.course.checks import nb08

CHECKERS = {"8a": nb08.gather_backward, "8b": nb08.plan, "8c": nb08.ulysses, "8d": nb08.sent}


class TestZoo(ZooRules):
    CHECKERS, WRONG, RIGHT = CHECKERS, WRONG, RIGHT


def test_an_untouched_stub_prints_one_calm_line(capsys):
    async def gather_stub(comm, dout, q, k, v, out, lse, positions, mask): ...

    async def ulysses_stub(comm, q, k, v, positions, mask): ...

    def plan_stub(H, G, P):
        return [... for rank in range(P)]

    def blanks(H, G, P):
        plan = ...
        return plan

    def sent_stub(way, S, P, H, G, D, e):
        if way == "ulysses":
            return ...
        return ...

    stubs = ("8a", gather_stub), ("8b", plan_stub), ("8b", blanks), ("8c", ulysses_stub), ("8d", sent_stub)
    for exercise, stub in stubs:
        assert_unwritten(CHECKERS[exercise](stub), capsys)


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

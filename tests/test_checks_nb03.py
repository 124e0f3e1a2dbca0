"""The checkers of notebook 03 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.nb03 import WRONG
from zoo.rules import ZooRules

import ringlearn as rl
from ringlearn.course.checks import nb03


def blank_list(kv, use):
    for _ in range(len(kv)):
        for rank in range(len(kv)):
            source = ...
            use(rank, source, kv[rank])
        kv = ...


def blank_move(kv, use):
    for step in range(len(kv)):
        for rank in range(len(kv)):
            use(rank, (rank - step) % len(kv), kv[rank])
        kv = ...


class TestZoo(ZooRules):
    NUMBER = "03"
    STUBS = {"3a": (blank_list, blank_move)}


def test_what_hides_a_mistake_is_as_the_notebook_says():
    """Two ranks, or no mask, and the wrong direction is exact: the checker must not rest on those."""
    wrong = next(case[0] for case in WRONG["3b"] if case[0].__name__ == "wrong_direction")
    nb03._ring(wrong, 8, 2, rl.causal)
    nb03._ring(wrong, 8, 4, rl.full)
    with pytest.raises(Exception, match="ranks 0 and 3 are right; on rank 1"):
        nb03._ring(wrong, 8, 4, rl.causal)

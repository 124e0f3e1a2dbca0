"""The checkers of notebook 03 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.nb03 import WRONG
from zoo.rules import ZooRules

import ringlearn as rl
from ringlearn.course.checks import nb03


class TestZoo(ZooRules):
    NUMBER = "03"


def test_what_hides_a_mistake_is_as_the_notebook_says():
    """Two ranks, or no mask, and the wrong direction is exact: the checker must not rest on those."""
    wrong = next(case[0] for case in WRONG["3b"] if case[0].__name__ == "wrong_direction")
    nb03._ring(wrong, 8, 2, rl.causal)
    nb03._ring(wrong, 8, 4, rl.full)
    with pytest.raises(Exception, match="ranks 0 and 3 are right; on rank 1"):
        nb03._ring(wrong, 8, 4, rl.causal)

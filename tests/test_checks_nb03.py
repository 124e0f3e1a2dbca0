"""The checkers of notebook 03 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.nb03 import RIGHT, WRONG
from zoo.rules import ZooRules, assert_unwritten

import ringlearn as rl
from ringlearn.course.checks import nb03

CHECKERS = {"3a": nb03.list_ring, "3b": nb03.ring_forward}


class TestZoo(ZooRules):
    CHECKERS, WRONG, RIGHT = CHECKERS, WRONG, RIGHT


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


def no_body(kv, use):
    """Not written."""
    ...


async def blank_forward(comm, q, k, v, positions, mask):
    """Not written."""
    ...


async def blank_result(comm, q, k, v, positions, mask):
    result = rl.identity(q.shape)
    result = ...
    return result.out, result.lse


@pytest.mark.parametrize(
    ("exercise", "stub"),
    [("3a", blank_list), ("3a", blank_move), ("3a", no_body), ("3b", blank_forward), ("3b", blank_result)],
)
def test_an_untouched_stub_prints_one_calm_line(exercise, stub, capsys):
    assert_unwritten(CHECKERS[exercise](stub), capsys)


def test_what_hides_a_mistake_is_as_the_notebook_says():
    """Two ranks, or no mask, and the wrong direction is exact: the checker must not rest on those."""
    wrong = next(case[0] for case in WRONG["3b"] if case[0].__name__ == "wrong_direction")
    nb03._ring(wrong, 8, 2, rl.causal, "causal")
    nb03._ring(wrong, 8, 4, rl.full, "no mask")
    with pytest.raises(Exception, match="ranks 0 and 3 are right; on rank 1"):
        nb03._ring(wrong, 8, 4, rl.causal, "causal")

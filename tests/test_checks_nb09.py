"""The checkers of notebook 09 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.nb09 import RIGHT, WRONG
from zoo.rules import ZooRules, assert_unwritten

from ringlearn.course.checks import nb09

CHECKERS = {"9a": nb09.seen, "9b": nb09.dilated_ring}


class TestZoo(ZooRules):
    CHECKERS, WRONG, RIGHT = CHECKERS, WRONG, RIGHT


def test_an_untouched_stub_prints_one_calm_line(capsys):
    def nothing(q_pos, k_pos, head, w, r): ...

    def blanks(q_pos, k_pos, head, w, r):
        same_segment = ...
        return same_segment

    async def nothing_async(comm, q, k, v, positions, head, configurations, mask): ...

    for exercise, stub in (("9a", nothing), ("9a", blanks), ("9b", nothing_async)):
        assert_unwritten(CHECKERS[exercise](stub), capsys)


def test_an_answer_in_other_digits_is_near_enough(capsys):
    assert nb09.quiz([7, 512, 50, 0.7, 24]) and nb09.predict_weight(200 / 3)
    assert "near enough to 0.69" in (text := capsys.readouterr().out) and "near enough to 67" in text


def test_detached_mixing_weights_leave_dv_alone_right():
    off = nb09.detached_gradients()
    assert off["dv"] < 1e-12 and min(off["dq"], off["dk"]) > 0.05


@pytest.mark.parametrize("S, P, leaks", [(24, 1, 0), (24, 2, 1), (25, 5, 4)])
def test_chunks_that_compare_rows_see_the_future_on_all_ranks_but_the_last(S, P, leaks):
    assert nb09._ranks_that_see_the_future(S, P, S, 4) == leaks

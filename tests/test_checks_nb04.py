"""The checkers of notebook 04 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

from zoo.nb04 import RIGHT, WRONG
from zoo.rules import ZooRules, assert_unwritten

from ringlearn.course.checks import nb04

CHECKERS = {"4a": nb04.ring_backward, "4b": nb04.predict}


class TestZoo(ZooRules):
    CHECKERS, WRONG, RIGHT = CHECKERS, WRONG, RIGHT


def test_an_untouched_stub_prints_one_calm_line(capsys):
    async def program(comm, dout, q, k, v, out, lse, positions, mask):
        dq = ...
        return dq, ..., ...

    async def nothing_async(comm, dout, q, k, v, out, lse, positions, mask): ...

    def nothing(S, P, H, G, D, e): ...

    def blanks(S, P, H, G, D, e):
        kv = ...
        return (P - 1) * kv, ..., ..., ...

    for exercise, stub in (("4a", program), ("4a", nothing_async), ("4b", nothing), ("4b", blanks)):
        assert_unwritten(CHECKERS[exercise](stub), capsys)

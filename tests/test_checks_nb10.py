"""The checkers of notebook 10 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
import torch
from zoo.nb10 import RIGHT, WRONG
from zoo.rules import ZooRules, assert_unwritten

from ringlearn import nn as rnn
from ringlearn.costs.training import kept_bytes
from ringlearn.course.checks import nb10

CHECKERS = {"10a": nb10.targets_of, "10b": nb10.shared_loss, "10c": nb10.step_gradients, "10d": nb10.kept}


class TestZoo(ZooRules):
    CHECKERS, WRONG, RIGHT = CHECKERS, WRONG, RIGHT


def test_an_untouched_stub_prints_one_calm_line(capsys):
    def targets(tokens, lengths, positions):
        full = ...
        return [full for p in positions]

    async def shared_loss(comm, losses, counts): ...

    async def blanks(comm, losses, counts):
        share = ...
        return share, ...

    async def step_gradients(comm, micro, max_norm): ...

    def kept(S, P, layers, H, G, D, anew): ...

    stubs = (("10a", targets), ("10b", shared_loss), ("10b", blanks), ("10c", step_gradients), ("10d", kept))
    for exercise, stub in stubs:
        assert_unwritten(CHECKERS[exercise](stub), capsys)


@pytest.mark.parametrize("P, anew", [(1, False), (4, False), (4, True)])
def test_what_the_checker_counts_is_what_shapes_say(P, anew):
    sizes = dict(layers=2, H=16, G=4, D=16)
    kept = kept_bytes(480, P, way="anew" if anew else "blocks", **sizes)
    assert abs(nb10.counted(480, P, anew=anew, **sizes) - kept) <= 3 * 8 * 480 // P + 2000


def test_targets_of_the_oracle_are_next_tokens_within_documents():
    tokens = torch.arange(10, 22)
    assert nb10._right_targets(tokens.tolist(), [12]) == rnn.next_tokens(tokens).tolist()
    assert nb10._right_targets([1, 2, 3, 4, 5], [2, 0, 3]) == [2, -100, 4, 5, -100]

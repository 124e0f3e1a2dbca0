"""The checkers of notebook 10 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
import torch
from zoo.rules import ZooRules

from ringlearn import nn as rnn
from ringlearn.costs.training import kept_bytes
from ringlearn.course.checks import nb10


class TestZoo(ZooRules):
    NUMBER = "10"


@pytest.mark.parametrize("P, recompute", [(1, False), (4, False), (4, True)])
def test_what_the_checker_counts_is_what_shapes_say(P, recompute):
    sizes = dict(layers=2, H=16, G=4, D=16)
    kept = kept_bytes(480, P, way="recompute" if recompute else "blocks", **sizes)
    assert abs(nb10.counted(480, P, recompute=recompute, **sizes) - kept) <= 3 * 8 * 480 // P + 2000


def test_targets_of_the_oracle_are_next_tokens_within_documents():
    tokens = torch.arange(10, 22)
    assert nb10._right_targets(tokens.tolist(), [12]) == rnn.next_tokens(tokens).tolist()
    assert nb10._right_targets([1, 2, 3, 4, 5], [2, 0, 3]) == [2, -100, 4, 5, -100]

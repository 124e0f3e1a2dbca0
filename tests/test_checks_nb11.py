"""The checkers of notebook 11 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
import torch
from zoo.rules import ZooRules

from ringlearn.attention.decoding import Ownership
from ringlearn.course.checks import nb11
from ringlearn.partial import Partial, merge_all


class TestZoo(ZooRules):
    NUMBER = "11"


def test_the_oracles_are_what_the_library_gives():
    given = nb11._partials(4, empty=(2,))
    out, lse = nb11.merged(*given)
    library = merge_all(Partial(a, b) for a, b in zip(*given))
    assert torch.allclose(out.float(), library.out, atol=1e-6) and torch.allclose(lse.float(), library.lse, atol=1e-6)
    row = nb11._row([3, 0, 4])
    assert torch.allclose(nb11.merged(*row.partials())[0], row.want[0], atol=1e-12)
    nothing = nb11.merged(*nb11._partials(3, empty=(0, 1, 2)))
    assert not nothing[0].any() and (nothing[1] == -torch.inf).all()


@pytest.mark.parametrize("P, K", [(3, 2), (4, 16), (1, 5)])
def test_lengths_are_those_of_tokens_dealt_out_one_by_one(P, K):
    for S in (0, 1, 7, 64, 101):
        counted = [nb11.dealt(rank, S, P, K) for rank in range(P)]
        assert counted == [Ownership(P, K).count(rank, S) for rank in range(P)] and sum(counted) == S

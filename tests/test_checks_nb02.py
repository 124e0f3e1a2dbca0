"""The checkers of notebook 02 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import itertools

import pytest
import torch
from zoo.rules import ZooRules

from ringlearn import costs
from ringlearn.course.checks import nb02
from ringlearn.flash import flash_backward, flash_forward
from ringlearn.masks import causal, full


class TestZoo(ZooRules):
    NUMBER = "02"


@pytest.mark.parametrize("mask", [full, causal, nb02.EARLIER], ids=["full", "causal", "earlier"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_the_oracle_agrees_with_the_library_in_float64(mask, heads):
    a = nb02.inputs((13, *heads, 4, 3), (4, 4), mask, B=2)
    q, k, v, dout = (x.double() for x in (a.q, a.k, a.v, a.dout))
    out, lse = flash_forward(q, k, v, mask, block_q=4, block_k=5)
    assert torch.allclose(out, a.out, atol=1e-12) and torch.equal(lse == -torch.inf, a.lse == -torch.inf)
    assert torch.allclose(lse, a.lse, atol=1e-12)
    for got, want in zip(flash_backward(dout, q, k, v, out, lse, mask), a.grads):
        assert torch.allclose(got, want, atol=1e-12)


def test_a_counted_walk_moves_what_the_cost_model_says():
    for S, block_q, block_k in itertools.product((1, 8, 97), (1, 32, 128), (16, 128)):
        counted = nb02.count_traffic(S, 3, 16, block_q, block_k, 2)
        assert counted == costs.flash_traffic(S, 3, 3, 16, block_q=block_q, block_k=block_k, itemsize=2)


def test_the_smallest_block_moves_less_than_4_gib_and_one_row_fewer_does_not():
    block = nb02.predict_block.answer()
    assert costs.flash_traffic(block_q=block, **nb02.BUDGET) < 4 * 2**30
    assert costs.flash_traffic(block_q=block - 1, **nb02.BUDGET) >= 4 * 2**30


@pytest.mark.parametrize("guess, right", [(3.9, True), (130 / 33, True), ("130/33", True), (4, False), (3.8, False)])
def test_one_decimal_is_asked_for_in_the_last_question(guess, right):
    assert bool(nb02.quiz.questions[4](guess)) == right

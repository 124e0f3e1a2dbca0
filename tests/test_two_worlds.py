"""The same text in two worlds: simulated ranks and gloo processes give the same bits."""

import pytest
import ring_programs as programs
import torch
from cases import NAMES, answers_of_processes, assert_same_bits, case_id
from pairwise import pairwise
from ring_programs import GRID, attend

import ringlearn as rl

P = 4
CASES = pairwise(GRID)
FILE = "tests/ring_programs.py"


gloo = answers_of_processes(f"{FILE}:attend_all", CASES)
gloo_plain = answers_of_processes(f"{FILE}:plain_tensors", CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: case_id(CASES[n]))
def test_gloo_equals_simulated_bit_for_bit(gloo, number):
    simulated = attend(rl.SimulatedWorld(P), **CASES[number])
    assert_same_bits(simulated, [results[number] for results in gloo], (*NAMES, "dsinks")[: len(simulated)])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: case_id(CASES[n]))
def test_plain_local_tensors_give_the_same(gloo_plain, number):
    for rank, simulated in enumerate(programs.simulated_shards(P, **CASES[number])):
        assert_same_bits(simulated, [gloo_plain[rank][number]], ("out", "dq", "dk", "dv", "dsinks")[: len(simulated)])


def test_packed_documents_in_both_worlds(pool):
    simulated = programs.packed(rl.SimulatedWorld(P))
    for results in pool.run(f"{FILE}:packed_in_processes"):
        assert all(torch.equal(a, b) for a, b in zip(results, simulated, strict=True))


def test_scores_that_overflow_in_both_worlds(pool):
    simulated = programs.overflowing(rl.SimulatedWorld(P))
    for results in pool.run(f"{FILE}:overflowing_in_processes"):
        assert all(torch.equal(a, b) for a, b in zip(results, simulated, strict=True))


def test_the_readme_example_in_both_worlds(pool):
    results = pool.run(f"{FILE}:readme_example")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 1000, 64, requires_grad=True) for _ in range(3))
    world = rl.SimulatedWorld(4)
    full = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal).unshard()
    full.sum().backward()
    for rank in range(P):
        assert all(torch.equal(a, b) for a, b in zip(results[rank], (full, q.grad, k.grad, v.grad), strict=True))


def test_a_rank_without_gradients_and_without_tokens(pool):
    results = pool.run(f"{FILE}:only_some_need_gradients")
    assert results == [(True, (1, 2, 1, 4))] + [(True, None)] * (P - 1)


def test_no_grad_inference_mode_autocast_and_an_own_mask(pool):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    world = rl.SimulatedWorld(P)
    plain = rl.ring_attention(*world.shard(q, k, v)).unshard()
    own = rl.mask(lambda q, k: (q - k) % 3 == 0)
    cast = rl.ring_attention(*world.shard(*(t.bfloat16() for t in (q, k, v))), mask=own).unshard()
    for a, b, c, *flags in pool.run(f"{FILE}:modes"):
        assert torch.equal(a, plain) and torch.equal(b, plain) and torch.equal(c, cast)
        assert flags == [False, True, "torch.bfloat16"]


def test_tensors_that_differ_between_ranks(pool):
    for text in pool.run(f"{FILE}:shard_what_differs", None):
        assert "expected the same on all ranks" in text and "src=0" in text, text
    torch.manual_seed(2)
    expected = torch.randn(1, 1, 6, 2)
    assert all(torch.equal(x, expected) for x in pool.run(f"{FILE}:shard_what_differs", 2))


def test_a_second_derivative_is_refused(pool):
    for text in pool.run(f"{FILE}:double_backward"):
        assert "a gradient of its gradient is not supported" in text


def test_the_trace_is_of_the_attention_not_of_what_shard_moves(pool):
    for computed, messages in pool.run(f"{FILE}:trace_after_backward"):
        assert computed == [("compute", "backward")] * P and messages == 2 * P - 3


def test_a_gradient_mode_that_differs_is_an_error_on_every_rank(pool):
    for said in pool.run(f"{FILE}:one_rank_records_nothing"):
        assert [text.split(":")[0] for text in said] == ["shard", "ring_attention"]
        assert all("ranks [0, 2, 3] need a gradient, but ranks [1] call it under no_grad" in text for text in said)


def test_tensors_that_no_backward_can_use_are_an_error_on_every_rank(pool):
    for said in pool.run(f"{FILE}:one_rank_cannot_record"):
        assert "ring_attention: ranks [0, 1, 2, 3] need a gradient, but ranks [1] pass tensors made under" in said

"""Other ways to split a sequence: simulated ranks and gloo processes give the same bits."""

import pytest
import strategy_programs as programs
import torch
from cases import NAMES, answers_of_processes, assert_same_bits, case_id
from oracle import relative
from pairwise import pairwise, product
from strategy_programs import GRID, MEMORY, SHAPE, STRATEGIES, attend

import ringlearn as rl

P = 4
CASES = pairwise(GRID)
FILE = "tests/strategy_programs.py"


gloo = answers_of_processes(f"{FILE}:attend_all", CASES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: case_id(CASES[n]))
def test_gloo_equals_simulated_bit_for_bit(gloo, number):
    simulated = attend(rl.SimulatedWorld(SHAPE), **CASES[number])
    assert_same_bits(simulated, [results[number] for results in gloo], (*NAMES, "dsinks")[: len(simulated)])


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_local_tensors_and_a_gradient_of_lse_on_one_rank(pool, strategy, check):
    world = rl.SimulatedWorld(SHAPE)
    q, k, v, douts = (list(x) for x in zip(*(programs.rank_local(rank)[:4] for rank in range(P)), strict=True))
    shards = [rl.Shards(x, world, rl.zigzag, 40) for x in (q, k, v)]
    out, lse = STRATEGIES[strategy](*shards, rl.causal, return_lse=True)
    torch.autograd.backward([*out.tensors, lse.tensors[2]], [*douts, torch.ones_like(lse.tensors[2])])
    for rank, got in enumerate(pool.run(f"{FILE}:plain_tensors", strategy, check)):
        expected = out.tensors[rank].detach(), lse.tensors[rank].detach(), *(x[rank].grad for x in (q, k, v))
        for name, here, there in zip(("out", "lse", "dq", "dk", "dv"), expected, got, strict=True):
            # Unchecked, no rank of a ring knows whether lse has a gradient elsewhere, so another kernel may compute it.
            assert torch.equal(here, there) or not check and relative(there, here) < 1e-6, f"{name} of rank {rank}"


def test_messages_along_an_axis_take_its_own_group(pool):
    """So on GPUs they have a communicator of their own, and do not wait for those along the other axis."""
    case = dict(layout="zigzag", mask="causal", dtype="f64", S=97, heads=(8, 2), lse=False)
    both = ["inner", "outer", "whole"]  # over the whole group results are gathered
    wires = {"double-ring": both, "hybrid": both, "ulysses": ["whole"]}
    for found in pool.run(f"{FILE}:over_groups_of_the_axes", list(wires), case):
        for name, (got, used) in found.items():
            assert used == wires[name]
            for here, there in zip(attend(rl.SimulatedWorld(SHAPE), name, **case), got, strict=True):
                assert torch.equal(here, there)


def test_a_simulated_rank_holds_what_a_distributed_one_does(pool):
    cases = pairwise(MEMORY) + [c for c in product(MEMORY) if c["strategy"] in ("ring", "double-ring")]
    found = pool.run(f"{FILE}:held", cases)
    for number, case in enumerate(cases):
        for rank, simulated in enumerate(programs.held_simulated(case)):
            assert tuple(found[rank][number]) == simulated, (case, rank)


def test_parts_of_a_mesh(pool):
    for rank, (out, same, *shapes, said) in enumerate(pool.run(f"{FILE}:meshes")):
        torch.manual_seed(rank // 2)
        q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
        expected = rl.ulysses_attention(*rl.SimulatedWorld(2).shard(q, k, v), mask=rl.causal).unshard()
        assert torch.equal(out, expected) and torch.equal(same, expected)
        assert shapes == [(1, 2), (2,), 2]
        assert said.startswith("DistributedWorld: expected a DeviceMesh of one or two axes")


def test_a_difference_or_a_mistake_is_an_error_on_every_rank(pool):
    for rank, heard in enumerate(pool.run(f"{FILE}:told")):
        assert "strategy: expected the same on all ranks, got ranks 0, 2, 3: all-gather, 2" in heard["heads at once"]
        assert "ranks 0, 2, 3: ulysses x ring; rank 1: ulysses x all-gather" in heard["outer"]
        assert "different calls: ranks 0, 2, 3: all_gather_attention; rank 1: ulysses_attention" in heard["strategy"]
        assert "sinks: expected the same on all ranks, got ranks 0, 2, 3: torch.float32 without" in heard["sinks"]
        assert "sinks of shape (2,), one score for each query head" in heard["wrong sinks"]
        assert "sinks: expected the same on all ranks, got ranks 0, 2, 3: None; rank 1" in heard["sinks of one"]
        assert "rank 1: torch.float32 with a gradient" in heard["a gradient"]
        assert "softcap: expected the same on all ranks, got ranks 0, 2, 3: 1.0; rank 1: 2.0" in heard["softcap"]
        assert "alibi: expected the same on all ranks, got ranks 0, 2, 3: (0.5, 0.25); rank 1" in heard["slopes"]
        assert "expected alibi to be 2 finite slopes" in heard["wrong slopes"]
        assert "expected heads_at_once to be None or a number" in heard["mistake"]
        assert "expected a strategy such as rl.attention.RING, got 'ring'" in heard["no strategy"]
        assert rank == 1 or "rank 1 raised ValueError" in heard["mistake"] and "rank 1 raised" in heard["no strategy"]
        assert "expected a world with two axes, got DistributedWorld(" in heard["one axis"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trace_says_the_same(pool, strategy):
    simulated = rl.SimulatedWorld(SHAPE)
    for rank, seen in enumerate(pool.run(f"{FILE}:traced", strategy)):
        assert seen == programs.record(simulated, strategy, rank)

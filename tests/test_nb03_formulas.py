"""One test for each numbered formula of notebook 03, in float64 or in whole numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ringlearn as rl
from ringlearn import costs
from ringlearn.course.checks.oracle import dense, shards
from ringlearn.course.rehearsal import rehearse
from ringlearn.course.viz.stepper import visits
from ringlearn.flash import attend
from ringlearn.worlds import PerRank


def close(got, want, tolerance=1e-12):
    return float((got.double() - want.double()).norm()) <= tolerance * float(want.double().norm())


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_formula_1_a_block_of_queries_is_the_merge_over_all_blocks_of_keys(P):
    case = shards(13, P, H=4, G=2, D=6, dtype=torch.float64)
    out, lse = dense(case.q, case.k, case.v, rl.full)
    qs, ks, vs = case.parts
    for i, (want_out, want_lse) in enumerate(zip(case.split(out), case.split(lse, -1))):
        merged = rl.merge_all(attend(qs[i], ks[j], vs[j], None, 6**-0.5) for j in range(P))
        assert close(merged.out, want_out) and close(merged.lse, want_lse)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 7])
def test_formula_2_the_block_in_step_t_is_i_minus_t_modulo_p(P):
    blocks = list(range(P))
    for t in range(P):
        assert blocks == [(i - t) % P for i in range(P)]  # a list that is passed on
        blocks = blocks[-1:] + blocks[:-1]
    world = rl.SimulatedWorld(P)
    rl.ring_attention(*world.shard(*(torch.zeros(1, 1, 2 * P, 4) for _ in range(3))))
    for i in range(P):  # and messages that are sent
        assert [e.origin for e in world.trace.select("compute", i)] == [(i - t) % P for t in range(P)]


@pytest.mark.parametrize("P", [1, 2, 4, 6])
def test_formula_3_all_of_the_past_a_triangle_nothing_of_the_future(P):
    at = torch.arange(5 * P).split(5)
    for i in range(P):
        for j in range(P):
            visible = rl.causal(at[i][:, None], at[j][None, :])
            want = torch.ones(5, 5).tril() if i == j else torch.full((5, 5), float(j < i))
            assert torch.equal(visible, want.bool())
    kinds = [{x.held: x.kind for x in row} for row in visits(P)]
    for i in range(P):
        assert [kinds[i][j] for j in range(P)] == ["all"] * i + ["triangle"] + ["nothing"] * (P - i - 1)


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize(("B", "G", "D", "dtype"), [(1, 1, 4, torch.float32), (2, 3, 5, torch.bfloat16)])
def test_formula_4_messages_and_bytes_of_a_rank(P, B, G, D, dtype):
    n, e = 6, dtype.itemsize
    world = rl.SimulatedWorld(P)
    tensors = (torch.zeros(B, heads, n * P, D, dtype=dtype) for heads in (2 * G, G, G))
    rl.ring_attention(*world.shard(*tensors))
    for rank in range(P):
        assert world.trace.messages(rank) == P - 1
        assert world.trace.bytes_sent(rank) == (P - 1) * 2 * B * G * n * D * e
        assert world.trace.bytes_sent(rank) == costs.ring_bytes(n * P, P, G, D, B=B, itemsize=e, rank=rank)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 6])
def test_formula_5_shards_of_k_and_v_that_a_rank_holds(P):
    world = rl.SimulatedWorld(P)
    rl.ring_attention(*world.shard(*(torch.zeros(1, 1, 8 * P, 4) for _ in range(3))))
    shard = 2 * 8 * 4 * 4
    for rank in range(P):
        peak = world.memory.peak(rank)
        assert peak["k, v"] == shard and peak["k, v"] + peak.get("in flight", 0) == (1 + min(2, P - 1)) * shard


@pytest.mark.parametrize("P", [1, 2, 4, 7])
@pytest.mark.parametrize(("C", "M"), [(10, 6), (10, 15), (3, 3)])
def test_formula_7_the_time_of_a_ring_that_posts_computes_and_awaits(P, C, M):
    units = rl.worlds.Hardware(flops=1, bandwidth=1, latency=0)
    trace = rehearse(P, operations=C, nbytes=M, hardware=units)
    assert trace.makespan() == (P - 1) * max(C, M) + C
    first = rehearse(P, operations=C, nbytes=M, hardware=units, awaited_first=True)
    assert first.makespan() == P * C + (P - 1) * M


async def ring(comm, q, k, v):
    result = rl.identity(q.shape)
    for t in range(comm.size):
        result = rl.merge(result, attend(q, k, v, None, 1.0))
        if t < comm.size - 1:
            k, v = await comm.rotate(k, v)
    return result.out


@pytest.mark.parametrize("P", [1, 2, 4])
def test_formula_6_operations_with_q_in_shards_and_with_all_of_q_on_every_rank(P):
    B, H, S, D = 2, 3, 8, 5
    q, k, v = (torch.ones(B, H, S, D) for _ in range(3))
    for queries, times in ((PerRank(q.chunk(P, 2)), 1), (q, P)):
        with FlopCounterMode(display=False) as counter:
            rl.SimulatedWorld(P).run(ring, queries, PerRank(k.chunk(P, 2)), PerRank(v.chunk(P, 2)))
        assert counter.get_total_flops() == times * 4 * B * H * D * S**2 == times * costs.attention_flops(S, H, D, B=B)

"""One test for each numbered formula of notebook 05, against a run that counts."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn.costs.ring import published_backward_bytes, ring_bytes, ring_memory
from ringlearn.course import published_ring
from ringlearn.course.checks import nb05
from ringlearn.course.records import load
from ringlearn.worlds.trace import Hardware
from ringlearn.worlds.world import PerRank


@pytest.mark.parametrize("P", range(2, 12))
def test_formula_1_turns_of_blocking_calls_with_even_ranks_first(P):
    assert nb05.turns(P, nb05.even) == 2 + P % 2


async def _pass_on(comm, x):
    await comm.rotate(x)


def test_formula_2_latency_and_bandwidth():
    latency, W = 20e-6, 300e9
    for V in (8, 4096, 5_000_000, 80_000_000):
        world = rl.SimulatedWorld(3, hardware=Hardware(flops=1e12, bandwidth=W, latency=latency))
        world.run(_pass_on, torch.zeros(V // 8, dtype=torch.float64))
        assert world.trace.makespan() == pytest.approx(latency + V / W, rel=1e-12)
    V = latency * W  # of which half is latency, as the quiz asks
    assert latency == pytest.approx((latency + V / W) / 2, rel=1e-12)


def test_formula_2_fits_the_messages_that_were_measured():
    """Within 12%, as the notebook's table shows: messages that were queued, so that the host did not matter."""
    steps = [row for row in load("2026-11-28-hiding-2-h200.json")["steps"] if row["what"] == "nccl alone"]
    assert len(steps) == 6
    for row in steps:
        V = 2 * 8 * row["tokens_per_gpu"] * 128 * 2
        assert 1e-3 * row["queued_ms"] == pytest.approx(20e-6 + V / 300e9, rel=0.12)


@pytest.mark.parametrize(("P", "B", "H", "G", "n", "D"), [(1, 1, 2, 1, 6, 4), (2, 2, 2, 2, 5, 4), (4, 1, 6, 3, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula_3_bytes_that_a_rank_sends(P, B, H, G, n, D, dtype):
    S, e = P * n, dtype.itemsize
    world = rl.SimulatedWorld(P)
    q, k, v, dout = (torch.randn(B, heads, S, D, dtype=dtype) for heads in (H, G, G, H))
    rl.ring_attention(*world.shard(q, k, v))
    forward = (P - 1) * 2 * B * G * n * D * e
    assert [world.trace.bytes_sent(rank) for rank in range(P)] == [forward] * P
    assert forward == ring_bytes(S, P, G, D, B=B, itemsize=e)
    published_ring.gradients(world, q, k, v, dout)
    backward = forward + (P * 2 * B * G * n * D * 4 if P > 1 else 0)
    assert [world.trace.bytes_sent(rank) for rank in range(P)] == [backward] * P
    assert backward == published_backward_bytes(S, P, G, D, B=B, itemsize=e)


S, H, G, D, E = 256, 4, 2, 8, 4  # of formula 4


def gathering(P):
    """The formula; on one rank nothing is gathered."""
    return 2 * S * H * D * E + 2 * G * S * D * E * (1 + 1 / P if P > 1 else 1)


@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_formula_4_memory_when_everything_is_gathered(P):
    """Counted while a rank holds all that it gathered, before the kernel begins; out comes on top."""
    world, held = rl.SimulatedWorld(P), []

    async def program(comm, q, k, v):
        if comm.size > 1:
            k = torch.cat(await comm.all_gather(k), dim=2)
            v = torch.cat(await comm.all_gather(v), dim=2)
        held.append(sum(world.memory._live[comm.rank].values()))

    q = torch.zeros(1, H, S, D)
    k, v = (PerRank(t.tensors) for t in world.shard(*(torch.zeros(1, G, S, D) for _ in range(2))))
    world.run(program, q, k, v)
    out = q.nbytes
    assert [n + out for n in held] == [gathering(P)] * P


@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_formula_4_memory_of_the_ring(P):
    parts = ring_memory(S, P, H, G, D, itemsize=E)  # equal to what the simulation counts: test_costs.py
    out = parts["q"]
    counted = parts["q"] + out + parts["k, v"] + parts.get("in flight", 0)
    assert counted == S / P * D * E * (2 * H + 2 * G * (1 + min(2, P - 1)))


def test_formula_4_rises_with_the_second_rank_and_never_falls_below_the_whole():
    counts = [nb05.memory_when_gathered(P, S=512, H=2, D=16) for P in (1, 2, 4, 8)]
    assert counts[1] > counts[2] > counts[3] > counts[0]
    whole, lse = 4 * 512 * 2 * 16 * 4, 512 * 2 * 4
    assert counts == [whole * (1 + (0.5 / P if P > 1 else 0)) + lse for P in (1, 2, 4, 8)]

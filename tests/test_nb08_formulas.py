"""One test for each numbered formula of notebook 08, against what runs send, hold and take."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.worlds import Hardware

B, D = 2, 8
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def ran(attention, size, S, H, G, e, backward=False, B=B, hardware=None, **options):
    """The world after a forward, or after the backward too."""
    world = rl.SimulatedWorld(size, hardware=hardware)
    x = [torch.randn(B, heads, S, D, dtype=DTYPES[e], requires_grad=backward) for heads in (H, G, G)]
    shards = world.shard(*x)
    world.memory.clear()
    out = attention(*shards, **options)
    if backward:
        out.unshard().sum().backward()
    return world


def each_sends(world):
    (sent,) = {world.trace.bytes_sent(rank) for rank in range(world.size)}  # the same on all ranks
    return sent


@pytest.mark.parametrize("P", [1, 2, 4, 5])
@pytest.mark.parametrize("e", [2, 4])
def test_formula_1_all_gather_and_ring_send_the_same(P, e):
    S, H, G = 12 * P, 6, 3
    for attention in (rl.all_gather_attention, rl.ring_attention, rl.ring_self_attention):
        assert each_sends(ran(attention, P, S, H, G, e)) == (P - 1) * 2 * B * G * S // P * D * e


@pytest.mark.parametrize("P", [3, 4, 5])
@pytest.mark.parametrize("e", [2, 4])
def test_formula_2_backwards(P, e):
    S, H, G, n, a = 12 * P, 6, 3, 12, 4
    shard = 2 * B * G * n * D
    assert each_sends(ran(rl.all_gather_attention, P, S, H, G, e, True)) == (P - 1) * shard * (e + a)
    assert each_sends(ran(rl.ring_attention, P, S, H, G, e, True)) == shard * ((P - 2) * e + (P - 1) * a)


@pytest.mark.parametrize("P", [3, 4, 5])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_formula_3_what_is_held(P, heads):
    S, H, G, e = 12 * P, 8, 4, 4
    world = ran(rl.all_gather_attention, P, S, H, G, e, heads_at_once=heads)
    assert {world.memory.most(rank)["gathered"] for rank in range(P)} == {heads * 2 * B * S * D * e}
    world = ran(rl.ring_attention, P, S, H, G, e)
    assert {world.memory.most(rank)["in flight"] for rank in range(P)} == {4 * B * G * S // P * D * e}


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("e", [2, 4])
def test_formula_4_rows_of_scores(P, e):
    S, H = 20 * P, 6
    world = ran(rl.ring_self_attention, P, S, H, 3, e)
    assert {world.memory.most(rank)["scores"] for rank in range(P)} == {4 * B * H * S**2 // P}


PLANS = [(1, 8, 4), (2, 8, 8), (2, 8, 4), (4, 8, 4), (4, 8, 2), (8, 8, 1)]  # P, H, G


@pytest.mark.parametrize("P, H, G", PLANS)
@pytest.mark.parametrize("e", [2, 4])
def test_formula_5_ulysses_forward(P, H, G, e):
    S, n = 6 * P, 6
    want = (P - 1) * B * n * (D * e * (2 * H + 2 * max(G, P)) + 4 * H) // P
    assert each_sends(ran(rl.ulysses_attention, P, S, H, G, e)) == want


@pytest.mark.parametrize("P, H, G", PLANS[1:])
def test_formula_6_is_the_ratio_up_to_lse(P, H, G):
    shape = dict(S=6 * P, P=P, G=G, D=128, itemsize=4)
    lse = (P - 1) * 6 * 4 * H // P
    ratio = (costs.ulysses_bytes(H=H, **shape) - lse) / costs.ring_bytes(**shape)
    assert ratio == pytest.approx((H + max(G, P)) / (P * G), rel=1e-12)


@pytest.mark.parametrize("P, U, G", [(4, 2, 4), (12, 4, 4), (8, 4, 2), (4, 1, 2), (4, 4, 4)])
def test_formula_7_what_crosses_nodes(P, U, G):
    H, e, n = 8, 4, 6

    def across(attention):
        world = ran(attention, (P // U, U), n * P, H, G, e)
        sent = [
            sum(x.nbytes for x in world.trace.select("send", rank) if x.name.startswith("outer")) for rank in range(P)
        ]
        assert len(set(sent)) == 1
        return sent[0]

    assert across(rl.hybrid_attention) == (P // U - 1) * 2 * B * max(G, U) * n * D * e
    assert across(rl.double_ring_attention) == (P // U - 1) * 2 * B * G * n * D * e


@pytest.mark.parametrize("n", [8, 64, 256])
def test_formula_8_times_are_those_of_the_virtual_clock(n):
    P, H, G, e, W, latency, F = 4, 8, 4, 4, 4e9, 1e-6, 1e12
    S, hardware = P * n, Hardware(F, W, latency)
    C = 4 * n * n * H * D / F  # of one step of a ring
    clocks = {}
    for name in ("all_gather", "ring", "ulysses"):
        attention = getattr(rl, f"{name}_attention")
        clocks[name] = ran(attention, P, S, H, G, e, B=1, hardware=hardware).trace.makespan()
    V = (P - 1) * 2 * G * n * D * e
    assert clocks["all_gather"] == pytest.approx(latency + V / W + P * C, rel=1e-9)
    assert clocks["ring"] == pytest.approx((P - 1) * max(C, latency + V / (P - 1) / W) + C, rel=1e-9)
    V = (P - 1) * n * (D * e * (2 * H + 2 * G) + 4 * H) // P
    assert clocks["ulysses"] == pytest.approx(2 * latency + V / W + P * C, rel=1e-9)

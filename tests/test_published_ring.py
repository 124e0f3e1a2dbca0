"""The published ring: right against dense float64 attention, and against the library's ring; with its messages."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.course.checks.oracle import dense
from ringlearn.course.published_ring import ring_backward, ring_forward
from ringlearn.worlds import PerRank

H, G, D = 4, 2, 8
LAYOUTS = (rl.contiguous, rl.striped, rl.zigzag)


def tensors(S, dtype=torch.float64):
    return [torch.randn(2, heads, S, D, dtype=dtype) for heads in (H, G, G, H)]


def published(P, layout, mask, q, k, v, dout):
    """(out, lse), (dq, dk, dv), each put together from the ranks' shards, and the world."""
    S, world = q.shape[-2], rl.SimulatedWorld(P)
    positions = [layout.positions(S, P, rank) for rank in range(P)]
    order = torch.cat(positions).argsort()
    parts = [PerRank(x[:, :, p] for p in positions) for x in (q, k, v, dout)]
    results = world.run(ring_forward, *parts[:3], positions, mask)
    assert [world.trace.messages(rank) for rank in range(P)] == [P - 1] * P
    out, lse = map(PerRank, zip(*results, strict=True))
    grads = world.run(ring_backward, parts[3], *parts[:3], out, lse, positions, mask)
    full = [torch.cat(x, 2)[:, :, order] for x in (out, lse, *zip(*grads, strict=True))]
    return full[:2], full[2:], world


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", [rl.causal, rl.full], ids=repr)
@pytest.mark.parametrize("S", [3, 26])
def test_it_is_dense_attention_and_the_library_s_ring(P, layout, mask, S):
    q, k, v, dout = tensors(S)
    (out, lse), grads, _ = published(P, layout, mask, q, k, v, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = dense(*leaves, mask)
    assert torch.allclose(out, want, atol=1e-12) and torch.allclose(lse, want_lse, atol=1e-12)
    for got, expected in zip(grads, torch.autograd.grad(want, leaves, dout), strict=True):
        assert (got - expected).norm() <= 1e-12 * expected.norm() + 1e-14
    ring = rl.ring_attention(*rl.SimulatedWorld(P).shard(*leaves, layout=layout), mask=mask).unshard()
    assert torch.allclose(out, ring, atol=1e-12)
    for got, expected in zip(grads, torch.autograd.grad(ring, leaves, dout), strict=True):
        assert (got - expected).norm() <= 1e-12 * expected.norm() + 1e-14


@pytest.mark.parametrize("P", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_its_messages_and_bytes(P, dtype, layout):
    """P - 1 hops of k, v as they came, P of dk, dv in the accumulation dtype, and with one rank none."""
    world = published(P, layout, rl.causal, *tensors(26, dtype))[2]
    for rank in range(P):
        made = [e.made for e in world.trace.select("send", rank)]
        assert (made.count(False), made.count(True)) == ((P - 1, P) if P > 1 else (0, 0))
        assert world.trace.bytes_sent(rank) == costs.published_backward_bytes(
            26, P, G, D, B=2, itemsize=dtype.itemsize, rank=rank, layout=layout
        )


def test_the_trace_says_whose_keys_and_how_much():
    P, S = 4, 32
    world = published(P, rl.contiguous, rl.causal, *tensors(S))[2]
    for rank in range(P):
        assert [e.origin for e in world.trace.select("compute", rank)] == [(rank - step) % P for step in range(P)]
    flops = sum(world.trace.flops(rank) for rank in range(P))
    assert flops == costs.attention_flops(S, H, D, B=2, causal=True, backward=True)


def test_only_the_hop_home_is_exposed():
    world = rl.SimulatedWorld(4, hardware=rl.worlds.Hardware(flops=1e9, bandwidth=1e9, latency=1e-6))
    q, k, v, dout = (PerRank(torch.randn(1, 1, 16, D) for _ in range(4)) for _ in range(4))
    positions = [rl.contiguous.positions(64, 4, rank) for rank in range(4)]
    out, lse = map(PerRank, zip(*world.run(ring_forward, q, k, v, positions, rl.full), strict=True))
    world.run(ring_backward, dout, q, k, v, out, lse, positions, rl.full)
    for rank in range(4):
        waits = [e.seconds > 0 for e in world.trace.select("wait", rank)]
        assert waits == [False] * 6 + [True]

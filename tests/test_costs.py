"""Costs from shapes against counts of what really happens."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.worlds.trace import Hardware


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("S", [3, 40, 97])
@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ring_bytes_are_those_of_the_trace(P, S, layout, dtype):
    B, H, G, D = 2, 4, 2, 8
    q, k, v = (torch.randn(B, heads, S, D, dtype=dtype, requires_grad=True) for heads in (H, G, G))
    world = rl.SimulatedWorld(P)
    out = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=rl.causal)
    shape = dict(S=S, P=P, G=G, D=D, B=B, itemsize=dtype.itemsize, layout=layout)
    for rank in range(P):
        assert world.trace.bytes_sent(rank) == costs.ring_bytes(**shape, rank=rank)
    world.trace.clear()
    out.unshard().sum().backward()
    for rank in range(P):
        sent = sum(e.nbytes for e in world.trace.select("send", rank) if e.name.startswith("rotate"))
        assert sent == costs.ring_bytes(**shape, rank=rank, backward=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_flops_are_those_that_the_trace_counts(causal, backward):
    B, H, S, D = 2, 4, 33, 8
    q, k, v = (torch.randn(B, H, S, D, requires_grad=True) for _ in range(3))
    world = rl.SimulatedWorld(1)
    out = rl.ring_attention(*world.shard(q, k, v), mask=rl.causal if causal else rl.full)
    if backward:
        world.trace.clear()
        out.unshard().sum().backward()
    assert world.trace.flops(0) == costs.attention_flops(S, H, D, B=B, causal=causal, backward=backward)


def exposed(s: int, causal: bool, backward: bool, itemsize_dtype=torch.bfloat16) -> float:
    """Seconds that the ranks of a simulated ring wait in its middle steps, on hardware without latency."""
    P, H, G, D = 4, 8, 2, 16
    world = rl.SimulatedWorld(P, hardware=Hardware(flops=1e9, bandwidth=1e6, latency=0.0))
    q, k, v = (torch.randn(1, heads, P * s, D, dtype=itemsize_dtype, requires_grad=True) for heads in (H, G, G))
    out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal if causal else rl.full)
    if backward:
        world.trace.clear()
        out.unshard().sum().backward()
    waits = [e for e in world.trace.select("wait", 1) if e.name.startswith("rotate")]
    return sum(e.seconds for e in (waits[2:-1] if backward else waits))


@pytest.mark.parametrize("causal", [False, True])
def test_a_hop_hides_from_the_threshold_on(causal):
    """In a full mask exactly at it; under zigzag causal, whose steps differ by half a block of rows, within a tenth."""
    at = costs.hiding_threshold(8, 2, flops=1e9, bandwidth=1e6, causal=causal)
    assert at == (500 if causal else 250)
    above, below = (int(at * 1.1), int(at * 0.9)) if causal else (int(at), int(at) - 2)
    assert exposed(above, causal, False) == pytest.approx(0, abs=1e-9)
    assert exposed(below, causal, False) > 0


def test_traffic_by_counting_reads_and_writes_of_a_tiled_loop():
    """The loop of algorithm 1 with a counter beside every load and store."""
    B, H, S, D, e = 2, 4, 97, 16, 2
    for block_q, block_k in ((32, 16), (16, 32), (97, 97), (1, 7)):
        moved = 0
        for _ in range(B * H):
            for i in range(0, S, block_q):
                rows = min(block_q, S - i)
                moved += rows * D * e  # q
                for j in range(0, S, block_k):
                    moved += 2 * min(block_k, S - j) * D * e  # k, v
                moved += rows * D * e + rows * 4  # out, lse
        assert moved == costs.flash_traffic(S, H, 2, D, block_q=block_q, block_k=block_k, B=B, itemsize=e)


def peaks(P, H, G, B, S, D, dtype, layout, mask=rl.full):
    """What world.memory counts for a call forward, and then backward: (rank, backward) to a table of components."""
    q, k, v = (torch.randn(B, heads, S, D, dtype=dtype, requires_grad=True) for heads in (H, G, G))
    world = rl.SimulatedWorld(P)
    out = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=mask).unshard()
    counted = {(rank, False): world.memory.peak(rank) for rank in range(P)}
    world.memory.clear()
    out.backward(torch.randn_like(out))
    return counted | {(rank, True): world.memory.peak(rank) for rank in range(P)}


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 40, 16), (2, 97, 8), (1, 8, 64)])
@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
def test_ring_memory_is_what_the_world_counts_component_by_component(P, heads, dtype, shape, layout):
    (H, G), (B, S, D) = heads, shape
    for (rank, backward), counted in peaks(P, H, G, B, S, D, dtype, layout).items():
        assert counted == costs.ring_memory(
            S, P, H, G, D, B=B, itemsize=dtype.itemsize, backward=backward, rank=rank, layout=layout
        )


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
def test_ring_memory_is_not_exceeded_under_a_causal_mask(P, layout):
    for (rank, backward), counted in peaks(P, 4, 2, 1, 96, 16, torch.float32, layout, rl.causal).items():
        expected = costs.ring_memory(96, P, 4, 2, 16, itemsize=4, backward=backward, rank=rank, layout=layout)
        assert sum(counted.values()) <= sum(expected.values())
        if layout is rl.contiguous and rank == P - 1:
            assert counted == expected, "the last rank sees the keys of all others"

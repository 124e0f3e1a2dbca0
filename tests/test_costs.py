"""Costs from shapes against counts of what really happens."""

from __future__ import annotations

import itertools

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.costs.problem import Problem
from ringlearn.worlds.memory import LiveBytes
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


class MainMemory:
    """Tensors that are loaded from and stored to, with a count of the bytes that pass."""

    def __init__(self):
        self.moved = 0

    def load(self, x):
        self.moved += x.nbytes
        return x.clone()

    def store(self, x):
        self.moved += x.nbytes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [(32, 16), (16, 32), (97, 97), (1, 7), (40, 128)])
def test_flash_traffic_by_counting_the_reads_and_writes_of_a_tiled_loop(blocks, causal):
    """The loop of algorithm 1, computing for real, with a counter beside every load and store."""
    (block_q, block_k), (B, H, G, S, D) = blocks, (2, 4, 2, 97, 16)
    q, k, v = (torch.randn(B, heads, S, D, dtype=torch.bfloat16) for heads in (H, G, G))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal, enable_gqa=True
    )
    memory = MainMemory()
    for b, h in itertools.product(range(B), range(H)):
        for i in range(0, S, block_q):
            q_i = memory.load(q[b, h, i : i + block_q])
            rows = torch.arange(i, i + len(q_i))
            result = rl.identity(q_i.shape)
            for j in range(0, S, block_k):
                if causal and j > rows[-1]:
                    continue
                k_j, v_j = (memory.load(x[b, h // (H // G), j : j + block_k]) for x in (k, v))
                hidden = causal & (torch.arange(j, j + len(k_j)) > rows[:, None])
                p, lse = rl.two_pass((q_i.float() @ k_j.float().T / D**0.5).masked_fill(hidden, -torch.inf))
                result = rl.merge(result, rl.Partial(p @ v_j.float(), lse))
            memory.store(result.out.bfloat16())
            memory.store(result.lse)
            assert torch.allclose(result.out, want[b, h, i : i + block_q], atol=1e-5)
    assert memory.moved == costs.flash_traffic(
        S, H, G, D, block_q=block_q, block_k=block_k, B=B, itemsize=2, causal=causal
    )


def test_naive_traffic_by_counting_the_reads_and_writes_of_three_steps():
    B, H, G, S, D = 2, 4, 2, 33, 8
    q, k, v = (torch.randn(B, heads, S, D, dtype=torch.bfloat16) for heads in (H, G, G))
    memory = MainMemory()
    s = rl.flash.scores(memory.load(q), memory.load(k), D**-0.5)
    memory.store(s)
    p = memory.load(s).softmax(-1)
    memory.store(p)
    memory.store(rl.flash.weighted_sum(memory.load(p), memory.load(v)))
    assert memory.moved == costs.naive_traffic(S, H, G, D, B=B, itemsize=2)


@pytest.mark.parametrize("shape", [(128, 64, 128), (97, 33, 16), (1, 7, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tile_bytes_are_those_of_the_tensors_alive_in_a_step(shape, dtype):
    (block_q, block_k, D), memory = shape, LiveBytes()
    q, k, v = (torch.randn(rows, D, dtype=dtype) for rows in (block_q, block_k, block_k))
    with memory:
        q_i, k_j, v_j = q.clone(), k.clone(), v.clone()  # noqa: F841
        m, l, acc = torch.zeros(block_q), torch.zeros(block_q), torch.zeros(block_q, D)  # noqa: F841
        s = torch.empty(block_q, block_k)  # noqa: F841
        assert memory.live == costs.tile_bytes(block_q, block_k, D, itemsize=dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_are_those_that_autograd_keeps(dtype):
    B, H, S, D = 2, 3, 40, 16
    q, k, v = (torch.randn(B, H, S, D, dtype=dtype, requires_grad=True) for _ in range(3))
    given = {x.untyped_storage().data_ptr() for x in (q, k, v)}

    def kept(attention):
        storages = {}

        def pack(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(q, k, v)  # noqa: F841  (alive, so that its storage is not given away again)
        return sum(nbytes for place, nbytes in storages.items() if place not in given)

    def naive(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    sizes = {"B": B, "itemsize": dtype.itemsize}
    assert kept(naive) == costs.saved_bytes(S, H, D, **sizes, naive=True)
    assert kept(rl.flash_attention) == costs.saved_bytes(S, H, D, **sizes)


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
@pytest.mark.parametrize("shape", [(1, 40, 16), (2, 97, 8), (1, 12, 64)])
@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
def test_ring_memory_is_what_the_world_counts_component_by_component(P, heads, dtype, shape, layout):
    (H, G), (B, S, D) = heads, shape
    for (rank, backward), counted in peaks(P, H, G, B, S, D, dtype, layout).items():
        assert counted == costs.ring_memory(
            S, P, H, G, D, B=B, itemsize=dtype.itemsize, backward=backward, rank=rank, layout=layout
        )


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (8, 1), (10, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ring_memory_when_the_last_step_is_made_in_two_calls(P, heads, dtype, monkeypatch):
    (H, G), (B, S, D) = heads, (2, 48, 16)
    monkeypatch.setattr("ringlearn.attention.strategy.CALL_BYTES", 1)
    monkeypatch.setattr("ringlearn.costs.ring.CALL_BYTES", 1)
    for (rank, backward), counted in peaks(P, H, G, B, S, D, dtype, rl.contiguous).items():
        assert counted == costs.ring_memory(S, P, H, G, D, B=B, itemsize=dtype.itemsize, backward=backward, rank=rank)


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
def test_ring_memory_is_not_exceeded_under_a_causal_mask(P, layout):
    for (rank, backward), counted in peaks(P, 4, 2, 1, 96, 16, torch.float32, layout, rl.causal).items():
        expected = costs.ring_memory(96, P, 4, 2, 16, itemsize=4, backward=backward, rank=rank, layout=layout)
        assert sum(counted.values()) <= sum(expected.values())
        if layout is rl.contiguous and rank == P - 1:
            assert counted == expected, "the last rank sees the keys of all others"


@pytest.mark.parametrize("P", [1, 2, 3, 5])
@pytest.mark.parametrize("configurations", [[(8, 1)], [(16, 2)], [(8, 2), (32, 4)], [(7, 3), (5, 2)]], ids=str)
@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
def test_dilated_bytes_are_those_of_the_trace(P, configurations, layout):
    S, B, H, G, D = 67, 2, 6, 3, 4
    w, r = zip(*configurations)
    q, k, v = (torch.randn(B, heads, S, D, requires_grad=True) for heads in (H, G, G))
    world = rl.SimulatedWorld(P, count_memory=False)
    out = rl.dilated_attention(*world.shard(q, k, v, layout=layout), w, r).unshard()
    for backward in (False, True):
        if backward:
            out.sum().backward()
        for rank in range(P):
            assert world.trace.bytes_sent(rank) == costs.dilated_bytes(
                S, P, G, D, w, r, B=B, itemsize=4, backward=backward, rank=rank, layout=layout
            )


def test_dilated_pairs_are_those_that_the_rule_makes():
    for S, w, r, head in itertools.product((1, 30, 64), (4, 7, 40), (1, 2, 3), (0, 1, 5)):
        kept = [p for p in range(S) if p % w % r == head % r]
        pairs = sum(q // w == k // w for q in kept for k in kept)
        assert costs.dilated_pairs(S, [w], [r], head=head) == pairs
        assert costs.dilated_pairs(S, [w, 4], [r, 2], head=head) == pairs + costs.dilated_pairs(S, [4], [2], head=head)
    with pytest.raises(ValueError, match="dilated_pairs: expected dilation rates of at most"):
        costs.dilated_pairs(8, [2], [3])


def test_a_formula_takes_sizes_or_a_problem_and_refuses_what_it_does_not_know():
    problem = Problem(97, (2, 3), 8, 2, 16, layout=rl.zigzag)
    assert costs.ring_bytes(problem, rank=1) == costs.ring_bytes(97, 6, 2, 16, rank=1, layout=rl.zigzag)
    assert costs.all_gather_memory(problem, heads_at_once=1) == costs.all_gather_memory(
        97, 6, 2, 16, heads_at_once=1, layout=rl.zigzag
    )
    with pytest.raises(
        TypeError, match=r"ring_bytes: missing a required argument: 'S'; expected ring_bytes\(S: int, P"
    ):
        costs.ring_bytes(P=4, G=2, D=8)
    with pytest.raises(TypeError, match="ring_seconds: missing a required argument: 'flops'"):
        costs.ring_seconds(600, 4, 32, 8, 128, bandwidth=250e9)
    for given in ((64, 4, 2, 16), (problem,)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
            costs.ring_bytes(*given, heads=3)

"""One test for each numbered formula of notebook 04, with the library's functions where it has them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringlearn as rl
from ringlearn.costs.ring import published_backward_bytes, ring_bytes
from ringlearn.course import published_ring
from ringlearn.course.checks import oracle
from ringlearn.course.checks.nb04 import _counted, _seconds
from ringlearn.flash import attend_backward
from ringlearn.worlds.trace import Hardware

H, G, D = 4, 2, 8


def numbers(*shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def close(got, want, tolerance=1e-12):
    return float((got - want).norm()) <= tolerance * float(want.norm())


@pytest.fixture(params=[(13, 1), (14, 4), (24, 4)], ids=lambda p: f"S={p[0]} P={p[1]}")
def ring(request):
    """Positions by rank, and functions that cut a full tensor; q, k, v, dout, and what autograd finds."""
    S, P = request.param
    q, k, v, dout = numbers((1, H, S, D), (1, G, S, D), (1, G, S, D), (1, H, S, D))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    want = torch.autograd.grad(out, leaves, dout)
    positions = [rl.contiguous.positions(S, P, rank) for rank in range(P)]
    return positions, (q, k, v, dout, out.detach()), want


def formula_1(ring, r, b):
    """p and ds of a tile, heads expanded, from the global lse and delta of its rows, by the definition."""
    positions, (q, k, v, dout, out), _ = ring
    rows, columns = positions[r], positions[b]
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    seen = rl.causal(torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None, :])
    s = (torch.einsum("bhid,bhjd->bhij", q, k) / D**0.5).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(s, -1)
    delta = (dout * out).sum(-1)
    p = torch.exp(s[:, :, rows][..., columns] - lse[..., rows, None])
    dp = torch.einsum("bhid,bhjd->bhij", dout[:, :, rows], v[:, :, columns])
    return p, p * (dp - delta[..., rows, None])


def test_formula_1_global_lse_and_delta_make_the_tile_s_part_of_the_whole_row(ring):
    positions, (q, k, v, dout, out), _ = ring
    P = len(positions)
    for r in range(P):
        p = torch.cat([formula_1(ring, r, b)[0] for b in range(P)], -1)
        ds = torch.cat([formula_1(ring, r, b)[1] for b in range(P)], -1)
        assert close(p.sum(-1), torch.ones_like(p.sum(-1))), "weights of a whole row sum to 1"
        assert float(ds.sum(-1).abs().max()) < 1e-12, "so what a row's scores take from each other sums to 0"


def test_formula_2_dq_adds_over_blocks_and_dk_and_dv_over_ranks(ring):
    positions, (q, k, v, dout, out), want = ring
    P = len(positions)
    tiles = [[formula_1(ring, r, b) for b in range(P)] for r in range(P)]
    grouped = [x.repeat_interleave(H // G, 1) for x in (k, v)]
    for r in range(P):
        dq = sum(tiles[r][b][1] @ grouped[0][:, :, positions[b]] for b in range(P)) / D**0.5
        assert close(dq, want[0][:, :, positions[r]])
    for b in range(P):
        dk = sum(tiles[r][b][1].mT @ q[:, :, positions[r]] for r in range(P)) / D**0.5
        dv = sum(tiles[r][b][0].mT @ dout[:, :, positions[r]] for r in range(P))
        for got, full in ((dk, want[1]), (dv, want[2])):
            assert close(got.unflatten(1, (G, -1)).sum(2), full[:, :, positions[b]])


def test_formula_3_the_sum_that_travels_is_complete_one_hop_before_home(ring):
    positions, (q, k, v, dout, out), want = ring
    P, S = len(positions), q.shape[2]
    _, lse = rl.flash_forward(q, k, v, mask=rl.causal)
    delta = (dout * out).sum(-1)
    for b in range(P):
        total, visited = 0.0, []
        for t in range(P):
            r = (b + t) % P
            assert (r - t) % P == b
            visible = rl.causal(positions[r][:, None], positions[b][None, :])
            rows = (x.index_select(2, positions[r]) for x in (dout, q))
            columns = (x.index_select(2, positions[b]) for x in (k, v))
            tile = attend_backward(*rows, *columns, lse[..., positions[r]], delta[..., positions[r]], visible, D**-0.5)
            total, visited = total + tile[1], [*visited, r]
        assert close(total, want[1][:, :, positions[b]])
        assert sorted(visited) == list(range(P)) and (visited[-1] + 1) % P == b
    assert sum(map(len, positions)) == S


@pytest.mark.parametrize("P", [2, 3, 4, 8])
@pytest.mark.parametrize("latency", [0.0, 2e-6])
def test_formula_4_the_time_of_a_backward_whose_hops_hide_and_of_one_that_awaits_first(P, latency):
    hardware = Hardware(flops=1e9, bandwidth=5e7, latency=latency)
    kv, dkv, work = torch.zeros(300), torch.zeros(768), 184e3
    h = latency + dkv.nbytes / hardware.bandwidth
    c = work / hardware.flops
    assert c >= (kv.nbytes + dkv.nbytes) / hardware.bandwidth + latency

    async def program(comm, first):
        travelling = None
        for step in range(comm.size):
            arriving = comm.rotate(kv) if step < comm.size - 1 else None
            if first and travelling:
                await travelling
            comm.compute("backward", work)
            if travelling and not first:
                await travelling
            travelling = comm.rotate(dkv)
            if arriving:
                await arriving
        await travelling

    def seconds(first):
        world = rl.SimulatedWorld(P, hardware=hardware)
        world.run(program, first)
        return world.trace.makespan()

    assert seconds(False) == pytest.approx(P * c + h, rel=1e-12)
    assert seconds(True) == pytest.approx(P * (c + h), rel=1e-12)


@pytest.mark.parametrize("P", [3, 4, 6])
def test_formula_4_is_the_time_of_the_published_ring_and_the_one_that_unwinds_saves_h(P):
    s = 32
    hardware = Hardware(flops=1e9, bandwidth=1e8, latency=2e-6)
    q, k, v, dout = (torch.randn(1, n, P * s, D, requires_grad=True) for n in (H, G, G, H))
    c, h = 10 * s * s * H * D / hardware.flops, hardware.latency + 2 * G * s * D * 4 / hardware.bandwidth
    world = rl.SimulatedWorld(P, hardware=hardware)
    published_ring.gradients(world, q, k, v, dout)
    assert world.trace.makespan() == pytest.approx(P * c + h, rel=1e-9)
    rl.ring_attention(*world.shard(q, k, v)).unshard().backward(dout)
    assert world.trace.makespan() == pytest.approx(P * c, rel=1e-9)
    assert sum(world.trace.seconds("wait", rank) for rank in range(P)) < 1e-12
    assert _seconds(4, 10.0, 3.0, 6.0) == 46


@pytest.mark.parametrize(("B", "e", "dtype"), [(1, 2, torch.bfloat16), (2, 4, torch.float32)])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_formula_5_bytes_sent_are_those_of_the_trace(B, e, dtype, P):
    s = 6
    q, k, v, dout = (torch.randn(B, n, P * s, D, dtype=dtype) for n in (H, G, G, H))
    world = rl.SimulatedWorld(P)
    rl.ring_attention(*world.shard(q, k, v))
    forward = (P - 1) * 2 * B * G * s * D * e
    assert world.trace.bytes_sent(0) == forward == ring_bytes(P * s, P, G, D, B=B, itemsize=e)
    published_ring.gradients(world, q, k, v, dout)
    backward = forward + P * 2 * B * G * s * D * 4
    assert world.trace.bytes_sent(0) == backward == published_backward_bytes(P * s, P, G, D, B=B, itemsize=e)


@pytest.mark.parametrize("e", [2, 4])
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_formula_6_bytes_in_flight_are_the_most_that_the_world_counts(P, e):
    s = 6
    kv, dkv = (2 * G * s * D * n for n in (e, 4))
    _, _, forward, backward = _counted(P * s, P, H, G, D, e)
    assert forward == min(2, P - 1) * kv
    assert backward == (forward + dkv if P > 1 else 0)


@pytest.mark.parametrize(("e", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
@pytest.mark.parametrize("P", [1, 2, 3])
def test_formula_7_a_rank_keeps_q_k_v_out_and_lse_and_the_library_the_shard_that_came_last(e, dtype, P):
    B, s = 2, 10
    shards = rl.SimulatedWorld(P).shard(
        *(torch.randn(B, n, P * s, D, dtype=dtype, requires_grad=True) for n in (H, G, G))
    )
    kept = {}

    def note(t):
        kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = rl.ring_attention(*shards, mask=rl.causal)
    formula = 2 * B * H * s * D * e + 2 * B * G * s * D * e + 4 * B * H * s
    assert sum(kept.values()) == P * (formula + (2 * B * G * s * D * e if P > 1 else 0))
    assert len({t.grad_fn for t in out.tensors}) == 1


def test_the_dense_oracle_of_the_checker_is_sdpa():
    case = oracle.shards(12, 3, H, G, D)
    out, lse = oracle.dense(case.q, case.k, case.v, rl.causal)
    want = scaled_dot_product_attention(case.q, case.k, case.v, is_causal=True, enable_gqa=True)
    assert close(out.float(), want, 1e-6) and lse.shape == want.shape[:-1]

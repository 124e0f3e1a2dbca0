"""One test for each numbered formula of notebook 06, against counts, the simulated clock, or bisection."""

from __future__ import annotations

import itertools
from math import sqrt

import pytest
import torch
from course import ROOT, formula_tests, formulas, read

import ringlearn as rl
from ringlearn import costs
from ringlearn.course import records
from ringlearn.course.rehearsal import rehearse
from ringlearn.tiles import Kind, Tile
from ringlearn.worlds.trace import Hardware

LINK = Hardware(flops=3e9, bandwidth=7e6, latency=2e-4)
SHAPES = [(P, s, H, G, D, dtype) for P in (1, 2, 3, 5) for s, H, G, D, dtype in
          ((16, 4, 2, 8, torch.float64), (33, 8, 1, 16, torch.float32), (64, 4, 4, 8, torch.bfloat16))]  # fmt: skip


async def ring(comm, q, k, v, hide):
    """The notebook's program, with float64 inputs too."""
    kernel, s = comm.traced(rl.kernels.choose()), q.shape[2]
    tile = Tile(slice(0, s), slice(0, s), Kind.FULL)
    result = rl.identity(q.shape, q.dtype)
    for step in range(comm.size):
        last = step == comm.size - 1
        if not last:
            arriving = comm.rotate(k, v)
        if not last and not hide:
            following = await arriving
        result = rl.merge(result, kernel.forward(q, k, v, tile, q.shape[-1] ** -0.5))
        if not last:
            k, v = await arriving if hide else following
    return result


def run(P, s, H, G, D, dtype, hide, hardware=LINK):
    """A ring with tensors that have numbers: its world, after the run, and its output."""
    world = rl.SimulatedWorld(P, hardware=hardware)
    q, k, v = (torch.randn(1, heads, P * s, D, dtype=dtype) for heads in (H, G, G))
    parts = world.run(ring, *world.shard(q, k, v), hide)
    return world, (q, k, v), torch.cat([part.out for part in parts], dim=2)


def formula_1(s, H, G, D, e, hardware=LINK):
    return 4 * s**2 * H * D / hardware.flops, hardware.latency + 2 * s * G * D * e / hardware.bandwidth


@pytest.mark.parametrize(("P", "s", "H", "G", "D", "dtype"), SHAPES)
def test_formula_1_compute_and_message_of_a_step_are_those_of_the_trace(P, s, H, G, D, dtype):
    world, (q, k, v), out = run(P, s, H, G, D, dtype, hide=True)
    compute, message = formula_1(s, H, G, D, dtype.itemsize)
    for event in world.trace.select("compute"):
        assert event.seconds == pytest.approx(compute, rel=1e-12)
    for event in world.trace.select("recv"):
        assert event.stop - event.start == pytest.approx(message, rel=1e-12)
    k, v = (x.repeat_interleave(H // G, 1).double() for x in (k, v))
    exact = torch.softmax(q.double() @ k.mT / D**0.5, -1) @ v
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert float((out.double() - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize(("P", "s", "H", "G", "D", "dtype"), SHAPES)
def test_formula_2_total_time_of_a_ring(P, s, H, G, D, dtype, hide):
    world, _, _ = run(P, s, H, G, D, dtype, hide)
    C, M = formula_1(s, H, G, D, dtype.itemsize)
    total = (P - 1) * (max(C, M) if hide else C + M) + C
    assert world.trace.makespan() == pytest.approx(total, rel=1e-12)
    given = dict(flops=LINK.flops, bandwidth=LINK.bandwidth, latency=LINK.latency, itemsize=dtype.itemsize)
    assert costs.ring_seconds(s, P, H, G, D, **given, awaited_first=not hide) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("P", "C", "M"), [*itertools.product((1, 2, 4, 9), (3, 5), (2, 5, 8))])
def test_formula_3_exposed_time(P, C, M):
    trace = rehearse(P, operations=C, nbytes=M, hardware=Hardware(1, 1, 0))
    for rank in range(P):
        assert trace.seconds("wait", rank) == pytest.approx((P - 1) * max(0, M - C))
    assert trace.makespan() == pytest.approx(P * C + (P - 1) * max(0, M - C))


def test_formula_2_with_steps_that_differ_is_the_sum_of_what_each_step_takes():
    """A zigzag ring under a causal mask: its own block has s / 2 rows of scores more."""
    P, s, H, G, D = 4, 64, 4, 2, 8
    for bandwidth in (1e6, 4e6, 5e7):
        hardware = Hardware(flops=1e9, bandwidth=bandwidth, latency=0.0)
        world = rl.SimulatedWorld(P, hardware=hardware)
        q, k, v = (torch.randn(1, heads, P * s, D) for heads in (H, G, G))
        rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
        C = [4 * H * D * area / hardware.flops for area in (s * s // 2 + s // 2, *[s * s // 2] * (P - 1))]
        M = 2 * s * G * D * 4 / bandwidth
        assert world.trace.makespan() == pytest.approx(sum(max(c, M) for c in C[:-1]) + C[-1], rel=1e-12)


def test_formula_4_one_intensity_for_the_tile_and_for_the_shard():
    for (H, G), e, D, s in itertools.product(((8, 8), (32, 8), (8, 1)), (2, 4), (64, 128), (100, 4096)):
        operations, nbytes = costs.step_work(s, H, G, D, itemsize=e)
        assert operations / nbytes == pytest.approx(2 / e * H / G * s, rel=1e-15)
        assert costs.intensity(s, reuse=H / G, itemsize=e) == pytest.approx(operations / nbytes, rel=1e-15)
    # Notebook 02's loop, whose heads each read their own keys: keys and values by themselves, counted.
    S, H, G, D, e, block = 4096, 8, 2, 64, 2, 128
    once = H * (2 * S * D * e + 4 * S)  # q, out, lse
    passing = costs.flash_traffic(S, H, G, D, block_q=block, block_k=64, itemsize=e) - once
    assert costs.attention_flops(S, H, D) / passing == costs.intensity(block, itemsize=e)


def meets(H, G, D, e, hardware):
    """The s at which compute and message of formula (1) take the same time, by bisection."""
    low, high = 1e-9, 1e12
    for _ in range(300):
        s = (low * high) ** 0.5
        compute, message = formula_1(s, H, G, D, e, hardware)
        low, high = (s, high) if compute < message else (low, s)
    return low


GRID = [*itertools.product(((8, 8), (32, 8), (64, 1)), (2, 4), (600e12, 90e12), (250e9, 12.5e9))]


@pytest.mark.parametrize(("heads", "e", "F", "W"), GRID)
def test_formula_5_where_compute_and_message_are_equal(heads, e, F, W):
    H, G = heads
    for D in (64, 128):
        at = meets(H, G, D, e, Hardware(F, W, 0))
        assert e / 2 * G / H * F / W == pytest.approx(at, rel=1e-9)
        assert costs.hiding_threshold(H, G, flops=F, bandwidth=W, itemsize=e) == pytest.approx(at, rel=1e-9)


def backward_waits(s, causal, e):
    """Seconds that rank 1 of a backward ring waits before its last step is done, on hardware without latency."""
    P, H, G, D = 4, 4, 2, 8
    world = rl.SimulatedWorld(P, hardware=Hardware(flops=1e9, bandwidth=4e6, latency=0.0))
    dtype = {2: torch.bfloat16, 4: torch.float32}[e]
    q, k, v = (torch.randn(1, heads, P * s, D, dtype=dtype, requires_grad=True) for heads in (H, G, G))
    out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal if causal else rl.full)
    world.trace.clear()
    out.unshard().sum().backward()
    return sum(event.seconds for event in world.trace.select("wait", 1)[:-1])


@pytest.mark.parametrize("e", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_formula_6_causal_and_backward(causal, e):
    star = e / 2 * (2 / 4) * (1e9 / 4e6)
    backward = (e + 4) / 5 * (2 / 4) * (1e9 / 4e6)
    given = dict(flops=1e9, bandwidth=4e6, itemsize=e)
    assert costs.hiding_threshold(4, 2, **given, causal=causal) == star * (2 if causal else 1)
    at = costs.hiding_threshold(4, 2, **given, causal=causal, backward=True)
    assert at == pytest.approx(backward * (2 if causal else 1), rel=1e-12)
    above, below = 2 * round(0.55 * at), 2 * round(0.45 * at)  # even: zigzag cuts a shard in two
    assert backward_waits(above, causal, e) == pytest.approx(0, abs=1e-9)
    assert backward_waits(below, causal, e) > 1e-5


@pytest.mark.parametrize(("heads", "e", "F", "W"), GRID)
def test_formula_7_the_same_with_latency(heads, e, F, W):
    (H, G), D = heads, 128
    for latency in (1e-6, 1e-4):
        at = meets(H, G, D, e, Hardware(F, W, latency))
        star = e / 2 * G / H * F / W
        assert star / 2 + sqrt((star / 2) ** 2 + latency * F / (4 * H * D)) == pytest.approx(at, rel=1e-9)
        given = dict(flops=F, bandwidth=W, itemsize=e, latency=latency, D=D)
        assert costs.hiding_threshold(H, G, **given) == pytest.approx(at, rel=1e-9)
        for causal, backward in itertools.product((False, True), repeat=2):
            s = costs.hiding_threshold(H, G, **given, causal=causal, backward=backward)
            big = round(1000 * s)  # exact integers, scaled: compute has s squared
            operations, nbytes = costs.step_work(big, H, G, D, itemsize=e, causal=causal, backward=backward)
            assert operations / 1e6 / F == pytest.approx(latency + nbytes / 1e3 / W, rel=1e-3)
    with pytest.raises(ValueError, match="pass it as D="):
        costs.hiding_threshold(H, G, flops=F, bandwidth=W, latency=1e-6)


def test_formula_8_rate_of_a_message():
    latency, W = 2e-5, 288e9
    for n in (1, 1000, 10**6, 10**9):
        seconds = rehearse(2, operations=0, nbytes=n, hardware=Hardware(1, W, latency)).makespan()
        assert n / (latency + n / W) == pytest.approx(n / seconds, rel=1e-12)
    half = latency * W
    assert half / (latency + half / W) == pytest.approx(W / 2, rel=1e-12)


def test_formula_8_fits_what_was_measured_within_a_seventh():
    record = records.load("2026-11-28-hiding-2-h200.json")
    points = [(s["tokens_per_gpu"] * 4096, s["queued_ms"] / 1e3) for s in record["steps"] if s["what"] == "nccl alone"]
    sizes, took = (torch.tensor(x, dtype=torch.float64) for x in zip(*points))
    columns = torch.stack((torch.ones_like(sizes), sizes), dim=1)
    latency, per_byte = torch.linalg.lstsq(columns, took[:, None]).solution.flatten().tolist()
    fitted = sizes / (latency + sizes * per_byte)
    assert float(((fitted - sizes / took) / (sizes / took)).abs().max()) < 1 / 7


def test_the_notebook_numbers_exactly_the_formulas_that_are_tested_here():
    tested = formula_tests(ROOT / "tests" / "test_nb06_formulas.py")
    assert formulas(read("06")) == sorted(tested) == list(range(1, 9))

"""New tokens behind a cached prefix: whatever travels, it equals dense attention; and the rule that chooses."""

import pytest
import torch
from cases import case_id
from decoding_programs import PREFILL, dense, prefill, prefill_inputs
from oracle import relative
from pairwise import pairwise

import ringlearn as rl
from ringlearn.attention.decoding import PASSES
from ringlearn.costs import decoding as costs

P = 3
FILE = "tests/decoding_programs.py"
CASES = pairwise({"P": [1, 2, 3, 4, 8], **PREFILL})
# Windows that end in the prefix for every query, at another place for each.
EDGE = dict(
    new=41, cached=200, heads=(6, 2), dims=(8, 8), window=60, ragged=True, interleave=16, page=None, extras=(True, 2.0)
)
CASES += [dict(P=4, **EDGE, layout=layout, travels=t) for layout in ("contiguous", "zigzag") for t in PASSES]
GLOO = pairwise({**PREFILL, "dtype": ["f64", "f32", "bf16"]})


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_dense_attention(case):
    given = prefill_inputs(case, torch.float64)
    out, lse, decoded = prefill(rl.SimulatedWorld(case["P"]), case)
    lengths, scale = [c + case["new"] for c in given["cached"]], case["dims"][0] ** -0.5
    call = given["q"], given["k"], given["v"], lengths, case["window"], scale
    wanted, wanted_lse = dense(*call, **given["changes"])
    assert relative(out, wanted) <= 1e-12 and relative(lse, wanted_lse) <= 1e-12
    assert relative(decoded, wanted) <= 1e-12


@pytest.fixture(scope="module")
def gloo(pool):
    cases = [({k: v for k, v in case.items() if k != "dtype"}, case["dtype"]) for case in GLOO]
    return cases, pool.run(f"{FILE}:prefill_all", cases)


@pytest.mark.parametrize("number", range(len(GLOO)), ids=lambda n: case_id(GLOO[n]))
def test_gloo_equals_simulated_bit_for_bit(gloo, number):
    cases, found = gloo
    for there in found:
        for name, a, b in zip(("out", "lse", "decoded"), prefill(rl.SimulatedWorld(P), *cases[number]), there[number]):
            assert torch.equal(a, b), f"{name} is off by {relative(b, a):.1e}"


def test_a_difference_or_a_mistake_is_an_error_on_every_rank(pool):
    for said in pool.run(f"{FILE}:prefill_told"):
        assert all(text.startswith("prefill_attention: ") for text in said.values()), said
        assert "travels: expected the same on all ranks" in said["travels"]
        assert "expected travels to be None, 'pass-kv' or 'pass-q', got 'home'" in said["travels nowhere"]
        assert "expected mask=rl.causal or rl.causal & rl.sliding_window(w), got full" in said["mask"]
        assert "expected Shards of the new tokens" in said["tensors"]
        assert "expected k of shape (1, 2, n, 4)" in said["heads"]
        assert "it records no gradient" in said["gradient"] and "it records no gradient" in said["gradient of sinks"]
        assert "values of sinks: expected the same on all ranks" in said["sinks"]
        assert "expected sinks of shape (4,), one score for each query head" in said["shape of sinks"]
        assert "softcap: expected the same on all ranks" in said["softcap"]
        assert "expected softcap to be None or a finite number > 0, got -1.0" in said["no softcap"]


@pytest.mark.parametrize("travels", PASSES)
@pytest.mark.parametrize("new, cached", [(1, 100), (57, 0), (40, 333)])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_bytes_of_the_trace_are_those_of_the_formulas(travels, new, cached, size):
    H, G, D, interleave = 6, 2, 8, 4
    world = rl.SimulatedWorld(size)
    cache = rl.KVCache(world, 2, G, D, 400, interleave=interleave, dtype=torch.bfloat16)
    cache.append(*(torch.ones(2, G, cached, D, dtype=torch.bfloat16) for _ in "kv"))
    new_ones = (torch.ones(2, heads, new, D, dtype=torch.bfloat16) for heads in (H, G, G))
    rl.prefill_attention(*world.shard(*new_ones, layout=rl.zigzag), cache, travels=travels)
    for rank in range(size):
        if travels == "pass-kv":
            more = dict(B=2, layout=rl.zigzag, interleave=interleave, rank=rank)
            expected = costs.pass_kv_bytes(new, cached, size, G, D, **more)
        else:
            expected = costs.pass_q_bytes(new, size, H, D, B=2, layout=rl.zigzag, rank=rank)
        assert world.trace.bytes_sent(rank) == expected


@pytest.mark.parametrize("exchange", ["all-gather", "tree"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_bytes_of_a_decoding_are_those_of_the_formula(exchange, size):
    world = rl.SimulatedWorld(size)
    cache = rl.KVCache(world, 2, 2, 8, 400)
    rl.decode_attention(torch.ones(2, 6, 3, 8), cache, exchange=exchange)
    for rank in range(size):
        expected = costs.decode_bytes(size, 6, 8, n=3, B=2, exchange=exchange, rank=rank)
        assert world.trace.bytes_sent(rank) == expected


def test_the_rule_picks_what_a_simulated_clock_finds_faster():
    """Times of 16 cases on hardware on which messages matter; where the two are close, either is right."""
    hardware = rl.worlds.Hardware(flops=1e9, bandwidth=1e6, latency=0.0)
    for new in (4, 16, 64, 256):
        for cached in (0, 64, 512, 2048):
            seconds, picked = {}, None
            for travels in (*PASSES, None):
                world = rl.SimulatedWorld(4, hardware=hardware, count_memory=False)
                cache = rl.KVCache(world, 1, 2, 16, 4096)
                cache.append(*(torch.ones(1, 2, cached, 16) for _ in "kv"))
                shards = world.shard(*(torch.ones(1, h, new, 16) for h in (8, 2, 2)), layout=rl.zigzag)
                rl.prefill_attention(*shards, cache, travels=travels, hardware=hardware)
                seconds[travels] = world.trace.makespan()
            picked, best = seconds.pop(None), min(seconds.values())
            assert picked <= 1.05 * best, (new, cached, seconds)


def test_the_published_thresholds():
    """405B on 4 ranks with the rates that the paper's table 5 implies: hops hide from 4,904 tokens on."""
    model = dict(P=4, H=128, G=8, flops=510e12, bandwidth=26e9)
    first = next(new for new in range(1, 128_000) if costs.published_rule(new, 128_000 - new, **model) == "pass-kv")
    assert first == 4904
    slow = model | {"bandwidth": 1e9}  # no hop hides: what is shorter decides, at 2 G / H = 12.5 %
    first = next(new for new in range(1, 128_000) if costs.published_rule(new, 128_000 - new, **slow) == "pass-kv")
    assert first == 16_000

"""One test for each numbered formula of notebook 11, against what runs compute, send, hold and take."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.attention.decoding import Ownership
from ringlearn.costs.decoding import decode_bytes, decode_seconds, tokens_to_shard, waiting_seconds
from ringlearn.course.checks.nb11 import dealt
from ringlearn.flash import attend
from ringlearn.worlds import Hardware


def filled(P, S, H, G, D, T=1, interleave=2, hardware=None):
    """A cache of S tokens on P simulated ranks, the newest T queries, and all keys and values."""
    world = rl.SimulatedWorld(P, hardware=hardware)
    q, k, v = (torch.randn(1, heads, m, D) for heads, m in ((H, T), (G, S), (G, S)))
    cache = rl.KVCache(world, 1, G, D, capacity=S, interleave=interleave)
    cache.append(k, v)
    return world, cache, q, k, v


@pytest.mark.parametrize("T, H, G, e", [(1, 32, 8, 2), (4, 8, 2, 4), (1, 4, 4, 2)])
def test_formula_1_operations_per_byte(T, H, G, e):
    S, D = 24, 8
    world, cache, q, k, v = filled(1, S, H, G, D, T)
    rl.decode_attention(q, cache)
    masked = sum(4 * H * D * (T - 1 - j) for j in range(T))  # what the newest queries do not see of each other
    assert sum(x.flops for x in world.trace.select("compute", 0)) + masked == 4 * T * H * S * D
    numbers = k.numel() + v.numel()
    assert 4 * T * H * S * D / (numbers * e) == 2 * T * H / (G * e)


@pytest.mark.parametrize("sizes", [[5, 4, 3], [0, 7, 0], [1] * 6])
def test_formula_2_any_splits_merge_to_the_whole(sizes):
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, sum(sizes), 4), torch.randn(1, 1, sum(sizes), 4)
    whole = attend(q, k, v, None, 0.5)
    parts = [attend(q, a, b, None, 0.5) for a, b in zip(k.split(sizes, 2), v.split(sizes, 2))]
    lse = torch.stack([part.lse for part in parts]).exp().sum(0).log()
    out = sum((part.lse - lse).exp().unsqueeze(-1) * part.out for part in parts)
    assert torch.allclose(lse, whole.lse, atol=1e-6) and torch.allclose(out, whole.out, atol=1e-6)


@pytest.mark.parametrize("P, T", [(1, 1), (2, 3), (4, 1), (5, 2)])
def test_formula_3_bytes_of_an_exchange_and_of_a_ring(P, T):
    H, G, D, S = 4, 2, 8, 20
    world, cache, q, k, v = filled(P, S, H, G, D, T)
    rl.decode_attention(q, cache)
    assert {world.trace.bytes_sent(r) for r in range(P)} == {(P - 1) * H * T * (D + 1) * 4}
    assert (P - 1) * H * T * (D + 1) * 4 == decode_bytes(P, H, D, n=T)
    whole = rl.SimulatedWorld(P)
    rl.ring_attention(*whole.shard(torch.randn(1, H, S, D), k, v))
    if S % P == 0:
        assert whole.trace.bytes_sent(0) == (P - 1) * 2 * G * (S // P) * D * 4
        assert whole.trace.bytes_sent(0) == costs.ring_bytes(S, P, G, D, itemsize=4)


@pytest.mark.parametrize("P, K", [(3, 2), (4, 16), (1, 5), (5, 1)])
def test_formula_4_owner_and_slot(P, K):
    own, held = Ownership(P, K), [[] for _ in range(P)]
    for i in range(100):
        assert (own.owner(i), own.slot(i)) == (i // K % P, i // (P * K) * K + i % K)
        assert own.slot(i) == len(held[own.owner(i)])  # slots follow positions
        held[own.owner(i)].append(i)


@pytest.mark.parametrize("P, K", [(3, 2), (4, 16), (1, 5), (5, 1)])
def test_formula_5_local_len(P, K):
    for S in range(0, 3 * P * K + 2, 3):
        for r in range(P):
            assert S // (P * K) * K + min(max(S % (P * K) - r * K, 0), K) == dealt(r, S, P, K)
        assert dealt(0, S, P, K) - dealt(P - 1, S, P, K) <= K


@pytest.mark.parametrize("P, K, S, T", [(3, 1, 18, 4), (4, 16, 100, 4), (4, 2, 3, 2)])
def test_formula_6_what_a_query_sees(P, K, S, T):
    _, cache, q, k, v = filled(P, S, 2, 1, 4, T, K)
    own, parts = Ownership(P, K), []
    for r in range(P):
        at = own.positions(r, S)
        stop = torch.tensor([own.count(r, S - T + j + 1) for j in range(T)])
        parts.append(attend(q, k[:, :, at], v[:, :, at], torch.arange(len(at)) < stop[:, None], 0.5))
    visible = torch.arange(S) <= S - T + torch.arange(T)[:, None]
    right = attend(q, k, v, visible, 0.5).out
    assert torch.allclose(rl.merge_all(parts).out, right, atol=1e-6)
    assert torch.allclose(rl.decode_attention(q, cache), right, atol=1e-6)


@pytest.mark.parametrize("T, S", [(32, 960), (512, 512)])
@pytest.mark.parametrize("bandwidth", [1e8, 1e10])
def test_formula_7_waits_and_the_bytes_in_them(T, S, bandwidth):
    P, H, G, D, e, a, F = 4, 4, 2, 8, 4, 4, 1e9
    t = 4 * H * D * (T / P) * ((S + T) / P) / F
    kv, q, home = 2 * G * D * e * (S + T) // P, H * D * e * T // P, H * (D + 1) * a * T // P
    found = waiting_seconds(T, S, P, H, G, D, flops=F, bandwidth=bandwidth, itemsize=e, accumulated=a)
    waits = (P - 1) * max(0.0, kv / bandwidth - t), (P - 1) * (max(0.0, q / bandwidth - t) + home / bandwidth)
    assert tuple(found.values()) == pytest.approx(waits)
    world = rl.SimulatedWorld(P)
    tensors = [torch.randn(1, heads, S + T, D) for heads in (H, G, G)]
    cache = rl.KVCache(world, 1, G, D, capacity=S)
    cache.append(*(x[:, :, :S] for x in tensors[1:]))
    new = world.shard(*(x[:, :, S:] for x in tensors))
    for travels, nbytes in (("pass-kv", kv), ("pass-q", q + home)):
        rl.prefill_attention(*new, cache, travels=travels)
        assert {world.trace.bytes_sent(r) for r in range(P)} == {(P - 1) * nbytes}


@pytest.mark.parametrize("exchange", ["all-gather", "tree"])
@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_formula_8_seconds_are_those_of_the_virtual_clock(P, exchange):
    """The clock computes where a GPU reads, so operations take as long as the reading of their bytes."""
    S, H, G, D, e, W, latency, read = 256, 4, 2, 8, 2, 1e8, 1e-5, 1e9
    hardware = Hardware(read * 2 * H / (G * e), W, latency)
    world, cache, q, *_ = filled(P, S, H, G, D, interleave=16, hardware=hardware)
    rl.decode_attention(q, cache, exchange=exchange)
    most = max(cache.local_lengths(r)[0] for r in range(P))
    hops = {"all-gather": int(P > 1), "tree": 2 * (P.bit_length() - 1)}[exchange]
    V = (P - 1 if exchange == "all-gather" else hops) * H * (D + 1) * 4
    formula = 2 * G * D * e / read * most + hops * latency + V / W
    link = dict(read=read, bandwidth=W, latency=latency)
    assert sum(decode_seconds(S, P, H, G, D, exchange=exchange, **link).values()) == pytest.approx(formula, rel=1e-12)
    assert world.trace.makespan() == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize("P, B", [(2, 1), (8, 4)])
def test_from_where_it_pays(P, B):
    link = dict(read=4.24e12, bandwidth=288e9, latency=21e-6)
    border = tokens_to_shard(P, 32, 8, 128, B=B, **link)
    for S, faster in ((0.9 * border, False), (1.1 * border, True)):
        one, many = (sum(decode_seconds(int(S), p, 32, 8, 128, B=B, **link).values()) for p in (1, P))
        assert (many < one) == faster

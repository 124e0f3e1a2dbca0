"""Dilated attention, on one device and on rings, against a dense softmax with multiplicities in float64."""

import itertools
import math
import warnings

import dilated_programs as programs
import pytest
import torch
import torch.utils.checkpoint
from cases import LAYOUTS, assert_equal, assert_same_bits, case_id, make_inputs
from oracle import Picky, dense_attention, relative
from pairwise import pairwise, product
from ring_programs import simulated_shards
from torch import Tensor

import ringlearn as rl
from ringlearn.attention import Spec, dilated_backward, dilated_forward
from ringlearn.attention.dilated.ring import prepare
from ringlearn.attention.dilated.rows import Configuration, intersect
from ringlearn.kernels.reference import Reference
from ringlearn.worlds import PerRank

CONFIGURATIONS = [[(8, 1)], [(16, 2)], [(8, 1), (32, 4)], [(7, 3)]]
ODD = [[(7, 3), (5, 2)], [(10, 4), (6, 6), (200, 5)], [(1, 1)], [(9, 2), (9, 2)]]

# H, G, D_k, D_v, and what else is odd about the inputs.
VARIANTS = {
    "MHA, batch of 2": dict(H=4, G=4, D_k=4, D_v=4, B=2),
    "GQA": dict(H=8, G=2, D_k=4, D_v=4),
    "MQA, scale": dict(H=3, G=1, D_k=4, D_v=4, scale=0.7),
    "GQA, D_k != D_v, batch of 2": dict(H=6, G=3, D_k=6, D_v=3, B=2),
    "later queries": dict(H=4, G=2, D_k=4, D_v=4, shorter=0.6),
    "non-contiguous": dict(H=4, G=2, D_k=4, D_v=4, B=2, contiguous=False),
}


def counts(configurations, G: int, S_q: int, S_k: int, causal: bool, q_start: int = 0) -> Tensor:
    """How many configurations let query i see key j, (G, S_q, S_k): the definition, position by position."""
    S = q_start + S_q
    C = torch.zeros(G, S_q, S_k, dtype=torch.float64)
    for w, r in configurations:
        for j in range(G):
            for begin in range(0, max(S, S_k), w):
                rows = list(range(begin, begin + w))[j % r :: r]
                for p in rows:
                    for s in rows:
                        if q_start <= p < S and s < S_k and (s <= p or not causal):
                            C[j, p - q_start, s] += 1
    return C


def dense(q, k, v, configurations, causal, scale=None, q_start=0):
    """Softmax over scores + log(how often the key is seen), in float64: out, lse."""
    q, k, v = q.double(), k.double(), v.double()
    H, G = q.shape[1], k.shape[1]
    C = counts(configurations, G, q.shape[2], k.shape[2], causal, q_start).repeat_interleave(H // G, 0)
    k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + C.log()
    seen = (C > 0).any(-1)
    safe = scores.masked_fill(~seen[..., None], 0.0)
    out = (safe.softmax(-1) @ v).masked_fill(~seen[..., None], 0.0)
    return out, safe.logsumexp(-1).masked_fill(~seen, -torch.inf)


def dilated(world, qkv, configurations, causal=False, layout=rl.contiguous, **options):
    """Full tensors in and out; world None: on one device."""
    segments, rates = zip(*configurations)
    shards = qkv if world is None else world.shard(*qkv, layout=layout)
    result = rl.dilated_attention(*shards, segments, rates, rl.causal if causal else rl.full, **options)
    if world is None:
        return result
    return tuple(r.unshard() for r in result) if isinstance(result, tuple) else result.unshard()


def check_against_dense(P, S, configurations, causal, layout, variant, kernel):
    options = VARIANTS[variant]
    qkv, scale = make_inputs(S, **options), options.get("scale")
    q_start = S - qkv[0].shape[2]
    world = rl.SimulatedWorld(P, count_memory=False) if P else None
    out, lse = dilated(
        world, qkv, configurations, causal, layout, scale=scale, kernel=kernel, q_start=q_start, return_lse=True
    )
    assert_equal((out, lse), dense(*qkv, configurations, causal, scale, q_start), qkv)


GRID = {"P": [1, 2, 3, 4], "S": [64, 97, 130], "configurations": CONFIGURATIONS, "causal": [False, True]}
OTHER = {"layout": LAYOUTS, "variant": list(VARIANTS), "kernel": [None, "reference"]}


@pytest.mark.parametrize(
    "number, case", list(enumerate(product(GRID))), ids=lambda x: case_id(x) if isinstance(x, dict) else ""
)
def test_the_ring_equals_dense(number, case):
    """Every case of the grid, with one of the layouts, heads and kernels."""
    others = product(OTHER)
    check_against_dense(**case, **others[7 * number % len(others)])


WIDER = {"P": [0, 1, 2, 3, 4, 5, 8], "S": [1, 3, 31, 64, 97], "configurations": CONFIGURATIONS + ODD}


@pytest.mark.parametrize("case", pairwise({**WIDER, "causal": [False, True], **OTHER}), ids=case_id)
def test_pairs_of_a_wider_grid_equal_dense(case):
    check_against_dense(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product({**GRID, "layout": LAYOUTS, "variant": list(VARIANTS)}), ids=case_id)
def test_the_ring_equals_dense_in_every_combination(case):
    check_against_dense(**case, kernel="reference" if len(case_id(case)) % 2 else None)


def test_one_device_is_a_ring_of_one_rank():
    qkv = make_inputs(97, **VARIANTS["GQA"])
    alone = dilated(None, qkv, [(8, 1), (32, 4)], causal=True)
    assert torch.equal(alone, dilated(rl.SimulatedWorld(1), qkv, [(8, 1), (32, 4)], causal=True))
    assert alone.shape == qkv[0].shape and alone.requires_grad


def test_one_segment_without_dilation_is_attention():
    q, k, v = make_inputs(50, **VARIANTS["GQA"])
    for segment in (50, 64):
        out, lse = dilated(rl.SimulatedWorld(3), (q, k, v), [(segment, 1)], causal=True, return_lse=True)
        expected, expected_lse = dense_attention(q, k, v, rl.causal)
        assert relative(out, expected) < 1e-12 and relative(lse, expected_lse) < 1e-12


def test_configurations_mix_by_their_denominators_and_not_as_a_union():
    """What two configurations keep counts twice: saying one twice changes nothing but lse, by log 2."""
    qkv = make_inputs(40, **VARIANTS["MHA, batch of 2"])
    once = dilated(None, qkv, [(8, 2)], return_lse=True)
    twice = dilated(None, qkv, [(8, 2), (8, 2)], return_lse=True)
    assert relative(twice[0], once[0]) < 1e-14
    seen = once[1] > -torch.inf
    assert torch.allclose(twice[1][seen], once[1][seen] + math.log(2), atol=1e-14)
    mixed = dilated(None, qkv, [(8, 1), (16, 2)])
    union = counts([(8, 1), (16, 2)], 4, 40, 40, False).clamp(max=1.0)
    scores = (qkv[0] @ qkv[1].transpose(-1, -2) / 2 + union.log()).softmax(-1)
    assert relative(mixed, scores @ qkv[2]) > 0.05


def test_gradients_flow_through_the_mixing_weights():
    """The mixture of two configurations, each by itself with plain autograd: detached weights give other gradients."""
    qkv = make_inputs(48, **VARIANTS["GQA"])
    parts = [dense(*qkv, [c], True) for c in [(8, 1), (24, 3)]]
    lse = torch.stack([p[1] for p in parts])
    weights = (lse - lse.logsumexp(0)).exp().unsqueeze(-1)
    dout = torch.randn_like(parts[0][0])
    out = dilated(rl.SimulatedWorld(2), qkv, [(8, 1), (24, 3)], causal=True)
    got = torch.autograd.grad(out, qkv, dout)
    mixed = [sum(w * p[0] for w, p in zip(some, parts)) for some in (weights, weights.detach())]
    assert all(relative(out, m) < 1e-12 for m in mixed)
    flowing, detached = (torch.autograd.grad(m, qkv, dout, retain_graph=True) for m in mixed)
    for a, b in zip(got, flowing):
        assert relative(a, b) < 1e-12
    assert relative(got[0], detached[0]) > 0.05 and relative(got[1], detached[1]) > 0.05


@pytest.mark.parametrize("P, layout", [(0, None), (2, rl.zigzag), (3, rl.striped)], ids=str)
def test_gradcheck(P, layout):
    qkv = make_inputs(7, H=2, G=2, D_k=2, D_v=3)
    blind = dense(*qkv, [(4, 2), (6, 3)], True)[1] == -torch.inf

    def attention(*qkv):
        world = rl.SimulatedWorld(P, count_memory=False) if P else None
        out, lse = dilated(world, qkv, [(4, 2), (6, 3)], True, layout, return_lse=True)
        return out, lse.masked_fill(blind, 0.0)

    assert torch.autograd.gradcheck(attention, qkv)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_backward_equals_autograd_through_the_wire(layout):
    """With messages passed by reference, plain autograd through the forward program is an oracle that shares no formula
    with the backward program."""
    P, S, configurations = 3, 29, [(7, 3), (20, 2)]
    qkv = make_inputs(S, H=4, G=2, D_k=4, D_v=3)
    with torch.inference_mode():  # a plan that is made here is used with gradients below
        dilated(rl.SimulatedWorld(P), qkv, configurations, True, layout)
    world = rl.SimulatedWorld(P, wire="reference", count_memory=False)
    shards = [x.map(lambda t: t.detach().requires_grad_()) for x in world.shard(*qkv, layout=layout)]
    spec = Spec(rl.causal, shards[0].ranges, shards[1].ranges, 0.5, Reference())
    spec = prepare(tuple(Configuration(*c) for c in configurations), spec, world, *shards[:2])
    partials, k_last, v_last = map(PerRank, zip(*world.run(dilated_forward, *shards, spec), strict=True))
    outs, lses = (PerRank(x) for x in zip(*partials, strict=True))
    douts = PerRank(map(torch.randn_like, outs))
    dlses = PerRank(torch.randn_like(x).masked_fill(x == -torch.inf, 0.0) for x in lses)
    flat = [t for x in shards for t in x.tensors]
    expected = torch.autograd.grad([*outs, *lses], flat, [*douts, *dlses])
    with torch.no_grad():
        results = rl.SimulatedWorld(P).run(
            dilated_backward, douts, *(PerRank(x.tensors) for x in shards), outs, lses, dlses, k_last, v_last, spec
        )
    for got, want in zip([r[i] for i in range(3) for r in results], expected, strict=True):
        assert relative(got, want) < 1e-12


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("P", [0, 1, 3, 4])
@pytest.mark.parametrize("configurations", CONFIGURATIONS, ids=str)
def test_the_future_never_leaks_to_the_last_bit(P, configurations, kernel):
    S = 97
    for layout, cut in itertools.product(LAYOUTS if P > 1 else LAYOUTS[:1], (1, 41, 64)):
        qkv = [t.detach() for t in make_inputs(S, H=6, G=3, D_k=8, D_v=8, dtype=torch.float32)]
        world = rl.SimulatedWorld(P, count_memory=False) if P else None
        before = dilated(world, qkv, configurations, True, layout, kernel=kernel, return_lse=True)
        for t in qkv:
            t[:, :, cut:] = 1e3 * torch.randn_like(t[:, :, cut:])
        after = dilated(world, qkv, configurations, True, layout, kernel=kernel, return_lse=True)
        for a, b in zip(before, after):
            assert torch.equal(a[:, :, :cut], b[:, :, :cut])
            assert not torch.equal(a[:, :, cut:], b[:, :, cut:])


@pytest.mark.parametrize("P", [0, 1, 3])
def test_queries_that_nothing_keeps_give_zero_and_minus_infinity(P):
    q, k, v = make_inputs(60, H=4, G=2, D_k=4, D_v=4)
    world = rl.SimulatedWorld(P) if P else None
    out, lse = dilated(world, (q, k, v), [(12, 3), (15, 5)], causal=True, return_lse=True)
    kept = counts([(12, 3), (15, 5)], 2, 60, 60, True).any(-1).repeat_interleave(2, 0).unsqueeze(0)
    assert 0 < kept.sum() < kept.numel()
    assert bool((lse.isfinite() == kept).all()) and bool((lse[~kept] == -torch.inf).all())
    assert bool((out[~kept] == 0).all())
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert bool((dq[~kept] == 0).all()) and all(bool(g.isfinite().all()) for g in (dq, dk, dv))
    never = ~counts([(12, 3), (15, 5)], 2, 60, 60, False).any(1).unsqueeze(0)  # keys that nothing keeps
    assert bool((dk[never] == 0).all()) and bool((dv[never] == 0).all())


def test_no_queries_no_keys():
    for lengths in ((6, 0), (0, 6), (0, 0)):
        q, k, v = (torch.randn(1, 2, s, 4, requires_grad=True) for s in (lengths[0], lengths[1], lengths[1]))
        for world in (None, rl.SimulatedWorld(3)):
            out, lse = dilated(world, (q, k, v), [(4, 2)], return_lse=True)
            assert out.shape == q.shape and bool((out == 0).all()) and bool((lse == -torch.inf).all())
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            assert all(g.shape == t.shape and bool((g == 0).all()) for g, t in zip(grads, (q, k, v)))


# --- what travels --------------------------------------------------------------------------------------------------


def rows_kept(configurations, G, positions) -> int:
    """(head, position) pairs that a configuration keeps, each once: what a rank that owns the positions sends first."""
    return sum(any(p % w % r == j % r for w, r in configurations) for j in range(G) for p in positions)


@pytest.mark.sample(2)
@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("S", [64, 97, 130])
@pytest.mark.parametrize("configurations", CONFIGURATIONS + ODD[:2], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_bytes_sent_are_the_kept_rows(P, S, configurations, causal):
    """Each of the P - 1 messages of a forward is all that some rank keeps: the kept k and v rows of all its heads."""
    B, H, G, D_k, D_v = 2, 6, 3, 4, 5
    for layout in LAYOUTS:
        q, k, v = make_inputs(S, H, G, D_k, D_v, B, dtype=torch.float32)
        world = rl.SimulatedWorld(P, count_memory=False)
        out = dilated(world, (q, k, v), configurations, causal, layout)
        kept = [rows_kept(configurations, G, layout.positions(S, P, rank).tolist()) for rank in range(P)]
        row = B * (D_k + D_v) * 4
        for rank in range(P):
            sent = [e.nbytes for e in world.trace.select("send", rank)]
            assert sent == [kept[(rank - step) % P] * row for step in range(P - 1)]
        # So every rank's rows make P - 1 hops, and a hop of all of them is the paper's number of rows.
        total = sum(world.trace.bytes_sent(rank) for rank in range(P))
        if len(configurations) == 1:
            ((w, r),) = configurations
            rows = [math.ceil(max(0, min(w, S - a) - j % r) / r) for j in range(G) for a in range(0, S, w)]
            assert total == (P - 1) * sum(rows) * row
        else:
            assert total <= (P - 1) * S * G * row, "what several configurations keep travels once"
        out.sum().backward()
        # Back: k, v make P - 2 hops, those between the last and its own; their gradients P - 1.
        total = sum(world.trace.bytes_sent(rank) for rank in range(P))
        assert total == (max(0, P - 2) + P - 1) * sum(kept) * row


def test_segments_and_heads_share_kernel_calls():
    """64 segments of 16 and 8 heads, forward: a call for a rank's own keys, and none for those of others."""
    qkv = [torch.randn(1, h, 1024, 8) for h in (16, 8, 8)]
    for layout, most in ((rl.contiguous, 1), (rl.zigzag, 1), (rl.striped, 2)):
        world = rl.SimulatedWorld(4)
        dilated(world, qkv, [(16, 2)], True, layout)
        for rank in range(4):
            calls = world.trace.select("compute", rank)
            assert len(calls) <= 4 * most, [c.tile for c in calls]
            assert layout is rl.striped or {c.origin for c in calls} == {rank}
    world = rl.SimulatedWorld(4)
    dilated(world, qkv, [(16, 1), (64, 4), (1024, 16)], True)
    assert max(len(world.trace.select("compute", rank)) for rank in range(4)) <= 14


def test_the_trace_says_whose_keys_are_computed():
    qkv = make_inputs(30, **VARIANTS["GQA"])
    world = rl.SimulatedWorld(3)
    out = dilated(world, qkv, [(30, 2)])
    orders = [[(rank - step) % 3 for step in range(3)] for rank in range(3)]
    assert [[e.origin for e in world.trace.select("compute", rank)] for rank in range(3)] == orders
    assert [[e.origin for e in world.trace.select("send", rank)] for rank in range(3)] == [o[:-1] for o in orders]
    out.sum().backward()
    assert [[e.origin for e in world.trace.select("compute", rank)] for rank in range(3)] == [o[::-1] for o in orders]


def test_operations_are_those_of_the_kept_pairs():
    q, k, v = (torch.randn(1, h, 96, 8) for h in (4, 2, 2))
    for layout, P in itertools.product(LAYOUTS, (1, 4)):
        world = rl.SimulatedWorld(P)
        dilated(world, (q, k, v), [(8, 1), (24, 3)], True, layout)
        pairs = counts([(8, 1), (24, 3)], 2, 96, 96, True).sum() * 2
        assert sum(world.trace.flops(rank) for rank in range(P)) == 4 * 8 * pairs


def test_a_large_batch_of_segments_is_split_over_several_calls(monkeypatch):
    qkv = make_inputs(97, **VARIANTS["GQA"])
    expected = dilated(rl.SimulatedWorld(2), qkv, [(7, 3)], True)
    monkeypatch.setattr("ringlearn.attention.dilated.ring.MOST_HEADS", 10)
    world = rl.SimulatedWorld(2)
    assert relative(dilated(world, qkv, [(7, 3)], True), expected) < 1e-14
    assert len(world.trace.select("compute", 0)) > 5


def test_what_the_ranks_hold_does_not_depend_on_what_ran_before():
    peaks = []
    for _ in range(2):
        world = rl.SimulatedWorld(3)
        qkv = make_inputs(71, **VARIANTS["GQA"])
        dilated(world, qkv, [(9, 2)], True, rl.striped).sum().backward()
        peaks.append([world.memory.peak(rank) for rank in range(3)])
    assert peaks[0] == peaks[1]


# --- which rows ----------------------------------------------------------------------------------------------------


def test_two_progressions_meet_in_a_progression():
    pieces = [range(a, b, s) for a in (0, 1, 5) for b in (0, 6, 17, 30) for s in (1, 2, 3, 4, 6)]
    for a, b in itertools.product(pieces, pieces):
        got = intersect(a, b)
        assert list(got) == sorted(set(a) & set(b))
    huge = intersect(range(3, 10**15, 7), range(10**12, 10**15, 12))
    assert huge[0] % 7 == 3 and huge.step == 84 and len(huge) > 10**13


@pytest.mark.parametrize("w, r", [(8, 1), (16, 2), (7, 3), (5, 5), (100, 4)])
def test_rows_of_a_rank_by_segment(w, r):
    for layout, S, P, head in itertools.product(LAYOUTS, (1, 64, 97), (1, 3, 4), range(4)):
        configuration = Configuration(w, r)
        by_segment = configuration.kept(head, S)
        assert [p for rows in by_segment for p in rows] == [p for p in range(S) if p % w % r == head % r]
        assert len(by_segment) == -(-S // w)
        found = []
        for rank in range(P):
            positions = layout.positions(S, P, rank).tolist()
            for segment, (places, rows) in configuration.rows(head, layout.ranges(S, P)[rank]).items():
                mine = [positions[i] for piece in rows for i in piece]
                first = segment * w + head % r
                assert mine == [first + p for piece in places for p in piece] and set(mine) <= set(by_segment[segment])
                found += mine
        assert sorted(found) == sorted(p for rows in by_segment for p in rows)


# --- both worlds ---------------------------------------------------------------------------------------------------

P = 3
CASES = pairwise(
    {
        "layout": list(programs.LAYOUTS),
        "mask": ["full", "causal"],
        "dtype": ["f64", "f32", "bf16"],
        "kernel": ["reference", "sdpa"],
        "S": [2, 64, 97],
        "heads": [(4, 4), (8, 2), (3, 1)],
        "configurations": CONFIGURATIONS + ODD[:1],
    }
)
FILE = "tests/dilated_programs.py"


def test_gloo_equals_simulated_bit_for_bit(pool):
    gloo = pool.run(f"{FILE}:attend_all", CASES)
    for number, case in enumerate(CASES):
        assert_same_bits(
            programs.attend(rl.SimulatedWorld(P), **programs.given(**case)), [results[number] for results in gloo]
        )


def test_plain_local_tensors_give_the_same(pool):
    case = next(c for c in CASES if c["layout"] == "zigzag" and c["S"] == 97)
    here = simulated_shards(P, **programs.given(**case))
    there = pool.run("tests/ring_programs.py:plain_tensors", [programs.given(**case)])
    for rank in range(P):
        assert_same_bits(here[rank], there[rank], ("out", "dq", "dk", "dv"))


def test_ranks_that_disagree_about_configurations_all_hear_of_it(pool):
    for first, second in pool.run(f"{FILE}:disagreements"):
        assert "dilated_attention: strategy: expected the same on all ranks" in first
        assert "ranks 0, 2: dilated, (segment length, dilation rate): (8, 2); rank 1: " in first
        assert "as many dilation_rates as segment_lengths" in second


# --- errors, dtypes, modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [None, rl.SimulatedWorld(2)], ids=["one device", "ring"])
@pytest.mark.parametrize("options, message", [
    (dict(segment_lengths=[0], dilation_rates=[1]), r"segment_lengths .*ints >= 1, got 0 in \[0\]"),
    (dict(segment_lengths=[8], dilation_rates=[0]), r"dilation_rates .*ints >= 1, got 0 in \[0\]"),
    (dict(segment_lengths=[8.0], dilation_rates=[1]), "segment_lengths .*ints >= 1, got 8.0"),
    (dict(segment_lengths=[8], dilation_rates=[True]), "dilation_rates .*ints >= 1, got True"),
    (dict(segment_lengths=8, dilation_rates=[1]), "segment_lengths .*list .*got 8"),
    (dict(segment_lengths="16", dilation_rates=[1, 1]), "segment_lengths .*ints >= 1, got '1'"),
    (dict(segment_lengths=[8, 16], dilation_rates=[1]), r"as many dilation_rates as segment_lengths.*got 1 .*and 2"),
    (dict(segment_lengths=[], dilation_rates=[]), "at least one"),
    (dict(segment_lengths=(w for w in [4])), "expected segment_lengths to be a list of ints >= 1, .*got <generator"),
    (dict(segment_lengths=[4], dilation_rates=[5]), "a dilation rate of 5 .*a segment of 4.*every head would keep"),
    (dict(mask=rl.sliding_window(3)), r"expected mask=rl.full or mask=rl.causal, got sliding_window\(3\)"),
    (dict(mask=rl.causal & rl.documents([6])), "expected mask=rl.full or mask=rl.causal"),
    (dict(mask="causal"), "expected mask=rl.full or mask=rl.causal, got 'causal'"),
    (dict(layout=rl.zigzag), "layout"),
])  # fmt: skip
def test_errors(world, options, message):
    q, k, v = (torch.zeros(1, h, 6, 8) for h in (4, 2, 2))
    options = {"segment_lengths": [4], "dilation_rates": [2], **options}
    with pytest.raises(ValueError, match=message):
        rl.dilated_attention(*((q, k, v) if world is None else world.shard(q, k, v)), **options)


def test_shapes():
    for shapes, message in (
        ([(1, 4, 6, 8), (1, 3, 6, 8), (1, 3, 6, 8)], "H query heads must be divisible by the G key/value heads"),
        ([(4, 6, 8), (4, 6, 8), (4, 6, 8)], r"expected q of shape \(B, H, S_q, D_k\)"),
        ([(1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 7, 8)], "same sequence length S_k"),
    ):
        with pytest.raises(ValueError, match=f"dilated_attention: .*{message}"):
            rl.dilated_attention(*map(torch.zeros, shapes), [4], [2])
    with pytest.raises(ValueError, match="three Shards or three tensors"):
        rl.dilated_attention(rl.SimulatedWorld(2).shard(torch.zeros(1, 1, 6, 8)), *torch.zeros(2, 1, 1, 6, 8), [4], [2])


@pytest.mark.parametrize("world", [None, rl.SimulatedWorld(2)], ids=["one device", "ring"])
def test_a_second_derivative_is_refused(world):
    q, k, v = make_inputs(6, H=1, G=1, D_k=2, D_v=2)
    (dq,) = torch.autograd.grad(dilated(world, (q, k, v), [(4, 2)]).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="dilated_attention: a gradient of its gradient is not supported"):
        dq.sum().backward()


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("P", [0, 2, 4])
def test_lower_precision(dtype, limit, P):
    qkv = [t.detach().to(dtype).requires_grad_() for t in make_inputs(130, H=8, G=2, D_k=16, D_v=16)]
    exact = [t.detach().double().requires_grad_() for t in qkv]
    configurations = [(8, 1), (32, 4)]
    world = rl.SimulatedWorld(P) if P else None
    out, lse = dilated(world, qkv, configurations, True, rl.zigzag, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    expected, _ = dense(*exact, configurations, True)
    dout = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, qkv, dout)]
    wanted = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    assert all(g.dtype == dtype for g in got)
    assert all(relative(g, w) < limit for g, w in zip(got, wanted)), [relative(g, w) for g, w in zip(got, wanted)]


@pytest.mark.parametrize("P", [0, 2])
def test_no_grad_inference_mode_and_autocast(P):
    q, k, v = make_inputs(20, H=2, G=2, D_k=4, D_v=4, dtype=torch.float32)
    world = rl.SimulatedWorld(P) if P else None
    with torch.inference_mode():
        inference = dilated(world, (q, k, v), [(5, 2)])
    with torch.no_grad():
        out = dilated(world, (q, k, v), [(5, 2)])
    expected = dilated(world, (q, k, v), [(5, 2)])  # after inference mode: what was planned there serves here too
    expected.sum().backward()
    assert not out.requires_grad and torch.equal(out, expected)
    assert inference.is_inference() and torch.equal(inference, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert dilated(world, (q, k, v), [(5, 2)]).dtype == torch.bfloat16


def test_meta_tensors():
    world = rl.SimulatedWorld(4, device="meta")
    qkv = [torch.empty(1, 2, 40, 8, device="meta", requires_grad=True) for _ in range(3)]
    out = dilated(world, qkv, [(8, 2)], True, rl.zigzag, kernel="reference")
    out.sum().backward()
    assert out.device.type == "meta" and all(t.grad.shape == t.shape for t in qkv)
    assert world.trace.messages(0) == 2 * 4 - 3


def test_a_kernel_of_one_s_own_and_nothing_empty_reaches_it():
    for layout, causal, S in itertools.product(LAYOUTS, (False, True), (3, 20)):
        qkv = make_inputs(S, H=2, G=2, D_k=4, D_v=4)
        out = dilated(rl.SimulatedWorld(8), qkv, [(5, 4)], causal, layout, kernel=Picky())
        assert relative(out, dense(*qkv, [(5, 4)], causal)[0]) < 1e-12


def test_a_layout_of_one_s_own_with_mixed_steps():
    def rule(S, P, rank):
        a, b = S // 3, S // 2
        return ((range(0, a, 2), range(b, S)) if rank == 0 else (range(1, a, 2), range(a, b)))[:2]

    mixed = rl.Layout("mixed", rule)
    for causal, configurations in itertools.product((False, True), CONFIGURATIONS + ODD):
        qkv = make_inputs(61, **VARIANTS["GQA"])
        out = dilated(rl.SimulatedWorld(2), qkv, configurations, causal, mixed)
        expected = dense(*qkv, configurations, causal)[0]
        dout = torch.randn_like(out)
        pairs = zip(torch.autograd.grad(out, qkv, dout), torch.autograd.grad(expected, qkv, dout))
        assert relative(out, expected) < 1e-12 and all(relative(a, b) < 1e-12 for a, b in pairs)


# --- the module ----------------------------------------------------------------------------------------------------


def layer(**options):
    return rl.nn.DilatedAttention(
        16, 4, **{"segment_lengths": [8, 20], "dilation_rates": [1, 3], "kv_heads": 2, **options}
    )


def test_the_module_is_projections_attention_sub_layernorm_projection():
    module, x = layer(mask=rl.causal).double(), torch.randn(2, 33, 16, dtype=torch.float64)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    F = torch.nn.functional
    q, k, v = (
        F.linear(x, p.weight, p.bias).view(2, 33, -1, 4).transpose(1, 2)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    assert q.shape[1] == 4 and k.shape[1] == v.shape[1] == 2
    attended = dense(q, k, v, [(8, 1), (20, 3)], True)[0].transpose(1, 2).reshape(2, 33, 16)
    normed = (attended - attended.mean(-1, True)) / (attended.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    normed = normed * module.sub_norm.weight + module.sub_norm.bias
    expected = F.linear(normed, module.out_proj.weight, module.out_proj.bias)
    assert relative(module(x), expected) < 1e-12
    grads = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    wanted = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    assert all(float((a - b).norm()) < 1e-9 for a, b in zip(grads, wanted))


def test_magneto_s_initialisation():
    torch.manual_seed(1)
    module = rl.nn.DilatedAttention(256, 8, segment_lengths=[8], dilation_rates=[1], layers=12)
    gain = math.sqrt(math.log(24))  # of a decoder, or an encoder, of 12 layers
    xavier = math.sqrt(2 / (256 + 256))
    for name, expected in (("q", 1.0), ("k", 1.0), ("v", gain), ("out", gain)):
        weight = getattr(module, f"{name}_proj").weight.detach()
        assert abs(float(weight.std()) / (expected * xavier) - 1) < 0.02
        assert float(weight.abs().max()) > 3 * expected * xavier, "normal, not uniform"
        assert bool((getattr(module, f"{name}_proj").bias == 0).all())
    assert rl.nn.magneto_gain(12) == pytest.approx(gain)


@pytest.mark.parametrize("layout", list(programs.LAYOUTS))
def test_the_module_on_shards_equals_the_module_on_one_device(layout, pool):
    module, x = layer().double(), torch.randn(1, 50, 16, dtype=torch.float64)
    expected = module(x)
    expected.square().sum().backward()
    simulated, grads = programs.module(module.state_dict(), x, layout, True)
    assert relative(simulated, expected) < 1e-12
    for name, p in module.named_parameters():
        assert float((grads[name] - p.grad).norm()) < 1e-9, name
    gloo = pool.run(f"{FILE}:module", module.state_dict(), x, layout, True)
    assert all(torch.equal(there[0], simulated) for there in gloo)
    for name, p in module.named_parameters():  # each rank has its own tokens' share
        assert float((sum(there[1][name] for there in gloo) - p.grad).norm()) < 1e-9, name


def test_the_module_takes_local_tensors_and_refuses_nonsense():
    with pytest.raises(ValueError, match="DilatedAttention: expected width divisible by heads, got 10 and 4"):
        rl.nn.DilatedAttention(10, 4, segment_lengths=[8], dilation_rates=[1])
    with pytest.raises(ValueError, match="DilatedAttention: expected heads divisible by kv_heads, got 4 and 3"):
        layer(kv_heads=3)
    with pytest.raises(ValueError, match="DilatedAttention: .*dilation_rates"):
        layer(dilation_rates=[1])
    with pytest.raises(ValueError, match="DilatedAttention: expected mask=rl.full or mask=rl.causal"):
        layer(mask=rl.sliding_window(2))
    with pytest.raises(ValueError, match="DilatedAttention: expected layers"):
        layer(layers=0)
    with pytest.raises(ValueError, match=r"DilatedAttention: expected x of shape \(B, S, 16\), got \(2, 3\)"):
        layer()(torch.zeros(2, 3))


@pytest.mark.parametrize("P", [0, 2])
def test_torch_compile_and_checkpointing_leave_the_module_s_results(P):
    """The compiled model's graph breaks at the call, on one device too."""
    module, x = layer(mask=rl.causal), torch.randn(2, 371, 16)
    world = rl.SimulatedWorld(P) if P else None

    def run(model, x=x):
        out = model(x) if world is None else model(world.shard(x)).unshard()
        return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]

    graphs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules
        compiled = run(torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph))
    traced = "\n".join(str(graph.graph) for graph in graphs)
    assert "layer_norm" in traced and "seen" not in traced, "the library is not looked into"
    assert P or len(graphs) == 2, "what is before the call, and what is after it"
    want = run(module)  # later, so that the compiler met a length of which nothing was remembered
    checkpointed = run(lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False))
    for got in (compiled, checkpointed):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))

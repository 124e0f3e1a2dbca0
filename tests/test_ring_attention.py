"""Ring attention in a simulated world against dense attention in float64."""

import itertools

import pytest
import torch
from cases import LAYOUTS, MASKS, SCORES, VARIANTS, case_id, check_against_dense, make_inputs, run_low_precision
from oracle import Picky, dense_attention, relative
from pairwise import pairwise, product
from ring_programs import overflowing

import ringlearn as rl

GRID = {
    "layout": LAYOUTS,
    "mask": list(MASKS),
    "P": [1, 2, 3, 4, 5, 8],
    "S": [1, 7, 64, 97, 130],
    "variant": list(VARIANTS),
    "kernel": ["reference", None],
    "scores": list(SCORES),
}


@pytest.mark.parametrize("case", pairwise(GRID), ids=case_id)
def test_float64_equals_dense_attention(case):
    check_against_dense(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product({k: v for k, v in GRID.items() if k not in ("kernel", "scores")}), ids=case_id)
def test_float64_equals_dense_attention_in_every_combination(case):
    check_against_dense(**case, kernel="reference" if len(case_id(case)) % 2 else None)


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("P", [1, 4, 16])
def test_float32_to_1e5(P, kernel):
    errors, _, _ = run_low_precision(torch.float32, P, kernel=kernel)
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("P", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_within_twice_one_sdpa_call(dtype, P, kernel):
    errors, sdpa, _ = run_low_precision(dtype, P, kernel=kernel)
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), errors, sdpa):
        assert mine <= 2 * theirs, f"{name}: {mine:.2e}, one SDPA call {theirs:.2e}"


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_logits_of_1e4_are_finite_and_as_right_as_their_rounding(dtype, kernel):
    # A score of size |s| is off by eps |s| before softmax sees it, and softmax passes an absolute error on as a
    # relative one. The inputs are rounded before the oracle sees them, so eps is that of the float32 accumulation.
    errors, sdpa, ring = run_low_precision(dtype, 4, scale_of_logits=1e4, kernel=kernel)
    assert all(bool(r.isfinite().all()) for r in ring)
    if dtype == torch.float32:
        largest = 1e4 * 6  # unit normal q . k / sqrt(D): the largest of 256 x 256 is about 5
        assert max(errors) < 4 * torch.finfo(dtype).eps * largest, errors
    else:
        assert all(mine <= 2 * theirs for mine, theirs in zip(errors, sdpa)), (errors, sdpa)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash", None])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_scores_that_overflow_to_minus_infinity_weigh_nothing(dtype, kernel):
    """A rank all of whose keys are so far below the others has nothing to add, and does not spoil its row."""
    for world in (rl.SimulatedWorld(P) for P in (1, 2, 4)):
        q, k, v, dout, out, lse, *grads = overflowing(world, dtype, kernel=kernel)
        (q, k, v), limit = (t.double().requires_grad_() for t in (q, k, v)), 1e-2 if dtype == "bf16" else 1e-5
        expected, expected_lse = dense_attention(q, k, v, rl.full)
        (expected * dout).sum().backward()
        (dq, *others), odd, even = grads, slice(1, None, 2), slice(None, None, 2)
        got = out, lse, *others, dq[:, :, even], dq[:, :, odd]
        right = expected, expected_lse, k.grad, v.grad, q.grad[:, :, even], q.grad[:, :, odd]
        assert all(relative(a, b) < limit for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [rl.full, rl.causal, rl.sliding_window(3)], ids=str)
def test_all_scores_of_a_row_that_overflow(mask, layout):
    """To -inf: the row counts as one that sees nothing, as in SDPA. To +inf: NaN, as in SDPA, and never a number."""
    by_predicate = rl.mask(lambda q, k: mask(q, k) & (q < 9))  # tiles that need the mask itself
    for form in (mask, by_predicate):
        options = {"keys": 8, "layout": layout, "mask": form}
        for kernel in (None, "reference"):
            out, lse, dq, dk, dv = overflowing(rl.SimulatedWorld(2), kernel=kernel, **options)[4:]
            out, lse, dq = (t.transpose(1, 2)[:, ::2] for t in (out, lse, dq))
            assert not out.any() and not dq.any() and (lse == -torch.inf).all()
            assert dk.isfinite().all() and dv.isfinite().all()
        assert overflowing(rl.SimulatedWorld(2), sign=1, **options)[4][:, :, ::2].isnan().all()


def test_empty_shards_and_tiles_never_reach_a_kernel():
    for layout, mask in itertools.product(LAYOUTS, (rl.full, rl.causal, rl.sliding_window(2))):
        q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
        out = rl.ring_attention(*rl.SimulatedWorld(8).shard(q, k, v, layout=layout), mask=mask, kernel=Picky())
        assert relative(out.unshard(), dense_attention(q, k, v, mask)[0]) < 1e-5


def test_messages_and_bytes_are_the_formula_s():
    B, H, G, S, D, P = 1, 8, 2, 4096, 64, 4
    q, k, v = (torch.randn(B, h, S, D, requires_grad=True) for h in (H, G, G))
    world, s = rl.SimulatedWorld(P, count_memory=False), S // P
    out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
    for rank in range(P):
        assert world.trace.messages(rank) == P - 1, "one packed message a hop"
        assert world.trace.bytes_sent(rank) == (P - 1) * 2 * B * G * s * D * 4 == 3_145_728
    out.unshard().sum().backward()
    for rank in range(P):
        assert world.trace.messages(rank) == 2 * P - 3, "k, v are there already, and at home again after P - 2 hops"
        assert world.trace.bytes_sent(rank) == (P - 2 + P - 1) * 2 * B * G * s * D * 4 == 5_242_880


@pytest.mark.parametrize(("P", "itemsize"), [(2, 2), (3, 4), (4, 4)])
def test_gradients_travel_in_the_accumulation_dtype_once_they_are_sums_of_several_ranks(P, itemsize):
    q, k, v = (torch.randn(1, 2, 48, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    world = rl.SimulatedWorld(P)
    rl.ring_attention(*world.shard(q, k, v)).unshard().sum().backward()
    kv = 2 * 2 * (48 // P) * 16
    assert world.trace.bytes_sent(0) == (P - 2) * kv * 2 + (P - 1) * kv * itemsize


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_the_backward_goes_back_and_ends_at_home(P):
    q, k, v = (torch.randn(1, 1, 6 * P, 4, requires_grad=True) for _ in range(3))
    world = rl.SimulatedWorld(P)
    out = rl.ring_attention(*world.shard(q, k, v)).unshard()
    forward = [[e.origin for e in world.trace.select("compute", rank)] for rank in range(P)]
    assert forward == [[(rank - step) % P for step in range(P)] for rank in range(P)]
    out.sum().backward()
    backward = [[e.origin for e in world.trace.select("compute", rank)] for rank in range(P)]
    assert backward == [order[::-1] for order in forward]
    assert all(e.peer == (e.rank - 1) % P for e in world.trace.select("send"))


def test_the_last_message_hides_behind_the_own_share():
    """On hardware where a step takes far longer than a message, no rank waits at all."""
    slow = rl.worlds.trace.Hardware(flops=1e6, bandwidth=1e9, latency=1e-9)
    world = rl.SimulatedWorld(4, hardware=slow)
    q, k, v = (torch.randn(1, 1, 64, 8, requires_grad=True) for _ in range(3))
    out = rl.ring_attention(*world.shard(q, k, v)).unshard()
    assert all(world.trace.seconds("wait", rank) == 0 for rank in range(4))
    out.sum().backward()
    assert all(world.trace.seconds("wait", rank) == 0 for rank in range(4))


@pytest.mark.parametrize("P", [1, 2, 3])
def test_the_last_step_in_two_calls_is_the_same(P, monkeypatch):
    q, k, v = (torch.randn(1, h, 50, 16, dtype=torch.float64, requires_grad=True) for h in (6, 3, 3))
    dout, grads = torch.randn(1, 6, 50, 16, dtype=torch.float64), []
    for nbytes in (2**30, 1):
        monkeypatch.setattr("ringlearn.attention.strategy.CALL_BYTES", nbytes)
        world = rl.SimulatedWorld(P)
        out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal).unshard()
        grads.append(torch.autograd.grad(out, (q, k, v), dout))
        assert len(world.trace.select("compute", 0)) == P - 1 + (2 if nbytes == 1 else 1)
    assert all(relative(a, b) < 1e-14 for a, b in zip(*grads, strict=True))


def test_the_readme_example_equals_sdpa():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 1000, 64, requires_grad=True) for _ in range(3))
    world = rl.SimulatedWorld(4)
    out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
    full = out.unshard()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative(full, expected) < 1e-6
    dout = torch.randn_like(full)
    for got, want in zip(torch.autograd.grad(full, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_casts_as_sdpa_does(dtype):
    q, k, v = make_inputs(40, H=4, G=4, D_k=8, D_v=8, dtype=dtype)
    world = rl.SimulatedWorld(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = rl.ring_attention(*world.shard(q, k, v)).unshard()
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype == theirs.dtype
    out.sum().backward()
    assert q.grad.dtype == dtype
    if dtype == torch.float32:
        plain = rl.ring_attention(*world.shard(*(t.detach().bfloat16() for t in (q, k, v)))).unshard()
        assert torch.equal(out, plain)


def test_no_grad_and_inference_mode():
    q, k, v = make_inputs(20, H=2, G=2, D_k=4, D_v=4)
    world = rl.SimulatedWorld(3)
    expected = rl.ring_attention(*world.shard(q, k, v)).unshard()
    assert expected.requires_grad
    with torch.no_grad():
        out = rl.ring_attention(*world.shard(q, k, v)).unshard()
    assert not out.requires_grad and torch.equal(out, expected)
    with torch.inference_mode():
        out = rl.ring_attention(*world.shard(q, k, v)).unshard()
    assert out.is_inference() and torch.equal(out, expected)


def test_tensors_made_under_inference_mode_serve_outside_of_it_but_not_with_gradients():
    q, k, v = make_inputs(20, H=2, G=2, D_k=4, D_v=4)
    world = rl.SimulatedWorld(3)
    expected = rl.ring_attention(*world.shard(q, k, v)).unshard()
    with torch.inference_mode():
        frozen = world.shard(q, k, v)
    assert torch.equal(rl.ring_attention(*frozen).unshard(), expected)
    with pytest.raises(ValueError, match="ring_attention: .*made under torch.inference_mode.*clone them outside"):
        rl.ring_attention(world.shard(q), *frozen[1:])
    assert rl.ring_attention(world.shard(q), *(x.map(torch.clone) for x in frozen[1:])).unshard().requires_grad


def test_double_precision_results_do_not_depend_on_counting_memory():
    q, k, v = make_inputs(30, H=2, G=1, D_k=4, D_v=4)
    outs = [
        rl.ring_attention(*rl.SimulatedWorld(3, count_memory=count).shard(q, k, v), mask=rl.causal).unshard()
        for count in (True, False)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_a_nan_is_never_lost(kernel):
    """Rank 1 sees nothing but a NaN in its own tile; the merge must not make a number of it."""
    for odd, rows in ((0, [1]), (1, [0, 1]), (2, [0, 1])):
        qkv = [torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(3)]
        with torch.no_grad():
            qkv[odd][:, :, 1] = torch.nan
        out, lse = rl.ring_attention(*rl.SimulatedWorld(2).shard(*qkv), kernel=kernel, return_lse=True)
        out, lse = out.unshard(), lse.unshard()
        assert out.isnan().any(-1).flatten().nonzero().flatten().tolist() == rows
        assert odd == 2 or lse.isnan().flatten().nonzero().flatten().tolist() == rows
        out.sum().backward()
        assert all(t.grad.isnan().any() for t in qkv[:2])


def test_a_key_at_minus_infinity_weighs_nothing():
    q, k, v = torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 2, 4)
    k[:, :, 1] = -torch.inf  # every score with it is -inf; it is alone in its tiles
    out = rl.ring_attention(*rl.SimulatedWorld(2).shard(q, k, v)).unshard()
    assert torch.equal(out, v[:, :, :1].expand(-1, -1, 2, -1))

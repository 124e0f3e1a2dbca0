"""Ring attention in a simulated world against dense attention in float64."""

import itertools

import pytest
import torch
from oracle import Picky, dense_attention, relative
from pairwise import pairwise, product

import ringlearn as rl
from ringlearn.attention import Spec, ring_backward, ring_forward
from ringlearn.kernels.reference import Reference
from ringlearn.worlds import PerRank

LAYOUTS = [rl.contiguous, rl.striped, rl.zigzag]


def documents(S):
    """Uneven documents, one of them empty, that add up to S."""
    lengths = [S // 3, 0, S // 7, S // 5]
    return rl.documents([*lengths, S - sum(lengths)])


# Masks by name, from the number of keys: documents need it.
MASKS = {
    "full": lambda S: rl.full,
    "causal": lambda S: rl.causal,
    "window": lambda S: rl.sliding_window(5),
    "causal window": lambda S: rl.causal & rl.sliding_window(16),
    "window wider than S": lambda S: rl.sliding_window(1000),
    "documents": documents,
    "causal documents": lambda S: rl.causal & documents(S),
    "or": lambda S: rl.causal & (documents(S) | rl.sliding_window(4)),
    "own": lambda S: rl.mask(lambda q, k: (3 * q + 5 * k) % 7 < 4),
}

# H, G, D_k, D_v, and what else is odd about the inputs.
VARIANTS = {
    "GQA": dict(H=8, G=2, D_k=8, D_v=8),
    "MQA": dict(H=4, G=1, D_k=8, D_v=8),
    "MHA, batch of 2": dict(H=3, G=3, D_k=8, D_v=8, B=2),
    "D_k != D_v": dict(H=4, G=2, D_k=12, D_v=5),
    "S_q < S_k, later": dict(H=4, G=2, D_k=8, D_v=8, shorter=0.6),
    "non-contiguous": dict(H=4, G=2, D_k=8, D_v=8, B=2, contiguous=False),
    "only q": dict(H=4, G=2, D_k=8, D_v=8, needs="q"),
    "only k": dict(H=4, G=2, D_k=8, D_v=8, needs="k"),
    "only v": dict(H=4, G=2, D_k=8, D_v=8, needs="v"),
    "scale": dict(H=2, G=2, D_k=8, D_v=8, scale=0.7),
}

GRID = {
    "layout": LAYOUTS,
    "mask": list(MASKS),
    "P": [1, 2, 3, 4, 5, 8],
    "S": [1, 7, 64, 97, 130],
    "variant": list(VARIANTS),
    "kernel": ["reference", None],
}


def make_inputs(S, H, G, D_k, D_v, B=1, shorter=1.0, contiguous=True, needs="qkv", dtype=torch.float64, **_):
    S_q = max(1, round(S * shorter))
    if contiguous:
        q, k, v = (torch.randn(B, h, s, d, dtype=dtype) for h, s, d in ((H, S_q, D_k), (G, S, D_k), (G, S, D_v)))
    else:  # (B, S, heads, D) as a projection gives it, transposed; v expanded over the batch
        q = torch.randn(B, S_q, H, D_k, dtype=dtype).transpose(1, 2)
        k = torch.randn(B, S, G, 2 * D_k, dtype=dtype)[..., ::2].transpose(1, 2)
        v = torch.randn(1, G, S, D_v, dtype=dtype).expand(B, G, S, D_v)
    for name, t in zip("qkv", (q, k, v)):
        t.requires_grad_(name in needs)
    return q, k, v


def check_against_dense(layout, mask, P, S, variant, kernel, tolerance=1e-12, attention=rl.ring_attention):
    options = VARIANTS[variant] if isinstance(variant, str) else variant
    q, k, v = make_inputs(S, **options)
    q_start = S - q.shape[2]  # the last queries of a longer context, as in chunked prefill
    mask, scale = MASKS[mask](S), options.get("scale")
    world = rl.SimulatedWorld(P, count_memory=False)
    shards = world.shard(q, k, v, layout=layout)
    out, lse = attention(*shards, mask, scale, kernel, q_start=q_start, return_lse=True)
    out, lse = out.unshard(), lse.unshard()
    expected, expected_lse = dense_attention(q, k, v, mask, scale, q_start)
    assert out.dtype == q.dtype and lse.dtype == torch.float64
    assert relative(out, expected) < tolerance and relative(lse, expected_lse) < tolerance
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    needing = [t for t in (q, k, v) if t.requires_grad]
    grads = torch.autograd.grad([out], needing, [dout], retain_graph=True)
    expected_grads = torch.autograd.grad([expected], needing, [dout], retain_graph=True)
    for t, got, want in zip(needing, grads, expected_grads, strict=True):
        assert got.dtype == t.dtype and got.shape == t.shape
        assert relative(got, want) < tolerance
    if options.get("needs") != "v":  # lse has a gradient too; v has no part in it
        dlse = dlse.masked_fill(expected_lse == -torch.inf, 0.0)
        needing = [t for t in (q, k) if t.requires_grad]
        grads = torch.autograd.grad([out, lse], needing, [dout, dlse])
        expected_grads = torch.autograd.grad([expected, expected_lse], needing, [dout, dlse])
        for got, want in zip(grads, expected_grads, strict=True):
            assert relative(got, want) < tolerance


def case_id(case):
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", pairwise(GRID), ids=case_id)
def test_float64_equals_dense_attention(case):
    check_against_dense(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product({k: v for k, v in GRID.items() if k != "kernel"}), ids=case_id)
def test_float64_equals_dense_attention_in_every_combination(case):
    check_against_dense(**case, kernel="reference" if len(case_id(case)) % 2 else None)


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradcheck(P, layout):
    world = rl.SimulatedWorld(P, count_memory=False)
    inputs = make_inputs(5, H=2, G=1, D_k=3, D_v=2)

    def attention(q, k, v):
        out, lse = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=rl.causal, return_lse=True)
        return out.unshard(), lse.unshard()

    assert torch.autograd.gradcheck(attention, inputs)


def run_low_precision(dtype, P, scale_of_logits=1.0, kernel=None, S=256, attention=rl.ring_attention):
    """Relative errors against float64 of the ring's and of one SDPA call's out, dq, dk, dv."""
    q, k, v = (t.detach() for t in make_inputs(S, H=4, G=2, D_k=32, D_v=32, dtype=torch.float64))
    q, k, v = ((t * m).to(dtype) for t, m in zip((q, k, v), (scale_of_logits, 1.0, 1.0)))
    dout = torch.randn(1, 4, S, 32, dtype=torch.float64).to(dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected, _ = dense_attention(*exact, rl.causal)
    expected = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    mine = [t.clone().requires_grad_() for t in (q, k, v)]
    world = rl.SimulatedWorld(P, count_memory=False)
    out = attention(*world.shard(*mine, layout=rl.zigzag), mask=rl.causal, kernel=kernel).unshard()
    ring = [out, *torch.autograd.grad(out, mine, dout)]
    theirs = [t.clone().requires_grad_() for t in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        expanded = [theirs[0], *(t.repeat_interleave(2, 1) for t in theirs[1:])]
        once = torch.nn.functional.scaled_dot_product_attention(*expanded, is_causal=True)
    sdpa = [once, *torch.autograd.grad(once, theirs, dout)]
    assert all(r.dtype == dtype for r in ring)
    return [relative(r, e) for r, e in zip(ring, expected)], [relative(s, e) for s, e in zip(sdpa, expected)], ring


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


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_causality_is_bit_exact(layout, kernel):
    """Another future, finite, leaves the past as it was to the last bit."""
    S, P, cut = 97, 4, 41
    q, k, v = (t.detach() for t in make_inputs(S, H=4, G=2, D_k=8, D_v=8, dtype=torch.float32))
    world = rl.SimulatedWorld(P, count_memory=False)

    def attend(q, k, v):
        return rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=rl.causal, kernel=kernel).unshard()

    before = attend(q, k, v)
    for t in (q, k, v):
        t[:, :, cut:] = 1e3 * torch.randn_like(t[:, :, cut:])
    after = attend(q, k, v)
    assert torch.equal(before[:, :, :cut], after[:, :, :cut])
    assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_that_see_no_key_give_zero_and_no_gradient(layout, kernel):
    blind = rl.mask(lambda q, k: (q % 3 != 0) & (k <= q))  # every third query sees nothing
    q, k, v = make_inputs(50, H=4, G=2, D_k=8, D_v=8, dtype=torch.float32)
    world = rl.SimulatedWorld(3, count_memory=False)
    out, lse = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=blind, kernel=kernel, return_lse=True)
    out, lse = out.unshard(), lse.unshard()
    assert bool((out[:, :, ::3] == 0).all()) and bool((lse[:, :, ::3] == -torch.inf).all())
    expected, _ = dense_attention(q, k, v, blind)
    assert relative(out, expected) < 1e-5
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    assert bool((grads[0][:, :, ::3] == 0).all())
    assert all(relative(a, b) < 1e-5 for a, b in zip(grads, wanted))


def test_no_queries_no_keys():
    q, k, v = (torch.randn(1, 2, s, 4, requires_grad=True) for s in (6, 0, 0))
    world = rl.SimulatedWorld(3)
    out, lse = rl.ring_attention(*world.shard(q, k, v), return_lse=True)
    assert bool((out.unshard() == 0).all()) and bool((lse.unshard() == -torch.inf).all())
    out.unshard().sum().backward()
    assert bool((q.grad == 0).all()) and k.grad.shape == (1, 2, 0, 4)
    none = rl.ring_attention(*world.shard(*(torch.randn(1, 2, s, 4) for s in (0, 6, 6)))).unshard()
    assert none.shape == (1, 2, 0, 4)


def test_empty_shards_and_tiles_never_reach_a_kernel():
    for layout, mask in itertools.product(LAYOUTS, (rl.full, rl.causal, rl.sliding_window(2))):
        q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
        out = rl.ring_attention(*rl.SimulatedWorld(8).shard(q, k, v, layout=layout), mask=mask, kernel=Picky())
        assert relative(out.unshard(), dense_attention(q, k, v, mask)[0]) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "causal documents"])
def test_hand_written_backward_equals_autograd_through_the_wire(layout, mask):
    """With messages passed by reference, plain autograd through the forward program is an oracle that shares no formula
    with the backward program."""
    S, P = 23, 4
    q, k, v = make_inputs(S, H=4, G=2, D_k=4, D_v=6)
    mask = MASKS[mask](S)
    world = rl.SimulatedWorld(P, wire="reference", count_memory=False)
    shards = [
        [p.requires_grad_() for p in x.map(torch.Tensor.detach).tensors] for x in world.shard(q, k, v, layout=layout)
    ]
    ranges = layout.ranges(S, P)
    spec = Spec(mask, ranges, ranges, 0.5, Reference())
    partials, k_last, v_last = zip(*world.run(ring_forward, *map(PerRank, shards), spec), strict=True)
    douts = [torch.randn_like(p.out) for p in partials]
    dlses = [torch.randn_like(p.lse) for p in partials]
    flat = [t for x in shards for t in x]
    expected = torch.autograd.grad(
        [p.out for p in partials] + [p.lse for p in partials], flat, douts + dlses, allow_unused=True
    )
    with torch.no_grad():
        results = rl.SimulatedWorld(P).run(
            ring_backward,
            PerRank(douts),
            *map(PerRank, shards),
            PerRank(p.out for p in partials),
            PerRank(p.lse for p in partials),
            PerRank(dlses),
            PerRank(t.detach() for t in k_last),
            PerRank(t.detach() for t in v_last),
            spec,
        )
    got = [r[i] for i in range(3) for r in results]
    for g, e in zip(got, expected, strict=True):
        assert relative(g, torch.zeros_like(g) if e is None else e) < 1e-12


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


def test_a_loss_that_uses_one_rank_only():
    """Other ranks' outputs have no gradient: they are zeros, and the program still runs."""
    q, k, v = make_inputs(12, H=2, G=2, D_k=4, D_v=4)
    out = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v), mask=rl.causal)
    out.tensors[1].sum().backward()
    got = [t.grad.clone() for t in (q, k, v)]
    expected, _ = dense_attention(q, k, v, rl.causal)
    wanted = torch.autograd.grad(expected[:, :, 4:8].sum(), (q, k, v))
    assert all(relative(g, w) < 1e-12 for g, w in zip(got, wanted))


def test_a_second_derivative_is_refused():
    q, k, v = make_inputs(6, H=1, G=1, D_k=2, D_v=2)
    out = rl.ring_attention(*rl.SimulatedWorld(2).shard(q, k, v)).unshard()
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="ring_attention: a gradient of its gradient is not supported"):
        dq.sum().backward()


def test_double_precision_results_do_not_depend_on_counting_memory():
    q, k, v = make_inputs(30, H=2, G=1, D_k=4, D_v=4)
    outs = [
        rl.ring_attention(*rl.SimulatedWorld(3, count_memory=count).shard(q, k, v), mask=rl.causal).unshard()
        for count in (True, False)
    ]
    assert torch.equal(*outs)


def test_meta_tensors():
    """The programs that are run for their numbers are run for their shapes and messages too."""
    world = rl.SimulatedWorld(4, device="meta")
    q, k, v = (torch.empty(1, 2, 40, 8, device="meta", requires_grad=True) for _ in range(3))
    out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal).unshard()
    out.sum().backward()
    assert out.device.type == "meta" and q.grad.shape == q.shape and k.grad.shape == v.grad.shape == k.shape
    assert world.trace.messages(0) == 2 * 4 - 3


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

"""Naive flash attention against dense attention in float64, and its refusals."""

import pytest
import torch
from cases import case_id
from kernel_cases import Largest, exact
from oracle import relative
from pairwise import pairwise, product_but_for

import ringlearn as rl
from ringlearn import flash

MASKS = {
    "full": rl.full,
    "causal": rl.causal,
    "window": rl.sliding_window(4),
    "causal window": rl.causal & rl.sliding_window(3),
    "documents": rl.causal & rl.documents([5, 0, 20, 12]),
    "blind rows": rl.mask(lambda q, k: (q % 3 != 0) & (k > 8)),
}
GRID = {
    "mask": list(MASKS),
    "S": [(37, 37), (1, 37), (7, 37), (0, 37)],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "dims": [(8, 8), (5, 3), (1, 9)],
    "blocks": [(1, 1), (7, 64), (64, 7), (7, 7), (64, 64), (16, 5)],
    "q_start": [0, 7],
    "dtype": [torch.float64, torch.float32],
}


def make(S, heads, dims, dtype=torch.float64):
    (S_q, S_k), (H, G), (D_k, D_v) = S, heads, dims
    shapes = (2, H, S_q, D_k), (2, G, S_k, D_k), (2, G, S_k, D_v), (2, H, S_q, D_v)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def check(case):
    S_q, S_k = case["S"]
    q_start = min(case["q_start"], S_k - S_q)  # documents end with the keys
    mask, limit = MASKS[case["mask"]], 1e-12 if case["dtype"] == torch.float64 else 1e-5
    q, k, v, dout = make(case["S"], case["heads"], case["dims"], case["dtype"])
    options = dict(zip(("block_q", "block_k"), case["blocks"], strict=True), q_start=q_start)
    out, lse, *grads = exact(q, k, v, dout, mask, 0.4, q_start).values()

    got = rl.flash_forward(q, k, v, mask, 0.4, **options)
    assert got.out.dtype == got.lse.dtype == case["dtype"]
    assert relative(got.out, out) < limit and relative(got.lse, lse) < limit
    assert torch.equal(got.lse == -torch.inf, lse == -torch.inf)
    got_grads = rl.flash_backward(dout, q, k, v, *got, mask, 0.4, **options)
    assert all(relative(g, want) < limit for g, want in zip(got_grads, grads, strict=True))

    leaves = [t.requires_grad_() for t in (q, k, v)]
    attention = rl.flash_attention(*leaves, mask, 0.4, **options)
    assert attention.dtype == case["dtype"] and relative(attention, out) < limit
    got_grads = torch.autograd.grad(attention, leaves, dout)
    assert all(relative(g, want) < limit for g, want in zip(got_grads, grads, strict=True))


@pytest.mark.parametrize("case", pairwise(GRID), ids=case_id)
def test_equals_dense_attention(case):
    check(case)


MANY = product_but_for(("heads", "q_start", "dtype"), GRID)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=case_id)
def test_equals_dense_attention_everywhere(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """Everything is computed in float32: out and gradients are as exact as their dtype can say."""
    q, k, v, dout = make((37, 37), (4, 2), (8, 8), dtype)
    out, _, *grads = exact(q, k, v, dout, rl.causal).values()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = rl.flash_attention(*leaves, rl.causal, block_q=16, block_k=16)
    got_grads = torch.autograd.grad(got, leaves, dout)
    assert got.dtype == dtype and all(g.dtype == dtype for g in got_grads)
    assert relative(got, out.to(dtype)) < torch.finfo(dtype).eps / 16
    # out was rounded before delta was taken from it: that is one more rounding than in out.
    assert all(relative(g, want) < torch.finfo(dtype).eps / 2 for g, want in zip(got_grads, grads, strict=True))


@pytest.mark.parametrize("mask", list(MASKS))
def test_gradcheck(mask):
    q, k, v, _ = make((37, 37), (2, 1), (3, 2))
    leaves = [t[:1].contiguous().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: rl.flash_attention(q, k, v, MASKS[mask], block_q=8, block_k=16), leaves, fast_mode=True
    )


def test_non_contiguous_and_expanded_inputs():
    q, k, v, dout = make((37, 37), (4, 2), (8, 8))
    want = rl.flash_forward(q, k, v, rl.causal)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    got = rl.flash_forward(*strided, rl.causal)
    assert relative(got.out, want.out) < 1e-14 and relative(got.lse, want.lse) < 1e-14
    one = k[:1, :1]
    expanded, repeated = one.expand(2, 2, -1, -1), one.repeat(2, 2, 1, 1)
    assert relative(rl.flash_forward(q, expanded, v).out, rl.flash_forward(q, repeated, v).out) < 1e-14
    leaf = q.clone().requires_grad_()
    rl.flash_attention(leaf, k, v).sum().backward()  # an expanded gradient
    want, *_ = rl.flash_backward(torch.ones_like(dout), q, k, v, *rl.flash_forward(q, k, v))
    assert relative(leaf.grad, want) < 1e-14


def test_large_logits():
    q, k, v, dout = make((37, 37), (4, 2), (8, 8), torch.float32)
    scale = 1e4 / float((q @ k.repeat_interleave(2, 1).mT).abs().max())
    out, lse, *grads = exact(q, k, v, dout, rl.causal, scale).values()
    got = rl.flash_forward(q, k, v, rl.causal, scale, block_q=8, block_k=8)
    got_grads = rl.flash_backward(dout, q, k, v, *got, rl.causal, scale, block_q=8, block_k=8)
    pairs = zip((*got, *got_grads), (out, lse, *grads), strict=True)
    assert all(relative(g, want) < 8 * 1e4 * torch.finfo(torch.float32).eps for g, want in pairs)


def test_no_score_matrix():
    q, k, v, dout = (torch.randn(1, 1, 512, 4) for _ in range(4))
    with Largest() as seen:
        got = rl.flash_forward(q, k, v, rl.causal, block_q=64, block_k=32)
        rl.flash_backward(dout, q, k, v, *got, rl.causal, block_q=64, block_k=32)
    assert 0 < seen.numel <= 64 * 32 < 512 * 512


def test_a_future_token_changes_nothing():
    q, k, v, _ = make((37, 37), (4, 2), (8, 8))
    before = rl.flash_forward(q, k, v, rl.causal, block_q=8, block_k=8)
    k[:, :, 20:] += 100.0
    v[:, :, 20:] *= -3.0
    after = rl.flash_forward(q, k, v, rl.causal, block_q=8, block_k=8)
    assert torch.equal(before.out[:, :, :20], after.out[:, :, :20])
    assert torch.equal(before.lse[..., :20], after.lse[..., :20])
    assert not torch.equal(before.out[:, :, 20:], after.out[:, :, 20:])


def test_only_one_input_needs_a_gradient():
    q, k, v, dout = make((7, 7), (4, 2), (8, 8))
    want = rl.flash_backward(dout, q, k, v, *rl.flash_forward(q, k, v, rl.causal), rl.causal)
    for i in range(3):
        leaves = [t.clone() for t in (q, k, v)]
        leaves[i].requires_grad_()
        (grad,) = torch.autograd.grad(rl.flash_attention(*leaves, rl.causal), leaves[i], dout)
        assert torch.equal(grad, want[i])


# --- refusals --------------------------------------------------------------------------------------------------------


def test_double_backward_is_refused():
    q, k, v, _ = make((7, 7), (4, 2), (8, 8))
    (grad,) = torch.autograd.grad(rl.flash_attention(q.requires_grad_(), k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_dropout_is_refused():
    q, k, v, _ = make((7, 7), (4, 2), (8, 8))
    with pytest.raises(ValueError, match=r"dropout is not supported, expected dropout_p=0\.0, got 0\.1; apply"):
        rl.flash_attention(q, k, v, dropout_p=0.1)


def shaped(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q, K = (1, 4, 5, 8), (1, 2, 7, 8)
WRONG = {
    "no tensor": ([1.0], shaped(*K), shaped(*K), r"expected q to be a tensor \(B, H, S_q, D_k\), got list"),
    "three dims": (
        shaped(4, 5, 8),
        shaped(*K),
        shaped(*K),
        r"expected q of shape .* got \(4, 5, 8\); SDPA's dim order",
    ),
    "int": (
        shaped(*Q),
        shaped(*K, dtype=torch.int64),
        shaped(*K),
        "expected float64, .* got k in torch.int64",
    ),
    "batch": (shaped(2, 4, 5, 8), shaped(*K), shaped(*K), r"same batch size B \(dim 0\), got q \(2, 4, 5, 8\)"),
    "k, v heads": (shaped(*Q), shaped(*K), shaped(1, 4, 7, 8), r"same number of heads G \(dim 1\)"),
    "groups": (shaped(1, 3, 5, 8), shaped(*K), shaped(*K), "query heads must be divisible by the G key/value heads"),
    "no key heads": (shaped(*Q), shaped(1, 0, 7, 8), shaped(1, 0, 7, 8), "must be divisible by the G"),
    "S_k": (shaped(*Q), shaped(*K), shaped(1, 2, 6, 8), r"same sequence length S_k \(dim 2\)"),
    "D_k": (shaped(1, 4, 5, 9), shaped(*K), shaped(*K), r"same head dim D_k \(dim 3\)"),
    "D_v of 0": (shaped(*Q), shaped(*K), shaped(1, 2, 7, 0), "head dims must be at least 1"),
    "dtypes": (
        shaped(*Q),
        shaped(*K).half(),
        shaped(*K),
        r"one dtype, got torch.float32, torch.float16, .*\.to",
    ),
    "devices": (shaped(*Q), shaped(*K).to("meta"), shaped(*K), "on one device, got cpu, meta, cpu"),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_wrong_tensors(wrong):
    *tensors, message = WRONG[wrong]
    for function in (rl.flash_attention, rl.flash_forward):
        with pytest.raises(ValueError, match=message):
            function(*tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_q": 0}, "expected block_q to be an int >= 1, got 0"),
        ({"block_k": 2.0}, r"expected block_k to be an int >= 1, got 2\.0"),
        ({"block_k": True}, "expected block_k to be an int >= 1, got True"),
        ({"mask": "causal"}, r"expected a mask such as rl\.causal or rl\.mask\(fn\), got 'causal'"),
        ({"mask": rl.documents([3])}, "lengths must add up to the number of key positions"),
        ({"q_start": -1}, "expected q_start to be an int >= 0, got -1"),
        ({"q_start": 1.5}, r"expected q_start to be an int >= 0, got 1\.5"),
        ({"scale": "0.3"}, r"expected scale to be a finite number > 0, or None .*, got '0.3'"),
        ({"scale": -1.0}, r"expected scale to be a finite number > 0, or None .*, got -1.0"),
        ({"scale": float("nan")}, r"expected scale to be a finite number > 0, or None .*, got nan"),
    ],
)
def test_wrong_options(options, message):
    q, k, v, _ = make((7, 7), (4, 2), (8, 8))
    for function in (rl.flash_attention, rl.flash_forward):
        with pytest.raises(ValueError, match=message):
            function(q, k, v, **options)


@pytest.mark.parametrize("wrong", ["dout", "out", "lse"])
def test_backward_wants_what_the_forward_gave(wrong):
    q, k, v, dout = make((7, 9), (4, 2), (8, 6))
    out, lse = rl.flash_forward(q, k, v)
    given = {"dout": dout, "out": out, "lse": lse}
    given[wrong] = given[wrong][:, :, :-1]
    with pytest.raises(ValueError, match=rf"flash_backward: expected {wrong} .*\(2, 4, 7.* got \(2, 4, 6"):
        rl.flash_backward(given["dout"], q, k, v, given["out"], given["lse"])


def test_blocks_cover_every_index_once():
    for length in range(20):
        for size in (1, 3, 7, 64):
            covered = [i for s in flash._blocks(length, size) for i in range(length)[s]]
            assert covered == list(range(length))


@pytest.mark.parametrize(("S_q", "S_k"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("visible", [False, True])
def test_a_tile_of_an_empty_shard_is_attention_to_no_key(S_q, S_k, visible):
    q, k, v, dout = make((S_q, S_k), (4, 2), (5, 3))
    mask = torch.ones(S_q, S_k, dtype=torch.bool) if visible else None
    out, lse = flash.attend(q, k, v, mask, 0.4)
    assert out.shape == (2, 4, S_q, 3) and lse.shape == (2, 4, S_q)
    assert not out.any() and bool((lse == -torch.inf).all())
    grads = flash.attend_backward(dout, q, k, v, lse, torch.zeros_like(lse), mask, 0.4)
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (q, k, v), strict=True))

"""Softmax in two passes, one pass and blocks: equal to torch in float64, and never NaN unless a score is."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import relative

from ringlearn.softmax import blockwise, online, running_max_and_sum, two_pass

INF = torch.inf
HARD = (-INF, -1e4, 0.0, 80.0, 1e4)
WAYS = [two_pass, online]


def oracle(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's softmax and logsumexp in float64; p = 0 for rows without keys, where torch has NaN."""
    scores = scores.double()
    lse = torch.logsumexp(scores, -1)
    return torch.where((lse == -INF).unsqueeze(-1), 0.0, torch.softmax(scores, -1)), lse


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_equals_torch_in_float64(way, dtype, tolerance):
    scores = 3 * torch.randn(2, 3, 50, dtype=dtype)
    (p, lse), (want_p, want_lse) = way(scores), oracle(scores)
    assert (p.shape, lse.shape) == (scores.shape, scores.shape[:-1])
    assert p.dtype == lse.dtype == dtype
    assert relative(p, want_p) < tolerance and relative(lse, want_lse) < tolerance


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_give_float32_results(way, dtype):
    scores = torch.randn(4, 33).to(dtype)
    (p, lse), (want_p, want_lse) = way(scores), oracle(scores)
    assert p.dtype == lse.dtype == torch.float32
    assert relative(p, want_p) < 1e-6 and relative(lse, want_lse) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_every_triple_of_hard_scores_in_every_order(way):
    scores = torch.tensor(list(itertools.product(HARD, repeat=3)))
    (p, lse), (want_p, want_lse) = way(scores), oracle(scores)
    assert not p.isnan().any() and not lse.isnan().any()
    assert relative(p, want_p) < 1e-6 and relative(lse, want_lse) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_logits_of_1e4_keep_their_weights(way):
    # exp(s - lse) would be off by 1e-3 here, because float32 rounds lse to 1e-3; (s - m) is exact.
    scores = 1e4 + torch.randn(8, 20).round(decimals=1)
    assert relative(way(scores)[0], oracle(scores)[0]) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_ascending_descending_and_one_key(way):
    for scores in (torch.arange(9.0), torch.arange(9.0).flip(0), torch.tensor([7.0])):
        assert relative(way(scores)[0], oracle(scores)[0]) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_no_keys_and_no_rows(way):
    p, lse = way(torch.empty(2, 0))
    assert p.shape == (2, 0) and torch.equal(lse, torch.full((2,), -INF))
    p, lse = way(torch.empty(0, 3))
    assert p.shape == (0, 3) and lse.shape == (0,)


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_score_stays_in_its_row(way):
    p, lse = way(torch.tensor([[0.0, torch.nan], [0.0, 0.0]]))
    assert lse.isnan().tolist() == [True, False] and p.isnan().any(-1).tolist() == [True, False]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_torch_and_are_finite_for_rows_without_keys(way):
    scores = torch.randn(4, 6, dtype=torch.float64)
    scores[1, :3], scores[2, :] = -INF, -INF
    leaf, want_leaf = scores.clone().requires_grad_(), scores.clone()[[0, 1, 3]].requires_grad_()
    dp, dlse = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    p, lse = way(leaf)
    loss = (p * dp).sum() + (torch.where(lse == -INF, 0.0, lse) * dlse).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    want_loss = (torch.softmax(want_leaf, -1) * dp[[0, 1, 3]]).sum() + (want_leaf.logsumexp(-1) * dlse[[0, 1, 3]]).sum()
    (want,) = torch.autograd.grad(want_loss, want_leaf)
    assert torch.equal(grad[2], torch.zeros(6, dtype=torch.float64))
    assert relative(grad[[0, 1, 3]], want) < 1e-13


def test_the_one_pass_reads_each_score_once_and_keeps_none():
    reads = []

    def stream():
        for j in range(5):
            reads.append(j)
            yield torch.tensor([float(j), -INF])

    m, l = running_max_and_sum(stream())
    assert reads == [0, 1, 2, 3, 4]
    assert torch.equal(m, torch.tensor([4.0, -INF]))
    assert l[0] == pytest.approx(sum(torch.exp(torch.arange(-4.0, 1.0)).tolist())) and l[1] == 0


SIZES = [[97], [32, 32, 32, 1], [0, 50, 0, 47], [1] * 97, [96, 1], [1, 96]]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: str(sizes[:4]))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_blockwise_equals_the_whole_row(sizes, dtype, tolerance):
    scores, values = 2 * torch.randn(2, 3, 5, 97, dtype=dtype), torch.randn(2, 3, 97, 4, dtype=dtype)
    scores[0, 0, 0, :60], scores[1, 2, 4, :] = -INF, -INF
    out, lse = blockwise(scores, values, sizes)
    want_p, want_lse = oracle(scores)
    assert (out.shape, lse.shape) == ((2, 3, 5, 4), (2, 3, 5)) and out.dtype == lse.dtype == dtype
    assert relative(out, want_p @ values.double()) < tolerance and relative(lse, want_lse) < tolerance
    assert torch.equal(out[1, 2, 4], torch.zeros(4, dtype=dtype))


def test_blockwise_does_not_depend_on_the_order_of_the_blocks():
    scores, values, sizes = 5 * torch.randn(3, 10), torch.randn(10, 2), [4, 1, 0, 5]
    pieces = list(zip(scores.split(sizes, -1), values.split(sizes), sizes))
    whole = blockwise(scores, values, [10])
    for order in itertools.permutations(pieces):
        s, v, n = zip(*order)
        out, lse = blockwise(torch.cat(s, -1), torch.cat(v), n)
        assert relative(out, whole.out) < 1e-6 and relative(lse, whole.lse) < 1e-6


def test_blockwise_takes_one_row_shared_values_strided_inputs_and_mixed_dtypes():
    scores, values = torch.randn(7, 4, 3).transpose(0, 2), torch.randn(2, 7).T.bfloat16()  # (3, 4, 7), (7, 2)
    want = oracle(scores)[0] @ values.double()
    out, lse = blockwise(scores, values, (3, 4))
    assert out.dtype == torch.float32 and relative(out, want) < 1e-6
    row_out, row_lse = blockwise(scores[1, 2], values, [7])
    assert row_out.shape == (2,) and row_lse.shape == ()
    assert relative(row_out, want[1, 2]) < 1e-6
    assert blockwise(scores.double(), values, [7]).out.dtype == torch.float64


def test_blockwise_has_the_gradient_of_the_whole():
    scores = torch.randn(3, 8, dtype=torch.float64).masked_fill(torch.rand(3, 8) < 0.3, -INF)
    scores[0, :4] = -INF  # a block without keys for row 0
    leaves = scores.clone().requires_grad_(), torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(3, 2, dtype=torch.float64)
    got = torch.autograd.grad((blockwise(*leaves, [4, 1, 3]).out * dout).sum(), leaves)
    want = torch.autograd.grad(((torch.softmax(leaves[0], -1) @ leaves[1]) * dout).sum(), leaves)
    for mine, right in zip(got, want):
        assert relative(mine, right) < 1e-13


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: two_pass(torch.arange(3)), "must be a tensor of floats, got dtype torch.int64"),
        (lambda: online([1.0, 2.0]), "must be a tensor of floats, got list"),
        (lambda: two_pass(torch.tensor(1.0)), "got a single number"),
        (lambda: online(torch.tensor(1.0)), "got a single number"),
        (lambda: running_max_and_sum([]), "at least one score"),
        (lambda: blockwise(torch.ones(2, 5), torch.ones(5, 1), [2, 2]), "sum to the 5 keys, got [2, 2]"),
        (lambda: blockwise(torch.ones(2, 5), torch.ones(5, 1), [6, -1]), "0 or more"),
        (lambda: blockwise(torch.ones(2, 5), torch.ones(4, 1), [5]), "the same N keys"),
        (lambda: blockwise(torch.ones(5), torch.ones(5), [5]), "values (..., N, D)"),
        (lambda: blockwise(torch.ones(2, 5), torch.ones(3, 5, 1), [5]), "values (..., N, D)"),
        (lambda: blockwise(torch.ones(2, 4, 5), torch.ones(3, 5, 1), [5]), "values (..., N, D)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)

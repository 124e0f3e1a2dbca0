"""Merging partial results: the monoid, for every mix of finite and -inf lse, with its gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import relative

from ringlearn.partial import Partial, accumulation_dtype, identity, merge, merge_all, merge_tree, merge_weights
from ringlearn.partial.accumulate import Accumulator

INF = torch.inf
HARD = (-INF, -1e4, 0.0, 80.0, 1e4)


def oracle(parts: list[Partial]) -> Partial:
    """Softmax over the lses in float64, guarded where all are -inf, for any number of parts at once."""
    lses = torch.stack([part.lse.double() for part in parts])
    none = torch.isneginf(lses).all(0)
    weights = torch.where(none, 0.0, torch.softmax(torch.where(none, 0.0, lses), 0))
    lse = torch.where(none, -INF, torch.logsumexp(torch.where(none, 0.0, lses), 0))
    return Partial(sum(w.unsqueeze(-1) * part.out.double() for w, part in zip(weights, parts)), lse)


def assert_close(got: Partial, want: Partial, tolerance: float) -> None:
    assert relative(got.out, want.out) <= tolerance
    assert relative(got.lse, want.lse) <= tolerance


def part(lse: torch.Tensor, dim: int = 3) -> Partial:
    """A partial result with this lse; out is random, and 0 where no key was seen."""
    out = torch.randn(*lse.shape, dim, dtype=lse.dtype)
    return Partial(out.masked_fill((lse == -INF).unsqueeze(-1), 0.0), lse)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_grid_of_hard_lses_in_both_orders(dtype, tolerance):
    pairs = torch.tensor(list(itertools.product(HARD, repeat=2)), dtype=dtype)
    a, b = part(pairs[:, 0]), part(pairs[:, 1])
    ab, ba = merge(a, b), merge(b, a)
    assert torch.equal(ab.out, ba.out) and torch.equal(ab.lse, ba.lse)  # commutative to the last bit
    assert ab.out.dtype == ab.lse.dtype == dtype
    assert not ab.out.isnan().any() and not ab.lse.isnan().any()
    assert_close(ab, oracle([a, b]), tolerance)


def test_weights_sum_to_one_even_where_lse_is_rounded():
    lse, wa, wb = merge_weights(torch.full((1000,), 1e4), 1e4 + torch.rand(1000))
    assert torch.allclose(wa + wb, torch.ones(1000), atol=2e-7, rtol=0)


def test_the_identity_changes_nothing_to_the_last_bit():
    a = part(torch.tensor([0.5, -1e4, 1e4, -INF]))
    for merged in (merge(a, identity((4, 3))), merge(identity((4, 3)), a)):
        assert torch.equal(merged.out, a.out) and torch.equal(merged.lse, a.lse)
    both = merge(identity((4, 3)), identity((4, 3)))
    assert torch.equal(both.out, torch.zeros(4, 3)) and torch.equal(both.lse, torch.full((4,), -INF))


def test_identity_has_the_dtype_that_was_asked_for():
    empty = identity((2, 5, 3), torch.float64)
    assert empty.out.dtype == empty.lse.dtype == torch.float64 and empty.lse.shape == (2, 5)


def test_associative_in_every_order():
    triples = torch.tensor(list(itertools.product(HARD, repeat=3)), dtype=torch.float64)
    parts = [part(triples[:, i]) for i in range(3)]
    want = oracle(parts)
    for x, y, z in itertools.permutations(parts):
        # The inner merge rounds its lse to 1e4 * 2e-16, and the outer weights with it.
        assert_close(merge(merge(x, y), z), want, 1e-11)
        assert_close(merge(x, merge(y, z)), want, 1e-11)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_tree_equals_all_equals_the_oracle(count):
    parts = [part(3 * torch.randn(2, 3, 4, dtype=torch.float64)) for _ in range(count)]
    assert_close(merge_all(parts), oracle(parts), 1e-14)
    assert_close(merge_tree(parts), oracle(parts), 1e-14)
    assert_close(merge_all(iter(parts)), merge_tree(iter(parts)), 1e-14)


def test_merging_none_is_an_error_that_names_identity():
    for way in (merge_all, merge_tree):
        with pytest.raises(ValueError, match="identity"):
            way([])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outs_are_merged_in_float32(dtype):
    parts = [Partial(torch.randn(50, 8).to(dtype), torch.randn(50)) for _ in range(16)]
    for way in (merge_all, merge_tree):
        merged = way(parts)
        assert merged.out.dtype == merged.lse.dtype == torch.float32
        assert_close(merged, oracle(parts), 1e-6)
    single = merge_all(parts[:1])
    assert single.out.dtype == torch.float32 and torch.equal(single.out, parts[0].out.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_lse_is_merged_in_float32_too(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert accumulation_dtype(dtype) == wide
    merged = merge(*(Partial(torch.randn(5, 2).to(dtype), torch.randn(5).to(dtype)) for _ in range(2)))
    assert merged.out.dtype == merged.lse.dtype == wide


def test_a_float64_side_makes_the_result_float64():
    a, b = part(torch.randn(4)), part(torch.randn(4, dtype=torch.float64))
    assert merge(a, b).out.dtype == merge(b, a).lse.dtype == torch.float64


def test_gradients_equal_a_float64_oracle_and_are_finite_for_every_mix():
    pairs = torch.tensor(list(itertools.product(HARD, repeat=2)), dtype=torch.float64)
    a, b = part(pairs[:, 0]), part(pairs[:, 1])
    leaves = [x.clone().requires_grad_() for x in (a.out, a.lse, b.out, b.lse)]
    dout, dlse = torch.randn(25, 3, dtype=torch.float64), torch.randn(25, dtype=torch.float64)

    def gradients(way):
        out, lse = way(Partial(*leaves[:2]), Partial(*leaves[2:]))
        return torch.autograd.grad((out * dout).sum() + (lse.masked_fill(lse == -INF, 0.0) * dlse).sum(), leaves)

    for got, want in zip(gradients(merge), gradients(lambda x, y: oracle([x, y]))):
        assert got.isfinite().all()
        assert relative(got, want) < 1e-13


def test_gradcheck():
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (2,), (2, 3), (2,))]
    assert torch.autograd.gradcheck(lambda *x: tuple(merge(Partial(*x[:2]), Partial(*x[2:]))), leaves)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (Partial(torch.ones(2, 3), torch.ones(3)), None, "lse has the shape of out without its last dim"),
        (None, Partial(torch.ones(2, 3), torch.ones(2, 1)), "b must be"),
        (None, Partial(torch.ones(2, 4), torch.ones(2)), "the same queries"),
    ],
)
def test_shapes_that_do_not_fit_are_named(a, b, message):
    fine = Partial(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match=message):
        merge(a or fine, b or fine)


def tiles() -> list[tuple[slice, torch.Tensor]]:
    """What a ring adds, row ranges and lses: rows in part, an empty row, and everything at once."""
    lse = 3 * torch.randn(4, 2, 3, 8)
    lse[1, :, :, 2], lse[2, 0, 0, :] = -INF, -INF
    return [
        (slice(0, 8), lse[0]),
        (slice(2, 5), lse[1][..., 2:5]),
        (slice(4, 8), lse[2][..., 4:]),
        (slice(0, 8), lse[3]),
    ]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulator_in_place_equals_merge(first, dtype):
    parts = [(rows, Partial(part(lse).out.to(dtype), lse)) for rows, lse in tiles()[first:]]
    acc, want = Accumulator((2, 3, 8, 3), torch.float32), identity((2, 3, 8, 3))
    for rows, new in parts:
        padded = identity((2, 3, 8, 3))
        padded.out[..., rows, :], padded.lse[..., rows] = new.out.float(), new.lse
        want = merge(want, padded)
    with torch.no_grad():
        for rows, new in parts:
            acc.add(rows, Partial(new.out.clone(), new.lse.clone()))
    assert acc.partial.out.dtype == torch.float32
    assert_close(acc.partial, want, 1e-6)


def test_accumulator_takes_the_first_full_tile_over_and_updates_it_in_place():
    full, more = part(torch.randn(1, 1, 4)), part(torch.randn(1, 1, 4))
    acc, memory = Accumulator((1, 1, 4, 3), torch.float32), full.out.data_ptr()
    with torch.no_grad():
        acc.add(slice(0, 4), full)
        acc.add(slice(0, 4), more)
    assert acc.partial.out.data_ptr() == memory


def test_accumulator_out_of_place_has_the_gradient_of_merge():
    leaves = [torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    acc = Accumulator((1, 1, 4, 2), torch.float64)
    acc.add(slice(0, 4), Partial(leaves[0], lses[0]))
    acc.add(slice(1, 3), Partial(leaves[1][..., 1:3, :], lses[1][..., 1:3]))
    inner = merge(
        Partial(leaves[0][..., 1:3, :], lses[0][..., 1:3]), Partial(leaves[1][..., 1:3, :], lses[1][..., 1:3])
    )
    want = torch.cat([leaves[0][..., :1, :], inner.out, leaves[0][..., 3:, :]], -2)
    want_lse = torch.cat([lses[0][..., :1], inner.lse, lses[0][..., 3:]], -1)
    assert_close(acc.partial, Partial(want, want_lse), 1e-15)
    dout = torch.randn_like(want)
    for got, right in zip(
        torch.autograd.grad((acc.partial.out * dout).sum(), leaves + lses),
        torch.autograd.grad((want * dout).sum(), leaves + lses),
    ):
        assert relative(got, right) < 1e-14


def test_accumulator_keeps_the_graph_when_only_an_lse_needs_a_gradient():
    acc, lse = Accumulator((1, 1, 4, 2), torch.float32), torch.zeros(1, 1, 4, requires_grad=True)
    acc.add(slice(None), Partial(torch.ones(1, 1, 4, 2), torch.zeros(1, 1, 4)))
    acc.add(slice(None), Partial(torch.zeros(1, 1, 4, 2), lse))
    assert acc.partial.out.shape == (1, 1, 4, 2) and acc.partial.lse.shape == (1, 1, 4)
    (grad,) = torch.autograd.grad(acc.partial.out.sum(), lse)
    assert torch.allclose(grad, torch.full((1, 1, 4), -0.5))  # out = 1 - p, twice, with p = 1/2 and dp/dlse = 1/4


def test_accumulator_of_nothing_is_the_identity():
    acc = Accumulator((1, 2, 3, 4), torch.float64)
    assert torch.equal(acc.partial.lse, torch.full((1, 2, 3), -INF, dtype=torch.float64))
    assert torch.equal(acc.partial.out, torch.zeros(1, 2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_accumulator_that_knows_how_many_come_rounds_once(count, full):
    """In bfloat16: as near to the merge in float64 as one rounding of its result, and half as many bytes until then."""
    rows = [slice(0, 8) if full or i % 2 else slice(2, 6) for i in range(count)]
    parts = [part(torch.randn(2, 3, 8)[..., r]) for r in rows]
    parts = [Partial(p.out.bfloat16(), p.lse) for p in parts]
    acc, want = Accumulator((2, 3, 8, 3), torch.float32, parts=count, final=torch.bfloat16), identity((2, 3, 8, 3))
    with torch.no_grad():
        for r, p in zip(rows, parts, strict=True):
            padded = identity((2, 3, 8, 3))
            padded.out[..., r, :], padded.lse[..., r] = p.out.float(), p.lse
            want = merge(want, padded)
            acc.add(r, Partial(p.out.clone(), p.lse.clone()))
    assert acc.partial.out.dtype == torch.bfloat16 and acc.partial.lse.dtype == torch.float32
    assert (
        torch.equal(acc.partial.lse, want.lse) or relative(acc.partial.lse.nan_to_num(0), want.lse.nan_to_num(0)) < 1e-6
    )
    assert relative(acc.partial.out.double(), want.out.double()) < 2**-8


def test_accumulator_of_two_tiles_in_bfloat16_makes_no_float32_copy_of_the_first():
    acc = Accumulator((1, 1, 4, 3), torch.float32, parts=2, final=torch.bfloat16)
    first, more = part(torch.randn(1, 1, 4)), part(torch.randn(1, 1, 4))
    with torch.no_grad():
        acc.add(slice(0, 4), Partial(first.out.bfloat16(), first.lse))
        assert acc.partial.out.dtype == torch.bfloat16
        acc.add(slice(0, 4), Partial(more.out.bfloat16(), more.lse))
    assert acc.partial.out.dtype == torch.bfloat16


def test_accumulator_that_waits_for_nothing_gives_zeros_in_the_final_dtype():
    partial = Accumulator((1, 1, 4, 3), torch.float32, parts=0, final=torch.bfloat16).partial
    assert partial.out.dtype == torch.bfloat16 and not partial.out.any() and bool((partial.lse == -INF).all())

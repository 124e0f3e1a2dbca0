"""Masks: what they say about positions, how they combine, and their integer form."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ringlearn as rl
from ringlearn.fingerprint import described
from ringlearn.masks import Bound, KeyInterval

MASKS = [
    rl.full,
    rl.causal,
    rl.sliding_window(1),
    rl.sliding_window(5),
    rl.documents([3, 0, 4, 9, 24]),
    rl.causal & rl.sliding_window(4),
    rl.causal & rl.documents([10, 10, 20]),
    rl.documents([10, 30]) | rl.sliding_window(3),
    rl.causal & (rl.documents([20, 20]) | rl.sliding_window(6)),
    (rl.causal & rl.sliding_window(9)) | rl.documents([4] * 10),
]


def by_loop(mask_of, S):
    return torch.tensor([[mask_of(i, j) for j in range(S)] for i in range(S)])


def test_masks_say_what_their_names_say():
    S = 12
    document = [0] * 3 + [1] * 4 + [2] * 5
    cases = {
        rl.full: lambda i, j: True,
        rl.causal: lambda i, j: j <= i,
        rl.sliding_window(3): lambda i, j: abs(i - j) < 3,
        rl.documents([3, 4, 0, 5]): lambda i, j: document[i] == document[j],
        rl.mask(lambda q, k: (q + k) % 3 == 0): lambda i, j: (i + j) % 3 == 0,
    }
    for mask, truth in cases.items():
        assert torch.equal(mask.dense(S, S), by_loop(truth, S)), mask
    a, b = rl.causal, rl.sliding_window(2)
    assert torch.equal((a & b).dense(S, S), a.dense(S, S) & b.dense(S, S))
    assert torch.equal((a | b).dense(S, S), a.dense(S, S) | b.dense(S, S))


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_pieces_are_the_mask_itself(mask):
    assert mask.exact
    S, dense = 40, mask.dense(40, 40)
    for start, stop in [(0, S), (7, 23), (39, 40)]:
        pieces = mask.pieces(start, stop)
        assert [p.start for p in pieces[1:]] == [p.stop for p in pieces[:-1]]
        assert (pieces[0].start, pieces[-1].stop) == (start, stop)
        for piece in pieces:
            for p in range(piece.start, piece.stop):
                row = torch.zeros(S, dtype=torch.bool)
                row[max(0, piece.lo.at(p)) : max(0, piece.hi.at(p))] = True
                assert torch.equal(row, dense[p]), (p, piece)


def test_a_mask_of_ones_own_makes_a_combination_inexact():
    own = rl.mask(lambda q, k: q != k)
    assert not own.exact and not (rl.causal & own).exact and not (own | rl.causal).exact


def test_equal_masks_are_equal_objects_and_have_one_signature():
    assert rl.sliding_window(4) == rl.sliding_window(4) and hash(rl.documents([1, 2])) == hash(rl.documents((1, 2)))
    assert rl.documents([1] * 9 + [2]).signature() != rl.documents([2] + [1] * 9).signature()
    assert (rl.causal & rl.sliding_window(4)).signature() != (rl.causal & rl.sliding_window(5)).signature()

    def windowed(width):
        return rl.mask(lambda q, k: (q - k).abs() < width)

    assert windowed(3).signature() == windowed(3).signature()
    assert windowed(3).signature() != windowed(4).signature()


@pytest.mark.parametrize("width", [0, -3, 2.0, True, None])
def test_windows_that_make_no_sense(width):
    with pytest.raises(ValueError, match=r"sliding_window: expected a width in tokens, an int >= 1 .*got"):
        rl.sliding_window(width)


@pytest.mark.parametrize("width", [float("inf"), None])
def test_no_window_is_no_mask(width):
    with pytest.raises(ValueError, match="omit the window where there is none, mask=rl.causal or rl.full"):
        rl.sliding_window(width)


def test_a_window_wider_than_everything():
    wide = rl.causal & rl.sliding_window(2**70)
    assert torch.equal(wide.dense(9, 9), rl.causal.dense(9, 9))
    q = torch.randn(1, 1, 9, 4)
    shards, own = rl.SimulatedWorld(2).shard(q, q, q), rl.mask(lambda q, k: (q - k) % 2 == 0)
    for a, b in (
        (wide, rl.causal),
        (wide & own, rl.causal & own),
        (wide & rl.documents([4, 5]), rl.causal & rl.documents([4, 5])),
    ):
        assert torch.equal(rl.ring_attention(*shards, mask=a).unshard(), rl.ring_attention(*shards, mask=b).unshard())


@pytest.mark.parametrize("make", [np.int64, np.int32, torch.tensor])
def test_integers_of_any_kind(make):
    assert rl.sliding_window(make(4)) == rl.sliding_window(4)
    assert rl.documents([make(5), make(15)]) == rl.documents([5, 15])
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 20, 4)
    out = []
    for P, start in ((2, 12), (make(2), make(12))):
        shards = rl.SimulatedWorld(P).shard(q, k, k, layout=rl.zigzag)
        out.append(rl.ring_attention(*shards, mask=rl.causal, q_start=start).unshard())
    assert torch.equal(*out)
    assert rl.zigzag.ranges(make(20), make(2)) == rl.zigzag.ranges(20, 2)
    assert torch.equal(rl.flash_attention(q, k, k, rl.causal, q_start=make(12), block_q=make(4)),
                       rl.flash_attention(q, k, k, rl.causal, q_start=12, block_q=4))  # fmt: skip


def test_lengths_as_arrays_and_scales_of_any_kind():
    assert rl.documents(np.diff([0, 5, 20])) == rl.documents(torch.tensor([5, 15])) == rl.documents([5, 15])
    assert rl.documents(torch.tensor([0, 5, 20], dtype=torch.int32).diff()) == rl.documents((5, 15))
    assert rl.documents(np.array([[5, 15], [8, 12]])) == rl.documents([[5, 15], [8, 12]])
    q = torch.randn(1, 1, 9, 4)
    shards = rl.SimulatedWorld(2).shard(q, q, q)
    for scale in (np.float32(2), np.int64(2), np.float64(2)):
        assert torch.equal(
            rl.ring_attention(*shards, scale=scale).unshard(), rl.ring_attention(*shards, scale=2).unshard()
        )


def test_cumulative_lengths_are_recognised():
    with pytest.raises(ValueError, match=r"these look like cu_seqlens.*\.diff\(\)"):
        rl.documents(torch.tensor([0, 5, 20])).check(20, 20)


@pytest.mark.parametrize("call", [
    lambda dense: rl.ring_attention(*rl.SimulatedWorld(2).shard(*[torch.randn(1, 1, 99, 4)] * 3), mask=dense),
    lambda dense: rl.flash_attention(*[torch.randn(1, 1, 99, 4)] * 3, mask=dense),
    lambda dense: rl.plan_tiles(dense, (range(99),), (range(99),)),
    lambda dense: rl.kernels.explain(*[torch.randn(1, 1, 99, 4)] * 3, mask=dense),
    lambda dense: rl.mask(dense),
    lambda dense: rl.documents(dense),
])  # fmt: skip
def test_a_dense_mask_is_not_printed_whole(call):
    with pytest.raises(ValueError) as caught:
        call(torch.ones(99, 99, dtype=torch.bool))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("lengths", [[-1, 2], [1.5], 7, ["a"], None])
def test_lengths_that_make_no_sense(lengths):
    with pytest.raises(ValueError, match=r"documents: expected .*got"):
        rl.documents(lengths)


def test_lengths_must_add_up():
    with pytest.raises(ValueError, match="lengths that add up to 7, 8 keys"):
        rl.documents([3, 4]).check(8, 8)
    with pytest.raises(ValueError, match="queries up to position 9"):
        (rl.causal & rl.documents([3, 4])).check(10, 7)


@pytest.mark.parametrize("fn, message", [
    (lambda q, k: q - k, "must return a bool tensor .*got a torch.int64 tensor"),
    (lambda q, k: True if q > k else False, "neither true nor false as a whole.*combine comparisons with &"),
    (lambda q, k: k <= q and q < 3, "neither true nor false as a whole"),
    (lambda q, k: True, "must return a bool tensor .*got a bool"),
    (lambda q, k: torch.ones(3, 7, dtype=torch.bool), r"must return a tensor that broadcasts to \(4, 4\), got"),
])  # fmt: skip
def test_functions_that_are_no_mask(fn, message):
    with pytest.raises(ValueError, match=message):
        rl.mask(fn).dense(4, 4)


def test_what_is_no_mask_is_refused():
    with pytest.raises(ValueError, match="expected a function of"):
        rl.mask(3)
    with pytest.raises(ValueError, match="mask & expected another mask, got function"):
        rl.causal & (lambda q, k: q == k)
    with pytest.raises(ValueError, match="~causal: masks combine with & and |"):
        _ = ~rl.causal
    with pytest.raises(
        ValueError, match=r"a function of two arguments, .*got <lambda>\(b, h, q_idx, kv_idx\); a mask_mod"
    ):
        rl.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


class Window:
    def __init__(self, width, name):
        self.width, self.name = width, name

    def __call__(self, q, k):
        return q - k < self.width

    def both(self, q, k):
        return (q - k).abs() < self.width


def threshold(q, k, width):
    return q - k < width


def taking_in(value):
    return rl.mask(lambda q, k: value[q] == value[k])


DIFFERENT = {
    "default": lambda n: rl.mask(lambda q, k, width=n: q - k < width),
    "keyword default": lambda n: rl.mask(lambda q, k, *, width=n: q - k < width),
    "partial": lambda n: rl.mask(functools.partial(threshold, width=n)),
    "object": lambda n: rl.mask(Window(n, "")),
    "method": lambda n: rl.mask(Window(n, "").both),
    "a tensor too long to be printed": lambda n: taking_in(torch.arange(5000) == 2000 + n),
    "a tuple": lambda n: taking_in((0, n)),
    "inner function": lambda n: (lambda inner: rl.mask(lambda q, k: inner(q - k)))(lambda d: d < n),
    "attribute of what is taken in": lambda n: (lambda w: rl.mask(lambda q, k: q - k < w.width))(Window(n, "")),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_own_masks_that_differ_have_different_signatures(kind):
    make = DIFFERENT[kind]
    assert make(3).signature() != make(4).signature()
    assert make(3).signature() == make(3).signature()


def test_signatures_hold_no_addresses_and_nothing_that_the_mask_does_not_use():
    """What ranks compare must not depend on where an object lies, nor on a rank number that it happens to carry."""
    text = described(rl.mask(lambda q, k: (lambda d: d < 3)(q - k)).fn) + described(DIFFERENT["inner function"](3).fn)
    assert " at 0x" not in text
    assert rl.mask(Window(3, "rank 0")).signature() == rl.mask(Window(3, "rank 1")).signature()

    def even(n, k):
        return n == 0 or odd(n - 1, k)

    def odd(n, k):
        return n != 0 and even(n - 1, k)

    assert rl.mask(even).signature() == rl.mask(even).signature()


def test_an_object_without_a_hash_is_a_mask_too():
    class Unhashable(Window):
        __hash__ = None

    q = torch.randn(1, 1, 6, 4)
    shards = rl.SimulatedWorld(2).shard(q, q, q)
    mask = rl.mask(Unhashable(2, ""))
    assert torch.equal(rl.ring_attention(*shards, mask=mask).unshard(),
                       rl.ring_attention(*shards, mask=rl.mask(Window(2, ""))).unshard())  # fmt: skip
    assert mask.name == "Unhashable"


@dataclass(frozen=True)
class Ahead(rl.Mask):
    """A query sees two keys, and not its own: exact, but not in a union, which may have a gap."""

    exact = True

    def __call__(self, q_pos, k_pos):
        return (k_pos >= q_pos + 3) & (k_pos < q_pos + 5)

    def pieces(self, start, stop):
        return [KeyInterval(start, stop, Bound(1, 3), Bound(1, 5))]


@pytest.mark.parametrize("other", [rl.sliding_window(2), rl.causal & rl.documents([9, 14])], ids=repr)
def test_a_union_with_a_gap_is_no_interval(other):
    q, k, v = (torch.randn(1, 2, 23, 4, dtype=torch.float64) for _ in range(3))
    mask = Ahead() | other
    assert Ahead().exact and not mask.exact and (other | rl.causal).exact
    out = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v, layout=rl.zigzag), mask=mask).unshard()
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(23, 23)), atol=1e-12)


@dataclass(frozen=True)
class OwnBlockAndTheOneBefore(rl.Mask):
    """A mask that says only what it is."""

    n: int

    def __call__(self, q_pos, k_pos):
        return (k_pos // self.n <= q_pos // self.n) & (k_pos // self.n >= q_pos // self.n - 1)


@pytest.mark.parametrize("mask", [OwnBlockAndTheOneBefore(5), rl.causal & OwnBlockAndTheOneBefore(5)], ids=repr)
def test_a_new_mask_needs_its_predicate_only(mask):
    q, k, v = (torch.randn(1, 2, 23, 4, dtype=torch.float64) for _ in range(3))
    out = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v, layout=rl.zigzag), mask=mask).unshard()
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(23, 23)), atol=1e-12)

"""Batches whose rows are packed differently: documents of each row, against dense attention in float64."""

from functools import partial

import pytest
import torch
from oracle import dense_attention, relative

import ringlearn as rl
from ringlearn.attention import ALL_GATHER

S, LENGTHS = 21, [[5, 16], [8, 0, 13], [21]]
ROWS = rl.documents(LENGTHS)
MASKS = {
    "documents": ROWS,
    "causal": rl.causal & ROWS,
    "a window": rl.causal & rl.sliding_window(4) & ROWS,
    "a union": rl.causal & (ROWS | rl.sliding_window(3)),
    "two kinds of documents": rl.documents([10, 11]) & ROWS,
    "a mask of one's own": rl.mask(lambda q, k: (q - 2 * k) % 3 != 0) & ROWS,
}
STRATEGIES = {
    "ring": (rl.ring_attention, 3),
    "ring of more ranks": (rl.ring_attention, 5),
    "ring of one": (rl.ring_attention, 1),
    "all-gather": (rl.all_gather_attention, 3),
    "ulysses": (rl.ulysses_attention, 2),
    "ring self-attention": (rl.ring_self_attention, 3),
    "double ring": (rl.double_ring_attention, (2, 2)),
    "hybrid": (rl.hybrid_attention, (2, 2)),
    "hybrid over all-gather": (partial(rl.hybrid_attention, outer=ALL_GATHER), (2, 2)),
}


def inputs(B=3, S_q=S, dtype=torch.float64):
    shapes = ((4, S_q, 6), (2, S, 6), (2, S, 5))
    return [torch.randn(B, h, s, d, dtype=dtype, requires_grad=True) for h, s, d in shapes]


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_has_documents_of_its_own(strategy, mask, layout):
    (attention, P), mask = STRATEGIES[strategy], MASKS[mask]
    q, k, v = inputs()
    shards = rl.SimulatedWorld(P, count_memory=False).shard(q, k, v, layout=layout)
    found = [x.unshard() for x in attention(*shards, mask=mask, return_lse=True)]
    wanted = dense_attention(q, k, v, mask)
    given = [torch.randn_like(x).masked_fill(x == -torch.inf, 0.0) for x in wanted]
    grads = [torch.autograd.grad(x, (q, k, v), given, retain_graph=True) for x in (found, wanted)]
    for got, want in zip((*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        assert got.dtype == torch.float64 and relative(got, want) < 1e-12


def test_a_row_is_what_it_would_be_alone():
    q, k, v = inputs()
    shards = rl.SimulatedWorld(3).shard(q, k, v, layout=rl.zigzag)
    out = rl.ring_attention(*shards, mask=rl.causal & ROWS).unshard()
    for b, lengths in enumerate(LENGTHS):
        alone = dense_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], rl.causal & rl.documents(lengths))[0]
        assert relative(out[b : b + 1], alone) < 1e-12


def test_the_last_queries_of_a_context():
    q, k, v = inputs(S_q=7)
    shards = rl.SimulatedWorld(3).shard(q, k, v, layout=rl.zigzag)
    out = rl.ring_attention(*shards, mask=rl.causal & ROWS, q_start=14).unshard()
    assert relative(out, dense_attention(q, k, v, rl.causal & ROWS, q_start=14)[0]) < 1e-12


def test_equal_rows_are_the_mask_of_one():
    q, k, v = inputs()
    shards = rl.SimulatedWorld(2).shard(q, k, v, layout=rl.zigzag)
    one = rl.ring_attention(*shards, mask=rl.causal & rl.documents([5, 16])).unshard()
    each = rl.ring_attention(*shards, mask=rl.causal & rl.documents([[5, 16]] * 3)).unshard()
    assert relative(each, one) < 1e-12


def test_flash_attention_and_layers_take_them():
    q, k, v = inputs()
    out = rl.flash_attention(q, k, v, mask=rl.causal & ROWS, block_q=8, block_k=8)
    assert relative(out, dense_attention(q, k, v, rl.causal & ROWS)[0]) < 1e-12
    layer, x = rl.nn.Attention(16, 4, mask=rl.causal & ROWS).double(), torch.randn(3, S, 16, dtype=torch.float64)
    whole = layer(x)
    assert relative(layer(rl.SimulatedWorld(3).shard(x, layout=rl.zigzag)).unshard(), whole) < 1e-12
    layer.mask = rl.causal & rl.documents([8, 13])
    assert relative(whole[1:2], layer(x[1:2])) < 1e-12


def test_what_the_mask_says_of_itself():
    dense = ROWS.dense(S, S)
    assert dense.shape == (3, 1, S, S) and (rl.causal & ROWS).rows == ROWS.rows == 3 and rl.causal.rows is None
    for b, lengths in enumerate(LENGTHS):
        assert torch.equal(dense[b, 0], rl.documents(lengths).dense(S, S))
    assert rl.documents(torch.tensor([[5, 16], [8, 13]])) == rl.documents([[5, 16], [8, 13]])
    assert repr(ROWS) == "documents([[5, 16], [8, 0, 13], [21]])"
    assert rl.documents([[2, 1], [3]]).signature() != rl.documents([[2], [1, 3]]).signature()
    assert rl.documents([[2, 1], [3]]).signature() != rl.documents([[3], [2, 1]]).signature()


def test_positions_in_the_documents_of_each_row():
    positions = rl.positions_in_documents(torch.arange(5), [[2, 3], [5]])
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    of_a_rank = rl.positions_in_documents(torch.tensor([1, 4]), [[2, 3], [5]])
    assert of_a_rank.tolist() == [[1, 2], [1, 4]]


@pytest.mark.parametrize("call, words", [
    (lambda x: rl.ring_attention(*rl.SimulatedWorld(2).shard(x, x, x), mask=ROWS), "a mask for the 2 rows .* for 3"),
    (lambda x: rl.ring_attention(*rl.SimulatedWorld(2).shard(x, x, x), mask=rl.documents([[5], [4]])),
     "row 1 of the batch: documents: the lengths must add up"),
    (lambda x: rl.documents([[1], [2]]) & ROWS, "for equally many rows of a batch, got 2 and 3"),
    (lambda x: rl.documents([5, [3, 2]]), "got both in .* one list for each row"),
    (lambda x: rl.documents([[5], [3.0]]), "lengths that are ints >= 0, got 3.0"),
    (lambda x: rl.plan(ROWS, (range(S),), (range(S),)), "plan one row"),
    (lambda x: rl.dilated_attention(x, x, x, [4], [2], mask=rl.documents([[5], [2, 3]])), "expected mask=rl.full or"),
    (lambda x: rl.zigzag_per_document(LENGTHS), "zigzag_per_document: a layout deals all rows .* alike"),
    (lambda x: rl.positions_in_documents(torch.zeros(2, 5, dtype=torch.int64), LENGTHS), r"positions \(n,\) or \(3, n"),
])  # fmt: skip
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.randn(2, 2, 5, 4))

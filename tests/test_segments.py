"""Segments: what kernels of variable length are told to compute, against the dense mask."""

import itertools
import random
from dataclasses import replace

import fa2_double
import fa4_double
import pytest
import torch
from oracle import dense_attention, relative

import ringlearn as rl
from ringlearn.kernels.packing import most_columns
from ringlearn.layouts import Dealt, count, positions_of
from ringlearn.partial import Partial
from ringlearn.partial.accumulate import Accumulator
from ringlearn.tiles import Kind, Tile, plan_steps
from ringlearn.tiles.segments import calls

LAYOUTS = {"contiguous": rl.contiguous, "zigzag": rl.zigzag, "striped": rl.striped}


def lengths_of(S, n, seed=0):
    """n documents, log-normal, some of them empty."""
    sample = random.Random(seed)
    weights = [sample.lognormvariate(0, 1) for _ in range(n)]
    lengths = [int(w / sum(weights) * S) for w in weights]
    lengths[sample.randrange(n)] += S - sum(lengths)
    return lengths


def masks(S):
    docs, many = rl.documents(lengths_of(S, 4)), rl.documents(lengths_of(S, max(1, S // 4), 1))
    windows = {w: rl.sliding_window(w) for w in (1, 3, 9, max(1, S // 3), 2 * S)}
    return {
        "full": rl.full,
        "causal": rl.causal,
        "documents": docs,
        "causal documents": rl.causal & docs,
        "many documents": rl.causal & many,
        "documents of one token": rl.documents([1] * S),
        **{f"window {w}": window for w, window in windows.items()},
        **{f"causal window {w}": rl.causal & window for w, window in windows.items()},
        **{f"documents, window {w}": rl.causal & docs & window for w, window in windows.items()},
        "many documents, window 3": many & rl.sliding_window(3),
        "causal or window": rl.causal | rl.sliding_window(4),
        "documents or window": rl.causal & (docs | rl.sliding_window(3)),
    }


def check(mask, q, k):
    """All that the calls see is what the mask lets through, each pair once. Gives the calls."""
    found = calls(mask, q, k)
    covered = torch.zeros(count(q), count(k), dtype=torch.int64)
    for call in found:
        visible = call.visible()
        covered[call.q, call.k] += visible
        assert int(visible.sum()) == call.area
        rows, columns = (call.q, call.starts.rows), (call.k, call.starts.columns)
        for (where, starts), longest in zip((rows, columns), call.longest, strict=True):
            assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == where.stop - where.start
            assert int(starts.diff().min()) >= 0 and int(starts.diff().max()) == longest
        blind = ~visible.any(-1)
        assert call.gaps == bool(blind.any())
        # Rows that see nothing are in segments without columns: what is left has a key for each row.
        for a, b, c, d in zip(*(t[i:][: len(t) - 1] for t in (call.starts.rows, call.starts.columns) for i in (0, 1))):
            assert (c == d) == bool(blind[a:b].any()) or a == b
        assert call.left is None or call.left >= 0
        assert call.right is None or call.right >= 0
        # FlashAttention 2 takes some numbers for no limit, and none for some number.
        longest = most_columns(Tile(call.q, call.k, Kind.SEGMENTS, call=call))
        left, right = fa2_double.limits(False, call.left, call.right, longest)
        if (left, right) != (call.left, call.right):
            assert torch.equal(replace(call, left=left, right=right).visible(), visible)
    dense = mask(positions_of(q)[:, None], positions_of(k)[None, :]).expand(count(q), count(k))
    assert torch.equal(covered, dense.long())
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("P", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("S", [1, 2, 7, 16, 40, 61])
def test_equal_to_the_dense_mask(S, layout, P):
    ranges = LAYOUTS[layout].ranges(S, P)
    for mask in masks(S).values():
        for q, k in itertools.product(ranges, ranges):
            check(mask, q, k)


@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_documents_dealt_out_one_by_one(P, monkeypatch):
    for seed, n in ((0, 3), (1, 9), (2, 30)):
        lengths = lengths_of(200, n, seed)
        ranges = rl.zigzag_per_document(lengths).ranges(200, P)
        for window in (None, 7, 50):
            mask = rl.causal & rl.documents(lengths)
            mask = mask if window is None else mask & rl.sliding_window(window)
            found = [check(mask, q, k) for q, k in itertools.product(ranges, ranges)]
            assert window or max(map(len, found)) == 1
    # A training step has fresh documents, thousands of them: no object is made for any.
    monkeypatch.setattr(Dealt, "_ranges", property(lambda shard: pytest.fail("planning has looked at a range")))
    ranges = rl.zigzag_per_document([*lengths, 1, 2]).ranges(203, P)
    assert all(plan_steps(rl.causal & rl.documents([*lengths, 1, 2]), mine, ranges) for mine in ranges)


@pytest.mark.parametrize("layout, most", [("contiguous", 1), ("striped", 1), ("zigzag", 2)])
def test_one_call_a_step(layout, most):
    """Two for a zigzag rank whose two blocks of rows share key columns. Whatever the lengths."""
    S = 1024
    for P in (2, 4):
        ranges = LAYOUTS[layout].ranges(S, P)
        for n, width in itertools.product((1, 8, 300), (None, 5, 100, 700)):
            for lengths in (lengths_of(S, n), [S // n] * n + [S % n]):
                mask = rl.causal & rl.documents(lengths)
                mask = mask if width is None else mask & rl.sliding_window(width)
                found = [calls(mask, q, k) for q, k in itertools.product(ranges, ranges)]
                assert max(map(len, found)) <= most, (P, n, width)
                visible = int(mask.dense(S, S).sum())
                assert sum(call.area for step in found for call in step) == visible


def test_ranges_that_overlap_in_part():
    """A block of queries in which keys begin or end."""
    q = range(5, 20), range(30, 40)
    for k in ((range(0, 12), range(15, 40)), (range(7, 9), range(18, 33)), (range(0, 2), range(21, 35))):
        for mask in masks(40).values():
            check(mask, q, k)
            check(mask, k, q)


def test_queries_that_begin_later():
    mask = rl.causal & rl.documents([30, 50, 20]) & rl.sliding_window(20)
    check(mask, (range(60, 100),), (range(0, 100),))
    check(mask, (range(60, 61),), (range(0, 100),))


def test_what_is_not_planned():
    mine = rl.causal & rl.mask(lambda q, k: (q + k) % 2 == 0)
    assert calls(mine, (range(9),), (range(9),)) is None
    assert calls(rl.causal, (range(0, 9),), (range(0, 9, 2),)) is None
    assert calls(rl.causal, (), (range(9),)) == calls(rl.causal, (range(9),), ()) == ()
    assert calls(rl.causal, (range(3),), (range(3, 6),)) == ()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_kernel_of_variable_length_that_is_told_so_computes_attention(layout, monkeypatch):
    """The double of FlashAttention 4 gets rows and columns as they lie in memory; calls merge to dense attention."""
    fa4_double.install(monkeypatch)
    S, P, scale = 96, 3, 0.3
    ranges = LAYOUTS[layout].ranges(S, P)
    q, k, v = (torch.randn(1, heads, S, 8, dtype=torch.float64) for heads in (4, 2, 2))
    for name, mask in masks(S).items():
        want = dense_attention(q, k, v, mask, scale)
        for rank, mine in enumerate(ranges):
            rows = positions_of(mine)
            result = Accumulator((1, 4, len(rows), 8), torch.float64)
            for theirs in ranges:
                for call in calls(mask, mine, theirs):
                    columns = positions_of(theirs)[call.k]
                    args = (t[0, :, at].transpose(0, 1) for t, at in ((q, rows[call.q]), (k, columns), (v, columns)))
                    out, lse, *_ = fa4_double._flash_attn_fwd(
                        *(t.contiguous() for t in args),
                        cu_seqlens_q=call.starts.rows,
                        cu_seqlens_k=call.starts.columns,
                        max_seqlen_q=call.longest[0],
                        max_seqlen_k=call.longest[1],
                        softmax_scale=scale,
                        window_size_left=call.left,
                        window_size_right=call.right,
                        return_lse=True,
                    )
                    result.add(call.q, Partial(out.transpose(0, 1)[None], lse[None]))
            for got, dense in zip(result.partial, want, strict=True):
                assert relative(got, dense[:, :, rows]) < 1e-12, (name, rank)

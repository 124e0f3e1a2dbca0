"""The split-K kernel against the readable one, on a GPU; or with Triton's interpreter, TRITON_INTERPRET=1 pytest ..."""

import os

import pytest
import torch
from oracle import relative
from pairwise import pairwise

import ringlearn as rl

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from ringlearn.attention.decoding import gpu, local  # noqa: E402
from ringlearn.attention.decoding.call import visible_slots  # noqa: E402
from ringlearn.attention.decoding.newest import own_rows  # noqa: E402

# The interpreter takes the bits of a bfloat16 for an integer in a matrix product.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID = {
    "lengths": [(0, 1), (5, 300), (257, 64)],
    "n": [1, 2, 5],
    "heads": [(4, 4), (6, 2), (16, 1)],
    "dims": [(16, 16), (24, 5), (128, 128)],
    "window": [None, 1, 70],
    "softcap": [None, 2.0],
    "page": [None, 7, 128],
    "splits": [1, 3, None],
    "rank": [(0, 1), (1, 3), (2, 3)],
    "interleave": [1, 16],
    "dtype": [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])],
}


@pytest.mark.parametrize("case", pairwise(GRID), ids=lambda case: "-".join(map(str, case.values())))
def test_equals_the_readable_kernel(case):
    (H, G), (D, D_v), (rank, P), n = case["heads"], case["dims"], case["rank"], case["n"]
    world = rl.SimulatedWorld(P, device=DEVICE, count_memory=False)
    cache = rl.KVCache(
        world, 2, G, D, 300, v_dim=D_v, interleave=case["interleave"], dtype=case["dtype"], page=case["page"]
    )
    for t in (*cache.k, *cache.v):
        t.fill_(torch.nan)  # what was never written may be anything
    k, v = (torch.randn(2, G, 300, d, dtype=case["dtype"], device=DEVICE) for d in (D, D_v))
    cache.append(k, v, case["lengths"])
    q = torch.randn(2, H, n, D, dtype=case["dtype"], device=DEVICE)
    first, last = (x.to(DEVICE) for x in visible_slots(cache.ownership, rank, cache.lengths, n, case["window"]))
    start, stop = int(first.min()), int(last.max())
    more = 0.3, case["softcap"]
    wanted = local.attend(q, cache.blocks(rank, start, stop), first, last, *more, D_v)
    out, lse = gpu.attend(
        *(q, cache.k[rank], cache.v[rank], cache.table, cache.lengths_on_device, rank, cache.ownership),
        *(case["window"], *more),
        splits=case["splits"],
    )
    assert torch.equal(lse == -torch.inf, wanted.lse == -torch.inf)
    assert relative(lse, wanted.lse) < 1e-5
    assert relative(out, wanted.out) < (1e-5 if case["dtype"] == torch.float32 else 5e-3)  # weights are rounded


APPEND = {
    "n": [1, 5, 30],
    "dims": [(16, 16), (24, 5)],
    "page": [None, 7, 64],
    "rank": [(0, 1), (1, 3), (2, 3)],
    "interleave": [1, 16],
    "counts": [None, (30, 0), (2, 4)],
    "dtype": [torch.float32, torch.float16, torch.float64],
    "transposed": [False, True],
}


@pytest.mark.parametrize("case", pairwise(APPEND), ids=lambda case: "-".join(map(str, case.values())))
def test_new_tokens_go_where_the_readable_rows_are(case):
    (D, D_v), (rank, P), n, G, counts = case["dims"], case["rank"], case["n"], 3, case["counts"]
    options = dict(v_dim=D_v, interleave=case["interleave"], dtype=case["dtype"], page=case["page"])
    cache = rl.KVCache(rl.SimulatedWorld(P, device=DEVICE, count_memory=False), 2, G, D, 90, **options)
    make = dict(dtype=case["dtype"], device=DEVICE)
    cache.append(*(torch.randn(2, G, 61, d, **make) for d in (D, D_v)), [5, 61])
    cache.reserve(20)  # not for all that come, where there are pages
    if case["transposed"]:  # as models leave them
        k, v = (torch.randn(2, n, G, d, **make).transpose(1, 2) for d in (D, D_v))
    else:
        k, v = (torch.randn(2, G, n, d, **make) for d in (D, D_v))
    counts = None if counts is None else torch.tensor(counts, device=DEVICE)
    where = cache.table, cache.lengths_on_device, cache._room, counts
    rows = own_rows(n, G, cache.page, cache.pages, *where, rank, cache.ownership).flatten()
    stores = [x[rank].clone() for x in cache._rows]
    for store, x in zip(stores, (k, v), strict=True):
        store.index_copy_(0, rows, x.reshape(-1, x.shape[-1]))
    gpu.append(k, v, cache.k[rank], cache.v[rank], *where, rank, cache.ownership)
    for store, got in zip(stores, (cache.k[rank], cache.v[rank]), strict=True):
        assert torch.equal(store[:-1].view_as(got), got)

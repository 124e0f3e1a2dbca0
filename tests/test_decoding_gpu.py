"""The split-K kernel against the readable one, on a GPU; or with Triton's interpreter, TRITON_INTERPRET=1 pytest ..."""

import os
import queue
import random
import time

import pytest
import torch
import torch.multiprocessing as mp
from oracle import relative
from pairwise import pairwise

import ringlearn as rl

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from ringlearn.attention.decoding import gpu, local, one_kernel  # noqa: E402
from ringlearn.attention.decoding.call import visible_slots  # noqa: E402
from ringlearn.attention.decoding.newest import own_rows  # noqa: E402
from ringlearn.partial import Partial, merge_all  # noqa: E402
from ringlearn.worlds.distributed.mailboxes import BEYOND, Mailboxes  # noqa: E402

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
    slots = visible_slots(cache.ownership, rank, cache.lengths, n, case["window"])
    first, last = torch.tensor(slots, device=DEVICE).unbind(-1)
    start, stop = int(first.min()), int(last.max())
    more = 0.3, case["softcap"]
    wanted = local.attend(q, cache.blocks(rank, start, stop), first, last, *more, D_v)
    parts = gpu.attend(
        *(q, cache.k[rank], cache.v[rank], cache.table, cache.lengths_on_device, rank, cache.ownership),
        *(case["window"], *more),
        splits=case["splits"],
    )
    out, lse = gpu.merged(parts)
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


# The exchange in one kernel. Processes on the CPU, whose interpreted kernels write to memory that they share.

FEW = 4  # channels, which an interpreter runs one after the other
SHAPES = [((1, 3, 1), 3, 16), ((2, 4, 2), 1, 24), ((3, 11, 1), 9, 5)]  # B, H, n; splits; D_v: 3, 16 and 33 rows
CALLS = 6


def _splits_of(call: int, rank: int) -> Partial:
    """What a rank has in a call: some splits, and in some calls some rows or ranks, have seen nothing."""
    shape, splits, D_v = SHAPES[call % len(SHAPES)]
    g = torch.Generator().manual_seed(100 * call + rank)
    out, lse = (torch.randn(*shape, splits, *d, generator=g) for d in ((D_v,), ()))
    lse[torch.rand(lse.shape, generator=g) < 0.3] = -torch.inf
    lse[:, call % 3] = -torch.inf  # for every rank: rows that no rank has seen a key of
    if (call + rank) % 3 == 0:
        lse[:] = -torch.inf
    return Partial(out.masked_fill(lse[..., None] == -torch.inf, 0.0), lse)


def _boxes(rank: int, memories: list[torch.Tensor], room: int) -> Mailboxes:
    """Over memory that processes share, in place of what GPUs do."""
    one_kernel.CHANNELS = FEW
    boxes = Mailboxes(None, rank, len(memories), torch.device("cpu"), lambda: None)
    boxes.room, boxes.epochs = room, torch.zeros(FEW, dtype=torch.int64)
    boxes.addresses = torch.tensor([memory.data_ptr() for memory in memories])
    return boxes


def _exchange(rank: int, memories: list[torch.Tensor], room: int, results: mp.Queue) -> None:
    torch.set_num_threads(1)
    boxes, found = _boxes(rank, memories, room), []
    for call in range(CALLS):
        time.sleep(0.05 * random.random())  # who comes first changes
        found.append([x.numpy() for x in one_kernel.merge_over_ranks(_splits_of(call, rank), boxes)])
    results.put((rank, found))


def _wait_for_nobody(memories: list[torch.Tensor], room: int, results: mp.Queue) -> None:
    boxes = _boxes(0, memories, room)
    results.put("started")
    for _ in range(3):
        one_kernel.merge_over_ranks(_splits_of(0, 0), boxes)
        results.put("released")


@pytest.fixture
def interpreted(monkeypatch):
    """Starts functions in processes that share memory; P -> (memories, room, a queue, start)."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    context, started = mp.get_context("spawn"), []

    def prepare(P: int):
        monkeypatch.setattr(one_kernel, "CHANNELS", FEW)
        room = max(one_kernel.numbers(torch.Size(shape).numel(), D_v) for shape, _, D_v in SHAPES)
        nbytes = 8 * P * FEW + 2 * P * FEW * 4 * room
        memories = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in range(P)]

        def start(fn, *args):
            started.append(context.Process(target=fn, args=args, daemon=True))
            started[-1].start()

        return memories, room, context.Queue(), start

    yield prepare
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("P", [2, 3, 4])
def test_the_exchange_in_one_kernel_equals_the_readable_one_and_all_ranks_have_the_same_bits(interpreted, P):
    memories, room, results, start = interpreted(P)
    for rank in range(P):
        start(_exchange, rank, memories, room, results)
    found = dict(results.get(timeout=200) for _ in range(P))
    for call in range(CALLS):
        ranks = [Partial(*map(torch.from_numpy, found[rank][call])) for rank in range(P)]
        assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))
        splits = [_splits_of(call, rank) for rank in range(P)]
        each = [Partial(out[..., i, :], lse[..., i]) for out, lse in splits for i in range(lse.shape[-1])]
        wanted = merge_all(each)
        assert torch.equal(ranks[0].lse == -torch.inf, wanted.lse == -torch.inf)
        assert relative(ranks[0].out, wanted.out) < 1e-6 and relative(ranks[0].lse, wanted.lse) < 1e-6


def test_flags_raised_beyond_every_epoch_end_all_waiting(interpreted):
    memories, room, results, start = interpreted(2)
    start(_wait_for_nobody, memories, room, results)
    assert results.get(timeout=60) == "started"
    with pytest.raises(queue.Empty):  # the kernel waits for rank 1
        results.get(timeout=3)
    memories[0][: 8 * 2 * FEW].view(torch.int64).fill_(BEYOND)
    assert [results.get(timeout=30) for _ in range(3)] == ["released"] * 3

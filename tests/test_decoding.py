"""Decoding over a cache that is shared out equals dense attention over whole sequences, in both worlds alike."""

import decoding_programs as programs
import pytest
import torch
from decoding_programs import GRID, decode, dense, inputs
from oracle import relative
from pairwise import pairwise, product

import ringlearn as rl
from ringlearn.attention.decoding import EXCHANGES, Ownership
from ringlearn.attention.decoding.newest import own_rows
from ringlearn.launch.pool import Pool

FILE = "tests/decoding_programs.py"
SIZES = [1, 2, 3, 4, 8]
CASES = pairwise({"P": SIZES, **GRID})
GLOO = pairwise({**GRID, "dtype": ["f64", "f32", "bf16"]})


def case_id(case):
    return "-".join(map(str, case.values()))


@pytest.fixture(scope="module", params=[2, 3, 4])
def pool(request):
    with Pool(request.param, backend="gloo") as pool:
        pool.size = request.param
        yield pool


# Which rank owns which token


@pytest.mark.parametrize("P", SIZES)
@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_ownership_counted_token_by_token(P, interleave):
    own = Ownership(P, interleave)
    held = [[] for _ in range(P)]
    for position in range(200):
        assert [own.count(r, position) for r in range(P)] == [len(tokens) for tokens in held]
        owner = (position // interleave) % P
        assert own.owner(position) == owner and own.slot(position) == len(held[owner])
        held[owner].append(position)
    assert [own.positions(r, 200).tolist() for r in range(P)] == held
    assert own.count(0, -5) == 0
    lengths = torch.arange(-3, 200)
    for r in range(P):
        assert own.count(r, lengths).tolist() == [own.count(r, int(x)) for x in lengths]


@pytest.mark.parametrize("P", SIZES)
@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_where_the_device_puts_new_tokens_is_where_ownership_says(P, interleave):
    """For any lengths and pages: the row of each token in the memory of its owner, and nowhere else."""
    own, page, heads, n = Ownership(P, interleave), 5, 2, 40
    lengths, counts, room = [0, 7, 90, 33], [40, 1, 40, 0], [1000, 1000, 101, 1000]
    table = torch.randperm(400).view(4, 100)
    device = [torch.tensor(x, dtype=torch.int32) for x in (lengths, room)]
    for rank in range(P):
        rows = own_rows(n, heads, page, 400, table.int(), *device, torch.tensor(counts), rank, own)
        for b, (length, count, most) in enumerate(zip(lengths, counts, room, strict=True)):
            for j, position in enumerate(range(length, length + n)):
                slot, kept = own.slot(position), own.owner(position) == rank and j < count and position < most
                for g in range(heads):
                    row = (int(table[b, slot // page]) * heads + g) * page + slot % page
                    assert rows[b, g, j] == (row if kept else 400 * heads * page)
    for slots in range(1, 60):
        assert own.count(0, own.room(slots)) == slots < own.count(0, own.room(slots) + 1) or P == 1
        assert own.count(0, own.room(slots)) <= slots


# Values


def held_to_dense(P, case):
    world = rl.SimulatedWorld(P)
    given = inputs(case, torch.float64)
    out, lse, *_ = decode(world, case)
    expected, expected_lse = dense(**given)
    assert relative(out, expected) <= 1e-12
    assert relative(lse, expected_lse) <= 1e-12
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_dense_attention(case):
    held_to_dense(case["P"], {name: value for name, value in case.items() if name != "P"})


@pytest.mark.slow
@pytest.mark.parametrize("length", GRID["length"])
def test_equals_dense_attention_in_every_case(length):
    """Every attention with every number of ranks, exchange and interleaving; the oracle is asked once for each."""
    ways = product({"P": SIZES, **{name: GRID[name] for name in ("exchange", "interleave")}})
    for given in product({n: x for n, x in GRID.items() if n not in ("length", "layout", "page", *ways[0])}):
        given = {"length": length, **given, "layout": None, "page": None}
        expected, expected_lse = dense(**inputs(given | ways[0], torch.float64))
        for way in ways:
            out, lse, *_ = decode(rl.SimulatedWorld(way["P"], count_memory=False), given | way)
            assert relative(out, expected) <= 1e-12 and relative(lse, expected_lse) <= 1e-12, (given, way)


@pytest.mark.parametrize("P", SIZES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_ranks_end_with_the_same_bits(P, exchange):
    torch.manual_seed(P)
    partials = [rl.Partial(torch.randn(2, 3, 2, 5), torch.randn(2, 3, 2)) for _ in range(P)]
    if P > 2:
        partials[1] = rl.identity((2, 3, 2, 5))  # an empty shard
    found = rl.SimulatedWorld(P).run(EXCHANGES[exchange], rl.worlds.PerRank(partials))
    wanted = rl.merge_all(rl.Partial(*(t.double() for t in p)) for p in partials)
    for out, lse in found:
        assert torch.equal(out, found[0].out) and torch.equal(lse, found[0].lse)
        assert relative(out, wanted.out) < 1e-6 and relative(lse, wanted.lse) < 1e-6


@pytest.mark.parametrize("P", SIZES)
def test_the_tree_takes_log_P_hops_each_way(P):
    async def program(comm):
        await EXCHANGES["tree"](comm, rl.identity((1, 1, 1, 1)))

    world = rl.SimulatedWorld(P, hardware=rl.worlds.Hardware(latency=1.0, bandwidth=1e30))
    world.run(program)
    hops = (P - 1).bit_length()
    seconds = world.trace.makespan()  # of 3 ranks, the two that send begin at once
    assert seconds == pytest.approx(2 * hops) if P == 2**hops else seconds <= 2 * hops
    assert sum(e.kind == "send" for e in world.trace) == 2 * (P - 1)


@pytest.mark.parametrize("layout", [None, rl.contiguous, rl.striped, rl.zigzag], ids=str)
@pytest.mark.parametrize("interleave", [1, 4])
def test_appended_one_by_one_at_once_or_by_a_prefill(layout, interleave):
    world, S = rl.SimulatedWorld(3), 29
    k, v = torch.randn(2, 2, S, 4), torch.randn(2, 2, S, 3)
    make = dict(batch=2, heads=2, dim=4, v_dim=3, capacity=40, interleave=interleave)
    single, other = rl.KVCache(world, **make), rl.KVCache(world, **make)
    for i in range(S):
        single.append(k[:, :, i : i + 1], v[:, :, i : i + 1], [1, int(i < 11)])
    other.append(*((k, v) if layout is None else world.shard(k, v, layout=layout)), [S, 11])
    assert single.lengths == other.lengths == (S, 11)
    for rank in range(3):
        positions = single.ownership.positions(rank, S)
        assert torch.equal(single.k[rank][0, :, : len(positions)], k[0][:, positions])
        assert torch.equal(single.v[rank][0, :, : len(positions)], v[0][:, positions])
        assert torch.equal(single.k[rank], other.k[rank]) and torch.equal(single.v[rank], other.v[rank])


def test_several_queries_at_once_are_what_one_after_the_other_sees():
    world = rl.SimulatedWorld(3)
    k, v, q = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 4, 5, 8)
    cache = rl.KVCache(world, 1, 2, 8, capacity=20, interleave=2)
    cache.append(k[:, :, :15], v[:, :, :15])
    single = []
    for j in range(5):
        cache.append(k[:, :, 15 + j : 16 + j], v[:, :, 15 + j : 16 + j])
        single.append(rl.decode_attention(q[:, :, j : j + 1], cache))
    assert relative(rl.decode_attention(q, cache), torch.cat(single, 2)) < 1e-6


def test_truncated_and_appended_again():
    """Proposed tokens that are not accepted leave nothing behind, not even if they were no numbers."""
    world = rl.SimulatedWorld(3)
    k, v, q = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 2, 8)
    cache, plain = (rl.KVCache(world, 2, 2, 8, capacity=30, interleave=2) for _ in range(2))
    plain.append(k, v, [20, 13])
    cache.append(k[:, :, :17], v[:, :, :17], [17, 10])
    cache.append(k[:, :, :9] * torch.nan, v[:, :, :9] * torch.nan)
    assert cache.lengths == (26, 19)
    cache.truncate([12, 10])
    after = torch.stack([k[0, :, 12:20], k[1, :, 10:18]]), torch.stack([v[0, :, 12:20], v[1, :, 10:18]])
    cache.append(*after, [8, 3])
    assert torch.equal(rl.decode_attention(q, cache), rl.decode_attention(q, plain))
    cache.truncate(0)
    out, lse = rl.decode_attention(q, cache, return_lse=True)
    assert cache.lengths == (0, 0) and bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_a_rank_that_owns_nothing_throughout():
    world = rl.SimulatedWorld(4)
    k, v, q = torch.randn(1, 1, 30, 4), torch.randn(1, 1, 30, 4), torch.randn(1, 1, 1, 4)
    cache = rl.KVCache(world, 1, 1, 4, capacity=30, interleave=10)
    for i in range(30):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        out = rl.decode_attention(q, cache)
        assert relative(out, dense(q, k, v, [i + 1], None, 0.5, None, None)[0]) < 1e-6
    assert [cache.local_lengths(r) for r in range(4)] == [(10,), (10,), (10,), (0,)]


def test_under_autocast_inference_mode_and_with_tensors_that_record():
    world = rl.SimulatedWorld(2)
    k, v, q = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4), torch.randn(1, 1, 1, 4)
    with torch.inference_mode():
        cache = rl.KVCache(world, 1, 1, 4, capacity=30, interleave=2)
        cache.append(k[:, :, :4], v[:, :, :4])
    cache.append(k[:, :, 4:].requires_grad_(), v[:, :, 4:])
    assert not cache.k[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        out = rl.decode_attention(q, cache)
    assert out.dtype == torch.float32 and torch.equal(out, rl.decode_attention(q, cache))
    assert relative(out, dense(q, k.detach(), v, [9], None, 0.5, None, None)[0]) < 1e-6


# Pages


def test_pages_are_taken_when_needed_given_back_and_taken_again():
    """Three sequences that take turns in being long, in a pool that cannot hold all of them at full length."""
    world = rl.SimulatedWorld(2)
    make = dict(batch=3, heads=1, dim=4, capacity=40, interleave=3)
    cache, plain = rl.KVCache(world, page=4, pages=8, **make), rl.KVCache(world, **make)
    assert cache.k[0].shape == (8, 1, 4, 4) and cache.table.shape == (3, 6)
    taken = set()
    for turn in range(6):
        k, v, q = torch.randn(3, 1, 34, 4), torch.randn(3, 1, 34, 4), torch.randn(3, 2, 2, 4)
        counts = [34 if b == turn % 3 else 5 for b in range(3)]
        for c in (cache, plain):
            c.append(k, v, counts)
        # What rank 0 has of them: 18 tokens of 34 need 5 pages, 3 of 5 need one; each page belongs to one sequence.
        held = [cache.table[b, : 5 if n == 34 else 1].tolist() for b, n in enumerate(counts)]
        assert len(set(sum(held, []))) == 7
        taken |= {tuple(pages) for pages in held}
        assert relative(rl.decode_attention(q, cache), rl.decode_attention(q, plain)) < 1e-6
        for c in (cache, plain):
            c.truncate([2, 0, 3])
        assert relative(rl.decode_attention(q, cache), rl.decode_attention(q, plain)) < 1e-6
        cache.truncate(0), plain.truncate(0)
    assert len(taken) > 6  # the same pages went to other sequences


def test_a_full_pool_is_an_error_that_loses_nothing():
    world = rl.SimulatedWorld(3)
    cache = rl.KVCache(world, 2, 1, 4, capacity=90, interleave=2, page=5, pages=8)
    k, v, q = torch.randn(2, 1, 60, 4), torch.randn(2, 1, 60, 4), torch.randn(2, 1, 1, 4)
    cache.append(k, v, [60, 57])  # 20 and 19 tokens of each on rank 0
    before = rl.decode_attention(q, cache)
    with pytest.raises(ValueError, match="1 more pages of 5 tokens are needed on each rank, 0 of 8 are free"):
        cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.lengths == (60, 57) and torch.equal(before, rl.decode_attention(q, cache))
    cache.truncate([60, 15])
    cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.lengths == (61, 16)


@pytest.mark.parametrize("page, P", [(None, 3), (4, 2), (7, 1)])
def test_replays_append_what_the_host_learns_of_later(monkeypatch, page, P):
    """What is captured uses the device's lengths alone, here one call for each replay; pages were reserved before."""
    make = dict(batch=2, heads=1, dim=4, capacity=60, interleave=3)
    cache, plain = rl.KVCache(rl.SimulatedWorld(P), page=page, **make), rl.KVCache(rl.SimulatedWorld(P), **make)
    k, v, q = torch.randn(2, 1, 60, 4), torch.randn(2, 1, 60, 4), torch.randn(2, 2, 3, 4)
    for c in (cache, plain):
        c.append(k[:, :, :9], v[:, :, :9], [9, 4])
    cache.reserve(30)
    for i in range(9, 37, 2):
        plain.append(k[:, :, i : i + 2], v[:, :, i : i + 2])
        with monkeypatch.context() as patch:
            patch.setattr(rl.KVCache, "capturing", True)
            cache.append(k[:, :, i : i + 2], v[:, :, i : i + 2])
            assert cache._lengths == [9, 4]  # the host learns nothing
    assert cache.lengths == plain.lengths == (37, 32)
    assert relative(rl.decode_attention(q, cache), rl.decode_attention(q, plain)) < 1e-6
    for c in (cache, plain):
        c.truncate([20, 31])
        c.append(k[:, :, :5], v[:, :, :5])
    assert relative(rl.decode_attention(q, cache), rl.decode_attention(q, plain)) < 1e-6


@pytest.mark.parametrize("page", [None, 4])
def test_replays_beyond_the_room_are_an_error_and_spoil_nothing(monkeypatch, page):
    cache = rl.KVCache(rl.SimulatedWorld(2), 2, 1, 4, capacity=24, interleave=3, page=page)
    k, v, q = torch.randn(2, 1, 40, 4), torch.randn(2, 1, 40, 4), torch.randn(2, 2, 1, 4)
    cache.append(k[:, :, :20], v[:, :, :20], [20, 2])
    with pytest.raises(ValueError, match="KVCache.reserve: sequence 0 has 20 tokens and would have 25"):
        cache.reserve(5)
    cache.reserve(4)
    with monkeypatch.context() as patch:
        patch.setattr(rl.KVCache, "capturing", True)
        with pytest.raises(ValueError, match="in a CUDA graph expected tensors and no counts"):
            cache.append(k[:, :, :1], v[:, :, :1], [1, 0])
        with pytest.raises(ValueError, match="in a CUDA graph only kernel 'split-k' can be used: "):
            rl.decode_attention(q, cache)
        for i in range(20, 30):
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    with pytest.raises(ValueError, match="gave sequence 0 30 tokens, there was room for 24, so the last 6 are lost"):
        cache.append(k, v)
    assert cache.lengths == (24, 12 if page is None else 7)  # a page of 4 slots holds positions 0, 1, 2 and 6 on rank 0
    plain = rl.KVCache(rl.SimulatedWorld(2), 2, 1, 4, capacity=24)
    plain.append(k, v, [24, 0])
    later = [torch.cat([x[:, :, :2], x[:, :, 20:]], 2) for x in (k, v)]
    plain.append(*later, [0, cache.lengths[1]])
    assert relative(rl.decode_attention(q, cache), rl.decode_attention(q, plain)) < 1e-6


def test_a_page_that_was_never_written_may_hold_anything():
    world = rl.SimulatedWorld(2)
    cache, plain = (rl.KVCache(world, 2, 1, 4, capacity=40, interleave=1, page=page) for page in (3, None))
    for t in (*cache.k, *cache.v):
        t.fill_(torch.nan)
    k, v, q = torch.randn(2, 1, 30, 4), torch.randn(2, 1, 30, 4), torch.randn(2, 1, 3, 4)
    for c in (cache, plain):
        c.append(k, v, [30, 4])
    assert relative(rl.decode_attention(q, cache), rl.decode_attention(q, plain)) < 1e-6


# Two worlds


@pytest.fixture(scope="module")
def gloo(pool):
    cases = [({k: v for k, v in case.items() if k != "dtype"}, case["dtype"]) for case in GLOO]
    return cases, pool.run(f"{FILE}:decode_all", cases), pool.size


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(GLOO)), ids=lambda n: case_id(GLOO[n]))
def test_gloo_equals_simulated_bit_for_bit(gloo, number):
    cases, found, P = gloo
    out, lse, *held = decode(rl.SimulatedWorld(P), *cases[number])
    for rank in range(P):
        there = found[rank][number]
        for name, a, b in zip(("out", "lse", "k", "v"), (out, lse, held[rank], held[P + rank]), there, strict=True):
            assert torch.equal(a, b), f"{name} of rank {rank}: off by {relative(b, a):.1e}"


def test_heads_are_split_over_ranks_too(pool):
    """Tensor parallel inside, the cache outside: a world for each group of heads is all that it takes."""
    for out, whole in pool.run(f"{FILE}:heads_split", 3 if pool.size == 3 else 2):
        assert torch.equal(out, whole)


def test_a_difference_or_a_mistake_is_an_error_on_every_rank_and_nothing_is_lost(pool):
    for said in pool.run(f"{FILE}:told"):
        assert said.pop("nothing lost") is True
        for name, text in said.items():
            assert text != "no error", name
            assert text.startswith(("KVCache", "decode_attention", "shard")), (name, text)
        assert "capacity: expected the same on all ranks" in said["making"]
        assert "expected capacity to be an int >= 1, got 0" in said["making, wrong"]
        assert "sequence 0 has 7 tokens and would have 14, the capacity is 10" in said["full"]
        assert "sequence 0 has 7 tokens and would have 14" in said["full on one rank"]
        assert "values of k: expected the same on all ranks" in said["other tokens"]
        assert "values of v: expected the same on all ranks" in said["other values"]
        assert "lengths afterwards: expected the same on all ranks" in said["other counts"]
        assert "expected counts from 0 to T = 1" in said["wrong counts"]
        assert "expected k of shape (2, 2, T, 4)" in said["shape"]
        assert "lengths: expected the same on all ranks" in said["truncated apart"]
        assert "expected a length from 0 to the present one" in said["longer"]
        assert "values of q: expected the same on all ranks" in said["queries apart"]
        assert "values of sinks: expected the same on all ranks" in said["sinks apart"]
        assert "exchange: expected the same on all ranks" in said["exchange"]
        assert "expected mask=rl.causal or rl.causal & rl.sliding_window(w), got full" in said["mask"]
        assert "decoding records no gradient" in said["gradient"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_trace_says_the_same_and_bytes_do_not_grow_with_the_sequence(pool, exchange):
    found = pool.run(f"{FILE}:traced", exchange)
    for rank, seen in enumerate(found):
        assert seen == programs.record(rl.SimulatedWorld(pool.size), exchange, rank)
    case = {name: values[-1] for name, values in GRID.items()}
    H, n, D_v, B = case["heads"][0], case["n"], case["dims"][1], 3
    sent = [nbytes for seen in found for kind, _, _, nbytes, _ in seen if kind == "send"]
    messages = pool.size * (pool.size - 1) if exchange == "all-gather" else 2 * (pool.size - 1)
    assert sent == [B * H * n * (D_v + 1) * 8] * messages

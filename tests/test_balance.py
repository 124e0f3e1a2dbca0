"""Who works when: scores by rank and step, against the dense mask, known formulas and the simulated clock."""

import itertools
import pickle

import pytest
import torch
from oracle import dense_attention, relative

import ringlearn as rl
from ringlearn.costs.balance import Balance, best_layout, ring_balance
from ringlearn.layouts import count, positions_in_documents, positions_of, zigzag_per_document
from ringlearn.worlds.trace import Hardware

LAYOUTS = [rl.contiguous, rl.striped, rl.zigzag]
PACKS = {
    "one": [40],
    "three": [17, 6, 30],
    "with empty ones": [0, 9, 0, 0, 23, 1, 0],
    "shorter than the ranks": [1, 2, 3, 1, 1, 2, 5, 3, 1],
    "even": [32, 64, 48],
    "one long": [3, 90, 2, 4],
}


def pack_of(n, S, seed=0):
    """n document lengths that add up to S, the longest many times the shortest."""
    weights = torch.randn(n, generator=torch.Generator().manual_seed(seed)).exp()
    ends = (weights.cumsum(0) / weights.sum() * S).round().long().tolist()
    return [b - a for a, b in zip([0, *ends[:-1]], ends)]


def counted(mask, S, P, layout):
    """What is visible to each rank in each step, from the dense mask."""
    seen = mask.dense(S, S)
    own = [positions_of(ranges) for ranges in layout.ranges(S, P)]
    return [[int(seen[own[r]][:, own[(r - t) % P]].sum()) for t in range(P)] for r in range(P)]


def masks(S):
    third = S // 3
    pack = rl.documents([third, S // 7, 0, S - third - S // 7])
    return {
        "full": rl.full,
        "causal": rl.causal,
        "window": rl.causal & rl.sliding_window(7),
        "documents": pack,
        "causal documents": rl.causal & pack,
        "own": rl.mask(lambda q, k: (3 * q + 5 * k) % 7 < 4),
    }


# ---- Balance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", masks(1))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scores_are_those_that_the_dense_mask_shows(layout, name):
    for S, P in [(64, 4), (97, 5), (40, 1), (3, 8), (130, 8)]:
        mask = masks(S)[name]
        dense = counted(mask, S, P, layout)
        seen, made = ring_balance(mask, S, P, layout, visible=True), ring_balance(mask, S, P, layout)
        assert [list(row) for row in seen.scores] == dense, (S, P)
        for r, t in itertools.product(range(P), repeat=2):
            assert made.scores[r][t] >= dense[r][t] and bool(made.scores[r][t]) == bool(dense[r][t])
        if name in ("full", "causal"):
            assert made.scores == seen.scores
        pieces = ring_balance(mask, S, P, layout, cut=True)
        assert ring_balance(mask, S, P, layout, visible=True, cut=True).scores == seen.scores
        assert pieces.total >= made.total and pieces.kernel_calls >= made.kernel_calls


def test_kernels_that_know_no_windows_compute_more_on_stripes():
    mask = rl.causal & rl.sliding_window(4096)
    planned, pieces = (ring_balance(mask, 131072, 8, rl.striped, cut=cut) for cut in (False, True))
    assert (
        planned.kernel_calls == 64 and planned.scores == ring_balance(mask, 131072, 8, rl.striped, visible=True).scores
    )
    assert pieces.total / planned.total == pytest.approx(1.49, abs=0.01) and pieces.kernel_calls > 4000
    assert best_layout(mask, 131072, 8) is rl.striped and best_layout(mask, 131072, 8, cut=True) is rl.contiguous


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_scores_of_packed_documents_dealt_one_by_one(lengths):
    S, layout = sum(lengths), zigzag_per_document(lengths)
    for P in (1, 2, 3, 4, 8):
        for mask in (rl.documents(lengths), rl.causal & rl.documents(lengths)):
            found = ring_balance(mask, S, P, layout, visible=True)
            assert [list(row) for row in found.scores] == counted(mask, S, P, layout)
            # Each range lies in one document, so no kernel computes what it need not.
            assert found.scores == ring_balance(mask, S, P, layout).scores


@pytest.mark.parametrize(("S", "P"), [(64, 4), (64, 8), (512, 8), (8192, 8), (131072, 16)])
def test_the_known_formulas(S, P):
    """Causal: contiguous (2P - 1) / P of an even share, up to the diagonal; striped P (s + 1) / (S + 1); zigzag 1."""
    s = S // P
    contiguous, striped, zigzag = (ring_balance(rl.causal, S, P, layout) for layout in LAYOUTS)
    assert contiguous.makespan == s * (s + 1) // 2 + (P - 1) * s * s
    assert contiguous.ratio == pytest.approx((2 * P - 1) / P * (1 + 1 / (2 * P - 1) / s) / (1 + 1 / S), rel=1e-12)
    assert striped.ratio == pytest.approx(P * (s + 1) / (S + 1), rel=1e-12)
    assert zigzag.ratio == 1 and zigzag.per_step == (1.0,) * P
    # Contiguous, step by step: P - t of the ranks have something to do, and all of these the same.
    assert contiguous.per_step == pytest.approx([1.0, *(P / (P - t) for t in range(1, P))])
    assert {b.total for b in (contiguous, striped, zigzag)} == {S * (S + 1) // 2}


def test_a_balance_of_small_numbers_by_hand():
    found = Balance(rl.contiguous, ((2, 0, 6), (1, 4, 0), (3, 0, 0)), ((1, 0, 1), (1, 1, 0), (1, 0, 0)))
    assert found.per_rank == (8, 5, 3) and found.busiest == 8 and found.total == 16
    assert found.mean == pytest.approx(16 / 3)
    assert found.per_step == (1.5, 3.0, 3.0)
    assert found.lockstep == 3 + 4 + 6
    # Rank 2 begins its step 1 at 3, and only then passes on what rank 0 needs for the 6 of its step 2.
    assert found.makespan == 3 + 6
    assert found.times == (((0, 2), (2, 2), (3, 9)), ((0, 1), (1, 5), (5, 5)), ((0, 3), (3, 3), (3, 3)))
    assert found.ratio == pytest.approx(9 / (16 / 3)) and found.idle == pytest.approx(1 - 16 / 27)
    assert found.calls == ((1, 0, 1), (1, 1, 0), (1, 0, 0)) and found.kernel_calls == 5


def test_a_rank_that_is_late_holds_up_those_after_it():
    """Rank 0 begins its step 1 at 5, so what it passes on in it reaches rank 1 then: rank 1's step 2 begins at 5."""
    found = Balance(rl.contiguous, ((5, 0, 0), (0, 0, 4), (0, 0, 0)), ((1, 0, 0), (0, 0, 1), (0, 0, 0)))
    assert found.busiest == 5 and found.makespan == 9 and found.lockstep == 9


def test_nothing_to_do_is_evenly_done():
    found = ring_balance(rl.causal, 0, 3, rl.zigzag)
    assert (found.makespan, found.ratio, found.idle, found.per_step) == (0, 1.0, 0.0, (1.0, 1.0, 1.0))


SIZES = [(64, 4), (130, 8), (97, 5)]
CASES = [
    case for case in itertools.product([*LAYOUTS, "per document"], masks(1), SIZES) if case[1:] != ("own", (130, 8))
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "name", "size"), CASES, ids=lambda x: str(x))
def test_the_makespan_is_that_of_the_simulated_ring_on_a_free_wire(layout, name, size):
    S, P = size
    mask = masks(S)[name]
    if layout == "per document":
        layout = zigzag_per_document([S // 3, S // 7, S - S // 3 - S // 7])
    found = ring_balance(mask, S, P, layout)
    world = rl.SimulatedWorld(P, hardware=Hardware(flops=1.0, bandwidth=1e300, latency=0.0), count_memory=False)
    rl.ring_attention(*world.shard(*(torch.randn(1, 1, S, 8) for _ in range(3)), layout=layout), mask=mask)
    per_score = 2 * (8 + 8)
    assert [world.trace.flops(r) / per_score for r in range(P)] == list(found.per_rank)
    assert world.trace.makespan() / per_score == pytest.approx(found.makespan, rel=1e-12)
    for r, t in itertools.product(range(P), repeat=2):
        events = [
            e for e in world.trace.select("compute", r) if e.step == min(t + 1, P - 1) and e.origin == (r - t) % P
        ]
        if events:
            assert (events[0].start / per_score, events[-1].stop / per_score) == pytest.approx(found.times[r][t])
    assert len(world.trace.select("compute")) == found.kernel_calls
    assert found.mean <= found.busiest <= found.makespan <= found.lockstep


def test_twenty_documents_on_eight_ranks():
    """A pack of 20: dealt one by one they are even in every step; the whole pack in zigzag is not."""
    S, P = 131072, 8
    lengths = pack_of(20, S)
    mask = rl.causal & rl.documents(lengths)
    whole, each = (ring_balance(mask, S, P, layout) for layout in (rl.zigzag, zigzag_per_document(lengths)))
    assert each.ratio < 1.01 and max(each.per_step) < 1.02
    assert whole.ratio > 1.1 and max(whole.per_step) > 2
    assert best_layout(mask, S, P, [rl.contiguous, rl.zigzag, each.layout]) is each.layout
    # Striped is as even, without knowing the documents.
    assert ring_balance(mask, S, P, rl.striped).ratio < 1.01


def test_the_best_layout():
    assert best_layout(rl.causal, 4096, 8) is rl.zigzag
    # Without a mask all are even; then the one that is named first.
    assert best_layout(rl.full, 4096, 8) is rl.contiguous
    assert best_layout(rl.full, 4096, 8, [rl.striped, rl.zigzag]) is rl.striped
    # Each half in zigzag is even as well, but makes more kernel calls.
    halves = zigzag_per_document([256, 256])
    both = [ring_balance(rl.causal, 512, 4, layout) for layout in (halves, rl.zigzag)]
    assert both[0].makespan == both[1].makespan and both[0].kernel_calls > both[1].kernel_calls
    assert best_layout(rl.causal, 512, 4, [halves, rl.zigzag]) is rl.zigzag
    with pytest.raises(ValueError, match="best_layout: expected at least one layout"):
        best_layout(rl.causal, 64, 4, [])
    with pytest.raises(ValueError, match="expected several layouts to choose from, got zigzag alone"):
        best_layout(rl.causal, 64, 4, rl.zigzag)


@pytest.mark.parametrize("wrong", [None, "zigzag", rl.causal])
def test_what_is_no_layout(wrong):
    with pytest.raises(ValueError, match="expected a layout such as rl.zigzag, got"):
        ring_balance(rl.causal, 64, 4, wrong)


def test_a_mask_that_does_not_fit_the_length():
    with pytest.raises(ValueError, match="the lengths must add up to the number of key positions"):
        ring_balance(rl.documents([3, 4]), 8, 2, rl.zigzag)


def test_a_million_tokens_are_planned_in_a_moment():
    found = ring_balance(rl.causal, 2**20, 64, rl.zigzag)
    assert found.ratio == 1 and found.total == 2**20 * (2**20 + 1) // 2


def test_the_table_says_who_does_what():
    text = ring_balance(rl.causal, 16, 4, rl.contiguous).table()
    assert text.splitlines() == [
        "contiguous | step 0  step 1  step 2  step 3 |    all",
        "rank 0     |     10       0       0       0 |     10",
        "rank 1     |     10      16       0       0 |     26",
        "rank 2     |     10      16      16       0 |     42",
        "rank 3     |     10      16      16      16 |     58",
        "max / mean |   1.00    1.33    2.00    4.00 |   1.71",
    ]


# ---- Packed documents, dealt one by one -----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_every_position_is_owned_once_and_shards_are_even(lengths, P):
    ranks = zigzag_per_document(lengths).ranges(sum(lengths), P)
    assert sorted(p for ranges in ranks for r in ranges for p in r) == list(range(sum(lengths)))
    tokens = [count(r) for r in ranks]
    assert max(tokens) - min(tokens) <= 1


def test_hundreds_of_short_documents_are_even_too():
    S, P, lengths = 29999, 4, pack_of(600, 29999)
    layout = zigzag_per_document(lengths)
    tokens = [count(r) for r in layout.ranges(S, P)]
    assert max(tokens) - min(tokens) <= 1
    # A shard has more than a thousand ranges; those that see nothing of each other are not even looked at.
    found = ring_balance(rl.causal & rl.documents(lengths), S, P, layout)
    assert found.total == sum(n * (n + 1) // 2 for n in lengths) and found.ratio < 1.03


def test_one_document_that_divides_is_zigzag():
    for n, P in itertools.product(range(4), (1, 2, 3, 4, 5, 8)):
        assert zigzag_per_document([2 * P * n]).ranges(2 * P * n, P) == rl.zigzag.ranges(2 * P * n, P)


def test_what_is_left_over_gives_no_rank_more_work():
    """Short documents are mostly left-over tokens: were they always early or always late ones, ranks would differ."""
    lengths, P = pack_of(2000, 64000), 8
    found = ring_balance(rl.causal & rl.documents(lengths), 64000, P, zigzag_per_document(lengths))
    assert found.ratio < 1.005


def test_documents_that_divide_are_perfectly_even_in_every_step():
    lengths, P = [32, 96, 16, 64], 4  # 2P divides each
    S, mask = sum(lengths), rl.causal & rl.documents(lengths)
    found = ring_balance(mask, S, P, zigzag_per_document(lengths))
    assert found.per_step == (1.0,) * P and found.ratio == 1
    assert ring_balance(mask, S, P, rl.zigzag, visible=True).ratio > 1.05


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", PACKS)
def test_float64_equals_dense_attention(name, P, causal):
    torch.manual_seed(0)
    lengths = PACKS[name]
    S, H, G, D = sum(lengths), 4, 2, 8
    mask = rl.causal & rl.documents(lengths) if causal else rl.documents(lengths)
    q, k, v = (torch.randn(1, h, S, D, dtype=torch.float64, requires_grad=True) for h in (H, G, G))
    world = rl.SimulatedWorld(P, count_memory=False)
    shards = world.shard(q, k, v, layout=zigzag_per_document(lengths))
    assert torch.equal(shards[0].unshard(), q)
    out, lse = rl.ring_attention(*shards, mask, return_lse=True)
    out, lse = out.unshard(), lse.unshard()
    expected, expected_lse = dense_attention(q, k, v, mask)
    assert relative(out, expected) < 1e-12 and relative(lse, expected_lse) < 1e-12
    dout = torch.randn_like(out)
    got, want = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected))
    assert all(relative(a, b) < 1e-12 for a, b in zip(got, want, strict=True))


def test_it_works_under_other_masks_and_ignores_documents_there():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 53, 8, dtype=torch.float64) for _ in range(3))
    for mask in (rl.full, rl.causal & rl.sliding_window(9), rl.mask(lambda q, k: (q + k) % 3 > 0)):
        shards = rl.SimulatedWorld(3).shard(q, k, v, layout=zigzag_per_document([17, 6, 30]))
        assert relative(rl.ring_attention(*shards, mask).unshard(), dense_attention(q, k, v, mask)[0]) < 1e-12


def test_it_travels_to_another_process_and_is_itself_there():
    layout = zigzag_per_document([5, 0, 7])
    assert pickle.loads(pickle.dumps(layout)) == layout and hash(layout) == hash(zigzag_per_document((5, 0, 7)))
    assert str(layout) == "zigzag per document" and layout != zigzag_per_document([7, 5])


def test_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match="zigzag per document: the lengths add up to 12, the sequence has 13"):
        zigzag_per_document([5, 7]).ranges(13, 2)
    with pytest.raises(ValueError, match="expected lengths that are ints >= 0, got -1"):
        zigzag_per_document([5, -1])
    with pytest.raises(ValueError, match="expected a list of document lengths"):
        zigzag_per_document(5)
    assert zigzag_per_document(torch.tensor([5, 7])) == zigzag_per_document([5, 7])


def test_positions_start_again_in_every_document():
    lengths = [3, 0, 2, 4]
    assert positions_in_documents(torch.arange(9), lengths).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert positions_in_documents(torch.tensor([[8, 3], [0, 5]]), lengths).tolist() == [[3, 0], [0, 0]]
    assert positions_in_documents(torch.empty(0, dtype=torch.int64), []).tolist() == []
    for wrong in (9, -1):
        with pytest.raises(ValueError, match="positions in 0..8"):
            positions_in_documents(torch.tensor([wrong]), lengths)
    for wrong, got in (([0, 3], "list"), (torch.tensor([1.0]), "float32"), (torch.tensor([True]), "bool")):
        with pytest.raises(ValueError, match=f"expected a tensor of one rank's positions, .*got .*{got}"):
            positions_in_documents(wrong, lengths)


def test_positions_of_shards_under_any_layout():
    lengths = [17, 6, 30]
    plain = torch.cat([torch.arange(n) for n in lengths])
    for layout in [*LAYOUTS, zigzag_per_document(lengths)]:
        world = rl.SimulatedWorld(4, count_memory=False)
        x = world.shard(torch.zeros(1, 53, 1), layout=layout)
        own = [positions_in_documents(p, lengths) for p in x.positions]
        found = torch.empty(53, dtype=torch.int64)
        for at, value in zip(x.positions, own, strict=True):
            found[at] = value
        assert torch.equal(found, plain)


def rope(x, positions):
    """Rotary positions (Su et al. 2021): dims d and d + D/2 turn by position * 100^(-2 d / D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_inside_a_document_global_and_own_rope_positions_give_the_same_attention():
    """Only the distance of query and key counts; positions that start again in every *shard* are wrong."""
    torch.manual_seed(0)
    lengths = [17, 6, 30]
    mask = rl.causal & rl.documents(lengths)
    q, k, v = (torch.randn(1, 2, 53, 8, dtype=torch.float64) for _ in range(3))
    plain = torch.arange(53)
    want = dense_attention(rope(q, plain), rope(k, plain), v, mask)[0]
    for layout in [*LAYOUTS, zigzag_per_document(lengths)]:
        shards = rl.SimulatedWorld(4, count_memory=False).shard(q, k, v, layout=layout)
        ways = {
            "global": lambda p: p,
            "own": lambda p: positions_in_documents(p, lengths),
            "of the shard": lambda p: torch.arange(len(p)),
        }
        error = {}
        for name, way in ways.items():
            turned = []
            for x in shards[:2]:
                positions = iter([way(p) for p in x.positions])
                turned.append(x.map(lambda t, positions=positions: rope(t, next(positions))))
            error[name] = relative(rl.ring_attention(*turned, shards[2], mask).unshard(), want)
        assert error["global"] < 1e-12 and error["own"] < 1e-12 and error["of the shard"] > 0.01, (layout, error)

"""Tiles: together they are the dense mask, and they are few."""

import gc
import itertools
import random
import weakref

import pytest
import torch
from cases import LAYOUTS

import ringlearn as rl
from ringlearn import tiles
from ringlearn.layouts import count, positions_of
from ringlearn.tiles import BLOCK, Kind, covered, plan, shift

RANKS = [1, 2, 3, 4, 5, 8]


def assert_tiles_are_the_mask(mask, layout, S_q, S_k, P, q_start=0):
    dense = mask.dense(S_q, S_k, q_start).int()
    for rank in range(P):
        own = layout.ranges(S_q, P)[rank]
        for source in range(P):
            theirs = layout.ranges(S_k, P)[source]
            plans = plan(mask, shift(own, q_start), theirs)
            expected = dense[positions_of(own)][:, positions_of(theirs)]
            got = covered(plans, count(own), count(theirs))
            assert torch.equal(got, expected), (mask, layout, S_q, S_k, P, q_start, rank, source, plans)
            cut = [simple for tile in plans for simple in tile.cut]
            assert torch.equal(covered(cut, count(own), count(theirs)), expected), (plans, cut)
            for tile in [*plans, *cut]:
                assert min(tile.shape) > 0, tile
                if tile.kind is Kind.PARTIAL:
                    assert max(tile.shape) <= tiles.BLOCK, tile
                elif tile.kind is Kind.CAUSAL:
                    assert tile.shape[0] == tile.shape[1], tile
                assert tile.kind is Kind.PARTIAL or tile.area == int(tile.visible().sum()), tile
            assert {tile.kind for tile in cut} <= {Kind.FULL, Kind.CAUSAL, Kind.PARTIAL}
            # A bound for any window and any number of documents: three tiles for each block of rows and of columns.
            blocks = sum(-(-count(own) // tiles.BLOCK) for own in (own, theirs))
            pairs = max(1, len(own) * len(theirs))
            assert not mask.exact or len(plans) <= len(cut) <= 3 * pairs * blocks, (plans, cut)
            if mask.exact and len(mask.pieces(0, S_q + S_k + q_start)) == 1:
                assert len(plans) <= 4 * pairs and Kind.PARTIAL not in {t.kind for t in plans}, plans


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("P", RANKS)
def test_causal_is_the_dense_mask_and_one_call_a_step(layout, P):
    for S in range(1, 41):
        assert_tiles_are_the_mask(rl.causal, layout, S, S, P)
        ranges = layout.ranges(S, P)
        for rank in range(P):
            for source in range(P):
                found = plan(rl.causal, ranges[rank], ranges[source])
                assert len(found) <= 1, "one kernel call a step"
                if layout is not rl.contiguous and count(ranges[rank]) > 1 and count(ranges[source]) > 1:
                    assert len(found) == 1, "zigzag and striped ranks never idle"
                if rank == source and count(ranges[rank]):
                    assert found[0].kind is Kind.CAUSAL and found[0].shape == (count(ranges[rank]),) * 2


def test_a_causal_mask_alone_needs_no_partial_tile():
    """Whatever the two shards: FULL columns before the diagonal, a CAUSAL square, FULL rows below it."""
    for layout in LAYOUTS:
        for S_q, S_k, P, q_start in [(600, 600, 3, 0), (97, 41, 4, 0), (41, 97, 2, 56), (600, 200, 1, 0)]:
            for own in layout.ranges(S_q, P):
                for theirs in layout.ranges(S_k, P):
                    found = plan(rl.causal, shift(own, q_start), theirs)
                    assert Kind.PARTIAL not in {t.kind for t in found}, found


def random_mask(rng, total, depth=2):
    choice = rng.randint(0, 6 if depth else 4)
    if choice == 0:
        return rl.full
    if choice == 1:
        return rl.causal
    if choice == 2:
        return rl.sliding_window(rng.randint(1, 25))
    if choice == 3:
        return rl.mask(lambda q, k: (7 * q + 3 * k) % 5 < 3)
    if choice == 4:
        lengths = []
        while sum(lengths) < total:
            lengths.append(rng.choice([0, 1, 2, 3, 5, 8, 20]))
        return rl.documents(lengths)
    a, b = random_mask(rng, total, depth - 1), random_mask(rng, total, depth - 1)
    return a & b if choice == 5 else a | b


@pytest.mark.sample(2)
@pytest.mark.parametrize("block", [4, 8, 512])
def test_any_mask_on_any_positions(block, monkeypatch):
    """A small block makes the edges of windows and documents split as they do in long sequences."""
    monkeypatch.setattr(tiles, "BLOCK", block)
    tiles._remembered_plan.cache_clear()
    rng = random.Random(block)
    for _ in range(250):
        S_q, S_k, q_start = rng.randint(1, 60), rng.randint(1, 60), rng.choice([0, 0, rng.randint(1, 60)])
        mask = random_mask(rng, max(S_k, q_start + S_q))
        assert_tiles_are_the_mask(mask, rng.choice(LAYOUTS), S_q, S_k, rng.choice(RANKS), q_start)
    tiles._remembered_plan.cache_clear()


def check_windows(S, P, layout, widths):
    for width in widths:
        for q, k in itertools.product(*[[r for ranges in layout.ranges(S, P) for r in ranges]] * 2):
            found = plan(rl.sliding_window(width), (q,), (k,))
            assert len(found) <= 1 and Kind.PARTIAL not in {t.kind for t in found}, found
        assert_tiles_are_the_mask(rl.causal & rl.sliding_window(width), layout, S, S, P)
        assert_tiles_are_the_mask(rl.sliding_window(width), layout, S, S, P)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("P", RANKS)
def test_windows_are_the_dense_mask_and_one_call_for_each_pair_of_ranges(layout, P):
    for S in (1, 2, 3, 7, 16, 40):
        check_windows(S, P, layout, sorted({1, 2, 3, S // 2 + 1, max(1, S - 1), S}))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("P", RANKS)
def test_all_windows_and_some_documents(layout, P):
    for S in range(1, 41):
        check_windows(S, P, layout, range(1, S + 1))
        for lengths in ([S], [1] * S, [S // 3, 0, S - S // 3], [S // 5, S // 7, S // 2, S - S // 5 - S // 7 - S // 2]):
            for mask in (rl.documents(lengths), rl.documents(lengths) & rl.sliding_window(4)):
                assert_tiles_are_the_mask(mask, layout, S, S, P)
                assert_tiles_are_the_mask(mask & rl.causal, layout, S, S, P)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("P", [1, 3, 4])
def test_short_documents_share_calls(layout, P):
    S = 40
    for mask in (rl.documents([9, 0, 14, 1, 16]), rl.documents([20, 20]), rl.documents([1] * S)):
        for edge in (rl.full, rl.causal, rl.causal & rl.sliding_window(4)):
            assert_tiles_are_the_mask(mask & edge, layout, S, S, P)
    (tile,) = plan(rl.causal & rl.documents([9, 0, 14, 1, 16]), (range(S),), (range(S),))
    assert repr(tile) == "SEGMENTS q[0:40] k[0:40] of 4"
    assert [part.band.rows for part in tile.segments] == [9, 14, 1, 16]
    (tile,) = plan(rl.causal & rl.sliding_window(4), (range(10, 30),), (range(10, 30),))
    assert repr(tile) == "SEGMENTS q[0:20] k[0:20] of 1" and (tile.call.left, tile.call.right) == (3, 0)


def test_positions_of_unequal_steps():
    for q, k in [((range(0, 40, 3),), (range(1, 40, 2),)), ((range(5, 6),), (range(0, 40, 7),))]:
        expected = rl.causal.dense(40, 40).int()[positions_of(q)][:, positions_of(k)]
        found = plan(rl.causal, q, k)
        assert torch.equal(covered(found, count(q), count(k)), expected)
        if len(q[0]) == 1:  # a single position fits every step
            assert [t.kind for t in found] == [Kind.CAUSAL] or [t.kind for t in found] == [Kind.FULL], found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_number_of_tiles_does_not_grow_with_the_number_of_documents(layout):
    """Many short documents, seen over a window that is a little wider than a block: the worst that was found."""
    S, P = 40_000, 4
    mask = rl.documents([7, 60, 2, 131] * 200) | rl.sliding_window(BLOCK + 90)
    for own in layout.ranges(S, P):
        for theirs in layout.ranges(S, P):
            blocks = -(-count(own) // BLOCK) + -(-count(theirs) // BLOCK)
            assert len(plan(mask, own, theirs)) <= 3 * len(own) * len(theirs) * blocks


def test_striped_attention_s_trick_falls_out():
    stripes = rl.striped.ranges(16, 4)
    (tile,) = plan(rl.causal, stripes[1], stripes[3])
    assert (tile.q, tile.k, tile.kind) == (slice(1, 4), slice(0, 3), Kind.CAUSAL)


@pytest.mark.parametrize("mask, q, message", [
    (rl.causal, range(4), r"expected q_ranges to be a tuple of ranges.*got range\(0, 4\)"),
    (rl.causal, [range(4)], "expected q_ranges to be a tuple of ranges"),
    (rl.causal, (1, 2), "expected q_ranges to be a tuple of ranges"),
    ("causal", (range(4),), "expected a mask such as rl.causal .*got 'causal'"),
])  # fmt: skip
def test_what_makes_no_plan(mask, q, message):
    with pytest.raises(ValueError, match=message):
        plan(mask, q, (range(4),))


def test_a_mask_of_ones_own_is_not_kept_alive():
    def own(q, k):
        return q > k

    plan(rl.mask(own) & rl.causal, (range(8),), (range(8),))
    alive = weakref.ref(own)
    del own
    gc.collect()
    assert alive() is None


def test_no_tile_where_nothing_is_seen_or_nothing_is_there():
    assert plan(rl.causal, (range(0, 4),), (range(4, 8),)) == ()
    assert plan(rl.full, (), (range(4, 8),)) == ()
    assert plan(rl.full, (range(4, 8),), ()) == ()
    assert plan(rl.mask(lambda q, k: q < k - 100), (range(0, 8),), (range(0, 8),)) == ()


def pack_of(n, S):
    """n documents of uneven lengths that add up to S."""
    weights = torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.05
    lengths = (weights / weights.sum() * S).int().tolist()
    lengths[0] += S - sum(lengths)
    return rl.documents(lengths)


def visible_pairs(mask, S):
    return sum(
        min(piece.hi.at(p), S) - max(piece.lo.at(p), 0)
        for piece in mask.pieces(0, S)
        for p in range(piece.start, piece.stop)
    )


# S = 131,072 on P = 8 ranks: the most tiles in one step of one rank, and computed over visible scores; both for
# kernels that take every kind of tile, and cut for the others.
# The table that docs/tiles.md shows; `python tests/test_tiles.py` prints it.
ONE = (1, 1.0)
TABLE = {
    # mask: {layout: (planned, cut)}, each (most tiles a step, computed / visible)
    "causal": {"contiguous": (ONE, ONE), "striped": (ONE, ONE), "zigzag": (ONE, ONE)},
    "causal window 512": {
        "contiguous": (ONE, (64, 1.5)),
        "striped": (ONE, (65, 4.97)),
        "zigzag": (ONE, (64, 1.5)),
    },
    "causal window 4096": {
        "contiguous": (ONE, (52, 1.07)),
        "striped": (ONE, (64, 1.49)),
        "zigzag": (ONE, (52, 1.07)),
    },
    "20 causal documents": {
        "contiguous": (ONE, (5, 1.01)),
        "striped": (ONE, (20, 1.01)),
        "zigzag": (ONE, (6, 1.01)),
    },
    "2000 causal documents": {
        "contiguous": (ONE, (36, 10.3)),
        "striped": (ONE, (33, 87.1)),
        "zigzag": (ONE, (37, 10.2)),
    },
}


def table_masks(S):
    return {
        "causal": rl.causal,
        "causal window 512": rl.causal & rl.sliding_window(512),
        "causal window 4096": rl.causal & rl.sliding_window(4096),
        "20 causal documents": rl.causal & pack_of(20, S),
        "2000 causal documents": rl.causal & pack_of(2000, S),
    }


def measure(mask, layout, S, P):
    """(most tiles in a step, computed / visible) as planned, and cut."""
    found = [[], []]
    ranges = layout.ranges(S, P)
    for rank in range(P):
        for source in range(P):
            planned = plan(mask, ranges[rank], ranges[source])
            cut = [simple for tile in planned for simple in tile.cut]
            for step, tiles_of_step in zip(found, (planned, cut), strict=True):
                step.append((len(tiles_of_step), sum(t.area for t in tiles_of_step)))
    visible = visible_pairs(mask, S)
    return [(max(n for n, _ in step), sum(area for _, area in step) / visible) for step in found]


@pytest.mark.parametrize("mask", [
    rl.full, rl.causal, rl.causal & rl.sliding_window(7), rl.sliding_window(3), rl.documents([9, 30, 0, 21]),
    rl.causal & rl.documents([9, 30, 0, 21]), rl.causal | rl.documents([9, 30, 0, 21]),
], ids=str)  # fmt: skip
def test_many_ranges_of_keys_are_looked_at_where_they_can_be_seen(mask):
    """Queries in one piece, in many, and in between; keys in many, in order and not."""
    small = tuple(range(a, a + 4) for a in range(0, 60, 4))
    striped = tuple(r for a in (0, 30) for r in (range(a, a + 10, 2), range(a + 10, a + 30, 3)))
    for q in ((range(0, 60),), (range(5, 33),), small, striped, (range(1, 60, 7), range(59, 60)), (range(0),)):
        for k in (small, small[::2], striped, small[::-1], (*small[:5], range(0), range(50, 60))):
            q_pos, k_pos = positions_of(q), positions_of(k)
            want = mask(q_pos[:, None], k_pos[None, :]).expand(len(q_pos), len(k_pos)).int()
            assert torch.equal(covered(plan(mask, q, k), len(q_pos), len(k_pos)), want), (q, k)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tiles_are_few_and_waste_is_bounded(name, layout):
    S, P = 131072, 8
    for (most, ratio), (bound, waste) in zip(
        measure(table_masks(S)[name], layout, S, P), TABLE[name][layout.name], strict=True
    ):
        assert most <= bound and ratio <= waste, (
            f"{name}, {layout}: {most} a step, {ratio:.2f} times the visible scores"
        )
        assert most <= 3 * (S // P) // BLOCK, "a handful of tiles for every 512 rows of a shard"


if __name__ == "__main__":
    S = 131072
    for name, mask in table_masks(S).items():
        for layout in LAYOUTS:
            (most, ratio), (most_cut, ratio_cut) = measure(mask, layout, S, 8)
            of_causal = ratio_cut * visible_pairs(mask, S) / (S * (S + 1) / 2)
            print(f"| {name} | {layout} | {most} | {ratio:.2f} | {most_cut} | {ratio_cut:.2f} | {of_causal:.1%} |")

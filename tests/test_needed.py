"""A mask removes messages: what a ring carries, how far, and that nothing is missing."""

from __future__ import annotations

import pytest
import torch
from cases import LAYOUTS, assert_equal, make_inputs
from oracle import dense_attention

import ringlearn as rl
from ringlearn import costs
from ringlearn.attention import needed
from ringlearn.attention.needed import Route, route_of
from ringlearn.costs.compare import Problem, compare

S, B, H, G, D = 61, 1, 4, 2, 8
LENGTHS = [9, 1, 0, 17, 5, 2, 20, 7]  # documents, one of them empty
MASKS = {
    "window": rl.sliding_window(6),
    "causal window": rl.causal & rl.sliding_window(20),
    "documents": rl.documents(LENGTHS),
    "causal documents with a window": rl.causal & rl.documents(LENGTHS) & rl.sliding_window(9),
}
DOUBLE = [(2, 2), (3, 2)]
EVERY = [("ring", P) for P in (1, 2, 3, 4, 5, 8)] + [("double ring", P) for P in DOUBLE]
EVERY += [("hybrid", (3, 2)), ("ring self-attention", 6)]
ATTENTION = {
    "ring": rl.ring_attention,
    "double ring": rl.double_ring_attention,
    "hybrid": rl.hybrid_attention,
    "ring self-attention": rl.ring_self_attention,
}


def sent(world):
    """What each rank sent, inside nodes and across."""
    found = [{"inner": 0, "outer": 0} for _ in range(world.size)]
    for e in world.trace.select("send"):
        if e.name.startswith(("rotate", "inner", "outer")):
            found[e.rank]["outer" if e.name.startswith("outer") else "inner"] += e.nbytes
    return found


def formula(way, P, rank, **call):
    if way == "ring":
        return {"inner": costs.ring_bytes(S, P, G, D, rank=rank, itemsize=8, **call), "outer": 0}
    if way == "ring self-attention":
        return {"inner": costs.ring_self_attention_bytes(S, P, G, D, rank=rank, itemsize=8, **call), "outer": 0}
    if way == "hybrid":
        return costs.hybrid_bytes(S, P, H, G, D, rank=rank, itemsize=8, lse_grad=True, **call)
    return costs.double_ring_bytes(S, P, G, D, rank=rank, itemsize=8, **call)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("way", "P"), EVERY, ids=str)
def test_float64_equals_dense_attention_and_bytes_are_the_formula_s(way, P, mask, layout):
    mask, inputs = MASKS[mask], make_inputs(S, H=H, G=G, D_k=D, D_v=D)
    world = rl.SimulatedWorld(P, count_memory=False)
    out, lse = ATTENTION[way](*world.shard(*inputs, layout=layout), mask, return_lse=True)
    there = sent(world)
    got = out.unshard(), lse.unshard()
    assert_equal(got, dense_attention(*inputs, mask), inputs)  # its last run of the world is a backward
    for backward, found in enumerate((there, sent(world))):
        for rank in range(world.size):
            assert found[rank] == formula(way, P, rank, mask=mask, layout=layout, backward=bool(backward))


def seen(mask, layout, P):
    """seen[rank][source]: which of source's keys, in local order, any query of rank sees. From the mask itself."""
    dense = mask.dense(S, S)
    at = [layout.positions(S, P, rank) for rank in range(P)]
    return [[dense[at[rank]][:, at[source]].any(0) for source in range(P)] for rank in range(P)]


@pytest.mark.parametrize("P", [2, 3, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
def test_a_hop_carries_the_rows_that_a_later_rank_sees_and_no_others(layout, mask, P):
    ranges, mask = layout.ranges(S, P), MASKS[mask]
    route, visible = route_of(mask, ranges, ranges), seen(mask, layout, P)
    last = 0
    for source in range(P):
        for hop in range(1, P):
            later = torch.stack([visible[(source + far) % P][source] for far in range(hop, P)]).any(0)
            carried = torch.zeros_like(later)
            for start, stop in route.rows(source, hop):
                carried[start:stop] = True
            assert torch.equal(carried, later) and int(later.sum()) == route.length(source, hop)
            last = max(last, hop * bool(later.any()))
    assert route.hops == last


@pytest.mark.parametrize("P", [2, 3, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_stripes_that_are_carried_hold_all_that_is_seen(mask, P):
    ranges, mask = rl.striped.ranges(S, P), MASKS[mask]
    route, visible = route_of(mask, ranges, ranges), seen(mask, rl.striped, P)
    for source in range(P):
        for far in range(1, P):
            carried = {row for start, stop in route.rows(source, far) for row in range(start, stop)}
            assert set(visible[(source + far) % P][source].nonzero().flatten().tolist()) <= carried


def test_a_window_of_4096_over_8_ranks_of_8192_tokens_is_one_hop_with_4095_rows():
    for P, s, w in ((8, 8192, 4096), (8, 128, 64)):
        ranges, mask = rl.contiguous.ranges(P * s, P), rl.causal & rl.sliding_window(w)
        route = route_of(mask, ranges, ranges)
        assert (route.hops, [route.length(source, 1) for source in range(P)]) == (1, [w - 1] * 7 + [0])
    world = rl.SimulatedWorld(P, count_memory=False)
    q, k, v = (torch.randn(1, heads, P * s, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 1, 1))
    out = rl.ring_attention(*world.shard(q, k, v), mask=mask)
    messages = [[(e.name, e.nbytes) for e in world.trace.select("send", rank)] for rank in range(P)]
    assert messages == [[("rotate 1", (w - 1) * 2 * 16 * 2)]] * (P - 1) + [[]]
    torch.autograd.backward(out.tensors, [torch.randn_like(t) for t in out.tensors])
    back = [[(e.name, e.nbytes) for e in world.trace.select("send", rank)] for rank in range(P)]
    assert back == [[], *[[("rotate back 1", (w - 1) * 2 * 16 * 2)]] * (P - 1)], "in the dtype of k: no sum yet"
    rows = {row.name: row for row in compare(Problem(P * s, (1, P), 4, 1, 16, mask=mask))}
    assert (rows["ring"].messages, rows["ring"].sent["inner"]) == (1, (w - 1) * 2 * 16 * 2)


@pytest.mark.parametrize("width", [1, 2, 10, 11, 12, 21, 22, 35, 70])
def test_hops_of_a_window(width):
    s, P = 10, 7
    ranges = rl.contiguous.ranges(s * P, P)
    route = route_of(rl.causal & rl.sliding_window(width), ranges, ranges)
    assert route.hops == min(P - 1, -(-(width - 1) // s))
    assert [route.length(0, hop) for hop in range(1, P)] == [
        max(0, min(s, width - 1 - s * (hop - 1))) for hop in range(1, P)
    ]


def test_a_picture_shows_that_each_rank_meets_the_keys_it_needs_and_ends_at_home():
    world, inputs = rl.SimulatedWorld(4, count_memory=False), make_inputs(64, H=2, G=2, D_k=8, D_v=8)
    out = rl.ring_attention(*world.shard(*inputs), mask=rl.causal & rl.sliding_window(20))
    met = [[turn.used for turn in turns] for turns in rl.viz.blocks.turns(world.trace).values()]
    assert met == [[(0,)], [(1,), (0,)], [(2,), (1,), (0,)], [(3,), (2,), (1,)]]
    torch.autograd.backward(out.tensors, [torch.randn_like(t) for t in out.tensors])
    met = [[turn.used for turn in turns if turn.used] for turns in rl.viz.blocks.turns(world.trace).values()]
    assert met == [[(0,)], [(0,), (1,)], [(0,), (1,), (2,)], [(1,), (2,), (3,)]]


def test_documents_that_end_where_shards_end_need_no_messages():
    world, inputs = rl.SimulatedWorld(4, count_memory=False), make_inputs(40, H=2, G=2, D_k=4, D_v=4)
    out = rl.ring_attention(*world.shard(*inputs), mask=rl.documents([10, 10, 3, 7, 10])).unshard()
    assert not world.trace.select("send")
    out.sum().backward()
    assert not world.trace.select("send")


@pytest.mark.parametrize("way", ["ring", "double ring"])
def test_full_causal_and_a_user_s_mask_send_everything(way):
    P = 6 if way == "ring" else (3, 2)
    own = rl.mask(lambda q, k: (q - k).abs() < 3)
    inputs, everything = make_inputs(S, H=H, G=G, D_k=D, D_v=D), []
    for mask in (rl.full, rl.causal, own, own & rl.documents(LENGTHS)):
        world = rl.SimulatedWorld(P, count_memory=False)
        out = ATTENTION[way](*world.shard(*inputs), mask).unshard()
        there = sent(world)
        out.sum().backward()
        everything.append((there, sent(world)))
        assert there == [formula(way, P, rank, mask=mask) for rank in range(6)]
    assert all(x == everything[0] for x in everything)


MEMORY = [
    ("ring", 3, rl.striped),
    ("ring", 5, rl.contiguous),
    ("ring", 5, rl.zigzag),
    ("double ring", (3, 2), rl.contiguous),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("way", "P", "layout"), MEMORY, ids=str)
def test_memory_is_never_above_that_of_a_ring_that_carries_everything(way, P, layout, monkeypatch):
    """Of a call, forward and backward, and of its backward alone, on every rank."""
    masks = [
        *MASKS.values(),
        rl.causal & rl.sliding_window(50),
        rl.sliding_window(45),
        rl.documents([5, 56]),
        rl.causal & rl.documents([33, 28]),
    ]
    for mask, dtype in zip(masks, [torch.float32, torch.bfloat16] * 4):
        held = []
        for whole in (False, True):
            with monkeypatch.context() as patch:
                if whole:
                    patch.setattr("ringlearn.attention.strategy.route_of", lambda mask, q, k: Route(k))
                world = rl.SimulatedWorld(P)
                inputs = [x.detach().to(dtype).requires_grad_() for x in make_inputs(S, H=H, G=G, D_k=D, D_v=D)]
                shards = world.shard(*inputs, layout=layout)
                world.memory.clear()
                out = ATTENTION[way](*shards, mask)
                forward = [world.memory.peak_bytes(rank) for rank in range(world.size)]
                world.memory.clear()
                torch.autograd.backward(out.tensors, [torch.randn_like(t) for t in out.tensors])
                held.append((forward, [world.memory.peak_bytes(rank) for rank in range(world.size)]))
        (forward, backward), (forward_whole, backward_whole) = held
        for rank in range(len(forward)):
            assert backward[rank] <= backward_whole[rank], f"{mask}, rank {rank}"
            assert forward[rank] <= max(forward_whole[rank], backward_whole[rank]), f"{mask}, rank {rank}"


@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
def test_who_needs_what_is_asked_twice_for_each_range_of_queries_and_kept(layout, monkeypatch):
    """Of 2,000 documents too: a training step has a fresh mask."""
    asked, P = [], 8
    lengths = [1 + n * 7919 % 64 for n in range(2000)]
    pieces = rl.masks.And.pieces
    monkeypatch.setattr(rl.masks.And, "pieces", lambda mask, a, b: asked.append((a, b)) or pieces(mask, a, b))
    mask, ranges = rl.causal & rl.documents(lengths), layout.ranges(sum(lengths), P)
    route = route_of(mask, ranges, ranges)
    assert len(asked) == 2 * sum(map(len, ranges)) and all(b == a + 1 for a, b in asked)
    assert route_of(rl.causal & rl.documents(lengths), ranges, ranges) is route
    assert route.longest <= 64 * len(ranges[0])


def test_positions_in_too_many_pieces_are_not_asked_about():
    lengths = [4] * (needed.MANY + 1)
    ranges = rl.zigzag_per_document(lengths).ranges(sum(lengths), 2)
    assert route_of(rl.documents(lengths), ranges, ranges).whole


@pytest.mark.parametrize("layout", [rl.striped, rl.zigzag, rl.contiguous], ids=str)
def test_a_double_ring_whose_rings_inside_nodes_are_not_whole(layout):
    """Over all ranks the ring is whole, because a window hides nothing or ranges are many; inside a node it is not."""
    torch.manual_seed(0)
    for S_k, S_q, mask in (
        (50, 17, rl.causal & rl.sliding_window(60)),
        (150, 150, rl.causal & rl.documents([1, 2, 3] * 25)),
    ):
        q = torch.randn(1, 2, S_q, 8, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(1, 2, S_k, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        shards = rl.SimulatedWorld((2, 2)).shard(q, k, v, layout=layout)
        found = []
        for attention in (rl.double_ring_attention, rl.ring_attention):
            out = attention(*shards, mask=mask, q_start=S_k - S_q).unshard()
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for got, want in zip(*found, strict=True):
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_bytes_of_a_double_ring_whose_rings_inside_nodes_are_not_whole():
    """Some ranks have a range more than are asked about, others do not."""
    lengths = [int(digit) for digit in "26641968466448844883333828552983513513449781731232641733"]
    mask, layout = rl.causal & rl.documents(lengths), rl.zigzag_per_document(lengths)
    tensors = make_inputs(sum(lengths), H=H, G=G, D_k=D, D_v=D)
    world = rl.SimulatedWorld((2, 2), count_memory=False)
    out, lse = rl.double_ring_attention(*world.shard(*tensors, layout=layout), mask, return_lse=True)
    there = sent(world)
    assert_equal((out.unshard(), lse.unshard()), dense_attention(*tensors, mask), tensors)
    for backward, found in enumerate((there, sent(world))):
        for rank in range(4):
            how = dict(rank=rank, itemsize=8, mask=mask, layout=layout, backward=bool(backward))
            assert found[rank] == costs.double_ring_bytes(sum(lengths), (2, 2), G, D, **how)

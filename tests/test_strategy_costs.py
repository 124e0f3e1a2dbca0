"""What strategies send and hold is what the formulas say, to the byte, on every rank."""

import pytest
import torch

import ringlearn as rl
from ringlearn import strategy_costs as costs

S, D, B = 53, 8, 2
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
HEADS = [(8, 8), (8, 2), (6, 3), (3, 1), (1, 1)]
LAYOUTS = [rl.contiguous, rl.striped, rl.zigzag]


def run(size, attention, H, G, itemsize, layout, B=B, lse_grad=False, **options):
    """The world after the forward, and after the backward: what each rank sent, inside and across nodes, and held."""
    world, seen = rl.SimulatedWorld(size), []
    q, k, v = (torch.randn(B, h, S, D, dtype=DTYPES[itemsize], requires_grad=True) for h in (H, G, G))
    shards = world.shard(q, k, v, layout=layout)
    dout = world.shard(torch.randn_like(q).detach(), layout=layout).tensors
    world.memory.clear()
    out, lse = attention(*shards, mask=rl.causal, return_lse=True, **options)
    for turn in range(2):
        sent = [[0, 0, 0] for _ in range(world.size)]
        for e in world.trace.select("send"):
            sent[e.rank][("inner", "outer").index(e.name[:5]) if e.name[:5] in ("inner", "outer") else 2] += e.nbytes
        seen.append([(*sent[r], world.memory.most(r)) for r in range(world.size)])
        world.memory.clear()
        if not turn:
            outputs = [*out.tensors, *lse.tensors] if lse_grad else out.tensors
            torch.autograd.backward(outputs, [*dout, *map(torch.ones_like, lse.tensors)] if lse_grad else dout)
    return seen


def only(most, *names):
    return {name: most[name] for name in names if name in most}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("heads_at_once", [None, 1, 2])
@pytest.mark.parametrize("P", [1, 2, 5])
def test_all_gather(P, heads_at_once, itemsize, layout):
    seen = run(P, rl.all_gather_attention, 6, 3, itemsize, layout, heads_at_once=heads_at_once)
    for backward, ranks in enumerate(seen):
        for rank, (*_, sent, most) in enumerate(ranks):
            call = dict(S=S, P=P, G=3, D=D, B=B, itemsize=itemsize, backward=backward, rank=rank, layout=layout)
            assert sent == costs.all_gather_bytes(**call)
            expected = costs.all_gather_memory(**call, heads_at_once=heads_at_once)
            assert only(most, "in flight", "gathered") == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_ring_self_attention(P, itemsize, layout):
    for backward, ranks in enumerate(run(P, rl.ring_self_attention, 6, 3, itemsize, layout)):
        for rank, (*_, sent, most) in enumerate(ranks):
            call = dict(S=S, P=P, G=3, D=D, B=B, itemsize=itemsize, backward=backward, rank=rank, layout=layout)
            assert sent == costs.ring_self_attention_bytes(**call)
            assert only(most, "in flight", "scores") == costs.ring_self_attention_memory(H=6, **call)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("P, itemsize, B, lse_grad", [(1, 2, 1, False), (4, 2, 1, False), (4, 4, 2, True),
                                                      (5, 8, 1, True), (5, 2, 2, False)])  # fmt: skip
def test_ulysses(P, itemsize, B, lse_grad, heads, layout):
    H, G = heads
    for backward, ranks in enumerate(run(P, rl.ulysses_attention, H, G, itemsize, layout, B, lse_grad)):
        for rank, (*_, sent, most) in enumerate(ranks):
            call = dict(S=S, P=P, H=H, G=G, D=D, B=B, itemsize=itemsize, backward=backward, lse_grad=lse_grad)
            assert sent == costs.ulysses_bytes(**call, rank=rank, layout=layout)
            assert only(most, "in flight", "gathered") == costs.ulysses_memory(**call, rank=rank, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shape, itemsize, lse_grad", [((2, 2), 2, False), ((3, 2), 2, True), ((2, 3), 4, False),
                                                       ((1, 3), 8, False), ((3, 1), 2, False)])  # fmt: skip
def test_hybrid(shape, itemsize, lse_grad, heads, layout):
    H, G = heads
    for backward, ranks in enumerate(run(shape, rl.hybrid_attention, H, G, itemsize, layout, lse_grad=lse_grad)):
        for rank, (inner, outer, rest, most) in enumerate(ranks):
            call = dict(S=S, shape=shape, H=H, G=G, D=D, B=B, itemsize=itemsize, rank=rank, layout=layout)
            expected = costs.hybrid_bytes(**call, backward=backward, lse_grad=lse_grad)
            assert {"inner": inner, "outer": outer} == expected and not rest
            if not backward:
                assert only(most, "in flight", "gathered") == costs.hybrid_memory(**call)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (1, 3), (3, 1), (2, 1)])
def test_double_ring(shape, itemsize, layout):
    for backward, ranks in enumerate(run(shape, rl.double_ring_attention, 6, 3, itemsize, layout)):
        for rank, (inner, outer, rest, most) in enumerate(ranks):
            call = dict(S=S, shape=shape, G=3, D=D, B=B, itemsize=itemsize, rank=rank, layout=layout)
            assert {"inner": inner, "outer": outer} == costs.double_ring_bytes(**call, backward=backward) and not rest
            if not backward:
                assert only(most, "in flight") == costs.double_ring_memory(**call)

"""What strategies send and hold is what the formulas say, to the byte, on every rank."""

from inspect import signature

import pytest
import torch
from pairwise import pairwise, product

import ringlearn as rl
from ringlearn import costs

S, D, B = 53, 8, 2
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
HEADS = [(8, 8), (8, 2), (6, 3), (3, 1), (1, 1)]
GRID = {"layout": [rl.contiguous, rl.striped, rl.zigzag], "itemsize": list(DTYPES)}


def over(**choices):
    """A test of pairs of choices; all combinations are for the full matrix."""
    few = pairwise(GRID | choices)
    rest = [pytest.param(case, marks=pytest.mark.slow) for case in product(GRID | choices) if case not in few]
    return pytest.mark.parametrize("case", [*few, *rest], ids=lambda case: "-".join(map(str, case.values())))


def run(attention, H, G, itemsize, layout, B=B, lse_grad=False, P=None, shape=None, mask=rl.causal, **options):
    """The world after the forward, and after the backward: what each rank sent, inside and across nodes, and held."""
    world, seen = rl.SimulatedWorld(shape or P), []
    q, k, v = (torch.randn(B, h, S, D, dtype=DTYPES[itemsize], requires_grad=True) for h in (H, G, G))
    shards = world.shard(q, k, v, layout=layout)
    dout = world.shard(torch.randn_like(q).detach(), layout=layout).tensors
    world.memory.clear()
    out, lse = attention(*shards, mask=mask, return_lse=True, **options)
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


def check(seen, nbytes, memory, components, **call):
    """What each rank sent and held is what the formulas say; memory may depend on more than bytes do."""
    for backward, ranks in enumerate(seen):
        for rank, (inner, outer, rest, most) in enumerate(ranks):
            given = dict(S=S, D=D, backward=backward, rank=rank) | call
            assert {name: most[name] for name in components if name in most} == memory(**given)
            wanted = signature(nbytes).parameters
            sent = nbytes(**{name: value for name, value in given.items() if name in wanted})
            assert (sent, 0) == (({"inner": inner, "outer": outer}, rest) if isinstance(sent, dict) else (rest, 0))


@over(P=[1, 2, 5], heads_at_once=[None, 1, 2])
def test_all_gather(case):
    seen = run(attention=rl.all_gather_attention, H=6, G=3, **case)
    check(seen, costs.all_gather_bytes, costs.all_gather_memory, ("in flight", "gathered"), G=3, B=B, **case)


@over(P=[1, 2, 3, 5])
def test_ring_self_attention(case):
    seen, formulas = run(attention=rl.ring_self_attention, H=6, G=3, **case), costs.ring_self_attention_memory
    check(seen, costs.ring_self_attention_bytes, formulas, ("in flight", "scores"), H=6, G=3, B=B, **case)


@over(P=[1, 4, 5], heads=HEADS, B=[1, 2], lse_grad=[False, True])
def test_ulysses(case):
    case = dict(case)
    case["H"], case["G"] = case.pop("heads")
    seen = run(attention=rl.ulysses_attention, **case)
    check(seen, costs.ulysses_bytes, costs.ulysses_memory, ("in flight", "gathered"), **case)


@over(shape=[(2, 2), (3, 2), (2, 3), (1, 3), (3, 1)], heads=HEADS, B=[1, 2], lse_grad=[False, True])
def test_hybrid(case):
    case = dict(case)
    case["H"], case["G"] = case.pop("heads")
    seen = run(attention=rl.hybrid_attention, mask=rl.full, **case)
    check(seen, costs.hybrid_bytes, costs.hybrid_memory, ("in flight", "gathered"), **case)


@pytest.mark.parametrize(
    ("shape", "heads", "lse_grad"), [((2, 2), (8, 2), False), ((2, 2), (8, 8), True), ((3, 2), (6, 3), False)]
)
def test_hybrid_gradients_that_stay_in_the_message_that_brought_them(shape, heads, lse_grad):
    """Between two nodes those that were summed wider than they travel, among three those that were found narrower."""
    case = dict(layout=rl.zigzag, itemsize=2, shape=shape, heads=heads, B=1, lse_grad=lse_grad)
    test_hybrid(case)


@over(shape=[(2, 2), (2, 3), (3, 2), (1, 3), (3, 1), (2, 1), (1, 2), (1, 1), (3, 3)], heads=[(6, 3), (3, 3)])
def test_double_ring(case):
    case = dict(case)
    H, G = case.pop("heads")
    seen = run(attention=rl.double_ring_attention, H=H, G=G, mask=rl.full, **case)
    check(seen, costs.double_ring_bytes, costs.double_ring_memory, ("in flight",), G=G, B=B, **case)


# ---- Seconds: the virtual clock --------------------------------------------------------------------------------------

SLOW, FAST = dict(bandwidth=1e9, latency=1e-5), dict(bandwidth=1e13, latency=0.0)


def simulated(attention, size, S, H, G, D, flops, bandwidth, latency, **options):
    world = rl.SimulatedWorld(size, hardware=rl.worlds.Hardware(flops, bandwidth, latency), device="meta")
    x = [torch.empty(1, h, S, D, dtype=torch.bfloat16, device="meta") for h in (H, G, G)]
    attention(*world.shard(*x), **options)
    return world.trace.makespan()


def same(formula, clock):
    return abs(formula - clock) <= 1e-9 * clock


@pytest.mark.parametrize("wire", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("P", [1, 2, 4])
def test_seconds_of_ways_over_one_axis(P, wire):
    call = dict(S=64, H=8, G=4, D=16, flops=1e11, **wire)
    for n in (None, 1, 3):
        clock = simulated(rl.all_gather_attention, P, **call, heads_at_once=n)
        assert same(costs.all_gather_seconds(P=P, **call, heads_at_once=n), clock)
    assert same(costs.ulysses_seconds(P=P, **call), simulated(rl.ulysses_attention, P, **call))
    assert same(costs.ring_self_attention_seconds(P=P, **call), simulated(rl.ring_self_attention, P, **call))


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("P", [4, 8])
def test_seconds_of_ulysses_where_ranks_share_keys(P, heads):
    H, G = heads
    call = dict(S=64, H=H, G=G, D=16, flops=1e11, **SLOW)
    assert same(costs.ulysses_seconds(P=P, **call), simulated(rl.ulysses_attention, P, **call))


@pytest.mark.parametrize("wire", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 4), (4, 1), (1, 4)], ids=str)
def test_seconds_of_ways_over_two_axes(shape, wire):
    call = dict(S=96, H=8, G=4, D=16, flops=1e11, **wire)
    outer = dict(outer_bandwidth=wire["bandwidth"])
    assert same(costs.hybrid_seconds(shape=shape, **call, **outer), simulated(rl.hybrid_attention, shape, **call))
    if wire is FAST or 1 in shape:
        formula = costs.double_ring_seconds(shape=shape, **call, **outer)
        assert same(formula, simulated(rl.double_ring_attention, shape, **call))


@pytest.mark.parametrize("P, S, heads", [(5, 53, (6, 3)), (4, 50, (3, 1)), (3, 50, (8, 2))])
def test_seconds_are_a_bound_where_nothing_divides(P, S, heads):
    H, G = heads
    call = dict(S=S, H=H, G=G, D=16, flops=1e11, **SLOW)
    for name in ("all_gather", "ulysses", "ring_self"):
        attention = getattr(rl, f"{name}_attention")
        formula = getattr(costs, f"{name}_attention_seconds" if name == "ring_self" else f"{name}_seconds")
        clock = simulated(attention, P, **call)
        assert clock <= formula(P=P, **call) * (1 + 1e-9) < 2 * clock


def test_a_hop_between_nodes_costs_what_a_turn_inside_does_not_hide():
    call = dict(S=96, H=8, G=4, D=16, flops=1e12, bandwidth=1e13)
    fast, slow = (costs.double_ring_seconds(shape=(3, 4), **call, outer_bandwidth=w) for w in (1e13, 1e8))
    turn, across = fast / 3, 2 * 4 * 8 * 16 * 2 / 1e8
    assert turn < across and same(slow, 2 * across + turn)

"""Every strategy in simulated worlds against dense attention in float64; the ring's own tests are in another file."""

from functools import partial
from itertools import cycle

import pytest
import torch
from cases import (
    LAYOUTS,
    MASKS,
    SCORES,
    VARIANTS,
    assert_equal,
    case_id,
    check_against_dense,
    make_inputs,
    run_low_precision,
)
from oracle import dense_attention, relative
from pairwise import pairwise, product

import ringlearn as rl
from ringlearn.attention import ALL_GATHER, DOUBLE_RING, RING, RING_SELF_ATTENTION, ULYSSES, hybrid, table
from ringlearn.worlds import PerRank

NAMED = {entry.costs[0].name: entry for entry in table.STRATEGIES.values()}
ONE_AXIS = {name: entry.function for name, entry in NAMED.items() if entry.strategy.axes == 1 and name != "ring"}
ONE_AXIS["all-gather by heads"] = partial(rl.all_gather_attention, heads_at_once=1)
TWO_AXES = {name: entry.function for name, entry in NAMED.items() if entry.strategy.axes == 2} | {
    "hybrid over all-gather": partial(rl.hybrid_attention, outer=ALL_GATHER),
    "hybrid over ring self-attention": partial(rl.hybrid_attention, outer=RING_SELF_ATTENTION),
}
STRATEGIES = ONE_AXIS | TWO_AXES
RING_TOO = {"ring": rl.ring_attention, "ring, reference kernel": partial(rl.ring_attention, kernel="reference")}
RING_TOO |= STRATEGIES
WITHOUT_KERNEL = ("ring self-attention", "hybrid over ring self-attention")

# Head counts that divide nothing: H, G.
HEADS = {"6:3": (6, 3), "3:1": (3, 1), "5:5": (5, 5), "8:2": (8, 2), "1:1": (1, 1)}
VARIANTS = VARIANTS | {name: dict(H=H, G=G, D_k=8, D_v=8) for name, (H, G) in HEADS.items()}

GRID = {
    "layout": LAYOUTS,
    "mask": list(MASKS),
    "S": [1, 7, 64, 97],
    "variant": list(VARIANTS),
    "kernel": ["reference", None],
    "scores": list(SCORES),
}
SMALL = {"layout": LAYOUTS, "mask": list(MASKS), "S": [7, 97], "variant": ["GQA", "MQA", "6:3"]}
SIZES = {"P": [1, 2, 3, 4, 5, 8]}
SHAPES = {"P": [(2, 2), (2, 3), (3, 2), (1, 3), (3, 1), (2, 4)]}


def check(strategy, kernel, variant, **case):
    kernel = None if strategy in WITHOUT_KERNEL else kernel
    check_against_dense(**case, variant=VARIANTS[variant], kernel=kernel, attention=STRATEGIES[strategy])


def world_of(strategy, P=4):
    return rl.SimulatedWorld((2, P // 2) if strategy in TWO_AXES else P, count_memory=False)


CASES = pairwise({"strategy": list(ONE_AXIS)} | SIZES | GRID) + pairwise({"strategy": list(TWO_AXES)} | SHAPES | GRID)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_float64_equals_dense_attention(case):
    check(**case)


EVERY = product({"strategy": list(ONE_AXIS)} | SIZES | SMALL) + product({"strategy": list(TWO_AXES)} | SHAPES | SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=case_id)
def test_float64_equals_dense_attention_in_every_combination(case):
    n = len(case_id(case))
    check(**case, kernel="reference" if n % 2 else None, scores=list(SCORES)[n % len(SCORES)])


@pytest.mark.parametrize("P", [4, 8])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("strategy", ["ulysses", "hybrid", "hybrid over all-gather"])
def test_heads_that_do_not_divide_and_fewer_heads_than_ranks(strategy, heads, P):
    P = (2, P // 2) if strategy in TWO_AXES else P
    check(strategy, None, heads, layout=rl.zigzag, mask="causal", P=P, S=41)


@pytest.mark.parametrize(("strategy", "layout"), list(zip(RING_TOO, cycle(LAYOUTS))), ids=str)
def test_gradcheck(strategy, layout):
    """Of lse as well; that other layouts have the gradients of dense attention is tested above."""
    inputs = make_inputs(5, H=2, G=1, D_k=3, D_v=2)
    world = world_of(strategy)

    def attention(q, k, v):
        out, lse = RING_TOO[strategy](*world.shard(q, k, v, layout=layout), mask=rl.causal, return_lse=True)
        return out.unshard(), lse.unshard()

    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_precision(strategy, dtype):
    for P in ((2, 2), (2, 4)) if strategy in TWO_AXES else (4, 8):
        errors, sdpa, _ = run_low_precision(dtype, P, S=128, attention=STRATEGIES[strategy])
        if dtype == torch.float32:
            assert max(errors) < 1e-5, errors
        for name, mine, theirs in zip(("out", "dq", "dk", "dv"), errors, sdpa):
            assert dtype == torch.float32 or mine <= 2 * theirs, f"{name}: {mine:.2e}, one SDPA call {theirs:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("strategy", RING_TOO)
def test_causality_is_bit_exact(strategy, layout):
    S, cut = 47, 21
    q, k, v = (t.detach() for t in make_inputs(S, H=4, G=2, D_k=8, D_v=8, dtype=torch.float32))
    world = world_of(strategy)

    def attend(q, k, v):
        return RING_TOO[strategy](*world.shard(q, k, v, layout=layout), mask=rl.causal).unshard()

    before = attend(q, k, v)
    for t in (q, k, v):
        t[:, :, cut:] = 1e3 * torch.randn_like(t[:, :, cut:])
    after = attend(q, k, v)
    assert torch.equal(before[:, :, :cut], after[:, :, :cut])
    assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("strategy", RING_TOO)
def test_rows_that_see_no_key_give_zero_and_no_gradient(strategy, layout):
    blind = rl.mask(lambda q, k: (q % 3 != 0) & (k <= q))  # every third query sees nothing
    q, k, v = make_inputs(50, H=4, G=2, D_k=8, D_v=8, dtype=torch.float32)
    shards = world_of(strategy).shard(q, k, v, layout=layout)
    out, lse = RING_TOO[strategy](*shards, mask=blind, return_lse=True)
    out, lse = out.unshard(), lse.unshard()
    assert bool((out[:, :, ::3] == 0).all()) and bool((lse[:, :, ::3] == -torch.inf).all())
    expected, _ = dense_attention(q, k, v, blind)
    dout = torch.randn_like(out)
    grads, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected))
    assert bool((grads[0][:, :, ::3] == 0).all())
    assert all(relative(a, b) < 1e-5 for a, b in zip((out, *grads), (expected, *wanted)))


@pytest.mark.parametrize("scores", ["sinks", "all"])
@pytest.mark.parametrize("strategy", RING_TOO)
def test_rows_that_see_no_key_see_their_sink(strategy, scores):
    blind = rl.mask(lambda q, k: (q % 3 != 0) & (k <= q))
    q, k, v = make_inputs(50, H=10, G=2, D_k=8, D_v=8)
    changes = SCORES[scores](10)
    sinks = changes["sinks"]
    shards = world_of(strategy).shard(q, k, v, layout=rl.zigzag)
    out, lse = RING_TOO[strategy](*shards, mask=blind, return_lse=True, **changes)
    out, lse = out.unshard(), lse.unshard()
    assert bool((out[:, :, ::3] == 0).all())
    assert torch.equal(lse[:, :, ::3], sinks.detach()[None, :, None].expand(1, 10, 17))
    assert_equal((out, lse), dense_attention(q, k, v, blind, **changes), (q, k, v, sinks))


@pytest.mark.parametrize("strategy", RING_TOO)
def test_a_sink_without_weight_changes_nothing(strategy):
    q, k, v = make_inputs(21, H=6, G=3, D_k=8, D_v=8)
    blind = rl.mask(lambda q, k: (q % 3 != 0) & (k <= q))
    sinks = torch.full((6,), -torch.inf).requires_grad_()
    shards = world_of(strategy).shard(q, k, v)
    (out, lse), (plain, plain_lse) = (
        RING_TOO[strategy](*shards, mask=blind, return_lse=True, sinks=x) for x in (sinks, None)
    )
    assert relative(out.unshard(), plain.unshard()) < 1e-15 and relative(lse.unshard(), plain_lse.unshard()) < 1e-15
    out.unshard().sum().backward()
    assert torch.equal(sinks.grad, torch.zeros(6))


@pytest.mark.parametrize("strategy", RING_TOO)
def test_no_queries_no_keys(strategy):
    world, attend = world_of(strategy), RING_TOO[strategy]
    q, k, v = (torch.randn(1, 2, s, 4, requires_grad=True) for s in (6, 0, 0))
    out, lse = attend(*world.shard(q, k, v), return_lse=True)
    assert bool((out.unshard() == 0).all()) and bool((lse.unshard() == -torch.inf).all())
    out.unshard().sum().backward()
    assert bool((q.grad == 0).all()) and k.grad.shape == (1, 2, 0, 4)
    sinks = torch.randn(2, requires_grad=True)
    out, lse = attend(*world.shard(q, k, v), return_lse=True, sinks=sinks, softcap=2.0, alibi=[0.5, 0.25])
    assert bool((out.unshard() == 0).all()) and torch.equal(lse.unshard(), sinks[None, :, None].expand(1, 2, 6))
    lse.unshard().sum().backward()
    assert torch.equal(sinks.grad, torch.full((2,), 6.0))
    none = attend(*world.shard(*(torch.randn(1, 2, s, 4) for s in (0, 6, 6))), sinks=sinks).unshard()
    assert none.shape == (1, 2, 0, 4)


@pytest.mark.parametrize("strategy", RING_TOO)
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_a_loss_that_uses_one_rank_only(strategy, of):
    """The gradients of the other ranks' out and lse are not there, and the messages that bring them must be."""
    q, k, v = make_inputs(12, H=4, G=2, D_k=4, D_v=4)
    out, lse = RING_TOO[strategy](*world_of(strategy).shard(q, k, v), mask=rl.causal, return_lse=True)
    expected, expected_lse = dense_attention(q, k, v, rl.causal)
    mine, theirs = [], []
    if of != "lse":
        mine, theirs = [out.tensors[1].sum()], [expected[:, :, 3:6].sum()]
    if of != "out":
        mine, theirs = [*mine, lse.tensors[2].sum()], [*theirs, expected_lse[:, :, 6:9].sum()]
    got, wanted = (torch.autograd.grad(sum(loss), (q, k, v), allow_unused=True) for loss in (mine, theirs))
    for g, w in zip(got, wanted, strict=True):
        assert relative(g, torch.zeros_like(g) if w is None else w) < 1e-12


@pytest.mark.parametrize("strategy", RING_TOO)
def test_a_second_derivative_is_refused(strategy):
    q, k, v = make_inputs(6, H=2, G=1, D_k=2, D_v=2)
    out = RING_TOO[strategy](*world_of(strategy).shard(q, k, v)).unshard()
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="_attention: a gradient of its gradient is not supported"):
        dq.sum().backward()


@pytest.mark.parametrize("strategy", RING_TOO)
def test_meta_tensors(strategy):
    """The programs that are run for their numbers are run for their shapes and messages too."""
    shape, sent = (2, 2) if strategy in TWO_AXES else 4, []
    for device in ("meta", "cpu"):
        world = rl.SimulatedWorld(shape, device=device)
        q, k, v = (torch.empty(1, h, 42, 8, device=device, requires_grad=True) for h in (6, 2, 2))
        out = RING_TOO[strategy](*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal).unshard()
        out.sum().backward()
        assert out.device.type == device and q.grad.shape == q.shape and k.grad.shape == v.grad.shape == k.shape
        sent.append([(world.trace.messages(rank), world.trace.bytes_sent(rank)) for rank in range(4)])
    assert sent[0] == sent[1]


@pytest.mark.parametrize("strategy", [ALL_GATHER, ULYSSES, RING, hybrid(RING), hybrid(ALL_GATHER), DOUBLE_RING],
                         ids=lambda s: s.name)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "causal documents"])
def test_hand_written_backward_equals_autograd_through_the_wire(strategy, layout, mask):
    """With messages passed by reference, plain autograd through the forward program shares no formula with the
    backward program."""
    S, shape = 23, (2, 2) if strategy.axes == 2 else 4
    world = rl.SimulatedWorld(shape, wire="reference", count_memory=False)
    shards = [
        [p.requires_grad_() for p in x.map(torch.Tensor.detach).tensors]
        for x in world.shard(*make_inputs(S, H=4, G=2, D_k=4, D_v=6), layout=layout)
    ]
    ranges = layout.ranges(S, 4)
    spec = rl.attention.Spec(MASKS[mask](S), ranges, ranges, 0.5, rl.kernels.choose("reference"))
    partials, *kept = zip(*world.run(strategy.forward, *map(PerRank, shards), spec), strict=True)
    douts, dlses = ([torch.randn_like(p[i]) for p in partials] for i in (0, 1))
    flat = [t for x in shards for t in x]
    expected = torch.autograd.grad(
        [p.out for p in partials] + [p.lse for p in partials], flat, douts + dlses, allow_unused=True
    )
    with torch.no_grad():
        results = rl.SimulatedWorld(shape).run(
            strategy.backward,
            PerRank(douts),
            *map(PerRank, shards),
            PerRank(p.out for p in partials),
            PerRank(p.lse for p in partials),
            PerRank(dlses),
            *(PerRank(t.detach() for t in x) for x in kept),
            spec,
        )
    for g, e in zip((r[i] for i in range(3) for r in results), expected, strict=True):
        assert relative(g, torch.zeros_like(g) if e is None else e) < 1e-12


# --- how it is done ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ulysses_is_one_causal_tile_under_every_layout(layout):
    q, k, v = (torch.randn(1, h, 41, 8, requires_grad=True) for h in (8, 4, 4))
    world = rl.SimulatedWorld(4)
    out = rl.ulysses_attention(*world.shard(q, k, v, layout=layout), mask=rl.causal)
    for _ in range(2):  # forward, backward
        assert [str(e.tile) for e in world.trace.select("compute")] == ["CAUSAL q[0:41] k[0:41]"] * 4
        assert all(world.trace.messages(rank) == 2 * 3 for rank in range(4)), "one packed message to each, twice"
        out.unshard().sum().backward(retain_graph=True)


@pytest.mark.parametrize("layout, tiles", [(rl.contiguous, 2), (rl.striped, 4), (rl.zigzag, 4)], ids=lambda x: str(x))
def test_gathered_keys_make_few_tiles_and_none_that_needs_the_mask(layout, tiles):
    world = rl.SimulatedWorld(4)
    rl.all_gather_attention(*world.shard(*(torch.randn(1, 2, 64, 8) for _ in range(3)), layout=layout), mask=rl.causal)
    for rank in range(4):
        seen = [e.tile.kind.name for e in world.trace.select("compute", rank)]
        assert len(seen) <= tiles and "PARTIAL" not in seen


def test_hybrid_zigzag_is_zigzag_over_nodes():
    q, k, v = (torch.randn(1, 4, 48, 8) for _ in range(3))
    world = rl.SimulatedWorld((3, 2))
    rl.hybrid_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
    for rank in range(6):
        assert len(world.trace.select("compute", rank)) == 3, "one kernel call for each node"
    assert max(map(world.trace.flops, range(6))) == min(map(world.trace.flops, range(6)))


def test_ranks_beyond_the_heads_compute_nothing():
    world = rl.SimulatedWorld(5)
    rl.ulysses_attention(*world.shard(*(torch.randn(1, h, 20, 4) for h in (3, 1, 1))))
    assert [len(world.trace.select("compute", rank)) for rank in range(5)] == [1, 1, 1, 0, 0]


def test_the_next_heads_travel_while_these_are_computed():
    slow = rl.worlds.Hardware(flops=1e6, bandwidth=1e9, latency=1e-9)
    q, k, v = (torch.randn(1, 4, 64, 8) for _ in range(3))
    waits = []
    for heads_at_once in (None, 1):
        world = rl.SimulatedWorld(4, hardware=slow)
        rl.all_gather_attention(*world.shard(q, k, v), heads_at_once=heads_at_once)
        waits.append(max(world.trace.seconds("wait", rank) for rank in range(4)))
    assert 0 < waits[1] < waits[0] / 3


def test_a_hop_between_nodes_has_a_turn_of_the_inner_ring_to_hide():
    """Of the messages across nodes, each is awaited as many kernel calls later as a node has ranks."""
    world = rl.SimulatedWorld((2, 3))
    q, k, v = (torch.randn(1, 2, 60, 8, requires_grad=True) for _ in range(3))
    out = rl.double_ring_attention(*world.shard(q, k, v))
    for waits in (("outer rotate",), ("outer rotate back", "outer rotate back")):
        mine = [e for e in world.trace if e.rank == 4]
        kinds = [e.kind if e.kind == "compute" else e.name.rstrip(" 0123456789") for e in mine
                 if e.kind in ("compute", "wait")]  # fmt: skip
        assert [n for n in kinds if n.startswith("outer")] == list(waits)
        assert kinds.count("compute") == 6
        assert kinds[: kinds.index(waits[0])].count("compute") == 3
        out.unshard().sum().backward(retain_graph=True)
    assert kinds[: len(kinds) - kinds[::-1].index(waits[1])].count("compute") == 6


# --- what is refused -----------------------------------------------------------------------------------------------


def shards(world, S=6):
    return world.shard(*(torch.zeros(1, h, S, 8) for h in (4, 2, 2)))


@pytest.mark.parametrize("attention, size, options, message", [
    (rl.hybrid_attention, 4, {}, r"hybrid_attention: expected a world with two axes, got SimulatedWorld\(4\); make it"),
    (rl.double_ring_attention, 4, {}, "double_ring_attention: expected a world with two axes"),
    (rl.ring_self_attention, 4, {"kernel": "sdpa"}, "computes whole rows of scores without a kernel; omit kernel="),
    (rl.hybrid_attention, (2, 2), {"outer": RING_SELF_ATTENTION, "kernel": "sdpa"}, "without a kernel"),
    (rl.hybrid_attention, (2, 2), {"outer": "ring"}, "expected a strategy such as rl.attention.RING, got 'ring'"),
    (rl.hybrid_attention, (2, 2), {"outer": DOUBLE_RING}, "double ring cannot be the outer strategy"),
    (rl.hybrid_attention, (2, 2), {"outer": ULYSSES}, "ulysses cannot be the outer strategy"),
    (rl.all_gather_attention, 4, {"heads_at_once": 0}, "expected heads_at_once to be None or a number .*, got 0"),
    (rl.all_gather_attention, 4, {"heads_at_once": [1]}, r"expected heads_at_once .*, got \[1\]"),
    (rl.ulysses_attention, 4, {"outer": RING}, r"see help\(rl.ulysses_attention\)"),
])  # fmt: skip
def test_what_is_refused(attention, size, options, message):
    with pytest.raises(ValueError, match=message):
        attention(*shards(rl.SimulatedWorld(size)), **options)


NOTHING = dict(is_causal=False, causal=False, attn_mask=None, dropout_p=0.0, dropout=0, window_size=(-1, -1),
               logits_soft_cap=0.0, alibi_slopes=None, enable_gqa=True, cu_seqlens=None, s_aux=None)  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_defaults_of_other_functions_change_nothing(name):
    q = torch.randn(1, 2, 8, 4)
    for attention in (rl.ring_attention, rl.all_gather_attention):
        shards = rl.SimulatedWorld(2).shard(q, q, q)
        out = attention(*shards, mask=rl.causal, **{name: NOTHING[name]}).unshard()
        assert torch.equal(out, attention(*shards, mask=rl.causal).unshard())


@pytest.mark.parametrize("name, value, remedy", [
    ("is_causal", True, "pass mask=rl.causal"),
    ("dropout_p", 0.1, "apply dropout to the output"),
    ("softmax_scale", 0.5, "say scale="),
    ("softmax_scale", 0.0, "say scale="),
    ("window_size", (4, 0), "rl.sliding_window"),
    ("window_size", 0, "rl.sliding_window"),
    ("logits_soft_cap", 30.0, "say softcap="),
    ("s_aux", torch.zeros(2), "say sinks="),
    ("alibi_slopes", torch.zeros(2), "say alibi="),
    ("attn_mask", torch.ones(99, 99), "a dense mask would be S x S"),
    ("attention_mask", None, "see help"),
])  # fmt: skip
def test_what_other_functions_take_is_refused_with_what_to_say_here(name, value, remedy):
    shards = rl.SimulatedWorld(2).shard(*[torch.randn(1, 2, 8, 4)] * 3)
    with pytest.raises(ValueError, match=remedy) as caught:
        rl.ring_attention(*shards, **{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("size", [(2, 0), (2, 2, 2), (2.0, 2), (), (True, 2)])
def test_shapes_of_worlds_that_make_no_sense(size):
    with pytest.raises(
        ValueError, match="SimulatedWorld: expected a number of ranks, an int >= 1, got .*; two of them"
    ):
        rl.SimulatedWorld(size)


def test_a_world_of_two_axes_is_a_world():
    world = rl.SimulatedWorld((2, 3))
    assert (world.size, world.shape, repr(world)) == (6, (2, 3), "SimulatedWorld((2, 3))")
    assert rl.SimulatedWorld(4).shape == (4,)
    q, k, v = make_inputs(20, H=2, G=2, D_k=4, D_v=4)
    for attention in (rl.ring_attention, rl.ulysses_attention):
        out = attention(*world.shard(q, k, v), mask=rl.causal).unshard()
        assert relative(out, dense_attention(q, k, v, rl.causal)[0]) < 1e-12

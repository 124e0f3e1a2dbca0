"""A call is checked and planned once, and again as soon as anything of it changes."""

import math

import pytest
import torch
from oracle import dense_attention, relative

import ringlearn as rl
from ringlearn.attention import prepared
from ringlearn.worlds.world import Shards

DTYPE = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore:.*the kernel 'reference' computes this call")


def inputs(S=24, H=4, G=2, D=8, D_v=8, B=1, dtype=DTYPE):
    return tuple(torch.randn(B, h, S, d, dtype=dtype, requires_grad=True) for h, d in ((H, D), (G, D), (G, D_v)))


def check(world, layout=rl.zigzag, mask=rl.causal, tensors=None, **options):
    """Forward and backward in this world, against dense attention."""
    tensors = tensors or inputs()
    needing = [t for t in (*tensors, options.get("sinks")) if t is not None and t.requires_grad]
    out = rl.ring_attention(*world.shard(*tensors, layout=layout), mask=mask, **options).unshard()
    options.pop("kernel", None)
    expected, _ = dense_attention(*tensors, mask, **options)
    dout = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad(x, needing, dout) for x in (out, expected)), strict=True)
    assert all(relative(a, b) < 1e-12 for a, b in [(out, expected), *pairs])


CHANGES = [
    {"mask": rl.full},
    {"mask": rl.causal & rl.sliding_window(5)},
    {"mask": rl.causal & rl.documents([10, 14])},
    {"mask": rl.causal & rl.documents([11, 13])},
    {"layout": rl.striped},
    {"layout": rl.contiguous},
    {"scale": 0.3},
    {"scale": 1},
    {"softcap": 2.0},
    {"softcap": 3.0},
    {"alibi": (0.5, 0.25, 0.1, 0.0)},
    {"alibi": (0.5, 0.25, 0.1, 0.2)},
    {"kernel": "reference"},
    {"tensors": {"S": 25}},
    {"tensors": {"G": 4}},
    {"tensors": {"D": 6}},
    {"tensors": {"D_v": 5}},
    {"tensors": {"B": 2}},
]


def test_every_change_is_noticed():
    """One world makes all calls in turn, each of them between two of the plain one, and each twice."""
    world = rl.SimulatedWorld(3)
    for change in CHANGES:
        change = change | ({"tensors": inputs(**change["tensors"])} if "tensors" in change else {})
        for options in ({}, change, {}, change):
            check(world, **options)
    for z in (1.0, -2.0):  # the numbers of sinks are in no plan
        check(world, sinks=torch.full((4,), z, dtype=DTYPE, requires_grad=True))


def test_the_same_call_is_checked_once_and_few_calls_are_kept(monkeypatch):
    made = []

    class Counted(prepared.Prepared):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(prepared, "Prepared", Counted)
    monkeypatch.setattr(prepared, "KEPT", 2)
    world = rl.SimulatedWorld(2)
    tensors = inputs(S=8)
    for _ in range(3):
        check(world, tensors=tensors)
    assert len(made) == 1
    for window in (2, 3, 4):
        check(world, mask=rl.causal & rl.sliding_window(window), tensors=tensors)
    assert len(made) == 4 and len(world.prepared) == 2
    for _ in range(2):  # a mask from a user's function may hold large tensors: it is not kept
        check(world, mask=rl.mask(lambda q_pos, k_pos: q_pos >= k_pos), tensors=tensors)
    assert len(made) == 6 and len(world.prepared) == 2


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"scale": True}, "expected scale"),  # equal to 1, which was right
        ({"scale": math.nan}, "expected scale"),
        ({"q_start": False}, "expected q_start"),
        ({"softcap": True}, "expected softcap"),
        ({"dropout_p": 0.5}, "dropout"),
        ({"mask": rl.documents([3, 4])}, "must add up"),
        ({"alibi": (True, 1.0, 1.0, 1.0)}, "expected alibi"),
        ({"sinks": torch.zeros(3)}, "expected sinks"),
        ({"layout": rl.striped}, "layout"),
    ],
)
def test_what_is_wrong_is_refused_after_a_call_that_was_right(wrong, message):
    shards = rl.SimulatedWorld(2).shard(*inputs(S=8), layout=rl.zigzag)
    for right in ({}, {"scale": 1}, {"softcap": 1}, {"alibi": (1.0, 1.0, 1.0, 1.0)}, {"sinks": torch.zeros(4)}):
        rl.ring_attention(*shards, **right)
    with pytest.raises(ValueError, match=message):
        rl.ring_attention(*shards, **wrong)


def test_tensors_that_changed_in_place_or_follow_another_rule_are_looked_at_again():
    q, k, v = rl.SimulatedWorld(2).shard(*inputs(S=8), layout=rl.zigzag)
    rl.ring_attention(q, k, v)
    with pytest.raises(ValueError, match="q, k and v must have one dtype"):
        rl.ring_attention(q, k.map(lambda t: t.float()), v)
    other = Shards(k.tensors, rl.SimulatedWorld(2), k.layout, k.length)
    with pytest.raises(ValueError, match="one world"):
        rl.ring_attention(q, other, v)
    with pytest.raises(ValueError, match="torch.func"):
        torch.func.vjp(
            lambda t: rl.ring_attention(q.map(lambda x: x + t), k, v).tensors[0], torch.zeros((), dtype=DTYPE)
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        single = [x.map(lambda t: t.detach().float()) for x in (q, k, v)]
        assert rl.ring_attention(*single).tensors[0].dtype == torch.bfloat16
    assert rl.ring_attention(*single).tensors[0].dtype == torch.float32

"""ring_attention says what it expected, what came, and how to mend it."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import ringlearn as rl
from ringlearn.kernels.reference import Reference

WORLD = rl.SimulatedWorld(2)


def shards(*shapes, dtype=torch.float32, layout=rl.contiguous, world=WORLD):
    return world.shard(*(torch.zeros(shape, dtype=dtype) for shape in shapes), layout=layout)


def three(H=4, G=2, S=6, D=8, **options):
    return shards((1, H, S, D), (1, G, S, D), (1, G, S, D), **options)


@pytest.mark.parametrize("shapes, message", [
    ([(1, 4, 6, 8), (1, 3, 6, 8), (1, 3, 6, 8)], "H query heads must be divisible by the G key/value heads"),
    ([(1, 4, 6, 8), (1, 0, 6, 8), (1, 0, 6, 8)], "H query heads must be divisible by the G key/value heads"),
    ([(1, 4, 6, 8), (1, 2, 6, 8), (1, 4, 6, 8)], "k and v must have the same number of heads G"),
    ([(1, 4, 6, 8), (1, 2, 6, 9), (1, 2, 6, 9)], "q and k must have the same head dim D_k"),
    ([(2, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)], "same batch size B"),
    ([(1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 7, 8)], "same sequence length S_k, got k of 6 and v of 7"),
    ([(4, 6, 8), (2, 6, 8), (2, 6, 8)], r"expected q of shape \(B, H, S_q, D_k\), got \(4, 3, 8\)"),
    ([(1, 4, 6, 0), (1, 2, 6, 0), (1, 2, 6, 8)], "head dims must be at least 1"),
])  # fmt: skip
def test_shapes(shapes, message):
    with pytest.raises(ValueError, match=rf"ring_attention: .*{message}"):
        rl.ring_attention(*shards(*shapes))


def test_dtypes():
    q, k, v = three()
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.float64, torch.float32.*\.to\(dtype\)"):
        rl.ring_attention(q, k.map(torch.Tensor.double), v)
    with pytest.raises(ValueError, match="expected float64, float32, bfloat16 or float16, got q in torch.int64"):
        rl.ring_attention(*three(dtype=torch.int64))


@pytest.mark.parametrize("make, message", [
    (lambda x: x.to_sparse(), "got one in layout torch.sparse_coo; pad it, or call .to_dense"),
    (lambda x: x.to_mkldnn(), "got one in layout torch._mkldnn"),
    (lambda x: torch.nested.as_nested_tensor([x[0], x[0, :, :3]], layout=torch.jagged), "got a nested tensor"),
    (lambda x: x.to("meta"), "got one on the meta device, which has none, for a world on cpu"),
    (lambda x: x.numpy(), "got ndarray"),
])  # fmt: skip
def test_tensors_of_other_kinds_are_not_split(make, message):
    with pytest.raises(ValueError, match=rf"shard: expected .*{message}"):
        WORLD.shard(make(torch.ones(1, 4, 6, 8)), layout=rl.zigzag)


@pytest.mark.parametrize("device, message", [
    ("gpu", "expected a device such as 'cpu' or 'cuda', got 'gpu'"),
    ("cuda:99", "expected a device that this machine has, got 'cuda:99'"),
    (None, "expected a device such as"),
])  # fmt: skip
def test_devices_that_are_not_there(device, message):
    with pytest.raises(ValueError, match=f"SimulatedWorld: {message}"):
        rl.SimulatedWorld(2, device=device)


@pytest.mark.parametrize("options, message", [
    ({"mask": "causal"}, "expected a mask such as rl.causal or rl.mask"),
    ({"mask": torch.ones(6, 6, dtype=torch.bool)}, "expected a mask such as rl.causal"),
    ({"mask": None}, "expected a mask such as rl.causal"),
    ({"mask": rl.documents([2, 3])}, "lengths that add up to 5, 6 keys"),
    ({"scale": float("nan")}, "expected scale to be None or a finite number > 0, got nan"),
    ({"scale": 0.0}, "expected scale to be None or a finite number > 0, got 0.0"),
    ({"scale": -0.5}, "expected scale to be None or a finite number > 0, got -0.5"),
    ({"scale": "big"}, "expected scale to be None or a finite number"),
    ({"q_start": -1}, "expected q_start, the position of the first query, to be an int >= 0, got -1"),
    ({"q_start": 1.5}, "expected q_start"),
    ({"kernel": "fastest"}, "kernel: expected None, 'auto', 'sdpa', .*got 'fastest'"),
    ({"kernel": Reference}, "kernel: expected None, 'auto'"),
    ({"kernel": "cudnn"}, "kernel 'cudnn' cannot compute this: it runs on NVIDIA GPUs, got cpu tensors. Omit kernel="),
    ({"layout": rl.zigzag}, "the shards have layout contiguous, got layout=zigzag"),
    ({"dropout_p": 0.1}, "got dropout_p=0.1; dropout inside attention is not supported"),
    *(({"softcap": x}, "expected softcap to be None or a finite number > 0, got")
      for x in (0, -1.0, float("nan"), float("inf"), "30", True)),
    ({"sinks": 4}, r"expected sinks of shape \(4,\), one score for each query head, .* on cpu, got 4"),
    ({"sinks": torch.zeros(2)}, r"expected sinks of shape \(4,\), .*got \(2,\) in torch.float32 on cpu"),
    ({"sinks": torch.zeros(4, 1)}, r"expected sinks of shape \(4,\), .*got \(4, 1\)"),
    ({"sinks": torch.zeros(4, dtype=torch.int64)}, "in a floating dtype on cpu, got .* torch.int64"),
    ({"sinks": torch.zeros(4, device="meta")}, "on cpu, got .* on meta"),
    *(({"alibi": x}, r"expected alibi to be 4 finite slopes, one for each query head, such as rl.alibi_slopes\(4\)")
      for x in (0.5, True, [0.5] * 3, [0.5, 0.5, 0.5, float("nan")], [0.5, 0.5, 0.5, "1"], "half", torch.zeros(4, 1),
                torch.zeros(2), torch.zeros(4, requires_grad=True))),
    ({"alibi_slopes": [1]}, "say alibi="),
    ({"is_causal": True}, "pass mask=rl.causal"),
    ({"attn_mask": torch.ones(8, 8)}, "a dense mask would be S x S"),
    ({"colour": 1}, r"got colour=1; see help\(rl.FUNCTION\)"),
])  # fmt: skip
@pytest.mark.parametrize("name", [*rl.attention.FUNCTIONS, "dilated_attention"])
def test_options(name, options, message):
    attention, world = getattr(rl, name), rl.SimulatedWorld((1, 2))
    if name == "dilated_attention":
        attention = partial(attention, segment_lengths=[4], dilation_rates=[2])
        message = "mask" if "mask" in options else message  # only two masks are allowed there
        message = "ALiBi is not supported, because" if "alibi" in options else message
    if name == "ring_self_attention" and "kernel" in options:
        message = "without a kernel"
    with pytest.raises(ValueError, match=message.replace("FUNCTION", name)):
        attention(*three(world=world), **options)


def test_plain_tensors_without_a_world():
    q = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"expected Shards, got Tensor, Tensor, Tensor; split them first"):
        rl.ring_attention(q, q, q)
    with pytest.raises(ValueError, match="plain tensors are a rank's own shards, which only a distributed world has"):
        rl.ring_attention(q, q, q, layout=rl.zigzag, world=WORLD)


@pytest.mark.parametrize("which", range(3))
def test_forward_mode_derivatives_are_refused_where_they_would_be_lost(which):
    x = [torch.zeros(1, 2, 6, 8) for _ in range(3)]
    shards_ = list(WORLD.shard(*x))
    with forward_ad.dual_level():
        x[which] = forward_ad.make_dual(x[which], torch.ones_like(x[which]))
        with pytest.raises(ValueError, match="shard: forward-mode derivatives .* are not supported"):
            WORLD.shard(*x)
        with pytest.raises(ValueError, match="dilated_attention: forward-mode derivatives"):
            rl.dilated_attention(*x, [4], [2])
        shards_[which] = shards_[which].map(lambda t: forward_ad.make_dual(t, torch.ones_like(t)))
        with pytest.raises(ValueError, match="ring_attention: forward-mode derivatives"):
            rl.ring_attention(*shards_)
    rl.ring_attention(*WORLD.shard(*(torch.zeros(1, 2, 6, 8) for _ in range(3))))


def test_transforms_of_torch_func_are_refused_by_name():
    x = torch.zeros(1, 2, 6, 8)
    shards_ = WORLD.shard(x, x, x)
    calls = {
        "shard": lambda t: rl.ring_attention(*WORLD.shard(t, x, x)).unshard().sum(),
        "ring_attention": lambda t: rl.ring_attention(shards_[0].map(lambda s: s + t.sum()), *shards_[1:]).local.sum(),
    }
    for op, call in calls.items():
        for transform, argument in ((torch.func.grad, x), (torch.func.vmap, x[None])):
            with pytest.raises(ValueError, match=f"{op}: the transforms of torch.func .* use torch.autograd.grad"):
                transform(call)(argument)


def test_a_mixture():
    q, k, v = three()
    with pytest.raises(ValueError, match="must be three Shards or three tensors, got Shards, Tensor, Shards"):
        rl.ring_attention(q, torch.zeros(1), v)
    with pytest.raises(ValueError, match="must have the same layout, got contiguous, zigzag, contiguous"):
        rl.ring_attention(q, three(layout=rl.zigzag)[1], v)
    with pytest.raises(ValueError, match="must belong to one world"):
        rl.ring_attention(q, three(world=rl.SimulatedWorld(2))[1], v)
    with pytest.raises(ValueError, match="expected world to be a SimulatedWorld or a DistributedWorld, got 4"):
        rl.ring_attention(q, k, v, world=4)


def test_lse_is_no_input():
    q, k, v = three()
    _, lse = rl.ring_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="got shards without a head dim"):
        rl.ring_attention(lse, k, v)


def test_ranks_that_hold_different_kinds_of_tensors():
    q, *_ = three()
    for change in (lambda t: t[:, :2], lambda t: t.double(), lambda t: t[..., :1]):
        with pytest.raises(ValueError, match="Shards: expected one dtype, and shapes that differ in the sequence dim"):
            ranks = iter((lambda t: t, change))
            q.map(lambda t, ranks=ranks: next(ranks)(t))
    with pytest.raises(ValueError, match="Shards: expected a tensor for each rank, got .*NoneType"):
        q.map(lambda t: None)


@pytest.mark.parametrize("timeout", ["5", None, 0, -1, float("nan"), float("inf")])
def test_timeouts(timeout):
    with pytest.raises(ValueError, match="DistributedWorld: expected timeout > 0 seconds"):
        rl.DistributedWorld(timeout=timeout)

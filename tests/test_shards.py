"""shard and unshard: what users hold, and gradients that need no scaling."""

import copy
import pickle

import pytest
import torch
from cases import LAYOUTS

import ringlearn as rl
from ringlearn.worlds import Shards
from ringlearn.worlds.comm import pack


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("S, P", [(1, 1), (10, 3), (3, 8), (97, 4), (0, 2)])
def test_unshard_undoes_shard(layout, S, P):
    x, y = torch.randn(2, 3, S, 4), torch.randn(S, 5)
    world = rl.SimulatedWorld(P)
    a, b = world.shard(x, y, layout=layout)
    assert torch.equal(a.unshard(), x) and torch.equal(b.unshard(), y)
    for rank, (part, positions) in enumerate(zip(a.tensors, a.positions)):
        assert torch.equal(part, x[:, :, positions]), rank
        assert part.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_replicated_loss_gives_the_full_gradient_without_a_factor(layout):
    x = torch.randn(2, 11, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 11, 3, dtype=torch.float64)
    full = rl.SimulatedWorld(4).shard(x, layout=layout).map(lambda t: t**2).unshard()
    (full * weight).sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach() * weight, atol=1e-14)
    assert torch.autograd.gradcheck(lambda t: rl.SimulatedWorld(3).shard(t, layout=layout).unshard(), x)


def test_a_tensor_without_gradient_gets_none():
    q, k = torch.randn(4, 2, requires_grad=True), torch.randn(4, 2)
    a, b = rl.SimulatedWorld(2).shard(q, k)
    (a.unshard() + b.unshard()).sum().backward()
    assert torch.equal(q.grad, torch.ones(4, 2)) and k.grad is None
    with torch.no_grad():
        assert not rl.SimulatedWorld(2).shard(q).tensors[0].requires_grad


def test_k_and_v_of_a_rank_lie_in_one_buffer():
    _, k, v = rl.SimulatedWorld(3).shard(*(torch.randn(1, 2, 10, 4) for _ in range(3)), layout=rl.zigzag)
    for a, b in zip(k.tensors, v.tensors):
        assert pack([a, b]).data_ptr() == a.data_ptr(), "sent as they are, without a copy"


def test_pack_copies_what_is_not_adjacent():
    buffer = torch.arange(6.0)
    assert pack([buffer[3:], buffer[:3]]).tolist() == [3, 4, 5, 0, 1, 2]
    assert pack([buffer.view(2, 3).t()]).tolist() == [0, 3, 1, 4, 2, 5]
    assert pack([buffer[:2], torch.ones(1)]).tolist() == [0, 1, 1]
    other = torch.arange(6.0)
    assert pack([buffer[:3], other[3:]]).tolist() == [0, 1, 2, 3, 4, 5] and pack([buffer[:3], other[3:]]).numel() == 6


def test_one_tensor_gives_one_shards():
    x = rl.SimulatedWorld(2).shard(torch.randn(4, 2), layout=rl.striped)
    assert isinstance(x, Shards) and x.lengths == (2, 2)
    assert repr(x) == "Shards(length 4, striped, 2 ranks, rank 0: (2, 2) torch.float32)"


@pytest.mark.parametrize("call, message", [
    (lambda w: w.shard(), r"expected at least one tensor \(..., S, D\), got none"),
    (lambda w: w.shard(torch.ones(3)), r"got shape \(3,\); give a \(S,\) tensor a last dim"),
    (lambda w: w.shard([[1.0]]), "expected tensors .* got list"),
    (lambda w: w.shard(torch.ones(3, 1), layout="zigzag"), "expected a layout such as rl.contiguous.*got 'zigzag'"),
    (lambda w: w.shard(torch.ones(3, 1), src=2), r"expected src=None or a rank in 0..1, got 2"),
    (lambda w: w.shard(torch.ones(3, 1)).map(lambda t: t[:1]), r"has local lengths \[1, 2\].* got \[1, 1\]"),
    (lambda w: w.shard(torch.ones(3, 1)).local, "this process owns 2 ranks; use .tensors"),
])  # fmt: skip
def test_what_makes_no_sense(call, message):
    with pytest.raises(ValueError, match=message):
        call(rl.SimulatedWorld(2))


def test_a_write_to_one_shard_is_no_write_to_the_others():
    """They lie in one buffer; in-place code on q must not look to autograd, or on the wire, like a write to k and v."""
    x = [torch.randn(1, 2, 10, 4, requires_grad=True) for _ in range(3)]
    q, k, v = rl.SimulatedWorld(2).shard(*x)
    v.map(torch.Tensor.sin).unshard().sum().backward(retain_graph=True)  # saves v
    before = [t._version for t in (*k.tensors, *v.tensors)]
    q = q.map(lambda t: t.mul_(2))
    assert before == [t._version for t in (*k.tensors, *v.tensors)]
    rl.ring_attention(q, k, v).unshard().sum().backward()
    y = [t.detach().requires_grad_() for t in x]
    torch.nn.functional.scaled_dot_product_attention(y[0] * 2, y[1], y[2]).sum().backward()
    assert torch.allclose(x[0].grad, y[0].grad, atol=1e-5)

    async def program(comm, q, k, v):
        arriving = comm.rotate(k, v)
        q.mul_(2)  # while k and v are in flight
        return await arriving

    world = rl.SimulatedWorld(2)
    world.run(program, *world.shard(*(t.detach() for t in x)))


def test_shards_are_no_tensor_and_say_what_to_do():
    x = rl.SimulatedWorld(2).shard(torch.ones(4, 1))
    for use in (lambda: x.sum(), lambda: x.shape):
        with pytest.raises(AttributeError, match=r"take .unshard\(\) for the full tensor, .map\(fn\)"):
            use()
    copy.copy(x)


def test_kernels_explain_takes_shards():
    q, k, v = rl.SimulatedWorld(2).shard(*(torch.ones(1, 2, 8, 4) for _ in range(3)))
    assert "FULL     cpu_flash" in rl.kernels.explain(q, k, v)


def test_what_belongs_to_a_world_copies_with_it_and_cannot_be_pickled():
    world = rl.SimulatedWorld(2)
    x = world.shard(torch.randn(6, 4))
    copied = copy.deepcopy(x)
    assert copied.world is world and copy.copy(world) is world and copied.tensors[0] is not x.tensors[0]
    assert torch.equal(copied.unshard(), x.unshard())
    for what in (world, x):
        with pytest.raises(TypeError, match="cannot be pickled.*send tensors, shards.tensors or shards.unshard"):
            pickle.dumps(what)

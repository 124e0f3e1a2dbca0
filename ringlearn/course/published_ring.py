"""Ring attention as it was published: forward and backward go round the same way, and gradients make one hop home.

    step                            0           1           t               P - 1       after
    forward: rank r has the k, v of r           r - 1       r - t           r + 1
    backward, and the dk, dv of     r           r - 1       r - t           r + 1       r

The course writes this ring in notebooks 03 and 04, with tiles computed in plain torch. ``ring_attention`` runs
attention/ring.py, whose backward goes round the other way and needs no hop home.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3, algorithm 1 and the code
in appendix A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..flash import attend, attend_backward
from ..layouts import Layout, contiguous
from ..masks import Mask, full
from ..partial import Partial, accumulation_dtype, identity, merge
from ..worlds.comm import Comm, empty_packed
from ..worlds.simulated import SimulatedWorld
from ..worlds.world import PerRank, Shards


async def ring_forward(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, positions: Sequence[Tensor], mask: Callable[[Tensor, Tensor], Tensor]
) -> Partial:
    """Partial(out, lse) of this rank's queries over all keys, in the accumulation dtype. P - 1 hops of k, v.

    q: (B, H, n_q, D), k, v: (B, G, n_k, D), this rank's shards. positions: those of each rank's tokens in the whole
    sequence.  mask: called as mask(q_pos[:, None], k_pos[None, :]), gives what is visible.

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(3)
    >>> x = world.shard(*(torch.randn(1, 2, 10, 4) for _ in range(3)), layout=rl.zigzag)
    >>> positions = [rl.zigzag.positions(10, 3, rank) for rank in range(3)]
    >>> q, k, v = (rl.worlds.PerRank(t.tensors) for t in x)
    >>> outs = [out for out, lse in world.run(ring_forward, q, k, v, positions, rl.causal)]
    >>> [torch.allclose(a, b, atol=1e-6) for a, b in zip(outs, rl.ring_attention(*x, mask=rl.causal).tensors)]
    [True, True, True]
    """
    P, scale = comm.size, q.shape[-1] ** -0.5
    result = identity((*q.shape[:-1], v.shape[-1]), accumulation_dtype(q.dtype), q.device)
    for step in range(P):
        source = (comm.rank - step) % P  # whose keys are here now
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[(source - 1) % P]))
        visible = mask(positions[comm.rank][:, None], positions[source][None, :]).to(q.device)
        result = merge(result, attend(q, k, v, visible, scale))
        comm.compute("forward", 4 * q.shape[0] * q.shape[1] * q.shape[-1] * int(visible.sum()), origin=source)
        if step < P - 1:
            k, v = await arriving
    return result


async def ring_backward(
    comm: Comm,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    positions: Sequence[Tensor],
    mask: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shards, in the accumulation dtype. P - 1 hops of k, v, and P of dk, dv.

    dout: (B, H, n_q, D), of this rank's out; out, lse: as the forward returned them; the other arguments as there. Each
    rank computes its contribution to dk, dv before it awaits the sum of the ranks before it. So all hops can hide but
    the last, which brings them home when nothing is left to compute.

    >>> import torch, ringlearn as rl
    >>> world = rl.SimulatedWorld(2)
    >>> q, k, v, dout = (rl.worlds.PerRank(torch.randn(1, 1, 3, 4) for _ in range(2)) for _ in range(4))
    >>> positions = [torch.arange(3), torch.arange(3, 6)]
    >>> out, lse = map(rl.worlds.PerRank, zip(*world.run(ring_forward, q, k, v, positions, rl.causal)))
    >>> grads = world.run(ring_backward, dout, q, k, v, out, lse, positions, rl.causal)
    >>> len(grads), grads[0][1].shape, world.trace.messages(rank=0)
    (2, torch.Size([1, 1, 3, 4]), 3)
    """
    P, scale, dtype = comm.size, q.shape[-1] ** -0.5, accumulation_dtype(q.dtype)
    q, dout = q.to(dtype), dout.to(dtype)
    delta = (dout * out).sum(-1)
    dq = travelling = None
    for step in range(P):
        source = (comm.rank - step) % P  # whose keys are here now, and soon the gradients that were found for them
        length = len(positions[(source - 1) % P])  # of what comes next
        if step < P - 1:
            arriving = comm.rotate(k, v, length=length)
        visible = mask(positions[comm.rank][:, None], positions[source][None, :]).to(q.device)
        found, dk, dv = attend_backward(dout, q, k.to(dtype), v.to(dtype), lse, delta, visible, scale)
        comm.compute("backward", 10 * q.shape[0] * q.shape[1] * q.shape[-1] * int(visible.sum()), origin=source)
        dq = found if dq is None else dq + found
        dk, dv = _in_one_piece((dk, dv), (0.0, 0.0) if travelling is None else await travelling)
        travelling = comm.rotate(dk, dv, length=length)
        if step < P - 1:
            k, v = await arriving
    dk, dv = await travelling
    return dq, dk, dv


def _in_one_piece(found: Sequence[Tensor], before: Sequence[Tensor | float]) -> tuple[Tensor, ...]:
    """The sums, contiguous in memory, so that they are sent without a copy."""
    sums = empty_packed([t.shape for t in found], found[0].dtype, found[0].device)
    for total, own, other in zip(sums, found, before, strict=True):
        total.copy_(own).add_(other)
    return sums


def gradients(
    world: SimulatedWorld,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Mask = full,
    layout: Layout = contiguous,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of full tensors, assembled from the shards. ``world.trace`` then has the events of the backward.

    q, dout: (B, H, S, D), k, v: (B, G, S, D).

    >>> import torch, ringlearn as rl
    >>> q, k, v, dout = (torch.randn(1, 2, 12, 4, requires_grad=True) for _ in range(4))
    >>> world = rl.SimulatedWorld(4)
    >>> dq, dk, dv = gradients(world, q, k, v, dout)
    >>> want = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v), v, dout)
    >>> torch.allclose(dv, *want, atol=1e-6), world.trace.messages(rank=0)
    (True, 7)
    """
    S, P = q.shape[-2], world.size
    positions = [layout.positions(S, P, rank) for rank in range(P)]
    shards = world.shard(*(t.detach() for t in (q, k, v, dout)), layout=layout)
    q, k, v, dout = (PerRank(t.tensors) for t in shards)
    out, lse = map(PerRank, zip(*world.run(ring_forward, q, k, v, positions, mask), strict=True))
    grads = world.run(ring_backward, dout, q, k, v, out, lse, positions, mask)
    return tuple(Shards(list(parts), world, layout, S).unshard() for parts in zip(*grads, strict=True))

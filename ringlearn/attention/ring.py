"""Ring attention: queries stay, keys and values go round, one hop per step.

Both programs have the same skeleton. In every step a rank posts the message that passes on what it has, computes the
tiles of what it has, and only then awaits what arrives: so messages travel while kernels run.

    step                            0           1           t               P - 1
    forward: rank r has the k, v of r           r - 1       r - t           r + 1
    backward:                       r + 1       r + 2       r + 1 + t       r

The backward unwinds the ring. It begins with the keys that came last, turns the other way, and ends at home.

A mask that hides enough makes messages disappear, too: a hop carries the rows that a later rank needs, and the ring
stops when nobody needs more. needed.py says which; a message is left out only where everybody knows that nobody needs
it, and a rank that has nothing to compute still passes on what others need.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3 and algorithm 1; there
the backward goes round the same way as the forward, and gradients need one hop more.
"""

from __future__ import annotations

from torch import Tensor

from ..partial import Partial
from ..partial.accumulate import Sum
from ..worlds.comm import Comm
from .call import attention_function
from .needed import add_found, gradients_back, keys_again, pass_on
from .strategy import Spec, Strategy, of_heads


async def ring_forward(comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Partial, Tensor, Tensor]:
    """Partial(out, lse) of this rank's queries over all keys, and the k, v that arrived last or, if not kept, None.

    q: (B, H, n_q, D_k), k: (B, G, n_k, D_k), v: (B, G, n_k, D_v), this rank's shards. out comes in the dtype of q, lse
    in the accumulation dtype.
    """
    rank, kernel, route = comm.rank, comm.traced(spec.kernel), spec.route
    tiles = spec.tiles_by_distance(rank)
    result = spec.accumulator(q, v, parts=sum(map(len, tiles)))
    for step in range(route.hops + 1):  # the keys that are here now are those of rank - step, as far as needed
        if step < route.hops:
            arriving = pass_on(comm, route, (k, v), step)  # rotate the rows that a later rank needs
        for tile in tiles[step]:
            result.add(tile.q, kernel.forward(q, k, v, tile, spec.scale))
        if step < route.hops:
            k, v = await arriving
    return result.partial, *route.keep(k, v)


async def ring_backward(
    comm: Comm,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    k_last: Tensor | None,
    v_last: Tensor | None,
    spec: Spec,
    dq: Sum | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shards, each in the dtype of its tensor or in the accumulation dtype.

    k_last, v_last: the keys and values that arrived last in the forward; None if they were not kept. All keys and
    values go back the way they came. Their gradients travel one hop behind them, collect the contribution of each rank,
    and are home after as many hops as the forward had. A rank waits for them only after it has computed its own
    contribution, so every message can hide.  dq: a sum to which dq is added, if there is one already.
    """
    rank, kernel, route = comm.rank, comm.traced(spec.kernel), spec.route
    tiles = spec.tiles_by_distance(rank)
    dq = dq or Sum([q.shape], spec.sum_dtype(q, sum(map(len, tiles))), q.device)
    own, (k, v), travelling = (k, v), (k_last, v_last), None
    if k_last is None or not route.keeps:
        k, v = await keys_again(comm, route, own, (), route.hops) if route.hops else own
    for far in reversed(range(route.hops + 1)):  # the keys that are here now are those of rank - far
        dkv = Sum(route.shapes(own, rank - far, far), spec.travel_dtype(k, route.hops), k.device)
        if far > 1:
            arriving = keys_again(comm, route, own, (k, v), far - 1)
        for tile in tiles[far]:
            for h, g in spec.head_groups(q, k, few=far == 0):  # query heads, and the key/value heads they use
                dout_h, q_h, out_h, lse_h, dlse_h = of_heads(h, dout, q, out, lse, dlse)
                dq_tile, dk_tile, dv_tile = kernel.backward(  # no name for its keys, or they would live on too
                    dout_h, q_h, *of_heads(g, k, v), out_h, lse_h, tile, spec.scale, dlse_h
                )
                dq.add(h, tile.q, dq_tile)
                dkv.add(g, tile.k, dk_tile, dv_tile)
                del dq_tile, dk_tile, dv_tile  # or they would live on through the next kernel call
        if far < route.hops:  # what the ranks further on have found for the same keys, as far as they had them
            add_found(dkv, route.within(rank - far, far, far + 1), await travelling)
        if far > 0:
            travelling = gradients_back(comm, route, dkv.tensors, far)
            k, v = await arriving if far > 1 else own
    return *dq.tensors, *dkv.tensors


RING = Strategy("ring", ring_forward, ring_backward, keeps=2, rotates=True)


@attention_function()
def ring_attention() -> Strategy:
    """Exact attention over a sequence that is split over ranks, with keys and values that travel round a ring.

    q: (B, H, S_q, D_k), k: (B, G, S_k, D_k), v: (B, G, S_k, D_v), each as ``Shards`` (from ``world.shard``), or in a
    distributed world as this rank's plain local tensors together with ``layout`` and ``world`` (in a world made with
    check=False only if every rank holds equally many tokens: without the check a rank cannot know the other lengths).
    H must be divisible by G. float64, float32, bfloat16 or float16.

    mask: which keys a query sees, by global position. If windows or documents tell every rank that nobody needs some
    rows of keys any more, these rows are not sent on: with contiguous shards a causal window takes one hop for each
    shard that it reaches back.  scale: multiplies the scores; 1 / sqrt(D_k) if None.
    kernel: None chooses the fastest kernel that supports the call; "reference", "sdpa" or another name from
    ``rl.kernels``.
    q_start: the global position of the first query, as in chunked prefill (keys start at 0).
    return_lse: also return lse (B, H, S_q), with which results over different keys can be merged.

    Some models change the scores after scaling. These changes are made in the following order:
    softcap: c, if a score s becomes c * tanh(s / c), as in Gemma 2.
    alibi: slopes, one for each query head, such as ``rl.alibi_slopes(H)``: numbers, or a tensor (H,), preferably on the
    CPU. A score is lowered by the slope times the distance between query and key, counted in global positions.
    sinks: (H,), for each query head a learnt score that has no value and only takes weight from the keys, as in
    gpt-oss. lse includes it. If results over different keys are to be merged, pass sinks to only one of the calls, or
    to none. Their gradient is this process's part of the whole, like that of any parameter: in a simulated world it
    is complete; in a distributed one ``rl.nn.sum_gradients``, DDP and FSDP2 add up the parts of all ranks. In a world
    with check=True the ranks compare their sinks, so the host has to wait for the GPU.

    Returns Shards if it was given Shards, and plain tensors otherwise; the output is in the dtype of q. The gradient
    flows to q, k, v and sinks; second derivatives are not supported. Rows that see no key give 0, and their lse is
    -inf, or their sink. A NaN in v reaches every row of the kernel calls that read it, as in SDPA: a hidden key has
    weight 0, and 0 * NaN is NaN.

    Raises ValueError on every rank if an argument is invalid or differs between ranks.

    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    >>> shards = rl.SimulatedWorld(3).shard(q, k, v, layout=rl.striped)
    >>> out = rl.ring_attention(*shards, mask=rl.causal).unshard()
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, expected, atol=1e-5)
    True
    """
    return RING

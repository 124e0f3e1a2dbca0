"""Ring self-attention, the first ring: keys go round and leave rows of scores, then values go round.

A rank keeps its queries' scores with all S keys until softmax can be taken over whole rows, and the weights for the
backward: O(S^2 / P) memory. Ring attention computes the same without them, because partial results merge. It is here
for comparison, not for use.

Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective", section 3.2. There
gradients are all-reduced; here they travel behind the keys and values, as in ring.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from ..layouts import positions_of
from ..partial import Partial, accumulation_dtype
from ..partial.accumulate import ALL, Sum
from ..worlds.comm import Comm
from .call import attention_function
from .needed import Route, add_found, gradients_back, keys_again, pass_on
from .strategy import Gradients, Spec, Strategy


@attention_function()
def ring_self_attention() -> Strategy:
    """Exact attention over a sequence that is split over ranks, with whole rows of scores in memory (for comparison).

    Arguments, result and errors are those of ``ring_attention``, except that ``kernel`` must be None. Each rank holds
    B H n S scores in the accumulation dtype, so long sequences do not fit; for these use ``ring_attention``.

    Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective", section 3.2.

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    >>> world = rl.SimulatedWorld(5)
    >>> out = rl.ring_self_attention(*world.shard(q, k, v), mask=rl.causal).unshard()
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
    True
    >>> world.memory.most(0)["scores"] == 4 * 10 * 50 * 4
    True
    """
    return RING_SELF_ATTENTION


async def ring_self_forward(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec
) -> tuple[Partial, Tensor, Tensor, Tensor]:
    """Partial(out, lse) of this rank's queries, their weights over all keys, and the k, v that came last."""
    (B, H, n, _), (_, G, _, D_v), dtype = q.shape, v.shape, accumulation_dtype(q.dtype)
    columns, rows = _columns(spec), _rows(q, G, dtype)  # (B, G, H / G * n, D_k)
    (scores,) = comm.buffers([(*rows.shape[:3], columns[-1].stop)], dtype, q.device, "scores")
    values = rows.new_zeros(*rows.shape[:3], D_v)
    if not spec.route.whole:  # some keys never come
        scores.fill_(-torch.inf)

    def score(source: int, k: Tensor) -> None:
        block = scores[..., columns[source]]
        block.copy_(spec.scores.capped(rows @ k.to(dtype).mT * spec.scale))
        by_head = block.unflatten(2, (H // G, n))  # (B, G, H / G, n, columns)
        q_pos, k_pos = _positions(spec, comm.rank, source, q.device)
        if spec.scores.slopes is not None:
            by_head += spec.scores.bias(q_pos, k_pos, dtype).unflatten(0, (G, H // G))
        by_head.masked_fill_(~spec.mask(q_pos[:, None], k_pos[None, :]), -torch.inf)
        comm.compute("scores", 2.0 * block.numel() * q.shape[3])

    def mix(source: int, v: Tensor) -> None:
        values.add_(scores[..., columns[source]] @ v.to(dtype))
        comm.compute("values", 2.0 * scores[..., columns[source]].numel() * D_v)

    k_last = await _go_round(comm, k, spec, score)
    # One more score of each row, as (G, H / G * n, 1).
    sinks = None if spec.sinks is None else spec.sinks.to(dtype).view(G, -1, 1).repeat_interleave(n, dim=1)
    lse = _softmax_(scores, sinks)
    v_last = await _go_round(comm, v, spec, mix)
    return Partial(values.view(B, H, n, D_v).to(q.dtype), lse.view(B, H, n)), scores, k_last, v_last


async def ring_self_backward(
    comm: Comm, dout, q, k, v, out, lse, dlse, weights, k_last, v_last, spec: Spec
) -> Gradients:
    """dq, dk, dv of this rank's shards, in the accumulation dtype: values unwind their ring first, then keys."""
    G, dtype, columns = k.shape[1], weights.dtype, _columns(spec)
    rows, douts = _rows(q, G, dtype), _rows(dout, G, dtype)
    (dscores,) = comm.buffers([weights.shape], dtype, q.device, "scores")
    dq = torch.zeros_like(rows)
    if not spec.route.whole:
        dscores.zero_()

    def through_values(source: int, v: Tensor) -> Tensor:
        block = weights[..., columns[source]]
        dscores[..., columns[source]] = douts @ v.to(dtype).mT
        comm.compute("values", 4.0 * block.numel() * v.shape[3])
        return block.mT @ douts

    def through_scores(source: int, k: Tensor) -> Tensor:
        block = dscores[..., columns[source]]
        if spec.scores.softcap is not None:
            block.mul_(spec.scores.passed_on(spec.scores.capped(rows @ k.to(dtype).mT * spec.scale)))
        dq.add_(block @ k.to(dtype))
        comm.compute("scores", 4.0 * block.numel() * k.shape[3])
        return block.mT @ rows

    dv = await _unwind(comm, v, v_last, spec, through_values)
    delta = (douts * _rows(out, G, dtype)).sum(-1)
    if dlse is not None:  # d lse / d s_j = p_j, so a gradient of lse only shifts delta
        delta -= dlse.reshape(delta.shape)
    dscores.sub_(delta.unsqueeze(-1)).mul_(weights).mul_(spec.scale)
    dk = await _unwind(comm, k, k_last, spec, through_scores)
    return dq.view(q.shape), dk, dv


# --- once round, and back ------------------------------------------------------------------------------------------


async def _go_round(comm: Comm, x: Tensor, spec: Spec, use: Callable[[int, Tensor], None]) -> Tensor:
    """Use every rank's x once, from this rank's on, as far as anybody needs it; gives the x that came last."""
    route, own = spec.route, x
    for step in range(route.hops + 1):
        source = (comm.rank - step) % comm.size
        if step < route.hops:
            arriving = pass_on(comm, route, (x,), step)
        use(source, _with_zeros(x, own, route, source, step))
        if step < route.hops:
            x = await arriving
    return route.keep(x)[0]


async def _unwind(comm: Comm, x: Tensor, last: Tensor, spec: Spec, use: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The other way round, from the x that came last to this rank's own. Its gradient, from ``use``, travels behind."""
    route, own, x, travelling = spec.route, x, last, None
    if not route.keeps:
        x = await keys_again(comm, route, (own,), (), route.hops)
    for far in reversed(range(route.hops + 1)):
        source = (comm.rank - far) % comm.size
        if far > 1:
            arriving = keys_again(comm, route, (own,), (x,), far - 1)
        dx = use(source, _with_zeros(x, own, route, source, far))
        (dx,) = comm.select(route.within(source, 0, far), dx)
        if far < route.hops:
            total = Sum([dx.shape], dx.dtype, dx.device)
            total.add(ALL, ALL, dx)
            add_found(total, route.within(source, far, far + 1), (await travelling,))
            (dx,) = total.tensors
        if far > 0:
            travelling = gradients_back(comm, route, (dx,), far)
            x = await arriving if far > 1 else own
    return dx


def _with_zeros(x: Tensor, own: Tensor, route: Route, source: int, distance: int) -> Tensor:
    """The whole shard of which some rows have come, with zeros for those that this rank does not see."""
    shape = route.shapes((own,), source, 0)[0]
    if x.shape[2] == shape[2]:
        return x
    whole, start = x.new_zeros(shape), 0
    for a, b in route.rows(source, distance) if x.shape[2] else ():
        whole[:, :, a:b] = x[:, :, start : start + b - a]
        start += b - a
    return whole


def _rows(x: Tensor, G: int, dtype: torch.dtype) -> Tensor:
    """(B, H, n, D) as (B, G, H / G * n, D): the query heads of a group use the same keys."""
    return x.to(dtype).reshape(x.shape[0], G, x.shape[1] // G * x.shape[2], x.shape[3])


def _columns(spec: Spec) -> list[slice]:
    """The columns of the scores that belong to each rank's keys."""
    ends = [0, *accumulate(spec.k_length(r) for r in range(len(spec.k_ranges)))]
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _positions(spec: Spec, rank: int, source: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of rank's queries and source's keys."""
    return positions_of(spec.q_ranges[rank], device), positions_of(spec.k_ranges[source], device)


def _softmax_(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores to weights, in place; gives lse. Rows that see no key have weights 0 and lse -inf, or their sink."""
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top.masked_fill_(top == -torch.inf, 0.0)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks - top).exp()
    scores.div_(total.masked_fill(total == 0, 1.0))
    return (top + total.log()).squeeze(-1)


RING_SELF_ATTENTION = Strategy(
    "ring self-attention",
    ring_self_forward,
    ring_self_backward,
    keeps=3,
    rotates=True,
    takes_sinks=True,
    has_kernel=False,
)

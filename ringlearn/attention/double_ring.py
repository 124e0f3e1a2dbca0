"""Double ring: a ring of nodes, around whose every hop a ring of the ranks inside a node turns once.

    outer hop    0                    1                    ...
    inner hops   0, 1, ..., n - 1     0, 1, ..., n - 1

In outer step t the ranks of node o hold the keys of node o - t, and pass them round among themselves. Meanwhile the
keys of the next node travel, so the slow links between nodes have a whole turn of the inner ring to hide behind, and
all of them are used at once. The backward unwinds both rings.

Source: Gu et al. 2024, "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism",
section 4.3 (double-ring attention).
"""

from __future__ import annotations

from torch import Tensor

from ..masks import causal, full
from ..partial import Partial, accumulation_dtype
from ..partial.accumulate import ALL, Sum
from ..worlds.comm import Comm
from .call import attention_function
from .needed import add_found, gradients_back, keys_again, pass_on
from .ring import ring_backward, ring_forward
from .strategy import Gradients, Spec, Strategy


@attention_function()
def double_ring_attention() -> Strategy:
    """Exact attention over a sequence that is split over nodes and ranks, in a ring of nodes and one inside each node.

    Arguments, result and errors are those of ``ring_attention``, except that the world must have two axes: a
    ``SimulatedWorld((nodes, ranks per node))``, or a ``DistributedWorld(mesh)`` of a DeviceMesh whose last axis is
    inside a node. It sends as many bytes as a single ring; nodes - 1 of the P - 1 hops cross nodes.

    Source: Gu et al. 2024, "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism".

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    >>> shards = rl.SimulatedWorld((2, 3)).shard(q, k, v, layout=rl.zigzag)
    >>> out = rl.double_ring_attention(*shards, mask=rl.causal).unshard()
    >>> torch.allclose(out, rl.ring_attention(*shards, mask=rl.causal).unshard(), atol=1e-5)
    True
    """
    return DOUBLE_RING


async def double_ring_forward(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, spec: Spec
) -> tuple[Partial, Tensor, Tensor]:
    """Partial(out, lse) of this rank's queries over all keys, and the k, v that came last if every rank needs all."""
    inner, outer = comm.along(1), comm.along(0)
    turns = Turns(spec, comm.shape, outer.rank)
    result, route = spec.accumulator(q, v, parts=turns.count), turns.routes[inner.rank]
    for t in range(turns.count):  # the keys that are in this node now are those of node - t, as far as needed
        if t < turns.count - 1:
            arriving = pass_on(outer, route, (k, v), t)
        found, *last = await ring_forward(inner, q, k, v, turns.between(t))
        result.add(ALL, found)
        if t < turns.count - 1:
            del found, last
            k, v = await arriving
    return result.partial, *(last if turns.whole else (k.new_empty(0), v.new_empty(0)))


async def double_ring_backward(comm: Comm, dout, q, k, v, out, lse, dlse, k_last, v_last, spec: Spec) -> Gradients:
    """dq, dk, dv of this rank's shards, each in the dtype of its tensor or in the accumulation dtype.

    Both rings turn back, from the keys that came last to this rank's own. Gradients travel one hop behind their keys in
    the inner ring; after a whole turn a node passes its sum to the node before, which adds its own.
    """
    inner, outer, kernel = comm.along(1), comm.along(0), comm.traced(spec.kernel)
    turns = Turns(spec, comm.shape, outer.rank)
    if not turns.whole:
        return await _backward_turn_by_turn(inner, outer, (dout, q), (k, v), (out, lse, dlse), turns)
    dq = Sum([q.shape], spec.sum_dtype(q, parts=comm.size), q.device)
    own, (k, v), travelling, between = (k, v), (k_last, v_last), None, None
    for t in reversed(range(outer.size)):
        if t > 0:
            across = outer.rotate(k, v, length=_length(spec, inner, outer, t - 1, inner.size - 1), back=True)
        pairs = turns.between(t)
        for u in reversed(range(inner.size)):  # the keys that are here now are those of (node - t, place - u)
            home = t == 0 and u == 1  # this rank's own come next
            length = _length(spec, inner, outer, t, u - 1)  # of what comes next
            dkv = Sum([k.shape, v.shape], spec.travel_dtype(k, comm.size - 1), k.device)
            if u > 0 and not home:
                arriving = inner.rotate(k, v, length=length, back=True)
            for tile in pairs.tiles(inner.rank, (inner.rank - u) % inner.size):
                dq_tile, dk_tile, dv_tile = kernel.backward(dout, q, k, v, out, lse, tile, spec.scale, dlse)
                dq.add(ALL, tile.q, dq_tile)
                dkv.add(ALL, tile.k, dk_tile, dv_tile)
                del dq_tile, dk_tile, dv_tile
            if u < inner.size - 1:
                dkv.add(ALL, ALL, *await travelling)  # what the ranks of this node have found before
            if u > 0:
                travelling = inner.rotate(*dkv.tensors, length=length, back=True)
                k, v = own if home else await arriving
        if t < outer.size - 1:
            dkv.add(ALL, ALL, *await between)  # what the nodes before have found
        if t > 0:
            between = outer.rotate(*dkv.tensors, length=_length(spec, inner, outer, t - 1, 0), back=True)
            k, v = await across
    return *dq.tensors, *dkv.tensors


async def _backward_turn_by_turn(
    inner: Comm, outer: Comm, queries: tuple[Tensor, ...], own: tuple[Tensor, ...], results: tuple, turns: Turns
) -> Gradients:
    """The backward where a mask makes messages disappear: a whole backward inside the node for every node's keys.

    Keys come from home, since the forward has dropped some on their way; gradients go back from node to node.
    """
    q, route, node, last = queries[1], turns.routes[inner.rank], outer.rank, turns.count - 1
    dq, travelling = Sum([q.shape], accumulation_dtype(q.dtype), q.device), None
    arriving = keys_again(outer, route, own, (), last) if last else None
    for t in reversed(range(turns.count)):
        k, v = await arriving if t else own
        if t > 1:
            arriving = keys_again(outer, route, own, (), t - 1)
        _, *found = await ring_backward(inner, *queries, k, v, *results, None, None, turns.between(t), dq)
        dkv = Sum(route.shapes(own, node - t, t), accumulation_dtype(k.dtype), k.device)
        dkv.add(ALL, ALL, *found)
        del found
        if t < last:
            add_found(dkv, route.within(node - t, t, t + 1), await travelling)
        if t > 0:
            travelling = gradients_back(outer, route, dkv.tensors, t)
    return *dq.tensors, *dkv.tensors


class Turns:
    """The turns of the inner ring of a node: how many there are, and what each of them is between.

    shape: (nodes, ranks of a node).
    routes: for each place in a node, how far the keys of the ranks at this place travel from node to node.
    """

    def __init__(self, spec: Spec, shape: tuple[int, ...], node: int):
        N, n = shape
        self._spec, self._n, self._N, self._node = spec, n, N, node
        nodes = tuple(sum(spec.q_ranges[o * n : (o + 1) * n], ()) for o in range(N))
        self.routes = [spec.over(nodes, spec.k_ranges[place::n]).route for place in range(n)]
        self.count = 1 + max(route.hops for route in self.routes)

    @property
    def whole(self) -> bool:
        """Whether every row goes to every rank, in a ring of all ranks and in each of these: the same on all ranks."""
        route = self._spec.route
        if not route.whole or self._spec.mask in (full, causal):
            return route.whole
        inside = (self._of_node(node, t).route for node in range(self._N) for t in range(self.count))
        return all(each.whole for each in (*self.routes, *inside))

    def between(self, t: int) -> Spec:
        """The part of a call between this node's queries and the keys of node - t that come here.

        Its results are summed further.
        """
        return self._of_node(self._node, t)

    def _of_node(self, node: int, t: int) -> Spec:
        here, there = node * self._n, (node - t) % self._N
        keys = tuple(route.held(node)[there] for route in self.routes)
        return self._spec.over(self._spec.q_ranges[here : here + self._n], keys, self._N > 1)


def _length(spec: Spec, inner: Comm, outer: Comm, t: int, u: int) -> int:
    """The number of keys that the rank (node - t, place - u) owns."""
    return spec.k_length((outer.rank - t) % outer.size * inner.size + (inner.rank - u) % inner.size)


DOUBLE_RING = Strategy("double ring", double_ring_forward, double_ring_backward, keeps=2, axes=2)

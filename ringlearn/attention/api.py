"""What users call: every input check, the agreement between ranks, and the one autograd node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import shown, whole_number
from ..compiling import uncompiled
from ..flash import check_attention_inputs, is_scale
from ..kernels import Kernel
from ..layouts import Layout, Ranges
from ..masks import Mask, documents, full
from ..tiles import shift
from ..worlds.shards import PerRank, Shards, check_grad_mode, check_no_tangent, describe
from ..worlds.world import World
from .ring import RING
from .spec import Spec
from .strategy import Strategy

_SCALES = ("softmax_scale", "sm_scale", "scaling")
# Arguments that other attention functions take, and what to do here instead of those that change something.
_REFUSED = {
    **dict.fromkeys(_SCALES, "say scale="),
    "dropout_p": "dropout inside attention is not supported; apply dropout to the output",
    "dropout": "dropout inside attention is not supported; apply dropout to the output",
    "is_causal": "say mask=rl.causal",
    "causal": "say mask=rl.causal",
    "attn_mask": "a dense mask would be S x S; say mask=rl.causal, rl.sliding_window(w), rl.documents(lengths) or "
    "rl.mask(fn)",
    "window_size": "say mask=rl.causal & rl.sliding_window(w)",
    "cu_seqlens": "say mask=rl.documents(lengths)",
    "softcap": "capped scores (softcap) are not supported",
    "sinks": "attention sinks are not supported",
    "s_aux": "attention sinks are not supported",
    "alibi_slopes": "ALiBi biases are not supported",
    "enable_gqa": "grouped-query attention is inferred from the head counts of q and k",
}


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether it is another function's default, which says what is so anyway: no dropout, no window."""
    if name not in _REFUSED:
        return False
    if name == "window_size":
        return value is None or value == -1 or tuple(value if isinstance(value, tuple | list) else ()) == (-1, -1)
    nothing = isinstance(value, bool | int | float) and value == 0 and name not in _SCALES
    return value is None or nothing or name == "enable_gqa" and value is True


def ring_attention(
    q: Shards | Tensor,
    k: Shards | Tensor,
    v: Shards | Tensor,
    mask: Mask = full,
    scale: float | None = None,
    kernel: str | Kernel | None = None,
    *,
    q_start: int = 0,
    return_lse: bool = False,
    layout: Layout | None = None,
    world: World | None = None,
    **unsupported: Any,
) -> Any:
    """Exact attention over a sequence that is split over ranks, with keys and values going round a ring.

    q: (B, H, S_q, D_k), k: (B, G, S_k, D_k), v: (B, G, S_k, D_v), each as ``Shards`` (from ``world.shard``), or in a
    distributed world as this rank's plain local tensors together with ``layout`` and ``world`` (of a world made with
    check=False, only if every rank holds equally many tokens: without the check nobody knows the others' lengths).
    H must be divisible by G. float64, float32, bfloat16 or float16.

    mask: which keys a query sees, by global position.  scale: of the scores, 1 / sqrt(D_k) if None.
    kernel: None chooses the fastest that can do it; "reference", "sdpa" or one of ``rl.kernels``.
    q_start: the global position of the first query, as in chunked prefill (keys start at 0).
    return_lse: also return lse (B, H, S_q), with which results over different keys merge.

    Returns what came: Shards for Shards, plain tensors for plain tensors; the output in the dtype of q. The gradient
    flows to q, k and v; a gradient of the gradient is refused. Rows that see no key give 0 and lse -inf. A NaN in v
    reaches every row of the kernel calls that read it, as in SDPA: a hidden key has weight 0, and 0 * NaN is NaN.

    Raises ValueError on every rank if an argument makes no sense or differs between ranks.

    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".

    >>> import torch, ringlearn as rl
    >>> q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    >>> shards = rl.SimulatedWorld(3).shard(q, k, v, layout=rl.striped)
    >>> out = rl.ring_attention(*shards, mask=rl.causal).unshard()
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, expected, atol=1e-5)
    True
    """
    return attend("ring_attention", RING, q, k, v, mask, scale, kernel, q_start, return_lse, layout, world, unsupported)


@uncompiled
def attend(
    op: str, strategy: Strategy, q, k, v, mask, scale, kernel, q_start, return_lse, layout, world, unsupported
) -> Any:
    """What every attention function over ranks does, whatever its strategy: check, agree, run as one autograd node."""
    world = _world(op, (q, k, v), world)
    plain = isinstance(q, Tensor)
    problem, same, own = None, {}, {}
    try:
        _check_kind(op, q, k, v, world, layout, unsupported)
        _check_strategy(op, strategy, world, kernel)
        tensors = [_autocast(t) for t in (q, k, v)]
        chosen = _check_call(op, tensors, mask, scale, kernel, q_start)
        more = strategy.check(op, mask, *tensors) if strategy.check else {}
        if world.check:  # else nobody reads it, and a mask that holds a GPU tensor makes the host wait for it
            same = {"strategy": strategy.name} | more
            same |= _signature(tensors, mask, scale, chosen, q_start, return_lse, layout, world)
        own = {
            "requires_grad": torch.is_grad_enabled() and any(t.requires_grad for x in tensors for t in _parts(x)),
            "grad mode": torch.is_grad_enabled(),
            "inference": any(t.is_inference() for x in tensors for t in _parts(x)),
            "lengths": [t.shape[-2] for t in (_parts(tensors[0])[0], _parts(tensors[1])[0])],
        }
    except Exception as error:  # a TypeError too, or one from a kernel or layout of the user's: the others must hear
        problem = error
    known = world.agree(op, same, own, problem)
    needs_grad = any(rank["requires_grad"] for rank in known)
    check_grad_mode(op, known)
    if plain:
        # From here on every rank knows the same lengths, so an error is the same error on all of them.
        tensors = _as_shards(op, tensors, layout, world, [rank["lengths"] for rank in known])
    q_shards, q_start = tensors[0], whole_number(q_start)
    mask.check(q_start + q_shards.length, tensors[1].length)
    q_ranges, k_ranges = tuple(shift(ranges, q_start) for ranges in q_shards.ranges), tensors[1].ranges
    parts, B = [_parts(t) for t in tensors], mask.rows
    if B is not None:
        S = tensors[1].length
        mask = documents([S] * B) & mask.packed(B, S)
        q_ranges, k_ranges = (tuple(_rows_in_line(r, B, S) for r in ranges) for ranges in (q_ranges, k_ranges))
        parts = [[_in_line(t) for t in of_ranks] for of_ranks in parts]
    spec = Spec(
        mask,
        q_ranges,
        k_ranges,
        1 / math.sqrt(parts[0][0].shape[-1]) if scale is None else float(scale),
        chosen,
    )
    if strategy.prepare:
        spec = strategy.prepare(op, spec, world, *tensors)
    if strategy.largest_message:
        world.reserve(strategy.largest_message(spec, parts[1][0], parts[2][0], needs_grad))
    outs, lses = _apply(op, strategy, world, spec, needs_grad, return_lse, parts)
    if B is not None:
        outs, lses = ([x.unflatten(2, (B, -1)).squeeze(0).transpose(0, 1) for x in xs] for xs in (outs, lses))
    out = Shards(outs, world, q_shards.layout, q_shards.length)
    lse = Shards(lses, world, q_shards.layout, q_shards.length, dim=-1)
    if plain:
        out, lse = out.local, lse.local
    return (out, lse) if return_lse else out


# --- checks --------------------------------------------------------------------------------------------------------


def _parts(x: Shards | Tensor) -> list[Tensor]:
    return x.tensors if isinstance(x, Shards) else [x]


def _world(op: str, inputs: Sequence[Any], world: World | None) -> World:
    """The world of a call; without one there is nobody to tell, so errors here are local."""
    worlds = [x.world for x in inputs if isinstance(x, Shards)]
    if world is None and not worlds:
        raise ValueError(
            f"{op}: expected Shards, got {', '.join(type(x).__name__ for x in inputs)}; split them first, "
            f"q, k, v = world.shard(q, k, v, layout=rl.zigzag), or in a distributed world pass this rank's shards with "
            f"layout= and world="
        )
    world = world or worlds[0]
    if not isinstance(world, World):
        raise ValueError(f"{op}: expected world to be a SimulatedWorld or a DistributedWorld, got {world!r}")
    return world


def _check_kind(op, q, k, v, world, layout, unsupported) -> None:
    for name, value in unsupported.items():
        if _changes_nothing(name, value):
            continue
        remedy = _REFUSED.get(name, f"see help(rl.{op}) for the arguments there are")
        raise ValueError(f"{op}: got {name}={shown(value)}; {remedy}")
    inputs = (q, k, v)
    if all(isinstance(x, Shards) for x in inputs):
        if any(x.world is not world for x in inputs):
            raise ValueError(
                f"{op}: q, k, v and world= must belong to one world; shard them with the same world object"
            )
        if len({x.layout for x in inputs}) > 1:
            raise ValueError(
                f"{op}: q, k and v must have the same layout, got {', '.join(str(x.layout) for x in inputs)}; shard "
                f"them in one call, world.shard(q, k, v, layout=...)"
            )
        if layout is not None and layout != q.layout:
            raise ValueError(f"{op}: the shards have layout {q.layout}, got layout={layout}; leave layout= away")
        if k.length != v.length:
            raise ValueError(
                f"{op}: k and v must have the same sequence length S_k, got k of {k.length} and v of {v.length}"
            )
        if any(x.dim != -2 for x in inputs):
            raise ValueError(f"{op}: expected shards of (B, heads, S, D) tensors, got shards without a head dim (lse?)")
    elif all(isinstance(x, Tensor) for x in inputs):
        if len(world.ranks) != 1:
            raise ValueError(
                f"{op}: plain tensors are a rank's own shards, which only a distributed world has, got {world!r}; in a "
                f"simulated world pass world.shard(q, k, v, layout=...)"
            )
        if not isinstance(layout, Layout):
            raise ValueError(
                f"{op}: plain tensors need layout= to say which positions they are, such as rl.zigzag, got {layout!r}"
            )
    else:
        raise ValueError(
            f"{op}: q, k and v must be three Shards or three tensors, got {', '.join(type(x).__name__ for x in inputs)}"
        )


def _check_strategy(op: str, strategy: Any, world: World, kernel: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise ValueError(f"{op}: expected a strategy such as rl.attention.RING, got {strategy!r}")
    if strategy.problem:
        raise ValueError(f"{op}: {strategy.problem}")
    if strategy.axes > len(world.shape):
        raise ValueError(
            f"{op}: expected a world with two axes, got {world!r}; make it with rl.SimulatedWorld((nodes, ranks of a "
            f"node)), or from a DeviceMesh of two axes, rl.DistributedWorld(mesh)"
        )
    if not strategy.has_kernel and kernel is not None:
        raise ValueError(f"{op}: {strategy.name} computes whole rows of scores without a kernel; leave kernel= away")


def _check_call(op, tensors, mask, scale, kernel, q_start) -> Kernel:
    for parts in zip(*map(_parts, tensors), strict=True):
        check_attention_inputs(op, *parts)
        check_no_tangent(op, *parts)
    if not isinstance(mask, Mask):
        raise ValueError(f"{op}: expected a mask such as rl.causal or rl.mask(fn), got {shown(mask)}")
    if mask.rows not in (None, _parts(tensors[0])[0].shape[0]):
        raise ValueError(
            f"{op}: expected a mask for the {_parts(tensors[0])[0].shape[0]} rows of the batch, got {mask!r} for "
            f"{mask.rows}"
        )
    if not is_scale(scale):
        raise ValueError(f"{op}: expected scale to be None or a finite number > 0, got {scale!r}")
    if whole_number(q_start) is None or q_start < 0:
        raise ValueError(f"{op}: expected q_start, the position of the first query, to be an int >= 0, got {q_start!r}")
    chosen = kernels.choose(kernel)
    for q, k, v in zip(*map(_parts, tensors), strict=True):
        reasons = [chosen.unsupported(q.detach(), k.detach(), v.detach(), kind) for kind in kernels.kinds_of(mask)]
        if q.numel() and k.numel() and any(reasons):
            raise ValueError(
                f"{op}: kernel {chosen.name!r} cannot compute this: {next(filter(None, reasons))}. Leave kernel= away "
                f"to have one chosen that can; print(rl.kernels.explain(q, k, v, mask)) says which"
            )
    return chosen


def _signature(tensors, mask, scale, kernel, q_start, return_lse, layout, world) -> dict[str, str]:
    q, k, v = (_parts(x)[0] for x in tensors)
    B, H, _, D_k = q.shape
    same = {
        "B, H, G, D_k, D_v": f"{B}, {H}, {k.shape[1]}, {D_k}, {v.shape[-1]}",
        "dtype": str(q.dtype),
        "device type": q.device.type,
        "mask": mask.signature(),
        "scale": repr(scale),
        "kernel": kernel.name,
        "q_start": str(whole_number(q_start)),
        "return_lse": str(bool(return_lse)),
    }
    if isinstance(tensors[0], Shards):
        for name, x in zip("qk", tensors, strict=False):
            same[f"layout of {name}"] = describe(x.layout, x.length, world.size)
    else:
        same["layout"] = str(layout)
    return same


def _as_shards(op: str, tensors: list[Tensor], layout: Layout, world: World, lengths: list[list[int]]) -> list[Shards]:
    """Plain local tensors as Shards: the full lengths are the sums of what the ranks have said."""
    if len(lengths) == 1:  # nobody was asked: shards are taken to be as long everywhere
        lengths = lengths * world.size
    shards = []
    for i, name in enumerate(("q", "k", "v")):
        per_rank = [rank[min(i, 1)] for rank in lengths]
        total = sum(per_rank)
        expected = [sum(map(len, ranges)) for ranges in layout.ranges(total, world.size)]
        if per_rank != expected:
            raise ValueError(
                f"{op}: the ranks hold {per_rank} tokens of {name}; for {total} in all, layout {layout} has "
                f"{expected}. Split with world.shard(..., layout=rl.{layout}) or layout.positions(S, P, rank)"
            )
        shards.append(Shards([tensors[i]], world, layout, total))
    return shards


def _in_line(x: Tensor) -> Tensor:
    """(B, heads, s, D) to (1, heads, B * s, D): the rows of the batch one after the other, as one sequence."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _rows_in_line(ranges: Ranges, B: int, S: int) -> Ranges:
    """The positions of a rank's tokens in such a sequence, where each row has S positions."""
    return tuple(r for b in range(B) for r in shift(ranges, b * S))


def _autocast(x: Shards | Tensor) -> Shards | Tensor:
    """Under autocast q, k and v are cast as SDPA casts them: all but float64 to the autocast dtype."""
    if isinstance(x, Shards):
        return x.map(_autocast)
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return x.to(torch.get_autocast_dtype(kind))
    return x


def _no_autocast(kind: str) -> AbstractContextManager:
    """Programs and kernels see the dtypes that they are given."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


# --- the autograd node ---------------------------------------------------------------------------------------------


def _apply(
    op: str,
    strategy: Strategy,
    world: World,
    spec: Spec,
    needs_grad: bool,
    return_lse: bool,
    tensors: list[list[Tensor]],
) -> tuple[list, list]:
    n = len(world.ranks)
    flat = [t for parts in tensors for t in parts]
    if needs_grad and torch.is_grad_enabled():
        # The node must be there on every rank or on none, or some rank would wait in the backward for one that never
        # comes. A rank whose own inputs need no gradient hangs its output on this empty tensor.
        flows = torch.empty(0, device=flat[0].device, requires_grad=True)
        results = _Attention.apply(op, strategy, world, spec, return_lse, flows, *flat)
    else:
        results = _forward(strategy, world, spec, [t.detach() for t in flat])
    return list(results[:n]), list(results[n : 2 * n])


def _forward(strategy: Strategy, world: World, spec: Spec, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the forward program: the owned ranks' outputs in the input dtype, their lse, and what the backward needs."""
    n = len(world.ranks)
    q, k, v = (PerRank(flat[i * n : (i + 1) * n]) for i in range(3))
    with torch.no_grad(), _no_autocast(q[0].device.type):
        results = world.run(strategy.forward, q, k, v, spec)
        partials, *kept = zip(*results, strict=True)
        return *(p.out.to(t.dtype) for p, t in zip(partials, q, strict=True)), *(p.lse for p in partials), *chain(*kept)


class _Attention(torch.autograd.Function):
    """All ranks that this process owns as one node: its inputs are all their q, k and v.

    One node per process cannot deadlock in the autograd engine, however many ranks it simulates.
    """

    @staticmethod
    def forward(ctx, op, strategy, world, spec, return_lse, flows, *flat):
        results = _forward(strategy, world, spec, flat)
        ctx.op, ctx.strategy, ctx.world, ctx.spec, ctx.return_lse = op, strategy, world, spec, return_lse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat, *results)
        return results[: 2 * len(world.ranks)]

    @staticmethod
    def backward(ctx, *grads):
        n = len(ctx.world.ranks)
        saved = ctx.saved_tensors
        q, k, v, out, lse, *kept = (PerRank(saved[i : i + n]) for i in range(0, len(saved), n))
        dout = PerRank(torch.zeros_like(o) if g is None else g for g, o in zip(grads[:n], out, strict=True))
        dlse = PerRank(grads[n:])
        known = ctx.world.agree(f"backward of {ctx.op}", {}, {"dlse": any(g is not None for g in dlse)})
        unasked = len(known) * n < ctx.world.size  # without the check nobody knows about the others
        if ctx.strategy.moves_dlse and ctx.return_lse and (unasked or any(rank["dlse"] for rank in known)):
            dlse = PerRank(torch.zeros_like(x) if g is None else g for g, x in zip(dlse, lse, strict=True))
        with torch.no_grad(), _no_autocast(q[0].device.type):
            results = ctx.world.run(ctx.strategy.backward, dout, q, k, v, out, lse, dlse, *kept, ctx.spec)
            flat = [
                g.to(t.dtype) for i, x in enumerate((q, k, v)) for g, t in zip((r[i] for r in results), x, strict=True)
            ]
        if torch.is_grad_enabled():  # create_graph=True: a second differentiation must not be silently wrong
            flat = _NoDoubleBackward.apply(
                ctx.op, len(flat), *flat, *saved[: 3 * n], *(g for g in grads if g is not None)
            )
        return None, None, None, None, None, None, *flat


class _NoDoubleBackward(torch.autograd.Function):
    """The identity, with a backward that says what is not there."""

    @staticmethod
    def forward(ctx, op, n, *tensors):
        ctx.op = op
        return tuple(t.clone() for t in tensors[:n])

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{ctx.op}: a gradient of its gradient is not supported; for second derivatives use dense attention "
            f"(SDPA's math backend), or drop create_graph=True"
        )

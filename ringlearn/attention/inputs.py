"""What an attention call is given, checked: every argument that makes no sense is refused here, with its remedy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import kernels
from ..flash import check_attention_inputs, is_scale
from ..kernels import Kernel
from ..layouts import Layout
from ..masks import Mask
from ..worlds.world import Shards, World, check_no_tangent
from .strategy import Strategy

# Arguments that other attention functions take, and what to do here instead.
_REFUSED = {
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
    "alibi_slopes": "ALiBi biases are not supported",
    "enable_gqa": "grouped-query attention is inferred from the head counts of q and k",
}


def _parts(x: Shards | Tensor) -> list[Tensor]:
    return x.tensors if isinstance(x, Shards) else [x]


def _check_kind(op, q, k, v, world, layout, unsupported) -> None:
    for name, value in unsupported.items():
        remedy = _REFUSED.get(name, f"see help(rl.{op}) for the arguments there are")
        raise ValueError(f"{op}: got {name}={value!r}; {remedy}")
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
        raise ValueError(f"{op}: expected a mask such as rl.causal or rl.mask(fn), got {mask!r}")
    if not is_scale(scale):
        raise ValueError(f"{op}: expected scale to be None or a finite number > 0, got {scale!r}")
    if isinstance(q_start, bool) or not isinstance(q_start, int) or q_start < 0:
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

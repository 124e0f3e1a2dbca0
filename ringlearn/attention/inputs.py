"""The arguments of an attention call, and every check of them: each error says what was expected and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import kernels
from ..fingerprint import shown, whole_number
from ..flash import check_attention_inputs, is_scale
from ..kernels import Kernel, Scores
from ..layouts import Layout
from ..masks import Mask, full
from ..worlds.world import Shards, World, check_no_tangent
from .sinks import check_sinks
from .strategy import Strategy

_SCALES = ("softmax_scale", "sm_scale", "scaling")
# Arguments that other attention functions take, and what to do here instead of those that change something.
_REFUSED = {
    **dict.fromkeys(_SCALES, "say scale="),
    "dropout_p": "dropout inside attention is not supported; apply dropout to the output",
    "dropout": "dropout inside attention is not supported; apply dropout to the output",
    "is_causal": "pass mask=rl.causal",
    "causal": "pass mask=rl.causal",
    "attn_mask": "a dense mask would be S x S; pass mask=rl.causal, rl.sliding_window(w), rl.documents(lengths) or "
    "rl.mask(fn)",
    "window_size": "pass mask=rl.causal & rl.sliding_window(w)",
    "cu_seqlens": "pass mask=rl.documents(lengths)",
    "logits_soft_cap": "say softcap=",
    "s_aux": "say sinks=",
    "learnable_sink": "say sinks=",
    "alibi_slopes": "say alibi=",
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


@dataclass(frozen=True)
class Request:
    """The arguments of an attention function as its caller gave them, before anything is checked.

    op: the function's name, with which its errors begin.  unsupported: arguments that the function does not have.
    All others are those of ``ring_attention``.
    """

    op: str
    q: Any
    k: Any
    v: Any
    mask: Any = full
    scale: Any = None
    kernel: Any = None
    q_start: Any = 0
    return_lse: bool = False
    layout: Any = None
    world: Any = None
    sinks: Any = None
    softcap: Any = None
    alibi: Any = None
    unsupported: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v


def parts(x: Shards | Tensor) -> list[Tensor]:
    """The tensors of the ranks that this process owns."""
    return x.tensors if isinstance(x, Shards) else [x]


def world_of(request: Request) -> World:
    """The world in which the call runs. Without one there are no other ranks to tell, so errors here are local."""
    op, world = request.op, request.world
    worlds = [x.world for x in request.inputs if isinstance(x, Shards)]
    if world is None and not worlds:
        raise ValueError(
            f"{op}: expected Shards, got {', '.join(type(x).__name__ for x in request.inputs)}; split them first, "
            f"q, k, v = world.shard(q, k, v, layout=rl.zigzag), or in a distributed world pass this rank's shards with "
            f"layout= and world="
        )
    world = world or worlds[0]
    if not isinstance(world, World):
        raise ValueError(f"{op}: expected world to be a SimulatedWorld or a DistributedWorld, got {world!r}")
    return world


def check_inputs(request: Request, world: World) -> None:
    """Raise ValueError unless q, k and v are three Shards, or three local tensors, that belong together."""
    op, (q, k, v), layout = request.op, request.inputs, request.layout
    for name, value in request.unsupported.items():
        if _changes_nothing(name, value):
            continue
        remedy = _REFUSED.get(name, f"see help(rl.{op}) for the arguments there are")
        raise ValueError(f"{op}: got {name}={shown(value)}; {remedy}")
    if all(isinstance(x, Shards) for x in request.inputs):
        if any(x.world is not world for x in request.inputs):
            raise ValueError(
                f"{op}: q, k, v and world= must belong to one world; shard them with the same world object"
            )
        if len({x.layout for x in request.inputs}) > 1:
            raise ValueError(
                f"{op}: q, k and v must have the same layout, got {', '.join(str(x.layout) for x in request.inputs)}; "
                f"shard them in one call, world.shard(q, k, v, layout=...)"
            )
        if layout is not None and layout != q.layout:
            raise ValueError(f"{op}: the shards have layout {q.layout}, got layout={layout}; omit layout=")
        if k.length != v.length:
            raise ValueError(
                f"{op}: k and v must have the same sequence length S_k, got k of {k.length} and v of {v.length}"
            )
        if any(x.dim != -2 for x in request.inputs):
            raise ValueError(f"{op}: expected shards of (B, heads, S, D) tensors, got shards without a head dim (lse?)")
    elif all(isinstance(x, Tensor) for x in request.inputs):
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
            f"{op}: q, k and v must be three Shards or three tensors, got "
            f"{', '.join(type(x).__name__ for x in request.inputs)}"
        )


def check_strategy(request: Request, strategy: Strategy, world: World) -> None:
    """Raise ValueError if the strategy needs another world, or has no use for the kernel that was asked for."""
    if strategy.axes > len(world.shape):
        raise ValueError(
            f"{request.op}: expected a world with two axes, got {world!r}; make it with rl.SimulatedWorld((nodes, "
            f"ranks per node)), or from a DeviceMesh of two axes, rl.DistributedWorld(mesh)"
        )
    if not strategy.has_kernel and request.kernel is not None:
        raise ValueError(f"{request.op}: {strategy.name} computes whole rows of scores without a kernel; omit kernel=")


def check_arguments(request: Request) -> tuple[Kernel, Scores]:
    """Raise ValueError unless these make attention that the kernel can compute; give it, and how scores are changed."""
    op, mask, scale, q_start = request.op, request.mask, request.scale, request.q_start
    per_rank = list(zip(*map(parts, request.inputs), strict=True))
    for q, k, v in per_rank:
        check_attention_inputs(op, q, k, v)
        check_no_tangent(op, q, k, v)
    H, device = per_rank[0][0].shape[1], per_rank[0][0].device
    check_sinks(op, request.sinks, H, device)
    check_no_tangent(op, *([] if request.sinks is None else [request.sinks]))
    scores = kernels.scores_of(op, H, request.softcap, request.alibi)
    if not isinstance(mask, Mask):
        raise ValueError(f"{op}: expected a mask such as rl.causal or rl.mask(fn), got {shown(mask)}")
    B = per_rank[0][0].shape[0]
    if mask.rows not in (None, B):
        raise ValueError(f"{op}: expected a mask for the {B} rows of the batch, got {mask!r} for {mask.rows}")
    if not is_scale(scale):
        raise ValueError(f"{op}: expected scale to be None or a finite number > 0, got {scale!r}")
    if whole_number(q_start) is None or q_start < 0:
        raise ValueError(f"{op}: expected q_start, the position of the first query, to be an int >= 0, got {q_start!r}")
    kernel = kernels.with_scores(kernels.choose(request.kernel), scores)
    for q, k, v in per_rank:
        reasons = [kernel.unsupported(q.detach(), k.detach(), v.detach(), kind) for kind in kernels.tile_kinds(mask)]
        if q.numel() and k.numel() and any(reasons):
            raise ValueError(
                f"{op}: kernel {kernel.name!r} cannot compute this: {next(filter(None, reasons))}. Omit kernel= to "
                f"have a suitable one chosen; print(rl.kernels.explain(q, k, v, mask)) says which"
            )
    return kernel, scores

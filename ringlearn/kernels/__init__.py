"""Kernels: how one tile of attention is computed, forward and backward.

A kernel is handed the local q, k, v and a tile, and returns the partial result of the tile's rows over its columns:

    forward(q, k, v, tile, scale)                              -> Partial(out, lse)
    backward(dout, q, k, v, out, lse, tile, scale, dlse=None)  -> dq, dk, dv  (of the tile's rows and columns)

One convention for all of them: lse is the natural-log logsumexp of the scaled scores, float32 or wider, and a row that
sees no key has out 0 and lse -inf. In the backward ``out`` and ``lse`` are the *global* results of the rows, after all
merges. Results are in the dtype in which the kernel has computed them, that of q or the accumulation dtype; they are
merged and summed in the latter.

``choose`` returns a kernel by name; ``explain`` says which kernel computes what, and why the others do not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..fingerprint import shown
from ..flash import check_attention_inputs
from ..layouts import LAYOUTS, Layout, contiguous
from ..masks import INFINITY, Mask
from ..partial import Partial
from ..tiles import LONG, Kind, Tile, plan_steps
from ..tiles.segments import is_plain
from .reference import Reference
from .scores import Scores, alibi_slopes, scores_of
from .sdpa import FUSED, Sdpa

__all__ = ["Kernel", "Scores", "alibi_slopes", "choose", "explain"]

ABSURD = 4  # times the visible scores: from there on ``explain`` says what to take instead


class Kernel(Protocol):
    """A kernel: computes one tile, forward and backward."""

    name: str

    def with_scores(self, scores: Scores) -> Kernel | None:
        """This kernel for scores that are capped, or lowered with the distance of query and key, before the softmax.

        None if the kernel does not support them; a kernel without this method is assumed not to. Tiles are ``Located``
        if scores depend on the distance.
        """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> str | None:
        """Why this kernel cannot compute such a tile (half a sentence for the user), or None if it can.

        lse_grad: whether a gradient flows into lse, so that the backward has to take it into account.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        """Partial(out (B, H, rows, D_v), lse (B, H, rows)).

        q: (B, H, n_q, D_k).  k: (B, G, n_k, D_k).  v: (B, G, n_k, D_v).  The kernel slices them by the tile.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        scale: float,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, H, rows, D_k), dk (B, G, columns, D_k), dv (B, G, columns, D_v).

        dout, out: (B, H, n_q, D_v).  lse, dlse: (B, H, n_q).  All rows; the kernel slices them by the tile.
        """


KERNELS: tuple[Kernel, ...] = (Sdpa(), *FUSED, Reference())


def choose(kernel: str | Kernel | None = None) -> Kernel:
    """The kernel of that name.

    None, "auto" or "sdpa": for each tile the first fused kernel that supports it, otherwise the reference kernel.
    "reference", or the name of a fused kernel: that one for every tile; a fused kernel raises ValueError, with the
    reason, at a tile that it does not support. An object with the name and methods of ``Kernel`` is returned
    unchanged.
    Raises ValueError for an unknown name.

    >>> choose().name, choose("reference").name
    ('sdpa', 'reference')
    """
    if kernel is None or kernel == "auto":
        kernel = "sdpa"
    if isinstance(kernel, str):
        for known in KERNELS:
            if known.name == kernel:
                return known
    elif (
        not isinstance(kernel, type)
        and isinstance(getattr(kernel, "name", None), str)
        and all(callable(getattr(kernel, method, None)) for method in ("unsupported", "forward", "backward"))
    ):
        return kernel
    raise ValueError(
        f"kernel: expected None, 'auto', {', '.join(repr(known.name) for known in KERNELS)}, or an object with the "
        f"name and the methods of ringlearn.kernels.Kernel, got {kernel!r}"
    )


def with_scores(kernel: Kernel, scores: Scores) -> Kernel:
    """The kernel with these scores. Raises ValueError if it has no form for them."""
    changed = kernel if not scores else kernel.with_scores(scores) if hasattr(kernel, "with_scores") else None
    if changed is None:
        raise ValueError(
            f"kernel {kernel.name!r} has no form for {scores}; omit kernel= to have one chosen that has, or say "
            f"kernel='reference'"
        )
    return changed


class Explanation(str):
    """Text that shows itself as it is, in a notebook too."""

    def __repr__(self) -> str:
        return str(self)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Kind | None = None,
    kernel: str | Kernel | None = None,
    *,
    softcap: float | None = None,
    alibi: Tensor | Sequence[float] | None = None,
) -> Explanation:
    """Which kernel computes the tiles of such tensors, and why the others do not.

    q: (B, H, S_q, D_k).  k: (B, G, S_k, D_k).  v: (B, G, S_k, D_v).  Only device, dtype and shapes matter.
    mask: a mask, to see only the kinds of tiles that it leads to, or a single kind of tile; all kinds if None.
    kernel: as for ``choose``.  softcap, alibi: as for ``ring_attention``.
    Raises ValueError if the kernel is unknown or does not support these scores, or if the shapes do not fit.

    >>> import torch, ringlearn as rl
    >>> explain(*(torch.randn(1, 8, 1000, 64) for _ in range(3)), mask=rl.causal)
    q (1, 8, 1000, 64), k (1, 8, 1000, 64), v (1, 8, 1000, 64), float32 on cpu, kernel 'sdpa'
    FULL     cpu_flash
    CAUSAL   cpu_flash
    Not used:
      fa4         it runs on NVIDIA GPUs, got cpu tensors
      cudnn       it runs on NVIDIA GPUs, got cpu tensors
      cuda_flash  it runs on NVIDIA GPUs, got cpu tensors
      efficient   it runs on NVIDIA GPUs, got cpu tensors
      reference   the slowest: for tiles that no fused kernel takes, and for a gradient that flows into lse
    """
    shards = q, k
    q, k, v = (getattr(x, "tensors", [x])[0] for x in (q, k, v))  # of Shards, the first shard
    check_attention_inputs("kernels.explain", q, k, v)
    scores = scores_of("kernels.explain", q.shape[1], softcap, alibi)
    chosen = with_scores(choose(kernel), scores)
    q, k, v = q.detach(), k.detach(), v.detach()
    kinds = tile_kinds(mask)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
    dtype = str(q.dtype).removeprefix("torch.")
    lines = [f"{shapes}, {dtype} on {q.device}, kernel {chosen.name!r}{f', with {scores}' if scores else ''}"]
    used = set()
    for kind in kinds:
        taker = chosen.pick(q, k, v, kind) if isinstance(chosen, Sdpa) else chosen
        reason = taker.unsupported(q, k, v, kind)
        if reason is not None:
            lines.append(f"{kind.name:<8} ValueError: {taker.name}: {reason}")
            continue
        used.add(taker.name)
        what = taker.name
        if kind is Kind.SEGMENTS:
            apart = isinstance(chosen, Sdpa) and chosen.apart(taker, q, k, v, kind)
            what = _of_segments(taker, apart, mask, *shards)
            used |= {chosen.pick(q, k, v, Kind.FULL).name} if apart else set()
        lines.append(f"{kind.name:<8} {what}")
    if isinstance(chosen, Sdpa):
        lines.append("Not used:")
        for other in (*FUSED, Reference()):
            changed = other.with_scores(scores)
            if changed is None:
                lines.append(f"  {other.name:<11} it has no form for {scores}")
            elif changed.name not in used:
                lines.append(f"  {other.name:<11} {_why_not(changed, q, k, v, kinds)}")
    return Explanation("\n".join(lines))


def warn_of_reference(
    op: str, kernel: Kernel, scores: Scores, q: Tensor, k: Tensor, v: Tensor, kinds: Sequence[Kind]
) -> None:
    """Say once that changed scores are left to the reference kernel, if they are: it is many times slower on a GPU."""
    if not scores or not isinstance(kernel, Sdpa) or q.device.type == "meta":
        return
    q, k, v = q.detach(), k.detach(), v.detach()
    if any(isinstance(kernel.pick(q, k, v, kind), Reference) for kind in kinds):
        warnings.warn(
            f"{op}: the kernel 'reference' computes this call or parts of it. It is right but slow; no fused "
            f"kernel takes {scores} for such tensors. print(rl.kernels.explain(q, k, v, mask, softcap=, alibi=)) gives "
            f"the reasons; kernel='reference' asks for it, without this warning",
            stacklevel=_outside(),
        )


def _outside() -> int:
    """The ``stacklevel`` with which the caller of this function warns about the line that called the library.

    Frames of torch lie between as well, where a layer of ``rl.nn`` made the call.
    """
    frame, level, inside = sys._getframe(1), 1, (__package__.partition(".")[0], "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level


def tile_kinds(mask: Mask | Kind | None) -> tuple[Kind, ...]:
    """The kinds of tiles that a mask leads to, whatever the layout."""
    if mask is None:
        return tuple(Kind)
    if isinstance(mask, Kind):
        return (mask,)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"kernels.explain: expected a mask such as rl.causal, a kind of tile or None, got {shown(mask)}"
        )
    if not mask.exact:
        return Kind.FULL, Kind.PARTIAL
    if mask.rows is not None or not is_plain(mask):
        return Kind.FULL, Kind.CAUSAL, Kind.SEGMENTS
    return (Kind.FULL, Kind.CAUSAL) if mask.pieces(0, INFINITY)[0].hi.slope else (Kind.FULL,)


def _of_segments(kernel: Kernel, apart: bool, mask: Mask | Kind | None, q: Any, k: Any) -> str:
    """How a kernel computes SEGMENTS tiles, and in how many calls in each step of a ring.

    apart: whether cuDNN computes long segments.  q, k: tensors, or Shards whose layout says what the steps are.
    """
    whole = Kind.SEGMENTS in getattr(kernel, "forms", (Kind.SEGMENTS,))
    text = kernel.name if whole else f"{kernel.name}, cut into FULL, CAUSAL and PARTIAL tiles"
    if apart:
        text += f", and cudnn segments of more than {LONG} rows"
    if not isinstance(mask, Mask) or mask.rows is not None:
        return text
    if isinstance(q, Tensor):
        layout, P, S_q, S_k = contiguous, 1, q.shape[-2], k.shape[-2]
    else:
        layout, P, S_q, S_k = q.layout, q.world.size, q.length, k.length
    mask.check(S_q, S_k)

    def work(layout: Layout) -> tuple[int, float]:
        """(most calls in a step, computed scores over visible ones)"""
        k_ranges = layout.ranges(S_k, P)
        planned = [tiles for mine in layout.ranges(S_q, P) for tiles in plan_steps(mask, mine, k_ranges)]
        steps = planned
        if apart or not whole:
            steps = [[part for tile in tiles for part in (tile.long_apart if apart else tile.cut)] for tiles in steps]
        computed, visible = (sum(tile.area for tiles in some for tile in tiles) for some in (steps, planned))
        return max(map(len, steps)), computed / max(1, visible)

    most, ratio = work(layout)
    text += f", in {'up to ' * (most > 1)}{most} call{'s' * (most > 1)} a step"
    if ratio < ABSURD:
        return text
    text += f", which compute {ratio:.0f} times the visible scores"
    better, least = min(((other, work(other)[1]) for other in LAYOUTS.values()), key=lambda found: found[1])
    return text + (f"; with layout=rl.{better} {least:.0f} times" if least < ratio / 2 else "")


def _why_not(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, kinds: tuple[Kind, ...]) -> str:
    if isinstance(kernel, Reference):
        return "the slowest: for tiles that no fused kernel takes, and for a gradient that flows into lse"
    reasons = [kernel.unsupported(q, k, v, kind) or kernel.passed_over(q, k, v, kind) for kind in kinds]
    return next((r for r in reasons if r), "it comes after those above in the order of preference")

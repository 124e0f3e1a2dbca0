"""What the fused kernels inside torch share: how a tile becomes a kernel call, and how the results come back.

torch has several fused attention kernels that return lse, and each of them has its own demands. ``Fused`` prepares
what it is handed so that they all look alike, without a copy wherever the kernel lets us:

    slices       a kernel gets only the tile's rows and columns, and an empty tile never reaches one (CPU flash ends
                 the process on it)
    head dims    zero columns are appended where a kernel wants D_k = D_v or a multiple of 8. They add 0 to every
                 score and give output columns that are cut off again, so the result is exact
    groups       a kernel without grouped-query attention sees B * G batches of H / G heads, whose keys are
                 *expanded* (stride 0), not copied; dk and dv are summed over the group in the accumulation dtype
    lse          natural log, (B, H, rows), contiguous; a row without keys has out 0 and lse -inf, whatever the
                 kernel says about it
    backward     a row that sees no key anywhere has lse -inf, of which kernels make NaN: it gets lse 0 and dout 0
    forms        a kernel without a form for segments (documents, windows) gets them cut into tiles that it takes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..partial import Partial, accumulation_dtype
from ..partial.accumulate import ALL, Accumulator, Sum
from ..tiles import Kind, Tile, moved
from .reference import Reference
from .scores import Scores

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv

_reference = Reference()


class Fused:
    """One fused kernel behind the ``Kernel`` protocol. A subclass says what it takes and makes the two calls.

    forward and backward raise ValueError, with the reason, at a tile that the kernel does not support. Tiles that are
    empty, smaller than the kernel takes, or misread by it are computed by the reference kernel.
    """

    name: str
    grouped = True  # whether the kernel itself takes G < H key/value heads
    takes_lse_grad = False  # whether its backward takes a gradient of lse
    least_rows = 1
    least_columns = 1
    forms: tuple[Kind, ...] = (Kind.FULL, Kind.CAUSAL, Kind.PARTIAL)  # the kinds of tiles that are one call

    def with_scores(self, scores: Scores) -> Fused | None:
        """This kernel with changed scores; None if it has no form for them."""
        return None if scores else self

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> str | None:
        """Why this kernel cannot compute such a tile, or None if it can."""
        if lse_grad and not self.takes_lse_grad:
            return "it takes no gradient of lse"
        reason = self._refuses(q, k, v, kind)
        if reason is None and kind not in self.forms and Kind.PARTIAL not in self.forms:
            names = [form.name for form in self.forms]
            return f"it takes {', '.join(names[:-1])} and {names[-1]} tiles only"
        return reason

    def passed_over(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        """Why the choice of a kernel passes over this one for such a tile, although it could compute it, or None."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        """Partial(out, lse) of the tile's rows over its columns.

        lse is in the accumulation dtype, out in the dtype of q, or in the former if it was merged from parts.
        """
        self._require(q, k, v, tile.kind)
        return self.checked_forward(q, k, v, tile, scale)

    def checked_forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Partial:
        """The same for a tile that is known to be supported: asking costs the host as much as a small kernel."""
        if self._too_small(q, tile):
            return _reference.forward(q, k, v, tile, scale)
        parts = self._parts(tile)
        if parts is not None:
            return forward_in_parts(self.checked_forward, q, k, v, tile, parts, scale)
        visible = tile.visible(q.device) if tile.kind is Kind.PARTIAL else None
        (q_t, k_t), (v_t,) = self._fit(cut(q, tile.q), cut(k, tile.k), cut(v, tile.k))
        out, lse = self._forward(q_t, k_t, v_t, tile, _bias(visible, q), scale)
        if self._misread(q, k, tile, lse, scale):
            return _reference.forward(q, k, v, tile, scale)
        shape = *q.shape[:2], tile.shape[0]
        if out.shape[:3] != shape:
            out = out.reshape(*shape, -1)
        out, lse = _columns(out, v), lse if lse.shape == shape else lse.reshape(shape)
        if visible is not None:
            blind = ~visible.any(dim=-1)
            out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)
        return Partial(out, lse.contiguous())

    def backward(self, dout, q, k, v, out, lse, tile, scale, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtype of q, or in the accumulation dtype if they were summed over a group or over parts."""
        self._require(q, k, v, tile.kind, lse_grad=dlse is not None)
        return self.checked_backward(dout, q, k, v, out, lse, tile, scale, dlse)

    def checked_backward(self, dout, q, k, v, out, lse, tile, scale, dlse=None) -> tuple[Tensor, Tensor, Tensor]:
        """The same for a tile that is known to be supported."""
        lse_t = cut(lse, tile.q)
        if self._too_small(q, tile) or self._misread(q, k, tile, lse_t, scale, backward=True):
            return _reference.backward(dout, q, k, v, out, lse, tile, scale, dlse)
        parts = self._parts(tile)
        if parts is not None:
            return backward_in_parts(self.checked_backward, dout, q, k, v, out, lse, tile, parts, scale, dlse)
        dout, out, lse = _as(q.dtype, cut(dout, tile.q)), _as(q.dtype, cut(out, tile.q)), lse_t
        visible = tile.visible(q.device) if tile.kind is Kind.PARTIAL else None
        # In other tiles a row that sees no key is in a segment without columns, of which a kernel computes nothing; and
        # one that sees a key has a finite lse.
        if visible is not None:
            blind = lse == -torch.inf
            dout, lse = dout.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, 0.0)
        (q_t, k_t), (v_t, dout, out) = self._fit(cut(q, tile.q), cut(k, tile.k), cut(v, tile.k), dout, out)
        # Kernels take a sliced lse for a contiguous one.
        lse = (lse if lse.shape == q_t.shape[:3] else lse.reshape(q_t.shape[:3])).contiguous()
        more = {} if dlse is None else {"dlse": cut(dlse, tile.q).to(lse.dtype).contiguous()}
        dq, dk, dv = self._backward(dout, q_t, k_t, v_t, out, lse, tile, _bias(visible, q), scale, **more)
        if dq.shape[:2] != q.shape[:2]:
            dq = dq.reshape(*q.shape[:2], *dq.shape[2:])
        dk, dv = _sum_groups(dk, k), _sum_groups(dv, v)
        return _columns(dq, q), _columns(dk, k), _columns(dv, v)

    def scratch(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, *of_rows: Tensor) -> int | None:
        """How many bytes such a call holds at most beside what it returns; None if that is not known beforehand.

        It is known where nothing is copied but lse.  of_rows: dout, out and lse, of a backward.
        """
        (B, H, S, D_k), G, D_v = q.shape, k.shape[1], v.shape[-1]
        if tile.kind not in (Kind.FULL, Kind.CAUSAL) or tile.kind not in self.forms or self._too_small(q, tile):
            return None
        if G < H and not self.grouped or _dims(self, D_k, D_v) != (D_k, D_v):
            return None
        if not all(self._readable(t) for t in (q, k, v, *of_rows[:2])):
            return None
        rows = tile.shape[0]
        if not of_rows:
            return self._beside(q, rows)
        dout, out, lse = of_rows
        if dout.dtype != q.dtype or out.dtype != q.dtype or not lse.is_contiguous():
            return None
        return B * H * rows * lse.itemsize if rows < S and B * H > 1 else 0  # some rows of each head are copied

    # --- what a subclass says --------------------------------------------------------------------------------------

    def _refuses(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        """Why tensors of this device, dtype and shape, or tiles of this kind, are refused."""
        raise NotImplementedError

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        """The head dims that the kernel is called with, at least D_k and D_v."""
        raise NotImplementedError

    def _reads(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        """Whether the kernel can read a tensor of this shape and these strides."""
        return strides[-1] == 1

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The call itself: out, lse. q, k, v are cut out of the tensors; of the tile only the kind and shape matter."""
        raise NotImplementedError

    def _backward(self, dout, q, k, v, out, lse, tile, bias, scale) -> tuple[Tensor, Tensor, Tensor]:
        """The call itself: dq, dk, dv. A kernel that takes a gradient of lse gets it as ``dlse``, if there is one."""
        raise NotImplementedError

    # --- preparation -----------------------------------------------------------------------------------------------

    def _require(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, lse_grad: bool = False) -> None:
        reason = self.unsupported(q, k, v, kind, lse_grad)
        if reason is None and recording(q, k, v):
            reason = "autograd is recording, and would miss the gradient through lse"
        if reason:
            raise ValueError(
                f"kernel {self.name!r} cannot compute this {kind.name} tile: {reason}. With kernel=None the library "
                f"falls back to another kernel; ringlearn.kernels.explain(q, k, v) says to which"
            )

    def _too_small(self, q: Tensor, tile: Tile) -> bool:
        rows, columns = tile.shape
        return rows < self.least_rows or columns < self.least_columns or not q.numel()

    def _parts(self, tile: Tile) -> tuple[Tile, ...] | None:
        """The tiles to compute it from; None if it is one call."""
        return None if tile.kind in self.forms else tile.cut

    def _beside(self, q: Tensor, rows: int) -> int:
        """How many bytes a forward holds at most beside out and lse."""
        return 0

    def _misread(self, q: Tensor, k: Tensor, tile: Tile, lse: Tensor, scale: float, backward: bool = False) -> bool:
        """Whether q or k hold a NaN, an infinity, or numbers whose scores overflow, which the kernel misreads.

        lse: of the tile's rows: what the kernel has just returned or, in the backward, the global one.
        """
        return False

    def _fit(self, q: Tensor, k: Tensor, v: Tensor, *like_out: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Head dims, groups and strides as the kernel wants them: (q, k), (v, *like_out)."""
        H, G = q.shape[1], k.shape[1]
        D_k, D_v = _dims(self, q.shape[-1], v.shape[-1])
        grouped, fitted = G < H and not self.grouped, []
        for t, D in ((q, D_k), (k, D_k), (v, D_v), *[(t, D_v) for t in like_out]):
            if D > t.shape[-1]:
                t = pad(t, (0, D - t.shape[-1]))
            if not self._readable(t):
                t = t.clone(memory_format=torch.contiguous_format)
            if grouped:
                t = t.reshape(t.shape[0] * G, t.shape[1] // G, *t.shape[2:]).expand(-1, H // G, -1, -1)
            fitted.append(t)
        return fitted[:2], fitted[2:]

    def _readable(self, t: Tensor) -> bool:
        """Whether the kernel can read a tensor as it is."""
        return _reads(self, t.shape, t.stride())


# What depends on shapes and strides alone is asked several times in every step of a ring, and kept.
_reads = lru_cache(maxsize=4096)(lambda kernel, shape, strides: kernel._reads(shape, strides))
_dims = lru_cache(maxsize=1024)(lambda kernel, D_k, D_v: kernel._dims(D_k, D_v))


def cut(t: Tensor, rows: slice) -> Tensor:
    """These rows of a (B, heads, S, ...) tensor; the tensor itself if they are all of them, for a view costs time."""
    return t if rows.start == 0 and rows.stop == t.shape[2] else t[:, :, rows]


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


def recording(*tensors: Tensor) -> bool:
    """Whether autograd would record a call on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _columns(t: Tensor, like: Tensor) -> Tensor:
    """Without the columns that were appended for the kernel."""
    D = like.shape[-1]
    return t if t.shape[-1] == D else t[..., :D]


def _bias(visible: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores: 0 where a row sees the column, -inf where it does not; (1, 1, rows, columns).

    Its rows are 16 elements apart, or a multiple: the memory-efficient kernel reads them in aligned pieces.
    """
    if visible is None:
        return None
    rows, columns = visible.shape
    bias = torch.zeros(1, 1, rows, columns + -columns % 16, dtype=q.dtype, device=q.device)[..., :columns]
    return bias.masked_fill_(~visible, -torch.inf)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """(B, G, columns, D) from the gradients of expanded keys, (B * G, H / G, columns, D)."""
    if grad.shape[:2] == like.shape[:2]:  # nothing was expanded
        return grad
    return grad.sum(dim=1, dtype=accumulation_dtype(like.dtype)).unflatten(0, like.shape[:2])


def forward_in_parts(
    compute: Callable[..., Partial],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: Tile,
    parts: tuple[Tile, ...],
    scale: float,
    twice: bool = False,
) -> Partial:
    """The tile's Partial(out, lse). Rows in none of the parts see nothing.

    twice: no row sees keys in more than two of the parts. Then out is rounded once, in the dtype of q; otherwise it is
    in the accumulation dtype.
    """
    shape, dtype = (*q.shape[:2], tile.shape[0], v.shape[-1]), accumulation_dtype(q.dtype)
    how = {"final": q.dtype, "throughout": True} if twice else {}
    result = Accumulator(shape, dtype, q.device, parts=len(parts), **how)
    for part in parts:
        result.add(moved(part.q, -tile.q.start), compute(q, k, v, part, scale))
    return result.partial


def backward_in_parts(
    compute: Callable[..., Gradients], dout, q, k, v, out, lse, tile, parts, scale, dlse=None, twice=False
) -> Gradients:
    """The tile's dq, dk, dv in the accumulation dtype; with ``twice``, as above, dq in the dtype of q."""
    rows, columns = tile.shape
    dtype = accumulation_dtype(q.dtype)
    dq = Sum([(*q.shape[:2], rows, q.shape[3])], q.dtype if twice else dtype, q.device)
    dkv = Sum([(*t.shape[:2], columns, t.shape[3]) for t in (k, v)], dtype, k.device)
    for part in parts:
        dq_part, *dkv_part = compute(dout, q, k, v, out, lse, part, scale, dlse)
        dq.add(ALL, moved(part.q, -tile.q.start), dq_part)
        dkv.add(ALL, moved(part.k, -tile.k.start), *dkv_part)
    return *dq.tensors, *dkv.tensors

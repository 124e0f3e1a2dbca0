"""Running results of a ring, one tile after another: ``Accumulator`` merges outputs and ``Sum`` adds gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import Partial, gpu, merge

ALL = slice(None)


class Sum:
    """A running sum of one or more tensors; each tile adds to some heads and rows of them.

    It allocates memory only when it has to: a contribution that covers everything, in the dtype of the sum, is taken
    over and added to in place; until one comes, the first contribution is kept as it is.

    shapes: (B, heads, S, D) of each tensor.  dtype: of the sums.

    >>> dk_dv = Sum([(1, 1, 3, 2), (1, 1, 3, 2)], torch.float32, "cpu")
    >>> dk_dv.add(ALL, slice(0, 1), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    >>> dk_dv.tensors[1].sum()
    tensor(2.)
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str):
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._first: tuple[slice, slice, tuple[Tensor, ...]] | None = None
        self._total: tuple[Tensor, ...] | None = None

    def add(self, heads: slice, rows: slice, *found: Tensor) -> None:
        """Add to these heads and rows of each tensor. ``found`` must not be used afterwards."""
        if self._total is None:
            if self._takes(found):
                heads, rows, found, self._total = *(self._first or (ALL, ALL, ())), found
                self._first = None
            elif self._first is None:
                self._first = heads, rows, found
                return
        elif self._takes(found) and _in_order(found) and not _in_order(self._total):
            self._total, found = found, self._total  # sums that lie in order are sent on without a copy
        for x, t in zip(self._total or self.tensors, found, strict=bool(found)):
            gpu.add_(x if t.shape == x.shape else x[:, heads, rows], t)

    def _takes(self, found: Sequence[Tensor]) -> bool:
        """Whether these could be the sums: they cover everything, in the dtype of the sums."""
        for t, shape in zip(found, self._shapes, strict=True):  # no generator: it is asked for every tile
            if t.dtype is not self._dtype or t.shape != shape:
                return False
        return True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums so far; zeros if nothing was added."""
        if self._total is None:
            self._total = tuple(torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in self._shapes)
            heads, rows, found = self._first or (ALL, ALL, ())
            self._first = None
            for x, t in zip(self._total, found, strict=bool(found)):
                gpu.add_(x[:, heads, rows], t)
        return self._total


def _in_order(tensors: Sequence[Tensor]) -> bool:
    return all(t.is_contiguous() for t in tensors)


class Accumulator:
    """The running partial result of a ring: starts as the identity and takes in one tile after another.

    It owns its memory: partial results are merged in place, and the first one that covers every row is taken
    over as it is, so a ring holds two outputs (the running one and the tile's), never three. While autograd is
    recording, the merge is out of place.

    shape: (B, H, S, D) of the output. dtype: what it accumulates in, float32 or float64.
    parts, final: if the number of partial results is known, the output is rounded only once, when the last one is
    merged, and is in the dtype ``final``; until the second one comes, the first keeps its dtype. So two tiles in
    bfloat16 need no float32 copy at all.
    throughout: ``final`` is the output's dtype from the beginning. Where no row is in more than two partial results
    that see keys, this rounds no more often.

    >>> acc = Accumulator((1, 1, 4, 2), torch.float32)
    >>> acc.add(slice(2, 4), Partial(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2)))
    >>> acc.partial.lse
    tensor([[[-inf, -inf, 0., 0.]]])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        parts: int | None = None,
        final: torch.dtype | None = None,
        throughout: bool = False,
    ):
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._parts, self._final = parts, final or dtype
        self._running = self._final if throughout else dtype  # the output's dtype before the last merge
        self._added = 0
        self._partial: Partial | None = None

    @property
    def partial(self) -> Partial:
        """The merged result so far; the identity if nothing was added."""
        if self._partial is None:
            dtype = self._final if self._parts == 0 else self._running
            return Partial(
                torch.zeros(self._shape, dtype=dtype, device=self._device),
                torch.full(self._shape[:-1], -torch.inf, dtype=self._dtype, device=self._device),
            )
        return self._partial

    def add(self, rows: slice, new: Partial) -> None:
        """Merge ``new``, whose queries are ``rows`` of this accumulator. ``new`` must not be used afterwards."""
        self._added += 1
        last = self._added == self._parts
        if self._partial is None and new.out.shape == self._shape:
            dtype = new.out.dtype if self._parts else self._running
            # `contiguous`: a kernel may return a view in another memory order, and rows are updated in place.
            self._partial = Partial(new.out.to(self._final if last else dtype), new.lse.to(self._dtype).contiguous())
            return
        self._partial = out, lse = self.partial
        if torch.is_grad_enabled() and any(x.requires_grad for x in (out, lse, *new)):
            merged = merge(Partial(out[..., rows, :], lse[..., rows]), new)
            start, stop, _ = rows.indices(self._shape[-2])
            self._partial = Partial(
                torch.cat([out[..., :start, :].to(merged.out.dtype), merged.out, out[..., stop:, :]], dim=-2),
                torch.cat([lse[..., :start], merged.lse, lse[..., stop:]], dim=-1),
            )
            return
        to = out.to(self._final if last else self._running)
        if new.out.shape == self._shape:
            merge_rows(self._partial, new, to)
        else:
            merge_rows(Partial(out[..., rows, :], lse[..., rows]), new, to[..., rows, :])
        self._partial = Partial(to, lse)


def merge_rows(mine: Partial, new: Partial, to: Tensor) -> None:
    """Merge ``new`` into ``mine``: lse in place, the output to ``to``, which is ``mine.out`` or holds a copy of it.

    ``new`` must not be used afterwards.
    """
    new_lse = new.lse.to(mine.lse.dtype)
    if gpu.available(mine.out, mine.lse, new.out, new_lse, to):
        gpu.merge_(mine.out, mine.lse, new.out, new_lse, to)
        return
    # exp(new.lse - lse) without a temporary for every step. The smallest finite number in place of -inf keeps it from
    # becoming NaN in rows that neither side has a key for; a NaN stays one.
    lowest = torch.finfo(mine.lse.dtype).min
    weight = torch.sigmoid(new_lse - mine.lse.clamp(min=lowest)).unsqueeze(-1)
    torch.logaddexp(mine.lse, new_lse, out=mine.lse)
    if to.dtype == weight.dtype:
        to.lerp_(new.out.to(weight.dtype), weight)
    else:
        to.copy_(torch.lerp(mine.out.to(weight.dtype), new.out.to(weight.dtype), weight))

"""Sums of what tiles find: dq over the keys that passed, dk and dv over the queries that they met."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import gpu as merging

ALL = slice(None)


class Sum:
    """The running sum of one or more tensors, to which tiles add some heads and rows.

    It has no memory of its own as long as it can do without: what covers everything, in the dtype of the sum, is taken
    over and added to in place; until then what came first is kept as it is.

    shapes: (B, heads, S, D) of each tensor. dtype: what it sums in.

    >>> dk_dv = Sum([(1, 1, 3, 2), (1, 1, 3, 2)], torch.float32, "cpu")
    >>> dk_dv.add(ALL, slice(0, 1), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    >>> dk_dv.tensors[1].sum()
    tensor(2.)
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str):
        self._shapes, self._dtype, self._device = [tuple(shape) for shape in shapes], dtype, device
        self._first: tuple[slice, slice, tuple[Tensor, ...]] | None = None
        self._total: tuple[Tensor, ...] | None = None

    def add(self, heads: slice, rows: slice, *found: Tensor) -> None:
        """Add to these heads and rows of each tensor. What is found is used up."""
        if self._total is None:
            if all(t.shape == shape and t.dtype == self._dtype for t, shape in zip(found, self._shapes, strict=True)):
                heads, rows, found, self._total = *(self._first or (ALL, ALL, ())), found
                self._first = None
            elif self._first is None:
                self._first = heads, rows, found
                return
        for x, t in zip(self.tensors, found, strict=bool(found)):
            merging.add_(x[:, heads, rows], t)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums so far; zeros if nothing came."""
        if self._total is None:
            self._total = tuple(torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in self._shapes)
            heads, rows, found = self._first or (ALL, ALL, ())
            self._first = None
            for x, t in zip(self._total, found, strict=bool(found)):
                merging.add_(x[:, heads, rows], t)
        return self._total

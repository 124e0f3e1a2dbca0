"""Partial attention results and their merge: the one piece of algebra that ring attention stands on.

Attention over a set of keys is summed up, for each query row, by two things: the output ``out`` (the
softmax-weighted mean of the values) and ``lse`` (the logsumexp of the scores). Two such pairs over disjoint
keys merge into the pair over their union, so softmax over a long row can be computed in pieces, in any order,
on any rank:

    lse = log(exp(a.lse) + exp(b.lse))
    out = exp(a.lse - lse) * a.out  +  exp(b.lse - lse) * b.out

Pairs under ``merge`` are a commutative monoid; its identity is ``(0, -inf)``, attention over no keys at all.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax" (section 3.1, the associative
operator of equation 4); Dao et al. 2022, "FlashAttention" (section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that results are merged and summed in: float64 for float64, float32 for everything else.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


class Partial(NamedTuple):
    """Attention of some queries over some of the keys.

    out: (..., S, D), the normalised output over the keys seen so far; 0 in rows that have seen no key.
    lse: (..., S), natural-log logsumexp of the scaled scores; -inf in rows that have seen no key.

    >>> scores, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [2.0], [4.0]])
    >>> partial = Partial(scores.softmax(-1) @ values, scores.logsumexp(-1))
    >>> out, lse = partial
    >>> out.shape, lse.shape
    (torch.Size([1, 1]), torch.Size([1]))
    """

    out: Tensor
    lse: Tensor


def identity(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Partial:
    """The partial result of attending to no key: ``(0, -inf)``. ``merge(identity(...), a)`` is ``a``.

    shape: (..., S, D), the shape of ``out``.

    >>> identity((2, 3)).lse
    tensor([-inf, -inf])
    """
    return Partial(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.full(shape[:-1], -torch.inf, dtype=dtype, device=device),
    )


def merge_weights(a_lse: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The merged lse, and the weights ``exp(a_lse - lse)`` and ``exp(b_lse - lse)`` that sum to 1.

    Right, with their gradients, for every mix of finite and -inf: where both are -inf the weights are 0 (not
    NaN, which ``exp(-inf - -inf)`` would give) and lse stays -inf.
    """
    # The maximum only keeps exp() in range: the result does not depend on it, so no gradient flows through it.
    top = torch.maximum(a_lse, b_lse).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    a, b = torch.exp(a_lse - top), torch.exp(b_lse - top)
    total = a + b
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf)
    return lse, a / total, b / total


def _check_shapes(name: str, p: Partial) -> None:
    if p.out.shape[:-1] != p.lse.shape:
        raise ValueError(
            f"merge: {name} must be Partial(out (..., S, D), lse (..., S)), got out {tuple(p.out.shape)} and "
            f"lse {tuple(p.lse.shape)}; lse has the shape of out without its last dim"
        )


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys, from the partial results over each.

    The merge is commutative and associative, with identity ``(0, -inf)``. It is computed and returned in float32
    (float64 if an input is). Raises ValueError if the shapes do not fit.

    >>> s, v = torch.randn(5, 7), torch.randn(7, 2)
    >>> attend = lambda s, v: Partial(s.softmax(-1) @ v, s.logsumexp(-1))
    >>> whole, pieces = attend(s, v), merge(attend(s[:, :3], v[:3]), attend(s[:, 3:], v[3:]))
    >>> torch.allclose(whole.out, pieces.out, atol=1e-6)
    True
    """
    _check_shapes("a", a), _check_shapes("b", b)
    if a.out.shape != b.out.shape:
        raise ValueError(
            f"merge: both partial results must describe the same queries, got out {tuple(a.out.shape)} and "
            f"{tuple(b.out.shape)}"
        )
    dtype = torch.promote_types(
        accumulation_dtype(torch.promote_types(a.out.dtype, b.out.dtype)),
        torch.promote_types(a.lse.dtype, b.lse.dtype),
    )
    lse, wa, wb = merge_weights(a.lse.to(dtype), b.lse.to(dtype))
    return Partial(wa.unsqueeze(-1) * a.out.to(dtype) + wb.unsqueeze(-1) * b.out.to(dtype), lse)


def merge_all(partials: Iterable[Partial]) -> Partial:
    """Merge one or more partial results from left to right, as a ring does, one at a time.

    Raises ValueError if there are none: without a shape there is no identity to return.

    >>> merge_all([identity((3, 2)), identity((3, 2))]).lse
    tensor([-inf, -inf, -inf])
    """
    result = None
    for partial in partials:
        if result is None:  # the first one as it is, but in the dtype and memory of a merge
            result = identity(partial.out.shape, accumulation_dtype(partial.out.dtype), partial.out.device)
        result = merge(result, partial)
    if result is None:
        raise ValueError("merge_all: expected at least one partial result, got none; see identity(shape)")
    return result


def merge_tree(partials: Iterable[Partial]) -> Partial:
    """Merge one or more partial results pairwise, in log2(n) rounds, as a tree reduction over ranks does.

    >>> merge_tree([identity((3, 2))] * 5).out.shape
    torch.Size([3, 2])
    """
    level = list(partials)
    while len(level) > 1:
        pairs = [merge(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return merge_all(level)

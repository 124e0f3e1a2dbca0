"""Three ways to compute a softmax: in two passes, in one pass, and in blocks that merge.

Every function here takes scores whose last dim runs over the keys, computes in float32 (float64 for float64
scores), and gives each row its *logsumexp*, ``lse = log(sum_j exp(s_j))``, beside its result. With it, the weight of
any key is ``p_j = exp(s_j - lse)``, so a row of any length is summed up by one number.

A score of -inf is a key that must not be seen. A row that sees no key at all has ``p = 0`` and ``lse = -inf``; it is
never NaN, unless a score is. (A score of +inf has no softmax, here or in torch: it gives NaN too.)

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", arXiv 1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .partial import Partial, accumulation_dtype, identity, merge


def _to_accumulate(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        got = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of floats, got {got}; convert it, for example with .float()")
    return x.to(accumulation_dtype(x.dtype))


def _finish(m: Tensor, l: Tensor) -> Tensor:
    """lse = m + log(l), and -inf where no key was seen. Guarded so that the gradient has no NaN either."""
    empty = l == 0
    return (m + torch.log(l.masked_fill(empty, 1.0))).masked_fill(empty, -torch.inf)


def two_pass(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Safe softmax: one pass over the scores for the maximum m, a second one for the denominator l.

    scores: (..., N), any float dtype, N may be 0. Returns ``p`` (..., N) and ``lse`` (...), both float32 (float64 for
    float64 scores). Raises ValueError if scores are not floats or have no dim.

    Source: Milakov and Gimelshein 2018, algorithm 2 (writing p out is its third loop).

    >>> p, lse = two_pass(torch.tensor([1e4, 1e4, -torch.inf]))
    >>> p
    tensor([0.5000, 0.5000, 0.0000])
    """
    scores = _to_accumulate("two_pass: scores", scores)
    if scores.ndim == 0:
        raise ValueError("two_pass: scores must be (..., N), got a single number; use scores.reshape(1)")
    if scores.shape[-1] == 0:  # the maximum of nothing is not defined in torch
        return scores, scores.sum(-1) - torch.inf
    # m only keeps exp() in range. Its value cancels in p and in lse, so no gradient flows through it.
    m = scores.amax(-1).detach()
    m = m.masked_fill(m == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) is 0, exp(-inf - -inf) is NaN
    e = torch.exp(scores - m.unsqueeze(-1))
    l = e.sum(-1)
    p = e / l.masked_fill(l == 0, 1.0).unsqueeze(-1)
    return p, _finish(m, l)


def running_max_and_sum(scores: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """One pass over a stream of scores: the running maximum m and the denominator ``l = sum_j exp(s_j - m)``.

    scores: an iterable of tensors of one shape (...), read once and not kept; at least one. Returns m and l, both
    (...). Where every score was -inf, m is -inf and l is 0. Raises ValueError if there is no score.

    Source: Milakov and Gimelshein 2018, algorithm 3, lines 1 to 6.

    >>> m, l = running_max_and_sum(torch.tensor([1.0, 3.0, 2.0]))
    >>> print(f"{m:.0f} {l:.4f}")
    3 1.5032
    """
    m = l = None
    for s in scores:
        s = _to_accumulate("running_max_and_sum: a score", s)
        if m is None:
            m, l = torch.full_like(s, -torch.inf), torch.zeros_like(s)
        m_new = torch.maximum(m, s.detach())
        safe = m_new.masked_fill(m_new == -torch.inf, 0.0)  # nothing seen yet: see two_pass
        l = l * torch.exp(m - safe) + torch.exp(s - safe)
        m = m_new
    if m is None:
        raise ValueError("running_max_and_sum: expected at least one score, got none to take a shape from")
    return m, l


def online(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Online softmax: maximum and denominator in a single pass over the keys, one key at a time.

    The same contract and the same result as :func:`two_pass`. A Python loop over N keys, written to be read.

    scores: (..., N), any float dtype, N may be 0. Returns ``p`` (..., N) and ``lse`` (...), both float32 (float64 for
    float64 scores). Raises ValueError if scores are not floats or have no dim.

    Source: Milakov and Gimelshein 2018, algorithm 3.

    >>> p, lse = online(torch.tensor([[0.0, 0.0, 0.0, 0.0]]))
    >>> p, torch.equal(lse, torch.tensor([4.0]).log())
    (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), True)
    """
    scores = _to_accumulate("online: scores", scores)
    if scores.ndim == 0 or scores.shape[-1] == 0:
        return two_pass(scores)
    m, l = running_max_and_sum(scores.unbind(-1))
    m = m.masked_fill(m == -torch.inf, 0.0)
    # exp(s - m) / l, not exp(s - lse): with scores of 1e4, float32 knows lse only to 1e-3, but s - m exactly.
    p = torch.exp(scores - m.unsqueeze(-1)) / l.masked_fill(l == 0, 1.0).unsqueeze(-1)
    return p, _finish(m, l)


def blockwise(scores: Tensor, values: Tensor, sizes: Sequence[int]) -> Partial:
    """Softmax-weighted mean of the values, one block of keys at a time, holding one block's weights only.

    scores: (..., S, N), or (N,) for one row. values: (N, D), or (..., N, D). sizes: the lengths of the blocks, in
    order; they sum to N, may be uneven, and may be 0. Returns ``Partial(out (..., S, D), lse (..., S))`` in float32
    (float64 if an input is). Raises ValueError if the sizes do not cover the keys or the shapes do not fit.

    Source: Milakov and Gimelshein 2018, equation 4, with the values carried along as in Dao et al. 2022,
    "FlashAttention", section 3.1 (arXiv 2205.14135).

    >>> scores, values = torch.tensor([1.0, 2.0, 3.0]), torch.eye(3)
    >>> whole, pieces = blockwise(scores, values, [3]), blockwise(scores, values, [1, 0, 2])
    >>> torch.allclose(whole.out, pieces.out), torch.allclose(whole.lse, pieces.lse)
    (True, True)
    """
    scores, values = _to_accumulate("blockwise: scores", scores), _to_accumulate("blockwise: values", values)
    _check_blocks(scores, values, sizes)
    dtype = torch.promote_types(scores.dtype, values.dtype)
    sizes = list(sizes)
    result = identity((*scores.shape[:-1], values.shape[-1]), dtype, scores.device)
    for s, v in zip(scores.split(sizes, dim=-1), values.split(sizes, dim=-2)):
        p, lse = two_pass(s.to(dtype))
        result = merge(result, Partial(p @ v.to(dtype), lse))
    return result


def _check_blocks(scores: Tensor, values: Tensor, sizes: Sequence[int]) -> None:
    n = scores.shape[-1] if scores.ndim else 0
    fits = scores.ndim >= 1 and values.ndim >= 2 and values.shape[-2] == n
    if fits and values.ndim > 2:
        fits = values.ndim <= scores.ndim and all(
            v in (1, s) for v, s in zip(reversed(values.shape[:-2]), reversed(scores.shape[:-2]))
        )
    if not fits:
        raise ValueError(
            f"blockwise: expected scores (..., S, N) and values (..., N, D) with the same N keys, got scores "
            f"{tuple(scores.shape)} and values {tuple(values.shape)}"
        )
    if any(size < 0 for size in sizes) or sum(sizes) != n:
        raise ValueError(
            f"blockwise: the block sizes must be 0 or more and sum to the {n} keys, got {list(sizes)}, which sum to "
            f"{sum(sizes)}; the last block may be shorter than the others"
        )

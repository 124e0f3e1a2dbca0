"""Flash attention, naively: the S x S scores are never there at once, forward or backward.

The scores are walked tile by tile. Forward, each row keeps a running ``Partial(out, lse)`` and merges one tile after
another into it. Backward, the probabilities are recomputed from ``lse``, which is all that has to be saved besides out.
Tiles that the mask hides entirely are computed all the same: finding out which to skip is the job of tiles/.

This is for reading and for any device and dtype; it is slow. Notation as in Dao et al. 2022, "FlashAttention"
(algorithms 1 and 4) and Dao 2023, "FlashAttention-2" (algorithms 1 and 2).
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from .fingerprint import shown, whole_number
from .masks import Full, Mask, full
from .partial import Partial, accumulation_dtype
from .partial.accumulate import Accumulator


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q k^T for grouped heads: (B, H, S_q, S_k), where H/G query heads share each of G key heads.

    >>> scores(torch.ones(1, 4, 2, 8), torch.ones(1, 2, 3, 8), 0.5).shape
    torch.Size([1, 4, 2, 3])
    """
    B, H, S_q, D = q.shape
    G, S_k = k.shape[1], k.shape[2]
    grouped = q.reshape(B, G, H // G * S_q, D)  # the query heads of a group side by side
    return (grouped @ k.transpose(-1, -2)).mul(scale).view(B, H, S_q, S_k)


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """p v for grouped heads: (B, H, S_q, S_k) and (B, G, S_k, D) to (B, H, S_q, D)."""
    B, H, S_q, S_k = p.shape
    G, D = v.shape[1], v.shape[-1]
    return (p.reshape(B, G, H // G * S_q, S_k) @ v).view(B, H, S_q, D)


def sum_over_queries(p: Tensor, x: Tensor, G: int) -> Tensor:
    """p^T x for grouped heads: (B, H, S_q, S_k) and (B, H, S_q, D) to (B, G, S_k, D), summed over a group's heads."""
    B, H, S_q, S_k = p.shape
    D = x.shape[-1]
    return p.reshape(B, G, H // G * S_q, S_k).transpose(-1, -2) @ x.reshape(B, G, H // G * S_q, D)


def attend_to_scores(s: Tensor, v: Tensor) -> Partial:
    """Softmax over the columns of some scores (B, H, S_q, S_k), -inf where nothing is visible, and its mean of v."""
    top = s.amax(dim=-1, keepdim=True).detach() if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)  # no key: no maximum
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not NaN
    p = torch.exp(s - top)
    total = p.sum(dim=-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + total.log()).masked_fill(empty, -torch.inf)
    return Partial(weighted_sum(p, v) / total, lse.squeeze(-1))


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Partial:
    """One tile in one go: softmax over its columns only, with the lse that lets it be merged.

    visible: bool, broadcasting to (B, H, S_q, S_k), or None if everything is. Rows that see nothing give 0 and -inf.
    """
    s = scores(q, k, scale)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    return attend_to_scores(s, v)


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    visible: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one tile adds to dq, dk, dv, from the *global* lse and delta of its rows.

    p = exp(s - lse)              the final probabilities, recomputed                                     (1)
    dv = p^T dout                                                                                         (2)
    dp = dout v^T                                                                                         (3)
    ds = p * (dp - delta)         delta = (dout * out).sum(-1) over the whole row, not over this tile     (4)
    dq = scale ds k,  dk = scale ds^T q                                                                   (5)
    """
    s = scores(q, k, scale)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)  # no key seen: every s is -inf, and p must be 0
    p = torch.exp(s - lse)
    dp = scores(dout, v, 1.0)
    ds = p * (dp - delta.unsqueeze(-1))
    G = k.shape[1]
    dq = weighted_sum(ds, k) * scale
    dk = sum_over_queries(ds, q, G) * scale
    dv = sum_over_queries(p, dout, G)
    return dq, dk, dv


def _blocks(length: int, size: int) -> list[slice]:
    return [slice(i, min(length, i + size)) for i in range(0, length, size)]


def _visible(mask: Mask, rows: slice, columns: slice, q_start: int, device: torch.device) -> Tensor | None:
    if isinstance(mask, Full):
        return None
    q_pos = torch.arange(q_start + rows.start, q_start + rows.stop, device=device)
    k_pos = torch.arange(columns.start, columns.stop, device=device)
    return mask(q_pos[:, None], k_pos[None, :])


def _prepare(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    q_start: int,
    block_q: int,
    block_k: int,
) -> float:
    """Check every argument, and return the scale."""
    check_attention_inputs(name, q, k, v)
    for option, value, least in (("q_start", q_start, 0), ("block_q", block_q, 1), ("block_k", block_k, 1)):
        if whole_number(value) is None or value < least:
            raise ValueError(f"{name}: expected {option} to be an int >= {least}, got {value!r}")
    if not isinstance(mask, Mask):
        raise ValueError(f"{name}: expected a mask such as rl.causal or rl.mask(fn), got {shown(mask)}")
    if not is_scale(scale):
        raise ValueError(f"{name}: expected scale to be a finite number > 0, or None for 1 / sqrt(D_k), got {scale!r}")
    mask.check(q_start + q.shape[2], k.shape[2])
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = full,
    scale: float | None = None,
    *,
    q_start: int = 0,
    block_q: int = 64,
    block_k: int = 64,
) -> Partial:
    """Attention tile by tile (Dao 2023, algorithm 1): Partial(out, lse) in the accumulation dtype.

    q: (B, H, S_q, D_k).  k: (B, G, S_k, D_k).  v: (B, G, S_k, D_v).  scale: 1 / sqrt(D_k) if None.
    q_start: the position of the first query, which the mask sees.  block_q, block_k: the size of a tile; memory beyond
    the result is O(block_q * block_k), never O(S_q * S_k). Raises ValueError if shapes or dtypes do not fit.

    >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    >>> out, lse = flash_forward(q, k, v, block_q=32, block_k=16)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> torch.allclose(out, expected, atol=1e-5), lse.shape
    (True, torch.Size([1, 2, 100]))
    """
    scale = _prepare("flash_forward", q, k, v, mask, scale, q_start, block_q, block_k)
    dtype = accumulation_dtype(q.dtype)
    B, H, S_q, _ = q.shape
    S_k, D_v = v.shape[2:]
    result = Accumulator((B, H, S_q, D_v), dtype, q.device)
    for rows in _blocks(S_q, block_q):
        q_i = q[:, :, rows].to(dtype)
        for columns in _blocks(S_k, block_k):
            k_j, v_j = k[:, :, columns].to(dtype), v[:, :, columns].to(dtype)
            visible = _visible(mask, rows, columns, q_start, q.device)
            result.add(rows, attend(q_i, k_j, v_j, visible, scale))
    return result.partial


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask = full,
    scale: float | None = None,
    *,
    q_start: int = 0,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention tile by tile, recomputing the probabilities (Dao 2023, algorithm 2).

    dout, out: (B, H, S_q, D_v), out and lse as ``flash_forward`` gave them. Returns dq, dk, dv in the accumulation
    dtype, in the shapes of q, k, v. Raises ValueError if shapes or dtypes do not fit.

    >>> q, k, v = (torch.randn(1, 2, 50, 8, requires_grad=True) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> dout = torch.randn_like(expected)
    >>> with torch.no_grad():
    ...     dq, dk, dv = flash_backward(dout, q, k, v, *flash_forward(q, k, v))
    >>> torch.allclose(dk, torch.autograd.grad(expected, k, dout)[0], atol=1e-5)
    True
    """
    scale = _prepare("flash_backward", q, k, v, mask, scale, q_start, block_q, block_k)
    rows_shape = tuple(q.shape[:3])
    out_shape = (*rows_shape, v.shape[3])
    for name, t, shape in (("dout", dout, out_shape), ("out", out, out_shape), ("lse", lse, rows_shape)):
        if tuple(t.shape) != shape:
            raise ValueError(
                f"flash_backward: expected {name} of shape {shape}, as the forward gave it, got {tuple(t.shape)}"
            )
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)  # (B, H, S_q): one number a row, over all keys
    for rows in _blocks(q.shape[2], block_q):
        q_i, dout_i = q[:, :, rows].to(dtype), dout[:, :, rows].to(dtype)
        lse_i, delta_i = lse[..., rows], delta[..., rows]
        for columns in _blocks(k.shape[2], block_k):
            k_j, v_j = k[:, :, columns].to(dtype), v[:, :, columns].to(dtype)
            visible = _visible(mask, rows, columns, q_start, q.device)
            dq_ij, dk_ij, dv_ij = attend_backward(dout_i, q_i, k_j, v_j, lse_i, delta_i, visible, scale)
            dq[:, :, rows] += dq_ij
            dk[:, :, columns] += dk_ij
            dv[:, :, columns] += dv_ij
    return dq, dk, dv


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, scale, options):
        out, lse = flash_forward(q, k, v, mask, scale, **options)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale, ctx.options = mask, scale, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = flash_backward(dout, q, k, v, out, lse, ctx.mask, ctx.scale, **ctx.options)
        return *(g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=True)), None, None, None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = full,
    scale: float | None = None,
    *,
    dropout_p: float = 0.0,
    q_start: int = 0,
    block_q: int = 64,
    block_k: int = 64,
) -> Tensor:
    """Attention with gradients, from ``flash_forward`` and ``flash_backward``: (B, H, S_q, D_v) in the dtype of q.

    Raises ValueError if shapes or dtypes do not fit, and for dropout, which is not supported.

    >>> q, k, v = (torch.randn(1, 8, 100, 16, requires_grad=True) for _ in range(3))
    >>> flash_attention(q, k, v, mask=full).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 8, 100, 16])
    """
    if dropout_p:
        raise ValueError(
            f"flash_attention: dropout is not supported, expected dropout_p=0.0, got {dropout_p!r}; apply dropout to "
            f"the output instead"
        )
    options = {"q_start": q_start, "block_q": block_q, "block_k": block_k}
    scale = _prepare("flash_attention", q, k, v, mask, scale, **options)
    return _FlashAttention.apply(q, k, v, mask, scale, options)


def is_scale(scale: object) -> bool:
    """Whether it is None or a finite number > 0: kernels hide scores with -inf before they scale them."""
    if scale is None:
        return True
    return isinstance(scale, Real) and not isinstance(scale, bool) and math.isfinite(scale) and scale > 0


def check_attention_inputs(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q (B, H, S_q, D_k), k (B, G, S_k, D_k), v (B, G, S_k, D_v) make attention."""
    for label, t, dims in (("q", q, "(B, H, S_q, D_k)"), ("k", k, "(B, G, S_k, D_k)"), ("v", v, "(B, G, S_k, D_v)")):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name}: expected {label} to be a tensor {dims}, got {type(t).__name__}")
        if t.dim() != 4:
            raise ValueError(
                f"{name}: expected {label} of shape {dims}, got {tuple(t.shape)}; SDPA's dim order, heads before the "
                f"sequence"
            )
        if t.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name}: expected float64, float32, bfloat16 or float16, got {label} in {t.dtype}; convert it first"
            )
    got = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"{name}: q, k and v must have the same batch size B (dim 0), {got}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{name}: k and v must have the same number of heads G (dim 1), {got}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{name}: the H query heads must be divisible by the G key/value heads (grouped-query attention), {got}"
        )
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"{name}: k and v must have the same sequence length S_k (dim 2), {got}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{name}: q and k must have the same head dim D_k (dim 3), {got}")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"{name}: head dims must be at least 1, {got}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{name}: q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; convert them with .to(dtype)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"{name}: q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")

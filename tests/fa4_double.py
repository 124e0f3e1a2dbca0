"""A double of FlashAttention 4 for machines without a GPU: the same two functions, whose arithmetic is dense torch.

It keeps what the package demands and what it promises: the order of dims, int32 ``cu_seqlens``, strides that its copy
engine can read, windows counted from the last row and column, out 0 and lse -inf in rows without keys.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from ringlearn.partial import accumulation_dtype

calls: list[dict] = []  # what the two functions were handed


def _flash_attn_fwd(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    *,
    return_lse=False,
):
    assert return_lse and qv is seqused_q is seqused_k is page_table is learnable_sink is None
    out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
    lse = torch.full(lse_shape(q, cu_seqlens_q), torch.nan, dtype=accumulation_dtype(q.dtype))
    longest = max_seqlen_q, max_seqlen_k
    key = q.dtype, causal, softcap, longest, window_size_left is None, window_size_right is None
    table = _flash_attn_fwd.compile_cache
    if key not in table:
        table[key] = partial(_forward_kernel, causal, softcap, *longest)
    window = window_size_left, window_size_right
    table[key](
        *(t.detach() for t in (q, k, v)), out, lse, softmax_scale, cu_seqlens_q, cu_seqlens_k, None, None, None, *window
    )
    return out, lse, None, None, None


_flash_attn_fwd.compile_cache = {}


def _forward_kernel(
    causal,
    softcap,
    max_seqlen_q,
    max_seqlen_k,
    q,
    k,
    v,
    out,
    lse,
    softmax_scale,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    page_table,
    window_size_left,
    window_size_right,
):
    calls.append({k: v for k, v in locals().items() if k != "v"} | {"name": "forward"})
    readable(q, k, v)
    assert not (q.requires_grad or k.requires_grad or v.requires_grad)  # it is handed over as dlpack
    assert out.dtype == q.dtype and lse.shape == lse_shape(q, cu_seqlens_q) and lse.is_contiguous()
    q, k, v = wide(q, k, v)
    for rows, columns, at in sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        s, _, hidden = scores(q[rows], k[columns], softmax_scale, softcap, causal, window_size_left, window_size_right)
        lse[at] = s.masked_fill(hidden, -torch.inf).logsumexp(-1)
        p = torch.exp(s - lse[at].unsqueeze(-1)).masked_fill(hidden, 0.0)
        out[rows] = torch.einsum("hij,jhd->ihd", p, heads(v[columns], q)).to(out.dtype)


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dlse=None,
    learnable_sink=None,
):
    calls.append({k: v for k, v in locals().items() if k not in ("q", "k", "v")} | {"name": "backward", "q": q, "k": k})
    assert seqused_q is seqused_k is learnable_sink is None
    readable(q, k, v, out, dout)
    assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
    for t in (lse, *([] if dlse is None else [dlse])):
        assert t.shape == lse_shape(q, cu_seqlens_q) and t.is_contiguous() and t.dtype == accumulation_dtype(q.dtype)
    dtype, (q, k, v, out, dout) = q.dtype, wide(q, k, v, out, dout)
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))
    for rows, columns, at in sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        s, slope, hidden = scores(
            q[rows], k[columns], softmax_scale, softcap, causal, window_size_left, window_size_right
        )
        p = torch.exp(s - lse[at].unsqueeze(-1)).masked_fill(hidden, 0.0)
        dp = torch.einsum("ihd,jhd->hij", dout[rows], heads(v[columns], q))
        delta = (dout[rows] * out[rows]).sum(-1).T.unsqueeze(-1)
        if dlse is not None:
            delta = delta - dlse[at].unsqueeze(-1)
        ds = p * (dp - delta) * slope * softmax_scale
        dq[rows] = torch.einsum("hij,jhd->ihd", ds, heads(k[columns], q))
        groups = k.shape[-2], q.shape[-2] // k.shape[-2]
        dk[columns] = torch.einsum("hij,ihd->jhd", ds, q[rows]).unflatten(1, groups).sum(2)
        dv[columns] = torch.einsum("hij,ihd->jhd", p, dout[rows]).unflatten(1, groups).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(accumulation_dtype(t.dtype)) for t in tensors)


def readable(*tensors: Tensor) -> None:
    for t in tensors:
        assert t.dtype == tensors[0].dtype and t.shape[-1] % 8 == 0 and t.stride(-1) == 1
        assert all(stride > 0 and stride % 8 == 0 for stride in t.stride()[:-1]), t.stride()
        assert t.data_ptr() % 16 == 0


def lse_shape(q: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if cu_seqlens is not None else (q.shape[0], q.shape[2], q.shape[1])


def heads(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values, (columns, G, D), for each query head."""
    return t.repeat_interleave(q.shape[-2] // t.shape[-2], dim=1)


def sequences(q, k, starts_q, starts_k, longest_q, longest_k):
    """For each sequence: where its rows are, its columns, and its lse."""
    if starts_q is None:
        assert starts_k is None and q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0]
        return [(b, b, b) for b in range(q.shape[0])]
    assert q.ndim == k.ndim == 3
    spans = []
    for starts, total, longest in ((starts_q, q.shape[0], longest_q), (starts_k, k.shape[0], longest_k)):
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        ends = starts.tolist()
        assert ends[0] == 0 and ends[-1] == total and all(a <= b for a, b in zip(ends, ends[1:], strict=False))
        spans.append([slice(a, b) for a, b in zip(ends, ends[1:], strict=False)])
        assert longest >= max(s.stop - s.start for s in spans[-1])
    return [(rows, columns, (slice(None), rows)) for rows, columns in zip(*spans, strict=True)]


def scores(q, k, scale, softcap, causal, left, right):
    """Scores (H, rows, columns), by how much softcap flattens them, and what is hidden."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    if causal:
        right = 0
    s = torch.einsum("ihd,jhd->hij", q, heads(k, q)) * scale
    slope = torch.ones_like(s)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
        slope = 1 - (s / softcap) ** 2
    rows, columns = q.shape[0], k.shape[0]
    j = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)  # columns beyond the diagonal
    hidden = torch.zeros_like(j, dtype=torch.bool)
    if left is not None:
        hidden |= j < -left
    if right is not None:
        hidden |= j > right
    return s, slope, hidden


def install(monkeypatch, version: str = "4.0.0b36") -> None:
    """Make Python find the double where the package would be, in this version, and take CPU tensors for a GPU's."""
    from ringlearn.kernels import fa4

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(fa4, "version", lambda package: version)
    fa4.missing.cache_clear(), fa4._interface.cache_clear()
    calls.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

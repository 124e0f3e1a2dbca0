"""A double of torch's FlashAttention 2 for machines without a GPU: its two operators, whose arithmetic is dense torch.

It keeps what flash_api.cpp and the kernels do with windows and variable lengths: a window is counted from the last row
and column of each sequence; a number below 0, or not below the longest number of columns, is no limit, unless the other
one is a limit: then it is that longest number. Rows that see nothing have out 0 and lse +inf. In the backward, what no
block of columns computes is 0.
"""

from __future__ import annotations

import fa4_double
import torch
from fa4_double import heads, lse_shape, readable, scores, sequences, wide

calls: list[dict] = []  # what the two operators were handed


def _flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale, window_size_left=None, window_size_right=None,
):  # fmt: skip
    calls.append({"name": "forward", "segments": None if cum_seq_q is None else len(cum_seq_q) - 1})
    assert dropout_p == 0 and not return_debug_mask
    readable(query, key, value)
    dtype, (q, k, v) = query.dtype, wide(query, key, value)
    out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
    lse = q.new_full(lse_shape(q, cum_seq_q), torch.nan)
    window = limits(is_causal, window_size_left, window_size_right, max_k)
    for rows, columns, at in sequences(q, k, cum_seq_q, cum_seq_k, max_q, max_k):
        s, _, hidden = scores(q[rows], k[columns], scale, None, False, *window)
        blind = hidden.all(-1)
        lse[at] = s.masked_fill(hidden, -torch.inf).logsumexp(-1).masked_fill(blind, torch.inf)
        p = torch.exp(s - lse[at].unsqueeze(-1)).masked_fill(hidden, 0.0)
        out[rows] = torch.einsum("hij,jhd->ihd", p, heads(v[columns], q))
    return out.to(dtype), lse, None, None, None


def _flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset,
    *, scale, window_size_left=None, window_size_right=None,
):  # fmt: skip
    calls.append({"name": "backward", "segments": None if cum_seq_q is None else len(cum_seq_q) - 1})
    readable(query, key, value, out, grad_out)
    assert logsumexp.shape == lse_shape(query, cum_seq_q) and logsumexp.is_contiguous()
    dtype, (q, k, v, out, dout) = query.dtype, wide(query, key, value, out, grad_out)
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))
    window = limits(is_causal, window_size_left, window_size_right, max_k)
    for rows, columns, at in sequences(q, k, cum_seq_q, cum_seq_k, max_q, max_k):
        s, _, hidden = scores(q[rows], k[columns], scale, None, False, *window)
        # Not guarded: a row that sees a key and has lse -inf makes infinities, as in the kernel.
        p = torch.exp(s - logsumexp[at].unsqueeze(-1)).masked_fill(hidden, 0.0)
        delta = (dout[rows] * out[rows]).sum(-1).T.unsqueeze(-1)
        ds = p * (torch.einsum("ihd,jhd->hij", dout[rows], heads(v[columns], q)) - delta) * scale
        groups = k.shape[-2], q.shape[-2] // k.shape[-2]
        dq[rows] = torch.einsum("hij,jhd->ihd", ds, heads(k[columns], q))
        dk[columns] = torch.einsum("hij,ihd->jhd", ds, q[rows]).unflatten(1, groups).sum(2)
        dv[columns] = torch.einsum("hij,ihd->jhd", p, dout[rows]).unflatten(1, groups).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def limits(causal: bool, left: int | None, right: int | None, longest: int) -> tuple[int | None, int | None]:
    """The window as the kernel takes it; None for no limit."""
    left, right = (None if x is None or x < 0 or x >= longest else x for x in (left, right))
    if causal:
        right = 0
    if (left is None) != (right is None):
        left, right = (longest if x is None else x for x in (left, right))
    return left, right


def install(monkeypatch) -> None:
    """Let the library's kernel call the double, with CPU tensors."""
    from ringlearn.kernels import sdpa

    monkeypatch.setattr(sdpa, "aten", __import__(__name__))
    monkeypatch.setattr(sdpa.CudaFlash, "_refuses", lambda self, q, k, v, kind: None)
    calls.clear(), fa4_double.calls.clear()

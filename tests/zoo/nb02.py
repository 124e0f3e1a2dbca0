"""Answers to the exercises of notebook 02: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass. The solutions that the notebook shows are taken from the
notebook itself by test_nb02_notebook.py, and must pass too.
"""

from __future__ import annotations

import math

import torch

from ringlearn import costs
from ringlearn.flash import attend, attend_backward, flash_backward, flash_forward
from ringlearn.partial import Partial, identity, merge
from ringlearn.softmax import two_pass

from .edits import edited, registry

WRONG, wrong = registry("2a", "2b", "2c", "2d")

# ---- 2a ----


def _scores(q, k, visible, scale=None):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s.masked_fill(~visible, -torch.inf)


def _values(q, v):
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _tile(q, k, v, visible, scale=None):
    p, lse = two_pass(_scores(q, k, visible, scale))
    return Partial(p @ _values(q, v), lse)


def _forward(q, k, v, mask, block_q, block_k, tile=_tile, merge=merge, q_pos=None, k_pos=None, skip=None, keys=None):
    """The solution, with places to go wrong in."""
    outs, lses = [], []
    for i in range(0, q.shape[2], block_q):
        q_i = q[:, :, i : i + block_q]
        rows = torch.arange(i, i + q_i.shape[2]) if q_pos is None else q_pos(i, q_i.shape[2])
        result = identity((*q_i.shape[:3], v.shape[-1]))
        for j in range(0, k.shape[2] if keys is None else keys(q, k), block_k):
            k_j, v_j = k[:, :, j : j + block_k], v[:, :, j : j + block_k]
            columns = torch.arange(j, j + k_j.shape[2]) if k_pos is None else k_pos(j, k_j.shape[2])
            visible = mask(rows[:, None], columns[None, :])
            if skip is not None and skip(i, j, block_q, block_k, visible):
                continue
            result = merge(result, tile(q_i, k_j, v_j, visible.expand(len(rows), len(columns))))
        outs.append(result.out), lses.append(result.lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "value", "merge by lse")
def forward_adds_tiles(*args):
    return _forward(*args, merge=lambda a, b: Partial(a.out + b.out, torch.logaddexp(a.lse, b.lse)))


@wrong("2a", "value", "merge by lse")
def forward_averages_tiles(*args):
    def mean(a, b):
        first = (a.lse == -torch.inf).all()
        return Partial(b.out if first else (a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))

    return _forward(*args, merge=mean)


@wrong("2a", "value", "merge by lse")
def forward_keeps_the_last_tile(*args):
    return _forward(*args, merge=lambda a, b: b)


@wrong("2a", "value", "merge by lse")
def forward_lse_not_updated(*args):
    """Merges with the lse of the first tile for ever."""

    def first(a, b):
        return Partial(merge(a, b).out, torch.where(a.lse == -torch.inf, b.lse, a.lse))

    return _forward(*args, merge=first)


def _running(q, k, v, mask, block_q, block_k, rescale=True, subtract=True):
    """The running (m, l, acc) of the papers."""
    outs, lses = [], []
    for i in range(0, q.shape[2], block_q):
        q_i = q[:, :, i : i + block_q]
        m = torch.full(q_i.shape[:3], -torch.inf if subtract else 0.0)
        l, acc = torch.zeros(q_i.shape[:3]), torch.zeros(*q_i.shape[:3], v.shape[-1])
        for j in range(0, k.shape[2], block_k):
            k_j, v_j = k[:, :, j : j + block_k], v[:, :, j : j + block_k]
            visible = mask(torch.arange(i, i + q_i.shape[2])[:, None], torch.arange(j, j + k_j.shape[2])[None, :])
            s = _scores(q_i, k_j, visible)
            m_new = torch.maximum(m, s.amax(-1)) if subtract else m
            safe = torch.where(m_new == -torch.inf, 0.0, m_new)
            e = torch.exp(s - safe.unsqueeze(-1))
            factor = torch.exp(m - safe) if rescale else torch.ones_like(m)
            l = l * factor + e.sum(-1)
            acc = acc * factor.unsqueeze(-1) + e @ _values(q_i, v_j)
            m = m_new
        empty = l == 0
        outs.append(acc / torch.where(empty, 1.0, l).unsqueeze(-1))
        lses.append(torch.where(empty, -torch.inf, m + torch.log(l)))
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "value", "exp(m_old - m_new)")
def forward_acc_not_rescaled(*args):
    return _running(*args, rescale=False)


@wrong("2a", "value", "exp(m_old - m_new)")
def forward_l_rescaled_but_not_acc(q, k, v, mask, block_q, block_k):
    out, lse = _running(q, k, v, mask, block_q, block_k, rescale=False)
    return out, forward_solution(q, k, v, mask, block_q, block_k)[1]


@wrong("2a", "adversarial", "overflow")
def forward_no_max(*args):
    return _running(*args, subtract=False)


@wrong("2a", "value", "global positions")
def forward_mask_by_tile_local_index(*args):
    return _forward(*args, q_pos=lambda i, n: torch.arange(n), k_pos=lambda j, n: torch.arange(n))


@wrong("2a", "value", "global positions")
def forward_key_positions_local(*args):
    return _forward(*args, k_pos=lambda j, n: torch.arange(n))


@wrong("2a", "value", "global positions")
def forward_positions_by_tile_number(*args):
    """i * block_q, where i is already a position."""
    block_q = args[4]
    return _forward(*args, q_pos=lambda i, n: torch.arange(i * block_q, i * block_q + n))


@wrong("2a", "value", "they are swapped")
def forward_mask_transposed(*args):
    q, k, v, mask, block_q, block_k = args
    return _forward(q, k, v, lambda a, b: mask(b, a), block_q, block_k)


@wrong("2a", "value", "they are swapped")
def forward_mask_of_a_column_of_keys(*args):
    """mask(j[:, None], i)."""
    q, k, v, mask, block_q, block_k = args
    return _forward(q, k, v, lambda i, j: mask(j.mT, i.mT), block_q, block_k)


@wrong("2a", "value", "they are swapped")
def forward_mask_swapped_and_flat(*args):
    """mask(j, i)."""
    q, k, v, mask, block_q, block_k = args
    return _forward(q, k, v, lambda i, j: mask(j.flatten(), i.flatten()), block_q, block_k)


@wrong("2a", "value", "it is transposed")
def forward_mask_returned_transposed(*args):
    """mask(i[:, None], j).mT."""
    outs, lses = [], []
    q, k, v, mask, block_q, block_k = args
    for i in torch.arange(q.shape[2]).split(block_q):
        result = identity((*q.shape[:2], len(i), v.shape[-1]))
        for j in torch.arange(k.shape[2]).split(block_k):
            part = _tile(q[:, :, i], k[:, :, j], v[:, :, j], mask(i[:, None], j).mT)
            result = merge(result, part)
        outs.append(result.out), lses.append(result.lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "value", "mask")
def forward_mask_forgotten(q, k, v, mask, block_q, block_k):
    return _forward(q, k, v, lambda a, b: (a + b) >= 0, block_q, block_k)


@wrong("2a", "value", "mask")
def forward_masked_scores_are_zero(*args):
    def tile(q, k, v, visible):
        s = _scores(q, k, torch.ones_like(visible)).masked_fill(~visible, 0.0)
        p, lse = two_pass(s)
        return Partial(p @ _values(q, v), lse)

    return _forward(*args, tile=tile)


@wrong("2a", "value", "exp(0) = 1")
def forward_pads_with_zeros(q, k, v, mask, block_q, block_k):
    """k and v are padded to whole tiles; a padded key has score 0 and is seen."""
    S, S_k = q.shape[2], k.shape[2]
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -S_k % block_k)) for x in (k, v))

    def padded(a, b):
        return mask(a, b) | (b >= S_k)

    outs, lses = [], []
    for i in range(0, S, block_q):
        q_i, result = q[:, :, i : i + block_q], None
        for j in range(0, k.shape[2], block_k):
            visible = padded(torch.arange(i, i + q_i.shape[2])[:, None], torch.arange(j, j + block_k)[None, :])
            part = _tile(q_i, k[:, :, j : j + block_k], v[:, :, j : j + block_k], visible)
            result = part if result is None else merge(result, part)
        outs.append(result.out), lses.append(result.lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "value", "dropped")
def forward_drops_the_ragged_keys(q, k, v, mask, block_q, block_k):
    whole = max(1, k.shape[2] // block_k) * block_k
    return _forward(q, k, v, mask, block_q, block_k, keys=lambda q, k: min(whole, k.shape[2]))


@wrong("2a", "value", "S_k = k.shape[2]")
def forward_loops_over_as_many_keys_as_queries(*args):
    return _forward(*args, keys=lambda q, k: q.shape[2])


@wrong("2a", "value", "dropped")
def forward_drops_the_ragged_queries(q, k, v, mask, block_q, block_k):
    whole = max(1, q.shape[2] // block_q) * block_q
    out, lse = forward_solution(q, k, v, mask, block_q, block_k)
    return out[:, :, :whole], lse[..., :whole]


@wrong("2a", "value", "past the end")
def forward_positions_past_the_end(*args):
    """arange(j, j + block_k) although the last block of keys is shorter."""
    return _forward(*args, k_pos=lambda j, n: torch.arange(j, j + args[5] if n < args[5] and j else j + n))


@wrong("2a", "value", "starts at the identity")
def forward_one_running_result_for_all_rows(q, k, v, mask, block_q, block_k):
    """The result is not reset for the next block of queries."""
    outs, lses, result = [], [], None
    for i in range(0, q.shape[2], block_q):
        q_i = q[:, :, i : i + block_q]
        if result is None or result.out.shape[2] != q_i.shape[2]:
            result = identity((*q_i.shape[:3], v.shape[-1]))
        for j in range(0, k.shape[2], block_k):
            k_j, v_j = k[:, :, j : j + block_k], v[:, :, j : j + block_k]
            visible = mask(torch.arange(i, i + q_i.shape[2])[:, None], torch.arange(j, j + k_j.shape[2])[None, :])
            result = merge(result, _tile(q_i, k_j, v_j, visible))
        outs.append(result.out), lses.append(result.lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "value", "exactly once")
def forward_no_scale(*args):
    return _forward(*args, tile=lambda q, k, v, visible: _tile(q, k, v, visible, 1.0))


@wrong("2a", "value", "exactly once")
def forward_scale_twice(*args):
    return _forward(*args, tile=lambda q, k, v, visible: _tile(q, k, v, visible, 1 / q.shape[-1]))


@wrong("2a", "value", "from q's")
def forward_scale_from_v(*args):
    return _forward(*args, tile=lambda q, k, v, visible: _tile(q, k, v, visible, v.shape[-1] ** -0.5))


@wrong("2a", "value", "with scale")
def forward_lse_without_scale(q, k, v, mask, block_q, block_k):
    out, _ = forward_solution(q, k, v, mask, block_q, block_k)
    return out, forward_no_scale(q, k, v, mask, block_q, block_k)[1]


@wrong("2a", "value", "base 2")
def forward_lse_in_base_2(*args):
    out, lse = forward_solution(*args)
    return out, lse / math.log(2)


@wrong("2a", "value", "lse of all keys")
def forward_lse_is_the_maximum(*args):
    out, _ = forward_solution(*args)
    q, k, _, mask = args[:4]
    visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
    return out, _scores(q, k, visible).amax(-1)


@wrong("2a", "value", "repeat_interleave, not repeat")
def forward_heads_by_repeat(*args):
    """Query head h gets key head h mod G."""

    def tile(q, k, v, visible):
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return _tile(q, k, v, visible)

    return _forward(*args, tile=tile)


@wrong("2a", "value", "repeat_interleave")
def forward_no_gqa(*args):
    def tile(q, k, v, visible):
        p, lse = two_pass((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf))
        return Partial(p @ v, lse)

    return _forward(*args, tile=tile)


@wrong("2a", "value", "head dim of v")
def forward_out_like_q(q, k, v, mask, block_q, block_k):
    """out is allocated with the shape of q."""
    full_out, lse = forward_solution(q, k, v, mask, block_q, block_k)
    out = torch.zeros_like(q)
    out[:, :, :] = full_out
    return out, lse


@wrong("2a", "adversarial", "last query")
def forward_skips_one_tile_too_many(*args):
    """Compares the tile's first key with the block's first query."""
    return _forward(*args, skip=lambda i, j, block_q, block_k, visible: j > i and not visible.all())


@wrong("2a", "adversarial", "last query")
def forward_skips_by_number(*args):
    """Tile number j > tile number i: right for square tiles only."""
    return _forward(
        *args, skip=lambda i, j, block_q, block_k, visible: j // block_k > i // block_q and not visible.all()
    )


@wrong("2a", "value", "NaN")
def forward_torch_softmax(*args):
    """NaN where a tile hides all keys of a row."""

    def tile(q, k, v, visible):
        s = _scores(q, k, visible)
        return Partial(s.softmax(-1) @ _values(q, v), s.logsumexp(-1))

    return _forward(*args, tile=tile)


@wrong("2a", "adversarial", "sees no key")
def forward_guards_only_rows_that_have_seen_a_key(*args):
    """Right for a causal mask, where each row sees a key of the first tile."""

    def tile(q, k, v, visible):
        s = _scores(q, k, visible)
        return Partial(s.softmax(-1) @ _values(q, v), s.logsumexp(-1))

    def guarded(a, b):
        dead = (b.lse == -torch.inf) & (a.lse > -torch.inf)
        return merge(a, Partial(torch.where(dead.unsqueeze(-1), 0.0, b.out), b.lse))

    return _forward(*args, tile=tile, merge=guarded)


@wrong("2a", "adversarial", "sees no key")
def forward_low_number_instead_of_inf(*args):
    """A row without keys becomes the mean of all values."""

    def tile(q, k, v, visible):
        s = _scores(q, k, torch.ones_like(visible)).masked_fill(~visible, -1e9)
        p, lse = two_pass(s)
        return Partial(p @ _values(q, v), lse)

    return _forward(*args, tile=tile)


@wrong("2a", "cost", "one tile")
def forward_all_scores_first(q, k, v, mask, block_q, block_k):
    visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
    s = _scores(q, k, visible)
    outs, lses = [], []
    for i in range(0, q.shape[2], block_q):
        p, lse = two_pass(s[:, :, i : i + block_q])
        outs.append(p @ _values(q, v)), lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "cost", "block_k is not used")
def forward_whole_rows(q, k, v, mask, block_q, block_k):
    """All keys at once for each block of queries, so that there is nothing to merge."""
    return _forward(q, k, v, mask, block_q, k.shape[2], merge=lambda a, b: b)


@wrong("2a", "cost", "block_q is not used")
def forward_whole_columns(q, k, v, mask, block_q, block_k):
    return _forward(q, k, v, mask, q.shape[2], block_k)


@wrong("2a", "cost", "block_k is not used")
def forward_blocks_of_keys_of_a_fixed_size(q, k, v, mask, block_q, block_k):
    return _forward(q, k, v, mask, block_q, 64)


@wrong("2a", "cost", "block_q and block_k are exchanged")
def forward_blocks_exchanged(q, k, v, mask, block_q, block_k):
    return _forward(q, k, v, mask, block_k, block_q)


@wrong("2a", "cost", "block_q and block_k are exchanged")
def forward_blocks_exchanged_and_asked_once(q, k, v, mask, block_q, block_k):
    return forward_asks_once_per_block_of_queries(q, k, v, mask, block_k, block_q)


@wrong("2a", "cost", "masks")
def forward_whole_mask_first(q, k, v, mask, block_q, block_k):
    visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
    outs, lses = [], []
    for i in range(0, q.shape[2], block_q):
        q_i = q[:, :, i : i + block_q]
        result = identity((*q_i.shape[:3], v.shape[-1]))
        for j in range(0, k.shape[2], block_k):
            tile = visible[i : i + block_q, j : j + block_k]
            result = merge(result, _tile(q_i, k[:, :, j : j + block_k], v[:, :, j : j + block_k], tile))
        outs.append(result.out), lses.append(result.lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@wrong("2a", "value", "dim 2")
def forward_joined_along_the_batch(*args):
    q, k, v, mask, block_q, block_k = args
    out, lse = forward_solution(*args)
    if q.shape[2] % block_q:
        return out, lse
    return torch.cat(out.split(block_q, 2)), torch.cat(lse.split(block_q, 2))


# mask(i, j) in place of mask(i[:, None], j).
wrong("2a", "value", "i[:, None]")(
    edited(
        forward_mask_swapped_and_flat,
        "forward_mask_without_a_column",
        ("mask(j.flatten(), i.flatten())", "mask(i.flatten(), j.flatten())"),
    )
)


@wrong("2a", "value", "other order")
def forward_exchanged(*args):
    out, lse = forward_solution(*args)
    return lse, out


@wrong("2a", "value", "not the pair (out, lse)")
def forward_out_only(*args):
    return forward_solution(*args)[0]


@wrong("2a", "value", "return")
def forward_no_return(*args):
    forward_solution(*args)


def forward_solution(*args):
    return _forward(*args)


def forward_running_max(*args):
    return _running(*args)


def forward_keys_outside(q, k, v, mask, block_q, block_k):
    """The loop over keys outside, that over queries inside, as in the first FlashAttention."""
    B, H, S, _ = q.shape
    out, lse = identity((B, H, S, v.shape[-1]))
    S_k = k.shape[2]
    for j in range(0, S_k, block_k):
        columns = slice(j, min(S_k, j + block_k))
        for i in range(0, S, block_q):
            rows = slice(i, min(S, i + block_q))
            visible = mask(torch.arange(S)[rows, None], torch.arange(S_k)[None, columns])
            part = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], visible, q.shape[-1] ** -0.5)
            out[:, :, rows], lse[:, :, rows] = merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
    return out, lse


def forward_skips_hidden_tiles(*args):
    return _forward(*args, skip=lambda i, j, block_q, block_k, visible: not visible.any())


def forward_asks_once_per_block_of_queries(q, k, v, mask, block_q, block_k):
    """The mask of a block of queries and all keys: wider than a tile, but not as large as S x S."""
    S_k, rows = torch.arange(k.shape[2]), {}

    def of_a_row(i, j):
        visible = rows.setdefault(int(i[0]), mask(i, S_k).expand(len(i), len(S_k)))
        return visible[:, j.flatten()]

    outs, lses = [], []
    for i in range(0, q.shape[2], block_q):
        rows.clear()
        at = torch.arange(i, min(i + block_q, q.shape[2]))
        result = _forward(q[:, :, at], k, v, lambda r, j, at=at: of_a_row(at[:, None], j), len(at), block_k)
        outs.append(result[0]), lses.append(result[1])
    return torch.cat(outs, 2), torch.cat(lses, 2)


def forward_library(q, k, v, mask, block_q, block_k):
    return flash_forward(q, k, v, mask, block_q=block_q, block_k=block_k)


# ---- 2b ----


@wrong("2b", "value", "p * dp alone")
def row_no_delta(p, v, dout):
    return p * (v @ dout)


@wrong("2b", "value", "weighted by p")
def row_plain_mean(p, v, dout):
    dp = v @ dout
    return p * (dp - dp.mean())


@wrong("2b", "value", "dp - delta is 0")
def row_dout_missing(p, v, dout):
    """p * dp - p."""
    return p * (v @ dout) - p


@wrong("2b", "value", "weighted by p")
def row_softmax_of_p(p, v, dout):
    p = torch.softmax(p, -1)
    dp = v @ dout
    return p * (dp - p @ dp)


@wrong("2b", "value", "delta")
def row_delta_without_dout(p, v, dout):
    return p * (v @ dout - (p @ v).sum())


@wrong("2b", "value", "the sign")
def row_wrong_sign(p, v, dout):
    dp = v @ dout
    return p * (p @ dp - dp)


@wrong("2b", "value", "weighted by p")
def row_dp_only(p, v, dout):
    dp = v @ dout
    return dp - p @ dp


@wrong("2b", "adversarial", "dot product")
def row_sums_values(p, v, dout):
    """dout . v_j written as a product of sums: right for values with one number."""
    dp = v.sum(-1) * dout.sum()
    return p * (dp - p @ dp)


@wrong("2b", "adversarial", "one number for each key")
def row_delta_per_dim(p, v, dout):
    """delta without its sum."""
    dp = v * dout
    return (p.unsqueeze(-1) * (dp - (p @ v) * dout)).squeeze(-1)


@wrong("2b", "value", "weighted by p")
def row_delta_times_p(p, v, dout):
    dp = v @ dout
    return p * dp - p @ dp


def row_solution(p, v, dout):
    dp = v @ dout
    return p * (dp - p @ dp)


def row_by_out(p, v, dout):
    out = p @ v
    return p * ((v - out) @ dout)


def row_by_jacobian(p, v, dout):
    jacobian = torch.diag(p) - torch.outer(p, p)
    return jacobian @ (v @ dout)


def row_by_transposed_jacobian(p, v, dout):
    """The Jacobian of softmax is symmetric."""
    jacobian = torch.diag(p) - torch.outer(p, p)
    return (v @ dout) @ jacobian.T


# ---- 2c ----


def _backward(
    dout, q, k, v, out, lse, mask, block_q, block_k, delta_of=None, lse_of=None, tile=None, local=False, skip=None
):
    """The solution, with places to go wrong in. delta_of, lse_of: what a tile takes in place of the row's."""
    B, H, S, D = q.shape
    G, S_k = k.shape[1:3]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(-1)
    for i in range(0, S, block_q):
        rows = slice(i, min(S, i + block_q))
        for j in range(0, S_k, block_k):
            columns = slice(j, min(S_k, j + block_k))
            q_i, dout_i, k_j, v_j = q[:, :, rows], dout[:, :, rows], k[:, :, columns], v[:, :, columns]
            visible = (
                mask(torch.arange(rows.stop - i)[:, None], torch.arange(columns.stop - j)[None, :])
                if local
                else mask(torch.arange(S)[rows, None], torch.arange(S_k)[None, columns])
            )
            if skip is not None and skip(i, j):
                continue
            here = attend(q_i, k_j, v_j, visible, D**-0.5)
            tile_delta = delta[..., rows] if delta_of is None else delta_of(dout_i, here)
            tile_lse = lse[..., rows] if lse_of is None else lse_of(here)
            parts = (tile or attend_backward)(dout_i, q_i, k_j, v_j, tile_lse, tile_delta, visible, D**-0.5)
            dq[:, :, rows] += parts[0]
            dk[:, :, columns] += parts[1]
            dv[:, :, columns] += parts[2]
    return dq, dk, dv


@wrong("2c", "value", "delta belongs to the whole row")
def backward_delta_per_block(*args):
    return _backward(*args, delta_of=lambda dout, here: (dout * here.out).sum(-1))


@wrong("2c", "value", "delta belongs to the whole row")
def backward_delta_from_the_keys_of_the_tile(*args):
    """sum(p * dp) as in 2b, with the p of the whole row, over the keys of the tile alone."""

    def tile(dout, q, k, v, lse, delta, visible, scale):
        p, _ = _p_ds(dout, q, k, v, lse, delta, visible)
        dp = dout @ _values(q, v).mT
        return _products(p, p * (dp - (p * dp).sum(-1, keepdim=True)), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "the lse of the whole row")
def backward_block_lse(*args):
    return _backward(*args, lse_of=lambda here: here.lse)


@wrong("2c", "value", "the lse of the whole row")
def backward_block_softmax_and_delta(*args):
    """Each tile as an attention of its own."""
    return _backward(*args, delta_of=lambda dout, here: (dout * here.out).sum(-1), lse_of=lambda here: here.lse)


@wrong("2c", "value", "delta")
def backward_no_delta(*args):
    return _backward(*args, delta_of=lambda dout, here: torch.zeros_like(here.lse))


@wrong("2c", "value", "ds = p * (dp - delta)")
def backward_mean_delta(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p = torch.exp(_scores(q, k, visible) - lse.unsqueeze(-1))
        dp = dout @ _values(q, v).mT
        return _products(p, p * (dp - dp.mean(-1, keepdim=True)), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


def _home(x, G):
    return x.unflatten(1, (G, -1)).sum(2)


def _products(p, ds, dout, q, k, v, scale, dk_scale=None):
    G = k.shape[1]
    dk_scale = scale if dk_scale is None else dk_scale
    return ds @ _values(q, k) * scale, _home(ds.mT @ q, G) * dk_scale, _home(p.mT @ dout, G)


def _p_ds(dout, q, k, v, lse, delta, visible):
    p = torch.exp(_scores(q, k, visible) - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    return p, p * (dout @ _values(q, v).mT - delta.unsqueeze(-1))


@wrong("2c", "value", "sqrt(D) times too large")
def backward_no_scale(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p, ds = _p_ds(dout, q, k, v, lse, delta, visible)
        return _products(p, ds, dout, q, k, v, 1.0)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "sqrt(D) times too small")
def backward_scale_twice(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p, ds = _p_ds(dout, q, k, v, lse, delta, visible)
        return _products(p, ds * scale, dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "the scale")
def backward_no_scale_in_scores(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p = torch.exp(_scores(q, k, visible, 1.0) - lse.unsqueeze(-1))
        return _products(p, p * (dout @ _values(q, v).mT - delta.unsqueeze(-1)), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "the sign")
def backward_wrong_sign(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p, ds = _p_ds(dout, q, k, v, lse, delta, visible)
        return _products(p, -ds, dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "ds = p * (dp - delta)")
def backward_ds_without_p(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p, _ = _p_ds(dout, q, k, v, lse, delta, visible)
        return _products(p, dout @ _values(q, v).mT - delta.unsqueeze(-1), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "+=")
def backward_dk_overwritten(dout, q, k, v, out, lse, mask, block_q, block_k):
    """= in place of += for dk and dv: only the last block of queries counts."""
    dq, dk, dv = flash_backward(dout, q, k, v, out, lse, mask, block_q=block_q, block_k=block_k)
    last = (q.shape[2] - 1) // block_q * block_q
    rows = slice(last, None)
    _, dk, dv = flash_backward(
        dout[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[..., rows].contiguous(), mask, q_start=last
    )
    return dq, dk, dv


@wrong("2c", "value", "adds up over all tiles")
def backward_dq_overwritten(dout, q, k, v, out, lse, mask, block_q, block_k):
    dq, dk, dv = flash_backward(dout, q, k, v, out, lse, mask, block_q=block_q, block_k=block_k)
    last = (k.shape[2] - 1) // block_k * block_k
    columns = slice(last, None)
    visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, columns])
    delta = (dout * out).sum(-1)
    dq = attend_backward(dout, q, k[:, :, columns], v[:, :, columns], lse, delta, visible, q.shape[-1] ** -0.5)[0]
    return dq, dk, dv


@wrong("2c", "value", "sums over its H/G")
def backward_first_head_of_the_group(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p, ds = _p_ds(dout, q, k, v, lse, delta, visible)
        G = k.shape[1]
        first = [(x.unflatten(1, (G, -1))[:, :, 0]) for x in (ds.mT @ q, p.mT @ dout)]
        return ds @ _values(q, k) * scale, first[0] * scale, first[1]

    return _backward(*args, tile=tile)


@wrong("2c", "value", "sums over its H/G")
def backward_mean_over_the_group(*args):
    dq, dk, dv = _backward(*args)
    group = args[1].shape[1] // args[2].shape[1]
    return dq, dk / group, dv / group


@wrong("2c", "value", "sum over the query heads")
def backward_h_heads_returned(dout, q, k, v, out, lse, mask, block_q, block_k):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return _backward(dout, q, k, v, out, lse, mask, block_q, block_k)


@wrong("2c", "value", "neighbours")
def backward_heads_by_repeat(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        G, group = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, group, 1, 1) for x in (k, v))
        dq, dk, dv = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        return dq, *(x.unflatten(1, (group, G)).sum(1) for x in (dk, dv))

    return _backward(*args, tile=tile)


@wrong("2c", "value", "global positions")
def backward_mask_local(*args):
    return _backward(*args, local=True)


@wrong("2c", "value", "they are swapped")
def backward_mask_transposed(dout, q, k, v, out, lse, mask, block_q, block_k):
    return _backward(dout, q, k, v, out, lse, lambda i, j: mask(j, i), block_q, block_k)


@wrong("2c", "value", "it is transposed")
def backward_mask_returned_transposed(dout, q, k, v, out, lse, mask, block_q, block_k):
    """mask(i[:, None], j).mT."""
    scale = q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(-1)
    for i in torch.arange(q.shape[2]).split(block_q):
        for j in torch.arange(k.shape[2]).split(block_k):
            visible = mask(i[:, None], j).mT
            p, ds = _p_ds(dout[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], lse[:, :, i], delta[:, :, i], visible)
            parts = _products(p, ds, dout[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], scale)
            dq[:, :, i] += parts[0]
            dk[:, :, j] += parts[1]
            dv[:, :, j] += parts[2]
    return dq, dk, dv


@wrong("2c", "value", "mask")
def backward_mask_forgotten(dout, q, k, v, out, lse, mask, block_q, block_k):
    return _backward(dout, q, k, v, out, lse, lambda a, b: (a + b) >= 0, block_q, block_k)


@wrong("2c", "adversarial", "last query")
def backward_skips_by_number(dout, q, k, v, out, lse, mask, block_q, block_k):
    hides = not bool(mask(torch.tensor(0), torch.tensor(1)))
    return _backward(
        dout, q, k, v, out, lse, mask, block_q, block_k, skip=lambda i, j: hides and j // block_k > i // block_q
    )


@wrong("2c", "value", "dropped")
def backward_drops_the_ragged_keys(dout, q, k, v, out, lse, mask, block_q, block_k):
    whole = max(1, k.shape[2] // block_k) * block_k
    return _backward(dout, q, k, v, out, lse, mask, block_q, block_k, skip=lambda i, j: j >= whole)


@wrong("2c", "adversarial", "out and lse are given")
def backward_makes_out_and_lse_again(dout, q, k, v, out, lse, mask, block_q, block_k):
    visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
    out, lse = attend(q, k, v, visible.expand(q.shape[2], k.shape[2]), q.shape[-1] ** -0.5)
    return _backward(dout, q, k, v, out, lse, mask, block_q, block_k)


@wrong("2c", "adversarial", "out and lse are given")
def backward_makes_delta_again(dout, q, k, v, out, lse, mask, block_q, block_k):
    """delta = rowsum(p * dp) over the keys that are there."""
    delta = torch.zeros_like(lse)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    for j in range(0, k.shape[2], block_k):
        k_j, v_j = k[:, :, j : j + block_k], v[:, :, j : j + block_k]
        for i in range(0, q.shape[2], block_q):
            rows = slice(i, i + block_q)
            positions = torch.arange(q.shape[2])[rows, None], torch.arange(k.shape[2])[None, j : j + block_k]
            p = torch.exp(_scores(q[:, :, rows], k_j, mask(*positions)) - safe[..., rows].unsqueeze(-1))
            delta[..., rows] += (p * (dout[:, :, rows] @ _values(q, v_j).mT)).sum(-1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i in range(0, q.shape[2], block_q):
        rows = slice(i, i + block_q)
        for j in range(0, k.shape[2], block_k):
            columns = slice(j, j + block_k)
            visible = mask(torch.arange(q.shape[2])[rows, None], torch.arange(k.shape[2])[None, columns])
            x = dout[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], lse[..., rows], delta[..., rows]
            parts = attend_backward(*x, visible, q.shape[-1] ** -0.5)
            dq[:, :, rows] += parts[0]
            dk[:, :, columns] += parts[1]
            dv[:, :, columns] += parts[2]
    return dq, dk, dv


@wrong("2c", "adversarial", "in place of an lse of -inf")
def backward_nan_for_empty_rows(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        p = torch.exp(_scores(q, k, visible) - lse.unsqueeze(-1))
        return _products(p, p * (dout @ _values(q, v).mT - delta.unsqueeze(-1)), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "value", "a last dim of 1")
def backward_without_the_last_dim(*args):
    """lse and delta (B, H, rows) beside scores (B, H, rows, columns)."""

    def tile(dout, q, k, v, lse, delta, visible, scale):
        p = torch.exp(_scores(q, k, visible) - lse)
        return _products(p, p * (dout @ _values(q, v).mT - delta), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "adversarial", "exp(s - lse)")
def backward_divides_exps(*args):
    def tile(dout, q, k, v, lse, delta, visible, scale):
        total = torch.exp(torch.where(lse == -torch.inf, 0.0, lse)).unsqueeze(-1)
        p = torch.exp(_scores(q, k, visible)) / total
        return _products(p, p * (dout @ _values(q, v).mT - delta.unsqueeze(-1)), dout, q, k, v, scale)

    return _backward(*args, tile=tile)


@wrong("2c", "cost", "one tile")
def backward_all_scores_first(dout, q, k, v, out, lse, mask, block_q, block_k):
    visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
    visible = visible.expand(q.shape[2], k.shape[2])
    return attend_backward(dout, q, k, v, lse, (dout * out).sum(-1), visible, q.shape[-1] ** -0.5)


@wrong("2c", "cost", "block_k is not used")
def backward_whole_rows(dout, q, k, v, out, lse, mask, block_q, block_k):
    return _backward(dout, q, k, v, out, lse, mask, block_q, k.shape[2])


@wrong("2c", "cost", "block_q is not used")
def backward_whole_columns(dout, q, k, v, out, lse, mask, block_q, block_k):
    return _backward(dout, q, k, v, out, lse, mask, q.shape[2], block_k)


@wrong("2c", "cost", "block_q and block_k are exchanged")
def backward_blocks_exchanged(dout, q, k, v, out, lse, mask, block_q, block_k):
    return _backward(dout, q, k, v, out, lse, mask, block_k, block_q)


@wrong("2c", "cost", "block_q and block_k are exchanged")
def backward_blocks_exchanged_with_keys_outside(dout, q, k, v, out, lse, mask, block_q, block_k):
    return backward_keys_outside(dout, q, k, v, out, lse, mask, block_k, block_q)


@wrong("2c", "value", "S_k = k.shape[2]")
def backward_loops_over_as_many_keys_as_queries(dout, q, k, v, out, lse, mask, block_q, block_k):
    S = q.shape[2]
    return _backward(dout, q, k, v, out, lse, mask, block_q, block_k, skip=lambda i, j: j >= S)


@wrong("2c", "value", "return dq, dk, dv")
def backward_two_gradients(*args):
    return _backward(*args)[:2]


@wrong("2c", "value", "another order")
def backward_in_another_order(*args):
    dq, dk, dv = _backward(*args)
    return dk, dv, dq


def backward_solution(*args):
    return _backward(*args)


def backward_keys_outside(dout, q, k, v, out, lse, mask, block_q, block_k):
    """The loop over keys outside, as the papers have it: dk and dv of a block are finished one after another."""
    S, S_k, scale, G = q.shape[2], k.shape[2], q.shape[-1] ** -0.5, k.shape[1]
    dq, dks, dvs = torch.zeros_like(q), [], []
    delta = (dout * out).sum(-1)
    for j in range(0, S_k, block_k):
        k_j, v_j = k[:, :, j : j + block_k], v[:, :, j : j + block_k]
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        for i in range(0, S, block_q):
            rows = slice(i, min(S, i + block_q))
            visible = mask(torch.arange(S)[rows, None], torch.arange(j, j + k_j.shape[2])[None, :])
            p, ds = _p_ds(dout[:, :, rows], q[:, :, rows], k_j, v_j, lse[..., rows], delta[..., rows], visible)
            dv_j = dv_j + _home(p.mT @ dout[:, :, rows], G)
            dk_j = dk_j + scale * _home(ds.mT @ q[:, :, rows], G)
            dq[:, :, rows] += scale * (ds @ _values(q, k_j))
        dks.append(dk_j), dvs.append(dv_j)
    return dq, torch.cat(dks, 2), torch.cat(dvs, 2)


def backward_library(dout, q, k, v, out, lse, mask, block_q, block_k):
    return flash_backward(dout, q, k, v, out, lse, mask, block_q=block_q, block_k=block_k)


# ---- 2d ----


@wrong("2d", "value", "S / block_q times")
def traffic_kv_read_once(S, H, D, block_q, block_k, itemsize):
    return H * (4 * S * D * itemsize + 4 * S)


@wrong("2d", "value", "not read again")
def traffic_q_read_again(S, H, D, block_q, block_k, itemsize):
    passes_q, passes_k = math.ceil(S / block_q), math.ceil(S / block_k)
    return H * (S * D * itemsize * (passes_k + 1 + 2 * passes_q) + 4 * S)


@wrong("2d", "value", "written once")
def traffic_out_written_for_each_tile(S, H, D, block_q, block_k, itemsize):
    passes_q, passes_k = math.ceil(S / block_q), math.ceil(S / block_k)
    return H * (S * D * itemsize * (1 + passes_k + 2 * passes_q) + 4 * S)


@wrong("2d", "value", "H heads")
def traffic_heads_forgotten(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, 1, D, block_q, block_k, itemsize)


@wrong("2d", "value", "itemsize")
def traffic_always_bf16(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, H, D, block_q, block_k, 2)


@wrong("2d", "adversarial", "ceil(97 / 32)")
def traffic_floor(S, H, D, block_q, block_k, itemsize):
    return H * (S * D * itemsize * (2 + 2 * max(1, S // block_q)) + 4 * S)


@wrong("2d", "adversarial", "not")
def traffic_padded_keys(S, H, D, block_q, block_k, itemsize):
    keys = math.ceil(S / block_k) * block_k if S > block_k else S
    return H * (2 * S * D * itemsize + math.ceil(S / block_q) * 2 * keys * D * itemsize + 4 * S)


@wrong("2d", "adversarial", "ceil(97 / 32)")
def traffic_fraction(S, H, D, block_q, block_k, itemsize):
    return H * (2 * S * D * itemsize + S / block_q * 2 * S * D * itemsize + 4 * S)


@wrong("2d", "value", "block of queries")
def traffic_blocks_exchanged(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, H, D, block_k, block_q, itemsize)


@wrong("2d", "value", "four tensors")
def traffic_k_only(S, H, D, block_q, block_k, itemsize):
    return H * (2 * S * D * itemsize + math.ceil(S / block_q) * S * D * itemsize + 4 * S)


@wrong("2d", "value", "lse")
def traffic_lse_forgotten(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, H, D, block_q, block_k, itemsize) - H * S * 4


@wrong("2d", "value", "float32")
def traffic_lse_in_itemsize(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, H, D, block_q, block_k, itemsize) - H * S * 4 + H * S * itemsize


@wrong("2d", "value", "four tensors")
def traffic_with_scores(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, H, D, block_q, block_k, itemsize) + H * S * S * itemsize


@wrong("2d", "value", "itemsize")
def traffic_numbers_not_bytes(S, H, D, block_q, block_k, itemsize):
    return traffic_solution(S, H, D, block_q, block_k, 1)


def traffic_solution(S, H, D, block_q, block_k, itemsize):
    passes = math.ceil(S / block_q)
    return H * (2 * S * D * itemsize + passes * 2 * S * D * itemsize + 4 * S)


def traffic_by_loop(S, H, D, block_q, block_k, itemsize):
    moved = 0
    for i in range(0, S, block_q):
        rows = min(block_q, S - i)
        moved += rows * (2 * D * itemsize + 4) + 2 * S * D * itemsize
    return H * moved


def traffic_by_floor_of_negative(S, H, D, block_q, block_k, itemsize):
    return H * S * (2 * D * itemsize * (1 - (-S // block_q)) + 4)


def traffic_library(S, H, D, block_q, block_k, itemsize):
    return costs.flash_traffic(S, H, 1, D, block_q=block_q, block_k=block_k, itemsize=itemsize)


RIGHT = {
    "2a": [
        forward_solution,
        forward_running_max,
        forward_keys_outside,
        forward_skips_hidden_tiles,
        forward_asks_once_per_block_of_queries,
        forward_library,
    ],
    "2b": [row_solution, row_by_out, row_by_jacobian, row_by_transposed_jacobian],
    "2c": [backward_solution, backward_keys_outside, backward_library],
    "2d": [traffic_solution, traffic_by_loop, traffic_by_floor_of_negative, traffic_library],
}

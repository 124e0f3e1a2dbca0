"""Answers to the exercises of notebook 01: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass. The solutions that the notebook shows are taken from the
notebook itself by test_nb01_notebook.py, and must pass too.
"""

from __future__ import annotations

import math
from math import exp, inf

import torch

from ringlearn.partial import Partial, identity
from ringlearn.partial import merge as library_merge
from ringlearn.softmax import online, two_pass

from .edits import edited, registry

WRONG, wrong = registry("1a", "1b", "1c")

# ---- 1a ----


@wrong("1a", "adversarial", "overflows")
def online_no_max(scores):
    return 0.0, sum(exp(s) for s in scores)


@wrong("1a", "adversarial", "overflows")
def online_no_max_torch(scores):
    l = torch.tensor(0.0)
    for s in scores:
        l = l + torch.exp(s)
    return 0.0, l


@wrong("1a", "value", "multiply l by exp(m_old - m_new)")
def online_not_rescaled(scores):
    m, l = -inf, 0.0
    for s in scores:
        m = max(m, s)
        l = l + exp(s - m) if s > -inf else l
    return m, l


@wrong("1a", "adversarial", "-inf - (-inf) is NaN")
def online_unguarded(scores):
    m, l = -inf, 0.0
    for s in scores:
        m_new = max(m, s)
        l = l * exp(m - m_new) + exp(s - m_new)
        m = m_new
    return m, l


online_rescaled_the_wrong_way = edited(
    online_unguarded,
    "online_rescaled_the_wrong_way",
    ("l = l * exp(m - m_new)", "l = l * (exp(m_new - m) if m > -inf else 0.0)"),
)
online_starts_at_zero = edited(online_unguarded, "online_starts_at_zero", ("-inf", "0.0"))


@wrong("1a", "value", "m = -inf")
def online_forgets_to_keep_the_max(scores):
    m, l = -inf, 0.0
    for s in scores:
        m_new = max(m, s)
        l = l * exp(m - m_new) + exp(s - m_new) if m_new > -inf else 0.0
    return m, l


@wrong("1a", "value", "l = exp(s - m) = 1")
def online_returns_lse(scores):
    m, l = online_solution(scores)
    return m, m + math.log(l)


@wrong("1a", "value", "(m = 1, l = 2)")
def online_exchanged(scores):
    m, l = online_solution(scores)
    return l, m


@wrong("1a", "value", "not the pair (m, l)")
def online_one_number(scores):
    m, l = online_solution(scores)
    return m + math.log(l)


@wrong("1a", "value", "return")
def online_no_return(scores):
    m, l = online_solution(scores)


@wrong("1a", "value", "are a stream")
def online_uses_tensor_max(scores):
    m = scores.max()
    return m, sum(exp(s - m) for s in scores)


@wrong("1a", "cost", "8000 scores were read")
def online_max_first(scores):
    m = max(scores, default=-inf)
    return m, sum(exp(s - m) for s in scores) if m > -inf else 0.0


@wrong("1a", "cost", "list")
def online_list_first(scores):
    scores = list(scores)
    m = max(scores, default=-inf)
    return m, sum(exp(s - m) for s in scores) if m > -inf else 0.0


@wrong("1a", "cost", "list")
def online_list_of_floats(scores):
    return online_list_first([float(s) for s in scores])


def online_solution(scores):
    m, l = -inf, 0.0
    for s in scores:
        m_new = max(m, s)
        if m_new > -inf:
            l = l * exp(m - m_new) + exp(s - m_new)
        m = m_new
    return m, l


online_rescales_the_new_term_too = edited(
    online_solution,
    "online_rescales_the_new_term_too",
    ("l = l * exp(m - m_new) + exp(s - m_new)", "l = (l + exp(s - m_new)) * (exp(m - m_new) if m > -inf else 1.0)"),
)


def online_by_cases(scores):
    """Rescales only when the maximum moves; m and l are tensors."""
    m, l = torch.tensor(-inf, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for s in scores:
        if s == -inf:
            continue
        if s <= m:
            l = l + torch.exp(s - m)
        else:
            m, l = s, l * torch.exp(m - s) + 1
    return m, l


def online_as_lse(scores):
    """Carries the lse alone."""
    lse = -inf
    for s in scores:
        top = max(lse, s)
        lse = top + math.log(exp(lse - top) + exp(s - top)) if top > -inf else top
    return lse, float(lse > -inf)


def online_in_float32(scores):
    m, l = torch.tensor(-inf), torch.tensor(0.0)
    for s in scores:
        s = s.float()
        m_new = torch.maximum(m, s)
        if m_new > -inf:
            l = l * torch.exp(m - m_new) + torch.exp(s - m_new)
        m = m_new
    return m, l


online_starts_at_minus_a_billion = edited(
    online_unguarded, "online_starts_at_minus_a_billion", ("-inf", "-1e9"), ("m, s", "m, float(s)")
)


def online_from_a_very_low_max(scores):
    """Starts at a finite number below any score."""
    m, l = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64), 0.0
    for s in scores:
        m_new = torch.maximum(m, s)
        l = l * exp(m - m_new) + exp(s - m_new)
        m = m_new
    return m, l


# ---- 1b ----


def _w(x):
    return x.unsqueeze(-1)


@wrong("1b", "value", "1/4 and 3/4")
def merge_mean(a, b):
    return (a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse)


@wrong("1b", "value", "averaged")
def merge_sum(a, b):
    return a.out + b.out, torch.logaddexp(a.lse, b.lse)


@wrong("1b", "value", "the two lses are added")
def merge_lses_added(a, b):
    lse = a.lse + b.lse
    return _w(torch.exp(a.lse - lse)) * a.out + _w(torch.exp(b.lse - lse)) * b.out, lse


@wrong("1b", "value", "weights")
def merge_weighted_by_lse(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return (_w(a.lse) * a.out + _w(b.lse) * b.out) / _w(a.lse + b.lse), lse


@wrong("1b", "value", "the weights are exchanged")
def merge_weights_exchanged(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return _w(torch.exp(b.lse - lse)) * a.out + _w(torch.exp(a.lse - lse)) * b.out, lse


@wrong("1b", "value", "total weights add")
def merge_larger_lse(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return _w(torch.exp(a.lse - lse)) * a.out + _w(torch.exp(b.lse - lse)) * b.out, torch.maximum(a.lse, b.lse)


@wrong("1b", "adversarial", "exp(d)")
def merge_log1p_exp(a, b):
    lse = a.lse + torch.log(1 + torch.exp(b.lse - a.lse))
    return _w(torch.exp(a.lse - lse)) * a.out + _w(torch.exp(b.lse - lse)) * b.out, lse


@wrong("1b", "adversarial", "-inf")
def merge_sigmoid(a, b):
    out = a.out - _w(torch.sigmoid(b.lse - a.lse)) * (a.out - b.out)
    return out, a.lse - torch.nn.functional.logsigmoid(a.lse - b.lse)


@wrong("1b", "adversarial", "both weights are 0")
def merge_logaddexp_unguarded(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return _w(torch.exp(a.lse - lse)) * a.out + _w(torch.exp(b.lse - lse)) * b.out, lse


@wrong("1b", "adversarial", "subtract the larger lse")
def merge_exp_of_lse(a, b):
    wa, wb = torch.exp(a.lse), torch.exp(b.lse)
    return (_w(wa) * a.out + _w(wb) * b.out) / _w(wa + wb), torch.log(wa + wb)


@wrong("1b", "adversarial", "bfloat16")
def merge_in_input_dtype(a, b):
    out, lse = library_merge(a, b)
    return out.to(b.out.dtype), lse


@wrong("1b", "adversarial", "bfloat16")
def merge_lse_in_input_dtype(a, b):
    out, lse = library_merge(a, b)
    return out, lse.to(b.out.dtype).to(lse.dtype)


@wrong("1b", "value", "nowhere else")
def merge_lse_keeps_a_dim(a, b):
    out, lse = library_merge(a, b)
    return out, _w(lse)


@wrong("1b", "value", "unsqueeze")
def merge_without_unsqueeze(a, b):
    lse, wa, wb = _guarded(a, b)
    return wa * a.out + wb * b.out, lse


@wrong("1b", "value", "in place")
def merge_in_place(a, b):
    lse, wa, wb = _guarded(a, b)
    a.out.mul_(_w(wa)).add_(_w(wb) * b.out)
    return a.out, lse


@wrong("1b", "gradient", "gradient")
def merge_detached(a, b):
    lse, wa, wb = _guarded(a, b)
    return _w(wa.detach()) * a.out + _w(wb.detach()) * b.out, lse


@wrong("1b", "gradient", "harmless before")
def merge_repaired_after_the_fact(a, b):
    """Values right; the branch that where() does not take still sends NaN back."""
    lse = a.lse + torch.where(b.lse - a.lse > 80, b.lse - a.lse, torch.log1p(torch.exp(b.lse - a.lse)))
    lse = torch.where(a.lse == -inf, b.lse, torch.where(b.lse == -inf, a.lse, lse))
    wa = torch.where(a.lse == -inf, 0.0, torch.exp(a.lse - lse))
    wb = torch.where(b.lse == -inf, 0.0, torch.exp(b.lse - lse))
    return _w(wa) * a.out + _w(wb) * b.out, lse


@wrong("1b", "gradient", "before the operation")
def merge_nan_to_num(a, b):
    """Values right; exp of NaN is repaired after the fact."""
    lse = torch.logaddexp(a.lse, b.lse)
    wa, wb = torch.exp(a.lse - lse).nan_to_num(0), torch.exp(b.lse - lse).nan_to_num(0)
    return _w(wa) * a.out + _w(wb) * b.out, lse


@wrong("1b", "gradient", "logaddexp")
def merge_by_logaddexp(a, b):
    """Values right, -inf replaced before it is subtracted; but logaddexp has a NaN gradient at (-inf, -inf)."""
    lse = torch.logaddexp(a.lse, b.lse)
    safe = torch.where(lse == -inf, 0.0, lse)
    return _w(torch.exp(a.lse - safe)) * a.out + _w(torch.exp(b.lse - safe)) * b.out, lse


@wrong("1b", "gradient", "before the operation")
def merge_log_of_a_total_of_zero(a, b):
    top = torch.maximum(a.lse, b.lse)
    top = torch.where(top == -inf, 0.0, top)
    wa, wb = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = torch.where(wa + wb == 0, 1.0, wa + wb)
    return _w(wa / total) * a.out + _w(wb / total) * b.out, top + torch.log(wa + wb)


@wrong("1b", "adversarial", "each row needs")
def merge_branches_on_all_rows(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    if (lse == -inf).all():
        return torch.zeros_like(a.out), lse
    return merge_logaddexp_unguarded(a, b)


@wrong("1b", "value", "work row by row")
def merge_branches_on_a_row(a, b):
    if a.lse == -inf:
        return b
    return merge_by_maximum(a, b)


@wrong("1b", "adversarial", "each row needs")
def merge_one_maximum_for_all_rows(a, b):
    top = torch.maximum(a.lse.max(), b.lse.max())
    top = torch.where(top == -inf, 0.0, top)
    wa, wb = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = torch.where(wa + wb == 0, 1.0, wa + wb)
    lse = torch.where(wa + wb == 0, -inf, top + torch.log(total))
    return _w(wa / total) * a.out + _w(wb / total) * b.out, lse


@wrong("1b", "adversarial", "log(0 + epsilon)")
def merge_with_an_epsilon(a, b):
    top = torch.maximum(a.lse, b.lse)
    top = torch.where(top == -inf, 0.0, top)
    wa, wb = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = wa + wb + 1e-9
    return _w(wa / total) * a.out + _w(wb / total) * b.out, top + torch.log(total)


@wrong("1b", "adversarial", "A large negative number")
def merge_very_low_instead_of_inf(a, b):
    return merge_by_maximum(*(Partial(x.out, torch.where(x.lse == -inf, -1e30, x.lse)) for x in (a, b)))


@wrong("1b", "value", "other order")
def merge_exchanged(a, b):
    out, lse = library_merge(a, b)
    return lse, out


@wrong("1b", "value", "torch.exp and torch.log")
def merge_with_math(a, b):
    lse = math.log(exp(a.lse) + exp(b.lse))
    return exp(a.lse - lse) * a.out + exp(b.lse - lse) * b.out, lse


@wrong("1b", "value", "not the pair (out, lse)")
def merge_one_tensor(a, b):
    return library_merge(a, b).out


def _guarded(a, b):
    top = torch.maximum(a.lse, b.lse)
    top = torch.where(top == -inf, 0.0, top)
    wa, wb = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = torch.where(wa + wb == 0, 1.0, wa + wb)
    lse = torch.where(wa + wb == 0, -inf, top + torch.log(total))
    return lse, wa / total, wb / total


def merge_by_maximum(a, b):
    lse, wa, wb = _guarded(a, b)
    return Partial(_w(wa) * a.out + _w(wb) * b.out, lse)


# Drops the smaller side as soon as its weight looks small.
merge_winner_takes_all = edited(
    merge_by_maximum,
    "merge_winner_takes_all",
    (
        "return Partial(_w(wa) * a.out + _w(wb) * b.out, lse)",
        "a_wins, b_wins = a.lse - b.lse > 5, b.lse - a.lse > 5\n"
        "wa, wb = (\n"
        "    torch.where(a_wins, 1.0, torch.where(b_wins, 0.0, wa)),\n"
        "    torch.where(b_wins, 1.0, torch.where(a_wins, 0.0, wb)),\n"
        ")\n"
        "return _w(wa) * a.out + _w(wb) * b.out, torch.where(a_wins, a.lse, torch.where(b_wins, b.lse, lse))",
    ),
)


def merge_by_logaddexp_of_harmless_lses(a, b):
    """logaddexp, but never of (-inf, -inf)."""
    empty = torch.maximum(a.lse, b.lse) == -inf
    a_lse = torch.where(empty, 0.0, a.lse)
    lse = torch.logaddexp(a_lse, b.lse)
    wa, wb = torch.exp(a_lse - lse).masked_fill(empty, 0.0), torch.exp(b.lse - lse)
    return wa[..., None] * a.out + wb[..., None] * b.out, torch.where(empty, -inf, lse)


def merge_by_softmax(a, b):
    """The weights are the softmax of the two lses."""
    lses = torch.stack([a.lse, b.lse])
    weights, lse = two_pass(lses.movedim(0, -1))
    return (weights.movedim(-1, 0).unsqueeze(-1) * torch.stack([a.out.to(lse), b.out.to(lse)])).sum(0), lse


# ---- 1c ----


def _split(scores, values, sizes):
    return zip(scores.split(sizes, -1), values.split(sizes, -2))


@wrong("1c", "value", "merge them by lse")
def blockwise_adds(scores, values, sizes):
    """Normalises inside each block and adds."""
    out = sum(two_pass(s)[0] @ v for s, v in _split(scores, values, sizes))
    return out, two_pass(scores)[1]


@wrong("1c", "value", "rl.identity")
def blockwise_starts_with_a_phantom_key(scores, values, sizes):
    """Starts with zeros for both, so the empty result counts as a key."""
    result = Partial(values.new_zeros(scores.shape[0], values.shape[1]), scores.new_zeros(scores.shape[0]))
    for s, v in _split(scores, values, sizes):
        p, lse = two_pass(s)
        result = library_merge(result, Partial(p @ v, lse))
    return result


@wrong("1c", "value", "merge them by lse")
def blockwise_averages(scores, values, sizes):
    out, lse = blockwise_adds(scores, values, sizes)
    return out / len(sizes), lse


@wrong("1c", "value", "merge them by lse")
def blockwise_weights_by_size(scores, values, sizes):
    n = scores.shape[-1]
    out = sum(v.shape[0] / n * (two_pass(s)[0] @ v) for s, v in _split(scores, values, sizes))
    return out, two_pass(scores)[1]


@wrong("1c", "adversarial", "dropped")
def blockwise_drops_the_ragged_block(scores, values, sizes):
    size = sizes[0] if sizes[0] else max(sizes)
    full = scores.shape[-1] // size
    if len(set(sizes)) > 1 and sizes != sorted(sizes, reverse=True):
        return blockwise_solution(scores, values, sizes)
    return blockwise_solution(scores[:, : full * size], values[: full * size], [size] * full)


@wrong("1c", "value", "block b starts where")
def blockwise_one_size_for_all(scores, values, sizes):
    size, n = sizes[0], scores.shape[-1]
    return blockwise_solution(scores[:, : n // size * size], values[: n // size * size], [size] * (n // size))


@wrong("1c", "value", "padding needs scores of -inf")
def blockwise_pads_with_zero_scores(scores, values, sizes):
    size = max(sizes)
    result = identity((scores.shape[0], values.shape[1]))
    for s, v in _split(scores, values, sizes):
        # Two blocks of different sizes in value stage are enough to see it.
        s = torch.nn.functional.pad(s, (0, size - s.shape[-1]))
        v = torch.nn.functional.pad(v, (0, 0, 0, size - v.shape[0]))
        p, lse = two_pass(s)
        result = library_merge(result, Partial(p @ v, lse))
    return result


@wrong("1c", "value", "block b starts where")
def blockwise_cuts_at_multiples(scores, values, sizes):
    """Block b starts at b * sizes[b]."""
    result = identity((scores.shape[0], values.shape[1]))
    for b, size in enumerate(sizes):
        s, v = scores[:, b * size : (b + 1) * size], values[b * size : (b + 1) * size]
        p, lse = two_pass(s)
        result = library_merge(result, Partial(p @ v, lse))
    return result


@wrong("1c", "value", "running lse")
def blockwise_lse_not_updated(scores, values, sizes):
    """The running lse stays that of the first block, until a right one is returned at the end."""
    out, first = None, None
    for s, v in _split(scores, values, sizes):
        p, lse = two_pass(s)
        if out is None:
            out, first = p @ v, lse
        else:
            out = library_merge(Partial(out, first), Partial(p @ v, lse)).out
    return out, two_pass(scores)[1]


@wrong("1c", "value", "total weights add")
def blockwise_lse_of_the_last_block(scores, values, sizes):
    result = identity((scores.shape[0], values.shape[1]))
    for s, v in _split(scores, values, sizes):
        p, lse = two_pass(s)
        result = library_merge(result, Partial(p @ v, lse))
    return result.out, lse


@wrong("1c", "value", "scores[:, block] and values[block]")
def blockwise_cuts_rows(scores, values, sizes):
    result, start = identity((scores.shape[0], values.shape[1])), 0
    for size in sizes:
        block = slice(start, start + size)
        p, lse = two_pass(scores[block])
        result = library_merge(result, Partial(p @ values[block], lse))
        start += size
    return result


@wrong("1c", "value", "scores[:, block] and values[block]")
def blockwise_all_values_each_time(scores, values, sizes):
    result = identity((scores.shape[0], values.shape[1]))
    for s, _ in _split(scores, values, sizes):
        p, lse = two_pass(s)
        result = library_merge(result, Partial(p @ values, lse))
    return result


@wrong("1c", "value", "values[start : start + size]")
def blockwise_first_values_each_time(scores, values, sizes):
    result, start = identity((scores.shape[0], values.shape[1])), 0
    for size in sizes:
        p, lse = two_pass(scores[:, start : start + size])
        result = library_merge(result, Partial(p @ values[:size], lse))
        start += size
    return result


blockwise_without_start = edited(
    blockwise_first_values_each_time, "blockwise_without_start", ("start : start + size", ":size")
)
blockwise_first_scores_each_time = edited(
    blockwise_without_start, "blockwise_first_scores_each_time", ("values[:size]", "values[start : start + size]")
)


@wrong("1c", "value", "each counted once")
def blockwise_all_keys_each_time(scores, values, sizes):
    result = identity((scores.shape[0], values.shape[1]))
    for _ in sizes:
        p, lse = two_pass(scores)
        result = library_merge(result, Partial(p @ values, lse))
    return result


@wrong("1c", "value", "rl.Partial(out, lse)")
def blockwise_plain_pairs(scores, values, sizes):
    result = identity((scores.shape[0], values.shape[1]))
    for s, v in _split(scores, values, sizes):
        p, lse = two_pass(s)
        result = library_merge(result, (p @ v, lse))
    return result


@wrong("1c", "adversarial", "NaN in torch")
def blockwise_torch_softmax(scores, values, sizes):
    """torch.softmax is NaN on a row of -inf."""
    result = identity((scores.shape[0], values.shape[1]))
    for s, v in _split(scores, values, sizes):
        result = library_merge(result, Partial(s.softmax(-1) @ v, s.logsumexp(-1)))
    return result


@wrong("1c", "adversarial", "before exp")
def blockwise_no_max(scores, values, sizes):
    acc, l = 0, 0
    for s, v in _split(scores, values, sizes):
        e = torch.exp(s)
        acc, l = acc + e @ v, l + e.sum(-1)
    return acc / torch.where(l == 0, 1.0, l).unsqueeze(-1), torch.log(l)


@wrong("1c", "cost", "merge each as it is made")
def blockwise_all_partials_then_stack(scores, values, sizes):
    parts = [(p @ v, lse) for s, v in _split(scores, values, sizes) for p, lse in [two_pass(s)]]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    weights, lse = two_pass(lses.movedim(0, -1))
    return (weights.movedim(-1, 0).unsqueeze(-1) * outs).sum(0), lse


@wrong("1c", "cost", "alive at once")
def blockwise_the_whole_row(scores, values, sizes):
    p, lse = two_pass(scores)
    return p @ values, lse


@wrong("1c", "adversarial", "before exp")
def blockwise_reversed_only(scores, values, sizes):
    """Right as long as the first block holds the maximum."""
    m, acc, l = None, 0, 0
    for s, v in _split(scores, values, sizes):
        if m is None:
            m = two_pass(s)[1]
            m = torch.where(m == -inf, 0.0, m)
        e = torch.exp(s - m.unsqueeze(-1))
        acc, l = acc + e @ v, l + e.sum(-1)
    return acc / torch.where(l == 0, 1.0, l).unsqueeze(-1), m + torch.log(l)


def blockwise_solution(scores, values, sizes):
    result = identity((scores.shape[0], values.shape[1]))
    for s, v in _split(scores, values, sizes):
        p, lse = two_pass(s)
        result = library_merge(result, Partial(p @ v, lse))
    return result


blockwise_fails_on_an_empty_block = edited(
    blockwise_solution,
    "blockwise_fails_on_an_empty_block",
    (
        "p, lse = two_pass(s)\nresult = library_merge(result, Partial(p @ v, lse))",
        "m = s.max(-1).values\n"
        "m = torch.where(m == -inf, 0.0, m)\n"
        "e = torch.exp(s - m.unsqueeze(-1))\n"
        "l = e.sum(-1)\n"
        "out = e @ v / torch.where(l == 0, 1.0, l).unsqueeze(-1)\n"
        "result = library_merge(result, Partial(out, m + torch.log(l)))",
    ),
)


def blockwise_by_index_backwards(scores, values, sizes):
    """Slices by hand, from the last block to the first, with the library's online softmax."""
    result, stop = identity((scores.shape[0], values.shape[1])), scores.shape[1]
    for size in reversed(sizes):
        start = stop - size
        p, lse = online(scores[:, start:stop])
        result = library_merge(Partial(p @ values[start:stop], lse), result)
        stop = start
    return result.out, result.lse


def blockwise_flash(scores, values, sizes):
    """The running (m, l, acc) of flash attention, divided once at the end."""
    m, l = torch.full(scores.shape[:1], -inf), torch.zeros(scores.shape[:1])
    acc = torch.zeros(scores.shape[0], values.shape[1])
    for s, v in _split(scores, values, sizes):
        m_new = torch.cat([m.unsqueeze(-1), s], -1).amax(-1)
        safe = torch.where(m_new == -inf, 0.0, m_new)
        e, scale = torch.exp(s - safe.unsqueeze(-1)), torch.exp(m - safe)
        m, l, acc = m_new, l * scale + e.sum(-1), acc * scale.unsqueeze(-1) + e @ v
    return acc / torch.where(l == 0, 1.0, l).unsqueeze(-1), torch.where(l == 0, -inf, m + torch.log(l))


WRONG["1a"] += [
    (online_rescaled_the_wrong_way, "value", "multiply l by exp(m_old - m_new)"),
    (online_rescales_the_new_term_too, "value", "multiply l by exp(m_old - m_new)"),
    (online_starts_at_zero, "adversarial", "start at -inf"),
    (online_starts_at_minus_a_billion, "adversarial", "such as -1e9"),
]
WRONG["1b"] += [
    (merge_winner_takes_all, "adversarial", "three partial results"),
]
WRONG["1c"] += [
    (blockwise_without_start, "value", "every block begins at key 0"),
    (blockwise_first_scores_each_time, "value", "scores[:, start : start + size]"),
    (blockwise_fails_on_an_empty_block, "adversarial", "no maximum"),
]

RIGHT = {
    "1a": [online_solution, online_by_cases, online_as_lse, online_in_float32, online_from_a_very_low_max],
    "1b": [library_merge, merge_by_maximum, merge_by_logaddexp_of_harmless_lses, merge_by_softmax],
    "1c": [blockwise_solution, blockwise_by_index_backwards, blockwise_flash],
}

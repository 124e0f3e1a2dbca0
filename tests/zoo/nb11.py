"""Answers to the exercises of notebook 11: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage at which it must be rejected, a word that the message must hold).
RIGHT[exercise] is a list of functions that must pass.
"""

from __future__ import annotations

import math

import torch

import ringlearn as rl
from ringlearn.attention.decoding import Ownership
from ringlearn.attention.decoding.exchange import all_gather, tree
from ringlearn.costs.decoding import waiting_seconds

from .edits import edited, registry

WRONG, wrong = registry("11a", "11b", "11c", "11d")

# ---- 11a ----


def split_solution(q, k, v, sizes):
    B, H, _, D = q.shape
    G = k.shape[1]
    rows = q.reshape(B, G, H // G, D)
    result = rl.identity((B, G, H // G, v.shape[-1]))
    for k_i, v_i in zip(k.split(sizes, 2), v.split(sizes, 2)):
        if k_i.shape[2] == 0:
            continue
        s = rows @ k_i.mT * D**-0.5
        lse = s.logsumexp(-1)
        result = rl.merge(result, rl.Partial(torch.softmax(s, -1) @ v_i, lse))
    return result.out.reshape(B, H, 1, -1), result.lse.reshape(B, H, 1)


def split_all_weights_at_once(q, k, v, sizes):
    """Partial results first, then one softmax over their lse."""
    B, H, _, D = q.shape
    G = k.shape[1]
    outs, lses, start = [], [], 0
    for size in sizes:
        k_i, v_i = k[:, :, start : start + size], v[:, :, start : start + size]
        start += size
        if size == 0:
            outs.append(torch.zeros(B, G, H // G, v.shape[-1]))
            lses.append(torch.full((B, G, H // G), -math.inf))
            continue
        s = q.reshape(B, G, H // G, D) @ k_i.transpose(2, 3) / D**0.5
        m = s.max(-1, keepdim=True).values
        e = torch.exp(s - m)
        outs.append(e @ v_i / e.sum(-1, keepdim=True))
        lses.append((m + e.sum(-1, keepdim=True).log()).squeeze(-1))
    outs, lses = torch.stack(outs), torch.stack(lses)
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse == -math.inf, torch.zeros_like(lse), lse))
    out = (weights[..., None] * outs).sum(0)
    return out.reshape(B, H, 1, -1), lse.reshape(B, H, 1)


def split_key_by_key(q, k, v, sizes):
    """The splits' sizes do not matter to whoever goes key by key."""
    return split_solution(q, k, v, [1] * k.shape[2])


def split_head_by_head(q, k, v, sizes):
    """Each key is read once for every query head of its group."""
    H, G = q.shape[1], k.shape[1]
    parts = []
    for h in range(H):
        head = slice(h // (H // G), h // (H // G) + 1)
        parts.append(split_solution(q[:, h : h + 1], k[:, head], v[:, head], sizes))
    return tuple(torch.cat(some, 1) for some in zip(*parts))


def split_as_partial(q, k, v, sizes):
    return rl.Partial(*split_all_weights_at_once(q, k, v, sizes))


def splits(name, **changes):
    """The solution with one thing done otherwise."""

    def answer(q, k, v, sizes):
        B, H, _, D = q.shape
        G = k.shape[1]
        scale = changes.get("scale", D**-0.5)
        order = [h for g in range(G) for h in range(g, H, G)] if "modulo" in changes else list(range(H))
        q = q[:, order]
        if changes.get("repeat"):
            k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
        if changes.get("copy"):
            k = k.clone()
        groups = k.shape[1]
        rows = q.reshape(B, groups, H // groups, D)
        outs, lses = [], []
        for k_i, v_i in zip(k.split(sizes, 2), v.split(sizes, 2)):
            if changes.get("repeat_split"):
                k_i, v_i = k_i.repeat_interleave(H // G, 1), v_i.repeat_interleave(H // G, 1)
                rows = q
            if k_i.shape[2] == 0 and not changes.get("unguarded"):
                outs.append(torch.zeros(*rows.shape[:-1], v.shape[-1]))
                lses.append(torch.full(rows.shape[:-1], changes.get("empty", -math.inf)))
                if changes.get("skips"):
                    outs.pop()
                    lses.pop()
                continue
            s = rows @ k_i.mT * scale
            if changes.get("no_max"):
                e = torch.exp(s)
                outs.append(e @ v_i / e.sum(-1, keepdim=True))
                lses.append(e.sum(-1).log())
                continue
            outs.append(torch.softmax(s, -1) @ v_i)
            lses.append(torch.logsumexp(s, -1))
        outs, lses = torch.stack(outs), torch.stack(lses)
        m = lses.amax(0)
        m = m if changes.get("unguarded") else m.masked_fill(m == -math.inf, 0.0)
        e = torch.exp(lses - m)
        lse = m + e.sum(0).log()
        weights = e / e.sum(0).clamp(min=1e-30)
        weights = changes.get("weights", lambda w, lses, sizes: w)(weights, lses, sizes)
        out = (weights.unsqueeze(-1) * outs).sum(0)
        lse = changes.get("lse", lambda lse, lses: lse)(lse, lses)
        out = changes.get("out", lambda out, outs: out)(out, outs)
        out, lse = out.reshape(B, H, 1, -1), lse.reshape(B, H, 1)
        if changes.get("modulo") == "and back":
            out, lse = (x[:, torch.tensor(order).argsort()] for x in (out, lse))
        return changes.get("returns", lambda out, lse: (out, lse))(out, lse)

    answer.__name__ = name
    return answer


def split_running_lse_forgotten(q, k, v, sizes):
    B, H, _, D = q.shape
    G = k.shape[1]
    rows, result = q.reshape(B, G, H // G, D), rl.identity((B, G, H // G, v.shape[-1]))
    first = None
    for k_i, v_i in zip(k.split(sizes, 2), v.split(sizes, 2)):
        s = rows @ k_i.mT * D**-0.5
        part = rl.Partial(torch.softmax(s, -1) @ v_i, s.logsumexp(-1))
        merged = rl.merge(result, part)
        first = merged.lse if first is None else first
        result = rl.Partial(merged.out, first)
    return result.out.reshape(B, H, 1, -1), result.lse.reshape(B, H, 1)


def split_same_keys(q, k, v, sizes):
    """Every split takes the first keys."""
    result = rl.identity((1, q.shape[1], 1, v.shape[-1]))
    for size in sizes:
        result = rl.merge(result, rl.Partial(*split_solution(q, k[:, :, :size], v[:, :, :size], [size])))
    return result


def split_lse_without_scale(q, k, v, sizes):
    """The scale is in the softmax, and not in the lse."""
    B, H, _, D = q.shape
    G = k.shape[1]
    rows, result = q.reshape(B, G, H // G, D), rl.identity((B, G, H // G, v.shape[-1]))
    for k_i, v_i in zip(k.split(sizes, 2), v.split(sizes, 2)):
        if k_i.shape[2]:
            s = rows @ k_i.mT
            result = rl.merge(result, rl.Partial(torch.softmax(s * D**-0.5, -1) @ v_i, s.logsumexp(-1)))
    return result.out.reshape(B, H, 1, -1), result.lse.reshape(B, H, 1)


def split_not_at_all(q, k, v, sizes):
    return split_solution(q, k, v, [k.shape[2]])


def split_broadcasts(q, k, v, sizes):
    """Keys get a dim of 1 for the heads of a group, which matmul expands."""
    B, H, _, D = q.shape
    G = k.shape[1]
    rows = q.reshape(B, G, H // G, 1, D)
    result = rl.identity((B, G, H // G, 1, v.shape[-1]))
    for k_i, v_i in zip(k.split(sizes, 2), v.split(sizes, 2)):
        if k_i.shape[2]:
            s = rows @ k_i[:, :, None].mT * D**-0.5
            part = rl.Partial(torch.softmax(s, -1) @ v_i[:, :, None], s.logsumexp(-1))
            result = rl.merge(result, part)
    return result.out.reshape(B, H, 1, -1), result.lse.reshape(B, H, 1)


def split_heads_do_not_fit(q, k, v, sizes):
    s = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(s, -1) @ v, s.logsumexp(-1)


def split_no_return(q, k, v, sizes):
    split_solution(q, k, v, sizes)


def _by_size(weights, lses, sizes):
    part = torch.tensor(sizes, dtype=torch.float32) / max(1, sum(sizes))
    return part.view(-1, 1, 1, 1).expand_as(weights)


def _powers_of_2(weights, lses, sizes):
    e = torch.exp2(lses - lses.amax(0))
    return e / e.sum(0)


# ---- 11b ----


async def exchange_solution(comm, out, lse):
    packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    parts = [rl.Partial(x[..., :-1], x[..., -1]) for x in await comm.all_gather(packed)]
    result = parts[0]
    for part in parts[1:]:
        result = rl.merge(result, part)
    return result


async def exchange_taken_apart_elsewhere(comm, out, lse):
    """lse is the first number of a message, and the last one is taken for it."""
    packed = torch.cat([lse.unsqueeze(-1), out], -1)
    return rl.merge_all([rl.Partial(x[..., :-1], x[..., -1]) for x in await comm.all_gather(packed)])


async def exchange_of_the_library(comm, out, lse):
    return await all_gather(comm, rl.Partial(out, lse))


async def exchange_tree(comm, out, lse):
    return await tree(comm, rl.Partial(out, lse))


async def exchange_one_softmax(comm, out, lse):
    """All weights at once, with a guard where no rank has a key."""
    packed = torch.stack(await comm.all_gather(torch.cat([lse.unsqueeze(-1), out], -1)))
    lses, outs = packed[..., 0], packed[..., 1:]
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(total.isinf(), torch.zeros(()), total))
    return (weights.unsqueeze(-1) * outs).sum(0), total


def exchanges(name, **changes):
    """The solution with one thing done otherwise."""

    async def answer(comm, out, lse):
        if "mine" in changes:
            out, lse = changes["mine"](out, lse)
        if changes.get("apart"):
            outs, lses = await comm.all_gather(out), await comm.all_gather(lse)
        else:
            packed = torch.cat([out, lse.unsqueeze(-1)], -1)
            if changes.get("wide_lse"):
                packed = torch.cat([out, lse.unsqueeze(-1).expand_as(out)], -1)
            packed = packed.double() if changes.get("double") else packed
            got = await comm.all_gather(packed)
            D = out.shape[-1]
            outs, lses = [x[..., :D].float() for x in got], [x[..., D].float() for x in got]
        if changes.get("no_await"):
            pass
        order = changes.get("order", lambda rank, P: range(P))(comm.rank, comm.size)
        merge = changes.get("merge", rl.merge)
        result = rl.Partial(*(rl.identity(out.shape))) if changes.get("from_identity") else None
        for i in order:
            part = rl.Partial(outs[i], lses[i])
            result = part if result is None else merge(result, part)
        result = changes.get("result", lambda result, outs, lses, comm: result)(result, outs, lses, comm)
        return changes.get("returns", lambda result: result)(result)

    answer.__name__ = name
    return answer


def _stacked(weigh):
    """The result from all partial results, by weights that weigh(lses) gives."""

    def result(result, outs, lses, comm):
        outs, lses = torch.stack(outs), torch.stack(lses)
        return rl.Partial((weigh(lses).unsqueeze(-1) * outs).sum(0), result.lse)

    return result


def _with_lse(of):
    return lambda result, outs, lses, comm: rl.Partial(result.out, of(torch.stack(lses), result.lse))


async def exchange_no_await(comm, out, lse):
    parts = comm.all_gather(torch.cat([out, lse.unsqueeze(-1)], -1))
    return parts[0][..., :-1], parts[0][..., -1]


async def exchange_skips_empty_ranks(comm, out, lse):
    """A rank without keys has nothing to say, so it stays away."""
    if torch.isinf(lse).all():
        return out, lse
    return await exchange_solution(comm, out, lse)


async def exchange_to_rank_0_only(comm, out, lse):
    """Rank 0 has the result; nobody tells the others."""
    message = (out, lse)
    shapes = tuple(tuple(t.shape) for t in message)
    if comm.rank:
        await comm.exchange({0: message}, {})
        return out, lse
    got = await comm.exchange({}, {r: shapes for r in range(1, comm.size)}, dtype=out.dtype)
    return rl.merge_all([rl.Partial(out, lse), *(rl.Partial(*got[r]) for r in range(1, comm.size))])


async def exchange_by_sums(comm, out, lse):
    """Weights from a gathered lse, then a sum over ranks: three exchanges."""
    lses = torch.stack(await comm.all_gather(lse))
    total = torch.logsumexp(lses, 0)
    weight = torch.exp(lse - torch.where(total.isinf(), torch.zeros(()), total))
    return await comm.all_reduce(weight.unsqueeze(-1) * out), total


async def exchange_sums_exponentials(comm, out, lse):
    """Numerator and denominator added up, without a maximum."""
    weight = torch.exp(lse)
    packed = await comm.all_gather(torch.cat([weight.unsqueeze(-1) * out, weight.unsqueeze(-1)], -1))
    total = sum(packed[1:], packed[0])
    return total[..., :-1] / total[..., -1:], total[..., -1].log()


def exchange_not_async(comm, out, lse):
    return out, lse


async def exchange_out_only(comm, out, lse):
    return (await exchange_solution(comm, out, lse)).out


async def exchange_nothing(comm, out, lse):
    return out, lse


# ---- 11c ----


def length_solution(rank, S, P, K):
    whole, rest = divmod(S, P * K)
    return whole * K + min(max(rest - rank * K, 0), K)


def length_by_counting_blocks(rank, S, P, K):
    """Whole blocks of the rank, and the unfinished one if it is the rank's."""
    blocks, rest = divmod(S, K)
    mine = (blocks - rank + P - 1) // P
    return mine * K + (rest if blocks % P == rank else 0)


def length_as_tensor(rank, S, P, K):
    return torch.tensor(length_solution(rank, S, P, K))


def length_of_the_library(rank, S, P, K):
    return Ownership(P, K).count(rank, S)


def lengths(name, tail, whole=lambda S, P, K: S // (P * K) * K):
    """Whole rounds, and tail(rest, rank, P, K) of what is left."""

    def answer(rank, S, P, K):
        return whole(S, P, K) + tail(S % (P * K), rank, P, K)

    answer.__name__ = name
    return answer


@wrong("11c", "value", "one by one")
def length_round_robin(rank, S, P, K):
    return (S - rank + P - 1) // P


@wrong("11c", "value", "S // P")
def length_even(rank, S, P, K):
    return S // P


@wrong("11c", "value", "rounded up")
def length_even_rounded_up(rank, S, P, K):
    return -(-S // P)


@wrong("11c", "value", "no whole number")
def length_fraction(rank, S, P, K):
    return S / P


@wrong("11c", "value", "one contiguous part")
def length_contiguous(rank, S, P, K):
    return S * (rank + 1) // P - S * rank // P


@wrong("11c", "value", "whole blocks")
def length_whole_blocks(rank, S, P, K):
    return -(-max(0, -(-S // K) - rank) // P) * K


@wrong("11c", "value", "blocks, not tokens")
def length_counts_blocks(rank, S, P, K):
    return -(-max(0, -(-S // K) - rank) // P)


@wrong("11c", "value", "one too few")
def length_one_too_few(rank, S, P, K):
    return length_solution(rank, S - 1, P, K)


@wrong("11c", "value", "one too many")
def length_one_too_many(rank, S, P, K):
    return length_solution(rank, S + 1, P, K)


@wrong("11c", "value", "exchanged")
def length_K_and_P_exchanged(rank, S, P, K):
    return length_solution(rank, S, K, P)


@wrong("11c", "value", "one number")
def length_as_range(rank, S, P, K):
    return [i for i in range(S) if i // K % P == rank]


@wrong("11c", "cost", "still counting")
def length_token_by_token(rank, S, P, K):
    return sum(i // K % P == rank for i in range(S))


@wrong("11c", "cost", "still counting")
def length_block_by_block(rank, S, P, K):
    return sum(min(K, S - start) for start in range(rank * K, S, P * K))


@wrong("11c", "cost", "still counting")
def length_of_all_positions(rank, S, P, K):
    return int((torch.arange(S) // K % P == rank).sum())


@wrong("11c", "value", "returns None")
def length_no_return(rank, S, P, K):
    length_solution(rank, S, P, K)


# ---- 11d ----


def waits_solution(T, S, P, H, G, D, e, a, F, W):
    step = 4 * H * D * (T / P) * ((S + T) / P) / F
    kv = 2 * G * D * e * (S + T) / P / W
    q = H * D * e * T / P / W
    home = H * (D + 1) * a * T / P / W
    return (P - 1) * max(0, kv - step), (P - 1) * (max(0, q - step) + home)


def waits_of_the_library(T, S, P, H, G, D, e, a, F, W):
    found = waiting_seconds(T, S, P, H, G, D, flops=F, bandwidth=W, itemsize=e, accumulated=a)
    return found["pass-kv"], found["pass-q"]


def waits_hop_by_hop(T, S, P, H, G, D, e, a, F, W):
    """The waits of each hop, added up, and then the results of each other rank."""
    seconds = [0.0, 0.0]
    for _ in range(P - 1):
        computing = 2 * (2 * H * D) * T * (S + T) / (P * P * F)
        for i, nbytes in enumerate((2 * G * D * e * (S + T) / P, H * D * e * T / P)):
            arrives = nbytes / W
            seconds[i] += arrives - computing if arrives > computing else 0.0
        seconds[1] += T / P * (H * D * a + H * a) / W
    return torch.tensor(seconds, dtype=torch.float64).tolist()


def waited(name, *changes):
    return edited(waits_solution, name, *changes)


RETURNED = "return (P - 1) * max(0, kv - step), (P - 1) * (max(0, q - step) + home)"


def returned(name, old, new):
    """The solution with another last line."""
    return waited(name, (RETURNED, RETURNED.replace(old, new)))


def waits_exchanged(*given):
    return waits_solution(*given)[::-1]


def waits_names_one(T, S, P, H, G, D, e, a, F, W):
    kv, q = waits_solution(T, S, P, H, G, D, e, a, F, W)
    return "pass-kv" if kv <= q else "pass-q"


def waits_as_text(T, S, P, H, G, D, e, a, F, W):
    return tuple(f"{x} s" for x in waits_solution(T, S, P, H, G, D, e, a, F, W))


WRONG["11a"] += [
    (
        splits("split_averages", weights=lambda w, lses, sizes: torch.full_like(w, 1 / len(sizes))),
        "value",
        "count alike",
    ),
    (splits("split_adds_outputs", weights=lambda w, lses, sizes: torch.ones_like(w)), "value", "are added"),
    (splits("split_weighs_by_size", weights=_by_size), "value", "number of keys"),
    (splits("split_powers_of_2", weights=_powers_of_2), "value", "natural logarithm"),
    (
        splits("split_weights_not_normalised", weights=lambda w, lses, sizes: torch.exp(lses - lses.amax(0))),
        "value",
        "do not sum to 1",
    ),
    (
        splits("split_heaviest_alone", weights=lambda w, lses, sizes: (lses == lses.amax(0)).float()),
        "value",
        "largest lse alone",
    ),
    (splits("split_last_alone", out=lambda out, outs: outs[-1]), "value", "the last split alone"),
    (splits("split_first_alone", out=lambda out, outs: outs[0]), "value", "the first split alone"),
    (splits("split_adds_lse", lse=lambda lse, lses: lses.sum(0)), "value", "are added"),
    (splits("split_lse_mean", lse=lambda lse, lses: lses.mean(0)), "value", "mean of the lse"),
    (splits("split_largest_lse", lse=lambda lse, lses: lses.amax(0)), "value", "the largest lse"),
    (splits("split_lse_in_base_2", lse=lambda lse, lses: lse / math.log(2)), "value", "base 2"),
    (splits("split_lse_without_max", lse=lambda lse, lses: lse - lses.amax(0)), "value", "not added again"),
    (splits("split_lse_of_the_first", lse=lambda lse, lses: lses[0]), "value", "of the first split"),
    (splits("split_lse_of_the_last", lse=lambda lse, lses: lses[-1]), "value", "of the last split"),
    (splits("split_without_scale", scale=1.0), "value", "sqrt(D)"),
    (splits("split_heads_modulo", modulo="and back"), "value", "not h % G"),
    (splits("split_heads_in_another_order", modulo=True), "value", "in another order"),
    (splits("split_returns_out_alone", returns=lambda out, lse: out), "value", "return out, lse"),
    (splits("split_lse_keeps_a_dim", returns=lambda out, lse: (out, lse[..., None])), "value", "lse (B, H, 1)"),
    (split_running_lse_forgotten, "value", "after each merge"),
    (split_lse_without_scale, "value", "those in the lse are not"),
    (split_same_keys, "value", "begin at key 0"),
    (split_heads_do_not_fit, "value", "q.reshape(B, G, H // G, D)"),
    (split_no_return, "value", "returns None"),
    (splits("split_empty_counts_as_0", empty=0.0), "adversarial", "a key with score 0"),
    (splits("split_unguarded", unguarded=True), "adversarial", "lse -inf"),
    (splits("split_empty_is_only_low", empty=-1e4), "adversarial", "finite number"),
    (splits("split_skips_all", skips=True), "adversarial", "no key at all"),
    (splits("split_without_max", no_max=True), "adversarial", "overflows"),
    (splits("split_repeats_heads", repeat=True), "cost", "for every query head"),
    (splits("split_repeats_heads_of_a_split", repeat_split=True), "cost", "for every query head"),
    (split_head_by_head, "cost", "once for all of them"),
    (split_broadcasts, "cost", "for every query head"),
    (splits("split_copies_keys", copy=True), "cost", "only look at k"),
    (split_not_at_all, "cost", "the row is not split"),
]
WRONG["11b"] += [
    (exchange_nothing, "value", "what they had before"),
    (exchange_no_await, "value", "await"),
    (exchange_not_async, "value", "async def"),
    (exchange_out_only, "value", "return out, lse"),
    (exchange_to_rank_0_only, "value", "what they had before"),
    (exchanges("exchange_averages", result=_stacked(lambda x: torch.full_like(x, 1 / len(x)))), "value", "count alike"),
    (exchanges("exchange_adds", result=_stacked(torch.ones_like)), "value", "are added"),
    (exchanges("exchange_not_normalised", result=_stacked(lambda x: torch.exp(x - x.amax(0)))), "value", "sum to 1"),
    (
        exchanges("exchange_powers_of_2", result=_stacked(lambda x: torch.softmax(x * math.log(2), 0))),
        "value",
        "natural logarithm",
    ),
    (exchanges("exchange_adds_lse", result=_with_lse(lambda x, lse: x.sum(0))), "value", "are added"),
    (exchanges("exchange_largest_lse", result=_with_lse(lambda x, lse: x.amax(0))), "value", "the largest lse"),
    (exchanges("exchange_lse_in_base_2", result=_with_lse(lambda x, lse: lse / math.log(2))), "value", "base 2"),
    (exchanges("exchange_lse_of_rank_0", result=_with_lse(lambda x, lse: x[0])), "value", "of the first rank"),
    (
        exchanges("exchange_without_own", order=lambda r, P: [i for i in range(P) if i != r] or [r]),
        "value",
        "own is missing",
    ),
    (exchange_taken_apart_elsewhere, "value", "is packed"),
    (exchanges("exchange_own_twice", order=lambda r, P: [r, *range(P)]), "value", "counts twice"),
    (
        exchanges("exchange_keeps_the_first_lse", merge=lambda a, b: rl.Partial(rl.merge(a, b).out, a.lse)),
        "value",
        "after each merge",
    ),
    (
        exchanges("exchange_empty_counts_as_0", mine=lambda out, lse: (out, lse.masked_fill(lse.isinf(), 0.0))),
        "adversarial",
        "a key with score 0",
    ),
    (exchange_skips_empty_ranks, "adversarial", "also one without keys"),
    (exchange_sums_exponentials, "adversarial", "exp(-inf - lse) = 0"),
    (exchanges("exchange_unguarded", result=_stacked(lambda x: torch.softmax(x, 0))), "adversarial", "-inf - (-inf)"),
    (
        exchanges("exchange_own_first", order=lambda r, P: [r, *(i for i in range(P) if i != r)]),
        "adversarial",
        "rank order",
    ),
    (exchanges("exchange_ring_order", order=lambda r, P: [(r - t) % P for t in range(P)]), "adversarial", "rank order"),
    (exchanges("exchange_apart", apart=True), "cost", "travel apart"),
    (exchange_by_sums, "cost", "travel apart"),
    (exchanges("exchange_in_float64", double=True), "cost", "twice as much"),
    (exchanges("exchange_lse_as_wide_as_out", wide_lse=True), "cost", "one number for D"),
]
WRONG["11c"] += [
    (lengths("length_whole_rounds", lambda rest, r, P, K: 0), "value", "nothing is counted"),
    (lengths("length_all_of_the_rest", lambda rest, r, P, K: rest), "value", "every rank gets all of it"),
    (lengths("length_rest_for_all", lambda rest, r, P, K: min(rest, K)), "value", "every rank gets up to K"),
    (lengths("length_negative", lambda rest, r, P, K: min(rest - r * K, K)), "value", "negative"),
    (lengths("length_too_much_of_the_rest", lambda rest, r, P, K: max(rest - r * K, 0)), "value", "at most K"),
    (lengths("length_ranks_from_1", lambda rest, r, P, K: max(0, min(rest - (r + 1) * K, K))), "value", "from 1"),
    (lengths("length_rest_one_by_one", lambda rest, r, P, K: len(range(r, rest, P))), "value", "one by one"),
    (lengths("length_rest_to_rank_0", lambda rest, r, P, K: rest * (r == 0)), "value", "rank 0 gets all"),
    (
        lengths("length_unfinished_block_for_all", lambda rest, r, P, K: K if rest // K > r else rest % K),
        "value",
        "every rank gets the unfinished block",
    ),
    (
        lengths(
            "length_rounds_not_tokens",
            lambda rest, r, P, K: min(max(rest - r * K, 0), K),
            whole=lambda S, P, K: S // (P * K),
        ),
        "value",
        "whole rounds are counted",
    ),
    (lengths("length_rest_to_the_last", lambda rest, r, P, K: rest * (r == P - 1)), "value", "the last rank gets all"),
]
WRONG["11d"] += [
    (waits_exchanged, "value", "exchanged"),
    (returned("waits_home_of_p", "(max(0, q - step) + home)", "max(0, q - step) + P * home"), "value", "keeps its own"),
    (
        waited("waits_cached_keys", ("((S + T) / P) / F", "(S / P) / F"), ("(S + T) / P / W", "S / P / W")),
        "value",
        "the new tokens have keys",
    ),
    (returned("waits_p_hops", "(P - 1)", "P"), "value", "after P - 1 hops"),
    (returned("waits_one_hop", "(P - 1) * ", ""), "value", "there are P - 1"),
    (
        returned(
            "waits_p_hops_alone",
            "(P - 1) * max(0, kv - step), (P - 1) * (max(0, q - step) + home)",
            "P * max(0, kv - step), P * max(0, q - step) + (P - 1) * home",
        ),
        "value",
        "after P - 1 hops",
    ),
    (
        returned(
            "waits_hidden_in_all_steps",
            "(P - 1) * max(0, kv - step), (P - 1) * (max(0, q - step) + home)",
            "max(0, (P - 1) * kv - P * step), max(0, (P - 1) * q - P * step) + (P - 1) * home",
        ),
        "value",
        "behind one step",
    ),
    (
        returned(
            "waits_never_zero",
            "max(0, kv - step), (P - 1) * (max(0, q - step) + home)",
            "(kv - step), (P - 1) * (q - step + home)",
        ),
        "value",
        "cannot be negative",
    ),
    (returned("waits_keys_not_hidden", "max(0, kv - step)", "kv"), "value", "nothing is hidden"),
    (returned("waits_negative", "max(0, kv - step)", "(kv - step)"), "value", "cannot be negative"),
    (returned("waits_negative_q", "max(0, q - step)", "(q - step)"), "value", "cannot be negative"),
    (waited("waits_all_queries_in_a_step", ("(T / P)", "T")), "value", "too much"),
    (waited("waits_whole_attention_in_a_step", ("(T / P) * ((S + T) / P)", "T * (S + T)")), "value", "too much"),
    (waited("waits_half_the_operations", ("4 * H", "2 * H")), "value", "two products of 2"),
    (waited("waits_key_heads_compute", ("4 * H", "4 * G")), "value", "every query head"),
    (waited("waits_new_keys_only_computed", ("((S + T) / P)", "(T / P)")), "value", "meet the cached keys"),
    (waited("waits_one_tensor", ("2 * G", "G")), "value", "k and v travel"),
    (waited("waits_query_heads_of_keys", ("2 * G", "2 * H")), "value", "keys and values have G"),
    (
        waited("waits_new_keys_only", ("kv = 2 * G * D * e * (S + T)", "kv = 2 * G * D * e * T")),
        "value",
        "the new ones alone",
    ),
    (
        waited("waits_cached_keys_only", ("kv = 2 * G * D * e * (S + T)", "kv = 2 * G * D * e * S")),
        "value",
        "the cached ones alone",
    ),
    (waited("waits_keys_of_all", ("(S + T) / P / W", "(S + T) / W")), "value", "those of one rank travel, a P-th"),
    (waited("waits_numbers_not_bytes", ("2 * G * D * e", "2 * G * D")), "value", "a number has e bytes"),
    (returned("waits_no_way_home", " + home", ""), "value", "it is missing"),
    (returned("waits_way_home_hidden", "+ home", "+ max(0, home - step)"), "value", "nothing is left"),
    (
        returned("waits_way_home_and_hop_hidden", "max(0, q - step) + home", "max(0, q + home - step)"),
        "value",
        "nothing is left",
    ),
    (
        waited("waits_home_of_all", ("home = H * (D + 1) * a * T / P", "home = H * (D + 1) * a * T")),
        "value",
        "results of T / P",
    ),
    (waited("waits_home_out_narrow", ("H * (D + 1) * a", "H * (D * e + a)")), "value", "of out and lse"),
    (waited("waits_home_without_lse", ("(D + 1)", "D")), "value", "lse is missing"),
    (waited("waits_home_narrow", ("(D + 1) * a", "(D + 1) * e")), "value", "of a partial result"),
    (
        returned("waits_home_once", "(P - 1) * (max(0, q - step) + home)", "(P - 1) * max(0, q - step) + home"),
        "value",
        "counted once",
    ),
    (waited("waits_home_key_heads", ("home = H", "home = G")), "value", "not of G"),
    (waited("waits_queries_key_heads", ("q = H * D", "q = G * D")), "value", "queries have H"),
    (waited("waits_queries_twice", ("q = H", "q = 2 * H")), "value", "belongs to k and v"),
    (waited("waits_queries_of_all", ("* T / P / W\nhome", "* T / W\nhome")), "value", "those of one rank travel"),
    (
        waited("waits_queries_of_the_cache", ("q = H * D * e * T", "q = H * D * e * (S + T)")),
        "value",
        "have no queries",
    ),
    (waits_names_one, "value", "pass_kv, pass_q"),
    (waits_as_text, "value", "one number"),
]

RIGHT = {
    "11a": [split_solution, split_all_weights_at_once, split_key_by_key, split_as_partial],
    "11b": [exchange_solution, exchange_of_the_library, exchange_tree, exchange_one_softmax],
    "11c": [length_solution, length_by_counting_blocks, length_as_tensor, length_of_the_library],
    "11d": [waits_solution, waits_of_the_library, waits_hop_by_hop],
}

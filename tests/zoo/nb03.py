"""Answers to the exercises of notebook 03: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass.
"""

from __future__ import annotations

from collections import deque

import torch

import ringlearn as rl
from ringlearn.flash import attend
from ringlearn.partial.accumulate import Accumulator

from .edits import edited

# ---- 3a ----


def _list_ring(name, source=lambda r, t, P: (r - t) % P, move=lambda kv: kv[-1:] + kv[:-1], steps=range, first=False):
    def program(kv, use):
        P = len(kv)
        for step in steps(P):
            if first:
                kv = move(kv)
            for rank in range(P):
                use(rank, source(rank, step, P), kv[rank])
            if not first:
                kv = move(kv)

    program.__name__ = name
    return program


def list_backwards_in_step(kv, use):
    """Blocks and source both go the other way: consistent, but no ring to rank + 1."""
    P = len(kv)
    for step in range(P):
        for rank in range(P):
            use(rank, (rank + step) % P, kv[rank])
        kv = kv[1:] + kv[:1]


def list_returns_only(kv, use):
    return kv[-1:] + kv[:-1]


def list_uses_numbers_for_blocks(kv, use):
    for step in range(len(kv)):
        for rank in range(len(kv)):
            use(rank, (rank - step) % len(kv), rank)


def list_one_rank_too_many(kv, use):
    for step in range(len(kv)):
        for rank in range(len(kv) + 1):
            use(rank, (rank - step) % len(kv), kv[rank % len(kv)])


def list_overwrites_while_it_moves(kv, use):
    """kv[r + 1] = kv[r], one after the other: block 0 is everywhere after one step."""
    P = len(kv)
    for step in range(P):
        for rank in range(P):
            use(rank, (rank - step) % P, kv[rank])
        for rank in range(P - 1):
            kv[rank + 1] = kv[rank]


def list_solution(kv, use):
    P = len(kv)
    for step in range(P):
        for rank in range(P):
            source = (rank - step) % P
            use(rank, source, kv[rank])
        kv = kv[-1:] + kv[:-1]


def list_by_rank(kv, use):
    """No list moves: each rank walks by itself."""
    P = len(kv)
    for rank in range(P):
        for step in range(P):
            source = rank - step if rank >= step else rank - step + P
            use(rank, source, kv[source])


def list_deque(kv, use):
    blocks = deque(enumerate(kv))
    for _ in kv:
        for rank, (source, block) in enumerate(blocks):
            use(rank, source, block)
        blocks.rotate(1)


def list_in_place(kv, use):
    for step in range(len(kv)):
        for rank, block in enumerate(kv):
            use(rank, (rank + len(kv) - step) % len(kv), block)
        kv.insert(0, kv.pop())


# ---- 3b ----


def _visible(positions, mask, r, source):
    return mask(positions[r][:, None], positions[source][None, :])


def _ring(
    name,
    *,
    source=lambda r, t, P: (r - t) % P,
    visible=_visible,
    scale=lambda q: q.shape[-1] ** -0.5,
    join=rl.merge,
    last=1,
    steps=lambda P: P,
    skip=lambda r, j, visible: False,
    early=False,
):
    """A ring with one thing in it changed."""

    async def program(comm, q, k, v, positions, mask):
        P, r = comm.size, comm.rank
        result = rl.identity(q.shape, q.dtype)
        for t in range(steps(P)):
            j = source(r, t, P)
            if t < P - last:
                arriving = comm.rotate(k, v, length=len(positions[(r - t - 1) % P]))
            if early and t < P - last:
                k, v = await arriving
            seen = visible(positions, mask, r, j)
            if not skip(r, j, seen):
                result = join(result, attend(q, k, v, seen, scale(q)))
            if not early and t < P - last:
                k, v = await arriving
        return result

    program.__name__ = name
    return program


def _tril(positions, mask, r, j):
    return torch.ones(len(positions[r]), len(positions[j]), dtype=torch.bool).tril()


def _tril_unless_full(positions, mask, r, j):
    return None if mask == rl.full else _tril(positions, mask, r, j)


def _nothing_after_me(positions, mask, r, j):
    """is_causal=True for every block that is not of the future."""
    if mask == rl.full:
        return _visible(positions, mask, r, j)
    return _tril(positions, mask, r, j) if j <= r else _visible(positions, mask, r, j)


def _ranks_compared(positions, mask, r, j):
    """Right for contiguous shards and the plain causal mask."""
    if mask == rl.full or j < r:
        return None
    return _tril(positions, mask, r, j) if j == r else torch.zeros(1, 1, dtype=torch.bool)


def _sum(a, b):
    return rl.Partial(a.out + b.out, torch.logaddexp(a.lse, b.lse))


def _stale_lse(a, b):
    return b if not a.out.any() else rl.Partial(rl.merge(a, b).out, a.lse)


def _swapped(a, b):
    """The weights of merge exchanged."""
    lse, wa, wb = rl.partial.merge_weights(a.lse, b.lse)
    if not a.out.any():
        return b
    return rl.Partial(wb.unsqueeze(-1) * a.out + wa.unsqueeze(-1) * b.out, lse)


async def forward_gathers_first(comm, q, k, v, positions, mask):
    P, r = comm.size, comm.rank
    held = [(k, v)]
    for t in range(P - 1):
        held.append(await comm.rotate(*held[-1], length=len(positions[(r - t - 1) % P])))
    result = rl.identity(q.shape)
    for t, (k, v) in enumerate(held):
        visible = _visible(positions, mask, r, (r - t) % P)
        result = rl.merge(result, attend(q, k, v, visible, q.shape[-1] ** -0.5))
    return result


async def forward_all_gather(comm, q, k, v, positions, mask):
    lengths = [len(p) for p in positions]
    ks, vs = await comm.all_gather(k, lengths), await comm.all_gather(v, lengths)
    visible = mask(positions[comm.rank][:, None], torch.cat(positions)[None, :])
    return attend(q, torch.cat(ks, 2), torch.cat(vs, 2), visible, q.shape[-1] ** -0.5)


async def forward_computes_then_rotates(comm, q, k, v, positions, mask):
    P, r = comm.size, comm.rank
    result = rl.identity(q.shape)
    for t in range(P):
        j = (r - t) % P
        result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))
        if t < P - 1:
            k, v = await comm.rotate(k, v, length=len(positions[(j - 1) % P]))
    return result


forward_breaks_at_the_future = edited(
    forward_computes_then_rotates,
    "forward_breaks_at_the_future",
    ("(r - t) % P", "(r - t) % P\nif j > r and mask != rl.full:\n    break"),
)


async def forward_awaits_first(comm, q, k, v, positions, mask):
    P, r = comm.size, comm.rank
    result = rl.identity(q.shape)
    for t in range(P):
        j = (r - t) % P
        here = k, v
        if t < P - 1:
            k, v = await comm.rotate(k, v, length=len(positions[(j - 1) % P]))
        result = rl.merge(result, attend(q, *here, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))
    return result


def forward_not_async(comm, q, k, v, positions, mask):
    return attend(q, k, v, _visible(positions, mask, comm.rank, comm.rank), q.shape[-1] ** -0.5)


async def forward_own_shard_only(comm, q, k, v, positions, mask):
    return attend(q, k, v, _visible(positions, mask, comm.rank, comm.rank), q.shape[-1] ** -0.5)


forward_drops_what_arrives = edited(
    forward_computes_then_rotates,
    "forward_drops_what_arrives",
    ("k, v = await comm.rotate(k, v, length=len(positions[(j - 1) % P]))", "await comm.rotate(k, v)"),
)
forward_forgets_await = edited(
    forward_drops_what_arrives, "forward_forgets_await", ("await comm.rotate(k, v)", "k, v = comm.rotate(k, v)")
)
forward_rotates_k_only = edited(
    forward_drops_what_arrives, "forward_rotates_k_only", ("await comm.rotate(k, v)", "k = await comm.rotate(k)")
)


async def forward_heads_expanded_before_sending(comm, q, k, v, positions, mask):
    reuse = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(reuse, 1), v.repeat_interleave(reuse, 1)
    return await forward_solution(comm, q, k, v, positions, mask)


async def forward_out_only(comm, q, k, v, positions, mask):
    return (await forward_solution(comm, q, k, v, positions, mask)).out


async def forward_lse_of_the_last_block(comm, q, k, v, positions, mask):
    out, lse = await forward_solution(comm, q, k, v, positions, mask)
    last = (comm.rank + 1) % comm.size
    return out, attend(q, k, v, _visible(positions, mask, comm.rank, comm.rank), q.shape[-1] ** -0.5).lse - last


async def forward_returns_the_exchange(comm, q, k, v, positions, mask):
    out, lse = await forward_solution(comm, q, k, v, positions, mask)
    return lse, out


async def forward_gathers_all_out(comm, q, k, v, positions, mask):
    out, lse = await forward_solution(comm, q, k, v, positions, mask)
    return torch.cat(await comm.all_gather(out, [len(p) for p in positions]), 2), lse


async def forward_skips_later_ranks(comm, q, k, v, positions, mask):
    """Whatever the mask."""
    return await _ring("", skip=lambda r, j, visible: j > r)(comm, q, k, v, positions, mask)


async def forward_skips_by_rank(comm, q, k, v, positions, mask):
    """Skips blocks of higher ranks under any mask but none: right for contiguous shards."""
    return await _ring("", skip=lambda r, j, visible: mask != rl.full and j > r)(comm, q, k, v, positions, mask)


async def forward_solution(comm, q, k, v, positions, mask):
    P, scale = comm.size, q.shape[-1] ** -0.5
    result = rl.identity(q.shape)
    for t in range(P):
        source = (comm.rank - t) % P
        if t < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[(source - 1) % P]))
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        if visible.any():
            result = rl.merge(result, attend(q, k, v, visible, scale))
        if t < P - 1:
            k, v = await arriving
    return result


async def forward_never_skips(comm, q, k, v, positions, mask):
    P, r = comm.size, comm.rank
    result = rl.identity(q.shape)
    for t in range(P):
        j = (r - t) % P
        if t < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[(j - 1) % P]))
        result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))
        if t < P - 1:
            k, v = await arriving
    return result


forward_skips_before_the_rotate = edited(
    forward_never_skips,
    "forward_skips_before_the_rotate",
    (
        "j = (r - t) % P",
        "j = (r - t) % P\nvisible = _visible(positions, mask, r, j)\nif not visible.any():\n    continue",
    ),
    (
        "result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))",
        "result = rl.merge(result, attend(q, k, v, visible, q.shape[-1] ** -0.5))",
    ),
)
forward_jumps_over_the_await = edited(
    forward_never_skips,
    "forward_jumps_over_the_await",
    (
        "result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))",
        "visible = _visible(positions, mask, r, j)\n"
        "if not visible.any():\n"
        "    continue\n"
        "result = rl.merge(result, attend(q, k, v, visible, q.shape[-1] ** -0.5))",
    ),
)
forward_rotates_twice = edited(
    forward_never_skips,
    "forward_rotates_twice",
    ("arriving = comm.rotate(k, v, length=len(positions[(j - 1) % P]))", "comm.rotate(k, v)"),
    ("await arriving", "await comm.rotate(k, v)"),
)
forward_without_length = edited(
    forward_never_skips, "forward_without_length", (", length=len(positions[(j - 1) % P])", "")
)
# Looks to the wrong side: source + 1.
forward_length_of_the_next_rank = edited(
    forward_never_skips,
    "forward_length_of_the_next_rank",
    (
        "arriving = comm.rotate(k, v, length=len(positions[(j - 1) % P]))",
        "arriving = comm.rotate(k, v, length=len(positions[(j + 1) % P]))",
    ),
)
forward_length_of_what_is_here = edited(forward_never_skips, "forward_length_of_what_is_here", ("(j - 1) % P", "j"))
forward_rotates_q_too = edited(
    forward_never_skips,
    "forward_rotates_q_too",
    ("if t < P - 1:\narriving = comm.rotate(k, v, length=len(positions[(j - 1) % P]))", ""),
    ("k, v = await arriving", "q, k, v = await comm.rotate(q, k, v)"),
)
forward_k_and_v_apart = edited(
    forward_never_skips,
    "forward_k_and_v_apart",
    (
        "arriving = comm.rotate(k, v, length=len(positions[(j - 1) % P]))",
        "length = len(positions[(j - 1) % P])\n"
        "next_k, next_v = comm.rotate(k, length=length), comm.rotate(v, length=length)",
    ),
    ("await arriving", "await next_k, await next_v"),
)
forward_scales_q_in_place = edited(
    forward_never_skips,
    "forward_scales_q_in_place",
    (
        "result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))",
        "k *= q.shape[-1] ** -0.5\nresult = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), 1.0))",
    ),
)
forward_starts_with_none = edited(
    forward_never_skips,
    "forward_starts_with_none",
    ("rl.identity(q.shape)", "None"),
    (
        "result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))",
        "visible = _visible(positions, mask, r, j)\n"
        "if visible.any():\n"
        "    part = attend(q, k, v, visible, q.shape[-1] ** -0.5)\n"
        "    result = part if result is None else rl.merge(result, part)",
    ),
)


async def forward_two_sends_by_hand(comm, q, k, v, positions, mask):
    """Own step first, then a loop over arrivals; an exchange in place of rotate; a pair that is no Partial."""
    P, r, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    result, kv = None, (k, v)
    for t in range(P):
        coming = None
        if t < P - 1:
            shapes = tuple((*x.shape[:2], len(positions[(r - t - 1) % P]), x.shape[3]) for x in kv)
            coming = comm.exchange({(r + 1) % P: kv}, {(r - 1) % P: shapes})
        new = attend(q, *kv, _visible(positions, mask, r, (r - t) % P), scale)
        result = new if result is None else rl.merge(result, new)
        if coming is not None:
            kv = (await coming)[(r - 1) % P]
    return result.out, result.lse


async def forward_with_an_accumulator(comm, q, k, v, positions, mask):
    """In place, as the library does it; SDPA-like tiles by hand."""
    P, result = comm.size, Accumulator(q.shape, q.dtype)
    for t in range(P):
        source = (comm.rank - t) % P
        arriving = comm.rotate(k, v, length=len(positions[source - 1])) if t + 1 < P else None
        visible = _visible(positions, mask, comm.rank, source)
        result.add(slice(None), attend(q, k, v, visible, q.shape[-1] ** -0.5))
        if arriving is not None:
            k, v = await arriving
    return result.partial


forward_keeps_all_partials = edited(
    forward_never_skips,
    "forward_keeps_all_partials",
    ("result = rl.identity(q.shape)", "parts = []"),
    (
        "result = rl.merge(result, attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))",
        "parts.append(attend(q, k, v, _visible(positions, mask, r, j), q.shape[-1] ** -0.5))",
    ),
    ("return result", "return rl.merge_all(parts)"),
)
forward_masks_all_keys_at_once = edited(
    forward_never_skips,
    "forward_masks_all_keys_at_once",
    (
        "result = rl.identity(q.shape)",
        "result = rl.identity(q.shape)\n"
        "all_keys = mask(positions[r][:, None], torch.cat(positions)[None, :])\n"
        "visible = all_keys.expand(q.shape[2], -1).split([len(p) for p in positions], -1)",
    ),
    ("_visible(positions, mask, r, j)", "visible[j]"),
)


async def forward_recursive(comm, q, k, v, positions, mask):
    """Right, but each call keeps its k and v while the later ones run: all blocks are there at the end."""

    async def rest(k, v, t):
        source = (comm.rank - t) % comm.size
        more = t < comm.size - 1
        arriving = comm.rotate(k, v, length=len(positions[(source - 1) % comm.size])) if more else None
        here = attend(q, k, v, _visible(positions, mask, comm.rank, source), q.shape[-1] ** -0.5)
        return rl.merge(here, await rest(*(await arriving), t + 1)) if more else here

    return await rest(k, v, 0)


WRONG = {
    "3a": [
        (_list_ring("plus", source=lambda r, t, P: (r + t) % P), "value", "minus, not plus"),
        (_list_ring("no_modulo", source=lambda r, t, P: r - t), "value", "modulo"),
        (_list_ring("exchanged", source=lambda r, t, P: (t - r) % P), "value", "exchanged"),
        (_list_ring("source_is_rank", source=lambda r, t, P: r), "value", "rank - step"),
        (_list_ring("one_late", source=lambda r, t, P: (r - t - 1) % P), "value", "rank - step"),
        (_list_ring("other_way", move=lambda kv: kv[1:] + kv[:1]), "value", "travel to rank - 1"),
        (_list_ring("nothing_moves", move=lambda kv: kv), "value", "every block moves"),
        (_list_ring("two_at_once", move=lambda kv: kv[-2:] + kv[:-2]), "value", "moves"),
        (_list_ring("too_few_steps", steps=lambda P: range(P - 1)), "value", "P steps"),
        (_list_ring("too_many_steps", steps=lambda P: range(P + 1)), "value", "P steps"),
        (_list_ring("moves_first", first=True), "value", "before the first use"),
        (list_backwards_in_step, "value", "travel to rank - 1"),
        (list_returns_only, "value", "0 steps"),
        (list_uses_numbers_for_blocks, "value", "the block itself"),
        (list_one_rank_too_many, "value", "ranks 0 to 2"),
        (list_overwrites_while_it_moves, "value", "every block moves"),
        (
            _list_ring("three_only", steps=lambda P: range(3), source=lambda r, t, P: (r - t) % 3),
            "adversarial",
            "P steps",
        ),
    ],
    "3b": [
        (_ring("wrong_direction", source=lambda r, t, P: (r + t) % P), "value", "minus, not plus"),
        (_ring("counts_from_one", source=lambda r, t, P: (r - t - 1) % P), "value", "one step too far"),
        (_ring("local_triangle", visible=_tril_unless_full), "value", "own block only"),
        (_ring("is_causal_for_the_past", visible=_nothing_after_me), "value", "of the past"),
        (_ring("ranks_compared", visible=_ranks_compared), "adversarial", "contiguous shards only"),
        (_ring("no_mask", visible=lambda positions, mask, r, j: None), "value", "not applied"),
        (
            _ring("mask_without_rows", visible=lambda positions, mask, r, j: mask(positions[r], positions[j])),
            "value",
            "[:, None]",
        ),
        (
            _ring("mask_turned", visible=lambda positions, mask, r, j: mask(positions[j][:, None], positions[r]).T),
            "value",
            "queries first",
        ),
        (_ring("no_scale", scale=lambda q: 1.0), "value", "sqrt(D)"),
        (_ring("scale_of_four", scale=lambda q: 0.5), "adversarial", "scale"),
        (_ring("sum_of_outs", join=_sum), "value", "added"),
        (_ring("plus", join=lambda a, b: a + b), "value", "one pair behind the other"),
        (_ring("keeps_the_last", join=lambda a, b: b), "value", "replaces the result"),
        (_ring("lse_not_updated", join=_stale_lse), "value", "Keep both of merge"),
        (_ring("weights_exchanged", join=_swapped), "value", "what is merged"),
        (_ring("one_step_too_few", steps=lambda P: max(P - 1, 1)), "value", "P computations"),
        (_ring("rotates_p_times", last=0), "cost", "P - 1 hops"),
        (_ring("awaits_before_it_computes", early=True), "value", "before they are used"),
        (forward_skips_before_the_rotate, "value", "skip the computation, never the message"),
        (forward_breaks_at_the_future, "value", "skip the computation, never the message"),
        (forward_jumps_over_the_await, "value", "may jump over the await"),
        (forward_rotates_twice, "value", "second message"),
        (forward_gathers_first, "cost", "collected"),
        (forward_recursive, "cost", "kept afterwards"),
        (forward_keeps_all_partials, "cost", "merge each into one running result"),
        (forward_masks_all_keys_at_once, "cost", "make that of one block"),
        (forward_all_gather, "cost", "rank + 1 only"),
        (forward_computes_then_rotates, "cost", "Post the rotate, compute"),
        (forward_awaits_first, "cost", "Post the rotate, compute"),
        (forward_without_length, "adversarial", "length="),
        (forward_length_of_what_is_here, "adversarial", "length="),
        (forward_length_of_the_next_rank, "adversarial", "length="),
        (forward_forgets_await, "value", "await"),
        (forward_not_async, "value", "async def"),
        (forward_own_shard_only, "value", "never used"),
        (forward_drops_what_arrives, "value", "must replace k and v"),
        (forward_rotates_k_only, "value", "travel together"),
        (forward_rotates_q_too, "value", "q stays"),
        (forward_k_and_v_apart, "cost", "in one message"),
        (forward_heads_expanded_before_sending, "cost", "G heads"),
        (forward_out_only, "value", "pair (out, lse)"),
        (forward_lse_of_the_last_block, "value", "merged result"),
        (forward_returns_the_exchange, "value", "return statement"),
        (forward_scales_q_in_place, "value", "still sending"),
        (forward_gathers_all_out, "value", "this rank's rows"),
        (forward_skips_by_rank, "adversarial", "contiguous shards only"),
        (forward_skips_later_ranks, "value", "by their number"),
        (forward_starts_with_none, "adversarial", "stays None"),
    ],
}

RIGHT = {
    "3a": [list_solution, list_by_rank, list_deque, list_in_place],
    "3b": [
        forward_solution,
        forward_two_sends_by_hand,
        forward_with_an_accumulator,
        forward_never_skips,
        _ring("skips_the_unseen", skip=lambda r, j, visible: not visible.any()),
    ],
}

"""Answers to the torchrun exercise 11: wrong ones as people write them, and right ones in different words.

WRONG is a list of (function, a word that the message must hold). RIGHT is a list of functions that must pass.
"""

from __future__ import annotations

import torch

import ringlearn as rl
from ringlearn.attention.decoding import EXCHANGES, Ownership
from ringlearn.flash import attend


def decodes(name, **changes):
    """The solution with one thing done otherwise."""

    async def answer(comm, q, k, v, k_own, v_own, length, interleave):
        P, rank, n, before = comm.size, comm.rank, q.shape[2], k_own.shape[2]
        I = changes.get("interleave", interleave)
        positions = torch.arange(length + n)
        owner = (positions - changes.get("origin", lambda length: 0)(length)) // I % P
        owner[:length] = positions[:length] // interleave % P
        own = positions[owner == rank]
        new = own[own >= length] - length
        new = changes.get("new", lambda new, n: new)(new, n)
        k_old, v_old = k_own, v_own
        order = changes.get("order", lambda old, new: torch.cat([old, new], 2))
        k_own, v_own = order(k_own, k[:, :, new]), order(v_own, v[:, :, new])
        own = torch.cat([own[own < length], length + new])
        visible = changes.get("visible", lambda own, **_: own <= positions[length:, None])(
            own=own, n=n, before=before, length=length, new=new, positions=positions
        )
        if changes.get("attends_first"):
            mine = attend(q, k_old, v_old, None, q.shape[-1] ** -0.5)
        else:
            mine = attend(q, k_own, v_own, visible, changes.get("scale", q.shape[-1] ** -0.5))
        out, lse = changes.get("mine", lambda mine: mine)(mine)
        if changes.get("apart"):
            outs, lses = await comm.all_gather(out), await comm.all_gather(lse)
        else:
            packed = await comm.all_gather(torch.cat([out, lse.unsqueeze(-1)], -1))
            outs, lses = [x[..., :-1] for x in packed], [x[..., -1] for x in packed]
        if changes.get("sends_keys"):
            await comm.all_gather(k)
        ranks = changes.get("ranks", lambda rank, P: range(P))(rank, P)
        result = rl.merge_all([rl.Partial(outs[r], lses[r]) for r in ranks])
        out, lse = changes.get("result", lambda result, outs: result)(result, outs)
        return changes.get("returns", lambda *x: x)(out, lse, k_own, v_own)

    answer.__name__ = name
    return answer


async def decode_right(comm, q, k, v, k_own, v_own, length, interleave):
    """By the library's ownership and its tree, with the tokens appended one by one."""
    own, n = Ownership(comm.size, interleave), q.shape[2]
    for i in range(n):
        if own.owner(length + i) == comm.rank:
            k_own = torch.cat([k_own, k[:, :, i : i + 1]], 2)
            v_own = torch.cat([v_own, v[:, :, i : i + 1]], 2)
    stops = torch.tensor([own.count(comm.rank, length + i + 1) for i in range(n)])
    visible = torch.arange(k_own.shape[2]) < stops[:, None]
    out, lse = await EXCHANGES["tree"](comm, attend(q, k_own, v_own, visible, 0.5))
    return out, lse, k_own, v_own


async def decode_skips_empty_ranks(comm, q, k, v, k_own, v_own, length, interleave):
    if not k_own.shape[2]:
        nothing = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
        return *nothing, k_own, v_own
    return await decodes("inner")(comm, q, k, v, k_own, v_own, length, interleave)


async def decode_alone(comm, q, k, v, k_own, v_own, length, interleave):
    """No exchange at all."""
    own = torch.arange(length + q.shape[2])
    own = own[own // interleave % comm.size == comm.rank]
    new = own[own >= length] - length
    k_own, v_own = torch.cat([k_own, k[:, :, new]], 2), torch.cat([v_own, v[:, :, new]], 2)
    visible = own <= torch.arange(length, length + q.shape[2])[:, None]
    return *attend(q, k_own, v_own, visible, q.shape[-1] ** -0.5), k_own, v_own


async def decode_forgets_await(comm, q, k, v, k_own, v_own, length, interleave):
    parts = comm.all_gather(q)
    return parts[0], parts[0][..., 0], k_own, v_own


async def decode_gathers_keys(comm, q, k, v, k_own, v_own, length, interleave):
    """The keys travel, and every rank attends to all of them."""
    out, lse, k_own, v_own = await decodes("inner")(comm, q, k, v, k_own, v_own, length, interleave)
    n = [Ownership(comm.size, interleave).count(r, length + q.shape[2]) for r in range(comm.size)]
    await comm.all_gather(k_own, n)
    return out, lse, k_own, v_own


def _own_end(own, n, **_):
    return torch.arange(len(own)) < len(own) - torch.arange(n - 1, -1, -1)[:, None]


def _own_begin(own, n, before, **_):
    return torch.arange(len(own)) < before + torch.arange(1, n + 1)[:, None]


def _slots(own, n, length, **_):
    return torch.arange(len(own)) <= length + torch.arange(n)[:, None]


def _phantom(mine):
    return mine.out, mine.lse.masked_fill(mine.lse == -torch.inf, 0.0)


WRONG = [
    (decodes("decode_masks_by_own_end", visible=_own_end), "back from its own end"),
    (decodes("decode_masks_by_own_begin", visible=_own_begin), "counts on from its own end"),
    (decodes("decode_masks_by_slots", visible=_slots), "compares slots with positions"),
    (decodes("decode_without_mask", visible=lambda own, **_: None), "come after it"),
    (
        decodes("decode_not_itself", visible=lambda own, length, positions, **_: own < positions[length:, None]),
        "its own included",
    ),
    (decodes("decode_attends_first", attends_first=True), "go into the cache first"),
    (decodes("decode_appends_everywhere", new=lambda new, n: torch.arange(n)), "alone"),
    (decodes("decode_appends_nothing", new=lambda new, n: new[:0]), "nothing is appended"),
    (decodes("decode_one_by_one", interleave=1), "one by one"),
    (decodes("decode_counts_new_from_0", origin=lambda length: length), "counted from 0"),
    (decodes("decode_new_in_front", order=lambda old, new: torch.cat([new, old], 2)), "behind what is there"),
    (decodes("decode_empty_counts_as_0", mine=_phantom), "a key with score 0"),
    (decodes("decode_averages", result=lambda result, outs: (torch.stack(outs).mean(0), result.lse)), "averaged"),
    (decodes("decode_adds", result=lambda result, outs: (torch.stack(outs).sum(0), result.lse)), "added"),
    (decodes("decode_without_scale", scale=1.0), "D ** -0.5"),
    (decodes("decode_own_first", ranks=lambda rank, P: [rank, *(r for r in range(P) if r != rank)]), "rank order"),
    (decodes("decode_apart", apart=True), "one message of them"),
    (decodes("decode_sends_new_keys", sends_keys=True), "Keys and values stay"),
    (decodes("decode_returns_out_and_lse", returns=lambda out, lse, k, v: (out, lse)), "out, lse, k, v"),
    (decode_gathers_keys, "Keys and values stay"),
    (decode_skips_empty_ranks, "owns no key yet"),
    (decode_alone, "the others' results are missing"),
    (decode_forgets_await, "await"),
]
RIGHT = [decodes("decode_solution"), decode_right]

# The tests find an answer by its name.
globals().update({fn.__name__: fn for fn, _ in WRONG} | {fn.__name__: fn for fn in RIGHT})

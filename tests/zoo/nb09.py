"""Answers to the exercises of notebook 09: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass. The solutions that the notebook shows are taken from the
notebook itself by test_nb09_notebook.py, and must pass too.
"""

from __future__ import annotations

import torch

import ringlearn as rl
from ringlearn.attention.dilated.rows import Configuration
from ringlearn.flash import attend

# ---- 9a ----


def seen_solution(q_pos, k_pos, head, w, r):
    same_segment = q_pos // w == k_pos // w
    q_kept = q_pos % w % r == head % r
    k_kept = k_pos % w % r == head % r
    return same_segment & q_kept & k_kept


def seen_by_ranges(q_pos, k_pos, head, w, r):
    """From the library's ranges."""
    length = max(int(q_pos.max()), int(k_pos.max())) + 1
    visible = torch.zeros(q_pos.shape[0], k_pos.shape[1], dtype=torch.bool)
    for kept in Configuration(w, r).kept(head, length):
        rows = torch.tensor(list(kept), dtype=torch.int64)
        visible |= torch.isin(q_pos, rows) & torch.isin(k_pos, rows)
    return visible


def seen_as(name, same=True, q=True, k=True, keeps=None):
    keeps = keeps or (lambda p, head, w, r: p % w % r == head % r)

    def answer(q_pos, k_pos, head, w, r):
        visible = q_pos // w == k_pos // w if same else (q_pos == q_pos) & (k_pos == k_pos)
        if q:
            visible = visible & keeps(q_pos, head, w, r)
        if k:
            visible = visible & keeps(k_pos, head, w, r)
        return visible

    answer.__name__ = name
    return answer


def seen_at_a_distance(q_pos, k_pos, head, w, r):
    return (q_pos // w == k_pos // w) & ((q_pos - k_pos) % r == 0)


def seen_in_a_window(q_pos, k_pos, head, w, r):
    near = (q_pos - k_pos).abs() < w
    return near & (q_pos % w % r == head % r) & (k_pos % w % r == head % r)


def seen_by_rows(q_pos, k_pos, head, w, r):
    rows, columns = torch.arange(q_pos.shape[0])[:, None], torch.arange(k_pos.shape[1])[None, :]
    return seen_solution(rows, columns, head, w, r)


def seen_before(q_pos, k_pos, head, w, r):
    return seen_solution(q_pos, k_pos, head, w, r) & (k_pos <= q_pos)


def seen_as_numbers(q_pos, k_pos, head, w, r):
    return seen_solution(q_pos, k_pos, head, w, r).float()


def seen_keys_alone(q_pos, k_pos, head, w, r):
    return k_pos % w % r == head % r


def seen_by_and(q_pos, k_pos, head, w, r):
    return q_pos // w == k_pos // w and q_pos % w % r == head % r and k_pos % w % r == head % r


def seen_swapped(q_pos, k_pos, head, w, r):
    return seen_solution(q_pos, k_pos, head, w, r).T


def seen_divided(q_pos, k_pos, head, w, r):
    same = q_pos / w == k_pos / w
    return same & (q_pos % w % r == head % r) & (k_pos % w % r == head % r)


def seen_without_parentheses(q_pos, k_pos, head, w, r):
    return q_pos // w == k_pos // w & (q_pos % w % r == head % r) & (k_pos % w % r == head % r)


def seen_in_place(q_pos, k_pos, head, w, r):
    same = q_pos // w == k_pos // w
    q_pos %= w
    k_pos %= w
    return same & (q_pos % r == head % r) & (k_pos % r == head % r)


# ---- 9b ----


async def ring_solution(comm, q, k, v, positions, head, configurations, mask):
    P, rank = comm.size, comm.rank
    kept = []
    for own in positions:
        keep = torch.zeros(len(own), dtype=torch.bool)
        for w, r in configurations:
            keep |= own % w % r == head % r
        kept.append(keep)
    k, v = k[:, :, kept[rank]], v[:, :, kept[rank]]
    result = rl.identity(q.shape)
    for step in range(P):
        source = (rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=int(kept[(source - 1) % P].sum()))
        q_pos, k_pos = positions[rank][:, None], positions[source][kept[source]][None, :]
        for w, r in configurations:
            visible = seen_solution(q_pos, k_pos, head, w, r) & mask(q_pos, k_pos)
            result = rl.merge(result, attend(q, k, v, visible, q.shape[-1] ** -0.5))
        if step < P - 1:
            k, v = await arriving
    return result


async def ring_with_multiplicities(comm, q, k, v, positions, head, configurations, mask):
    """log C beside the scores, and kept queries only."""
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    w, r = (torch.tensor(x).view(-1, 1) for x in zip(*configurations))
    travels = [(own % w % r == head % r).any(0).nonzero().flatten() for own in positions]
    k, v = (t.index_select(2, travels[rank]) for t in (k, v))
    lse, out, queries = torch.full(q.shape[:-1], -torch.inf), torch.zeros_like(q), positions[rank]
    for step in range(P):
        source = (rank - step) % P
        coming = comm.rotate(k, v, length=len(travels[source - 1])) if step < P - 1 else None
        keys = positions[source][travels[source]]
        count = torch.zeros(len(queries), len(keys))
        for segment, rate in configurations:
            count += seen_solution(queries[:, None], keys[None, :], head, segment, rate)
        count *= mask(queries[:, None], keys[None, :])
        weight = torch.exp(q @ k.mT * scale) * count
        total = weight.sum(-1)
        new = torch.logaddexp(lse, total.log())
        share = torch.where(new > -torch.inf, torch.exp(lse - new), 0.0).unsqueeze(-1)
        out = share.nan_to_num() * out + torch.exp(-new).nan_to_num(posinf=0.0).unsqueeze(-1) * (weight @ v)
        lse = new
        if coming is not None:
            k, v = await coming
    return out, lse


def altered(name, **changes):
    """The solution with one thing done otherwise."""

    async def answer(comm, q, k, v, positions, head, configurations, mask):
        P, rank, scale = comm.size, comm.rank, changes.get("scale", lambda D: D**-0.5)(q.shape[-1])
        head = 0 if changes.get("no_offset") else head
        places = [torch.arange(len(own)) for own in positions] if changes.get("rows") else positions
        see = changes.get("seen", seen_solution)
        kept = []
        for own in places:
            keep = torch.zeros(len(own), dtype=torch.bool)
            for w, r in configurations[:1] if changes.get("first_travels") else configurations:
                keep |= (own % r == head % r) if changes.get("no_segments") else (own % w % r == head % r)
            kept.append(
                torch.ones_like(keep) if changes.get("everything") else keep.to(changes.get("index", torch.bool))
            )
        k, v = k[:, :, kept[rank]], v[:, :, kept[rank]]
        if changes.get("queries_too"):
            q = q[:, :, kept[rank]]
        result, outs = rl.identity(q.shape), []
        for step in range(P):
            source = (rank - step) % P
            q_pos, k_pos = places[rank], places[source][kept[source]]
            if changes.get("queries_too"):
                q_pos = q_pos[kept[rank]]
            if changes.get("all_positions"):
                k_pos = places[source]
            q_pos, k_pos = q_pos[:, None], k_pos[None, :]
            if changes.get("mask_by_row"):
                i, j = torch.arange(len(positions[rank])), torch.arange(len(positions[source]))
                allowed = mask(i[:, None], j[kept[source]][None, :])
            elif changes.get("rows") == "but for the mask":
                allowed = mask(positions[rank][:, None], positions[source][kept[source]][None, :])
            else:
                allowed = mask(q_pos, k_pos)
            views = [see(q_pos, k_pos, head, w, r) & allowed for w, r in configurations]
            if changes.get("unmasked"):
                views = [see(q_pos, k_pos, head, w, r) for w, r in configurations]
            if changes.get("skips") and not any(view.any() for view in views):
                continue
            going = step < P - (0 if changes.get("home") else 1)
            coming = source - 1 if not changes.get("own_length") else source
            if going:
                arriving = comm.rotate(k, v, length=int(kept[coming % P].sum()))
                if changes.get("await_first"):
                    k_next, v_next = await arriving
            if changes.get("union"):
                views = [torch.stack(views).any(0)]
            if "only" in changes:
                views = [views[changes["only"]]]
            if changes.get("mean") or changes.get("sum"):
                outs.append([attend(q, k, v, view, scale) for view in views])
            for view in views:
                tile = attend(q, k, v, view.to(changes.get("visible", torch.bool)), scale)
                if changes.get("own_softmax"):
                    s = (q @ k.mT * scale).masked_fill(~view, -torch.inf)
                    tile = rl.Partial(torch.softmax(s, -1) @ v, torch.logsumexp(s, -1))
                merged = rl.merge(result, tile)
                result = result if changes.get("forgets") else merged
            if going:
                k, v = (k_next, v_next) if changes.get("await_first") else await arriving
        if outs:
            parts = [_merged(some) for some in zip(*outs)]
            total = sum(part.out for part in parts)
            return total / len(parts) if changes.get("mean") else total, result.lse
        return result.out if changes.get("out_alone") else result

    answer.__name__ = name
    return answer


def _merged(partials):
    first, *others = partials
    for other in others:
        first = rl.merge(first, other)
    return first


async def ring_sends_each_configuration(comm, q, k, v, positions, head, configurations, mask):
    """One ring after the other."""
    result = rl.identity(q.shape)
    for configuration in configurations:
        result = rl.merge(result, await ring_solution(comm, q, k, v, positions, head, [configuration], mask))
    return result


def ring_not_async(comm, q, k, v, positions, head, configurations, mask):
    return rl.identity(q.shape)


async def ring_stays_at_home(comm, q, k, v, positions, head, configurations, mask):
    own = positions[comm.rank]
    result = rl.identity(q.shape)
    for w, r in configurations:
        visible = seen_solution(own[:, None], own[None, :], head, w, r) & mask(own[:, None], own[None, :])
        result = rl.merge(result, attend(q, k, v, visible, q.shape[-1] ** -0.5))
    return result


async def ring_forgets_length(comm, q, k, v, positions, head, configurations, mask):
    class Comm:
        rank, size = comm.rank, comm.size

        def rotate(self, *tensors, length=None):
            return comm.rotate(*tensors)

    return await ring_solution(Comm(), q, k, v, positions, head, configurations, mask)


WRONG = {
    "9a": [
        (seen_as("seen_without_segments", same=False), "value", "segments are missing"),
        (seen_as("seen_by_every_query", q=False), "value", "only keys are selected"),
        (seen_as("seen_of_every_key", k=False), "value", "only queries are selected"),
        (seen_at_a_distance, "value", "not those of other heads"),
        (seen_in_a_window, "value", "a window around the query"),
        (seen_as("seen_at_head_0", keeps=lambda p, head, w, r: p % w % r == 0), "value", "rows of head 0"),
        (seen_before, "value", "the mask's part"),
        (seen_as_numbers, "value", "not a bool tensor"),
        (seen_keys_alone, "value", "broadcast"),
        (seen_by_and, "value", "row by row"),
        (seen_as("seen_from_the_start", keeps=lambda p, head, w, r: p % r == head % r), "adversarial", "counts anew"),
        (seen_as("seen_head_beyond_r", keeps=lambda p, head, w, r: p % w % r == head), "adversarial", "head % rho"),
        (
            seen_as("seen_from_row_head", keeps=lambda p, head, w, r: (p % w >= head) & ((p % w - head) % r == 0)),
            "adversarial",
            "begins at row head % rho",
        ),
        (seen_divided, "value", "The segment is p // w"),
        (seen_without_parentheses, "value", "binds more tightly"),
        (seen_in_place, "value", "changes q_pos"),
        (seen_by_rows, "adversarial", "a shard begins anywhere"),
        (seen_swapped, "adversarial", "broadcast"),
    ],
    "9b": [
        (altered("ring_counts_rows", rows=True), "value", "counts the rows of its chunk"),
        (altered("ring_keeps_by_row", rows="but for the mask"), "value", "counts the rows of its chunk"),
        (altered("ring_masks_by_row", mask_by_row=True), "value", "see their future"),
        (altered("ring_takes_the_union", union=True), "value", "It counts twice"),
        (altered("ring_takes_the_mean", mean=True), "value", "rl.merge"),
        (altered("ring_adds_configurations", sum=True), "value", "weights them by lse"),
        (altered("ring_first_configuration", only=0), "value", "only the first"),
        (altered("ring_last_configuration", only=-1), "value", "only the last"),
        (altered("ring_no_offset", no_offset=True), "value", "row j % rho"),
        (altered("ring_no_mask", unmasked=True), "value", "it is not used"),
        (altered("ring_all_queries", seen=seen_as("", q=False)), "value", "only keys are selected"),
        (altered("ring_no_segments", seen=seen_as("", same=False)), "value", "segments are missing"),
        (altered("ring_all_positions", all_positions=True), "value", "the positions of just these rows"),
        (altered("ring_selects_queries", queries_too=True), "value", "only k and v travel"),
        (altered("ring_own_length", own_length=True), "value", "the kept rows of rank"),
        (altered("ring_own_softmax", own_softmax=True), "value", "0 / 0"),
        (altered("ring_skips_messages", skips=True), "value", "passes on in every step"),
        (altered("ring_out_alone", out_alone=True), "value", "return out, lse"),
        (altered("ring_with_the_cells_scale", scale=lambda D: 8**-0.5), "value", "here D is 4"),
        (altered("ring_without_scale", scale=lambda D: 1.0), "value", "not scaled"),
        (altered("ring_scaled_up", scale=lambda D: D**0.5), "value", "root of D"),
        (altered("ring_forgets_what_merge_returns", forgets=True), "value", "merge returns a new one"),
        (altered("ring_with_an_integer_mask", visible=torch.int32), "value", "attend wants a bool tensor"),
        (altered("ring_with_a_mask_of_fractions", visible=torch.float32), "value", "attend wants a bool tensor"),
        (altered("ring_selects_by_integers", index=torch.int64), "value", "taken for the numbers of rows"),
        (altered("ring_selects_by_fractions", index=torch.float32), "value", "the index is no bool tensor"),
        (ring_not_async, "value", "async def"),
        (ring_stays_at_home, "value", "no common mistake"),
        (ring_forgets_length, "value", "the kept rows of rank"),
        (
            altered("ring_sends_the_first_s_rows", first_travels=True),
            "adversarial",
            "of the first configuration travel",
        ),
        (altered("ring_selects_from_the_start", no_segments=True), "adversarial", "start of the sequence"),
        (altered("ring_sends_everything", everything=True), "cost", "whole shards travel"),
        (ring_sends_each_configuration, "cost", "has to travel once"),
        (altered("ring_p_hops", home=True), "cost", "P - 1 hops"),
        (altered("ring_awaits_first", await_first=True), "cost", "before you compute"),
    ],
}

RIGHT = {
    "9a": [seen_solution, seen_by_ranges],
    "9b": [ring_solution, ring_with_multiplicities],
}

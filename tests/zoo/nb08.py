"""Answers to the exercises of notebook 08: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass. The solutions that the notebook shows are taken from the
notebook itself by test_nb08_notebook.py, and must pass too.
"""

from __future__ import annotations

import torch

from ringlearn.attention import head_plan
from ringlearn.flash import attend, attend_backward

# ---- 8a ----


async def gather_solution(comm, dout, q, k, v, out, lse, positions, mask):
    lengths = [len(own) for own in positions]
    k_all = torch.cat(await comm.all_gather(k, lengths), 2)
    v_all = torch.cat(await comm.all_gather(v, lengths), 2)
    visible = mask(positions[comm.rank][:, None], torch.cat(positions)[None, :])
    delta = (dout * out).sum(-1)
    grads = attend_backward(dout, q, k_all, v_all, lse, delta, visible, q.shape[-1] ** -0.5)
    dq, dk, dv = grads
    dk = await comm.reduce_scatter(dk.split(lengths, 2))
    dv = await comm.reduce_scatter(dv.split(lengths, 2))
    return dq, dk, dv


async def gather_in_one_message(comm, dout, q, k, v, out, lse, positions, mask):
    """k and v side by side, a sum by hand, weights by einsum."""
    G, reuse, scale = k.shape[1], q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    lengths = [len(own) for own in positions]
    both = torch.cat(await comm.all_gather(torch.cat([k, v], 1), lengths), 2)
    keys, values = (t.repeat_interleave(reuse, 1) for t in both.split(G, 1))
    visible = mask(positions[comm.rank][:, None], torch.cat(positions)[None, :])
    p = torch.exp((q @ keys.mT * scale).masked_fill(~visible, -torch.inf) - lse.unsqueeze(-1))
    ds = p * (dout @ values.mT - (dout * out).sum(-1, keepdim=True)) * scale
    found = torch.cat([t.unflatten(1, (G, reuse)).sum(2) for t in (ds.mT @ q, p.mT @ dout)], 1)
    shape = (1, 2 * G, len(positions[comm.rank]), q.shape[-1])
    parts = await comm.all_to_all([t.contiguous() for t in found.split(lengths, 2)], [shape] * comm.size)
    dk, dv = sum(parts[1:], parts[0]).split(G, 1)
    return ds @ keys, dk, dv


def gathered(name, **changes):
    """The solution with one thing done otherwise."""

    async def answer(comm, dout, q, k, v, out, lse, positions, mask):
        P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
        lengths = [len(own) for own in positions]
        if changes.get("expanded"):
            reuse = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(reuse, 1), v.repeat_interleave(reuse, 1)
        if changes.get("no_lengths"):
            ks, vs = await comm.all_gather(k), await comm.all_gather(v)
        else:
            ks, vs = await comm.all_gather(k, lengths), await comm.all_gather(v, lengths)
        if changes.get("detour"):
            await comm.all_gather(q, lengths)
        k_all, v_all = torch.cat(ks, 2), torch.cat(vs, 2)
        k_pos = torch.arange(sum(lengths)) if changes.get("places") else torch.cat(positions)
        q_pos = k_pos if changes.get("all_rows") else positions[rank]
        visible = mask(q_pos[:, None], k_pos[None, :])
        if changes.get("unmasked"):
            visible = None
        delta = (
            torch.zeros_like(lse) if changes.get("no_delta") else (dout * out).sum(-1, changes.get("keepdim", False))
        )
        scale = 1.0 if changes.get("unscaled") else scale
        dq, dk, dv = attend_backward(dout, q, k_all, v_all, lse, delta, visible, scale)
        if changes.get("whole"):
            return dq, dk, dv
        if changes.get("chunks"):
            dks, dvs = dk.chunk(P, 2), dv.chunk(P, 2)
        else:
            dks, dvs = dk.split(lengths, 2), dv.split(lengths, 2)
        if changes.get("turned"):
            dks, dvs = dks[::-1], dvs[::-1]
        if changes.get("own"):
            return dq, dks[rank], dvs[rank]
        if changes.get("uncut"):
            return dq, await comm.reduce_scatter(dk), await comm.reduce_scatter(dv)
        if changes.get("no_await"):
            return dq, comm.reduce_scatter(dks), comm.reduce_scatter(dvs)
        if changes.get("all_reduce"):
            dk, dv = await comm.all_reduce(dk), await comm.all_reduce(dv)
            return dq, dk.split(lengths, 2)[rank], dv.split(lengths, 2)[rank]
        dk = await comm.reduce_scatter(dks)
        if changes.get("own_dv"):
            return dq, dk, dvs[rank]
        dv = await comm.reduce_scatter(dvs)
        if changes.get("expanded"):
            dk, dv = (t.unflatten(1, (-1, reuse)).sum(2) for t in (dk, dv))
        if changes.get("mean"):
            dk, dv = dk / P, dv / P
        if changes.get("out_of_order"):
            return dq, dv, dk
        return (dq, dk) if changes.get("two") else (dq, dk, dv)

    answer.__name__ = name
    return answer


async def gather_no_await(comm, dout, q, k, v, out, lse, positions, mask):
    k_all = torch.cat(comm.all_gather(k), 2)
    return q, k_all, v


async def gather_rank_0_alone(comm, dout, q, k, v, out, lse, positions, mask):
    if comm.rank > 0:
        return q, k, v
    return await gather_solution(comm, dout, q, k, v, out, lse, positions, mask)


def gather_not_async(comm, dout, q, k, v, out, lse, positions, mask):
    return q, k, v


# ---- 8b ----


def plan_solution(H, G, P):
    each, more = divmod(H, P)
    group, plan, start = H // G, [], 0
    for rank in range(P):
        stop = start + each + (rank < more)
        mine = []
        while start < stop:
            g = start // group
            end = min(stop, (g + 1) * group)
            mine.append((range(start, end), g))
            start = end
        plan.append(mine)
    return plan


def plan_head_by_head(H, G, P):
    """Lists of heads, sorted into pairs; the longer blocks at the end."""
    edges = [H * rank // P for rank in range(P + 1)]
    plan = []
    for a, b in zip(edges, edges[1:]):
        pairs = {}
        for h in range(a, b):
            pairs.setdefault(h * G // H, []).append(h)
        plan.append([(heads, g) for g, heads in pairs.items()])
    return plan


def blocks(edges, H, G):
    group = H // G
    plan = []
    for a, b in edges:
        groups = sorted({h // group for h in range(a, b)})
        plan.append([(range(max(a, g * group), min(b, (g + 1) * group)), g) for g in groups])
    return plan


def plan_keeps_empty_pairs(H, G, P):
    group, edges = H // G, [H * rank // P for rank in range(P + 1)]
    return [
        [(range(max(a, g * group), max(a, min(b, (g + 1) * group))), g) for g in range(G)]
        for a, b in zip(edges, edges[1:])
    ]


def plan_drops_the_rest(H, G, P):
    n = H // P
    return blocks([(r * n, r * n + n) for r in range(P)], H, G)


def plan_rounds_up(H, G, P):
    n = -(-H // P)
    return blocks([(min(H, r * n), min(H, r * n + n)) for r in range(P)], H, G)


def plan_rest_to_the_last(H, G, P):
    n = H // P
    return blocks([(r * n, H if r == P - 1 else r * n + n) for r in range(P)], H, G)


def plan_by_key_heads(H, G, P):
    """Key/value heads are dealt out, and query heads follow."""
    group = H // G
    edges = [G * r // P for r in range(P + 1)]
    return [[(range(g * group, (g + 1) * group), g) for g in range(a, b)] for a, b in zip(edges, edges[1:])]


def plan_round_robin(H, G, P):
    group = H // G
    plan = []
    for rank in range(P):
        pairs = {}
        for h in range(rank, H, P):
            pairs.setdefault(h // group, []).append(h)
        plan.append([(heads, g) for g, heads in pairs.items()])
    return plan


def plan_modulo(H, G, P):
    edges = [H * r // P for r in range(P + 1)]
    return [[([h], h % G) for h in range(a, b)] for a, b in zip(edges, edges[1:])]


def plan_one_pair(H, G, P):
    """A block of query heads gets the key/value head of its first."""
    plan = plan_solution(H, G, P)
    return [[(range(mine[0][0].start, mine[-1][0].stop), mine[0][1])] if mine else [] for mine in plan]


def plan_a_pair_each(H, G, P):
    return [[([h], g) for heads, g in mine for h in heads] for mine in plan_solution(H, G, P)]


def plan_every_head_shared(H, G, P):
    return [[(range(g * H // G, (g + 1) * H // G), g) for g in range(G)] for _ in range(P)]


def plan_counts_in_the_rank(H, G, P):
    plan = plan_solution(H, G, P)
    return [[(range(a.start - mine[0][0].start, a.stop - mine[0][0].start), g) for a, g in mine] for mine in plan]


def plan_stops_early(H, G, P):
    return [[(range(heads.start, heads.stop - 1), g) for heads, g in mine] for mine in plan_solution(H, G, P)]


def plan_without_pairs(H, G, P):
    return [[h for heads, _ in mine for h in heads] for mine in plan_solution(H, G, P)]


def plan_as_dict(H, G, P):
    return dict(enumerate(plan_solution(H, G, P)))


def plan_busy_ranks_only(H, G, P):
    return [mine for mine in plan_solution(H, G, P) if mine]


def plan_at_least_one(H, G, P):
    """Ranks beyond the heads compute the last head once more."""
    return [mine or [(range(H - 1, H), G - 1)] for mine in plan_solution(H, G, P)]


def plan_divides_only(H, G, P):
    assert H % P == 0 and (G % P == 0 or P % G == 0)
    return plan_solution(H, G, P)


# ---- 8c ----


async def ulysses_solution(comm, q, k, v, positions, mask):
    plan, lengths = head_plan(q.shape[1], k.shape[1], comm.size), [len(p) for p in positions]
    q_heads = [[h for heads, _ in mine for h in heads] for mine in plan]
    k_heads = [[g for _, g in mine] for mine in plan]

    async def whole(x, heads):
        shapes = [(1, len(heads[comm.rank]), n, x.shape[3]) for n in lengths]
        return torch.cat(await comm.all_to_all([x[:, mine] for mine in heads], shapes), 2)

    q, k, v = await whole(q, q_heads), await whole(k, k_heads), await whole(v, k_heads)
    everywhere = torch.cat(positions)
    visible = mask(everywhere[:, None], everywhere[None, :])
    outs, first = [], 0
    for i, (heads, _) in enumerate(plan[comm.rank]):
        some = q[:, first : first + len(heads)]
        outs.append(attend(some, k[:, i : i + 1], v[:, i : i + 1], visible, q.shape[3] ** -0.5).out)
        first += len(heads)
    back = torch.cat(outs, 1).split(lengths, 2)
    shapes = [(1, len(heads), lengths[comm.rank], q.shape[3]) for heads in q_heads]
    return torch.cat(await comm.all_to_all(back, shapes), 1)


async def ulysses_in_order(comm, q, k, v, positions, mask):
    """Everything in one message there, rows sorted by position, k and v repeated for each query head at home."""
    H, G, P, D = q.shape[1], k.shape[1], comm.size, q.shape[3]
    plan = head_plan(H, G, P)
    sends, shapes = [], []
    for mine in plan:
        a, b = (mine[0][0].start, mine[-1][0].stop) if mine else (0, 0)
        c, d = (mine[0][1], mine[-1][1] + 1) if mine else (0, 0)
        sends.append(torch.cat([q[:, a:b], k[:, c:d], v[:, c:d]], 1))
    mine = plan[comm.rank]
    n, m = sum(len(heads) for heads, _ in mine), len(mine)
    shapes = [(1, n + 2 * m, len(p), D) for p in positions]
    rows = torch.cat(await comm.all_to_all(sends, shapes), 2)
    order = torch.cat(positions)
    rows = torch.empty_like(rows).index_copy_(2, order, rows)
    whose = [i for i, (heads, _) in enumerate(mine) for _ in heads]
    qs, ks, vs = rows[:, :n], rows[:, n : n + m][:, whose], rows[:, n + m :][:, whose]
    place = torch.arange(len(order))
    out = attend(qs, ks, vs, mask(place[:, None], place[None, :]), D**-0.5).out
    counts = [sum(len(heads) for heads, _ in theirs) for theirs in plan]
    back = [out[:, :, p] for p in positions]
    return torch.cat(await comm.all_to_all(back, [(1, c, q.shape[2], D) for c in counts]), 1)


def traded(name, **changes):
    """The solution with one thing done otherwise."""

    async def answer(comm, q, k, v, positions, mask):
        H, G, P, rank, D = q.shape[1], k.shape[1], comm.size, comm.rank, q.shape[3]
        if changes.get("expanded"):
            k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
            G = H
        plan, lengths = head_plan(H, G, P), [len(p) for p in positions]
        q_heads = [[h for heads, _ in mine for h in heads] for mine in plan]
        k_heads = [[g for _, g in mine] for mine in plan]
        if changes.get("all_keys"):
            k_heads = [list(range(G))] * P
        if changes.get("chunks"):  # of H // P query and G // P key/value heads
            q_heads = [list(range(r * (H // P), (r + 1) * (H // P))) for r in range(P)]
            k_heads = [list(range(r * (G // P), (r + 1) * (G // P))) for r in range(P)]

        async def whole(x, heads):
            shapes = [(1, len(heads[r if changes.get("their_heads") else rank]), n, D) for r, n in enumerate(lengths)]
            if changes.get("no_shapes"):
                shapes = None
            if changes.get("no_batch"):
                shapes = [shape[1:] for shape in shapes]
            arrived = await comm.all_to_all([x[:, mine] for mine in heads], shapes)
            return torch.cat(arrived, 1 if changes.get("heads_first") else 2)

        async def gathered(x, heads):
            return torch.cat(await comm.all_gather(x, lengths), 2)[:, heads[rank]]

        bring = gathered if changes.get("all_gather") else whole
        q, k, v = await bring(q, q_heads), await bring(k, k_heads), await bring(v, k_heads)
        rows = torch.arange(sum(lengths)) if changes.get("places") else torch.cat(positions)
        visible = None if changes.get("unmasked") else mask(rows[:, None], rows[None, :])
        outs, first = [], 0
        if changes.get("one_call"):
            outs = [attend(q, k, v, visible, D**-0.5).out]
        for i, (heads, g) in enumerate([] if outs else plan[rank]):
            i = 0 if changes.get("first_key") else g if changes.get("all_keys") or changes.get("global_key") else i
            some = q[:, first : first + len(heads)]
            if changes.get("global_queries"):
                some = q[:, list(heads)]
            if changes.get("global_slice"):
                some = q[:, heads.start : heads.stop]
            scale = 1.0 if changes.get("unscaled") else D**-0.5
            outs.append(attend(some, k[:, i : i + 1], v[:, i : i + 1], visible, scale).out)
            first += len(heads)
        out = torch.cat(outs, 1)
        if changes.get("no_way_back"):
            return out
        back = out.chunk(P, 2) if changes.get("chunked_back") else out.split(lengths, 2)
        if changes.get("turned"):
            back = back[::-1]
        if changes.get("gathers_back"):
            everything = torch.cat(await comm.all_gather(out), 1)
            return everything.split(lengths, 2)[rank]
        arrived = await comm.all_to_all(back, [(1, len(heads), lengths[rank], D) for heads in q_heads])
        if changes.get("heads_turned"):
            arrived = [x.flip(1) for x in arrived[::-1]]
        return torch.cat(arrived, 2 if changes.get("rows_back") else 1)

    answer.__name__ = name
    return answer


async def ulysses_gathers_keys(comm, q, k, v, positions, mask):
    """All-gather attention."""
    lengths = [len(p) for p in positions]
    k, v = [torch.cat(await comm.all_gather(x, lengths), 2) for x in (k, v)]
    visible = mask(positions[comm.rank][:, None], torch.cat(positions)[None, :])
    return attend(q, k, v, visible, q.shape[3] ** -0.5).out


async def ulysses_modulo(comm, q, k, v, positions, mask):
    """Query head h with key/value head h % G: k and v tiled in place of repeated."""
    H, G = q.shape[1], k.shape[1]
    k, v = (t.repeat(1, H // G, 1, 1) for t in (k, v))
    return await ulysses_solution(comm, q, k, v, positions, mask)


async def ulysses_no_await(comm, q, k, v, positions, mask):
    q = torch.cat(comm.all_to_all(list(q.chunk(comm.size, 1))), 2)
    return q


async def ulysses_stays_at_home(comm, q, k, v, positions, mask):
    own = positions[comm.rank]
    return attend(q, k, v, mask(own[:, None], own[None, :]), q.shape[3] ** -0.5).out


async def ulysses_out_and_lse(comm, q, k, v, positions, mask):
    return await ulysses_solution(comm, q, k, v, positions, mask), None


# ---- 8d ----


def sent_solution(way, S, P, H, G, D, e):
    s = S // P
    if way == "ulysses":
        keys = max(G, P)
        return (P - 1) * s * (D * e * (2 * H + 2 * keys) + 4 * H) // P
    return (P - 1) * 2 * G * s * D * e


def sent_by_plan(way, S, P, H, G, D, e):
    """Head by head, from a plan."""
    rows = S // P
    if way in ("ring", "all-gather"):
        return sum(2 * rows * G * D * e for _ in range(P - 1))
    plan = head_plan(H, G, P)
    there = sum(sum(len(heads) for heads, _ in mine) + 2 * len(mine) for mine in plan[1:]) * rows * D * e
    mine = sum(len(heads) for heads, _ in plan[0])
    return there + mine * (P - 1) * rows * (D * e + 4)


def counted(name, **changes):
    def answer(way, S, P, H, G, D, e):
        s = S if changes.get("whole") else S // P
        if way != "ulysses":
            hops = P if changes.get("hops") else 1 if changes.get("once") else P - 1
            heads = H if changes.get("query_heads") else G
            return hops * (1 if changes.get("one") else 2) * heads * s * D * e
        keys = changes["keys"](H, G, P) if "keys" in changes else max(G, P)
        lse = 0 if changes.get("no_lse") else e * H if changes.get("narrow_lse") else 4 * H
        back = 0 if changes.get("one_way") else H * D * e + lse
        share = 1 if changes.get("all_of_it") else (P - 1) / P
        return share * s * (D * e * (H + 2 * keys) + back)

    answer.__name__ = name
    return answer


def sent_of_a_ring_always(way, S, P, H, G, D, e):
    return (P - 1) * 2 * G * (S // P) * D * e


def sent_nothing_said(way, S, P, H, G, D, e):
    if way == "ulysses":
        return None
    return sent_of_a_ring_always(way, S, P, H, G, D, e)


def sent_number_as_text(way, S, P, H, G, D, e):
    return str(sent_solution(way, S, P, H, G, D, e))


def sent_as_text(way, S, P, H, G, D, e):
    return f"{sent_solution(way, S, P, H, G, D, e)} bytes"


WRONG = {
    "8a": [
        (gathered("gather_own_share_only", own=True), "value", "sum what all found"),
        (gathered("gather_own_dv", own_dv=True), "value", "dv is not summed"),
        (gathered("gather_mean", mean=True), "value", "A gradient is the sum"),
        (gathered("gather_returns_all_rows", whole=True), "value", "by reduce_scatter"),
        (gathered("gather_dv_dk", out_of_order=True), "value", "return dq, dk, dv"),
        (gathered("gather_returns_two", two=True), "value", "return dq, dk, dv"),
        (gathered("gather_parts_turned_round", turned=True), "value", "part i belongs to rank i"),
        (gathered("gather_no_delta", no_delta=True), "value", "delta is missing"),
        (gathered("gather_delta_keeps_a_dim", keepdim=True), "value", "without keepdim"),
        (gathered("gather_sums_uncut", uncut=True), "value", "the parts are dk.split"),
        (gathered("gather_no_mask", unmasked=True), "value", "it is never applied"),
        (gathered("gather_mask_of_all_rows", all_rows=True), "value", "a row for each of positions[comm.rank]"),
        (gathered("gather_no_scale", unscaled=True), "value", "scale"),
        (gathered("gather_sum_not_awaited", no_await=True), "value", "await"),
        (gather_no_await, "value", "await"),
        (gather_not_async, "value", "async def"),
        (gather_rank_0_alone, "value", "take part"),
        (gathered("gather_no_lengths", no_lengths=True), "adversarial", "shards differ in length"),
        (gathered("gather_cuts_in_equal_parts", chunks=True), "adversarial", "shards differ in length"),
        (gathered("gather_masks_by_place", places=True), "adversarial", "torch.cat(positions)"),
        (gathered("gather_all_reduce", all_reduce=True), "cost", "reduce_scatter"),
        (gathered("gather_expands_heads", expanded=True), "cost", "H heads travel"),
        (gathered("gather_queries_too", detour=True), "cost", "nothing of q"),
    ],
    "8b": [
        (plan_every_head_shared, "value", "a query head is computed by one"),
        (plan_modulo, "value", "h // (H // G)"),
        (plan_without_pairs, "value", "a list of pairs"),
        (plan_as_dict, "value", "for each rank a list of pairs"),
        (plan_round_robin, "value", "neighbours"),
        (plan_a_pair_each, "value", "one pair for each key/value head"),
        (plan_by_key_heads, "value", "Key/value heads follow them"),
        (plan_counts_in_the_rank, "value", "counted in the whole call"),
        (plan_stops_early, "value", "from first to stop - 1"),
        (plan_drops_the_rest, "adversarial", "H % P ranks get one head more"),
        (plan_rounds_up, "adversarial", "spread them"),
        (plan_rest_to_the_last, "adversarial", "spread them"),
        (plan_one_pair, "value", "two pairs"),
        (plan_keeps_empty_pairs, "value", "leave it out"),
        (plan_busy_ranks_only, "adversarial", "an empty list"),
        (plan_at_least_one, "adversarial", "a query head is computed by one"),
        (plan_divides_only, "adversarial", "AssertionError"),
    ],
    "8c": [
        (ulysses_stays_at_home, "value", "no common mistake"),
        (ulysses_no_await, "value", "await"),
        (ulysses_out_and_lse, "value", "all H heads"),
        (traded("ulysses_no_way_back", no_way_back=True), "value", "trade back"),
        (traded("ulysses_no_mask", unmasked=True), "value", "it is never applied"),
        (traded("ulysses_no_scale", unscaled=True), "value", "D ** -0.5"),
        (traded("ulysses_first_key_head", first_key=True), "value", "the pairs of its plan"),
        (traded("ulysses_rows_turned_round", turned=True), "value", "the rows of its own positions"),
        (traded("ulysses_heads_turned_round", heads_turned=True), "value", "in rank order"),
        (traded("ulysses_back_along_rows", rows_back=True), "value", "torch.cat(..., 1)"),
        (traded("ulysses_there_along_heads", heads_first=True), "value", "torch.cat(..., 2)"),
        (ulysses_modulo, "value", "not h % G"),
        (traded("ulysses_shapes_without_batch", no_batch=True), "value", "four numbers"),
        (traded("ulysses_global_key_head", global_key=True), "value", "the key/value head of its pair i is number i"),
        (traded("ulysses_global_query_heads", global_queries=True), "value", "they count from 0"),
        (traded("ulysses_global_slice_of_heads", global_slice=True), "value", "this rank's heads only"),
        (traded("ulysses_no_shapes", no_shapes=True), "adversarial", "len(positions[i])"),
        (traded("ulysses_cuts_in_equal_parts", chunked_back=True), "adversarial", "len(positions[i])"),
        (traded("ulysses_masks_by_place", places=True), "adversarial", "torch.cat(positions)"),
        (traded("ulysses_equal_chunks_of_heads", chunks=True), "adversarial", "every rank that has a query head"),
        (traded("ulysses_shapes_of_their_heads", their_heads=True), "adversarial", "heads do not"),
        (traded("ulysses_one_call", one_call=True), "adversarial", "once for each pair"),
        (ulysses_gathers_keys, "cost", "that is all-gather attention"),
        (traded("ulysses_expands_keys", expanded=True), "cost", "expanded to H heads"),
        (traded("ulysses_all_keys_to_all", all_keys=True), "cost", "those of its plan"),
        (traded("ulysses_gathers", all_gather=True), "cost", "all_to_all, not all_gather"),
    ],
    "8d": [
        (counted("sent_query_heads", query_heads=True), "value", "only key/value heads"),
        (counted("sent_one_tensor", one=True), "value", "k and v travel"),
        (counted("sent_p_hops", hops=True), "value", "nothing to itself"),
        (counted("sent_once", once=True), "value", "goes on P - 1 times"),
        (counted("sent_whole_sequence", whole=True), "value", "n = S / P"),
        (counted("sent_no_lse", no_lse=True), "value", "lse is missing"),
        (counted("sent_narrow_lse", narrow_lse=True), "value", "it is float32"),
        (counted("sent_one_way", one_way=True), "value", "what was computed goes back"),
        (counted("sent_own_part_too", all_of_it=True), "value", "(P - 1) / P"),
        (counted("sent_keys_expanded", keys=lambda H, G, P: H), "value", "max(G, P)"),
        (counted("sent_no_keys", keys=lambda H, G, P: 0), "value", "k and v are missing"),
        (counted("sent_keys_of_a_rank", keys=lambda H, G, P: P * (G // P)), "adversarial", "G // P, which is 0 here"),
        (sent_of_a_ring_always, "value", "no common mistake"),
        (sent_nothing_said, "value", "returns None"),
        (sent_as_text, "value", "one number"),
        (sent_number_as_text, "value", "returns str"),
        (counted("sent_keys_once", keys=lambda H, G, P: G), "adversarial", "a head goes to every rank"),
    ],
}

RIGHT = {
    "8a": [gather_solution, gather_in_one_message],
    "8b": [plan_solution, plan_head_by_head, lambda H, G, P: [list(mine) for mine in head_plan(H, G, P)], head_plan],
    "8c": [ulysses_solution, ulysses_in_order],
    "8d": [sent_solution, sent_by_plan],
}

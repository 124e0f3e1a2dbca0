"""Answers to the exercises of notebook 04: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass. The solutions that the notebook shows are taken from the
notebook itself by test_nb04_notebook.py, and must pass too.
"""

from __future__ import annotations

import torch

from ringlearn.course.published_ring import ring_backward as published_backward
from ringlearn.flash import attend, attend_backward

# ---- 4a ----


def visible_at(mask, positions, rank, source):
    return mask(positions[rank][:, None], positions[source][None, :])


async def backward_solution(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout.float() * out.float()).sum(-1)
    dq, travelling = torch.zeros(q.shape), None
    for step in range(P):
        source, before = (rank - step) % P, (rank - step - 1) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[before]))
        visible = visible_at(mask, positions, rank, source)
        tensors = (t.float() for t in (dout, q, k, v))
        dq_new, dk, dv = attend_backward(*tensors, lse, delta, visible, scale)
        dq += dq_new
        if step > 0:
            dk_before, dv_before = await travelling
            dk, dv = dk + dk_before, dv + dv_before
        travelling = comm.rotate(dk, dv, length=len(positions[before]))
        if step < P - 1:
            k, v = await arriving
    dk, dv = await travelling
    return dq, dk, dv


def altered(name, **changes):
    """The solution with one thing done otherwise: `changes` are looked up where the solution does it."""

    async def answer(comm, dout, q, k, v, out, lse, positions, mask):
        P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
        wide = changes.get("compute", torch.float32)
        first = changes.get("first_source", 0)
        sign = changes.get("sign", -1)
        dout, q = dout.to(wide), q.to(wide)
        if "kv_travel" in changes:
            k, v = k.to(changes["kv_travel"]), v.to(changes["kv_travel"])
        delta = (dout * out.to(wide)).sum(-1)
        dq = torch.zeros(q.shape)
        kept = travelling = None
        alive = []
        for step in range(P):
            source = (rank + sign * step + first) % P
            before = (source - 1) % P
            sizes = {} if changes.get("no_length") else {"length": len(positions[before])}
            visible = visible_at(mask, positions, rank, source)
            if changes.get("local_mask"):
                visible = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :])
            if changes.get("mask_turned"):
                visible = mask(positions[source][None, :], positions[rank][:, None])
            if changes.get("skips") and not visible.any():
                continue
            last = step == P - 1
            if not last or changes.get("kv_home"):
                arriving = comm.rotate(k, v, **sizes)
                if changes.get("kv_first"):
                    k_next, v_next = await arriving
            if changes.get("await_first") and step > 0:
                came = await travelling
            lse_used, delta_used = lse, delta
            block = attend(q, k.to(wide), v.to(wide), visible, scale)
            if changes.get("block_lse"):
                lse_used = block.lse
            if changes.get("block_delta"):
                # The sum of p dp over this block alone.
                share = 1.0 if changes.get("block_lse") else torch.exp(block.lse - lse)
                delta_used = share * (dout * block.out).sum(-1)
            if changes.get("delta_of_its_out"):
                delta_used = (dout * block.out).sum(-1)
            if changes.get("no_delta"):
                delta_used = torch.zeros_like(delta)
            scaled = changes.get("scale", lambda D, n: scale)(q.shape[-1], q.shape[2])
            dq_new, dk, dv = attend_backward(dout, q, k.to(wide), v.to(wide), lse_used, delta_used, visible, scaled)
            if changes.get("unscaled"):
                dq_new, dk = dq_new / scale, dk / scale
            dq = dq_new if changes.get("dq_replaced") else dq + dq_new
            if changes.get("stays"):
                kept = (dk, dv) if kept is None or len(kept[0]) == 0 else (kept[0] + dk, kept[1] + dv)
            if step > 0:
                if not changes.get("await_first"):
                    came = await travelling
                if changes.get("crossed"):
                    came = came[1], came[0]
                if not changes.get("not_added"):
                    dk, dv = dk + came[0], dv + came[1]
            if "wire" in changes:
                dk, dv = dk.to(changes["wire"]), dv.to(changes["wire"])
            if last and changes.get("no_way_home"):
                return dq, dk, dv
            if changes.get("keeps"):
                alive += [k, v, dk, dv]
            travelling = comm.rotate(dk, dv, **sizes)
            if not last or changes.get("kv_home"):
                k, v = (k_next, v_next) if changes.get("kv_first") else await arriving
        dk, dv = await travelling
        if changes.get("stays"):
            dk, dv = kept
        if changes.get("own_only"):
            dk, dv = attend_backward(dout, q, k, v, lse, delta, visible, scale)[1:]
        dk, dv = dk.to(changes.get("returns", torch.float32)), dv.to(changes.get("returns", torch.float32))
        if changes.get("swapped"):
            return dq, dv, dk
        if changes.get("keys_first"):
            return dk, dv, dq
        if changes.get("summed"):
            return dq, dk + dv, dv
        return dq, dk, dv

    answer.__name__ = name
    return answer


async def backward_first_hop_with_nothing_in_it(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in range(P):
        source = (rank - step) % P
        travelling = comm.rotate(dk, dv, length=len(positions[(source - 1) % P]))
        dq_new, dk_new, dv_new = attend_backward(
            dout, q, k, v, lse, delta, visible_at(mask, positions, rank, source), scale
        )
        dq += dq_new
        dk, dv = await travelling
        dk, dv = dk + dk_new, dv + dv_new
        if step < P - 1:
            k, v = await comm.rotate(k, v, length=len(positions[(source - 1) % P]))
    return dq, dk, dv


async def backward_all_in_one_message(comm, dout, q, k, v, out, lse, positions, mask, wide=False):
    if wide:
        k, v = k.float(), v.float()
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout.float() * out.float()).sum(-1)
    dq, before = torch.zeros(q.shape), None
    for step in range(P):
        source = (rank - step) % P
        visible = visible_at(mask, positions, rank, source)
        dq_new, dk, dv = attend_backward(*(t.float() for t in (dout, q, k, v)), lse, delta, visible, scale)
        dq += dq_new
        if before is not None:
            dk, dv = dk + before[0], dv + before[1]
        length = len(positions[(source - 1) % P])
        if step < P - 1:
            k, v, *before = await comm.rotate(k, v, dk, dv, length=length)
    return dq, *(await comm.rotate(dk, dv, length=length))


async def backward_all_in_one_wide_message(*given):
    return await backward_all_in_one_message(*given, wide=True)


async def backward_keeps_all_shards(comm, dout, q, k, v, out, lse, positions, mask):
    """Right, hidden, and at the end it holds what every rank held."""
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta, shards, found = (dout.float() * out.float()).sum(-1), {rank: (k, v)}, {}
    dq, travelling = torch.zeros(q.shape), None
    for step in range(P):
        source = (rank - step) % P
        length = len(positions[(source - 1) % P])
        if step < P - 1:
            arriving = comm.rotate(*shards[source], length=length)
        visible = visible_at(mask, positions, rank, source)
        tensors = (t.float() for t in (dout, q, *shards[source]))
        dq_new, dk, dv = attend_backward(*tensors, lse, delta, visible, scale)
        dq += dq_new
        if step > 0:
            came = await travelling
            dk, dv = dk + came[0], dv + came[1]
        found[source] = dk, dv
        travelling = comm.rotate(*found[source], length=length)
        if step < P - 1:
            shards[(source - 1) % P] = await arriving
    return dq, *(await travelling)


async def backward_own_share_only(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1)
    dq = torch.zeros_like(q)
    for step in range(P):
        source = (rank - step) % P
        visible = visible_at(mask, positions, rank, source)
        dq_new, dk_new, dv_new = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        dq += dq_new
        if step == 0:
            dk, dv = dk_new, dv_new
        if step < P - 1:
            k, v = await comm.rotate(k, v, length=len(positions[(source - 1) % P]))
    return dq, dk, dv


async def backward_last_message_forgotten(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1)
    dq, travelling = torch.zeros_like(q), None
    for step in range(P):
        source = (rank - step) % P
        length = len(positions[(source - 1) % P])
        arriving = comm.rotate(k, v, length=length) if step < P - 1 else None
        visible = visible_at(mask, positions, rank, source)
        dq_new, dk, dv = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        dq += dq_new
        if step > 0:
            dk_before, dv_before = await travelling
            dk, dv = dk + dk_before, dv + dv_before
        travelling = comm.rotate(dk, dv, length=length)
        if arriving:
            k, v = await arriving
    assert travelling
    return dq, dk, dv


async def backward_no_await(comm, dout, q, k, v, out, lse, positions, mask):
    delta = (dout * out).sum(-1)
    dq = torch.zeros_like(q)
    for step in range(comm.size):
        source = (comm.rank - step) % comm.size
        visible = visible_at(mask, positions, comm.rank, source)
        dq_new, dk, dv = attend_backward(dout, q, k, v, lse, delta, visible, q.shape[-1] ** -0.5)
        dq += dq_new
        k, v = comm.rotate(k, v)
        dk, dv = comm.rotate(dk, dv)
    return dq, dk, dv


async def backward_writes_in_flight(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    travelling = None
    for step in range(P):
        source = (rank - step) % P
        length = len(positions[(source - 1) % P])
        arriving = comm.rotate(k, v, length=length) if step < P - 1 else None
        visible = visible_at(mask, positions, rank, source)
        dq_new, dk_new, dv_new = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        dq += dq_new
        dk += dk_new  # this is the tensor that the last rotate is still sending
        dv += dv_new
        if travelling is not None:
            dk, dv = await travelling
        travelling = comm.rotate(dk, dv, length=length)
        if arriving:
            k, v = await arriving
    dk, dv = await travelling
    return dq, dk, dv


def backward_not_async(comm, dout, q, k, v, out, lse, positions, mask):
    delta = (dout * out).sum(-1)
    visible = visible_at(mask, positions, comm.rank, comm.rank)
    return attend_backward(dout, q, k, v, lse, delta, visible, q.shape[-1] ** -0.5)


async def backward_leaves_when_empty(comm, dout, q, k, v, out, lse, positions, mask):
    if q.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return await backward_solution(comm, dout, q, k, v, out, lse, positions, mask)


async def backward_needs_a_neighbour(comm, dout, q, k, v, out, lse, positions, mask):
    """Starts with a step of its own, then P - 1 more; the last await uses what only these have made."""
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1)
    arriving = comm.rotate(k, v, length=len(positions[(rank - 1) % P]))
    dq, dk, dv = attend_backward(dout, q, k, v, lse, delta, visible_at(mask, positions, rank, rank), scale)
    previous = comm.rotate(dk, dv, length=len(positions[(rank - 1) % P]))
    k, v = await arriving
    for step in range(1, P):
        source = (rank - step) % P
        length = len(positions[(source - 1) % P])
        if step < P - 1:
            arriving = comm.rotate(k, v, length=length)
        dq_new, dk, dv = attend_backward(dout, q, k, v, lse, delta, visible_at(mask, positions, rank, source), scale)
        dq = dq + dq_new
        dk_before, dv_before = await previous
        travelling = comm.rotate(dk + dk_before, dv + dv_before, length=length)
        previous = travelling
        if step < P - 1:
            k, v = await arriving
    dk, dv = await travelling
    return dq, dk, dv


async def backward_expands_heads(comm, dout, q, k, v, out, lse, positions, mask):
    reuse = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(reuse, 1), v.repeat_interleave(reuse, 1)
    return await backward_solution(comm, dout, q, k, v, out, lse, positions, mask)


async def backward_expands_heads_and_sums(comm, dout, q, k, v, out, lse, positions, mask):
    dq, dk, dv = await backward_expands_heads(comm, dout, q, k, v, out, lse, positions, mask)
    G = k.shape[1]
    return dq, *(t.unflatten(1, (G, -1)).sum(2) for t in (dk, dv))


async def backward_in_four_messages(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout.float() * out.float()).sum(-1)
    dq, dk_travelling, dv_travelling = torch.zeros(q.shape), None, None
    for step in range(P):
        source = (rank - step) % P
        length = len(positions[(source - 1) % P])
        if step < P - 1:
            k_arriving, v_arriving = comm.rotate(k, length=length), comm.rotate(v, length=length)
        visible = visible_at(mask, positions, rank, source)
        dq_new, dk, dv = attend_backward(*(t.float() for t in (dout, q, k, v)), lse, delta, visible, scale)
        dq += dq_new
        if step > 0:
            dk, dv = dk + await dk_travelling, dv + await dv_travelling
        dk_travelling, dv_travelling = comm.rotate(dk, length=length), comm.rotate(dv, length=length)
        if step < P - 1:
            k, v = await k_arriving, await v_arriving
    return dq, await dk_travelling, await dv_travelling


async def backward_collects_everything_first(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    delta = (dout.float() * out.float()).sum(-1)
    shards = [(k, v)]
    for step in range(P - 1):
        shards.append(await comm.rotate(*shards[-1], length=len(positions[(rank - step - 1) % P])))
    dq, dkv = torch.zeros(q.shape), None
    for step, (k, v) in enumerate(shards):
        source = (rank - step) % P
        visible = visible_at(mask, positions, rank, source)
        dq_new, dk, dv = attend_backward(*(t.float() for t in (dout, q, k, v)), lse, delta, visible, scale)
        dq += dq_new
        if dkv is not None:
            before = await dkv
            dk, dv = dk + before[0], dv + before[1]
        dkv = comm.rotate(dk, dv, length=len(positions[(source - 1) % P]))
    dk, dv = await dkv
    return dq, dk, dv


async def backward_by_einsum(comm, dout, q, k, v, out, lse, positions, mask):
    """Its own tile, and the first step before the loop."""
    P, rank = comm.size, comm.rank
    H, G, D = q.shape[1], k.shape[1], q.shape[-1]
    q, dout, out = q.float(), dout.float(), out.float()

    def tile(k, v, source):
        k, v = (t.float().repeat_interleave(H // G, 1) for t in (k, v))
        hidden = ~visible_at(mask, positions, rank, source)
        s = (torch.einsum("bhid,bhjd->bhij", q, k) / D**0.5).masked_fill(hidden, -torch.inf)
        p = torch.exp(s - lse.unsqueeze(-1))
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / D**0.5
        return ds @ k, *(t.unflatten(1, (G, H // G)).sum(2) for t in (ds.mT @ q, p.mT @ dout))

    def length(step):
        return len(positions[(rank - step - 1) % P])

    handles = []
    if P > 1:
        handles.append(comm.rotate(k, v, length=length(0)))
    dq, dk, dv = tile(k, v, rank)
    travelling = comm.rotate(dk, dv, length=length(0))
    for step in range(1, P):
        k, v = await handles.pop()
        if step < P - 1:
            handles.append(comm.rotate(k, v, length=length(step)))
        dq_new, dk, dv = tile(k, v, (rank - step) % P)
        dq = dq + dq_new
        arrived = await travelling
        arrived[0].add_(dk)
        arrived[1].add_(dv)
        travelling = comm.rotate(*arrived, length=length(step))
    return dq, *(await travelling)


# ---- 4b ----


def predict_solution(S, P, H, G, D, e):
    kv = 2 * G * (S // P) * D * e
    dkv = 2 * G * (S // P) * D * 4
    home = P if P > 1 else 0
    buffers = min(2, P - 1)
    return (P - 1) * kv, (P - 1) * kv + home * dkv, buffers * kv, buffers * kv + min(1, P - 1) * dkv


def predict_by_counting(S, P, H, G, D, e):
    sent = {"kv": 0, "dkv": 0}
    held = most_forward = most_backward = 0
    numbers = 2 * G * D * (S // P)
    for step in range(P):
        arriving = 1 if step < P - 1 else 0
        held = (1 if step else 0) + arriving
        sent["kv"] += arriving
        sent["dkv"] += 1 if P > 1 else 0
        most_forward = max(most_forward, held * numbers * e)
        most_backward = max(most_backward, held * numbers * e + (numbers * 4 if P > 1 else 0))
    forward = sent["kv"] * numbers * e
    return [forward, forward + sent["dkv"] * numbers * 4, most_forward, most_backward]


def predicted(name, **changes):
    def answer(S, P, H, G, D, e):
        s = S if changes.get("whole") else S / P if changes.get("float") else S // P
        heads = H if changes.get("H") else G
        two = 1 if changes.get("only_k") else 2
        kv, dkv = two * heads * s * D * e, two * heads * s * D * (e if changes.get("narrow") else 4)
        hops = P if changes.get("kv_home") else P - 1
        home = P - 1 if changes.get("no_hop_home") else P
        if P == 1 and not changes.get("sends_to_itself"):
            home = 0
        both = 2 if changes.get("both_sides") else 1
        again = 0 if changes.get("kv_kept") else hops * kv
        buffers = changes["buffers"](P) if "buffers" in changes else min(2, P - 1)
        arrives = 0 if changes.get("no_dkv_buffer") or P == 1 else dkv
        return both * hops * kv, both * (again + home * dkv), buffers * kv, buffers * kv + arrives

    answer.__name__ = name
    return answer


def predict_two_numbers(S, P, H, G, D, e):
    return predict_solution(S, P, H, G, D, e)[:2]


def predict_p_hops_in_the_forward_only(S, P, H, G, D, e):
    forward, *others = predict_solution(S, P, H, G, D, e)
    return forward + 2 * G * (S // P) * D * e, *others


def predict_two_gradient_buffers(S, P, H, G, D, e):
    *others, backward = predict_solution(S, P, H, G, D, e)
    return *others, backward + (2 * G * (S // P) * D * 4 if P > 1 else 0)


def predict_lse_travels_too(S, P, H, G, D, e):
    forward, backward, *buffers = predict_solution(S, P, H, G, D, e)
    return forward, backward + (P - 1) * H * (S // P) * 4, *buffers


WRONG = {
    "4a": [
        (altered("backward_without_the_hop_home", no_way_home=True), "value", "P hops"),
        (altered("backward_dk_and_dv_exchanged", swapped=True), "value", "exchanged"),
        (altered("backward_dk_is_dk_plus_dv", summed=True), "value", "summed up in one tensor"),
        (altered("backward_delta_of_the_block", block_delta=True), "value", "whole row"),
        (altered("backward_delta_of_the_blocks_own_out", delta_of_its_out=True), "value", "the out of one block"),
        (altered("backward_no_delta", no_delta=True), "value", "delta is missing"),
        (altered("backward_another_order", keys_first=True), "value", "another order"),
        (altered("backward_dk_added_to_dv", crossed=True), "value", "added to dk"),
        (altered("backward_mask_turned", mask_turned=True), "value", "queries come first"),
        (altered("backward_lse_of_the_block", block_lse=True), "value", "lse of one block"),
        (altered("backward_each_block_alone", block_lse=True, block_delta=True), "value", "row, not to a step"),
        (altered("backward_unscaled", unscaled=True), "value", "sqrt(D)"),
        (altered("backward_scale_1", scale=lambda D, n: 1.0), "value", "scale = 1 "),
        (altered("backward_scale_1_over_D", scale=lambda D, n: 1 / D), "value", "scale = 0.25"),
        (altered("backward_scale_of_the_tokens", scale=lambda D, n: n**-0.5), "value", "that attend_backward is given"),
        (altered("backward_dq_replaced", dq_replaced=True), "value", "dq is replaced"),
        (altered("backward_arriving_not_added", not_added=True), "value", "not added"),
        (altered("backward_gradients_stay", stays=True), "value", "belong to the block"),
        (altered("backward_starts_where_the_forward_ended", first_source=1), "value", "the block after it"),
        (altered("backward_wrong_direction", sign=+1), "value", "the block of comm.rank + step"),
        (altered("backward_local_mask", local_mask=True), "value", "places in the shard"),
        (altered("backward_skips_the_messages", skips=True), "value", "skip the computation, never the message"),
        (backward_first_hop_with_nothing_in_it, "value", "nothing in it"),
        (backward_own_share_only, "value", "never comes home"),
        (backward_last_message_forgotten, "value", "awaited after the loop"),
        (backward_no_await, "value", "after `await`"),
        (backward_writes_in_flight, "value", "still sending"),
        (backward_not_async, "value", "async def"),
        (backward_expands_heads, "value", "G heads"),
        (altered("backward_no_length", no_length=True), "adversarial", "length="),
        (backward_leaves_when_empty, "adversarial", "never the message"),
        (backward_needs_a_neighbour, "adversarial", "P = 1"),
        (altered("backward_bfloat16_on_the_wire", wire=torch.bfloat16), "value", "float32"),
        (altered("backward_returns_bfloat16", returns=torch.bfloat16), "value", "float32"),
        (altered("backward_computes_in_the_input_dtype", compute=None), "adversarial", "x.float()"),
        (altered("backward_keys_travel_in_float32", kv_travel=torch.float32), "cost", "twice the bytes"),
        (altered("backward_keys_go_home_too", kv_home=True), "cost", "nobody needs the next k, v"),
        (altered("backward_gradients_awaited_first", await_first=True), "cost", "compute this rank's dk, dv first"),
        (altered("backward_keys_awaited_first", kv_first=True), "cost", "post k, v before you compute"),
        (backward_expands_heads_and_sums, "cost", "G heads"),
        (backward_in_four_messages, "cost", "as one message"),
        (backward_all_in_one_message, "adversarial", "Send them apart"),
        (backward_all_in_one_wide_message, "cost", "Send them apart"),
        (backward_keeps_all_shards, "cost", "lets go of them"),
        (altered("backward_keeps_all_that_travels", keeps=True), "cost", "lets go of them"),
        (backward_collects_everything_first, "cost", "post k, v before you compute"),
    ],
    "4b": [
        (predicted("predict_query_heads", H=True), "value", "H in place of G"),
        (predicted("predict_p_hops_forward", kv_home=True), "value", "P hops are counted"),
        (predicted("predict_only_k", only_k=True), "value", "one tensor"),
        (predicted("predict_narrow_gradients", narrow=True), "value", "4 bytes"),
        (predicted("predict_sends_and_receives", both_sides=True), "value", "sender's side"),
        (predicted("predict_no_hop_home", no_hop_home=True), "value", "brings them home"),
        (predicted("predict_keys_kept", kv_kept=True), "value", "once more"),
        (predicted("predict_whole_sequence", whole=True), "value", "n = S / P"),
        (predicted("predict_float", float=True), "value", "S // P"),
        (predicted("predict_a_buffer_for_each_shard", buffers=lambda P: P - 1), "value", "given up"),
        (predicted("predict_one_buffer", buffers=lambda P: min(1, P - 1)), "value", "From P = 3 on"),
        (predicted("predict_no_gradient_buffer", no_dkv_buffer=True), "value", "is missing"),
        (predict_p_hops_in_the_forward_only, "value", "P hops are counted"),
        (predict_two_gradient_buffers, "value", "its buffer given back"),
        (predict_two_numbers, "value", "four numbers"),
        (predict_lse_travels_too, "value", "on a sheet of paper"),
        (predicted("predict_always_two_buffers", buffers=lambda P: 2 if P > 1 else 0), "adversarial", "min(2, P - 1)"),
        (predicted("predict_sends_to_itself", sends_to_itself=True), "adversarial", "nothing is sent"),
    ],
}

RIGHT = {
    "4a": [backward_solution, backward_by_einsum, published_backward],
    "4b": [predict_solution, predict_by_counting],
}

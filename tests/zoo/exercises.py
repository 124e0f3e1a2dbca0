"""Answers to the torchrun exercises: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, a word that the message must hold). RIGHT[exercise] is a list of functions that
must pass. The solutions under notebooks/exercises/solutions must pass too.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_ranks import FOLDER, load

import ringlearn as rl
from ringlearn.course.published_ring import ring_forward as published_ring_forward
from ringlearn.flash import attend, attend_backward
from ringlearn.nn import rope

from . import decode, packed_step, train_sharded
from .edits import edited, registry

WRONG, wrong = registry("01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12")

# ---- 01 ring pass: (token, rank, size) -> what rank - 1 sent ----


@wrong("01", "all ranks send first")
def pass_all_send_first(token, rank, size):
    arrived = torch.empty_like(token)
    if size == 1:
        return token.clone()
    dist.send(token, (rank + 1) % size)
    dist.recv(arrived, (rank - 1) % size)
    return arrived


@wrong("01", "all ranks receive first")
def pass_all_receive_first(token, rank, size):
    arrived = torch.empty_like(token)
    dist.recv(arrived, (rank - 1) % size)
    dist.send(token, (rank + 1) % size)
    return arrived


@wrong("01", "of its own")
def pass_into_the_token(token, rank, size):
    if rank % 2 == 0:
        dist.send(token, (rank + 1) % size)
        dist.recv(token, (rank - 1) % size)
    else:
        dist.recv(token, (rank - 1) % size)
        dist.send(token, (rank + 1) % size)
    return token


@wrong("01", "empty_like")
def pass_receives_into_what_is_sent(token, rank, size):
    token = token.clone()
    handles = [dist.isend(token, (rank + 1) % size), dist.irecv(token, (rank - 1) % size)]
    for handle in handles:
        handle.wait()
    return token


@wrong("01", "the other way")
def pass_backwards(token, rank, size):
    arrived = torch.empty_like(token)
    ops = [dist.P2POp(dist.isend, token, (rank - 1) % size), dist.P2POp(dist.irecv, arrived, (rank + 1) % size)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()
    return arrived


@wrong("01", "never waited for")
def pass_drops_the_handle(token, rank, size):
    arrived = torch.empty_like(token)
    dist.isend(token, (rank + 1) % size)
    dist.irecv(arrived, (rank - 1) % size).wait()
    return arrived


@wrong("01", "never waited for")
def pass_never_waits(token, rank, size):
    arrived = torch.empty_like(token)
    dist.isend(token, (rank + 1) % size)
    dist.irecv(arrived, (rank - 1) % size)
    return arrived


@wrong("01", "own token")
def pass_returns_the_token(token, rank, size):
    pass_right(token, rank, size)
    return token


@wrong("01", "no return statement")
def pass_returns_nothing(token, rank, size):
    pass_right(token, rank, size)


@wrong("01", "on purpose")
def pass_raises_on_one_rank(token, rank, size):
    if rank == 1:
        raise ValueError("on purpose")
    return pass_right(token, rank, size)


@wrong("01", "NameError")
def pass_misspelt(token, rank, size):
    return pass_right(tokens, rank, size)  # noqa: F821


@wrong("01", "between neighbours")
def pass_by_all_gather(token, rank, size):
    everything = [torch.empty_like(token) for _ in range(size)]
    dist.all_gather(everything, token)
    return everything[(rank - 1) % size]


@wrong("01", "elements")
def pass_twice_as_much(token, rank, size):
    arrived = torch.zeros_like(token)
    handles = [dist.isend(torch.cat([token, token]), (rank + 1) % size), dist.irecv(arrived, (rank - 1) % size)]
    for handle in handles:
        handle.wait()
    return arrived


pass_half_a_token = edited(
    pass_twice_as_much,
    "pass_half_a_token",
    (
        "handles = [dist.isend(torch.cat([token, token]), (rank + 1) % size), dist.irecv(arrived, (rank - 1) % size)]",
        "if rank == 2:\n"
        "    token = token[: max(1, len(token) // 2)]\n"
        "handles = [dist.isend(token, (rank + 1) % size), dist.irecv(arrived, (rank - 1) % size)]",
    ),
)


@wrong("01", "exit code 3")
def pass_ends_the_process(token, rank, size):
    if rank == 2:
        os._exit(3)
    return pass_right(token, rank, size)


@wrong("01", "SystemExit")
def pass_exits(token, rank, size):
    if rank == 2:
        sys.exit()
    return pass_right(token, rank, size)


@wrong("01", "time.sleep(1000)")
def pass_sleeps(token, rank, size):
    if rank == 1:
        time.sleep(1000)
    return pass_right(token, rank, size)


@wrong("01", "computing for ever")
def pass_loops(token, rank, size):
    while True:
        pass


@wrong("01", "every send needs a receive")
def pass_spins(token, rank, size):
    arrived = torch.empty_like(token)
    handle = dist.irecv(arrived, (rank - 1) % size)
    while not handle.is_completed():
        pass
    dist.send(token, (rank + 1) % size)
    return arrived


def pass_right(token, rank, size):
    """With handles: posts both at once."""
    arrived = token.clone()
    if size > 1:
        handles = [dist.irecv(arrived, (rank - 1) % size), dist.isend(token, (rank + 1) % size)]
        for handle in handles:
            handle.wait()
    return arrived


def pass_batched(token, rank, size):
    if size == 1:
        return token
    arrived = torch.empty_like(token)
    ops = [dist.P2POp(dist.isend, token, (rank + 1) % size), dist.P2POp(dist.irecv, arrived, (rank - 1) % size)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()
    return arrived


pass_only_rank_0_differs = edited(
    pass_batched,
    "pass_only_rank_0_differs",
    ("if size == 1:\nreturn token", ""),
    (
        "ops = [dist.P2POp(dist.isend, token, (rank + 1) % size), dist.P2POp(dist.irecv, arrived, (rank - 1) % size)]\n"
        "for handle in dist.batch_isend_irecv(ops):\n"
        "handle.wait()",
        "if rank == 0:\n"
        "    dist.send(token, 1)\n"
        "    dist.recv(arrived, size - 1)\n"
        "else:\n"
        "    dist.recv(arrived, rank - 1)\n"
        "    dist.send(token, (rank + 1) % size)",
    ),
)
pass_without_modulo = edited(
    pass_batched,
    "pass_without_modulo",
    ("if size == 1:\nreturn token", ""),
    (
        "ops = [dist.P2POp(dist.isend, token, (rank + 1) % size), dist.P2POp(dist.irecv, arrived, (rank - 1) % size)]\n"
        "for handle in dist.batch_isend_irecv(ops):\n"
        "handle.wait()",
        "if rank % 2 == 0:\n"
        "    dist.send(token, rank + 1)\n"
        "    dist.recv(arrived, (rank - 1) % size)\n"
        "else:\n"
        "    dist.recv(arrived, (rank - 1) % size)\n"
        "    dist.send(token, rank + 1)",
    ),
)


def pass_odd_sends_first(token, rank, size):
    arrived, following, previous = torch.empty_like(token), (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return token.clone()
    if rank % 2:
        dist.send(tensor=token, dst=following)
        dist.recv(tensor=arrived, src=previous)
    else:
        dist.recv(tensor=arrived, src=previous)
        dist.send(tensor=token, dst=following)
    return arrived


# ---- 02 all-reduce: (x, rank, size) -> the sum over ranks ----


def _pass_on(part, into, rank, size):
    send = dist.P2POp(dist.isend, part, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, into, (rank - 1) % size)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()


def _scatter(parts, rank, size, add=True):
    for step in range(size - 1):
        leaving, arriving = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        found = torch.empty_like(arriving)
        _pass_on(leaving, found, rank, size)
        arriving.copy_(arriving + found if add else found)


def _gather(parts, rank, size, first=1, steps=None):
    for step in range(size - 1 if steps is None else steps):
        leaving, arriving = parts[(rank - step + first) % size], parts[(rank - step + first - 1) % size]
        _pass_on(leaving, arriving, rank, size)


@wrong("02", "whole tensors")
def reduce_whole_tensors(x, rank, size):
    total, moving = x.clone(), x.clone()
    for _ in range(size - 1):
        found = torch.empty_like(moving)
        _pass_on(moving, found, rank, size)
        moving, total = found, total + found
    return total


@wrong("02", "the all-gather is missing")
def reduce_without_gather(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    _scatter(parts, rank, size)
    return torch.cat(parts)


@wrong("02", "which part leaves")
def reduce_gathers_the_wrong_part(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    _scatter(parts, rank, size)
    _gather(parts, rank, size, first=0)
    return torch.cat(parts)


@wrong("02", "parts")
def reduce_overwrites(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    _scatter(parts, rank, size, add=False)
    _gather(parts, rank, size)
    return torch.cat(parts)


@wrong("02", "which part leaves")
def reduce_always_sends_its_own_part(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    for step in range(size - 1):
        arriving = parts[(rank - step - 1) % size]
        found = torch.empty_like(arriving)
        _pass_on(parts[rank], found, rank, size)
        arriving += found
    _gather(parts, rank, size)
    return torch.cat(parts)


@wrong("02", "mean")
def reduce_to_the_mean(x, rank, size):
    return reduce_right(x, rank, size) / size


@wrong("02", "dist.all_reduce was called")
def reduce_by_the_library(x, rank, size):
    x = x.clone()
    dist.all_reduce(x)
    return x


@wrong("02", "shape")
def reduce_equal_parts_only(x, rank, size):
    n = len(x) // size
    parts = [x[i * n : (i + 1) * n].clone() for i in range(size)]
    _scatter(parts, rank, size)
    _gather(parts, rank, size)
    return torch.cat(parts)


@wrong("02", "which part it is")
def reduce_buffer_of_the_leaving_part(x, rank, size):
    """Right for equal parts only: what arrives may be shorter or longer than what leaves."""
    parts = list(x.clone().tensor_split(size))
    for step in range(size - 1):
        leaving, i = parts[(rank - step) % size], (rank - step - 1) % size
        found = torch.empty_like(leaving)
        _pass_on(leaving, found, rank, size)
        parts[i] += found
    _gather(parts, rank, size)
    return torch.cat(parts)


@wrong("02", "another tensor afterwards")
def reduce_in_place(x, rank, size):
    parts = list(x.tensor_split(size))
    _scatter(parts, rank, size)
    _gather(parts, rank, size)
    return torch.cat(parts)


@wrong("02", "step")
def reduce_a_step_too_many(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    _scatter(parts, rank, size)
    _gather(parts, rank, size, steps=size)
    return torch.cat(parts)


@wrong("02", "which part leaves")
def reduce_a_step_less_on_rank_0(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    _scatter(parts, rank, size)
    _gather(parts, rank, size, steps=size - 1 - (rank == 0))
    return torch.cat(parts)


@wrong("02", "empty_like")
def reduce_adds_into_what_is_sent(x, rank, size):
    parts = list(x.clone().tensor_split(size))
    for step in range(size - 1):
        part = parts[(rank - step) % size]
        _pass_on(part, part, rank, size)
    return torch.cat(parts)


@wrong("02", "list")
def reduce_returns_a_list(x, rank, size):
    return list(reduce_right(x, rank, size).tensor_split(size))


def reduce_right(x, rank, size):
    """Begins with another part than the solution, and numbers the steps down."""
    parts = [part.clone() for part in x.tensor_split(size)]
    for step in reversed(range(1, size)):
        leaving, arriving = (rank + step) % size, (rank + step - 1) % size
        found = torch.empty_like(parts[arriving])
        _pass_on(parts[leaving], found, rank, size)
        parts[arriving] = parts[arriving] + found
    for step in range(size - 1):
        _pass_on(parts[(rank - step) % size], parts[(rank - step - 1) % size], rank, size)
    return torch.cat(parts)


# ---- 03 overlap: (x, compute, rank, size) -> the sum of compute over all shards ----


_overlap = load(FOLDER / "solutions" / "03_overlap.py")
post, overlap_solution = _overlap.post, _overlap.overlaps
waits_first = wrong("03", "stands before compute")(_overlap.waits_first)


@wrong("03", "post it first")
def overlap_posts_late(x, compute, rank, size):
    total = 0
    for step in range(size):
        total = total + compute(x)
        if step < size - 1:
            arriving = torch.empty_like(x)
            for handle in post(x, arriving, rank, size):
                handle.wait()
            x = arriving
    return total


@wrong("03", "not been waited for")
def overlap_waits_at_the_end(x, compute, rank, size):
    total, handles = 0, []
    for step in range(size):
        arriving = torch.zeros_like(x)
        if step < size - 1:
            handles += post(x, arriving, rank, size)
        total = total + compute(x)
        x = arriving
    for handle in handles:
        handle.wait()
    return total


@wrong("03", "empty_like")
def overlap_one_buffer(x, compute, rank, size):
    total = 0
    for step in range(size):
        handles = post(x, x, rank, size) if step < size - 1 else []
        total = total + compute(x)
        for handle in handles:
            handle.wait()
    return total


overlap_forgets_the_last = edited(
    overlap_solution,
    "overlap_forgets_the_last",
    ("range(size)", "range(size - 1)"),
    ("if step < size - 1:\nhandles = post(x, arriving, rank, size)", "handles = post(x, arriving, rank, size)"),
)
wrong("03", "called 3 times")(overlap_forgets_the_last)
overlap_a_message_too_many = edited(
    overlap_forgets_the_last,
    "overlap_a_message_too_many",
    ("size - 1", "size"),
    ("(x, arriving, rank, size)", "(x, arriving, rank, size) if size > 1 else []"),
)
overlap_awaits_the_send_first = edited(
    overlap_solution,
    "overlap_awaits_the_send_first",
    (", handles = torch.empty_like(x), []", " = torch.empty_like(x)"),
    (
        "handles = post(x, arriving, rank, size)",
        "send = dist.isend(x, (rank + 1) % size)\nreceive = dist.irecv(arriving, (rank - 1) % size)\nsend.wait()",
    ),
    ("for handle in handles:\nhandle.wait()", "if step < size - 1:\n    receive.wait()"),
)
overlap_never_waits = edited(
    overlap_solution,
    "overlap_never_waits",
    (", handles = torch.empty_like(x), []", " = torch.zeros_like(x)"),
    ("handles = post", "post"),
    ("for handle in handles:\nhandle.wait()", ""),
)
overlap_computes_on_its_own_only = edited(
    overlap_solution,
    "overlap_computes_on_its_own_only",
    ("total = 0", "total, own = 0, x"),
    ("total = total + compute(x)", "total = total + compute(own)"),
)
overlap_writes_what_is_sent = edited(
    overlap_solution, "overlap_writes_what_is_sent", ("+ compute(x)", "+ compute(x)\nx.zero_()")
)


def overlap_right(x, compute, rank, size):
    """Two buffers that are used in turn, plain isend and irecv, the receive posted first."""
    buffers, total = [x, torch.empty_like(x)], None
    for step in range(size):
        here, there = buffers[step % 2], buffers[(step + 1) % 2]
        if step < size - 1:
            receive = dist.irecv(there, (rank - 1) % size)
            send = dist.isend(here, (rank + 1) % size)
        part = compute(here)
        total = part if total is None else total + part
        if step < size - 1:
            send.wait()
            receive.wait()
    return total


# ---- 04 ring forward: (comm, q, k, v, positions, mask) -> (out, lse) ----


def _forward(
    name="program",
    source=lambda rank, step, P: (rank - step) % P,
    positions_of=lambda positions, rank, source: (positions[rank], positions[source]),
    merge=rl.merge,
    steps=lambda P: P,
    hops=lambda P: P - 1,
    skips=False,
    waits_first=False,
    scale=None,
    finish=lambda result, P: (result.out, result.lse),
):
    """A ring with one thing changed."""

    async def program(comm, q, k, v, positions, mask):
        P, rank = comm.size, comm.rank
        result = None
        for step in range(steps(P)):
            here = source(rank, step, P)
            q_pos, k_pos = positions_of(positions, rank, here)
            visible = mask(q_pos[:, None], k_pos[None, :])
            if skips and not visible.any():
                continue
            arriving = None
            if step < hops(P):
                arriving = comm.rotate(k, v, length=len(positions[(rank - step - 1) % P]))
                if waits_first:
                    k_next, v_next = await arriving
            part = attend(q, k, v, visible, scale or q.shape[-1] ** -0.5)
            result = part if result is None else merge(result, part)
            if arriving is not None:
                k, v = (k_next, v_next) if waits_first else await arriving
        if result is None:
            result = rl.identity(q.shape, q.dtype, q.device)
        return finish(result, P)

    program.__name__ = name
    return program


def _add(a, b):
    return rl.Partial(a.out + b.out, torch.logaddexp(a.lse, b.lse))


def _merge_without_lse(a, b):
    return rl.Partial(rl.merge(a, b).out, a.lse)


def _local_positions(positions, rank, source):
    return [torch.arange(len(positions[r]), device=positions[r].device) for r in (rank, source)]


forward_wrong_direction = _forward("forward_wrong_direction", source=lambda rank, step, P: (rank + step) % P)
forward_local_mask = _forward("forward_local_mask", positions_of=_local_positions)


@wrong("04", "of the past a query sees everything")
async def forward_local_mask_on_the_past(comm, q, k, v, positions, mask):
    """Skips the computation on later shards, and masks each earlier one with a triangle."""
    P, rank, result = comm.size, comm.rank, rl.identity(q.shape, q.dtype, q.device)
    for step in range(P):
        source = (rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[(source - 1) % P]))
        if source <= rank or mask is rl.full:
            q_pos, k_pos = _local_positions(positions, rank, source)
            part = attend(q, k, v, mask(q_pos[:, None], k_pos[None, :]), q.shape[-1] ** -0.5)
            result = rl.merge(result, part)
        if step < P - 1:
            k, v = await arriving
    return result


@wrong("04", "positions[rank] and positions[source]")
async def forward_own_positions_only(comm, q, k, v, positions, mask):
    def own(positions, rank, source):
        n = len(positions[source])
        return positions[rank], torch.cat([positions[rank], positions[rank][-1:]])[:n]

    return await _forward(positions_of=own)(comm, q, k, v, positions, mask)


forward_skips_the_message = _forward("forward_skips_the_message", skips=True)
forward_a_hop_too_many = _forward("forward_a_hop_too_many", hops=lambda P: P if P > 1 else 0)


@wrong("04", "Two are enough")
async def forward_gathers_first(comm, q, k, v, positions, mask):
    P, rank = comm.size, comm.rank
    ks, vs = {rank: k}, {rank: v}
    for step in range(P - 1):
        k, v = await comm.rotate(k, v, length=len(positions[(rank - step - 1) % P]))
        ks[(rank - step - 1) % P], vs[(rank - step - 1) % P] = k, v
    k, v = (torch.cat([x[r] for r in range(P)], dim=2) for x in (ks, vs))
    visible = mask(positions[rank][:, None], torch.cat(positions)[None, :])
    return attend(q, k, v, visible, q.shape[-1] ** -0.5)


forward_adds = _forward("forward_adds", merge=_add)


@wrong("04", "they are averaged")
async def forward_averages(comm, q, k, v, positions, mask):
    def finish(result, P):
        return result.out / P, result.lse

    return await _forward(merge=_add, finish=finish)(comm, q, k, v, positions, mask)


forward_keeps_the_first_lse = _forward("forward_keeps_the_first_lse", merge=_merge_without_lse)


@wrong("04", "lse")
async def forward_returns_the_last_lse(comm, q, k, v, positions, mask):
    last = []

    def merge(a, b):
        last[:] = [b.lse]
        return rl.merge(a, b)

    def finish(result, P):
        return result.out, last[0] if last else result.lse

    return await _forward(merge=merge, finish=finish)(comm, q, k, v, positions, mask)


forward_waits_first = _forward("forward_waits_first", waits_first=True)
forward_a_step_less = _forward("forward_a_step_less", steps=lambda P: max(1, P - 1))
forward_without_scale = _forward("forward_without_scale", scale=1.0)


@wrong("04", "the mask is not applied")
async def forward_without_mask(comm, q, k, v, positions, mask):
    return await _forward()(comm, q, k, v, positions, rl.full)


@wrong("04", "out, lse")
async def forward_returns_out_alone(comm, q, k, v, positions, mask):
    return (await _forward()(comm, q, k, v, positions, mask))[0]


@wrong("04", "length=")
async def forward_without_length(comm, q, k, v, positions, mask):
    P, rank, result = comm.size, comm.rank, None
    for step in range(P):
        source = (rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v)
        part = attend(q, k, v, mask(positions[rank][:, None], positions[source][None, :]), q.shape[-1] ** -0.5)
        result = part if result is None else rl.merge(result, part)
        if step < P - 1:
            k, v = await arriving
    return result


forward_forgets_await = edited(
    forward_without_length,
    "forward_forgets_await",
    (
        "if step < P - 1:\n"
        "arriving = comm.rotate(k, v)\n"
        "part = attend(q, k, v, mask(positions[rank][:, None], positions[source][None, :]), q.shape[-1] ** -0.5)",
        "visible = mask(positions[rank][:, None], positions[source][None, :])\n"
        "part = attend(q, k, v, visible, q.shape[-1] ** -0.5)",
    ),
    ("await arriving", "comm.rotate(k, v, length=len(positions[(source - 1) % P]))"),
)


@wrong("04", "async def")
def forward_no_async(comm, q, k, v, positions, mask):
    visible = mask(positions[comm.rank][:, None], positions[comm.rank][None, :])
    return attend(q, k, v, visible, q.shape[-1] ** -0.5)


@wrong("04", "hardware")
async def forward_only_simulated(comm, q, k, v, positions, mask):
    """Looks at what only a simulated world has."""
    found = await _forward()(comm, q, k, v, positions, mask)
    comm.world.hardware.flops  # noqa: B018
    return found


@wrong("04", "on purpose")
async def forward_only_on_rank_0_for_real(comm, q, k, v, positions, mask):
    if isinstance(comm.world, rl.DistributedWorld) and comm.rank == 2:
        raise ValueError("on purpose, on one rank")
    return await _forward()(comm, q, k, v, positions, mask)


async def forward_right(comm, q, k, v, positions, mask):
    """Skips the computation where a block is hidden, with everything visible for the past; begins without a result."""
    P, rank, result = comm.size, comm.rank, None
    for step in range(P):
        source = (rank - step) % P
        arriving = comm.rotate(k, v, length=len(positions[(source - 1) % P])) if step < P - 1 else None
        visible = mask(positions[rank].unsqueeze(1), positions[source].unsqueeze(0))
        if step == 0 or visible.any():
            part = attend(q, k, v, None if visible.all() else visible, q.shape[-1] ** -0.5)
            result = part if result is None else rl.merge(result, part)
        if arriving is not None:
            k, v = await arriving
    return result


# ---- 05 ring backward: (comm, dout, q, k, v, out, lse, positions, mask) -> dq, dk, dv ----


def _backward(
    name="program",
    delta_of=lambda dout, out, part: (dout * out).sum(-1),
    lse_of=lambda lse, part: lse,
    source=lambda rank, step, P: (rank - step) % P,
    positions_of=lambda positions, rank, source: (positions[rank], positions[source]),
    hops=lambda P: P,
    kv_hops=lambda P: P - 1,
    adds=True,
    waits_first=False,
    skips=False,
    scale=None,
):
    """A ring's backward with one thing changed."""

    async def program(comm, dout, q, k, v, out, lse, positions, mask):
        P, rank = comm.size, comm.rank
        own = q.shape[-1] ** -0.5
        dq = torch.zeros_like(q)
        for step in range(P):
            length = len(positions[(rank - step - 1) % P])
            q_pos, k_pos = positions_of(positions, rank, source(rank, step, P))
            visible = mask(q_pos[:, None], k_pos[None, :])
            if skips and not visible.any():
                continue
            if step < kv_hops(P):
                arriving = comm.rotate(k, v, length=length)
                if waits_first:
                    k_next, v_next = await arriving
            part = attend(q, k, v, visible, own)
            delta = delta_of(dout, out, part)
            dq_tile, dk, dv = attend_backward(dout, q, k, v, lse_of(lse, part), delta, visible, scale or own)
            dq += dq_tile
            if step > 0:
                found = await travelling  # noqa: F821
                if adds:
                    dk, dv = dk + found[0], dv + found[1]
            if step < hops(P):
                travelling = comm.rotate(dk, dv, length=length)
            if step < kv_hops(P):
                k, v = (k_next, v_next) if waits_first else await arriving
        if hops(P) >= P:
            dk, dv = await travelling
        return dq, dk, dv

    program.__name__ = name
    return program


backward_a_hop_less = _backward("backward_a_hop_less", hops=lambda P: P - 1)


@wrong("05", "one hop too many")
async def backward_a_hop_too_many(comm, *args):
    positions = args[-2]
    dq, dk, dv = await _backward()(comm, *args)
    if comm.size > 1:
        dk, dv = await comm.rotate(dk, dv, length=len(positions[(comm.rank - 1) % comm.size]))
    return dq, dk, dv


backward_delta_per_block = _backward(
    "backward_delta_per_block", delta_of=lambda dout, out, part: (dout * part.out).sum(-1)
)
backward_without_delta = _backward(
    "backward_without_delta", delta_of=lambda dout, out, part: torch.zeros_like(part.lse)
)
backward_lse_of_the_block = _backward("backward_lse_of_the_block", lse_of=lambda lse, part: part.lse)


@wrong("05", "sqrt(D) times too large")
async def backward_without_scale(comm, *args):
    def lse_as_it_is(lse, part):
        return lse

    program = _backward(lse_of=lse_as_it_is)
    dq, dk, dv = await program(comm, *args)
    root = args[1].shape[-1] ** 0.5
    return dq * root, dk * root, dv


backward_drops_what_arrives = _backward("backward_drops_what_arrives", adds=False)


@wrong("05", "belong to the block")
async def backward_stays_at_home(comm, dout, q, k, v, out, lse, positions, mask):
    P, rank = comm.size, comm.rank
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for step in range(P):
        source = (rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[(source - 1) % P]))
        visible = mask(positions[rank][:, None], positions[source][None, :])
        found = attend_backward(dout, q, k, v, lse, (dout * out).sum(-1), visible, q.shape[-1] ** -0.5)
        dq += found[0]
        n = min(dk.shape[2], k.shape[2])
        dk[:, :, :n] += found[1][:, :, :n]
        dv[:, :, :n] += found[2][:, :, :n]
        if step < P - 1:
            k, v = await arriving
    return dq, dk, dv


backward_local_mask = _backward("backward_local_mask", positions_of=_local_positions)
backward_wrong_direction = _backward("backward_wrong_direction", source=lambda rank, step, P: (rank + step) % P)
backward_kv_all_the_way = _backward("backward_kv_all_the_way", kv_hops=lambda P: P)
backward_waits_first = _backward("backward_waits_first", waits_first=True)
backward_skips_the_message = _backward("backward_skips_the_message", skips=True)


@wrong("05", "await")
async def backward_never_awaits_the_last(comm, *args):
    positions = args[-2]
    dq, dk, dv = await _backward()(comm, *args)
    if comm.size > 1:
        comm.rotate(dk, dv, length=len(positions[(comm.rank - 1) % comm.size]))
    return dq, dk, dv


@wrong("05", "dq, dk, dv")
async def backward_two_values(comm, *args):
    dq, dk, dv = await _backward()(comm, *args)
    return dk, dv


async def backward_right(comm, dout, q, k, v, out, lse, positions, mask):
    """dk and dv in one message with k and v, one hop behind the solution's."""
    P, rank, scale = comm.size, comm.rank, q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = torch.einsum("bhsd,bhsd->bhs", dout, out)
    for step in range(P):
        source, length = (rank - step) % P, len(positions[(rank - step - 1) % P])
        if step < P - 1:
            arriving = comm.rotate(k, v, length=length)
        visible = mask(positions[rank][:, None], positions[source][None, :])
        tile = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        if step > 0:
            dk, dv = await travelling  # noqa: F821
        dq, dk, dv = (a + b for a, b in zip((dq, dk, dv), tile))
        travelling = comm.rotate(dk, dv, length=length)
        if step < P - 1:
            k, v = await arriving
    return dq, *await travelling


# ---- 06 training step: (model, tokens, prompt, world) -> loss ----


def _mine(tokens, world):
    return rl.contiguous.positions(len(tokens) - 1, world.size, world.rank, world.device)


def _attention(world):
    return lambda q, k, v: rl.ring_attention(q, k, v, mask=rl.causal, layout=rl.contiguous, world=world)


def _reduced(model, share):
    share.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    loss = share.detach().clone()
    dist.all_reduce(loss)
    return loss


def _share(model, tokens, prompt, world, positions=None, reduction="sum", divisor=None):
    mine = _mine(tokens, world)
    logits = model(tokens[mine], mine if positions is None else positions, _attention(world))
    counts = mine + 1 >= prompt
    share = F.cross_entropy(logits[counts], tokens[mine + 1][counts], reduction=reduction)
    return share / (divisor or len(tokens) - prompt)


@wrong("06", "number of its own tokens")
def step_mean_of_means(model, tokens, prompt, world):
    return _reduced(model, _share(model, tokens, prompt, world, reduction="mean", divisor=world.size))


@wrong("06", "number of its own tokens")
def step_sum_of_means(model, tokens, prompt, world):
    return _reduced(model, _share(model, tokens, prompt, world, reduction="mean", divisor=1))


@wrong("06", "4 times too small")
def step_averages_as_ddp(model, tokens, prompt, world):
    loss = _reduced(model, _share(model, tokens, prompt, world))
    for p in model.parameters():
        p.grad /= world.size
    return loss


@wrong("06", "inside autograd")
def step_reduces_the_loss_inside_autograd(model, tokens, prompt, world):
    class Sum(torch.autograd.Function):  # as torch.distributed.nn.functional.all_reduce
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    loss = Sum.apply(_share(model, tokens, prompt, world))
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return loss.detach()


@wrong("06", "counts its positions from 0")
def step_local_positions(model, tokens, prompt, world):
    positions = torch.arange(len(_mine(tokens, world)), device=world.device)
    return _reduced(model, _share(model, tokens, prompt, world, positions=positions))


@wrong("06", "first token of the next shard")
def step_targets_inside_the_shard(model, tokens, prompt, world):
    mine = _mine(tokens, world)
    logits = model(tokens[mine], mine, _attention(world))
    own = tokens[mine]
    if world.rank == world.size - 1:
        own = torch.cat([own, tokens[-1:]])
    n = len(own) - 1
    counts = mine[:n] + 1 >= prompt
    share = F.cross_entropy(logits[:n][counts], own[1:][counts], reduction="sum") / (len(tokens) - prompt)
    return _reduced(model, share)


@wrong("06", "differ between the ranks")
def step_keeps_its_share(model, tokens, prompt, world):
    share = _share(model, tokens, prompt, world)
    share.backward()
    loss = share.detach().clone()
    dist.all_reduce(loss)
    return loss


@wrong("06", "the prompt counts")
def step_counts_the_prompt(model, tokens, prompt, world):
    return _reduced(model, _share(model, tokens, 0, world, divisor=len(tokens) - 1))


@wrong("06", "differ between the ranks")
def step_everything_wrong(model, tokens, prompt, world):
    """As if this rank's tokens were all there is."""
    mine = _mine(tokens, world)
    loss = F.cross_entropy(model(tokens[mine], mine, _attention(world)), tokens[mine + 1])
    loss.backward()
    return loss.detach()


@wrong("06", "the prompt counts")
def step_means_with_the_prompt(model, tokens, prompt, world):
    return _reduced(model, _share(model, tokens, 0, world, reduction="mean", divisor=world.size))


@wrong("06", "tokens[prompt] does not count")
def step_starts_one_place_late(model, tokens, prompt, world):
    return _reduced(model, _share(model, tokens, prompt + 1, world, divisor=len(tokens) - prompt))


@wrong("06", "25 times")
def step_sums(model, tokens, prompt, world):
    return _reduced(model, _share(model, tokens, prompt, world, divisor=1))


@wrong("06", "sum the shares")
def step_returns_its_share(model, tokens, prompt, world):
    share = _share(model, tokens, prompt, world)
    _reduced(model, share)
    return share.detach()


@wrong("06", "no gradient")
def step_no_backward(model, tokens, prompt, world):
    loss = _share(model, tokens, prompt, world).detach()
    dist.all_reduce(loss)
    return loss


@wrong("06", "all_reduce")
def step_leaves_out_ranks_without_targets(model, tokens, prompt, world):
    """Skips backward where nothing counts: the others wait for this rank's part of the ring."""
    mine = _mine(tokens, world)
    if (mine + 1 >= prompt).any():
        return _reduced(model, _share(model, tokens, prompt, world))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    dist.all_reduce(loss)
    return loss


@wrong("06", "which tokens")
def step_all_tokens_on_each_rank(model, tokens, prompt, world):
    mine = torch.arange(len(tokens) - 1, device=world.device)
    logits = model(tokens[mine], mine, _attention(world))
    counts = mine + 1 >= prompt
    return _reduced(model, F.cross_entropy(logits[counts], tokens[mine + 1][counts]) / world.size)


def step_right(model, tokens, prompt, world):
    """DDP's average undone by a factor P, with all gradients in one message."""
    mine = _mine(tokens, world)
    logits = model(tokens[mine], mine, _attention(world))
    losses = F.cross_entropy(logits, tokens[1:][mine], reduction="none") * (mine >= prompt - 1)
    count = (mine >= prompt - 1).sum()
    dist.all_reduce(count)
    loss = losses.sum() / count
    (loss * world.size).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    parts = (flat / world.size).split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts):
        p.grad = part.view_as(p)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


# ---- 07 gather by heads: (comm, q, k, v, positions, mask) -> (out, lse) ----


def _by_heads(
    name="program",
    at_once=1,
    ahead=True,
    keeps=False,
    scale=None,
    keys_at=torch.cat,
    rows_at=lambda positions, rank: positions[rank],
    query_heads=lambda g, H, G: slice(g * H // G, (g + 1) * H // G),
    own_v=False,
    expand=False,
    lengths_of=lambda positions: [len(p) for p in positions],
    finish=lambda outs, lses: (torch.cat(outs, 1), torch.cat(lses, 1)),
):
    """Gathering by heads with one thing changed."""

    async def program(comm, q, k, v, positions, mask):
        H, lengths = q.shape[1], lengths_of(positions)
        if expand:
            k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        G, kept = k.shape[1], []
        q_pos, k_pos = rows_at(positions, comm.rank), keys_at(positions)
        visible = mask(q_pos[:, None], k_pos[None, :])

        def post(g):
            return [comm.all_gather(x[:, g : g + at_once], lengths) for x in (k, v)]

        outs, lses, coming = [], [], post(0)
        for g in range(0, G, at_once):
            found = [await handle for handle in coming]
            kept.append(found if keeps else None)
            if ahead and g + at_once < G:
                coming = post(g + at_once)
            k_g, v_g = (torch.cat(x, 2) for x in found)
            if own_v:
                n = lengths[comm.rank]
                v_g = torch.cat([v[:, g : g + at_once]] * comm.size, 2)[:, :, : k_g.shape[2]] if n else v_g
            heads = query_heads(g, H, G) if at_once == 1 else slice(0, H)
            part = attend(q[:, heads], k_g, v_g, visible, scale or q.shape[-1] ** -0.5)
            outs.append(part.out)
            lses.append(part.lse)
            if not ahead and g + at_once < G:
                coming = post(g + at_once)
        return finish(outs, lses)

    program.__name__ = name
    return program


def _interleaved(outs, lses):
    return tuple(torch.stack(x, 2).flatten(1, 2) for x in (outs, lses))


gather_all_heads = _by_heads("gather_all_heads", at_once=4)
gather_keeps_what_arrived = _by_heads("gather_keeps_what_arrived", keeps=True)
gather_waits_first = _by_heads("gather_waits_first", ahead=False)
gather_expands_heads = _by_heads("gather_expands_heads", expand=True)
gather_without_scale = _by_heads("gather_without_scale", scale=1.0)


@wrong("07", "never applied")
async def gather_without_mask(comm, q, k, v, positions, mask):
    return await _by_heads()(comm, q, k, v, positions, rl.full)


gather_keys_in_order = _by_heads(
    "gather_keys_in_order", keys_at=lambda positions: torch.arange(sum(map(len, positions)))
)
gather_other_heads = _by_heads("gather_other_heads", query_heads=lambda g, H, G: slice(g, None, G), finish=_interleaved)
gather_other_heads_in_their_order = _by_heads(
    "gather_other_heads_in_their_order", query_heads=lambda g, H, G: slice(g, None, G)
)


gather_heads_backwards = _by_heads(
    "gather_heads_backwards", finish=lambda outs, lses: tuple(torch.cat(x, 1).flip(1) for x in (outs, lses))
)
gather_own_values = _by_heads("gather_own_values", own_v=True)
gather_without_lengths = _by_heads(
    "gather_without_lengths", lengths_of=lambda positions: [len(positions[0])] * len(positions)
)
gather_returns_out_alone = _by_heads("gather_returns_out_alone", finish=lambda outs, lses: torch.cat(outs, 1))
gather_lse_of_the_last_head = _by_heads(
    "gather_lse_of_the_last_head", finish=lambda outs, lses: (torch.cat(outs, 1), lses[-1])
)


@wrong("07", "deadlock")
async def gather_skips_empty_ranks(comm, q, k, v, positions, mask):
    if len(positions[comm.rank]) == 0:
        return q, q.sum(-1)
    return await _by_heads()(comm, q, k, v, positions, mask)


@wrong("07", "await")
async def gather_forgets_await(comm, q, k, v, positions, mask):
    k, v = (torch.cat(comm.all_gather(x, [len(p) for p in positions]), 2) for x in (k, v))
    return attend(q, k, v, mask(positions[comm.rank][:, None], torch.cat(positions)[None, :]), q.shape[-1] ** -0.5)


async def gather_right(comm, q, k, v, positions, mask):
    """k and v of a head in one message, and the next one posted before this one is awaited."""
    H, (_, G, _, D), scale = q.shape[1], k.shape, q.shape[-1] ** -0.5
    kv, lengths = torch.cat([k, v], -1), [p.numel() for p in positions]
    visible = mask(positions[comm.rank].unsqueeze(1), torch.cat(positions).unsqueeze(0))
    coming, parts = comm.all_gather(kv[:, :1], lengths), []
    for g in range(G):
        here, coming = coming, comm.all_gather(kv[:, g + 1 : g + 2], lengths) if g + 1 < G else None
        rows = torch.cat(await here, 2)
        mine = q.unflatten(1, (G, H // G))[:, g]
        parts.append(attend(mine, rows[..., :D], rows[..., D:], visible, scale))
    return torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1)


# ---- 08 ulysses: (comm, q, k, v, positions, mask) -> (out, lse) ----


def _ulysses(
    name="program",
    rows_at=torch.cat,
    scale=None,
    all_keys=False,
    expand=False,
    lengths_of=lambda positions: [len(p) for p in positions],
    join=lambda parts: torch.cat(parts, 1),
    own_lse=False,
    trades_back=True,
    equal_parts=False,
):
    """Ulysses with one thing changed."""

    async def program(comm, q, k, v, positions, mask):
        P, rank, (B, H, s, D) = comm.size, comm.rank, q.shape
        if expand:
            k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        G, lengths = k.shape[1], lengths_of(positions)
        q_heads = [slice(r * H // P, (r + 1) * H // P) for r in range(P)]
        k_heads = [slice(r * G // P, max((r + 1) * G // P, r * G // P + 1)) for r in range(P)]
        mine = k_heads[rank]
        if all_keys:
            k_heads = [slice(0, G)] * P
        arrived = []
        for x, heads in ((q, q_heads), (k, k_heads), (v, k_heads)):
            n = x.shape[1] // P if equal_parts else len(range(*heads[rank].indices(x.shape[1])))
            found = await comm.all_to_all([x[:, h] for h in heads], [(B, n, length, D) for length in lengths])
            arrived.append(torch.cat(found, 2))
        q, k, v = arrived
        if all_keys:
            k, v = k[:, mine], v[:, mine]
        rows = rows_at(positions)
        out, lse = attend(q, k, v, mask(rows[:, None], rows[None, :]), scale or D**-0.5)
        if not trades_back:
            return out, lse
        sizes = [len(p) for p in positions]
        back = await comm.all_to_all(list(out.split(sizes, 2)), [(B, H // P, s, D)] * P)
        lse_back = await comm.all_to_all(list(lse.split(sizes, 2)), [(B, H // P, s)] * P)
        return join(back), join([lse.split(sizes, 2)[rank]] * P if own_lse else lse_back)

    program.__name__ = name
    return program


ulysses_rows_in_order = _ulysses(
    "ulysses_rows_in_order", rows_at=lambda positions: torch.arange(sum(map(len, positions)))
)
ulysses_without_scale = _ulysses("ulysses_without_scale", scale=1.0)


@wrong("08", "never applied")
async def ulysses_without_mask(comm, q, k, v, positions, mask):
    return await _ulysses()(comm, q, k, v, positions, rl.full)


ulysses_sends_all_keys = _ulysses("ulysses_sends_all_keys", all_keys=True)
ulysses_expands_heads = _ulysses("ulysses_expands_heads", expand=True)
ulysses_without_shapes = _ulysses(
    "ulysses_without_shapes", lengths_of=lambda positions: [len(positions[0])] * len(positions)
)
ulysses_equal_parts_of_heads = _ulysses("ulysses_equal_parts_of_heads", equal_parts=True)
ulysses_heads_backwards = _ulysses("ulysses_heads_backwards", join=lambda parts: torch.cat(parts, 1).flip(1))
ulysses_keeps_its_lse = _ulysses("ulysses_keeps_its_lse", own_lse=True)
ulysses_never_trades_back = _ulysses("ulysses_never_trades_back", trades_back=False)


@wrong("08", "deadlock")
async def ulysses_skips_empty_ranks(comm, q, k, v, positions, mask):
    if q.shape[2] == 0:
        return q, q.sum(-1)
    return await _ulysses()(comm, q, k, v, positions, mask)


@wrong("08", "how the rows come back")
async def ulysses_own_rows_only(comm, q, k, v, positions, mask):
    at = positions[comm.rank]
    return attend(q, k, v, mask(at[:, None], at[None, :]), q.shape[-1] ** -0.5)


@wrong("08", "await")
async def ulysses_forgets_await(comm, q, k, v, positions, mask):
    found = comm.all_to_all(list(q.tensor_split(comm.size, 1)))
    return torch.cat(found, 2), q.sum(-1)


@wrong("08", "Nothing else travels")
async def ulysses_gathers_everything(comm, q, k, v, positions, mask):
    """All-gather attention: right, and no Ulysses."""
    lengths = [len(p) for p in positions]
    k, v = [torch.cat(await comm.all_gather(x, lengths), 2) for x in (k, v)]
    return attend(q, k, v, mask(positions[comm.rank][:, None], torch.cat(positions)[None, :]), q.shape[-1] ** -0.5)


async def ulysses_right(comm, q, k, v, positions, mask):
    """Head by head and rank by rank, through one exchange, out and lse in one message."""
    P, rank, (B, H, s, D), G = comm.size, comm.rank, q.shape, k.shape[1]
    mine = range(rank * H // P, (rank + 1) * H // P)
    groups = [sorted({h * G // H for h in range(r * H // P, (r + 1) * H // P)}) for r in range(P)]
    lengths, n = [len(p) for p in positions], len(groups[rank])
    sends = {r: (q[:, r * H // P : (r + 1) * H // P], k[:, groups[r]], v[:, groups[r]]) for r in range(P)}
    shapes = {r: ((B, len(mine), lengths[r], D), *[(B, n, lengths[r], D)] * 2) for r in range(P)}
    found = await comm.exchange(sends, shapes)
    q, k, v = (torch.cat([found[r][i] for r in range(P)], 2) for i in range(3))
    at = torch.cat(positions)
    out, lse = attend(q, k, v, mask(at.unsqueeze(1), at.unsqueeze(0)), D**-0.5)
    both = torch.cat([out, lse.unsqueeze(-1)], -1).split(lengths, 2)
    both = torch.cat(await comm.all_to_all(list(both), [(B, len(mine), s, D + 1)] * P), 1)
    return both[..., :D], both[..., D]


# ---- 09 zigzag rope: (comm, q, k, v) -> (out, mine) ----


def _blocks(S, P, i):
    return torch.arange(S * i // (2 * P), S * (i + 1) // (2 * P))


def _mirrored(S, P, r):
    return torch.cat([_blocks(S, P, r), _blocks(S, P, 2 * P - 1 - r)])


def _zigzag(
    name="program",
    shard=_mirrored,
    turns=lambda q, k, v, mine: (rope(q, mine), rope(k, mine), v),
    masked=lambda positions: positions,
    place=None,
    lengths_of=lambda positions: [len(p) for p in positions],
):
    """The layer with one thing changed."""

    async def program(comm, q, k, v):
        P, S, out = comm.size, q.shape[2], torch.empty_like(q)
        positions = [shard(S, P, r) for r in range(P)]
        mine = positions[comm.rank]
        q, k, v = (x[:, :, mine] for x in (q, k, v))
        part = await published_ring_forward(comm, *turns(q, k, v, mine), masked(positions), rl.causal)
        rows = torch.cat(await comm.all_gather(part.out, lengths_of(positions)), 2)
        order = torch.cat(positions)
        if place:
            return place(rows, order), mine
        out[:, :, order] = rows
        return out, mine

    program.__name__ = name
    return program


def _from_0(mine):
    return torch.arange(len(mine))


zigzag_contiguous = _zigzag("zigzag_contiguous", shard=lambda S, P, r: torch.arange(S * r // P, S * (r + 1) // P))
zigzag_not_mirrored = _zigzag(
    "zigzag_not_mirrored", shard=lambda S, P, r: torch.cat([_blocks(S, P, r), _blocks(S, P, P + r)])
)
zigzag_striped = _zigzag("zigzag_striped", shard=lambda S, P, r: torch.arange(r, S, P))


@wrong("09", "not divisible by 2P")
async def zigzag_drops_the_rest(comm, *args):
    def equal(S, P, r):
        n = S // (2 * P)
        return torch.cat([torch.arange(n * i, n * (i + 1)) for i in (r, 2 * P - 1 - r)])

    return await _zigzag(shard=equal)(comm, *args)


@wrong("09", "the same positions as the mask")
async def zigzag_local_rope(comm, *args):
    def turns(q, k, v, mine):
        return rope(q, _from_0(mine)), rope(k, _from_0(mine)), v

    return await _zigzag(turns=turns)(comm, *args)


@wrong("09", "both are counted from 0")
async def zigzag_all_local(comm, *args):
    def turns(q, k, v, mine):
        return rope(q, _from_0(mine)), rope(k, _from_0(mine)), v

    return await _zigzag(turns=turns, masked=lambda positions: [_from_0(p) for p in positions])(comm, *args)


zigzag_without_rope = _zigzag("zigzag_without_rope", turns=lambda q, k, v, mine: (q, k, v))
zigzag_rope_of_q_alone = _zigzag("zigzag_rope_of_q_alone", turns=lambda q, k, v, mine: (rope(q, mine), k, v))
zigzag_rope_of_v_too = _zigzag(
    "zigzag_rope_of_v_too", turns=lambda q, k, v, mine: (rope(q, mine), rope(k, mine), rope(v, mine))
)


@wrong("09", "in the order of the ranks")
async def zigzag_mask_in_rank_order(comm, *args):
    def masked(positions):
        return list(torch.arange(sum(map(len, positions))).split([len(p) for p in positions]))

    return await _zigzag(masked=masked)(comm, *args)


zigzag_not_put_back = _zigzag("zigzag_not_put_back", place=lambda rows, order: rows)
zigzag_permuted_twice = _zigzag("zigzag_permuted_twice", place=lambda rows, order: rows[:, :, order])
zigzag_without_lengths = _zigzag("zigzag_without_lengths", lengths_of=lambda positions: None)


@wrong("09", "shape")
async def zigzag_own_rows_alone(comm, q, k, v):
    out, mine = await _zigzag()(comm, q, k, v)
    return out[:, :, mine], mine


@wrong("09", "return out, mine")
async def zigzag_out_alone(comm, *args):
    return (await _zigzag()(comm, *args))[0]


@wrong("09", "rows of k and v go round")
async def zigzag_computes_everything(comm, q, k, v):
    """Every rank gathers what every rank has anyway, and attends to all of it."""
    S = q.shape[2]
    at, mine = torch.arange(S), _mirrored(S, comm.size, comm.rank)
    await comm.all_gather(q)
    return attend(rope(q, at), rope(k, at), v, rl.causal(at[:, None], at[None, :]), q.shape[-1] ** -0.5).out, mine


async def zigzag_right(comm, q, k, v):
    """Rotated before it is split; the late block first; put back through the inverse permutation."""
    S, P = q.shape[2], comm.size
    at = torch.arange(S)
    positions = [torch.cat([_blocks(S, P, 2 * P - 1 - r), _blocks(S, P, r)]) for r in range(P)]
    mine = positions[comm.rank]
    shards = [x[:, :, mine] for x in (rope(q, at), rope(k, at), v)]
    out, _ = await published_ring_forward(comm, *shards, positions, rl.causal)
    rows = await comm.all_gather(out, [len(p) for p in positions])
    return torch.cat(rows, 2).index_select(2, torch.cat(positions).argsort()), mine


WRONG["01"] += [
    (pass_only_rank_0_differs, "4 turns"),
    (pass_without_modulo, "% size"),
    (pass_half_a_token, "size of what is sent"),
]
WRONG["03"] += [
    (overlap_awaits_the_send_first, "(send)"),
    (overlap_never_waits, "wait before it is sent on"),
    (overlap_a_message_too_many, "last step"),
    (overlap_computes_on_its_own_only, "computed on twice"),
    (overlap_writes_what_is_sent, "while it was being sent"),
]
WRONG["04"] += [
    (forward_wrong_direction, "minus, not plus"),
    (forward_local_mask, "positions[rank] and positions[source]"),
    (forward_skips_the_message, "never the message"),
    (forward_a_hop_too_many, "P - 1 hops"),
    (forward_adds, "they are added"),
    (forward_keeps_the_first_lse, "Keep both of merge"),
    (forward_waits_first, "nothing is computed while"),
    (forward_a_step_less, "P computations, and P - 1 rotates"),
    (forward_without_scale, "divided by sqrt(D)"),
    (forward_forgets_await, "await"),
]
WRONG["05"] += [
    (backward_a_hop_less, "one rank before home"),
    (backward_delta_per_block, "the out of one block"),
    (backward_without_delta, "delta is missing"),
    (backward_lse_of_the_block, "the lse of one block"),
    (backward_drops_what_arrives, "are not added"),
    (backward_local_mask, "places in the shard"),
    (backward_wrong_direction, "the block of comm.rank + step"),
    (backward_kv_all_the_way, "only dk, dv make the hop home"),
    (backward_waits_first, "only the hop home has to be exposed"),
    (backward_skips_the_message, "never the message"),
]
WRONG["07"] += [
    (gather_all_heads, "gathered all at once"),
    (gather_keeps_what_arrived, "let go of head g"),
    (gather_waits_first, "nothing is computed while"),
    (gather_expands_heads, "with their G heads"),
    (gather_without_scale, "D ** -0.5"),
    (gather_keys_in_order, "in the order of the ranks"),
    (gather_other_heads, "lie side by side"),
    (gather_other_heads_in_their_order, "lie side by side"),
    (gather_heads_backwards, "opposite order"),
    (gather_own_values, "which rows, heads and positions"),
    (gather_without_lengths, "lengths="),
    (gather_returns_out_alone, "out, lse"),
    (gather_lse_of_the_last_head, "lse"),
]
WRONG["08"] += [
    (ulysses_rows_in_order, "torch.cat(positions)"),
    (ulysses_without_scale, "D ** -0.5"),
    (ulysses_sends_all_keys, "Nothing else travels"),
    (ulysses_expands_heads, "Nothing else travels"),
    (ulysses_without_shapes, "shapes= of comm.all_to_all"),
    (ulysses_equal_parts_of_heads, "heads do not"),
    (ulysses_heads_backwards, "opposite order"),
    (ulysses_keeps_its_lse, "the same way back"),
    (ulysses_never_trades_back, "trade back"),
]
WRONG["09"] += [
    (zigzag_contiguous, "a contiguous shard"),
    (zigzag_not_mirrored, "the mirrored one"),
    (zigzag_striped, "these are stripes"),
    (zigzag_without_rope, "not rotated at all"),
    (zigzag_rope_of_q_alone, "k is not"),
    (zigzag_rope_of_v_too, "v is rotated too"),
    (zigzag_not_put_back, "row i belongs at position"),
    (zigzag_permuted_twice, "permuted once more"),
    (zigzag_without_lengths, "lengths="),
]
WRONG["10"] = train_sharded.WRONG
WRONG["11"] = decode.WRONG
WRONG["12"] = packed_step.WRONG

RIGHT = {
    "01": [pass_right, pass_batched, pass_odd_sends_first],
    "02": [reduce_right],
    "03": [overlap_right],
    "04": [forward_right],
    "05": [backward_right],
    "06": [step_right],
    "07": [gather_right],
    "08": [ulysses_right],
    "09": [zigzag_right],
    "10": train_sharded.RIGHT,
    "11": decode.RIGHT,
    "12": packed_step.RIGHT,
}

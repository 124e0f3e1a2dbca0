"""Answers to the exercises of notebook 05: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (answer, the stage that must reject it, a word its message must hold at help=2). An answer
is a function, and for 5c a pair of rank programs. RIGHT[exercise] must pass, on real processes too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import ringlearn as rl
from ringlearn.flash import attend, attend_backward
from ringlearn.partial import accumulation_dtype

from .edits import edited, registry

WRONG, wrong = registry("5a", "5b", "5c")

# ---- 5a ----


def pass_solution(x, rank, P):
    if P == 1:
        return x.clone()
    x = x.contiguous()
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % P)
        dist.recv(received, (rank - 1) % P)
    else:
        dist.recv(received, (rank - 1) % P)
        dist.send(x, (rank + 1) % P)
    return received


def pass_odd_first(x, rank, P):
    received = torch.zeros(x.shape, dtype=x.dtype)
    calls = [lambda: dist.send(tensor=x.contiguous(), dst=(rank + 1) % P), lambda: dist.recv(received, (rank - 1) % P)]
    if P == 1:
        received.copy_(x)
        return received
    for one in calls if rank % 2 else calls[::-1]:
        one()
    return received


def pass_from_anyone(x, rank, P):
    buffer = torch.empty(x.numel(), dtype=x.dtype)
    if P == 1:
        return x
    if rank % 2:
        dist.recv(buffer)
    dist.send(x.reshape(-1), 0 if rank == P - 1 else rank + 1)
    if rank % 2 == 0:
        dist.recv(buffer, src=None)
    return buffer.view(x.shape)


@wrong("5a", "value", "nobody gets to the other")
def pass_all_send_first(x, rank, P):
    received = torch.empty_like(x)
    dist.send(x, (rank + 1) % P)
    dist.recv(received, (rank - 1) % P)
    return received


@wrong("5a", "value", "nobody gets to the other")
def pass_all_receive_first(x, rank, P):
    received = torch.empty_like(x)
    dist.recv(received, (rank - 1) % P)
    dist.send(x, (rank + 1) % P)
    return received


pass_rank_0_alone_differs = edited(
    pass_solution,
    "pass_rank_0_alone_differs",
    ("x.clone()", "x"),
    ("% 2 == 0:", "== 0:\n    dist.recv(received, (rank - 1) % P)\n    dist.send(x, (rank + 1) % P)\nelse:"),
    ("else:\ndist.recv(received, (rank - 1) % P)\ndist.send(x, (rank + 1) % P)", ""),
)
pass_last_rank_alone_differs = edited(
    pass_solution, "pass_last_rank_alone_differs", ("x.clone()", "x"), ("% 2 == 0", "< P - 1")
)


@wrong("5a", "value", "overwritten")
def pass_one_buffer(x, rank, P):
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % P)
        dist.recv(x, (rank - 1) % P)
    else:
        dist.recv(x, (rank - 1) % P)
        dist.send(x, (rank + 1) % P)
    return x


@wrong("5a", "value", "sent back what it received")
def pass_one_buffer_copied(x, rank, P):
    x = x.clone()
    return pass_one_buffer(x, rank, P)


pass_to_itself = edited(pass_solution, "pass_to_itself", ("if P == 1:\nreturn x.clone()\nx = x.contiguous()", ""))


@wrong("5a", "value", "other way")
def pass_other_way(x, rank, P):
    if P == 1:
        return x
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank - 1) % P)
        dist.recv(received, (rank + 1) % P)
    else:
        dist.recv(received, (rank + 1) % P)
        dist.send(x, (rank - 1) % P)
    return received


@wrong("5a", "value", "modulo P")
def pass_without_modulo(x, rank, P):
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, rank + 1)
        dist.recv(received, rank - 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(x, rank + 1)
    return received


@wrong("5a", "value", "rank 0")
def pass_is_no_ring(x, rank, P):
    received = torch.zeros_like(x)  # not empty_like: the page of wrong answers shows what stays in it
    if rank < P - 1:
        dist.send(x, rank + 1)
    if rank > 0:
        dist.recv(received, rank - 1)
    return received


@wrong("5a", "value", "its own x")
def pass_returns_x(x, rank, P):
    pass_solution(x, rank, P)
    return x


@wrong("5a", "value", "None")
def pass_returns_nothing(x, rank, P):
    pass_solution(x, rank, P)


pass_returns_what_recv_returns = edited(
    pass_solution,
    "pass_returns_what_recv_returns",
    ("x = x.contiguous()\nreceived = torch.empty_like(x)", "buffer = torch.empty_like(x)"),
    (
        "dist.send(x, (rank + 1) % P)\ndist.recv(received, (rank - 1) % P)",
        "dist.send(x, (rank + 1) % P)\nreceived = dist.recv(buffer, (rank - 1) % P)",
    ),
    ("else:\ndist.recv(received, (rank - 1) % P)", "else:\n    received = dist.recv(buffer, (rank - 1) % P)"),
)


@wrong("5a", "value", "5b")
def pass_with_isend(x, rank, P):
    return exchange_solution(x, rank, P)


@wrong("5a", "adversarial", "torch.empty_like(x)")
def pass_float_buffer(x, rank, P):
    if P == 1:
        return x
    received = torch.empty(x.shape)
    if rank % 2 == 0:
        dist.send(x.contiguous(), (rank + 1) % P)
        dist.recv(received, (rank - 1) % P)
    else:
        dist.recv(received, (rank - 1) % P)
        dist.send(x.contiguous(), (rank + 1) % P)
    return received


@wrong("5a", "adversarial", "contiguous")
def pass_as_it_lies(x, rank, P):
    if P == 1:
        return x
    return pass_to_itself(x, rank, P)


@wrong("5a", "value", "all_gather")
def pass_gathers(x, rank, P):
    everything = [torch.empty_like(x) for _ in range(P)]
    dist.all_gather(everything, x)
    return everything[rank - 1]


@wrong("5a", "cost", "sends once")
def pass_twice(x, rank, P):
    pass_solution(x, rank, P)
    return pass_solution(x, rank, P)


@wrong("5a", "value", "wait() for it")
def pass_sends_more_than_is_received(x, rank, P):
    if P == 1:
        return x
    received = torch.empty_like(x)
    if rank == 0:
        dist.isend(x, 1)
    return pass_solution(x, rank, P) if rank else received


@wrong("5a", "value", "NameError")
def pass_typing_error(x, rank, P):
    return received  # noqa: F821


@wrong("5a", "value", "without a message")
def pass_never_ends(x, rank, P):
    while True:
        rank = rank + 1


@wrong("5a", "value", "take the call out")
def pass_joins_a_group(x, rank, P):
    dist.init_process_group("gloo")
    return pass_solution(x, rank, P)


@wrong("5a", "value", "SystemExit")
def pass_ends_the_process(x, rank, P):
    raise SystemExit(1)


REMEMBERED: dict = {}


@wrong("5a", "processes", "own copy")
def pass_by_a_global(x, rank, P):
    """Right in one process, where all ranks see the same dict."""
    REMEMBERED[rank] = x
    received = pass_solution(x, rank, P)
    return REMEMBERED[(rank - 1) % P].clone() if P > 1 else received


# ---- 5b ----


def exchange_solution(x, rank, P):
    if P == 1:
        return x.clone()
    x = x.contiguous()
    received = torch.empty_like(x)
    handles = [dist.isend(x, (rank + 1) % P), dist.irecv(received, (rank - 1) % P)]
    for handle in handles:
        handle.wait()
    return received


def exchange_batch(x, rank, P):
    if P == 1:
        return x
    received = torch.empty(x.shape, dtype=x.dtype)
    ops = [
        dist.P2POp(dist.irecv, received, (rank - 1) % P),
        dist.P2POp(op=dist.isend, tensor=x.contiguous(), peer=(rank + 1) % P),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def exchange_batch_send_first(x, rank, P):
    if P == 1:
        return x.clone()
    x = x.contiguous()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % P)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % P)
    sending, receiving = dist.batch_isend_irecv([send, receive])
    receiving.wait()
    sending.wait()
    return received


@wrong("5b", "value", "return the buffer")
def exchange_returns_a_handle(x, rank, P):
    if P == 1:
        return x.clone()
    buffer = torch.empty_like(x)
    sending, received = dist.isend(x, (rank + 1) % P), dist.irecv(buffer, (rank - 1) % P)
    sending.wait()
    received.wait()
    return received


def exchange_isend_then_recv(x, rank, P):
    if P == 1:
        return x
    x = x.contiguous()
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % P)
    dist.recv(received, (rank - 1) % P)
    sending.wait()
    return received


exchange_looks_again = edited(
    exchange_isend_then_recv,
    "exchange_looks_again",
    (
        "sending = dist.isend(x, (rank + 1) % P)\ndist.recv(received, (rank - 1) % P)\nsending.wait()",
        "handles = [dist.isend(x, (rank + 1) % P), dist.irecv(received, (rank - 1) % P)]\n"
        "while not all(handle.is_completed() for handle in handles):\n"
        "    pass\n"
        "for handle in handles:\n"
        "    handle.wait()",
    ),
)


@wrong("5b", "value", "dist.isend or dist.irecv")
def exchange_batches_what_blocks(x, rank, P):
    if P == 1:
        return x
    received = torch.empty_like(x)
    ops = [dist.P2POp(dist.send, x.contiguous(), (rank + 1) % P), dist.P2POp(dist.recv, received, (rank - 1) % P)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


@wrong("5b", "value", "keep every handle")
def exchange_send_dropped(x, rank, P):
    received = torch.empty_like(x)
    dist.isend(x, (rank + 1) % P)
    dist.irecv(received, (rank - 1) % P).wait()
    return received


@wrong("5b", "value", "keep every handle")
def exchange_send_not_waited_for(x, rank, P):
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % P)  # noqa: F841
    dist.recv(received, (rank - 1) % P)
    return received


@wrong("5b", "value", "keep every handle")
def exchange_receive_not_waited_for(x, rank, P):
    received = torch.zeros_like(x)
    sending = dist.isend(x, (rank + 1) % P)
    dist.irecv(received, (rank - 1) % P)
    sending.wait()
    return received


@wrong("5b", "value", "keep every handle")
def exchange_nothing_waited_for(x, rank, P):
    received = torch.zeros_like(x)
    dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % P), dist.P2POp(dist.irecv, received, (rank - 1) % P)]
    )
    return received


@wrong("5b", "value", "Post both")
def exchange_waits_at_once(x, rank, P):
    received = torch.empty_like(x)
    dist.isend(x, (rank + 1) % P).wait()
    dist.irecv(received, (rank - 1) % P).wait()
    return received


@wrong("5b", "value", "receive into another")
def exchange_one_buffer(x, rank, P):
    handles = [dist.isend(x, (rank + 1) % P), dist.irecv(x, (rank - 1) % P)]
    for handle in handles:
        handle.wait()
    return x


@wrong("5b", "value", "received")
def exchange_reads_early(x, rank, P):
    received = torch.zeros_like(x)
    handles = [dist.isend(x, (rank + 1) % P), dist.irecv(received, (rank - 1) % P)]
    result = received.clone()
    for handle in handles:
        handle.wait()
    return result


@wrong("5b", "value", "change it later")
def exchange_writes_early(x, rank, P):
    received = torch.empty_like(x)
    sent = x.clone()
    handles = [dist.isend(sent, (rank + 1) % P), dist.irecv(received, (rank - 1) % P)]
    sent.zero_()
    for handle in handles:
        handle.wait()
    return received


@wrong("5b", "value", "with P = 1")
def exchange_itself(x, rank, P):
    received = torch.empty_like(x)
    handles = [dist.isend(x, (rank + 1) % P), dist.irecv(received, (rank - 1) % P)]
    for handle in handles:
        handle.wait()
    return received


@wrong("5b", "adversarial", "contiguous")
def exchange_as_it_lies(x, rank, P):
    return x if P == 1 else exchange_itself(x, rank, P)


@wrong("5b", "adversarial", "transposed too")
def exchange_contiguous_sent_only(x, rank, P):
    if P == 1:
        return x
    received = torch.empty_like(x)
    handles = [dist.isend(x.contiguous(), (rank + 1) % P), dist.irecv(received, (rank - 1) % P)]
    for handle in handles:
        handle.wait()
    return received


exchange_other_way = edited(
    exchange_solution,
    "exchange_other_way",
    ("return x.clone()\nx = x.contiguous()", "return x"),
    ("+ 1) % P), dist.irecv(received, (rank -", "- 1) % P), dist.irecv(received, (rank +"),
)


# ---- 5c ----


async def forward_solution(comm, q, k, v, positions, mask):
    P, acc = comm.size, accumulation_dtype(q.dtype)
    total = rl.identity((*q.shape[:3], v.shape[-1]), acc, q.device)
    for step in range(P):
        source = (comm.rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[source - 1]))
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        total = rl.merge(total, attend(q.to(acc), k.to(acc), v.to(acc), visible, q.shape[-1] ** -0.5))
        if step < P - 1:
            k, v = await arriving
    return total


async def backward_solution(comm, dout, q, k, v, out, lse, positions, mask):
    P, acc = comm.size, lse.dtype
    dout, q = dout.to(acc), q.to(acc)
    delta = (dout * out.to(acc)).sum(-1)
    dq = torch.zeros_like(q)
    for step in range(P):
        source = (comm.rank - step) % P
        length = len(positions[source - 1])
        if step < P - 1:
            arriving = comm.rotate(k, v, length=length)
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        tile = attend_backward(dout, q, k.to(acc), v.to(acc), lse, delta, visible, q.shape[-1] ** -0.5)
        dq += tile[0]
        dk, dv = tile[1:]
        if step > 0:
            earlier = await travelling  # noqa: F821
            dk, dv = dk + earlier[0], dv + earlier[1]
        travelling = comm.rotate(dk, dv, length=length)
        if step < P - 1:
            k, v = await arriving
    dk, dv = await travelling
    return dq, dk, dv


SOLUTION = forward_solution, backward_solution


async def forward_of_parts(comm, q, k, v, positions, mask):
    """Sends k and v apart, skips what is masked, merges at the end."""
    parts, scale = [], q.shape[3] ** -0.5
    for step in range(comm.size):
        here = (comm.rank - step) % comm.size
        visible = mask(positions[comm.rank][:, None], positions[here][None, :])
        if visible.any():
            parts.append(attend(q.float(), k.float(), v.float(), visible, scale))
        if step + 1 < comm.size:
            n = len(positions[(here - 1) % comm.size])
            hk, hv = comm.rotate(k, length=n), comm.rotate(v, length=n)
            v = await hv  # awaited in another order than posted: nothing is wrong with that
            k = await hk
    empty = rl.identity((*q.shape[:3], v.shape[3]), device=q.device)
    out, lse = rl.merge_all([empty, *parts])
    return out, lse


async def backward_late(comm, dout, q, k, v, out, lse, positions, mask):
    """Waits for the keys before it computes, and awaits in another order than it posted."""
    P, scale = comm.size, q.shape[3] ** -0.5
    delta = (dout.float() * out).sum(-1)
    dq = q.new_zeros(q.shape, dtype=torch.float32)
    dk, dv = (torch.zeros(x.shape, device=x.device) for x in (k, v))
    for step in range(P):
        here = (comm.rank - step) % P
        visible = mask(positions[comm.rank][:, None], positions[here][None, :])
        tile = attend_backward(dout.float(), q.float(), k.float(), v.float(), lse, delta, visible, scale)
        dq, dk, dv = dq + tile[0], dk + tile[1], dv + tile[2]
        n = len(positions[(here - 1) % P])
        keys = comm.rotate(k, v, length=n) if step < P - 1 else None
        gradients = comm.rotate(dk, dv, length=n)
        dk, dv = await gradients
        if keys:
            k, v = await keys
    return [dq, dk, dv]


async def forward_wrong_direction(comm, q, k, v, positions, mask):
    P, total = comm.size, rl.identity((*q.shape[:3], v.shape[-1]))
    for step in range(P):
        source = (comm.rank - step) % P
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        total = rl.merge(total, attend(q, k, v, visible, q.shape[-1] ** -0.5))
        if step < P - 1:
            after, before = (comm.rank + 1) % P, (comm.rank - 1) % P
            shape = (*k.shape[:2], len(positions[(comm.rank + step + 1) % P]), k.shape[3])
            k, v = (await comm.exchange({before: (k, v)}, {after: (shape, shape)}))[after]
    return total


SHARDS: dict = {}


# Sends what it should, and takes the keys from a dict that all simulated ranks share.
forward_reads_a_global = edited(
    forward_solution,
    "forward_reads_a_global",
    (
        "P, acc = comm.size, accumulation_dtype(q.dtype)",
        "SHARDS[comm.rank] = k, v\nP, acc = comm.size, accumulation_dtype(q.dtype)",
    ),
    ("(comm.rank - step) % P", "(comm.rank - step) % P\nk, v = SHARDS[source]"),
    ("k, v = await", "await"),
)


SETTINGS: dict = {}


forward_set_up_by_rank_0 = edited(
    forward_solution,
    "forward_set_up_by_rank_0",
    (
        "P, acc = comm.size, accumulation_dtype(q.dtype)",
        "if comm.rank == 0:\n"
        '    SETTINGS["scale"] = q.shape[-1] ** -0.5\n'
        "P, acc = comm.size, accumulation_dtype(q.dtype)",
    ),
    (
        "total = rl.merge(total, attend(q.to(acc), k.to(acc), v.to(acc), visible, q.shape[-1] ** -0.5))",
        'total = rl.merge(total, attend(q.to(acc), k.to(acc), v.to(acc), visible, SETTINGS["scale"]))',
    ),
)


TOTALS: dict = {}


async def forward_keeps_its_total(comm, q, k, v, positions, mask):
    """Allocates once per rank and shape, and forgets to start anew."""
    key = comm.rank, comm.size, q.shape, k.shape, q.dtype
    P = comm.size
    total = TOTALS.get(key, rl.identity((*q.shape[:3], v.shape[-1])))
    for step in range(P):
        source = (comm.rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[source - 1]))
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        total = rl.merge(total, attend(q, k, v, visible, q.shape[-1] ** -0.5))
        if step < P - 1:
            k, v = await arriving
    TOTALS[key] = rl.Partial(total.out.clone(), total.lse.clone())
    return total


forward_on_the_cpu = edited(
    forward_solution,
    "forward_on_the_cpu",
    (
        "total = rl.identity((*q.shape[:3], v.shape[-1]), acc, q.device)",
        "total = rl.Partial(torch.zeros(*q.shape[:3], v.shape[-1]), torch.full(q.shape[:3], -torch.inf))",
    ),
)


async def forward_on_the_cpu_skipping_what_is_masked(comm, q, k, v, positions, mask):
    P, total = comm.size, rl.identity(q.shape)
    for step in range(P):
        source = (comm.rank - step) % P
        if step < P - 1:
            arriving = comm.rotate(k, v, length=len(positions[source - 1]))
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        if visible.any():
            total = rl.merge(total, attend(q, k, v, visible, q.shape[-1] ** -0.5))
        if step < P - 1:
            k, v = await arriving
    return total


async def forward_rank_0_does_not_wait(comm, q, k, v, positions, mask):
    P, total = comm.size, rl.identity((*q.shape[:3], v.shape[-1]))
    for step in range(P):
        source = (comm.rank - step) % P
        if comm.rank == 0 and step > 0:
            break  # under a causal mask the first rank needs no other keys
        visible = mask(positions[comm.rank][:, None], positions[source][None, :])
        total = rl.merge(total, attend(q, k, v, visible, q.shape[-1] ** -0.5))
        if step < P - 1:
            k, v = await comm.rotate(k, v, length=len(positions[source - 1]))
    return total


async def forward_asks_torch_who_it_is(comm, q, k, v, positions, mask):
    rank = dist.get_rank()
    return await forward_solution(comm, q, k, v, positions, mask) if rank >= 0 else None


async def forward_in_float32(comm, q, k, v, positions, mask):
    return await forward_solution(comm, q.float(), k.float(), v.float(), positions, mask)


async def forward_returns_out_alone(comm, q, k, v, positions, mask):
    return (await forward_solution(comm, q, k, v, positions, mask)).out


def _backward(name, dtype=None, device=None, odd_ranks_post_first=False, hops=0, moves=None):
    """The solution with one thing changed."""

    async def backward(comm, dout, q, k, v, out, lse, positions, mask):
        P, acc = comm.size, lse.dtype
        dout, q = dout.to(acc), q.to(acc)
        delta = (dout * out.to(acc)).sum(-1)
        dq = torch.zeros(q.shape, device=device or q.device)
        given = k.dtype
        travelling = None
        for step in range(P):
            source = (comm.rank - step) % P
            length = len(positions[source - 1])
            late = odd_ranks_post_first and comm.rank % 2
            if step < P - 1 and not late:
                arriving = comm.rotate(k, v, length=length)
            visible = mask(positions[comm.rank][:, None], positions[source][None, :])
            tile = attend_backward(dout, q, k.to(acc), v.to(acc), lse, delta, visible, q.shape[-1] ** -0.5)
            dq = dq + tile[0]
            dk, dv = tile[1:]
            if travelling is not None:
                earlier = await travelling
                if moves:
                    earlier = [moves(x) for x in earlier]
                dk, dv = dk + earlier[0].to(acc), dv + earlier[1].to(acc)
            if hops == -1 and step == P - 1:
                return dq, dk, dv
            travelling = comm.rotate(*(x.to(given if dtype == "given" else acc) for x in (dk, dv)), length=length)
            if step < P - 1 and late:
                arriving = comm.rotate(k, v, length=length)
            if step < P - 1:
                k, v = await arriving
        dk, dv = await travelling
        return dq, dk.to(acc), dv.to(acc)

    backward.__name__ = name
    return backward


backward_dkv_as_they_came = _backward("backward_dkv_as_they_came", dtype="given")
backward_brings_gradients_to_the_cpu = _backward("backward_brings_gradients_to_the_cpu", moves=lambda x: x.cpu())
backward_and_back = _backward("backward_and_back", moves=lambda x: x.to(device="cpu").to(x.device))
backward_on_the_cpu = _backward("backward_on_the_cpu", device="cpu")
backward_posts_in_another_order = _backward("backward_posts_in_another_order", odd_ranks_post_first=True)
backward_stays_one_hop_away = _backward("backward_stays_one_hop_away", hops=-1)


async def backward_mixes_up_what_it_awaits(comm, dout, q, k, v, out, lse, positions, mask):
    """Two messages are under way; the one that was posted first is taken for the other."""
    P, scale = comm.size, q.shape[3] ** -0.5
    delta = (dout.float() * out).sum(-1)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for step in range(P):
        here = (comm.rank - step) % P
        visible = mask(positions[comm.rank][:, None], positions[here][None, :])
        tile = attend_backward(dout, q, k, v, lse, delta, visible, scale)
        dq, dk, dv = dq + tile[0], dk + tile[1], dv + tile[2]
        n = len(positions[(here - 1) % P])
        first, second = comm.rotate(k, v, length=n), comm.rotate(dk, dv, length=n)
        dk, dv = await first
        k, v = await second
    return dq, dk, dv


CALLS = {"number": 0}


async def backward_counts_its_calls(comm, dout, q, k, v, out, lse, positions, mask):
    """Rank 0's counter decides; in one process it is everybody's."""
    if comm.rank == 0:
        CALLS["number"] += 1
    CALLS["number"] += 0
    if CALLS["number"] == 0:
        raise ValueError("call number 0")
    return await backward_solution(comm, dout, q, k, v, out, lse, positions, mask)


WRONG["5a"] += [
    (pass_rank_0_alone_differs, "cost", "every other rank"),
    (pass_last_rank_alone_differs, "cost", "every other rank"),
    (pass_to_itself, "value", "with P = 1"),
    (pass_returns_what_recv_returns, "value", "return the buffer"),
]
WRONG["5b"] += [
    (pass_solution, "cost", "under way at once"),
    (exchange_solution, "cost", "256 MiB"),
    (exchange_isend_then_recv, "cost", "Hand both over together"),
    (exchange_looks_again, "value", "until wait() has returned"),
    (exchange_other_way, "value", "other way"),
]
WRONG["5c"] += [
    ((forward_wrong_direction, backward_solution), "value", "3b"),
    ((forward_returns_out_alone, backward_solution), "value", "not the pair"),
    ((forward_rank_0_does_not_wait, backward_solution), "value", "deadlock"),
    ((forward_asks_torch_who_it_is, backward_solution), "value", "process group"),
    ((forward_keeps_its_total, backward_solution), "adversarial", "from one call to the next"),
    ((forward_on_the_cpu, backward_solution), "adversarial", "device=q.device"),
    ((forward_on_the_cpu_skipping_what_is_masked, backward_solution), "adversarial", "rl.identity"),
    ((forward_in_float32, backward_solution), "cost", "in which they came"),
    ((forward_reads_a_global, backward_solution), "processes", "share nothing"),
    ((forward_set_up_by_rank_0, backward_solution), "processes", "share nothing"),
    ((forward_solution, backward_posts_in_another_order), "gradient", "in which they are posted"),
    ((forward_solution, backward_mixes_up_what_it_awaits), "gradient", "in which they are posted"),
    ((forward_solution, backward_stays_one_hop_away), "gradient", "wrong"),
    ((forward_solution, backward_on_the_cpu), "gradient", "device=q.device"),
    ((forward_solution, backward_brings_gradients_to_the_cpu), "gradient", "moved to the CPU"),
    ((forward_solution, backward_and_back), "gradient", "moved to the CPU"),
    ((forward_solution, backward_dkv_as_they_came), "cost", "each hop would round"),
    ((forward_solution, backward_counts_its_calls), "processes", "share nothing"),
]

RIGHT = {
    "5a": [pass_solution, pass_odd_first, pass_from_anyone],
    "5b": [exchange_batch, exchange_batch_send_first],
    "5c": [SOLUTION, (forward_of_parts, backward_late), (forward_of_parts, backward_solution)],
}

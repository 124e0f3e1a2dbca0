"""What runs a learner's rank program: each failure becomes a Wrong that names the rank, the line and the remedy."""

from __future__ import annotations

import pytest
import torch
from zoo.nb03 import forward_never_skips as ring

import ringlearn as rl
from ringlearn.costs.ring import ring_bytes
from ringlearn.course.checks.checker import Wrong
from ringlearn.course.checks.oracle import dense, shards
from ringlearn.course.checks.simulate import check_messages, run, who, wrong_ranks
from ringlearn.flash import attend


def go(program, S=12, P=4, mask=rl.causal, **options):
    case = shards(S, P)
    return run(program, P, *case.parts, case.positions, mask, input=f"S = {S}, P = {P}", **options)


@pytest.mark.parametrize(("S", "P"), [(12, 4), (10, 4), (2, 4), (7, 1)])
@pytest.mark.parametrize("mask", [rl.causal, rl.full], ids=["causal", "full"])
@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
def test_a_right_ring_gives_what_dense_attention_gives(S, P, mask, layout):
    case = shards(S, P, H=4, G=2, D=8, layout=layout)
    ran = run(ring, P, *case.parts, case.positions, mask, input="")
    out, lse = dense(case.q, case.k, case.v, mask)
    assert wrong_ranks("out", [r.out for r in ran.results], case.split(out), 1e-5) == {}
    assert wrong_ranks("lse", [r.lse for r in ran.results], case.split(lse, -1), 1e-5) == {}
    check_messages(ran, P - 1, [ring_bytes(S, P, 2, 8, itemsize=4, rank=r, layout=layout) for r in range(P)])
    assert all(hidden for rank in range(P) for _, hidden in ran.hides(rank)) or S < P


def test_dense_is_sdpa():
    q, k, v = shards(9, 3, H=4, G=2).parts[0][0], *shards(9, 1, H=4, G=2)[1:3]
    out, _ = dense(shards(9, 1, H=4, G=2).q, k, v, rl.causal)
    want = torch.nn.functional.scaled_dot_product_attention(
        shards(9, 1, H=4, G=2).q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(out, want, atol=1e-12) and q.shape == (1, 4, 3, 4)


# ---- Every way to fail ----------------------------------------------------------------------------------------------


async def forgets_await(comm, q, k, v, positions, mask):
    k, v = comm.rotate(k, v)


async def uses_the_handle(comm, q, k, v, positions, mask):
    return q @ comm.rotate(k)


async def handle_as_tensor(comm, q, k, v, positions, mask):
    return comm.rotate(k).shape


def no_async(comm, q, k, v, positions, mask):
    return q


async def awaits_a_tensor(comm, q, k, v, positions, mask):
    k = await attend(q, k, v, None, 1.0)
    return k


async def awaits_twice(comm, q, k, v, positions, mask):
    arriving = comm.rotate(k, v)
    k, v = await arriving
    k, v = await arriving
    return q


async def asyncio_sleep(comm, q, k, v, positions, mask):
    import asyncio

    await asyncio.sleep(0)
    return q


async def skips_the_rotate(comm, q, k, v, positions, mask):
    for t in range(comm.size):
        source = (comm.rank - t) % comm.size
        if source > comm.rank:
            continue
        if t < comm.size - 1:
            k, v = await comm.rotate(k, v)
    return q


async def writes_in_flight(comm, q, k, v, positions, mask):
    arriving = comm.rotate(k, v)
    k += 1
    await arriving
    return q


async def never_awaits(comm, q, k, v, positions, mask):
    comm.rotate(k, v)
    return q


async def send_without_receiver(comm, q, k, v, positions, mask):
    await comm.send(k, to=(comm.rank + 1) % comm.size)
    return q


async def one_sided_send(comm, q, k, v, positions, mask):
    comm.send(k, to=(comm.rank + 1) % comm.size)
    return q


async def no_end(comm, q, k, v, positions, mask):
    while True:
        k, v = await comm.rotate(k, v)


async def forgets_a_coroutine(comm, q, k, v, positions, mask):
    ring(comm, q, k, v, positions, mask)
    return q


async def returns_a_coroutine(comm, q, k, v, positions, mask):
    return ring(comm, q, k, v, positions, mask)


async def returns_nothing(comm, q, k, v, positions, mask):
    k, v = await comm.rotate(k, v)


async def raises(comm, q, k, v, positions, mask):
    await comm.rotate(k)
    return q / 0 if comm.rank != 2 else nonexistent  # noqa: F821


async def wrong_arguments(comm, q):
    return q


async def does_not_fit(comm, q, k, v, positions, mask):
    return q @ torch.ones(7, 7)


FAILURES = [
    (
        forgets_await,
        "on rank 0 your function tried to unpack a message that has not arrived",
        "`k, v = comm.rotate(k, v)`",
        "await",
    ),
    (handle_as_tensor, "tried to use .shape", "comm.rotate(k).shape", "await"),
    (uses_the_handle, "on rank 0 your function raises TypeError", "", ""),
    (no_async, "no rank program", "first line", "async def"),
    (awaits_a_tensor, "on rank 0", "await attend", "only a message"),
    (awaits_twice, "awaited twice", "await arriving", "once"),
    (asyncio_sleep, "awaited something that is not a message", "await", "no asyncio"),
    (skips_the_rotate, "deadlock: rank 1 waits", "comm.rotate", "skip the computation, never the message"),
    (writes_in_flight, "wrote to a tensor that rotate 1 was still sending", "in place", "await"),
    (never_awaits, "rank 0 posted rotate 1 and never awaited it", "awaited", "P - 1"),
    (send_without_receiver, "deadlock: rank 0 waits in send to 1 for rank 1 to receive", "", ""),
    (one_sided_send, "never awaited", "", ""),
    (no_end, "do not stop", "loop", "P - 1"),
    (forgets_a_coroutine, "coroutine 'forward_never_skips' was never awaited", "async def", "await"),
    (returns_a_coroutine, "ranks 0, 1, 2 and 3 return a coroutine", "return", "await"),
    (returns_nothing, "rank 0 returns None", "last line", "return"),
    (raises, "on rank 2 your function raises NameError", "nonexistent", ""),
    (wrong_arguments, "positional arguments", "", ""),
    (does_not_fit, "on rank 0 your function raises RuntimeError", "", ""),
]


@pytest.mark.parametrize(("program", "symptom", "where", "cause"), FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_failure_becomes_a_wrong(program, symptom, where, cause, recwarn):
    with pytest.raises(Wrong) as failed:
        go(program)
    wrong = failed.value
    assert symptom in wrong.symptom and where in wrong.where and cause in wrong.cause, vars(wrong)
    assert wrong.input == "S = 12, P = 4" and wrong.where and wrong.cause
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_uneven_shards_without_a_length_are_told_about_length():
    async def program(comm, q, k, v, positions, mask):
        k, v = await comm.rotate(k, v)
        return q

    with pytest.raises(Wrong) as failed:
        go(program, S=10)
    assert "expects shapes" in failed.value.symptom and "length=" in failed.value.where


def test_shapes_that_do_not_fit_can_be_given_a_reason():
    with pytest.raises(Wrong) as failed:
        go(does_not_fit, shapes=("the seven", "seven is not four"))
    assert (failed.value.where, failed.value.cause) == ("the seven", "seven is not four")


# ---- What came out --------------------------------------------------------------------------------------------------


def test_wrong_ranks_names_those_that_differ():
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    assert list(wrong_ranks("out", [a, b, a], [a, a, a], 1e-6)) == [1]
    assert (who([]), who([2]), who([0, 1, 3])) == ("no rank", "rank 2", "ranks 0, 1 and 3")


async def every_hop(comm, q, k, v, positions, mask):
    for _ in range(comm.size):
        k, v = await comm.rotate(k, v)
    return q


async def backwards(comm, q, k, v, positions, mask):
    for _ in range(comm.size - 1):
        a, b = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        k, v = (await comm.exchange({a: (k, v)}, {b: (k.shape, v.shape)}))[b]
    return q


async def only_k(comm, q, k, v, positions, mask):
    for _ in range(comm.size - 1):
        k = await comm.rotate(k)
    return q


@pytest.mark.parametrize(
    ("program", "symptom"),
    [(every_hop, "4 messages where 3"), (backwards, "rank 0 sends to rank 3"), (only_k, "144 bytes; 288 are expected")],
)
def test_check_messages_rejects(program, symptom):
    with pytest.raises(Wrong) as failed:
        check_messages(go(program), 3, [ring_bytes(12, 4, 1, 4, itemsize=4)] * 4)
    assert symptom in failed.value.symptom


def test_what_is_in_flight_and_what_hides():
    async def awaits_first(comm, q, k, v, positions, mask):
        for _ in range(comm.size - 1):
            k, v = await comm.rotate(k, v)
            attend(q, k, v, None, 1.0)
        return q

    async def gathers(comm, q, k, v, positions, mask):
        held = [(k, v)]
        for _ in range(comm.size - 1):
            held.append(await comm.rotate(*held[-1]))
        return q

    shard = 2 * 3 * 4 * 4  # k and v of 3 tokens, D = 4, float32
    assert [hidden for _, hidden in go(ring, mask=rl.full).hides(2)] == [True] * 3
    assert [hidden for _, hidden in go(awaits_first).hides(2)] == [False] * 3
    assert go(ring).held(1, "in flight") == 2 * shard and go(gathers).held(1, "in flight") == 3 * shard

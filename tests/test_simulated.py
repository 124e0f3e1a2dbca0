"""The simulated world: it delivers like hardware, and says what is wrong like nothing else does."""

import asyncio

import pytest
import torch

import ringlearn as rl
from ringlearn.tiles import Kind
from ringlearn.worlds import Hardware, PerRank
from ringlearn.worlds.simulated import DeadlockError, InFlightError


def per_rank(fn, P):
    return PerRank(fn(rank) for rank in range(P))


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_rotate_brings_the_previous_rank_s_tensors(P):
    async def program(comm, x, y):
        x, y = await comm.rotate(x, y)
        return x, y, await comm.rotate(x)

    world = rl.SimulatedWorld(P)
    results = world.run(program, per_rank(lambda r: torch.full((2,), r), P), per_rank(lambda r: torch.tensor([r]), P))
    for rank, (x, y, z) in enumerate(results):
        assert (
            x.tolist() == [(rank - 1) % P] * 2 and y.tolist() == [(rank - 1) % P] and z.tolist() == [(rank - 2) % P] * 2
        )


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_rotate_back_brings_the_next_rank_s_tensors(P):
    async def program(comm, x):
        y = await comm.rotate(x, back=True)
        return y, await comm.rotate(y), await comm.rotate(y, back=True)

    world = rl.SimulatedWorld(P)
    results = world.run(program, per_rank(lambda r: torch.tensor([r]), P))
    assert [[t.item() for t in found] for found in results] == [[(r + 1) % P, r, (r + 2) % P] for r in range(P)]
    origins = [e.origin for e in world.trace.select("recv", 0)]
    assert origins == ([1 % P, 0, 2 % P] if P > 1 else [])


def test_a_trace_knows_whose_data_came_in_an_earlier_run():
    async def onward(comm, x):
        return await comm.rotate(x)

    world = rl.SimulatedWorld(3)
    arrived = world.run(onward, per_rank(lambda r: torch.tensor([r]), 3))
    world.run(onward, arrived)
    assert [e.origin for e in world.trace.select("recv", 0)] == [1]


def test_what_arrives_is_a_copy():
    async def program(comm, x):
        y = await comm.rotate(x)
        y += 1
        return y

    x = PerRank([torch.zeros(1), torch.zeros(1)])
    rl.SimulatedWorld(2).run(program, x)
    assert [t.item() for t in x] == [0, 0]


def test_messages_meet_in_posting_order_not_in_await_order():
    async def program(comm, x):
        if comm.rank == 0:
            first, second = comm.send(x, 1), comm.send(x + 1, 1)
            await second
            await first
        else:
            first, second = comm.recv((1,), 0), comm.recv((1,), 0)
            b = await second
            a = await first
            return a.item(), b.item()

    assert rl.SimulatedWorld(2).run(program, torch.zeros(1))[1] == (0.0, 1.0)


def test_collectives():
    P = 3

    async def program(comm, x):
        gathered = await comm.all_gather(x[: comm.rank + 1], lengths=[1, 2, 3])
        swapped = await comm.all_to_all([x + 10 * r for r in range(P)])
        return {
            "gathered": [g.shape[0] for g in gathered],
            "swapped": [t[0, 0].item() for t in swapped],
            "scattered": (await comm.reduce_scatter([x * (r + 1) for r in range(P)]))[0, 0].item(),
            "reduced": await comm.all_reduce(x),
            "sent": (await comm.broadcast(x, src=1))[0, 0].item(),
        }

    results = rl.SimulatedWorld(P).run(program, per_rank(lambda r: torch.full((3, 1), float(r)), P))
    for rank, result in enumerate(results):
        assert result["gathered"] == [1, 2, 3]
        assert result["swapped"] == [10.0 * rank, 10.0 * rank + 1, 10.0 * rank + 2]
        assert result["scattered"] == (0 + 1 + 2) * (rank + 1)
        assert torch.equal(result["reduced"], torch.full((3, 1), 3.0))
        assert result["sent"] == 1.0


def test_sums_are_taken_in_rank_order_in_the_accumulation_dtype():
    values = [256.0, 1.0, 1.0]  # in bf16, 256 + 1 is 256 again

    async def program(comm, x):
        return await comm.all_reduce(x)

    results = rl.SimulatedWorld(3).run(program, per_rank(lambda r: torch.tensor([values[r]], dtype=torch.bfloat16), 3))
    assert all(r.dtype == torch.bfloat16 and r.item() == 258.0 for r in results)
    values = [1e8, 1.0, -1e8]  # (1e8 + 1) - 1e8 is 0 in float32; in another order the sum is 1
    results = rl.SimulatedWorld(3).run(program, per_rank(lambda r: torch.tensor([values[r]]), 3))
    assert [r.item() for r in results] == [0.0, 0.0, 0.0]


def test_empty_messages_are_fine():
    async def program(comm, x):
        return await comm.rotate(x, length=[3, 0][comm.rank])

    results = rl.SimulatedWorld(2).run(program, PerRank([torch.ones(1, 0, 2), torch.ones(1, 3, 2)]))
    assert [tuple(r.shape) for r in results] == [(1, 3, 2), (1, 0, 2)]


# --- mistakes ------------------------------------------------------------------------------------------------------


def test_a_deadlock_names_each_waiting_rank_and_what_it_waits_for():
    async def skips_the_message(comm, x):
        if comm.rank != 2:  # "nothing to compute, so nothing to send"
            x = await comm.rotate(x)
        return x

    with pytest.raises(DeadlockError) as error:
        rl.SimulatedWorld(4).run(skips_the_message, torch.ones(1))
    text = str(error.value)
    assert "rank 1 waits in rotate 1 for rank 2 to receive" in text
    assert "rank 3 waits in rotate 1 for rank 2 to send" in text
    assert "ranks that have returned: [0, 2]" in text
    assert "skip the computation, never the message" in text


def test_everybody_receives_first():
    async def program(comm, x):
        await comm.recv(x.shape, (comm.rank - 1) % comm.size)
        await comm.send(x, (comm.rank + 1) % comm.size)

    with pytest.raises(DeadlockError, match="rank 0 waits in recv from 2 for rank 2 to send"):
        rl.SimulatedWorld(3).run(program, torch.ones(1))


@pytest.mark.parametrize("mode", ["plain", "inference"])
def test_a_write_to_a_buffer_in_flight_is_an_error(mode):
    async def program(comm, x):
        arriving = comm.rotate(x)
        x[0] += 1
        return await arriving

    x = [torch.ones(4) for _ in range(2)]
    with torch.inference_mode(mode == "inference"):
        x = PerRank(t.clone() for t in x)
        with pytest.raises(InFlightError, match="rank . wrote to a tensor that rotate 1 was still sending to rank ."):
            rl.SimulatedWorld(2).run(program, x)


def test_a_write_through_a_view_is_seen_too():
    async def program(comm, x):
        arriving = comm.rotate(x[:2], x[2:])
        x.view(2, 2)[1] = 7
        return await arriving

    with pytest.raises(InFlightError):
        rl.SimulatedWorld(3).run(program, per_rank(lambda r: torch.ones(4), 3))


def test_writing_after_the_await_is_right():
    async def program(comm, x):
        y = await comm.rotate(x)
        x += 1
        return y

    assert [t.item() for t in rl.SimulatedWorld(2).run(program, per_rank(lambda r: torch.zeros(1), 2))] == [0, 0]


def test_a_handle_that_is_never_awaited():
    async def program(comm, x):
        comm.rotate(x)
        return x

    with pytest.raises(RuntimeError, match="rank 0 posted rotate 1 and never awaited it"):
        rl.SimulatedWorld(2).run(program, torch.ones(1))


@pytest.mark.parametrize("use", ["unpack", "index", "attribute"])
def test_a_forgotten_await_says_so(use):
    async def program(comm, k, v):
        if use == "unpack":
            k, v = comm.rotate(k, v)
        elif use == "index":
            k = comm.rotate(k, v)[0]
        else:
            k = comm.rotate(k).shape
        return k

    with pytest.raises(TypeError, match=r"the handle of rotate on rank 0.*Write `await`"):
        rl.SimulatedWorld(2).run(program, torch.ones(1), torch.ones(1))


def test_awaiting_twice():
    async def program(comm, x):
        handle = comm.rotate(x)
        await handle
        return await handle

    with pytest.raises(RuntimeError, match="was awaited before; a message arrives once"):
        rl.SimulatedWorld(2).run(program, torch.ones(1))


def test_a_top_level_await_is_told_what_to_do():
    world, seen = rl.SimulatedWorld(2), []

    async def program(comm, x):
        seen.append(comm)
        return x

    world.run(program, torch.ones(1))

    async def in_a_notebook_cell():
        return await seen[0].rotate(torch.ones(1))

    with pytest.raises(RuntimeError, match=r"does not run under asyncio. Run it with world.run\(program, ...\)"):
        asyncio.run(in_a_notebook_cell())


def test_a_program_that_is_awaited_with_the_world_in_place_of_a_rank_is_told_how_to_run():
    async def program(comm, x):
        return await comm.rotate(x)

    with pytest.raises(AttributeError, match=r"write world.run\(program, ...\)"):
        asyncio.run(program(rl.SimulatedWorld(2), torch.zeros(1)))
    with pytest.raises(AttributeError, match="'SimulatedWorld' object has no attribute 'rotat'"):
        rl.SimulatedWorld(2).rotat  # noqa: B018


def test_awaiting_something_foreign():
    class Foreign:
        def __await__(self):
            yield 3

    async def program(comm):
        await Foreign()

    with pytest.raises(RuntimeError, match="rank 0 awaited something that is not a message"):
        rl.SimulatedWorld(2).run(program)


def test_a_function_that_is_no_rank_program():
    with pytest.raises(ValueError, match="expected a rank program, `async def <lambda>"):
        rl.SimulatedWorld(2).run(lambda comm: 3)


def test_lengths_that_differ_without_saying_so():
    async def program(comm, x):
        return await comm.rotate(x)

    with pytest.raises(ValueError, match=r"rank 1 expects shapes \[\(3, 1\)\].*which sent \[\(2, 1\)\].*length="):
        rl.SimulatedWorld(2).run(program, PerRank([torch.ones(2, 1), torch.ones(3, 1)]))


def test_an_error_names_its_rank():
    async def program(comm, x):
        x = await comm.rotate(x)
        if comm.rank == 1:
            raise ZeroDivisionError("mine")
        return await comm.rotate(x)

    with pytest.raises(ZeroDivisionError, match="mine") as error:
        rl.SimulatedWorld(3).run(program, torch.ones(1))
    assert error.value.__notes__ == ["on simulated rank 1 of 3, after rotate 1"]


def test_after_an_error_the_world_is_as_good_as_new():
    async def broken(comm, x):
        await comm.rotate(x)
        raise KeyError

    async def fine(comm, x):
        return await comm.rotate(x)

    world = rl.SimulatedWorld(2)
    with pytest.raises(KeyError):
        world.run(broken, torch.ones(1))
    assert [t.item() for t in world.run(fine, torch.ones(1))] == [1, 1]


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True])
def test_sizes_that_make_no_sense(size):
    with pytest.raises(ValueError, match=r"SimulatedWorld: expected a number of ranks, an int >= 1, got"):
        rl.SimulatedWorld(size)


def test_other_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match='expected wire="copy" or wire="reference"'):
        rl.SimulatedWorld(2, wire="rope")
    with pytest.raises(ValueError, match="expected bandwidth > 0"):
        Hardware(bandwidth=0)


@pytest.mark.parametrize("call, message", [
    (lambda comm, x: comm.send(x, 5), r"send to 5: expected a rank in 0..1, got 5"),
    (lambda comm, x: comm.rotate(), "rotate: expected at least one tensor"),
    (lambda comm, x: comm.rotate(5), "rotate: expected tensors, got int; send a number as torch.tensor"),
    (lambda comm, x: comm.rotate(x, x.double()), "must have one dtype"),
    (lambda comm, x: comm.all_to_all([x]), "all_to_all: expected one tensor for each of 2 ranks, got 1"),
    (lambda comm, x: comm.all_to_all(torch.ones(2, 3)), r"got one of shape \(2, 3\); cut it"),
    (lambda comm, x: comm.reduce_scatter([x]), "reduce_scatter: expected one tensor for each of 2 ranks, got 1"),
    (lambda comm, x: comm.reduce_scatter(torch.ones(2, 3)), r"a list with one .*, got one of shape \(2, 3\); cut it"),
    (lambda comm, x: comm.broadcast(x, src=-1), "got src=-1"),
])  # fmt: skip
def test_messages_that_make_no_sense(call, message):
    async def program(comm, x):
        await call(comm, x)

    with pytest.raises(ValueError, match=message):
        rl.SimulatedWorld(2).run(program, torch.ones(1))


# --- the virtual clock and the trace -------------------------------------------------------------------------------


def test_a_message_hides_behind_computation_or_does_not():
    hardware = Hardware(flops=1.0, bandwidth=4.0, latency=2.0)  # 4 bytes take 1 second, and 2 more to arrive

    async def overlapped(comm, x):
        arriving = comm.rotate(x)
        comm.compute("tile", flops=5)
        return await arriving

    async def exposed(comm, x):
        x = await comm.rotate(x)
        comm.compute("tile", flops=5)
        return x

    world = rl.SimulatedWorld(3, hardware=hardware)
    world.run(overlapped, torch.ones(1))
    assert world.trace.makespan() == 5 and world.trace.seconds("wait", 0) == 0
    world.run(exposed, torch.ones(1))
    assert world.trace.makespan() == 8 and world.trace.seconds("wait", 0) == 3
    assert world.trace.simulated


def test_a_rank_waits_for_a_late_sender():
    async def program(comm, x):
        if comm.rank == 0:
            comm.compute("slow", flops=10)
        return await comm.rotate(x)

    world = rl.SimulatedWorld(2, hardware=Hardware(flops=1.0, bandwidth=4.0, latency=0.0))
    world.run(program, torch.ones(1))
    assert [world.trace.seconds("wait", rank) for rank in (0, 1)] == [1.0, 11.0]


def test_messages_share_the_outgoing_link():
    async def program(comm, x):
        a, b = comm.rotate(x), comm.rotate(x)
        await a
        return await b

    world = rl.SimulatedWorld(2, hardware=Hardware(flops=1.0, bandwidth=4.0, latency=0.0))
    world.run(program, torch.ones(1))
    assert world.trace.makespan() == 2.0


def test_causal_makespan_over_perfect_balance():
    """Contiguous (2P - 1) / P, striped P (s + 1) / (S + 1), zigzag 1: computation only, on a free wire."""
    S, P = 512, 8
    q, k, v = (torch.randn(1, 1, S, 8) for _ in range(3))
    free = Hardware(flops=1e9, bandwidth=1e30, latency=0.0)
    ratio = {}
    for layout in (rl.contiguous, rl.striped, rl.zigzag):
        world = rl.SimulatedWorld(P, hardware=free, count_memory=False)
        rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=rl.causal)
        ratio[layout.name] = world.trace.makespan() / (sum(world.trace.flops(r) for r in range(P)) / P / 1e9)
    s = S // P
    # The wire couples the ranks, so the slowest rank of each step sets the pace.
    assert ratio["contiguous"] == pytest.approx((2 * P - 1) / P, rel=0.01)
    assert ratio["striped"] == pytest.approx(P * (s + 1) / (S + 1), rel=0.01)
    assert ratio["zigzag"] == pytest.approx(1.0, rel=0.02)


def test_the_trace_knows_whose_keys_each_tile_was_computed_with():
    q, k, v = (torch.randn(1, 1, 12, 4) for _ in range(3))
    world = rl.SimulatedWorld(4)
    rl.ring_attention(*world.shard(q, k, v), mask=rl.full)
    for rank in range(4):
        assert [e.origin for e in world.trace.select("compute", rank)] == [(rank - t) % 4 for t in range(4)]


def test_flops_of_a_tile():
    q, k, v = (torch.randn(2, 3, 10, d) for d in (4, 4, 6))
    world = rl.SimulatedWorld(1)
    rl.ring_attention(*world.shard(q, k, v), mask=rl.full)
    assert world.trace.flops(0) == 2 * 2 * 3 * 10 * 10 * (4 + 6)


def test_a_run_inside_a_run_says_what_to_do():
    world = rl.SimulatedWorld(2)

    async def inner(comm, x):
        return await comm.rotate(x)

    async def outer(comm, x):
        arriving = comm.rotate(x)
        world.run(inner, torch.zeros(1))
        return await arriving

    with pytest.raises(RuntimeError, match="in the middle of a program. Inside a rank program await another program"):
        world.run(outer, torch.zeros(1))
    assert len(world.run(inner, torch.zeros(1))) == 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_arguments_of_a_world_of_another_size(ranks):
    x = rl.SimulatedWorld(ranks).shard(torch.zeros(6, 2))

    async def program(comm, x):
        return x

    for wrong in (x, PerRank([1] * ranks)):
        with pytest.raises(
            ValueError, match=f"run: expected one value for each of the 2 ranks of this process, .*{ranks}"
        ):
            rl.SimulatedWorld(2).run(program, wrong)


def test_a_program_that_was_called_already():
    async def program(comm):
        return comm.rank

    called = program(None)
    with pytest.raises(ValueError, match="expected a rank program, got coroutine; name it without calling it"):
        rl.SimulatedWorld(2).run(called)
    called.close()


def test_a_part_cannot_have_the_name_of_an_axis():
    async def program(comm):
        comm.only([comm.rank], "inner")

    with pytest.raises(ValueError, match="only: the names outer and inner are those of the axes, got 'inner'"):
        rl.SimulatedWorld((1, 2)).run(program)


def test_all_reduce_wants_a_tensor():
    async def count(comm):
        return await comm.all_reduce(3)

    with pytest.raises(ValueError, match=r"all_reduce: expected a tensor, got int; .* torch.tensor\(x\)"):
        rl.SimulatedWorld(2).run(count)


def test_all_reduce_wants_numbers():
    async def count(comm):
        return await comm.all_reduce(torch.tensor([True, False]))

    with pytest.raises(ValueError, match=r"all_reduce: expected numbers, got bool; .* tensor.sum\(\), or .long\(\)"):
        rl.SimulatedWorld(2).run(count)


def test_the_keys_that_a_kernel_is_told_of_on_an_axis_are_those_of_a_rank_of_the_world():
    async def program(comm, q, k, v):
        inner = comm.along(1)
        tile = rl.Tile(slice(0, 3), slice(0, 3), Kind.FULL)
        return inner.traced(rl.kernels.choose("reference"), origin=0).forward(q, k, v, tile, 1.0).out

    world = rl.SimulatedWorld((2, 2))
    world.run(program, *[PerRank(torch.randn(1, 1, 3, 4) for _ in range(4)) for _ in "qkv"])
    assert [event.origin for event in world.trace.events if event.kind == "compute"] == [0, 0, 2, 2]

"""Functions that the tests run on several processes; they must be importable, so they are no tests themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ringlearn as rl
from ringlearn.worlds import Comm

Told = tuple[str, str, float]  # the error's class, its text, seconds until it came


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# Every collective, as one rank program ---------------------------------------------------------------------------


async def collectives(comm: Comm, dtype: torch.dtype) -> dict[str, Any]:
    """One of each, with sizes that differ between ranks and are zero on some."""
    r, P = comm.rank, comm.size
    make = torch.Generator().manual_seed(r)
    lengths = [(3 * s + 1) % 5 if s else 0 for s in range(P)]  # 0, 4, 2, 0, 3, ...

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).to(comm.device)

    x, y, summand = values(2, lengths[r], 3), values(1, lengths[r], 5), values(7, 3)
    found: dict[str, Any] = {"given": (x, y, summand)}
    for step in range(P):
        x, y = await comm.rotate(x, y, length=lengths[(r - step - 1) % P])
    found["rotate, all the way home"] = x, y
    for step in range(P):
        x, y = await comm.rotate(x, y, length=lengths[(r + step + 1) % P], back=True)
    found["rotate back, all the way home"] = x, y
    onward, back = comm.rotate(values(3)), comm.rotate(values(3), back=True)
    found["both ways at once"] = [await back, await onward]
    found["rotate, not contiguous"] = await comm.rotate(values(4, 6).t()[1:])
    found["all_gather"] = await comm.all_gather(found["given"][0], lengths)
    rows = [values((r + s) % 3, 2) for s in range(P)]
    found["all_to_all"] = await comm.all_to_all(rows, [((s + r) % 3, 2) for s in range(P)])
    found["reduce_scatter"] = await comm.reduce_scatter([values(s, 2) for s in range(P)])
    found["all_reduce"] = await comm.all_reduce(summand)
    found["all_reduce of one number"] = await comm.all_reduce(values())
    found["broadcast"] = await comm.broadcast(values(3), src=P - 1)
    if P > 1:
        if r == 0:
            await comm.send(values(2, 2), to=1)
        if r == 1:
            found["recv"] = await comm.recv((2, 2), source=0, dtype=dtype)
    first, second = comm.rotate(values(2)), comm.rotate(values(2))
    found["awaited in another order"] = [await second, await first]
    return found


async def both_axes(comm: Comm) -> list[Any]:
    """Messages along both axes on their way at once, awaited in another order, and some over all ranks between."""
    outer, inner = comm.along(0), comm.along(1)
    x, found = torch.full((1000,), float(comm.rank), device=comm.device), []
    for _ in range(3):
        across, inside, around = outer.rotate(x), inner.rotate(x), comm.rotate(x)
        back = outer.rotate(x, back=True)
        found.append([await inside, await across, await around, await back])
        x = found[-1][0] + found[-1][1]
    return [*found, await inner.all_gather(x), await outer.all_reduce(x)]


async def keep_everything(comm: Comm, rounds: int) -> list[float]:
    """Hold every second message that arrives; all must stay what they were."""
    kept = []
    x = torch.full((1000,), float(comm.rank), device=comm.device)
    for i in range(rounds):
        x = await comm.rotate(x)
        if i % 2:
            kept.append((x[10:20], (comm.rank - i - 1) % comm.size))
    return [float((x - origin).abs().max()) for x, origin in kept]


async def addresses(comm: Comm, rounds: int) -> set[int]:
    """Where messages arrive when nobody holds them."""
    seen = set()
    x = torch.zeros(1000, device=comm.device)
    for _ in range(rounds):
        x = await comm.rotate(x)
        seen.add(x.data_ptr())
    return seen


def run_collectives(dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return rl.DistributedWorld(timeout=20, **options).run(collectives, dtype)[0]


def run_with_options(options: dict[str, Any]) -> dict[str, Any]:
    return run_collectives(torch.float32, **options)


def run_on_subgroup(members: list[int], dtype: torch.dtype) -> Any:
    """Only the members call; the others go on."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    world = rl.DistributedWorld(group, timeout=20)
    return world.rank, world.run(collectives, dtype)[0]


def outside_of_its_group() -> str:
    group = dist.new_group([0])
    try:
        rl.DistributedWorld(group, timeout=20)
        return ""
    except ValueError as error:
        return str(error)


def run_buffers() -> Any:
    world = rl.DistributedWorld(timeout=20)
    wrong = world.run(keep_everything, 12)[0]
    first = world.run(keep_everything, 3)
    again = world.run(addresses, 20)[0] | world.run(addresses, 20)[0]
    with torch.inference_mode():
        world.run(_pass_on, torch.ones(777, device=world.device))  # a size of its own
    normal = world.run(_pass_on, torch.ones(777, requires_grad=True, device=world.device))[0]
    return wrong, len(first[0]), len(again), normal.is_inference()


async def many(comm: Comm, x: torch.Tensor, rotates: int) -> torch.Tensor:
    for _ in range(rotates):
        x = await comm.rotate(x)
    return x


async def _pass_on(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    return await comm.rotate(x)


def run_shards(src: int | None) -> Any:
    """shard, a computation, unshard, and its gradient; with src, only that rank has the right tensors."""
    world = rl.DistributedWorld(timeout=20)
    seed = 0 if src is None or world.rank == src else 1 + world.rank
    x = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    weight = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(5)).to(world.device)
    shards = world.shard(x, layout=rl.zigzag, src=src)
    full = shards.map(lambda t: t * t).unshard()
    (full * weight).sum().backward()
    lse = rl.DistributedWorld(timeout=20).assemble([shards.local[..., 0]], rl.zigzag, 11, -1)
    return full.detach(), x.grad, lse.detach()


def run_trace() -> Any:
    world = rl.DistributedWorld(timeout=20, trace=True)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    rl.ring_attention(*world.shard(q, k, v), mask=rl.causal)
    return [(e.kind, e.name, e.step, e.nbytes, e.peer, e.origin, e.flops, e.made) for e in world.trace], [
        (e.start, e.stop) for e in world.trace
    ]


def no_trace() -> str:
    try:
        return str(rl.DistributedWorld(timeout=20).trace)
    except ValueError as error:
        return str(error)


def other_device() -> Told:
    world = rl.DistributedWorld(timeout=5)
    return caught(lambda: world.run(_pass_on, torch.zeros(2, device="meta")))


def run_mistakes() -> list[str]:
    """Errors that all ranks make alike; each leaves the world broken, so each gets its own."""
    texts = []
    for program in (_forgets_to_await, _awaits_something_else, _not_async, _short, _long, _other_dtype):
        world = rl.DistributedWorld(timeout=5)
        texts.append(caught(lambda w=world, p=program: w.run(p))[:2])
        texts.append(caught(lambda w=world: w.run(_pass_on, torch.zeros(1)))[:2])
        dist.barrier()
    return texts


async def _forgets_to_await(comm: Comm) -> None:
    comm.rotate(torch.zeros(3))


class _Foreign:
    def __await__(self):
        yield "something"


async def _awaits_something_else(comm: Comm) -> None:
    await _Foreign()


def _not_async(comm: Comm) -> int:
    return 1


async def _short(comm: Comm) -> None:
    shape = (1, 4) if comm.rank == 0 else (2, 4)
    await comm.rotate(torch.zeros(shape), length=2)


async def _long(comm: Comm) -> None:
    shape = (300, 4) if comm.rank == 0 else (200, 4)
    await comm.rotate(torch.zeros(shape), length=200)


async def _other_dtype(comm: Comm) -> None:
    await comm.rotate(torch.zeros(4, dtype=torch.float32 if comm.rank else torch.int32))


# Agreement -------------------------------------------------------------------------------------------------------


def caught(fn: Callable[[], Any]) -> Told:
    start = time.monotonic()
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


class OddKernel:
    """A kernel of the user's with a mistake that only one rank runs into."""

    name = "odd"

    def unsupported(self, *args: Any) -> None:
        if dist.get_rank() == 1:
            raise TypeError("a mistake")
        raise ValueError("nothing else to see here")

    forward = backward = unsupported


def mismatches() -> dict[str, Told]:
    """What each rank hears when rank 1 makes another call than the others; the world stays usable after each."""
    world = rl.DistributedWorld(timeout=5)
    odd = world.rank == 1
    heard = {}
    q, k, v = (torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def attend(shards: Any = None, **options: Any) -> Callable[[], Any]:
        local = [t.local for t in world.shard(q, k, v)] if shards is None else shards
        return lambda: rl.ring_attention(*local, **{"layout": rl.contiguous, "world": world, **options})

    def other_shape() -> list[torch.Tensor]:
        return [t.local[:, : 1 + (not odd)] for t in world.shard(q, k, v)]

    def other_dtype() -> list[torch.Tensor]:
        return [t.local.double() if odd else t.local for t in world.shard(q, k, v)]

    attend()()  # these calls are known by now: what follows is new on rank 1 only
    heard["mask"] = caught(attend(mask=rl.causal if odd else rl.full))
    heard["my mask"] = caught(attend(mask=rl.sliding_window(3) if odd else rl.sliding_window(2)))
    heard["layout"] = caught(attend(layout=rl.zigzag if odd else rl.contiguous))
    heard["scale"] = caught(attend(scale=0.5 if odd else 0.25))
    heard["kernel"] = caught(attend(kernel="reference" if odd else "sdpa"))
    heard["shape"] = caught(attend(other_shape()))
    heard["dtype"] = caught(attend(other_dtype()))
    heard["kind of error"] = caught(attend(kernel=OddKernel()))
    other_width = world.shard(torch.zeros(6, 3)).map(lambda t: t.repeat(1, 1 + 400 * odd))  # would end gloo's process
    heard["width of what is put together"] = caught(other_width.unshard)
    heard["dtype of what is put together"] = caught(world.shard(q).map(torch.Tensor.double if odd else abs).unshard)
    heard["values"] = caught(lambda: world.shard(q + odd))
    heard["problem"] = caught(attend(mask="causal" if odd else rl.full))
    heard["order"] = caught(lambda: world.shard(q) if odd else attend([q[:, :, :3]] * 3)())
    heard["program"] = caught(
        lambda: world.run(_pass_on if odd else addresses, torch.zeros(1, device=world.device) if odd else 1)
    )
    heard["in the end"] = caught(attend())
    return heard


def long_texts() -> list[Told]:
    world = rl.DistributedWorld(timeout=5)
    same = {f"field {i}": "x" * 2000 for i in range(6)}
    odd = {**same, "field 3": "x" * 1999 + "y"}
    told = [caught(lambda: world.agree("call", same))]
    told.append(caught(lambda: world.agree("call", odd if world.rank == 1 else same)))
    told.append(caught(lambda: world.agree("call", {}, {"own": "x" * 5000})))
    return told


def one_says_too_much() -> Told:
    world = rl.DistributedWorld(timeout=5)
    return caught(lambda: world.agree("call", {}, {"own": "x" * (5000 * (world.rank == 1))}))


def known_to_all() -> Any:
    world = rl.DistributedWorld(timeout=5)
    free = rl.DistributedWorld(timeout=5, check=False)
    problem = ValueError("mine") if world.rank == 1 else None
    return (
        world.agree("call", {"a": "b"}, {"rank": world.rank}),
        free.agree("call", {"a": str(world.rank)}, {"rank": world.rank}),
        caught(lambda: free.agree("call", {}, {}, problem)),
    )


def different_worlds() -> Told:
    return caught(lambda: rl.DistributedWorld(timeout=5, check=dist.get_rank() != 1))


def heard_later() -> tuple[list[Any], Told]:
    """A world whose calls go on without hearing from the others, as on a GPU: first alike, then in different calls."""
    world = rl.DistributedWorld(timeout=10)
    world._goes_on = True
    known = world.agree("one", {"a": "1"}, {"rank": world.rank}, later=True)
    world.conclude()
    world.agree("two" if world.rank else "three", {}, later=True)
    return known, caught(world.conclude)


# Faults ----------------------------------------------------------------------------------------------------------


async def ring_with(comm: Comm, act: Callable[[int], None] | None, rotates: int = 4) -> None:
    """A ring in which one rank does something at its third step."""
    x = torch.zeros(1000, device=comm.device)
    for step in range(rotates):
        if act is not None and step == 2:
            act(comm.rank)
        x = await comm.rotate(x)


def _twice(world: rl.DistributedWorld, fn: Callable[[], Any]) -> list[Told]:
    """What the failed call says, and what the next one does."""
    return [caught(fn), caught(lambda: world.run(ring_with, None))]


def killed_peer(victim: int, timeout: float) -> list[Told]:
    world = rl.DistributedWorld(timeout=timeout)

    def act(rank: int) -> None:
        if rank == victim:
            time.sleep(0.5)  # a sign of life in which the others can read where it was
            os.kill(os.getpid(), signal.SIGKILL)

    return _twice(world, lambda: world.run(ring_with, act))


def stalled_peer(victim: int, timeout: float) -> list[Told]:
    """Rank ``victim`` is stopped; another one wakes it up after the error, so that it can be asked as well."""
    world = rl.DistributedWorld(timeout=timeout)
    pids = [rank["pid"] for rank in world.agree("who", {}, {"pid": os.getpid()})]
    world.run(ring_with, None)

    def act(rank: int) -> None:
        if rank == victim:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)

    told = _twice(world, lambda: world.run(ring_with, act))
    if world.rank != victim:
        time.sleep(0.3)
        os.kill(pids[victim], signal.SIGCONT)
    return told


def lost_in_a_collective(victim: int, timeout: float, sign: int) -> list[Told]:
    """Rank ``victim`` is killed, or stopped for 8 s, while the others wait for it in a collective of torch's own."""
    world = rl.DistributedWorld(timeout=timeout)

    def collective() -> None:
        with world.watched():
            dist.barrier()
            if world.rank == victim:
                time.sleep(0.5)
                subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"], stderr=subprocess.DEVNULL)
                os.kill(os.getpid(), sign)
            dist.all_reduce(torch.ones(3))

    return _twice(world, collective)


def lost_in_a_world_of_some(timeout: float) -> list[Told]:
    """Rank 2 is killed in a world of ranks 1 and 2, where it is number 1; rank 0 waits for all in a collective."""
    everyone, group = rl.DistributedWorld(timeout=timeout), dist.new_group([1, 2])
    some = rl.DistributedWorld(group, timeout=timeout) if everyone.rank else None

    def act(rank: int) -> None:
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

    def collective() -> None:
        with everyone.watched():
            if some:
                some.run(ring_with, act)
            dist.all_reduce(torch.ones(3))

    return _twice(everyone, collective)


def raised_beside_a_collective(victim: int, timeout: float) -> list[Told]:
    world = rl.DistributedWorld(timeout=timeout)

    def collective() -> None:
        with world.watched():
            if world.rank == victim:
                raise KeyError("a bug of mine")
            dist.all_reduce(torch.ones(3))

    return _twice(world, collective)


def done_with_watching(timeout: float) -> str:
    """A rank that has left the watched part may end; the others still compute, and wait for each other."""
    world = rl.DistributedWorld(timeout=timeout)
    with world.watched():
        dist.barrier()
        if world.rank:
            time.sleep(2 * timeout)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


async def _sends_late(comm, victim: int, seconds: float) -> None:
    """The victim sends to the last rank, late; the others have nothing to do."""
    if comm.rank == victim:
        time.sleep(seconds)
        await comm.send(torch.zeros(1), comm.size - 1)
    elif comm.rank == comm.size - 1:
        await comm.recv((1,), victim)


def busy_peer_beside_one_that_has_ended(victim: int, timeout: float) -> str:
    world = rl.DistributedWorld(timeout=timeout)
    try:
        world.run(_sends_late, victim, timeout + 2)
    except RuntimeError as error:
        return str(error)
    return ""


def busy_peer(victim: int, timeout: float) -> list[Told]:
    """Alive, but it computes for longer than the timeout."""
    world = rl.DistributedWorld(timeout=timeout)
    return _twice(world, lambda: world.run(ring_with, lambda rank: time.sleep((timeout + 1.5) * (rank == victim))))


def raising_peer(victim: int, timeout: float) -> list[Told]:
    world = rl.DistributedWorld(timeout=timeout)

    def act(rank: int) -> None:
        if rank == victim:
            raise KeyError("a bug of mine")

    return _twice(world, lambda: world.run(ring_with, act))


def absent_backward(victim: int, timeout: float) -> list[Told]:
    world = rl.DistributedWorld(timeout=timeout)
    q, k, v = (torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    shards = [t.local.requires_grad_() for t in world.shard(q, k, v)]
    out = rl.ring_attention(*shards, world=world, layout=rl.contiguous)
    if world.rank != victim:
        return _twice(world, lambda: out.sum().backward())
    time.sleep(timeout + 2)
    return [caught(lambda: world.run(ring_with, None))] * 2


def absent_forever(victim: int, timeout: float) -> Told:
    """A rank that ends, world and all, before the others are through."""
    world = rl.DistributedWorld(timeout=timeout)
    world.run(ring_with, None)
    if world.rank == victim:
        del world
        return "", "", 0.0
    return caught(lambda: world.run(ring_with, None))


def never_made(victim: int, timeout: float) -> Told:
    rl.worlds.distributed.world.SETUP = 0.0
    if dist.get_rank() == victim:
        time.sleep(timeout + 1)
        return "", "", 0.0
    return caught(lambda: rl.DistributedWorld(timeout=timeout))


def interrupted(victim: int, timeout: float) -> list[Told]:
    """Ctrl-C on one rank while it waits."""
    world = rl.DistributedWorld(timeout=timeout)

    def act(rank: int) -> None:
        if rank == victim:
            import threading

            # A job in the background of a shell is started with Ctrl-C ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.5)

    start = time.monotonic()
    try:
        world.run(ring_with, act)
        return []
    except (KeyboardInterrupt, rl.worlds.WorldError) as error:
        first = type(error).__name__, str(error), time.monotonic() - start
    return [first, caught(lambda: world.run(ring_with, None))]


def fresh_world_after(timeout: float) -> bool:
    """A new world on the same processes works after another one broke."""
    raising_peer(1, timeout)
    dist.barrier()
    return rl.DistributedWorld(timeout=20).run(_pass_on, torch.ones(2))[0].sum().item() == 2


def threads() -> tuple[int, int, int]:
    """Threads of this process before, with and after a world."""
    import threading

    before = threading.active_count()
    world = rl.DistributedWorld(timeout=20)
    world.run(ring_with, None)
    during = threading.active_count()
    dist.barrier()
    del world
    time.sleep(0.5)
    return before, during, threading.active_count()


# Launch ----------------------------------------------------------------------------------------------------------


def add(a: int, b: torch.Tensor) -> dict[str, Any]:
    return {"sum": [a + b], "grad": (a * b.requires_grad_()).exp(), "rank": dist.get_rank()}


def say_something() -> None:
    print(f"hello from {dist.get_rank()}")
    print("this goes to stderr", file=sys.stderr)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def raise_on(rank: int) -> int:
    if dist.get_rank() == rank:
        print("before the crash")
        raise ZeroDivisionError("on purpose")
    return dist.get_rank()


def end_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            print("leaving", flush=True)
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)


def hang_on(rank: int, busy: bool = False) -> None:
    world = rl.DistributedWorld(timeout=60)
    world.run(ring_with, None)
    if dist.get_rank() == rank:
        _hang_here(busy)


def _hang_here(busy: bool) -> None:
    while busy:
        pass
    time.sleep(1000)


def absent_while_others_meet(absent: int, timeout: float) -> None:
    """A rank that skips a call of the world, and is then told by gloo that the others have gone."""
    world = rl.DistributedWorld(timeout=timeout)
    if world.rank != absent:
        world.run(ring_with, None)
    dist.barrier()


class Unknown:
    """Can be pickled, and not be rebuilt."""

    def __reduce__(self) -> Any:
        return _rebuild_unknown, ()


def _rebuild_unknown() -> None:
    raise AttributeError("nobody has defined this")


def initialise_by_hand() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def return_a_lambda() -> Any:
    return lambda: None


def with_a_child_process() -> int:
    import subprocess

    return subprocess.Popen(["sleep", "1000"]).pid


def nested_launch() -> Any:
    return rl.launch(rank_and_size, 2)


def transports() -> list[Any]:
    """The transport of a world on CPUs, and what asking for another one gives."""
    world = rl.DistributedWorld(timeout=20)
    world.reserve(10**6)
    found: list[Any] = [world.transport, world.reserved]
    for transport in ("symmetric", "carrier pigeon"):
        found.append(caught(lambda transport=transport: rl.DistributedWorld(timeout=20, transport=transport))[1])
    return found

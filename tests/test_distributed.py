"""A distributed world does what a simulated one does, bit for bit, and its buffers, traces and mistakes are its own."""

import os
import socket
import sys
import time
from typing import Any

import forked
import programs
import pytest
import torch

import ringlearn as rl
from ringlearn.launch.pool import Pool
from ringlearn.worlds import WorldError
from ringlearn.worlds.distributed.join import join

P = 4


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name in expected if not same(found[name], expected[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_collective_equals_the_simulated_one(pool: Pool, dtype: torch.dtype) -> None:
    expected = rl.SimulatedWorld(P).run(programs.collectives, dtype)
    for found, wanted in zip(pool.run(programs.run_collectives, dtype, timeout=60), expected, strict=True):
        assert differing(found, wanted) == []


def test_the_expected_values_are_right() -> None:
    """The simulated world is no oracle for itself: a ring comes home, sums are sums, everybody gets the same."""
    found = rl.SimulatedWorld(P).run(programs.collectives, torch.float64)
    xs, _, summands = zip(*(f["given"] for f in found))
    for rank, f in enumerate(found):
        assert same(f["rotate, all the way home"], f["given"][:2])
        assert same(f["all_gather"], list(xs))
        assert torch.allclose(f["all_reduce"], sum(summands), rtol=1e-15)
        assert same(f["all_reduce"], found[0]["all_reduce"]) and same(f["broadcast"], found[0]["broadcast"])
        assert [t.shape[0] for t in f["all_to_all"]] == [(s + rank) % 3 for s in range(P)]
    assert [x.shape[1] for x in xs] == [0, 4, 2, 0]


@pytest.mark.parametrize("members", [[2], [1, 3], [0, 2, 3]], ids=str)
def test_a_subgroup_is_a_world_of_its_own(pool: Pool, members: list[int]) -> None:
    expected = rl.SimulatedWorld(len(members)).run(programs.collectives, torch.float32)
    found = pool.run(programs.run_on_subgroup, members, torch.float32, timeout=60)
    for rank, result in enumerate(found):
        if rank not in members:
            assert result is None
        else:
            assert result[0] == members.index(rank)
            assert differing(result[1], expected[result[0]]) == []


def test_without_checks_and_with_debug_the_results_are_the_same(pool: Pool) -> None:
    expected = rl.SimulatedWorld(P).run(programs.collectives, torch.float32)
    for options in ({"check": False}, {"debug": True}, {"trace": True}):
        found = pool.run(programs.run_with_options, options, timeout=60)
        assert [differing(f, e) for f, e in zip(found, expected)] == [[]] * P


def test_a_buffer_is_used_again_only_when_nobody_holds_it(pool: Pool) -> None:
    for wrong, kept, places, inference in pool.run(programs.run_buffers, timeout=60):
        assert len(wrong) == 6 and max(wrong) == 0.0  # what a program kept was never overwritten
        assert kept == 1
        assert places <= 2  # one that arrives and one that is sent on, for 40 messages
        assert not inference  # what a run under inference_mode left behind is no trap for the next


@pytest.mark.parametrize("src", [None, 2])
def test_shard_and_unshard_are_conjugate(pool: Pool, src: int | None) -> None:
    x = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(5))
    (x * x * weight).sum().backward()
    for rank, (full, grad, first) in enumerate(pool.run(programs.run_shards, src, timeout=60)):
        assert same(full, (x * x).detach())
        assert same(first, x.detach()[..., 0])  # put together along the last dim, as lse is
        if src is None or rank == src:
            assert torch.allclose(grad, x.grad)


def test_the_trace_says_what_the_simulated_one_says(pool: Pool) -> None:
    """Everything but the times: kinds, names, steps, bytes, peers, origins and FLOPs."""
    world = rl.SimulatedWorld(P)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    rl.ring_attention(*world.shard(q, k, v), mask=rl.causal)
    for rank, (events, times) in enumerate(pool.run(programs.run_trace, timeout=60)):
        expected = [
            (e.kind, e.name, e.step, e.nbytes, e.peer, e.origin, e.flops, e.made) for e in world.trace if e.rank == rank
        ]
        assert sorted(map(str, events)) == sorted(map(str, expected))
        assert all(0 <= start <= stop < 60 for start, stop in times)


def test_a_world_without_a_trace_says_how_to_get_one(pool: Pool) -> None:
    for text in pool.run(programs.no_trace, timeout=60):
        assert "trace=True" in text


def test_mistakes_in_a_program_are_errors(pool: Pool) -> None:
    told = pool.run(programs.run_mistakes, timeout=90)
    forgets, awaits, plain, short, long, dtype = ([rank[2 * i : 2 * i + 2] for rank in told] for i in range(6))
    for rank in range(P):
        for kind, text in (forgets[rank][0], awaits[rank][0]):
            # Every rank makes the mistake. On a busy machine one may hear of another's before it gets to its own.
            assert kind == "RuntimeError" and f"rank {rank} " in text or kind == "WorldError" and "RuntimeError" in text
        for (_, text), what in (
            (forgets[rank][0], "posted rotate 1 and never awaited it"),
            (awaits[rank][0], "awaited something that is not a message"),
        ):
            assert what in text
        assert plain[rank][0][0] == "ValueError" and "async def _not_async" in plain[rank][0][1]
        assert plain[rank][1] == ["", ""] or plain[rank][1] == ("", "")  # nothing was on its way: the world is fine
        for broken in (forgets, awaits, short, long, dtype):
            assert broken[rank][1][0] == "WorldError", "the next call must say that the world is broken"
    for mistake in (forgets, awaits):
        assert "RuntimeError" in [rank[0][0] for rank in mistake]
    for told_by_rank_1, what in ((short[1][0], "(1, 4)"), (long[1][0], "(300, 4)"), (dtype[1][0], "torch.int32")):
        kind, text = told_by_rank_1  # gloo itself accepts the short one and the other dtype without a word
        assert kind == "ValueError" and "from rank 0, which sent" in text and what in text


def test_a_process_outside_of_the_group_is_told(pool: Pool) -> None:
    inside, *outside = pool.run(programs.outside_of_its_group, timeout=60)
    assert inside == ""
    for rank, text in enumerate(outside, start=1):
        assert f"rank {rank}" in text and "not in the group of ranks [0]" in text


def test_tensors_of_another_device_are_refused(pool: Pool) -> None:
    for kind, text, _ in pool.run(programs.other_device, timeout=60):
        assert kind == "ValueError" and "expected tensors on cpu" in text and "meta" in text


def test_alone_it_says_how_to_start() -> None:
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 4 file.py"):
        rl.DistributedWorld()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="timeout > 0"):
        rl.DistributedWorld(timeout=0)


SCRIPT = """
import os
import torch, ringlearn as rl
torch.manual_seed(0)
q, k, v = (torch.randn(1, 8, 1000, 64, requires_grad=True) for _ in range(3))
world = rl.DistributedWorld()
out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
full = out.unshard()
full.square().sum().backward()
qq, kk, vv = (t.detach().clone().requires_grad_() for t in (q, k, v))
exact = torch.nn.functional.scaled_dot_product_attention(qq, kk, vv, is_causal=True)
exact.square().sum().backward()
for a, b in ((full, exact), (q.grad, qq.grad), (k.grad, kk.grad), (v.grad, vv.grad)):
    assert (a - b).norm() < 1e-5 * b.norm(), (a - b).norm() / b.norm()
os.write(1, f"rank {world.rank} of {world.size} agrees\\n".encode())  # in one piece: two ranks write to one pipe
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_waited_for_as_long_as_the_timeout_says(monkeypatch: Any, rank: int) -> None:
    """Where no torchrun ends the others: one may have refused its options and gone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    start = time.monotonic()
    with pytest.raises(WorldError, match="the ranks did not find each other within 1 s .*needs a longer timeout"):
        join("gloo", 1)
    assert time.monotonic() - start < 20


def test_under_torchrun_nothing_needs_to_be_initialised(tmp_path: Any) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = forked.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 agrees" in done.stdout
    assert "Error" not in done.stderr and "terminate" not in done.stderr, done.stderr

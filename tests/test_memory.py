"""Memory of simulated ranks: what the table says is what was there, and it falls as 1 / P."""

import pytest
import torch
from kernel_cases import Largest

import ringlearn as rl

B, H, G, S, D = 1, 8, 2, 4096, 64
INPUTS = ("q", "k, v")


def peaks(P, mask, layout, kernel=None, dtype=torch.float32):
    """The largest peak over ranks in bytes beyond a rank's own q, k, v: forward and backward; total, and a table."""
    q, k, v = (torch.randn(B, h, S, D, dtype=dtype, requires_grad=True) for h in (H, G, G))
    world = rl.SimulatedWorld(P)
    out = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=mask, kernel=kernel)
    forward = max(world.memory.peak_bytes(rank, without=INPUTS) for rank in range(P))
    total = max(world.memory.peak_bytes(rank) for rank in range(P))
    parts = world.memory.peak(P - 1)
    world.memory.clear()
    out.unshard().sum().backward()
    backward = max(world.memory.peak_bytes(rank, without=INPUTS) for rank in range(P))
    return forward, backward, total, parts


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
@pytest.mark.parametrize("mask", [rl.full, rl.causal], ids=repr)
def test_peak_memory_beyond_the_inputs_falls_as_one_over_P(mask, layout):
    forward, backward = {}, {}
    for P in (1, 2, 4, 8):
        forward[P], backward[P], _, _ = peaks(P, mask, layout)
    for measured in (forward, backward):
        c = max(P * measured[P] for P in (2, 4, 8)) / S  # bytes a token: one constant for all
        assert all(measured[P] <= c * S / P for P in (2, 4, 8))
        assert measured[8] == pytest.approx(measured[4] / 2, rel=0.05)
        assert measured[4] < 0.62 * measured[2] and measured[2] < 1.3 * measured[1]


def test_peak_memory_is_the_formula_s():
    """Own q, k, v, two shards of k, v in flight (one at P = 2), two outputs and lse; a few numbers a row to merge."""
    e = 4
    for P in (1, 2, 4, 8):
        s = S // P
        _, _, total, _ = peaks(P, rl.full, rl.contiguous)
        outputs = 2 if P > 1 else 1
        formula = s * D * (H * e + 2 * G * e * (1 + min(2, P - 1)) + outputs * 4 * H) + outputs * 4 * H * s
        # The merge weights of a tile: at most 8 numbers a row and head, against D = 64 of the output.
        assert formula <= total <= formula + 8 * 4 * H * s, (P, total, formula)


def test_components():
    P, s = 4, S // 4
    _, _, _, parts = peaks(P, rl.full, rl.contiguous)
    assert parts["q"] == B * H * s * D * 4
    assert parts["k, v"] == 2 * B * G * s * D * 4
    assert parts["in flight"] == 2 * parts["k, v"]
    assert parts["partial results"] >= 2 * B * H * s * D * 4


def test_the_reference_kernel_shows_its_scores():
    _, _, _, parts = peaks(4, rl.full, rl.contiguous, kernel="reference")
    assert parts["scores"] >= B * H * 512 * 512 * 4, "a block of scores"


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("mask", ["causal", "documents", "own"])
@pytest.mark.parametrize("P", [1, 3])
def test_no_path_builds_S_by_S(kernel, mask, P):
    S = 3000
    mask = {
        "causal": rl.causal,
        "documents": rl.causal & rl.documents([1000, 500, 1500]) & rl.sliding_window(700),
        "own": rl.mask(lambda q, k: (q - k) % 3 == 0),
    }[mask]
    q, k, v = (torch.randn(1, 1, S, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        world = rl.SimulatedWorld(P, count_memory=False)
        rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=mask, kernel=kernel).unshard().sum().backward()
    assert largest.numel <= 512 * 512, f"{largest.numel} elements in one tensor; S x S is {S * S}"


def test_what_a_program_drops_is_not_counted_any_longer():
    async def program(comm, x):
        for _ in range(5):
            big = torch.zeros(1000)
            del big
        return torch.zeros(10)

    world = rl.SimulatedWorld(2)
    world.run(program, torch.zeros(3))
    assert world.memory.peak(1) == {"other inputs": 12, "partial results": 4000}
    assert world.memory.live(1) == {}, "results belong to the caller after the run"


def test_the_receive_buffer_is_charged_to_the_receiver():
    async def program(comm, x):
        if comm.rank == 0:
            await comm.send(x, to=1)
        else:
            await comm.recv(x.shape, source=0)

    world = rl.SimulatedWorld(2)
    world.run(program, torch.zeros(100))
    assert world.memory.peak(0) == {"other inputs": 400}
    assert world.memory.peak(1) == {"other inputs": 400, "in flight": 400}


@pytest.mark.parametrize("late", [0, 1])
def test_a_packed_message_is_the_sender_s_until_it_was_awaited(late):
    """Whichever rank awaits first: a sender that goes on to work holds it all the while."""

    async def program(comm, x, y):
        handle = comm.exchange({1 - comm.rank: (x, y)}, {1 - comm.rank: (x.shape, y.shape)})
        if comm.rank == late:  # the other one comes first and takes its message
            await comm.exchange({1 - comm.rank: (x[:1],)}, {1 - comm.rank: ((1,),)})
            work = torch.zeros(1000)
            del work
            await handle
        else:
            await handle
            await comm.exchange({1 - comm.rank: (x[:1],)}, {1 - comm.rank: ((1,),)})

    world = rl.SimulatedWorld(2)
    world.run(program, torch.zeros(50), torch.zeros(50))
    assert world.memory.peak(late)["in flight"] == 800  # what is sent, and what arrives


def test_the_table_is_readable():
    world = rl.SimulatedWorld(2)
    rl.ring_attention(*world.shard(*(torch.randn(1, 1, 8, 4) for _ in range(3))))
    lines = world.memory.table().splitlines()
    assert lines[0].split()[0] == "rank" and lines[0].split()[-1] == "total" and len(lines) == 3


def test_counting_can_be_switched_off():
    world = rl.SimulatedWorld(2, count_memory=False)
    rl.ring_attention(*world.shard(*(torch.randn(1, 1, 8, 4) for _ in range(3))))
    assert world.memory.peak(0) == {}

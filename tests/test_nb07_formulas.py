"""One test for each numbered formula of notebook 07, against the dense mask, counted, and the simulated clock."""

from __future__ import annotations

import itertools

import pytest
import torch
from course import ROOT, formula_tests, formulas, read
from oracle import dense_attention

import ringlearn as rl
from ringlearn.costs.balance import ring_balance
from ringlearn.course.checks import nb07
from ringlearn.layouts import positions_of

LAYOUTS = [rl.contiguous, rl.striped, rl.zigzag]
SIZES = [(8, 2), (24, 3), (64, 4), (80, 5), (128, 8)]  # 2P divides S


def counted(mask, S, P, layout):
    """Formula (1): visible pairs, one by one."""
    own = [positions_of(ranges).tolist() for ranges in layout.ranges(S, P)]
    seen = mask.dense(S, S).tolist()
    return [[sum(seen[p][x] for p in own[r] for x in own[(r - t) % P]) for t in range(P)] for r in range(P)]


@pytest.mark.parametrize("layout", [*LAYOUTS, rl.zigzag_per_document([21, 6, 0, 33])], ids=str)
def test_formula_1_the_work_of_a_rank_in_a_step(layout):
    S, P = 60, 4
    for mask in (rl.full, rl.causal, rl.causal & rl.sliding_window(9), rl.causal & rl.documents([21, 6, 0, 33])):
        found = ring_balance(mask, S, P, layout, visible=True)
        assert [list(row) for row in found.scores] == counted(mask, S, P, layout)


@pytest.mark.parametrize(("S", "P"), SIZES)
def test_formula_2_contiguous(S, P):
    n = S // P
    want = [[n * (n + 1) // 2 if t == 0 else n * n if t <= r else 0 for t in range(P)] for r in range(P)]
    assert counted(rl.causal, S, P, rl.contiguous) == want
    limit = (2 * P - 1) / P
    far = [ring_balance(rl.causal, P * m, P, rl.contiguous).ratio for m in (10, 1000, 100_000)]
    assert abs(far[2] - limit) < 1e-4 and [abs(x - limit) for x in far] == sorted(abs(x - limit) for x in far)[::-1]


def begins(work):
    """Formula (3), in tensors; the beginning of each step, and the makespan."""
    work = torch.tensor(work, dtype=torch.float64)
    b = [torch.zeros(len(work), dtype=torch.float64)]
    for t in range(len(work) - 1):
        b.append(torch.maximum(b[-1] + work[:, t], b[-1].roll(1)))
    return torch.stack(b, 1), float((b[-1] + work[:, -1]).max())


def works():
    numbers = torch.Generator().manual_seed(0)
    for P in (1, 2, 3, 5, 8):
        for _ in range(20):
            yield (torch.rand(P, P, generator=numbers) ** 4 * 100).round().long().tolist()
    yield nb07.example()


def test_formula_3_is_the_simulated_clock():
    for work in works():
        b, makespan = begins(work)
        assert makespan == nb07.simulated(work)
        found = rl.costs.balance.Balance(rl.zigzag, tuple(map(tuple, work)), ())
        assert makespan == found.makespan and b.tolist() == [[start for start, _ in row] for row in found.times]


def test_formula_4_the_makespan_lies_between_busiest_and_lockstep():
    strict = [False, False]
    for work in works():
        busiest, lockstep = max(map(sum, work)), sum(map(max, zip(*work)))
        makespan = begins(work)[1]
        assert busiest <= makespan <= lockstep
        strict = [strict[0] or busiest < makespan, strict[1] or makespan < lockstep]
    assert strict == [True, True]


@pytest.mark.parametrize(("S", "P"), SIZES)
def test_formula_5_striped(S, P):
    n = S // P
    want = [[n * (n + 1) // 2 if t <= r else n * (n - 1) // 2 for t in range(P)] for r in range(P)]
    assert counted(rl.causal, S, P, rl.striped) == want
    assert ring_balance(rl.causal, S, P, rl.striped).ratio == pytest.approx(P * (n + 1) / (S + 1), rel=1e-12)


@pytest.mark.parametrize(("S", "P"), SIZES)
def test_formula_6_zigzag(S, P):
    n = S // P
    want = [[n * (n + 1) // 2 if t == 0 else n * n // 2 for t in range(P)] for _ in range(P)]
    assert counted(rl.causal, S, P, rl.zigzag) == want
    assert ring_balance(rl.causal, S, P, rl.zigzag).ratio == 1


@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
@pytest.mark.parametrize("w", [1, 2, 5, 9, 40])
def test_formula_7_the_rows_that_a_hop_carries_are_those_that_it_sends(layout, w):
    """Formula (7) in sets of rows, against the messages of a ring; and ceil((w - 1) / n) hops of contiguous shards."""
    S, P, G, D = 48, 4, 1, 2
    mask = rl.causal & rl.sliding_window(w)
    own = [positions_of(ranges).tolist() for ranges in layout.ranges(S, P)]
    seen = mask.dense(S, S).tolist()
    rows = {(b, P): set() for b in range(P)}
    for b, t in itertools.product(range(P), range(P - 1, 0, -1)):
        needed = {j for j in own[b] if any(seen[i][j] for i in own[(b + t) % P])}
        rows[b, t] = needed | rows[b, t + 1]
    world = rl.SimulatedWorld(P)
    rl.ring_attention(*world.shard(*torch.randn(3, 1, G, S, D), layout=layout), mask=mask)
    for rank in range(P):  # in hop t it passes on the keys of rank - t + 1
        sent = [e.nbytes // (2 * G * D * 4) for e in world.trace.select("send", rank)]
        assert sent == [n for t in range(1, P) if (n := len(rows[(rank - t + 1) % P, t]))]
    if layout is rl.contiguous:
        assert max((t for (_, t), carried in rows.items() if carried), default=0) == min(P - 1, -(-(w - 1) // (S // P)))


def rope(x, positions):
    """The notebook's."""
    angle = positions[:, None] * 100.0 ** -torch.linspace(0, 1, 8, dtype=torch.float64)
    a, b = x[..., :8], x[..., 8:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_formula_8_only_the_distance_counts():
    torch.manual_seed(0)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    for p, x in itertools.product((0, 3, 50, 1000), (0, 7, 999)):
        at = [torch.tensor([n]) for n in (p, x, p - x)]
        got = (rope(q[None], at[0]) * rope(k[None], at[1])).sum()
        assert float(got) == pytest.approx(float((rope(q[None], at[2]) * k).sum()), abs=1e-12)
    lengths = [17, 6, 37]
    mask, place = rl.causal & rl.documents(lengths), torch.arange(60)
    q, k, v = torch.randn(3, 1, 1, 60, 16, dtype=torch.float64)
    ways = [place, rl.positions_in_documents(place, lengths)]
    outs = [dense_attention(rope(q, p), rope(k, p), v, mask)[0] for p in ways]
    assert torch.allclose(*outs, rtol=0, atol=1e-12)


def test_the_notebook_numbers_exactly_the_formulas_that_are_tested_here():
    tested = formula_tests(ROOT / "tests" / "test_nb07_formulas.py")
    assert formulas(read("07")) == sorted(tested) == list(range(1, 9))

"""All ways side by side say what the formulas say, which say what runs do."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.attention.table import STRATEGIES
from ringlearn.costs.compare import Problem, compare

ATTENTION = {costs.name: entry.function for entry in STRATEGIES.values() for costs in entry.costs}
ATTENTION["all-gather, 1 head at once"] = lambda *x: rl.all_gather_attention(*x, heads_at_once=1)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("heads", [(8, 4), (6, 2), (4, 1)], ids=str)
def test_rows_are_what_the_worst_rank_of_a_run_sends_and_holds(shape, heads):
    (H, G), S, D = heads, 50, 8
    P = shape[0] * shape[1]
    for row in compare(Problem(S, shape, H, G, D, itemsize=4)):
        world = rl.SimulatedWorld(shape)
        x = [torch.randn(1, h, S, D, requires_grad=True) for h in (H, G, G)]
        shards = world.shard(*x)
        world.memory.clear()
        out = ATTENTION[row.name](*shards)
        forward = [world.trace.bytes_sent(rank) for rank in range(P)]
        assert row.messages == max(world.trace.messages(rank) for rank in range(P)), row.name
        assert row.total_memory == most_held(world, row.name), row.name
        world.memory.clear()
        assert row.busy == sum(world.trace.flops(rank) > 0 for rank in range(P)), row.name
        out.unshard().sum().backward()
        assert row.total_memory_backward == most_held(world, row.name), row.name
        assert sum(row.sent.values()) == max(forward), row.name
        assert sum(row.sent_backward.values()) == max(world.trace.bytes_sent(rank) for rank in range(P)), row.name


def most_held(world, name):
    """By the rank that holds most; scores inside a kernel are no part of the way."""
    parts = ("in flight", "gathered", "scores")[: 3 if name == "ring self-attention" else 2]
    return max(sum(world.memory.most(rank).get(part, 0) for part in parts) for rank in range(world.size))


def across(world, shape):
    """The most bytes that a rank sends to another node."""
    places = shape[1]
    sent = [0] * world.size
    for e in world.trace.select("send"):
        sent[e.rank] += e.nbytes * (e.rank // places != e.peer // places)
    return max(sent)


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 4)], ids=str)
def test_what_crosses_nodes_is_what_goes_to_ranks_of_other_nodes(shape):
    S, H, G, D = 48, 24, 24, 4  # every way has equal shares: heads divide
    for row in compare(Problem(S, shape, H, G, D, itemsize=4)):
        world = rl.SimulatedWorld(shape)
        ATTENTION[row.name](*world.shard(*(torch.randn(1, h, S, D) for h in (H, G, G))))
        assert row.sent["outer"] == across(world, shape), row.name


def test_seconds_on_equal_links_are_those_of_the_formulas_and_hidden_is_what_adds_nothing():
    problem = Problem(4096, (1, 8), 32, 8, 128, bandwidth=50e9)
    rows = {row.name: row for row in compare(problem)}
    machine = dict(flops=600e12, bandwidth=50e9, latency=10e-6)
    assert rows["ring"].seconds == costs.ring_seconds(512, 8, 32, 8, 128, **machine)
    assert rows["ulysses"].seconds == pytest.approx(costs.ulysses_seconds(4096, 8, 32, 8, 128, **machine))
    even = 4 * 4096**2 * 32 * 128 / 8 / 600e12
    assert all(row.compute == pytest.approx(even) and 0 < row.exposed < 1 for row in rows.values())
    assert rows["ring"].seconds - rows["ring"].compute == pytest.approx(rows["ring"].exposed * rows["ring"].seconds)
    long = {row.name: row for row in compare(Problem(2**20, (2, 4), 32, 8, 128))}
    assert long["ring"].exposed < 1e-12 < long["ulysses"].exposed


def test_a_slower_network_slows_what_crosses_it_and_nothing_else():
    fast, slow = (
        {row.name: row.seconds for row in compare(Problem(2**15, (2, 4), 32, 8, 128, outer_bandwidth=w))}
        for w in (250e9, 5e9)
    )
    assert all(slow[name] > fast[name] for name in fast)
    gains = {name: slow[name] / fast[name] for name in fast}
    assert gains["hybrid"] < gains["ulysses"] < gains["all-gather"]
    assert gains["double ring"] < gains["ring"]
    one_node = [
        [row.seconds for row in compare(Problem(2**15, (1, 8), 32, 8, 128, outer_bandwidth=w))] for w in (250e9, 5e9)
    ]
    assert one_node[0] == one_node[1]


def test_ranks_beyond_the_heads_do_not_help_ulysses():
    rows = {P: {r.name: r for r in compare(Problem(8192, (1, P), 8, 2, 64))} for P in (8, 16)}
    assert (rows[8]["ulysses"].busy, rows[16]["ulysses"].busy, rows[16]["ring"].busy) == (8, 8, 16)
    assert rows[16]["ulysses"].compute == rows[8]["ulysses"].compute

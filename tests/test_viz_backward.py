"""Pictures of a ring's backward say what the trace and the tables say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.patches import FancyArrowPatch

import ringlearn as rl
from ringlearn.costs.ring import ring_memory
from ringlearn.course import published_ring
from ringlearn.course.viz import backward


def trace(P, mask=rl.full):
    world = rl.SimulatedWorld(P)
    published_ring.gradients(world, *(torch.randn(1, 1, 4 * P, 4) for _ in range(4)), mask)
    return world.trace


def unwinding(P, mask=rl.full):
    world = rl.SimulatedWorld(P)
    q, k, v = world.shard(*(torch.randn(1, 1, 4 * P, 4, requires_grad=True) for _ in range(3)))
    rl.ring_attention(q, k, v, mask=mask).unshard().sum().backward()
    return world.trace


@pytest.mark.parametrize("P", [1, 2, 5])
def test_a_block_is_where_the_ring_brings_it(P):
    assert backward.holders(trace(P)) == [[(block + step) % P for step in range(P)] for block in range(P)]
    assert backward.holders(unwinding(P)) == [[(block - 1 - step) % P for step in range(P)] for block in range(P)]


def drawn(figure):
    """The shares that the boxes name, the place of "home", and how many arrows there are: solid, dashed."""
    ax = figure.axes[0]
    boxes = [t.get_text().partition("\n")[2] for t in ax.texts if t.get_text().startswith("dk, dv")]
    (home,) = [t.get_position() for t in ax.texts if t.get_text() == "home"]
    styles = [p.get_linestyle() for p in ax.patches if isinstance(p, FancyArrowPatch)]
    return boxes, (home[0], round(home[1])), (styles.count("-"), styles.count("--"))


def test_two_sums_shows_each_share_and_adds_rows_of_dq_and_columns_of_dv():
    figure = backward.two_sums([[0.0, 1.5], [-1.0, 4.0]], [[1.0, 3.0], [0.5, 2.0]])
    dq, dv = ([t.get_text() for t in ax.texts] for ax in figure.axes)
    assert dq == ["0", "1.5", "-1", "4", "1.5", "3"] and dv == ["1", "3", "0.5", "2", "1.5", "5"]


def test_the_journey_shows_each_share_and_the_hop_home():
    figure = backward.journey(trace(4), block=1)
    boxes, home, arrows = drawn(figure)
    assert boxes == ["1", "1 2", "1 2 3", "1 2 3 0", "1 2 3 0"] and home == (4.5, 1) and arrows == (3, 4)


def test_the_journey_of_a_ring_that_unwinds_ends_at_home():
    figure = backward.journey(unwinding(4), block=1)
    boxes, home, arrows = drawn(figure)
    assert boxes == ["0", "0 3", "0 3 2", "0 3 2 1"] and home == (3.5, 1) and arrows == (2, 3)


def test_the_journey_refuses_what_is_none():
    with pytest.raises(ValueError, match="without a mask"):
        backward.journey(unwinding(3, rl.causal))
    with pytest.raises(ValueError, match="a block in 0..2"):
        backward.journey(trace(3), block=3)


def test_two_orders_have_one_time_axis():
    figure = backward.two_orders({"long": trace(4), "short": trace(2)})
    first, second = (ax.get_xlim() for ax in figure.axes)
    assert first[1] == second[1]
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["long, rank 0, simulated", "short, rank 0, simulated"]


def test_bars_are_as_high_as_the_table_says():
    tables = {"forward": {P: ring_memory(1024, P, 8, 2, 64, itemsize=4) for P in (1, 2, 4)}}
    figure = backward.memory_bars(tables)
    ax = figure.axes[0]
    labels = [float(t.get_text()) for t in ax.texts]
    assert labels == [round(sum(t.values()) / 2**20, 1) for t in tables["forward"].values()]
    assert sum(bar.get_height() for bar in ax.patches) * 2**20 == pytest.approx(
        sum(sum(t.values()) for t in tables["forward"].values())
    )

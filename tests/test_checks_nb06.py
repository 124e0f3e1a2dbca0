"""The checkers of notebook 06 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
from zoo.rules import ZooRules

from ringlearn import costs
from ringlearn.course.checks import nb06


class TestZoo(ZooRules):
    NUMBER = "06"


@pytest.mark.parametrize("P", [1, 2, 3, 4, 7])
def test_no_ring_of_these_messages_is_faster_than_the_units_that_are_asked_for(P):
    """All compute must be done by each rank, and its own gradients are complete only after another rank's last step."""
    from zoo.nb06 import ring_solution

    ran = nb06._ring(ring_solution, P)
    assert ran.seconds() == nb06._units(P)
    assert nb06._units(3) == 23


def test_the_threshold_of_the_oracle_is_where_compute_and_message_of_costs_meet():
    for causal in (False, True):
        for backward in (False, True):
            given = dict(causal=causal, backward=backward, itemsize=2)
            s = round(nb06._oracle_threshold(32, 8, tflops=600, gbit=2000, **given))
            operations, nbytes = costs.step_work(s, 32, 8, 128, **given)
            assert operations / 600e12 == pytest.approx(nbytes / 250e9, rel=2e-3)


def test_the_oracle_of_timelines_counts_as_a_fine_grid_does():
    events = [("compute", 0, 5), ("message", 4, 7), ("message", 6, 12), ("compute", 7, 8), ("compute", 20, 21)]
    grid = [i + 0.5 for i in range(25)]

    def covered(kind, t):
        return any(k == kind and a < t < b for k, a, b in events)

    exposed = sum(covered("message", t) and not covered("compute", t) for t in grid)
    assert nb06._oracle_timeline(events) == (exposed, "link") == (6, "link")


def test_predictions_hold_for_other_numbers_too():
    assert [nb06.shards_held(P) for P in (2, 3, 4, 5)] == [2, 3, 3, 3]
    attention, nccl = nb06.measured_ms(2048, "attention"), nb06.measured_ms(2048, "nccl")
    assert nb06.predict_overhead.answer() == round(100 * (nccl - attention) / attention)


def test_a_timeline_that_was_not_measured_is_an_error():
    with pytest.raises(ValueError, match="no timeline of 77 tokens"):
        nb06.measured_events(77, "nccl")

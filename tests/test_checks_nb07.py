"""The checkers of notebook 07 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

from zoo.rules import ZooRules

import ringlearn as rl
from ringlearn.costs.balance import Balance, ring_balance
from ringlearn.course.checks import nb07


class TestZoo(ZooRules):
    NUMBER = "07"


def test_the_simulated_clock_says_what_the_library_says_of_work_that_is_uneven_in_all_ways():
    work = nb07.example()
    found = Balance(rl.zigzag, tuple(map(tuple, work)), ())
    assert nb07.simulated(work) == found.makespan
    assert found.busiest < found.makespan < found.lockstep, "or the exercise would not need its rule"


def test_a_zigzag_rank_computes_half_of_a_pair_on_any_number_of_ranks():
    assert [nb07.half_of_a_pair(P) for P in (2, 3, 5)] == ["half"] * 3


def test_the_pack_is_the_one_of_the_library_s_test():
    assert len(nb07.PACK) == 20 and sum(nb07.PACK) == 131072
    each = ring_balance(rl.causal & rl.documents(nb07.PACK), 131072, 8, rl.zigzag_per_document(nb07.PACK))
    assert each.ratio < 1.001

"""Notebook 07 as a learner leaves it: solved with its own solutions, with guesses made, and its numbers as counted."""

from __future__ import annotations

import re

from course import markdown, printed, read
from notebook_rules import NotebookRules

import ringlearn as rl
from ringlearn.costs.balance import ring_balance
from ringlearn.course.checks import nb07


class TestNotebook(NotebookRules):
    NUMBER = "07"
    ANSWERS = [1.875, "half", 1.96, 2]
    QUIZ = [1.94, 50, 1200, 1.23, 1, 1]
    GIVEAWAYS = {
        "predict_contiguous": ("1.88", "1.87", "15/8"),
        "predict_pair": ("half:", "'half'", "FULL q"),
        "predict_pack": ("1.96",),
        "predict_window": ("steps with work", "contiguous 1.02"),
    }
    TEXT_TOO = True


def test_the_numbers_in_the_text_are_those_that_are_counted():
    text, shown = markdown(read("07")), printed(read("07"))
    assert f"from {min(nb07.PACK)} to {max(nb07.PACK):,} each" in text and "131,072 tokens in all" in text
    full, causal = (ring_balance(mask, 1024, 4, rl.contiguous).makespan for mask in (rl.full, rl.causal))
    assert f"causal {causal / full:.2f}" in shown and "on 4 ranks 0.88 of it is left" in text
    assert sum(nb07.PACK) // 8 == 16_384 and "reaches from one shard of 16,384 into the one before" in text


def test_what_the_text_says_of_zigzag_over_the_pack():
    """Rank 6 ends last, though it has little to do: its last keys came late."""
    found = ring_balance(rl.causal & rl.documents(nb07.PACK), sum(nb07.PACK), 8, rl.zigzag, visible=True)
    ends = [row[-1][1] for row in found.times]
    assert ends.index(max(ends)) == 6 and found.per_rank[6] < 1.2 * found.mean
    before = max(stop for start, stop in found.times[6][:-1] if stop > start)
    assert found.times[6][-1][0] > before, "it waits before its last step"


def test_what_the_text_says_of_contiguous_shards_of_the_pack():
    found = ring_balance(rl.causal & rl.documents(nb07.PACK), sum(nb07.PACK), 8, rl.contiguous)
    assert f"Contiguous shards take {found.ratio:.2f} times the mean" in markdown(read("07"))


def test_what_the_text_says_of_windows_on_stripes():
    """Striped wins by two per cent; where no kernel knows windows it computes half as many scores again."""
    window, S = rl.causal & rl.sliding_window(4096), sum(nb07.PACK)
    striped, contiguous = (ring_balance(window, S, 8, layout) for layout in (rl.striped, rl.contiguous))
    assert round(100 * (1 - striped.makespan / contiguous.makespan)) == 2
    assert 1.4 < ring_balance(window, S, 8, rl.striped, cut=True).total / striped.total < 1.6


def test_what_the_text_says_of_four_equal_documents():
    lengths = [4096] * 4
    found = ring_balance(rl.causal & rl.documents(lengths), sum(lengths), 4, rl.contiguous)
    assert not any(n for row in found.scores for n in row[1:])


def test_every_time_is_said_to_be_simulated():
    text = markdown(read("07"))
    assert "All times in this notebook are **simulated**" in text
    assert not re.search(r"\bmeasured\b", text.replace("none is measured", ""))

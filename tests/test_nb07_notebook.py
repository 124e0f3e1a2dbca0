"""Notebook 07 as a learner leaves it: solved with its own solutions, with guesses made, and its numbers as counted."""

from __future__ import annotations

import re

import pytest
from course import markdown, printed, read
from notebook_rules import NotebookRules

import ringlearn as rl
from ringlearn.costs.balance import ring_balance
from ringlearn.course import records
from ringlearn.course.checks import nb07


class TestNotebook(NotebookRules):
    NUMBER = "07"
    ANSWERS = [1.875, "half", 1.96, 2, 66]
    QUIZ = [1.94, 50, 1200, 1.23, 1, 1]
    SPOILERS = {
        "predict-contiguous": (r"\b1\.8[78]", r"15/8", r"7\.5 squares"),
        "exercise-7a": (r"max\(\w*end", r"begin\[rank - 1\]", r"\\max\\big", r"begun\["),
        "predict-pair": (r"half:", r"'half'", r"FULL q", r"##\.\. ##\.\."),
        "exercise-7b": (r"// ?\(2 ?\* ?P\)", r"_block\(", r"edges"),
        "predict-pack": (r"1\.96",),
        "exercise-7c": (r"start \+ first", r"start \+= ", r"length \* i"),
        "predict-window": (r"steps with work", r"contiguous +1\.02", r"and no further\b"),
        "predict-measured": (r"\b6[67] ?%", r"\b398\b", r"1\.5 even shares to compute"),
        "quiz": (r"1\.94", r"31/16", r"1\.23", r"16/13", r"\b1,?200\b"),
    }


def test_the_numbers_in_the_text_are_those_that_are_counted():
    text, shown = markdown(read("07")), printed(read("07"))
    assert f"from {min(nb07.PACK)} to {max(nb07.PACK):,} tokens each" in text and "131,072 tokens in all" in text
    full, causal = (ring_balance(mask, 1024, 4, rl.contiguous).makespan for mask in (rl.full, rl.causal))
    assert f"causal {causal / full:.2f}" in shown and "on 4 ranks it takes 0.88 of the time" in text
    assert sum(nb07.PACK) // 8 == 16_384 and "reaches from one shard of 16,384 into the one before" in text


def test_what_the_text_says_of_zigzag_over_the_pack():
    """Rank 3 has the most to do, but rank 6 ends last: its last keys came late."""
    found = ring_balance(rl.causal & rl.documents(nb07.PACK), sum(nb07.PACK), 8, rl.zigzag, visible=True)
    ends = [row[-1][1] for row in found.times]
    assert ends.index(max(ends)) == 6 and found.per_rank.index(max(found.per_rank)) == 3
    before = max(stop for start, stop in found.times[6][:-1] if stop > start)
    assert found.times[6][-1][0] > before, "it waits before its last step"


def test_what_the_text_says_of_contiguous_shards_of_the_pack():
    found = ring_balance(rl.causal & rl.documents(nb07.PACK), sum(nb07.PACK), 8, rl.contiguous)
    assert f"Contiguous shards take {found.ratio:.2f} even shares" in markdown(read("07"))


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


def test_times_are_simulated_until_two_gpus_are_measured():
    before, after = markdown(read("07")).split("## 8 ")
    assert "Until section 8 all times are **simulated**" in before and not re.search(r"\bmeasured\b", before)
    assert "Two H200 ran a ring of 65,536 tokens" in after


def test_what_the_text_says_of_two_gpus():
    """The count is an upper bound of each measured rate; where calls are long it is the rate."""
    rings = [row for row in records.load(nb07.MASKS)["rows"] if row["way"] == "ring"]
    found = {(r["mask"], r["layout"]): (1 / r["balance"], r["forward_backward_fraction"]) for r in rings}
    assert all(measured < 1.03 * most for most, measured in found.values())
    for mask in ("causal", "documents:8"):
        assert all(abs(measured - most) < 0.04 for (m, _), (most, measured) in found.items() if m == mask)
    assert f"reach {100 * found['causal', 'zigzag'][1]:.0f}% of that rate" in markdown(read("07"))
    assert found["documents:64", "contiguous"] > found["documents:64", "zigzag"]
    assert all(5 < r["forward_backward_ms"] < 7 for r in rings if r["mask"] == "documents:64")  # "some 6 ms"
    for r in rings:  # the rate is that of the fastest kernel on one GPU, FlashAttention 4
        one = nb07.measured(r["mask"], "one device")
        assert one["kernel"] == "fa4" and r["forward_backward_tflops"] / one[
            "forward_backward_tflops"
        ] == pytest.approx(r["forward_backward_fraction"])

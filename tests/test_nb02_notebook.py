"""Notebook 02 as a learner leaves it: solved with its own solutions, and with guesses made; and as it is shipped."""

from __future__ import annotations

import re

from course import printed, read
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "02"
    ANSWERS = [4, 1.25, "dv", 130]
    QUIZ = [34_078_720, 32, 2.5, -1.5, 3.9]
    SPOILERS = {
        "exercise-2a": (
            r"split\(block_",
            r"range\([^)]*block_",
            r"torch\.cat\(\w+, (dim=)?2",
            r"_blocks\(S",
            r"Accumulator",
        ),
        "exercise-2b": (
            r"(p|p_j) ?(\*|\\,)? ?\(dp",
            r"v @ dout",
            r"dp ?- ?delta",
            r"\\delta ?=",
            r"p @ dp",
            r"\\tag\{?2",
        ),
        "exercise-2c": (r"unflatten", r"\.mT @ (q|dout)", r"sum_over_queries", r"\bds ?@", r"dv\[", r"sum\(2\)"),
        "exercise-2d": (r"-\(-S", r"\\l?ceil", r"⌈", r"2 ?\*? ?S ?\*? ?D", r"\bpasses \+ 1|1 \+ passes", r"\\tag\{?7"),
        "predict-terabytes": (r"\b4 ?(TB|terabytes)", r"10¹² scores", r"\b4,000,000,000,000"),
        "predict-ds": (r"(?<![\d.])1\.25", r"\b5/[48]\b", r"\bp_j ?\(1 ?- ?p_j\)"),
        "predict-exact": (r"dv +0\.00", r"dv ?=", r"\bdv\b.{0,20}\b(right|exact|untouched|correct)", r"leaves dv"),
        "predict-block": (r"(?<![\d.,])(130|129|254)\b", r"16 MiB"),
        "quiz": (r"34,?078,?720", r"\b32 times", r"\b2\.5\b", r"-1\.5\b", r"\b3\.9\b", r"128 MiB", r"130 / 33"),
    }


def test_a_delta_per_block_shows_its_signature_and_so_does_a_local_mask():
    text = printed(read("02"))
    off = {what: re.search(rf"{what} +per block: off by (.*)", text)[1] for what in ("neither", "delta", "lse")}
    assert off["neither"] == "dq 0.00 dk 0.00 dv 0.00"
    assert off["delta"].endswith("dv 0.00") and "0.00" not in off["delta"][:-4]
    assert "0.00" not in off["lse"]
    assert "delta from each block: ds  0.33 -0.33  0.00   sum over the row 0.00" in text
    assert "S =  64: off by 0.00" in text and "byte 855 has changed: True" in text

"""Notebook 02 as a learner leaves it: solved with its own solutions, and with guesses made; and as it is shipped."""

from __future__ import annotations

import re

from course import printed, read
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "02"
    ANSWERS = [4, 1.25, "dv", 130]
    QUIZ = [34_078_720, 32, 2.5, -0.5, 3.9]

    SPOILERS = {
        "exercise-2a": (r"\.split\(block_q\)", r"range\(0, .{1,20}, block_", r"outs\.append"),
        "exercise-2b": (r"p \* \(dp", r"p @ dp", r"\(dp_j ?- ?\\delta\)", r"weighted average"),
        "exercise-2c": (r"p \* \(dp - delta\.", r"unflatten\(1, \(-1, group", r"sum_over_queries", r"ds\.mT @"),
        "exercise-2d": (r"-\(?-S //", r"\(1 \+ passes\)", r"V=2SDe"),
        "predict-terabytes": (r"\b4 (TB|terabytes)\b", r"10¹² scores, of 4"),
        "predict-ds": (r"\b1\.25\b", r"\b5/8\b"),
        "predict-exact": (r"\bdv 0\.00", r"\bdv\b[^.]*\b(exact|right|untouched)\b", r"no \$?\\?delta in"),
        "predict-block": (r"\b130\b", r"\b254\b", r"\b129\b"),
        "quiz": (r"\b34,?078,?720\b", r"\b3\.9\b", r"\b31\.5\b", r"130 / 33", r"\b8,192 bytes"),
    }


def test_a_delta_per_block_shows_its_signature_and_so_does_a_local_mask():
    text = printed(read("02"))
    off = {what: re.search(rf"{what} +per block: off by (.*)", text)[1] for what in ("neither", "delta", "lse")}
    assert off["neither"] == "dq 0.00 dk 0.00 dv 0.00"
    assert off["delta"].endswith("dv 0.00") and "0.00" not in off["delta"][:-4]
    assert "0.00" not in off["lse"]
    assert "delta from each block: ds  0.33 -0.33  0.00   sum over the row 0.00" in text
    assert "S =  64: off by 0.00" in text and "byte 855 has changed: True" in text

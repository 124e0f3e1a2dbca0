"""Notebook 02 as a learner leaves it: solved with its own solutions, and with guesses made; and as it is shipped."""

from __future__ import annotations

import re

from course import above, printed, read
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "02"
    ANSWERS = [4, 1.25, "dv", 130]
    QUIZ = [34_078_720, 32, 2.5, -0.5, 3.9]

    def test_nothing_above_a_prediction_gives_it_away(self, checks):
        for name in self.asked:
            answer = re.escape(str(getattr(checks, name).answer()))
            assert not re.search(rf"(?<![\w.,]){answer}(?![\w.,])", above(read("02"), name)), name


def test_a_delta_per_block_shows_its_signature_and_so_does_a_local_mask():
    text = printed(read("02"))
    off = {what: re.search(rf"{what} +per block: off by (.*)", text)[1] for what in ("neither", "delta", "lse")}
    assert off["neither"] == "dq 0.00 dk 0.00 dv 0.00"
    assert off["delta"].endswith("dv 0.00") and "0.00" not in off["delta"][:-4]
    assert "0.00" not in off["lse"]
    assert "delta from each block: ds  0.33 -0.33  0.00   sum over the row 0.00" in text
    assert "S =  64: off by 0.00" in text and "byte 855 has changed: True" in text

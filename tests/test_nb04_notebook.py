"""Notebook 04 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

from course import printed, read
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "04"
    ANSWERS = [6, 15, "grows", 1, 13, 67]
    QUIZ = [3, 5767168, 46, 2654208, 0]

    def test_nothing_above_a_prediction_gives_it_away(self):
        text = printed(read("04"))
        assert not [word for word in ("grows", "67", "15", "13") if word in text]


def test_what_the_cells_print_is_what_the_text_says(solved):
    table = solved.partition("wrong are")[2].partition("no hop home gives")[0].splitlines()[1:]
    rows = {line[:19].strip(): [line[i : i + 13].strip() for i in range(19, 19 + 4 * 13, 13)] for line in table if line}
    assert len(rows) == 5
    assert all(row[0] == "-" for row in rows.values()), "one rank: nothing is found"
    assert rows["other direction"] == ["-", "-", "-", "dq dk dv"]
    assert rows["delta per step"][3] == "dq dk", "dv is exact"
    assert all(row[3] != "-" for row in rows.values()), "P = 4, causal finds all five"
    assert "wrong dk passes allclose(atol=1e-2): True   off by 100%: True" in solved

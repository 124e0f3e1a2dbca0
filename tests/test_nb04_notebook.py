"""Notebook 04 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "04"
    ANSWERS = [6, 15, "grows", 1, 13, 67]
    QUIZ = [3, 5767168, 46, 2654208, 0]

    SPOILERS = {
        "predict-home": (r"block 6", r"next rank's block", r"\(5 - 7\)"),
        "predict-messages": (r"\b15\b", r"2 ?P - 1", r"P hops of dk", r"(four|4|eight|8) (hops )?of dk"),
        "exercise-4a": (r"await travelling", r"travelling = comm", r"dkv\[-1:\]", r"dk \+ dk", r"found, dk, dv ="),
        "predict-wire": (r"it grows", r"P = 32 has more", r"times the error", r"1\.003", r"rounds the whole sum"),
        "predict-exposed": (r"hop home (is|has|sits)", r"[Oo]nly the hop home", r"P\\?,? ?C \+ M"),
        "predict-unwound": (r"\b13\b(?!})", r"six of k, v", r"P - 2", r"one hop (less|fewer)"),
        "exercise-4b": (r"\(P - 1\) ?(\\,|\*) ?2", r"min\(2, P", r"home \* dkv", r"5,242,880|7,340,032|3,145,728"),
        "predict-half": (r"\b67\b", r"0\.667", r"40\.0?[16]"),
        "quiz": (r"5,?767,?168", r"2,?654,?208", r"\b46\b ?ms"),
    }


def test_what_the_cells_print_is_what_the_text_says(solved):
    table = solved.partition("wrong are")[2].partition("no hop home gives")[0].splitlines()[1:]
    rows = {line[:19].strip(): [line[i : i + 13].strip() for i in range(19, 19 + 4 * 13, 13)] for line in table if line}
    assert len(rows) == 6 and set(rows.pop("no mistake")) == {"-"}
    assert all(row[0] == "-" for row in rows.values()), "one rank: nothing is found"
    assert rows["other direction"] == ["-", "-", "-", "dq dk dv"]
    assert rows["delta per step"][3] == "dq dk", "dv is exact"
    assert all(row[3] != "-" for row in rows.values()), "P = 4, causal finds all five"
    assert "wrong dk passes allclose(atol=1e-2): True   off by over 100%: True" in solved

"""Notebook 09 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "09"
    ANSWERS = [67, 4, 3, 100, "dv"]
    QUIZ = [7, 512, 50, 0.69, 24]
    SPOILERS = {
        "exercise-9a": (r"% w % r", r"\\bmod w\) \\bmod", r"p // w", r"q_pos // w"),
        "predict-weight": (r"\b67\b", r"2/3", r"counted twice"),
        "predict-rows": (r"0, 4, 6, 10", r"same keys", r"x\.\.\.x\.!"),
        "predict-leaks": (r"all but the last\.", r"position 18", r"ahead: \d", r"keys of all later ranks"),
        "exercise-9b": (
            r"configurations\]\)\.any",
            r"rl\.merge\(result",
            r"async def dilated_forward",
            r"rotate\(k, v, length=int",
        ),
        "predict-bytes": (r"100\.0%", r"keeps every row", r"everything travels", r"configuration is enough"),
        "predict-exact": (r"\bdv: ", r"needs only the weights", r"dv .{0,20}(exact|right)"),
        "quiz": (r"offset is 1\b", r"2 \\cdot 16\^2", r"0\.69", r"three hops"),
    }


def test_what_the_cells_print_is_what_the_text_says(solved):
    lines = {line[:14].strip(): line for line in solved.splitlines() if line.startswith("S = ")}
    assert "same keys: True " in lines["S = 32, full"] and "off by 0.00" in lines["S = 32, full"]
    assert "ahead: 0" not in lines["S = 32, causal"] and "ahead: 0" not in lines["S = 24, causal"]
    assert "same keys: False" in lines["S = 24, full"]
    assert "all below 1e-12: True" in solved
    assert "not one bit of what comes before: True" in solved
    assert re.search(r"\[\(7, 3\)\].* 33\.9%", solved) and re.search(r"\[\(64, 1\), \(256, 16\)\].* 100\.0%", solved)
    assert "dv: detached, off by 0.00   library right: True" in solved
    assert not re.search(r"d[qk]: detached, off by 0\.0", solved)
    for line in re.findall(r"\[\(.*%", solved):
        counted, computed = re.findall(r" ([\d,]{5,}) ", line)
        assert counted == computed

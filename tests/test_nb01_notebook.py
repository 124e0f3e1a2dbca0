"""Notebook 01 as a learner leaves it: solved with its own solutions, with guesses made, and without ipywidgets."""

from __future__ import annotations

import re

import pytest
from notebook_rules import NotebookRules


class TestNotebook(NotebookRules):
    NUMBER = "01"
    ANSWERS = [89, 7, "descending", 0.75]
    QUIZ = [0.9, 2, 3, 524288, 4096]
    SPOILERS = {
        "exercise-1a": (r"exp\(m ?-", r"\\exp\(m - m'\)", r"torch\.maximum\(m", r"max\(m"),
        "exercise-1b": (
            r"_b ?- ?\\mathrm\{lse\}\)",
            r"logaddexp",
            r"lse - (lse|top)\b",
            r"sigmoid",
            r"torch\.maximum\(a",
        ),
        "exercise-1c": (r"rl\.merge\(result", r"scores\[:, block\]", r"values\[block\]", r"rl\.blockwise\("),
        "predict-overflow": (r"\b8[89]\b", r"88\.7", r"3\.4e\+?38"),
        "predict-moves": (r"7\.0", r"1 ?/ ?k"),
        "predict-order": (r"largest (score )?(comes )?first", r"m never moves"),
        "predict-weight": (r"0\.75\b", r"3/4"),
        "quiz": (r"\b0\.9\b", r"524,?288", r"512 KiB"),
    }


def test_the_stepper_moves_its_state_and_never_its_result():
    torch = pytest.importorskip("torch")
    pytest.importorskip("ipywidgets")
    from ringlearn.course.viz import softmax

    scores, values = torch.tensor([0.0, 1.0, 3.0, -torch.inf, 2.0]), torch.tensor([1.0, 0.0, 0.5, 9.0, 1.0])
    stepper = softmax.stepper(scores, values)
    seen, state, split, parts = stepper.children
    seen.value = 3
    assert "read key 2: score 3.0" in state.value and "0.1353 &nbsp;the maximum moved" in state.value
    seen.value = 4
    assert "read key 3: score -inf" in state.value and "maximum moved" not in state.value
    table = repr(softmax.stepper_table(scores, values, [2]))
    assert "  4    2.0    1.0 |    3.0   1.0000   1.5530   0.9177 |   0.5909" in table
    results = set()
    for split.value in range(6):
        results.add(re.search(r"([\d.]+) &nbsp;\(never moves\)", parts.value)[1])
        assert f"left, {split.value} keys" in parts.value
    want = float(torch.softmax(scores, -1) @ values)
    assert results == {f"{want:.4f}"}

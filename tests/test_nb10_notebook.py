"""Notebook 10 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

from notebook_rules import NotebookRules

from ringlearn.course import records
from ringlearn.course.viz.training import borders


class TestNotebook(NotebookRules):
    NUMBER = "10"
    ANSWERS = [126, 99, 8, 55]
    QUIZ = [7, 4, 4, 8, 2]
    GIVEAWAYS = {
        "predict_borders": ("126",),
        "predict_weight": ("99",),
        "predict_factor": ("2.5",),
        "predict_kept": ("KiB",),
    }


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"(?<![\w.])[\d,]*\d(?:\.\d+)?(?!\w)", line)]


def test_what_the_cells_print_is_what_the_text_says(solved):
    lines = solved.splitlines()
    assert borders(24, 3) == 4  # the picture at the top
    naive = next(line for line in lines if line.startswith("3 ranks: "))
    assert numbers(naive)[-1] > 0.3
    broken = {line[:28].strip(): numbers(line[28:]) for line in lines if re.match(r".{28}( +\d\.\d\d){3}$", line)}
    assert broken.pop("none") == [0, 0, 0] and all(row[0] == 0 for row in broken.values())
    assert broken["mean of means"][1] == 0 < broken["mean of means"][2]
    assert broken["averaged by DDP"] == [0, 0.67, 0.67] and broken["loss summed inside autograd"] == [0, 2, 2]
    assert min(*broken["local positions"][1:], *broken["shift inside the shard"][1:]) > 0.05
    assert lines.count("plain  p.grad on ranks 0 to 3: [1.0, 2.0, 3.0, 4.0]") == 1
    assert solved.count("[2.5, 2.5, 2.5, 2.5]") == 2
    assert solved.count("gradients equal to 1e-10: True, loss and norm: True") == 3
    assert solved.count("the same gradient: True") == 3
    for way in ("blocks", "anew"):
        rows = [numbers(line)[1:] for line in lines if re.match(rf"{way} +\d rank", line)]
        assert len(rows) == 4 and all(0 <= kept / computed - 1 < 0.1 for kept, computed, _ in rows)
        for column in (0, 2):
            two, four, eight = (row[column] for row in rows[1:])
            assert abs(four / two - 0.5) < 0.06 and abs(eight / four - 0.5) < 0.06
    assert "equal to 1e-9 in every step: True" in solved
    assert "ring_attention  far: over 90%: True" in solved and "under 40%: True" in solved
    assert "killed, resumed, resumed: every loss equal to 1e-9: True" in solved


def test_what_the_text_says_of_two_gpus_is_in_the_record(solved):
    rates = {(r["gpus"], r["tokens"]): r for r in records.load("2026-11-28-training-2-h200.json")["rates"]}
    assert rates[2, 16384]["tokens_per_s"] < rates[1, 16384]["tokens_per_s"]
    assert round(rates[2, 131072]["tokens_per_s"] / rates[1, 131072]["tokens_per_s"], 1) == 1.9
    one, two = (float(re.search(rf"1,024 more tokens on {n} GPUs?: (\d+) MiB", solved)[1]) for n in (1, 2))
    assert 0.5 < two / one < 0.56
    one, two = (
        int(re.search(rf"the longest within .* MiB: ([\d,]+) tokens on {n} GPU", solved)[1].replace(",", ""))
        for n in (1, 2)
    )
    assert two == 2 * one
    apart = {
        kind: float(re.search(rf"50 losses in {kind}: at most (\S+) apart", solved)[1])
        for kind in ("float64", "bfloat16")
    }
    assert apart["float64"] < 1e-12 and apart["bfloat16"] < 0.01

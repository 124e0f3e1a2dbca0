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
    SPOILERS = {
        "exercise-10a": (r"full\[p\]", r"cumsum", r"for document in"),
        "exercise-10b": (r"losses\[counts\]", r"share\.detach", r"counts\.sum\(\)", r"reduce the (number|count)s?\b"),
        "exercise-10c": (
            r"for grads, _ in",
            r"min\(1",
            r"known = _gather",
            r"once per step",
            r"summed? over all ranks",
        ),
        "exercise-10d": (r"7 ?\*? ?d\b", r"\bkeys and values that came last\b", r"P > 1 else", r"309"),
        "predict-borders": (r"\b12[678]\b", r"2 ?P ?- ?[12]", r"borders"),
        "predict-weight": (r"\b99\b(?!0)", r"1 ?/ ?\(?P\b", r"P\\,N_r"),
        "predict-factor": (r"= ?R\b", r"\bR ?/ ?N", r"times \$?R\b", r"factor.{0,20}\b8\b"),
        "predict-kept": (r"\b5[56](\.\d)? ?(%|per cent)", r"309", r"keys and values that came last", r"KiB"),
        "quiz": (r"P - 1\$? borders", r"16 bytes (for|of) each parameter, an", r"\bruns through\b"),
    }


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"(?<![\w.])[\d,]*\d(?:\.\d+)?(?!\w)", line)]


def test_what_the_cells_print_is_what_the_text_says(solved):
    lines = solved.splitlines()
    assert borders(24, 3) == 4  # the picture at the top
    assert "three ranks as one device: True" in lines and "as the library's model:    True" in lines
    assert "tokens that count: 55" in lines
    naive = next(line for line in lines if line.startswith("three ranks: loss"))
    assert numbers(naive)[-1] > 0.3
    broken = {line[:26].strip(): numbers(line[26:]) for line in lines if re.match(r".{26}( +\d\.\d\d){3}$", line)}
    assert broken.pop("none") == [0, 0, 0] and all(row[0] == 0 for row in broken.values())
    assert broken["mean of means"][1] == 0 < broken["mean of means"][2]
    assert broken["averaged by DDP"] == [0, 0.67, 0.67] and broken["summed inside autograd"] == [0, 2, 2]
    assert min(*broken["positions from 0"][1:], *broken["shifted inside the shard"][1:]) > 0.05
    assert lines.count("plain  p.grad on ranks 0 to 3: [1.0, 2.0, 3.0, 4.0]") == 1
    assert solved.count("[2.5, 2.5, 2.5, 2.5]") == 2
    assert solved.count("gradients equal to 1e-10: True, loss and norm: True") == 3
    assert solved.count("the same gradient: True") == 1
    kept = {int(P): int(n) for n, P in re.findall(r"(\d+) numbers per token on (\d) rank", solved)}
    d, GD, small = 32, 16, 1 + 16 + 4  # of the norm, of RoPE, lse
    assert kept == {P: 7 * d + 2 * GD + (P > 1) * 2 * GD + small for P in (1, 2, 3, 4)}
    assert "598  numbers per token; d = 32, G D = 16" in solved and 598 - kept[1] == 10 * d + 1
    for way in ("blocks", "recompute"):
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

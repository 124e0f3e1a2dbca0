"""The planner against published figures and our own: the page says what the code predicts, and the protocol held."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict

import published_plans as held
import pytest
from course import ROOT

from ringlearn.plan import FITTED


def test_the_page_says_what_the_code_predicts():
    """python tools/published_plans.py writes it anew."""
    page = held.PAGE.read_text()
    assert held.page(page) == page


def test_constants_are_those_that_the_fit_finds():
    assert asdict(FITTED) == pytest.approx(asdict(held.fit()), rel=1e-3)


def test_at_most_six_constants_on_at_most_ten_rows_that_exist():
    said = json.loads((held.PUBLISHED / "fitted.json").read_text())
    named = sum(said["rows"].values(), [])
    assert set(said["rows"]) == set(said["constants"]) == set(asdict(FITTED))
    assert len(said["constants"]) <= 6 and len(named) == len(set(named)) <= 10
    known = {row.id: row for row in held.rows()}
    assert all(known[name].counted for name in named) and len(known) == len(held.rows())


def test_the_rows_were_named_before_the_first_prediction():
    """In the history, where there is one: the list and the rows are older than any constant and any formula."""
    done = subprocess.run(["git", "log", "--format=%ct", "--reverse", "--", "docs/published/fitted.json"],
                          cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    formulas = subprocess.run(["git", "log", "--format=%ct", "--reverse", "--", "ringlearn/plan/seconds.py"],
                              cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    if done.returncode or not done.stdout or not formulas.stdout:
        pytest.skip("no history here")
    assert int(done.stdout.split()[0]) < int(formulas.stdout.split()[0])


def free(what):
    return [
        h.ratio
        for h in held.held()
        if h.row.counted and h.what == what and f"{h.row.id}: {what}" not in held.fitted()
    ]  # fmt: skip


def test_half_of_the_times_are_within_10_percent_and_three_quarters_within_25():
    ratios = free("time")
    assert held.within(ratios, 0.1) >= len(ratios) / 2
    assert held.within(ratios, 0.25) >= len(ratios) * 3 / 4


def test_memory_is_within_10_percent_but_for_the_misses_that_the_page_lists():
    off = {h.row.id for h in held.held() if h.row.counted and h.what == "memory" and not held.within([h.ratio], 0.1)}
    of_405b = {"titan-405b-1f1b", "titan-405b-interleaved", "titan-405b-cp8"}
    assert off == of_405b | {"titan-8b-h200-32", "titan-8b-h200-64"}


def test_our_own_training_is_predicted_to_a_hundredth():
    ours = [h for h in held.held() if h.what == "memory" and h.row.id.startswith("ours")]
    assert len(ours) == 8 and all(abs(h.ratio - 1) < 0.01 for h in ours)


def test_our_rows_are_those_of_the_record():
    record = json.loads((ROOT / "docs" / "measurements" / "2026-11-28-training-2-h200.json").read_text())
    rows = {(row.setup.cp, row.said["tokens"]): row.said for row in held.rows() if row.id.startswith("ours")}
    for rate in record["rates"]:
        said = rows[rate["gpus"], rate["tokens"]]
        assert (said["ms"], said["allocated_mib"]) == (
            pytest.approx(rate["step_ms"], abs=0.01),
            pytest.approx(rate["peak_mib"], abs=0.01),
        )


def test_every_row_says_its_source_and_its_convention():
    for group in json.loads((held.PUBLISHED / "configurations.json").read_text()):
        assert group["source"] and group["convention"] and group["rows"], group["source"]
    page = held.PAGE.read_text()
    assert all(
        f"`{row.id}`" in page for row in held.rows() if re.search("tflops|tokens_per_s|seconds|ms|mfu", str(row.said))
    )

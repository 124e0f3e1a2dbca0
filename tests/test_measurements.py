"""Measurements are read from a clone, or as they were installed; timelines are intervals."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from ringlearn.course import records

ROOT = Path(__file__).parent.parent
NAME = "2026-11-28-multi-gpu-2-h200.json"


def test_a_clone_is_read_and_a_wrong_name_is_told_what_there_is():
    assert records.load(NAME) == json.loads((records.FOLDER / NAME).read_text())
    with pytest.raises(ValueError, match=f"expected one of .*{NAME}.*got 'nothing.json'"):
        records.load("nothing.json")


def test_without_a_clone_it_is_what_was_installed(monkeypatch, tmp_path):
    (tmp_path / "share" / "ringlearn" / "measurements").mkdir(parents=True)
    (tmp_path / "share" / "ringlearn" / "measurements" / NAME).write_text('{"date": "today"}')
    info = tmp_path / "site-packages" / "ringlearn-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ringlearn\nVersion: 1\n")
    (info / "RECORD").write_text(f"../share/ringlearn/measurements/{NAME},,\nringlearn/measurements.py,,\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(records, "FOLDER", tmp_path / "none")
    assert records.load(NAME) == {"date": "today"}
    with pytest.raises(ValueError, match=f"expected one of {NAME}, got 'nothing.json'"):
        records.load("nothing.json")


def test_the_measurements_are_installed_with_the_package():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    (pattern,) = files["share/ringlearn/measurements"]
    assert {path.name for path in ROOT.glob(pattern)} == {path.name for path in records.FOLDER.glob("*.json")}


@pytest.mark.parametrize(
    ("intervals", "cover", "left"),
    [
        ([(0, 4)], [(0, 4)], []),
        ([(0, 4)], [], [(0, 4)]),
        ([], [(0, 4)], []),
        ([(0, 9)], [(5, 8), (1, 3)], [(0, 1), (3, 5), (8, 9)]),
        ([(0, 2), (1, 4)], [(3, 6)], [(0, 3)]),
        ([(0, 2), (3, 5)], [(1, 4)], [(0, 1), (4, 5)]),
        ([(2, 3)], [(0, 1), (4, 5)], [(2, 3)]),
    ],
)
def test_uncovered_is_what_no_cover_reaches(intervals, cover, left):
    assert records.uncovered(intervals, cover) == left
    grid = [i / 2 + 0.25 for i in range(20)]

    def inside(spans, t):
        return any(a < t < b for a, b in spans)

    count = sum(inside(intervals, t) and not inside(cover, t) for t in grid)
    assert records.length(left) == count / 2

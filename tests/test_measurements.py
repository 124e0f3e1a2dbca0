"""Measurements are read from a clone, fetched without one; timelines are intervals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from urllib.error import URLError

import pytest

from ringlearn import measurements

NAME = "2026-11-28-multi-gpu-2-h200.json"


def test_a_clone_is_read_and_a_wrong_name_is_told_what_there_is():
    assert measurements.load(NAME) == json.loads((measurements.FOLDER / NAME).read_text())
    with pytest.raises(ValueError, match=f"expected one of .*{NAME}.*got 'nothing.json'"):
        measurements.load("nothing.json")


def test_without_a_clone_it_is_fetched_from_the_repository(monkeypatch, tmp_path):
    asked = []

    def fetch(url, timeout):
        asked.append(url)
        return io.BytesIO(b'{"date": "today"}')

    monkeypatch.setattr(measurements, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(measurements, "urlopen", fetch)
    monkeypatch.setattr(measurements, "_repository", lambda: "https://github.com/someone/fork")
    assert measurements.load(NAME) == {"date": "today"}
    assert asked == [f"https://raw.githubusercontent.com/someone/fork/main/docs/measurements/{NAME}"]

    def fail(url, timeout):
        raise URLError("no network")

    monkeypatch.setattr(measurements, "urlopen", fail)
    with pytest.raises(ValueError, match="no network"):
        measurements.load(NAME)


def test_the_repository_is_that_of_the_project():
    importlib_metadata = pytest.importorskip("importlib.metadata")
    try:
        importlib_metadata.metadata("ringlearn")
    except importlib_metadata.PackageNotFoundError:
        pytest.skip("ringlearn is on the path and not installed")
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'Repository = "{measurements._repository()}"' in text


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
    assert measurements.uncovered(intervals, cover) == left
    grid = [i / 2 + 0.25 for i in range(20)]

    def inside(spans, t):
        return any(a < t < b for a, b in spans)

    count = sum(inside(intervals, t) and not inside(cover, t) for t in grid)
    assert measurements.length(left) == count / 2

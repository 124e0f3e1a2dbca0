"""Read what was measured on real hardware: the dated JSON files under docs/measurements, and timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

FOLDER = Path(__file__).parent.parent / "docs" / "measurements"


def load(name: str) -> dict[str, Any]:
    """One measurement, by its file name. From a clone it is read; where only the package is installed, as on Colab, it
    is fetched from the repository.

    Raises ValueError if there is no such file.

    >>> load("2026-11-28-multi-gpu-2-h200.json")["hardware"]["device"]
    'NVIDIA H200'
    """
    path = FOLDER / name
    if path.is_file():
        return json.loads(path.read_text())
    if FOLDER.is_dir():
        there = ", ".join(sorted(p.name for p in FOLDER.glob("*.json")))
        raise ValueError(f"measurements.load: expected one of {there}, got {name!r}")
    raw = _repository().replace("https://github.com", "https://raw.githubusercontent.com")
    url = f"{raw}/main/docs/measurements/{name}"
    try:
        with urlopen(url, timeout=30) as answer:
            return json.load(answer)
    except (URLError, TimeoutError) as error:
        raise ValueError(
            f"measurements.load: {name!r} is in no clone beside this package, and {url} gives: {error}"
        ) from error


def _repository() -> str:
    urls = metadata.metadata("ringlearn").get_all("Project-URL") or []
    return next(url.partition(", ")[2] for url in urls if url.startswith("Repository"))


Intervals = Sequence[tuple[float, float]]


def merged(intervals: Intervals) -> list[tuple[float, float]]:
    """The same time without overlaps, in order.

    >>> merged([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    found: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def uncovered(intervals: Intervals, cover: Intervals) -> list[tuple[float, float]]:
    """The time that is in some interval and in none of the cover: of messages and of computing, what is exposed.

    >>> uncovered([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(0, 1), (2, 3), (7, 9)]
    """
    found = []
    for start, stop in merged(intervals):
        for begin, end in merged(cover):
            if end <= start or begin >= stop:
                continue
            if begin > start:
                found.append((start, begin))
            start = end
        if start < stop:
            found.append((start, stop))
    return found


def length(intervals: Intervals) -> float:
    """How long some intervals last together, overlaps counted once.

    >>> length([(5, 7), (0, 2), (1, 3)])
    5
    """
    return sum(stop - start for start, stop in merged(intervals))

"""Read what was measured on real hardware: the dated JSON files under docs/measurements, and timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "measurements"


def load(name: str) -> dict[str, Any]:
    """Load a measurement by its file name, from the clone or from the installed package.

    Raises ValueError if there is no such file.

    >>> load("2026-11-28-multi-gpu-2-h200.json")["hardware"]["device"]
    'NVIDIA H200'
    """
    there = {path.name: path for path in (FOLDER.glob("*.json") if FOLDER.is_dir() else _installed())}
    if name not in there:
        raise ValueError(f"measurements.load: expected one of {', '.join(sorted(there))}, got {name!r}")
    return json.loads(Path(there[name]).read_text())


def _installed() -> list[Path]:
    """The files that pyproject.toml lists as data-files, where the installer put them."""
    return [Path(path.locate()) for path in metadata.files("ringlearn") or [] if path.match("measurements/*.json")]


Intervals = Sequence[tuple[float, float]]


def merged(intervals: Intervals) -> list[tuple[float, float]]:
    """The same intervals, sorted and with overlapping ones joined.

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
    """The time that is in some interval but not in the cover, such as the exposed part of messages behind computation.

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
    """The total length of some intervals, with overlaps counted once.

    >>> length([(5, 7), (0, 2), (1, 3)])
    5
    """
    return sum(stop - start for start, stop in merged(intervals))

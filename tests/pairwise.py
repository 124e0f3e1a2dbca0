"""A small sample of a large grid in which every pair of choices still meets at least once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that together hold every pair of values of every two parameters: greedy, deterministic.

    >>> cases = pairwise({"a": [0, 1, 2], "b": "xy", "c": [True, False]})
    >>> len(cases), len({(c["a"], c["b"]) for c in cases})
    (6, 6)
    """
    names = list(grid)
    # Values are told apart by their index: masks and layouts need not be hashable.
    missing = {
        ((m, i), (n, j))
        for m, n in itertools.combinations(range(len(names)), 2)
        for i in range(len(grid[names[m]]))
        for j in range(len(grid[names[n]]))
    }
    cases = []
    while missing:
        case = dict(min(missing))
        for m in range(len(names)):
            if m not in case:
                gain = [
                    sum(tuple(sorted(((m, i), known))) in missing for known in case.items())
                    for i in range(len(grid[names[m]]))
                ]
                # Among equals, walk through the values, so that no choice is preferred.
                best = [i for i, g in enumerate(gain) if g == max(gain)]
                case[m] = best[len(cases) % len(best)]
        missing -= set(itertools.combinations(sorted(case.items()), 2))
        cases.append({names[m]: grid[names[m]][i] for m, i in sorted(case.items())})
    return cases


def product(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def product_but_for(walking: Sequence[str], grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the other dims; the values of these walk along, a new one in each case."""
    others = product({name: values for name, values in grid.items() if name not in walking})
    return [case | {name: grid[name][i % len(grid[name])] for name in walking} for i, case in enumerate(others)]

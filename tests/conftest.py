"""What every test starts from: one torch thread, no display, the same random numbers, and processes at hand."""

import os
import subprocess
from collections.abc import Iterator
from typing import Any

# Before torch is imported, so that the processes that tests start inherit it: ranks and test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# torch asks a name server for the name of each address that connects, here ::ffff:127.0.0.1. If no answer comes, it
# waits for a second, not for five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import forked  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from ringlearn import kernels  # noqa: E402
from ringlearn.launch import pool as launching  # noqa: E402

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test with the mark ``sample(n)`` every n-th one is run; the full matrix has all of them."""
    seen: dict[str, int] = {}
    for item in items:
        mark, name = item.get_closest_marker("sample"), item.nodeid.partition("[")[0]
        if mark and not item.get_closest_marker("slow"):
            seen[name] = seen.get(name, -1) + 1
            if seen[name] % mark.args[0]:
                item.add_marker("slow")


@pytest.fixture(scope="module")
def solved(request: pytest.FixtureRequest) -> str:
    """All that the notebook of a test file prints when its exercises are solved and its guesses made."""
    from course import read, run, solve  # needs nbclient, and only tests of notebooks have it

    rules = request.module.TestNotebook
    return run(solve(read(rules.NUMBER), rules.guesses()))


@pytest.fixture(scope="session", autouse=True)
def quick_start() -> None:
    """The processes of ``launch`` are forked; a test of how they start has the fixture ``slow_start``."""
    launching.subprocess = forked


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "subprocess", subprocess)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The gloo processes of a test file, as many as its P says."""
    from ringlearn.launch.pool import Pool

    with Pool(request.module.P, backend="gloo") as pool:
        yield pool


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    kernels.choose()._picked.clear()  # a test may put a double in place of a kernel

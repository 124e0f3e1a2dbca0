"""Modules that have moved, under the names by which notebooks, pages and programs of readers import them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "ringlearn.balance": "ringlearn.costs.balance",
    "ringlearn.checks": "ringlearn.course.checks",
    "ringlearn.comparison": "ringlearn.costs.compare",
    "ringlearn.dilated": "ringlearn.attention.dilated.rows",
    "ringlearn.hugging_face": "ringlearn.nn.hugging_face",
    "ringlearn.ladder": "ringlearn.launch.machine",
    "ringlearn.measurements": "ringlearn.course.records",
    "ringlearn.peers": "ringlearn.bench.peers",
    "ringlearn.published_ring": "ringlearn.course.published_ring",
    "ringlearn.strategy_costs": "ringlearn.costs",
    "ringlearn.training_costs": "ringlearn.costs.training",
    "ringlearn.viz": "ringlearn.course.viz",
}


class FormerNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module by a former name: the very module, not a second copy of it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        first = ".".join(name.split(".")[:2])
        if first not in MOVED or importlib.util.find_spec(MOVED[first] + name[len(first) :]) is None:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        first = ".".join(spec.name.split(".")[:2])
        module = importlib.import_module(MOVED[first] + spec.name[len(first) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:  # the import system has put the former name there
            module.__spec__ = spec.loader_state


def install() -> None:
    """Make ``import`` find the former names, once in a process."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())  # before the finder of files, which would load a second copy

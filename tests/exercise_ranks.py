"""What the tests of the torchrun exercises run on several processes."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ringlearn.course.checks import exercises

FOLDER = Path(__file__).parent.parent / "notebooks" / "exercises"
NAMES = {path.stem[:2]: path.stem[3:] for path in sorted(FOLDER.glob("[0-9]*.py"))}  # "01" -> "ring_pass"
ZOOS = {"10": "train_sharded", "11": "decode", "12": "packed_step"}  # those with a file of their own
FUNCTIONS = {"03": "overlaps"}  # where the function that is asked for is not named as its file


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer_of(number: str, name: str) -> Any:
    """The function of this name in the zoo, or the one in the file of this name under notebooks/exercises."""
    if name in ("solutions", "."):
        return getattr(load(FOLDER / name / f"{number}_{NAMES[number]}.py"), FUNCTIONS.get(number, NAMES[number]))
    return getattr(importlib.import_module(f"zoo.{ZOOS.get(number, 'exercises')}"), name)


def judge(number: str, name: str, size: int, hangs_after: float) -> tuple[str, str] | None:
    """What rank 0 of the first ``size`` processes says: its status and its message."""
    assert not dist.is_initialized()
    if int(os.environ["RANK"]) >= size:
        return None
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        given = (load(FOLDER / "03_overlap.py").waits_first,) if number == "03" else ()
        exercise = getattr(exercises, NAMES[number])
        verdict = exercise.verdict(answer_of(number, name), *given, hangs_after=hangs_after)
    finally:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "4"
    return None if verdict is None else (verdict.status, verdict.message)

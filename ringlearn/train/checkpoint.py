"""Checkpoints that a run on another number of ranks can read, and that a kill in the middle of a save cannot spoil.

    folder/
      step-00000100/     what torch.distributed.checkpoint wrote: model and optimizer, each rank its part
        progress.json    step, place in the data, random numbers, what the model is, and a checksum of every file
      step-00000200/
      latest             the name of the last one that is whole

A save writes a new directory, brings every file and directory to the disk (fsync), and only then moves ``latest`` over,
which is atomic: at any time it names a checkpoint that is whole. What a killed save left behind is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

KEEP = 2  # checkpoints; the last but one is there if a disk has spoilt the last
_STEP = "step-" + 8 * "[0-9]"


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, known: dict[str, Any]) -> Path:
    """Save a run, on all processes together; return the directory.

    known: JSON values that describe the progress of the run, including "step"; the state of torch's random number
    generators is added.

    Raises OSError on every process if one cannot write; earlier checkpoints stay.
    """
    new = folder / f"step-{known['step']:08d}"

    def begin() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)

    def finish() -> None:
        content = known | {"random": _random(), "files": files}
        _write(new / "progress.json", json.dumps({"checksum": _checksum_of_text(content)} | content, indent=1))
        _sync(new)
        _sync(folder)
        _write(folder / "latest.new", new.name)
        os.replace(folder / "latest.new", folder / "latest")
        _sync(folder)
        for old in sorted(folder.glob(_STEP))[:-KEEP]:
            if old != new:
                shutil.rmtree(old)

    _first_does(begin)
    _dcp(dcp.save, _state(model, optimizer), new)
    files = _all_do(lambda: _checksums(new, _own_files(new)))
    _first_does(finish)
    return new


def latest(folder: Path) -> Path | None:
    """The last complete checkpoint, or None. Raises OSError or ValueError if this cannot be determined."""
    try:
        return folder / (folder / "latest").read_text().strip()
    except FileNotFoundError:
        return None


def progress(folder: Path) -> dict[str, Any] | None:
    """What the last checkpoint says about the run; None if there is none.

    Raises OSError or ValueError if it is damaged.
    """
    last = latest(folder)
    if last is None:
        return None
    known = json.loads((last / "progress.json").read_text())
    if not isinstance(known, dict) or not isinstance(known.get("step"), int) or "random" not in known:
        raise ValueError(f"{last / 'progress.json'}: expected the progress of a run, got {str(known):.40}")
    if "checksum" not in known:
        raise ValueError(f"{last / 'progress.json'} has no checksum, because an older version of this program saved it")
    if known.pop("checksum") != _checksum_of_text(known):
        raise ValueError(f"{last / 'progress.json'} is not as it was saved: its checksum differs")
    return known


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Bring a model and an optimizer to the last checkpoint, on all processes together; return its progress.

    The run may have been saved on another number of ranks, sharded or not. Returns None if the folder has no
    checkpoint.
    Raises OSError or ValueError on every process if the checkpoint is damaged, even by a single byte.
    """
    known = progress(folder)
    if known is None:
        return None
    last = latest(folder)
    _compare(last, known.pop("files"))
    state = _state(model, optimizer)
    _dcp(dcp.load, state, last)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    random = known.pop("random")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(random["cpu"]), dtype=torch.uint8))
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(random["cuda"]), dtype=torch.uint8))
    return known


def load_model(folder: Path, model: nn.Module) -> None:
    """Bring only a model to the last checkpoint. Raises OSError or ValueError if there is none, or if it is damaged."""
    last, known = latest(folder), progress(folder)
    if known is None:
        raise ValueError(
            f"{folder}: expected a folder that ringlearn.train --save has written to, but it has no checkpoint"
        )
    _compare(last, known["files"])
    state = {"model": get_model_state_dict(model)}
    _dcp(dcp.load, state, last)
    set_model_state_dict(model, state["model"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By parameter name, without wrappers' prefixes. An optimizer that has not stepped yet gets its state here."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def _dcp(call: Any, state: dict[str, Any], where: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            call(state, checkpoint_id=where, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # every process gets it, whoever had the problem
            rank, (cause, _) = next(iter(error.failures.items()))
            said = (str(cause).splitlines() or [""])[0]
            raise OSError(f"{where}: {type(cause).__name__} on rank {rank}: {said}") from None


def _random() -> dict[str, str]:
    random = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if torch.cuda.is_available():
        random["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return random


def _own_files(folder: Path) -> list[str]:
    """What this process has written; the metadata is the first one's."""
    own = f"__{_rank()}_"
    return [p.name for p in folder.iterdir() if p.name.startswith(own) or _first() and not p.name.startswith("__")]


def _checksums(folder: Path, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _compare(folder: Path, saved: dict[str, str]) -> None:
    """Raise ValueError on every process if a file is not as it was saved; each process reads some of them."""
    mine = sorted(saved)[_rank() :: dist.get_world_size() if dist.is_initialized() else 1]
    read = _all_do(lambda: _checksums(folder, mine))
    if changed := [name for name in sorted(saved) if read[name] != saved[name]]:
        raise ValueError(f"{folder}: {', '.join(changed)} not as saved: checksums differ")


def _checksum_of_text(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _first() -> bool:
    return _rank() == 0


def _all_do(what: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What the processes find, put together; if one cannot, all raise OSError."""
    found, problem = {}, ""
    try:
        found = what()
    except OSError as error:
        problem = str(error)
    said = [(found, problem)]
    if dist.is_initialized():
        said = said * dist.get_world_size()
        dist.all_gather_object(said, (found, problem))
    if problems := [problem for _, problem in said if problem]:
        raise OSError(problems[0])
    return {name: value for found, _ in said for name, value in found.items()}


def _first_does(what: Callable[[], None]) -> None:
    """Process 0 does something that all wait for; if it cannot, all raise OSError."""

    def on_the_first() -> dict[str, str]:
        if _first():
            what()
        return {}

    _all_do(on_the_first)


def _write(path: Path, content: str) -> None:
    with path.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """A directory's own entries: without it a file may be on the disk, and its name not."""
    if os.name != "posix":
        return
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""The training loop."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..attention.table import STRATEGIES
from ..layouts import LAYOUTS
from ..nn import Config, Transformer, backward, clip
from ..plan.hardware import gpu_named
from ..plan.models import Model
from ..plan.seconds import model_flops
from . import checkpoint
from .place import Place, parameters_of, place_of
from .recall import Recall, accuracy_by_distance
from .stdlib import StandardLibrary

_HOW = ("lr", "warmup", "decay", "weight_decay", "clip", "batch", "accumulate", "dtype")  # a resumed run may change it
EVALUATED = 1 << 30  # the first sequence that accuracy is measured on; training never gets there


def train(options: argparse.Namespace) -> list[float]:
    """Train as the options say; return the loss of each step that was made. Every rank calls this.

    Raises ValueError on every rank if ranks were given different options, if ``--save`` holds a run of another model or
    other data, or a damaged one, or if the loss is not a number; OSError if something cannot be written; and, once the
    run is saved, KeyboardInterrupt on every rank if one was told to stop.
    """
    place = place_of(options, LAYOUTS[options.layout], "RANK" in os.environ)
    # A rank that is lost is an error wherever the others are, in a checkpoint too, and torchrun's SIGTERM, which comes
    # next, does not keep them from saying so.
    with _interruptions() as interrupted, place.watched():
        return _train(options, place, interrupted)


def _train(options: argparse.Namespace, place: Place, interrupted: list[int]) -> list[float]:
    data, saved = _begin(options, place)
    H, G = options.heads
    computed = dict(block=options.block, rope_base=options.rope_base, checkpoint=options.checkpoint_layers)
    config = Config(data.vocabulary, options.width, options.layers, H, G, **computed)
    torch.manual_seed(options.seed)  # the same parameters on every rank
    wide = torch.float64 if options.dtype == "float64" else torch.float32
    model = Transformer(config, strategy=STRATEGIES[options.strategy].function).to(place.device, wide)
    count = parameters_of(model)
    if options.fsdp:
        place.shard_parameters(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))

    run = {"task": options.task, "tokens": options.tokens, "seed": options.seed, "model": asdict(config)}
    run["model"] |= {"block": None, "checkpoint": None}  # how it is computed may change
    say = _Speaker(options, place, *_flops(options, config, place))
    step = row = 0
    if saved:
        step, row = _resume(options, saved, model, optimizer, run)
    say.line(
        f"{count:,} parameters, {options.tokens:,} tokens a sequence, {place}" + (f", from step {step}" if step else "")
    )
    how = {name: getattr(options, name) for name in _HOW} | {"decay": _decay(options, saved)}
    for name, was in (saved["how"] if saved else {}).items():
        if was != how[name]:
            say.line(f"from here on --{name.replace('_', '-')} is {how[name]}; it was {was}")
    if saved and not options.decay and how["decay"] != options.steps:
        say.line(
            f"the learning rate still falls until step {how['decay']}, as when the run began; --decay changes this"
        )

    if step and step >= options.steps:
        say.line(f"nothing to do: {options.save} is already at step {step}; ask for more --steps or use another folder")
    losses, last = [], checkpoint.latest(options.save) if options.save else None
    while step < options.steps:
        start = time.perf_counter()
        batches = []
        for _ in range(options.accumulate):
            batches.append(place.split(*data.rows(place.own(range(row, row + options.batch)))))
            row += options.batch
        optimizer.zero_grad()
        autocast = torch.bfloat16 if options.dtype == "bfloat16" else None
        loss = backward(model, batches, place.group, autocast=autocast, say=len(interrupted))
        norm = clip(model, options.clip)
        if not math.isfinite(loss.mean) or not math.isfinite(norm):
            raise ValueError(
                f"step {step + 1}: expected finite numbers, got loss {loss.mean} and gradient norm {norm}; a smaller "
                f"--lr or --clip, or a longer --warmup, may help"
            )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, how["lr"], how["warmup"], how["decay"])
        optimizer.step()
        step += 1
        losses.append(loss.mean)
        say.step(step, loss.mean, norm, options.accumulate * options.batch * options.tokens, start)
        stop = any(loss.said)  # every rank has heard it
        end = stop or step == options.steps
        if options.save and (end or options.save_every and step % options.save_every == 0):
            _alone(options, place, last)
            known = {"step": step, "row": row, "run": run, "how": how}
            try:
                last = checkpoint.save(options.save, model, optimizer, known)
            except OSError as error:
                raise OSError(f"--save {options.save}: {error}" + (f"; {last} is complete" if last else "")) from None
            say.line(f"saved {last}")
        if stop:
            say.line(f"interrupted after step {step}" + ("; the same command resumes" if options.save else ""))
            raise KeyboardInterrupt(f"after step {step}")
    if options.task == "recall":
        _say_accuracy(say, model, data, place)
    return losses


def _flops(options: argparse.Namespace, config: Config, place: Place) -> tuple[float, float | None]:
    """The model FLOPs of a step, and the FLOP/s of all GPUs at their peak; None for devices without a known peak."""
    c = config
    sizes = Model(
        "", c.layers, c.width, c.heads, c.kv_heads, 4 * c.width, c.vocabulary, c.width // c.heads, gated=False
    )
    flops = model_flops(sizes, options.tokens, options.batch * options.accumulate)
    gpu = gpu_named(torch.cuda.get_device_name(place.device)) if place.device.type == "cuda" else None
    known = gpu is not None and options.dtype == "bfloat16"
    return flops, gpu.bf16 * (place.group.size() if place.group else 1) if known else None


def lr_at(step: int, largest: float, warmup: int, decay: int) -> float:
    """The learning rate of a step, counted from 0: a linear rise, then half a cosine down to a tenth.

    >>> [round(lr_at(step, 1.0, warmup=2, decay=10), 2) for step in (0, 1, 2, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    """
    if step < warmup:
        return largest * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, decay - warmup))
    return largest * (0.55 + 0.45 * math.cos(math.pi * done))


def _begin(options: argparse.Namespace, place: Place) -> tuple[Any, dict[str, Any] | None]:
    """The data, and what the folder says of a saved run, before any work is done that might be lost."""
    data: Any = None
    saved = last = problem = None
    try:
        data = {"text": StandardLibrary, "recall": Recall}[options.task](options.tokens, options.seed)
        if options.save:
            try:
                last, saved = checkpoint.latest(options.save), checkpoint.progress(options.save)
                if saved and (missing := {"row", "run", "how"} - saved.keys()):
                    raise ValueError(f"{last} is not a checkpoint of this program: it lacks {sorted(missing)}")
            except (OSError, ValueError) as error:
                raise ValueError(_spoilt(options.save, error)) from None
        if place.first and (saved is None or saved["step"] < options.steps):
            _check_writable(options)
    except (OSError, ValueError) as error:
        problem = error
    seen = place.agree(str(last), problem)
    if len(set(seen)) > 1:  # nobody decides alone: some would train, and others wait for them in the load
        raise ValueError(
            f"--save {options.save}: expected a folder that all ranks share, but they see different checkpoints, {seen}"
        )
    return data, saved


def _check_writable(options: argparse.Namespace) -> None:
    name = "--save"
    try:
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            if not os.access(options.save, os.W_OK):
                raise PermissionError(f"{options.save} belongs to another user")
        name = "--record"
        if options.record:
            options.record.open("a").close()
    except OSError as error:
        raise OSError(f"{name}: expected a place where this user may write: {error}") from None


def _spoilt(folder: Path, error: Exception) -> str:
    whole = ", ".join(sorted(p.name for p in folder.glob("step-*"))) if folder.is_dir() else ""
    other = f", or write into {folder / 'latest'} the name of a complete checkpoint (of {whole})" if whole else ""
    return (
        f"--save {folder}: expected a new folder, or checkpoints of this program, but the last one cannot be read: "
        f"{error}. Use another folder{other}"
    )


def _resume(
    options: argparse.Namespace, saved: dict[str, Any], model: Any, optimizer: Any, run: dict[str, Any]
) -> tuple[int, int]:
    """The step and the row of the data to go on with. The optimizer's own settings are the options', not the saved."""
    if saved["run"] != run:
        differ = [f"{key} {saved['run'].get(key)}, got {run[key]}" for key in run if saved["run"].get(key) != run[key]]
        raise ValueError(f"--save {options.save} holds another run: expected {'; '.join(differ)}. Use another folder")
    settings = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        checkpoint.load(options.save, model, optimizer)
    except (OSError, ValueError) as error:
        raise ValueError(_spoilt(options.save, error)) from None
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group |= own
    return saved["step"], saved["row"]


def _decay(options: argparse.Namespace, saved: dict[str, Any] | None) -> int:
    """Until which step the learning rate falls. A run that goes on, for more --steps too, keeps what it began with."""
    return options.decay or (saved["how"]["decay"] if saved else options.steps)


def _alone(options: argparse.Namespace, place: Place, last: Path | None) -> None:
    """Raise ValueError on every rank if another run has saved to the folder in the meantime."""
    problem, now = None, checkpoint.latest(options.save) if place.first else last
    if now != last:
        problem = ValueError(
            f"--save {options.save}: another run has saved {now} here in the meantime; use another folder"
        )
    place.agree("", problem)


def _say_accuracy(say: _Speaker, model: Any, data: Recall, place: Place) -> None:
    edges = [0, *(data.length >> n for n in (4, 3, 2, 1, 0))]
    numbers = range(EVALUATED, EVALUATED + 16 * place.dp)
    numbers = place.own(numbers)
    batch = place.split(*data.rows(numbers), data.distances(numbers))
    for low, high, accuracy, asked in accuracy_by_distance(model, [batch], edges, place.group):
        say.line(f"records {low + 1} to {high} tokens back: {accuracy:.0%} of {asked} right")


@contextlib.contextmanager
def _interruptions() -> Iterator[list[int]]:
    """A list that gets the number of each SIGINT (Ctrl-C) and SIGTERM (of torchrun, of a scheduler) that comes.

    The step that is being made is finished, since other ranks are in it; a second SIGINT ends this process at once.
    """
    got: list[int] = []

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in got:
            signal.default_int_handler(number, frame)
        got.append(number)

    if threading.current_thread() is not threading.main_thread():  # only that one may have handlers
        yield got
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Speaker:
    """What rank 0 prints: on a terminal one line that changes, elsewhere a line now and then."""

    def __init__(self, options: argparse.Namespace, place: Place, flops: float, peak: float | None):
        self.first, self.place, self.options = place.first, place, options
        self.flops, self.peak = flops, peak
        self.terminal, self.open = sys.stdout.isatty(), False

    def line(self, words: str) -> None:
        if self.first:
            print(("\n" if self.open else "") + words, flush=True)
        self.open = False

    def step(self, step: int, loss: float, norm: float, tokens: int, start: float) -> None:
        if not self.first:
            return
        seconds = time.perf_counter() - start  # the loss has come from the device, so all of the step has been computed
        now = {"step": step, "loss": loss, "norm": norm, "tokens/s": tokens / seconds, "MiB": self._memory()}
        now |= {"MFU": self.flops / seconds / self.peak} if self.peak else {}
        if self.options.record:
            try:
                with self.options.record.open("a") as file:
                    file.write(json.dumps(now) + "\n")
            except OSError as error:
                raise OSError(f"--record {self.options.record}: {error}") from None
        words = (
            f"step {step}/{self.options.steps}  loss {loss:.4f}  norm {norm:.2f}  {now['tokens/s']:,.0f} tokens/s  "
            + (f"{now['MFU']:.0%} MFU  " if self.peak else "")
            + f"{now['MiB']:,.0f} MiB"
        )
        if self.terminal:
            done = int(20 * step / self.options.steps)
            print(f"\r[{'=' * done}{' ' * (20 - done)}] {words}   ", end="", flush=True)
            self.open = True
        elif step % self.options.print_every == 0 or step == self.options.steps:
            print(words, flush=True)

    def _memory(self) -> float:
        """The most that this rank's device has held; of a CPU, what the process has held."""
        if self.place.device.type == "cuda":
            reserved = self.place.world.reserved if self.place.world else 0
            return (torch.cuda.max_memory_allocated(self.place.device) + reserved) / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)

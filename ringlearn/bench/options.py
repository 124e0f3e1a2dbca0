"""The command line of the bench, and the checks made before anything is measured."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .. import kernels
from ..attention.table import STRATEGIES, TWO_AXES
from ..launch import command_line
from ..launch.command_line import is_first
from ..launch.machine import hardware, versions
from ..layouts import LAYOUTS
from ..worlds import DistributedWorld
from ..worlds.distributed.join import inner_axis
from . import __doc__ as about
from .masks import PER_DOCUMENT, mask_choice

PICTURES = ("rates", "memory", "overlap")

refuse = partial(command_line.refuse, "ringlearn.bench")


# What is measured by default: the shape of Llama 3.1 8B, or one that CPUs compute within seconds.
ON_GPUS = {"tokens": [2048, 8192, 32768], "heads": [32, 8, 128], "dtype": "bfloat16"}
ON_CPUS = {"tokens": [64, 256], "heads": [4, 2, 16], "dtype": "float32"}


def parser() -> argparse.ArgumentParser:
    usual = ON_GPUS if torch.cuda.is_available() else ON_CPUS
    p = command_line.Parser(prog="ringlearn.bench", description=about, formatter_class=command_line.Help)
    what = p.add_argument_group("what is computed (the defaults are smaller without a GPU)")
    p.add_argument("--decode", action="store_true", help="measure decoding instead, with options of its own: --decode "
                   "--help")  # fmt: skip
    what.add_argument("--tokens", type=int, nargs="+", help="tokens per rank")
    what.add_argument("--batch", type=int, default=1, help="sequences")
    what.add_argument("--mask", nargs="+", default=["causal"], help="causal, full, documents:N (N packed "
                      "documents over all ranks; documents:N:equal for equally long ones), window:W, or both joined "
                      "by +; all but full are causal")  # fmt: skip
    direction = what.add_mutually_exclusive_group()
    direction.add_argument("--backward", action="store_true", default=True, help="measure the backward too (default)")
    direction.add_argument("--forward-only", dest="backward", action="store_false", help="measure the forward alone")
    p.set_defaults(**usual)

    how = p.add_argument_group("how it is computed; every combination gets a row")
    how.add_argument(
        "--strategies", nargs="+", choices=list(STRATEGIES), default=["ring"], help="strategies of the library"
    )
    how.add_argument("--inner", type=int, nargs="+", metavar="RANKS", help="ranks per node for hybrid and double-ring, "
                     "whatever the hardware is; default: the ranks of a host, or half of them on one host")  # fmt: skip
    holds = "which tokens each rank holds"
    how.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, PER_DOCUMENT], default=["zigzag"], help=holds)
    how.add_argument("--kernel", nargs="+", default=["auto"], help="auto, or names from rl.kernels")
    how.add_argument("--transport", nargs="+", choices=["auto", "nccl", "symmetric"], default=["auto"],
                     help="what carries the messages")  # fmt: skip

    timing = p.add_argument_group("how it is measured")
    timing.add_argument("--repeats", type=int, default=9, help="rounds; every row is timed once in each")
    timing.add_argument("--graph", action="store_true", help="time the replay of CUDA graphs where that is possible")
    add_shared(what, how, timing, "other functions to measure")
    timing.add_argument("--overlap", action="store_true", help="also measure how much communication is not hidden")
    timing.add_argument("--error-tokens", type=int, default=32768, help="compare sequences of up to this many tokens, "
                        "over all ranks, with float32; 0: none")  # fmt: skip

    out = p.add_argument_group("where the results go")
    out.add_argument("--json", type=Path, help="write everything that was measured to this file")
    out.add_argument("--plot", type=Path, nargs="+", metavar="JSON", help="measure nothing; draw these files")
    out.add_argument("--plot-what", choices=PICTURES, default="rates", help="what to draw from these files")
    out.add_argument("--out", type=Path, default=Path("bench.png"), help="file for the picture")
    return p


def add_shared(what: Any, how: Any, timing: Any, about: str) -> None:
    """Add the options that all measurements have: the shape, functions of other libraries, and how long to wait.

    about: what these functions are measured for, with which the help of --compare begins.
    """
    what.add_argument("--heads", type=int, nargs=3, metavar=("H", "G", "D"),
                      help="query heads, key/value heads, head dim")  # fmt: skip
    what.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="dtype of queries, keys and values")
    how.add_argument("--compare", nargs="+", default=[], metavar="MODULE:FUNCTION",
                     help=f"{about}: module:function or file.py:function")  # fmt: skip
    timing.add_argument("--graph-compare", action="store_true", help="capture the functions of --compare as well; a "
                        "collective that cannot be captured may hang")  # fmt: skip
    timing.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a message before failing")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The checked options. If they are invalid, rank 0 says why, and every rank exits with code 2."""
    options = parser().parse_args(argv)
    try:
        if options.plot:
            options.records = [_record(path) for path in options.plot]
            return options
        if "RANK" not in os.environ:
            raise ValueError(
                "each rank is a process, so start this with torchrun --nproc-per-node 2 -m ringlearn.bench"
            )
        _check(options)
        options.functions = {name: load(name) for name in options.compare}
    except ValueError as error:
        refuse(str(error))
    return options


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--plot {path}: {error}") from None
    if not isinstance(record, dict) or not {"rows", "hardware", "agreement_ms"} <= record.keys():
        raise ValueError(f"--plot {path}: expected a file written by --json of this program, without --decode")
    return record


def _check(options: argparse.Namespace) -> None:
    check_heads(options)
    positive(options, "batch", "repeats", "timeout", "tokens")
    _check_inner(options)
    for name in options.kernel:
        kernels.choose(name)
    options.choices, P = [mask_choice(name) for name in dict.fromkeys(options.mask)], int(os.environ["WORLD_SIZE"])
    for choice in options.choices:
        most = P * min(options.tokens)
        if choice.documents % P or choice.documents > most:
            raise ValueError(
                f"--mask {choice.name}: expected the number of documents to be a multiple of the {P} ranks, so that "
                f"all have the same lengths, and at most {most:,}, one per token; got {choice.documents}"
            )
    check_file(options.json)


def check_heads(options: argparse.Namespace) -> None:
    H, G, D = options.heads
    if min(H, G, D) < 1 or H % G:
        raise ValueError(f"--heads: expected H, G, D > 0 with H divisible by G, got {H} {G} {D}")


def positive(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError if one of these options, or a number in its list, is not above 0."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, list) and min(value) <= 0:
            raise ValueError(f"--{name}: expected numbers > 0, got {min(value)}")
        if not isinstance(value, list) and value <= 0:
            raise ValueError(f"--{name}: expected a number > 0, got {value}")


def check_file(path: Path | None) -> None:
    """Raise ValueError, before hours of measuring, if the file of --json cannot be written."""
    if path and is_first():
        try:
            path.open("a").close()
        except OSError as error:
            raise ValueError(f"--json: expected a file that this user may write: {error}") from None


def written(file: Path, record: dict[str, Any]) -> str:
    """Write a record to a file; return why this failed (the disk may be full by then), or an empty text."""
    try:
        file.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        return f"{file} cannot be written: {error}"
    return ""


def begun_record(command: str, options: argparse.Namespace, world: DistributedWorld) -> dict[str, Any]:
    """The record of a bench before anything has been measured.  command: with which it was started."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "hardware": hardware(world.size, world.device.type),
        "versions": versions(),
        "shape": dict(zip("HGD", options.heads, strict=True)) | {"dtype": options.dtype},
    }


def end(failed: bool, unwritten: str, where: str) -> NoReturn:
    """End this rank of a bench.

    failed: whether something of the library failed.  unwritten: why the record was not written.  where: what else has
    the results.
    """
    if unwritten:
        words = f"ringlearn.bench: error: --json: {unwritten}; only {where} the results"
        print(words, file=sys.stderr, flush=True)
    dist.barrier()
    sys.stderr.flush()
    os._exit(1 if failed or unwritten else 0)  # gloo sometimes aborts in Python's own shutdown after a backward


def _check_inner(options: argparse.Namespace) -> None:
    two_axes, P = [name for name in options.strategies if name in TWO_AXES], int(os.environ["WORLD_SIZE"])
    if options.inner and not two_axes:
        raise ValueError(f"--inner: only {' and '.join(TWO_AXES)} have an inner axis; add them to --strategies")
    if two_axes and options.inner is None:
        options.inner = [inner_axis(P)]
    for n in options.inner or ():
        if n < 1 or P % n:
            raise ValueError(f"--inner: expected a divisor of the {P} ranks, got {n}")


def load(name: str) -> Callable[..., Any]:
    """The function named by ``module:function`` or ``path/to/file.py:function``.

    Raises ValueError, with the reason, if it cannot be loaded.

    >>> load("math:sqrt")(9.0)
    3.0
    """
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ValueError(f"--compare: expected module:function or file.py:function, got {name!r}")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        found = getattr(module, function)
    except Exception as error:  # whatever importing another's file may raise
        raise ValueError(f"--compare {name}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"--compare {name}: expected a function, got {type(found).__name__}")
    return found

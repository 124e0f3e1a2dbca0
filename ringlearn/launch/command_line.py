"""Command lines of programs that run on many ranks: rank 0 prints help and errors, and all ranks exit alike.

The options that concern the ranks are here, too: ``--simulate`` without torchrun; ``--backend`` and ``--timeout`` with
it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from ..layouts import LAYOUTS
from ..worlds.distributed.faults import WorldError
from ..worlds.distributed.join import backend_for_this_host

SECONDS_TO_PRINT = 5.0  # for which the other ranks wait, so that torchrun does not kill rank 0 before it has said why


def refuse(program: str, message: str) -> NoReturn:
    """Print an error on rank 0, and exit with code 2 on all ranks."""
    if is_first():
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_PRINT)
    _exit(2)


class Parser(argparse.ArgumentParser):
    """An argument parser whose help and errors are printed only by rank 0."""

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, f"{message} (--help lists the options)")

    def print_help(self, file: Any = None) -> None:
        if is_first():
            super().print_help(file)


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the line breaks of the description and shows the default of each option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool) or action.default in ([], argparse.SUPPRESS):
            return action.help
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return f"{action.help} [{default}]"


def add_ranks(parser: argparse.ArgumentParser) -> Any:
    """The group of options that say which ranks there are and how they are connected, for a program to add to."""
    ranks = parser.add_argument_group("the ranks")
    ranks.add_argument("--simulate", type=int, metavar="P", help="simulate P ranks in this process, without torchrun")
    about = "how the processes that torchrun started communicate"
    ranks.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto", help=about)
    about = "seconds to wait for an unresponsive rank before treating it as lost"
    ranks.add_argument("--timeout", type=float, default=60.0, help=about)
    ranks.add_argument("--layout", choices=list(LAYOUTS), default="zigzag", help="which tokens each rank holds")
    return ranks


def check_ranks(options: argparse.Namespace, program: str) -> None:
    """Raise ValueError if these options make no sense for the way in which the program was started."""
    launched = "RANK" in os.environ
    if options.simulate is not None and (launched or options.simulate < 1):
        raise ValueError("--simulate: expected a number of ranks >= 1, and a start without torchrun")
    if options.backend != "auto" and not launched:
        raise ValueError(f"--backend needs processes: torchrun --nproc-per-node 4 -m {program} ...")
    if options.backend == "nccl" and backend_for_this_host() != "nccl":
        raise ValueError("--backend nccl: expected a GPU for each process of this host; use fewer, or --backend gloo")


def carry_out(program: str, work: Callable[[], Any], *refused: type[Exception]) -> NoReturn:
    """Do a program's work on this rank, and end the process with the exit code that says how it went.

    refused: errors that are the same on all ranks, of which rank 0 prints the text.  A KeyboardInterrupt with a text
    is one that all ranks have heard of.
    """
    code = 0
    try:
        work()
    except KeyboardInterrupt as stop:
        if not stop.args:  # Ctrl-C at once: others may be in the middle of a step, and hear of it from torchrun
            sys.stdout.flush()
            os._exit(130)
        code = 130
    except refused as error:
        refuse(program, str(error))
    except WorldError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # nobody is left to say goodbye to
    if dist.is_initialized():
        dist.barrier()  # after the others have come as far
    _exit(code)


def _exit(code: int) -> NoReturn:
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(code)  # gloo sometimes aborts in Python's own shutdown
    raise SystemExit(code)


def is_first() -> bool:
    """Whether this process is rank 0, which prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def parse_checked(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, check: Callable[[argparse.Namespace], None]
) -> argparse.Namespace:
    """The options, checked. If ``check`` raises ValueError, rank 0 says why and every rank exits with code 2."""
    options = parser.parse_args(argv)
    try:
        check(options)
    except ValueError as error:
        refuse(parser.prog, str(error))
    return options

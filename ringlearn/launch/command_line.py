"""Command lines of programs that run on many ranks: rank 0 prints help and errors, and all ranks exit alike."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, NoReturn

SECONDS_TO_PRINT = 5.0  # which other ranks wait, so that torchrun does not kill rank 0 before it has said why


def refuse(program: str, message: str) -> NoReturn:
    """Print an error on rank 0, and exit with code 2 on all ranks."""
    if is_first():
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_PRINT)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """An argument parser whose help and errors are printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, f"{message} (--help lists the options)")

    def print_help(self, file: Any = None) -> None:
        if is_first():
            super().print_help(file)


def is_first() -> bool:
    """Whether this process is rank 0, which prints and writes files."""
    return os.environ.get("RANK", "0") == "0"

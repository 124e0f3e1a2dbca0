"""What the command lines of programs on many ranks have in common: rank 0 speaks, and all end alike."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, NoReturn

PATIENCE = 5.0  # seconds that other ranks wait, so that torchrun does not end rank 0 before it has said why


def refuse(program: str, message: str) -> NoReturn:
    """Rank 0 says what is wrong; all ranks end with exit code 2."""
    if is_first():
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(PATIENCE)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """One whose help and errors are printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, f"{message} (--help lists the options)")

    def print_help(self, file: Any = None) -> None:
        if is_first():
            super().print_help(file)


def is_first() -> bool:
    """Whether this process is the one that speaks, and writes files."""
    return os.environ.get("RANK", "0") == "0"

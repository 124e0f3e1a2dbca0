"""``torchrun --nproc-per-node N -m ringlearn.generate``: see the package's docstring, and --help."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..launch.command_line import carry_out
from . import __doc__ as about
from .options import parse
from .run import run


def main(argv: Sequence[str] | None = None) -> None:
    carry_out("ringlearn.generate", partial(run, parse(argv, about)), ValueError, OSError, ImportError)


if __name__ == "__main__":
    main()

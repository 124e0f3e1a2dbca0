"""``torchrun --nproc-per-node N -m ringlearn.train``: see the package's docstring, and --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..launch.command_line import leave
from ..worlds import WorldError
from . import __doc__ as about
from .options import parse, refuse
from .run import train


def main(argv: Sequence[str] | None = None) -> None:
    options, code = parse(argv, about), 0
    try:
        train(options)
    except KeyboardInterrupt as stop:
        if not stop.args:  # Ctrl-C twice: at once
            sys.stdout.flush()
            os._exit(130)
        code = 130  # saved, if it was to be, and said, on all ranks
    except (ValueError, OSError) as error:  # the same on all ranks
        refuse(str(error))
    except WorldError as error:
        sys.stderr.write(f"ringlearn.train: error: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # nobody is left to say goodbye to
    leave(code)


if __name__ == "__main__":
    main()

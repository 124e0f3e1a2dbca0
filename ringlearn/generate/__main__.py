"""``torchrun --nproc-per-node N -m ringlearn.generate``: see the package's docstring, and --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..launch.command_line import leave
from ..worlds import WorldError
from . import __doc__ as about
from .options import parse, refuse
from .run import run


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv, about)
    try:
        run(options)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # others may be in the middle of a token, and hear of it from torchrun
    except (ValueError, OSError, ImportError) as error:  # the same on all ranks
        refuse(str(error))
    except WorldError as error:
        sys.stderr.write(f"ringlearn.generate: error: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # nobody is left to say goodbye to
    leave(0)


if __name__ == "__main__":
    main()

"""What the processes of test_generate_program.py run."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout

import torch

from ringlearn.generate.options import parse
from ringlearn.generate.run import run


def written(argv):
    """The tokens, what this rank prints, and what it hears when each rank has a seed of its own."""
    torch.set_num_threads(1)
    lines = io.StringIO()
    with redirect_stdout(lines):
        out = run(parse(argv))
        try:
            run(parse([*argv, "--seed", os.environ["RANK"]]))
            said = "no error"
        except ValueError as error:
            said = str(error)
    return out, lines.getvalue(), said

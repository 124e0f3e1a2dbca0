"""The command line of the generating program: its options, and the checks of their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..launch import command_line

DTYPES = ("bfloat16", "float32", "float64")
TOKENS = 2048  # of a prompt from the standard library

refuse = partial(command_line.refuse, "ringlearn.generate")


def parser(about: str | None = None) -> argparse.ArgumentParser:
    p = command_line.Parser(prog="ringlearn.generate", description=about, formatter_class=command_line.Help)
    prompt = p.add_argument_group("the prompt")
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with the text to continue, in UTF-8")
    about = f"if no text is given: how many tokens of Python's standard library to continue; by default {TOKENS:,}"
    prompt.add_argument("--tokens", type=int, metavar="N", help=about)

    out = p.add_argument_group("what is generated")
    out.add_argument("--new-tokens", type=int, default=64, metavar="N", help="the most tokens to generate")
    about = "0 for the likeliest token each time; larger values draw more surprising ones"
    out.add_argument("--temperature", type=float, default=0.0, help=about)
    out.add_argument("--seed", type=int, default=0, help="seed for drawing tokens, and for random weights")

    model = p.add_argument_group("the model")
    model.add_argument("--load", type=Path, metavar="DIR", help="a folder that ringlearn.train --save has written to")
    about = "a causal language model of Hugging Face transformers: its folder, or its name on the Hub"
    model.add_argument("--model", metavar="NAME", help=about)
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights and of the cache")

    ranks = command_line.add_ranks(p)
    about = "how many neighbouring tokens of the cache a rank keeps before the next rank's turn"
    ranks.add_argument("--interleave", type=int, default=16, metavar="N", help=about)
    return p


def parse(argv: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    """The options, checked. If a value is invalid, rank 0 says why and every rank exits with code 2."""
    return command_line.parse_checked(parser(about), argv, _check_options)


def _check_options(options: argparse.Namespace) -> None:
    for name in ("tokens", "new_tokens", "timeout", "interleave"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number > 0, got {value}")
    if not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature: expected a number >= 0, got {options.temperature}")
    if not 0 <= options.seed < 1 << 64:
        raise ValueError(f"--seed: expected a number from 0 to 2**64 - 1, got {options.seed}")
    for names in (("prompt", "prompt_file", "tokens"), ("load", "model")):
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: expected one of them")
    if options.prompt == "":
        raise ValueError("--prompt: expected a text of at least one character")
    command_line.check_ranks(options, "ringlearn.generate")

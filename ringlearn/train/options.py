"""The command line of the training program: its options, and the checks of their values."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..attention.table import STRATEGIES, TWO_AXES
from ..launch import command_line
from ..launch.command_line import is_first
from ..worlds.distributed.join import inner_axis

DTYPES = ("bfloat16", "float32", "float64")

refuse = partial(command_line.refuse, "ringlearn.train")


def parser(about: str | None = None) -> argparse.ArgumentParser:
    p = command_line.Parser(prog="ringlearn.train", description=about, formatter_class=command_line.Help)
    task = p.add_argument_group("the task")
    about = "what to learn: text (the bytes of Python's standard library) or recall (which needs distant tokens)"
    task.add_argument("--task", choices=["text", "recall"], default="text", help=about)
    task.add_argument("--tokens", type=int, default=1024, help="tokens in a sequence, over all ranks that share it")
    task.add_argument("--batch", type=int, default=4, help="sequences in a micro-batch, over all ranks")
    task.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    task.add_argument("--steps", type=int, default=100, help="steps in total, including those of a resumed run")
    task.add_argument("--seed", type=int, default=0, help="seed for weights and data")

    model = p.add_argument_group("the model")
    model.add_argument("--width", type=int, default=128, help="size of each token's vector")
    model.add_argument("--layers", type=int, default=2, help="layers, each of attention and a feed-forward")
    about = "numbers of query heads and of key/value heads"
    model.add_argument("--heads", type=int, nargs=2, default=[4, 2], metavar=("H", "G"), help=about)
    about = "base of the rotary angles; larger for longer sequences"
    model.add_argument("--rope-base", type=float, default=10000.0, help=about)
    about = (
        "tokens of each sequence for which feed-forward and loss run at a time; by default 512 on a CPU; on a GPU up "
        "to 8,192 of all sequences, as many as keep it busy without filling its memory"
    )
    model.add_argument("--block", type=int, metavar="TOKENS", help=about)

    ranks = command_line.add_ranks(p)
    ranks.add_argument("--dp", type=int, default=1, help="groups of ranks that each train on different sequences")
    ranks.add_argument("--fsdp", action="store_true", help="shard the parameters over all ranks (FSDP2)")
    about = "how the ranks share attention"
    ranks.add_argument("--strategy", choices=list(STRATEGIES), default="ring", help=about)
    about = (
        f"with {' and '.join(TWO_AXES)}: how many of the ranks that share a sequence form a node; by default the ranks "
        f"of a host, or half of them if there is one host"
    )
    ranks.add_argument("--inner", type=int, metavar="RANKS", help=about)

    how = p.add_argument_group("the optimizer")
    about = "largest learning rate; it rises for --warmup steps and then falls"
    how.add_argument("--lr", type=float, default=3e-3, help=about)
    how.add_argument("--warmup", type=int, default=20, help="steps in which the learning rate rises")
    about = "step at which the learning rate has fallen to a tenth; by default the --steps that the run began with"
    how.add_argument("--decay", type=int, metavar="STEP", help=about)
    how.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of matrices (AdamW)")
    how.add_argument("--clip", type=float, default=1.0, help="clip the gradients to this norm")
    about = "bfloat16 means autocast over float32 parameters"
    how.add_argument("--dtype", choices=DTYPES, default="float32", help=about)
    about = "keep only the inputs of layers and compute each layer again in the backward"
    how.add_argument("--checkpoint-layers", action="store_true", help=about)

    out = p.add_argument_group("what is saved and printed")
    about = "save to this folder at the end and when interrupted; resume from it if it holds a checkpoint"
    out.add_argument("--save", type=Path, metavar="DIR", help=about)
    about = "also save every this many steps; 0 for never"
    out.add_argument("--save-every", type=int, default=0, metavar="STEPS", help=about)
    out.add_argument("--record", type=Path, metavar="FILE", help="append each step's numbers to this file (JSON lines)")
    about = "print a line every this many steps if the output is not a terminal"
    out.add_argument("--print-every", type=int, default=10, metavar="STEPS", help=about)
    return p


def parse(argv: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    """The options, checked. If a value is invalid, rank 0 says why and every rank exits with code 2."""
    return command_line.parse_checked(parser(about), argv, _check_options)


def _check_options(options: argparse.Namespace) -> None:
    for name in ("lr", "rope_base", "weight_decay", "timeout"):
        if not math.isfinite(getattr(options, name)):
            raise ValueError(f"--{name.replace('_', '-')}: expected a finite number, got {getattr(options, name)}")
    for name in "tokens batch accumulate width layers block dp lr clip rope_base timeout print_every decay".split():
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number > 0, got {value}")
    if options.seed >= 1 << 64:
        raise ValueError(f"--seed: expected a number below 2**64, got {options.seed}")
    for name in ("steps", "save_every", "warmup", "seed", "weight_decay"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number >= 0, got {getattr(options, name)}")
    H, G = options.heads
    if min(H, G) < 1 or H % G or options.width % H or options.width // H % 2:
        raise ValueError(
            f"--width, --heads: expected the width to be divisible by 2 H, and H by G, got {options.width} and {H} {G}"
        )
    launched = "RANK" in os.environ
    command_line.check_ranks(options, "ringlearn.train")
    if not launched and (options.dp > 1 or options.fsdp):
        raise ValueError("--dp and --fsdp need processes: torchrun --nproc-per-node 4 -m ringlearn.train ...")
    if launched and int(os.environ["WORLD_SIZE"]) % options.dp:
        raise ValueError(f"--dp: expected a divisor of the {os.environ['WORLD_SIZE']} ranks, got {options.dp}")
    _check_inner(options, int(os.environ["WORLD_SIZE"]) // options.dp if launched else options.simulate or 1)
    if options.batch % options.dp:
        raise ValueError(f"--batch: expected a multiple of --dp {options.dp}, got {options.batch}")
    if options.save_every and not options.save:
        raise ValueError("--save-every: expected --save DIR as well, the folder to save to")
    if options.record and is_first() and not options.record.absolute().parent.is_dir():
        raise ValueError(f"--record {options.record}: there is no folder {options.record.absolute().parent}")


def _check_inner(options: argparse.Namespace, ranks: int) -> None:
    if options.strategy not in TWO_AXES:
        if options.inner is not None:
            raise ValueError(f"--inner: only {' and '.join(TWO_AXES)} have an inner axis; choose one with --strategy")
        return
    if options.inner is None:
        options.inner = inner_axis(ranks)
    if options.inner < 1 or ranks % options.inner:
        raise ValueError(f"--inner: expected a divisor of the {ranks} ranks that share a sequence, got {options.inner}")

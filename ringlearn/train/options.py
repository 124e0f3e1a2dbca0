"""The command line of the training program, and what it refuses."""

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
from ..layouts import LAYOUTS
from ..worlds.distributed.join import backend_for_this_host, inner_axis

DTYPES = ("bfloat16", "float32", "float64")

refuse = partial(command_line.refuse, "ringlearn.train")


class _Help(argparse.RawDescriptionHelpFormatter):
    """The text as it is written, and each option's default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == argparse.SUPPRESS:
            return action.help
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return f"{action.help} [{default}]"


def parser(about: str | None = None) -> argparse.ArgumentParser:
    p = command_line.Parser(prog="ringlearn.train", description=about, formatter_class=_Help)
    what = p.add_argument_group("what is learned")
    about = "text: Python's standard library, byte by byte; recall: a task that needs far tokens"
    what.add_argument("--task", choices=["text", "recall"], default="text", help=about)
    what.add_argument("--tokens", type=int, default=1024, help="of a whole sequence, over all ranks that share it")
    what.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch, over all ranks")
    what.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    what.add_argument("--steps", type=int, default=100, help="in all, those of a run that is resumed too")
    what.add_argument("--seed", type=int, default=0, help="of weights and data")

    model = p.add_argument_group("the model")
    model.add_argument("--width", type=int, default=128, help="numbers of each token")
    model.add_argument("--layers", type=int, default=2, help="each of attention and a feed-forward")
    model.add_argument("--heads", type=int, nargs=2, default=[4, 2], metavar=("H", "G"), help="query, key/value heads")
    model.add_argument("--rope-base", type=float, default=10000.0, help="larger: far tokens look more alike")
    model.add_argument("--block", type=int, default=512, help="tokens that feed-forward and loss compute at a time")

    ranks = p.add_argument_group("who computes it")
    ranks.add_argument("--simulate", type=int, metavar="P", help="ranks in this process; without torchrun")
    ranks.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="of torchrun's processes")
    ranks.add_argument("--dp", type=int, default=1, help="groups of ranks, each of which has sequences of its own")
    ranks.add_argument("--fsdp", action="store_true", help="parameters are sharded over all ranks (FSDP2)")
    ranks.add_argument("--timeout", type=float, default=60.0, help="seconds until a rank that is silent is lost")
    ranks.add_argument("--layout", choices=list(LAYOUTS), default="zigzag", help="who holds which tokens")
    ranks.add_argument("--strategy", choices=list(STRATEGIES), default="ring", help="what travels in attention")
    ranks.add_argument(
        "--inner",
        type=int,
        metavar="RANKS",
        help="of hybrid and double-ring: how many of the ranks that "
        "share a sequence make a node; if nobody says, those of a host, on one host half of them",
    )

    how = p.add_argument_group("how")
    how.add_argument("--lr", type=float, default=3e-3, help="the largest; it rises for --warmup steps, then falls")
    how.add_argument("--warmup", type=int, default=20, help="steps")
    how.add_argument("--decay", type=int, help="steps until it is a tenth; if left out, the --steps a run began with")
    how.add_argument("--weight-decay", type=float, default=0.1, help="AdamW's, of matrices")
    how.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    how.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16: autocast over float32 parameters")
    how.add_argument("--checkpoint-layers", action="store_true", help="the backward computes each layer anew")

    out = p.add_argument_group("what is kept")
    out.add_argument("--save", type=Path, metavar="DIR", help="save here at the end and when interrupted; resume")
    out.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="and after so many steps, if not 0")
    out.add_argument("--record", type=Path, metavar="FILE", help="append each step's numbers, a JSON line for each")
    out.add_argument("--print-every", type=int, default=10, metavar="STEPS", help="a line, if this is no terminal")
    return p


def parse(argv: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    """The options, checked. What makes no sense is said by rank 0, and every rank exits with code 2."""
    options = parser(about).parse_args(argv)
    try:
        _check(options)
    except ValueError as error:
        refuse(str(error))
    return options


def _check(options: argparse.Namespace) -> None:
    for name in ("lr", "rope_base", "weight_decay", "timeout"):
        if not math.isfinite(getattr(options, name)):
            raise ValueError(f"--{name.replace('_', '-')}: expected a finite number, got {getattr(options, name)}")
    for name in (
        "tokens",
        "batch",
        "accumulate",
        "width",
        "layers",
        "block",
        "dp",
        "lr",
        "clip",
        "rope_base",
        "timeout",
        "print_every",
    ):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number > 0, got {getattr(options, name)}")
    if options.decay is not None and options.decay < 1:
        raise ValueError(f"--decay: expected a number > 0, got {options.decay}")
    if options.seed >= 1 << 64:
        raise ValueError(f"--seed: expected a number below 2**64, got {options.seed}")
    for name in ("steps", "save_every", "warmup", "seed", "weight_decay"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number >= 0, got {getattr(options, name)}")
    H, G = options.heads
    if min(H, G) < 1 or H % G or options.width % H or options.width // H % 2:
        raise ValueError(
            f"--width, --heads: expected width divisible by 2 H, and H by G, got {options.width} and {H} {G}"
        )
    launched = "RANK" in os.environ
    if options.simulate is not None and (launched or options.simulate < 1):
        raise ValueError("--simulate: expected a number of ranks >= 1, without torchrun")
    if not launched and (options.dp > 1 or options.fsdp):
        raise ValueError("--dp and --fsdp are for processes: torchrun --nproc-per-node 4 -m ringlearn.train ...")
    if options.backend != "auto" and not launched:
        raise ValueError("--backend is for processes: torchrun --nproc-per-node 4 -m ringlearn.train ...")
    if options.backend == "nccl" and backend_for_this_host() != "nccl":
        raise ValueError("--backend nccl: expected a GPU for each process of this host; use fewer, or --backend gloo")
    if launched and int(os.environ["WORLD_SIZE"]) % options.dp:
        raise ValueError(f"--dp: expected a divisor of the {os.environ['WORLD_SIZE']} ranks, got {options.dp}")
    _check_inner(options, int(os.environ["WORLD_SIZE"]) // options.dp if launched else options.simulate or 1)
    if options.batch % options.dp:
        raise ValueError(f"--batch: expected a multiple of --dp {options.dp}, got {options.batch}")
    if options.save_every and not options.save:
        raise ValueError("--save-every: say where, with --save DIR")
    if options.record and is_first() and not options.record.absolute().parent.is_dir():
        raise ValueError(f"--record {options.record}: there is no folder {options.record.absolute().parent}")


def _check_inner(options: argparse.Namespace, ranks: int) -> None:
    if options.strategy not in TWO_AXES:
        if options.inner is not None:
            raise ValueError(f"--inner: only {' and '.join(TWO_AXES)} have an inner axis; say so with --strategy")
        return
    if options.inner is None:
        options.inner = inner_axis(ranks)
    if options.inner < 1 or ranks % options.inner:
        raise ValueError(f"--inner: expected a divisor of the {ranks} ranks that share a sequence, got {options.inner}")

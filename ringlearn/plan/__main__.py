"""``python -m ringlearn.plan --model llama-3.1-8b --tokens 1M --gpus 32 --gpu h100``: see --help."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..launch.command_line import Parser, refuse
from . import GPUS, MODELS, Candidate, Plan, gpu, length, model, plan, serve
from .configs import configs
from .explain import explained, explained_serving
from .setup import FRAMEWORKS, PRECISIONS
from .table import plan_table, served_table

ABOUT = """Plan a run: whether it fits, how long it takes, and how the GPUs are best split.

Every number is computed from shapes; docs/plan.md compares them with what others have measured."""


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="ringlearn.plan", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help=f"a config.json or its folder, or one of {', '.join(MODELS)}")
    p.add_argument("--tokens", help="tokens in a sequence: 8192, 128k (x 1024) or 1M (x 1024 x 1024)")
    p.add_argument(
        "--lengths", nargs="+", type=int, metavar="N", help="instead of --tokens: lengths of packed documents"
    )
    p.add_argument("--gpus", type=int, default=1, help="how many GPUs [1]")
    p.add_argument(
        "--gpu",
        default="h100",
        help=f"{', '.join(GPUS)}, this (this machine's GPU), or a file of ringlearn.measure [h100]",
    )
    p.add_argument(
        "--batch", type=int,
        help="sequences per step on all GPUs [one for each dp group, with a pipeline four for each stage]; "
        "with --serve, those that a copy decodes at a time [1]",
    )  # fmt: skip
    p.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="precision of matrix products; fp8-ffn: FP8 in feed-forwards alone [bf16]",
    )
    known = [name for name in FRAMEWORKS if name != "ringlearn"]
    p.add_argument("--framework", choices=known, default="fsdp2", help="the framework whose memory is counted [fsdp2]")
    p.add_argument("--kernel", default="", help="attention kernel: fa2, cudnn, fa3 or fa4 [the fastest in PyTorch]")
    p.add_argument("--serve", action="store_true", help="plan serving instead of training, with --tokens in the cache")
    p.add_argument("--rows", type=int, default=8, help="how many setups the table shows [8]")
    p.add_argument(
        "--explain", action="store_true", help="print the formula of each number of the first setup, with its inputs"
    )
    p.add_argument("--config", action="store_true", help="write the first setup as command lines and options")
    p.add_argument("--json", metavar="FILE", type=Path, help="write everything as data; with - print it instead")
    p.add_argument("--plot", metavar="FILE", type=Path, help="draw memory and time over shorter and longer sequences")
    p.add_argument("--over", choices=["tokens", "gpus"], default="tokens", help="what --plot varies [tokens]")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    try:
        if options.rows < 1:
            raise ValueError(f"expected --rows to be at least 1, got {options.rows}")
        (_serve if options.serve else _train)(options)
    except ValueError as problem:
        refuse("ringlearn.plan", str(problem).removeprefix("plan: "))
    except BrokenPipeError:  # whoever reads it has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as problem:
        refuse("ringlearn.plan", f"expected a file that can be written: {problem}")


def _plan(options: argparse.Namespace, tokens: int | str | None, gpus: int) -> Plan:
    same = dict(precision=options.precision, framework=options.framework, kernel=options.kernel, batch=options.batch)
    return plan(options.model, tokens, gpus, options.gpu, lengths=options.lengths, **same)


def _train(options: argparse.Namespace) -> None:
    found = _plan(options, options.tokens, options.gpus)
    if _written(options, found.as_dict(options.rows)):
        return
    print(plan_table(found, options.rows))
    if options.explain:
        c = found.best
        print("\n" + explained(found.model, c.setup, found.tokens, found.gpu, c.density))
    if options.config:
        for program, text in configs(found.model, found.gpu, found.best).items():
            print(f"\n{program}:\n    {text}")
    if options.plot:
        _draw(options, found)


def _written(options: argparse.Namespace, data: dict) -> bool:
    """Whether the data is all that was asked for; written to a file, the table is printed too."""
    if options.json is None:
        return False
    text = json.dumps(data, indent=1)
    if str(options.json) == "-":
        print(text)
        return True
    options.json.write_text(text + "\n")
    return False


def _serve(options: argparse.Namespace) -> None:
    for name in ("config", "plot", "lengths"):
        if getattr(options, name):
            raise ValueError(f"--{name} is for training, and --serve plans serving; omit one of the two")
    if options.tokens is None:
        raise ValueError("plan: expected --tokens, how many are cached, such as --tokens 128k")
    m, device, tokens = model(options.model), gpu(options.gpu), length(options.tokens)
    batch = 1 if options.batch is None else options.batch
    found = serve(m, tokens, options.gpus, device, precision=options.precision, kernel=options.kernel, batch=batch)
    data = {"model": asdict(m), "gpu": asdict(device), "tokens": tokens, "warning": m.warning(tokens)}
    if _written(options, data | {"ranked": [asdict(s) for s in found]}):
        return
    print(served_table(m, device, options.gpus, tokens, found, options.rows))
    if options.explain:
        print("\n" + explained_serving(m, device, tokens, found[0]))


def _draw(options: argparse.Namespace, found: Plan) -> None:
    from .plot import over

    if options.over == "tokens" and options.lengths:
        raise ValueError("plan: --plot over tokens needs --tokens, not --lengths; or --over gpus")
    best: dict[int, Candidate] = {}
    middle = found.tokens if options.over == "tokens" else found.gpus
    for x in sorted({max(1, middle // 4), max(1, middle // 2), middle, 2 * middle, 4 * middle}):
        try:
            best[x] = _plan(options, *((x, found.gpus) if options.over == "tokens" else (options.tokens, x))).best
        except ValueError:
            continue  # does not fit, or does not divide
    title = f"{found.model.name} on {found.gpu.name}"
    over(best, options.over, found.gpu.memory, title).savefig(options.plot, dpi=150)
    print(f"\nwrote {options.plot}")


if __name__ == "__main__":
    main()

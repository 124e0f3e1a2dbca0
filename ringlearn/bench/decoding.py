"""How fast is decoding over a shared cache on this hardware, and how close does it come to what the memory can do?

    python -m ringlearn.bench --decode --graph --json one.json
    torchrun --nproc-per-node 2 -m ringlearn.bench --decode --graph --json two.json
    torchrun --nproc-per-node 2 -m ringlearn.bench --decode --parts prefill

Without torchrun it measures one rank. There are three parts, all for one layer:

    attention    one query in each sequence against a full cache: on one GPU, over the ranks, with SDPA, with a function
                 named by --compare, and for comparison a plain sum over as many bytes
    appends      decode steps (append and attention) while the cache grows, and what formula (8) of notebook 11 says
    prefill      many new tokens after a cached prefix: is it faster if keys and values travel, or if queries do, and
                 which does the library choose?

What is measured and how to read it: docs/bench.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from ..attention.decoding import EXCHANGES
from ..launch import command_line
from ..worlds import DistributedWorld
from . import appends, one_query, prefill
from .cached import Sizes
from .options import add_shared, begun_record, check_file, check_heads, end, load, positive, refuse, written
from .timing import tidy

PARTS = ("attention", "appends", "prefill")

# What is measured by default: the shape of Llama 3.1 8B, or one that CPUs compute within seconds.
ON_GPUS = {
    "heads": [32, 8, 128],
    "dtype": "bfloat16",
    "batch": [1, 8, 32],
    "cached": [8192, 32768, 131072, 524288, 1048576],
    "behind": [0, 8192, 32768, 65536, 131072, 262144, 524288],
    "new": [16, 64, 256, 1024, 4096, 16384],
    "appends": 1000,
}
ON_CPUS = {
    "heads": [4, 2, 16],
    "dtype": "float32",
    "batch": [1, 3],
    "cached": [64, 500],
    "behind": [0, 100],
    "new": [4, 30],
    "appends": 20,
}


def parser() -> argparse.ArgumentParser:
    usual = ON_GPUS if torch.cuda.is_available() else ON_CPUS
    p = command_line.Parser(prog="ringlearn.bench --decode", description=__doc__, formatter_class=command_line.Help)
    what = p.add_argument_group("what is computed (the defaults are smaller without a GPU)")
    what.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; prefill needs "
                      "two ranks or more")  # fmt: skip
    what.add_argument("--cached", type=int, nargs="+", help="tokens in the cache, for attention and appends")
    what.add_argument(
        "--batch", type=int, nargs="+", help="sequences, for attention; each is combined with every --cached"
    )
    what.add_argument("--gib", type=float, default=48.0, help="GiB of cache on a rank at most; what needs more is left "
                      "out")  # fmt: skip
    what.add_argument("--appends", type=int, help="steps by which the cache grows, one token each")
    what.add_argument("--behind", type=int, nargs="+", help="lengths of the cached prefix in tokens, for prefill")
    what.add_argument("--new", type=int, nargs="+", help="numbers of new tokens; each is combined with every --behind")
    p.set_defaults(**usual)

    how = p.add_argument_group("how it is computed")
    how.add_argument("--exchange", nargs="+", choices=list(EXCHANGES), default=["all-gather"],
                     help="how ranks merge their results")  # fmt: skip
    how.add_argument("--interleave", type=int, default=16, help="neighbouring tokens that a rank owns in turn")
    how.add_argument("--page", type=int, help="tokens in a page of the cache; by default the cache is in one piece")
    how.add_argument("--transport", choices=["auto", "nccl", "symmetric"], default="auto",
                     help="what carries the messages")  # fmt: skip

    timing = p.add_argument_group("how it is measured")
    timing.add_argument("--repeats", type=int, default=7, help="rounds; every row is timed once in each")
    timing.add_argument("--graph", action="store_true", help="also time the replay of CUDA graphs where possible")
    add_shared(what, how, timing, "other functions to measure, for attention")
    timing.add_argument("--error-tokens", type=int, default=1 << 20, help="compare results with float32 attention for "
                        "up to this many cached tokens, of all sequences together; 0: never")  # fmt: skip
    timing.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return p


def check(options: argparse.Namespace) -> None:
    """Raises ValueError if the options make no sense."""
    check_heads(options)
    positive(options, "cached", "batch", "new", "gib", "appends", "interleave", "repeats", "timeout")
    if options.page is not None:
        positive(options, "page")
    if min(options.behind) < 0:
        raise ValueError(f"--behind: expected numbers >= 0, got {min(options.behind)}")
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 and "prefill" in options.parts:
        if options.parts == ["prefill"]:
            raise ValueError(
                "--parts prefill: expected at least two ranks, since one has nobody to send to; use torchrun"
            )
        options.parts.remove("prefill")
    check_file(options.json)
    options.functions = {name: load(name) for name in options.compare}


def main(argv: Sequence[str]) -> None:
    """Measure what the options ask for, print tables, write the record. Ends the process."""
    options = command_line.parse_checked(parser(), argv, check)
    start = "torchrun --nproc-per-node {} -m" if "RANK" in os.environ else "python -m"
    world = _world(options)
    speak = world.rank == 0
    command = f"{start.format(world.size)} ringlearn.bench --decode {shlex.join(argv)}".rstrip()
    record = begun_record(command, options, world)
    record |= {"interleave": options.interleave, "page": options.page, "transport": world.transport}
    record |= {part: [] for part in PARTS}
    jobs = _jobs(options, world.size)
    expected = sum(sizes.seconds(part, world.device, options.repeats) for part, sizes in jobs)
    begun, done, unwritten = time.monotonic(), 0.0, ""

    def say(words: str) -> None:
        if speak:
            print(words, file=sys.stderr, flush=True)

    no_gpu = "" if world.device.type == "cuda" else "; CPUs show how it works, but say nothing about speed"
    H, G, D = options.heads
    say(f"{world.size} rank{'s' * (world.size > 1)}, {H}:{G} heads of {D}, {options.dtype}, {world.transport}{no_gpu}")
    say(f"{len(jobs)} measurements, roughly {_duration(expected)}")
    for number, (part, sizes) in enumerate(jobs, 1):
        if number > 1:
            left = (expected - done) * (time.monotonic() - begun) / done
            say(f"[{number}/{len(jobs)}] {part}, {sizes}; about {_duration(left)} left")
        else:
            say(f"[{number}/{len(jobs)}] {part}, {sizes}")
        record[part] += MEASURE[part](sizes, options, world)
        appends.predict(record["appends"])
        tidy([world], [])
        done += sizes.seconds(part, world.device, options.repeats)
        if speak and options.json:
            unwritten = written(options.json, record)
            if unwritten:
                say(f"ringlearn.bench: --json: {unwritten}; measuring continues")
    if speak:
        for part, table in TABLES.items():
            if record[part]:
                print(f"{table(record[part])}\n", flush=True)
    rows = [row for part in PARTS for row in record[part]]
    failed = any(row["problem"] and row.get("way", one_query.ONE) in one_query.OURS for row in rows)
    end(failed, unwritten, "the tables have")


MEASURE = {"attention": one_query.measure, "appends": appends.measure, "prefill": prefill.measure}
TABLES = {"attention": one_query.table, "appends": appends.table, "prefill": prefill.table}


def _jobs(options: argparse.Namespace, P: int) -> list[tuple[str, Sizes]]:
    """What is measured, in order, the short ones first; what takes more memory than --gib is left out."""
    how = dict(heads=tuple(options.heads), dtype=getattr(torch, options.dtype), P=P, gib=options.gib, page=options.page)
    found: list[tuple[str, Sizes]] = []
    if "attention" in options.parts:
        found += [("attention", Sizes(B, S, **how)) for S, B in product(options.cached, options.batch)]
    if "appends" in options.parts:
        found += [("appends", Sizes(1, S, new=options.appends, **how)) for S in options.cached]
    if "prefill" in options.parts:
        found += [("prefill", Sizes(1, S, new=T, **how)) for S, T in product(options.behind, options.new)]
    return [(part, sizes) for part, sizes in found if sizes.fits(P)]


def _world(options: argparse.Namespace) -> DistributedWorld:
    if "RANK" not in os.environ:  # without torchrun: one rank, which needs an address all the same
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        return DistributedWorld(check=False, transport=options.transport, timeout=options.timeout)
    except ValueError as error:  # the same on all ranks
        refuse(str(error))


def _duration(seconds: float) -> str:
    """As people say it.

    >>> _duration(3.2), _duration(200)
    ('3 s', '3 min')
    """
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"

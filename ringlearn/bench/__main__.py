"""``torchrun --nproc-per-node N -m ringlearn.bench``: see the package's docstring, and --help."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh

from ..attention.table import STRATEGIES
from ..worlds import DistributedWorld
from .options import begun_record, end, parse, refuse, written
from .rows import measure
from .table import table
from .timing import in_a_loop


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--decode" in argv:
        from . import decoding

        return decoding.main([option for option in argv if option != "--decode"])
    options = parse(argv)
    if options.plot:
        from . import plot as bench

        try:
            getattr(bench, options.plot_what)(options.records).savefig(options.out, dpi=150)
        except ValueError as error:
            refuse(f"--plot-what {options.plot_what}: {error}")
        except OSError as error:
            refuse(f"--out: expected a file that this user may write: {error}")
        print(f"wrote {options.out}")
        return
    worlds, why = _worlds(options)
    world = next(iter(worlds.values()))
    record = begun_record(
        f"torchrun --nproc-per-node {world.size} -m ringlearn.bench " + shlex.join(argv), options, world
    )
    record["shape"] |= {"B": options.batch, "mask": " ".join(options.mask)}
    record |= {"transports": why, "agreement_ms": _agreement_ms(options.repeats), "rows": []}
    speak, unwritten = world.rank == 0, ""
    if speak:
        H, G, D = options.heads
        no_gpu = "" if world.device.type == "cuda" else "; CPUs show how it works, but say nothing about speed"
        print(f"{world.size} ranks, {H}:{G} heads of {D}, {options.dtype}{no_gpu}", file=sys.stderr, flush=True)
    for tokens, choice in itertools.product(sorted(options.tokens), options.choices):
        if speak:
            print(f"measuring {tokens:,} tokens per rank, {choice.name} ...", file=sys.stderr, flush=True)
        record["rows"] += measure(tokens, options, worlds, choice)
        if speak and options.json:  # after each length: what comes next may take long, or fail
            unwritten = written(options.json, record)
            if unwritten:
                print(f"ringlearn.bench: --json: {unwritten}; measuring continues", file=sys.stderr, flush=True)
    if speak:
        print(table(record["rows"]))
        print(f"comparing arguments, not in these times: {record['agreement_ms']:.2f} ms per call", flush=True)
    failed = any(row["problem"] and row["way"] in ("one device", *STRATEGIES) for row in record["rows"])
    end(failed, unwritten, "the table has")


def _worlds(options: argparse.Namespace) -> tuple[dict[str, DistributedWorld], dict[str, str]]:
    """A world for each transport, by its name, and one for each mesh; and what each requested transport turned out to
    be, with the reason."""
    worlds, why = {}, {}
    for asked in dict.fromkeys(options.transport):
        try:
            world = DistributedWorld(check=False, transport=asked, timeout=options.timeout)
        except ValueError as error:  # the same on all ranks
            refuse(str(error))
        why[asked] = world.transport
        worlds.setdefault(world.transport.split()[0], world)
    for inner in dict.fromkeys(options.inner or ()):  # only hops of a ring over all ranks take symmetric memory
        mesh = init_device_mesh(world.device.type, (world.size // inner, inner), mesh_dim_names=("outer", "inner"))
        worlds[f"mesh of {inner}"] = DistributedWorld(mesh, check=False, transport="nccl", timeout=options.timeout)
    return worlds, why


def _agreement_ms(repeats: int) -> float:
    """Milliseconds, by the host's clock, that the ranks take to compare their arguments before a call."""
    world, host = DistributedWorld(transport="nccl"), torch.device("cpu")
    return in_a_loop(lambda: world.agree("bench", {"mask": "causal", "layout": "zigzag"}), repeats, host)


if __name__ == "__main__":
    main()

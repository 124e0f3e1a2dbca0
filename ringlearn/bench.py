"""How fast is ring attention on this hardware, and how near to what one device can do?

    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 2048 8192 32768 --json ring.json
    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 2048 --graph
    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 8192 --compare other.py:attention
    python -m ringlearn.bench --plot ring.json --out ring.png

Each row is one way of computing the same attention on the same tensors in the same run:

    one device   SDPA over the tokens of one rank, on every rank at once: what the hardware gives without a ring
    ring         ring attention over all tokens, tokens per rank as asked for
    a function   named by --compare, over all tokens

Times are medians of several calls by CUDA events (a clock on CPUs), the slowest rank's. TFLOP/s count 4 S^2 H D / 2
operations for a causal forward and 3.5 times as many for forward and backward, over the ranks. The peak is what a call
allocates beyond its inputs, symmetric memory included. Errors are relative norms against float32. Agreement between
ranks is off, as in a hot loop; what it costs stands in the record as agreement_ms.

A function to compare with takes this rank's q, k, v, (B, H, s, D), and returns this rank's output, for a causal mask
and the layout asked for: ``def attention(q, k, v, layout, group): ...``
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .attention import ring_attention
from .costs import attention_flops, ring_bytes
from .layouts import Layout, contiguous, striped, zigzag
from .masks import causal, full
from .measure import hardware, milliseconds, versions
from .worlds import DistributedWorld

LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}
MIB = 2**20
ERROR_TOKENS = 32768  # a longer sequence is not computed in float32 for comparison

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    if options.plot:
        from .viz.bench import rates

        rates([json.loads(path.read_text()) for path in options.plot]).savefig(options.out, dpi=150)
        print(f"wrote {options.out}")
        return
    if "RANK" not in os.environ:
        sys.exit("ringlearn.bench measures ranks that are processes: torchrun --nproc-per-node 2 -m ringlearn.bench")
    world = DistributedWorld(check=False, transport=options.transport)
    rows = []
    for s in options.tokens:
        rows += measure(world, s, options)
    agreement = agreement_ms(options.repeats)
    if world.rank == 0:
        print(table(rows))
        print(f"agreement of the ranks, not in these times: {agreement:.2f} ms a call")
        record = {
            "date": datetime.date.today().isoformat(),
            "command": f"torchrun --nproc-per-node {world.size} -m ringlearn.bench {shlex.join(argv or sys.argv[1:])}",
            "hardware": hardware(world.size),
            "versions": versions(),
            "transport": world.transport,
            "agreement_ms": agreement,
            "rows": rows,
        }
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts in Python's own shutdown after a backward


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringlearn.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="per rank; a row of each way for each")
    add("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("H", "G", "D"), help="heads and head dim")
    add("--batch", type=int, default=1)
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--layout", choices=list(LAYOUTS), default="zigzag")
    add("--mask", choices=["causal", "full"], default="causal")
    add("--kernel", default="auto", help="auto, or the name of one of rl.kernels")
    add("--transport", choices=["auto", "nccl", "symmetric"], default="auto")
    add("--graph", action="store_true", help="capture each call in a CUDA graph and time its replay")
    add("--compare", nargs="*", default=[], metavar="MODULE:FUNCTION", help="other functions on the same tensors")
    add("--repeats", type=int, default=9)
    add("--json", type=Path, help="write everything that was measured")
    add("--plot", type=Path, nargs="+", help="draw the rates of these JSON files, and measure nothing")
    add("--out", type=Path, default=Path("bench.png"), help="where the picture goes")
    return parser


# ---- One length -----------------------------------------------------------------------------------------------------


def measure(world: DistributedWorld, s: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows for s tokens per rank. All ranks call it together."""
    H, G, D = options.heads
    B, dtype, layout = options.batch, getattr(torch, options.dtype), LAYOUTS[options.layout]
    mask, S = {"causal": causal, "full": full}[options.mask], s * world.size
    whole = [_numbers(B, heads, S, D, dtype, world.device, seed) for seed, heads in enumerate((H, G, G, H))]
    q, k, v, dout = (layout_part(t, layout, world) for t in whole)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    exact = _exact(whole, mask is causal) if S <= ERROR_TOKENS else None
    exact = exact and [layout_part(t, layout, world) for t in exact]
    if exact is None:
        del whole

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, mask=mask, layout=layout, world=world, kernel=options.kernel)

    def one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(_fastest(q)):
            return scaled_dot_product_attention(q, k, v, is_causal=mask is causal, enable_gqa=G < H)

    ways: list[tuple[str, Attention, int]] = [("one device", one_device, s), ("ring", ring, S)]
    for name in options.compare:
        other = _load(name)
        ways.append((name.rpartition(":")[2], lambda *x, f=other: f(*x, layout=options.layout, group=world.group), S))
    rows = []
    for name, way, length in ways:
        row = {"way": name, "tokens_per_rank": s, "ranks": world.size, "graph": options.graph}
        row |= _times(way, inputs, dout, world, options)
        flops = [attention_flops(length, H, D, B=B, causal=mask is causal, backward=b) for b in (False, True)]
        ranks = 1 if name == "one device" else world.size
        row["forward_tflops"] = flops[0] / ranks / row["forward_ms"] / 1e9
        row["forward_backward_tflops"] = sum(flops) / ranks / row["forward_backward_ms"] / 1e9
        row["forward_fraction"] = row["forward_tflops"] / (rows[0] if rows else row)["forward_tflops"]
        row["forward_backward_fraction"] = (
            row["forward_backward_tflops"] / (rows[0] if rows else row)["forward_backward_tflops"]
        )
        if name == "ring":
            shape = dict(S=S, P=world.size, G=G, D=D, B=B, itemsize=dtype.itemsize, layout=layout)
            row["forward_bytes"], row["backward_bytes"] = (ring_bytes(**shape, backward=b) for b in (False, True))
        if exact is not None and name != "one device":
            row["error"] = _errors(way, inputs, dout, exact)
        rows.append(row)
    return rows


def agreement_ms(repeats: int) -> float:
    """What it costs that the ranks compare their arguments before a call; by the host's clock."""
    world, times = DistributedWorld(), []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        world.agree("bench", {"mask": "causal", "layout": "zigzag"})
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def layout_part(t: Tensor, layout: Layout, world: DistributedWorld) -> Tensor:
    """This rank's rows of a full tensor (B, heads, S, D)."""
    return t[:, :, layout.positions(t.shape[2], world.size, world.rank, t.device)].contiguous()


def _numbers(B: int, heads: int, S: int, D: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(B, heads, S, D, dtype=dtype, device=device, generator=generator)


def _fastest(q: Tensor) -> list[SDPBackend]:
    if q.is_cuda and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device)[0] >= 9:
        return [SDPBackend.CUDNN_ATTENTION]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _load(name: str) -> Callable[..., Tensor]:
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ValueError(f"--compare: expected module:function or file.py:function, got {name!r}")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, function)


def _times(
    way: Attention, inputs: list[Tensor], dout: Tensor, world: DistributedWorld, options: argparse.Namespace
) -> dict[str, float | None]:
    def forward() -> None:
        with torch.no_grad():
            way(*inputs)

    def forward_backward() -> None:
        for t in inputs:
            t.grad = None
        way(*inputs).backward(dout)

    gpu = world.device.type == "cuda"
    found: dict[str, float | None] = {}
    for name, call in (("forward", forward), ("forward_backward", forward_backward)):
        timed = captured(call) if options.graph and gpu else call
        ms = milliseconds(timed, world.device, options.repeats)
        del timed
        peak = _peak(call, inputs, world) if gpu else None
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, (ms, peak), group=world.group)
        found[f"{name}_ms"] = max(ms for ms, _ in everyone)
        found[f"{name}_peak_mib"] = max(peak for _, peak in everyone) if gpu else None
    for t in inputs:
        t.grad = None
    return found


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as one CUDA graph. It is called three times first, so that nothing is set up during the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _peak(call: Callable[[], Any], inputs: list[Tensor], world: DistributedWorld) -> float:
    for t in inputs:
        t.grad = None
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held + world.reserved) / MIB


def _exact(whole: list[Tensor], is_causal: bool) -> list[Tensor]:
    q, k, v, dout = (t.float() for t in whole)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    k_all, v_all = (t.repeat_interleave(group, dim=1) for t in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(q, k_all, v_all, is_causal=is_causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _errors(way: Attention, inputs: list[Tensor], dout: Tensor, exact: list[Tensor]) -> dict[str, float]:
    out = way(*inputs)
    grads = torch.autograd.grad(out, inputs, dout)
    errors = {}
    for name, got, want in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), exact):
        sums = torch.stack([(got.double() - want.double()).square().sum(), want.double().square().sum()])
        dist.all_reduce(sums)
        errors[name] = float((sums[0] / sums[1]).sqrt())
    return errors


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, forward / forward and backward."""
    head = f"{'tokens/rank':>11}  {'way':<16} {'ms':>17} {'TFLOP/s per rank':>17} {'of one device':>15} {'peak MiB':>9}"
    lines = [head]
    for row in rows:
        peak = row["forward_backward_peak_mib"]
        lines.append(
            f"{row['tokens_per_rank']:>11,}  {row['way']:<16} "
            f"{row['forward_ms']:>8.3f} {row['forward_backward_ms']:>8.3f} "
            f"{row['forward_tflops']:>8.1f} {row['forward_backward_tflops']:>8.1f} "
            f"{row['forward_fraction']:>7.1%} {row['forward_backward_fraction']:>7.1%} "
            f"{'-' if peak is None else format(peak, '.0f'):>9}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

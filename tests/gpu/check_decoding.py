"""Checks decoding on one GPU against dense float64 attention, and times it; run from the root of the repository:

    python tests/gpu/check_decoding.py --out decoding.json

One line for each check, also of decode steps that are captured as a CUDA graph and replayed while the cache grows by
1,000 tokens. Then the time of such a step, appending included, over 1,000 replays; and a table: microseconds of one
call and GB/s of the keys and values that it reads, for the split-K kernel (in one piece, and in pages), SDPA's kernels,
and a plain sum over the same memory, which is what the memory can do. Every call is timed inside a CUDA graph, so the
host does not count, and the ways take turns. The exit status is 1 if a value was wrong. It takes about two minutes.
``--quick`` times two sizes only; ``--only "a captured"`` makes the checks with that in their name, and times nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from oracle import relative  # noqa: E402
from pairwise import pairwise  # noqa: E402
from trying import captured, tried  # noqa: E402

import ringlearn as rl  # noqa: E402
from ringlearn.attention.decoding import Ownership, gpu  # noqa: E402

GRID = {
    "P": [1, 2, 3],
    "lengths": [(0, 1), (5, 3000), (1001, 64), (20000, 19999)],
    "n": [1, 2, 5, 8],
    "heads": [(4, 4), (32, 8), (6, 2), (16, 1)],
    "dims": [(128, 128), (64, 64), (192, 128), (24, 40)],
    "window": [None, 1, 700],
    "extras": [(False, None), (True, None), (True, 2.0)],  # sinks, softcap
    "page": [None, 16, 256],
    "interleave": [1, 16],
    "exchange": ["all-gather", "tree"],
    "dtype": [torch.bfloat16, torch.float16, torch.float32],
}
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES = [(1, 32_768), (1, 131_072), (1, 1_048_576), (8, 131_072), (32, 8_192)]  # batch, cached tokens
RESULTS: list[dict[str, Any]] = []
ONLY = ""  # what the name of a check must have in it


def check(name: str, fn: Callable[[], str]) -> None:
    if ONLY not in name:
        return
    good, note, seconds = tried(fn)
    RESULTS.append({"name": name, "passed": good, "note": note, "seconds": round(seconds, 1)})
    print(f"{'ok  ' if good else 'FAIL'} {name}, {RESULTS[-1]['seconds']} s: {note}", flush=True)


def dense(q: Tensor, k: Tensor, v: Tensor, length: int, window: Any, sinks: Any, softcap: Any) -> Tensor:
    """One sequence in float64: q (H, n, D), k, v (G, S, D) of which ``length`` count."""
    (H, n, D), G = q.shape, k.shape[0]
    k, v = (t[:, :length].double().repeat_interleave(H // G, 0) for t in (k, v))
    x = q.double() @ k.mT * D**-0.5
    x = softcap * torch.tanh(x / softcap) if softcap else x
    at = torch.arange(length - n, length, device=q.device)[:, None]
    keys = torch.arange(length, device=q.device)
    seen = (keys <= at) & (keys > at - (window or 1 << 60))
    x = x.masked_fill(~seen, -torch.inf)
    none = torch.full_like(x[..., :1], -torch.inf) if sinks is None else sinks.double()[:, None, None].expand(H, n, 1)
    p = torch.cat([x, none], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
    return p @ v


def values(case: dict[str, Any]) -> float:
    """The error over its limit."""
    (H, G), (D, D_v), n, dtype = case["heads"], case["dims"], case["n"], case["dtype"]
    with_sinks, softcap = case["extras"]
    S = max(case["lengths"])
    cache = rl.KVCache(
        rl.SimulatedWorld(case["P"], device="cuda", count_memory=False),
        *(2, G, D, S),
        v_dim=D_v,
        interleave=case["interleave"],
        page=case["page"],
        dtype=dtype,
    )
    for t in (*cache.k, *cache.v):
        t.fill_(torch.nan)  # what was never written may be anything
    q, k, v = (torch.randn(2, *shape, dtype=dtype, device="cuda") for shape in ((H, n, D), (G, S, D), (G, S, D_v)))
    sinks = torch.randn(H, device="cuda") if with_sinks else None
    before = [max(0, length - n) for length in case["lengths"]]
    cache.append(k, v, before)
    for b, (length, old) in enumerate(zip(case["lengths"], before, strict=True)):
        only = slice(old, length)  # the newest tokens of one sequence at a time
        cache.append(k[:, :, only], v[:, :, only], [length - old if i == b else 0 for i in range(2)])
    window = case["window"]
    mask = rl.causal & rl.sliding_window(window) if window else rl.causal
    more = dict(sinks=sinks, softcap=softcap, exchange=case["exchange"], kernel="split-k")
    out = rl.decode_attention(q, cache, mask, **more)
    wanted = [
        dense(q[b], k[b], v[b], length, window, sinks, softcap).nan_to_num(0.0)
        for b, length in enumerate(case["lengths"])
    ]
    return relative(out, torch.stack(wanted)) / LIMITS[dtype]


def grid() -> str:
    cases = pairwise(GRID)
    off = [values(case) for case in cases]
    worst = max(range(len(cases)), key=lambda i: off[i])
    assert off[worst] <= 1, f"{off[worst]:.1f} times the limit in {cases[worst]}; {sum(x > 1 for x in off)} such cases"
    return f"{len(cases)} cases, at most {off[worst]:.2f} of the limit"


def growing_graph(page: int | None) -> str:
    """A captured call stays right while the lengths, the pages and the keys change under it."""
    H, G, D, S = 32, 8, 128, 5000
    world = rl.SimulatedWorld(1, device="cuda", count_memory=False)
    cache = rl.KVCache(world, 2, G, D, S, page=page, dtype=torch.bfloat16)
    q, k, v = (torch.randn(2, h, s, D, dtype=torch.bfloat16, device="cuda") for h, s in ((H, 1), (G, S), (G, S)))

    def call() -> Tensor:
        parts = gpu.attend(
            *(q, cache.k[0], cache.v[0], cache.table, cache.lengths_on_device, 0, cache.ownership),
            *(None, D**-0.5, None),
        )
        return gpu.merged(parts).out

    cache.append(k[:, :, :10], v[:, :, :10])
    call(), torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for length in (10, 11, 1000, 4999):
        old = cache.lengths[0]
        new = slice(old, length)  # the second sequence stops at 300
        cache.append(k[:, :, new], v[:, :, new], [length - old, min(length, 300) - min(old, 300)])
        q.normal_()
        graph.replay()
        wanted = torch.stack([dense(q[b], k[b], v[b], cache.lengths[b], None, None, None) for b in range(2)])
        off = relative(out, wanted)
        assert off < 1e-2, f"off by {off:.1e} at {length} tokens"
    return "10 to 4,999 tokens"


def growing_step(page: int | None, P: int, tokens: int = 1000) -> str:
    """Append and attention, captured together: replays let the cache grow, and see what was appended."""
    H, G, D, n = 32, 8, 128, tokens + 50
    world = rl.SimulatedWorld(P, device="cuda", count_memory=False)
    cache = rl.KVCache(world, 2, G, D, n + 10, page=page, dtype=torch.bfloat16, interleave=4)
    q, k, v = (torch.randn(2, h, n, D, dtype=torch.bfloat16, device="cuda") for h in (H, G, G))
    new = [x[:, :, :1].clone() for x in (q, k, v)]

    def step() -> Tensor:
        cache.append(*new[1:])
        return rl.decode_attention(new[0], cache)

    cache.append(k[:, :, :50], v[:, :, :50], [50, 20])
    step(), torch.cuda.synchronize()  # kernels are compiled
    cache.truncate([50, 20])
    cache.reserve(tokens)
    graph, worst = torch.cuda.CUDAGraph(), 0.0
    with torch.cuda.graph(graph):
        out = step()
    rows = [list(range(50)), list(range(20))]  # what each sequence has of k and v
    for i in range(50, n):
        for mine, whole in zip(new, (q, k, v)):
            mine.copy_(whole[:, :, i : i + 1])
        graph.replay()
        [row.append(i) for row in rows]
        if i % 100 == 49 or i == 50:
            wanted = [dense(new[0][b], k[b][:, r], v[b][:, r], len(r), None, None, None) for b, r in enumerate(rows)]
            worst = max(worst, relative(out, torch.stack(wanted)))
    assert worst < 1e-2, f"off by {worst:.1e}"
    assert cache.lengths == (n, n - 30), cache.lengths
    for _ in range(12):  # two more than the capacity, and some more than the reserved pages have room for
        graph.replay()
    own = cache.ownership
    room = min(n + 10, own.room(-(-own.count(0, n) // cache.page) * cache.page))
    try:
        said = str(cache.lengths)
    except ValueError as error:
        said = str(error)
    assert f"so the last {n + 12 - room} are lost" in said, said
    return f"{tokens} tokens, {P} ranks: at most {worst:.1e}"


def growing_model(page: int | None, tokens: int = 1000) -> str:
    """A transformer of rl.nn whose decode step, the choice of the token included, is replayed; against no cache."""
    torch.manual_seed(1)
    model = rl.nn.Transformer(rl.nn.Config(width=512, layers=3, heads=8, kv_heads=2)).cuda().requires_grad_(False)
    world = rl.SimulatedWorld(1, device="cuda", count_memory=False)
    cache = model.new_cache(world, 1, tokens + 200, page=page)
    prompt = torch.randint(256, (1, 100), device="cuda")
    model(prompt[:, :-1], cache=cache)
    token = prompt[:, -1:].clone()
    model(token, cache=cache), torch.cuda.synchronize()
    for layer in cache:
        layer.truncate(99)
        layer.reserve(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, cache=cache)[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
    found, text = [], [prompt]
    start = time.monotonic()
    for _ in range(tokens):
        graph.replay()
        found.append(logits.clone()), text.append(token.clone())
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    off = relative(torch.stack(found, 1), model(torch.cat(text, 1)[:, :-1])[:, 99:])
    assert {layer.lengths for layer in cache} == {(99 + tokens,)}
    assert off < 1e-4, f"logits are off by {off:.1e}"
    return f"{tokens} tokens, logits at most {off:.1e}, {tokens / seconds:,.0f} tokens/s"


# Times


def step_time(S: int, page: int | None, H: int = 32, G: int = 8, D: int = 128, tokens: int = 1000) -> dict[str, Any]:
    """Seconds for each token of a captured step, append and attention, while the cache grows by so many."""
    world = rl.SimulatedWorld(1, device="cuda", count_memory=False)
    cache = rl.KVCache(world, 1, G, D, S + tokens + 10, page=page, dtype=torch.bfloat16)
    q, k, v = (torch.randn(1, h, 1, D, dtype=torch.bfloat16, device="cuda") for h in (H, G, G))
    for start in range(0, S, 1 << 17):
        more = torch.randn(1, G, min(1 << 17, S - start), D, dtype=torch.bfloat16, device="cuda")
        cache.append(more, more)
    attend, _ = captured(lambda: rl.decode_attention(q, cache))

    def step() -> None:
        cache.append(k, v)
        rl.decode_attention(q, cache)

    step(), cache.truncate(S), cache.reserve(tokens + 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = {}
    for name, which in (("attention", attend), ("step", graph.replay)):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        which(), start.record()
        for _ in range(tokens):
            which()
        stop.record(), stop.synchronize()
        found[name] = start.elapsed_time(stop) / 1e3 / tokens
    assert cache.lengths == (S + tokens + 1,)
    print(
        f"{S:9,d} cached tokens, {'one piece' if page is None else f'pages of {page}'}: attention alone "
        f"{1e6 * found['attention']:6.1f} us a replay, with append {1e6 * found['step']:6.1f} us",
        flush=True,
    )
    return {"tokens": S, "page": page, "seconds": found}


def seconds(ways: dict[str, Callable[[], Any]], calls: int, rounds: int = 7) -> dict[str, float | str]:
    """The median over rounds in which the ways take turns; what a way raises in place of its time."""
    replays, found = {}, {}
    for name, fn in ways.items():
        try:
            replays[name], _ = captured(fn, calls)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(), replay(), stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / 1e3 / calls)
    return found | {name: statistics.median(t) for name, t in times.items()}


def timed(B: int, S: int, H: int = 32, G: int = 8, D: int = 128, page: int = 256) -> dict[str, Any]:
    q = torch.randn(B, H, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(B, G, S, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths, own = torch.full((B,), S, dtype=torch.int32, device="cuda"), Ownership(1, 16)
    whole = torch.arange(B, dtype=torch.int32, device="cuda")[:, None]
    pages = torch.randperm(B * S // page, device="cuda").to(torch.int32).view(B, -1)
    k_pages, v_pages = (t.view(-1, G, page, D) for t in (k, v))  # the same memory, in other pages

    def split_k(k: Tensor, v: Tensor, table: Tensor, **options: Any) -> Callable[[], Any]:
        return lambda: gpu.merged(gpu.attend(q, k, v, table, lengths, 0, own, None, D**-0.5, None, **options), q.dtype)

    def torch_sdpa(backend: SDPBackend) -> Callable[[], Any]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, enable_gqa=True)

        return run

    both = torch.stack([k, v]) if B * S < 1 << 20 else None  # one kernel for the sum, where memory is no matter
    ways: dict[str, Callable[[], Any]] = {
        "split-K": split_k(k, v, whole),
        "split-K in pages": split_k(k_pages, v_pages, pages),
        "SDPA flash": torch_sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": torch_sdpa(SDPBackend.CUDNN_ATTENTION),
        "a plain sum": (lambda: both.sum()) if both is not None else lambda: (k.sum(), v.sum()),
    }
    calls = max(3, min(50, int(2e10 / (4 * B * G * S * D))))
    found = seconds(ways, calls)
    nbytes = 2 * k.nbytes
    line = [f"{B:3d} x {S:9,d}"]
    for name in ways:
        t = found[name]
        line.append(f"{name}: {t}" if isinstance(t, str) else f"{name} {1e6 * t:7.1f} us {nbytes / t / 1e9:5.0f} GB/s")
    print(" | ".join(line), flush=True)
    read = found["split-K"], found["a plain sum"]
    if not any(isinstance(t, str) for t in read):
        print(f"{'':15s} split-K reads at {read[1] / read[0]:.0%} of the sum's rate", flush=True)
    return {"batch": B, "tokens": S, "bytes": nbytes, "seconds": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--quick", action="store_true", help="time two sizes only")
    parser.add_argument("--only", default="", help="only the checks whose name has this in it, and no times")
    options = parser.parse_args()
    global ONLY
    ONLY = options.only
    torch.manual_seed(0)
    with torch.no_grad():
        check("equal to dense attention", grid)
        check("a captured graph grows", lambda: growing_graph(None))
        check("a captured graph grows, in pages", lambda: growing_graph(64))
        for page, P in ((None, 1), (64, 1), (16, 1), (None, 2), (48, 3)):
            check(f"a captured step grows, page {page}, {P} ranks", lambda page=page, P=P: growing_step(page, P))
        for page in (None, 64):
            check(f"a captured step of rl.nn, page {page}", lambda page=page: growing_model(page))
        steps = []
        for S, page in ((32_768, None), (32_768, 256), (131_072, None), (131_072, 256), (1_000_000, None)):
            check(
                f"time of a step, {S} tokens, page {page}", lambda S=S, page=page: str(steps.append(step_time(S, page)))
            )
        times = [timed(B, S) for B, S in (() if ONLY else SIZES[:2] if options.quick else SIZES)]
    if options.out:
        record = {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "checks": RESULTS,
            "steps": steps,
            "times": times,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(r["passed"] for r in RESULTS))


if __name__ == "__main__":
    sys.exit(main())

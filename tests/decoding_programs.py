"""Decoding over ranks: an oracle, cases, and what gloo processes run; the same functions run simulated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ringlearn as rl

LAYOUTS = {layout.name: layout for layout in (rl.contiguous, rl.striped, rl.zigzag)}
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
GRID = {
    "length": [0, 1, 5, 64, 1001],
    "n": [1, 2, 5],
    "heads": [(4, 4), (6, 2), (3, 1)],
    "dims": [(8, 8), (16, 5)],
    "window": [None, 1, 7, 200],
    "extras": [(False, None), (True, None), (True, 2.0)],  # sinks, softcap
    "ragged": [False, True],
    "exchange": ["all-gather", "tree"],
    "interleave": [1, 16],
    "layout": [None, "contiguous", "zigzag"],  # of a prefill; None: all tokens are appended by every rank
    "page": [None, 1, 24],
}


def dense(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, scale: float, sinks: Any, softcap: Any
) -> tuple[Tensor, Tensor]:
    """One sequence and one query after the other, in float64: its scores, a softmax, a sum."""
    B, H, n, _ = q.shape
    group = H // k.shape[1]
    out, lse = torch.zeros(B, H, n, v.shape[3], dtype=torch.float64), torch.full((B, H, n), -torch.inf).double()
    for b, h, j in torch.cartesian_prod(*map(torch.arange, (B, H, n))).tolist():
        stop = lengths[b] - n + j + 1
        start = max(0, stop - window) if window else 0
        keys = range(start, max(stop, start))
        scores = k[b, h // group, keys].double() @ q[b, h, j].double() * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        values = v[b, h // group, keys].double()
        if sinks is not None:
            scores, values = torch.cat([scores, sinks[h : h + 1].double()]), torch.cat([values, 0 * out[:1, 0, 0]])
        if len(scores):
            out[b, h, j], lse[b, h, j] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


def inputs(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The whole sequences and the newest queries, the same in every process."""
    torch.manual_seed(case["length"])
    (H, G), (D_k, D_v), L, n = case["heads"], case["dims"], case["length"], case["n"]
    lengths = [L, L // 2, min(L, 3)] if case["ragged"] else [L, L]
    B, (with_sinks, softcap) = len(lengths), case["extras"]
    q = torch.randn(B, H, n, D_k, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(B, G, L, d, dtype=torch.float64).to(dtype) for d in (D_k, D_v))
    sinks = torch.randn(H, dtype=torch.float64) if with_sinks else None
    return dict(q=q, k=k, v=v, lengths=lengths, sinks=sinks, softcap=softcap, scale=D_k**-0.5, window=case["window"])


def filled(world: Any, case: dict[str, Any], given: dict[str, Any], **options: Any) -> rl.KVCache:
    """A cache with all tokens: most of them from a prefill, the last ones appended."""
    k, v, lengths = given["k"], given["v"], given["lengths"]
    cache = rl.KVCache(
        world,
        *(k.shape[0], k.shape[1], k.shape[3], max(1, k.shape[2])),
        v_dim=v.shape[3],
        interleave=case["interleave"],
        page=case["page"],
        dtype=k.dtype,
        **options,
    )
    if case["layout"] is None:
        cache.append(k, v, lengths)
        return cache
    prompt = k.shape[2] - k.shape[2] // 4
    before = [min(prompt, length) for length in lengths]
    cache.append(*world.shard(k[:, :, :prompt], v[:, :, :prompt], layout=LAYOUTS[case["layout"]]), before)
    cache.append(k[:, :, prompt:], v[:, :, prompt:], [a - b for a, b in zip(lengths, before, strict=True)])
    return cache


def call(cache: rl.KVCache, case: dict[str, Any], given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    mask = rl.causal if case["window"] is None else rl.causal & rl.sliding_window(case["window"])
    more = dict(sinks=given["sinks"], softcap=given["softcap"], exchange=case["exchange"], return_lse=True) | options
    return rl.decode_attention(given["q"], cache, mask, **more)


def decode(world: Any, case: dict[str, Any], dtype: str = "f64", **options: Any) -> list[Tensor]:
    """out, lse, and what the owned ranks hold of keys and values."""
    given = inputs(case, DTYPES[dtype])
    cache = filled(world, case, given, **options)
    return [*call(cache, case, given), *cache.k, *cache.v]


def decode_all(cases: list[tuple[dict[str, Any], str]], **options: Any) -> list[list[Tensor]]:
    torch.set_num_threads(1)
    world = rl.DistributedWorld(timeout=60)
    return [decode(world, case, dtype, **options) for case, dtype in cases]


def heads_split(t: int) -> tuple[Tensor, Tensor]:
    """Out of all heads: each of t ranks has some, whose cache is shared out over the ranks that have the same ones.

    Beside it what one simulated world gives for all heads.
    """
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // t, t), mesh_dim_names=("cache", "heads"))
    world, heads = rl.DistributedWorld(mesh["cache"], timeout=20), rl.DistributedWorld(mesh["heads"], timeout=20)
    case = {name: values[-1] for name, values in GRID.items()} | {"heads": (12, 6), "layout": "zigzag"}
    given = inputs(case, torch.float64)
    whole, _ = call(filled(rl.SimulatedWorld(size // t), case, given), case, given)
    own = {name: given[name].chunk(t, 1)[heads.rank].contiguous() for name in ("q", "k", "v")}
    own["sinks"] = given["sinks"].chunk(t)[heads.rank]
    out, _ = call(filled(world, case, given | own), case, given | own)
    return torch.cat(heads.run(_all_heads, out)[0], 1), whole


async def _all_heads(comm: Any, out: Tensor) -> list[Tensor]:
    return await comm.all_gather(out)


# Prefill behind a cached prefix --------------------------------------------------------------------------------------

PREFILL = {
    "new": [0, 1, 6, 41],
    "cached": [0, 1, 29, 200],
    "heads": [(4, 4), (6, 2), (3, 1)],
    "dims": [(8, 8), (16, 5)],
    "window": [None, 1, 9, 60],
    "ragged": [False, True],
    "layout": ["contiguous", "striped", "zigzag"],
    "travels": ["pass-kv", "pass-q"],
    "interleave": [1, 16],
    "page": [None, 8],
    "extras": [(False, None), (True, None), (True, 2.0)],  # sinks, softcap
}


def prefill_inputs(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Whole sequences, and what is cached of each; the new tokens stand behind it."""
    torch.manual_seed(case["new"] + case["cached"])
    (H, G), (D_k, D_v), C, T = case["heads"], case["dims"], case["cached"], case["new"]
    cached = [C, C // 2] if case["ragged"] else [C, C]
    k, v = (torch.randn(2, G, C + T, d, dtype=torch.float64).to(dtype) for d in (D_k, D_v))
    q, (with_sinks, softcap) = torch.randn(2, H, T, D_k, dtype=torch.float64).to(dtype), case["extras"]
    sinks = torch.randn(H, dtype=torch.float64) if with_sinks else None
    return dict(q=q, k=k, v=v, cached=cached, changes=dict(sinks=sinks, softcap=softcap))


def prefill(world: Any, case: dict[str, Any], dtype: str = "f64") -> list[Tensor]:
    """out and lse of the new tokens, whole; then out of the same by ``decode_attention``, after they were appended."""
    given = prefill_inputs(case, DTYPES[dtype])
    q, k, v, cached, T = given["q"], given["k"], given["v"], given["cached"], case["new"]
    options = dict(v_dim=v.shape[3], interleave=case["interleave"], page=case["page"], dtype=k.dtype)
    cache = rl.KVCache(world, 2, k.shape[1], k.shape[3], max(1, k.shape[2]), **options)
    cache.append(k, v, cached)
    new = [torch.stack([x[b, :, c : c + T] for b, c in enumerate(cached)]) for x in (k, v)]
    mask = rl.causal if case["window"] is None else rl.causal & rl.sliding_window(case["window"])
    shards = world.shard(q, *new, layout=LAYOUTS[case["layout"]])
    changes = given["changes"]
    out, lse = rl.prefill_attention(*shards, cache, mask, travels=case["travels"], return_lse=True, **changes)
    cache.append(*shards[1:])
    decoded = rl.decode_attention(q, cache, mask, **changes) if T else out.unshard()
    return [out.unshard(), lse.unshard(), decoded]


def prefill_all(cases: list[tuple[dict[str, Any], str]]) -> list[list[Tensor]]:
    torch.set_num_threads(1)
    world = rl.DistributedWorld(timeout=60)
    return [prefill(world, case, dtype) for case, dtype in cases]


def prefill_told() -> dict[str, str]:
    """What each rank hears when rank 1 does something else, or all do what makes no sense."""
    world, said = rl.DistributedWorld(timeout=20), {}
    odd = world.rank == 1
    cache = rl.KVCache(world, 1, 2, 4, capacity=40)
    q, k, v = world.shard(torch.ones(1, 4, 9, 4), torch.ones(1, 2, 9, 4), torch.ones(1, 2, 9, 4))
    wrong = {
        "travels": lambda: rl.prefill_attention(q, k, v, cache, travels="pass-q" if odd else "pass-kv"),
        "travels nowhere": lambda: rl.prefill_attention(q, k, v, cache, travels="home" if odd else None),
        "mask": lambda: rl.prefill_attention(q, k, v, cache, rl.full if odd else rl.causal),
        "tensors": lambda: rl.prefill_attention(q.local if odd else q, k, v, cache),
        "heads": lambda: rl.prefill_attention(q, q, q, cache),
        "more queries": lambda: rl.prefill_attention(world.shard(torch.ones(1, 4, 10, 4)), k, v, cache),
        "gradient": lambda: rl.prefill_attention(q.map(lambda t: t.clone().requires_grad_()), k, v, cache),
        "gradient of sinks": lambda: rl.prefill_attention(q, k, v, cache, sinks=torch.zeros(4, requires_grad=True)),
        "sinks": lambda: rl.prefill_attention(q, k, v, cache, sinks=torch.zeros(4) + odd),
        "shape of sinks": lambda: rl.prefill_attention(q, k, v, cache, sinks=torch.zeros(3) if odd else None),
        "softcap": lambda: rl.prefill_attention(q, k, v, cache, softcap=1.0 + odd),
        "no softcap": lambda: rl.prefill_attention(q, k, v, cache, softcap=-1.0),
    }
    for name, fn in wrong.items():
        try:
            fn()
            said[name] = "no error"
        except ValueError as error:
            said[name] = str(error)
    return said


# What goes wrong -----------------------------------------------------------------------------------------------------


def told() -> dict[str, Any]:
    """What each rank hears when rank 1 does something else, or all do what makes no sense; and if nothing is lost."""
    world, said = rl.DistributedWorld(timeout=20), {}
    odd = world.rank == 1

    def attempt(name: str, fn: Any) -> None:
        try:
            fn()
            said[name] = "no error"
        except ValueError as error:
            said[name] = str(error)

    def some(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    attempt("making", lambda: rl.KVCache(world, 2, 2, 4, capacity=10 + odd))
    attempt("making, wrong", lambda: rl.KVCache(world, 2, 2, 4, capacity=0 if odd else 10))
    cache = rl.KVCache(world, 2, 2, 4, capacity=10, interleave=2)
    k, v, q = some(2, 2, 7, 4, seed=1), some(2, 2, 7, 4, seed=2), some(2, 4, 2, 4, seed=3)
    cache.append(k, v, [7, 4])
    before = rl.decode_attention(q, cache)
    attempt("full", lambda: cache.append(k, v))
    attempt("full on one rank", lambda: cache.append(k[:, :, : 7 if odd else 1], v[:, :, : 7 if odd else 1]))
    attempt("other tokens", lambda: cache.append(k[:, :, :1] + odd, v[:, :, :1]))
    attempt("other values", lambda: cache.append(k[:, :, :1], v[:, :, :1] + odd))
    attempt("other counts", lambda: cache.append(k[:, :, :1], v[:, :, :1], [1, 1 - odd]))
    attempt("wrong counts", lambda: cache.append(k[:, :, :1], v[:, :, :1], [1, 2]))
    attempt("shape", lambda: cache.append(k[:, :1, :1], v[:, :1, :1]))
    attempt("dtype", lambda: cache.append(k.double() if odd else k, v))
    attempt("no tensor", lambda: cache.append(None if odd else k, v))
    attempt("kinds", lambda: cache.append(world.shard(k), v))
    attempt("layouts", lambda: cache.append(world.shard(k), world.shard(v, layout=rl.zigzag)))
    attempt("another layout", lambda: cache.append(*world.shard(k[:, :, :3], v[:, :, :3], layout=_odd(odd))))
    attempt("full of shards", lambda: cache.append(*world.shard(k, v)))
    attempt("longer", lambda: cache.truncate(8 if odd else 7))
    attempt("truncated apart", lambda: cache.truncate([7, 4 - odd]))
    attempt("queries apart", lambda: rl.decode_attention(q + odd, cache))
    attempt("sinks apart", lambda: rl.decode_attention(q, cache, sinks=torch.zeros(4) + odd))
    attempt("q", lambda: rl.decode_attention(q[:, :3] if odd else q, cache))
    attempt("no query", lambda: rl.decode_attention(q[:, :, :0], cache))
    attempt("mask", lambda: rl.decode_attention(q, cache, rl.full if odd else rl.causal))
    attempt("exchange", lambda: rl.decode_attention(q, cache, exchange="tree" if odd else "all-gather"))
    attempt("no exchange", lambda: rl.decode_attention(q, cache, exchange="pigeon"))
    attempt("softcap", lambda: rl.decode_attention(q, cache, softcap=0.0))
    attempt("sinks", lambda: rl.decode_attention(q, cache, sinks=torch.zeros(3)))
    attempt("gradient", lambda: rl.decode_attention(q.clone().requires_grad_(), cache))
    said["nothing lost"] = cache.lengths == (7, 4) and torch.equal(before, rl.decode_attention(q, cache))
    return said


def _odd(odd: bool) -> rl.Layout:
    return rl.Layout("apart", rl.zigzag.rule if odd else rl.contiguous.rule)


def traced(exchange: str) -> list[tuple[str, str, int]]:
    world = rl.DistributedWorld(timeout=20, trace=True)
    return record(world, exchange, world.rank)


def record(world: Any, exchange: str, rank: int) -> list[tuple[str, str, int]]:
    """What a rank sends and computes in one call."""
    case = {name: values[-1] for name, values in GRID.items()} | {"exchange": exchange}
    decode(world, case)
    return [(e.kind, e.name, e.peer if e.kind == "send" else 0, e.nbytes, e.flops)
            for e in world.trace if e.rank == rank and e.kind in ("send", "compute")]  # fmt: skip

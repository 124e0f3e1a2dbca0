"""Attention of the newest queries to a cache that is shared out over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...fingerprint import checksum
from ...flash import is_scale
from ...kernels import scores_of
from ...masks import And, Mask, SlidingWindow, causal
from ...partial import Partial, accumulation_dtype
from ...worlds.comm import Comm
from ...worlds.uncompiled import uncompiled
from ...worlds.world import PerRank
from ..call import _no_autocast
from ..sinks import check_sinks, with_sinks
from . import gpu, local, one_kernel
from .cache import KVCache
from .exchange import EXCHANGES
from .ownership import Ownership

_OP = "decode_attention"


@uncompiled
def decode_attention(
    q: Tensor,
    cache: KVCache,
    mask: Mask = causal,
    scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    exchange: str = "all-gather",
    kernel: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of the newest T tokens of each sequence to everything in a cache.

    Each rank attends to the tokens that it owns, and one exchange of (out, lse) merges the results.

    q: (B, H, T, D_k), T >= 1, the same on every rank; H must be divisible by the cache's G heads. These are the queries
    of the last T tokens of each sequence, whose keys and values must *already* be in the cache: append first. If there
    are several (proposed tokens to verify, for example), each sees only those before it. If a sequence has fewer than T
    tokens, the surplus queries, which come first, see nothing.
    mask: ``causal``, or ``causal & sliding_window(w)`` for the last w tokens, including the query's own.
    scale: multiplies the scores; 1 / sqrt(D_k) if None.
    sinks: (H,), for each query head a score that has no value and only takes weight from the keys (gpt-oss).
    softcap: c, if scores are capped to c * tanh(score / c) after scaling (Gemma 2).
    exchange: "all-gather", which takes one hop, or "tree", which goes to rank 0 and back. Each gives the same bits on
    every rank; the last digits differ between the two.
    kernel: "split-k" for GPUs, "reference" for any device and dtype; None chooses the first where possible.
    return_lse: also return lse (B, H, T), including sinks.

    Returns out (B, H, T, D_v) in the dtype of q, the same bits on every rank. Rows that see no key give 0 and lse -inf.

    Raises ValueError on every rank if an argument is invalid, or if it or its values differ between ranks (checked only
    in a world with check=True), or if a gradient is required: decoding records none.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference", with ranks in place of the parts of one GPU;
    the tree is that of Shyam et al. 2024, "Tree Attention" (algorithm 3).

    >>> import torch, ringlearn as rl
    >>> k, v, q = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8), torch.randn(1, 4, 1, 8)
    >>> cache = rl.KVCache(rl.SimulatedWorld(3), batch=1, heads=2, dim=8, capacity=64)
    >>> cache.append(k, v)
    >>> out = rl.decode_attention(q, cache)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    >>> torch.allclose(out, expected, atol=1e-5)
    True
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"{_OP}: expected a KVCache, got {type(cache).__name__}; make one with rl.KVCache(world, ...)")
    world, problem, same = cache.world, None, {}
    try:
        _check(q, cache, scale, sinks, softcap, exchange)
        chosen = _choose(kernel, q, cache)
        window = window_of(mask)
        if world.check:
            same = {"q": f"{tuple(q.shape)} {q.dtype}", "cached lengths": str(cache.lengths), "exchange": exchange}
            same["kernel"] = chosen
            same |= {"mask": mask.signature(), "scale": repr(scale), "softcap": repr(softcap)}
            same |= {"return_lse": str(bool(return_lse)), "sinks": str(sinks is not None)}
            values = {} if cache.capturing else {"q": q, "sinks": sinks}
            same |= {f"values of {name}": checksum(x) for name, x in values.items() if x is not None}
    except Exception as error:  # the other ranks must hear of it
        problem = error
    world.agree(_OP, same, {}, problem)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    boxes = one_kernel.mailboxes(world, exchange, rows, cache.v_dim) if chosen == "split-k" else None
    if world.size == 2 and boxes is None:
        world.reserve(rows * (cache.v_dim + 1) * accumulation_dtype(q.dtype).itemsize)
    final = q.dtype if sinks is None else torch.float32
    call = _Call(cache, q.shape[2], window, scale, softcap, exchange, chosen, boxes, final)
    with torch.no_grad(), _no_autocast(q.device.type):
        result = world.run(_decode, q, PerRank(range(len(world.ranks))), call)[0]  # all ranks have the same
        if sinks is not None:
            result = with_sinks(result, sinks)
    out = result.out.to(q.dtype)
    return (out, result.lse) if return_lse else out


@dataclass(frozen=True)
class _Call:
    """What is the same on all ranks.

    boxes: for the exchange in one kernel, if there are any.  final: the dtype that a kernel may leave the result in.
    """

    cache: KVCache
    n: int
    window: int | None
    scale: float
    softcap: float | None
    exchange: str
    kernel: str
    boxes: Any
    final: torch.dtype


async def _decode(comm: Comm, q: Tensor, index: int, call: _Call) -> Partial:
    """Attend to what this rank owns, then merge with the others. A rank that owns nothing takes part all the same."""
    cache = call.cache
    traced = comm.keeps_trace and not cache.capturing  # in a capture the host does not know what a replay will see
    if traced or call.kernel == "reference":
        slots = visible_slots(cache.ownership, comm.rank, cache.lengths, call.n, call.window)
    if traced:
        seen = sum(last - first for of_sequence in slots for first, last in of_sequence)
        comm.compute("decode", 2.0 * seen * q.shape[1] * (cache.dim + cache.v_dim))
    if call.kernel == "split-k":
        parts = gpu.attend(
            *(q, cache.k[index], cache.v[index], cache.table, cache.lengths_on_device, comm.rank, cache.ownership),
            *(call.window, call.scale, call.softcap),
        )
        if call.boxes:
            return one_kernel.merge_over_ranks(parts, call.boxes, call.final)
        mine = gpu.merged(parts, call.final if comm.size == 1 else torch.float32)
    else:
        first, last = torch.tensor(slots).unbind(-1)  # (B, n) each
        blocks = cache.blocks(index, int(first.min()), int(last.max()))
        mine = local.attend(q, blocks, first.to(q.device), last.to(q.device), call.scale, call.softcap, cache.v_dim)
    return await EXCHANGES[call.exchange](comm, mine)


def visible_slots(
    ownership: Ownership, rank: int, lengths: tuple[int, ...], n: int, window: int | None
) -> list[list[tuple[int, int]]]:
    """Which slots of a rank the newest n queries of each sequence see: from first to before last.

    The query that is j-th from the end stands at position length - j, wherever the tokens around it are. These are
    Python's numbers, since making a tensor would cost the host more than counting does.

    >>> visible_slots(Ownership(2, 1), 0, (5,), 2, None)
    [[(0, 2), (0, 3)]]
    >>> visible_slots(Ownership(2, 1), 0, (5,), 2, window=2)
    [[(1, 2), (2, 3)]]
    """

    def seen(stop: int) -> tuple[int, int]:  # stop: one past the query's own position
        return 0 if window is None else ownership.count(rank, stop - window), ownership.count(rank, stop)

    return [[seen(stop) for stop in range(length - n + 1, length + 1)] for length in lengths]


def window_of(mask: Mask, op: str = _OP) -> int | None:
    """The width of a causal mask's window, None without one. Raises ValueError for any other mask."""
    parts = _parts(mask)
    widths = [part.width for part in parts if isinstance(part, SlidingWindow)]
    if causal not in parts or any(part != causal and not isinstance(part, SlidingWindow) for part in parts):
        raise ValueError(
            f"{op}: expected mask=rl.causal or rl.causal & rl.sliding_window(w), got {mask!r}; sequences of a batch "
            f"are apart by themselves, and other masks are not supported in decoding"
        )
    return min(widths, default=None)


def _parts(mask: Any) -> list[Any]:
    return [*_parts(mask.a), *_parts(mask.b)] if isinstance(mask, And) else [mask]


def _choose(kernel: Any, q: Tensor, cache: KVCache) -> str:
    if kernel not in (None, "split-k", "reference"):
        raise ValueError(f'{_OP}: expected kernel to be None, "split-k" or "reference", got {kernel!r}')
    reason = gpu.unsupported(q, cache.heads, cache.v_dim)
    if cache.capturing and (reason or kernel == "reference"):
        raise ValueError(f"{_OP}: in a CUDA graph only kernel 'split-k' can be used: {reason or 'omit kernel='}")
    if kernel == "split-k" and reason:
        raise ValueError(f"{_OP}: kernel 'split-k' cannot compute this: {reason}. Omit kernel=")
    return kernel or ("reference" if reason else "split-k")


def _check(q, cache, scale, sinks, softcap, exchange) -> None:
    B, G, D = cache.batch, cache.heads, cache.dim
    if (
        not isinstance(q, Tensor)
        or q.dim() != 4
        or q.shape[0] != B
        or q.shape[1] % G
        or not q.shape[1]
        or q.shape[3] != D
    ):
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(
            f"{_OP}: expected q of shape ({B}, H, T, {D}) with H divisible by the cache's {G} heads, the same on every "
            f"rank, got {got}"
        )
    if q.shape[2] < 1:
        raise ValueError(f"{_OP}: expected at least one query for each sequence, got q {tuple(q.shape)}")
    if q.dtype != cache.dtype or q.device.type != cache.world.device.type:
        raise ValueError(
            f"{_OP}: expected q in {cache.dtype} on {cache.world.device}, as the cache is, got {q.dtype} on "
            f"{q.device}; convert it with .to(), or make the cache with its dtype"
        )
    if torch.is_grad_enabled() and (q.requires_grad or getattr(sinks, "requires_grad", False)):
        raise ValueError(
            f"{_OP}: decoding records no gradient; call it under torch.no_grad(), or train with rl.ring_attention"
        )
    if not is_scale(scale):
        raise ValueError(f"{_OP}: expected scale to be None or a finite number > 0, got {scale!r}")
    scores_of(_OP, q.shape[1], softcap, None)
    check_sinks(_OP, sinks, q.shape[1], q.device)
    if exchange not in EXCHANGES:
        raise ValueError(f"{_OP}: expected exchange to be one of {', '.join(map(repr, EXCHANGES))}, got {exchange!r}")

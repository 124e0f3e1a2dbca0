"""Attention of a few queries to the tokens that one rank owns, on a GPU: split-K, in Triton.

One query has too little work for a GPU if a program computes whole rows, so the slots of a sequence are split among
programs, each of which leaves a partial result (out, lse), and a second kernel merges those: what ranks do among each
other, done within one of them. ``local.attend`` is the same to be read.

All query heads of a group, and all n queries, are rows of one matrix product, so every key and value is read once.
Lengths and pages are read from the GPU's memory, and the grid follows from the capacity, so a captured CUDA graph stays
right while the cache grows.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...partial import Partial
from ...partial.gpu import power_of_2
from ...partial.launch import launch
from .ownership import Ownership

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MOST_ROWS = 128  # query heads of a group times queries: more would not fit into a program's registers
MOST_SPLITS = 128
MOST_WAVES = 4


@dataclass(frozen=True)
class Cut:
    """How split-K divides its work.

    programs: on each multiprocessor at the same time.  block: how many slots a program reads at a time, if a key and a
    value have at most 256 bytes each; fewer if they have more.  stages: how many blocks are in flight.  warps: of a
    program.
    """

    programs: int
    block: int
    stages: int
    warps: int


# On an H200, from 8,192 to 1,048,576 slots and with batches of 1 to 32, each is at most 5 per cent slower than the best
# of each case. Where pages are read, a block of 32 slots takes twice as long: every block waits for its page's number.
ONE_PIECE = Cut(programs=2, block=32, stages=4, warps=4)
PAGES = Cut(programs=2, block=128, stages=2, warps=8)
SHARED = 76 * 2**10  # bytes of shared memory that a program with PAGES may take


def unsupported(q: Tensor, heads: int, v_dim: int) -> str | None:
    """Why the kernel cannot take these queries, or None. heads: of keys and values."""
    rows = q.shape[1] // heads * q.shape[2]
    if triton is None:
        return "Triton is not installed; it comes with torch for NVIDIA GPUs"
    if not q.is_cuda or torch.version.hip:
        return f"the queries are on {q.device}, not on an NVIDIA GPU"
    if q.dtype == torch.float64:
        return "float64 is not supported"
    if rows > MOST_ROWS:
        return f"{q.shape[1] // heads} query heads of a group times {q.shape[2]} queries are more than {MOST_ROWS} rows"
    if max(q.shape[3], v_dim) > 256:
        return f"head dims up to 256 are supported, not {max(q.shape[3], v_dim)}"
    return None


if triton is not None:

    @triton.jit
    def _count(length, rank, ranks, interleave):
        """``Ownership.count``"""
        length = tl.maximum(length, 0)
        turn = ranks * interleave
        rest = length % turn - rank * interleave
        return length // turn * interleave + tl.minimum(tl.maximum(rest, 0), interleave)

    @triton.jit(do_not_specialize=["splits"])
    def _attend(
        q,
        k,
        v,
        table,
        lengths,
        out,
        lse,
        scale,
        softcap,
        rank,
        ranks,
        interleave,
        window,
        columns,
        page_size,
        splits,
        k_page,
        k_head,
        v_page,
        v_head,
        G: tl.constexpr,
        N: tl.constexpr,
        ROWS: tl.constexpr,
        D: tl.constexpr,
        D_V: tl.constexpr,
        WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr,
        PAGES: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_S: tl.constexpr,
    ):
        split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        r, d, e, s = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
        row = (b * G + g).to(tl.int64) * ROWS + r
        queries = tl.load(q + row[:, None] * D + d[None, :], mask=(r < ROWS)[:, None] & (d < D)[None, :], other=0.0)

        length = tl.load(lengths + b)
        up_to = length - N + 1 + r % N  # one past the query's own position
        last = _count(up_to, rank, ranks, interleave)
        stop = _count(length, rank, ranks, interleave)
        stop = tl.minimum(stop, columns * page_size)  # a graph that was replayed too often must read nobody's memory
        begin = 0
        if WINDOW:
            first = _count(up_to - window, rank, ranks, interleave)
            begin = _count(length - N + 1 - window, rank, ranks, interleave) // BLOCK_S * BLOCK_S
        # Programs take blocks in turn: those that run together read neighbouring memory.
        begin += split * BLOCK_S
        step = splits * BLOCK_S

        top = tl.full([BLOCK_R], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        result = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
        page = tl.load(table + b * columns).to(tl.int64)
        for start in range(begin, stop, step):
            slot = start + s
            here = slot < stop
            if PAGES == 1:  # a page holds whole blocks
                page = tl.load(table + b * columns + start // page_size).to(tl.int64)
            if PAGES == 2:  # any page: each slot may be in another one
                pages = tl.load(table + b * columns + slot // page_size, mask=here, other=0).to(tl.int64)
                k_at = pages * k_page + g * k_head + (slot % page_size) * D
                v_at = pages * v_page + g * v_head + (slot % page_size) * D_V
            else:
                within = slot % page_size if PAGES == 1 else slot
                k_at = page * k_page + g * k_head + within * D
                v_at = page * v_page + g * v_head + within * D_V
            keys = tl.load(k + k_at[None, :] + d[:, None], mask=here[None, :] & (d < D)[:, None], other=0.0)
            x = tl.dot(queries, keys, input_precision="ieee") * scale
            if SOFTCAP:
                x = softcap - 2 * softcap / (tl.exp(2 * x / softcap) + 1)  # softcap * tanh(x / softcap)
            seen = here[None, :] & (slot[None, :] < last[:, None])
            if WINDOW:
                seen = seen & (slot[None, :] >= first[:, None])
            x = tl.where(seen, x, -float("inf"))
            new_top = tl.maximum(top, tl.max(x, 1))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: exp(-inf - 0) = 0, not NaN
            p = tl.exp(x - base[:, None])
            fade = tl.exp(top - base)
            values = tl.load(v + v_at[:, None] + e[None, :], mask=here[:, None] & (e < D_V)[None, :], other=0.0)
            total = total * fade + tl.sum(p, 1)
            result = result * fade[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
            top = new_top

        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        at = row * splits + split
        inside = (r < ROWS)[:, None] & (e < D_V)[None, :]
        tl.store(out + at[:, None] * D_V + e[None, :], result / total[:, None], mask=inside)
        tl.store(lse + at, tl.where(empty, -float("inf"), top + tl.log(total)), mask=r < ROWS)

    @triton.jit
    def merged_rows(parts, lses, row, rows, splits, D_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr):
        """(out, lse) of some rows, in float32, from their splits; those from ``rows`` on are empty."""
        e, i = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_P)
        at = row[:, None] * splits + i[None, :]
        here = (row < rows)[:, None] & (i < splits)[None, :]
        x = tl.load(lses + at, mask=here, other=-float("inf"))
        top = tl.max(x, 1)
        base = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp(x - base[:, None])
        total = tl.sum(weights, 1)
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        y = tl.load(
            parts + at[:, :, None] * D_V + e[None, None, :], mask=here[:, :, None] & (e < D_V)[None, None, :], other=0.0
        )
        out = tl.sum(y * weights[:, :, None], 1) / total[:, None]
        return out, tl.where(empty, -float("inf"), base + tl.log(total))

    @triton.jit(do_not_specialize=["splits"])
    def _merge(
        parts,
        lses,
        out,
        lse,
        splits,
        D_V: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        row, e = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.arange(0, BLOCK_V)
        y, y_lse = merged_rows(parts, lses, row, tl.num_programs(0), splits, D_V, BLOCK_V, BLOCK_P)
        tl.store(out + row[:, None] * D_V + e[None, :], y.to(out.dtype.element_ty), mask=(e < D_V)[None, :])
        tl.store(lse + row, y_lse)

    @triton.jit
    def _append(
        k,
        v,
        k_cache,
        v_cache,
        table,
        lengths,
        room,
        counts,
        rank,
        ranks,
        interleave,
        columns,
        page_size,
        k_b,
        k_g,
        k_n,
        v_b,
        v_g,
        v_n,
        k_page,
        k_head,
        v_page,
        v_head,
        D: tl.constexpr,
        D_V: tl.constexpr,
        COUNTS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_V: tl.constexpr,
    ):
        n, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        position = tl.load(lengths + b) + n
        kept = (position // interleave % ranks == rank) & (position < tl.load(room + b))
        if COUNTS:
            kept = kept & (n < tl.load(counts + b))
        if kept:
            slot = position // (ranks * interleave) * interleave + position % interleave
            page = tl.load(table + b * columns + slot // page_size).to(tl.int64)
            new, head, row = n.to(tl.int64), g.to(tl.int64), b.to(tl.int64)
            key = tl.load(k + row * k_b + head * k_g + new * k_n + d, mask=d < D)
            value = tl.load(v + row * v_b + head * v_g + new * v_n + e, mask=e < D_V)
            tl.store(k_cache + page * k_page + head * k_head + (slot % page_size) * D + d, key, mask=d < D)
            tl.store(v_cache + page * v_page + head * v_head + (slot % page_size) * D_V + e, value, mask=e < D_V)


def can_append(k: Tensor) -> bool:
    """Whether there is a kernel that puts new keys and values on this device where they belong."""
    return triton is not None and k.is_cuda and not torch.version.hip


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    room: Tensor,
    counts: Tensor | None,
    rank: int,
    ownership: Ownership,
) -> None:
    """Put those of the next tokens k, v (B, G, n, D) that a rank keeps into its pages, in one launch.

    The arguments are those of ``newest.own_rows``, which says the same to be read.
    """
    B, G, n, D = k.shape
    if not k.numel():
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    launch(
        _append,
        (n, G, B),
        (k, v, k_cache, v_cache, table, lengths, room, lengths if counts is None else counts),
        (
            *(rank, ownership.ranks, ownership.interleave, table.shape[1], k_cache.shape[2]),
            *k.stride()[:3],
            *v.stride()[:3],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
        ),
        D=D,
        D_V=v.shape[3],
        COUNTS=counts is not None,
        BLOCK_D=power_of_2(D),
        BLOCK_V=power_of_2(v.shape[3]),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    rank: int,
    ownership: Ownership,
    window: int | None,
    scale: float,
    softcap: float | None,
    *,
    splits: int | None = None,
) -> Partial:
    """Partial(out, lse), float32, of the newest queries (B, H, n, D_k) over each split of one rank's tokens.

    k, v, table: as in ``KVCache``.  lengths: (B,) int32, of the whole sequences, on the GPU.
    splits: how many programs share the slots of a sequence; None fills the GPU.

    Returns out (B, H, n, splits, D_v) and lse (B, H, n, splits), for ``merged``.
    """
    B, H, n, D = q.shape
    G, page, D_v = k.shape[1], k.shape[2], v.shape[3]
    rows, columns = H // G * n, table.shape[1]
    cut = _cut(columns > 1, q.device)
    block = max(16, cut.block * 256 // max(256, q.element_size() * power_of_2(max(D, D_v))))
    if splits is None:
        splits = min(-(-page * columns // block), _splits(B * G, cut.programs * _multiprocessors(q.device)))
    out = torch.empty(B, H, n, splits, D_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, n, splits, dtype=torch.float32, device=q.device)
    launch(
        _attend,
        (splits, G, B),
        (q.contiguous(), k, v, table, lengths, out, lse),
        (
            *(scale, softcap or 1.0, rank, ownership.ranks, ownership.interleave, window or 0, columns, page, splits),
            *k.stride()[:2],
            *v.stride()[:2],
        ),
        G=G,
        N=n,
        ROWS=rows,
        D=D,
        D_V=D_v,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        PAGES=0 if columns == 1 else 1 if page % block == 0 else 2,
        BLOCK_R=max(16, power_of_2(rows)),
        BLOCK_D=max(16, power_of_2(D)),
        BLOCK_V=max(16, power_of_2(D_v)),
        BLOCK_S=block,
        num_stages=cut.stages,
        num_warps=cut.warps,
    )
    return Partial(out, lse)


def merged(parts: Partial, dtype: torch.dtype = torch.float32) -> Partial:
    """Partial(out in a dtype, lse in float32) of all splits together."""
    *shape, splits, D_v = parts.out.shape
    out, lse = parts.out.new_empty(*shape, D_v, dtype=dtype), parts.lse.new_empty(shape)
    sizes = {"D_V": D_v, "BLOCK_V": max(16, power_of_2(D_v)), "BLOCK_P": power_of_2(splits)}
    launch(_merge, (lse.numel(), 1, 1), (*parts, out, lse), (splits,), **sizes)
    return Partial(out, lse)


@cache
def _splits(pairs: int, slots: int) -> int:
    """How many programs share each pair of a sequence and a key/value head, if a GPU can run ``slots`` at a time.

    Programs run in waves, and the last wave should be as full as the others: with 396 slots, 528 programs need two
    waves, as 792 would. Of one to four waves this takes the number that leaves the fewest slots empty.

    >>> _splits(8, 396), _splits(64, 396), _splits(256, 396), _splits(5000, 396)
    (99, 6, 3, 1)
    """
    fullest = max(range(1, MOST_WAVES + 1), key=lambda waves: (waves * slots // pairs * pairs / waves, -waves))
    return max(1, min(MOST_SPLITS, fullest * slots // pairs))


@cache
def _cut(paged: bool, device: torch.device) -> Cut:
    small = device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin < SHARED
    return PAGES if paged and not small else ONE_PIECE  # which is slower with pages, but there is room for it


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

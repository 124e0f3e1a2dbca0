"""What the kernel tests share, on the CPU and on a GPU: odd inputs, a run over all tiles, and what to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases import NAMES, documents
from oracle import dense_attention, relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringlearn as rl
from ringlearn.masks import Bound, KeyInterval, Mask
from ringlearn.partial import accumulation_dtype
from ringlearn.partial.accumulate import Accumulator
from ringlearn.tiles import Kind, Tile, plan
from ringlearn.tiles.segments import NONE, call_of
from ringlearn.tiles.strips import Band

# Masks by name, from the number of keys. Between them they need every kind of tile.
MASKS = {
    "full": lambda S: rl.full,
    "causal": lambda S: rl.causal,
    "window": lambda S: rl.causal & rl.sliding_window(5),
    "wide window": lambda S: rl.sliding_window(max(2, S // 3)),
    "documents": lambda S: rl.causal & documents(S),
    "documents, whole": documents,
    "documents, window": lambda S: rl.causal & documents(S) & rl.sliding_window(max(2, S // 6)),
    # Every third query sees no key at all, and the first 130 keys are seen by no query after them.
    "blind rows": lambda S: rl.mask(lambda q, k: (q % 3 != 0) & ((k >= 130) | (q < 130)) & ((5 * q + 3 * k) % 7 < 4)),
}


SOME = rl.mask(lambda q, k: (7 * q + 3 * k) % 5 < 2, "some")
MIDDLE = slice(3, 40), slice(5, 42)  # rows and columns


def tile_of(kind: Kind, rows: slice = MIDDLE[0], columns: slice = MIDDLE[1], mask: Mask = SOME) -> Tile:
    """A tile of 37 rows and 37 columns. Of PARTIAL tiles the mask counts from the tile's first row and column."""
    if kind is Kind.SEGMENTS:
        return segments_tile(rows, columns)
    where = tuple(range(s.stop - s.start) for s in (rows, columns)) if kind is Kind.PARTIAL else ()
    return Tile(rows, columns, kind, mask if where else None, *where)


@dataclass(frozen=True)
class Diagonals(Mask):
    """A query at position p sees the keys p + lo .. p + hi: a mask of one's own that says so in pieces."""

    lo: int
    hi: int
    exact = True

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos >= q_pos + self.lo) & (k_pos <= q_pos + self.hi)

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
        return [KeyInterval(start, stop, Bound(1, self.lo), Bound(1, self.hi + 1))]


# Rows that see nothing at the beginning, at the end, at both; nothing hidden; one diagonal; one corner; nothing seen.
BANDS = [(-5, 3), (0, 0), (-60, -4), (6, 60), (9, 12), (-12, -9), (-60, 60), (-3, 40), (36, 36), (3, 2), (50, 60)]
# The first row and column, rows, and columns of segments under a causal edge; around them rows and columns without.
PLACES = [(0, 0, 10, 10), (11, 10, 10, 14), (21, 25, 1, 5), (30, 30, 7, 7)]


def segments_tile(rows: slice = MIDDLE[0], columns: slice = MIDDLE[1], places=PLACES, left=NONE, right=0) -> Tile:
    parts = []
    for i, j, height, width in places:
        top, first, d = rows.start + i, columns.start + j, width - height
        band = Band(height, width, 1 - height if left == NONE else d - left, width - 1 if right == NONE else d + right)
        parts.append((top, top + height, first, first + width, left, right, band.area))
    call = call_of(parts)
    return Tile(call.q, call.k, Kind.SEGMENTS, call=call)


# Segments that plans of whole sequences seldom lead to: tall and wide ones, with all kinds of edges.
ODD = {
    "rows and columns without": {},
    "nothing hidden": {"places": [(0, 0, 30, 3), (35, 9, 2, 20)], "right": NONE},
    "a left edge alone": {"places": [(0, 0, 30, 3), (31, 5, 5, 40)], "left": 2, "right": NONE},
    "a right edge beyond the columns": {"places": [(0, 0, 30, 3)], "left": NONE, "right": 28},
    "both edges": {"places": [(2, 1, 20, 30), (30, 40, 7, 7)], "left": 5, "right": 9},
    "one row each": {"places": [(i, 2 * i, 1, 2) for i in range(30)]},
    "long gaps": {"places": [(0, 0, 9, 9), (700, 900, 11, 13)]},
}


def mask_of(tile: Tile) -> Mask:
    """What a tile lets its rows see of its columns."""
    return rl.mask(lambda q, k: tile.visible(q.device)[q, k], "tile")


def one_tile(kernel, tile: Tile, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> tuple[dict, dict]:
    """out, lse, dq, dk, dv of a tile alone, and the same from dense float64 attention."""
    rows, columns = tile.q, tile.k
    parts = q[:, :, rows], k[:, :, columns], v[:, :, columns], dout[:, :, rows]
    oracle = exact(*parts, mask_of(tile), scale)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, tile, scale)
        # The results of all rows: what is outside the tile's rows must not be read.
        all_out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, dtype=out.dtype, device=q.device)
        all_lse = torch.full(q.shape[:3], torch.nan, dtype=lse.dtype, device=q.device)
        all_out[:, :, rows], all_lse[..., rows] = out, lse
        grads = kernel.backward(dout, q, k, v, all_out, all_lse, tile, scale)
    return dict(zip(NAMES, (out, lse, *grads), strict=True)), oracle


def tensor(shape: tuple[int, ...], memory: str, dtype: torch.dtype, device: str) -> Tensor:
    """Random numbers in one of several orders of memory."""
    B, H, S, D = shape
    make = {
        "contiguous": lambda: torch.randn(B, H, S, D, device=device),
        "(B, S, H, D)": lambda: torch.randn(B, S, H, D, device=device).transpose(1, 2),
        "last dim first": lambda: torch.randn(B, H, D, S, device=device).transpose(2, 3),
        "cut out": lambda: torch.randn(B, H, S + 3, D + 5, device=device)[:, :, 2 : S + 2, 3 : D + 3],
        "expanded": lambda: torch.randn(1, 1, S, D, device=device).expand(B, H, S, D),
    }[memory]
    strided = make().to(dtype)  # keeps the strides of all but expanded and cut out tensors
    if memory == "cut out":
        whole = torch.empty(B, H, S + 3, D + 5, dtype=dtype, device=device)
        strided = whole[:, :, 2 : S + 2, 3 : D + 3].copy_(strided)
    if memory == "expanded":
        strided = strided[:1, :1].contiguous().expand(B, H, S, D)
    assert strided.shape == shape
    return strided


MEMORY = ("contiguous", "(B, S, H, D)", "last dim first", "cut out", "expanded")


def inputs(S_q, S_k, heads, dims, memory="contiguous", dtype=torch.float64, device="cpu", B=2):
    """q, k, v, dout"""
    (H, G), (D_k, D_v) = heads, dims
    shapes = (B, H, S_q, D_k), (B, G, S_k, D_k), (B, G, S_k, D_v), (B, H, S_q, D_v)
    return tuple(tensor(shape, memory, dtype, device) for shape in shapes)


def run(kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float, pieces: int = 1) -> dict:
    """out, lse, dq, dk, dv from all tiles, with the keys cut into pieces as a ring has them, without gradients.

    Every piece's backward gets the *global* out and lse: the sum of the pieces must be the gradient of the whole.
    """
    dtype, S_q, S_k = accumulation_dtype(q.dtype), q.shape[2], k.shape[2]
    shards = [slice(i * S_k // pieces, (i + 1) * S_k // pieces) for i in range(pieces)]
    plans = [plan(mask, (range(S_q),), (range(s.start, s.stop),)) for s in shards]
    result = Accumulator((*q.shape[:3], v.shape[-1]), dtype, q.device)
    with torch.no_grad():
        for s, tiles in zip(shards, plans, strict=True):
            for tile in tiles:
                result.add(tile.q, kernel.forward(q, k[:, :, s], v[:, :, s], tile, scale))
        out, lse = result.partial
        dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
        for s, tiles in zip(shards, plans, strict=True):
            for tile in tiles:
                a, b, c = kernel.backward(dout, q, k[:, :, s], v[:, :, s], out, lse, tile, scale)
                dq[:, :, tile.q] += a
                dk[:, :, s][:, :, tile.k] += b
                dv[:, :, s][:, :, tile.k] += c
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def exact(q, k, v, dout, mask: Mask, scale: float | None = None, q_start: int = 0) -> dict[str, Tensor]:
    """The same from dense float64 attention and autograd."""
    leaves = [t.detach().double().clone().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, scale, q_start)
    grads = torch.autograd.grad(out, leaves, dout.double())
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check_gradient_of_lse(kernel, mask: Mask, S: int, dims: tuple[int, int]) -> None:
    """Hold a kernel's backward against autograd where lse has a gradient, too; rows that see nothing have none."""
    q, k, v, dout = inputs(S, S, (4, 2), dims)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, 0.3)
    seen = lse.detach() > -torch.inf
    dlse = torch.randn_like(lse) * seen
    wanted = torch.autograd.grad((out, lse.masked_fill(~seen, 0.0)), leaves, (dout, dlse))
    sums = [torch.zeros_like(t) for t in (q, k, v)]
    for tile in plan(mask, (range(S),), (range(S),)):
        grads = kernel.backward(dout, q, k, v, out.detach(), lse.detach(), tile, 0.3, dlse)
        for total, grad, where in zip(sums, grads, (tile.q, tile.k, tile.k), strict=True):
            total[:, :, where] += grad
    assert all(relative(got, want) < 1e-12 for got, want in zip(sums, wanted, strict=True))


def one_sdpa_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float) -> dict:
    """The same, without lse, from one call of SDPA in the dtype of q: what its users would have got.

    On contiguous tensors, on a GPU with head dims padded by zeros to a multiple of 8: for others SDPA may leave its
    fused kernels, compute in float32 and be more exact.
    """
    visible = mask.dense(q.shape[2], k.shape[2], device=q.device)
    seen = visible.any(-1)
    # Of one row a stride may be 1 in a contiguous tensor too, at which torch 2.11 refuses float32 on a GPU.
    leaves = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (q, k, v)]
    r = q.shape[1] // k.shape[1]
    queries, keys, values = (t if t.device.type == "cpu" else F.pad(t, (0, -t.shape[-1] % 8)) for t in leaves)
    keys, values = (t.repeat_interleave(r, dim=1) for t in (keys, values))
    # Rows without keys see everything here, and their result is thrown away.
    out = F.scaled_dot_product_attention(queries, keys, values, visible | ~seen[:, None], scale=scale)
    out = out[..., : v.shape[-1]].masked_fill(~seen[:, None], 0.0)
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def errors(got: dict, oracle: dict) -> dict[str, float]:
    return {name: relative(got[name], oracle[name]) for name in got}


def limits(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float, oracle: dict) -> dict[str, float]:
    """How far each result may be off, as a relative norm, at unit logits."""
    if q.dtype == torch.float64:
        return dict.fromkeys(NAMES, 1e-12)
    own = errors(one_sdpa_call(q, k, v, dout, mask, scale), oracle)
    if q.dtype == torch.float32:
        # A query that sees almost one key alone has a dq that is a difference of nearly equal numbers: there SDPA
        # itself is not at 1e-5 on a GPU.
        return {"lse": 1e-5} | {name: max(2 * error, 1e-5) for name, error in own.items()}
    # Twice the error of one SDPA call; where that is exact (a single key), one rounding. Fast exponentials cost lse
    # some digits, but fewer than the dtype of out has.
    floor = torch.finfo(q.dtype).eps / 4
    return {"lse": 5e-5} | {name: max(2 * error, floor) for name, error in own.items()}


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation has returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return result

"""What the kernel tests share, on the CPU and on a GPU: odd inputs, a run over all tiles, and what to compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracle import dense_attention, relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringlearn as rl
from ringlearn.masks import Mask
from ringlearn.partial import Accumulator, accumulation_dtype
from ringlearn.tiles import plan

NAMES = ("out", "lse", "dq", "dk", "dv")


def documents(S: int) -> Mask:
    lengths = [S // 3, 0, S // 7, S // 5]
    return rl.documents([*lengths, S - sum(lengths)])


# Masks by name, from the number of keys. Between them they need FULL, CAUSAL and PARTIAL tiles.
MASKS = {
    "full": lambda S: rl.full,
    "causal": lambda S: rl.causal,
    "window": lambda S: rl.causal & rl.sliding_window(5),
    "documents": lambda S: rl.causal & documents(S),
    # Every third query sees no key at all, and the first 130 keys are seen by no query after them.
    "blind rows": lambda S: rl.mask(lambda q, k: (q % 3 != 0) & ((k >= 130) | (q < 130)) & ((5 * q + 3 * k) % 7 < 4)),
}


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


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float) -> dict:
    """The same from dense float64 attention and autograd."""
    leaves = [t.detach().double().clone().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, scale)
    grads = torch.autograd.grad(out, leaves, dout.double())
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def one_sdpa_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float) -> dict:
    """The same, without lse, from one call of SDPA in the dtype of q: what its users would have got.

    On contiguous tensors: for others SDPA may leave its fused kernel, and be more exact.
    """
    visible = mask.dense(q.shape[2], k.shape[2], device=q.device)
    seen = visible.any(-1)
    leaves = [t.detach().contiguous().clone().requires_grad_() for t in (q, k, v)]
    r = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(r, dim=1) for t in leaves[1:])
    # Rows without keys see everything here, and their result is thrown away.
    out = F.scaled_dot_product_attention(leaves[0], keys, values, visible | ~seen[:, None], scale=scale)
    out = out.masked_fill(~seen[:, None], 0.0)
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
    # Twice the error of one SDPA call; where that is exact (a single key), one rounding. With head dims that its fused
    # kernels do not take, SDPA on a GPU computes in float32; a kernel pads them and rounds p and ds to 16 bits, which
    # costs half an eps. Fast exponentials cost lse some digits, but fewer than the dtype of out has.
    fused = q.device.type == "cpu" or (q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0)
    floor = torch.finfo(q.dtype).eps / (4 if fused else 2)
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

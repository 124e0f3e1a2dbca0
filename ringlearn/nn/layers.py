"""The layers of a transformer that act on each token alone: normalisation, feed-forward, rotary positions, the loss.

The feed-forward makes activations four times as wide as the model, the loss as wide as the vocabulary. Once attention
is computed in tiles, these are what fills the memory of a long sequence. Neither mixes tokens, so a block of the
sequence is computed, its result kept, and everything between forgotten; the backward computes it again, block by block.

Sources: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4 (RMSNorm); Su et al. 2021,
"RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34 (rope); Liu and Abbeel 2023, "Blockwise
Parallel Transformer for Large Context Models", section 3 and algorithm 1 (blocks).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .inputs import check_sizes
from .split import IGNORE


class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last dim; computed in float32 or wider, returned in the dtype of x.

    >>> RMSNorm(4)(torch.full((1, 4), 3.0))
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=<...>)
    """

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        # As a text: torch.compile(dynamic=True) takes a float of a module for a number that may change, and then fails
        # on it inside a checkpoint (torch 2.13), where ``in_blocks`` computes this.
        self._eps = repr(float(eps))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + float(self._eps)).rsqrt() * self.gain).to(x.dtype)


class FeedForward(nn.Module):
    """down(gelu(up(x))) of each token.

    width: of the model.  hidden: the size between the two projections, 4 width if None. ``in_blocks`` calls the module
    for some tokens at a time. Raises ValueError unless both are ints >= 1.

    >>> import torch
    >>> FeedForward(8)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(self, width: int, hidden: int | None = None):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        width, hidden = check_sizes("FeedForward", width=width, hidden=hidden)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def rope(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by the angle position * base^(-2i / D) (rotary position embedding).

    x: (B, H, n, D) with D even.  positions: (n,), global, or (B, n) if sequences are of different lengths.  base: > 0.
    Returns the shape and dtype of x. The angles are computed in float64: at position 1,000,000 a float32 angle is off
    by 0.06.  Raises ValueError if the arguments do not fit together.

    >>> x = torch.randn(1, 1, 2, 8)
    >>> torch.equal(rope(x, torch.tensor([0, 0])), x)
    True
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"rope: it rotates pairs, so the head dim D must be even, got x {tuple(x.shape)}")
    if positions.shape not in (x.shape[-2:-1], (x.shape[0], x.shape[-2])):
        raise ValueError(
            f"rope: expected a position for each token, ({x.shape[-2]},) or ({x.shape[0]}, {x.shape[-2]}), got "
            f"{tuple(positions.shape)} for x {tuple(x.shape)}"
        )
    if not base > 0:
        raise ValueError(f"rope: expected base to be a number > 0, got {base!r}")
    wide = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=x.device) / D)
    angles = positions[..., None] * frequencies  # (n, D/2), or (B, n, D/2)
    angles = angles if positions.dim() == 1 else angles[:, None]
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def split_heads(x: Tensor, D: int) -> Tensor:
    """(B, n, heads * D) as (B, heads, n, D)."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, n, D) as (B, n, heads * D)."""
    return x.transpose(1, 2).flatten(2)


def fitting_block(device: torch.device, sequences: int, widest: int) -> int:
    """How many tokens of each sequence to compute at a time, where a token has ``widest`` numbers at its widest.

    512 on a CPU. A GPU needs more work in each call than its host needs to start the call: as many tokens as make 64 Mi
    numbers (256 MiB in float32), but at least 512, and at most 8,192, beyond which they are no faster; those of all
    sequences together.

    >>> gpu = torch.device("cuda")
    >>> fitting_block(gpu, 1, 4096), fitting_block(gpu, 4, 4096), fitting_block(gpu, 1, 128256)
    (8192, 2048, 523)
    >>> fitting_block(torch.device("cpu"), 4, 4096)
    512
    """
    if device.type == "cpu":
        return 512
    return max(1, min(8192, max(512, (1 << 26) // widest)) // max(1, sequences))


def each_block(fn: Callable[..., Tensor], *xs: Tensor, block: int) -> list[Tensor]:
    """fn of every ``block`` tokens of xs, which are (B, n, ...); what fn makes inside is forgotten until the backward.

    fn must not use random numbers. Returns a result for each block, at least one: a rank without tokens has an empty
    block, so that gradients (zeros) reach its parameters as they do on every other rank. Raises ValueError unless block
    is an int >= 1.

    >>> [float(x) for x in each_block(torch.sum, torch.ones(1, 5, 2), block=2)]
    [4.0, 4.0, 2.0]
    """
    (block,) = check_sizes("in_blocks", block=block)
    blocks = zip(*(x.split(block, 1) for x in xs), strict=True)
    if not torch.is_grad_enabled():
        return [fn(*parts) for parts in blocks]
    return [checkpoint(fn, *parts, use_reentrant=False, preserve_rng_state=False) for parts in blocks]


def in_blocks(fn: Callable[..., Tensor], *xs: Tensor, block: int) -> Tensor:
    """``fn(*xs)`` for a function that acts on each token alone, ``block`` tokens at a time; xs are (B, n, ...).

    >>> in_blocks(torch.exp, torch.zeros(1, 5, 2), block=2).shape
    torch.Size([1, 5, 2])
    """
    results = each_block(fn, *xs, block=block)
    return torch.cat(results, 1) if len(results) > 1 else results[0]


def loss_sum(logits_of: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, *, block: int) -> Tensor:
    """The sum of the cross-entropies of ``block`` tokens at a time: never logits of shape (B, S, vocabulary).

    logits_of: from (B, block, width) to (B, block, vocabulary).  x: (B, n, width), the model's last activations.
    targets: int64 (B, n), IGNORE where there is none. Returns a float32 (or float64) number; if no token counts, it is
    0 with a gradient of 0.

    >>> import torch
    >>> x, head, targets = torch.zeros(1, 5, 2), torch.zeros(2, 256), torch.tensor([[1, 2, 3, 4, IGNORE]])
    >>> loss_sum(lambda x: x @ head, x, targets, block=2)  # four times log(256)
    tensor(22.1807)
    """

    if targets.shape != x.shape[:2]:
        raise ValueError(
            f"loss_sum: expected a target for each token, (B, n) = {tuple(x.shape[:2])}, got {tuple(targets.shape)}"
        )

    def one_block(x: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(x)
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    return sum(each_block(one_block, x, targets, block=block))

"""How the sequence of a batch is split: every module of this package gets it along with its activations.

Most of a transformer acts on each token alone: projections, norms, feed-forward, loss. ``each`` applies such a function
to a tensor, or to every shard of ``Shards``. Two things need more: RoPE wants the global positions of the tokens, and
attention wants to know which ranks hold the rest of the sequence. A ``Split`` says both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layouts import Layout, contiguous
from ..worlds.world import Shards, World, take
from .inputs import check_alike

IGNORE = -100  # the target of a token that has none, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Split:
    """The global positions of the tokens that this process holds, and the ranks that hold the others.

    positions: int64 (n,), or Shards of them.  layout, world: those of this rank's plain local tensors; None for Shards,
    which have their own, and on one device.
    """

    positions: Tensor | Shards
    layout: Layout | None = None
    world: World | None = None

    @classmethod
    def of(cls, x: Tensor | Shards, dim: int = -2, layout: Layout | None = None, world: World | None = None) -> Split:
        """The split of a batch: x is a tensor on one device, Shards, or this rank's tokens with layout and world.

        dim: the sequence dim of x. The length of the whole sequence is the sum over the ranks, which exchange their
        lengths, so all of them make this call.  Raises ValueError if layout and world do not fit.

        >>> Split.of(torch.zeros(2, 3, 8)).positions
        tensor([0, 1, 2])
        """
        if isinstance(x, Shards):
            if layout is not None or world is not None:
                raise ValueError("expected Shards alone, which have their layout and world; omit layout= and world=")
            return cls(Shards(x.positions, x.world, x.layout, x.length, dim=-1))
        if (layout is None) != (world is None):
            raise ValueError(
                f"expected both layout and world, to say which tokens of the sequence a plain tensor holds, or none of "
                f"them on one device; got layout={layout}, world={world}"
            )
        if world is None:
            return cls(torch.arange(x.shape[dim], device=x.device))
        known = world.agree("model", {"layout": str(layout)}, {"tokens": x.shape[dim]})
        tokens = [rank["tokens"] for rank in known] * (world.size // len(known))  # an unchecked world: all the same
        ranges = layout.ranges(sum(tokens), world.size)
        if [sum(map(len, r)) for r in ranges] != tokens:
            raise ValueError(
                f"the ranks hold {tokens} tokens; for {sum(tokens)} in all, layout {layout} has "
                f"{[sum(map(len, r)) for r in ranges]}. Split them with shard_tokens(world, tokens, layout=...)"
            )
        return cls(layout.positions(sum(tokens), world.size, world.ranks[0], x.device), layout, world)


def each(fn: Callable[..., Tensor], *xs: Tensor | Shards, dim: int = -2) -> Tensor | Shards:
    """``fn(*tensors)``, or Shards of the results of fn for every rank's tensors.

    dim: the sequence dim of the result.  Raises ValueError if the Shards do not hold the same positions.

    >>> each(torch.add, torch.ones(2), torch.ones(2))
    tensor([2., 2.])
    """
    check_alike("each", *xs)
    first = xs[0]
    if not isinstance(first, Shards):
        return fn(*xs)
    parts = zip(*(x.tensors for x in xs), strict=True)
    return Shards([fn(*tensors) for tensors in parts], first.world, first.layout, first.length, dim)


def shard_tokens(world: World, *tokens: Tensor, layout: Layout = contiguous, src: int | None = None) -> Any:
    """Split token ids, or any other tensor (..., S), along the last dim: ``world.shard`` for tensors without a dim D.

    Pass targets as well, shifted before the split (``next_tokens``): then the shift is right at every shard border.

    >>> import ringlearn as rl
    >>> tokens = torch.tensor([[5, 6, 7, 8]])
    >>> x, y = shard_tokens(rl.SimulatedWorld(2), tokens, next_tokens(tokens), layout=rl.striped)
    >>> x.tensors, y.tensors
    ([tensor([[5, 7]]), tensor([[6, 8]])], [tensor([[6, 8]]), tensor([[   7, -100]])])
    """
    shards = world.shard(*(t.unsqueeze(-1) if isinstance(t, Tensor) else t for t in tokens), layout=layout, src=src)
    shards = (shards,) if len(tokens) == 1 else shards
    result = tuple(Shards([t.squeeze(-1) for t in x.tensors], world, x.layout, x.length, dim=-1) for x in shards)
    return result if len(result) > 1 else result[0]


def next_tokens(tokens: Tensor | Shards) -> Tensor | Shards:
    """What each position has to predict: the token at the next *global* position, IGNORE at the end of the sequence.

    tokens: (B, S), or Shards of it in any layout. The successor of a rank's last token is on another rank, and with the
    striped layout so is that of every token. Token ids are few bytes, so Shards are put together and split again.
    Raises ValueError if these are not token ids.

    >>> next_tokens(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    if not all(_are_ids(t) for t in (tokens.tensors if isinstance(tokens, Shards) else [tokens])):
        raise ValueError(f"next_tokens: expected token ids, int64 (B, S), or Shards from shard_tokens, got {tokens!r}")
    if isinstance(tokens, Shards):
        if tokens.dim != -1:
            raise ValueError("next_tokens: expected Shards that are split along their last dim, as by shard_tokens")
        full = next_tokens(tokens.unshard())
        parts = [take(full, tokens.ranges[rank], -1) for rank in tokens.world.ranks]
        return Shards(parts, tokens.world, tokens.layout, tokens.length, dim=-1)
    if tokens.shape[-1] == 0:
        return tokens.clone()
    return torch.cat([tokens[..., 1:], torch.full_like(tokens[..., :1], IGNORE)], -1)


def _are_ids(x: object) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)

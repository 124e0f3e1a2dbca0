"""Blockwise computation: a function of each token alone runs block by block, and once more in the backward.

The feed-forward makes activations four times as wide as the model, the loss as wide as the vocabulary. Attention is
not what fills the memory of a long sequence, once it is computed in tiles: these are. Neither mixes tokens, so a block
of the sequence is computed, its result kept, and everything between forgotten; the backward computes it anew, one block
at a time.

Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models", section 3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .inputs import check_sizes


def each_block(fn: Callable[..., Tensor], *xs: Tensor, block: int) -> list[Tensor]:
    """fn of every ``block`` tokens of xs, which are (B, s, ...); what fn makes inside is forgotten until the backward.

    fn must not use random numbers. Returns a result for each block, at least one: a rank without tokens has an empty
    block, so that gradients (zeros) reach its parameters as they do on every other rank. Raises ValueError unless block
    is an int >= 1.

    >>> [float(x) for x in each_block(torch.sum, torch.ones(1, 5, 2), block=2)]
    [4.0, 4.0, 2.0]
    """
    check_sizes("in_blocks", block=block)
    blocks = zip(*(x.split(block, 1) for x in xs), strict=True)
    return [checkpoint(fn, *parts, use_reentrant=False, preserve_rng_state=False) for parts in blocks]


def in_blocks(fn: Callable[..., Tensor], *xs: Tensor, block: int) -> Tensor:
    """``fn(*xs)`` of a function of each token alone, ``block`` tokens at a time; xs are (B, s, ...).

    >>> in_blocks(torch.exp, torch.zeros(1, 5, 2), block=2).shape
    torch.Size([1, 5, 2])
    """
    results = each_block(fn, *xs, block=block)
    return torch.cat(results, 1) if len(results) > 1 else results[0]

"""Self-attention as a layer, over a sequence that one device holds or that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import KVCache, decode_attention, prefill_attention, ring_attention
from ..kernels import alibi_slopes, scores_of
from ..masks import Mask, causal, full
from ..worlds import Shards, SimulatedWorld
from .inputs import check_activations, check_heads
from .layers import join_heads, rope, split_heads
from .split import Split, each


def attention_anywhere(
    q: Any, k: Any, v: Any, split: Split, mask: Mask, strategy: Callable[..., Any], **scores: Any
) -> Any:
    """Attention of q over k and v, wherever they are; all that a layer needs to know about ranks is in here.

    q: (B, H, n, D), k, v: (B, G, n, D), as tensors on one device, Shards, or local tensors of a distributed world.
    scores: those of sinks, softcap and alibi that are used, as for ``rl.ring_attention``: a strategy need not know the
    others.
    """
    if isinstance(q, Shards):
        return strategy(q, k, v, mask=mask, **scores)
    if split.world is not None:
        return strategy(q, k, v, mask=mask, **scores, layout=split.layout, world=split.world)
    if mask in (full, causal) and not scores:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask == causal, enable_gqa=q.shape[1] != k.shape[1])
    world = SimulatedWorld(1, device=q.device, count_memory=False)  # what SDPA has not: a ring of one, tile by tile
    return ring_attention(*world.shard(q, k, v), mask=mask, **scores).unshard()


def behind(x: Tensor | Shards, cache: KVCache, dim: int = -2) -> Split:
    """The positions of tokens that follow those in a cache: (B, n) of a tensor, whose sequences may differ in length.

    dim: the sequence dim of x.  Raises ValueError for Shards that follow sequences of different lengths.
    """
    if not isinstance(x, Shards):
        new = torch.arange(x.shape[dim], device=x.device)
        return Split(cache.lengths_on_device[:, None] + new)
    if len(set(cache.lengths)) > 1:
        raise ValueError(
            f"expected sequences of one length before a prefill by shards, got {cache.lengths}; give "
            f"the new tokens as a tensor, the same on every rank"
        )
    return Split(Shards([p + cache.lengths[0] for p in x.positions], x.world, x.layout, x.length, dim=-1))


class Attention(nn.Module):
    """Multi-head self-attention with RoPE and grouped-query heads.

    width: of the model, divisible by heads.  heads: H.  kv_heads: G, which divides H; H if None.
    mask: which keys a query sees, by global position.  rope_base: the base of the RoPE angles; None for no RoPE.
    strategy: how attention is computed over ranks: a function with the arguments of ``rl.ring_attention`` that computes
    exact attention under the mask. On one device SDPA computes the same, or a ring of one rank where SDPA cannot.
    sinks: whether each query head learns a score without a value, the parameter ``sinks`` (H,), which starts at 0.
    softcap: c, if scores are capped to c * tanh(score / c).
    alibi: whether scores are lowered with the distance between query and key, by ``rl.alibi_slopes(heads)``; usually
    combined with rope_base=None.

    Raises ValueError if the sizes do not fit together.

    >>> import torch, ringlearn as rl
    >>> layer, x = Attention(64, 8, kv_heads=2), torch.randn(2, 100, 64)
    >>> layer(x).shape
    torch.Size([2, 100, 64])
    >>> out = layer(rl.SimulatedWorld(3).shard(x, layout=rl.zigzag))
    >>> torch.allclose(out.unshard(), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        mask: Mask = causal,
        strategy: Callable[..., Any] = ring_attention,
        rope_base: float | None = 10000.0,
        sinks: bool = False,
        softcap: float | None = None,
        alibi: bool = False,
    ):
        super().__init__()
        width, heads, kv_heads = check_heads("Attention", width, heads, kv_heads)
        if not callable(strategy):
            raise ValueError(f"Attention: expected strategy to be a function like rl.ring_attention, got {strategy!r}")
        self.width, self.D = width, width // heads
        if rope_base is not None and self.D % 2:
            raise ValueError(f"Attention: RoPE rotates pairs, so width / heads must be even, got {self.D}")
        scores_of("Attention", heads, softcap, None)
        self.mask, self.strategy, self.rope_base = mask, strategy, rope_base
        self.softcap, self.alibi = softcap, alibi_slopes(heads) if alibi else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.q = nn.Linear(width, heads * self.D, bias=False)
        self.k = nn.Linear(width, kv_heads * self.D, bias=False)
        self.v = nn.Linear(width, kv_heads * self.D, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor | Shards, split: Split | None = None, cache: KVCache | None = None) -> Tensor | Shards:
        """(B, n, width) in and out.

        split: the positions of the tokens; taken from x if None. Local tensors need it.
        cache: if given, x holds the tokens that follow what is in the cache, and their keys and values are appended to
        it. x is then either Shards (many tokens, after sequences that are all equally long so far) or a tensor (a few
        tokens, the same on every rank). No gradient is recorded.
        """
        check_activations("Attention", x, self.width)
        split = split or (Split.of(x) if cache is None else behind(x, cache))
        q = each(lambda x, p: self._turn(split_heads(self.q(x), self.D), p), x, split.positions)  # (B, H, n, D)
        k = each(lambda x, p: self._turn(split_heads(self.k(x), self.D), p), x, split.positions)  # (B, G, n, D)
        v = each(lambda x: split_heads(self.v(x), self.D), x)  # (B, G, n, D)
        scores = dict(sinks=self.sinks, softcap=self.softcap, alibi=self.alibi)
        scores = {name: x for name, x in scores.items() if x is not None}
        if cache is None:
            out = attention_anywhere(q, k, v, split, self.mask, self.strategy, **scores)
        else:
            with cache.restored_on_failure():
                out = self._cached(q, k, v, split, cache, scores)
        return each(lambda out: self.out(join_heads(out)), out)

    def _cached(self, q: Any, k: Any, v: Any, split: Split, cache: KVCache, scores: dict[str, Any]) -> Any:
        if split.world is not None:
            raise ValueError("Attention: with cache= expected Shards, or a tensor that is the same on every rank")
        if self.alibi is not None:
            raise ValueError("Attention: alibi is not supported with a cache; compute the whole sequence without one")
        if not isinstance(q, Shards):
            cache.append(k, v)
            return decode_attention(q, cache, self.mask, **scores)
        if any(cache.lengths):
            out = prefill_attention(q, k, v, cache, self.mask, **scores)
        else:
            out = self.strategy(q, k, v, mask=self.mask, **scores)
        cache.append(k, v)
        return out

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rope_base is None else rope(x, positions, self.rope_base)

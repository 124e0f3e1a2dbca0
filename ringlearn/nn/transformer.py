"""A transformer over a sequence that is split over ranks, blockwise: nothing is S x 4d or S x vocabulary.

The same text runs on one device, in a simulated world and on the ranks of a distributed one. Only attention talks to
other ranks; parameters are the same on all of them.

Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models"; Liu, Zaharia and Abbeel 2023,
"Ring Attention with Blockwise Transformers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import KVCache, ring_attention
from ..fingerprint import checksum
from ..kernels import scores_of
from ..layouts import Layout, zigzag
from ..masks import Mask, causal
from ..worlds import Shards
from ..worlds.world import World
from .attention import Attention, behind
from .inputs import check_alike, check_sizes
from .layers import FeedForward, RMSNorm, fitting_block, in_blocks, loss_sum
from .split import Split, each, shard_tokens


@dataclass(frozen=True)
class Config:
    """The sizes of a model.

    vocabulary: 256 for bytes.  kv_heads: G; H if None.  hidden: of the feed-forward; 4 width if None.
    block: how many tokens of each sequence feed-forward and loss process at a time; if None, as many as suit the device
    (512 on a CPU; on a GPU up to 8,192 over all sequences).
    checkpoint: whether the backward recomputes each layer, including its messages, so that only the layers' inputs are
    kept.
    sinks, softcap, alibi: for every layer's attention, as in ``Attention``; with alibi there is no RoPE.

    Raises ValueError unless sizes are ints >= 1, and softcap None or a finite number > 0.
    """

    vocabulary: int = 256
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    block: int | None = None
    rope_base: float = 10000.0
    checkpoint: bool = False
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False

    def __post_init__(self):
        optional = ("kv_heads", "hidden", "block")
        given = {name: getattr(self, name) for name in ("vocabulary", "width", "layers", "heads", *optional)}
        sizes = {name: x for name, x in given.items() if x is not None or name not in optional}
        for name, size in zip(sizes, check_sizes("Config", **sizes), strict=True):
            object.__setattr__(self, name, size)  # Python's int, whatever kind of integer came
        scores_of("Config", self.heads, self.softcap, None)

    def tokens_at_a_time(self, x: Tensor) -> int:
        """How many tokens of each sequence feed-forward and loss process at a time; x: (B, n, ...)."""
        return self.block or fitting_block(x.device, x.shape[0], max(self.hidden or 4 * self.width, self.vocabulary))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); (B, n, width) in and out."""

    def __init__(self, config: Config, mask: Mask, strategy: Callable[..., Any]):
        super().__init__()
        c = config
        self.norm1, self.norm2 = RMSNorm(c.width), RMSNorm(c.width)
        scores = dict(sinks=c.sinks, softcap=c.softcap, alibi=c.alibi, rope_base=None if c.alibi else c.rope_base)
        self.attention = Attention(c.width, c.heads, c.kv_heads, mask=mask, strategy=strategy, **scores)
        self.feed_forward, self.config = FeedForward(c.width, c.hidden), c

    def forward(self, x: Tensor | Shards, split: Split, cache: KVCache | None = None) -> Tensor | Shards:
        x = each(torch.add, x, self.attention(each(self.norm1, x), split, cache))
        return each(lambda x: in_blocks(self._feed_forward, x, block=self.config.tokens_at_a_time(x)), x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """A decoder-only language model.

    mask, strategy: for its attention, as in ``rl.nn.Attention``.

    >>> import torch, ringlearn as rl
    >>> from ringlearn.nn import Config, Transformer, next_tokens, shard_tokens
    >>> model = Transformer(Config(width=32, layers=2, heads=4, kv_heads=2))
    >>> tokens = torch.randint(256, (1, 50))
    >>> shards = shard_tokens(rl.SimulatedWorld(3), tokens, next_tokens(tokens), layout=rl.zigzag)
    >>> torch.allclose(model(*shards), model(tokens, next_tokens(tokens)))  # the sum of 49 losses
    True
    """

    def __init__(self, config: Config, mask: Mask = causal, strategy: Callable[..., Any] = ring_attention):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config, mask, strategy) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # what adds to the residual stream starts smaller in a deeper model, as in GPT-2
                adds = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(p, std=(p.shape[1] * (2 * config.layers if adds else 1)) ** -0.5)

    def forward(
        self,
        tokens: Tensor | Shards,
        targets: Tensor | Shards | None = None,
        *,
        layout: Layout | None = None,
        world: World | None = None,
        cache: Sequence[KVCache] | None = None,
    ) -> Any:
        """The sum of the losses of this process's tokens; without targets the logits (B, n, vocabulary).

        tokens, targets: int64 (B, S) on one device, Shards of them, or this rank's (B, n) with layout and world. The
        logits are Shards if this process owns several ranks, otherwise a tensor, because DDP and FSDP2 look for tensors
        in a module's output and would overlook Shards.
        In a distributed world every rank makes this call, and if one needs the gradient, every rank must enter the
        backward; ``rl.nn.backward`` ensures this, and divides by the number of tokens that all ranks have.
        cache: made by ``new_cache``. The tokens follow those in the cache, and are appended to it: Shards of many
        tokens, or a tensor (B, T) of a few, the same on every rank, which gives the same logits (B, T, vocabulary) on
        every rank. Call it under ``torch.no_grad()``. Before a few tokens are computed the ranks compare them, once for
        all layers. A call can be captured as a CUDA graph and replayed (``KVCache.reserve``); replays compare nothing.
        """
        if cache is not None:
            return each(self._logits, self._continued(tokens, targets, layout, world, cache))
        _agree(tokens, targets, world)
        split, tokens, targets = _local(tokens, targets, layout, world)
        x = each(self.embedding, tokens)
        for layer in self.layers:
            if self.config.checkpoint and torch.is_grad_enabled():
                x = checkpoint(layer, x, split, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, split)
        if targets is None:
            return each(self._logits, x)
        parts = zip(*(t.tensors if isinstance(t, Shards) else [t] for t in (x, targets)), strict=True)
        return sum(loss_sum(self._logits, x, t, block=self.config.tokens_at_a_time(x)) for x, t in parts)

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    # Generation

    def new_cache(self, world: World, batch: int, capacity: int, **options: Any) -> list[KVCache]:
        """An empty cache for each layer, shared out over the ranks of a world.

        capacity: the most tokens that each of ``batch`` sequences can have.  options: for ``rl.KVCache``, such as
        page=.
        """
        c, weight = self.config, self.head.weight
        heads, dim = c.kv_heads or c.heads, c.width // c.heads
        return [KVCache(world, batch, heads, dim, capacity, dtype=weight.dtype, **options) for _ in self.layers]

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        new_tokens: int,
        world: World,
        *,
        temperature: float = 0.0,
        stop: int | None = None,
        layout: Layout = zigzag,
        interleave: int = 16,
        on_token: Callable[[Tensor], Any] | None = None,
    ) -> Tensor:
        """Continue prompts: from (B, S) to at most (B, S + new_tokens), the same on every rank. All ranks call this.

        The ranks read the prompt together, by shards, and share out its keys and values. Every rank then computes the
        newest token, and rank 0 chooses the next one.

        tokens: int64 (B, S), S >= 1, the same on every rank.  temperature: 0 to take the likeliest token; otherwise
        logits are divided by it before a token is drawn.  stop: a token that ends a sequence, which is then padded with
        it; the call ends when all sequences have ended.  layout: how the prompt is split.  interleave: as in
        ``rl.KVCache``.
        on_token: called with each new token (B,) on rank 0, as it comes.
        Raises ValueError on every rank if an argument makes no sense or differs between ranks.

        >>> import torch, ringlearn as rl
        >>> model = rl.nn.Transformer(rl.nn.Config(width=32, layers=2))
        >>> model.generate(torch.randint(256, (1, 50)), 10, rl.SimulatedWorld(3)).shape
        torch.Size([1, 60])
        """
        op, problem, same = "generate", None, {}
        try:
            _check_generation(op, tokens, new_tokens, temperature, stop)
            if world.check:
                same = {"values of tokens": f"{tuple(tokens.shape)} {checksum(tokens)}", "new_tokens": str(new_tokens)}
                same |= {"temperature": repr(temperature), "stop": repr(stop), "layout": str(layout)}
        except Exception as error:  # the other ranks must hear of it
            problem = error
        world.agree(op, same, {}, problem)
        tokens = tokens.to(world.device)
        B, S = tokens.shape
        cache, first = self.new_cache(world, B, S + new_tokens, interleave=interleave), 0 in world.ranks
        if S > 1:
            self._continued(shard_tokens(world, tokens[:, :-1], layout=layout), None, None, None, cache)
        ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)
        for _ in range(new_tokens):
            logits = self(tokens[:, -1:], cache=cache)[:, -1]
            if temperature:
                wide = torch.promote_types(logits.dtype, torch.float32)
                chosen = torch.multinomial((logits.to(wide) / temperature).softmax(-1), 1)[:, 0]
            else:
                chosen = logits.argmax(-1)
            if stop is not None:
                chosen = chosen.masked_fill(ended, stop)
            chosen = world.replicate([chosen], src=0)[0]
            if on_token is not None and first:
                on_token(chosen)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            if stop is not None:
                ended |= chosen == stop
                if bool(ended.all()):
                    break
        return tokens

    def _continued(self, tokens: Any, targets: Any, layout: Any, world: Any, cache: Sequence[KVCache]) -> Any:
        """The last activations of tokens that follow those in a cache, to which they are appended."""
        known = cache[0].world
        problem, same, new = None, {}, not isinstance(tokens, Shards)
        try:
            _check_tokens(tokens, None)
            if len(cache) != len(self.layers):
                raise ValueError(
                    f"Transformer: expected a cache for each of {len(self.layers)} layers, got {len(cache)}"
                )
            if self.config.alibi:
                raise ValueError("Transformer: alibi is not supported with a cache; recompute the whole sequence")
            if targets is not None or layout is not None or world is not None:
                raise ValueError("Transformer: with cache= expected tokens alone, Shards or the same on every rank")
            if new and known.check and not cache[0].capturing:
                same = {"tokens": f"{tuple(tokens.shape)} {checksum(tokens)}", "cached lengths": str(cache[0].lengths)}
                cache[0].check_room(tokens.shape[1])
        except Exception as error:  # the other ranks must hear of it
            problem = error
        known.agree("Transformer", same, {}, problem)
        with known.settled() if new else nullcontext(), ExitStack() as stack:
            for kept in cache:
                stack.enter_context(kept.restored_on_failure())
            split = behind(tokens, cache[0], dim=-1)
            x = each(self.embedding, tokens)
            for layer, kept in zip(self.layers, cache, strict=True):
                x = layer(x, split, kept)
        return x


def _check_generation(op: str, tokens: Any, new_tokens: Any, temperature: Any, stop: Any) -> None:
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        got = f"{tuple(tokens.shape)} in {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{op}: expected tokens (B, S) in int64, at least one for each sequence, got {got}")
    check_sizes(op, new_tokens=new_tokens)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(f"{op}: expected temperature to be a number >= 0, got {temperature!r}")
    if stop is not None and (isinstance(stop, bool) or not isinstance(stop, int)):
        raise ValueError(f"{op}: expected stop to be None or a token, got {stop!r}")


def _agree(tokens: Any, targets: Any, world: World | None) -> None:
    """Raise ValueError if these are no batch; the other ranks, which wait in a call of theirs, hear of it."""
    try:
        _check_tokens(tokens, targets)
    except ValueError as problem:
        worlds = [x.world for x in (tokens, targets) if isinstance(x, Shards)] or [world]
        if isinstance(worlds[0], World):
            worlds[0].agree("Transformer", {}, {}, problem)
        raise


def _check_tokens(tokens: Any, targets: Any) -> None:
    """Raise ValueError unless these are token ids and, if there are any, the targets of the same tokens."""
    given = [tokens] if targets is None else [tokens, targets]
    check_alike("Transformer", *given)
    parts = [x.tensors if isinstance(x, Shards) else [x] for x in given]
    for name, tensors, dtypes in zip(("tokens", "targets"), parts, ((torch.int64, torch.int32), (torch.int64,))):
        for t in tensors:
            if t.dim() != 2 or t.dtype not in dtypes:
                raise ValueError(f"Transformer: expected {name} (B, S) in int64, got {tuple(t.shape)} in {t.dtype}")
    for pair in zip(*parts, strict=True):
        if len({t.shape for t in pair}) > 1:
            raise ValueError(f"Transformer: expected a target for each token, got {' and '.join(map(_shape, pair))}")


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))


def _local(tokens: Any, targets: Any, layout: Layout | None, world: World | None) -> tuple[Split, Any, Any]:
    """Shards of a process that owns one rank become plain tensors."""
    split = Split.of(tokens, -1, layout, world)
    if isinstance(tokens, Shards) and len(tokens.tensors) == 1:
        split = Split(split.positions.local, tokens.layout, tokens.world)
        tokens, targets = tokens.local, None if targets is None else targets.local
    return split, tokens, targets

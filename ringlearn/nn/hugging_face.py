"""The ring under a model of Hugging Face transformers, through its attention interface. The model stays as it is.

Everything in a decoder but attention acts on each token alone. So a rank runs the model on its own tokens, as if they
were a short sequence, and three things tell it of the others: ``position_ids`` carry the global positions (RoPE),
``attn_implementation="ringlearn"`` makes attention a ring, and the labels are shifted before the sequence is split, so
that the last token of a shard is scored against the first of the next.

    from ringlearn.hugging_face import register, split

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringlearn")
    batch = split(model, world, input_ids, labels)
    batch.loss(model(**batch).logits).backward()   # this rank's part of the mean loss
    rl.nn.sum_gradients(model.parameters())        # or DDP, FSDP2: see Batch.loss

Which tokens a rank holds travels with the call (``ringlearn=`` among the model's arguments, which transformers hands
on to attention), so there is no state, and layers that the backward computes anew find it too.

Source: transformers, "Attention Interface" in its documentation; sum of losses over count as in ``rl.nn.gradients``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import ring_attention
from ..layouts import Layout, count, zigzag
from ..masks import And, Mask, SlidingWindow, causal, full, sliding_window
from ..worlds import Shards
from ..worlds.world import World
from .split import IGNORE, next_tokens, shard_tokens

NAME = "ringlearn"
_OP = "attention of a transformers model"
# What models hand to attention beside q, k and v, and what changes nothing: positions are in q and k already.
_KNOWN = {
    "cache_position",
    "layer_type",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
}
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.ZeroPad2d)  # layers that look at neighbouring tokens


def register() -> str:
    """Make ``attn_implementation="ringlearn"`` known to transformers; gives that name. Twice is the same as once.

    Raises ImportError if transformers (version 5 or newer) is not installed.

    >>> register()
    'ringlearn'
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "ringlearn.hugging_face needs transformers 5 or newer: pip install 'ringlearn[transformers]'"
        ) from error
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


class Batch(dict):
    """What this process's ranks give to the model, ``model(**batch)``; made by ``split``.

    Its items are the arguments: input_ids and position_ids, int64 (B, s), of the tokens that this process holds, rank
    after rank if it simulates several.  targets: int64 (B, s), what they predict.  count: how many tokens have a
    target, on all ranks.
    """

    def __init__(self, split: _Split, targets: Tensor, count: int, arguments: Mapping[str, Any]):
        super().__init__(arguments, **{NAME: split})
        self.targets, self.count, self._split = targets, count, split

    def loss(self, logits: Tensor) -> Tensor:
        """This process's part of the mean loss over all tokens that have a target: its parts add up over the ranks.

        logits: (B, s, vocabulary) of ``model(**batch)``; float64 stays, everything else is computed in float32. All
        ranks call ``backward`` on it, one without targets too. Gradients are to be summed over ranks, which
        ``rl.nn.sum_gradients`` does. DDP and FSDP2 divide the sum by the number of ranks: multiply the loss by it.
        """
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        total = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return total / max(self.count, 1)

    def unshard(self, x: Tensor) -> Tensor:
        """(B, s, ...) of this process's tokens, such as logits, to (B, S, ...) of all in their order, on every rank."""
        return self._split.shards(x, 1).unshard()


class _Split:
    """How the sequence of a batch is split: what attention has to know."""

    def __init__(self, world: World, layout: Layout, length: int, mask: Mask, strategy: Callable[..., Any]):
        self.world, self.layout, self.length, self.mask, self.strategy = world, layout, length, mask, strategy
        ranges = layout.ranges(length, world.size)
        self.lengths = [count(ranges[rank]) for rank in world.ranks]
        # Models cannot compute with no tokens at all: where there are none, one stands in, which nobody sees.
        self.standing_in = int(sum(self.lengths) == 0)
        self.tokens = sum(self.lengths) + self.standing_in

    def shards(self, x: Tensor, dim: int) -> Shards:
        """x of this process's tokens, rank after rank along dim, as one shard for each of its ranks."""
        own = x.narrow(dim, 0, sum(self.lengths))
        return Shards(own.split(self.lengths, dim), self.world, self.layout, self.length, dim - x.dim())


def split(
    model: nn.Module,
    world: World,
    input_ids: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    layout: Layout = zigzag,
    mask: Mask = full,
    strategy: Callable[..., Any] = ring_attention,
    count: int | None = None,
) -> Batch:
    """Split a batch over the ranks of a world. Every rank passes the whole batch, the same one, and gets its own part.

    model: a causal language model of transformers with ``attn_implementation="ringlearn"``; DDP or FSDP2 may wrap it.
    input_ids: int64 (B, S), any S.  labels: int64 (B, S) as transformers wants them, not shifted, -100 for tokens that
    are not to be predicted; without them no token has a target.
    attention_mask: (B, S), 1 for tokens and 0 for padding, which must be on the right: a causal model's tokens never
    see what comes after them, so padding needs no mask but that it is not predicted, and labels there become -100.
    position_ids: (B, S) or (1, S), for packed documents whose positions start anew; then mask= must say where they end.
    mask: what a query may see beside what the model's own mask says (causal, sliding window): documents(lengths).
    strategy: how attention is computed over ranks, a function with the arguments of ``rl.ring_attention``.
    count: by how many tokens the loss is divided, for a step of several batches; those of this batch with a target if
    None.

    Raises ValueError on every rank if the model, or the batch, needs what is not supported, or if batches differ.

    >>> import torch, ringlearn as rl
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation=register())
    >>> tokens = torch.randint(99, (2, 50))
    >>> batch = split(model, rl.SimulatedWorld(3), tokens, labels=tokens)
    >>> logits = model(**batch).logits
    >>> batch.loss(logits).backward()
    >>> batch.unshard(logits).shape, batch.count
    (torch.Size([2, 50, 99]), 98)
    """
    problem, B, S = None, 0, 0
    try:
        _check_world(world)
        _check_batch(input_ids, labels, attention_mask, position_ids, mask)
        B, S = input_ids.shape
        positions = torch.arange(S).expand(B, S) if position_ids is None else position_ids.cpu().expand(B, S)
        _check_model(model, int(positions.max()) + 1 if positions.numel() else 0)
        if position_ids is None:
            _check_first_position(model, S)
    except Exception as error:  # the other ranks must hear of it
        if not isinstance(world, World):
            raise
        problem = error
    world.agree("split", {"count": str(count)}, {}, problem)
    targets = torch.full_like(input_ids, IGNORE) if labels is None else labels
    if attention_mask is not None:
        targets = targets.masked_fill(attention_mask == 0, IGNORE)
    targets = next_tokens(targets)
    parts = shard_tokens(world, input_ids, positions.to(input_ids.device), targets, layout=layout)
    here = _Split(world, layout, S, mask, strategy)
    ids, places, wanted = (torch.cat(x.tensors, -1) for x in parts)  # one after the other, if several ranks are here
    ids, places = (F.pad(x, (0, here.standing_in)) for x in (ids, places))
    wanted = F.pad(wanted, (0, here.standing_in), value=IGNORE)
    arguments = {
        "input_ids": ids,
        "position_ids": places,
        "attention_mask": torch.ones_like(ids),  # else transformers takes jumps of positions for packed documents
        "use_cache": False,
    }
    count = int((targets != IGNORE).sum()) if count is None else count
    return Batch(here, wanted, count, arguments)


# --- what transformers calls --------------------------------------------------------------------------------------


def _mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **said: Any,
) -> Mask | ValueError:
    """What a layer of the model may see, once for each forward; transformers hands it to attention as it is.

    A problem is returned: attention can tell the other ranks.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        return ValueError("an attention_mask with zeros reached the model; give it to split(..., attention_mask=)")
    if said.get("use_vmap") or not said.get("allow_is_causal_skip"):
        return ValueError("the model's mask is not causal, or has parts of its own; only causal models are supported")
    if local_size is None:
        return causal
    if local_size < 1:  # made, and used by no layer, where a model's config has windows switched off
        return ValueError(f"the layer has a sliding window of {local_size} tokens")
    own = causal & sliding_window(local_size)
    q = torch.tensor([[n * local_size + d] for n in (1, 2) for d in (-1, 0, 1)])  # a few at the edges tell them apart
    k = torch.cat([torch.zeros_like(q), q - local_size, q - local_size + 1, q, q + 1], 1).clamp(min=0)
    if torch.equal(mask_function(0, 0, q, k), own(q, k)):
        return own
    return ValueError(
        f"the model's mask is no sliding window but chunks of {local_size} tokens; say mask= of documents"
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """query: (B, H, s, D), key, value: (B, G, s, D) of this process's tokens. Returns (B, s, H, D_v)."""
    here = more.pop(NAME, None)
    if not isinstance(here, _Split):
        raise ValueError(
            f'attn_implementation="{NAME}": the model was called without saying which tokens these are; call '
            f'model(**split(model, world, input_ids, ...)), or model.set_attn_implementation("sdpa") on one device. If '
            f"it was called so, it does not hand its arguments on to attention, and is not supported"
        )
    problem = _unsupported(here, query, key, attention_mask, dropout, more)
    if problem is not None:
        here.world.agree(_OP, {}, {}, ValueError(f"{_OP}: {problem}"))
    mask = attention_mask if here.mask == full else attention_mask & here.mask
    q, k, v = (here.shards(x, 2) for x in (query, key, value))
    out = here.strategy(q, k, v, mask=mask, scale=None if scaling is None else float(scaling))
    out = F.pad(torch.cat(out.tensors, 2), (0, 0, 0, here.standing_in))
    return out.transpose(1, 2).contiguous(), None  # as transformers' own: some models view it


def _unsupported(here: _Split, q: Tensor, k: Tensor, mask: Any, dropout: float, more: Mapping[str, Any]) -> str | None:
    if isinstance(mask, ValueError):
        return str(mask)
    if not isinstance(mask, Mask):
        return f"expected a mask that transformers made, got {type(mask).__name__}; give masks to split(..., mask=)"
    if more.pop("use_cache", False) or q.shape[2] != k.shape[2]:
        return "a KV cache and cross-attention are not supported; call the model with use_cache=False, as split says"
    if q.shape[2] != here.tokens:
        return f"expected the {here.tokens} tokens of the batch, got {q.shape[2]}; the model added or left out some"
    if dropout:
        return f"dropout inside attention is not supported, got {dropout}; set config.attention_dropout = 0.0"
    window = more.pop("sliding_window", None)
    if window is not None and window not in {part.width for part in _parts(mask) if isinstance(part, SlidingWindow)}:
        return f"the layer has sliding_window={window}, its mask is {mask}"
    if more.pop("is_causal", None) is False:
        return "attention that is not causal is not supported"
    for name, value in more.items():
        if name not in _KNOWN and value is not None and value is not False:
            return f"got {name}, which is not supported"
    return None


def _parts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _parts(mask.a)
        yield from _parts(mask.b)
    else:
        yield mask


# --- what split refuses -------------------------------------------------------------------------------------------


def _check_world(world: Any) -> None:
    if not isinstance(world, World):
        raise ValueError(f"split: expected a SimulatedWorld or a DistributedWorld, got {world!r}")


def _check_batch(ids: Any, labels: Any, padding: Any, positions: Any, mask: Any) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"split: expected input_ids to be an int64 tensor (B, S), got {_shape(ids)}")
    for name, x in (("labels", labels), ("attention_mask", padding)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != ids.shape):
            raise ValueError(f"split: expected {name} like input_ids, {tuple(ids.shape)}, got {_shape(x)}")
    if not isinstance(mask, Mask):
        raise ValueError(f"split: expected mask= to be a mask such as rl.documents(lengths), got {mask!r}")
    if padding is not None and bool((padding.long().diff(dim=1) > 0).any()):
        raise ValueError(
            "split: expected padding on the right, where no token of a causal model sees it, got attention_mask with a "
            'one after a zero; set tokenizer.padding_side = "right"'
        )
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.shape not in (ids.shape, (1, ids.shape[1])):
            raise ValueError(f"split: expected position_ids (B, S) or (1, S), got {_shape(positions)}")
        if mask == full and bool((positions.diff(dim=1) != 1).any()):
            raise ValueError(
                "split: position_ids start anew, as those of packed documents do, which would see each other; give "
                "mask=rl.documents(lengths) too"
            )


def _check_model(model: Any, length: int) -> None:
    from transformers import PreTrainedModel

    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)] if isinstance(model, nn.Module) else []
    if not models:
        raise ValueError(f"split: expected a model of transformers, got {type(model).__name__}")
    for m in models:
        name, config = type(m).__name__, m.config
        if not m._supports_attention_backend:
            raise ValueError(f"split: {name} does not use the attention interface of transformers; it is not supported")
        if config._attn_implementation != NAME:
            raise ValueError(
                f'split: expected attn_implementation="{NAME}", got "{config._attn_implementation}" of {name}, with '
                f'which ranks would not see each other; model.set_attn_implementation("{NAME}") after register()'
            )
        if "position_ids" not in inspect.signature(m.forward).parameters:
            raise ValueError(f"split: {name} takes no position_ids, so it cannot know where its tokens are")
        for kind in getattr(config, "layer_types", None) or ():
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"split: {name} has layers of type {kind}, which are not supported")
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                "split: the router's loss is no sum over tokens, so it does not add up over ranks; set "
                "config.output_router_logits = False"
            )
        _check_rope(config, length)
    for name, m in model.named_modules():
        if isinstance(m, _MIXERS):
            raise ValueError(
                f"split: {name} is a {type(m).__name__}, which mixes neighbouring tokens; only attention may, because "
                f"ranks hold their tokens apart"
            )


def _check_first_position(model: nn.Module, S: int) -> None:
    """RoBERTa and its kin count from the padding token's number on, and only if nobody gives them positions."""
    for name, m in model.named_modules():
        if hasattr(m, "create_position_ids_from_input_ids"):
            first = m.padding_idx + 1
            raise ValueError(
                f"split: {name} does not count positions from 0; give position_ids as it makes them without padding, "
                f"torch.arange({first}, {first + S})[None]"
            )


def _check_rope(config: Any, length: int) -> None:
    """Two kinds of RoPE choose their frequencies by the largest position of a call, which differs from rank to rank."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(x for x in ropes.values() if isinstance(x, dict))):
        kind = rope.get("rope_type") or ""
        if kind == "longrope" or "dynamic" in kind:
            limit = config.max_position_embeddings if kind != "longrope" else rope["original_max_position_embeddings"]
            if length > limit:
                raise ValueError(
                    f"split: RoPE of type {kind} changes beyond {limit} tokens with the largest position that a rank "
                    f"holds, got {length}; only up to there all ranks have the same"
                )


def _shape(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

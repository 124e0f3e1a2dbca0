"""The ring under a model of Hugging Face transformers, through its attention interface. The model stays as it is.

Everything in a decoder but attention acts on each token alone. So a rank runs the model on its own tokens, as if they
were a short sequence, and three things tell it of the others: ``position_ids`` carry the global positions (RoPE),
``attn_implementation="ringlearn"`` makes attention a ring, and the labels are shifted before the sequence is split, so
that the first token of a shard is the target of the last token of the shard before.

    from ringlearn.hugging_face import register, split

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringlearn")
    batch = split(model, world, input_ids, labels)
    batch.loss(model(**batch).logits).backward()   # this rank's part of the mean loss
    rl.nn.sum_gradients(model.parameters())        # or DDP, FSDP2: see Batch.loss

The information about which tokens a rank holds travels with the call (``ringlearn=`` among the model's arguments, which
transformers passes on to attention), so there is no global state, and layers that the backward recomputes have it too.

Source: transformers, "Attention Interface" in its documentation; the loss is as in ``rl.nn.gradients``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import ring_attention
from ..fingerprint import checksum, shown, whole_number
from ..layouts import Layout, count, zigzag
from ..masks import Mask, SlidingWindow, causal, full, sliding_window
from ..worlds import Shards
from ..worlds.uncompiled import uncompiled
from ..worlds.world import World, describe, take
from .batch_documents import parts_of, with_documents
from .split import IGNORE, next_tokens
from .supported_models import Head, check_model, check_tokens, learns_positions

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
    "shift_labels",
}
# What some models want of attention beside a mask, by the names that they have for it.
_WANTED = {
    "position_bias": "a bias by position",
    "output_attentions": "the attention weights, which no rank has",
    "head_mask": "a mask of heads",
}
# What changes their scores, and the strategy's names for it.
_SCORES = {"s_aux": "sinks", "sinks": "sinks", "softcap": "softcap"}
# What collators give beside the arguments of split, and what says the same.
_DOCUMENTS = "mark documents by position_ids that restart, or by mask=rl.documents(lengths)"
_INSTEAD = {
    **dict.fromkeys(("cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k"), _DOCUMENTS),
    **dict.fromkeys(("seq_idx", "seq_lengths", "document_ids"), _DOCUMENTS),
    "inputs_embeds": "the model has to embed input_ids",
    "num_items_in_batch": "pass count=, the number of targets after the shift",
    "shift_labels": "pass labels=, which split shifts itself",
}


def register() -> str:
    """Make ``attn_implementation="ringlearn"`` known to transformers and return that name; repeating it is harmless.

    Raises ImportError if transformers (version 5 or newer) is not installed.

    >>> register()
    'ringlearn'
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "ringlearn.hugging_face needs transformers 5 or newer: pip install 'transformers>=5.0'"
        ) from error
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


def __getattr__(name: str) -> Any:
    if name in ("Cache", "Prompt"):  # built on a class of transformers, which need not be installed
        from . import generation

        return getattr(generation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Batch(dict):
    """The model's arguments for this process's ranks, ``model(**batch)``; made by ``split``.

    Its items are the arguments: input_ids and position_ids, int64 (B, n), of the tokens that this process holds, rank
    after rank if it simulates several.  targets: int64 (B, n), the token that each predicts.  count: how many tokens
    have a target, on all ranks.

    If the model predicts the next token, ``model(**batch, labels=batch.targets).loss`` is the same as
    ``batch.loss(model(**batch).logits)``: transformers takes the targets from the batch, where they are already
    shifted.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        # Trainers make batches anew: type(batch)({name: prepare(x) for name, x in batch.items()}).
        if not isinstance(arguments, Mapping) or not isinstance(arguments.get(NAME), _Split):
            raise ValueError("Batch: expected the items of a batch that split(model, world, input_ids, ...) has made")
        super().__init__(arguments)
        self._split: _Split = arguments[NAME]
        self.targets, self.count = self._split.targets.to(self["input_ids"].device), self._split.count

    def loss(self, logits: Tensor) -> Tensor:
        """This process's part of the mean loss over all tokens that have a target; the parts of all ranks add up to it.

        logits: (B, n, vocabulary) from ``model(**batch)``; computed in float64 if they are, and in float32 otherwise.
        All ranks call ``backward`` on the result, even a rank without targets. The gradients must be summed over ranks,
        for instance by ``rl.nn.sum_gradients``. DDP and FSDP2 divide the sum by the number of ranks: multiply the loss
        by it.

        Raises ValueError if these are not the logits of all tokens.
        """
        if not isinstance(logits, Tensor) or logits.shape[:-1] != self.targets.shape:
            raise ValueError(
                f"loss: expected logits {(*self.targets.shape, 'vocabulary')} of all tokens of model(**batch), got "
                f"{_shape(logits)}; call the model without logits_to_keep, and pass the .logits that it returns"
            )
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        total = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return total / max(self.count, 1)

    def unshard(self, x: Tensor) -> Tensor:
        """From (B, n, ...) of this process's tokens, such as logits, to (B, S, ...) of all in order, on every rank.

        A loss that every rank computes from it needs no factor. Sum the gradients of the model alone: a head that is
        applied to it has its whole gradient on every rank already.
        """
        if not isinstance(x, Tensor) or x.shape[:2] != self.targets.shape:
            raise ValueError(
                f"unshard: expected a tensor {(*self.targets.shape, '...')} of the tokens that this process holds, "
                f"such as the logits of model(**batch), got {_shape(x)}"
            )
        return self._split.shards(x, 1).unshard()

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """The same batch on another device, as trainers want it; ``split`` puts it on the world's already."""
        return Batch({name: x.to(device=device, non_blocking=non_blocking) for name, x in self.items()})

    def __copy__(self) -> Batch:
        return Batch(self)

    copy = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Batch of ringlearn belongs to the ranks of a world and cannot be pickled; let a DataLoader's processes "
            "collate whole batches, and call split(model, world, ...) in the training loop"
        )


class _Movable:
    """Training loops move a batch item by item, ``{name: x.to(device) for name, x in batch.items()}``."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self


class _Off(_Movable, int):
    """False, as an int, for no subclass of bool can be made."""


class _Unsaid(_Movable):
    """What stands for the targets of a batch that was split without labels."""

    def view(self, *_: Any) -> Tensor:
        raise ValueError("labels= reached the model of a batch without; pass the whole labels to split(..., labels=)")


class _Split(_Movable):
    """How the sequence of a batch is split: what attention has to know."""

    targets: Tensor  # of the batch, as it was made
    count: int

    def __init__(self, world: World, layout: Layout, length: int, mask: Mask, strategy: Callable[..., Any]):
        self.world, self.layout, self.length, self.mask, self.strategy = world, layout, length, mask, strategy
        self.counts: list[int] | None = None  # tokens of each row that a cache is to keep
        ranges = layout.ranges(length, world.size)
        self.lengths = [count(ranges[rank]) for rank in world.ranks]
        # Models cannot compute with no tokens at all: where there are none, one stands in, which nobody sees.
        self.standing_in = int(sum(self.lengths) == 0)
        self.tokens = sum(self.lengths) + self.standing_in

    def own(self, x: Tensor) -> Tensor:
        """This process's tokens of (B, S), int64 on the world's device: rank after rank, if it has several."""
        x, ranges = x.to(self.world.device).long(), self.layout.ranges(self.length, self.world.size)
        return torch.cat([take(x, ranges[rank], -1) for rank in self.world.ranks], -1)

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
    **unsupported: Any,
) -> Batch:
    """Split a batch over the ranks of a world. Every rank passes the same whole batch and gets its own part.

    model: a causal language model of transformers with ``attn_implementation="ringlearn"``, or one that classifies each
    token; it may be wrapped in DDP or FSDP2.
    input_ids: integers (B, S), any S.  labels: integers (B, S) as transformers expects them, not shifted, and -100 for
    tokens that are not to be predicted; without labels no token has a target.
    attention_mask: (B, S), 1 for tokens and 0 for padding on one side; or numbers of packed documents and 0 for
    padding.
    position_ids: (B, S) or (1, S). Where they restart a new document begins, as in transformers.
    mask: what a query may see, in addition to the model's own mask (causal, sliding window): ``documents(lengths)``,
    with a list of lengths for each row if rows differ.
    strategy: how attention is computed over ranks, a function with the arguments of ``rl.ring_attention``.
    count: the number of tokens by which the loss is divided, for a step with several batches; if None, the number of
    tokens of this batch that have a target.

    These have no target: padding, the last token of a row, and the last token of a document, which cannot know the next
    document.

    Raises ValueError on every rank if the model or the batch needs something unsupported, or if the batches differ.

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
    problem, same = None, {}
    try:
        if not isinstance(world, World):
            raise ValueError(f"split: expected a SimulatedWorld or a DistributedWorld, got {shown(world)}")
        head = check_model("split", model, NAME)  # first: of an unsupported model, its batch is the lesser problem
        if "cu_seq_lens_q" in unsupported:
            position_ids = _positions_of_borders(input_ids, position_ids, unsupported)
        for name in unsupported:
            raise ValueError(f"split: got {name}, which a ring cannot use; {_INSTEAD.get(name, 'omit it')}")
        _check_batch(input_ids, labels, attention_mask, position_ids, mask, layout, strategy)
        B, S = input_ids.shape
        check_tokens("split", model, input_ids, position_ids)
        if mask.rows not in (None, B):
            raise ValueError(f"split: expected documents for the {B} rows of the batch, got {mask!r} for {mask.rows}")
        mask, starts = with_documents("split", mask, attention_mask, position_ids, B, S)
        mask.check(S, S)
        if position_ids is None and _padded_on_the_left(attention_mask) and learns_positions(model):
            raise ValueError(
                "split: the model learns its positions, and padding on the left moves them; pass position_ids, or pad "
                "on the right"
            )
        targets = _targets(input_ids, labels, attention_mask, starts, head)
        tokens = int((targets != IGNORE).sum())
        count = tokens if count is None else _check_count(count, tokens)
        batch = {"input_ids": input_ids, "labels": labels}
        batch |= {"attention_mask": attention_mask, "position_ids": position_ids}
        if world.check:
            same = {name: _told(x) for name, x in batch.items()} | {"count": str(count)}
            same |= {"layout": describe(layout, S, world.size), "mask": mask.signature()}
    except Exception as error:  # the other ranks must hear of it
        if not isinstance(world, World):
            raise
        problem = error
    world.agree("split", same, {}, problem)
    here = _Split(world, layout, S, mask, strategy)
    positions = torch.arange(S).expand(B, S) if position_ids is None else position_ids.expand(B, S)
    ids, places, wanted = (here.own(x) for x in (input_ids, positions, targets))
    ids, places = (F.pad(x, (0, here.standing_in)) for x in (ids, places))
    wanted = F.pad(wanted, (0, here.standing_in), value=IGNORE)
    arguments = {
        "input_ids": ids,
        "position_ids": places,
        "attention_mask": torch.ones_like(ids),  # else transformers takes jumps of positions for packed documents
        "use_cache": _Off(),
    }
    if head is Head.NEXT_TOKEN:  # a model that is given labels= then takes these, and divides by the count
        total = torch.tensor(max(count, 1), device=world.device)
        arguments |= {"shift_labels": _Unsaid() if labels is None else wanted, "num_items_in_batch": total}
    else:
        _refuse_labels(model)
    here.targets, here.count = wanted, count
    return Batch(arguments | {NAME: here})


@torch.no_grad()
def prefill(
    model: nn.Module,
    world: World,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 1024,
    streamer: Any = None,
    layout: Layout = zigzag,
    interleave: int = 16,
) -> Any:
    """Read a prompt with all ranks, and return what ``model.generate`` needs to continue it.

    All tokens but the last go through the model with ring attention; their keys and values stay on the ranks, in a
    cache that is shared out over them. ``model.generate(**prefill(model, world, input_ids), max_new_tokens=100)``
    continues from
    there: every rank computes the last token and the new ones, and the ranks share the work of attention. Rank 0
    chooses each token and decides when to stop, so sampling needs no common seed. All ranks make the same calls and get
    the same tokens. With a ``SimulatedWorld`` a single process does all of this.

    model: a causal language model of transformers with ``attn_implementation="ringlearn"``.
    input_ids: integers (B, S), S >= 1, the same on every rank.  attention_mask: (B, S), 1 for tokens and 0 for padding,
    which must be on the left.
    new_tokens: how many tokens ``generate`` may add; the cache has room for that many.
    streamer: a ``TextStreamer`` or similar, which receives each token on rank 0; pass it here, not to ``generate``.
    layout: how the prompt is split.  interleave: as in ``rl.KVCache``.

    Returns a ``Prompt``, a dict of arguments for ``generate``.  Raises ValueError on every rank if the model or the
    batch needs something unsupported, or if the batches differ. In ``generate`` the ranks compare what they are about
    to do once for each token, for all layers; a mistake raises ValueError on every rank and leaves the cache unchanged.

    >>> import torch, ringlearn as rl
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation=register())
    >>> prompt = prefill(model, rl.SimulatedWorld(3), torch.randint(99, (1, 50)))
    >>> model.generate(**prompt, max_new_tokens=10).shape
    torch.Size([1, 60])
    """
    problem, same, op = None, {}, "prefill"
    try:
        if not isinstance(world, World):
            raise ValueError(f"{op}: expected a SimulatedWorld or a DistributedWorld, got {shown(world)}")
        from transformers import TextStreamer

        from .generation import Cache, Prompt, cache_name, pads_of, without_pads

        if check_model(op, model, NAME) is not Head.NEXT_TOKEN or not hasattr(model, "generate"):
            raise ValueError(f"{op}: expected a model that predicts the next token, got {type(model).__name__}")
        if not _whole_numbers(input_ids) or input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(f"{op}: expected input_ids of at least one token, int64 (B, S), got {_shape(input_ids)}")
        if attention_mask is not None and (
            not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape
        ):
            raise ValueError(
                f"{op}: expected attention_mask like input_ids, {tuple(input_ids.shape)}, got {_shape(attention_mask)}"
            )
        if whole_number(new_tokens) is None or new_tokens < 1:
            raise ValueError(f"{op}: expected new_tokens to be an int >= 1, got {new_tokens!r}")
        if not isinstance(layout, Layout):
            raise ValueError(f"{op}: expected a layout such as rl.zigzag, got {layout!r}")
        check_tokens(op, model, input_ids, None)
        B, S = input_ids.shape
        try:
            if B > 1 and isinstance(streamer, TextStreamer):
                raise ValueError(f"a TextStreamer prints one sequence, got a batch of {B}; omit streamer=")
            pads = pads_of(attention_mask, B, S)
            cache = Cache(model.config, world, pads, S - min(pads) + new_tokens, interleave)
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from None
        if world.check:
            same = {"input_ids": _told(input_ids), "attention_mask": _told(attention_mask)}
            same |= {"new_tokens": str(new_tokens), "interleave": str(interleave)}
    except Exception as error:  # the other ranks must hear of it
        if not isinstance(world, World):
            raise
        problem = error
    world.agree(op, same, {}, problem)
    input_ids = input_ids.to(world.device)
    tokens = without_pads(input_ids, pads)  # each row from position 0 on; what pads it on the right, nobody sees
    if tokens.shape[1] > 1:
        batch = split(model, world, tokens[:, :-1], layout=layout)
        batch[NAME].counts = [S - n - 1 for n in pads]
        few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        model(**batch, **{cache_name(model): cache}, **few)
        if any(layer.store is None for layer in cache.layers):
            raise ValueError(f"{op}: {type(model).__name__} did not fill its cache; it is not supported")
    cache.lengths, cache.seen = [S - n - 1 for n in pads], S - 1
    ones = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(world.device).long()
    return Prompt(cache, cache_name(model), input_ids, ones, streamer)


# --- what transformers calls --------------------------------------------------------------------------------------


@uncompiled
def _mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **said: Any,
) -> _Seen:
    """What a layer of the model may see, once for each forward; transformers hands it to attention as it is.

    A problem goes the same way: attention can tell the other ranks.
    """
    seen = _what_is_seen(mask_function, local_size, said)
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    return _Seen(seen, type(said.get("config")).__name__, padding)


def _what_is_seen(mask_function: Callable[..., Any], local_size: int | None, said: Mapping[str, Any]) -> Any:
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
        f"the model's mask is not a sliding window but chunks of {local_size} tokens; pass mask=rl.documents(...)"
    )


class _Seen:
    """A mask on its way through a model, to which it means nothing; one that computes with it is told so."""

    def __init__(self, mask: Mask | ValueError, config: str, padding: Tensor | None = None):
        self._mask, self._config, self._padding = mask, config, padding

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"{_OP}: the model of {self._config} computes with its attention mask, which is not a tensor under a ring; "
            f"it is not supported"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries ask for these of any object
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        next(found, _Seen(full, "transformers"))._refuse()

    __getitem__ = __invert__ = __neg__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __len__ = __iter__ = _refuse
    __hash__ = None


@uncompiled
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
    """query: (B, H, n, D), key, value: (B, G, n, D) of this process's tokens. Returns (B, n, H, D_v)."""
    here, layer = more.pop(NAME, None), getattr(key, "_ringlearn_layer", None)
    seen, padding = attention_mask, None
    if isinstance(attention_mask, _Seen):
        seen, padding = attention_mask._mask, attention_mask._padding
    scale = None if scaling is None else float(scaling)
    scores = {_SCORES[name]: x for name in _SCORES if (x := more.pop(name, None)) is not None}
    if here is None and layer is not None:  # generation: the newest tokens, on every rank
        more.pop("use_cache", None)
        problem = _unsupported(seen, dropout, more)
        out = layer.cache.attend(layer, query, key, value, seen, padding, problem, scale=scale, **scores)
        return out.transpose(1, 2).contiguous(), None
    if not isinstance(here, _Split):
        raise ValueError(
            f'attn_implementation="{NAME}": the model was called without the information which tokens these are; call '
            f"model(**split(model, world, input_ids, ...)), model.generate(**prefill(model, world, input_ids)), or "
            f'model.set_attn_implementation("sdpa") on one device. If it was called so, it does not hand its arguments '
            f"on to attention, and is not supported"
        )
    problem = _not_split(here, query, key, padding, scores, more) or _unsupported(seen, dropout, more)
    if problem is not None:
        here.world.agree(_OP, {}, {}, ValueError(f"{_OP}: {problem}"))
    mask = seen if here.mask == full else seen & here.mask
    q, k, v = (here.shards(x, 2) for x in (query, key, value))
    if layer is not None and here.counts is not None:
        layer.cache.fill(layer, k, v, seen, here.counts)
    out = here.strategy(q, k, v, mask=mask, scale=scale, **scores)
    out = F.pad(torch.cat(out.tensors, 2), (0, 0, 0, here.standing_in))
    return out.transpose(1, 2).contiguous(), None  # as transformers' own: some models view it


def _not_split(
    here: _Split, q: Tensor, k: Tensor, padding: Tensor | None, scores: Mapping[str, Any], more: dict[str, Any]
) -> str | None:
    """Why these are not the tokens of a split batch."""
    if padding is not None:
        return "an attention_mask with zeros reached the model; pass it to split(..., attention_mask=)"
    if more.pop("use_cache", False) or q.shape[2] != k.shape[2]:
        return "a KV cache and cross-attention are not supported; call the model with use_cache=False, as split does"
    if q.shape[2] != here.tokens:
        return f"expected the {here.tokens} tokens of the batch, got {q.shape[2]}; the model added or left out some"
    if scores and not _takes(here.strategy, **scores):
        return f"the model has {' and '.join(scores)}, which strategy= does not support; use rl.ring_attention"
    return None


def _unsupported(mask: Any, dropout: float, more: dict[str, Any]) -> str | None:
    if isinstance(mask, ValueError):
        return str(mask)
    if not isinstance(mask, Mask):
        return f"expected a mask that transformers made, got {type(mask).__name__}; pass masks to split(..., mask=)"
    if dropout:
        return f"dropout inside attention is not supported, got {dropout}; set config.attention_dropout = 0.0"
    window = more.pop("sliding_window", None)
    if window is not None and window not in {part.width for part in parts_of(mask) if isinstance(part, SlidingWindow)}:
        return f"the layer has sliding_window={window}, its mask is {mask}"
    if more.pop("is_causal", None) is False:
        return "attention that is not causal is not supported"
    for name, value in more.items():
        if name not in _KNOWN and value is not None and value is not False:
            said = f" ({_WANTED[name]})" if name in _WANTED else ""
            return f"got {name}{said}, which is not supported"
    return None


# --- what split refuses -------------------------------------------------------------------------------------------


def _check_batch(ids: Any, labels: Any, padding: Any, positions: Any, mask: Any, layout: Any, strategy: Any) -> None:
    if not _whole_numbers(ids) or ids.dim() != 2:
        raise ValueError(f"split: expected input_ids to be an int64 tensor (B, S), got {_shape(ids)}")
    if ids.shape[0] == 0:
        raise ValueError(
            "split: expected a batch of at least one row, got input_ids of none; pass a row of padding, with labels of "
            "-100"
        )
    given = {"input_ids": ids, "labels": labels, "attention_mask": padding, "position_ids": positions}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.device.type == "meta":
            raise ValueError(f"split: expected {name} with values, got a tensor on the meta device, which has none")
    for name, x in (("labels", labels), ("attention_mask", padding)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != ids.shape):
            raise ValueError(
                f"split: expected {name} like input_ids, {tuple(ids.shape)}, got {_shape(x)}"
                + ("; mark documents by mask=rl.documents(lengths)" if name == "attention_mask" else "")
            )
    if labels is not None and not _whole_numbers(labels):
        raise ValueError(f"split: expected labels to be an int64 tensor (B, S), got {_shape(labels)}")
    if labels is not None and bool(((labels.long() < 0) & (labels.long() != IGNORE)).any()):
        raise ValueError(
            f"split: expected labels that are tokens, or {IGNORE} where nothing is to be predicted, got "
            f"{int(labels.long().min())}; use {IGNORE} instead"
        )
    if not isinstance(mask, Mask):
        raise ValueError(f"split: expected mask= to be a mask such as rl.documents(lengths), got {mask!r:.200}")
    if positions is not None:
        if not _whole_numbers(positions) or positions.shape not in (ids.shape, (1, ids.shape[1])):
            raise ValueError(f"split: expected position_ids, int64 (B, S) or (1, S), got {_shape(positions)}")
        if positions.numel() and int(positions.long().min()) < 0:
            raise ValueError(f"split: expected position_ids from 0 on, got {int(positions.long().min())}")
    if not isinstance(layout, Layout):
        raise ValueError(f"split: expected a layout such as rl.zigzag, got {layout!r}")
    try:
        inspect.signature(strategy).bind(None, None, None, mask=mask, scale=None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"split: expected strategy= to be called as strategy(q, k, v, mask=, scale=), like rl.ring_attention, got "
            f"{getattr(strategy, '__name__', strategy)!r}: {error}; supply what is missing with functools.partial"
        ) from None


def _takes(strategy: Callable[..., Any], **arguments: Any) -> bool:
    try:
        inspect.signature(strategy).bind(None, None, None, **arguments)
    except (TypeError, ValueError):
        return False
    return True


def _positions_of_borders(ids: Any, positions: Any, given: dict[str, Any]) -> Any:
    """position_ids of documents whose borders kernels for packed sequences want; what says the same is taken away."""
    borders, of_keys = given.pop("cu_seq_lens_q"), given.pop("cu_seq_lens_k", None)
    for name in ("max_length_q", "max_length_k"):
        given.pop(name, None)
    if borders is None and of_keys is None:
        return positions
    S = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 and len(ids) == 1 else -1
    ends = [] if not _whole_numbers(borders) or borders.dim() != 1 else borders.tolist()
    same = isinstance(of_keys, Tensor) and isinstance(borders, Tensor) and torch.equal(borders, of_keys)
    if not same or len(ends) < 2 or ends[0] != 0 or ends[-1] != S or sorted(ends) != ends:
        raise ValueError(
            f"split: expected cu_seq_lens_q, and cu_seq_lens_k alike, to be the borders of documents in one row, from "
            f"0 to its length, got {shown(borders)} and {shown(of_keys)} for input_ids {_shape(ids)}; {_DOCUMENTS}"
        )
    found = torch.cat([torch.arange(b - a) for a, b in zip(ends, ends[1:])]).unsqueeze(0)
    if positions is None:
        return found
    if isinstance(positions, Tensor) and not torch.equal(positions.cpu() == 0, found == 0):
        raise ValueError(
            f"split: expected cu_seq_lens_q and position_ids that mark the same documents, got borders at {ends} and "
            f"positions that restart at {(positions[0] == 0).nonzero().flatten().tolist()}"
        )
    return positions


def _whole_numbers(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check_count(count: Any, tokens: int) -> int:
    found = whole_number(count)
    if found is None or found < tokens:
        raise ValueError(
            f"split: expected count, the number of targets in all batches of the step, to be an int of at least the "
            f"{tokens} of this batch, got {count!r}"
        )
    return found


def _targets(ids: Tensor, labels: Tensor | None, padding: Tensor | None, starts: Tensor, head: Head) -> Tensor:
    """(B, S): the label of the next token in the same document, IGNORE where there is none."""
    if labels is None:
        return torch.full_like(ids, IGNORE, dtype=torch.int64)
    targets = labels.long()
    if padding is not None:
        targets = targets.masked_fill(padding.to(labels.device) == 0, IGNORE)
    if head is Head.EACH_TOKEN:
        return targets
    return next_tokens(targets.masked_fill(starts.to(labels.device), IGNORE))


def _padded_on_the_left(padding: Tensor | None) -> bool:
    return padding is not None and bool(((padding[:, :1] == 0) & (padding != 0)).any())


def _refuse_labels(model: nn.Module) -> None:
    """A model's own loss is a mean over the tokens that it was given: let nobody take one rank's for that of all."""
    for m in model.modules():
        if m is model or hasattr(m, "loss_function"):
            if _no_labels not in m._forward_pre_hooks.values():
                m.register_forward_pre_hook(_no_labels, with_kwargs=True)


def _no_labels(module: nn.Module, args: Any, arguments: dict[str, Any]) -> None:
    here = arguments.get(NAME)
    if isinstance(here, _Split) and arguments.get("labels") is not None:
        text = "the model was given labels=, whose loss would be the mean over one rank's tokens; use batch.loss(...)"
        here.world.agree(_OP, {}, {}, ValueError(f"{_OP}: {text}"))


def _told(x: Tensor | None) -> str:
    """A text that is equal on two ranks only if the tensors are."""
    return "None" if x is None else f"{tuple(x.shape)} {x.dtype}, checksum {checksum(x)}"


def _shape(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

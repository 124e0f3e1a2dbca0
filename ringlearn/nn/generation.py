"""A cache for models of transformers whose tokens are shared out over ranks, and the arguments that ``generate`` needs.

Import ``prefill`` from ``ringlearn.hugging_face``; this file imports transformers, which that one does not.

A layer that attends to everything has an ``rl.KVCache``: each rank keeps some of the tokens, and every new token costs
one exchange of partial results. A layer with a short window keeps that window on every rank, so that decoding needs no
message there at all; if a rank's part of the whole cache is smaller than twice the window, it is shared out too.

Each rank runs the whole model on the newest tokens; only attention is divided.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerationMode

from ..attention import decode_attention
from ..attention.decoding import KVCache
from ..attention.decoding.call import window_of
from ..fingerprint import checksum
from ..masks import Mask, causal, sliding_window
from ..worlds import Shards, SimulatedWorld
from ..worlds.comm import Comm
from ..worlds.world import World

_OP = "generate"
TAG = "_ringlearn_layer"  # new keys say by it which layer of which cache they have been given to
_REFUSED = (
    "a cache that is shared out over ranks can neither be reordered nor repeated: generate greedily or by sampling, "
    "and one sequence for each prompt (num_beams=1, num_return_sequences=1, no assistant)"
)


class Cache(TransformersCache):
    """The keys and values of all layers of a model, shared out over the ranks of a world. ``prefill`` makes it.

    lengths: how many tokens of each sequence it holds, without padding.
    """

    def __init__(self, config: Any, world: World, pads: Sequence[int], capacity: int, interleave: int):
        config = config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            one = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
            kinds = [one] * config.num_hidden_layers
        if getattr(config, "num_kv_shared_layers", 0):
            raise ValueError("layers that share their keys and values with others are not supported")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"layers of type {kind} are not supported")
        super().__init__(layers=[Layer(self, i, kind == "sliding_attention") for i, kind in enumerate(kinds)])
        self.config, self.world, self.capacity, self.interleave = config, world, capacity, interleave
        self.pads, self.lengths, self.seen = list(pads), [0] * len(pads), 0

    def __repr__(self) -> str:
        return f"Cache({len(self.layers)} layers, {self.lengths} tokens, capacity {self.capacity}, {self.world})"

    def reorder_cache(self, *_: Any) -> None:
        """Not supported: raises ValueError, which says what is. Sequences stay as they were filled."""
        raise ValueError(f"{_OP}: {_REFUSED}")

    crop = batch_repeat_interleave = batch_select_indices = reset = offload = prefetch = reorder_cache

    # What attention calls

    def fill(self, layer: Layer, key: Shards, value: Shards, mask: Mask, counts: Sequence[int]) -> None:
        """Prefill: the first ``counts`` tokens of each sequence, which ranks hold as a ring does."""
        layer.store = self._store(key.tensors[0], value.tensors[0], mask)
        layer.store.fill(key, value, counts)

    def attend(
        self,
        layer: Layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        padding: Tensor | None,
        problem: str | None,
        **scores: Any,
    ) -> Tensor:
        """Append the newest tokens, the same on every rank, and let them attend to all tokens: (B, H, T, D_v).

        Once for each forward, in its first layer, the ranks compare what they are about to do, for all layers.
        mask: what a query of the layer sees, as in training.  padding: the attention_mask if it has zeros.  problem:
        what this rank cannot do.  scores: scale, sinks and softcap, as for ``rl.decode_attention``.
        """
        n, last = key.shape[2], layer.index == len(self.layers) - 1
        if layer.index == 0:
            self._agree(key, value, padding, problem)
            with self.world.settled():
                for other in self.layers:  # a forward that broke off may have left tokens in some of them
                    if other.store is not None:
                        other.store.forget(self.lengths)
        elif problem is not None:
            raise ValueError(f"{_OP}: {problem}")
        if layer.store is None:
            layer.store = self._store(key, value, mask)
        with self.world.settled():
            layer.store.append(key, value)
            out = layer.store.attend(query, **scores)
        if last:
            self.lengths, self.seen = [length + n for length in self.lengths], self.seen + n
        return out

    def _agree(self, key: Tensor, value: Tensor, padding: Tensor | None, problem: str | None) -> None:
        n, same = key.shape[2], {}
        problem = problem or self._wrong(key, n, padding)
        if problem is None and self.world.check:
            same = {"cached lengths": str(self.lengths), "number of new tokens": str(n)}
            same["new tokens (by their first keys and values)"] = f"{checksum(key)} {checksum(value)}"
        self.world.agree(_OP, same, {}, ValueError(f"{_OP}: {problem}") if problem else None)

    def _wrong(self, key: Tensor, n: int, padding: Tensor | None) -> str | None:
        if key.shape[0] != len(self.pads):
            return f"expected the batch of {len(self.pads)} sequences that prefill was given, got {key.shape[0]}"
        if padding is not None or any(self.pads):
            problem = self._wrong_padding(padding, n)
            if problem is not None:
                return problem
        full = next((b for b, length in enumerate(self.lengths) if length + n > self.capacity), None)
        if full is None:
            return None
        return (
            f"the cache is full: sequence {full} has {self.lengths[full]} tokens and would have "
            f"{self.lengths[full] + n}, the capacity is {self.capacity}; pass prefill(..., new_tokens=), as many as "
            f"generate may add"
        )

    def _wrong_padding(self, padding: Tensor | None, n: int) -> str | None:
        zeros = torch.arange(self.seen + n) < torch.tensor(self.pads)[:, None]
        given = torch.zeros_like(zeros) if padding is None else ~padding.cpu().bool()
        if given.shape != zeros.shape:
            return (
                f"expected an attention_mask of the {self.seen} tokens before and the {n} new ones, got "
                f"{tuple(given.shape)}"
            )
        if torch.equal(given, zeros):
            return None
        b = int((given != zeros).any(1).nonzero()[0])
        if given[b, self.seen :].any():
            return (
                f"a new token of sequence {b} is padding, but the next one is predicted from the last: pad on the left "
                f"(tokenizer.padding_side = 'left')"
            )
        return (
            f"expected an attention_mask of {self.pads[b]} zeros at the left of sequence {b}, as in prefill, "
            f"got {int(given[b].sum())} zeros; pass generate what prefill returns, model.generate(**prompt)"
        )

    def _store(self, key: Tensor, value: Tensor, mask: Mask) -> Shared | Recent:
        """Where the keys and values of a layer with such a mask are kept."""
        B, G, D, D_v, window = *key.shape[:2], key.shape[3], value.shape[3], window_of(mask, _OP)
        options = dict(batch=B, heads=G, dim=D, v_dim=D_v, dtype=key.dtype)
        if window is not None and 2 * window * self.world.size <= self.capacity:
            return Recent(self.world, window, options)
        return Shared(KVCache(self.world, capacity=self.capacity, interleave=self.interleave, **options), mask)


class Layer(CacheLayerMixin):
    """What transformers expects of the cache of one layer; its lengths are those of the whole sequences."""

    is_compileable = is_croppable = False
    supports_early_init = False

    def __init__(self, cache: Cache, index: int, is_sliding: bool):
        super().__init__()
        self.cache, self.index, self.is_sliding, self.is_initialized = cache, index, is_sliding, True
        self.store: Shared | Recent | None = None

    def lazy_initialization(self, *_: Any) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged; attention finds the cache by these tensors and appends them."""
        name = self.cache.config._attn_implementation
        if name != "ringlearn":
            raise ValueError(
                f"{_OP}: this cache is shared out over ranks, but the model's attention is {name!r}, which would see "
                f'the newest tokens alone; call model.set_attn_implementation("ringlearn"), or omit the cache'
            )
        setattr(key_states, TAG, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]  # transformers 5.0: positions
        return self.cache.seen + new, 0

    def get_seq_length(self, *_: Any) -> int:
        return self.cache.seen

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        return len(self.cache.pads)


class Shared:
    """A layer's tokens, shared out over the ranks."""

    def __init__(self, cache: KVCache, mask: Mask):
        self.cache, self.mask = cache, mask

    def fill(self, key: Shards, value: Shards, counts: Sequence[int]) -> None:
        self.cache.append(key, value, counts)

    def append(self, key: Tensor, value: Tensor) -> None:
        self.cache.append(key, value)

    def attend(self, query: Tensor, **scores: Any) -> Tensor:
        return decode_attention(query, self.cache, self.mask, **scores)

    def forget(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens."""
        if self.cache.lengths != tuple(lengths):
            self.cache.truncate(lengths)


class Recent:
    """The last tokens of each sequence, all that a window sees of it, on every rank.

    The cache has room for twice the window: when it is full, the last tokens begin a new one. Where they are in it
    makes no difference to attention, which depends only on the distance between query and key.
    """

    def __init__(self, world: World, window: int, options: dict[str, Any]):
        self.alone, self.whole = SimulatedWorld(1, device=world.device, count_memory=False), world
        self.window, self.options = window, options
        self.cache, self.dropped = self._empty(2 * window), [0] * options["batch"]

    def _empty(self, capacity: int) -> KVCache:
        return KVCache(self.alone, capacity=capacity, **self.options)

    def fill(self, key: Shards, value: Shards, counts: Sequence[int]) -> None:
        kept = [min(c, self.window - 1) for c in counts]
        first = [c - n for c, n in zip(counts, kept, strict=True)]
        self.cache.append(*self.whole.run(_last_tokens, key, value, key.ranges, first, counts)[0], kept)
        self.dropped = first

    def append(self, key: Tensor, value: Tensor) -> None:
        n, lengths = key.shape[2], self.cache.lengths
        if max(lengths) + n > self.cache.capacity:
            kept = [min(length, self.window - 1) for length in lengths]
            first = torch.tensor([length - k for length, k in zip(lengths, kept, strict=True)])
            rows = first[:, None] + torch.arange(max(kept))  # (B, kept): a shorter sequence has some of the next ones
            rows = rows.clamp(max=self.cache.capacity - 1).to(key.device)[:, None, :, None]
            last = [
                x.gather(2, rows.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.cache.k[0], self.cache.v[0])
            ]
            self.dropped = [d + int(f) for d, f in zip(self.dropped, first, strict=True)]
            self.cache = self._empty(max(2 * self.window, max(kept) + n))
            self.cache.append(*last, kept)
        self.cache.append(key, value)

    def attend(self, query: Tensor, **scores: Any) -> Tensor:
        mask = causal & sliding_window(self.window)
        return decode_attention(query, self.cache, mask, **scores)

    def forget(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens; those of one forward can be forgotten, since the window before is kept."""
        left = tuple(length - d for length, d in zip(lengths, self.dropped, strict=True))
        if self.cache.lengths != left:
            self.cache.truncate(left)


async def _last_tokens(
    comm: Comm, k: Tensor, v: Tensor, ranges: Any, first: Sequence[int], stop: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The tokens at positions first <= p < stop of each sequence, from all ranks to all: (B, G, most, D) each."""
    first, stop = torch.tensor(first)[:, None], torch.tensor(stop)[:, None]

    def wanted(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of what a rank holds: sequence, row, and where it goes."""
        positions = torch.tensor([p for r in ranges[rank] for p in r], dtype=torch.int64)
        b, row = ((first <= positions) & (positions < stop)).nonzero(as_tuple=True)
        return b, row, positions[row] - first[b, 0]

    b, row, _ = wanted(comm.rank)
    mine = k[b, :, row], v[b, :, row]  # (tokens, G, D)
    shapes = {rank: tuple((len(wanted(rank)[0]), *x.shape[1:]) for x in mine) for rank in range(comm.size)}
    received = await comm.exchange(dict.fromkeys(shapes, mine), shapes, name="gather the window")
    most = int((stop - first).max())
    out = k.new_zeros(*k.shape[:2], most, k.shape[3]), v.new_zeros(*v.shape[:2], most, v.shape[3])
    for rank, tokens in received.items():
        b, _, place = wanted(rank)
        for whole, some in zip(out, tokens, strict=True):
            whole[b, :, place] = some
    return out


def cache_name(model: Any) -> str:
    """The argument that takes the cache: ``cache`` in newer versions of transformers, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Prompt(dict):
    """The arguments of ``generate`` after a ``prefill``: ``model.generate(**prompt, max_new_tokens=100)``.

    Its items: input_ids and attention_mask, whole;  the cache, under the name that the model gives it;  streamer, on
    rank 0;  and custom_generate, with which rank 0 chooses each token, and whether to stop, for all ranks.

    cache: the keys and values of all tokens but the last.  name: of the argument under which the model takes it.
    """

    def __init__(self, cache: Cache, name: str, input_ids: Tensor, attention_mask: Tensor, streamer: Any):
        super().__init__(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **{name: cache},
            custom_generate=self._together,
            streamer=streamer if 0 in cache.world.ranks else _Silent() if streamer is not None else None,
        )
        self.cache, self.name = cache, name

    def followed_by(self, input_ids: Tensor) -> Prompt:
        """The same conversation with more tokens, for the next turn of a chat: what is in the cache stays there.

        input_ids: (B, S), all tokens: those that ``generate`` returned, followed by the new ones. Every rank
        computes the new ones, so a long text should begin a new prompt.
        Raises ValueError if they do not continue what the cache holds.
        """
        seen, mask = self.cache.seen, self["attention_mask"]
        B = mask.shape[0]
        if (
            not isinstance(input_ids, Tensor)
            or input_ids.dim() != 2
            or len(input_ids) != B
            or input_ids.shape[1] <= seen
        ):
            got = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(f"followed_by: expected the {seen} tokens so far and new ones, ({B}, S), got {got}")
        more = mask.new_ones(B, input_ids.shape[1] - mask.shape[1])
        return Prompt(self.cache, self.name, input_ids.to(mask.device), torch.cat([mask, more], 1), self["streamer"])

    def _together(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> Any:
        """What ``generate`` calls to choose tokens: its own way, but that rank 0 decides."""
        world, mode = self.cache.world, generation_config.get_generation_mode()
        problem = None
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or input_ids.shape[0] != len(
            self.cache.pads
        ):
            problem = ValueError(f"{_OP}: {_REFUSED}")
        world.agree(_OP, {"tokens before": str(tuple(input_ids.shape))}, {}, problem)
        more["streamer"] = self["streamer"]
        return type(model)._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=_FirstDecides(world, stopping_criteria),
            generation_config=generation_config,
            **more,
        )


class _FirstDecides(list):
    """Criteria to stop, for which rank 0 speaks. It is asked after each token, which rank 0 then has chosen, too."""

    def __init__(self, world: World, criteria: Any):
        super().__init__(criteria)
        self.world, self.criteria, self.max_length = world, criteria, criteria.max_length

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        stop = self.criteria(input_ids, scores, **more)
        chosen = torch.stack([input_ids[:, -1], stop.long()])
        chosen = self.world.replicate([chosen], src=0)[0].to(input_ids.device)
        input_ids[:, -1] = chosen[0]
        return chosen[1].bool()


class _Silent:
    """Stands for the streamer where another rank has it."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


def pads_of(attention_mask: Tensor | None, B: int, S: int) -> list[int]:
    """How many tokens at the left of each row are padding. Raises ValueError for padding anywhere else."""
    if attention_mask is None:
        return [0] * B
    tokens = attention_mask.cpu() != 0
    pads = (S - tokens.sum(1)).tolist()
    for b, (row, n) in enumerate(zip(tokens, pads, strict=True)):
        if n == S:
            raise ValueError(f"expected at least one token in each row, got only padding in row {b}")
        if not row[-1]:
            raise ValueError(
                f"row {b} is padded on the right, but the next token is predicted from the last one, which would be "
                f"padding; pad on the left (tokenizer.padding_side = 'left')"
            )
        if not row[n:].all():
            raise ValueError(f"expected padding only on the left, got zeros between the tokens of row {b}")
    return pads


def without_pads(input_ids: Tensor, pads: Sequence[int]) -> Tensor:
    """(B, longest): the tokens of each row moved to its first column; the rest of the row repeats its first token."""
    S = input_ids.shape[1]
    longest = S - min(pads)
    rows = torch.arange(longest, device=input_ids.device) + torch.tensor(pads, device=input_ids.device)[:, None]
    return input_ids.gather(1, rows.where(rows < S, rows[:, :1]))

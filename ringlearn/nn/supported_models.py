"""Which models of transformers a ring can run under, and why another is refused.

A rank runs the model on its own tokens alone, so only attention may look at other tokens, only through the interface
that transformers has for it, and positions must come from ``position_ids``.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from torch import Tensor, nn

_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.ZeroPad2d)  # layers that look at neighbouring tokens
_LAYERS = ("full_attention", "sliding_attention")


class Head(Enum):
    """What a model computes from its last hidden states, for each token alone."""

    NEXT_TOKEN = "predicts the next token"
    EACH_TOKEN = "classifies each token"


def check_model(op: str, model: Any, attention: str) -> Head:
    """Raise ValueError, with the reason, unless the model computes the same over a split sequence.

    attention: the name of the attention that it must have.
    """
    models = _models(model)
    if not models:
        raise ValueError(f"{op}: expected a model of transformers, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError(f"{op}: DataParallel distributes the rows of a batch itself; wrap the model in DDP or FSDP2")
    head = _head(op, models[0])
    for m in models:
        _check_interface(op, m, attention)
    for name, m in model.named_modules():
        if isinstance(m, _MIXERS):
            raise ValueError(
                f"{op}: {name} is a {type(m).__name__}, which mixes neighbouring tokens; only attention may, because "
                f"ranks hold their tokens apart"
            )
    return head


def check_tokens(op: str, model: nn.Module, input_ids: Tensor, position_ids: Tensor | None) -> None:
    """Raise ValueError unless a model that passed ``check_model`` takes these tokens and positions.

    input_ids: (B, S).  position_ids: as the user gave them.
    """
    models, S = _models(model), input_ids.shape[1]
    last = S - 1 if position_ids is None else int(position_ids.max()) if position_ids.numel() else -1
    for m in models:
        _check_rope(op, m.config, last + 1)
    for name, m in model.named_modules():
        if position_ids is None and hasattr(m, "create_position_ids_from_input_ids"):
            first = m.padding_idx + 1  # RoBERTa and its kin count from there, and only if nobody gives them positions
            raise ValueError(
                f"{op}: {name} does not count positions from 0; pass position_ids as it makes them without padding, "
                f"torch.arange({first}, {first + S})[None]"
            )
        if _learns_positions(name, m) and last >= m.num_embeddings - getattr(m, "offset", 0):
            raise ValueError(
                f"{op}: {name} has learnt {m.num_embeddings - getattr(m, 'offset', 0)} positions, got tokens up to "
                f"position {last}; shorten the sequence"
            )
    _check_ids(op, models[0], input_ids)


def _models(model: Any) -> list[Any]:
    from transformers import PreTrainedModel

    return [m for m in model.modules() if isinstance(m, PreTrainedModel)] if isinstance(model, nn.Module) else []


def learns_positions(model: nn.Module) -> bool:
    """Whether a token's own position matters to the model, and not only how far tokens are apart."""
    return any(_learns_positions(name, m) for name, m in model.named_modules())


def _learns_positions(name: str, m: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    return isinstance(m, nn.Embedding) and ("position" in last or last == "wpe")


def _head(op: str, m: Any) -> Head:
    from transformers.models.auto import modeling_auto as auto

    own = {kind.__name__ for kind in type(m).__mro__}
    for names, head in (
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, Head.NEXT_TOKEN),
        (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, Head.EACH_TOKEN),
        (auto.MODEL_MAPPING_NAMES, Head.NEXT_TOKEN),
    ):
        if own & {name for names in names.values() for name in ([names] if isinstance(names, str) else names)}:
            return head
    raise ValueError(
        f"{op}: {type(m).__name__} has a head that may look at several tokens, as those for classification and "
        f"question answering do, but a rank has only its own tokens. Use the model without its head (AutoModel), and "
        f"apply the head to batch.unshard(model(**batch).last_hidden_state), which every rank gets; "
        f"docs/your_model.md says whose gradients are then summed"
    )


def _check_interface(op: str, m: Any, attention: str) -> None:
    name, config = type(m).__name__, m.config
    if not m._supports_attention_backend:
        raise ValueError(f"{op}: {name} does not use the attention interface of transformers; it is not supported")
    if config._attn_implementation != attention:
        raise ValueError(
            f'{op}: expected attn_implementation="{attention}", got "{config._attn_implementation}" of {name}, with '
            f'which ranks would not see each other; model.set_attn_implementation("{attention}") after register()'
        )
    if "position_ids" not in inspect.signature(m.forward).parameters:
        raise ValueError(f"{op}: {name} takes no position_ids, so it cannot know where its tokens are")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYERS:
            raise ValueError(f"{op}: {name} has layers of type {kind}, which are not supported")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{op}: the router's loss is not a sum over tokens, so it does not add up over ranks; set "
            f"config.output_router_logits = False"
        )


def _check_rope(op: str, config: Any, length: int) -> None:
    """Two kinds of RoPE choose their frequencies by the largest position of a call, which differs from rank to rank."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(x for x in ropes.values() if isinstance(x, dict))):
        kind = rope.get("rope_type") or ""
        if kind == "longrope" or "dynamic" in kind:
            limit = config.max_position_embeddings if kind != "longrope" else rope["original_max_position_embeddings"]
            if length > limit:
                raise ValueError(
                    f"{op}: RoPE of type {kind} changes beyond {limit} tokens with the largest position that a rank "
                    f"holds, got {length}; the ranks agree only up to that length"
                )


def _check_ids(op: str, m: Any, input_ids: Tensor) -> None:
    """An index out of range ends a program on a GPU, and says nowhere which."""
    try:
        words = m.get_input_embeddings()
    except NotImplementedError:
        return
    if isinstance(words, nn.Embedding) and input_ids.numel():
        low, high = map(int, input_ids.long().aminmax())
        if low < 0 or high >= words.num_embeddings:
            raise ValueError(
                f"{op}: expected input_ids below {words.num_embeddings}, the size of the vocabulary, and none below 0, "
                f"got {low} to {high}; -100 belongs only in labels"
            )

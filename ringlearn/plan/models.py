"""The sizes of a model that a plan needs, as its published configuration states them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..fingerprint import shown


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer: sizes in numbers, not in bytes.

    layers, width; heads H and kv_heads G of head_dim D; ffn: numbers inside the feed-forward, of one expert if there
    are several; vocabulary. gated: whether the feed-forward has a third matrix (SwiGLU). tied: whether the output layer
    is the embedding. bias: whether q, k and v have one. qk_norm: whether q and k are normalised per head.
    experts, active: how many feed-forwards a layer has, and how many a token passes through. sinks: whether each head
    has one, and with it biases in every other matrix of the layer, as in gpt-oss. window: keys that a query sees in
    ``windowed`` of the layers. positions: how many the model was made for, 0 if that is not known. learnt: whether each
    of them has an embedding, so that there are no more. unsure: "", or why these sizes may be wrong.

    >>> model("llama-3.1-8b").parameters
    8030261248
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_dim: int
    gated: bool = True
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    experts: int = 1
    active: int = 1
    sinks: bool = False
    window: int = 0
    windowed: int = 0
    positions: int = 0
    learnt: bool = False
    unsure: str = ""

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (q + 2 * kv) * (self.bias or self.sinks) + (self.width + self.heads) * self.sinks
        return 2 * self.width * (q + kv) + biases + 2 * self.head_dim * self.qk_norm

    @property
    def expert(self) -> int:
        """Parameters of one feed-forward."""
        matrices = 3 if self.gated else 2
        biases = (matrices - 1) * self.ffn + self.width if self.sinks else 0
        return matrices * self.width * self.ffn + biases

    @property
    def router(self) -> int:
        return self.experts * (self.width + self.sinks) if self.experts > 1 else 0

    @property
    def layer(self) -> int:
        """Parameters of one layer, all experts and both norms included."""
        return self.attention + self.experts * self.expert + self.router + 2 * self.width

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output layer where it is not tied to it."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + (1 if self.tied else 2) * self.embedding + self.width

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through."""
        return self.parameters - self.layers * (self.experts - self.active) * self.expert

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values of one token in all layers.

        >>> model("llama-3.1-8b").cache_bytes(), model("llama-3.1-405b").cache_bytes()
        (131072, 516096)
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def splits_over(self, ranks: int) -> bool:
        """Whether so many tensor-parallel ranks can share out the heads; several may have the same key/value head.

        >>> [n for n in range(1, 65) if model("llama-3.1-8b").splits_over(n)]
        [1, 2, 4, 8, 16, 32]
        """
        return not (self.heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads))

    def pairs(self, tokens: int, cached: int = 0) -> float:
        """How many (query, key) pairs a layer scores, the mean over layers: ``tokens`` queries after ``cached`` keys.

        >>> model("llama-3.1-8b").pairs(4), model("llama-3.1-8b").pairs(1, cached=7)
        (10.0, 8.0)
        """
        whole = tokens * (tokens + 1) / 2 + tokens * cached
        if not self.windowed:
            return whole
        w, ramp = self.window, max(0, min(tokens, self.window - cached))  # queries that still see every key before them
        inside = ramp * (ramp + 1) / 2 + ramp * cached + (tokens - ramp) * w
        return (self.windowed * min(inside, whole) + (self.layers - self.windowed) * whole) / self.layers

    def warning(self, tokens: int) -> str:
        """What to know before the model is given so long a sequence; "" if it has that many positions.

        >>> model("llama-3.1-8b").warning(131072)
        ''
        """
        return " ".join(filter(None, (self.unsure, self._of_positions(tokens))))

    def _of_positions(self, tokens: int) -> str:
        if not self.positions or tokens <= self.positions:
            return ""
        if self.learnt:
            return (
                f"Warning: {self.name} has learnt {self.positions:,} positions and cannot be run on {tokens:,} tokens. "
                "The plan is for a model of the same size with that many positions, which would have to be trained."
            )
        return (
            f"Note: {self.name} was made for {self.positions:,} positions. It runs on {tokens:,} tokens, in the time "
            "and memory that are planned, but it was not trained on the positions beyond these; scale its RoPE "
            "(rope_scaling or a larger rope_theta) and train on such lengths, or expect worse results."
        )


def _dense(name: str, layers: int, width: int, heads: int, kv: int, ffn: int, vocabulary: int, **more: Any) -> Model:
    return Model(name, layers, width, heads, kv, ffn, vocabulary, **({"head_dim": width // heads} | more))


_QWEN = dict(head_dim=128, qk_norm=True, positions=40960)
_OSS = dict(head_dim=64, active=4, sinks=True, window=128, positions=131072)

# Sizes are those of the config.json that was published with each model; tests hold the parameter counts.
MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        _dense("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, positions=4096),
        _dense("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, positions=8192),
        _dense("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, positions=8192),
        _dense("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, positions=131072),
        _dense("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, positions=131072),
        _dense("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, positions=131072),
        _dense("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, tied=True, **_QWEN),
        _dense("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, **_QWEN),
        _dense("qwen3-14b", 40, 5120, 40, 8, 17408, 151936, **_QWEN),
        _dense("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, **_QWEN),
        _dense("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151936, experts=128, active=8, **_QWEN),
        _dense("mistral-7b", 32, 4096, 32, 8, 14336, 32768, positions=32768),
        _dense("gpt-oss-20b", 24, 2880, 64, 8, 2880, 201088, experts=32, windowed=12, **_OSS),
        _dense("gpt-oss-120b", 36, 2880, 64, 8, 2880, 201088, experts=128, windowed=18, **_OSS),
        # What ringlearn.train trains in docs/measurements: --width 1024 --layers 8 --heads 8 2.
        _dense("ringlearn", 8, 1024, 8, 2, 4096, 256, gated=False),
    )
}


def model(which: str | Path | Mapping[str, Any] | Any) -> Model:
    """A model by its name, by a config.json (its path or folder), or by a configuration of transformers.

    Raises ValueError for an unknown name, listing the known ones, and for an architecture for which the planner
    has no formula (multi-head latent attention, linear attention, state-space layers).

    >>> model("llama-3.1-405b").layers
    126
    >>> config = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=100)
    >>> model(config).parameters
    95040
    """
    if isinstance(which, Model):
        return which
    if isinstance(which, str) and which.lower() in MODELS:
        return MODELS[which.lower()]
    if isinstance(which, Mapping):
        return _of_config(which)
    if hasattr(which, "to_dict"):
        return _of_config(which.to_dict())
    if isinstance(which, str | Path):
        path = Path(which)
        path = path / "config.json" if path.is_dir() else path
        if path.is_file():
            try:
                config = json.loads(path.read_text())
            except ValueError as problem:
                raise ValueError(f"model: {path} is not JSON: {problem}") from None
            return replace(_of_config(config), name=path.parent.name if path.name == "config.json" else path.stem)
        if path.parent.is_dir() and path.name == "config.json":
            raise ValueError(f"model: the folder {path.parent} has no config.json.")
        if path.name.lower() in MODELS:  # as the Hugging Face Hub calls it: Qwen/Qwen3-8B
            return MODELS[path.name.lower()]
    said = Path(str(which)).name.lower()
    like = [name for name in MODELS if name.startswith(said)] or get_close_matches(said, MODELS, 1, 0.8)
    raise ValueError(
        f"model: there is no model {shown(which)}{f'; did you mean {like[0]}?' if like else '.'} "
        f"Known are {', '.join(MODELS)}; any other dense transformer is "
        "planned from its config.json: give the path of the file, or of the folder that it is in. "
        "For a model of the Hugging Face Hub, AutoConfig.from_pretrained(name).save_pretrained(folder) writes it."
    )


_STRANGE = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
}


# Their parameters are counted as transformers has them, to 2 %: a test compares the default configuration of each.
CHECKED = (
    "apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "falcon", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite",
    "granitemoe", "helium", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
    "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
# Where the output layer is the embedding unless the configuration says otherwise.
_TIED = (
    "bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode",
    "openai-gpt", "opt", "smollm3", "starcoder2",
)  # fmt: skip
# Feed-forwards of two matrices, without a gate.
_UNGATED = (
    "apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_neox_japanese", "gptj", "nanochat", "nemotron", "openai-gpt", "opt", "persimmon", "phi", "starcoder2",
)  # fmt: skip

# Those with an embedding for each position; all others here turn queries and keys (RoPE), or have no positions (ALiBi).
_LEARNT = ("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt")


def _of_config(config: Mapping[str, Any]) -> Model:
    """From the keys of a transformers configuration."""
    config = config.get("text_config") or config
    for key, what in _STRANGE.items():
        if config.get(key):
            raise ValueError(f"model: {key} says that this model has {what}, and the planner has no formula for it.")

    def get(*names: str, default: Any = None) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is None:
            raise ValueError(f"model: expected the configuration to have {' or '.join(names)}, it has {sorted(config)}")
        return default

    width, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
    layers, kv = get("num_hidden_layers", "n_layer"), get("num_key_value_heads", "num_kv_heads", default=heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon, StarCoder
        kv = 1
    experts = get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=1)
    of_expert = ("moe_intermediate_size",) if experts > 1 else ()
    kind = config.get("model_type", "")
    windowed = sum(t == "sliding_attention" for t in config.get("layer_types") or [])
    window = config.get("sliding_window") or 0
    if window and not windowed and config.get("use_sliding_window", kind == "mistral"):
        windowed = layers
    sizes = dict(layers=layers, width=width, heads=heads, kv_heads=kv, vocabulary=get("vocab_size"))
    sizes |= dict(ffn=get(*of_expert, "intermediate_size", "n_inner", default=4 * width), experts=experts)
    sizes |= dict(
        active=get("num_experts_per_tok", "moe_k", default=1), head_dim=get("head_dim", default=width // heads)
    )
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"model: expected {name} to be a number of at least 1, got {value!r}")
    if heads % kv:
        raise ValueError(f"model: expected num_attention_heads divisible by num_key_value_heads, got {heads} and {kv}")
    found = Model(
        name=config.get("_name_or_path") or kind or "model",
        gated=kind not in _UNGATED,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=kind.startswith("qwen3") or kind.startswith("olmo2"),
        sinks=kind == "gpt_oss",
        window=window if windowed else 0,
        windowed=windowed,
        positions=config.get("max_position_embeddings") or config.get("n_positions") or 0,
        learnt=kind in _LEARNT or (not kind and "n_positions" in config),
        **sizes,
    )
    shared = [key for key, value in config.items() if "shared_expert" in key and value]
    if shared or (kind and kind not in CHECKED):
        what = f"{shared[0]} is not read" if shared else f"the architecture {kind!r} was not compared with transformers"
        return replace(
            found,
            unsure=f"Note: {what}; the planner counts {found.parameters / 1e9:,.2f} billion parameters. If the model "
            "has another number, the plan is wrong by about as much.",
        )
    return found

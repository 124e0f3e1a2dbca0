"""Every causal model that transformers has, tiny and random, over a split sequence: equal, or refused with a reason.

    python tools/sweep_architectures.py            # writes the table of docs/architectures.md anew, some minutes
    python tools/sweep_architectures.py Llama GPT2 # prints what these two give

A model is equal if its logits and its gradients, computed by three simulated ranks under a ring, are those of the same
model on one device (SDPA, or transformers' eager attention if it has no SDPA).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

import ringlearn as rl
from ringlearn.hugging_face import NAME, register, split

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
TOKENS, VOCABULARY, MOST = 21, 61, 12_000_000
MEMORY = 9 * 2**30
# Sizes by the names that configs have for them; a config takes those that it knows.
SIZES = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "n_embed"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads", "n_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "kv_channels"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "rotary_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("sliding_window",), 5),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("is_decoder",), True),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "dropout", "resid_pdrop", "embd_pdrop"), 0.0),
}


class Found(NamedTuple):
    """What came of one architecture."""

    name: str
    result: str  # "equal", "refused", "not built", or "WRONG"
    why: str


def architectures() -> list[str]:
    """The classes of all causal language models that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = (names for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return list(dict.fromkeys(name for some in names for name in ([some] if isinstance(some, str) else some)))


def build(kind: type, without: tuple[str, ...], more: dict) -> torch.nn.Module:
    """A tiny random model in float32; raises what transformers raises if it cannot be built.

    without: sizes that are left as the config has them.  more: sizes of this try.
    """
    known = kind.config_class
    default = known()
    own = default.get_text_config()
    sizes = {key: value for key, value in (SIZES | more).items() if _has(own, key) and key not in without}
    kinds = list(dict.fromkeys((own.layer_types if _has(own, "layer_types") else None) or ()))
    if kinds and "layer_types" not in without:
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        sizes |= {key: len(sizes["layer_types"]) for key in ("num_hidden_layers", "n_layer") if key in sizes}
    sizes |= OF_ONE.get(kind.__name__, {})
    config = known(**sizes) if own is default else known(text_config=sizes)
    torch.manual_seed(1)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind._from_config(config, attn_implementation="eager").parameters())
    if parameters > MOST:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters are left")
    model = kind._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for p in model.parameters():  # scores far from uniform, whatever the config's own range
            if p.dim() > 1:
                p.normal_(0, 0.15)
    return model


def _has(config: object, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a value that differs from layer to layer
        return False


GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
# What single architectures want beside that.
OF_ONE = {
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Gemma3nForCausalLM": GEMMA | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4ForCausalLM": GEMMA | {"head_dim": 8, "global_head_dim": 8},
    "Gemma4UnifiedForCausalLM": GEMMA | {"head_dim": 8, "global_head_dim": 8},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 4, "layer_types": ["attention", "attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LongcatFlashForCausalLM": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}

# What is tried one after the other until a model is built and computes something.
TRIES: list[tuple[tuple[str, ...], dict]] = [
    ((), {}),
    ((), {"num_key_value_heads": 4}),  # latent attention has no groups
    (("layer_types",), {}),
    (("layer_types", "head_dim"), {"num_key_value_heads": 4}),
    (("layer_types", "head_dim", "v_head_dim", "num_hidden_layers"), {}),
    (("layer_types", "head_dim", "num_hidden_layers", "num_experts_per_tok", "n_group", "topk_group"), {}),
    (("layer_types", "num_layers"), {"attention_types": [[["global", "local"], 1]], "window_size": 5}),
    (("layer_types", "head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"), {}),
]


def sweep(name: str) -> Found:
    """Build it, compute on one device and on three ranks, compare."""
    import transformers

    kind = getattr(transformers, name)
    tokens = torch.randint(3, VOCABULARY - 1, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    problem: Exception | None = None
    for without, more in TRIES:
        try:
            model = build(kind, without, more)
            model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
            want = _compute(model, model(tokens, use_cache=False).logits)
            break
        except Exception as error:
            problem = problem or error
    else:
        if not kind._supports_attention_backend:  # what split would say, whatever the sizes
            return Found(name, "refused", f"split: {name} does not use the attention interface of transformers")
        return Found(name, "not built", _first_line(problem))
    try:
        model.set_attn_implementation(NAME)
        positions = _first_positions(model, tokens)
        batch = split(model, rl.SimulatedWorld(3, count_memory=False), tokens, position_ids=positions)
        got = _compute(model, batch.unshard(model(**batch).logits))
    except ValueError as error:
        return Found(name, "refused" if _is_ours(error) else "WRONG", _first_line(error))
    except Exception as error:
        return Found(name, "WRONG", f"{type(error).__name__}: {_first_line(error)}")
    worst = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(got, want, strict=True))
    return Found(name, "equal" if worst < 1e-4 else "WRONG", "" if worst < 1e-4 else f"off by {worst:.1e}")


def _first_positions(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor | None:
    """Those of RoBERTa and its kin, which do not count from 0, as split asks for them."""
    for m in model.modules():
        if hasattr(m, "create_position_ids_from_input_ids"):
            first = m.padding_idx + 1
            return torch.arange(first, first + tokens.shape[1])[None]
    return None


def _compute(model: torch.nn.Module, logits: torch.Tensor) -> list[torch.Tensor]:
    """Logits, and the gradients of all parameters as one tensor."""
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    return [logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def _is_ours(error: Exception) -> bool:
    return str(error).startswith(
        ("split:", "attention of a transformers model:", "attn_implementation=", "ring_attent")
    )


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:300]


def page(found: list[Found]) -> str:
    """The page of the docs: what is equal, and what is refused, by reasons."""
    import transformers

    by = {result: [x for x in found if x.result == result] for result in ("equal", "refused", "not built", "WRONG")}
    rows = {}
    for x in by["refused"]:
        rows.setdefault(_reason(x), []).append(x.name)
    lines = [
        "# Which models from transformers run on a ring",
        "",
        "We tried to build every causal language model that `AutoModelForCausalLM` knows as a tiny model with",
        "random weights, and ran those that could be built over a sequence split over three simulated ranks. Their",
        "logits and all their gradients were compared, in float32, with those of the same model on one device;",
        '"equal" means that they agree to 1e-4. `Lfm2ForCausalLM` and `GraniteMoeHybridForCausalLM` were built',
        "with attention layers only; with their convolution or Mamba layers they are refused. What a model needs is in",
        f"[your own model](your_model.md#what-is-supported). transformers {transformers.__version__}, torch "
        f"{torch.__version__.split('+')[0]}; this page is",
        "made by `python tools/sweep_architectures.py`.",
        "",
        "| result | models |",
        "|---|---|",
        *(f"| {name} | {len(some)} |" for name, some in by.items() if some),
        "",
        "## Equal",
        "",
        ", ".join(f"`{x.name}`" for x in by["equal"]),
        "",
        "## Refused, by name and with a reason",
        "",
        "Every rank raises an error with the reason, at the latest in the first attention layer of the model.",
        "",
        "| reason | models |",
        "|---|---|",
        *(f"| {why} | {', '.join(f'`{name}`' for name in names)} |" for why, names in sorted(rows.items())),
        "",
        "## Not built",
        "",
        "transformers could not build a tiny model of these from a configuration, so nothing is known about them.",
        "",
        "| model | what happened |",
        "|---|---|",
        *(f"| `{x.name}` | {_in_a_cell(x.why)} |" for x in by["not built"]),
    ]
    if by["WRONG"]:
        lines += ["", "## Wrong", "", *(f"* `{x.name}`: {_in_a_cell(x.why)}" for x in by["WRONG"])]
    return "\n".join(lines) + "\n"


def _reason(x: Found) -> str:
    """Without what differs from model to model: its name, the layer's, a number."""
    if "called without the information which tokens" in x.why:
        return "does not pass the arguments of a call on to attention"
    why = x.why.split(": ", 1)[1].split(";")[0].removeprefix(f"{x.name} ")
    why = re.sub(r"^the model of \w+ ", "", re.sub(r"^[a-z_.\d]+ is a ", "a layer is a ", why))
    return _in_a_cell(why.removesuffix(", which are not supported").removesuffix(", which is not supported"))


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of class names, such as Llama; all models if there are none")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # one that is not tiny after all ends in an error
    register()
    found = []
    for name in architectures():
        if options.names and not any(part.lower() in name.lower() for part in options.names):
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found.append(sweep(name))
        print(*found[-1], flush=True)
    if not options.names:
        PAGE.write_text(page(found))
    return int(any(x.result == "WRONG" for x in found))


if __name__ == "__main__":
    sys.exit(main())

"""Bytes of one GPU, by component, of a training step."""

from __future__ import annotations

from ..costs.training import kept_numbers
from .attention import traffic
from .constants import FITTED, Constants
from .models import Model
from .setup import Setup

TILE = 8192  # tokens of a block of a tiled loss or feed-forward


def rank_parameters(m: Model, s: Setup) -> float:
    """Parameters of the fullest rank before sharding: its layers, and the embedding or the output layer or both.

    >>> from .models import model
    >>> rank_parameters(model("llama-3.1-8b"), Setup(tp=2)) * 2
    8030261248.0
    """
    layers, ends = -(-m.layers // s.pp), (1 if m.tied or s.pp > 1 else 2) * m.embedding + m.width
    layer = m.layer - (m.experts - m.experts / s.ep) * m.expert
    return (max((layers - 1) * layer + ends, layers * layer) if short_ends(m, s) else layers * layer + ends) / s.tp


def short_ends(m: Model, s: Setup) -> bool:
    """Whether the first and last stage of a pipeline have a layer less than others: Llama 3 405B has 126 for 16."""
    return s.pp > 1 and -m.layers % s.pp >= 2


def state(m: Model, s: Setup) -> dict[str, float]:
    """Weights, gradients and optimizer, and the copies that compute (Rajbhandari et al. 2020, "ZeRO", section 5)."""
    n, f = rank_parameters(m, s), s.kept
    sharded = [s.shards if s.fsdp >= level else 1 for level in (3, 2, 1)]
    bytes_of = dict(zip(("weights", "gradients", "optimizer"), (f.weights, f.gradients, f.optimizer), strict=True))
    found = {name: n * each / k for (name, each), k in zip(bytes_of.items(), sharded, strict=True)}
    if s.offload_weights:
        found["weights"] = 0.0
    copies = f.computed or f.weights
    if s.fsdp == 3:
        if s.pp > 1:  # a stage's weights stay gathered, and their gradients are summed whole, over all micro-batches
            found["gathered weights"] = n * copies
            found["gathered gradients"] = n * f.summed
        else:  # two layers, one computing and one arriving, and the output layer, with the gradient of what is computed
            layer = (m.layer - (m.experts - m.experts / s.ep) * m.expert) / s.tp
            found["gathered weights"] = copies * (2 * layer + m.embedding / s.tp)
            found["gathered gradients"] = copies * max(layer, m.embedding / s.tp)
    elif f.computed and s.framework != "ringlearn":
        found["gathered weights"] = n * f.computed
    return found


def _widths(m: Model, s: Setup) -> tuple[float, float, float, float]:
    """Numbers of a token on one rank: residual stream, queries, keys and values, feed-forward."""
    kv = 2 * max(1.0, m.kv_heads / s.tp) * m.head_dim  # a head of keys and values is not split
    return m.width / s.tp, m.heads * m.head_dim / s.tp, kv, m.active * m.ffn / s.tp


def kept_per_token(m: Model, s: Setup, recompute: str | None = None) -> float:
    """Bytes that one layer keeps of each local token for its backward, in bf16.

    none: the inputs of both norms and what they return, q, k, v, out and its lse, and the feed-forward's tensors (with
    Megatron 18 + 4 ffn / h bytes a number, Korthikanti et al. 2022, "Reducing Activation Recomputation", table 2, of
    selective recomputation, which flash attention makes needless). selective: the layer's input, q, v, out and lse, one
    product into the feed-forward and the one out of it. full: the layer's input. offload: nothing.
    """
    recompute = recompute or s.recompute
    d, q, kv, ffn = _widths(m, s)
    lse = 4 * m.heads / s.tp
    if recompute == "full":
        return s.kept.residual * d
    if recompute == "offload":
        return 0.0
    if s.framework == "megatron":
        return 18 * d + 4 * ffn
    if recompute == "selective":
        return 2 * (2 * d + 2 * q + kv / 2 + ffn) + lse
    inside = 0 if s.tiled_mlp else (s.kept.mlp_kept if s.compiled else 4) * ffn
    return 2 * (4 * d + 2 * q + kv + inside) + lse


def working_per_token(m: Model, s: Setup) -> float:
    """Bytes that the backward of one layer makes of each local token, at the fullest of its two halves.

    Feed-forward: gradients of its inner tensors, of its input and of the stream. Attention: those of the stream, of
    out, q, k, v, and what the kernel needs: dq in float32 until it is whole (Dao 2023, section 3.1), and for
    grouped-query heads dk, dv of every query head before they are summed; FlashAttention-3 and 4 sum them in float32. A
    ring's are in ``traffic``.
    """
    d, q, kv, ffn = _widths(m, s)
    feed_forward = 2 * (2 * d + (0 if s.tiled_mlp else s.kept.mlp_gradients * ffn))
    if s.cp > 1 and s.strategy == "ring":
        return max(feed_forward, 2 * (2 * d + q))
    one_head = m.heads // max(m.kv_heads, s.cp if s.strategy == "ulysses" else 1) <= 1  # of queries for one of keys
    grouped = 0 if one_head else 4 * kv if s.kernel in ("fa3", "fa4") else 4 * q
    return max(feed_forward, 2 * (2 * d + 2 * q + kv) + 4 * q + grouped)


def _gathered_by_tp(m: Model, s: Setup, tokens: float) -> float:
    """Whole rows that tensor parallelism gathers: of the input of both halves, and their gradients, in bf16."""
    return 3 * 2 * tokens * m.width if s.tp > 1 else 0.0


def _strategy(m: Model, s: Setup, S: int) -> int:
    """Bytes that the strategy holds at the fullest moment of a backward, which is fuller than a forward."""
    if s.cp == 1:
        return 0
    heads, groups = max(1, m.heads // s.tp), max(1, m.kv_heads // s.tp)
    if s.framework == "zero-offload":  # q, k, v are traded before they are kept, in bf16: k, v as often as they are used
        extra = 2 * m.head_dim * (max(groups, s.cp) - groups)
        return s.sequences * -(-S // s.cp) * 2 * (2 * heads * m.head_dim + 2 * extra)  # out and dout twice, k, v, dk, dv
    call = dict(B=s.sequences, itemsize=2, layout=s.layout)
    return max(
        traffic(s.strategy, S, s.shape, heads, groups, m.head_dim, backward=backward, **call).held
        for backward in (False, True)
    )


def in_flight(s: Setup) -> float:
    """Micro-batches whose activations the first stage holds: those before the first backward (Narayanan et al. 2021).

    >>> in_flight(Setup(pp=4, microbatches=8)), in_flight(Setup(pp=4, microbatches=2)), in_flight(Setup())
    (4, 2, 1)
    """
    waiting = min(s.pp, s.microbatches)
    return waiting if s.stages == 1 else waiting * (1 + (s.pp - 1) / (s.pp * s.stages))


def activations(m: Model, s: Setup, S: int) -> dict[str, float]:
    """What is kept for the backward, and what is there at the fullest moment: the loss, or one layer's backward."""
    tokens = s.sequences * -(-S // s.cp)
    layers = -(-m.layers // s.pp)
    if s.framework == "ringlearn":
        return _of_ringlearn(m, s, S, tokens)
    kept = tokens * layers * kept_per_token(m, s) * in_flight(s)
    name = "checkpoints" if s.recompute in ("full", "offload") else "activations"
    found = {name: kept}
    if s.recompute == "offload":
        found[name] = 2 * tokens * m.width / s.tp  # the one that comes back while a layer computes
    again = tokens * max(0.0, kept_per_token(m, s, "none") - kept_per_token(m, s))
    layer = again + tokens * working_per_token(m, s) + _gathered_by_tp(m, s, tokens) + _strategy(m, s, S)
    block = min(tokens, TILE) if s.tiled_mlp else 0
    layer += block * 2 * (4 + s.kept.mlp_gradients) * m.active * m.ffn / s.tp
    rows = min(tokens, TILE) if s.tiled_loss else tokens
    each = s.kept.logits + (8 if s.tp > 1 else 0)
    logits = rows * each * m.vocabulary / s.tp
    if s.tiled_loss:  # the gradients of the last hidden states, and of the output layer in float32
        logits += 2 * 2 * tokens * m.width / s.tp + 4 * m.embedding / s.tp
    if s.pp > 1:  # the last stage holds one micro-batch, and the first all that wait
        logits = max(0.0, logits - kept * (1 - 1 / in_flight(s)))
    found["logits" if logits > layer else "one layer's backward"] = max(logits, layer)
    if s.cp > 1 and layer >= logits:
        found["buffers of the strategy"] = _strategy(m, s, S)
        found["one layer's backward"] -= found["buffers of the strategy"]
    return found


def _of_ringlearn(m: Model, s: Setup, S: int, tokens: int) -> dict[str, float]:
    """``rl.nn.Transformer`` under autocast: what ``costs.training`` counts, residual stream and norms in float32."""
    way = "anew" if s.recompute == "full" else "blocks"
    numbers = dict(kept_numbers(s.cp, layers=m.layers, H=m.heads, G=m.kv_heads, D=m.head_dim, way=way))
    half = {"attention"}  # what autocast makes bf16; a Linear keeps its input as bf16 too
    kept = tokens * sum(n * (2 if name in half else 4) for name, n in numbers.items())
    kept += tokens * 2 * m.width * m.layers * (way == "blocks")
    rows = min(tokens, TILE)
    block = rows * max(2 * 4 * m.ffn * 3, s.kept.logits * m.vocabulary)
    found = {"activations": kept}
    working = tokens * (working_per_token(m, s) + 4 * 2 * m.width)
    strategy = _strategy(m, s, S)
    found["one layer's backward"] = max(block, working)
    if strategy:
        found["buffers of the strategy"] = strategy
    return found


def memory(m: Model, s: Setup, S: int, constants: Constants = FITTED) -> dict[str, float]:
    """Bytes of the fullest GPU by component, and last the reserve: CUDA, NCCL and what the allocator cannot use.

    Without the reserve it is what PyTorch calls allocated; with the allocator's part of it, reserved; with all of it,
    what nvidia-smi shows.
    """
    found = {name: n for name, n in (state(m, s) | activations(m, s, S)).items() if n}
    found["reserve"] = constants.device_overhead + (constants.reserved - 1) * sum(found.values())
    return found

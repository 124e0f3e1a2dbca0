"""Seconds of a training step on one GPU, by component."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..costs.problem import Problem
from ..layouts import LAYOUTS
from .attention import Traffic, imbalance, traffic
from .constants import FITTED, Constants
from .hardware import FORWARD, GPU
from .links import Group
from .memory import rank_parameters, short_ends
from .models import Model
from .setup import Setup

HOST = 55e9  # bytes per second between a GPU and its host's memory, PCIe 5 x16, of 63e9
HOST_OPTIMIZER = 40e9  # bytes per second that the optimizer of one GPU's share reads and writes in the host's memory


@dataclass(frozen=True)
class Work:
    """Operations of one micro-batch on one GPU, a multiply-add counting as two: of the forward.

    fast: matrix products in the setup's low precision.  slow: those that stay in bf16.  head: of the output layer.
    scores: of attention under the causal mask.
    """

    fast: float
    slow: float
    head: float
    scores: float


def work(m: Model, s: Setup, S: int, density: float = 1.0) -> Work:
    """What the busiest pipeline rank computes: 2 operations a parameter and token, 4 a pair and dimension.

    density: the part of the causal pairs that packed documents see.

    >>> from .models import model
    >>> w = work(model("llama-3.1-8b"), Setup(), 1)
    >>> round((w.fast + w.slow + w.head) / 2 / (8030261248 - 128256 * 4096), 3)  # of all but the embedding
    1.0
    """
    tokens, layers = s.sequences * S / s.cp, -(-m.layers // s.pp)
    projections, feed_forward = m.attention, m.active * m.expert + m.router
    low = {"bf16": projections + feed_forward, "fp8": projections + feed_forward, "fp8-ffn": feed_forward}[s.precision]
    high = projections + feed_forward - low
    per_layer = 2 * tokens * layers / s.tp
    together = s.cp if s.strategy == "ulysses" else s.inner if s.strategy == "hybrid" else 1  # that share out the heads
    heads = m.heads / s.tp
    uneven = -(-heads // together) * together / heads  # where they do not divide, the busiest rank has one more
    if s.strategy != "ulysses":  # there, each rank has whole rows of scores
        uneven *= imbalance(s.layout, S, s.cp // s.inner)
    pairs = s.sequences * m.pairs(S) / s.cp * uneven
    return Work(
        fast=per_layer * low,
        slow=per_layer * high,
        head=2 * tokens * m.embedding / s.tp * (not short_ends(m, s)),
        scores=4 * density * pairs * m.heads * m.head_dim * layers / s.tp,
    )


def best_kernel(gpu: GPU, s: Setup) -> str:
    """The kernel of the setup, or cuDNN's where the GPU has it, else FlashAttention-2."""
    kernel = s.kernel or ("cudnn" if "cudnn" in gpu.kernels else "fa2")
    if kernel not in gpu.kernels:
        raise ValueError(f"plan: expected a kernel of {gpu.name}, one of {', '.join(gpu.kernels)}, got {kernel!r}")
    return kernel


def again(m: Model, s: Setup) -> tuple[float, float]:
    """The part of a layer's matrix products, and of its attention, that the backward computes once more.

    selective: every second product, k, out and one of the feed-forward's three.
    """
    if s.recompute in ("full", "offload"):
        return 1.0, 1.0
    if s.recompute == "selective" and s.framework == "fsdp2":
        kv, q = m.width * m.kv_heads * m.head_dim, m.width * m.heads * m.head_dim
        return (kv + q + m.active * m.width * m.ffn) / (m.attention + m.active * m.expert + m.router), 0.0
    if s.framework == "ringlearn":
        return m.expert / (m.attention + m.expert), 0.0
    return 0.0, 0.0


def elementwise_bytes(m: Model, s: Setup) -> float:
    """Bytes of main memory that everything but products and attention of one layer reads and writes for each token.

    Compiled, each of these is a kernel that reads bf16 and writes bf16: two norms, two additions, RoPE of q and k, the
    feed-forward's activation; with FP8 also a cast of every product's input. Not compiled, a norm is five kernels
    (cast to float32, square, mean, scale, gain and cast), RoPE three (cast, turn, cast), the activation two. Backward
    twice that.
    """
    d, turned, ffn = m.width, (m.heads + m.kv_heads) * m.head_dim, m.active * m.ffn
    norm, turn, activation = memory_passes(s)
    forward = 2 * norm * d + 2 * 3 * s.kept.residual * d + turn * turned + activation * ffn
    casts = 3 * 3 * (2 * d + m.heads * m.head_dim + ffn) if s.precision == "fp8" else 0  # of 2 bytes to 1
    return ((3 + (s.recompute in ("full", "offload"))) * forward + casts) / s.tp


def memory_passes(s: Setup) -> tuple[int, int, int]:
    """Bytes read and written for a number of a norm, of RoPE, and of the feed-forward's activation."""
    return (4, 4, 6) if s.compiled else (6 + 8 + 4 + 8 + 6, 6 + 12 + 6, 4 + 6)


def step_seconds(
    m: Model, s: Setup, S: int, gpu: GPU, constants: Constants = FITTED, *, density: float = 1.0
) -> dict[str, float]:
    """Seconds of one step by component; their sum is the step.

    matrix products, attention, elementwise: those of all micro-batches.  recomputation: products and attention that are
    computed again.  strategy, tensor parallel, experts, pipeline, FSDP: the time that the GPU waits for their messages.
    pipeline: its bubble, (pp - 1) / (stages microbatches) of the rest (Narayanan et al. 2021, section 2.2).
    """
    w = work(m, s, S, density)

    def group(size: int, stride: int) -> Group:
        return Group.of(gpu, size, stride, constants.links)

    bf16 = gpu.bf16 * constants.products_bf16
    low = bf16 if s.precision == "bf16" else gpu.peak("fp8") * constants.products_fp8
    kernel = gpu.bf16 * gpu.kernels[best_kernel(gpu, s)]
    products = w.fast / low + w.slow / bf16
    attention = w.scores * 3.5 / kernel
    tokens, layers = s.sequences * S / s.cp, -(-m.layers // s.pp)
    products_again, attention_again = again(m, s)
    found = {
        "matrix products": 3 * products + (4 if s.framework == "ringlearn" else 3) * w.head / bf16,
        "attention": attention,
        "elementwise": tokens * layers * elementwise_bytes(m, s) / gpu.bandwidth,
        "recomputation": products_again * products + attention_again * attention / 3.5 / FORWARD,
    }
    computing = sum(found.values())
    if s.recompute == "offload":  # out in the forward, back in the backward
        found["offloading"] = max(0.0, 4 * tokens * m.width * layers / s.tp / HOST - computing)
    found["strategy"] = _strategy(m, s, S, group(s.cp, s.tp), attention)
    rows, whole = 2 * tokens * m.width, s.recompute in ("full", "offload")
    if s.tp > 1:  # a gather and a scatter for each half of a layer; computed again, the last sum is not needed
        message = (8 + 3 * whole) * layers * group(s.tp, 1).gather(rows)
        hidden = found["matrix products"] + products_again * products if s.async_tp else 0.0
        found["tensor parallel"] = max(message / s.tp, message - hidden)
    if s.ep > 1:
        sent = rows / s.tp * m.active * (s.ep - 1) / s.ep
        experts = group(s.ep, s.tp)
        found["experts"] = 2 * (2 + whole) * layers * experts.exchange(*_sides(sent, experts))
    found["FSDP"] = 0.0
    n = rank_parameters(m, s)
    of_experts = layers * m.experts * m.expert / s.ep / s.tp if s.ep > 1 else 0.0
    shards, few = group(s.shards, s.tp), group(s.shards // s.ep, s.tp * s.ep)  # few: that have the same experts

    def gather(each: int) -> float:
        return shards.gather(each * (n - of_experts)) + few.gather(each * of_experts)

    if s.shards > 1 and s.fsdp == 3 and s.pp == 1:  # each micro-batch gathers twice and scatters once, behind computing
        message = 2 * gather(2) + gather(4 if s.framework == "fsdp2" else 2)
        found["FSDP"] = max(message / (2 * m.layers), message - computing)
    found = {name: s.microbatches * value for name, value in found.items()}
    if s.shards > 1 and not (s.fsdp == 3 and s.pp == 1):  # once in a step: weights, and gradients in float32
        message = gather(2) + gather(4)
        found["FSDP"] = max(message / (2 * layers), message - computing)
    if s.pp > 1:
        hop = group(s.pp, s.tp * s.cp * s.dp).exchange(0, rows / s.tp)
        found["pipeline"] = sum(found.values()) * (s.pp - 1) / (s.stages * s.microbatches) + 2 * (s.pp - 1) * hop
    found["optimizer"] = _optimizer(s, rank_parameters(m, s, s.shards if s.fsdp else 1), gpu)
    if not s.compiled:
        starting = constants.host_per_layer * layers * s.microbatches
        found["host"] = max(0.0, starting - sum(found.values()))
    return {name: value for name, value in found.items() if value}


def _sides(nbytes: float, group: Group) -> tuple[float, float]:
    """What of an all-to-all stays in the node, and what leaves it."""
    across = nbytes * (group.size - group.places) / max(1, group.size - 1)
    return nbytes - across, across


def _strategy(m: Model, s: Setup, S: int, group: Group, attention: float) -> float:
    """Seconds in which the GPU waits for the strategy's messages, while all layers compute ``attention`` seconds."""
    if s.cp == 1:
        return 0.0
    layers, total = -(-m.layers // s.pp), 0.0
    for part, t in passes(m, s, S, group):
        behind = part * attention / layers * (s.cp - 1) / s.cp
        if s.strategy == "hybrid":
            total += group.exchange(t.inner, 0) + max(0.0, group.exchange(0, t.outer) - behind)
        else:
            seconds = group.exchange(t.inner, t.outer, t.messages if t.hidden else 2)
            total += max(0.0, seconds - behind) if t.hidden else seconds
    return layers * total


def passes(m: Model, s: Setup, S: int, group: Group) -> Iterator[tuple[float, Traffic]]:
    """Calls of attention in one layer, forward (again) and backward: the part of attention's time, and the messages."""
    heads, groups = max(1, m.heads // s.tp), max(1, m.kv_heads // s.tp)
    shape = s.shape if s.strategy in ("hybrid", "double-ring") else (group.nodes, s.cp // group.nodes)
    for backward in [False] * (1 + (s.recompute in ("full", "offload"))) + [True]:
        call = Problem(S, shape, heads, groups, m.head_dim, s.sequences, backward=backward, layout=LAYOUTS[s.layout])
        yield (2.5 if backward else 1) / 3.5, traffic(s.strategy, call)


def _optimizer(s: Setup, mine: float, gpu: GPU) -> float:
    """AdamW reads weights, gradients and both moments, and writes all but the gradients: 28 bytes a parameter.

    In the host's memory besides: gradients go out and weights come back, 2 bytes each.
    """
    if s.kept.optimizer:
        return 28 * mine / gpu.bandwidth
    return 28 * mine / HOST_OPTIMIZER + 4 * mine / HOST


def model_flops(m: Model, S: int, sequences: int) -> float:
    """Operations of a step that the model itself needs: 6 per token for each active parameter except the embedding,
    and attention under the causal mask, with a backward of twice the forward; none for recomputation (Chowdhery et al.
    2022, "PaLM", appendix B, which counts all pairs).
    """
    linear = m.active_parameters - (0 if m.tied else m.embedding)
    return sequences * (6 * S * linear + 12 * m.pairs(S) * m.heads * m.head_dim * m.layers)

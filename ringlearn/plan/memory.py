"""Bytes of one GPU, by component, of a training step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..costs.problem import Problem
from ..costs.training import kept_numbers
from ..layouts import LAYOUTS
from .attention import traffic
from .constants import FITTED, Constants
from .models import Model
from .setup import Setup

TILE = 8192  # tokens of a block of a tiled loss or feed-forward


def rank_parameters(m: Model, s: Setup, shards: int = 1) -> float:
    """Parameters of the fullest rank: its layers, and the embedding or the output layer or both.

    shards: over how many ranks they are sharded, 1 or ``s.shards``.

    >>> from .models import model
    >>> rank_parameters(model("llama-3.1-8b"), Setup(tp=2)) * 2
    8030261248.0
    >>> rank_parameters(model("gpt-oss-20b"), Setup(dp=8, ep=4), shards=8) * 8 == model("gpt-oss-20b").parameters
    True
    """
    layers, ends = -(-m.layers // s.pp), ((1 if m.tied or s.pp > 1 else 2) * m.embedding + m.width) / shards
    layer = layer_parameters(m, s, shards)
    return (max((layers - 1) * layer + ends, layers * layer) if short_ends(m, s) else layers * layer + ends) / s.tp


def layer_parameters(m: Model, s: Setup, shards: int = 1) -> float:
    """Of a layer, before tensors are split. ep ranks share out its experts, each sharded over every ep-th rank only."""
    experts = m.experts * m.expert if s.ep > 1 else 0
    return (m.layer - experts) / shards + experts / s.ep / max(1, shards / s.ep)


def short_ends(m: Model, s: Setup) -> bool:
    """Whether the first and last stage of a pipeline have a layer less than others: Llama 3 405B has 126 for 16."""
    return s.pp > 1 and -m.layers % s.pp >= 2


def state(m: Model, s: Setup, loss: bool = False) -> dict[str, float]:
    """Weights, gradients and optimizer, and the copies that compute (Rajbhandari et al. 2020, "ZeRO", section 5).

    Of weights that are sharded two layers are gathered at a time, one that computes and one that arrives, and one has
    whole gradients. loss: at that moment the output layer is one of the two.

    >>> from .models import model
    >>> sum(state(model("llama-3.1-8b"), Setup(framework="megatron", fsdp=0)).values()) / 8030261248
    18.0
    """
    n, f, levels = rank_parameters(m, s), s.kept, (3, 2, 1)
    mine = [rank_parameters(m, s, s.shards if s.fsdp >= level else 1) for level in levels]
    bytes_of = dict(zip(("weights", "gradients", "optimizer"), (f.weights, f.gradients, f.optimizer), strict=True))
    found = {name: each * n for (name, each), n in zip(bytes_of.items(), mine, strict=True)}
    if s.offload_weights:
        found["weights"] = 0.0
    copies = f.computed or f.weights
    if s.fsdp == 3 and s.pp > 1:  # a stage's weights stay gathered, their gradients are summed whole in the meantime
        found |= {"gathered weights": n * copies, "gathered gradients": n * f.summed}
    elif s.fsdp == 3:
        layer = layer_parameters(m, s) / s.tp
        computing = m.embedding / s.tp if loss else layer
        found |= {"gathered weights": copies * (computing + layer), "gathered gradients": copies * computing}
    elif f.computed:
        found["gathered weights"] = n * f.computed
    return found


# As much memory as this many tensors of the stream lies in gaps that the allocator cannot use. On an H200, 41 GiB in
# tensors of up to 2.6 GiB made it reserve 47 GiB, which is 1.75 tensors more.
GAPS = 2


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer for each local token, in bf16.

    attention, rest: what the two halves need for their backward. attention_backward, rest_backward: what these make.
    """

    attention: float
    rest: float
    attention_backward: float
    rest_backward: float

    @property
    def fullest(self) -> float:
        """Of the layer's backward, which begins with the second half and then forgets what that half needed."""
        return max(self.attention + self.rest + self.rest_backward, self.attention + self.attention_backward)


def layer(m: Model, s: Setup) -> Layer:
    """Tensors of a layer, counted one by one.

    First half: the input and its norm, q, k (and before their norm, if they have one), v, out and its lse. Second:
    its input and its norm, and of the feed-forward gate and up, with Liger's kernel their product, and if nothing
    fuses them the activation as well. Their backwards: the gradient of the stream; of the feed-forward's tensors; of
    out, q, k, v. The kernel sums dq in float32 (Dao 2023, section 3.1), and for grouped-query heads returns dk, dv of
    every query head; FlashAttention-3 and 4 sum these in float32 instead. What a ring makes instead is in
    ``traffic``.
    """
    d, q = m.width / s.tp, m.heads * m.head_dim / s.tp
    kv = 2 * max(1.0, m.kv_heads / s.tp) * m.head_dim  # a head of keys and values is not split
    ffn = 0.0 if s.tiled_mlp else m.active * m.ffn / s.tp
    ring = s.cp > 1 and s.strategy == "ring"
    normed = q + kv / 2 if m.qk_norm else 0.0  # q, k before their norm
    one_head = m.heads // max(m.kv_heads, s.cp if s.strategy == "ulysses" else 1) <= 1  # of queries for one of keys
    grouped = 0 if one_head else 4 * kv if s.kernel in ("fa3", "fa4") else 4 * q
    return Layer(
        attention=2 * (2 * d + 2 * q + kv + normed) + 4 * m.heads / s.tp,
        rest=2 * (2 * d + (s.kept.mlp_kept if s.compiled else 4) * ffn),
        attention_backward=2 * (d + q) + (0 if ring else 2 * (q + kv) + 4 * q + grouped),
        rest_backward=2 * (2 * d + (s.kept.mlp_gradients if s.compiled else 2) * ffn),
    )


def kept_per_token(m: Model, s: Setup) -> float:
    """Bytes that one layer keeps of each local token until its backward.

    none: all that it needs. selective: the layer's input, q, v, out and lse, one product into the feed-forward and the
    one out of it, as torchtitan does; with Megatron 18 + 4 ffn / width bytes a number (Korthikanti et al. 2022,
    "Reducing Activation Recomputation", table 2). full: the input. offload: nothing.
    """
    d, q = m.width / s.tp, m.heads * m.head_dim / s.tp
    kv, ffn = 2 * max(1.0, m.kv_heads / s.tp) * m.head_dim, m.active * m.ffn / s.tp
    if s.recompute == "full":
        return s.kept.residual * d
    if s.recompute == "offload":
        return 0.0
    if s.framework == "megatron":
        return 18 * d + 4 * ffn
    if s.recompute == "selective":
        return 2 * (2 * d + 2 * q + kv / 2 + ffn) + 4 * m.heads / s.tp
    return layer(m, s).attention + layer(m, s).rest


def strategy_bytes(m: Model, s: Setup, S: int) -> int:
    """Bytes that the strategy holds at the fullest moment of one layer, forward or backward."""
    if s.cp == 1:
        return 0
    heads, groups = max(1, m.heads // s.tp), max(1, m.kv_heads // s.tp)
    if s.framework == "zero-offload":  # traded before they are kept, in bf16; out and dout are there before and after
        again = 2 * m.head_dim * (max(groups, s.cp) - groups)  # k, v that several ranks use; dk, dv of them
        return s.sequences * -(-S // s.cp) * 2 * (2 * heads * m.head_dim + 2 * again)
    call = Problem(S, s.shape, heads, groups, m.head_dim, s.sequences, layout=LAYOUTS[s.layout])
    return max(traffic(s.strategy, replace(call, backward=backward)).held for backward in (False, True))


def in_flight(s: Setup) -> float:
    """Micro-batches whose activations the first stage holds: those before the first backward (Narayanan et al. 2021).

    >>> in_flight(Setup(pp=4, microbatches=8)), in_flight(Setup(pp=4, microbatches=2)), in_flight(Setup())
    (4, 2, 1)
    """
    waiting = min(s.pp, s.microbatches)
    return waiting if s.stages == 1 else waiting * (1 + (s.pp - 1) / (s.pp * s.stages))


def loss_bytes(m: Model, s: Setup, tokens: float) -> float:
    """Bytes of the loss at its fullest: logits in the framework's copies, or one block of them and its gradients."""
    each = s.kept.logits + (8 if s.tp > 1 else 0)
    if not s.tiled_loss:
        return tokens * each * m.vocabulary / s.tp
    hidden = 2 * 2 * tokens * m.width / s.tp  # the last hidden states, and their gradient
    return min(tokens, TILE) * each * m.vocabulary / s.tp + hidden + 4 * m.embedding / s.tp


def activations(m: Model, s: Setup, S: int) -> dict[str, float]:
    """When the backward begins: all that is kept, and the loss or the last layer's backward, whichever is more."""
    tokens = s.sequences * -(-S // s.cp)
    kept = tokens * -(-m.layers // s.pp) * kept_per_token(m, s) * in_flight(s)
    if s.recompute == "offload":
        kept = 2 * tokens * m.width / s.tp  # the one that comes back while a layer computes
    strategy = strategy_bytes(m, s, S)
    gathered = 3 * 2 * tokens * m.width if s.tp > 1 else 0.0  # whole rows: the input of both halves, and a gradient
    block = min(tokens, TILE) * 2 * (4 + s.kept.mlp_gradients) * m.active * m.ffn / s.tp if s.tiled_mlp else 0.0
    whole = tokens * max(0.0, layer(m, s).fullest - kept_per_token(m, s)) + gathered + block
    loss = loss_bytes(m, s, tokens)
    if s.pp > 1:  # the last stage, which has the loss, holds one micro-batch where the first holds all that wait
        loss = max(0.0, loss - kept * (1 - 1 / in_flight(s)))
    found = {"checkpoints" if s.recompute in ("full", "offload") else "activations": kept}
    if loss > whole + strategy:
        return found | {"logits and loss": loss}
    return found | {"one layer's backward": whole, "buffers of the strategy": strategy}


def _of_ringlearn(m: Model, s: Setup, S: int) -> dict[str, float]:
    """The same of ``rl.nn.Transformer`` under autocast, from what ``costs.training`` counts.

    The stream, norms and the sines of RoPE are float32, attention's tensors bf16; q, k and v each cast the norm's
    result for themselves. A feed-forward's block has up, its GELU, and the gradient of one. On two slots of symmetric
    memory lie the keys and values that come.
    """
    tokens = s.sequences * -(-S // s.cp)

    def kept(layers: int, way: str) -> float:
        numbers = kept_numbers(s.cp, layers=layers, H=m.heads, G=m.kv_heads, D=m.head_dim, way=way)
        total = 4 * sum(numbers.values())
        if way == "blocks":
            total -= 2 * (numbers["attention"] - layers * m.heads)  # bf16, but for lse
            total += layers * m.width * (3 * 2 - 4)  # three casts of the norm's result, which is forgotten itself
        return total

    block = min(tokens, TILE) * max(3 * 2 * m.ffn, s.kept.logits * m.vocabulary)
    backward = tokens * 4 * m.width + block
    if s.recompute == "full":  # what one layer keeps, but for its input, is there while its backward runs
        backward += tokens * (kept(1, "blocks") - kept(1, "recompute"))
    of_all = kept(m.layers, "recompute" if s.recompute == "full" else "blocks") + 2 * 8  # a token and its target
    found = {"activations": tokens * of_all, "one layer's backward": backward}
    if s.cp > 1:
        found["buffers of the strategy"] = 2 * tokens * 2 * m.kv_heads * m.head_dim * 2
    return found


def memory(m: Model, s: Setup, S: int, constants: Constants = FITTED) -> dict[str, float]:
    """Bytes of the fullest GPU by component at its fullest moment, and last the reserve: CUDA, NCCL and fragmentation.

    The fullest moment is when the backward begins, before there are gradients (unless earlier micro-batches left some,
    or the framework's stay), or when it ends, with gradients and without activations.

    Without the reserve this is what PyTorch calls allocated; with the allocator's part of the reserve, what it calls
    reserved; with the whole reserve, what nvidia-smi shows.
    """
    begins = (_of_ringlearn if s.framework == "ringlearn" else activations)(m, s, S)
    held = state(m, s, loss="logits and loss" in begins)
    stay = s.microbatches > 1 or s.kept.gradients_stay
    first = {name: n for name, n in held.items() if stay or name != "gradients"} | begins
    last = held | {
        name: n for name, n in begins.items() if name not in ("activations", "checkpoints", "logits and loss")
    }
    found = {name: n for name, n in max(first, last, key=lambda each: sum(each.values())).items() if n}
    unused = (constants.reserved - 1) * sum(found.values())
    if s.framework == "ringlearn":  # long sequences of a narrow model: a few tensors of gigabytes each
        unused = max(unused, GAPS * 4 * s.sequences * -(-S // s.cp) * m.width)
    found["reserve"] = constants.device_overhead + unused
    return found

"""Where each number of a plan comes from: its formula in symbols, with this plan's numbers in it, and a reason.

A formula is computed with ``Number``, which remembers how; tests hold every result to memory.py, seconds.py and
serving.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import wrap

from .constants import FITTED, Constants
from .hardware import FORWARD, GPU, GiB
from .links import INSIDE, Group
from .memory import TILE, activations, memory, short_ends, strategy_bytes
from .memory import layer as counted
from .models import Model
from .seconds import HOST, HOST_OPTIMIZER, again, best_kernel, memory_passes, passes, work
from .serving import KERNEL, KERNELS, MEMORY_RATE, Served
from .setup import Setup
from .table import duration

WIDTH = 110  # columns


def shown(x: float) -> str:
    """
    >>> shown(4096), shown(989e12), shown(0.5718), shown(17e-6), shown(1 / 3)
    ('4,096', '989e12', '0.5718', '17e-6', '0.333333')
    """
    if x == int(x) and (abs(x) < 1e9 or (abs(x) < 1e15 and float(f"{x:.8g}") != x)):
        return f"{int(x):,}"
    if 1e-3 <= abs(x) < 1e6:
        return f"{x:.6g}"
    digits, exponent = f"{x:.7e}".split("e")
    shift = int(exponent) % 3
    return f"{float(digits) * 10**shift:.8g}e{int(exponent) - shift}"


class Number:
    """A number that knows how it was computed: ``symbols`` with names, and ``numbers`` with their values.

    What changes nothing is not written: a factor that is 1, or 0 in a sum.

    >>> n = Number(8192, "n")
    >>> x = (3 + n) * 2
    >>> x.symbols, x.numbers, x.value
    ('(3 + n) x 2', '(3 + 8,192) x 2', 16390)
    """

    def __init__(self, value: float, symbols: str = "", numbers: str = "", order: int = 3, names: tuple = ()):
        self.value, self.order = value, order  # order 1 is a sum, 2 a product, 3 neither
        self.numbers = numbers or shown(value)
        self.symbols, self.names = symbols or self.numbers, names or ((symbols,) if symbols else ())

    def _with(self, sign: str, other: Number, value: float, turned: bool) -> Number:
        a, b = (other, self) if turned else (self, other)
        order = 1 if sign in "+-" else 2
        right = order + (sign in "-/")  # what follows a minus or a stroke needs brackets sooner

        def text(of: str) -> str:
            parts = [(getattr(a, of), a.order < order), (getattr(b, of), b.order < right)]
            return f" {sign} ".join(f"({said})" if inside else said for said, inside in parts)

        return Number(value, text("symbols"), text("numbers"), order, a.names + b.names)

    def __add__(self, other: Number | float, turned: bool = False) -> Number:
        other = number(other)
        if not other.value or not self.value:
            return self if self.value else other
        return self._with("+", other, self.value + other.value, turned)

    def __radd__(self, other: float) -> Number:
        return self.__add__(other, True)

    def __sub__(self, other: Number | float) -> Number:
        other = number(other)
        return self._with("-", other, self.value - other.value, False) if other.value else self

    def __mul__(self, other: Number | float, turned: bool = False) -> Number:
        other = number(other)
        if other.value == 1 or self.value == 0:
            return self
        if self.value == 1 or other.value == 0:
            return other
        return self._with("x", other, self.value * other.value, turned)

    def __rmul__(self, other: float) -> Number:
        return self.__mul__(other, True)

    def __truediv__(self, other: Number | float) -> Number:
        other = number(other)
        return self if other.value == 1 else self._with("/", other, self.value / other.value, False)


def number(x: Number | float) -> Number:
    return x if isinstance(x, Number) else Number(x)


def named(name: str, x: Number) -> Number:
    """The same number, as other formulas call it."""
    return Number(x.value, name.replace(" ", "_"))


def larger(*of: Number | float) -> Number:
    """
    >>> larger(0, Number(2, "a") - 5).numbers
    'max(0, 2 - 5)'
    """
    these = [number(x) for x in of]
    if len(these) == 1:
        return these[0]
    text = [f"max({', '.join(getattr(x, name) for x in these)})" for name in ("symbols", "numbers")]
    return Number(max(x.value for x in these), *text, 3, sum((x.names for x in these), ()))


def exposed(message: Number, behind: Number) -> Number:
    """What the GPU waits for."""
    return larger(0, message - behind)


@dataclass
class Explained:
    """The terms of one plan by name, each with a reason, and what goes into them."""

    m: Model
    s: Setup
    S: int
    gpu: GPU
    constants: Constants = FITTED
    density: float = 1.0
    inputs: dict[str, tuple[Number, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        m, s, put = self.m, self.s, self.put
        for name in ("dp", "tp", "cp", "pp", "ep", "sequences", "microbatches", "stages"):
            setattr(self, name, put(name.replace("micro", "micro_"), getattr(s, name), _AXES[name]))
        self.tokens = put("S", self.S, "tokens of a sequence")
        self.d = put("d", m.width, "width of the model")
        self.H, self.G = put("H", m.heads, "query heads"), put("G", m.kv_heads, "key/value heads")
        self.D = put("D", m.head_dim, "numbers of a head")
        self.words = put("words", m.vocabulary, "words of the vocabulary")
        active = put("active experts", m.active, "feed-forwards that a token passes through")
        self.ffn = active * put("ffn", m.ffn, "width of a feed-forward")
        self.all_layers = put("all layers", m.layers, "layers of the model")
        self.layers = put("layers", up(self.all_layers / self.pp), "layers of a GPU") if s.pp > 1 else self.all_layers
        self.n = put("n", self.sequences * up(self.tokens / self.cp), "tokens of a GPU, in one micro-batch")
        mean = self.sequences * self.tokens / self.cp
        self.mean = self.n if mean.value == self.n.value else put("n'", mean, "tokens of a GPU, the mean over ranks")
        self.q = put("q", self.H * self.D / self.tp, "numbers of a token's queries on a GPU")
        heads = 1 if m.kv_heads < s.tp else self.G / self.tp  # a head is not split
        self.kv = put("kv", 2 * self.D * heads, "numbers of a token's keys and values on a GPU")
        expert = m.experts * (m.expert - m.expert / s.ep)  # of those that other ranks have
        self.layer = put("layer", (Number(m.layer) - expert) / self.tp, "parameters of a layer on a GPU")
        self.embedding = put("embedding", self.words * self.d / self.tp, "parameters of the embedding on a GPU")
        ends = (1 if m.tied or s.pp > 1 else 2) * self.embedding + self.d / self.tp
        own = self.layers * self.layer + ends
        if short_ends(m, s):  # then the first stage has a layer less than others
            own = larger((self.layers - 1) * self.layer + ends, self.layers * self.layer)
        self.parameters = put("parameters", own, "of the fullest GPU before they are sharded")
        self.shards = put("shards", self.dp * self.cp, "GPUs that share out weights, gradients and optimizer")
        self.reach = {False: self.rate("inside", "link", INSIDE), True: self.rate("across", "network", self.links)}

    @property
    def links(self) -> float:
        return self.constants.links

    def put(self, name: str, value: Number | float, meaning: str) -> Number:
        """Name a number, so that formulas have the name; it is listed if one of them needs it."""
        value, name = number(value), name.replace(" ", "_")
        self.inputs[name] = (value, meaning)
        return Number(value.value, name)

    def rate(self, name: str, of: str, reached: float) -> Number:
        words = {"link": "a link inside a node", "network": "a GPU's link to other nodes"}[of]
        rate = Number(getattr(self.gpu, of)) * reached
        return self.put(f"W {name}", rate, f"bytes per second: {words}, and the part that it reaches")

    def needed(self, terms: list[Term]) -> dict[str, tuple[Number, str]]:
        """What goes into these terms, directly or not, in the order in which it was named."""
        wanted, more = set(), {name for term in terms for name in term.value.names}
        while more - wanted:
            wanted |= more
            more = {each for name in wanted if name in self.inputs for each in self.inputs[name][0].names}
        return {name: said for name, said in self.inputs.items() if name in wanted}

    # --- links

    def group(self, size: int, stride: int) -> Group:
        return Group.of(self.gpu, size, stride, self.links)

    def gather(self, nbytes: Number, group: Group, ranks: str) -> Number:
        lacking = nbytes * (group.size - 1) / group.size
        latency = self.put(
            f"start of {ranks}", group.latency, f"seconds of a collective of {ranks} ranks without bytes"
        )
        ways = [lacking / self.reach[False]]
        if group.nodes > 1:
            ways.append(lacking / group.places / self.reach[True])
        return larger(*ways) + latency

    def exchange(self, inner: Number | float, outer: Number | float, group: Group, messages: int = 1) -> Number:
        across = group.nodes > 1
        latency = self.gpu.network_latency if across else self.gpu.latency
        where = "between" if across else "inside"
        late = self.put(f"latency {where}", latency, f"seconds of a message {where} nodes, data sheet or measured")
        ways = [number(x) / self.reach[out] for x, out in ((inner, False), (outer, True)) if number(x).value]
        return (larger(*ways) if ways else number(0)) + messages * late


@dataclass(frozen=True)
class Term:
    name: str
    value: Number
    why: str


_AXES = {
    "dp": "data-parallel groups",
    "tp": "tensor-parallel ranks",
    "cp": "ranks that share a sequence",
    "pp": "pipeline ranks",
    "ep": "ranks that share out the experts",
    "sequences": "sequences of a micro-batch, for each data-parallel group",
    "microbatches": "micro-batches of a step",
    "stages": "stages of each pipeline rank",
}


def up(x: Number) -> Number:
    """Rounded up, and said so where that changes it."""
    whole = -(-x.value // 1)
    if whole == x.value:
        return Number(int(whole), x.symbols, x.numbers, x.order, x.names)
    return Number(int(whole), f"ceil({x.symbols})", f"ceil({x.numbers})", 3, x.names)


# --- memory -----------------------------------------------------------------------------------------------------


def layer_bytes(e: Explained) -> dict[str, Number]:
    """As ``memory.layer`` and ``memory.kept_per_token`` count them."""
    m, s, f = e.m, e.s, e.s.kept
    d, q, kv, H = e.d / e.tp, e.q, e.kv, e.H / e.tp
    ffn = number(0) if s.tiled_mlp else e.ffn / e.tp
    normed = q + kv / 2 if m.qk_norm else 0
    halves = {
        "first half": 2 * (2 * d + 2 * q + kv + normed) + 4 * H,
        "second half": 2 * (2 * d + f.mlp_kept * ffn),
        "backward of the second": 2 * (2 * d + f.mlp_gradients * ffn),
    }
    meaning = {
        "first half": "bytes of a token: input, norm, q, out, k and v in bf16, lse in float32",
        "second half": "bytes of a token: input and norm of the feed-forward, and what is as wide as it",
        "backward of the second": "bytes of a token: gradients of the stream and of the feed-forward's tensors",
    }
    halves = {name: e.put(name, x, meaning[name]) for name, x in halves.items()}
    made = counted(m, s).attention_backward
    of_first = e.put("backward of the first", made, "bytes of a token: gradients of the stream and of q, k, v, out")
    first, second, of_second = halves.values()
    fullest = e.put("fullest", larger(first + second + of_second, first + of_first), "bytes of a token in that layer")
    width = e.ffn / e.tp
    if s.recompute == "full":
        kept = s.kept.residual * d
    elif s.recompute == "offload":
        kept = number(0)
    elif s.framework == "megatron":
        kept = 18 * d + 4 * width
    elif s.recompute == "selective":
        kept = 2 * (2 * d + 2 * q + kv / 2 + width) + 4 * H
    else:
        kept = first + second
    return {"kept": e.put("kept", kept, "bytes that a layer keeps of a token for its backward"), "fullest": fullest}


def memory_terms(e: Explained) -> Iterator[Term]:
    m, s, f = e.m, e.s, e.s.kept
    layer, embedding, parameters, shards = e.layer, e.embedding, e.parameters, e.shards
    parts = {"weights": (f.weights, 3), "gradients": (f.gradients, 2), "optimizer": (f.optimizer, 1)}
    why = {
        "weights": f"{f.weights:g} bytes each" + (", sharded" if s.fsdp >= 3 else ""),
        "gradients": f"{f.gradients:g} bytes each" + (", sharded" if s.fsdp >= 2 else ""),
        "optimizer": f"{f.optimizer:g} bytes each: AdamW's moments in float32"
        + (", and master weights" if f.optimizer > 8 else "") + (", sharded" if s.fsdp >= 1 else ""),
    }  # fmt: skip
    for name, (each, level) in parts.items():
        yield Term(name, each * parameters / (shards if s.fsdp >= level else 1), why[name])
    begins = activations(m, s, e.S)
    loss, copies = "logits and loss" in begins, f.computed or f.weights
    if s.fsdp == 3 and s.pp > 1:
        yield Term("gathered weights", copies * parameters, "those of a pipeline stage stay gathered")
        yield Term("gathered gradients", f.summed * parameters, "summed over micro-batches before they are sharded")
    elif s.fsdp == 3:
        computing = embedding if loss else layer
        which = "the output layer, which computes," if loss else "a layer that computes"
        yield Term(
            "gathered weights", copies * (computing + layer), f"{which} and a layer that arrives, {copies:g} bytes each"
        )
        yield Term("gathered gradients", copies * computing, "of what computes, before they are scattered")
    else:
        yield Term("gathered weights", f.computed * parameters, "the copy that computes, in bf16")
    n, layers, tiles = e.n, e.layers, Number(min(TILE, e.n.value))
    per_token = layer_bytes(e)
    kept, waiting = per_token["kept"], min(s.pp, s.microbatches)
    flight = number(waiting if s.stages == 1 else 1.0 * waiting)
    if s.stages > 1:
        flight = flight * (1 + (e.pp - 1) / (e.pp * e.stages))
    flight = e.put("in flight", flight, "micro-batches whose activations the first stage holds (Narayanan et al. 2021)")
    all_kept = n * layers * kept * flight
    if s.recompute == "offload":
        yield Term("checkpoints", 2 * n * e.d / e.tp, "inputs of the one layer that comes back from the host, in bf16")
        all_kept = 2 * n * e.d / e.tp
    else:
        name = "checkpoints" if s.recompute == "full" else "activations"
        yield Term(name, all_kept, "inputs of layers, where the backward begins anew" if name == "checkpoints" else
                   f"what layers keep for the backward; recompute {s.recompute}")  # fmt: skip
    more = larger(0, per_token["fullest"] - kept) if kept.value else per_token["fullest"]
    whole = n * more
    if s.tp > 1:
        whole = whole + 3 * 2 * n * e.d
    if s.tiled_mlp:
        whole = whole + tiles * 2 * (4 + f.mlp_gradients) * e.ffn / e.tp
    yield Term("one layer's backward", whole, "what it needs beyond what is kept"
               + (", rows gathered over tp" if s.tp > 1 else "")
               + (f", and a block of {TILE:,} tokens of the feed-forward" if s.tiled_mlp else ""))  # fmt: skip
    if s.cp > 1:
        sent = e.put(
            f"held by {s.strategy}", strategy_bytes(m, s, e.S),
            "bytes of messages, gathered rows and partial results, counted rank by rank by ringlearn.costs",
        )  # fmt: skip
        yield Term("buffers of the strategy", sent, "the fullest moment of one layer, forward or backward")
    each = s.kept.logits + (8 if s.tp > 1 else 0)
    logits = f"{each} bytes a logit: bf16, float32, log-probability, gradient" + (
        ", a split softmax" if s.tp > 1 else ""
    )
    if s.tiled_loss:
        of_loss = tiles * each * e.words / e.tp + 4 * n * e.d / e.tp + 4 * embedding
        logits += f", in blocks of {TILE:,} tokens; the last hidden states and the head's gradient"
    else:
        of_loss = n * each * e.words / e.tp
    if s.pp > 1 and flight.value > 1:
        of_loss = larger(0, of_loss - all_kept * (1 - 1 / flight.value))
        logits += ". Less what the last stage does not hold, but the first does"
    yield Term("logits and loss", of_loss, logits)


# --- seconds ----------------------------------------------------------------------------------------------------


def rates(e: Explained, forward: float = 1.0) -> tuple[Number, Number, Number]:
    """Operations per second of products in bf16 and in the setup's precision, and of attention's kernel."""
    peak = Number(e.gpu.bf16)
    bf16 = e.put("F", peak * e.constants.products_bf16, "operations per second of products: the peak, the part reached")
    low = bf16
    if e.s.precision != "bf16":
        fast = Number(e.gpu.peak("fp8")) * e.constants.products_fp8
        low = e.put("F fp8", fast, "the same in FP8")
    kernel = best_kernel(e.gpu, e.s)
    meaning = f"operations per second of {kernel}" + (", forward and backward" if forward == 1 else "'s forward")
    return bf16, low, e.put("F attention", peak * e.gpu.kernels[kernel] * forward, meaning)


def products(e: Explained, bf16: Number, low: Number) -> Number:
    """Seconds of the forward's products in the layers of one micro-batch."""
    m, s = e.m, e.s
    feed_forward = m.active * m.expert + m.router
    of_low = m.attention * (s.precision == "fp8") + feed_forward * (s.precision != "bf16")
    high = m.attention + feed_forward - of_low
    at_low = number(0)
    if of_low:
        at_low = e.put("fp8 parameters", of_low, "of a layer that one token passes through, in FP8") / low
    at_high = e.put("bf16 parameters", high, "of a layer that one token passes through, in bf16") / bf16 if high else 0
    return 2 * e.mean * e.layers / e.tp * (at_low + at_high)


def pairs(e: Explained, dense: float = 1.0) -> Number:
    seen = e.m.pairs(e.S)
    meaning = "queries and keys of a layer that meet under the causal mask"
    if e.m.windowed:
        meaning += f", fewer with a window of {e.m.window} tokens; the mean over layers"
    whole = e.tokens * (e.tokens + 1) / 2
    found = e.put("pairs", seen if e.m.windowed else whole, meaning)
    return found * e.put("seen", dense, "the part of the pairs that packed documents see, on the busiest rank")


def traffic_over(e: Explained) -> Number:
    """Bytes of a token in one layer that norms, RoPE, additions and the activation read and write."""
    s = e.s
    norm, turn, activation = memory_passes(s)
    turned = turn * (e.H + e.G) * e.D
    forward = 2 * norm * e.d + 6 * s.kept.residual * e.d + turned + activation * e.ffn
    return e.put("moved", forward, "bytes of a token in one layer: two norms, two additions, RoPE, the activation")


def seconds_terms(e: Explained) -> Iterator[Term]:
    m, s, gpu, n = e.m, e.s, e.gpu, e.mean
    bf16, low, kernel = rates(e)
    micro, layers, whole = e.microbatches, e.layers, s.recompute in ("full", "offload")
    forward = e.put("forward", products(e, bf16, low), "seconds of the forward's products in one micro-batch")
    head = 2 * n * e.words * e.d / e.tp / bf16 * (not short_ends(m, s))
    of_products = micro * 3 * (forward + head)
    yield Term(
        "matrix products", of_products, "a forward, and a backward of twice that: the layers, and the output layer"
    )
    uneven = work(m, s, e.S, e.density).scores / (
        4 * e.density * s.sequences * m.pairs(e.S) / s.cp * m.heads * m.head_dim * layers.value / s.tp
    )
    of_attention = micro * 14 * e.sequences * pairs(e, e.density) * e.H * e.D * layers / e.cp / e.tp / kernel
    if abs(uneven - 1) > 1e-9:
        of_attention = of_attention * e.put("uneven", uneven, "work of the busiest rank over the mean")
    yield Term(
        "attention",
        of_attention,
        "for a pair and a number of a head, 4 operations in the forward and 10 in the backward",
    )
    moved, casts = traffic_over(e), 9 * (2 * e.d + e.H * e.D + e.ffn) if s.precision == "fp8" else 0
    of_rest = micro * n * layers * ((3 + whole) * moved + casts) / e.tp / Number(gpu.bandwidth)
    why = "bytes over the memory's bandwidth: the forward, a backward of twice that"
    yield Term("elementwise", of_rest, why + ", the forward again" * whole + "; casts to FP8" * bool(casts))
    part, of_scores = again(m, s)
    anew = micro * e.put("part", part, "of a layer's products that the backward computes once more") * forward
    if of_scores:
        anew = anew + named("attention", of_attention) / 3.5 / FORWARD
    why = f", and attention's forward: 1 / 3.5 of it, {FORWARD} times as fast" if of_scores else ""
    yield Term("recomputation", anew, "products of the layers" + why)
    four = {"matrix products": of_products, "attention": of_attention, "elementwise": of_rest, "recomputation": anew}
    computing = e.put("computing", _sum(four) / micro, "seconds that one micro-batch computes")
    done = dict(four)
    if s.recompute == "offload":
        out = 4 * n * e.d * layers / e.tp / HOST
        done["offloading"] = micro * exposed(out, computing)
        yield Term(
            "offloading", done["offloading"], "inputs of layers over PCIe and back, less what hides behind computing"
        )
    if s.cp > 1:
        of_layer = named("attention", of_attention) / micro / layers
        of_layer = e.put("attention of a layer", of_layer, "seconds, forward and backward, of one micro-batch")
        done["strategy"] = micro * layers * _messages(e, of_layer)
        hides = s.strategy in ("ring", "hybrid", "double-ring")
        why = "what attention does not hide" if hides else "which the GPU waits for"
        yield Term("strategy", done["strategy"], f"messages of {s.strategy} in each layer, {why}")
    rows = 2 * n * e.d
    if s.tp > 1:
        gather = e.put("gather of rows", e.gather(rows, e.group(s.tp, 1), "tp"), "seconds: whole rows in bf16, over tp")
        message, done["tensor parallel"] = (8 + 3 * whole) * layers * gather, number(0)
        if s.async_tp:
            hidden = named("matrix products", of_products) / micro + part * forward
            done["tensor parallel"] = micro * larger(message / e.tp, message - hidden)
        else:
            done["tensor parallel"] = micro * message
        why = "a gather and a scatter for each half of a layer, forward and backward"
        yield Term("tensor parallel", done["tensor parallel"], why + ", and three once more" * whole)
    if s.ep > 1:
        group = e.group(s.ep, s.tp)
        sent = e.put("sent to experts", rows / e.tp * m.active * (e.ep - 1) / e.ep, "bytes in a layer")
        across = (group.size - group.places) / max(1, group.size - 1)
        trade = e.exchange(sent * (1 - across) if across < 1 else 0, sent * across if across else 0, group)
        done["experts"] = micro * 2 * (2 + whole) * layers * trade
        yield Term("experts", done["experts"], "tokens' rows go to their experts and come back, forward and backward")
    if s.shards > 1:
        done["FSDP"] = _sharding(e, computing)
        why = "weights are gathered, gradients scattered; less what computing hides, but at least one layer's"
        yield Term("FSDP", done["FSDP"], why)
    if s.pp > 1:
        before = _sum(done)
        hop = e.exchange(0, rows / e.tp, e.group(s.pp, s.tp * s.cp * s.dp))
        done["pipeline"] = before * (e.pp - 1) / (e.stages * micro) + 2 * (e.pp - 1) * hop
        yield Term("pipeline", done["pipeline"], "its bubble (Narayanan et al. 2021), and the first and last hops")
    mine = e.parameters / (e.shards if s.fsdp else 1)
    if s.kept.optimizer:
        yield Term("optimizer", 28 * mine / Number(gpu.bandwidth), "AdamW reads 16 bytes a parameter and writes 12")
    else:
        on_host = 28 * mine / HOST_OPTIMIZER + 4 * mine / HOST
        yield Term("optimizer", on_host, "28 bytes a parameter in the host's memory, and 4 over PCIe")


def _sum(terms: dict[str, Number]) -> Number:
    total = number(0)
    for name, x in terms.items():
        total = total + named(name, x)
    return total


def _messages(e: Explained, attention: Number) -> Number:
    """Seconds in which the GPU waits for the strategy's messages, in one layer."""
    group, found = e.group(e.s.cp, e.s.tp), []
    for part, t in passes(e.m, e.s, e.S, group):
        way = "forward" if part < 0.5 else "backward"
        if found and found[-1][0] == way:  # the forward, once more
            found[-1] = (way, 2 * found[-1][1])
            continue
        what = f"bytes that a rank sends in one {way} of a layer, counted by ringlearn.costs"
        inner = e.put(f"{way} inside", t.inner, what + ": in its node")
        outer = e.put(f"{way} across", t.outer, what + ": to other nodes")
        behind = (1 if way == "forward" else 2.5) * attention / 3.5 * (e.cp - 1) / e.cp
        if e.s.strategy == "hybrid":
            waits = e.exchange(inner, 0, group) + exposed(e.exchange(0, outer, group), behind)
        else:
            seconds = e.exchange(inner, outer, group, t.messages if t.hidden else 2)
            waits = exposed(seconds, behind) if t.hidden else seconds
        found.append((way, waits))
    first, then = (e.put(f"wait in {way}", x, "seconds in one layer") for way, x in found)
    return first._with("+", then, first.value + then.value, False)


def _sharding(e: Explained, computing: Number) -> Number:
    s, group = e.s, e.group(e.s.shards, e.s.tp)
    weights = e.put("gather", e.gather(2 * e.parameters, group, "shards"), "seconds to gather weights in bf16")
    wide = 2 if s.fsdp == 3 and s.pp == 1 and s.framework != "fsdp2" else 4
    meaning = f"seconds to scatter gradients of {wide} bytes"
    scatter = e.put("scatter", e.gather(wide * e.parameters, group, "shards"), meaning)
    if s.fsdp == 3 and s.pp == 1:  # in each micro-batch, for the forward and for the backward
        message = 2 * weights + scatter
        return e.microbatches * larger(message / (2 * e.all_layers), message - computing)
    message = weights + scatter
    return larger(message / (2 * e.layers), message - computing)


# --- serving ----------------------------------------------------------------------------------------------------


def prefill_terms(e: Explained) -> Iterator[Term]:
    s = e.s
    bf16, low, kernel = rates(e, FORWARD)
    rate = _memory_rate(e)
    reading = _weight_bytes(e) / rate
    yield Term(
        "matrix products", larger(products(e, bf16, low), reading), "products of the layers, or reading the weights"
    )
    attention = 4 * pairs(e) * e.H * e.D * e.layers / e.cp / e.tp / kernel
    yield Term("attention", attention, "4 operations for a pair and a number of a head")
    casts = 9 * (2 * e.d + e.H * e.D + e.ffn) / 3 if s.precision == "fp8" else 0
    moved = e.mean * e.layers * (traffic_over(e) + casts) / e.tp
    yield Term("elementwise", moved / rate, "bytes over the memory's bandwidth")
    if s.tp > 1:
        gather = e.gather(2 * e.mean * e.d, e.group(s.tp, 1), "tp")
        yield Term("tensor parallel", 4 * e.layers * gather, "two gathers and two scatters of rows in each layer")
    if s.cp > 1:
        hop = e.put("hop", _direct(e, 2 * e.mean * e.kv), "seconds until keys and values are with the next rank")
        behind = named("attention", attention) / e.layers / e.cp
        yield Term(
            "strategy", e.layers * ((e.cp - 1) * exposed(hop, behind)), "hops of the ring that attention does not hide"
        )


def decode_terms(e: Explained, batch: int) -> Iterator[Term]:
    m, s = e.m, e.s
    rate, rows = _memory_rate(e), e.put("batch", batch, "sequences that decode together")
    skipped = Number(m.embedding) / m.parameters
    of_experts = m.layers * m.experts * m.expert / m.parameters * (1 - min(1.0, batch * m.active / m.experts))
    if of_experts:
        skipped = skipped + e.put("idle experts", of_experts, "the part of all weights that this batch does not visit")
    yield Term(
        "weights",
        _weight_bytes(e) * (Number(1) - skipped) / rate,
        "read once, but for the embedding",
    )
    cached = e.put("pairs", m.pairs(1, e.S), "cached tokens that one layer reads" + ", the mean" * bool(m.windowed))
    yield Term("cache", rows * 2 * e.kv * e.layers * cached / e.cp / rate, "keys and values in bf16, read once")
    yield Term(
        "kernels",
        e.layers * KERNELS * Number(KERNEL),
        "ten kernels a layer, 4 us between two (arXiv 2411.01783, table 8)",
    )
    if s.tp > 1:
        gather = e.gather(2 * rows * e.d, e.group(s.tp, 1), "tp")
        yield Term(
            "tensor parallel", 2 * e.layers * (2 * gather), "two sums in each layer, each a scatter and a gather"
        )
    if s.cp > 1:
        group = e.group(s.cp, s.tp)
        hop = e.put("hop", _direct(e, 2 * rows * e.q), "seconds until queries are with the next rank")
        home = _direct(e, (e.cp - 1) * rows * e.H / e.tp * (2 * e.D + 4))
        if group.nodes > 1:
            home = home + Number(e.gpu.all_to_all_latency - e.gpu.network_latency)
        home = e.put("way home", home, "seconds of the all-to-all that brings out and lse home")
        yield Term(
            "strategy", e.layers * ((e.cp - 1) * hop + home), "queries go round, results go home; nothing hides it"
        )


def _memory_rate(e: Explained) -> Number:
    return e.put(
        "W memory", Number(e.gpu.bandwidth) * MEMORY_RATE, "bytes per second of a GPU's memory, and the part reached"
    )


def _weight_bytes(e: Explained) -> Number:
    m, s = e.m, e.s
    all_bytes = 2 * Number(m.parameters)
    ffn = m.layers * m.experts * m.expert
    in_fp8 = {"bf16": 0, "fp8-ffn": ffn, "fp8": ffn + m.layers * m.attention}[s.precision]
    return e.put("weights of a GPU", (all_bytes - in_fp8) / e.tp, "bytes: 2 a parameter, and 1 of those in FP8")


def _direct(e: Explained, nbytes: Number) -> Number:
    group = e.group(e.s.cp, e.s.tp)
    return e.exchange(0, nbytes, group) if group.nodes > 1 else e.exchange(nbytes, 0, group)


# --- as text ----------------------------------------------------------------------------------------------------


def explained(m: Model, s: Setup, S: int, gpu: GPU, density: float = 1.0) -> str:
    """Every number of a setup for training, with its formula: what goes in, memory, time.

    density: the part of the causal pairs that packed documents see.
    """
    e = Explained(m, s, S, gpu, density=density)
    held = [term for term in memory_terms(e) if term.name in memory(m, s, S)]
    tensors = e.put("allocated", _sum({term.name: term.value for term in held}), "bytes of all tensors, listed below")
    reserve = Number(e.constants.device_overhead) + (Number(e.constants.reserved) - 1) * tensors
    held.append(Term("reserve", reserve, "CUDA, NCCL, libraries, and what the allocator cannot use: fitted constants"))
    took = [term for term in seconds_terms(e) if term.value.value or term.name == "strategy"]
    return _page(e, {"memory of a GPU": held, "time of a step": took})


def explained_serving(m: Model, gpu: GPU, tokens: int, served: Served) -> str:
    """The same of one way to serve."""
    e = Explained(m, served.setup, tokens, gpu)
    found = {"until the first token": list(prefill_terms(e))}
    first = _page(e, found)
    e = Explained(m, served.setup, tokens, gpu)
    return first + "\n\n" + _page(e, {"each further token": list(decode_terms(e, served.batch))})


def _page(e: Explained, sections: dict[str, list[Term]]) -> str:
    lines = []
    for title, terms in sections.items():
        lines += ["", f"{title}:"]
        for term in terms:
            size = f"{term.value.value / GiB:.2f} GiB" if "memory" in title else duration(term.value.value)
            lines += [f"{term.name}: {size}", *_wrapped(f"({term.why})", "    ", "     ")]
            lines += _wrapped(f"= {term.value.symbols}", "    ", "      ")
            if term.value.symbols != term.value.numbers:
                lines += _wrapped(f"= {term.value.numbers}", "    ", "      ")
            unit = "bytes" if "memory" in title else "s"
            lines.append(f"    = {shown(round(term.value.value) if unit == 'bytes' else term.value.value)} {unit}")
    head = []
    for name, (x, meaning) in e.needed([term for terms in sections.values() for term in terms]).items():
        way = [x.symbols] if x.symbols != x.numbers else []
        way += [x.numbers] if x.order < 3 or "(" in x.numbers else []
        head += _wrapped(" = ".join([name, *way, shown(x.value)]) + f"  ({meaning})", "", "      ")
    return "\n".join(["what goes in:", *head, *lines])


def _wrapped(text: str, first: str, further: str) -> list[str]:
    return wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )

"""Where each number of a plan comes from: its formula in symbols, with this plan's numbers in it, and a reason.

A formula is computed with ``Number``, which remembers how; tests hold every result to memory.py, seconds.py and
serving.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import wrap

from .constants import FITTED, Constants
from .hardware import FORWARD, GPU, GiB
from .links import INSIDE, Group
from .memory import TILE, activations, layer, memory, short_ends, strategy_bytes
from .models import Model
from .seconds import HOST, HOST_OPTIMIZER, again, best_kernel, memory_passes, passes, work
from .serving import KERNEL, KERNELS, MEMORY_RATE, Served
from .setup import Setup
from .table import duration

WIDTH = 110  # columns
OVERLAPPED = ("ring", "hybrid", "double-ring")  # strategies whose messages travel while attention computes


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
    terms: dict[str, tuple[Number, str]] = field(default_factory=dict)

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
        experts = Number(m.experts * m.expert if s.ep > 1 else 0)
        rest = (Number(m.layer) - experts) / self.tp
        self.experts = put("experts", experts / self.ep / self.tp, "parameters of a layer's experts on a GPU")
        self.layer = put("layer", rest + self.experts if s.ep > 1 else rest, "parameters of a layer on a GPU")
        self.embedding = put("embedding", self.words * self.d / self.tp, "parameters of the embedding on a GPU")
        ends = (1 if m.tied or s.pp > 1 else 2) * self.embedding + self.d / self.tp

        def own(layer: Number, ends: Number) -> Number:
            if short_ends(m, s):  # then the first stage has a layer less than others
                return larger((self.layers - 1) * layer + ends, self.layers * layer)
            return self.layers * layer + ends

        self.parameters = put("parameters", own(self.layer, ends), "of the fullest GPU before they are sharded")
        self.shards = put("shards", self.dp * self.cp, "GPUs that share out weights, gradients and optimizer")
        self.sharded = self.parameters / self.shards
        if s.ep > 1:  # of the ranks that share weights, every ep-th has the same experts
            mine = own(rest / self.shards + self.experts * self.ep / self.shards, ends / self.shards)
            self.sharded = put("sharded", mine, "parameters of the fullest GPU, sharded: an expert over fewer GPUs")
        reached = "bytes per second of a GPU's link {}, and the part reached"
        self.inside = put("W inside", Number(self.gpu.link) * INSIDE, reached.format("in its node"))
        self.across = put("W across", Number(self.gpu.network) * self.constants.links, reached.format("to other nodes"))

    def put(self, name: str, value: Number | float, meaning: str, of: str = "inputs") -> Number:
        """Name a number, so that formulas have the name; it is listed if one of them needs it."""
        getattr(self, of)[name] = (number(value), meaning)
        return Number(number(value).value, name.replace(" ", "_"))

    def term(self, name: str, value: Number | float, why: str) -> Number:
        return self.put(name, value, why, "terms")

    def sum(self) -> Number:
        """Of all terms until now."""
        total = number(0)
        for name, (x, _) in self.terms.items():
            total = total + Number(x.value, name.replace(" ", "_"))
        return total

    def needed(self) -> dict[str, tuple[Number, str]]:
        """What goes into the terms, directly or not, in the order in which it was named."""
        inputs = {name.replace(" ", "_"): said for name, said in self.inputs.items()}
        wanted, more = set(), {name for x, _ in self.terms.values() for name in x.names}
        while more - wanted:
            wanted |= more
            more = {each for name in wanted if name in inputs for each in inputs[name][0].names}
        return {name: said for name, said in inputs.items() if name in wanted}

    def group(self, size: int, stride: int) -> Group:
        return Group.of(self.gpu, size, stride, self.constants.links)

    def gather(self, nbytes: Number, group: Group, of: str) -> Number:
        """As ``Group.gather``: of: the name of the ranks' number."""
        lacking = nbytes * (group.size - 1) / group.size
        start = self.put(f"start of {of}", group.latency, f"seconds of a collective of {of} ranks without bytes")
        across = [lacking / group.places / self.across] if group.nodes > 1 else []
        return larger(lacking / self.inside, *across) + start

    def exchange(self, inner: Number | float, outer: Number | float, group: Group, messages: int = 1) -> Number:
        """As ``Group.exchange``."""
        where, seconds = ("between", "network_latency") if group.nodes > 1 else ("inside", "latency")
        late = self.put(f"latency {where}", getattr(self.gpu, seconds), f"seconds of a message {where} nodes")
        ways = [number(x) / rate for x, rate in ((inner, self.inside), (outer, self.across)) if number(x).value]
        return (larger(*ways) if ways else number(0)) + messages * late

    def direct(self, nbytes: Number, group: Group) -> Number:
        return self.exchange(0, nbytes, group) if group.nodes > 1 else self.exchange(nbytes, 0, group)


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


def of_layer(e: Explained) -> tuple[Number, Number]:
    """Bytes of a token in a layer, as ``memory.kept_per_token`` and ``memory.layer`` count them: kept, at the most."""
    m, s, f = e.m, e.s, e.s.kept
    d, q, kv, H, ffn = e.d / e.tp, e.q, e.kv, e.H / e.tp, e.ffn / e.tp
    wide = number(0) if s.tiled_mlp else ffn
    normed = q + kv / 2 if m.qk_norm else 0
    here = "bytes of a token: "
    first = e.put("first half", 2 * (2 * d + 2 * q + kv + normed) + 4 * H, here + "input, norm, q, k, v, out, lse")
    second = e.put("second half", 2 * (2 * d + f.mlp_kept * wide), here + "input, norm, what is as wide as ffn")
    last = 2 * (2 * d + f.mlp_gradients * wide)
    last = e.put("backward of the second", last, here + "gradients of the stream and of the feed-forward's tensors")
    made = 2 * (d + q)
    if s.cp == 1 or s.strategy != "ring":
        made = made + 2 * (q + kv) + 4 * q
        if rest := layer(m, s).attention_backward - made.value:  # dk, dv of every query head, or in float32
            made = made + rest
    made = e.put("backward of the first", made, here + "gradients of the stream and of out, q, k, v")
    fullest = e.put("fullest", larger(first + second + last, first + made), here + "when its backward needs most")
    kept = {
        "full": f.residual * d,
        "offload": number(0),
        "none": first + second,
        "selective": 2 * (2 * d + 2 * q + kv / 2 + ffn) + 4 * H,
    }[s.recompute]
    if s.framework == "megatron" and s.recompute in ("none", "selective"):
        kept = 18 * d + 4 * ffn
    return e.put("kept", kept, "bytes that a layer keeps of a token for its backward"), fullest


def of_memory(e: Explained) -> None:
    m, s, f, n, split = e.m, e.s, e.s.kept, e.n, e.s.tp > 1
    master = ", and master weights" * (f.optimizer > 8)
    state = {"weights": "", "gradients": "", "optimizer": f": AdamW's moments in float32{master}"}
    for level, (name, what) in zip((3, 2, 1), state.items()):
        each, sharded = getattr(f, name), s.fsdp >= level
        e.term(
            name,
            each * (e.sharded if sharded else e.parameters),
            f"{each:g} bytes each{what}{', sharded' * sharded}",
        )
    loss, copies = "logits and loss" in activations(m, s, e.S), f.computed or f.weights
    if s.fsdp == 3 and s.pp > 1:
        e.term("gathered weights", copies * e.parameters, "those of a pipeline stage stay gathered")
        e.term("gathered gradients", f.summed * e.parameters, "summed over micro-batches before they are sharded")
    elif s.fsdp == 3:
        computing, which = (e.embedding, "the output layer") if loss else (e.layer, "a layer")
        why = f"{which}, which computes, and a layer that arrives, {copies:g} bytes each"
        e.term("gathered weights", copies * (computing + e.layer), why)
        e.term("gathered gradients", copies * computing, "of what computes, before they are scattered")
    else:
        e.term("gathered weights", f.computed * e.parameters, "the copy that computes, in bf16")
    kept, fullest = of_layer(e)
    flight = number(min(s.pp, s.microbatches))
    if s.stages > 1:
        flight = flight * (1 + (e.pp - 1) / (e.pp * e.stages))
    flight = e.put("in flight", flight, "micro-batches whose activations the first stage holds (Narayanan et al. 2021)")
    anew, away = s.recompute in ("full", "offload"), s.recompute == "offload"
    kept_here = 2 * n * e.d / e.tp if away else n * e.layers * kept * flight
    why = "layers' inputs, for the backward to recompute" if anew else f"kept for the backward: recompute {s.recompute}"
    e.term(
        "checkpoints" if anew else "activations", kept_here, why + ", of one layer: the others are on the host" * away
    )
    tile = Number(min(TILE, n.value))
    whole = n * (larger(0, fullest - kept) if kept.value else fullest) + (6 * n * e.d if split else 0)
    if s.tiled_mlp:
        whole = whole + 2 * (4 + f.mlp_gradients) * tile * e.ffn / e.tp
    why = "what it needs beyond what is kept" + ", rows gathered over tp" * split
    e.term("one layer's backward", whole, why + ", a block of the feed-forward" * s.tiled_mlp)
    if s.cp > 1:
        what = "bytes of messages, gathered rows and partial results, counted rank by rank by ringlearn.costs"
        held = e.put(f"held by {s.strategy}", strategy_bytes(m, s, e.S), what)
        e.term("buffers of the strategy", held, "the fullest moment of one layer, forward or backward")
    each = f.logits + 8 * split
    why = f"{each} bytes a logit: bf16, float32, log-probability, gradient{', a split softmax' * split}"
    logits = (tile if s.tiled_loss else n) * each * e.words / e.tp
    if s.tiled_loss:
        logits = logits + 4 * n * e.d / e.tp + 4 * e.embedding
        why += "; in blocks, beside the last hidden states and the output layer's gradient"
    if s.pp > 1 and flight.value > 1:
        logits = larger(0, logits - kept_here * (1 - 1 / flight.value))
        why += "; less what the last stage does not keep, and the first does"
    e.term("logits and loss", logits, why)


# --- seconds ----------------------------------------------------------------------------------------------------


def rates(e: Explained, forward: float = 1.0) -> tuple[Number, Number]:
    """Seconds of the forward's products in the layers of one micro-batch, and the rate of attention's kernel."""
    m, s, peak, kernel = e.m, e.s, Number(e.gpu.bf16), best_kernel(e.gpu, e.s)
    e.F = e.put("F", peak * e.constants.products_bf16, "operations per second of products: the peak, the part reached")
    feed_forward = m.active * m.expert + m.router
    low = m.attention * (s.precision == "fp8") + feed_forward * (s.precision != "bf16")
    took, high = number(0), m.attention + feed_forward - low
    if low:
        fast = e.put("F fp8", Number(e.gpu.peak("fp8")) * e.constants.products_fp8, "the same in FP8")
        took = e.put("fp8 parameters", low, "of a layer that one token passes through, in FP8") / fast
    if high:
        took = took + e.put("bf16 parameters", high, "of a layer that one token passes through, in bf16") / e.F
    meaning = f"operations per second of {kernel}" + (", forward and backward" if forward == 1 else "'s forward")
    of_kernel = e.put("F attention", peak * e.gpu.kernels[kernel] * forward, meaning)
    return 2 * e.mean * e.layers / e.tp * took, of_kernel


def pairs(e: Explained) -> Number:
    seen, meaning = e.tokens * (e.tokens + 1) / 2, "queries and keys of a layer that meet under the causal mask"
    if e.m.windowed:
        seen, meaning = e.m.pairs(e.S), f"{meaning} and windows of {e.m.window} tokens, the mean over layers"
    dense = e.put("seen", e.density, "the part of the pairs that packed documents see, on the busiest rank")
    return e.put("pairs", seen, meaning) * dense


def moved(e: Explained) -> tuple[Number, Number]:
    """Bytes of a token in one layer of what is no product: read and written, and of casts to FP8."""
    norm, turn, activation = memory_passes(e.s)
    forward = (2 * norm + 6 * e.s.kept.residual) * e.d + turn * (e.H + e.G) * e.D + activation * e.ffn
    casts = 9 * (2 * e.d + e.H * e.D + e.ffn) if e.s.precision == "fp8" else number(0)
    return e.put("moved", forward, "bytes of a token in one layer: two norms, two additions, RoPE, activation"), casts


def of_seconds(e: Explained) -> None:
    m, s, n, micro, layers = e.m, e.s, e.mean, e.microbatches, e.layers
    whole = s.recompute in ("full", "offload")
    forward, kernel = rates(e)
    forward = e.put("forward", forward, "seconds of the layers' forward products in one micro-batch")
    head = 2 * n * e.words * e.d / e.tp / e.F * (not short_ends(m, s))
    why = "a forward, and a backward of twice that: the layers, and the output layer"
    products = e.term("matrix products", micro * 3 * (forward + head), why)
    even = 4 * e.density * s.sequences * m.pairs(e.S) / s.cp * m.heads * m.head_dim * layers.value / s.tp
    uneven = e.put(
        "uneven", round(work(m, s, e.S, e.density).scores / even, 12), "work of the busiest rank over the mean"
    )
    scores = micro * 14 * e.sequences * pairs(e) * e.H * e.D * layers / e.cp / e.tp * uneven / kernel
    why = "for a pair and a number of a head, 4 operations in the forward and 10 in the backward"
    attention = e.term("attention", scores, why)
    read, casts = moved(e)
    why = f"bytes over the memory's bandwidth: forward, a backward of twice that{', forward again' * whole}"
    every = micro * n * layers * ((3 + whole) * read + casts) / e.tp / Number(e.gpu.bandwidth)
    e.term("elementwise", every, why + "; casts to FP8" * bool(casts.value))
    part, of_scores = again(m, s)
    anew = micro * e.put("part", part, "of a layer's products that the backward computes once more") * forward
    why = f", and attention's forward: 1 / 3.5 of it, {FORWARD} times as fast" * bool(of_scores)
    e.term("recomputation", anew + (attention / 3.5 / FORWARD if of_scores else 0), "products of the layers" + why)
    computing = e.put("computing", e.sum() / micro, "seconds that one micro-batch computes")
    if s.recompute == "offload":
        out = 4 * n * e.d * layers / e.tp / HOST
        e.term(
            "offloading",
            micro * exposed(out, computing),
            "inputs of layers over PCIe and back, less what computing hides",
        )
    if s.cp > 1:
        one = e.put("attention of a layer", attention / micro / layers, "seconds of one micro-batch, with its backward")
        why = "less what attention hides" if s.strategy in OVERLAPPED else "which the GPU waits for"
        e.term("strategy", micro * layers * _messages(e, one), f"messages of {s.strategy} in each layer, {why}")
    rows = 2 * n * e.d
    if s.tp > 1:
        gather = e.put("gather of rows", e.gather(rows, e.group(s.tp, 1), "tp"), "seconds: whole rows in bf16, over tp")
        message = (8 + 3 * whole) * layers * gather
        if s.async_tp:
            message = larger(message / e.tp, message - (products / micro + part * forward))
        why = "a gather and a scatter for each half of a layer, forward and backward" + ", and three once more" * whole
        e.term("tensor parallel", micro * message, why)
    if s.ep > 1:
        group = e.group(s.ep, s.tp)
        sent = e.put("sent to experts", rows / e.tp * m.active * (e.ep - 1) / e.ep, "bytes in a layer")
        across = (group.size - group.places) / max(1, group.size - 1)
        trade = micro * 2 * (2 + whole) * layers * e.exchange(sent * (1 - across), sent * across, group)
        e.term("experts", trade, "tokens' rows go to their experts and come back, forward and backward")
    if s.shards > 1:
        group, often = e.group(s.shards, s.tp), s.fsdp == 3 and s.pp == 1  # often: in each micro-batch, and twice
        wide = 2 if often and s.framework != "fsdp2" else 4
        few = e.group(s.shards // s.ep, s.tp * s.ep)

        def gather(each: int) -> Number:
            if s.ep == 1:
                return e.gather(each * e.parameters, group, "shards")
            dense = e.gather(each * (e.parameters - layers * e.experts), group, "shards")
            return dense + e.gather(each * layers * e.experts, few, "shards of an expert") if few.size > 1 else dense

        weights, scatter = e.put("gather", gather(2), "seconds to gather weights in bf16"), gather(wide)
        message = (1 + often) * weights + e.put("scatter", scatter, f"seconds to scatter gradients of {wide} bytes")
        waits = larger(message / (2 * (e.all_layers if often else layers)), message - computing)
        why = "weights are gathered, gradients scattered; less what computing hides, but at least one layer's"
        e.term("FSDP", (micro if often else 1) * waits, why)
    if s.pp > 1:
        hop = e.exchange(0, rows / e.tp, e.group(s.pp, s.tp * s.cp * s.dp))
        bubble = e.sum() * (e.pp - 1) / (e.stages * micro) + 2 * (e.pp - 1) * hop
        e.term("pipeline", bubble, "its bubble (Narayanan et al. 2021), and the first and last hops")
    mine = e.sharded if s.fsdp else e.parameters
    if s.kept.optimizer:
        e.term("optimizer", 28 * mine / Number(e.gpu.bandwidth), "AdamW reads 16 bytes a parameter and writes 12")
    else:
        here = 28 * mine / HOST_OPTIMIZER + 4 * mine / HOST
        e.term("optimizer", here, "28 bytes a parameter in the host's memory, and 4 over PCIe")


def _messages(e: Explained, attention: Number) -> Number:
    """Seconds in which the GPU waits for the strategy's messages, in one layer."""
    group, found = e.group(e.s.cp, e.s.tp), {}
    for part, t in passes(e.m, e.s, e.S, group):
        way = "forward" if part < 0.5 else "backward"
        if way in found:  # the forward, once more
            found[way] = 2 * found[way]
            continue
        what = f"bytes that a rank sends in one {way} of a layer, counted by ringlearn.costs"
        inner = e.put(f"{way} inside", t.inner, what + ": in its node")
        outer = e.put(f"{way} across", t.outer, what + ": to other nodes")
        behind = (1 if way == "forward" else 2.5) * attention / 3.5 * (e.cp - 1) / e.cp
        if e.s.strategy == "hybrid":
            found[way] = e.exchange(inner, 0, group) + exposed(e.exchange(0, outer, group), behind)
        else:
            seconds = e.exchange(inner, outer, group, t.messages if t.hidden else 2)
            found[way] = exposed(seconds, behind) if t.hidden else seconds
    first, then = (e.put(f"wait in {way}", x, "seconds in one layer") for way, x in found.items())
    return first._with("+", then, first.value + then.value, False)  # even if both are 0


# --- serving ----------------------------------------------------------------------------------------------------


def read(e: Explained) -> tuple[Number, Number]:
    """Bytes of the weights of a GPU, and the rate of its memory."""
    m, ffn = e.m, e.m.layers * e.m.experts * e.m.expert
    in_fp8 = {"bf16": 0, "fp8-ffn": ffn, "fp8": ffn + m.layers * m.attention}[e.s.precision]
    nbytes = (2 * Number(m.parameters) - in_fp8) / e.tp
    rate = Number(e.gpu.bandwidth) * MEMORY_RATE
    return (
        e.put("weights of a GPU", nbytes, "bytes: 2 a parameter" + ", 1 of those in FP8" * (e.s.precision != "bf16")),
        e.put("W memory", rate, "bytes per second of a GPU's memory, and the part reached"),
    )


def of_prefill(e: Explained, batch: int) -> None:
    s, layers = e.s, e.layers
    forward, kernel = rates(e, FORWARD)
    weights, rate = read(e)
    e.term("matrix products", larger(forward, weights / rate), "products of the layers, or reading the weights")
    scores = 4 * pairs(e) * e.H * e.D * layers / e.cp / e.tp / kernel
    attention = e.term("attention", scores, "4 operations for a pair and a number of a head")
    bytes_read, casts = moved(e)
    every = e.mean * layers * (bytes_read + casts / 3) / e.tp / rate
    e.term("elementwise", every, "bytes over the memory's bandwidth")
    if s.tp > 1:
        gather = e.gather(2 * e.mean * e.d, e.group(s.tp, 1), "tp")
        e.term("tensor parallel", 4 * layers * gather, "two gathers and two scatters of rows in each layer")
    if s.cp > 1:
        hop = e.direct(2 * e.mean * e.kv, e.group(s.cp, s.tp))
        hop = e.put("hop", hop, "seconds until keys and values are with the next rank")
        waits = (e.cp - 1) * exposed(hop, attention / layers / e.cp)
        e.term("strategy", layers * waits, "hops of the ring, less what attention hides")


def of_decode(e: Explained, batch: int) -> None:
    m, s, layers = e.m, e.s, e.layers
    (weights, rate), rows = read(e), e.put("batch", batch, "sequences that decode together")
    idle = m.layers * m.experts * m.expert / m.parameters * (1 - min(1.0, batch * m.active / m.experts))
    idle = e.put("idle experts", idle, "the part of all weights that this batch does not visit") if idle else 0
    skipped = Number(m.embedding) / m.parameters + idle
    e.term("weights", weights * (Number(1) - skipped) / rate, "read once, but for the embedding")
    cached = e.put("pairs", m.pairs(1, e.S), "cached tokens that one layer reads" + ", the mean" * bool(m.windowed))
    e.term("cache", rows * 2 * e.kv * layers * cached / e.cp / rate, "keys and values in bf16, read once")
    why = "ten kernels a layer, 4 us between two (arXiv 2411.01783, table 8)"
    e.term("kernels", layers * KERNELS * Number(KERNEL), why)
    if s.tp > 1:
        gather = e.gather(2 * rows * e.d, e.group(s.tp, 1), "tp")
        e.term("tensor parallel", 2 * layers * (2 * gather), "two sums in each layer, each a scatter and a gather")
    if s.cp > 1:
        group = e.group(s.cp, s.tp)
        hop = e.put("hop", e.direct(2 * rows * e.q, group), "seconds until queries are with the next rank")
        late = Number((e.gpu.all_to_all_latency - e.gpu.network_latency) * (group.nodes > 1))
        home = e.direct((e.cp - 1) * rows * e.H / e.tp * (2 * e.D + 4), group) + late
        home = e.put("way home", home, "seconds of the all-to-all that brings out and lse home")
        e.term("strategy", layers * ((e.cp - 1) * hop + home), "queries go round, results go home; nothing hides it")


# --- as text ----------------------------------------------------------------------------------------------------


def explained(m: Model, s: Setup, S: int, gpu: GPU, density: float = 1.0) -> str:
    """Every number of a setup for training, with its formula: what goes in, memory, time.

    density: the part of the causal pairs that packed documents see.
    """
    e = Explained(m, s, S, gpu, density=density)
    of_memory(e)
    counted = memory(m, s, S)
    e.terms = {name: said for name, said in e.terms.items() if name in counted}
    tensors = e.put("allocated", e.sum(), "bytes of all tensors, listed below")
    outside, unused = Number(e.constants.device_overhead), Number(e.constants.reserved) - 1
    e.term("reserve", outside + unused * tensors, "CUDA, NCCL, libraries, and what the allocator cannot use: fitted")
    held, e.terms = e.terms, {}
    of_seconds(e)
    e.terms = {name: (x, why) for name, (x, why) in e.terms.items() if x.value or name == "strategy"}
    took, e.terms = e.terms, held | e.terms
    return _page(e, {"memory of a GPU": held, "time of a step": took})


def explained_serving(m: Model, gpu: GPU, tokens: int, served: Served) -> str:
    """The same of one way to serve."""
    parts = []
    for title, fill in (("until the first token", of_prefill), ("each further token", of_decode)):
        e = Explained(m, served.setup, tokens, gpu)
        fill(e, served.batch)
        parts.append(_page(e, {title: e.terms}))
    return "\n\n".join(parts)


def _page(e: Explained, sections: dict[str, dict[str, tuple[Number, str]]]) -> str:
    lines = ["what goes in:"]
    for name, (x, meaning) in e.needed().items():
        way = [x.symbols] if x.symbols != x.numbers else []
        way += [x.numbers] if x.order < 3 or "(" in x.numbers else []
        lines += _wrapped(" = ".join([name, *way, shown(x.value)]) + f"  ({meaning})", "")
    for title, terms in sections.items():
        lines += ["", f"{title}:"]
        for name, (x, why) in terms.items():
            of_bytes = "memory" in title
            lines.append(f"{name}: {f'{x.value / GiB:.2f} GiB' if of_bytes else duration(x.value)}")
            result = f"{shown(round(x.value))} bytes" if of_bytes else f"{shown(x.value)} s"
            for line in (f"({why})", *(f"= {said}" for said in dict.fromkeys([x.symbols, x.numbers, result]))):
                lines += _wrapped(line, "    ")
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=" " * 6, break_long_words=False,
                break_on_hyphens=False)  # fmt: skip

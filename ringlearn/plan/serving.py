"""Seconds and bytes of serving a model: until the first token, for each further one, and how many sequences fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .constants import FITTED, Constants
from .hardware import FORWARD, GPU, GiB
from .links import Group
from .models import Model
from .search import divisors
from .seconds import best_kernel, elementwise_bytes, work
from .setup import Setup, counted

KERNELS, KERNEL = 10, 4e-6  # of a layer that decodes, and seconds between two: arXiv 2411.01783, table 8, less the read
MEMORY_RATE = 0.89  # of the sheet's bandwidth, read: docs/measurements, one H200, 4,280 of 4,800 GB/s


def weight_bytes(m: Model, s: Setup) -> float:
    """Bytes of the weights on one GPU: 2 a parameter, and 1 of those in FP8.

    >>> from .models import model
    >>> weight_bytes(model("llama-3.1-8b"), Setup(tp=2))
    8030261248.0
    """
    ffn = m.layers * m.experts * m.expert
    low = {"bf16": 0, "fp8-ffn": ffn, "fp8": ffn + m.layers * m.attention}[s.precision]
    return (2 * m.parameters - low) / (s.tp * s.pp)


def cache_bytes(m: Model, s: Setup, tokens: float, itemsize: int = 2) -> float:
    """Bytes of keys and values of one sequence on one GPU: cp ranks share its tokens, tp ranks the heads.

    A head is not split, so more than ``kv_heads`` tensor-parallel ranks hold copies. A layer with a window keeps at
    most twice the window.
    """
    kept = m.windowed * min(tokens, 2 * m.window) + (m.layers - m.windowed) * tokens
    return _row_bytes(m, s, itemsize) * kept / m.layers


def _row_bytes(m: Model, s: Setup, itemsize: int = 2) -> float:
    """Bytes on one GPU of the keys and values of one token, in all layers."""
    return m.cache_bytes(itemsize) * max(1 / m.kv_heads, 1 / s.tp) / s.pp / s.cp


def sequences_that_fit(m: Model, s: Setup, tokens: int, gpu: GPU, constants: Constants = FITTED) -> int:
    """How many sequences of that many tokens fit next to the weights, the reserve, and a prefill of 8,192 tokens."""
    working = min(tokens / s.cp, 8192) * 2 * (8 * m.width + 2 * m.active * m.ffn / s.tp)
    free = (gpu.memory - constants.device_overhead) / constants.reserved - weight_bytes(m, s) - working
    return max(0, int(free // cache_bytes(m, s, tokens)))


def prefill_seconds(
    m: Model,
    s: Setup,
    tokens: int,
    gpu: GPU,
    constants: Constants = FITTED,
    *,
    cached: int = 0,
    passing: str = "kv",
) -> dict[str, float]:
    """Seconds until the first token, by component; ``tokens`` are new, after ``cached`` ones.

    passing: what goes round the ring of cp ranks, "kv" or "q" (Yang et al. 2024, arXiv 2411.01783, section 3.3).
    Queries are smaller when few tokens are new, but their results have to go home at the end, where nothing hides them.
    """
    if passing not in ("kv", "q"):
        raise ValueError(f"prefill_seconds: expected passing to be 'kv' or 'q', got {passing!r}")
    w, tp, cp = work(m, s, tokens), Group.of(gpu, s.tp, 1, constants.links), Group.of(gpu, s.cp, s.tp, constants.links)
    bf16, mine = gpu.bf16 * constants.products_bf16, tokens / s.cp
    low = bf16 if s.precision == "bf16" else gpu.peak("fp8") * constants.products_fp8
    reading = weight_bytes(m, s) / (gpu.bandwidth * MEMORY_RATE)
    scores = 4 * m.pairs(tokens, cached) / s.cp * m.heads * m.head_dim * m.layers / s.tp
    attention = scores / (gpu.bf16 * gpu.kernels[best_kernel(gpu, s)] * FORWARD)
    found = {
        "matrix products": max(w.fast / low + w.slow / bf16, reading),
        "attention": attention,
        "elementwise": mine * m.layers * elementwise_bytes(m, s) / 3 / (gpu.bandwidth * MEMORY_RATE),
        "tensor parallel": 4 * m.layers * tp.gather(2 * mine * m.width) if s.tp > 1 else 0.0,
    }
    if s.cp > 1:
        heads = m.heads / s.tp if passing == "q" else 2 * max(1.0, m.kv_heads / s.tp)
        rows = mine if passing == "q" else (tokens + cached) / s.cp
        hop = cp.exchange(*_direct(cp, 2 * rows * heads * m.head_dim))
        exposed = (s.cp - 1) * max(0.0, hop - attention / m.layers / s.cp)
        if passing == "q":
            exposed += _home(m, s, cp, mine)
        found["strategy"] = m.layers * exposed
    return {name: value for name, value in found.items() if value}


def decode_seconds(
    m: Model, s: Setup, tokens: int, gpu: GPU, constants: Constants = FITTED, *, batch: int = 1
) -> dict[str, float]:
    """Seconds of one token of each of ``batch`` sequences with ``tokens`` cached ones, by component.

    Weights (of experts those that the batch visits) and cache are read once. Two sums over tensor-parallel ranks a
    layer. Over cp ranks, queries go round and results go home, as in prefill with ``passing="q"``.
    """
    rate = gpu.bandwidth * MEMORY_RATE
    tp, cp = Group.of(gpu, s.tp, 1, constants.links), Group.of(gpu, s.cp, s.tp, constants.links)
    experts = m.layers * m.experts * m.expert / m.parameters  # part of all weights
    read = 1 - m.embedding / m.parameters - experts * (1 - min(1.0, batch * m.active / m.experts))
    found = {
        "weights": read * weight_bytes(m, s) / rate,
        "cache": batch * _row_bytes(m, s) * m.pairs(1, tokens) / rate,
        "kernels": m.layers * KERNELS * KERNEL,
        "tensor parallel": 2 * m.layers * tp.reduce(2 * batch * m.width) if s.tp > 1 else 0.0,
    }
    if s.cp > 1:
        query = 2 * batch * m.heads / s.tp * m.head_dim
        found["strategy"] = m.layers * ((s.cp - 1) * cp.exchange(*_direct(cp, query)) + _home(m, s, cp, batch))
    return {name: value for name, value in found.items() if value}


def _direct(group: Group, nbytes: float) -> tuple[float, float]:
    """Bytes to the next rank of a ring: some rank's neighbour is in another node, if there is one."""
    return (0.0, nbytes) if group.nodes > 1 else (nbytes, 0.0)


def _home(m: Model, s: Setup, group: Group, rows: float) -> float:
    """Seconds of the all-to-all that brings out and lse home."""
    sent = (s.cp - 1) * rows * m.heads / s.tp * (2 * m.head_dim + 4)
    late = group.gpu.all_to_all_latency - group.gpu.network_latency if group.nodes > 1 else 0.0
    return group.exchange(*_direct(group, sent)) + late


@dataclass(frozen=True)
class Served:
    """One way to serve: copies of a model on tp x cp GPUs each.

    prefill, decode: seconds by component, until the first token and for each further one.  batch: sequences that decode
    together.  sequences: how many fit on one copy.
    """

    setup: Setup
    copies: int
    batch: int
    prefill: dict[str, float]
    decode: dict[str, float]
    sequences: int

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return sum(self.prefill.values())

    @property
    def each(self) -> float:
        """Seconds of each further token."""
        return sum(self.decode.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all copies while they decode."""
        return self.copies * self.batch / self.each


def serve(
    m: Model,
    tokens: int,
    gpus: int,
    gpu: GPU,
    *,
    precision: str = "bf16",
    kernel: str = "",
    batch: int = 1,
    constants: Constants = FITTED,
) -> list[Served]:
    """Every split of the GPUs into copies of tp x cp GPUs that hold ``batch`` sequences each, the fastest token first.

    Raises ValueError if there is none, with a text that says what would fit.
    """
    gpus, batch = counted("gpus", gpus), counted("batch", batch)

    def ways(count: int, precision: str) -> Iterator[Served]:
        for tp in filter(m.splits_over, divisors(count)):
            for cp in (n for n in divisors(count // tp) if n <= tokens):
                s = Setup(tp=tp, cp=cp, recompute="none", precision=precision, kernel=kernel)
                fit = sequences_that_fit(m, s, tokens, gpu, constants)
                if fit >= batch:
                    first = prefill_seconds(m, s, tokens, gpu, constants)
                    each = decode_seconds(m, s, tokens, gpu, constants, batch=batch)
                    yield Served(s, count // (tp * cp), batch, first, each, fit)

    found = list(ways(gpus, precision))
    if found:
        return sorted(found, key=lambda each: (each.each, each.first))
    tp = max(filter(m.splits_over, divisors(gpus)))
    s = Setup(tp=tp, cp=gpus // tp, recompute="none", precision=precision)
    what = f"{batch} sequences of {tokens:,} tokens" if batch > 1 else f"a sequence of {tokens:,} tokens"
    said = (
        f"plan: {what} of {m.name} {'do' if batch > 1 else 'does'} not fit on {gpus} x {gpu.name}: of the "
        f"{gpu.memory / GiB:.0f} GiB of each, weights take {weight_bytes(m, s) / GiB:.0f} and the cache of a sequence "
        f"{cache_bytes(m, s, tokens) / GiB:.1f}."
    )
    would, fit = [], sequences_that_fit(m, s, tokens, gpu, constants)
    if fit:
        would.append(f"{fit} sequence{'s' * (fit > 1)}")
    elif shorter := _longest(m, s, tokens, gpu, constants):
        would.append(f"one sequence of about {shorter:,} tokens")
    if precision == "bf16" and gpu.fp8 and any(ways(gpus, "fp8")):
        would.append("the same in FP8 (--precision fp8)")
    more = sorted({*(2**n for n in range(13)), *(gpu.node * n for n in range(1, 65))})
    if enough := next((n for n in more if n > gpus and any(ways(n, precision))), None):
        would.append(f"{enough} x {gpu.name}")
    answer = f"What fits: {'; or '.join(would)}." if would else "Nor do fewer tokens, or 4,096 GPUs."
    raise ValueError(f"{said} {answer}")


def _longest(m: Model, s: Setup, tokens: int, gpu: GPU, constants: Constants) -> int:
    """The most tokens of one sequence, fewer than these, rounded down to two digits; 0 if not even one has room."""
    fits = partial(sequences_that_fit, m, s, gpu=gpu, constants=constants)
    most = bisect_left(range(1, tokens), True, key=lambda n: not fits(n))
    unit = 10 ** max(0, len(str(most)) - 2)
    return most // unit * unit

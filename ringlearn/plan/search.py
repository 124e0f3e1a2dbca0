"""All sensible ways to train a model on some GPUs: what fits, the fastest first, and why the others do not."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log

from .constants import FITTED, Constants
from .hardware import GPU, GiB
from .memory import memory, rank_parameters, state
from .models import Model
from .packed import Packing
from .seconds import step_seconds
from .setup import Setup

LEAST = 128  # tokens of a rank below which a kernel has no full tile
AGAIN = (("none", False), ("selective", False), ("full", False), ("full", True), ("offload", True))


@dataclass(frozen=True)
class Candidate:
    """A setup with its tokens, the bytes of its fullest GPU by component, and the seconds of its step by component.

    density: the part of the causal pairs that packed documents see, on the busiest rank.
    """

    setup: Setup
    tokens: int
    memory: dict[str, float]
    seconds: dict[str, float]
    density: float = 1.0

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """The seconds of a step."""
        return sum(self.seconds.values())

    @property
    def sequences(self) -> int:
        """The sequences of a step on all GPUs."""
        return self.setup.dp * self.setup.sequences * self.setup.microbatches

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * self.tokens / self.step


@dataclass(frozen=True)
class Found:
    """What a search has found: candidates that fit, the fastest first, and how often each reason rejected others.

    closest: of those that do not fit, the one that needs least.
    """

    ranked: Sequence[Candidate]
    reasons: dict[str, int] = field(default_factory=dict)
    closest: Candidate | None = None


def divisors(n: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _splits(m: Model, gpus: int, gpu: GPU, S: int, batch: int | None, why: Counter) -> Iterator[dict[str, int]]:
    """dp, tp, cp, pp whose product is the number of GPUs."""
    for tp in divisors(gpus):
        if tp > gpu.node:
            why["tensor parallelism beyond a node: its sums are not hidden, and would cross the network"] += 1
            continue
        if not m.splits_over(tp):
            why[f"{m.heads} query and {m.kv_heads} key/value heads do not divide over tp ranks"] += 1
            continue
        for pp in divisors(gpus // tp):
            if pp > m.layers:
                why[f"more pipeline stages than the model's {m.layers} layers"] += 1
                continue
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if cp > 1 and S < LEAST * cp:
                    why[f"fewer than {LEAST} tokens on each rank of a sequence"] += 1
                elif batch is not None and batch % dp:
                    why[f"a batch of {batch:,} does not divide evenly over the data-parallel groups"] += 1
                else:
                    microbatches = 4 * pp * (pp > 1) or 1
                    yield dict(dp=dp, tp=tp, cp=cp, pp=pp, microbatches=batch // dp if batch else microbatches)


def _strategies(m: Model, split: dict[str, int], gpu: GPU, why: Counter) -> Iterator[dict]:
    """Strategies with their layout, and the ranks of a node for those that know nodes."""
    cp, heads = split["cp"], m.heads // split["tp"]
    if cp == 1:
        yield {}
        return
    inner = min(cp, max(1, gpu.node // split["tp"]))
    yield dict(strategy="ring", layout="zigzag")
    yield dict(strategy="all-gather", layout="zigzag")
    if cp <= heads:
        yield dict(strategy="ulysses", layout="contiguous")
    else:
        why[f"Ulysses on more ranks than the {heads} heads that tensor parallelism leaves: some would have none"] += 1
    if 1 < inner < cp and cp % inner == 0:
        if inner <= heads:
            yield dict(strategy="hybrid", layout="zigzag", inner=inner)
        yield dict(strategy="double-ring", layout="zigzag", inner=inner)


def search(
    m: Model,
    S: int,
    gpus: int,
    gpu: GPU,
    *,
    precision: str = "bf16",
    framework: str = "fsdp2",
    kernel: str = "",
    batch: int | None = None,
    packing: Packing | None = None,
    constants: Constants = FITTED,
) -> Found:
    """Every split of the GPUs with every strategy, recomputation and level of sharding that make sense together.

    batch: sequences of a step over all GPUs; if None, one for each data-parallel group, and four for each stage of a
    pipeline, so that its bubble stays below a quarter.
    """
    why: Counter = Counter()
    ranked: list[Candidate] = []
    closest: Candidate | None = None
    common = dict(precision=precision, framework=framework, kernel=kernel, tiled_loss=framework != "megatron")
    levels = (1, 2) if framework == "megatron" else (3,) if framework == "zero-offload" else (0, 1, 2, 3)
    for split in _splits(m, gpus, gpu, S, batch, why):
        for ep in _expert_ranks(m, split):
            base = Setup(**split, ep=ep, **common)
            for fsdp in levels if base.shards > 1 else levels[:1] if framework != "zero-offload" else levels:
                s = replace(base, fsdp=fsdp)
                held = sum(n for name, n in state(m, s).items() if not name.startswith("gathered"))
                if held > gpu.memory:
                    why[f"weights, gradients and optimizer alone exceed {gpu.memory / GiB:.0f} GiB"] += 1
                    continue
                for how in _strategies(m, split, gpu, why):
                    for recompute, tiled in AGAIN:
                        one = replace(s, recompute=recompute, tiled_mlp=tiled, **how)
                        found = memory(m, one, S, constants)
                        if host_bytes(m, one, S) > gpu.host:
                            why[f"offloaded data exceeds the {gpu.host / GiB:.0f} GiB of host memory for each GPU"] += 1
                        elif sum(found.values()) > gpu.memory:
                            why[_most(found)] += 1
                            if closest is None or sum(found.values()) < closest.bytes:
                                closest = Candidate(one, S, found, {})
                        else:
                            busy = packing.busiest(one.cp) if packing else 1.0
                            seconds = step_seconds(m, one, S, gpu, constants, density=busy)
                            ranked.append(Candidate(one, S, found, seconds, busy))
                            break  # what recomputes more is slower
    # Within a hundredth as fast, the one that leaves more memory free comes first.
    ranked.sort(key=lambda each: (-round(log(each.tokens_per_second), 2), each.bytes))
    return Found(ranked, dict(why.most_common()), closest)


def _expert_ranks(m: Model, split: dict[str, int]) -> list[int]:
    """How many of the ranks that hold the same layers share out the experts."""
    ranks = split["dp"] * split["cp"]
    return [d for d in divisors(ranks) if m.experts % d == 0] if m.experts > 1 else [1]


def _most(found: dict[str, float]) -> str:
    return f"does not fit, most of all because of: {max(found, key=lambda name: found[name])}"


def host_bytes(m: Model, s: Setup, S: int) -> float:
    """Bytes of host memory that one GPU uses: inputs of layers, and an optimizer whose state is kept there.

    >>> from .models import model
    >>> s = Setup(cp=32, recompute="offload", fsdp=3, framework="fsdp2")
    >>> round(8 * host_bytes(model("llama-3.1-70b"), s, 3_000_000) / 2**30)  # a node's, as ALST says
    916
    """
    inputs = 2 * s.sequences * S / s.cp * m.width / s.tp * -(-m.layers // s.pp) if s.recompute == "offload" else 0.0
    optimizer = 16 * rank_parameters(m, s, s.shards) if not s.kept.optimizer else 0.0
    return inputs + optimizer + (2 * rank_parameters(m, s) if s.offload_weights else 0.0)


def longest_sequence(m: Model, s: Setup, gpu: GPU, constants: Constants = FITTED, step: int = 1024) -> int:
    """The longest sequence that fits in this setup, reserve included: a multiple of ``step`` tokens, 0 if none does."""

    def too_long(steps: int) -> bool:
        return sum(memory(m, s, steps * step, constants).values()) > gpu.memory

    return step * bisect_left(range(1, 2**31 // step), True, key=too_long)

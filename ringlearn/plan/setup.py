"""How a run is set up: how many GPUs split what, what is computed again, and which framework keeps which bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..fingerprint import whole_number

RECOMPUTE = ("none", "selective", "full", "offload")
PRECISIONS = ("bf16", "fp8", "fp8-ffn")
LAYOUTS = ("contiguous", "striped", "zigzag")
PLANNED = ("ring", "all-gather", "ulysses", "hybrid", "double-ring")


def counted(name: str, value: Any) -> int:
    """A number that a user gave; raises ValueError unless it is whole and at least 1."""
    found = whole_number(value)
    if found is None or found < 1:
        raise ValueError(f"plan: expected {name} to be a whole number of at least 1, got {value!r}")
    return found


@dataclass(frozen=True)
class Framework:
    """What a framework keeps, in bytes of each parameter, and in tensors of each token.

    weights, gradients, optimizer: bytes of a parameter that stay on the GPU (sharded, as the setup's ``fsdp`` says).
    computed: bytes of a parameter of the copy that computes, gathered or cast, 0 if the kept weights compute.
    summed: bytes of a parameter's gradient while a pipeline sums it over micro-batches, before it is sharded.
    logits: bytes of a logit at the fullest moment of the loss.
    mlp_kept, mlp_gradients: tensors as wide as the feed-forward that its backward needs, and that it makes meanwhile.
    residual: bytes of a number of the residual stream.  gradients_stay: whether they have a buffer from step to step.
    """

    name: str
    weights: float
    gradients: float
    optimizer: float
    computed: float = 2
    summed: float = 0
    logits: int = 14
    mlp_kept: int = 4
    mlp_gradients: int = 3
    residual: int = 2
    gradients_stay: bool = False
    about: str = ""


# logits, 14: in bf16, once more in float32, their log-probabilities, and the gradient of these.
# 22, where the vocabulary is split: two more float32 tensors of the split softmax.
FRAMEWORKS: dict[str, Framework] = {
    f.name: f
    for f in (
        Framework(
            "fsdp2", 4, 4, 8, summed=4, mlp_kept=2,
            about="PyTorch FSDP2 with mixed precision, compiled: torchtitan, accelerate, ringlearn under your model",
        ),
        Framework(
            "megatron", 2, 4, 12, computed=0, mlp_kept=2, gradients_stay=True,
            about="Megatron-Core: bf16 weights, float32 gradients and optimizer (theoretical_memory_usage.py)",
        ),
        Framework(
            "zero-offload", 2, 0, 0, computed=0, mlp_kept=3, mlp_gradients=1,
            about="DeepSpeed ZeRO-3 with the optimizer and gradients in the host's memory, as in ALST",
        ),
        Framework(
            "ringlearn", 4, 4, 8, residual=4, mlp_kept=0, mlp_gradients=0,
            about="python -m ringlearn.train: autocast over float32 weights, feed-forward and loss in blocks",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One way to run a model on GPUs: dp x tp x cp x pp of them.

    strategy, layout: how cp ranks split attention; inner: ranks of a node for hybrid and double ring.
    sequences: of a micro-batch, for each data-parallel group; microbatches: per step; stages: per pipeline rank.
    fsdp: what is sharded over dp x cp ranks: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also weights.
    recompute: what the backward recomputes: none, selective (every second matrix product), full (whole layers,
    whose inputs are kept), offload (the same, with the inputs in the host's memory).
    kernel: the attention kernel; "" for the fastest one in PyTorch for this GPU.
    tiled_loss, tiled_mlp: whether logits, or feed-forwards, are computed in blocks of the sequence.
    offload_weights: whether weights are kept in the host's memory too.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    strategy: str = "ring"
    inner: int = 1
    layout: str = "zigzag"
    sequences: int = 1
    microbatches: int = 1
    stages: int = 1
    fsdp: int = 3
    recompute: str = "full"
    precision: str = "bf16"
    framework: str = "fsdp2"
    kernel: str = ""
    compiled: bool = True
    tiled_loss: bool = False
    tiled_mlp: bool = False
    async_tp: bool = False
    offload_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "ep", "inner", "sequences", "microbatches", "stages"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"Setup: expected {name} to be a number of at least 1, got {getattr(self, name)!r}")
        known: Mapping[str, tuple] = {
            "strategy": PLANNED,
            "layout": LAYOUTS,
            "recompute": RECOMPUTE,
            "precision": PRECISIONS,
            "framework": tuple(FRAMEWORKS),
            "fsdp": (0, 1, 2, 3),
        }
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                said = ", ".join(map(str, choices))
                raise ValueError(f"Setup: expected {name} to be one of {said}, got {getattr(self, name)!r}")
        if self.cp % self.inner:
            raise ValueError(f"Setup: expected inner to divide cp, got {self.inner} and {self.cp}")

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """The number of ranks that hold the same weights, over which these can be sharded."""
        return self.dp * self.cp

    @property
    def shape(self) -> tuple[int, int]:
        """(nodes, ranks per node) of the ranks that share a sequence."""
        return (self.cp // self.inner, self.inner)

    @property
    def kept(self) -> Framework:
        return FRAMEWORKS[self.framework]

    def __str__(self) -> str:
        axes = [f"{name} {getattr(self, name)}" for name in ("dp", "tp", "cp", "pp", "ep") if getattr(self, name) > 1]
        return ", ".join(axes) or "one GPU"

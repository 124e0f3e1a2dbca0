"""Will it fit, how long will it take, and how is it best split: training and serving, planned from shapes alone.

    python -m ringlearn.plan --model llama-3.1-8b --tokens 1M --gpus 32 --gpu h100

``rl.plan(...)`` gives the same as data. What goes in: a model's sizes (models.py), a GPU and its links (hardware.py).
What comes out: bytes of the fullest GPU (memory.py) and seconds of a step (seconds.py) by component, for every sensible
split of the GPUs (search.py), or of serving (serving.py). docs/plan.md compares it with what others have measured.

>>> import ringlearn as rl
>>> best = rl.plan("llama-3.1-8b", tokens="128k", gpus=8, gpu="h100", batch=1).best
>>> best.setup.cp, best.setup.strategy, round(best.step)
(8, 'ring', 5)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..fingerprint import whole_number
from ..masks import Mask
from ..tiles import plan as plan_tiles
from .constants import FITTED, Constants
from .hardware import GPU, GPUS, GiB, gpu
from .memory import memory
from .models import MODELS, Model, model
from .packed import Packing
from .search import Candidate, Found, host_bytes, longest_sequence, search
from .seconds import model_flops, step_seconds
from .serving import Served, serve
from .setup import FRAMEWORKS, Setup, counted

__all__ = [
    "FITTED",
    "FRAMEWORKS",
    "GPU",
    "GPUS",
    "MODELS",
    "Candidate",
    "Constants",
    "GiB",
    "Model",
    "Packing",
    "Plan",
    "Served",
    "Setup",
    "gpu",
    "host_bytes",
    "length",
    "longest_sequence",
    "memory",
    "model",
    "model_flops",
    "plan",
    "serve",
    "step_seconds",
]
_model, _gpu = model, gpu  # the functions, where arguments have their names


@dataclass(frozen=True)
class Plan:
    """The result of ``plan``: the candidates that fit, the one with the most tokens per second first.

    reasons: why other setups are ruled out, and how many each reason rules out.  warning: "", or what to know about a
    sequence that has more tokens than the model has positions.
    """

    model: Model
    gpu: GPU
    gpus: int
    tokens: int
    ranked: Sequence[Candidate]
    reasons: Mapping[str, int]
    warning: str = ""

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    def distinct(self) -> list[Candidate]:
        """The best candidate of each split and strategy; the others differ only in recomputation or sharding."""
        seen: dict[tuple, Candidate] = {}
        for each in self.ranked:
            s = each.setup
            seen.setdefault((s.dp, s.tp, s.cp, s.pp, s.ep, s.strategy if s.cp > 1 else ""), each)
        return list(seen.values())

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """All of it in plain numbers: bytes and seconds, as ``--json`` writes it; ``most`` candidates."""
        ranked = [
            {"setup": asdict(c.setup), "bytes": c.memory, "seconds": c.seconds, "sequences": c.sequences}
            | {"bytes_in_all": c.bytes, "step_seconds": c.step, "tokens_per_second": c.tokens_per_second}
            for c in self.ranked[:most]
        ]
        head = {"model": asdict(self.model), "gpu": asdict(self.gpu), "gpus": self.gpus, "tokens": self.tokens}
        head["warning"] = self.warning
        return head | {"ranked": ranked, "reasons": dict(self.reasons)}


def length(said: int | str, name: str = "tokens") -> int:
    """A number of tokens as people write it: k is 1024, M is 1024 k and B is 1024 M.

    >>> length("1M"), length("128k"), length(4096)
    (1048576, 131072, 4096)
    """
    number = whole_number(said)
    text = str(said if number is None else number).strip().replace("_", "").replace(",", "")
    size = {"k": 2**10, "m": 2**20, "b": 2**30}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if size > 1 else text) * size
    except ValueError:
        number = 0.0
    if not 1 <= number <= 2**50 or number != int(number):
        raise ValueError(f"plan: expected {name} to be a number such as 8192, 128k or 1M, got {said!r}")
    return int(number)


def plan(
    model: str | Path | Mapping[str, Any] | Model,
    tokens: int | str | None = None,
    gpus: int = 1,
    gpu: str | Path | GPU = "h100",
    *,
    precision: str = "bf16",
    framework: str = "fsdp2",
    kernel: str = "",
    batch: int | None = None,
    lengths: Sequence[int] | None = None,
    constants: Constants = FITTED,
) -> Plan:
    """All sensible setups to train a model on sequences of that many tokens: those that fit, the fastest first.

    model: a name (``MODELS``), the path of a config.json, or a configuration of transformers.  tokens: of a sequence,
    4096 or "1M".  gpu: a name (``GPUS``), "this", or a file of ``python -m ringlearn.measure``.  precision: "bf16", or
    "fp8" for the products of layers.  framework: the one whose memory is counted (``FRAMEWORKS``).  batch: sequences
    per step over all GPUs; None leaves it open.  lengths: those of packed documents, instead of tokens.

    Raises ValueError for invalid arguments and, with a text that says what would fit, if nothing fits.

    >>> plan("llama-3.1-8b", tokens="32k", gpus=8, gpu="h200").best.setup.gpus
    8

    (``rl.plan_tiles`` was once called ``rl.plan``. A mask in place of the model is still accepted and means that
    function.)
    """
    if isinstance(model, Mask):
        return plan_tiles(model, tokens, gpus)  # type: ignore[arg-type,return-value]
    m, device, packing = _model(model), _gpu(gpu), None
    if lengths is not None:
        packing = Packing(tuple(lengths))
        if tokens is not None and length(tokens) != packing.tokens:
            raise ValueError(f"plan: lengths are {packing.tokens} tokens in all, but tokens={tokens!r} was given too")
        tokens = packing.tokens
    if tokens is None:
        raise ValueError("plan: expected tokens, the length of a sequence, such as tokens='128k', or lengths")
    S = length(tokens)
    gpus, batch = counted("gpus", gpus), None if batch is None else counted("batch", batch)
    if framework == "ringlearn":
        raise ValueError(
            "plan: framework 'ringlearn' stands for python -m ringlearn.train, whose model is its own. For your model, "
            "with ringlearn's attention under it, take 'fsdp2'; memory(...) takes Setup(framework='ringlearn')."
        )
    options = dict(precision=precision, framework=framework, kernel=kernel, packing=packing, constants=constants)
    found = search(m, S, gpus, device, batch=batch, **options)
    if not found.ranked:
        raise ValueError(_what_would(m, S, gpus, device, batch, found, options))
    longest = max(packing.lengths) if packing else S  # positions begin anew with every document
    return Plan(m, device, gpus, S, found.ranked, found.reasons, m.warning(longest))


def _what_would(
    m: Model, S: int, gpus: int, device: GPU, batch: int | None, found: Found, options: Mapping[str, Any]
) -> str:
    """The answer where nothing fits: what is missing, and what does: fewer tokens, more GPUs, or larger ones."""

    def fits(tokens: int, count: int, on: GPU) -> bool:
        no_packing = dict(options, packing=None)
        return bool(search(m, tokens, count, on, batch=batch and max(batch, 1), **no_packing).ranked)

    said = [f"plan: {m.name} with {S:,} tokens does not fit on {gpus} x {device.name}."]
    if not found.closest:
        said = [f"{said[0][:-1]}: {'; '.join(found.reasons)}."]
    else:
        c = found.closest
        said.append(
            f"The closest setup ({c.setup}, recompute {c.setup.recompute}, FSDP {c.setup.fsdp}) needs "
            f"{c.bytes / GiB:,.0f} of {device.memory / GiB:.0f} GiB, most of it for: {max(c.memory, key=c.memory.get)}."
        )
    would = []
    shorter = next((S // 2**n for n in range(1, 12) if S >= 2**n and fits(S // 2**n, gpus, device)), None)
    if shorter:
        would.append(f"{shorter:,} tokens on as many GPUs")
    more = next((gpus * 2**n for n in range(1, 12) if fits(S, gpus * 2**n, device)), None)
    if more:
        would.append(f"{more} x {device.name}")
    larger = next((g.name for g in GPUS.values() if g.memory > device.memory and fits(S, gpus, g)), None)
    if larger:
        would.append(f"{gpus} x {larger}")
    said.append(f"What fits: {'; or '.join(would)}." if would else "Nor do fewer tokens, or 2,048 times the GPUs.")
    return " ".join(said)


class _CallablePackage(ModuleType):
    """This package, which can also be called: ``rl.plan(...)`` is ``ringlearn.plan.plan(...)``.

    If ``rl.plan`` were the function itself, ``import ringlearn.plan.setup as setup`` would look for ``setup`` in it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
__signature__ = inspect.signature(plan)

"""ringlearn: learn ring attention from a single softmax to many GPUs, with code that runs for real.

Symbols, the same everywhere: B batch, H query heads, G key/value heads (H must be divisible by G; grouped-query
attention is inferred from the shapes), S tokens of the full sequence, n tokens of one rank, D head dim, P ranks.
Tensors are (B, H, S, D), as in ``torch.nn.functional.scaled_dot_product_attention`` (SDPA). ``lse`` is the natural-log
logsumexp of the scaled scores, float32 (float64 for float64 inputs), (B, H, S).

>>> import torch, ringlearn as rl
>>> q, k, v = (torch.randn(1, 8, 1000, 64, requires_grad=True) for _ in range(3))
>>> world = rl.SimulatedWorld(4)
>>> out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
>>> out.unshard().shape
torch.Size([1, 8, 1000, 64])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import attention, kernels
from .attention import FUNCTIONS, dilated_attention
from .costs.balance import best_layout, ring_balance
from .course import former_names
from .flash import flash_attention, flash_backward, flash_forward
from .kernels import alibi_slopes
from .launch.machine import VERSION
from .launch.pool import launch
from .layouts import LAYOUTS, Layout, positions_in_documents, zigzag_per_document
from .masks import Mask, causal, documents, full, mask, sliding_window
from .partial import Partial, identity, merge, merge_all, merge_tree
from .softmax import blockwise, online, two_pass
from .tiles import Tile
from .tiles import plan as plan_tiles
from .worlds import DistributedWorld, Shards, SimulatedWorld

former_names.install()

__version__ = VERSION

globals().update(FUNCTIONS | LAYOUTS)  # what stands in their tables is public
if TYPE_CHECKING:  # editors and type checkers do not run that line, nor the __getattr__ below
    from . import nn, text
    from .attention.decoding import KVCache, decode_attention, prefill_attention
    from .attention.table import *  # noqa: F403
    from .course import checks, viz
    from .layouts import *  # noqa: F403
    from .nn import hugging_face
    from .plan import plan

__all__ = [
    *FUNCTIONS,
    *LAYOUTS,
    "DistributedWorld",
    "KVCache",
    "Layout",
    "Mask",
    "Partial",
    "Shards",
    "SimulatedWorld",
    "Tile",
    "alibi_slopes",
    "best_layout",
    "blockwise",
    "causal",
    "checks",
    "decode_attention",
    "dilated_attention",
    "documents",
    "flash_attention",
    "flash_backward",
    "flash_forward",
    "full",
    "hugging_face",
    "identity",
    "kernels",
    "launch",
    "mask",
    "merge",
    "merge_all",
    "merge_tree",
    "nn",
    "online",
    "plan",
    "plan_tiles",
    "positions_in_documents",
    "prefill_attention",
    "ring_balance",
    "sliding_window",
    "text",
    "two_pass",
    "viz",
    "zigzag_per_document",
]

# Loaded when they are first used: not every program needs them, and some import matplotlib, ipywidgets or FSDP.
_LAZY = ("checks", "hugging_face", "nn", "plan", "text", "viz")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    if name in attention.DECODING:
        return getattr(attention, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

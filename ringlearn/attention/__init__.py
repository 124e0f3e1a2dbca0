"""Attention over a sequence that is split over ranks."""

from .all_gather import ALL_GATHER, all_gather, all_gather_attention
from .decoding import KVCache, decode_attention
from .dilated.ring import dilated_attention, dilated_backward, dilated_forward
from .double_ring import DOUBLE_RING, double_ring_attention
from .hybrid import hybrid, hybrid_attention
from .ring import RING, ring_attention, ring_backward, ring_forward
from .ring_self_attention import RING_SELF_ATTENTION, ring_self_attention
from .strategy import Spec, Strategy
from .ulysses import ULYSSES, head_plan, ulysses_attention

__all__ = [
    "ALL_GATHER",
    "DOUBLE_RING",
    "KVCache",
    "RING",
    "RING_SELF_ATTENTION",
    "ULYSSES",
    "Spec",
    "Strategy",
    "all_gather",
    "all_gather_attention",
    "decode_attention",
    "dilated_attention",
    "dilated_backward",
    "dilated_forward",
    "double_ring_attention",
    "head_plan",
    "hybrid",
    "hybrid_attention",
    "ring_attention",
    "ring_backward",
    "ring_forward",
    "ring_self_attention",
    "ulysses_attention",
]

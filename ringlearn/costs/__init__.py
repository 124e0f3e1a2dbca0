"""What attention takes in FLOPs, bytes, memory and time, computed from shapes alone: one file per strategy."""

from .all_gather import all_gather_bytes, all_gather_memory, all_gather_seconds
from .double_ring import double_ring_bytes, double_ring_memory, double_ring_seconds
from .one_device import attention_flops, flash_traffic, intensity, naive_traffic, saved_bytes, tile_bytes
from .ring import (
    dilated_bytes,
    dilated_pairs,
    hiding_threshold,
    published_backward_bytes,
    ring_bytes,
    ring_memory,
    ring_seconds,
    step_work,
)
from .ring_self_attention import ring_self_attention_bytes, ring_self_attention_memory, ring_self_attention_seconds
from .ulysses import hybrid_bytes, hybrid_memory, hybrid_seconds, ulysses_bytes, ulysses_memory, ulysses_seconds

__all__ = [
    "all_gather_bytes",
    "all_gather_memory",
    "all_gather_seconds",
    "attention_flops",
    "dilated_bytes",
    "dilated_pairs",
    "double_ring_bytes",
    "double_ring_memory",
    "double_ring_seconds",
    "flash_traffic",
    "hiding_threshold",
    "hybrid_bytes",
    "hybrid_memory",
    "hybrid_seconds",
    "intensity",
    "naive_traffic",
    "published_backward_bytes",
    "ring_bytes",
    "ring_memory",
    "ring_seconds",
    "ring_self_attention_bytes",
    "ring_self_attention_memory",
    "ring_self_attention_seconds",
    "saved_bytes",
    "step_work",
    "tile_bytes",
    "ulysses_bytes",
    "ulysses_memory",
    "ulysses_seconds",
]

"""Attention over a sequence that is split over ranks."""

from .api import ring_attention
from .dilated import dilated_attention, dilated_backward, dilated_forward
from .ring import ring_backward, ring_forward
from .spec import Spec
from .strategy import Strategy

__all__ = [
    "Spec",
    "Strategy",
    "dilated_attention",
    "dilated_backward",
    "dilated_forward",
    "ring_attention",
    "ring_backward",
    "ring_forward",
]

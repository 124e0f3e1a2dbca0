"""Attention over a sequence that is split over ranks."""

from .api import ring_attention
from .ring import ring_backward, ring_forward
from .spec import Spec
from .strategy import Strategy

__all__ = ["Spec", "Strategy", "ring_attention", "ring_backward", "ring_forward"]

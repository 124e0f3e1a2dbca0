"""Attention over a sequence that is split over ranks."""

from .api import ring_attention
from .ring import ring_backward, ring_forward
from .spec import Spec

__all__ = ["Spec", "ring_attention", "ring_backward", "ring_forward"]

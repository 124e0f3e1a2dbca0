"""Dilated attention (LongNet), exact when the sequence is split across ranks."""

from .ring import dilated_attention, dilated_backward, dilated_forward

__all__ = ["dilated_attention", "dilated_backward", "dilated_forward"]

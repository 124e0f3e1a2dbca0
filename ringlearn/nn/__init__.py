"""Modules whose attention runs over a sequence that is split over ranks."""

from .dilated import DilatedAttention, magneto_gain

__all__ = ["DilatedAttention", "magneto_gain"]

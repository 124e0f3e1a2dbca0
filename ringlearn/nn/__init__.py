"""Modules of a transformer whose sequence is split over ranks, and the gradients of a training step."""

from .attention import Attention
from .dilated import DilatedAttention, magneto_gain
from .gradients import Loss, backward, clip, sum_gradients
from .layers import FeedForward, RMSNorm, in_blocks, loss_sum, rope
from .memory import Activations, Kept
from .split import IGNORE, Split, each, next_tokens, shard_tokens
from .transformer import Config, Layer, Transformer

__all__ = [
    "IGNORE",
    "Activations",
    "Attention",
    "Config",
    "DilatedAttention",
    "FeedForward",
    "Kept",
    "Layer",
    "Loss",
    "RMSNorm",
    "Split",
    "Transformer",
    "backward",
    "clip",
    "each",
    "in_blocks",
    "loss_sum",
    "magneto_gain",
    "next_tokens",
    "rope",
    "shard_tokens",
    "sum_gradients",
]

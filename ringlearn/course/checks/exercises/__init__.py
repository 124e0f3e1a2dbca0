"""The checks of the torchrun exercises, notebooks/exercises/: ``exercises.ring_pass(my_ring_pass)`` on each rank."""

from .decoding import decode
from .packed import packed_step
from .passing import all_reduce, overlap, ring_pass
from .rings import ring_backward, ring_forward
from .splits import gather_by_heads, ulysses, zigzag_rope
from .training import train_sharded, training_step

__all__ = [
    "all_reduce",
    "decode",
    "gather_by_heads",
    "overlap",
    "packed_step",
    "ring_backward",
    "ring_forward",
    "ring_pass",
    "train_sharded",
    "training_step",
    "ulysses",
    "zigzag_rope",
]

"""What the modules of this package expect of the numbers and tensors that they get."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..fingerprint import shown, whole_number
from ..worlds import Shards


def check_sizes(op: str, **sizes: Any) -> list[int]:
    """The sizes as Python's ints. They may be NumPy's or torch's.

    Raises ValueError, with ``op`` in front, unless all are integers >= 1.

    >>> check_sizes("Attention", width=64, heads=8)
    [64, 8]
    >>> check_sizes("Attention", width=64, heads=0)
    Traceback (most recent call last):
    ValueError: Attention: expected heads to be an int >= 1, got 0
    """
    found = []
    for name, n in sizes.items():
        size = whole_number(n)
        if size is None or size < 1:
            raise ValueError(f"{op}: expected {name} to be an int >= 1, got {shown(n)}")
        found.append(size)
    return found


def check_heads(op: str, width: int, heads: int, kv_heads: int | None) -> list[int]:
    """The three as ints; kv_heads is as many as heads if None.

    Raises ValueError unless heads divide the width, and key/value heads the heads.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    width, heads, kv_heads = check_sizes(op, width=width, heads=heads, kv_heads=kv_heads)
    if width % heads:
        raise ValueError(f"{op}: expected width divisible by heads, got {width} and {heads}")
    if heads % kv_heads:
        raise ValueError(f"{op}: expected heads divisible by kv_heads, got {heads} and {kv_heads}")
    return [width, heads, kv_heads]


def check_activations(op: str, x: Tensor | Shards, width: int) -> None:
    """Raise ValueError unless x is (B, S, width), or Shards of such a tensor."""
    for t in x.tensors if isinstance(x, Shards) else (x,):
        if t.dim() != 3 or t.shape[-1] != width:
            raise ValueError(f"{op}: expected x of shape (B, S, {width}), got {tuple(t.shape)}")


def check_alike(op: str, *xs: Tensor | Shards) -> None:
    """Raise ValueError unless xs are all tensors, or all Shards that hold the same positions on the same ranks."""
    shards = [x for x in xs if isinstance(x, Shards)]
    if shards and len(shards) < len(xs):
        raise ValueError(
            f"{op}: expected Shards alone or tensors alone, got {', '.join(type(x).__name__ for x in xs)}; shard them "
            f"in one call"
        )
    if any(x.world is not shards[0].world for x in shards):
        raise ValueError(f"{op}: expected Shards of one world; shard them with the same world object, in one call")
    if len({(x.layout, x.length) for x in shards}) > 1:
        held = ", ".join(f"{x.length} positions in layout {x.layout}" for x in shards)
        raise ValueError(f"{op}: expected Shards of the same positions, got {held}; shard them in one call")

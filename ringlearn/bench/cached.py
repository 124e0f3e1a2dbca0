"""The caches that decoding is measured with: on one device and shared out, with the same numbers in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.decoding import KVCache
from ..worlds import SimulatedWorld
from ..worlds.world import World
from .calls import numbers

GIB = 2**30
# What a measurement goes through between two reads of the same key: caches of several layers, which together are ten
# times as large as the second-level cache of an H200. Otherwise a short sequence would be read from there.
PASS = {"cuda": 512 * 2**20, "cpu": 0}
DRAWN = 2**26  # numbers of k that are drawn together


@dataclass(frozen=True)
class Sizes:
    """B sequences of S cached tokens on P ranks, and some new ones; page: of the cache, None for one piece."""

    B: int
    S: int
    heads: tuple[int, int, int]
    dtype: torch.dtype
    P: int
    gib: float
    new: int = 0
    page: int | None = None

    def __str__(self) -> str:
        new = f", {self.new:,} new" if self.new else ""
        return f"{self.S:,} cached tokens{new}, batch {self.B}, {self.nbytes(1) / 2**20:,.4g} MiB of keys and values"

    def nbytes(self, ranks: int, tokens: int | None = None) -> int:
        """Bytes of keys and values that the rank with the most tokens has, if so many ranks share them."""
        _, G, D = self.heads
        return 2 * self.B * G * D * self.dtype.itemsize * math.ceil((self.S if tokens is None else tokens) / ranks)

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks may hold the cache."""
        return self.nbytes(ranks, self.S + self.new) <= self.gib * GIB

    def layers(self, device: torch.device) -> int:
        return max(1, math.ceil(PASS[device.type] / max(1, self.nbytes(1))))

    def seconds(self, part: str, device: torch.device, repeats: int) -> float:
        """A guess at how long a part takes with these sizes; what is left is corrected by what has been taken."""
        gpu, (H, _, D) = device.type == "cuda", self.heads
        bytes_a_second, call, flops = (3e12, 3e-4, 4e14) if gpu else (5e8, 3e-3, 2e9)
        filling = (40 * self.layers(device) * self.nbytes(1)) / bytes_a_second + (3.0 if gpu else 0.5)
        reading = self.nbytes(1) / bytes_a_second + call
        if part == "attention":
            return filling + 16 * repeats * max(self.layers(device), 2) * reading
        if part == "appends":
            return filling + 9 * self.new * self.layers(device) * reading
        return filling + 4 * repeats * (10 * call + 4 * H * D * self.new * (self.S + self.new) / self.P / flops)


def new_caches(
    worlds: Sequence[World], sizes: Sizes, interleave: int, capacity: int | None = None, layers: int | None = None
) -> list[list[KVCache]]:
    """For each world a cache for each layer, with S random tokens in them: the same in all worlds."""
    _, G, D = sizes.heads
    device, capacity = worlds[0].device, max(1, capacity or sizes.S)
    found: list[list[KVCache]] = [[] for _ in worlds]
    for layer in range(layers or sizes.layers(device)):
        for world, caches in zip(worlds, found, strict=True):
            how = dict(interleave=interleave, dtype=sizes.dtype, page=sizes.page)
            caches.append(KVCache(world, sizes.B, G, D, capacity, **how))
        some = max(1, DRAWN // (sizes.B * G * D))
        for start in range(0, sizes.S, some):
            shape = sizes.B, G, min(some, sizes.S - start), D
            k, v = (numbers(shape, sizes.dtype, device, 2 * (layer * sizes.S + start) + i) for i in range(2))
            for caches in found:
                caches[-1].append(k, v)
    return found


def one_rank(device: torch.device) -> SimulatedWorld:
    """A world of one device, which sends nothing."""
    return SimulatedWorld(1, device=device, count_memory=False)


def exact(q: Tensor, cache: KVCache) -> Tensor:
    """Attention in float32 (float64 on a CPU) of the newest queries, one for each sequence, to a cache of one rank."""
    wide = torch.float32 if q.is_cuda else torch.float64
    (B, H, _, D), out = q.shape, torch.empty(q.shape, dtype=wide, device=q.device)
    k, v = cache.whole(0)
    rows = H // k.shape[1]
    for b, g in ((b, g) for b in range(B) for g in range(k.shape[1])):
        mine = slice(g * rows, (g + 1) * rows)
        scores = q[b, mine, 0].to(wide) @ k[b, g].to(wide).T * D**-0.5
        out[b, mine, 0] = scores.softmax(-1) @ v[b, g].to(wide)
    return out

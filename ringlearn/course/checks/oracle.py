"""Inputs for checkers: the same numbers on every machine, whatever its random generator does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layouts import Layout, contiguous
from ...masks import Mask, causal, full
from ...worlds.simulated import SimulatedWorld
from ...worlds.world import PerRank


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case(NamedTuple):
    """Inputs of a rank program: q (1, H, S, D), k, v (1, G, S, D), split over P ranks, and the mask.

    parts: the shards of q, k and v, one PerRank each.  positions: by rank.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parts: tuple[PerRank, PerRank, PerRank]
    positions: list[Tensor]
    mask: Mask = full
    layout: Layout = contiguous

    @property
    def input(self) -> str:
        """In words, what it is."""
        mask = {full: "no mask", causal: "causal"}.get(self.mask, str(self.mask))
        lengths = self.lengths if len(set(self.lengths)) > 1 else ()
        return ", ".join(
            [f"S = {self.S}, P = {self.P}", mask, f"H = {self.H}, G = {self.G}, D = {self.q.shape[3]}"]
            + ([f"{self.layout} shards"] if self.layout != contiguous and self.P > 1 else [])
            + ([f"shards of {', '.join(map(str, lengths))} tokens"] if lengths else [])
            + ([str(self.q.dtype).removeprefix("torch.")] if self.q.dtype.itemsize < 4 else [])
        )

    @property
    def S(self) -> int:
        return self.q.shape[2]

    @property
    def P(self) -> int:
        return len(self.positions)

    @property
    def H(self) -> int:
        return self.q.shape[1]

    @property
    def G(self) -> int:
        return self.k.shape[1]

    @property
    def lengths(self) -> list[int]:
        return [len(own) for own in self.positions]

    @property
    def args(self) -> tuple[Any, ...]:
        """q, k, v, positions, mask: what a forward is called with; a PerRank by rank."""
        return *self.parts, self.positions, self.mask

    def dense(self, **change: Any) -> tuple[Tensor, Tensor]:
        """out and lse by definition; change: as for ``dense``, the mask too."""
        return dense(self.q, self.k, self.v, **({"mask": self.mask} | change))

    def outs(self, **change: Any) -> list[Tensor]:
        """The out of each rank by definition."""
        return self.split(self.dense(**change)[0])

    def split(self, full: Tensor, dim: int = -2) -> list[Tensor]:
        """Each rank's part of a full tensor, such as the expected output (dim=-1 for lse)."""
        return [full.index_select(dim, p) for p in self.positions]


def shards(
    S: int,
    P: int,
    H: int = 2,
    G: int = 1,
    D: int = 4,
    layout: Layout = contiguous,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    mask: Mask = full,
) -> Case:
    """The same numbers on every machine, split over P ranks; k and v of a rank lie in one buffer.

    >>> case = shards(10, 4)
    >>> [len(p) for p in case.positions], case.parts[1][0].shape
    ([2, 3, 2, 3], torch.Size([1, 1, 2, 4]))
    """
    q = numbers(seed, 1, H, S, D).to(dtype)
    k, v = (numbers(seed + i, 1, G, S, D).to(dtype) for i in (1, 2))
    split = SimulatedWorld(P).shard(q, k, v, layout=layout)
    positions = [layout.positions(S, P, rank) for rank in range(P)]
    return Case(q, k, v, tuple(PerRank(x.tensors) for x in split), positions, mask, layout)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    heads: Callable[[int], int] | None = None,
    q_at: Tensor | None = None,
    k_at: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in float64: out and lse; 0 and -inf for a query that sees no key.

    The others change it into a mistake.  heads: which key/value head a query head takes.  q_at, k_at: what the mask is
    told of the positions of queries and keys.  scale: of the scores.
    """
    q, k, v = q.double(), k.double(), v.double()
    reuse = q.shape[1] // k.shape[1]
    taken = [heads(h) if heads else h // reuse for h in range(q.shape[1])]
    s = torch.einsum("bhid,bhjd->bhij", q, k[:, taken]) * (scale or q.shape[-1] ** -0.5)
    i = torch.arange(q.shape[2]) if q_at is None else q_at
    j = torch.arange(k.shape[2]) if k_at is None else k_at
    visible = mask(i[:, None], j[None, :]).expand(s.shape)
    seen = visible.any(-1)  # a row without keys keeps its scores, and its result is thrown away: its gradient is 0
    s = s.masked_fill(~visible & seen.unsqueeze(-1), -torch.inf)
    out = torch.einsum("bhij,bhjd->bhid", torch.softmax(s, -1), v[:, taken])
    return torch.where(seen.unsqueeze(-1), out, 0.0), torch.where(seen, torch.logsumexp(s, -1), -torch.inf)

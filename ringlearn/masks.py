"""Masks: which key positions a query position sees.

A mask is a predicate of *global* positions, so it means the same on every rank and under every layout. Masks combine
with ``&`` and ``|``:

>>> import ringlearn as rl
>>> (rl.causal & rl.sliding_window(2)).dense(4, 4).int()
tensor([[1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1]], dtype=torch.int32)

The masks of this module are *interval* masks: a query at position p sees one interval of keys, whose two ends are
either constant or move along with p. ``pieces`` says so in plain integers; tiles.py turns that into kernel calls
without ever building a dense mask. A mask made from your own function has no such pieces and is evaluated block by
block.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .fingerprint import described

INFINITY = 1 << 62  # beyond any position


class Line(NamedTuple):
    """An end of an interval as a function of the query position p: ``slope * p + offset``, slope 0 or 1."""

    slope: int
    offset: int

    def at(self, p: int) -> int:
        return self.slope * p + self.offset


class Piece(NamedTuple):
    """Queries at positions start..stop-1 see the keys lo(p)..hi(p)-1."""

    start: int
    stop: int
    lo: Line
    hi: Line


class Mask:
    """A predicate ``mask(q_pos, k_pos) -> bool tensor`` of positions; True where the query sees the key.

    q_pos, k_pos: int64 tensors of global positions that broadcast, such as (S_q, 1) and (1, S_k).
    """

    exact: bool = True  # whether `pieces` is the mask itself, or only an outer bound of it

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        raise NotImplementedError

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What the queries start..stop-1 see, as pieces in order of the query position."""
        raise NotImplementedError

    def check(self, q_stop: int, k_stop: int) -> None:
        """Raise ValueError if the mask does not fit query positions < q_stop and key positions < k_stop."""

    def dense(self, S_q: int, S_k: int, q_start: int = 0, device: torch.device | str | None = None) -> Tensor:
        """The whole mask as a bool tensor (S_q, S_k): for pictures and tests, never used by the library."""
        q_pos = torch.arange(q_start, q_start + S_q, device=device)
        return self(q_pos[:, None], torch.arange(S_k, device=device)[None, :]).expand(S_q, S_k)

    def signature(self) -> str:
        """A text that is equal on two ranks only if their masks are: what ranks compare before they start."""
        return repr(self)

    def __and__(self, other: Mask) -> Mask:
        return _combine(And, self, other, "&")

    def __or__(self, other: Mask) -> Mask:
        return _combine(Or, self, other, "|")


def _combine(kind: type, a: Mask, b: Mask, sign: str) -> Mask:
    if not isinstance(b, Mask):
        raise ValueError(
            f"mask {sign} expected another mask, got {type(b).__name__}; wrap a function of positions with rl.mask(fn)"
        )
    return kind(a, b)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(q_pos.shape, k_pos.shape)
        return torch.ones((), dtype=torch.bool, device=q_pos.device).expand(shape)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return [Piece(start, stop, Line(0, -INFINITY), Line(0, INFINITY))]

    def __repr__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees its own position and what came before."""

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return [Piece(start, stop, Line(0, -INFINITY), Line(1, 1))]

    def __repr__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees the keys at a distance below ``width``, on both sides."""

    width: int

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos).abs() < self.width

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return [Piece(start, stop, Line(1, 1 - self.width), Line(1, self.width))]

    def __repr__(self) -> str:
        return f"sliding_window({self.width})"


@dataclass(frozen=True)
class Documents(Mask):
    """Several documents packed one after another: a query sees the keys of its own document."""

    lengths: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """One past the last position of each document that is not empty."""
        return tuple(accumulate(n for n in self.lengths if n))

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        ends = on_device(self.ends, torch.int64, q_pos.device)
        return torch.bucketize(q_pos, ends, right=True) == torch.bucketize(k_pos, ends, right=True)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        ends = self.ends
        pieces = []
        while start < stop:
            i = bisect_right(ends, start)
            first = ends[i - 1] if i else 0
            last = ends[i] if i < len(ends) else INFINITY
            pieces.append(Piece(start, min(stop, last), Line(0, first), Line(0, last)))
            start = pieces[-1].stop
        return pieces

    def check(self, q_stop: int, k_stop: int) -> None:
        total = sum(self.lengths)
        if total != k_stop or q_stop > total:
            raise ValueError(
                f"documents: the lengths must add up to the number of key positions, and queries must lie in "
                f"them; got lengths that add up to {total}, {k_stop} keys, and queries up to position {q_stop - 1}"
            )

    def signature(self) -> str:
        digest = hashlib.sha256(repr(self.lengths).encode()).hexdigest()[:16]
        return f"documents({len(self.lengths)} lengths, total {sum(self.lengths)}, sha256 {digest})"

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:6])) + (", ..." if len(self.lengths) > 6 else "")
        return f"documents([{shown}])" if len(self.lengths) <= 6 else f"documents([{shown}] x{len(self.lengths)})"


@lru_cache(maxsize=1024)
def on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept, because copying numbers to a GPU makes the host wait for it, and every tile of documents asks."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass(frozen=True)
class Custom(Mask):
    """A mask from the user's own function of positions."""

    fn: Callable[[Tensor, Tensor], Tensor]
    name: str
    exact = False

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self.fn(q_pos, k_pos)
        shape = torch.broadcast_shapes(q_pos.shape, k_pos.shape)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = f"a {seen.dtype} tensor" if isinstance(seen, Tensor) else f"a {type(seen).__name__}"
            raise ValueError(
                f"rl.mask({self.name}): the function must return a bool tensor that is True where the query sees "
                f"the key, got {got}; return a comparison of positions, such as k_pos <= q_pos"
            )
        try:
            return seen.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"rl.mask({self.name}): for positions {tuple(q_pos.shape)} and {tuple(k_pos.shape)} the function "
                f"must return a tensor that broadcasts to {tuple(shape)}, got {tuple(seen.shape)}"
            ) from None

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return full.pieces(start, stop)

    def signature(self) -> str:
        return f"mask({self.name}, sha256 {hashlib.sha256(described(self.fn).encode()).hexdigest()[:16]})"

    def __repr__(self) -> str:
        return f"mask({self.name})"


@dataclass(frozen=True)
class _Both(Mask):
    """Two masks and a sign between them."""

    a: Mask
    b: Mask

    sign = "?"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.a.exact and self.b.exact

    def check(self, q_stop: int, k_stop: int) -> None:
        self.a.check(q_stop, k_stop)
        self.b.check(q_stop, k_stop)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return _zip_pieces(self.a.pieces(start, stop), self.b.pieces(start, stop), largest_lo=self.sign == "&")

    def signature(self) -> str:
        return f"({self.a.signature()} {self.sign} {self.b.signature()})"

    def __repr__(self) -> str:
        return f"({self.a!r} {self.sign} {self.b!r})"


@dataclass(frozen=True, repr=False)
class And(_Both):
    """A query sees what both masks let it see."""

    sign = "&"

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.a(q_pos, k_pos) & self.b(q_pos, k_pos)


@dataclass(frozen=True, repr=False)
class Or(_Both):
    """A query sees what either mask lets it see.

    The union of two intervals is an interval when they overlap. Every interval mask here lets a query see its own
    position, so two of them always do, and the union of exact masks is exact.
    """

    sign = "|"

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.a(q_pos, k_pos) | self.b(q_pos, k_pos)


def _zip_pieces(a: list[Piece], b: list[Piece], largest_lo: bool) -> list[Piece]:
    """Intersection (largest lo, smallest hi) or union (the other way round) of two lists of pieces."""
    cuts = {p.start for p in a + b}
    out: list[Piece] = []
    stop = a[-1].stop if a else 0
    i = j = 0
    edges = sorted(cuts) + [stop]
    for start, end in zip(edges, edges[1:], strict=False):
        while a[i].stop <= start:
            i += 1
        while b[j].stop <= start:
            j += 1
        lines = (a[i].lo, b[j].lo), (a[i].hi, b[j].hi)
        # Lines of different slope may cross inside: cut there, and then one of them is the winner throughout.
        inner = sorted({x for pair in lines for x in _crossing(*pair) if start < x < end})
        for s, e in zip([start, *inner], [*inner, end], strict=True):
            wins = (
                (lambda line, s=s: line.at(s)) if e - s == 1 else (lambda line, s=s, e=e: line.at(s) + line.at(e - 1))
            )
            lo = (max if largest_lo else min)(lines[0], key=wins)
            hi = (min if largest_lo else max)(lines[1], key=wins)
            out.append(Piece(s, e, lo, hi))
    return out


def _crossing(x: Line, y: Line) -> list[int]:
    if x.slope == y.slope:
        return []
    constant, moving = (x, y) if x.slope == 0 else (y, x)
    return [constant.offset - moving.offset]


full = Full()
causal = Causal()


def sliding_window(width: int) -> Mask:
    """Keys at a distance below ``width`` on both sides: ``|q - k| < width``.

    With ``causal &`` it is the usual window of ``width`` tokens that includes the query's own (Longformer, Beltagy et
    al. 2020; Mistral 7B, Jiang et al. 2023). Raises ValueError unless width is an int >= 1.

    >>> sliding_window(2).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(
            f"sliding_window: expected a width in tokens, an int >= 1 (1 sees only the own token), got {width!r}"
        )
    return SlidingWindow(width)


def documents(lengths: Iterable[int]) -> Mask:
    """Documents packed one after another, none of which sees another; lengths of 0 are allowed.

    Raises ValueError unless lengths are ints >= 0; that they add up to S is checked when the mask is used.

    >>> documents([1, 2]).dense(3, 3).int()
    tensor([[1, 0, 0],
            [0, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    try:
        values = tuple(lengths)
    except TypeError:
        raise ValueError(f"documents: expected a list of document lengths in tokens, got {lengths!r}") from None
    for n in values:
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"documents: expected lengths that are ints >= 0, got {n!r} in {list(values)[:8]}")
    return Documents(values)


def mask(fn: Callable[[Tensor, Tensor], Tensor], name: str | None = None) -> Mask:
    """A mask from your own function of positions: ``fn(q_pos, k_pos) -> bool tensor``, broadcasting its arguments.

    It costs more than the masks of this module, since it is evaluated in blocks to find out which are empty. It must
    be a pure function of positions (it may be called in any order, on any rank). Raises ValueError if fn is not
    callable.

    >>> dilated = mask(lambda q_pos, k_pos: (q_pos - k_pos) % 2 == 0)
    >>> (causal & dilated).dense(3, 3).int()
    tensor([[1, 0, 0],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    if isinstance(fn, Mask):
        return fn
    if not callable(fn):
        raise ValueError(f"rl.mask: expected a function of (q_pos, k_pos) that returns a bool tensor, got {fn!r}")
    name = name or getattr(fn, "__name__", type(fn).__name__)
    # Plans are kept by mask. An object without a hash has at least a method with one.
    return Custom(fn if isinstance(fn, Hashable) else fn.__call__, name)

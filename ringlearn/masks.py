"""Masks: which key positions a query position sees.

A mask is a predicate of *global* positions, so it means the same on every rank and under every layout. Masks combine
with ``&`` and ``|``:

>>> import ringlearn as rl
>>> (rl.causal & rl.sliding_window(2)).dense(4, 4).int()
tensor([[1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1]], dtype=torch.int32)

A mask may differ from row to row of a batch: ``documents([[5, 15], [8, 12]])``. The rows are then computed as one long
sequence, one after the other, none of which sees another (``packed``).

The masks of this module are *interval* masks: a query at position p sees one interval of keys, whose two ends are
either constant or move along with p. ``pieces`` says so in plain integers; the package tiles/ turns that into kernel
calls without ever building a dense mask. A mask made from your own function has no such pieces and is evaluated block
by block.
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .fingerprint import described, shown, whole_number

INFINITY = 1 << 62  # beyond any position


class Bound(NamedTuple):
    """A bound of an interval that depends on the query position p: ``slope * p + offset``, with slope 0 or 1."""

    slope: int
    offset: int

    def at(self, p: int) -> int:
        return self.slope * p + self.offset


class KeyInterval(NamedTuple):
    """The keys lo(p)..hi(p)-1, seen by each query p in start..stop-1."""

    start: int
    stop: int
    lo: Bound
    hi: Bound


class Mask:
    """A predicate of positions, ``mask(q_pos, k_pos) -> bool tensor``, True where the query sees the key.

    q_pos, k_pos: int64 tensors of global positions that broadcast, such as (S_q, 1) and (1, S_k). If a mask differs
    from row to row of a batch, its result has the dims (B, 1) in front, for rows and heads.

    A new mask is a frozen dataclass with ``__call__``, which is all that it needs to be right; ranks compare its
    ``repr``. With ``pieces`` and ``exact = True`` it is fast as well, because most tiles then need no predicate. The
    library then relies on two things: the pieces say the same as the predicate, for any start and stop; and from one
    query position to the next, neither end of the interval moves backwards. With ``sees_itself = True`` a union with
    another such mask, ``|``, is fast too; otherwise it might have a gap, and is evaluated block by block.

    A batch whose rows have documents of their own is computed as one sequence. ``packed`` below does this for any mask,
    but its result is not exact, so override it where that has to be fast too.
    """

    exact: bool = False  # whether `pieces` is the mask itself, or only an outer bound of it
    sees_itself: bool = False  # whether every query sees the key at its own position
    rows: int | None = None  # the number of rows of the batch, of a mask that differs from row to row

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        raise NotImplementedError

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
        """What the queries start..stop-1 see, as pieces in order of the query position; all keys by default.

        stop may be INFINITY, 2**62, to ask which kinds of pieces there are; a mask with infinitely many pieces then has
        to stop early.
        """
        return [KeyInterval(start, stop, Bound(0, -INFINITY), Bound(0, INFINITY))]

    def check(self, q_stop: int, k_stop: int) -> None:
        """Raise ValueError if the mask does not fit query positions < q_stop and key positions < k_stop."""

    def packed(self, B: int, S: int) -> Mask:
        """This mask for B rows of S positions as one sequence of B * S, in which position p of row b is b * S + p.

        This alone does not separate the rows: ``documents([S] * B) & mask.packed(B, S)`` does.
        """
        return Custom(lambda q_pos, k_pos: self(q_pos % S, k_pos % S), repr(self))

    def dense(self, S_q: int, S_k: int, q_start: int = 0, device: torch.device | str | None = None) -> Tensor:
        """The whole mask as a bool tensor, for pictures and tests; the library never uses it.

        Its shape is (S_q, S_k), or (B, 1, S_q, S_k), as SDPA takes it, if the mask differs from row to row.
        """
        q_pos = torch.arange(q_start, q_start + S_q, device=device)
        seen = self(q_pos[:, None], torch.arange(S_k, device=device)[None, :])
        return seen.expand(*seen.shape[:-2], S_q, S_k)

    def signature(self) -> str:
        """A text that is equal on two ranks only if their masks are: what ranks compare before they start."""
        return repr(self)

    def __and__(self, other: Mask) -> Mask:
        return _combine(And, self, other, "&")

    def __invert__(self) -> Mask:
        raise ValueError(
            f"~{self!r}: masks combine with & and | only, because what a query sees is one piece of keys; write the "
            f"opposite as a function, rl.mask(lambda q_pos, k_pos: ...)"
        )

    def __or__(self, other: Mask) -> Mask:
        return _combine(Or, self, other, "|")


def _combine(kind: type, a: Mask, b: Mask, sign: str) -> Mask:
    if not isinstance(b, Mask):
        raise ValueError(
            f"mask {sign} expected another mask, got {type(b).__name__}; wrap a function of positions with rl.mask(fn)"
        )
    if None not in (a.rows, b.rows) and a.rows != b.rows:
        raise ValueError(f"mask {sign} expected masks for equally many rows of a batch, got {a.rows} and {b.rows}")
    return kind(a, b)


class _AlikeEverywhere(Mask):
    """A mask that depends only on how far apart two positions are, so it is its own packed form."""

    exact = sees_itself = True

    def packed(self, B: int, S: int) -> Mask:
        return self


@dataclass(frozen=True)
class Full(_AlikeEverywhere):
    """Every query sees every key."""

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(q_pos.shape, k_pos.shape)
        return torch.ones((), dtype=torch.bool, device=q_pos.device).expand(shape)

    def __repr__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(_AlikeEverywhere):
    """A query sees the keys at its own and at earlier positions."""

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
        return [KeyInterval(start, stop, Bound(0, -INFINITY), Bound(1, 1))]

    def __repr__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class SlidingWindow(_AlikeEverywhere):
    """A query sees the keys at a distance below ``width``, on both sides."""

    width: int

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos).abs() < self.width

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
        return [KeyInterval(start, stop, Bound(1, 1 - self.width), Bound(1, self.width))]

    def __repr__(self) -> str:
        return f"sliding_window({self.width})"


@dataclass(frozen=True)
class Documents(Mask):
    """Several documents packed one after another: a query sees the keys of its own document."""

    lengths: tuple[int, ...]
    exact = sees_itself = True

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """One past the last position of each document that is not empty."""
        return tuple(accumulate(n for n in self.lengths if n))

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        ends = on_device(self.ends, torch.int64, q_pos.device)
        return torch.bucketize(q_pos, ends, right=True) == torch.bucketize(k_pos, ends, right=True)

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
        ends = self.ends
        pieces = []
        while start < stop:
            i = bisect_right(ends, start)
            first = ends[i - 1] if i else 0
            last = ends[i] if i < len(ends) else INFINITY
            pieces.append(KeyInterval(start, min(stop, last), Bound(0, first), Bound(0, last)))
            start = pieces[-1].stop
        return pieces

    def check(self, q_stop: int, k_stop: int) -> None:
        total = sum(self.lengths)
        if total != k_stop or q_stop > total:
            cumulative = self.lengths[:1] == (0,) and self.lengths[-1] == k_stop and len(self.lengths) > 2
            raise ValueError(
                f"documents: the lengths must add up to the number of key positions, and queries must lie in "
                f"them; got lengths that add up to {total}, {k_stop} keys, and queries up to position {q_stop - 1}"
                + ("; these look like cu_seqlens, sums of lengths: give their differences, .diff()" * cumulative)
            )

    def packed(self, B: int, S: int) -> Mask:
        return Documents(self.lengths * B)

    def signature(self) -> str:
        digest = hashlib.sha256(repr(self.lengths).encode()).hexdigest()[:16]
        return f"documents({len(self.lengths)} lengths, total {sum(self.lengths)}, sha256 {digest})"

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:6])) + (", ..." if len(self.lengths) > 6 else "")
        return f"documents([{shown}])" if len(self.lengths) <= 6 else f"documents([{shown}] x{len(self.lengths)})"


@dataclass(frozen=True)
class DocumentsPerRow(Mask):
    """Packed documents whose lengths differ from row to row of a batch."""

    of_rows: tuple[Documents, ...]
    exact = sees_itself = True

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.of_rows)

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return torch.stack([row(q_pos, k_pos) for row in self.of_rows])[:, None]

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
        raise ValueError(
            "the mask differs from row to row of the batch, so it cannot be planned for all of them at once; plan one "
            "row, rl.documents(lengths[row]), or all rows as one sequence, mask.packed(B, S)"
        )

    def check(self, q_stop: int, k_stop: int) -> None:
        for number, row in enumerate(self.of_rows):
            try:
                row.check(q_stop, k_stop)
            except ValueError as error:
                raise ValueError(f"row {number} of the batch: {error}") from None

    def packed(self, B: int, S: int) -> Mask:
        return Documents(tuple(n for row in self.of_rows for n in row.lengths))

    def signature(self) -> str:
        digest = hashlib.sha256(repr(self.of_rows).encode() + self.packed(0, 0).signature().encode()).hexdigest()[:16]
        return f"documents(of {self.rows} rows, sha256 {digest})"

    def __repr__(self) -> str:
        shown = ", ".join(repr(row).removeprefix("documents(").removesuffix(")") for row in self.of_rows[:3])
        return f"documents([{shown}{', ...' if self.rows > 3 else ''}]{f' x{self.rows}' if self.rows > 3 else ''})"


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

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        try:
            seen = self.fn(q_pos, k_pos)
        except RuntimeError as error:
            if "Boolean value of Tensor" not in str(error):
                raise
            raise ValueError(
                f"rl.mask({self.name}): the function gets tensors of positions, which are neither true nor false as "
                f"a whole, as Python's if, and, or, not want them; combine comparisons with &, |, ~ and torch.where"
            ) from None
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

    def signature(self) -> str:
        return f"mask({self.name}, sha256 {hashlib.sha256(described(self.fn).encode()).hexdigest()[:16]})"

    def __repr__(self) -> str:
        return f"mask({self.name})"


@dataclass(frozen=True)
class _Both(Mask):
    """Two masks joined by ``&`` or ``|``."""

    a: Mask
    b: Mask

    sign = "?"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.a.exact and self.b.exact

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.a.sees_itself and self.b.sees_itself

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        return self.b.rows if self.a.rows is None else self.a.rows

    def packed(self, B: int, S: int) -> Mask:
        return type(self)(self.a.packed(B, S), self.b.packed(B, S))

    def check(self, q_stop: int, k_stop: int) -> None:
        self.a.check(q_stop, k_stop)
        self.b.check(q_stop, k_stop)

    def pieces(self, start: int, stop: int) -> list[KeyInterval]:
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

    The union of two intervals is an interval when they overlap. They do if both masks let a query see its own position,
    as every interval mask here does: then the union of exact masks is exact.
    """

    sign = "|"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return super().exact and self.sees_itself

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.a(q_pos, k_pos) | self.b(q_pos, k_pos)


def _zip_pieces(a: list[KeyInterval], b: list[KeyInterval], largest_lo: bool) -> list[KeyInterval]:
    """Intersection (largest lo, smallest hi) or union (the other way round) of two lists of pieces."""
    cuts = {p.start for p in a + b}
    out: list[KeyInterval] = []
    stop = a[-1].stop if a else 0
    i = j = 0
    edges = sorted(cuts) + [stop]
    for start, end in zip(edges, edges[1:], strict=False):
        while a[i].stop <= start:
            i += 1
        while b[j].stop <= start:
            j += 1
        lines = (a[i].lo, b[j].lo), (a[i].hi, b[j].hi)
        # Bounds of different slope may cross inside: cut there, so that one of them is the tighter one throughout.
        inner = sorted({x for pair in lines for x in _crossing(*pair) if start < x < end})
        for s, e in zip([start, *inner], [*inner, end], strict=True):
            wins = (
                (lambda line, s=s: line.at(s)) if e - s == 1 else (lambda line, s=s, e=e: line.at(s) + line.at(e - 1))
            )
            lo = (max if largest_lo else min)(lines[0], key=wins)
            hi = (min if largest_lo else max)(lines[1], key=wins)
            out.append(KeyInterval(s, e, lo, hi))
    return out


def _crossing(x: Bound, y: Bound) -> list[int]:
    if x.slope == y.slope:
        return []
    constant, moving = (x, y) if x.slope == 0 else (y, x)
    return [constant.offset - moving.offset]


full = Full()
causal = Causal()


def sliding_window(width: int) -> Mask:
    """Keys at a distance below ``width`` on both sides: ``|q - k| < width``.

    ``causal & sliding_window(width)`` is the usual window of ``width`` tokens, including the query's own (Longformer,
    Beltagy et al. 2020; Mistral 7B, Jiang et al. 2023). Raises ValueError unless width is an int >= 1.

    >>> sliding_window(2).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    tokens = whole_number(width)
    if tokens is None or tokens < 1:
        everything = width is None or isinstance(width, float) and bool(width == float("inf"))
        raise ValueError(
            f"sliding_window: expected a width in tokens, an int >= 1 (1: a token sees only itself), got {shown(width)}"
            + ("; omit the window where there is none, mask=rl.causal or rl.full" * everything)
        )
    return SlidingWindow(min(tokens, INFINITY))  # wider than any sequence is all the same


def documents(lengths: Iterable[int] | Iterable[Iterable[int]]) -> Mask:
    """Documents packed one after another that do not see each other; lengths of 0 are allowed.

    lengths: the lengths of the documents, the same in every row of a batch; or a list of lengths for each row. They may
    be integers of any kind, or an integer tensor or array.

    Raises ValueError unless lengths are ints >= 0. Whether they add up to S is checked when the mask is used.

    >>> documents([1, 2]).dense(3, 3).int()
    tensor([[1, 0, 0],
            [0, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    >>> documents([[1, 2], [3]]).dense(3, 3).shape
    torch.Size([2, 1, 3, 3])
    """
    values = _listed(lengths)
    if set(map(type, values)) <= {int} and min(values, default=0) >= 0:  # as in every training step: not one by one
        return Documents(tuple(values))
    of_rows = [_is_listed(row) for row in values]
    if not any(of_rows):
        return Documents(_lengths(values))
    if not all(of_rows):
        raise ValueError(
            f"documents: expected lengths, or a list of lengths for each row of the batch, got both in "
            f"{shown(values)}; say one list for each row"
        )
    return DocumentsPerRow(tuple(Documents(_lengths(_listed(row))) for row in values))


def _is_listed(x: object) -> bool:
    return isinstance(x, Iterable) and not isinstance(x, str | bytes) and getattr(x, "ndim", 1) > 0


def _listed(lengths: object) -> list:
    if not _is_listed(lengths) or isinstance(lengths, Mask):
        raise ValueError(f"documents: expected a list of document lengths in tokens, got {shown(lengths)}")
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _lengths(values: list) -> tuple[int, ...]:
    found = tuple(whole_number(n) for n in values)
    for n, given in zip(found, values, strict=True):
        if n is None or n < 0:
            raise ValueError(f"documents: expected lengths that are ints >= 0, got {shown(given)} in {shown(values)}")
    return found


def mask(fn: Callable[[Tensor, Tensor], Tensor], name: str | None = None) -> Mask:
    """A mask from your own function of positions: ``fn(q_pos, k_pos) -> bool tensor``, broadcasting its arguments.

    It costs more time than the masks of this module, since it is evaluated in blocks to find out which are empty. It
    must be a pure function of positions (it may be called in any order, on any rank). Raises ValueError if fn is not
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
        dense = "; a mask of S x S would be too large, say what it hides as a function" * isinstance(fn, Tensor)
        raise ValueError(
            f"rl.mask: expected a function of (q_pos, k_pos) that returns a bool tensor, got {shown(fn)}{dense}"
        )
    try:
        inspect.signature(fn).bind(None, None)
    except TypeError:
        raise ValueError(
            f"rl.mask: expected a function of two arguments, (q_pos, k_pos), got {getattr(fn, '__name__', 'one')}"
            f"{inspect.signature(fn)}; a mask_mod of FlexAttention that is the same for all rows and heads becomes one "
            f"by lambda q_pos, k_pos: mask_mod(0, 0, q_pos, k_pos)"
        ) from None
    except ValueError:  # a function without a signature, in C
        pass
    name = name or getattr(fn, "__name__", type(fn).__name__)
    # Plans are kept by mask. An object without a hash has at least a method with one.
    return Custom(fn if isinstance(fn, Hashable) else fn.__call__, name)

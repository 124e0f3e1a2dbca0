"""One attention call as the formulas of this folder see it, and how such a formula is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from math import inf
from typing import Any, get_type_hints

from ..attention.strategy import Spec
from ..layouts import Layout, contiguous, count
from ..masks import Mask, full
from .one_device import ACCUMULATED

Bytes = dict[str, int]


@dataclass(frozen=True)
class Problem:
    """One attention call, the ranks that share it, and their links.

    S tokens, H query heads, G key/value heads, head dim D, batch B, itemsize bytes per element; shape is (nodes, ranks
    per node). flops: operations per second of a rank.  bandwidth: bytes per second of a rank's link inside its node.
    outer_bandwidth: of its link to other nodes, by default the same.  latency: seconds of a message.
    backward: whether the formula is for the backward or the forward.  rank: the rank for which it is evaluated.
    layout: which tokens each rank holds.  mask: determines which messages are skipped, since nobody needs them; memory
    and seconds are those without a mask, which are upper bounds.

    >>> Problem(32768, (2, 4), 32, 8, 128).ranks
    8
    """

    S: int
    shape: tuple[int, int]
    H: int
    G: int
    D: int
    B: int = 1
    itemsize: int = 2
    flops: float = 600e12
    bandwidth: float = 250e9
    outer_bandwidth: float | None = None
    latency: float = 10e-6
    backward: bool = False
    rank: int = 0
    layout: Layout = contiguous
    mask: Mask = full

    @property
    def ranks(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def across(self) -> float:
        """Bytes per second between nodes."""
        return self.bandwidth if self.outer_bandwidth is None else self.outer_bandwidth

    @property
    def without_messages(self) -> Problem:
        """The same problem on links that take no time."""
        return replace(self, bandwidth=inf, outer_bandwidth=inf, latency=0.0)

    # ---- What a rank holds ----

    @property
    def lengths(self) -> list[int]:
        """How many tokens each rank holds.

        >>> Problem(10, (1, 4), 1, 1, 8).lengths
        [2, 3, 2, 3]
        """
        return [count(ranges) for ranges in self.layout.ranges(self.S, self.ranks)]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def spec(self) -> Spec:
        """The call as rank programs see it, without a kernel."""
        positions = self.layout.ranges(self.S, self.ranks)
        return Spec(self.mask, positions, positions, scale=1.0, kernel=None)

    @property
    def kv(self) -> int:
        """How many numbers a rank's k and v have per token; dk and dv have as many."""
        return 2 * self.B * self.G * self.D

    @property
    def accumulated(self) -> int:
        """Bytes of an element of a sum: float32, or float64 for float64 inputs."""
        return max(self.itemsize, ACCUMULATED)

    def travelling(self, ranks: int) -> int:
        """Bytes per element of dk, dv in a ring of that many ranks: between two ranks nothing has been summed yet."""
        return self.itemsize if ranks <= 2 else self.accumulated

    def products(self, rows: int, columns: int, heads: int) -> int:
        """Operations of scores and weighted values: a multiply-add counts as two."""
        return 4 * self.B * heads * self.D * rows * columns

    # ---- Strategies that do not distinguish nodes, on links of two kinds ----

    @property
    def links_to_all(self) -> Problem:
        """The same problem for equal messages to all other ranks: both kinds of links work, and the slower decides."""
        share = (self.ranks - self.shape[1]) / (self.ranks - 1) if self.ranks > 1 else 0.0
        slowest = max((1 - share) / self.bandwidth, share / self.across)
        return replace(self, bandwidth=1 / slowest if slowest else inf)

    def to_all(self, nbytes: int) -> Bytes:
        """Where bytes that go to all other ranks alike, inside the node and across: a mean if heads do not divide."""
        across = nbytes * (self.ranks - self.shape[1]) // (self.ranks - 1) if self.ranks > 1 else 0
        return {"inner": nbytes - across, "outer": across}

    @property
    def links_to_next(self) -> Problem:
        """The same problem for a ring of all ranks, which goes at the pace of its slowest link."""
        return replace(self, bandwidth=min(self.across, self.bandwidth)) if self.shape[0] > 1 else self

    def to_next(self, nbytes: int) -> Bytes:
        """Where a ring of all ranks sends bytes: the last rank of a node sends all of them to the next node."""
        return {"inner": 0, "outer": nbytes} if self.shape[0] > 1 else {"inner": nbytes, "outer": 0}


def held(**components: int) -> dict[str, int]:
    """A table of bytes by component, without empty components.

    >>> held(in_flight=8, scores=0)
    {'in flight': 8}
    """
    return {name.replace("_", " "): nbytes for name, nbytes in components.items() if nbytes}


@dataclass(frozen=True)
class Costs:
    """What the comparison needs to know of a strategy. Each entry is a function of a ``Problem``.

    messages: how many the busiest rank sends.  sent: bytes inside the node and across, {"inner": ..., "outer": ...}.
    memory: bytes by component.  seconds: of the forward.  busy: how many ranks compute anything.
    """

    name: str
    messages: Callable[[Problem], int]
    sent: Callable[[Problem], Mapping[str, int]]
    memory: Callable[[Problem], Mapping[str, int]]
    seconds: Callable[[Problem], float]
    busy: Callable[[Problem], int] = lambda problem: problem.ranks


_TYPES = get_type_hints(Problem) | {"P": int, "n": int}
# Here and not in the formulas' own signatures, whose defaults the pages of the API would take for those of the call.
_MACHINE = ("flops", "bandwidth", "outer_bandwidth")  # for which a formula has no defaults
_DEFAULTS = {x.name: x.default for x in fields(Problem) if x.default is not MISSING and x.name not in _MACHINE}
_DEFAULTS |= {"latency": 0.0, "awaited_first": False, "heads_at_once": None, "lse_grad": False}
_DEFAULTS |= {"n": 1, "interleave": 16, "exchange": "all-gather", "accumulated": ACCUMULATED}


def formula(sizes: str, options: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function of a ``Problem`` be called with the sizes that it depends on.

    sizes: names of positional arguments, such as "S P G D". P ranks are one node; n tokens on each rank are P * n in
    all.  options: names of arguments that are passed by keyword.  Arguments that are not fields of ``Problem`` are
    passed on to the function unchanged. Called with a ``Problem`` instead of sizes, the formula is evaluated for that
    problem; options that are given replace its fields.

    Raises TypeError, like any function, for an argument that is missing, unknown or given twice.

    >>> @formula("S P", "itemsize")
    ... def shard_bytes(p: Problem) -> int:
    ...     return p.longest * p.itemsize
    >>> shard_bytes(64, 4), shard_bytes(64, P=2, itemsize=4), shard_bytes(Problem(64, (2, 4), 1, 1, 8))
    (32, 128, 16)
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own, hints = list(signature(function).parameters)[1:], _TYPES | get_type_hints(function)
        parameters = [
            Parameter(name, kind, default=known.get(name, Parameter.empty), annotation=hints[name])
            for kind, names, known in (
                (Parameter.POSITIONAL_OR_KEYWORD, sizes, {}),
                (Parameter.KEYWORD_ONLY, options, _DEFAULTS),
            )
            for name in names.split()
        ]
        expected = Signature(parameters, return_annotation=hints["return"])

        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if args and isinstance(args[0], Problem):
                values = {name: _DEFAULTS[name] for name in own if name in _DEFAULTS} | given
                extra = {name: values.pop(name) for name in own if name in values}
                return function(replace(*args, **values), **extra)
            try:
                bound = expected.bind(*args, **given)
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}; expected {function.__name__}{expected}") from None
            bound.apply_defaults()
            extra = {name: bound.arguments.pop(name) for name in own}
            # or 1 where it does not matter
            values = {"S": 1, "H": bound.arguments.get("G", 1), "G": 1, "D": 1} | bound.arguments
            P = values.pop("P", 1)
            values.setdefault("shape", (1, P))
            if "n" in values:
                values["S"] = P * values.pop("n")
            return function(Problem(**values), **extra)

        call.__signature__ = expected
        return call

    return decorate

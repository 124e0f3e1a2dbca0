"""The checks of the torchrun exercises 04 and 05: the learner's ring, forward and backward.

How a rank program is tried is here too. Each rank first runs the answer on simulated ranks, however many real ones
there are: a deadlock is found at once there, and from three ranks on every mistake shows (with two, the wrong
direction does not). For the ring these are the stages of notebooks 03 and 04. Then the same function runs between the
real ranks, where its result must be right again, and on CPUs the same bits as in the simulation.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....layouts import Layout, contiguous
from ....masks import Mask, causal, full
from ....worlds.world import PerRank
from .. import gradients, nb03, nb04, oracle, simulate
from ..checker import Wrong, difference, parts, returned
from ..simulate import who
from .runner import Exercise, Rank

D = 4


def prepare() -> None:
    """The simulation counts memory in a dispatch mode, for whose first use torch imports its compiler: seconds."""
    importlib.import_module("torch._dynamo")


STUCK = (
    "which ranks get to the line with comm.rotate, and how often",
    "a rank leaves out a rotate or an await that its neighbours make: skip the computation, never the message",
)


class Case(NamedTuple):
    """A ring's inputs by rank, in float64, and in one line what they are."""

    S: int
    P: int
    mask: Mask
    ring: oracle.Case
    input: str

    @property
    def scale(self) -> float:
        return D**-0.5


def make(S: int, P: int, mask: Mask, about: str = "", H: int = 4, G: int = 2, layout: Layout = contiguous) -> Case:
    ring = oracle.shards(S, P, H=H, G=G, D=D, layout=layout, dtype=torch.float64)
    name = "causal" if mask is causal else "no mask"
    shards = "" if layout is contiguous else f", {layout} shards"
    return Case(S, P, mask, ring, f"S = {S}, P = {P}, {name}, {H} query and {G} key heads{shards}{about}")


def _real(P: int) -> Iterator[Case]:
    yield make(5 * P + P // 2, P, causal, ", for real")
    yield make(max(1, P - 1), P, full, ", for real")


# ---- How a rank program is tried -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What is asked of a rank program.

    stages: each simulates the answer, and raises Wrong.  real: the cases for a number of real ranks.  args: of a case;
    a PerRank gives each rank its own.  unpack: of what a rank returned, its parts.  compare(case, parts by rank):
    raises Wrong.
    """

    stages: tuple[Callable[[Callable], None], ...]
    real: Callable[[int], Iterable[Case]]
    args: Callable[[Case], tuple[Any, ...]]
    unpack: Callable[[Any], tuple[Any, ...]]
    compare: Callable[[Case, dict[int, Any]], None]

    def __call__(self, rank: Rank, answer: Callable) -> str:
        for stage in self.stages:
            rank.case(lambda stage=stage: _simulated(stage, answer))
        world = rank.case(rank.world, patience=60.0)
        for case in self.real(rank.size):
            rank.case(lambda case=case: self._real(rank, world, answer, case), case.input)
        same = ", and bit for bit the same" if rank.device.type == "cpu" else ""
        return f"Simulated, then for real{same}."

    def _real(self, rank: Rank, world: Any, answer: Callable, case: Case) -> None:
        r = rank.rank
        args = [_on(rank.device, x[r] if isinstance(x, PerRank) else x) for x in self.args(case)]
        (result,) = world.run(answer, *args)
        got = self.unpack(returned(result))
        rank.synchronize()
        self.compare(case, {r: tuple(_on(torch.device("cpu"), t) for t in got)})
        if rank.device.type == "cpu":
            ran = simulate.run(answer, case.P, *self.args(case), input=case.input)
            _same_bits(got, self.unpack(ran.results[r]))


def _simulated(stage: Callable[[Callable], None], answer: Callable) -> None:
    try:
        stage(answer)
    except Wrong as wrong:
        raise Wrong(f"simulated: {wrong.symptom}", wrong.where, wrong.cause, input=wrong.input) from None


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on(device, v) for v in value] if isinstance(value, list | tuple) else value


# ---- 04 ring forward: (comm, q, k, v, positions, mask) -> (out, lse) -------------------------------------------------


def _same_bits(got: Any, want: Any) -> None:
    if not all(torch.equal(a, b) for a, b in zip(got, want)):
        raise Wrong(
            "the result is right, but differs from the simulated one in the last bits",
            "what the result depends on besides the arguments",
            "something outside the function, such as a clock or a global variable, decides the order of sums",
            input="the same shards, simulated and for real",
        )


Reason = tuple[str, str]  # where to look, and the cause


def forward_args(case: Case) -> tuple[Any, ...]:
    return *case.ring.parts, case.ring.positions, case.mask


def out_and_lse(result: Any) -> tuple[Any, Any]:
    return parts(result, "out, lse")


def compare_forward(
    known: dict[Callable[[Case], list[Tensor]], Reason], unknown: str, lse: Reason, all_rows: str = ""
) -> Callable[[Case, dict[int, Any]], None]:
    """Raises Wrong for another out or lse than dense attention's.

    known: mistakes, as what they give.  unknown: where to look for others.  lse: if it alone is wrong.
    all_rows: the cause if out has the rows of all ranks.
    """

    def compare(case: Case, got: dict[int, Any]) -> None:
        want_out, want_lse = oracle.dense(case.ring.q, case.ring.k, case.ring.v, case.mask)
        problems = _problems(("out", "lse"), (case.ring.split(want_out), case.ring.split(want_lse, dim=-1)), got)
        if not any(problems.values()):
            return
        where, cause = unknown, NONE
        if not problems["out"]:
            where, cause = lse
        elif case.S % case.P == 0:
            found = [reason for mistake, reason in known.items() if _same(got, mistake(case), 0)]
            where, cause = found[0] if found else (where, cause)
            if all_rows and any(getattr(g[0], "shape", ())[2:3] == (case.S,) for g in got.values()) and case.P > 1:
                cause = all_rows
        raise Wrong(_said(problems, got), where, cause)

    return compare


NONE = "none of the usual mistakes alone: compare what one rank does, line by line, with attention on one device"
Problems = dict[str, dict[int, str]]  # name of a tensor -> rank -> how it differs


def _problems(names: tuple[str, ...], want: tuple[list[Tensor], ...], got: dict[int, Any]) -> Problems:
    found: Problems = {}
    for part, name in enumerate(names):
        differs = {r: difference(name, g[part], want[part][r], 1e-10) for r, g in got.items()}
        found[name] = {r: problem for r, problem in differs.items() if problem}
    return found


def _said(problems: Problems, got: dict[int, Any]) -> str:
    """ "out is off by 0.68, 0.88 on ranks 1 and 2 and right on ranks 0 and 3; lse is right"."""
    words = []
    for name, wrong in problems.items():
        errors = [re.fullmatch(rf"{name} is off by (\S+) \(relative norm\)", text) for text in wrong.values()]
        right = [r for r in got if r not in wrong]
        if not wrong:
            words.append(f"{name} is right")
        elif len(got) == 1 or not all(errors):
            words.append(next(iter(wrong.values())).removesuffix(" (relative norm)"))
        else:
            sizes = ", ".join(m[1] for m in errors if m)
            more = f" and right on {who(right)}" if right else ""
            words.append(f"{name} is off by {sizes} on {who(list(wrong)) if right else 'all ranks'}{more}")
    return f"{'; '.join(words)} (relative norms)"


def _same(got: dict[int, Any], other: list[Tensor], part: int) -> bool:
    return all(
        isinstance(g[part], Tensor)
        and g[part].shape == other[r].shape
        and torch.allclose(g[part], other[r], 1e-9, 1e-9)
        for r, g in got.items()
    )


REAL = "what differs between simulated ranks, where the answer is right, and processes"
_forward = Trial(
    tuple(stage for _, stage in nb03.ring_forward.stages),
    _real,
    forward_args,
    out_and_lse,
    compare_forward({}, REAL, ("the lse that is returned", "it is to be that of the merged result, over all keys")),
)

ring_forward = Exercise("04 ring forward", _forward, STUCK, prepare)

# ---- 05 ring backward: (comm, dout, q, k, v, out, lse, positions, mask) -> dq, dk, dv --------------------------------


def _three(result: Any) -> tuple[Any, ...]:
    return parts(result, "dq, dk, dv")


def _compare_backward(case: Case, got: dict[int, Any]) -> None:
    want = gradients.of(case.ring, case.mask).want
    problems = _problems(gradients.NAMES, tuple(map(case.ring.split, want)), got)
    if any(problems.values()):
        raise Wrong(_said(problems, got), REAL, NONE)


_backward = Trial(
    nb04.IN_ONE_DTYPE, _real, lambda case: gradients.of(case.ring, case.mask).args, _three, _compare_backward
)

ring_backward = Exercise("05 ring backward", _backward, STUCK, prepare)

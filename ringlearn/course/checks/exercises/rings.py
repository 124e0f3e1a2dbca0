"""The checks of the torchrun exercises 04 and 05: the learner's ring, forward and backward.

How a rank program is tried is here too. Each rank first runs the answer on simulated ranks, however many real ones
there are: a deadlock is found at once there, and from three ranks on every mistake shows (with two, the wrong
direction does not). For the ring these are the stages of notebooks 03 and 04. Then the same function runs between the
real ranks, where its result must be right again, and on CPUs the same bits as in the simulation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ....layouts import Layout, contiguous
from ....masks import Mask, causal, full
from ....worlds.world import PerRank
from .. import gradients, nb03, nb04, oracle, simulate
from ..checker import Wrong, difference, parts, returned
from ..mistakes import Reason, recognised
from ..oracle import Case
from .runner import Exercise, Rank

D = 4


def prepare() -> None:
    """The simulation counts memory in a dispatch mode, for whose first use torch imports its compiler: seconds."""
    importlib.import_module("torch._dynamo")


STUCK = (
    "which ranks get to the line with comm.rotate, and how often",
    "a rank leaves out a rotate or an await that its neighbours make: skip the computation, never the message",
)


def make(S: int, P: int, mask: Mask, H: int = 4, G: int = 2, layout: Layout = contiguous) -> Case:
    return oracle.shards(S, P, H, G, D, layout, torch.float64, mask=mask)


def real_cases(P: int, last: Mask = full, **sizes: Any) -> Iterator[Case]:
    """For P real ranks: uneven shards, and fewer tokens than ranks."""
    yield make(5 * P + P // 2, P, causal, **sizes)
    yield make(max(1, P - 1), P, last, **sizes)


# ---- How a rank program is tried -------------------------------------------------------------------------------------


forward_args = attrgetter("args")
out_and_lse = partial(parts, names="out, lse")


@dataclass(frozen=True)
class Trial:
    """What is asked of a rank program.

    stages: each simulates the answer, and raises Wrong.  real: the cases for a number of real ranks.  args: of a case;
    a PerRank gives each rank its own.  unpack: of what a rank returned, its parts.  compare(case, parts by rank):
    raises Wrong; it sees all simulated ranks, or one real one.
    simulated: cases that are simulated too, for each of which cost(case, ran) raises Wrong; where: what they are about.
    remark(answer): what is said of a right one.
    """

    stages: tuple[Callable[[Callable], None], ...]
    real: Callable[[int], Iterable[Case]]
    args: Callable[[Case], tuple[Any, ...]]
    unpack: Callable[[Any], tuple[Any, ...]]
    compare: Callable[[Case, dict[int, Any]], None]
    simulated: Callable[[], Iterable[Case]] = tuple
    cost: Callable[[Case, simulate.Ran], None] = lambda case, ran: None
    where: str = ""
    remark: Callable[[Callable], str] = lambda answer: ""

    def __call__(self, rank: Rank, answer: Callable) -> str:
        for stage in (*self.stages, self._simulate):
            rank.case(lambda stage=stage: _simulated(stage, answer))
        world = rank.case(rank.world, hangs_after=60.0)
        for case in self.real(rank.size):
            rank.case(lambda case=case: self._real(rank, world, answer, case), case.input)
        same = ", and bit for bit the same" if rank.device.type == "cpu" else ""
        return f"Simulated, then for real{same}. {self.remark(answer)}".rstrip()

    def _simulate(self, answer: Callable) -> None:
        for case in self.simulated():
            where = self.where if case.P > 1 else "one rank alone: no message, and everything is its own"
            ran = simulate.run(answer, case.P, *self.args(case), input=case.input, where=where)
            self.compare(case, {r: self.unpack(result) for r, result in enumerate(ran.results)})
            self.cost(case, ran)

    def _real(self, rank: Rank, world: Any, answer: Callable, case: Case) -> None:
        r = rank.rank
        args = [_on(rank.device, x[r] if isinstance(x, PerRank) else x) for x in self.args(case)]
        (result,) = world.run(answer, *args)
        got = self.unpack(returned(result))
        rank.synchronize()
        self.compare(case, {r: tuple(_on(torch.device("cpu"), t) for t in got)})
        if rank.device.type == "cpu":
            ran = simulate.run(answer, case.P, *self.args(case), input=case.input)
            if not all(map(torch.equal, got, self.unpack(ran.results[r]))):
                raise Wrong(
                    "the result is right, but differs from the simulated one in the last bits",
                    "what the result depends on besides the arguments",
                    "something outside the function, such as a clock or a global variable, decides the order of sums",
                    input="the same shards, simulated and for real",
                )


def _simulated(stage: Callable[[Callable], None], answer: Callable) -> None:
    try:
        stage(answer)
    except Wrong as wrong:
        raise Wrong(f"simulated: {wrong.symptom}", wrong.where, wrong.cause, input=wrong.input) from None


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on(device, v) for v in value] if isinstance(value, list | tuple) else value


NONE = "none of the usual mistakes alone: compare what one rank does, line by line, with attention on one device"


Problems = dict[str, dict[int, str]]  # name of a part -> rank -> how it differs


def wrong_parts(names: tuple[str, ...], want: tuple[list[Tensor], ...], got: dict[int, Any]) -> Problems:
    """Of the named parts those that are wrong; got: the parts of some ranks."""
    found: Problems = {}
    for part, name in enumerate(names):
        for rank, values in got.items():
            problem = difference(name, values[part], want[part][rank], 1e-10)
            if problem:
                found.setdefault(name, {})[rank] = problem
    return found


def symptom(wrong: Problems, got: dict[int, Any], names: tuple[str, ...]) -> str:
    """In words, what is wrong on which ranks; of a single real rank, only what."""
    if len(got) > 1:
        return gradients.symptom(wrong, len(got), names)
    return "; ".join(problem for ranks in wrong.values() for problem in ranks.values())


# ---- 04 ring forward: (comm, q, k, v, positions, mask) -> (out, lse) -------------------------------------------------

Known = Callable[[Case], Iterable[tuple[str, str, list[Tensor]]]]


def compare_forward(
    unknown: str, lse: Reason, known: Known = lambda case: (), all_rows: str = ""
) -> Callable[[Case, dict[int, Any]], None]:
    """Raises Wrong for another out or lse than dense attention's.

    unknown: where to look for an unknown mistake.  lse: if it alone is wrong.  known: mistakes, by the outs that they
    give.  all_rows: the cause if out has the rows of all ranks.
    """

    def compare(case: Case, got: dict[int, Any]) -> None:
        out, want_lse = case.dense()
        wrong = wrong_parts(("out", "lse"), (case.split(out), case.split(want_lse, dim=-1)), got)
        if not wrong:
            return

        def gives(outs: list[Tensor]) -> bool:
            return not wrong_parts(("out",), (outs,), got)

        where, cause = unknown, NONE
        if "out" not in wrong:
            where, cause = lse
        elif case.S % case.P == 0:
            where, cause = recognised(known(case), gives, (unknown, NONE))
            if all_rows and any(getattr(g[0], "shape", ())[2:3] == (case.S,) for g in got.values()) and case.P > 1:
                cause = all_rows
        raise Wrong(symptom(wrong, got, ("out", "lse")), where, cause)

    return compare


REAL = "what differs between simulated ranks, where the answer is right, and processes"
_forward = Trial(
    tuple(stage for _, stage in nb03.ring_forward.stages),
    real_cases,
    forward_args,
    out_and_lse,
    compare_forward(REAL, ("the lse that is returned", "it is to be that of the merged result, over all keys")),
)

ring_forward = Exercise("04 ring forward", _forward, STUCK, prepare)

# ---- 05 ring backward: (comm, dout, q, k, v, out, lse, positions, mask) -> dq, dk, dv --------------------------------


def _compare_backward(case: Case, got: dict[int, Any]) -> None:
    wrong = wrong_parts(gradients.NAMES, tuple(map(case.split, gradients.of(case).want)), got)
    if wrong:
        raise Wrong(symptom(wrong, got, gradients.NAMES), REAL, NONE)


_backward = Trial(
    nb04.IN_ONE_DTYPE,
    real_cases,
    lambda case: gradients.of(case).args,
    lambda result: parts(result, "dq, dk, dv"),
    _compare_backward,
)

ring_backward = Exercise("05 ring backward", _backward, STUCK, prepare)

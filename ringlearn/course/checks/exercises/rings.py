"""The checks of the torchrun exercises 04 and 05: the learner's ring, forward and backward.

How a rank program is tried is here too: each rank first runs the answer on four simulated ranks, whatever the number
of real ones: there a deadlock is found at once, and with four ranks every mistake shows (with two, the wrong direction
does not). Then the same function runs between the real ranks, where its result must be right again, and on CPUs the
same bits as in the simulation.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....flash import attend, attend_backward
from ....layouts import Layout, contiguous
from ....masks import Mask, causal, full
from ....partial import identity, merge, merge_all, merge_weights
from ....worlds.world import PerRank
from .. import oracle, simulate
from ..checker import Wrong, difference, pair
from ..gradients import NAMES, Gradients, Table, added
from ..oracle import numbers
from ..simulate import who
from .runner import Exercise, Rank, returned

SIMULATED = 4
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

    def visible(self, rank: int, source: int) -> Tensor:
        q_pos, k_pos = (self.ring.positions[r] for r in (rank, source))
        return self.mask(q_pos[:, None], k_pos[None, :])


def make(S: int, P: int, mask: Mask, about: str = "", H: int = 4, G: int = 2, layout: Layout = contiguous) -> Case:
    ring = oracle.shards(S, P, H=H, G=G, D=D, layout=layout, dtype=torch.float64)
    name = "causal" if mask is causal else "no mask"
    shards = "" if layout is contiguous else f", {layout} shards"
    return Case(S, P, mask, ring, f"S = {S}, P = {P}, {name}, {H} query and {G} key heads{shards}{about}")


def _simulated() -> Iterator[Case]:
    P = SIMULATED
    yield make(4 * P, P, full)
    yield make(4 * P, P, causal)
    yield make(10, P, causal, ": shards of 2 and 3 tokens")
    yield make(3, P, causal, ": rank 0 holds no token")
    yield make(5, 1, causal)


def _real(P: int) -> Iterator[Case]:
    yield make(5 * P + P // 2, P, causal, ", for real")
    yield make(max(1, P - 1), P, full, ", for real")


# ---- How a rank program is tried -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What is asked of a rank program.

    simulated, real: its cases, those of the real world for a number of ranks.  args: of a case; a PerRank gives each
    rank its own.  unpack: of what a rank returned, its parts.  compare(case, parts by rank), cost(case, ran): raise
    Wrong; the first sees all simulated ranks or one real one.  where: what a case is about, for an exception that says
    nothing better.
    """

    simulated: Callable[[], Iterable[Case]]
    real: Callable[[int], Iterable[Case]]
    args: Callable[[Case], tuple[Any, ...]]
    unpack: Callable[[Any, Case], tuple[Any, ...]]
    compare: Callable[[Case, dict[int, Any]], None]
    cost: Callable[[Case, simulate.Ran], None]
    where: Callable[[Case], str]

    def __call__(self, rank: Rank, answer: Callable) -> str:
        for case in self.simulated():
            rank.case(lambda case=case: self._simulated(answer, case))
        world = rank.case(rank.world, patience=60.0)
        for case in self.real(rank.size):
            rank.case(lambda case=case: self._real(rank, world, answer, case))
        same = ", and bit for bit the same" if rank.device.type == "cpu" else ""
        return f"Simulated on {SIMULATED} ranks, then for real{same}."

    def _run(self, answer: Callable, case: Case) -> simulate.Ran:
        return simulate.run(answer, case.P, *self.args(case), input=case.input, where=self.where(case))

    def _simulated(self, answer: Callable, case: Case) -> None:
        ran = self._run(answer, case)
        self.compare(case, {r: self.unpack(result, case) for r, result in enumerate(ran.results)})
        self.cost(case, ran)

    def _real(self, rank: Rank, world: Any, answer: Callable, case: Case) -> None:
        r = rank.rank
        args = [_on(rank.device, x[r] if isinstance(x, PerRank) else x) for x in self.args(case)]
        (result,) = world.run(answer, *args)
        got = self.unpack(returned(result), case)
        rank.synchronize()
        self.compare(case, {r: tuple(_on(torch.device("cpu"), t) for t in got)})
        if rank.device.type == "cpu":
            _same_bits(got, self.unpack(self._run(answer, case).results[r], case))


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on(device, v) for v in value] if isinstance(value, list | tuple) else value


# ---- 04 ring forward: (comm, q, k, v, positions, mask) -> (out, lse) -------------------------------------------------


def _same_bits(got: Any, want: Any) -> None:
    if not all(torch.equal(a, b) for a, b in zip(got, want)):
        raise Wrong(
            "the result is right, but differs from the simulated one in the last bits",
            input="the same shards, simulated and for real",
            where="what the result depends on besides the arguments",
            cause="something outside the function, such as a clock or a global variable, decides the order of sums",
        )


Reason = tuple[str, str]  # where to look, and the cause


def forward_args(case: Case) -> tuple[Any, ...]:
    return *case.ring.parts, case.ring.positions, case.mask


def out_and_lse(result: Any, case: Case) -> tuple[Any, Any]:
    return pair(result, "out, lse", input=case.input)


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
        raise Wrong(_said(problems, got), input=case.input, where=where, cause=cause)

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
    """ "simulated: out is off by 0.68, 0.88 on ranks 1 and 2 and right on ranks 0 and 3; lse is right"."""
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
    return f"{'simulated: ' * (len(got) > 1)}{'; '.join(words)} (relative norms)"


def _same(got: dict[int, Any], other: list[Tensor], part: int) -> bool:
    return all(
        isinstance(g[part], Tensor)
        and g[part].shape == other[r].shape
        and torch.allclose(g[part], other[r], 1e-9, 1e-9)
        for r, g in got.items()
    )


def _forward_cost(case: Case, ran: simulate.Ran) -> None:
    P, positions = case.P, case.ring.positions
    nbytes = [2 * 2 * D * 8 * sum(len(positions[(r - t) % P]) for t in range(P - 1)) for r in range(P)]
    simulate.check_messages(ran, P - 1, nbytes, input=case.input)
    late = [r for r in range(P) if len(positions[r]) and ran.hides(r) and not ran.hides(r)[0][1]]
    if late:
        raise Wrong(
            f"the result is right, but on {who(late)} nothing is computed while the first message travels",
            input=case.input,
            where="what stands between rotate and await",
            cause="await says: I need it now. Post the message, compute on what is here, and only then await",
        )


def _tiles(case: Case, **change: Any) -> list[list[Any]]:
    """Partial results by rank and step; change: data, label (step -> source), visible, scale."""
    q, k, v = case.ring.parts
    P = case.P
    data = change.get("data", lambda r, t: (r - t) % P)
    label = change.get("label", lambda r, t: (r - t) % P)
    visible = change.get("visible", case.visible)
    scale = change.get("scale", case.scale)
    return [
        [attend(q[r], k[data(r, t)], v[data(r, t)], visible(r, label(r, t)), scale) for t in range(P)] for r in range(P)
    ]


def _merged(tiles: list[list[Any]]) -> list[Tensor]:
    return [merge_all(row).out for row in tiles]


def _local_visible(case: Case) -> Callable[[int, int], Tensor]:
    def visible(r: int, source: int) -> Tensor:
        q_pos, k_pos = (torch.arange(len(case.ring.positions[x])) for x in (r, source))
        return case.mask(q_pos[:, None], k_pos[None, :])

    return visible


def _lse_not_updated(case: Case) -> list[Tensor]:
    found = []
    for row in _tiles(case):
        out, lse = row[0]
        for new in row[1:]:
            _, mine, theirs = merge_weights(lse, new.lse)
            out = mine.unsqueeze(-1) * out + theirs.unsqueeze(-1) * new.out
        found.append(out)
    return found


def _without_first(case: Case) -> list[Tensor]:
    return [merge(identity(row[0].out.shape, torch.float64), merge_all(row[1:])).out for row in _tiles(case)]


def _local_past(case: Case) -> list[Tensor]:
    """Local indices, and the future skipped all the same."""
    rows = _tiles(case, visible=_local_visible(case))
    return [merge_all(row[: r + 1]).out for r, row in enumerate(rows)]


MASKED = (
    "each block is masked like the own one: local indices, or this rank's own positions for all keys. The mask needs "
    "positions[rank] and positions[source]"
)

# A mistake -> where to look, and the cause. What a mistake gives is computed, and compared with what came.
FORWARD: dict[Callable[[Case], list[Tensor]], tuple[str, str]] = {
    lambda case: [sum(p.out for p in row) for row in _tiles(case)]: (
        "how the parts are put together",
        "they are added. Each part is a softmax of its own: merge them by lse, rl.merge(a, b)",
    ),
    lambda case: [sum(p.out for p in row) / case.P for row in _tiles(case)]: (
        "how the parts are put together",
        "they are averaged. Each part counts as much as exp(lse) says: rl.merge(a, b)",
    ),
    _lse_not_updated: (
        "the lse that is carried from step to step",
        "out is merged and lse is not: from the third part on the weights are wrong",
    ),
    lambda case: _merged(_tiles(case, data=lambda r, t: (r - t) % case.P, label=lambda r, t: (r + t) % case.P)): (
        "whose keys are here in step t",
        "messages go to rank + 1, so after t steps the keys of rank - t are here: source = (rank - step) % P. (With 2 "
        "ranks, or without a mask, this mistake does not show.)",
    ),
    lambda case: _merged(_tiles(case, visible=_local_visible(case))): (
        "the positions that the mask gets",
        MASKED,
    ),
    _local_past: ("the positions that the mask gets", MASKED),
    lambda case: _merged(_tiles(case, visible=lambda r, source: None)): ("the mask", "no mask is applied at all"),
    lambda case: _merged(_tiles(case, scale=1.0)): ("the scale", "the scores are not multiplied by scale, D ** -0.5"),
    lambda case: [row[0].out for row in _tiles(case)]: (
        "what becomes of what arrives",
        "only the own keys count: merge a part in every step",
    ),
    lambda case: [merge_all(row[:-1]).out for row in _tiles(case)]: (
        "the number of steps",
        "the last shard that arrives is not computed on: P steps, with P - 1 messages between them",
    ),
    _without_first: ("the number of steps", "the own keys are left out: step 0 needs no message"),
    lambda case: [merge_all([row[0]] * case.P).out for row in _tiles(case)]: (
        "which k and v each step uses",
        "every step computes on the own keys: k, v = await arriving",
    ),
}

_forward = Trial(
    _simulated,
    _real,
    forward_args,
    out_and_lse,
    compare_forward(
        FORWARD,
        "which keys each rank sees in each step, and how the parts are merged",
        ("the lse that is returned", "it is to be that of the merged result, over all keys"),
    ),
    _forward_cost,
    lambda case: "what each rank computes in each step" if case.P > 1 else "one rank alone: no message, one tile",
)

ring_forward = Exercise("04 ring forward", _forward, STUCK, prepare)

# ---- 05 ring backward: (comm, dout, q, k, v, out, lse, positions, mask) -> dq, dk, dv --------------------------------


class Backward(NamedTuple):
    """What a backward gets besides q, k, v, and what it should give, by rank."""

    given: tuple[list[Tensor], list[Tensor], list[Tensor]]  # dout, out, lse
    want: tuple[list[Tensor], list[Tensor], list[Tensor]]  # dq, dk, dv


def _backward(case: Case) -> Backward:
    q, k, v = (x.clone().requires_grad_() for x in (case.ring.q, case.ring.k, case.ring.v))
    out, lse = oracle.dense(q, k, v, case.mask)
    dout = numbers(7, *out.shape).double()
    want = torch.autograd.grad(out, (q, k, v), dout)
    split = case.ring.split
    given = split(dout), split(out.detach()), split(lse.detach(), dim=-1)
    return Backward(given, tuple(split(g) for g in want))


def _backward_args(case: Case) -> tuple[Any, ...]:
    dout, out, lse = (PerRank(x) for x in _backward(case).given)
    return dout, *case.ring.parts, out, lse, case.ring.positions, case.mask


def _three(result: Any, case: Case) -> tuple[Any, Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 3:
        what = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise Wrong(
            f"what is returned is {what}, expected dq, dk, dv",
            input=case.input,
            where="the return statement",
            cause="it should end with `return dq, dk, dv`",
        )
    return tuple(result)


def _compare_backward(case: Case, got: dict[int, Any]) -> None:
    backward = _backward(case)
    problems = _problems(NAMES, backward.want, got)
    if not any(problems.values()):
        return
    where, cause = "dq, dk and dv one after another: which of them are right says where to look", NONE
    if case.S % case.P == 0:
        for known, reason in BACKWARD.items():
            found = known(case, backward)
            if all(_same(got, list(found[part]), part) for part in range(3) if found[part] is not None):
                where, cause = reason
                break
    raise Wrong(_said(problems, got), input=case.input, where=where, cause=cause)


def _backward_cost(case: Case, ran: simulate.Ran) -> None:
    P, lengths, trace = case.P, [len(p) for p in case.ring.positions], ran.world.trace
    for r in range(P):
        sent = [e for e in trace.select("send", r) if P > 1]
        others = sorted({e.peer for e in sent} - {(r + 1) % P})
        want = 2 * 2 * D * 8 * sum(lengths[(r - t) % P] * (1 + (t < P - 1)) for t in range(P)) if P > 1 else 0
        nbytes = sum(e.nbytes for e in sent)
        if others:
            raise Wrong(
                f"the gradients are right, but rank {r} sends to {who(others)}",
                input=case.input,
                where="who a rank sends to",
                cause="in a ring a rank sends to rank + 1 only, which comm.rotate does",
            )
        if nbytes != want:
            raise Wrong(
                f"the gradients are right, but rank {r} sends {nbytes:,} bytes; {want:,} are enough",
                input=case.input,
                where="what goes round, and how often",
                cause="k and v make P - 1 hops, dk and dv make P, the last of them home; nothing else travels",
            )
    late = [r for r in range(P) if lengths[r] and ran.hides(r) and not ran.hides(r)[0][1]]
    if late and P > 1:
        raise Wrong(
            f"the gradients are right, but on {who(late)} nothing is computed while the first message travels",
            input=case.input,
            where="what stands between rotate and await",
            cause="post k and v first, compute this block's gradients, and only then await",
        )


def _gradients(case: Case, backward: Backward, **change: Any) -> Table:
    """dq, dk, dv of each tile, [rank][source]; change: lse, delta (rank, source -> tensor), visible, scale, label."""
    q, k, v = case.ring.parts
    dout, out, lse = backward.given
    visible = change.get("visible", case.visible)
    label = change.get("label", lambda r, s: s)
    one_lse = change.get("lse", lambda r, s: lse[r])
    delta = change.get("delta", lambda r, s: (dout[r] * out[r]).sum(-1))
    return [
        [
            attend_backward(dout[r], q[r], k[s], v[s], one_lse(r, s), delta(r, s), visible(r, label(r, s)), case.scale)
            for s in range(case.P)
        ]
        for r in range(case.P)
    ]


def _block(case: Case, r: int, s: int) -> Any:
    q, k, v = case.ring.parts
    return attend(q[r], k[s], v[s], case.visible(r, s), case.scale)


def _rolled(hops: int) -> Callable[[Case, Backward], Any]:
    def known(case: Case, backward: Backward) -> Any:
        _, dk, dv = backward.want
        return None, *([g[(r + hops) % case.P] for r in range(case.P)] for g in (dk, dv))

    return known


def _stays(case: Case, backward: Backward) -> Gradients:
    tiles, P = _gradients(case, backward), case.P
    return tuple([sum(tiles[r][s][i] for s in range(P)) for r in range(P)] for i in range(3))


def _own_tile(case: Case, backward: Backward) -> Any:
    tiles, P = _gradients(case, backward), case.P
    return None, *([tiles[r][r][i] for r in range(P)] for i in (1, 2))


def _last_finder(case: Case, backward: Backward) -> Any:
    """What arrives is not added: the share of the last rank that the keys came to."""
    tiles, P = _gradients(case, backward), case.P
    return None, *([tiles[(s - 1) % P][s][i] for s in range(P)] for i in (1, 2))


def _times(dq: float, dk: float, dv: float = 1.0) -> Callable[[Case, Backward], Any]:
    def known(case: Case, backward: Backward) -> Any:
        return tuple([g * factor for g in grads] for grads, factor in zip(backward.want, (dq, dk, dv)))

    return known


# The same for gradients; None for one that may be anything.
BACKWARD: dict[Callable[[Case, Backward], Any], tuple[str, str]] = {
    _rolled(1): (
        "how many hops dk and dv make",
        "they stop one rank short of home: each rank returns the gradients of the next rank's keys. P hops, the last "
        "one after the last step",
    ),
    _rolled(-1): (
        "how many hops dk and dv make",
        "each rank returns the gradients of the keys of the rank before it: one hop too many. It takes P to be home",
    ),
    _stays: (
        "where dk and dv are added up",
        "each rank adds up what its queries give to all keys, in one place: dk and dv belong to the keys that are here "
        "now, and travel on with them",
    ),
    _own_tile: (
        "what becomes of dk and dv between the steps",
        "only the own queries count: what the other ranks find for these keys has to travel home",
    ),
    _last_finder: (
        "what is done with the dk and dv that arrive",
        "they are dropped: add this rank's share to what the ranks before have found for the same keys",
    ),
    lambda case, b: added(_gradients(case, b, delta=lambda r, s: torch.zeros_like(b.given[2][r]))): (
        "delta",
        "delta is missing: ds = p * (dp - delta), delta = (dout * out).sum(-1)",
    ),
    lambda case, b: added(
        _gradients(case, b, delta=lambda r, s: (b.given[0][r] * _block(case, r, s).out).sum(-1)),
    ): (
        "delta (dv is exact, dq and dk are not)",
        "it is computed for each block: delta = (dout * out).sum(-1) of the *final* out, once",
    ),
    lambda case, b: added(_gradients(case, b, lse=lambda r, s: _block(case, r, s).lse)): (
        "the lse that the probabilities are recomputed from",
        "it is that of one block: pass the lse of the forward, over all keys",
    ),
    lambda case, b: added(_gradients(case, b, visible=_local_visible(case))): (
        "the positions that the mask gets",
        MASKED,
    ),
    lambda case, b: added(_gradients(case, b, visible=lambda r, s: None)): (
        "the mask",
        "no mask is applied at all",
    ),
    lambda case, b: added(_gradients(case, b, label=lambda r, s: (2 * r - s) % case.P)): (
        "whose keys are here in step t",
        "after t hops to rank + 1, the keys of rank - t are here: source = (rank - step) % P",
    ),
    _times(D**0.5, D**0.5): ("the scale", "dq and dk are sqrt(D) times too large: attend_backward needs scale"),
}

_backward_trial = Trial(
    _simulated,
    _real,
    _backward_args,
    _three,
    _compare_backward,
    _backward_cost,
    lambda case: "the shapes of what is sent and of what arrives: length=",
)

ring_backward = Exercise("05 ring backward", _backward_trial, STUCK, prepare)

"""The check of the torchrun exercise 11: a decode step of several tokens on a cache that is shared out over ranks.

A rank program, tried on simulated ranks and then for real, as in rings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....attention.decoding import Ownership
from ....costs.decoding import decode_bytes
from ....worlds.world import PerRank
from .. import oracle, simulate
from ..checker import Wrong, difference, parts
from ..mistakes import Reason, recognised
from ..nb11 import merged
from ..simulate import who
from .rings import NONE, Trial, forward_args, prepare
from .runner import Exercise

H, G, D = 4, 2, 4
NUMBER = 8  # bytes, of float64

STUCK = (
    "which ranks get to each line with comm, and how often",
    "a rank leaves out a message that the others make, perhaps because it owns no key yet. It takes part all the same: "
    "its lse is -inf",
)


class Step(NamedTuple):
    """S tokens are cached, and the newest n come: q (1, H, n, D), k, v (1, G, S + n, D), in float64."""

    S: int
    n: int
    P: int
    I: int
    q: Tensor
    k: Tensor
    v: Tensor
    about: str = ""

    @property
    def input(self) -> str:
        tokens = "1 new token" if self.n == 1 else f"{self.n} new tokens"
        return f"{self.S} cached tokens, {tokens}, P = {self.P}, interleave = {self.I}{self.about}"

    @property
    def own(self) -> Ownership:
        return Ownership(self.P, self.I)

    def positions(self, rank: int, tokens: int) -> Tensor:
        return self.own.positions(rank, tokens)

    @property
    def args(self) -> tuple[Any, ...]:
        new = self.k[:, :, self.S :], self.v[:, :, self.S :]
        kept = (PerRank(x[:, :, self.positions(r, self.S)] for r in range(self.P)) for x in (self.k, self.v))
        return self.q, *new, *kept, self.S, self.I


def make(S: int, n: int, P: int, I: int, about: str = "") -> Step:
    q, k, v = (oracle.numbers(i, 1, heads, m, D).double() for i, heads, m in ((1, H, n), (2, G, S + n), (3, G, S + n)))
    return Step(S, n, P, I, q, k, v, about)


def _simulated() -> Iterator[Step]:
    yield make(21, 4, 4, 2)
    yield make(16, 1, 4, 2)
    yield make(3, 2, 4, 4, ": ranks 2 and 3 own no token")
    yield make(0, 1, 4, 1, ": the first token of all")
    yield make(7, 3, 1, 2)


def _real(P: int) -> Iterator[Step]:
    yield make(5 * P + 1, 3, P, 2, ", for real")
    yield make(1, 2, P, 4, ", for real")


# ---- What an answer should give, and what mistakes give --------------------------------------------------------------

# Which keys the queries see, bool (n, S + n) or what broadcasts to it: from the step; the position of each key; the
# number of each query, a column from 0; the place of each key among those that the rank owns; and whether it owns it.
Rule = Callable[[Step, Tensor, Tensor, Tensor, Tensor], Tensor]


def _right(step: Step, at: Tensor, i: Tensor, slot: Tensor, owned: Tensor) -> Tensor:
    return (at <= step.S + i) & owned


def _partials(step: Step, rule: Rule = _right, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The out and the lse of each rank, if its queries see what a rule says."""
    at, i = torch.arange(step.S + step.n), torch.arange(step.n)[:, None]
    found = []
    for rank in range(step.P):
        owned = torch.isin(at, step.positions(rank, len(at)))
        seen = rule(step, at, i, owned.cumsum(0) - 1, owned)
        found.append(oracle.dense(step.q, step.k, step.v, lambda i, j, seen=seen: seen, scale=scale))
    outs, lses = zip(*found)
    return torch.stack(outs), torch.stack(lses)


_MASK = "which keys each query sees"
RULES: tuple[tuple[str, str, Rule], ...] = (
    (
        _MASK,
        "each rank counts back from its own end. A query hides what stands at a later position, wherever it lies: the "
        "one at position i sees local_len(rank, i + 1) keys of each rank",
        lambda step, at, i, slot, owned: (slot < owned.sum() - (step.n - 1 - i)) & owned,
    ),
    (
        _MASK,
        "each rank counts on from its own end, one key more for each query. Not every rank owns one of the new tokens: "
        "the query at position i sees local_len(rank, i + 1) keys of each rank",
        lambda step, at, i, slot, owned: (slot <= owned[: step.S].sum() + i) & owned,
    ),
    (
        _MASK,
        "no query sees any of the new tokens. They go into the cache first; each sees those before it, and itself",
        lambda step, at, i, slot, owned: (at < step.S) & owned,
    ),
    (
        _MASK,
        "a query does not see its own token: keys at positions up to its own, its own included",
        lambda step, at, i, slot, owned: (at < step.S + i) & owned,
    ),
    (
        _MASK,
        "nothing is hidden: a new token sees those that come after it. There is no mask, or it compares slots with "
        "positions, and a rank's slots have smaller numbers",
        lambda step, at, i, slot, owned: owned,
    ),
    (
        "which new keys each rank attends to",
        "every rank attends to all new keys, so each counts P times: only the owner of a token has it",
        lambda step, at, i, slot, owned: (at <= step.S + i) & (owned | (at >= step.S)),
    ),
)


def _mistakes(step: Step) -> Iterator[tuple[str, str, tuple[Tensor, Tensor]]]:
    """Where to look, the cause, and the out and lse that a mistake gives."""
    for where, cause, rule in RULES:
        yield where, cause, merged(*_partials(step, rule))
    cause = "the scores are not multiplied by D ** -0.5"
    yield "the scale", cause, merged(*_partials(step, scale=1.0))
    outs, lses = _partials(step)
    where = "what a rank gives that sees no key"
    cause = "its lse is taken for 0, and that is a key with score 0: it is -inf, as attend gives it"
    yield where, cause, merged(outs, lses.masked_fill(lses == -torch.inf, 0.0))
    weighs, lse = "Rank b weighs exp(lse_b - lse): rl.merge", merged(outs, lses)[1]
    yield "the merge", f"the ranks' outputs are averaged. {weighs}", (outs.mean(0), lse)
    yield "the merge", f"the ranks' outputs are added. {weighs}", (outs.sum(0), lse)


def _compare(step: Step, got: dict[int, Any]) -> None:
    own, end = step.own, step.S + step.n
    for rank, (_, _, k, v) in got.items():
        for name, x, whole in (("k", k, step.k), ("v", v, step.v)):
            want = whole[:, :, own.positions(rank, end)]
            problem = difference(f"the cache's {name}", x, want, 0.0)
            if problem:
                raise Wrong(f"on {who([rank])} {problem}", *_cache_reason(step, rank, x))
    want = merged(*_partials(step))
    for i, name in enumerate(("out", "lse")):
        problems = {rank: difference(name, g[i], want[i], 1e-10) for rank, g in got.items()}
        wrong = {rank: problem for rank, problem in problems.items() if problem}
        if wrong:
            first = next(iter(wrong))
            alone = "which ranks have the result", "some rank has another one: every rank merges all partial results"
            stays = _partials(step)[0][first]
            if (
                step.P > 1
                and isinstance(got[first][0], Tensor)
                and difference("out", got[first][0], stays, 1e-10) is None
            ):
                alone = "the exchange", "it is what this rank found among its own keys: the others' results are missing"
            unknown = alone if len(wrong) < len(got) or alone[0] == "the exchange" else (_MASK, NONE)
            reason = recognised(_mistakes(step), partial(_same, got[first]), unknown)
            raise Wrong(f"on {who(list(wrong))} {wrong[first]}", *reason)
    bits = [g[:2] for g in got.values()]
    if not all(torch.equal(a, b) for one in bits for a, b in zip(one, bits[0])):
        raise Wrong(
            "all ranks are right, but not to the last bit the same",
            "in which order a rank merges",
            "each begins with its own result. Merge in rank order on every rank, or some day they choose different "
            "tokens",
        )


def _cache_reason(step: Step, rank: int, got: Any) -> Reason:
    where = "which of the new tokens a rank appends"
    before, n = len(step.positions(rank, step.S)), step.n
    if isinstance(got, Tensor) and got.ndim == 4:
        end = step.S + n
        if got.shape[2] == len(step.positions(rank, end)):
            return "where new tokens are put", "they come behind what is there: slots follow positions"
        if got.shape[2] == before:
            return where, "nothing is appended: the owner of a new token keeps its key and value"
        if got.shape[2] == before + n:
            return where, "all new tokens are: token j belongs to rank j // interleave % P alone"
        turns = sum(position % step.P == rank for position in range(step.S, end))
        if got.shape[2] == before + turns:
            return where, "they are dealt out one by one: interleave neighbours go to a rank before the next one's turn"
        own = sum(i // step.I % step.P == rank for i in range(n))
        if got.shape[2] == before + own:
            return where, "they are counted from 0: a new token's position is length + i"
    return where, "token j of the text belongs to rank j // interleave % P, and comes behind the tokens that it has"


def _same(got: Any, other: tuple[Tensor, Tensor]) -> bool:
    return all(difference(name, x, want, 1e-9) is None for name, x, want in zip(("out", "lse"), got, other))


def _cost(step: Step, ran: simulate.Ran) -> None:
    enough = decode_bytes(step.P, H, D, n=step.n, accumulated=NUMBER)
    for rank in range(step.P):
        sent, messages = ran.world.trace.bytes_sent(rank), ran.world.trace.messages(rank)
        if sent > enough:
            raise Wrong(
                f"the values are right, but rank {rank} sends {sent:,} bytes; {enough:,} are enough",
                "what is in each message",
                "out and lse of this rank's part, once to each other rank. Keys and values stay where they are",
            )
        if messages > step.P - 1:
            raise Wrong(
                f"the values are right, but rank {rank} sends {messages} messages; {step.P - 1} are enough",
                "how many exchanges there are",
                "out and lse travel apart: torch.cat([out, lse.unsqueeze(-1)], -1) makes one message of them",
            )


_unpack = partial(parts, names="out, lse, k, v")


def _stage(answer: Callable) -> None:
    for step in _simulated():
        where = "a rank that owns no key: shapes with a 0 in them" if step.S < 4 else "the shapes"
        ran = simulate.run(answer, step.P, *step.args, input=step.input, where=where, instead=(("deadlock", *STUCK),))
        _compare(step, {rank: _unpack(result) for rank, result in enumerate(ran.results)})
        _cost(step, ran)


_trial = Trial((_stage,), _real, forward_args, _unpack, _compare)
decode = Exercise("11 decode", _trial, STUCK, prepare)

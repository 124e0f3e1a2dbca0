"""The check of the torchrun exercise 11: a decode step of several tokens on a cache that is shared out over ranks.

A rank program, tried on simulated ranks and then for real, as in rings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....attention.decoding import Ownership
from ....costs.decoding import decode_bytes
from ....worlds.world import PerRank
from .. import oracle, simulate
from ..checker import Wrong, difference, parts
from ..nb11 import merged
from ..simulate import who
from .rings import NONE, Reason, Trial, prepare
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

Seen = Callable[[Step, int], Tensor]  # of a rank: which of all S + n keys each of the n queries sees, bool (n, S + n)


def _owned(step: Step, rank: int) -> Tensor:
    """Which keys a rank owns, bool (S + n,)."""
    own = torch.zeros(step.S + step.n, dtype=torch.bool)
    own[step.positions(rank, step.S + step.n)] = True
    return own


def _right(step: Step, rank: int) -> Tensor:
    at = torch.arange(step.S + step.n)
    return (at <= step.S + torch.arange(step.n)[:, None]) & _owned(step, rank)


def _by_slots(step: Step, rank: int, last: Sequence[int]) -> Tensor:
    """Query i sees the first last[i] keys of a rank."""
    seen = torch.zeros(step.n, step.S + step.n, dtype=torch.bool)
    mine = step.positions(rank, step.S + step.n)
    for i, stop in enumerate(last):
        seen[i, mine[: max(0, stop)]] = True
    return seen


def _own_end(step: Step, rank: int) -> Tensor:
    count = len(step.positions(rank, step.S + step.n))
    return _by_slots(step, rank, [count - (step.n - 1 - i) for i in range(step.n)])


def _own_begin(step: Step, rank: int) -> Tensor:
    count = len(step.positions(rank, step.S))
    return _by_slots(step, rank, [count + i + 1 for i in range(step.n)])


def _old_only(step: Step, rank: int) -> Tensor:
    return (torch.arange(step.S + step.n) < step.S).expand(step.n, -1) & _owned(step, rank)


def _no_mask(step: Step, rank: int) -> Tensor:
    return _owned(step, rank).expand(step.n, -1)


def _new_everywhere(step: Step, rank: int) -> Tensor:
    at = torch.arange(step.S + step.n)
    return (at <= step.S + torch.arange(step.n)[:, None]) & (_owned(step, rank) | (at >= step.S))


def _not_itself(step: Step, rank: int) -> Tensor:
    at = torch.arange(step.S + step.n)
    return (at < step.S + torch.arange(step.n)[:, None]) & _owned(step, rank)


def _partials(step: Step, seen: Seen = _right, scale: float | None = None) -> tuple[Tensor, Tensor]:
    found = [
        oracle.dense(step.q, step.k, step.v, lambda i, j, rank=rank: seen(step, rank), scale=scale)
        for rank in range(step.P)
    ]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def _with_phantoms(step: Step) -> tuple[Tensor, Tensor]:
    outs, lses = _partials(step)
    return merged(outs, lses.masked_fill(lses == -torch.inf, 0.0))


_MASK = "which keys each query sees"
KNOWN: dict[Callable[[Step], tuple[Tensor, Tensor]], Reason] = {
    lambda step: merged(*_partials(step, _own_end)): (
        _MASK,
        "each rank counts back from its own end. A query hides what stands at a later position, wherever it lies: the "
        "one at position i sees local_len(rank, i + 1) keys of each rank",
    ),
    lambda step: merged(*_partials(step, _own_begin)): (
        _MASK,
        "each rank counts on from its own end, one key more for each query. Not every rank owns one of the new tokens: "
        "the query at position i sees local_len(rank, i + 1) keys of each rank",
    ),
    lambda step: merged(*_partials(step, _old_only)): (
        _MASK,
        "no query sees any of the new tokens. They go into the cache first; each sees those before it, and itself",
    ),
    lambda step: merged(*_partials(step, _not_itself)): (
        _MASK,
        "a query does not see its own token: keys at positions up to its own, its own included",
    ),
    lambda step: merged(*_partials(step, _no_mask)): (
        _MASK,
        "nothing is hidden: a new token sees those that come after it. There is no mask, or it compares slots with "
        "positions, and a rank's slots have smaller numbers",
    ),
    lambda step: merged(*_partials(step, _new_everywhere)): (
        "which new keys each rank attends to",
        "every rank attends to all new keys, so each counts P times: only the owner of a token has it",
    ),
    lambda step: merged(*_partials(step, scale=1.0)): ("the scale", "the scores are not multiplied by D ** -0.5"),
    _with_phantoms: (
        "what a rank gives that sees no key",
        "its lse is taken for 0, and that is a key with score 0: it is -inf, as attend gives it",
    ),
    lambda step: (_partials(step)[0].mean(0), merged(*_partials(step))[1]): (
        "the merge",
        "the ranks' outputs are averaged. Rank b weighs exp(lse_b - lse): rl.merge",
    ),
    lambda step: (_partials(step)[0].sum(0), merged(*_partials(step))[1]): (
        "the merge",
        "the ranks' outputs are added. Rank b weighs exp(lse_b - lse): rl.merge",
    ),
}


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
            like = (reason for mistake, reason in KNOWN.items() if _same(got[first], mistake(step)))
            alone = "which ranks have the result", "some rank has another one: every rank merges all partial results"
            stays = _partials(step)[0][first]
            if (
                step.P > 1
                and isinstance(got[first][0], Tensor)
                and difference("out", got[first][0], stays, 1e-10) is None
            ):
                alone = "the exchange", "it is what this rank found among its own keys: the others' results are missing"
            reason = next(like, alone if len(wrong) < len(got) or alone[0] == "the exchange" else (_MASK, NONE))
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


def _unpack(result: Any) -> tuple[Any, ...]:
    return parts(result, "out, lse, k, v")


def _stage(answer: Callable) -> None:
    for step in _simulated():
        where = "a rank that owns no key: shapes with a 0 in them" if step.S < 4 else "the shapes"
        ran = simulate.run(answer, step.P, *step.args, input=step.input, where=where, instead=(("deadlock", *STUCK),))
        _compare(step, {rank: _unpack(result) for rank, result in enumerate(ran.results)})
        _cost(step, ran)


_trial = Trial((_stage,), _real, lambda step: step.args, _unpack, _compare)
decode = Exercise("11 decode", _trial, STUCK, prepare)

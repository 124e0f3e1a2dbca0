"""Exercises of notebook 11, decoding: 11a split_k, 11b exchange, 11c local_len, 11d waits; predictions and the quiz.

Oracles: dense attention in float64 for 11a, the softmax over all partial results in float64 for 11b, the positions
themselves, dealt out one by one, for 11c, and the library's costs, which tests hold to counted runs, for 11d.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...attention.decoding import Ownership
from ...costs.decoding import (
    decode_bytes,
    decode_seconds,
    exchange_hops,
    pass_kv_bytes,
    pass_q_bytes,
    tokens_to_shard,
    waiting_seconds,
)
from ...plan.hardware import GPUS
from ...worlds.world import PerRank
from . import oracle, simulate
from .checker import Checker, Wrong, call, difference, number, parts, tried_input
from .predictions import Prediction, Quiz

Pair = tuple[Tensor, Tensor]

# ---- The cause of a mistake: what explains the answers to all inputs of a stage --------------------------------------

Mistakes = Iterator[tuple[str, str, Any]]


class _Tried(NamedTuple):
    """An input that an answer was tried on: what known mistakes give there, and whether that is what it gave."""

    mistakes: Mistakes
    looks: Callable[[Any], bool]


def explained(tried: list[_Tried], otherwise: tuple[str, str]) -> tuple[str, str]:
    """Where to look and the likely cause: of the first mistake that gives the same as the answer on every input.

    One input is too few to tell: where one of two lse is 0, their sum is the other one.
    """
    tables: list[dict[tuple[str, str], bool]] = []
    for one in tried:
        table: dict[tuple[str, str], bool] = {}
        for where, cause, value in one.mistakes:
            table[where, cause] = table.get((where, cause), False) or one.looks(value)
        tables.append(table)
    known = dict.fromkeys(reason for table in tables for reason in table)
    return next((reason for reason in known if all(table.get(reason, True) for table in tables)), otherwise)


Check = Callable[[], tuple[str | None, _Tried]]


def _first_wrong(checks: list[tuple[Check, tuple[str, str]]]) -> None:
    """Raise Wrong for the first input with a wrong answer; its cause is looked for in the answers to all of them."""
    found: tuple[str, str, tuple[str, str]] | None = None
    tried = []
    for check, unknown in checks:
        try:
            problem, one = check()
        except Wrong:
            if found is None:
                raise
            break
        tried.append(one)
        if problem and found is None:
            found = problem, tried_input(), unknown
    if found:
        raise Wrong(found[0], *explained(tried, found[2]), input=found[1])


# ---- What partial results give, rightly and wrongly: for 11a and 11b -------------------------------------------------


def merged(outs: Tensor, lses: Tensor) -> Pair:
    """What partial results outs (P, ..., D), lses (P, ...) merge to, by definition, in float64."""
    outs, lses = outs.double(), lses.double()
    top = lses.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    total = torch.exp(lses - top).sum(0)
    lse = torch.where(total > 0, top + total.clamp(min=1e-300).log(), -torch.inf)
    weight = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - torch.where(total > 0, lse, 0.0)))
    return (weight.unsqueeze(-1) * outs).sum(0), lse


def _weighted(weight: Tensor, outs: Tensor) -> Tensor:
    return (weight.unsqueeze(-1) * outs.double()).sum(0)


def _merge_mistakes(outs: Tensor, lses: Tensor, sizes: list[int] | None, what: str) -> Iterator[tuple[str, str, Pair]]:
    """(where to look, the cause, what it gives). what: "split" or "rank"; sizes: keys of each."""
    outs, lses = outs.double(), lses.double()
    right, lse = merged(outs, lses)
    n, total = len(outs), torch.exp(lses - lses.amax(0)).sum(0)
    weights = f"the weights of the {what}s"
    empty = torch.where(lses == -torch.inf, 0.0, lses)
    if bool((lses == -torch.inf).all()):
        yield (
            f"what a {what} without keys gives",
            "its lse is a finite number, however far below 0. Where there is no key at all, that number is the result, "
            "and it should be -inf",
            (right, None),
        )
    yield (
        f"what a {what} without keys counts for",
        "its lse is taken for 0. exp(0) = 1, so it counts as a key with score 0 and value 0 that is not there: the "
        "lse of no key at all is -inf",
        merged(outs, empty),
    )
    yield (
        f"what a {what} without keys counts for",
        f"its lse is taken for 0 in the weights: the lse of no key at all is -inf, so that the {what} weighs nothing",
        (merged(outs, empty)[0], lse),
    )
    yield (
        weights,
        f"all {what}s count alike. They do not hold equally much of the row: {what} b weighs exp(lse_b - lse)",
        (outs.mean(0), lse),
    )
    yield weights, f"the outputs are added. Each is a mean: {what} b counts exp(lse_b - lse) times", (outs.sum(0), lse)
    if sizes is not None and sum(sizes):
        part = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * (lses.ndim - 1)) / sum(sizes)
        yield (
            weights,
            f"{what}s count by their number of keys. What matters is how high the keys' scores are: exp(lse_b - lse)",
            (_weighted(part.expand_as(lses), outs), lse),
        )
    doubled = torch.exp2(lses - lses.amax(0))
    yield (
        weights,
        "powers of 2 of a natural logarithm: exp2 belongs to an lse in base 2, exp to a natural one",
        (_weighted(doubled / doubled.sum(0), outs), None),
    )
    yield (
        weights,
        "they do not sum to 1: exp(lse_b - the largest lse) still has to be divided by the sum of these",
        (_weighted(torch.exp(lses - lses.amax(0)), outs), None),
    )
    heaviest = lses.argmax(0, keepdim=True)
    yield (
        f"how many {what}s reach the result",
        f"it is the {what} with the largest lse alone; the others have weight, too",
        (outs.gather(0, heaviest.unsqueeze(-1).expand(1, *outs.shape[1:]))[0], None),
    )
    yield (
        f"how many {what}s reach the result",
        f"it is the last {what} alone: the running result is overwritten, not merged",
        (outs[-1], None),
    )
    yield f"how many {what}s reach the result", f"it is the first {what} alone", (outs[0], None)
    running, first = outs[0], lses[0]
    for i in range(1, n):
        running, _ = merged(torch.stack([running, outs[i]]), torch.stack([first, lses[i]]))
    yield (
        "the lse of the running result",
        "out is merged and lse is not: after each merge, lse is that of both",
        (running, None),
    )
    for reason, wrong in (
        ("the lse are added. exp(lse) is what adds up: lse = log(sum of exp(lse_b))", lses.sum(0)),
        ("it is the mean of the lse: lse = log(sum of exp(lse_b))", lses.mean(0)),
        ("it is the largest lse: the others add to it, lse = log(sum of exp(lse_b))", lses.amax(0)),
        ("it is in base 2: this course's lse is the natural logarithm, so log, not log2", lse / math.log(2)),
        ("the maximum that was subtracted is not added again: lse = m + log(sum of exp(lse_b - m))", total.log()),
        (f"it is that of the first {what}", lses[0]),
        (f"it is that of the last {what}", lses[-1]),
    ):
        yield "the lse that is returned", reason, (right, wrong)


def _looks(got: Any, tolerance: float) -> Callable[[Pair], bool]:
    """Whether a pair is what was returned; None in it stands for anything."""

    def like(other: tuple[Tensor, Tensor | None]) -> bool:
        named = zip(("out", "lse"), got, other)
        return all(want is None or difference(name, x, want, tolerance) is None for name, x, want in named)

    return like


# ---- 11a: split_k(q, k, v, sizes) -> out, lse ------------------------------------------------------------------------


class _Row(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sizes: list[int]

    @property
    def want(self) -> Pair:
        return oracle.dense(self.q, self.k, self.v, _everything)

    def partials(self, scale: float | None = None, heads: Callable[[int], int] | None = None) -> Pair:
        """The partial results of the splits."""
        found = [
            oracle.dense(self.q, k, v, _everything, scale=scale, heads=heads)
            for k, v in zip(self.k.split(self.sizes, 2), self.v.split(self.sizes, 2))
        ]
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def _everything(i: Tensor, j: Tensor) -> Tensor:
    return torch.ones(1, j.shape[-1], dtype=torch.bool)


def _row(sizes: list[int], H: int = 4, G: int = 2, D: int = 4, B: int = 1, times: float = 1.0, shift: float = 0.0):
    """Numbers that are the same everywhere; shift: added to every score, through one dim that all keys share."""
    S = sum(sizes)
    q, k, v = (oracle.numbers(i, B, heads, n, D) for i, heads, n in ((1, H, 1), (2, G, S), (3, G, S)))
    if shift:
        q, k = q.clone(), k.clone()
        q[..., 0], k[..., 0] = 1.0, shift * D**0.5
    return _Row(times * q, k, v, list(sizes))


def _split_mistakes(row: _Row) -> Iterator[tuple[str, str, Pair]]:
    H, G = row.q.shape[1], row.k.shape[1]
    outs, unscaled = row.partials()[0], row.partials(scale=1.0)
    yield "the scale", "scores are not divided by sqrt(D)", merged(*unscaled)
    yield (
        "the scale",
        "the scores in the softmax are divided by sqrt(D), and those in the lse are not: both are of the same scores",
        merged(outs, unscaled[1]),
    )
    if 1 < G < H:
        yield (
            "which key/value head goes with a query head",
            "neighbouring query heads share one: head h uses h // (H // G), not h % G",
            merged(*row.partials(heads=lambda h: h % G)),
        )
        order = [h for g in range(G) for h in range(g, H, G)]
        out, lse = row._replace(q=row.q[:, order]).want
        yield (
            "which key/value head goes with a query head",
            "the heads come out in another order: neighbours form a group, so q.reshape(B, G, H // G, D) needs no "
            "transpose, and neither does what comes back",
            (out, lse),
        )
    starts = row._replace(k=_from_the_start(row.k, row.sizes), v=_from_the_start(row.v, row.sizes))
    yield (
        "where each split begins",
        "all begin at key 0: a split begins where the one before it has ended: k.split(sizes, 2) cuts them",
        merged(*starts.partials()),
    )
    yield from _merge_mistakes(*row.partials(), row.sizes, "split")


def _from_the_start(x: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([x[:, :, :size] for size in sizes], 2)


def _check_split(fn: Callable, row: _Row, shown: str, where: str = "", cause: str = "") -> tuple[str | None, _Tried]:
    groups = (
        "which query heads meet which keys",
        "k and v have G heads, q has H: the H / G query heads of a group are rows for one key/value head, "
        "q.reshape(B, G, H // G, D)",
    )
    result = call(
        fn,
        row.q,
        row.k,
        row.v,
        list(row.sizes),
        input=shown,
        where=where,
        cause=cause,
        shapes=None if where else groups,
    )
    got, want = parts(result, "out, lse"), row.want
    problem = next((p for p in (difference(n, g, w, 1e-5) for n, g, w in zip(("out", "lse"), got, want)) if p), None)
    for name, g, w in zip(("out", "lse"), got, want):
        if isinstance(g, Tensor) and g.shape != w.shape:
            why = f"out is (B, H, 1, D) and lse (B, H, 1), here {tuple(want[0].shape)} and {tuple(want[1].shape)}"
            raise Wrong(problem or "", f"the shape of {name}", why)
    return problem, _Tried(_split_mistakes(row), _looks(got, 1e-4))


_UNKNOWN_SPLIT = (
    "one split, then the merge: compare each with two_pass and merge of notebook 01",
    "no common mistake fits. Does every split take its own keys and values, from where the last one ended?",
)


def _split_value(fn: Callable) -> None:
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([2.0, 1.0, 1.0]).log().view(1, 1, 3, 1)
    v = torch.tensor([1.0, 0.0, 4.0]).view(1, 1, 3, 1)
    rows = (
        (_Row(q, k, v, [2, 1]), "the three keys of section 2, splits of 2 and 1"),
        (_row([5, 4, 3], H=2, G=2), "12 keys in splits of 5, 4 and 3; H = G = 2"),
        (_row([5, 4, 3]), "12 keys in splits of 5, 4 and 3; H = 4 query heads, G = 2 key/value heads"),
    )
    _first_wrong([(partial(_check_split, fn, *row), _UNKNOWN_SPLIT) for row in rows])


def _split_adversarial(fn: Callable) -> None:
    nothing = (
        "what a split without keys gives",
        "no key at all: out 0 and lse -inf. Its maximum does not exist (amax of nothing raises), and 0 / 0 is NaN",
    )
    overflow = (
        "the argument of every exp: how large can it get?",
        "exp(1e4) overflows: subtract the maximum of a split inside it, and the largest lse in the merge",
    )
    batch = "the batch", "each sequence has its own softmax"
    for row, shown, unknown in (
        (_row([4, 0, 3]), "splits of 4, 0 and 3 keys", nothing),
        (_row([0, 0, 5]), "splits of 0, 0 and 5 keys", nothing),
        (_row([4, 0], shift=-30.0), "splits of 4 and 0 keys, all scores near -30", nothing),
        (_row([3, 4, 2], times=1e4), "splits of 3, 4 and 2 keys, scores around 1e4", overflow),
        (_row([0, 0]), "no key at all: splits of 0 and 0", nothing),
        (_row([1] * 6, B=2), "B = 2, six splits of one key each", batch),
    ):
        _first_wrong([(partial(_check_split, fn, row, shown, *unknown), unknown)])


class _Made(TorchDispatchMode):
    """Notes the shape of every tensor that is not a view of another one, and how often the numbers of k are read."""

    def __init__(self, k: Tensor):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.read, self._memory = 0, k.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in func._schema.returns):
            self.shapes += [tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)]
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.read += sum(x.numel() for x in given if x.untyped_storage().data_ptr() == self._memory)
        return result


def _split_cost(fn: Callable) -> None:
    H, G, D, size, count = 32, 2, 32, 256, 16
    row = _row([size] * count, H=H, G=G, D=D)
    S = size * count
    shown = f"{S:,} keys in {count} splits of {size}; H = {H}, G = {G}, D = {D}"
    with _Made(row.k) as made:
        call(fn, row.q, row.k, row.v, list(row.sizes), input=shown)
    for shape in sorted(made.shapes, key=math.prod, reverse=True):
        many = math.prod(shape)
        what = f"the values are right, but it makes a tensor of {many:,} numbers, shape {shape}"
        keys = next((n for n, other in (shape[-2:], shape[:-3:-1]) if other == D), 0) if len(shape) > 1 else 0
        if keys >= size and many > keys * G * D:
            raise Wrong(
                f"{what}: keys or values once more, for every query head",
                "what repeats k and v: repeat_interleave, or a product that broadcasts over a dim of k",
                "nearly all the time of decoding goes into reading keys, and here they are read H / G times. Make the "
                "heads of a group rows of one product: q.reshape(B, G, H // G, D) @ k.mT",
            )
        if keys == S:
            raise Wrong(
                f"{what}: all keys or all values once more",
                "what copies k or v",
                "k.split(sizes, 2) and k[:, :, a:b] only look at k; float(), clone() and torch.cat copy",
            )
        if many >= H * S:
            raise Wrong(
                f"{what}: the scores of all keys at once",
                "where k is cut by sizes",
                "the row is not split: each split makes its own scores, and only (out, lse) of it go on",
            )
    if made.read > 2 * row.k.numel():
        raise Wrong(
            f"the values are right, but every key is read {made.read / row.k.numel():.0f} times",
            "which loop goes over the query heads",
            "reading keys is all the time that decoding takes. Make the heads of a group rows of one product, so that "
            "each key is read once for all of them: q.reshape(B, G, H // G, D) @ k.mT",
        )


split_k = Checker("11a split_k", value=_split_value, adversarial=_split_adversarial, cost=_split_cost)

# ---- 11b: exchange(comm, out, lse) -> out, lse, the same on every rank -----------------------------------------------

_EXCHANGE = (
    (
        "never awaited it|disagree",
        "which messages are awaited, and by whom",
        "every rank takes part in every message, also one without keys; each message needs an await",
    ),
    ("message that has not arrived|coroutine", "", "messages return at once; what they bring is there after `await`"),
    (
        "deadlock",
        "which ranks get to each message",
        "every rank takes part, also one without keys: decide by what all ranks know, never by this rank's lse",
    ),
    (
        "one dtype",
        "the dtypes of what is sent",
        "the tensors of a message have one dtype: out and lse are both float32 here",
    ),
)


class _Partials(NamedTuple):
    outs: Tensor  # (P, B, H, n, D)
    lses: Tensor

    def run(self, fn: Callable, shown: str, where: str = "", cause: str = "") -> simulate.Ran:
        P = len(self.outs)
        args = PerRank(x.clone() for x in self.outs), PerRank(x.clone() for x in self.lses)
        return simulate.run(fn, P, *args, input=shown, where=where, cause=cause, instead=_EXCHANGE)


def _partials(P: int, H: int = 2, D: int = 4, n: int = 1, times: float = 2.0, empty: tuple[int, ...] = ()) -> _Partials:
    outs, lses = oracle.numbers(5, P, 1, H, n, D), times * oracle.numbers(6, P, 1, H, n)
    for rank in empty:
        outs[rank], lses[rank] = 0.0, -torch.inf
    return _Partials(outs, lses)


def _check_exchange(
    fn: Callable, given: _Partials, shown: str, where: str = "", cause: str = ""
) -> tuple[str | None, _Tried]:
    ran = given.run(fn, shown, where, cause)
    got = [parts(result, "out, lse", f"rank {rank} returns") for rank, result in enumerate(ran.results)]
    want = merged(*given)
    problems: dict[int, str] = {}
    for i, name in enumerate(("out", "lse")):
        problems = problems or simulate.wrong_ranks(name, [g[i] for g in got], [want[i]] * len(got), 1e-5)
    first = next(iter(problems), 0)
    one = _Tried(_rank_mistakes(given, first), _looks(got[first], 1e-4))
    if not problems:
        return None, one
    what = f"on {simulate.who(list(problems))} {problems[first]}"
    stay = [rank for rank in problems if difference("out", got[rank][0], given.outs[rank], 0.0) is None]
    if stay == list(problems) and len(stay) >= len(got) - 1:
        why = "they have what they had before: each rank merges what arrives, and every rank needs the result"
        raise Wrong(what, f"what {simulate.who(stay)} return{'s' * (len(stay) == 1)}", why)
    return what, one


_UNKNOWN_EXCHANGE = (
    "what arrives from each rank, and the merge",
    "no common mistake fits. Every rank merges all partial results, its own once",
)


def _rank_mistakes(given: _Partials, rank: int) -> Iterator[tuple[str, str, Pair]]:
    P = len(given.outs)
    if P > 1:
        others = [r for r in range(P) if r != rank]
        yield (
            "whose results are merged",
            "the rank's own is missing: what arrives comes from the others",
            merged(given.outs[others], given.lses[others]),
        )
        twice = [*range(P), rank]
        yield (
            "whose results are merged",
            "the rank's own counts twice: what all_gather brings has it already",
            merged(given.outs[twice], given.lses[twice]),
        )
    packed = torch.cat([given.lses.unsqueeze(-1), given.outs], -1)
    yield (
        "how a message is packed, and how it is taken apart",
        "lse is packed in front of out, and taken from behind it: the last of the D + 1 numbers is one of out",
        merged(packed[..., :-1], packed[..., -1]),
    )
    packed = torch.cat([given.outs, given.lses.unsqueeze(-1)], -1)
    yield (
        "how a message is packed, and how it is taken apart",
        "lse is packed behind out, and taken from in front of it: the first of the D + 1 numbers is one of out",
        merged(packed[..., 1:], packed[..., 0]),
    )
    yield from _merge_mistakes(*given, None, "rank")


def _exchange_value(fn: Callable) -> None:
    outs = torch.tensor([2 / 3, 4.0]).view(2, 1, 1, 1, 1)
    lses = torch.tensor([3.0, 1.0]).log().view(2, 1, 1, 1)
    cases = (
        (_Partials(outs, lses), "P = 2: the two parts of section 2, out 2/3 and 4, lse log 3 and 0"),
        (_partials(3), "P = 3, H = 2, D = 4"),
        (_partials(4, H=4, n=3), "P = 4, H = 4, D = 4, three queries"),
    )
    _first_wrong([(partial(_check_exchange, fn, *case), _UNKNOWN_EXCHANGE) for case in cases])


def _exchange_adversarial(fn: Callable) -> None:
    nothing = (
        "what a rank without keys counts for",
        "its lse is -inf: exp(-inf - lse) = 0, but -inf - (-inf) is NaN where no rank has a key. rl.merge knows this",
    )
    overflow = "the argument of every exp", "exp(1e4) overflows: subtract the largest lse first"
    for given, shown, unknown in (
        (_partials(4, empty=(1, 3)), "P = 4, ranks 1 and 3 hold no key: out 0, lse -inf", nothing),
        (_partials(3, empty=(0,)), "P = 3, rank 0 holds no key", nothing),
        (_partials(3, empty=(0, 1, 2)), "P = 3, no rank holds a key", nothing),
        (_partials(3, times=1e4), "P = 3, lse around 1e4", overflow),
        (_partials(1), "P = 1: nothing to exchange", ("one rank", "with P = 1 its own result is all")),
    ):
        _first_wrong([(partial(_check_exchange, fn, given, shown, *unknown), unknown)])
    shown = "P = 5, 512 queries: every rank's result, compared with rank 0's bit by bit"
    ran = _partials(5, n=512, D=16).run(fn, shown)
    for rank, (out, lse) in enumerate(ran.results):
        if not (torch.equal(out, ran.results[0][0]) and torch.equal(lse, ran.results[0][1])):
            rows = int((out != ran.results[0][0]).any(-1).sum())
            raise Wrong(
                f"all ranks are right, but {rows} of {2 * 512} rows of out on rank {rank} differ from rank 0's in the "
                "last digits",
                "in which order a rank merges",
                "each rank begins with a result of its own, or with what arrives first, and float sums depend on their "
                "order. Some day two ranks choose different tokens. Merge in rank order, 0, 1, 2, ..., on every rank",
            )


def _exchange_cost(fn: Callable) -> None:
    P, H, D = 4, 4, 16
    shown = f"P = {P}, H = {H}, D = {D}, one query, float32"
    given = _partials(P, H=H, D=D)
    ran = given.run(fn, shown)
    message = decode_bytes(2, H, D)
    for rank in range(P):
        sent, messages = ran.world.trace.bytes_sent(rank), ran.world.trace.messages(rank)
        if sent > (P - 1) * message:
            what = f"the values are right, but rank {rank} sends {sent:,} bytes; {(P - 1) * message:,} are enough"
            cause = "out and lse of this rank's part, once to each other rank: H (D + 1) numbers of 4 bytes"
            if sent >= 2 * (P - 1) * message:
                cause = "twice as much as needed: it travels in float64, or it is sent twice"
            elif sent == (P - 1) * 2 * H * D * 4:
                cause = "lse was expanded to the size of out: it is one number for D of out"
            raise Wrong(what, "what is in each message", cause)
        if messages > P - 1:
            raise Wrong(
                f"the values are right, but rank {rank} sends {messages} messages; {P - 1} are enough",
                "how many exchanges there are",
                "out and lse travel apart, or there is one exchange after another, and each of them costs a latency, "
                "which is nearly all that so small a message costs. Put lse beside out, as one more number: "
                "torch.cat([out, lse.unsqueeze(-1)], -1)",
            )


exchange = Checker("11b exchange", value=_exchange_value, adversarial=_exchange_adversarial, cost=_exchange_cost)

# ---- 11c: local_len(rank, S, P, K) -> how many of the first S tokens a rank owns -------------------------------------


def dealt(rank: int, S: int, P: int, K: int) -> int:
    """How many of the positions 0 to S - 1 a rank owns, dealt out one by one."""
    return sum(position // K % P == rank for position in range(S))


def _other_lengths(rank: int, S: int, P: int, K: int) -> Iterator[tuple[str, str, Any]]:
    turn, rest = P * K, S % (P * K)
    whole = S // turn * K
    last = "what a rank gets of the last, unfinished round"
    yield (
        last,
        "nothing is counted of it: S mod (P K) tokens are left; the first ranks get K of them each, one gets the rest",
        whole,
    )
    yield last, "every rank gets all of it: it is dealt out in blocks of K, rank 0 first", whole + rest
    yield (
        last,
        "every rank gets up to K of it: rank r gets what is left after the ranks before it",
        whole + min(rest, K),
    )
    yield (
        last,
        "a rank that comes later than what is left gets a negative number: at least 0",
        whole + min(rest - rank * K, K),
    )
    yield last, "a rank gets more than one block of it: at most K", whole + max(rest - rank * K, 0)
    yield (
        last,
        "ranks are counted from 1: before rank r come r blocks of K tokens, so rank 0 is the first to get some",
        whole + max(0, min(rest - (rank + 1) * K, K)),
    )
    yield (
        last,
        "every rank gets the unfinished block: it belongs to one rank, and the ranks after that one get nothing",
        whole + (K if rest // K > rank else rest % K),
    )
    yield last, "rank 0 gets all of it", whole + rest * (rank == 0)
    yield last, "the last rank gets all of it", whole + rest * (rank == P - 1)
    yield (
        "how tokens are dealt out",
        "one by one: K neighbours go to a rank before the next one's turn",
        len(range(rank, S, P)),
    )
    yield (
        "how tokens are dealt out",
        "in one contiguous part for each rank: blocks of K go round, 0, 1, ..., P - 1, 0, 1, ...",
        S * (rank + 1) // P - S * rank // P,
    )
    yield "how tokens are dealt out", "evenly, S // P: the ranks differ by up to K tokens", S // P
    yield "how tokens are dealt out", "evenly, rounded up: the ranks differ by up to K tokens", -(-S // P)
    yield "how tokens are dealt out", "S / P is no whole number of tokens", S / P
    yield (
        "how many tokens there are",
        "one too few is counted: the first S tokens have the positions 0 to S - 1",
        Ownership(P, K).count(rank, S - 1),
    )
    yield (
        "how many tokens there are",
        "one too many is counted: the first S tokens have the positions 0 to S - 1",
        Ownership(P, K).count(rank, S + 1),
    )
    yield (
        "what is counted",
        "whole rounds are counted, not their tokens: a rank gets K tokens in each round",
        S // turn + min(max(rest - rank * K, 0), K),
    )
    yield "K and P", "they are exchanged", Ownership(K, P).count(rank, S)
    yield (
        "what is counted",
        "whole blocks: the last block may be unfinished",
        -(-max(0, -(-S // K) - rank) // P) * K,
    )
    yield "what is counted", "blocks, not tokens: a block has K", -(-max(0, -(-S // K) - rank) // P)


def _check_length(fn: Callable, rank: int, S: int, P: int, K: int) -> tuple[str | None, _Tried]:
    got = call(fn, rank, S, P, K, input=f"rank {rank}, S = {S:,}, P = {P}, K = {K}")
    said, want = number(got, "how many tokens: one number"), Ownership(P, K).count(rank, S)
    problem = f"you give {said:,.10g} tokens, rank {rank} owns {want:,}" if said != want else None
    return problem, _Tried(_other_lengths(rank, S, P, K), lambda value: abs(said - value) < 1e-9)


_UNKNOWN_LENGTH = (
    "whole rounds of P K tokens, and what is left after them",
    "no common mistake fits: deal S tokens out by hand, and count",
)


def _length_value(fn: Callable) -> None:
    cases = [(rank, S, 3, 2) for S in (8, 12, 13, 16, 17) for rank in range(3)]
    _first_wrong([(partial(_check_length, fn, *case), _UNKNOWN_LENGTH) for case in cases])


def _length_adversarial(fn: Callable) -> None:
    cases = [
        (rank, S, P, K)
        for P, K in ((3, 2), (4, 16), (2, 1), (1, 16), (5, 3))
        for S in (0, 1, K - 1, K, K + 1, P * K - 1, P * K, 2 * P * K + K + 1, 3 * P * K - 1, 1_000_003)
        for rank in range(P)
    ]
    _first_wrong([(partial(_check_length, fn, *case), _UNKNOWN_LENGTH) for case in cases])


def _length_cost(fn: Callable) -> None:
    S, most, lines = 10**13, 200, 0
    loop = (
        f"it is still counting after {most} lines of Python",
        "what is done once for each token, or for each block",
        "a kernel needs this number in every step. Whole rounds take one division, what is left takes a comparison",
    )

    def count(frame: Any, event: str, arg: Any) -> Callable:
        nonlocal lines
        lines += event == "line"
        if lines > most:
            raise _Loop
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        fn(1, S, 4, 16)
    except (_Loop, MemoryError, RuntimeError, OverflowError):  # of what makes a list or a tensor of all positions
        raise Wrong(*loop, input=f"rank 1, S = {S:,}, P = 4, K = 16") from None
    finally:
        sys.settrace(before)


class _Loop(Exception):
    """A function goes through more lines than a closed form has."""


local_len = Checker("11c local_len", value=_length_value, adversarial=_length_adversarial, cost=_length_cost)

# ---- 11d: waits(T, S, P, H, G, D, e, a, F, W) -> seconds that pass-KV and pass-Q wait --------------------------------


class _Prefill(NamedTuple):
    T: int
    S: int
    P: int
    H: int
    G: int
    D: int
    e: int
    a: int
    F: float
    W: float

    @property
    def want(self) -> tuple[float, float]:
        found = waiting_seconds(
            self.T, self.S, self.P, self.H, self.G, self.D, flops=self.F, bandwidth=self.W, itemsize=self.e,
            accumulated=self.a,
        )  # fmt: skip
        return found["pass-kv"], found["pass-q"]

    @property
    def shown(self) -> str:
        return ", ".join(f"{name} = {value:,.6g}" for name, value in zip(self._fields, self))


def _pieces(x: _Prefill) -> tuple[float, float, float, float]:
    """Seconds of a step's attention, of a hop of k and v, of one of q, and of one part of the way home."""
    rows, keys = x.T / x.P, (x.T + x.S) / x.P
    step = 4 * x.H * x.D * rows * keys / x.F
    return step, 2 * x.G * x.D * x.e * keys / x.W, x.H * x.D * x.e * rows / x.W, x.H * (x.D + 1) * x.a * rows / x.W


def _other_waits(x: _Prefill) -> Iterator[tuple[str, str, tuple[float | None, float | None]]]:
    step, kv, q, home = _pieces(x)
    hops = x.P - 1

    def hidden(hop: float, behind: float = step, hops: int = hops) -> float:
        return hops * max(0.0, hop - behind)

    right_kv, right_q = x.want
    yield "which wait is which", "they are exchanged: `return pass_kv, pass_q`", (right_q, right_kv)
    yield "how many hops there are", "you count P hops; after P - 1 hops every rank has met everything", (
        hidden(kv, hops=x.P), x.P * (max(0.0, q - step) + home),
    )  # fmt: skip
    yield (
        "how many hops there are",
        "one is counted, and there are P - 1",
        (max(0.0, kv - step), max(0.0, q - step) + home),
    )
    yield (
        "what a hop hides behind",
        "nothing is hidden. A hop travels while the rank computes with what it has: max(0, hop - step)",
        (hops * kv, None),
    )
    negative = "a wait cannot be negative: what hides waits 0 seconds, max(0, hop - step)"
    yield "what a hop hides behind", negative, (hops * (kv - step), hops * (q - step + home))
    yield "what a hop hides behind", negative, (hops * (kv - step), None)
    yield "what a hop hides behind", negative, (None, hops * (q - step + home))
    yield "how many hops there are", "you count P hops; after P - 1 hops every rank has met everything", (
        hidden(kv, hops=x.P), hidden(q, hops=x.P) + hops * home,
    )  # fmt: skip
    yield (
        "what a hop hides behind",
        "all hops together are hidden behind all steps. A hop hides behind one step, and the last step hides none",
        (max(0.0, hops * kv - x.P * step), max(0.0, hops * q - x.P * step) + hops * home),
    )
    for factor, cause in (
        (x.P, "too much: in a step T / P queries meet the (S + T) / P keys of one rank"),
        (x.P**2, "too much: in a step T / P queries meet the (S + T) / P keys of one rank"),
        (
            0.5,
            "you count half: 4 operations for each query, key and number of a head; two products of 2 each",
        ),
        (x.G / x.H, "that of G heads: every query head meets the keys, so H"),
    ):
        yield "the attention of a step", cause, (hidden(kv, step * factor), hidden(q, step * factor) + hops * home)
    short = step * x.T / (x.T + x.S)
    yield (
        "the attention of a step",
        "new queries meet the cached keys too: (S + T) / P keys",
        (hidden(kv, short), hidden(q, short) + hops * home),
    )
    old = x.S / (x.T + x.S)
    yield (
        "which keys there are",
        "the cached ones alone are counted: the new tokens have keys and values too, so (S + T) / P keys",
        (hidden(kv * old, step * old), hidden(q, step * old) + hops * home),
    )
    keys = "the bytes of a hop of keys and values"
    yield keys, "one tensor is counted where k and v travel", (hidden(kv / 2), None)
    yield keys, "H in place of G heads: keys and values have G", (hidden(kv * x.H / x.G), None)
    yield keys, "the new ones alone are counted: cached keys travel, too", (hidden(kv * x.T / (x.T + x.S)), None)
    yield keys, "the cached ones alone are counted: the new ones travel, too", (hidden(kv * x.S / (x.T + x.S)), None)
    yield keys, "those of all ranks are counted: in a hop those of one rank travel, a P-th", (hidden(kv * x.P), None)
    yield keys, "e is missing: a number has e bytes", (hidden(kv / x.e), None)
    way = "the way home of pass-Q's results"
    yield way, "it is missing: out and lse of every query are on other ranks at the end", (None, hidden(q))
    yield way, "it is hidden behind attention, but nothing is left to compute: all of it is waited for", (
        None, hidden(q) + hidden(home),
    )  # fmt: skip
    yield (
        way,
        "lse is missing: D + 1 numbers for each query and head",
        (None, hidden(q) + hops * home * x.D / (x.D + 1)),
    )
    yield way, "each number of a partial result has `a` bytes, not `e`", (None, hidden(q) + hops * home * x.e / x.a)
    yield way, "it is hidden behind attention, but nothing is left to compute: all of it is waited for", (
        None, hidden(q + home),
    )  # fmt: skip
    yield way, "those of all ranks are counted: from each other rank come the results of T / P queries", (
        None, hidden(q) + hops * home * x.P,
    )  # fmt: skip
    yield way, "each number of out and lse has `a` bytes, not `e`", (
        None, hidden(q) + hops * home * (x.D * x.e + x.a) / ((x.D + 1) * x.a),
    )  # fmt: skip
    yield way, "it is counted once; a result comes home from each of P - 1 ranks", (None, hidden(q) + home)
    yield way, "P results are counted; one comes home from each of P - 1 ranks, and a rank keeps its own", (
        None, hidden(q) + x.P * home,
    )  # fmt: skip
    yield way, "it has the results of H query heads, not of G", (None, hidden(q) + hops * home * x.G / x.H)
    queries = "the bytes of a hop of queries"
    yield queries, "G in place of H heads: queries have H", (None, hidden(q * x.G / x.H) + hops * home)
    yield queries, "one tensor travels, q: the 2 belongs to k and v", (None, hidden(2 * q) + hops * home)
    yield queries, "those of all ranks are counted: in a hop those of one rank travel", (
        None, hidden(q * x.P) + hops * home,
    )  # fmt: skip
    yield queries, "cached tokens have no queries: T, not S + T", (None, hidden(q * (x.T + x.S) / x.T) + hops * home)


def _check_waits(fn: Callable, given: _Prefill) -> tuple[str | None, _Tried]:
    got = parts(call(fn, *given, input=given.shown), "pass_kv, pass_q")
    said = tuple(number(x, "seconds: one number", "your function returns") for x in got)
    want = given.want
    limit = 1e-6 * max(*want, *_pieces(given))

    def same(a: float, b: float) -> bool:
        return abs(a - b) <= limit

    def looks(value: tuple[float | None, float | None]) -> bool:
        return all(same(a, want[i] if b is None else b) for i, (a, b) in enumerate(zip(said, value)))

    one = _Tried(_other_waits(given) if given.P > 1 else iter(()), looks)
    for name, a, b in zip(("pass-KV", "pass-Q"), said, want):
        if not same(a, b):
            return f"you say that {name} waits {1e6 * a:,.4g} µs, it waits {1e6 * b:,.4g} µs", one
    return None, one


_UNKNOWN_WAIT = "what travels in a hop, and what it hides behind", "no common mistake fits: write down one hop"


def _waits_value(fn: Callable) -> None:
    few = dict(P=4, H=8, G=2, D=64, e=2, a=4, F=1e12, W=1e9)
    cases = (
        _Prefill(64, 4032, **few),
        _Prefill(16, 8176, **few | dict(P=8, e=4, a=8)),
        _Prefill(64, 4032, **few | dict(F=1e11, W=2e9)),
        _Prefill(2048, 2048, **few | dict(F=1e13, W=1e8)),
    )
    _first_wrong([(partial(_check_waits, fn, case), _UNKNOWN_WAIT) for case in cases])


def _waits_adversarial(fn: Callable) -> None:
    for case in (
        _Prefill(2048, 0, 4, 8, 2, 64, 2, 4, 1e12, 1e9),
        _Prefill(1280, 126_720, 4, 16, 1, 128, 2, 2, 510e12, 26e9),
        _Prefill(64_000, 64_000, 4, 16, 1, 128, 2, 2, 510e12, 26e9),
        _Prefill(64, 4032, 1, 8, 2, 64, 2, 4, 1e12, 1e9),
    ):
        _first_wrong([(partial(_check_waits, fn, case), _UNKNOWN_WAIT)])


waits = Checker("11d waits", value=_waits_value, adversarial=_waits_adversarial)


def library_waits(T: int, S: int, P: int, H: int, G: int, D: int, e: int, a: int, F: float, W: float) -> tuple:
    """The library's answer to 11d, in the exercise's words: (seconds of pass-KV, of pass-Q)."""
    return _Prefill(T, S, P, H, G, D, e, a, F, W).want


# ---- Predictions and the quiz: computed by the library, not written down ---------------------------------------------

LLAMA = dict(H=32, G=8, D=128)  # a layer of Llama 3 8B
READ = 4.22e12  # bytes per second of one H200: the fastest plain sum of docs/measurements/2026-11-29-decoding-h200.json
LINK = dict(bandwidth=288e9, latency=21e-6)  # of NCCL on two H200, fitted in notebook 06, section 9


def intensity(T: int, H: int, G: int, e: int) -> float:
    """Operations per byte of T queries."""
    return 2 * T * H / (G * e)


def busy() -> float:
    """Per cent of an H200's arithmetic that one query can use."""
    return round(100 * intensity(1, 32, 8, 2) / (GPUS["h200"].bf16 / GPUS["h200"].bandwidth), 1)


def all_have_keys(splits: int, size: int) -> int:
    """The shortest prompt of which every split has a key."""
    return next(S for S in range(1, splits * size + 1) if S > (splits - 1) * size)


def missed(T: int, P: int, S: int = 100) -> int:
    """Keys that the first of T queries misses if each rank goes back from its own end."""
    own = Ownership(P, 1)
    return sum(own.count(r, S - T + 1) - max(0, own.count(r, S) - (T - 1)) for r in range(P))


predict_busy = Prediction(
    "Per cent of the arithmetic",
    busy,
    "4 operations per byte, where the chip could do 206 in the time that a byte takes.",
    tolerance=0.15,
    unit="%",
)
predict_shortest = Prediction(
    "Fewest keys without an empty split",
    lambda: all_have_keys(8, 16),
    "Seven splits of 16 are full, and the eighth has its first key.",
)
predict_message = Prediction(
    "Bytes of a message",
    lambda: decode_bytes(2, **{x: LLAMA[x] for x in "HD"}),
    "32 heads, 128 numbers of out and one lse each, 4 bytes: however long the sequence.",
    unit="bytes",
)
predict_room = Prediction(
    "Tokens until a rank is full",
    lambda: 1000 - 2000 // 4,
    "The last rank has room for 500 more; 1,500 places on the others stay empty.",
)
predict_missed = Prediction(
    "Keys that it misses",
    lambda: missed(4, 4),
    "Each of 4 ranks hides 3 keys, 12 in all; but only the keys of the last 3 tokens had to be hidden.",
)
predict_hops = Prediction(
    "Hops of a tree over 64 ranks",
    lambda: exchange_hops(64, "tree"),
    "Six hops up, since 2^6 = 64, and six down.",
)
predict_share = Prediction(
    "Per cent of new tokens",
    lambda: 100 * 2 * 8 / 128,
    "T H D e = 2 (S + T) G D e, so T / (S + T) = 2 G / H = 2 / 16.",
    tolerance=0.05,
    unit="%",
)


def pays_from() -> int:
    """Thousands of tokens from which on two H200 are faster than one."""
    return round(tokens_to_shard(2, **LLAMA, read=READ, **LINK) / 1000)


predict_pays = Prediction(
    "Thousands of tokens",
    pays_from,
    "An exchange takes 21 µs; with 43,000 tokens, reading half of the keys takes as long.",
    tolerance=3,
)

quiz = Quiz(
    "Quiz 11",
    (lambda: intensity(3, 64, 8, 1), "2 T H / (G e) = 2 x 3 x 64 / (8 x 1)."),
    (lambda: decode_bytes(8, 32, 128), "(P - 1) H (D + 1) 4 = 7 x 32 x 129 x 4."),
    (
        lambda: decode_bytes(8, 32, 128, exchange="tree", rank=4) // decode_bytes(2, 32, 128),
        "One up to rank 0, and one back to each of ranks 6 and 5, whose results it has merged.",
    ),
    (lambda: Ownership(4, 16).count(2, 170), "Two whole rounds of 64, and of the 42 that are left the last 10."),
    (
        lambda: round(100 * pass_q_bytes(1024, 4, 32, 128) / pass_kv_bytes(1024, 15 * 1024, 4, 8, 128)),
        "Queries 3 x 256 x 32 x 128 x 2, results home 768 x 32 x 129 x 4; keys and values 3 x 2 x 4,096 x 8 x 128 x 2.",
        1,
        "%",
    ),
    (
        lambda: round(1e6 * sum(decode_seconds(524_288, 4, **LLAMA, read=READ, **LINK).values())),
        "131,072 tokens of 4,096 bytes at 4.22 TB/s are 127 µs; the exchange is 21.",
        2,
        "us",
    ),
)

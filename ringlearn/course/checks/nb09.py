"""Exercises of notebook 09, dilated attention: 9a seen, 9b dilated_ring; predictions and the quiz.

The oracle counts, position by position, how many configurations let a query see a key, and takes a softmax with these
multiplicities in float64. What known mistakes give is made the same way, from other counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ... import costs
from ...attention import dilated_attention
from ...attention.dilated.rows import Configuration
from ...layouts import Layout, contiguous, striped, zigzag
from ...masks import Mask, causal, full
from ...worlds.simulated import SimulatedWorld
from .. import viz
from . import oracle, simulate
from .checker import Checker, Wrong, call, cases, parts
from .gradients import symptom
from .mistakes import recognised
from .oracle import numbers
from .predictions import Prediction, Quiz

Configurations = Sequence[tuple[int, int]]

# ---- 9a: seen(q_pos, k_pos, head, w, rho) -> bool tensor ---------------------------------------------------------


def _keeps(p: int, head: int, w: int, r: int) -> bool:
    """By the words of the definition: the rows of p's segment, every r-th of them from the head's first on."""
    begin = p // w * w
    return p in list(range(begin, begin + w))[head % r :: r]


def _sees(q: int, k: int, head: int, w: int, r: int) -> bool:
    return q // w == k // w and _keeps(q, head, w, r) and _keeps(k, head, w, r)


class Rule(NamedTuple):
    """A wrong rule for what a query sees, with where to look and the cause. ``sees`` also gets the two row numbers."""

    where: str
    cause: str
    sees: Callable[[int, int, int, int, int, int, int], bool]


def _from_0(p: int, head: int, r: int) -> bool:
    return p % r == head % r


def _from_row(p: int, head: int, w: int, r: int) -> bool:
    return p % w >= head and (p % w - head) % r == 0


RULES = (
    Rule(
        "which pairs of kept positions see each other",
        "segments are missing: both must lie in the same one, q_pos // w == k_pos // w",
        lambda q, k, i, j, head, w, r: _keeps(q, head, w, r) and _keeps(k, head, w, r),
    ),
    Rule(
        "which queries see anything",
        "only keys are selected. A head keeps the same rows of q, k and v: a query that it does not keep sees nothing",
        lambda q, k, i, j, head, w, r: q // w == k // w and _keeps(k, head, w, r),
    ),
    Rule(
        "which keys are seen",
        "only queries are selected: the head keeps keys by the same rule",
        lambda q, k, i, j, head, w, r: q // w == k // w and _keeps(q, head, w, r),
    ),
    Rule(
        "which keys a kept query sees",
        "a kept query sees the kept keys of its segment, not all keys, and not those of other heads",
        lambda q, k, i, j, head, w, r: q // w == k // w and (q - k) % r == 0,
    ),
    Rule(
        "where each segment starts to count",
        "every rho-th position is counted from the start of the sequence. Each segment counts anew: p % w % rho",
        lambda q, k, i, j, head, w, r: q // w == k // w and _from_0(q, head, r) and _from_0(k, head, r),
    ),
    Rule(
        "the offset of a head that is not below rho",
        "its offset is head % rho: there are only rho different ones, and head rho starts again at 0",
        lambda q, k, i, j, head, w, r: q // w == k // w and q % w % r == head and k % w % r == head,
    ),
    Rule(
        "the offset of a head",
        "every head keeps the rows of head 0. Head j starts at row j % rho of each segment",
        lambda q, k, i, j, head, w, r: _sees(q, k, 0, w, r),
    ),
    Rule(
        "which keys are in reach",
        "a window around the query is taken, abs(q - k) < w, in place of its segment",
        lambda q, k, i, j, head, w, r: abs(q - k) < w and _keeps(q, head, w, r) and _keeps(k, head, w, r),
    ),
    Rule(
        "what is counted: rows or positions",
        "rows of the tensors are counted from 0. Use the values of q_pos and k_pos: a shard begins anywhere",
        lambda q, k, i, j, head, w, r: _sees(i, j, head, w, r),
    ),
    Rule(
        "what hides the future",
        "keys after the query are hidden too. That is the mask's part, rl.causal, not the part of this function",
        lambda q, k, i, j, head, w, r: k <= q and _sees(q, k, head, w, r),
    ),
    Rule(
        "the number of a position's segment",
        "p / w is a fraction, another one for each position, so that a token sees itself alone. The segment is p // w",
        lambda q, k, i, j, head, w, r: q == k and _keeps(q, head, w, r),
    ),
    Rule(
        "the parentheses",
        "in Python & binds more tightly than ==: put each comparison in parentheses, (a == b) & (c == d)",
        lambda q, k, i, j, head, w, r: q // w == (k // w & _keeps(q, head, w, r) & _keeps(k, head, w, r)),
    ),
    Rule(
        "the first row of a head that is not below rho",
        "a head begins at row head % rho of each segment. Yours begins at row head, so it misses the rows before it",
        lambda q, k, i, j, head, w, r: q // w == k // w and _from_row(q, head, w, r) and _from_row(k, head, w, r),
    ),
)
BY_ROW = RULES[8]


def _seen(fn: Callable, q_pos: Sequence[int], k_pos: Sequence[int], head: int, w: int, r: int, note: str = "") -> None:
    shown = f"w = {w}, rho = {r}, head {head}, {note or f'positions {q_pos[0]} to {q_pos[-1]}'}"
    q_pos, k_pos = list(q_pos), list(k_pos)
    args = torch.tensor(q_pos)[:, None], torch.tensor(k_pos)[None, :], head, w, r
    got = call(
        fn, *args, input=shown, where="shapes: q_pos is (n, 1), k_pos is (1, m)", cause="compare them with ==, &"
    )
    for name, given, now in (("q_pos", q_pos, args[0]), ("k_pos", k_pos, args[1])):
        if now.flatten().tolist() != given:
            raise Wrong(
                f"your function changes {name}: its caller finds {now.flatten().tolist()[:8]} in it",
                "what is changed in place (%=, //=, -=)",
                f"the caller goes on with its positions; make new tensors: {name} % w, not {name} %= w",
            )
    if isinstance(got, bool) or not isinstance(got, Tensor) or got.dtype != torch.bool:
        what = str(got.dtype).replace("torch.", "a tensor of ") if isinstance(got, Tensor) else type(got).__name__
        raise Wrong(
            f"your function returns {what}, not a bool tensor",
            "how the conditions are put together",
            "comparisons give bool tensors; combine these with &, each in parentheses",
        )
    if got.shape != (len(q_pos), len(k_pos)):
        raise Wrong(
            f"the shape is {tuple(got.shape)}, expected {(len(q_pos), len(k_pos))}: a row for each query",
            "what is done to q_pos and what to k_pos",
            "the result needs a condition on both: (n, 1) and (1, m) broadcast to (n, m)",
        )
    want = [[_sees(q, k, head, w, r) for k in k_pos] for q in q_pos]
    if got.tolist() == want:
        return
    i, j = next((i, j) for i in range(len(q_pos)) for j in range(len(k_pos)) if bool(got[i, j]) != want[i][j])
    q, k = q_pos[i], k_pos[j]
    say = {True: "sees", False: "does not see"}
    symptom = f"the query at {q} {say[bool(got[i, j])]} the key at {k}, and {'should' if want[i][j] else 'should not'}"
    pairs = [(i, q, j, k) for i, q in enumerate(q_pos) for j, k in enumerate(k_pos)]
    where, cause = recognised(
        RULES,
        lambda sees: got.flatten().tolist() == [sees(q, k, i, j, head, w, r) for i, q, j, k in pairs],
        ("the three conditions", "no common mistake fits: same segment, q kept, k kept; p % w % rho == head % rho"),
    )
    raise Wrong(symptom, where, cause)


seen = Checker(
    "9a seen",
    value=cases(_seen, (range(8), range(8), 0, 4, 2), (range(8), range(8), 1, 4, 2)),
    adversarial=cases(
        _seen,
        (range(14), range(14), 1, 7, 3),
        (range(12), range(12), 5, 6, 3),
        (range(6, 11), range(9, 16), 1, 8, 2, "queries at 6 to 10, keys at 9 to 15"),
        ([1, 4, 7, 10], [0, 2, 3, 10, 11], 1, 6, 3, "queries at 1, 4, 7, 10, keys at 0, 2, 3, 10, 11"),
        (range(5), range(5), 3, 3, 1),
    ),
)

# ---- 9b: dilated_ring(comm, q, k, v, positions, head, configurations, mask) -> out, lse -----------------------------


class Given(NamedTuple):
    """One run of 9b."""

    case: oracle.Case
    head: int
    configurations: Configurations


def _counts(given: Given, sees: Callable[..., bool] | None = None) -> Tensor:
    """(n, S, S): for each configuration, which queries see which keys, 1.0 or 0.0; or by a rule of RULES."""
    S = given.case.S
    number = {int(p): i for own in given.case.positions for i, p in enumerate(own)}  # its row in its shard
    C = torch.zeros(len(given.configurations), S, S, dtype=torch.float64)
    for n, (w, r) in enumerate(given.configurations):
        for q in range(S):
            for k in range(S):
                if sees is None:
                    C[n, q, k] = _sees(q, k, given.head, w, r)
                else:
                    C[n, q, k] = sees(q, k, number[q], number[k], given.head, w, r)
    return C


def _softmax(given: Given, C: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over scores with multiplicities C (S, S): out (1, 1, S, D), lse (1, 1, S)."""
    q, k, v = (t.double() for t in given.case[:3])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weight = torch.exp(torch.einsum("bhid,bhjd->bhij", q, k) * scale) * C
    total = weight.sum(-1, keepdim=True)
    out = torch.einsum("bhij,bhjd->bhid", weight, v) / total.clamp(min=1e-300)
    lse = total.clamp(min=1e-300).log().masked_fill(total == 0, -torch.inf)
    return out, lse.squeeze(-1)


def _allowed(given: Given) -> Tensor:
    i = torch.arange(given.case.S)
    return given.case.mask(i[:, None], i[None, :]).double()


def _mistakes(given: Given) -> Iterator[tuple[str, str, tuple[Tensor, Tensor]]]:
    """Where to look, the cause, and the out and lse that a mistake gives."""
    C, allowed, S = _counts(given), _allowed(given), given.case.S
    several = len(given.configurations) > 1
    yield (
        "where the result of rl.merge goes",
        "nothing is in the result. merge returns a new one and changes neither of its arguments: "
        "result = rl.merge(result, ...)",
        _softmax(given, torch.zeros(S, S)),
    )
    D = given.case.q.shape[-1]
    for scale, cause in (
        (8**-0.5, f"that of the notebook's cells is for D = 8; here D is {D}"),
        (1.0, "scores are not scaled"),
        (D**0.5, "scores are multiplied by the root of D"),
    ):
        yield (
            "the scale that attend is given",
            f"{cause}: q.shape[-1] ** -0.5",
            _softmax(given, C.sum(0) * allowed, scale),
        )
    number = torch.zeros(S, dtype=torch.int64)
    for own in given.case.positions:
        number[own] = torch.arange(len(own))
    by_row = given.case.mask(number[:, None], number[None, :]).double()
    if several:
        mixing = "how configurations are mixed"
        yield (
            mixing,
            "a key that two configurations keep counts once, as under the union of their masks. It counts twice: merge "
            "the partial result of each configuration",
            _softmax(given, C.amax(0) * allowed),
        )
        for n in range(len(given.configurations)):
            which = "first" if n == 0 else "last"
            yield (
                "the loop over configurations",
                f"only the {which} configuration has an effect: merge every one into the same result",
                _softmax(given, C[n] * allowed),
            )
        parts = [_softmax(given, c * allowed) for c in C]
        outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
        lse = torch.logsumexp(lses, 0)
        yield mixing, "their mean is taken. Their lse say how much each counts: rl.merge", (outs.mean(0), lse)
        yield mixing, "their outs are added up. rl.merge weights them by lse", (outs.sum(0), lse)
    for travels, cause in (
        (lambda p: _keeps(p, given.head, *given.configurations[0]), "only rows of the first configuration travel"),
        (
            lambda p: any(_from_0(p, given.head, r) for _, r in given.configurations),
            "what travels is counted from the start of the sequence, p % rho. Each segment counts anew: p % w % rho",
        ),
    ):
        there = torch.tensor([travels(p) for p in range(S)], dtype=torch.float64)
        yield "which rows are selected before they are sent", cause, _softmax(given, C.sum(0) * allowed * there)
    yield (
        "what the mask is given",
        "the mask compares row numbers of two shards. It wants positions: a row number says nothing about before and "
        "after, and tokens see their future",
        _softmax(given, C.sum(0) * by_row),
    )
    rows = _counts(given, BY_ROW.sees).sum(0)
    for seen_by, what in ((allowed, ""), (by_row, " The mask compares rows, too")):
        yield (
            "what is counted: rows or positions",
            "each rank counts the rows of its chunk from 0, so it keeps other rows than one device, and cuts segments "
            f"at its borders. Count positions[rank].{what}",
            _softmax(given, rows * seen_by),
        )
    for rule in RULES:
        if rule is not BY_ROW:
            yield rule.where, rule.cause, _softmax(given, _counts(given, rule.sees).sum(0) * allowed)
    yield "the mask", "it is not used: visible = sees(...) & mask(q_pos, k_pos)", _softmax(given, C.sum(0))


def _run(fn: Callable, given: Given, where: str = "", cause: str = "") -> simulate.Ran:
    case = given.case
    shapes = (
        "which positions go with which rows of k and v",
        "k and v have kept rows only; the mask needs the positions of just these rows, of the rank where they began. "
        "And every rank passes on in every step, also when it sees nothing of what it holds",
    )
    whole = "|".join({str(len(own)) for own in case.positions})  # rows of a shard that nobody selected from
    instead = (
        (
            "only supports boolean masks|integer and Boolean-type",
            "what attend is given as visible",
            "it holds numbers, and attend wants a bool tensor. Comparisons give bool tensors, and so does & "
            "between two of them; .int(), .float(), a sum, or a product with numbers does not",
        ),
        (
            rf"tensors used as indices|which sent \[\(1, 1, ({whole}), ",
            "how k and v are cut down to kept rows",
            "all rows are sent, or the index is no bool tensor. With a bool tensor k[:, :, kept] takes the rows where "
            "it is True; numbers, 0 and 1 too, are taken for the numbers of rows",
        ),
        (
            "expects shapes",
            "",
            "ranks keep different numbers of rows. What arrives next is what rank - 1 holds now: the kept rows of rank "
            "(source - 1) % P",
        ),
    )
    shown = f"{case.input}, (w, rho) = {' and '.join(map(str, given.configurations))}, head {given.head}"
    args = *case.parts, case.positions, given.head, list(given.configurations), case.mask
    said = dict(input=shown, where=where, cause=cause, shapes=shapes, instead=instead)
    return simulate.run(fn, case.P, *args, **said)


def _given(
    S: int, P: int, configurations: Configurations, head: int = 0, mask: Mask = full, layout: Layout = contiguous
) -> Given:
    return Given(oracle.shards(S, P, 1, 1, 4, layout, seed=S + P, mask=mask), head, configurations)


def _values(fn: Callable, sizes: tuple, where: str = "", cause: str = "") -> None:
    """Holds out and lse of every rank against the definition; sizes: as for ``_given``."""
    given = _given(*sizes)
    case = given.case
    ran = _run(fn, given, where, cause)
    outs, lses = zip(*(parts(result, "out, lse", f"rank {rank} returns") for rank, result in enumerate(ran.results)))
    unselected = (
        "what is selected: only k and v travel",
        "out and lse have all rows, kept or not: those that the head does not keep stay in q; their out is 0 and their "
        "lse -inf",
    )
    for rank, q in enumerate(case.parts[0]):
        simulate.check_shapes(rank, ("out", "lse"), (outs[rank], lses[rank]), (q, q[..., 0]), lambda *_: unselected)
    want = _softmax(given, _counts(given).sum(0) * _allowed(given))
    wrong = simulate.wrong_ranks("out", outs, case.split(want[0]), 1e-5)
    name = "out"
    if not wrong:
        wrong, name = simulate.wrong_ranks("lse", lses, case.split(want[1], -1), 1e-5), "lse"
    if not wrong:
        return
    what = symptom({name: wrong}, case.P, (name,))
    if any("NaN" in problem for problem in wrong.values()):
        raise Wrong(
            what,
            "rows that see no key",
            "a softmax over nothing is 0 / 0. attend and merge give out 0 and lse -inf there",
        )

    def gives(known: tuple[Tensor, Tensor]) -> bool:
        out, lse = known
        return not simulate.wrong_ranks("out", outs, case.split(out), 1e-4) and (
            name == "out" or not simulate.wrong_ranks("lse", lses, case.split(lse, -1), 1e-4)
        )

    unknown = (
        "what is seen in each step: of which rank are the rows that are here?",
        "no common mistake fits. Check source = (rank - step) % P, and that both places use the same positions: "
        "which rows are kept before they are sent, and what the mask is given when they are here",
    )
    raise Wrong(what, *recognised(_mistakes(given), gives, unknown))


_ring_adversarial = cases(
    _values,
    (
        (11, 4, [(7, 3)], 4, causal),
        "length= of rotate: how many rows arrive",
        "ranks keep different numbers of rows. What arrives next is what rank source - 1 keeps",
    ),
    (
        (12, 3, [(5, 2), (12, 4)], 2, causal, zigzag),
        "which positions are used",
        "positions are taken to be neighbours; use positions[rank] as they are",
    ),
    ((12, 3, [(12, 3)], 2, full, striped),),
    ((3, 5, [(2, 1)], 0, causal),),
    ((8, 3, [(4, 2), (4, 2)], 0, causal),),
    ((7, 1, [(4, 2), (7, 3)], 1, causal),),
    ((8, 2, [(8, 4)], 3, causal),),
)


def _ring_cost(fn: Callable) -> None:
    P, S, configurations, head = 4, 32, [(8, 2), (16, 4)], 3
    given = _given(S, P, configurations, head)
    ran = _run(fn, given)
    kept = [[sum(_keeps(int(p), head, *c) for c in configurations) for p in own] for own in given.case.positions]

    def passing(times: Callable[[int], int]) -> list[int]:
        """Bytes of each rank, if a row that n configurations keep travels times(n) times."""
        rows = [sum(map(times, own)) for own in kept]
        return [2 * 4 * 4 * sum(rows[(rank - step) % P] for step in range(P - 1)) for rank in range(P)]

    want, sent = passing(bool), [ran.world.trace.bytes_sent(rank) for rank in range(P)]
    for times, where, cause in (
        (
            lambda n: 1,
            "what is sent",
            "whole shards travel, and rows that the head never keeps are hidden by the mask. Select k and v before the "
            "first rotate",
        ),
        (
            int,
            "what is sent for the second configuration",
            "each configuration sends its rows. A row that several keep has to travel once: send those that at least "
            "one of them keeps",
        ),
    ):
        if sent == passing(times):
            symptom = (
                f"the values are right, but rank 0 sends {sent[0]:,} bytes; the rows that are kept take {want[0]:,}"
            )
            raise Wrong(symptom, where, cause)
    simulate.check_messages(ran, P - 1, want)
    simulate.check_hidden(ran)


dilated_ring = Checker(
    "9b dilated_ring",
    value=cases(
        _values, ((9, 3, [(6, 2)], 1, full),), ((12, 3, [(12, 3)], 0, causal),), ((16, 4, [(4, 1), (8, 2)], 1, causal),)
    ),
    adversarial=_ring_adversarial,
    cost=_ring_cost,
)

# ---- Predictions and the quiz: computed by the library, not written down --------------------------------------------


@lru_cache(maxsize=8)
def _weights(configurations: Configurations, S: int) -> Tensor:
    """(S, S): what each query gives to each key if all scores are equal; values are unit vectors, so out has them."""
    q, v = torch.zeros(1, 1, S, 4, dtype=torch.float64), torch.eye(S, dtype=torch.float64)[None, None]
    return dilated_attention(q, q, v, *zip(*configurations, strict=True))[0, 0]


def _ranks_that_see_the_future(S: int, P: int, segment: int, rate: int) -> int:
    """If selection and causal mask go by rows of the chunk: on how many ranks some query sees a later position."""
    owned = [contiguous.positions(S, P, rank).tolist() for rank in range(P)]
    found = 0
    for own in owned:
        found += any(
            k > q and j <= i and _sees(i, j, 0, segment, rate)
            for i, q in enumerate(own)
            for other in owned
            for j, k in enumerate(other)
        )
    return found


def _percent_of_a_ring(configurations: Configurations, S: int = 4096, P: int = 4, G: int = 8) -> int:
    w, r = zip(*configurations, strict=True)
    share = costs.dilated_bytes(S, P, G, 64, w, r) / costs.ring_bytes(S, P, G, 64)
    return round(100 * share)


def detached_gradients() -> dict[str, float]:
    """How far dq, dk, dv are off (relative norm) if the mixing weights of two configurations are taken as constants."""
    S, D, configurations = 24, 4, ((8, 1), (24, 3))
    q, k, v, dout = (numbers(i, 1, 1, S, D).double() for i in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    given = Given(oracle.Case(*leaves, (), [torch.arange(S)], causal), 0, configurations)
    outs, lses = zip(*(_softmax(given, c * _allowed(given)) for c in _counts(given)), strict=True)
    weights = torch.softmax(torch.stack(lses), 0).unsqueeze(-1)
    found = {}
    for flows in (True, False):
        mixed = ((weights if flows else weights.detach()) * torch.stack(outs)).sum(0)
        found[flows] = torch.autograd.grad(mixed, leaves, dout, retain_graph=True)
    names = ("dq", "dk", "dv")
    return {n: float((a - b).norm() / a.norm()) for n, a, b in zip(names, found[True], found[False], strict=True)}


def _same_twice() -> float:
    """By how much lse grows if a configuration is given twice."""
    q, k, v = (numbers(i, 1, 1, 8, 4).double() for i in range(3))
    once, twice = (dilated_attention(q, k, v, [4] * n, [1] * n, return_lse=True)[1] for n in (1, 2))
    return round(float((twice - once).mean()), 2)


def _never_kept(S: int, heads: int, segment: int, rate: int) -> int:
    """Percent of positions that no head keeps."""
    kept = {p for head in range(heads) for part in Configuration(segment, rate).kept(head, S) for p in part}
    return round(100 * (S - len(kept)) / S)


def _sent_rows(S: int, P: int, segment: int, rate: int, heads: int) -> int:
    """Rows of k that rank 0 sends in a forward, counted in a run."""
    world = SimulatedWorld(P)
    x = [torch.zeros(1, heads, S, 1) for _ in range(3)]
    dilated_attention(*world.shard(*x), [segment], [rate])
    return world.trace.bytes_sent(0) // (2 * 4)


predict_weight = Prediction(
    "Weight of itself, in percent",
    lambda: round(100 * float(_weights(((1, 1), (2, 1)), 2)[0, 0])),
    "It counts twice, the neighbour once: softmax over (configuration, key) pairs.",
    tolerance=1,
    unit="%",
)
predict_rows = Prediction(
    "Rows that both keep",
    lambda: viz.dilated.rows(24, 4, 1, 24, 4, by_row=True)[0].count(viz.dilated.KEPT),
    "0, 4, 12 and 16. Ranks 1 and 3 begin at 6 and 18, which are no multiples of 4.",
)
predict_leaks = Prediction(
    "Ranks that see the future",
    lambda: _ranks_that_see_the_future(24, 4, 24, 4),
    "Row 0 of a later chunk looks as early as row 0 of a rank's own chunk; only the last rank has no later chunk.",
)
predict_bytes = Prediction(
    "Percent of a ring's bytes",
    lambda: _percent_of_a_ring(((64, 1), (1024, 16))),
    "The configuration of rate 1 keeps every row, so every row travels.",
    tolerance=1,
    unit="%",
)
predict_exact = Prediction(
    "The gradient that stays right",
    lambda: next(name for name, off in detached_gradients().items() if off < 1e-12),
    "dv needs the weights only; dq and dk need how these change, and the mixing weights are a part of that.",
)

quiz = Quiz(
    "Quiz 09",
    (lambda: sum(map(len, Configuration(8, 3).kept(4, 20))), "Head 4 starts at row 1."),
    (
        lambda: 2**16 * 2**16 // costs.dilated_pairs(2**16, [2**15], [16]),
        "Two halves of the sequence save a factor of 2, a 16th of the queries and of the keys 16 * 16.",
    ),
    (lambda: _never_kept(64, 2, 8, 4), "Offsets 0 and 1 of 4."),
    (_same_twice, "Every key counts twice: lse grows by log 2.", 0.02),
    (lambda: _sent_rows(64, 4, 16, 4, 2), "Four rows of each of two heads, three hops."),
)

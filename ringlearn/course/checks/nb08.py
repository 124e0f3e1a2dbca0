"""Exercises of notebook 08, ways to split a sequence: 8a gather_backward, 8b plan, 8c ulysses, 8d sent;
predictions and the quiz.

Oracles: autograd through dense attention in float64 for gradients, dense attention for outputs, the rules of a head
plan, counted, for 8b, and the messages that the library's strategies send for 8d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ... import costs
from ...attention import all_gather_attention, head_plan, ring_attention, ulysses_attention
from ...costs.compare import Problem, compare
from ...layouts import Layout, contiguous, striped, zigzag
from ...masks import Mask, causal, full
from ...worlds.simulated import SimulatedWorld
from ...worlds.trace import Hardware
from . import gradients, oracle, simulate
from .checker import Checker, Wrong, call, cases, difference, number, per_rank
from .gradients import GROUPED, Given, Mistake, added, against_autograd, contributions, make, symptom
from .mistakes import Reason, recognised
from .oracle import Case
from .predictions import Prediction, Quiz

# ---- 8a: gather_backward(comm, dout, q, k, v, out, lse, positions, mask) -> dq, dk, dv -------------------------------


_LENGTHS = "lengths= of all_gather, shapes= of all_to_all, where reduce_scatter's list is cut"
INSTEAD = (
    ("expects shapes.*heads do not", _LENGTHS, ""),
    (
        r"expects shapes \[(\((\d+, ){0,2}\d*\)|\d)",
        "shapes= of all_to_all",
        "a shape here has four numbers, as the tensor that arrives: (1, heads, rows, D)",
    ),
    (
        "expects shapes",
        _LENGTHS,
        "shards differ in length. From rank i arrive len(positions[i]) rows; to rank i go the rows of its positions",
    ),
    (
        "never awaited it|disagree",
        "which messages are awaited",
        "each all_gather, all_to_all and reduce_scatter needs an await, on every rank",
    ),
    (
        "message that has not arrived|coroutine",
        "",
        "all_gather, all_to_all and reduce_scatter return at once; what they bring is there after `await`",
    ),
    (
        "The size of tensor a|shapes cannot be multiplied",
        "",
        "shapes do not fit. What arrives from other ranks are other rows: torch.cat(..., 2) puts them together; what "
        "comes back are other heads: torch.cat(..., 1)",
    ),
    (
        "too many values to unpack",
        "",
        "a tensor has a dim too many: lse and delta are (B, H, n), so (dout * out).sum(-1), without keepdim",
    ),
    (
        "reduce_scatter.*(got one of shape|expected)",
        "",
        "a list with a part for each rank: of dk, dv of all rows the parts are dk.split(lengths, 2)",
    ),
    (
        "got one of shape",
        "",
        "a list with a part for each rank: there x[:, its heads], back out.split(lengths, 2)",
    ),
    (
        "deadlock",
        "which ranks get to each message",
        "all ranks take part in every all_gather, all_to_all and reduce_scatter, also those with nothing",
    ),
)


def _run_backward(fn: Callable, given: Given, where: str = "", cause: str = "") -> simulate.Ran:
    def reason(name: str, got: Tensor | None, like: Tensor) -> Reason:
        if got is None:
            return "what the messages give", "all_gather gives a list, reduce_scatter a tensor, after `await`"
        if got.shape[2] == given.case.S != like.shape[2]:
            cause = "they are still those of all ranks' keys: each rank gets the sum for its own, by reduce_scatter"
            return "what becomes of dk, dv of all rows", cause
        if got.shape[2] != like.shape[2]:
            return CUT
        return "what is returned as " + name, GROUPED

    return gradients.run(fn, given, reason, where=where, cause=cause, instead=(_TILE, *INSTEAD))


_TILE = (
    "The size of tensor a|shapes cannot be multiplied",
    "",
    "shapes do not fit. The tile is this rank's queries against all keys: visible has a row for each of "
    "positions[comm.rank] and a column for each of torch.cat(positions); gathered k and v are put together "
    "by torch.cat(..., 2)",
)
CUT = (
    "where dk, dv of all rows are cut",
    "shards differ in length: split(lengths, 2) with lengths = [len(p) for p in positions]",
)


def _gather_mistakes(given: Given) -> Iterator[Mistake]:
    """What known mistakes give, made from what the queries of each rank add to the keys of each rank."""
    P, table = given.case.P, contributions(given)
    every = range(P)
    dq, dk, dv = added(table)
    own, reduce = [[table[b][b][i] for b in every] for i in (1, 2)], "what becomes of dk, dv of all rows"
    yield (
        reduce,
        "a rank keeps what its own queries found for its own keys. The queries of all ranks met them: sum what all "
        "found, by reduce_scatter",
        (dq, *own),
    )
    mean = dq, [x / P for x in dk], [x / P for x in dv]
    yield reduce, "their mean is taken. A gradient is the sum over all queries", mean
    yield "the return statement", "dk and dv are exchanged: `return dq, dk, dv`", (dq, dv, dk)
    for name, kept in (("dk", (own[0], dv)), ("dv", (dk, own[1]))):
        yield f"what becomes of {name}", f"{name} is not summed over ranks: reduce_scatter both", (dq, *kept)
    places = torch.arange(given.case.S).split(given.case.lengths)
    if len(set(given.case.lengths)) == 1:
        yield (
            "which part of dk, dv goes to which rank",
            "they go to another rank: part i belongs to rank i, in rank order, as they were gathered",
            (dq, dk[::-1], dv[::-1]),
        )
    yield (
        "what the mask is asked about",
        "gathered keys lie rank by rank, not in the order of their positions. Ask about torch.cat(positions), not "
        "about 0, 1, 2, ...",
        added(contributions(given, seen=lambda r, b: (given.case.positions[r], places[b]))),
    )
    for delta_of, lse_of, where, cause in (
        ("none", "row", "delta", "delta is missing: ds = p * (dp - delta), delta = (dout * out).sum(-1)"),
        ("row", "block", "lse", "lse is that of a part of the keys. Use the lse that the forward returned"),
    ):
        dq, dk, dv = added(contributions(given, lse_of, delta_of))
        yield where, cause, (dq, dk, dv if lse_of == "block" else None)
    yield "the mask", "it is never applied", added(contributions(given.under(full)))


_gradients = against_autograd(
    _run_backward,
    _gather_mistakes,
    "what attend_backward is given: this rank's dout, q, lse, delta; all ranks' k and v",
    "no common mistake fits. Check the scale D ** -0.5, and mask(positions[comm.rank][:, None], "
    "torch.cat(positions)[None, :])",
)


_gather_value = cases(
    _gradients,
    ((6, 3, 1, 1, 4, causal),),
    (
        (12, 4, 4, 2, 4, causal),
        "the shapes: dk, dv have G heads, as k, v",
        "attend_backward sums dk, dv over the heads of a group already",
    ),
)
_gather_adversarial = cases(
    _gradients,
    ((10, 4, 2, 1, 4, causal), *CUT),
    (
        (12, 3, 2, 1, 4, causal, zigzag),
        "what the mask is asked about",
        "gathered keys lie rank by rank: their positions are torch.cat(positions)",
    ),
    ((3, 5, 1, 1, 4, causal),),
    ((5, 1, 2, 1, 4, causal),),
)


def _gather_cost(fn: Callable) -> None:
    P, S, H, G, D = 4, 16, 6, 2, 8
    ran = _run_backward(fn, make(S, P, H, G, D, full))
    shard = 2 * G * D * 4 * S // P  # bytes of k, v of one rank, and of their gradients
    enough = costs.all_gather_bytes(S, P, G, D, itemsize=4, backward=True)

    def reason(sent: int) -> Reason:
        where, cause = (
            "what is sent",
            "k and v of this rank's rows, to all; dk, dv of the others' rows, to each its own",
        )
        if sent == enough + (P - 1) * shard:
            cause = "all_reduce brings every rank the sums for all keys. A rank needs those of its own: reduce_scatter "
            return "how dk, dv are summed", cause + "sends half as much"
        if sent > 3 * enough:
            cause = "something of all rows goes to all ranks: what a rank found for rank i's keys is needed by i alone"
        elif sent in (enough * H // G, enough * (H // G + 1) // 2):
            cause = "H heads travel in place of G: attend_backward takes k, v with G heads, and gives dk, dv with G"
        elif sent > enough:
            cause += "; nothing of q, dout, out or lse needs to travel"
        return where, cause

    simulate.check_bytes(ran, [enough] * P, reason)


gather_backward = Checker("8a gather_backward", value=_gather_value, adversarial=_gather_adversarial, cost=_gather_cost)

# ---- 8b: plan(H, G, P) -> for each rank a list of (range of query heads, key/value head) ------------------------


def _plan(fn: Callable, H: int, G: int, P: int) -> tuple[list[list[tuple[list[int], int]]], str]:
    """The learner's plan as lists, or Wrong if it is none."""
    shown = f"H = {H}, G = {G}, P = {P}"
    got = call(fn, H, G, P, input=shown, where="an index or a range", cause="some ranks may have no head")
    how = "a list of pairs (query heads, key/value head), such as [(range(0, 2), 0)]"
    plan = []
    for rank, mine in enumerate(per_rank(got, P, how)):
        try:
            plan.append([([int(h) for h in heads], int(g)) for heads, g in mine])
        except (TypeError, ValueError):
            raise Wrong(f"the entry of rank {rank} is {mine!r}", "what is put into the list", how) from None
    return plan, shown


def _check_plan(fn: Callable, H: int, G: int, P: int) -> None:
    plan, shown = _plan(fn, H, G, P)
    given = sorted(h for mine in plan for heads, _ in mine for h in heads)
    if given != list(range(H)):
        outside = [h for h in given if not 0 <= h < H]
        missing = [h for h in range(H) if h not in given]
        twice = [h for h in range(H) if given.count(h) > 1]
        cause = (
            "a query head is computed by one rank, so rank r's begin where those of rank r - 1 end. Key/value heads "
            "may be needed by several"
        )
        if outside:
            what = f"query head {outside[0]}, which is not there, is given to a rank"
        elif missing:
            what = f"no rank has query head {missing[0]}"
        else:
            what = f"query head {twice[0]} is given to {given.count(twice[0])} ranks"
        if (missing or outside) and H % P:
            cause = "what is left over when H is divided by P: H % P ranks get one head more"
        elif missing or outside:
            cause = (
                f"each rank computes {H // P} here, from first to stop - 1. They are counted in the whole call, from 0 "
                f"to {H - 1}, not in the rank or in the group"
            )
        raise Wrong(what, "where a rank's query heads begin and end", cause)
    for rank, mine in enumerate(plan):
        for heads, g in mine:
            wrong = [h for h in heads if h // (H // G) != g]
            if not heads:
                raise Wrong(
                    f"rank {rank}: the pair of key/value head {g} has no query head",
                    "which key/value heads get a pair",
                    "a key/value head that none of the rank's query heads uses has no pair: leave it out",
                )
            if wrong:
                what = f"query head {wrong[0]} is paired with key/value head {g}"
                cause = f"query heads {g * (H // G)} to {(g + 1) * (H // G) - 1} use it: h uses h // (H // G)"
                if g == wrong[0] % G:
                    cause = "heads of a group are neighbours, h // (H // G), not every G-th one, h % G"
                elif len(mine) == 1:
                    cause = "a block of query heads may lie in two groups: then it needs two pairs"
                raise Wrong(f"rank {rank}: {what}", "which key/value head goes with them", cause)
        if len({g for _, g in mine}) < len(mine):
            raise Wrong(
                f"rank {rank} has {len(mine)} pairs with {len({g for _, g in mine})} key/value heads",
                "how query heads of a group are put together",
                "one pair for each key/value head: k, v of a head would travel twice to the same rank",
            )
    each = [sum(len(heads) for heads, _ in mine) for mine in plan]
    if max(each) - min(each) > 1:
        raise Wrong(
            f"the ranks have {each} query heads: they differ by {max(each) - min(each)}",
            "who gets what is left over when H is divided by P" if H % P else "which heads are dealt out",
            "with more ranks than heads H ranks have one each, and the others none"
            if P > H
            else "all wait for the rank with the most heads: spread them, H % P ranks get one more"
            if H % P
            else f"query heads are: {H // P} for each rank. Key/value heads follow them, and may go to several ranks",
        )
    order = [h for mine in plan for heads, _ in mine for h in heads]
    if order != list(range(H)):
        raise Wrong(
            f"the query heads come in the order {order}",
            "which heads a rank gets",
            "a rank's heads are neighbours, in rank order: so they share key/value heads, and what comes back is "
            "put together by torch.cat",
        )


plan = Checker(
    "8b plan",
    value=cases(_check_plan, (4, 4, 2), (8, 4, 4), (8, 2, 4)),
    adversarial=cases(_check_plan, (6, 2, 4), (7, 7, 4), (6, 3, 4), (8, 1, 3), (3, 1, 5), (8, 8, 1), (32, 8, 12)),
)

# ---- 8c: ulysses(comm, q, k, v, positions, mask) -> out --------------------------------------------------------------


def ulysses_mistakes(case: Case) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Where to look, the cause, and the out of each rank that a mistake gives, where rows or heads are gathered."""
    H, G, P = case.H, case.G, case.P
    place = torch.cat(case.positions).argsort()  # of each position, when the shards lie one behind the other
    lies = (
        "gathered rows lie rank by rank, in the order of the ranks: their positions are torch.cat(positions), not 0, "
    )
    yield "the positions of the keys that the mask gets", lies + "1, 2, ...", case.outs(k_at=place)
    yield "what the mask is given", lies + "1, 2, ...", case.outs(q_at=place, k_at=place)
    yield "the mask", "it is never applied", case.outs(mask=full)
    yield "the scale", "the scores are not multiplied by scale, D ** -0.5", case.outs(scale=1.0)
    paired = "which key/value head goes with which query heads"
    side = "query heads of one group lie side by side: head h uses key/value head h // (H // G), not h % G"
    permuted = [h for g in range(G) for h in range(g, H, G)]
    yield paired, side, case.outs(heads=lambda h: h % G)
    yield paired, side, [out[:, permuted] for out in case.outs(heads=lambda h: h % G)]
    first = {h: mine[0][1] for mine in head_plan(H, G, P) for heads, _ in mine for h in heads}
    cause = "all query heads of a rank take its first key/value head: go through the pairs of its plan"
    yield paired, cause, case.outs(heads=first.get)
    yield paired, "every query head takes key/value head 0", case.outs(heads=lambda h: 0)
    cause = "they come back in the opposite order; put them together in rank order: torch.cat(..., 1)"
    yield "how the heads that come back are put together", cause, [out.flip(1) for out in case.outs()]
    yield "which rows go back to which rank", "rank i gets the rows of its own positions", case.outs()[::-1]


# The plan counts heads in the whole call, and a program takes these numbers for places in what has arrived.
_GLOBAL_HEADS = (
    r"ZeroDivisionError|IndexError: index \d+ is out of bounds|which sent \[\(1, 0,",
    "",
    "the plan counts heads from 0 to H - 1 in the whole call, but what has arrived are this rank's heads only, and "
    "they count from 0. The query heads of its first pair come first, and the key/value head of its pair i is number i",
)


def _run_ulysses(fn: Callable, case: Case, where: str = "", cause: str = "") -> simulate.Ran:
    instead = INSTEAD if cause else (_GLOBAL_HEADS, *INSTEAD)  # the first cases, in which nothing else is odd
    ran = simulate.run(fn, case.P, *case.args, input=case.input, where=where, cause=cause, instead=instead)

    def reason(name: str, got: Tensor | None, like: Tensor) -> Reason:
        if got is not None and got.shape[2] == case.S != like.shape[2]:
            return "what happens after attention", TRADE_BACK
        if got is not None and got.shape[2] == like.shape[2]:
            cause = "other ranks bring other heads: torch.cat(..., 1)"
            return "along which dim what comes back is put together", cause
        if got is not None and got.shape[1] == like.shape[1]:
            cause = "rows on the way there (2), heads on the way back (1)"
            return "along which dim tensors are put together", cause
        return "what is returned", "out, of this rank's rows and all H heads"

    for rank, result in enumerate(ran.results):
        simulate.check_shapes(rank, ("out",), (result,), (case.parts[0][rank],), reason)
    return ran


TRADE_BACK = (
    "these are all rows of some heads: trade back, by all_to_all, and put together what comes back along the heads, "
    "torch.cat(..., 1)"
)


def _ulysses_values(fn: Callable, sizes: tuple, where: str = "", cause: str = "") -> None:
    case = _ulysses_case(*sizes)
    ran = _run_ulysses(fn, case, where, cause)
    wrong = simulate.wrong_ranks("out", ran.results, case.outs(), 1e-5)
    if not wrong:
        return
    unknown = (
        where or "which heads and rows go to whom, and in which order they are put together",
        cause
        or "no common mistake fits. There: to rank r go its heads of q, and its key/value heads of k and v. Back: "
        "to rank r go the rows of its positions. The scale is D ** -0.5",
    )

    def gives(outs: list[Tensor]) -> bool:
        return all(difference("out", got, out, 1e-4) is None for got, out in zip(ran.results, outs))

    what = symptom({"out": wrong}, case.P, ("out",))
    raise Wrong(what, *recognised(ulysses_mistakes(case), gives, unknown))


def _ulysses_case(S: int, P: int, H: int, G: int, mask: Mask, layout: Layout = contiguous) -> Case:
    return oracle.shards(S, P, H, G, 4, layout, seed=S + P, mask=mask)


_ulysses_adversarial = cases(
    _ulysses_values,
    (
        (10, 4, 4, 4, causal),
        "shapes= of all_to_all, and where out is cut",
        "from rank i come len(positions[i]) rows of your heads; back come your rows of rank i's heads",
    ),
    (
        (16, 4, 4, 4, causal, zigzag),
        "what the mask is given",
        "the rows that arrive lie rank by rank: their positions are torch.cat(positions)",
    ),
    (
        (8, 4, 8, 2, causal),  # two ranks share a key/value head
        "which heads of k and v go to which rank",
        "by the plan: a key/value head goes to every rank that has a query head of its group",
    ),
    (
        (9, 4, 6, 2, causal, striped),  # nothing divides
        "ranks whose query heads lie in two groups",
        "such a rank has two pairs in its plan, and so two key/value heads",
    ),
    (
        (6, 2, 6, 3, causal),  # a rank has a group and half of another
        "the calls of attend",
        "query heads are shared out evenly over the key/value heads of a call, and these pairs differ in size: attend "
        "once for each pair of the plan",
    ),
    ((5, 1, 2, 1, causal),),
)


def _ulysses_cost(fn: Callable) -> None:
    P, S, H, G, D = 4, 16, 16, 2, 4
    ran = _run_ulysses(fn, _ulysses_case(S, P, H, G, full))
    row = D * 4 * (P - 1) * S // P
    enough = row * (2 * H // P + 2)  # q and out of H / P heads, k and v of one

    def reason(sent: int) -> Reason:
        cause = "to each rank its heads of q, k, v; to each rank its rows of out"
        if sent == row * (2 * H // P + 2 * H // P):
            cause = "k and v were expanded to H heads before they travel: send the plan's key/value heads, one each"
        elif sent == row * (2 * H // P + 2 * G):
            cause = "all key/value heads go to all ranks: a rank needs those of its plan only"
        elif sent > 2 * enough:
            cause = "something goes to all ranks that one of them needs: all_to_all, not all_gather"
        elif sent == row * 2 * G:
            cause = "k and v are gathered, and q stays: that is all-gather attention. "
            cause += "Trade heads for rows, by all_to_all"
        return "what is sent to whom", cause

    simulate.check_bytes(ran, [enough] * P, reason)


ulysses = Checker(
    "8c ulysses",
    value=cases(_ulysses_values, ((6, 3, 3, 3, full),), ((8, 4, 4, 4, causal),), ((8, 2, 8, 4, causal),)),
    adversarial=_ulysses_adversarial,
    cost=_ulysses_cost,
)

# ---- 8d: sent(way, S, P, H, G, D, e) -> bytes that a rank sends in the forward ---------------------------------------

_ATTENTION = {"all-gather": all_gather_attention, "ring": ring_attention, "ulysses": ulysses_attention}
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@lru_cache(maxsize=64)
def counted(way: str, S: int, P: int, H: int, G: int, D: int, e: int) -> int:
    """Bytes that rank 0 sends in the forward of a strategy, from the trace of a run on tensors without numbers."""
    world = SimulatedWorld(P, device="meta", count_memory=False)
    x = [torch.empty(1, heads, S, D, dtype=_DTYPES[e], device="meta") for heads in (H, G, G)]
    _ATTENTION[way](*world.shard(*x))
    return world.trace.bytes_sent(0)


def _other_counts(way: str, S: int, P: int, H: int, G: int, D: int, e: int) -> Iterator[tuple[str, str, float]]:
    """Where to look, the cause, and the number that a mistake gives."""
    n = S // P
    if way != "ulysses":
        right = (P - 1) * 2 * G * n * D * e
        yield "how many heads travel", "H in place of G: only key/value heads travel", right * H / G
        yield "what travels", "one tensor is counted where k and v travel", right / 2
        yield "how many tokens a shard has", "S in place of n = S / P", right * P
        yield "how often it is sent", "P in place of P - 1: a rank sends nothing to itself", right * P / (P - 1)
        yield "how often it is sent", "the shard is counted once, but it goes on P - 1 times", right / (P - 1)
        return
    share, keys = (P - 1) / P * n, max(G, P)
    there, lse = D * e * (H + 2 * keys), 4 * H
    yield "what comes back", "lse is missing: float32, 4 bytes for each row and query head", share * (there + H * D * e)
    yield "the bytes of lse", "it is float32, 4 bytes, whatever q is", share * (there + H * D * e + e * H)
    yield "what comes back", "out and lse are missing: what was computed goes back", share * there
    missing = "k and v are missing" + (", or their heads are counted as G // P, which is 0 here" if G < P else "")
    yield "what goes there", missing, share * (2 * H * D * e + lse)
    yield "what goes there", "one of k, v is missing", share * (D * e * (2 * H + keys) + lse)
    yield (
        "what of its own heads and rows a rank sends",
        "it keeps one of P parts: (P - 1) / P of its rows' heads travel",
        n * (there + H * D * e + lse),
    )
    if G < P:
        yield (
            "key/value heads, where G < P",
            "a head goes to every rank that needs it: P ranks need one each, so max(G, P) are sent",
            share * (D * e * (2 * H + 2 * G) + lse),
        )
    if G < H:
        yield (
            "how many heads of k and v travel",
            "H are counted; of k and v those that the ranks need travel, max(G, P)",
            share * (D * e * 4 * H + lse),
        )
    yield "how many tokens a shard has", "S in place of n = S / P", P * share * (there + H * D * e + lse)


def _sent(fn: Callable, way: str, S: int, P: int, H: int, G: int, D: int, e: int) -> None:
    shown = f'"{way}", S = {S}, P = {P}, H = {H}, G = {G}, D = {D}, e = {e}'
    got = call(fn, way, S, P, H, G, D, e, input=shown)
    want = counted(way, S, P, H, G, D, e)
    said = number(got, "bytes that one rank sends: one number")
    if said == want:
        return
    others = _other_counts(way, S, P, H, G, D, e) if P > 1 else ()
    unknown = (
        "each tensor that travels: its heads, its rows, its bytes per number",
        "no common mistake fits this number",
    )
    where, cause = recognised(others, lambda value: abs(said - value) < 0.5, unknown)
    raise Wrong(f"you give {said:,.0f}, a run sends {want:,}", where, cause)


sent = Checker(
    "8d sent",
    value=cases(
        _sent,
        ("all-gather", 64, 4, 6, 2, 16, 2),
        ("ring", 64, 4, 6, 2, 16, 2),
        ("ulysses", 64, 4, 8, 4, 16, 2),
        ("ulysses", 64, 2, 8, 4, 16, 4),
    ),
    adversarial=cases(
        _sent,
        ("ulysses", 64, 8, 24, 2, 16, 2),
        ("ulysses", 64, 8, 8, 1, 16, 4),
        *((way, *sizes) for way in _ATTENTION for sizes in ((64, 1, 8, 2, 16, 2), (4096, 8, 32, 8, 128, 2))),
    ),
)

# ---- Predictions and the quiz: computed by the library, not written down --------------------------------------------


def times_the_ring(P: int, H: int, G: int, D: int = 128) -> float:
    """The bytes of a Ulysses forward over those of a ring, bf16."""
    S = 64 * P
    return costs.ulysses_bytes(S, P, H, G, D) / costs.ring_bytes(S, P, G, D)


def over_mean(attention: Callable, P: int, layout: Layout, S: int = 256, H: int = 8) -> float:
    """Makespan over an even share of a causal call, by the virtual clock, on a wire that takes no time."""
    world = SimulatedWorld(P, hardware=Hardware(1.0, 1e300, 0.0), device="meta", count_memory=False)
    x = [torch.empty(1, H, S, 4, device="meta") for _ in range(3)]
    attention(*world.shard(*x, layout=layout), mask=causal)
    return world.trace.makespan() * P / sum(world.trace.flops(rank) for rank in range(P))


def _more_across(S: int, shape: tuple[int, int], H: int, G: int) -> str:
    """Of hybrid and double ring, which sends more bytes across nodes in the forward."""
    found = {row.name: row.sent["outer"] for row in compare(Problem(S, shape, H, G, 128))}
    if found["hybrid"] == found["double ring"]:
        return "same"
    return max(("hybrid", "double ring"), key=found.__getitem__)


predict_scores = Prediction(
    "GiB of scores",
    lambda: costs.ring_self_attention_memory(131_072, 8, 1, 1, 128)["scores"] // 2**30,
    "S / P rows of S float32 numbers: 16,384 x 131,072 x 4 bytes.",
    unit="GiB",
)
predict_times = Prediction(
    "Ulysses over ring, bytes",
    lambda: round(times_the_ring(2, 32, 8), 2),
    "Half of q and out, 32 heads each, and of k and v travels; the ring sends k and v, 8 heads each, once.",
    tolerance=0.3,
)
predict_even = Prediction(
    "Ulysses, causal, contiguous",
    lambda: round(over_mean(ulysses_attention, 4, contiguous), 2),
    "Every rank has all rows: the same triangle for each of its heads.",
    tolerance=0.05,
)
predict_idle = Prediction(
    "Ranks without work",
    lambda: sum(not mine for mine in head_plan(8, 2, 12)),
    "Eight query heads are computed by eight ranks; nothing is left for the other four.",
)
predict_across = Prediction(
    "More bytes across nodes",
    lambda: _more_across(131_072, (2, 4), 32, 8),
    "Both pass on a node's keys once, and every rank carries its part: of the heads, or of the rows.",
)

quiz = Quiz(
    "Quiz 08",
    (lambda: costs.all_gather_bytes(4096, 4, G=2, D=64), "(P - 1) 2 G n D e = 3 x 2 x 2 x 1,024 x 64 x 2."),
    (
        lambda: next(P for P in (2, 4, 8, 16, 32) if times_the_ring(P, 32, 8) < 1),
        "(H + G) / (P G) = 5 / P falls below 1 after 5.",
    ),
    (lambda: round(times_the_ring(8, 8, 1), 1), "Eight ranks need one key/value head each: (8 + 8) / (8 x 1).", 0.05),
    (
        lambda: sum(len(mine) for mine in head_plan(6, 2, 4)),
        "Blocks of 2, 2, 1, 1 query heads; the second lies in both groups.",
    ),
    (
        lambda: round(100 * over_mean(all_gather_attention, 4, contiguous)),
        "(2 P - 1) / P, as in a ring: the last rank's queries see the most.",
        1,
        "%",
    ),
    (
        lambda: next(r.messages for r in compare(Problem(4096, (4, 8), 32, 8, 128)) if r.name == "double ring") - 4 * 7,
        "Between 4 nodes there are 3 hops; the other 28 messages stay inside.",
    ),
)

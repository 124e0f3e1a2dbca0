"""Checkers of notebook 06: where the awaits stand, when a hop hides, how to read a timeline.

Oracles: sums of integers and the virtual clock for the awaits; bisection over exact counts of operations and bytes for
the threshold; a count of instants on a fine grid for the timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import costs
from ...worlds.trace import Event, Hardware
from ...worlds.world import PerRank
from .. import records
from ..rehearsal import rehearse
from .checker import Checker, Wrong, call, cases, number, parts
from .nb03 import shards_held
from .oracle import numbers
from .predictions import Prediction, Quiz
from .simulate import Ran, run

HIDING = "2026-11-28-hiding-2-h200.json"

# ---- 6a: patient(comm, keys, work) -> the gradients of this rank's keys, in 23 units -------------------------------

N = 8  # numbers in a block of keys; in bfloat16 they take 1 unit on the link, their float32 gradients 2
UNITS = Hardware(flops=1.0, bandwidth=2.0 * N, latency=2.0)
OWN, OTHER = 5, 7  # units that a step computes
KEYS, GRADS, LATENCY = 1, 2, 2


def keys(P: int) -> PerRank:
    """Each rank's keys: N times its rank + 1."""
    return PerRank(torch.full((N,), float(rank + 1), dtype=torch.bfloat16) for rank in range(P))


def work(comm: Any, keys: Tensor, step: int) -> Tensor:
    """What this rank's queries give the keys that are here: of rank r the digit 10^r times the keys."""
    comm.compute("backward", OWN if step == 0 else OTHER)
    return 10.0**comm.rank * keys.float()


def _units(P: int) -> int:
    """The shortest time: all compute, and then the last gradients' way home, behind which nothing is left to do."""
    return OWN + (P - 1) * OTHER + (GRADS + LATENCY if P > 1 else 0)


INSTEAD = (
    (
        "never awaited it",
        "the handles that comm.rotate gave: is there an await for each, in the last step too?",
        "keys make P - 1 hops, and each is awaited in the loop; gradients make P: the last is awaited after the loop, "
        "or in the return",
    ),
    (
        "NoneType can't be used in 'await'",
        "",
        "in step 0 no gradients travel yet: await and add them from step 1 on",
    ),
    (
        "awaited twice",
        "",
        "a message arrives once. In the last step no keys are posted, so there are none to await: what is posted under "
        "an `if` is awaited under the same `if`",
    ),
    ("'Handle'", "", "comm.rotate returns a handle; what the message brings is there after `await`"),
)


def _ring(fn: Callable, P: int) -> Ran:
    return run(fn, P, keys(P), work, input=f"P = {P}", hardware=UNITS, instead=INSTEAD)


def _home(fn: Callable, P: int) -> None:
    ran = _ring(fn, P)
    for rank, got in enumerate(ran.results):
        want = (rank + 1) * sum(10.0**r for r in range(P))
        if not isinstance(got, Tensor):
            raise Wrong(
                f"rank {rank} returns {type(got).__name__}, not the gradients of its keys",
                "the return statement",
                "the last message brings them home: return what its await gives",
            )
        if got.shape != (N,):
            raise Wrong(
                f"rank {rank} returns a tensor of shape {tuple(got.shape)}, expected ({N},)",
                "the return statement",
                "the gradients have the shape of the keys",
            )
        found = float(got[0])
        if not torch.equal(got.float(), torch.full((N,), want)):
            raise Wrong(
                f"rank {rank} returns {found:g}, expected {want:g}: "
                + _contributions(found / (rank + 1), P, found % (rank + 1) == 0),
                "what is added to what, and which keys `work` gets in which step",
                "work(keys that are here), plus what the ranks before this one found for the *same* keys: the "
                "gradients that arrive in this step; then send the sum on",
                input=f"P = {P}; keys of rank r are r + 1, and what rank r contributes is 10^r times the keys",
            )


def _contributions(digits: float, P: int, whole: bool) -> str:
    """Which ranks' contributions are missing in a sum of powers of ten."""
    if not whole or digits != int(digits):
        return "these are not (only) the gradients of its own keys"
    found = [int(digits) // 10**r % 10 for r in range(P)]
    if len(set(found)) == 1:
        return "these are the whole gradients of another rank's keys"
    wrong = {r: f"in it {n} times" if n else "missing" for r, n in enumerate(found) if n != 1}
    said = ", ".join(f"rank {r}'s contribution is {what}" for r, what in wrong.items())
    return said or "these are not the gradients of its own keys"


def _sent(ran: Ran, rank: int) -> tuple[list[Event], list[Event]]:
    """Messages of keys and of gradients, which are twice as large."""
    sent = ran.world.trace.select("send", rank)
    return [e for e in sent if e.nbytes == 2 * N], [e for e in sent if e.nbytes == 4 * N]


def _ring_cost(fn: Callable) -> None:
    for P in (3, 2, 5):
        ran = _ring(fn, P)
        blocks, grads = _sent(ran, 0)
        others = len(ran.world.trace.select("send", 0)) - len(blocks) - len(grads)
        if others or (len(blocks), len(grads)) != (P - 1, P):
            more = f" and {others} of another size" if others else ""
            raise Wrong(
                f"the values are right, but rank 0 sends {len(blocks)} messages of keys and {len(grads)} of gradients"
                f"{more}, expected {P - 1} and {P}",
                "the messages of the last step, and what is sent together",
                "after the last step nobody needs keys any more: P - 1 hops for them, P for the gradients, one "
                "message each (the keys stay bfloat16, the gradients float32)",
            )
        taken = ran.seconds()
        if taken > _units(P):
            symptom, where, cause = _why_late(ran)
            raise Wrong(f"the values are right; {taken:g} units, {_units(P)} are possible: {symptom}", where, cause)


def _why_late(ran: Ran) -> tuple[str, str, str]:
    """The first wait of rank 0 behind which it still has something to compute, in words."""
    events = ran.world.trace.select(rank=0)
    last = max(i for i, e in enumerate(events) if e.kind == "compute")
    received = {e.name: e for e in events if e.kind == "recv"}
    posted = {e.name: i for i, e in enumerate(events) if e.kind == "send"}
    for i, event in enumerate(events):
        if event.kind != "wait" or event.seconds == 0 or i > last:
            continue
        carries_keys = received[event.name].nbytes == 2 * N
        what = "keys" if carries_keys else "gradients"
        arrived = [j for j in range(i) if events[j].kind == "wait" and received[events[j].name].nbytes == 2 * N]
        between = [e for e in events[posted[event.name] : i] if e.kind == "compute"]
        before = [e for e in events[max(arrived, default=0) : posted[event.name]] if e.kind == "compute"]
        symptom = f"rank 0 waits {event.seconds:g} for {what} ({event.name}), and has more to compute after that"
        if between or (carries_keys and before):
            return (
                symptom,
                f"the line that posts the {what}: could it stand further up?",
                "a message can go as soon as what it carries is there: keys when they have arrived, gradients when the "
                "sum is made",
            )
        if carries_keys:
            return (
                symptom,
                "the await of the next keys: what stands between it and its rotate?",
                "this step computes with the keys that are here. The next ones are needed when it is over: await them "
                "at the end of the step",
            )
        return (
            symptom,
            "the await of the travelling gradients: what stands between it and their rotate?",
            "they are needed when this step's own contribution is made: compute with `work` first, then await and add",
        )
    return (
        "rank 0 does not wait before its last computation; the link does",
        "the order in which messages are posted: a link sends one after the other",
        "what is needed first must be posted first",
    )


patient = Checker("6a patient", value=cases(_home, (3,)), adversarial=cases(_home, (1,), (2,), (5,)), cost=_ring_cost)

# ---- 6b: threshold(H, G, itemsize, tflops, gbit, causal, backward) -> tokens per rank --------------------------------


def _oracle_threshold(
    H: int, G: int, itemsize: int, tflops: float, gbit: float, causal: bool, backward: bool
) -> float:  # fmt: skip
    """Bisection: the length at which a step's operations and its bytes take the same time."""
    D, low, high = 64, 0.0, 1e12
    for _ in range(200):
        n = (low + high) / 2
        compute = (10 if backward else 4) * n * n * H * D / (2 if causal else 1) / (tflops * 1e12)
        message = 2 * n * G * D * (itemsize + (4 if backward else 0)) / (gbit * 1e9 / 8)
        low, high = (n, high) if compute < message else (low, n)
    return low


# got / expected -> the likely cause, for what is exactly such a factor off.
_FACTORS = {
    1 / 8: "gbit is in bits: 8 of them are a byte, and itemsize is in bytes",
    1 / 64: "gbit is in bits: divide by 8, do not multiply",
    8.0: "bits are turned into bytes twice",
    1e12: "a TFLOP is 1e12 operations",
    1e-9: "a gigabit is 1e9 bits",
    1e3: "tera is 1e12 and giga is 1e9: their ratio is 1e3, in whichever unit you count",
    1e-3: "tera is 1e12 and giga is 1e9: their ratio is 1e3, in whichever unit you count",
    128.0: "head dim is in the operations and in the bytes: it cancels",
}


def _threshold(fn: Callable, where: str, cause: str, factors: dict[float, str] | None = None, **given: Any) -> None:
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    want = _oracle_threshold(**given)
    got = call(fn, *given.values(), input=shown, where=where, cause=cause)
    got = number(got, "tokens per rank: one number, whole or not")
    if abs(got - want) <= max(1.0, 1e-3 * want):
        return
    for factor, why in ({**_FACTORS, **(factors or {})}).items():
        if abs(got / want / factor - 1) < 1e-3:
            shown = f"{factor:,.4g}" if factor >= 1 else f"1/{1 / factor:,.4g}"
            where, cause = f"the factor by which you are off, {shown}", why
            break
    raise Wrong(f"you give {got:,.6g} tokens, expected {want:,.6g}", where, cause)


def _threshold_value(fn: Callable) -> None:
    plain = dict(itemsize=2, tflops=600.0, gbit=2000.0, causal=False, backward=False)
    where = "the n at which 4 n^2 H D operations take as long as 2 n G D itemsize bytes"
    once = (
        "a message counts once: a rank sends one and receives one *at the same time*, each on its own direction of the "
    )
    once += "link. And a multiply-add is two operations, which makes 4 n^2 H D for the two products"
    both = "k and v both travel: 2 n G D numbers"
    _threshold(
        fn, where, "formula (5), with everything in operations, bytes and seconds", {2.0: once, 0.5: both},
        H=8, G=8, **plain,
    )  # fmt: skip
    heads = "H query heads compute with G key/value heads, but only the G travel"
    _threshold(fn, heads, "the threshold has the factor G / H", {4.0: heads, 16.0: heads}, H=32, G=8, **plain)
    _threshold(
        fn, "itemsize", "the message grows with the bytes of an element: itemsize / 2", H=32, G=8,
        **{**plain, "itemsize": 4},
    )  # fmt: skip


def _threshold_adversarial(fn: Callable) -> None:
    check = partial(_threshold, fn)
    given = dict(H=32, G=8, itemsize=2, tflops=600.0, gbit=2000.0)
    half = "causal in a balanced layout: each step computes half, and its message is as large as before, so it takes "
    half += "twice as many tokens"
    check("causal=True", half, {0.5: half, 0.25: half}, **given, causal=True, backward=False)
    check(
        "backward=True: what is computed, and what travels",
        "five matrix products instead of two, 10 n^2 H D; besides k, v there are dk, dv: 2 n G D numbers of 4 bytes",
        {
            2 / 3: "per number of a shard 6 bytes travel, and you count 4: itemsize for k, v, plus 4 for dk, dv, which "
            "are float32 whatever itemsize is",
            4 / 3: "dk, dv travel in float32, but k, v still with itemsize bytes per number",
            1 / 3: "in the backward dk, dv travel too, in float32",
            1 / 2: "the backward has its own quotient: 2 n G D (itemsize + 4) bytes for 10 n^2 H D operations. The 2 "
            "in itemsize / 2 comes from the forward's 2 / 4",
            2.5: "the backward has five matrix products where the forward has two",
            5 / 3: "the backward has five matrix products, and dk, dv travel in float32",
            5 / 6: "the backward: (itemsize + 4) bytes where the forward has itemsize, and 5/2 of the operations",
        },
        **given, causal=False, backward=True,
    )  # fmt: skip
    check("both at once", "the two factors multiply", **given, causal=True, backward=True)
    given = dict(H=16, G=2, itemsize=4, tflops=90.0, gbit=100.0)
    check("backward with itemsize=4", "(itemsize + 4) / 5", **given, causal=False, backward=True)
    given = dict(H=64, G=8, itemsize=2, tflops=989.0, gbit=25.0)
    slow = "nothing new; is something rounded, or fixed to one link?"
    check("a slow network: 25 Gbit/s", slow, **given, causal=True, backward=False)


threshold = Checker("6b threshold", value=_threshold_value, adversarial=_threshold_adversarial)

# ---- 6c: read_timeline(events) -> (exposed, bottleneck) --------------------------------------------------------------

Timed = tuple[str, float, float]


def _oracle_timeline(events: Sequence[Timed]) -> tuple[float, str]:
    """Every stretch between two neighbouring starts or stops: is a message under way there, is something computed?"""
    times = sorted({t for _, start, stop in events for t in (start, stop)})
    exposed = computing = sending = 0.0
    for begin, end in zip(times, times[1:]):
        kinds = {kind for kind, start, stop in events if start <= begin and end <= stop}
        exposed += (end - begin) * (kinds == {"message"})
        computing += (end - begin) * ("compute" in kinds)
        sending += (end - begin) * ("message" in kinds)
    return exposed, "link" if sending > computing else "compute"


def _timeline(fn: Callable, events: Sequence[Timed], where: str, cause: str, shown: str = "") -> None:
    shown = shown or " ".join(f"{kind} {start:g}-{stop:g}" for kind, start, stop in events) or "no events"
    result = call(fn, list(events), input=shown, where=where, cause=cause)
    exposed, bottleneck = parts(result, "exposed, bottleneck")
    want, slower = _oracle_timeline(events)
    exposed = number(exposed, "the pair is (exposed, bottleneck): a time, then a word", "exposed is")
    if not abs(exposed - want) <= 1e-6 * max(1.0, want):
        raise Wrong(f"exposed is {exposed:.6g}, expected {want:.6g}", where, cause)
    if bottleneck != slower:
        raise Wrong(
            f"exposed is right; the bottleneck is {bottleneck!r}, expected {slower!r}",
            "what is compared for the bottleneck",
            "the time in which a message is under way (two at once count once) against the time in which "
            'something is computed: "link" if the first is longer, else "compute"',
        )


_timeline_value = cases(
    _timeline,
    (
        [("compute", 0, 4), ("message", 0, 3)],
        "a message that ends before the computing does",
        "it is hidden: exposed is 0. What counts is time with a message and without computing",
    ),
    (
        [("compute", 0, 2), ("message", 0, 5), ("compute", 5, 7)],
        "a message that goes on after the computing has ended",
        "exposed is what sticks out: from 2 to 5",
    ),
    (
        [("compute", 0, 4), ("message", 0, 3), ("compute", 4, 8), ("message", 4, 10), ("compute", 10, 14)],
        "one message that is hidden, one that is not, and a last step that sends nothing",
        "each message is hidden only by computing at the same time: spare time in one step does not hide the next "
        "step's message, and sums hide this",
    ),
    (
        [("message", 0, 3), ("compute", 3, 7), ("message", 7, 10), ("compute", 10, 14)],
        "messages that nothing overlaps",
        "all of both is exposed: add them up",
    ),
)


def _timeline_adversarial(fn: Callable) -> None:
    check = partial(_timeline, fn)
    check([("compute", 0, 3)], "no message at all", "nothing is exposed")
    check([], "no event at all", "nothing is exposed, and nothing is slower than computing: 0 and 'compute'")
    check(
        [("compute", 0, 2), ("compute", 5, 7)],
        "a gap in which nothing happens at all",
        "a GPU that waits for its host is idle, but not for a message: exposed needs a message under way",
    )
    check(
        [("compute", 6, 8), ("message", 0, 5), ("compute", 0, 2)],
        "events that are not in order",
        "sort them, or compare each message with all computations",
    )
    check(
        [("compute", 0, 2), ("message", 1, 6), ("message", 2, 5), ("compute", 6, 8)],
        "two messages under way at the same time, such as k and v",
        "time counts once, however many messages are under way",
    )
    check(
        [("compute", 0, 5), ("message", 0, 3), ("message", 1, 4)],
        "two messages under way at the same time, both hidden",
        "time counts once, however many messages are under way",
    )
    check(
        [("message", 0, 9), ("compute", 1, 3), ("compute", 5, 8)],
        "a message that lasts through several computations",
        "what sticks out can be before, between and after: 0 to 1, 3 to 5, 8 to 9",
    )
    check(
        [("compute", 0, 5), ("message", 4, 7), ("message", 8, 12), ("compute", 7, 8)],
        "a message that begins during one computation and ends after it",
        "pairing the n-th message with the n-th computation fails here: compare each with all",
    )
    times = sorted(float(x) for x in numbers(6, 40).abs() * 100)
    events = [("compute" if i % 2 else "message", a, b) for i, (a, b) in enumerate(zip(times, times[3:]))]
    check(events, "many events that overlap in all ways", "one rule for all: message, and no computing", "37 events")
    for what in ("nccl", "head start", "copy"):
        check(
            measured_events(8192, what),
            "times that are no whole numbers, in microseconds",
            "the same rule; nothing rounded",
            f"rl.checks.nb06.measured_events(8192, {what!r}): four measured steps of GPU 0",
        )


def measured_events(tokens: int, what: str, rank: int = 0) -> list[Timed]:
    """One measured timeline of two GPUs as (kind, start, stop), in microseconds."""
    for timeline in records.load(HIDING)["timelines"]:
        if (timeline["tokens_per_gpu"], timeline["what"], timeline["rank"]) == (tokens, what, rank):
            return [(e["kind"], e["start_us"], e["stop_us"]) for e in timeline["events"]]
    raise ValueError(f"measured_events: no timeline of {tokens} tokens, {what!r}, rank {rank}")


read_timeline = Checker("6c read_timeline", value=_timeline_value, adversarial=_timeline_adversarial)

# ---- Predictions and quiz -------------------------------------------------------------------------------------------

_MS = Hardware(flops=1e3, bandwidth=1e3, latency=0.0)  # an operation or a byte takes a millisecond
LINK = dict(flops=600e12, bandwidth=250e9)


def ring_ms(P: int, compute: int, message: int) -> int:
    """Milliseconds of a ring whose steps compute so long and whose messages take so long, awaited afterwards."""
    return round(1e3 * rehearse(P, operations=compute, nbytes=message, hardware=_MS).makespan())


def most_ranks(S: int, **given: Any) -> int:
    """The largest power of two of ranks at which every hop still hides."""
    P = 1
    while S / (2 * P) >= costs.hiding_threshold(32, 8, **LINK, **given):
        P *= 2
    return P


def measured_ms(tokens: int, what: str, how: str = "queued_ms") -> float:
    """One time of a step on two GPUs: of its attention, of its message alone, or of both."""
    steps = records.load(HIDING)["steps"]
    return next(s[how] for s in steps if (s["tokens_per_gpu"], s["what"]) == (tokens, what))


predict_total = Prediction(
    "Total time",
    lambda: ring_ms(8, compute=4, message=6),
    "Seven steps have a message to wait for and last 6 ms each; the eighth sends nothing and lasts 4.",
    unit="ms",
)
predict_dim = Prediction(
    "Half the head dim",
    lambda: "same" if costs.step_work(600, 32, 8, 64)[0] * 2 == costs.step_work(600, 32, 8, 128)[0] else "",
    "The head dim is in the operations and in the bytes, so it cancels.",
)
predict_ranks = Prediction(
    "Most ranks",
    lambda: most_ranks(131_072, causal=True),
    "Causal, so 1,200 tokens per rank are needed: 64 ranks have 2,048 each, 128 have 1,024.",
)
predict_overhead = Prediction(
    "Overhead at 2,048 tokens, in per cent (0 to 100)",
    lambda: round(100 * (measured_ms(2048, "nccl") / measured_ms(2048, "attention") - 1)),
    "Both together take almost as long as one after the other: nearly nothing was hidden.",
    tolerance=15,
    unit="%",
)

quiz = Quiz(
    "Quiz 06",
    (lambda: ring_ms(8, 5, 4), "All seven messages hide: 8 steps of 5 ms.", 0.0, "ms"),
    (
        lambda: round(1e3 * rehearse(8, operations=5, nbytes=7, hardware=_MS).seconds("wait", 0)),
        "Seven messages stick out by 2 ms each.",
        0.0,
        "ms",
    ),
    (
        lambda: round(costs.hiding_threshold(64, 8, flops=1000e12, bandwidth=50e9)),
        "(2/2) (8/64) 1e15 / 50e9: 400 Gbit/s are 50 GB/s.",
    ),
    (
        lambda: round(costs.hiding_threshold(64, 8, flops=1000e12, bandwidth=50e9, causal=True, backward=True)),
        "Times 2 for causal, times (2 + 4)/5 = 1.2 for the backward.",
    ),
    (lambda: shards_held(8), "Its own, the one it computes with, and the one that arrives."),
)

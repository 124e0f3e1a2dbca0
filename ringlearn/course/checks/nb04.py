"""Exercises of notebook 04, ring backward: 4a ring_backward, 4b predict; predictions and the quiz.

The oracle of 4a is autograd, as gradients.py says. The oracle of 4b is a count: the published ring runs, and its
messages and buffers are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor

from ... import costs
from ...attention import ring_attention
from ...layouts import contiguous, zigzag
from ...masks import causal, full
from ...worlds.simulated import SimulatedWorld
from ...worlds.trace import Hardware, Trace
from ...worlds.world import PerRank
from .. import published_ring
from . import gradients, simulate
from .checker import Checker, Wrong, call, cases, parts
from .gradients import GROUPED, NAMES, Given, Mistake, added, against_autograd, contributions, make
from .mistakes import Reason, recognised
from .oracle import numbers
from .predictions import Prediction, Quiz

# ---- 4a: ring_backward(comm, dout, q, k, v, out, lse, positions, mask) -> dq, dk, dv --------------------------------


TOGETHER = (
    "which tensors share a message",
    "k, v and dk, dv are in one message, so k, v wait until dk, dv are computed, and nothing hides them; nor have they "
    "one dtype. Send them apart: k, v before you compute, dk, dv after",
)
INSTEAD = (
    ("all tensors of a message must have one dtype", *TOGETHER),
    (
        "never awaited it|do not stop",
        "which rotates are awaited, and how many there are",
        "each rotate needs its await: of k, v there are P - 1, of dk, dv P, and the last of these is awaited after the "
        "loop",
    ),
)


def _run(fn: Callable, given: Given, where: str = "", cause: str = "") -> simulate.Ran:
    """Run fn on all ranks; Wrong unless each rank returns three tensors of the shapes of its q, k and v."""

    def reason(name: str, got: Tensor | None, like: Tensor) -> Reason:
        if got is None:
            return f"what {name} starts with", "torch.zeros of its shape"
        if name != "dq" and got.shape[1] == given.case.H != like.shape[1]:
            return "what becomes of the heads of k and v", GROUPED
        if got.shape[:2] == like.shape[:2]:
            cause = "the shard of another rank came back: dk, dv are at home after P hops, one more than k, v make"
            return "whose dk, dv a rank holds at the end, and length= of the rotates", cause
        return "the return statement", "they are returned in another order: `return dq, dk, dv`"

    return gradients.run(fn, given, reason, where=where, cause=cause, instead=INSTEAD)


def _mistakes(given: Given) -> Iterator[Mistake]:
    """The mistakes that have a signature of their own, each with the values that it gives on these inputs."""
    P = given.case.P
    table, every = contributions(given), range(P)
    dq, dk, dv = added(table)

    def blocks(pick: Callable[[int, int], Tensor]) -> tuple[list[Tensor], ...]:
        """dq as it is, and pick(rank, i) for i = 1, dk, and i = 2, dv."""
        return dq, *([pick(r, i) for r in every] for i in (1, 2))

    yield (
        "how many hops dk, dv make, and when the last one is awaited",
        "each rank holds dk, dv of the next rank's block. They must make P hops, one more than k, v: after P - 1 they "
        "are one rank before home (a hop before the first tile, with nothing in it, does not count)",
        blocks(lambda r, i: (dk, dv)[i - 1][(r + 1) % P]),
    )
    yield (
        "how many hops dk, dv make, and when the last one is awaited",
        "each rank holds dk, dv of the block of the rank before it: one hop too many. It takes P hops to be home",
        blocks(lambda r, i: (dk, dv)[i - 1][r - 1]),
    )
    yield "the return statement", "dk and dv are exchanged: `return dq, dk, dv`", (dq, dv, dk)
    for order in ((dk, dv, dq), (dk, dq, dv), (dv, dk, dq), (dv, dq, dk)):
        yield "the return statement", "they are returned in another order: `return dq, dk, dv`", order
    yield (
        "what is added to dk, and what to dv",
        "the dv that arrives is added to dk, and the dk to dv: they are unpacked in the order in which they were sent",
        blocks(lambda b, i: sum(table[(b + t) % P][b][i if (P - 1 - t) % 2 == 0 else 3 - i] for t in every)),
    )
    both = [a + b for a, b in zip(dk, dv, strict=True)]
    for swapped in ((dq, both, both), (dq, both, dv), (dq, dk, both), (dq, both, None)):
        yield "how dk and dv are unpacked", "dk and dv are summed up in one tensor", swapped
    yield (
        "what happens to dk, dv that arrive",
        "they arrive and are not added: each rank sends on only what it found itself",
        blocks(lambda b, i: table[(b - 1) % P][b][i]),
    )
    yield (
        "where dk and dv go after each step",
        "each rank sums up in one place what it finds for all blocks. dq may stay, since its queries stay; dk, dv of a "
        "block belong to the block: they travel with k, v",
        blocks(lambda r, i: sum(table[r][b][i] for b in every)),
    )
    yield (
        "where dk and dv go after each step",
        "a rank keeps only its own contribution to its own block; what the other ranks found never comes home",
        blocks(lambda b, i: table[b][b][i]),
    )
    last = [table[r][(r + 1) % P][0] for r in every]
    yield "how dq changes from step to step", "dq is replaced in each step, not added to", (last, None, None)
    positions = given.case.positions
    if len(set(given.case.lengths)) == 1:  # else shapes do not fit
        steps = "rank r has the block of (comm.rank - step) % P, in step 0 its own; the mask is asked about "
        for seen, cause in (
            (lambda r, b: (positions[r], positions[(2 * r - b) % P]), steps + "the block of comm.rank + step"),
            (lambda r, b: (positions[r], positions[(b + 1) % P]), steps + "the block after it"),
            (lambda r, b: (positions[r], positions[(b - 1) % P]), steps + "the block before it"),
            (
                lambda r, b: (torch.arange(len(positions[r])), torch.arange(len(positions[b]))),
                "the mask is asked about places in the shard; it wants positions in the whole sequence, "
                "positions[comm.rank] and positions[source]",
            ),
        ):
            yield (
                "what the mask is given: the positions of which rank's queries, of which block's keys",
                cause,
                added(contributions(given, seen=seen)),
            )
    yield (
        "the two arguments of the mask",
        "queries and keys are exchanged; queries come first: mask(positions[comm.rank][:, None], "
        "positions[source][None, :])",
        added(contributions(given.under(lambda i, j: given.case.mask(j, i)))),
    )
    yield (
        "the factor 1 / sqrt(D) in scores and ds",
        "dq and dk are sqrt(D) times too large: ds has the factor `scale` once more, as attend_backward puts it",
        (*added(contributions(given, scaled=False))[:2], None),
    )
    n, D = len(positions[0]), given.case.q.shape[-1]
    for scale in sorted({size**power for size in (D, n, P * n, given.case.H) for power in (-1, -0.5, 0.5, 1)} | {1.0}):
        if scale != D**-0.5:
            yield (
                "the scale that attend_backward is given",
                f"with scale = {scale:.3g} it makes these numbers. It is that of the forward, D ** -0.5 with D = "
                "q.shape[-1], and attend_backward puts it both into the scores and into dq and dk",
                added(contributions(given, scale=scale)),
            )
    for lse_of, delta_of, where, cause in (
        (
            "row",
            "block",
            "delta: which keys it sums over",
            "delta is taken from one block. It belongs to the whole row: (dout * out).sum(-1) with the global out",
        ),
        (
            "row",
            "alone",
            "delta: which out it is taken from",
            "delta is taken from the out of one block. It belongs to the whole row: (dout * out).sum(-1), with the out "
            "that the forward returned",
        ),
        ("row", "none", "delta", "delta is missing: ds = p * (dp - delta)"),
        (
            "block",
            "row",
            "lse: which keys it sums over",
            "the lse of one block makes weights that sum to 1 in every block. Use the lse that the forward returned",
        ),
        (
            "block",
            "block",
            "lse and delta: which keys they sum over",
            "each block is differentiated as if it were alone. lse and delta belong to the whole row, not to a step",
        ),
    ):
        dq, dk, dv = added(contributions(given, lse_of, delta_of))
        yield where, cause, (dq, dk, dv if lse_of == "block" else None)


_SHIFTED = "which block is here at step t, (comm.rank - step) % P, and what attend_backward is given for it"


_values = against_autograd(
    _run,
    _mistakes,
    "what is added to what in one step, and which block is here: source = (comm.rank - step) % P",
    "no common mistake fits. Check source; mask(positions[comm.rank][:, None], positions[source][None, :]); the "
    "scale D ** -0.5; and that what arrives is added to the dk, dv of `source`, before they are sent on",
)
_backward_value = cases(
    _values,
    ((6, 3, 1, 1, 4, causal), _SHIFTED),
    ((8, 4, 1, 1, 4, full), _SHIFTED),
    (
        (12, 4, 4, 2, 4, causal),
        "the shapes: dk, dv have G heads, as k, v",
        "attend_backward sums dk, dv over the heads of a group already",
    ),
)
_backward_uneven = cases(
    _values,
    (
        (10, 4, 2, 1, 4, causal),
        "length= of each rotate: what arrives, not what is sent",
        "k, v that arrive are those of (source - 1) % P, and so are the dk, dv that arrive with the next step",
    ),
    (
        (3, 5, 1, 1, 4, causal),
        "what a rank without tokens does",
        "it has nothing to compute, and passes on messages as the others do; attend_backward takes empty shards",
    ),
    (
        (12, 3, 2, 1, 4, causal, zigzag),
        "what the mask is given",
        "positions are taken to be neighbours. Pass positions[comm.rank][:, None] and positions[source][None, :]",
    ),
    (
        (5, 1, 2, 1, 4, causal),
        "what is awaited when there was no step before, and no step after",
        "with one rank there is no k, v to rotate; dk, dv may be rotated to oneself, or returned as they are",
    ),
    (
        (6, 2, 2, 1, 4, causal),
        "how many hops k, v make at P = 2, and how many dk, dv",
        "k, v make one hop and dk, dv two: there and home again",
    ),
)


def _backward_adversarial(fn: Callable) -> None:
    _backward_uneven(fn)
    _low_precision(fn)


def _low_precision(fn: Callable) -> None:
    given = make(64, 8, 2, 1, 8, causal, dtype=torch.bfloat16)
    # From the out and lse that the ranks were given: their rounding is not the learner's.
    want = [torch.cat(parts, 2) for parts in added(contributions(given))]
    where = "the dtype of each sum and of each message"
    cause = "compute with x.float(): dq, dk, dv are summed, and dk, dv travel, in float32; k, v travel as they came"
    ran = _run(fn, given, where, cause)
    for rank, result in enumerate(ran.results):
        for name, got in zip(NAMES, result, strict=True):
            if got.dtype != torch.float32:
                problem = f"on rank {rank} {name} comes in {got.dtype}, expected float32".replace("torch.", "")
                raise Wrong(problem, where, cause)
    for i, name in enumerate(NAMES):
        found = simulate.wrong_ranks(name, [r[i] for r in ran.results], given.case.split(want[i]), 1e-4)
        if found:
            rank = next(iter(found))
            raise Wrong(f"on rank {rank} {found[rank]}", where, cause)


def _backward_cost(fn: Callable, dtype: torch.dtype = torch.bfloat16) -> None:
    P, H, G, D, e = 4, 2, 1, 8, dtype.itemsize
    given = make(16, P, H, G, D, full, dtype=dtype)
    ran = _run(fn, given)
    trace = ran.world.trace
    kv, dkv = 2 * G * D * 4 * e, 2 * G * D * 4 * 4  # bytes of a shard of four tokens
    for rank in range(P):
        sent = [e.nbytes for e in trace.select("send", rank)]
        found = f"the values are right, but rank {rank} sends {len(sent)} messages of {_bytes(sent)} bytes"
        enough = f"; {P - 1} of {kv} (k, v) and {P} of {dkv} (dk, dv) are enough"
        if sorted(sent) == sorted([kv] * (P - 1) + [dkv] * P):
            continue
        where, cause = "what is in each message", "k, v travel as they came, dk, dv in float32, both with G heads"
        if len(sent) <= P and any(n > dkv for n in sent):
            where, cause = TOGETHER
        elif sum(sent) == (P - 1) * kv + P * dkv:
            where, cause = "how many tensors a rotate takes", "comm.rotate(k, v) sends two tensors as one message"
        elif sorted(sent) == sorted([kv] * P + [dkv] * P):
            where = "the last step"
            cause = "in the last step nobody needs the next k, v; only dk, dv make the hop home"
        elif any(n > dkv for n in sent):
            cause = "more than one shard, or more than G heads, are in one message"
        elif kv not in sent:
            cause = (
                "k, v were made float32 before they were sent: that is twice the bytes. Convert what you compute with"
            )
        raise Wrong(found + enough, where, cause)
    simulate.check_messages(
        ran,
        2 * P - 1,
        [costs.published_backward_bytes(16, P, G, D, itemsize=e, rank=r) for r in range(P)],
    )
    for rank in range(P):
        hidden = ran.hides(rank)
        exposed = [name for name, hides in hidden if not hides]
        if len(exposed) > 1:
            made = {e.name: e.made for e in trace.select("send", rank)}
            blocks = [name for name in exposed if not made[name]]
            what = f"{len(exposed)} of {len(hidden)} messages, {len(blocks)} of them k, v"
            raise Wrong(
                f"the values are right, but on rank {rank} nothing is computed between posting and awaiting {what}; "
                f"only the hop home has to be exposed",
                "the order of rotate, attend_backward and await in one step",
                "post k, v before you compute, and await them after"
                if blocks
                else "compute this rank's dk, dv first; then await what arrives, add, and send on",
            )
    _backward_memory(fn, ran, dtype)


def _backward_memory(fn: Callable, ran: simulate.Ran, dtype: torch.dtype) -> None:
    """Wrong if a rank holds more in a ring of eight than it held in one of four, with shards of the same size."""
    few, many = ran.world.size, 2 * ran.world.size
    given = make(4 * many, many, 2, 1, 8, full, dtype=dtype)
    longer = _run(fn, given)
    inputs = ("q", "k, v", "other inputs")
    held, more = (world.memory.peak_bytes(0, without=inputs) for world in (ran.world, longer.world))
    if more > held + 2 * 8 * 4 * dtype.itemsize:  # one shard of k, v
        raise Wrong(
            f"the values are right, but rank 0 holds {held:,} bytes besides its inputs in a ring of {few}, and "
            f"{more:,} in one of {many}, although its shards have four tokens in both",
            "what is still alive when a step is over: lists, dicts and tensors that grow with every step",
            "shards of k, v, or dk, dv that were sent on, are kept although nobody needs them any more. A ring that "
            "lets go of them holds as much with a hundred ranks as with four",
        )


def _bytes(sent: list[int]) -> str:
    return ", ".join(map(str, sent[:3])) + (", ..." if len(sent) > 3 else "")


# The torchrun exercise 05 asks for these: there, everything is in one dtype.
IN_ONE_DTYPE = (_backward_value, _backward_uneven, partial(_backward_cost, dtype=torch.float32))
ring_backward = Checker(
    "4a ring_backward", value=_backward_value, adversarial=_backward_adversarial, cost=_backward_cost
)

# ---- 4b: predict(S, P, H, G, D, e) -> four numbers of bytes ---------------------------------------------------------

COUNTS = ("sent_forward", "sent_backward", "in_flight_forward", "in_flight_backward")
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@lru_cache(maxsize=32)
def _counted(S: int, P: int, H: int, G: int, D: int, e: int) -> tuple[int, int, int, int]:
    """Run the published ring on zeros, forward and backward: bytes that rank 0 sent, and the most in its buffers."""
    q, k, v = (torch.zeros(1, heads, S, D, dtype=_DTYPES[e]) for heads in (H, G, G))
    given = [contiguous.positions(S, P, rank) for rank in range(P)], full
    q, k, v = (PerRank(x.tensors) for x in SimulatedWorld(P).shard(q, k, v, layout=contiguous))
    forward = simulate.run(published_ring.ring_forward, P, q, k, v, *given, input="")
    out, lse = map(PerRank, zip(*forward.results, strict=True))
    backward = simulate.run(published_ring.ring_backward, P, q, q, k, v, out, lse, *given, input="")
    sent = [ran.world.trace.bytes_sent(0) for ran in (forward, backward)]
    return (*sent, *(ran.held(0, "in flight") for ran in (forward, backward)))


def _wrong_counts(S: int, P: int, H: int, G: int, D: int, e: int) -> Iterator[tuple[str, str, tuple]]:
    """Where to look, the cause, and the four numbers that a mistake gives; None where it says nothing."""
    s = S // P

    def four(heads: int = G, tensors: int = 2, wide: int = 4, tokens: int = s, hops: int = P - 1, home: int = P):
        kv, dkv = (tensors * heads * tokens * D * n for n in (e, wide))
        home = home if P > 1 else 0
        buffers = min(2, P - 1)
        return hops * kv, hops * kv + home * dkv, buffers * kv, buffers * kv + (dkv if P > 1 else 0)

    right = four()
    yield "how many heads k and v have", "H in place of G: only the key/value heads travel", four(heads=H)
    yield "what one message holds", "one tensor is counted where two travel: k and v, dk and dv", four(tensors=1)
    yield (
        "the bytes of an element of dk, dv",
        "dk, dv are counted with e bytes an element; they travel in float32, 4 bytes, whatever k and v are",
        four(wide=e),
    )
    yield "how many tokens a shard has", "S in place of n = S / P", four(tokens=S)
    yield "how many hops k, v make", "P hops are counted; after P - 1 every rank has seen every shard", four(hops=P)
    yield "how many hops dk, dv make", "P - 1 hops are counted; the last of P brings them home", four(home=P - 1)
    yield (
        "what is sent and what is received",
        "both are counted. What a rank sends, another receives: count the sender's side only",
        (2 * right[0], 2 * right[1], None, None),
    )
    yield (
        "what the backward sends besides dk, dv",
        "k, v go round once more in the backward: the blocks are not kept",
        (None, right[1] - right[0], None, None),
    )
    if P == 1:
        yield (
            "P = 1",
            "with one rank nothing is sent, and nothing arrives: dk, dv are at home all the time",
            (None, 2 * G * s * D * 4, None, None),
        )
    if P > 1:
        kv = 2 * G * s * D * e
        dkv = 2 * G * s * D * 4
        yield (
            "buffers for k, v in flight",
            "every shard has a buffer of its own. A shard that was sent on is given up: at most two are there",
            (None, None, (P - 1) * kv, (P - 1) * kv + dkv),
        )
        yield (
            "buffers for k, v in flight, at small P",
            "two are counted. At P = 2 one shard arrives, and a rank's own shard needs no buffer: min(2, P - 1)",
            (None, None, 2 * kv, 2 * kv + dkv),
        )
        yield (
            "buffers for k, v in flight",
            "one is counted. From P = 3 on a rank computes with a shard it received while the next one arrives",
            (None, None, kv, kv + dkv),
        )
        yield "what arrives in the backward", "a buffer in which dk, dv arrive is missing", (None, None, None, right[2])
        yield (
            "buffers for dk, dv in flight",
            "two are counted. What arrived was added, and its buffer given back, before the next dk, dv are posted",
            (None, None, None, right[3] + dkv),
        )


def _predict(fn: Callable, S: int, P: int, H: int, G: int, D: int, e: int, note: str = "") -> None:
    shown = f"S = {S}, P = {P}, H = {H}, G = {G}, D = {D}, e = {e}{note}"
    want = _counted(S, P, H, G, D, e)
    result = call(fn, S, P, H, G, D, e, input=shown)
    result = parts(result, ", ".join(COUNTS))
    for name, got, counted in zip(COUNTS, result, want, strict=True):
        if isinstance(got, bool) or not isinstance(got, int):
            raise Wrong(
                f"{name} is {got!r}, a {type(got).__name__}, expected an int",
                "divisions: / gives a float",
                "bytes are whole numbers: S // P",
            )
        if got == counted:
            continue

        def gives(numbers: tuple, name: str = name, got: int = got) -> bool:
            return numbers[COUNTS.index(name)] == got

        def explains(numbers: tuple) -> bool:
            said = [(g, w) for g, n, w in zip(result, want, numbers, strict=True) if w is not None and w != n]
            return gives(numbers) and all(g == w for g, w in said)

        otherwise = (
            "the rank's messages, one by one, on a sheet of paper",
            "what is posted in each step, with its bytes, and what lies in a buffer meanwhile",
        )
        mistakes = list(_wrong_counts(S, P, H, G, D, e))  # one that explains all four numbers, else one that gives this
        where, cause = recognised(mistakes, explains, recognised(mistakes, gives, otherwise))
        raise Wrong(f"{name} is {got:,}, a run of the ring counts {counted:,}", where, cause)


predict = Checker(
    "4b predict",
    value=cases(_predict, (24, 4, 4, 2, 8, 4), (24, 4, 4, 2, 8, 2, " (bfloat16)"), (30, 3, 6, 1, 16, 2, " (bfloat16)")),
    adversarial=cases(
        _predict,
        (24, 1, 4, 2, 8, 4, ": one rank"),
        (24, 2, 4, 2, 8, 4, ": two ranks"),
        (64, 8, 8, 8, 8, 2, ": eight ranks, as many key heads as query heads"),
    ),
)

# ---- Predictions and the quiz: the answers are counted in runs of a ring, not written down --------------------------


@lru_cache(maxsize=8)
def _backward_trace(P: int) -> Trace:
    """The events of the published ring's backward without a mask, on hardware where every hop that can hide does."""
    world = SimulatedWorld(P, hardware=Hardware(flops=1e9, bandwidth=1e9, latency=2e-6))
    published_ring.gradients(world, *(numbers(i, 1, 2, 16 * P, 8) for i in range(4)))
    return world.trace


def _unwinding_messages(P: int) -> int:
    """How many messages rank 0 sends in the backward of the library's ring."""
    world = SimulatedWorld(P)
    q, k, v = (numbers(i, 1, 2, 16 * P, 8).requires_grad_() for i in range(3))
    ring_attention(*world.shard(q, k, v)).unshard().sum().backward()
    return len([e for e in world.trace.select("send", 0) if e.name.startswith("rotate")])


def _exposed(P: int) -> int:
    waits = [e for e in _backward_trace(P).select("wait", 0) if e.name.startswith("rotate")]
    return len([e for e in waits if e.seconds > 1e-9])


@lru_cache(maxsize=8)
def _wire_error(P: int, dtype: torch.dtype) -> float:
    """Relative error of dk when the travelling sum is rounded to a dtype at every hop."""
    given = make(64, P, 1, 1, 8, full)
    table = contributions(given)
    got = []
    for block in range(P):
        dk = torch.zeros_like(table[0][block][1])
        for step in range(P):
            dk = (dk + table[(block + step) % P][block][1]).to(dtype).double()
        got.append(dk)
    want = given.want[1]
    return float((torch.cat(got, 2) - want).norm() / want.norm())


def _seconds(P: int, compute: float, blocks: float, gradients: float) -> float:
    """Of the virtual clock, for a backward in which a step and its messages take so many seconds."""

    async def program(comm):
        travelling = None
        kv, dkv = torch.zeros(round(blocks * 1000)), torch.zeros(round(gradients * 1000))
        for step in range(comm.size):
            if step < comm.size - 1:
                arriving = comm.rotate(kv)
            comm.compute("backward", compute)
            if travelling is not None:
                await travelling
            travelling = comm.rotate(dkv)
            if step < comm.size - 1:
                await arriving
        await travelling

    world = SimulatedWorld(P, hardware=Hardware(flops=1.0, bandwidth=4000.0, latency=0.0))
    world.run(program)
    return round(world.trace.makespan(), 6)


def _peak(P: int, backward: bool) -> int:
    return sum(costs.ring_memory(4096, P, 8, 2, 64, itemsize=4, backward=backward).values())


def _saved(s: int, H: int, G: int, D: int, e: int) -> int:
    """q, out; k, v; lse in float32."""
    q, kv, lse = (torch.empty(shape, device="meta") for shape in ((H, s, D), (G, s, D), (H, s)))
    return 2 * q.numel() * e + 2 * kv.numel() * e + lse.numel() * 4


predict_messages = Prediction(
    "Messages of the backward",
    lambda: len([e for e in _backward_trace(8).select("send", 0) if e.name.startswith("rotate")]),
    "P - 1 of k, v, as in the forward, and P of dk, dv: the last one brings them home.",
)
predict_home = Prediction(
    "Without the hop home",
    lambda: [e.origin for e in _backward_trace(8).select("compute", 5)][-1],
    "In the last step rank r works on block r + 1, so all gradients are there, one rank too early.",
)
predict_exposed = Prediction(
    "Exposed messages",
    lambda: _exposed(8),
    "The hop home starts when the last tile is done: nothing is left to compute behind which it could hide.",
)
predict_unwound = Prediction(
    "Messages of the unwinding ring",
    lambda: _unwinding_messages(8),
    "A rank already holds the next rank's k, v and its own: P - 2 hops. dk, dv end at home: P - 1.",
)
predict_wire = Prediction(
    "bfloat16 on the wire",
    lambda: "grows" if _wire_error(16, torch.bfloat16) > 1.5 * _wire_error(2, torch.bfloat16) else "stays",
    "Each hop rounds the sum so far, and a ring of P ranks makes P hops.",
)
predict_half = Prediction(
    "Two ranks instead of one",
    lambda: round(100 * _peak(2, True) / _peak(1, True)),
    "All that belongs to a rank's own tokens is halved. New are k, v of the other rank, the sum of dq, and two "
    "messages with dk, dv.",
    tolerance=5,
    unit="%",
)

quiz = Quiz(
    "Quiz 04",
    (
        lambda: len([e for e in _backward_trace(3).select("send", 0) if e.made and e.name.startswith("rotate")]),
        "dk, dv of a block visit every rank, and come home: P hops.",
    ),
    (
        lambda: costs.published_backward_bytes(4096, 4, 2, 64, itemsize=2),
        "3 x 2 x 2 x 1,024 x 64 x 2 bytes of k, v, and 4 x 2 x 2 x 1,024 x 64 x 4 of dk, dv.",
        0,
        "bytes",
    ),
    (
        lambda: _seconds(4, 10.0, 3.0, 6.0),
        "Four steps of 10 ms, in which 3 + 6 ms of messages hide, and the hop home.",
        1e-6,
        "ms",
    ),
    (
        lambda: _saved(1024, 8, 2, 64, 2),
        "q and out 2 x 8 x 1,024 x 64 x 2 bytes, k, v 2 x 2 x 1,024 x 64 x 2, lse 8 x 1,024 x 4. No weights.",
        0,
        "bytes",
    ),
    (
        lambda: costs.published_backward_bytes(4096, 1, 2, 64, itemsize=2),
        "With one rank every block is at home all the time.",
        0.0,
        "bytes",
    ),
)

"""The checks of the torchrun exercises 07 to 09: other ways to split a sequence, and the layout that balances one.

Each is a rank program, tried on simulated ranks and then for real, as in rings.py. Memory is counted in the
simulation, where a rank is charged with every tensor that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import costs
from ....attention import all_gather_attention, ring_attention
from ....layouts import contiguous, zigzag
from ....masks import Mask, causal, full
from ....worlds.simulated import SimulatedWorld
from .. import oracle, simulate
from ..checker import Wrong, difference, parts
from ..simulate import who
from .rings import Case, D, Reason, Trial, compare_forward, forward_args, make, out_and_lse, prepare
from .runner import Exercise, Rank

SIMULATED = 4  # ranks, on most cases
NUMBER = 8  # bytes, of float64

STUCK = (
    "which ranks get to each line with comm, and how often",
    "a rank leaves out a message that the others make, perhaps because it holds no token or sees no key",
)


class Program(NamedTuple):
    """A rank program that an exercise asks for.

    args(case), unpack(what a rank returned): what it is given, and its parts.  compare(case, parts by rank), cost(case,
    ran): raise Wrong; the first sees all simulated ranks or one real one.  where: what its cases are about.
    """

    args: Callable[[Case], tuple[Any, ...]]
    unpack: Callable[[Any], tuple[Any, ...]]
    compare: Callable[[Case, dict[int, Any]], None]
    cost: Callable[[Case, simulate.Ran], None]
    where: str


def trial(program: Program, simulated: Callable[[], Iterator[Case]], real: Callable[[int], Iterator[Case]]) -> Trial:
    """The trial of a rank program, with its simulated cases and those for a number of real ranks."""

    def stage(answer: Callable) -> None:
        for case in simulated():
            where = program.where if case.P > 1 else "one rank alone: no message, and everything is its own"
            ran = simulate.run(answer, case.P, *program.args(case), input=case.input, where=where)
            program.compare(case, {r: program.unpack(result) for r, result in enumerate(ran.results)})
            program.cost(case, ran)

    return Trial((stage,), real, program.args, program.unpack, program.compare)


def _dense(case: Case, mask: Mask | None = None, **change: Any) -> list[Tensor]:
    """Attention by its definition, by rank; mask: another than the case's; change: as for ``oracle.dense``."""
    return case.ring.split(oracle.dense(case.ring.q, case.ring.k, case.ring.v, mask or case.mask, **change)[0])


def _permuted(case: Case) -> list[Tensor]:
    """Query heads g, g + G, ... with key/value head g, put one behind the other in this order."""
    H, G = case.ring.q.shape[1], case.ring.k.shape[1]
    order = [h for g in range(G) for h in range(g, H, G)]
    return [x[:, order] for x in _dense(case, heads=lambda h: h % G)]


def _places(case: Case) -> Tensor:
    """Where each position lies when the shards of all ranks are put one behind the other."""
    return torch.cat(case.ring.positions).argsort()


OTHER_HEADS = (
    "which query heads go with a key/value head",
    "query heads h of one group lie side by side: the H / G of them from g * H // G on use key/value head g",
)
# Mistakes that both ways of gathering rows invite.
KNOWN: dict[Callable[[Case], list[Tensor]], Reason] = {
    lambda case: _dense(case, k_at=_places(case)): (
        "the positions of the keys",
        "gathered rows lie in the order of the ranks, not of the text: their positions are torch.cat(positions)",
    ),
    lambda case: _dense(case, q_at=_places(case), k_at=_places(case)): (
        "the positions that the mask gets",
        "rows that were put one behind the other, rank by rank, are not 0, 1, 2, ...: they are torch.cat(positions)",
    ),
    lambda case: _dense(case, full): ("the mask", "no mask is applied at all"),
    lambda case: _dense(case, scale=1.0): ("the scale", "the scores are not multiplied by scale, D ** -0.5"),
    lambda case: _dense(case, heads=lambda h: h % case.ring.k.shape[1]): OTHER_HEADS,
    _permuted: OTHER_HEADS,
    lambda case: [x.flip(1) for x in _dense(case)]: (
        "in which order the heads are put together",
        "they come back in the opposite order: head 0 comes first",
    ),
}

# ---- 07 gather by heads: (comm, q, k, v, positions, mask) -> (out, lse) ----------------------------------------------

HEADS, GROUPS = 8, 4
MEMORY = 64  # tokens of the case whose memory is shown


def _gather_cases() -> Iterator[Case]:
    P, heads = SIMULATED, dict(H=HEADS, G=GROUPS)
    yield make(4 * P, P, full, **heads)
    yield make(4 * P, P, causal, layout=zigzag, **heads)
    yield make(10, P, causal, ": shards of 2 and 3 tokens", **heads)
    yield make(3, P, causal, ": rank 0 holds no token", **heads)
    yield make(5, 1, causal, **heads)


def _gather_real(P: int) -> Iterator[Case]:
    yield make(5 * P + P // 2, P, causal, ", for real", H=HEADS, G=GROUPS, layout=zigzag)
    yield make(max(1, P - 1), P, full, ", for real", H=HEADS, G=GROUPS)


def _gather_cost(case: Case, ran: simulate.Ran) -> None:
    P, lengths, trace = case.P, [len(p) for p in case.ring.positions], ran.world.trace
    G = case.ring.k.shape[1]
    row = 2 * D * NUMBER  # k and v of one head
    for r in range(P):
        want = (P - 1) * lengths[r] * G * row
        if trace.bytes_sent(r) != want:
            raise Wrong(
                f"the values are right, but rank {r} sends {trace.bytes_sent(r):,} bytes; {want:,} are enough",
                "what is in each message",
                "each of the other ranks needs this rank's rows of k and v once, with their G heads, no more",
            )
    if P == 1 or min(lengths) == 0:
        return
    for r in range(P):
        most = ran.held(r, "in flight")
        if most > 2 * case.S * row:
            raise Wrong(
                f"right, but rank {r} holds {most:,} bytes of messages at a time, "
                f"{most / (row * (case.S - lengths[r])):.2g} heads of what the others sent; 2 heads are enough",
                "when a head is gathered, and how long what arrived is kept",
                "the heads are gathered all at once, or what has been computed with is kept: gather head g + 1 "
                "while you compute with head g, and then let go of head g",
            )
        hidden = _hidden(ran, r)
        if sum(hidden) < len(hidden) * (G - 1) // G:
            raise Wrong(
                f"right, but on rank {r} nothing is computed while {len(hidden) - sum(hidden)} of {len(hidden)} "
                f"gathers are on their way",
                "what stands between comm.all_gather and await",
                "only the first head has nothing to hide behind: post the gather of head g + 1, compute with "
                "head g, and only then await",
            )


def _hidden(ran: simulate.Ran, rank: int) -> list[bool]:
    """For each all-gather of a rank, in order, whether it computes between posting and awaiting it."""
    events = ran.world.trace.select(rank=rank)
    sends = [i for i, e in enumerate(events) if e.kind == "send"]
    posts = sends[:: ran.world.size - 1]
    waits = [i for i, e in enumerate(events) if e.kind == "wait"]
    return [any(e.kind == "compute" for e in events[a:b]) for a, b in zip(posts, waits, strict=False)]


_compare_gather = compare_forward(
    KNOWN,
    "which rows, heads and positions each call of attend gets",
    ("the lse that is returned", "it is to be that of all heads, as attend gave it: (B, H, s)"),
)
_gather_trial = trial(
    Program(forward_args, out_and_lse, _compare_gather, _gather_cost, "the shapes of what each rank gathers: lengths="),
    _gather_cases,
    _gather_real,
)


def _gather_by_heads(rank: Rank, answer: Callable) -> str:
    return f"{_gather_trial(rank, answer)} {memory_seen(answer)}"


def memory_seen(answer: Callable) -> str:
    """What messages of rank 0 hold at most on four simulated ranks, counted, and by the formulas."""
    P, S = SIMULATED, MEMORY
    case = make(S, P, causal, H=HEADS, G=GROUPS)
    yours = simulate.run(answer, P, *forward_args(case), input=case.input).held(0, "in flight")
    counted = []
    for attention in (all_gather_attention, ring_attention):
        world = SimulatedWorld(P)
        attention(*world.shard(case.ring.q, case.ring.k, case.ring.v), mask=causal)
        counted.append(world.memory.most(0)["in flight"])
    call = dict(S=S, P=P, G=GROUPS, D=D, itemsize=NUMBER)
    two_heads = 2 * (S - S // P) * 2 * D * NUMBER
    all_heads = costs.all_gather_memory(**call)["in flight"]
    ring = costs.ring_memory(H=HEADS, **call)["in flight"]
    return (
        f"Most bytes of messages on rank 0, {S} tokens on {P} ranks, counted and (by the formula): yours {yours:,} "
        f"(two heads at most: {two_heads:,}), all heads at once {counted[0]:,} ({all_heads:,}), a ring {counted[1]:,} "
        f"({ring:,}, two shards)."
    )


gather_by_heads = Exercise("07 gather by heads", _gather_by_heads, STUCK, prepare)

# ---- 08 Ulysses: (comm, q, k, v, positions, mask) -> (out, lse) ------------------------------------------------------


def _ulysses_cases() -> Iterator[Case]:
    P = SIMULATED
    yield make(4 * P, P, full, H=8, G=4)
    yield make(4 * P, P, causal, H=8, G=4, layout=zigzag)
    yield make(10, P, causal, ": shards of 2 and 3 tokens", H=8, G=8)
    yield make(4 * P, P, causal, ": fewer key heads than ranks", H=8, G=2)
    yield make(3, P, causal, ": rank 0 holds no token", H=4, G=4)
    yield make(5, 1, causal, H=4, G=2)


def _ulysses_real(P: int) -> Iterator[Case]:
    yield make(5 * P + P // 2, P, causal, ", for real", H=2 * P, G=P, layout=zigzag)
    yield make(max(1, P - 1), P, full, ", for real", H=2 * P, G=1)


def _ulysses_cost(case: Case, ran: simulate.Ran) -> None:
    P, H, G = case.P, case.ring.q.shape[1], case.ring.k.shape[1]
    for r in range(P):
        want = costs.ulysses_bytes(case.S, P, H, G, D, itemsize=NUMBER, rank=r, layout=_layout(case))
        sent = ran.world.trace.bytes_sent(r)
        if sent != want:
            raise Wrong(
                f"the values are right, but rank {r} sends {sent:,} bytes; {want:,} are enough",
                "which heads and rows each rank gets",
                "there: to each rank this rank's rows of its H / P query heads and of the key/value heads that they "
                "use. Back: to each rank its rows of out and lse, of this rank's heads. Nothing else travels",
            )


def _layout(case: Case) -> Any:
    return contiguous if torch.equal(torch.cat(case.ring.positions), torch.arange(case.S)) else zigzag


_compare_ulysses = compare_forward(
    KNOWN,
    "which rows, heads and positions attend gets, and how the rows come back",
    ("the lse that is returned", "it makes the same way back as out: own rows, all heads, (B, H, s)"),
    "these are all rows of some heads: trade back, by all_to_all, and put together what comes back along the heads, "
    "torch.cat(..., 1)",
)
_ulysses_trial = trial(
    Program(forward_args, out_and_lse, _compare_ulysses, _ulysses_cost, "the shapes of what arrives from each rank"),
    _ulysses_cases,
    _ulysses_real,
)
ulysses = Exercise("08 ulysses", _ulysses_trial, STUCK, prepare)

# ---- 09 zigzag and RoPE: (comm, q, k, v) -> (out of all rows, positions of its own rows) -----------------------------


def _zigzag_cases() -> Iterator[Case]:
    P = SIMULATED
    yield make(4 * P, P, causal)
    yield make(19, P, causal, ": blocks of 2 and 3 tokens")
    yield make(3, P, causal, ": fewer tokens than blocks")
    yield make(5, 1, causal)


def _zigzag_real(P: int) -> Iterator[Case]:
    yield make(5 * P + P // 2, P, causal, ", for real")
    yield make(max(1, P - 1), P, causal, ", for real")


def _rotated(x: Tensor, at: Tensor) -> Tensor:
    """RoPE by its definition: each pair of dims is a complex number that is turned."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def _layer(case: Case, **change: Any) -> Tensor:
    """The output of the whole text; change: at (the positions that RoPE gets), masked (those of the mask), q, k, v."""
    at = torch.arange(case.S)
    turn, places = change.get("at", at), change.get("masked", at)
    q, k, v = (
        _rotated(x, turn) if change.get(name, name != "v") else x
        for name, x in (("q", case.ring.q), ("k", case.ring.k), ("v", case.ring.v))
    )
    return oracle.dense(q, k, v, causal, q_at=places, k_at=places)[0]


def _local(case: Case) -> Tensor:
    """Where each position lies in its own zigzag shard."""
    at = torch.empty(case.S, dtype=torch.int64)
    for r in range(case.P):
        mine = zigzag.positions(case.S, case.P, r)
        at[mine] = torch.arange(len(mine))
    return at


def _order(case: Case) -> Tensor:
    return torch.cat([zigzag.positions(case.S, case.P, r) for r in range(case.P)])


ROPE = "the positions that rope gets"
OUTS: dict[Callable[[Case], Tensor], Reason] = {
    lambda case: _layer(case, at=_local(case)): (
        ROPE,
        "each rank counts its rows from 0: a token's angle belongs to its place in the whole text, so rope gets the "
        "same positions as the mask",
    ),
    lambda case: _layer(case, at=_local(case), masked=_local(case)): (
        "the positions that rope and the mask get",
        "both are counted from 0 on each rank: a token's place is that in the whole text",
    ),
    lambda case: _layer(case, q=False, k=False): (ROPE, "q and k are not rotated at all"),
    lambda case: _layer(case, k=False): (ROPE, "q is rotated and k is not: scores depend on p - p' if both are"),
    lambda case: _layer(case, q=False): (ROPE, "k is rotated and q is not: scores depend on p - p' if both are"),
    lambda case: _layer(case, v=True): (ROPE, "v is rotated too: positions are in the scores alone, so q and k are"),
    lambda case: _layer(case)[:, :, _order(case)]: (
        "how the rows are put back",
        "gathered rows lie in the order of the ranks: row i belongs at position torch.cat(positions)[i]",
    ),
    lambda case: _layer(case)[:, :, _order(case)][:, :, _order(case)]: (
        "how the rows are put back",
        "they are permuted once more, not back: out[:, :, order] = rows writes each to its place; rows[:, :, order] "
        "does not",
    ),
    lambda case: _layer(case, masked=_order(case).argsort()): (
        "the positions that ring_forward gets",
        "the mask counts rows in the order of the ranks: it needs, for each rank, the positions of its tokens",
    ),
}


def _compare_zigzag(case: Case, got: dict[int, Any]) -> None:
    for r, (_, mine) in got.items():
        _shard(case, r, mine)
    want = _layer(case)
    problems = {r: difference("out", out, want, 1e-10) for r, (out, _) in got.items()}
    wrong = {r: problem for r, problem in problems.items() if problem}
    if wrong:
        reason = "positions, rope, ring_forward, and the way back, one by one", "none of the usual mistakes alone"
        for known, found in OUTS.items():
            if case.S % (2 * case.P) == 0 and all(_equal(out, known(case)) for out, _ in got.values()):
                reason = found
                break
        right = [r for r in got if r not in wrong]
        text = next(iter(wrong.values())) + (f"; right on {who(right)}" if right else "")
        raise Wrong(f"{text}; the positions of the shards are right", reason[0], reason[1])


def _equal(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want, 1e-9, 1e-9)


def _shard(case: Case, r: int, mine: Any) -> None:
    """The positions that a rank says are its own; their order is its own business."""
    S, P = case.S, case.P
    want = zigzag.positions(S, P, r)
    if not isinstance(mine, Tensor) or mine.dim() != 1 or mine.is_floating_point():
        what = f"a tensor of {mine.dtype} of shape {tuple(mine.shape)}" if isinstance(mine, Tensor) else type(mine)
        raise Wrong(
            f"the second value is {what}, expected the positions of this rank's tokens, a 1-D int64 tensor",
            "the return statement",
            "it should end with `return out, mine`",
        )
    if torch.equal(mine.sort().values, want):
        return
    n = S // (2 * P)  # of blocks that are equally long
    blocks = [torch.arange(S * i // (2 * P), S * (i + 1) // (2 * P)) for i in range(2 * P)]
    have = set(mine.tolist())
    if have == set(contiguous.positions(S, P, r).tolist()):
        cause = (
            "these are neighbouring blocks, a contiguous shard: under a causal mask the last rank has most to compute"
        )
    elif have == {*blocks[r].tolist(), *blocks[(r + P) % (2 * P)].tolist()}:
        cause = "the second block is r + P: it should be the mirrored one, 2P - 1 - r, so that early goes with late"
    elif have == set(range(r, S, P)):
        cause = "these are stripes, which balance the work too; the exercise asks for the zigzag, two blocks for a rank"
    elif have == {*range(n * r, n * (r + 1)), *range(n * (2 * P - 1 - r), n * (2 * P - r))}:
        cause = "tokens are dropped where S is not divisible by 2P: blocks differ in length, take block(S, P, i)"
    elif have < set(want.tolist()):
        cause = "a block is missing: rank r owns two, block(S, P, r) and block(S, P, 2P - 1 - r)"
    else:
        cause = "rank r of P owns block(S, P, r) and block(S, P, 2P - 1 - r)"
    raise Wrong(
        f"rank {r} owns the positions {sorted(have)}, expected {want.tolist()}", "which blocks a rank owns", cause
    )


def _zigzag_cost(case: Case, ran: simulate.Ran) -> None:
    P, trace = case.P, ran.world.trace
    lengths = [len(zigzag.positions(case.S, P, r)) for r in range(P)]
    H, G = case.ring.q.shape[1], case.ring.k.shape[1]
    for r in range(P):
        ring = 2 * G * D * NUMBER * sum(lengths[(r - t) % P] for t in range(P - 1))
        want = ring + (P - 1) * lengths[r] * H * D * NUMBER
        if trace.bytes_sent(r) != want:
            raise Wrong(
                f"the output is right, but rank {r} sends {trace.bytes_sent(r):,} bytes; {want:,} are enough",
                "what each rank gives to ring_forward and to comm.all_gather",
                "this rank's rows of k and v go round, and its rows of out go to every other rank; nothing else does",
            )


def balance(S: int, P: int) -> str:
    """How many scores each rank computes, of the zigzag and of contiguous shards."""

    def scores(layout: Any) -> list[int]:
        return [int((layout.positions(S, P, r) + 1).sum()) for r in range(P)]

    even, uneven = scores(zigzag), scores(contiguous)
    return (
        f"Scores that a rank computes for {S} tokens on {P} ranks: {min(even):,} to {max(even):,}; with contiguous "
        f"shards {min(uneven):,} to {max(uneven):,}."
    )


_zigzag_trial = trial(
    Program(
        lambda case: (case.ring.q, case.ring.k, case.ring.v),
        lambda result: parts(result, "out, mine"),
        _compare_zigzag,
        _zigzag_cost,
        "the shapes of what is gathered: lengths=",
    ),
    _zigzag_cases,
    _zigzag_real,
)


def _zigzag_rope(rank: Rank, answer: Callable) -> str:
    return f"{_zigzag_trial(rank, answer)} {balance(64, SIMULATED)}"


zigzag_rope = Exercise("09 zigzag rope", _zigzag_rope, STUCK, prepare)

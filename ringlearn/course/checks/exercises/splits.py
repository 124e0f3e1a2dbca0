"""The checks of the torchrun exercises 07 to 09: other ways to split a sequence, and the layout that balances one.

Each is a rank program, tried on simulated ranks and then for real, as in rings.py. Memory is counted in the
simulation, where a rank is charged with every tensor that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .... import costs
from ....attention import all_gather_attention, ring_attention
from ....layouts import contiguous, zigzag
from ....masks import causal, full
from ....worlds.simulated import SimulatedWorld
from .. import oracle, simulate
from ..checker import Wrong, difference, parts
from ..mistakes import recognised
from ..nb08 import TRADE_BACK, ulysses_mistakes
from ..oracle import Case
from ..simulate import who
from .rings import D, Trial, compare_forward, forward_args, make, out_and_lse, prepare, real_cases
from .runner import Exercise

SIMULATED = 4  # ranks, on most cases
NUMBER = 8  # bytes, of float64

STUCK = (
    "which ranks get to each line with comm, and how often",
    "a rank leaves out a message that the others make, perhaps because it holds no token or sees no key",
)

# ---- 07 gather by heads: (comm, q, k, v, positions, mask) -> (out, lse) ----------------------------------------------

HEADS, GROUPS = 8, 4
MEMORY = 64  # tokens of the case whose memory is shown


def _gather_cases() -> Iterator[Case]:
    P, heads = SIMULATED, dict(H=HEADS, G=GROUPS)
    yield make(4 * P, P, full, **heads)
    yield make(4 * P, P, causal, layout=zigzag, **heads)
    yield make(10, P, causal, **heads)
    yield make(3, P, causal, **heads)  # rank 0 holds no token
    yield make(5, 1, causal, **heads)


def _gather_cost(case: Case, ran: simulate.Ran) -> None:
    P, G, lengths = case.P, case.G, case.lengths
    row = 2 * D * NUMBER  # k and v of one head
    cause = "each of the other ranks needs this rank's rows of k and v once, with their G heads, no more"
    simulate.check_bytes(ran, [(P - 1) * n * G * row for n in lengths], lambda sent: ("what is in each message", cause))
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


_gather_trial = Trial(
    (),
    lambda P: real_cases(P, H=HEADS, G=GROUPS, layout=zigzag),
    forward_args,
    out_and_lse,
    compare_forward(
        "which rows, heads and positions each call of attend gets",
        ("the lse that is returned", "it is to be that of all heads, as attend gave it: (B, H, n)"),
        ulysses_mistakes,
    ),
    _gather_cases,
    _gather_cost,
    "the shapes of what each rank gathers: lengths=",
    lambda answer: memory_seen(answer),
)


def memory_seen(answer: Callable) -> str:
    """What messages of rank 0 hold at most on four simulated ranks, counted, and by the formulas."""
    P, S = SIMULATED, MEMORY
    case = make(S, P, causal, H=HEADS, G=GROUPS)
    yours = simulate.run(answer, P, *case.args, input=case.input).held(0, "in flight")
    counted = []
    for attention in (all_gather_attention, ring_attention):
        world = SimulatedWorld(P)
        attention(*world.shard(case.q, case.k, case.v), mask=causal)
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


gather_by_heads = Exercise("07 gather by heads", _gather_trial, STUCK, prepare)

# ---- 08 Ulysses: (comm, q, k, v, positions, mask) -> (out, lse) ------------------------------------------------------


def _ulysses_cases() -> Iterator[Case]:
    P = SIMULATED
    yield make(4 * P, P, full, H=8, G=4)
    yield make(4 * P, P, causal, H=8, G=4, layout=zigzag)
    yield make(10, P, causal, H=8, G=8)
    yield make(4 * P, P, causal, H=8, G=2)  # fewer key heads than ranks
    yield make(3, P, causal, H=4, G=4)  # rank 0 holds no token
    yield make(5, 1, causal, H=4, G=2)


def _ulysses_cost(case: Case, ran: simulate.Ran) -> None:
    call = dict(itemsize=NUMBER, layout=case.layout)
    want = [costs.ulysses_bytes(case.S, case.P, case.H, case.G, D, rank=r, **call) for r in range(case.P)]
    cause = (
        "there: to each rank this rank's rows of its H / P query heads and of the key/value heads that they use. Back: "
        "to each rank its rows of out and lse, of this rank's heads. Nothing else travels"
    )
    simulate.check_bytes(ran, want, lambda sent: ("which heads and rows each rank gets", cause))


_ulysses_trial = Trial(
    (),
    lambda P: real_cases(P, H=2 * P, G=P, layout=zigzag),
    forward_args,
    out_and_lse,
    compare_forward(
        "which rows, heads and positions attend gets, and how the rows come back",
        ("the lse that is returned", "it makes the same way back as out: own rows, all heads, (B, H, n)"),
        ulysses_mistakes,
        TRADE_BACK,
    ),
    _ulysses_cases,
    _ulysses_cost,
    "the shapes of what arrives from each rank",
)

ulysses = Exercise("08 ulysses", _ulysses_trial, STUCK, prepare)

# ---- 09 zigzag and RoPE: (comm, q, k, v) -> (out of all rows, positions of its own rows) -----------------------------


def _zigzag_cases() -> Iterator[Case]:
    P = SIMULATED
    yield make(4 * P, P, causal)
    yield make(19, P, causal)  # blocks of 2 and 3 tokens
    yield make(3, P, causal)  # fewer tokens than blocks
    yield make(5, 1, causal)


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
    turned = (_rotated(x, turn) if change.get(name, name != "v") else x for name, x in zip("qkv", case[:3]))
    return oracle.dense(*turned, causal, q_at=places, k_at=places)[0]


def _mistakes(case: Case) -> tuple[tuple[str, str, Tensor], ...]:
    """Where to look, the cause, and the output of the whole text that a mistake gives."""
    mine = [zigzag.positions(case.S, case.P, r) for r in range(case.P)]
    order, local = torch.cat(mine), torch.empty(case.S, dtype=torch.int64)
    local[order] = torch.cat([torch.arange(len(own)) for own in mine])
    return (
        (
            ROPE,
            "each rank counts its rows from 0: a token's angle belongs to its place in the whole text, so rope gets "
            "the same positions as the mask",
            _layer(case, at=local),
        ),
        (
            "the positions that rope and the mask get",
            "both are counted from 0 on each rank: a token's place is that in the whole text",
            _layer(case, at=local, masked=local),
        ),
        (ROPE, "q and k are not rotated at all", _layer(case, q=False, k=False)),
        (ROPE, "q is rotated and k is not: scores depend on p - p' if both are", _layer(case, k=False)),
        (ROPE, "k is rotated and q is not: scores depend on p - p' if both are", _layer(case, q=False)),
        (ROPE, "v is rotated too: positions are in the scores alone, so q and k are", _layer(case, v=True)),
        (
            "how the rows are put back",
            "gathered rows lie in the order of the ranks: row i belongs at position torch.cat(positions)[i]",
            _layer(case)[:, :, order],
        ),
        (
            "how the rows are put back",
            "they are permuted once more, not back: out[:, :, order] = rows writes each to its place, and "
            "rows[:, :, order] does not",
            _layer(case)[:, :, order[order]],
        ),
        (
            "the positions that ring_forward gets",
            "the mask counts rows in the order of the ranks: it needs, for each rank, the positions of its tokens",
            _layer(case, masked=order.argsort()),
        ),
    )


ROPE = "the positions that rope gets"


def _compare_zigzag(case: Case, got: dict[int, Any]) -> None:
    for r, (_, mine) in got.items():
        _shard(case, r, mine)
    problems = {r: difference("out", out, _layer(case), 1e-10) for r, (out, _) in got.items()}
    wrong = {r: problem for r, problem in problems.items() if problem}
    if wrong:

        def gives(whole: Tensor) -> bool:
            return all(difference("out", out, whole, 1e-9) is None for out, _ in got.values())

        unknown = "positions, rope, ring_forward, and the way back, one by one", "none of the usual mistakes alone"
        reason = recognised(_mistakes(case) if case.S % (2 * case.P) == 0 else (), gives, unknown)
        right = [r for r in got if r not in wrong]
        text = next(iter(wrong.values())) + (f"; right on {who(right)}" if right else "")
        raise Wrong(f"{text}; the positions of the shards are right", *reason)


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
    P = case.P
    lengths = [len(zigzag.positions(case.S, P, r)) for r in range(P)]
    gathered = [(P - 1) * n * case.H * D * NUMBER for n in lengths]
    want = [2 * case.G * D * NUMBER * sum(lengths[(r - t) % P] for t in range(P - 1)) + gathered[r] for r in range(P)]
    cause = "this rank's rows of k and v go round, and its rows of out go to every other rank; nothing else does"
    simulate.check_bytes(ran, want, lambda sent: ("what each rank gives to ring_forward and to comm.all_gather", cause))


def balance(S: int, P: int) -> str:
    """How many scores each rank computes, of the zigzag and of contiguous shards."""

    def scores(layout: Any) -> list[int]:
        return [int((layout.positions(S, P, r) + 1).sum()) for r in range(P)]

    even, uneven = scores(zigzag), scores(contiguous)
    return (
        f"Scores that a rank computes for {S} tokens on {P} ranks: {min(even):,} to {max(even):,}; with contiguous "
        f"shards {min(uneven):,} to {max(uneven):,}."
    )


_zigzag_trial = Trial(
    (),
    lambda P: real_cases(P, causal),
    lambda case: case[:3],
    lambda result: parts(result, "out, mine"),
    _compare_zigzag,
    _zigzag_cases,
    _zigzag_cost,
    "the shapes of what is gathered: lengths=",
    lambda answer: balance(64, SIMULATED),
)

zigzag_rope = Exercise("09 zigzag rope", _zigzag_trial, STUCK, prepare)

"""Exercises of notebook 03, the simulated ring: 3a list_ring, 3b ring_forward; predictions and the quiz.

The ring's oracle is dense attention in float64, written with other operations than the library's own code. What known
mistakes give is computed the same way, so that a wrong answer can be told which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...attention import ring_attention
from ...costs.ring import ring_bytes
from ...flash import attend
from ...layouts import contiguous, zigzag
from ...masks import Mask, causal, full, sliding_window
from ...partial import Partial, identity, merge, merge_all
from ...tiles import plan
from ...worlds.simulated import SimulatedWorld
from ...worlds.trace import Hardware
from ...worlds.world import PerRank
from .. import viz
from ..rehearsal import rehearse
from .checker import Checker, Wrong, call, cases, parts
from .mistakes import recognised
from .oracle import Case, dense, shards
from .predictions import Prediction, Quiz
from .simulate import Ran, check_hidden, check_messages, run, who, wrong_ranks

# ---- 3a: list_ring(kv, use) -----------------------------------------------------------------------------------------


def _walk(fn: Callable, P: int) -> None:
    """Runs fn on P blocks with names, and follows every block."""
    kv = [f"kv {r}" for r in range(P)]
    input = f"kv = {kv}"
    calls: list[list[tuple[Any, str]]] = [[] for _ in range(P)]

    def use(rank: int, source: int, block: str) -> None:
        if rank not in range(P):
            raise IndexError(f"use(rank={rank}, ...): there are ranks 0 to {P - 1}")
        if len(calls[rank]) > 2 * P:
            raise RuntimeError(f"use() was called more than {2 * P} times for rank {rank}")
        calls[rank].append((source, block))

    def program() -> bool:
        fn(list(kv), use)
        return True

    call(program, input=input, where="the loops over steps and ranks", cause="each has range(P)")
    for rank, steps in enumerate(calls):
        blocks = [block for _, block in steps]
        if len(steps) != P:
            raise Wrong(
                f"rank {rank} makes {len(steps)} steps" + (f", with {', '.join(map(str, blocks))}" if blocks else ""),
                "how many steps there are",
                "its own block in step 0, then those of the P - 1 others: P steps",
            )
        strange = [block for block in blocks if block not in kv]
        if strange:
            raise Wrong(
                f"rank {rank} uses {strange[0]!r}, which is no block",
                "the third argument of use",
                "it is the block itself, which lies at kv[rank]",
            )
        if blocks[0] != kv[rank]:
            raise Wrong(
                f"in step 0 rank {rank} uses {blocks[0]}",
                "where in the loop the blocks move on",
                "they move before the first use. In step 0 every block is at home: use first, then pass on",
            )
        for step, block in enumerate(blocks):
            due = kv[(rank - step) % P]
            if block == due:
                continue
            other = block == kv[(rank + step) % P]
            raise Wrong(
                f"in step {step} rank {rank} holds {block}, expected {due}",
                "the line that moves the blocks",
                "they travel to rank - 1: each block should go to rank + 1, so the last one comes to the front"
                if other
                else "one block too far, or not at all: in each step every block moves to rank + 1, the last to rank 0",
            )
    every = [(rank, step, *found) for rank, steps in enumerate(calls) for step, found in enumerate(steps)]
    wrong = [x for x in every if x[2] != (x[0] - x[1]) % P or isinstance(x[2], bool)]
    if wrong:
        rank, step, source, block = wrong[0]
        raise Wrong(
            f"in step {step} rank {rank} holds {block}, and source is {source}",
            "the line that computes source",
            next(
                (why for formula, why in SLIPS if all(s in formula(r, t, P) for r, t, s, _ in every)),
                "after `step` hops to the right, the block here left home at rank - step, modulo P",
            ),
        )


SLIPS = (
    (lambda r, t, P: [r - t], "left of rank 0 comes rank P - 1: take it modulo P"),
    (
        lambda r, t, P: [r + t, (r + t) % P],
        "blocks travel to rank + 1, so what is here comes from the left: minus, not plus",
    ),
    (lambda r, t, P: [t - r, (t - r) % P], "the two are exchanged: the block here left home at rank - step"),
)


list_ring = Checker("3a list_ring", value=cases(_walk, (3,)), adversarial=cases(_walk, (1,), (2,), (4,), (5,)))

# ---- 3b: async ring_forward(comm, q, k, v, positions, mask) -> (out, lse) -------------------------------------------

LENGTH = (
    "length= of comm.rotate",
    "shards differ in length by a token: what arrives is as long as the positions of rank (source - 1) % P",
)
TILE_SHAPE = (
    "which positions make the tile of the mask",
    "rows are this rank's queries, positions[comm.rank]; columns the keys that are here now, positions[source]",
)


def _over(q: Tensor, blocks: list[tuple[Tensor, Tensor, Tensor]], scale: float) -> Partial:
    """Softmax of q over some (k, v, visible) blocks side by side, in float64; 0 and -inf in rows that see nothing."""
    k, v = (torch.cat([b[i] for b in blocks], 2) for i in (0, 1))
    visible = torch.cat([b[2].expand(q.shape[2], b[0].shape[2]) for b in blocks], -1)
    return Partial(*dense(q, k, v, lambda i, j: visible, scale=scale))


def _known(case: Case) -> dict[str, list[Tensor]]:
    """What each rank's out is under known mistakes."""
    q, k, v, at, mask = case.args
    P = case.P
    scale = case.q.shape[-1] ** -0.5
    found: dict[str, list[Tensor]] = {name: [] for name in MISTAKES}
    for r in range(P):

        def tile(held: int, taken_for: int, r: int = r) -> tuple[Tensor, Tensor, Tensor] | None:
            visible = mask(at[r][:, None], at[taken_for][None, :])
            if visible.shape[-1] != k[held].shape[2]:
                return None  # such a mistake would not run on these shards
            return k[held], v[held], visible

        def local(j: int, r: int = r) -> tuple[Tensor, Tensor, Tensor]:
            return k[j], v[j], torch.ones(len(at[r]), len(at[j]), dtype=torch.bool).tril()

        order = [(r - t) % P for t in range(P)]
        tiles = [tile(j, j) for j in order]
        seen = [j for j, (_, _, visible) in zip(order, tiles) if visible.any()]
        lists = {
            "direction": [tile((r + t) % P, j) for t, j in enumerate(order)],
            "one step early": [tile(order[min(t + 1, P - 1)], j) for t, j in enumerate(order)],
            "one step late": [tile(j, (j - 1) % P) for j in order],
            "local": [local(j) for j in order],
            "local, future skipped": [local(j) for j in seen] or [local(r)],
            "own block only": [tile(r, r)],
            "own block under each mask": [tile(r, j) for j in order],
            "last block left out": tiles[:-1] or tiles,
            "own block left out": tiles[1:] or tiles,
            "later ranks skipped": [tile(j, j) for j in order if j <= r],
            "no mask": [(k[j], v[j], torch.ones(len(at[r]), len(at[j]), dtype=torch.bool)) for j in order],
            "mask turned round": [(k[j], v[j], mask(at[j][:, None], at[r][None, :]).T) for j in order],
        }
        for name, blocks in lists.items():
            if all(b is not None for b in blocks):
                found[name].append(_over(q[r], blocks, scale).out)
        found["no scale"].append(_over(q[r], tiles, 1.0).out)
        partials = [_over(q[r], [b], scale) for b in tiles]
        found["sum"].append(sum(p.out for p in partials))
        found["mean"].append(sum(p.out for p in partials) / P)
        found["not merged"].append(partials[-1].out)
        if len(set(case.lengths)) == 1:
            alone = [(k[j], v[r], visible) for j, (_, _, visible) in zip(order, tiles)]
            found["k alone travels"].append(_over(q[r], alone, scale).out)
            moving = [_over(q[j], [b], scale) for j, b in zip(order, tiles)]
            found["q travels too"].append(merge_all(moving).out)
        stale, first = partials[0].out, partials[0].lse
        for p in partials[1:]:
            stale = merge(Partial(stale, first), p).out
        found["lse not updated"].append(stale)
    return {name: outs for name, outs in found.items() if len(outs) == P}


OWN = "what arrives is never used: k, v = await ... must replace k and v, and be merged"
HELD = "whose block is here in which step, and whose mask it gets"
MISTAKES = {
    "direction": (HELD, "rotate sends to rank + 1, so in step t the block of (rank - t) % P is here: minus, not plus"),
    "one step early": (HELD, "k and v are replaced before they are used: compute with what is here, then await"),
    "one step late": (HELD, "source is counted one step too far: in step 0 it is this rank"),
    "local": (
        "the mask of a block that is not this rank's own",
        "a triangle fits this rank's own block only: what a query sees follows from the global positions of both, "
        "positions[rank] and positions[source]",
    ),
    "local, future skipped": (
        "the mask of a block of the past",
        "a triangle fits this rank's own block only: of the past a query sees everything. Use mask(q positions, "
        "k positions)",
    ),
    "own block only": ("what becomes of the data that arrives", OWN),
    "own block under each mask": ("what becomes of the data that arrives", OWN),
    "last block left out": ("how many blocks are computed", "P blocks need P computations, and P - 1 rotates"),
    "own block left out": ("what is computed before the first await", "this rank's own block counts too: it is step 0"),
    "no mask": (
        "the argument `visible` of attend",
        "the mask is not applied, or to positions without [:, None] and [None, :], which make rows and columns of them",
    ),
    "later ranks skipped": (
        "what is skipped",
        "blocks of later ranks are left out by their number. That fits a causal mask on contiguous shards only: ask "
        "mask, with the positions",
    ),
    "k alone travels": ("what each rotate sends", "k moves on and v stays: a key and its value travel together"),
    "q travels too": ("what each rotate sends", "q stays where it is: only keys and values go round"),
    "mask turned round": ("the arguments of mask", "queries first: mask(q_pos[:, None], k_pos[None, :])"),
    "no scale": ("the scale that attend gets", "scores are divided by sqrt(D): scale = 1 / sqrt(q.shape[-1])"),
    "sum": ("how a new partial result joins the others", "they are added: merge weights them by their lse, rl.merge"),
    "mean": ("how a new partial result joins the others", "they are averaged: rl.merge weights them by their lse"),
    "not merged": ("what becomes of earlier partial results", "each step replaces the result: merge into it instead"),
    "lse not updated": (
        "the lse of the running result",
        "out is merged and lse is not: two blocks come out right, a third one is weighted wrongly. Keep both of merge",
    ),
}


UNKNOWN = (
    "source, the mask's tile, and what is merged, for the first rank that is wrong",
    "take its steps one by one: whose block is here, which of its keys are seen, is it merged once",
)


def _ring(fn: Callable, S: int, P: int, mask: Mask, words: dict[str, Any] | None = None, **sizes: Any) -> Ran:
    """Runs fn on a case, and holds out and lse of every rank against dense attention.

    words: where, cause and shapes, as for ``simulate.run``.  sizes: as for ``shards``.
    """
    case, words = shards(S, P, mask=mask, **sizes), words or {}
    ran = run(fn, P, *case.args, input=case.input, **words)
    longest = max((len(result) for result in ran.results if isinstance(result, tuple)), default=0)
    if longest > 2:
        raise Wrong(
            f"your function returns a tuple of {longest}, not the pair (out, lse)",
            "how a new partial result joins the others",
            "`+` puts one pair behind the other: rl.merge(a, b) makes one pair of two",
        )
    results = [parts(result, "out, lse") for result in ran.results]
    out, lse = case.dense()
    outs = [result[0] for result in results]
    wrong = wrong_ranks("out", outs, case.split(out), 1e-5)
    if wrong:
        right = [r for r in range(P) if r not in wrong]
        rank, problem = next(iter(wrong.items()))
        some = f"{who(right)} {'is' if len(right) == 1 else 'are'} right; " if right else ""
        unknown = (words["where"], words["cause"]) if "where" in words else UNKNOWN
        known = ((*MISTAKES[name], known) for name, known in _known(case).items())
        look, reason = recognised(known, lambda known: not wrong_ranks("out", outs, known, 1e-4), unknown)
        if "shape" in problem:
            look, reason = "the return statement", "out is this rank's rows (B, H, n, D), merged over all blocks"
        elif "NaN" in problem:
            look, reason = "rows that have seen no key yet", "merge with rl.merge, and start with rl.identity(shape)"
        raise Wrong(f"{some}on rank {rank} {problem}", look, reason)
    wrong = wrong_ranks("lse", [result[1] for result in results], case.split(lse, -1), 1e-5)
    if wrong:
        rank, problem = next(iter(wrong.items()))
        raise Wrong(
            f"out is right; on rank {rank} {problem}",
            "the second value that is returned",
            "lse is that of the merged result, over all keys: return result.out, result.lse",
        )
    return ran


ALONE = "P steps: one rank alone has nothing to send, and its own block to compute"


def _forward_adversarial(fn: Callable) -> None:
    # Not 10 tokens: of shards of 2, 3, 2, 3 both neighbours are equally long, and that of source + 1 would do as well
    _ring(fn, 11, 4, causal, dict(shapes=LENGTH))
    no_tokens = dict(
        where="a rank without tokens",
        cause="it has nothing to compute and still passes on what arrives; attend and merge take empty tensors",
        shapes=TILE_SHAPE,
    )
    _ring(fn, 2, 4, causal, no_tokens)
    heads = dict(
        where="heads, and the scale",
        cause="attend groups the heads by itself, from the shapes; scale = 1 / sqrt(D), the last dim of q",
        shapes=("the shape of the running result", "it has the heads of q: rl.identity(q.shape)"),
    )
    _ring(fn, 8, 4, causal, heads, H=4, G=2, D=9)
    where = "how the mask's tile is found, and what is skipped"
    cause = "comparing the numbers of ranks works for contiguous shards only: ask mask, with the positions"
    _ring(fn, 8, 4, causal, dict(where=where, cause=cause), layout=zigzag)
    cause = "not every past key is seen under every mask: ask mask, with the positions, for every block"
    _ring(fn, 12, 4, causal & sliding_window(4), dict(where=where, cause=cause))


def _forward_cost(fn: Callable) -> None:
    S, P, G, D = 16, 4, 2, 8
    ran = _ring(fn, S, P, full, H=4, G=G, D=D)
    check_messages(ran, P - 1, [ring_bytes(S, P, G, D, itemsize=4, rank=r) for r in range(P)])
    shard = 2 * G * D * 4 * S // P
    for rank in range(P):
        held = ran.held(rank, "in flight")
        if held > 2 * shard:
            raise Wrong(
                f"the values are right, but rank {rank} holds {held // shard} shards of k and v besides its own",
                "what is kept from one step to the next",
                "all blocks are collected before they are used, or kept afterwards. Two are enough: the one in "
                "use and the one that arrives",
            )
    check_hidden(ran)
    # The same shards on more ranks: what a rank makes is as large as before.
    few, many, n, D = 3, 5, 32, 16
    made = [_ring(fn, n * P, P, causal, D=D).held(P - 1, "partial results") for P in (few, many)]
    masks = (many - few) * n * n  # bool, of the tiles that there are more of
    if made[1] - made[0] > masks / 2:
        one_mask = made[1] - made[0] < 1.5 * masks
        raise Wrong(
            f"the values are right, but with {many} ranks the last one holds {made[1]:,} bytes of its own making, with "
            f"{few} ranks {made[0]:,}, although its shard is as long",
            "which mask is made, and when" if one_mask else "what is kept from one step to the next",
            "a mask for the keys of all ranks is made at once: make that of one block, when its keys are here"
            if one_mask
            else "every step's partial result is kept, and merged at the end: merge each into one running result",
        )


ring_forward = Checker(
    "3b ring_forward",
    value=cases(
        _ring, (4, 1, causal, dict(where="the first step", cause=ALONE)), (6, 3, full), (8, 4, causal), (15, 5, causal)
    ),
    adversarial=_forward_adversarial,
    cost=_forward_cost,
)

# ---- Predictions and the quiz ---------------------------------------------------------------------------------------


def _computed_tiles(P: int) -> int:
    """How many of the P x P tiles the causal mask leaves something of."""
    ranges = contiguous.ranges(4 * P, P)
    return sum(bool(plan(causal, q, k)) for q in ranges for k in ranges)


def _small_ring(P: int, H: int = 2, G: int = 1) -> SimulatedWorld:
    world = SimulatedWorld(P)
    q, k, v = (torch.zeros(1, heads, 8 * P, 4) for heads in (H, G, G))
    ring_attention(*world.shard(q, k, v))
    return world


def shards_held(P: int) -> int:
    """How many shards of k and v a rank of the library's ring holds at most, its own and those in flight included."""
    peak = _small_ring(P).memory.peak(0)
    return (peak["k, v"] + peak.get("in flight", 0)) // peak["k, v"]


def wrong_direction(P: int) -> int:
    """How many of P ranks are wrong if blocks travel the other way under a causal mask."""
    return sum(not row[-1].right for row in viz.stepper.visits(P, other_way=True))


async def _plain_ring(comm, q, k, v):
    result = identity(q.shape)
    for step in range(comm.size):
        result = merge(result, attend(q, k, v, None, 1.0))
        if step < comm.size - 1:
            k, v = await comm.rotate(k, v)
    return result


def full_q_flops(P: int) -> int:
    """How many times the operations a ring makes in all if each of P ranks keeps the full q; counted."""
    q, k, v = (torch.zeros(1, 1, 4 * P, 4) for _ in range(3))
    counts = []
    for queries in (PerRank(q.split(4, 2)), q):
        with FlopCounterMode(display=False) as counter:
            SimulatedWorld(P).run(_plain_ring, queries, PerRank(k.split(4, 2)), PerRank(v.split(4, 2)))
        counts.append(counter.get_total_flops())
    return counts[1] // counts[0]


predict_tiles = Prediction(
    "Tiles", lambda: _computed_tiles(8), "Rank r has r tiles of the past and its own triangle: P (P + 1) / 2."
)
predict_bytes = Prediction(
    "Bytes sent by a rank",
    lambda: ring_bytes(2048, 4, G=2, D=64, itemsize=4),
    "3 hops x 2 (k and v) x 2 heads x 512 tokens x 64 numbers x 4 bytes. The query heads do not count.",
    unit="bytes",
)
predict_shards = Prediction(
    "Shards of k and v",
    lambda: shards_held(4),
    "Its own, which the caller keeps, the one that it computes with, and the one that arrives meanwhile.",
)
predict_direction = Prediction(
    "Wrong ranks",
    lambda: wrong_direction(4),
    "Ranks 1 and 2. For rank 0 all other blocks lie in the future, and for rank 3 all lie in the past: there it makes "
    "no difference whose a block is taken for.",
)

quiz = Quiz(
    "Quiz 03",
    (lambda: viz.stepper.visits(5, full)[2][4].held, "(2 - 4) % 5; its block has made four hops."),
    (lambda: sum(x.kind != "nothing" for x in viz.stepper.visits(8)[5]), "Blocks 0 to 4 whole, and its own triangle."),
    (
        lambda: _small_ring(4, H=8, G=2).trace.bytes_sent(0) // _small_ring(4, H=2, G=2).trace.bytes_sent(0),
        "Only k and v travel, and their heads are the G.",
    ),
    (lambda: full_q_flops(8), "Each rank does the work of all of them, so each output is computed 8 times."),
    (lambda: wrong_direction(2), "With two ranks, left and right are the same neighbour."),
    (
        lambda: rehearse(8, operations=2, nbytes=3, hardware=Hardware(1, 1, 0)).makespan(),
        "(P - 1) max(C, M) + C: seven steps last as long as their message, 3 seconds, and the last one 2.",
    ),
)

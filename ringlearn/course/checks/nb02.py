"""Exercises of notebook 02, flash attention: 2a tiled_forward, 2b row_backward, 2c tiled_backward, 2d traffic.

Each oracle here is attention by its definition, all scores at once in float64, with autograd for the gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import costs
from ...masks import Mask, causal, full
from ...masks import mask as mask_of
from ...worlds.memory import LiveBytes
from .checker import Checker, Wrong, call, cases, difference, parts, show
from .gradients import NAMES
from .mistakes import Reason
from .oracle import dense, numbers
from .predictions import Prediction, Quiz

INF = math.inf
EARLIER = mask_of(lambda q, k: k < q)  # only keys before the query: query 0 sees none

# ---- The oracle -----------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    """Inputs of attention, the blocks that it is to be tiled by, and, by its definition in float64, its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask
    blocks: tuple[int, int]  # of queries, of keys
    note: str  # on the inputs, for a message
    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, Tensor, Tensor]

    def __str__(self) -> str:
        B, H, S, D = self.q.shape
        G, S_k, D_v = self.v.shape[1:]
        mask = "full" if self.mask is full else "causal" if self.mask is causal else "keys before the query"
        if H == S == D == 1:
            text = f"one query, scores = {show(self.k.flatten())}, v = {show(self.v.flatten())}"
        else:
            heads = f"H={H}, " if H == G else f"H={H}, G={G}, "
            length = f"S={S}, " if S == S_k else f"{S} queries, {S_k} keys, "
            dims = f"D={D}" if D == D_v else f"D={D}, D_v={D_v}"
            text = f"B={B}, {heads}{length}{dims}, mask: {mask}"
        return "{}, block_q={}, block_k={}{}".format(text, *self.blocks, self.note)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, blocks: tuple[int, int], note: str = "", dout: Tensor | None = None
) -> Attention:
    """All scores at once; rows that see no key give 0 and -inf, and no gradient."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, mask)
    dout = numbers(99, *out.shape) if dout is None else dout
    grads = torch.autograd.grad(out, leaves, dout.double())
    return Attention(q, k, v, dout, mask, blocks, note, out.detach(), lse.detach(), grads)


def inputs(
    shape: tuple[int, ...], blocks: tuple[int, int], mask: Mask = full, note: str = "", *, B: int = 1, times: float = 1
) -> Attention:
    """Attention over random numbers of shape (S, H, G, D, D_v); q is multiplied by ``times``."""
    S, H, G, D, D_v = shape
    q, k, v = (numbers(seed, B, *x) for seed, x in enumerate(((H, S, D), (G, S, D), (G, S, D_v))))
    return attention(times * q, k, v, mask, blocks, note)


def by_hand(scores: Sequence[float], values: Sequence[float], block_k: int, note: str = "") -> Attention:
    """One query with these scores (D = 1, so that scale is 1), these values, and dout = 2."""
    q = torch.ones(1, 1, 1, 1)
    k, v = (torch.tensor(x, dtype=torch.float32).reshape(1, 1, -1, 1) for x in (scores, values))
    return attention(q, k, v, full, (1, block_k), note, dout=2 * q)


def _difference(name: str, got: object, want: Tensor, tolerance: float) -> str | None:
    """As difference, but the few numbers of a small tensor stand in one list."""
    if isinstance(got, Tensor) and got.shape == want.shape:
        got, want = got.flatten(), want.flatten()
    return difference(name, got, want, tolerance)


# ---- 2a: tiled_forward(q, k, v, mask, block_q, block_k) -> (out, lse) -----------------------------------------------

_NAN = (
    "a row of a tile that sees none of the tile's keys: all its scores are -inf",
    "-inf - (-inf) is NaN, and so is torch.softmax of a row of -inf. rl.two_pass and rl.merge know this case",
)
_LAST_TILE = (
    inputs((5, 1, 1, 1, 1), (2, 3)),
    "the last tile of a row or a column, which is smaller than the others",
    "the ragged rest is dropped, or padded with zeros, whose scores of 0 are keys of weight exp(0) = 1; or positions "
    "go past the end: a slice ends by itself at S, arange(i, i + block_q) does not",
)
_SKIPPED = (
    inputs((9, 1, 1, 4, 4), (4, 2), causal),
    "which tiles are left out because the mask hides all of them",
    "a tile may be skipped only if its first key is behind its last query",
)
_POSITIONS = (
    "the positions that the mask is asked about (without a mask you are right)",
    "the mask wants global positions: row r of the tile that starts at query i is at i + r, and so for keys. With "
    "positions counted from the tile's corner every tile looks like the first",
)
_SHAPES = (
    "how q, k and v are cut, and the shapes that meet in a tile",
    "the sequence is dim 2: q[:, :, rows], k[:, :, columns]; a tile's scores are (B, H, rows, columns); what belongs "
    "to a row, as lse, needs a last dim of 1 beside them; the mask wants i[:, None] and j",
)


_SWAPPED = (
    "the two arguments of mask",
    "they are swapped: the positions of the queries come first and are a column, i[:, None]; then come those of the "
    "keys, j. What mask returns then has a row for each query and a column for each key",
)


_TURNED = (
    "what is done with the mask of a tile, between the call of mask and the scores",
    "it is transposed. With i[:, None] and j, mask already returns a row for each query and a column for each key, as "
    "q @ k.mT has them: no .mT, no .T",
)


class _Turned(Mask):
    """A mask whose rows and columns are exchanged in what it returns."""

    def __init__(self, mask: Mask):
        self.mask = mask

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self.mask(q_pos, k_pos)
        return seen.mT if seen.ndim > 1 else seen


def _is_block(positions: Tensor, S: int, size: int) -> bool:
    """Whether these are the positions of one of the blocks of this size that S tokens are cut into."""
    at = positions.flatten().tolist()
    return bool(at) and at[0] % size == 0 and at == list(range(at[0], min(at[0] + size, S)))


def _names_a_swap(check: Callable) -> Callable:
    """check(fn, a, ...), which says so if fn was wrong and gave the mask's arguments in the other order.

    The order shows where a block of queries and one of keys differ in size. If it is right, but fn would pass with a
    mask that returns rows for columns, fn has transposed what mask returns.
    """

    @wraps(check)
    def checked(fn: Callable, a: Attention, *rest: Any, **options: Any) -> None:
        tokens, swapped = (a.q.shape[2], a.k.shape[2]), False

        def watched(i: Tensor, j: Tensor) -> Tensor:
            nonlocal swapped
            in_order, reverse = (all(map(_is_block, x, tokens, a.blocks)) for x in ((i, j), (j, i)))
            swapped |= reverse and not in_order
            return a.mask(i, j)

        def run(mask: Mask) -> None:
            check(lambda *given: fn(*(mask if x is a.mask else x for x in given)), a, *rest, **options)

        try:
            run(mask_of(watched))
        except Wrong as wrong:
            if swapped:
                raise Wrong(wrong.symptom, *_SWAPPED, wrong.input) from wrong
            try:
                run(_Turned(a.mask))
            except Wrong:
                raise wrong from None
            raise Wrong(wrong.symptom, *_TURNED, wrong.input) from wrong

    return checked


def _shapes(a: Attention, where: str, cause: str) -> Reason:
    """Where to look and the cause if shapes do not fit: what the input is about, if it is about shapes."""
    ragged = any(n > block and n % block for n, block in zip((a.q.shape[2], a.k.shape[2]), a.blocks))
    special = ragged or a.q.shape[1] != a.k.shape[1] or a.q.shape[-1] != a.v.shape[-1]
    return (where, cause) if special else _SHAPES


@_names_a_swap
def _forward(fn: Callable, a: Attention, where: str, cause: str) -> None:
    """Holds fn's (out, lse) against the definition."""
    arguments = a.q.clone(), a.k.clone(), a.v.clone(), a.mask, *a.blocks
    result = call(fn, *arguments, input=str(a), where=where, cause=cause, shapes=_shapes(a, where, cause))
    out, lse = parts(result, "out, lse")
    wrong = {"out": _difference("out", out, a.out, 1e-5), "lse": _difference("lse", lse, a.lse, 1e-5)}
    if not any(wrong.values()):
        return
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in (out, lse)]
    due = [tuple(a.out.shape), tuple(a.lse.shape)]
    if shapes != due:
        where, cause = "what is returned", "two tensors, out (B, H, S_q, D_v) and lse (B, H, S_q), over all queries"
        if shapes == due[::-1]:
            where, cause = "the return statement", "the pair is in the other order: `return out, lse`"
        elif isinstance(out, Tensor) and out.numel() == a.out.numel() and sorted(shapes[0]) != sorted(due[0]):
            where, cause = "how the blocks are joined", "along the sequence, which is dim 2: torch.cat(outs, 2)"
        elif shapes[0] and len(shapes[0]) == 4 and shapes[0][-2] != due[0][-2]:
            where = "the rows of out: every block of queries must be in it, in order"
            cause = "one block's result overwrites another's, or the last, shorter block is dropped or padded"
    elif a.mask is causal and not a.note and bool(out.isnan().any() | lse.isnan().any()):
        where, cause = _NAN
    elif not wrong["out"]:
        where, cause = _about_lse(lse, a.lse)
    elif a.k.shape[2] > (n := a.q.shape[2]):
        only = dense(a.q, a.k[:, :, :n], a.v[:, :, :n], a.mask)[0]  # attention to as many keys as there are queries
        if difference("out", out, only, 1e-5) is None:
            where, cause = _END_OF_KEYS
    raise Wrong(wrong["lse"] if not wrong["out"] else wrong["out"], where, cause)


_END_OF_KEYS = (
    "where the loop over keys ends",
    "there are S_k = k.shape[2] keys, which need not be as many as the queries, q.shape[2]",
)


def _about_lse(got: Tensor, want: Tensor) -> Reason:
    where = "the lse that is returned (out is right here)"
    seen = want != -INF
    if ((got == -INF) != ~seen).any():
        return where, "a row that sees no key has lse -inf, and no other has"
    ratio = got.double()[seen] / want[seen]
    if torch.allclose(ratio, ratio.new_tensor(1 / math.log(2)), atol=1e-3):
        return where, "it is in base 2, 1.4427 times too large: lse is the natural logarithm"
    return where, "it must be the lse of all keys, of the scores that out was made of (with scale), merged tile by tile"


_forward_value = cases(
    _forward,
    (
        by_hand([0.0], [3.0], 1),
        "one query, one key: out = v, lse = the score",
        "softmax over one key is 1, whatever its score",
    ),
    (
        by_hand([0.0, 1.0, 2.0], [1.0, 0.0, 4.0], 3),
        "one tile: the softmax of its scores, times v",
        "out = p @ v, and lse = log(sum(exp(s))), not the maximum and not the sum",
    ),
    (
        by_hand([2.0, 1.0, 0.0], [1.0, 0.0, 4.0], 1),
        "three tiles beside each other: how their results become one",
        "each tile is normalised by its own sum: merge by lse, do not add, average or overwrite",
    ),
    (
        by_hand([0.0, 1.0, 2.0], [1.0, 0.0, 4.0], 1),
        "what happens to the result so far when a larger score arrives (on descending scores you are right)",
        "with a running maximum, l and acc so far must be multiplied by exp(m_old - m_new)",
    ),
    (
        inputs((2, 1, 1, 4, 4), (2, 2)),
        "the scale, 1 / sqrt(D), which is 1/2 here (with D = 1 you are right)",
        "scores are q @ k.mT / sqrt(D), exactly once: neither left out nor applied again inside attend_tile",
    ),
    (
        inputs((4, 1, 1, 1, 1), (2, 4)),
        "the second block of queries (with one block you are right)",
        "each block of queries has a running result of its own, which starts at the identity, and its own rows of out",
    ),
    _LAST_TILE,
    (inputs((4, 1, 1, 1, 1), (1, 2), causal), *_POSITIONS),
    (inputs((4, 1, 1, 1, 1), (2, 2), causal), *_POSITIONS),
    (
        inputs((4, 4, 2, 4, 4), (2, 2)),
        "which key/value head a query head uses: H=4, G=2",
        "query heads 0, 1 share key head 0 and heads 2, 3 share key head 1: repeat_interleave, not repeat",
    ),
    (
        inputs((4, 2, 2, 4, 3), (2, 2)),
        "the last dim of out",
        "out has the head dim of v, which may differ from that of q and k; scale is taken from q's",
    ),
)
_forward_adversarial = cases(
    _forward,
    _SKIPPED,
    (
        inputs((97, 4, 2, 16, 8), (32, 16), causal, B=2),
        "everything at once, on lengths that no tile divides",
        "some tile is computed wrongly or left out: compare with the whole for S = 97, tile by tile",
    ),
    (
        inputs((5, 1, 1, 4, 4), (2, 2), EARLIER),
        "a row that sees no key: query 0 here",
        "its out is 0 and its lse -inf, and no NaN comes near: -inf - (-inf) is NaN, and torch.softmax of a row of "
        "-inf too. rl.two_pass and rl.merge know this case",
    ),
    (
        inputs((12, 1, 1, 4, 4), (4, 4), causal, ", scores around 1e4", times=1e4),
        "the argument of every exp: how large can it get?",
        "scores of 1e4 overflow exp: subtract the running maximum, or merge pairs (out, lse)",
    ),
)


def _peak(fn: Callable, arguments: tuple, shown: str) -> int:
    with LiveBytes() as memory:
        call(fn, *arguments, input=shown)
    return memory.peak


def _cost(fn: Callable, arguments_of: Callable[[int], tuple], what: str) -> None:
    """Peak live memory at S and at 2 S: linear, not quadratic; smaller with smaller blocks of either kind; and the
    tiles have block_q queries and block_k keys."""
    S, size = 512, 64
    few, many = (_peak(fn, (*arguments_of(n), size, size), f"S={n}") for n in (S, 2 * S))
    if many > 2.2 * few:
        raise Wrong(
            f"the values are right, but peak memory grows from {few:,} to {many:,} bytes, {many / few:.1f} times, "
            "when S doubles",
            "every tensor with two dims of length S: scores, weights, masks, differences of positions",
            "something is built for all tiles at once: make it for one tile, inside the inner loop, and let it go",
            input=f"{what}, block_q=block_k={size}, at S={S} and S={2 * S}",
        )
    for name, tokens, blocks in (("block_q", "queries", (S, size)), ("block_k", "keys", (size, S))):
        one = _peak(fn, (*arguments_of(S), *blocks), f"S={S}, {name}={S}")
        if few > 0.75 * one:
            raise Wrong(
                f"the values are right, but {name} changes nothing: peak memory is {few:,} bytes with {name}={size}, "
                f"and {one:,} with {name}={S}",
                f"the loop over blocks of {tokens}, and what is cut with {name}",
                f"{name} is not used: take {name} {tokens} at a time, so that no tile is larger than block_q x block_k",
                input=f"{what}, S={S}, the other block {size}",
            )
    _tiles(fn, arguments_of, what)


def _tiles(fn: Callable, arguments_of: Callable[[int], tuple], what: str) -> None:
    """Whether tiles have block_q queries and block_k keys, by the positions that the mask is asked about.

    A block may be asked about with all of the other kind at once, so either number alone may be S.
    """
    S, block_q, block_k, asked = 96, 32, 8, (0, 0)

    def watched(i: Tensor, j: Tensor) -> Tensor:
        nonlocal asked
        asked = max(asked[0], i.numel()), max(asked[1], j.numel())
        return causal(i, j)

    shown = f"{what}, S={S}, block_q={block_q}, block_k={block_k}"
    call(fn, *arguments_of(S)[:-1], mask_of(watched), block_q, block_k, input=shown)
    if asked in ((block_k, block_q), (block_k, S), (S, block_q)):
        raise Wrong(
            "the values are right, but the mask is asked about {} queries and {} keys at a time, with block_q={} and "
            "block_k={}".format(*asked, block_q, block_k),
            "which argument cuts the queries, and which the keys",
            "block_q and block_k are exchanged: a tile has block_q queries and block_k keys",
            input=shown,
        )


def _forward_cost(fn: Callable) -> None:
    def arguments(S: int) -> tuple:
        q, k, v = (numbers(seed, 1, 2, S, 16) for seed in range(3))
        return q, k, v, causal

    _cost(fn, arguments, "H=2, D=16, causal")


tiled_forward = Checker("2a tiled_forward", value=_forward_value, adversarial=_forward_adversarial, cost=_forward_cost)

# ---- 2b: row_backward(p, v, dout) -> ds -----------------------------------------------------------------------------


def _row(fn: Callable, given: tuple[Any, Any, Any], where: str, cause: str) -> None:
    """Holds fn's ds for p, v, dout against autograd through softmax."""
    p, v, dout = (torch.as_tensor(x, dtype=torch.float32) for x in given)
    shown = f"p = {show(p)}, v = {show(v)}, dout = {show(dout)}" if len(p) <= 4 else f"N={len(p)}, D_v={v.shape[1]}"
    shapes = "the shapes: p (N,), v (N, D_v), dout (D_v,)", "dp is v @ dout, one number for each key"
    ds = call(fn, p.clone(), v.clone(), dout.clone(), input=shown, where=where, cause=cause, shapes=shapes)
    s = p.double().log().requires_grad_()
    (want,) = torch.autograd.grad(torch.softmax(s, -1) @ v.double(), s, dout.double())
    # ds may be 0 in truth: what counts then is its size beside the terms that cancel.
    size = float((p.double() * (v.double() @ dout.double())).norm())
    problem = difference("ds", ds, want, 1e-5)
    if problem and isinstance(ds, Tensor) and ds.shape == want.shape:
        if not ds.isnan().any() and float((ds.double() - want).norm()) <= 1e-5 * size:
            return
        if torch.allclose(ds.double(), -want, atol=1e-5 * size):
            where = "the sign"
            cause = "with dp = v @ dout and delta the mean of dp weighted by p, it is dp - delta, not delta - dp"
        elif torch.allclose(ds.double(), p.double() * (v.double() @ dout.double()), atol=1e-5 * size):
            where = "what all keys of a row share"
            cause = (
                "p * dp alone, with dp = v @ dout, forgets that raising one score lowers all other weights: subtract "
                "the mean of dp weighted by p"
            )
    elif problem:
        where = "the shape of ds"
        cause = "one number for each key: dp = v @ dout has as many, and their mean is one number for the row"
    if problem:
        raise Wrong(problem, where, cause)


def _row_value(fn: Callable) -> None:
    check = partial(_row, fn)
    check(
        ([1.0], [[1.0]], [2.0]),
        "a row with one key: its weight is 1 whatever its score is, so ds is 0",
        "call dp_j = dout . v_j, and delta the mean of all dp weighted by p: with a single key they are equal, so "
        "dp - delta is 0",
    )
    p, v = [0.5, 0.25, 0.25], [[1.0], [0.0], [4.0]]
    check(
        (p, v, [2.0]),
        "the row of the text, in which ds = (-0.5, -0.75, 1.25)",
        "call dp_j = dout . v_j. What counts is how far dp_j lies above delta, the mean of all dp weighted by p: "
        "sum(p * dp), which is 3 in this row",
    )
    check(
        (p, v, [-1.0]),
        "what changes with dout: ds is proportional to it",
        "dout goes into each dp_j = dout . v_j, and with it into their mean; ds changes sign when dout does",
    )


_row_adversarial = cases(
    _row,
    (
        (torch.softmax(3 * numbers(0, 9), -1), numbers(1, 9, 5), numbers(2, 5)),
        "values with more than one number, D_v = 5 here",
        "dp_j is the dot product of dout and v_j. Each key has one dp and the row has one delta: dp = v @ dout, "
        "delta = p @ dp",
    ),
)
row_backward = Checker("2b row_backward", value=_row_value, adversarial=_row_adversarial)

# ---- 2c: tiled_backward(dout, q, k, v, out, lse, mask, block_q, block_k) -> (dq, dk, dv) ----------------------------


@_names_a_swap
def _backward(fn: Callable, a: Attention, where: str, cause: str | dict[str, str], tolerance: float = 1e-5) -> None:
    """Holds fn's three gradients against autograd through the definition.

    cause: one, or one for each set of wrong gradients, such as "dq dk", and for "else".
    """
    tensors = [x.clone() for x in (a.dout, a.q, a.k, a.v, a.out.float(), a.lse.float())]
    told = cause if isinstance(cause, str) else cause["else"]
    shapes = _shapes(a, where, told)
    result = call(fn, *tensors, a.mask, *a.blocks, input=str(a), where=where, cause=told, shapes=shapes)
    got = parts(result, "dq, dk, dv")
    # A gradient that is 0 in truth (one key: dq, dk) has no relative error: an absolute 1e-6 will do.
    wrong = {
        name: _difference(name, mine, right, tolerance)
        for name, mine, right in zip(NAMES, got, a.grads)
        if not _near(mine, right)
    }
    wrong = {name: problem for name, problem in wrong.items() if problem}
    if not wrong:
        return
    for name, mine, right, like in zip(NAMES, got, a.grads, "qkv"):
        if not isinstance(mine, Tensor) or mine.shape != right.shape:
            where, cause = f"the shape of {name}", f"a gradient has the shape of its tensor: {name} that of {like}"
            if name != "dq" and isinstance(mine, Tensor) and mine.shape[1] == a.q.shape[1] != right.shape[1]:
                cause = "k and v have G heads, so have dk and dv: sum over the query heads that share one"
            raise Wrong(wrong[name], where, cause)
    if isinstance(cause, dict):
        cause = cause.get(" ".join(wrong), cause["else"])
    where, cause = _pattern(a, got, wrong) or (where, cause)
    right = [name for name in NAMES if name not in wrong]
    symptom = "; ".join(wrong.values()) + (f" ({' and '.join(right)} right)" if right else "")
    raise Wrong(symptom, where, cause)


def _first_half(a: Attention) -> Attention:
    """The same with half of the keys, and what these add to the gradients: out and lse stay those of the whole rows."""
    keys, scale = slice(0, a.k.shape[2] // 2), a.q.shape[-1] ** -0.5
    s = (scale * a.q.double() @ a.k.double().mT).requires_grad_()
    (ds,) = torch.autograd.grad(torch.softmax(s, -1) @ a.v.double(), s, a.dout.double())
    k, v, dk, dv = (x[:, :, keys] for x in (a.k, a.v, *a.grads[1:]))
    note = f" (the first half; out and lse are over all {a.k.shape[2]} keys)"
    return a._replace(k=k, v=v, note=note, grads=(scale * ds[..., keys] @ k.double(), dk, dv))


def _near(mine: object, right: Tensor) -> bool:
    return (
        isinstance(mine, Tensor)
        and mine.shape == right.shape
        and torch.allclose(mine.detach().double(), right, rtol=1e-5, atol=1e-6)
    )


def _pattern(a: Attention, got: Sequence[Tensor], wrong: dict[str, str]) -> Reason | None:
    """Mistakes that show in which gradients are wrong, and by how much."""
    root, n, want = math.sqrt(a.q.shape[-1]), a.q.shape[2], a.grads
    if any(all(map(_near, got, order)) for order in itertools.permutations(want)):
        return "the return statement", "the three are in another order: `return dq, dk, dv`"
    if a.k.shape[2] > n and not any(x[:, :, n:].any() for x in got[1:]):
        return _END_OF_KEYS
    if root != 1 and "dv" not in wrong:
        for factor, text in (
            (root, "sqrt(D) times too large: s = scale q.k, so dq and dk are scale times ds @ k, ds.mT @ q"),
            (1 / root, "sqrt(D) times too small: scale belongs in each of dq and dk once"),
        ):
            if all(_near(mine / factor, right) for mine, right in zip(got[:2], want)):
                return "the scale in dq and dk", f"both are exactly {text}"
    if "dq" in wrong and "dv" not in wrong and all(_near(-mine, right) for mine, right in zip(got[:2], want)):
        return "the sign of ds", "it is dp - delta, not delta - dp"
    return None


_BACK = "dv = p.mT @ dout, dp = dout @ v.mT, ds = p * (dp - delta), dq = scale ds @ k, dk = scale ds.mT @ q"


def _backward_value(fn: Callable) -> None:
    check = partial(_backward, fn)
    hand = partial(by_hand, [math.log(2.0), 0.0, 0.0], [1.0, 0.0, 4.0], note=", dout = 2")
    check(
        by_hand([0.5], [3.0], 1),
        "one key: its weight is p = exp(s - lse) = 1, so dv = dout, and dq and dk are 0",
        "p is exp(s - lse), and delta = sum(dout * out) takes away all of dp",
    )
    check(
        hand(3),
        "one tile, the row of exercise 2b: p = (.5, .25, .25), delta = 3, ds = (-.5, -.75, 1.25)",
        _BACK,
    )
    check(
        hand(1),
        "the same row in three tiles: what is taken over the row, and what over the tile (in one tile you are right)",
        {
            "dq": "dq of a block of queries adds up over all tiles of its row: +=, and 0 only before the first",
            "dq dk": "dv is right, so p is, and ds is not: delta belongs to the whole row, (dout * out).sum(-1). From "
            "the keys of one tile it is another number",
            "else": "p is exp(s - lse) with the lse of the whole row, which is given; a softmax over the keys of one "
            "tile is something else. So is a delta of one tile",
        },
    )
    check(
        inputs((4, 1, 1, 1, 1), (2, 4)),
        "what the second block of queries does to dk and dv (with one block you are right)",
        "every query sees the key, so dk and dv are sums over all blocks of queries: +=, and set to 0 once, before the "
        "loops",
    )
    check(inputs((3, 1, 1, 4, 4), (3, 3)), "the scale, 1/2 here: in s, and again in dq and dk", _BACK)
    check(*_LAST_TILE)
    for blocks in ((1, 2), (2, 2)):
        check(
            inputs((4, 1, 1, 1, 1), blocks, causal),
            "the positions that the mask is asked about (without a mask you are right)",
            "the same mask as forward, with global positions: a hidden key has s = -inf, so p = 0",
        )
    check(
        inputs((3, 4, 2, 4, 4), (3, 3)),
        "which query heads share a key/value head: H=4, G=2",
        "dk and dv of a head are the sums over its H/G query heads, which are neighbours: heads 0, 1 and heads 2, 3. "
        "Undo repeat_interleave: view (B, G, H/G, ...) and sum dim 2",
    )
    check(inputs((3, 2, 2, 4, 3), (2, 2)), "the head dims: D_v = 3, D = 4", "scale is 1 / sqrt(D), with q's D")


def _raised(a: Attention, by: float) -> Attention:
    """The same with ``by`` added to every score, which changes lse alone."""
    q, k = a.q.clone(), a.k.clone()
    q[..., -1], k[..., -1] = by * math.sqrt(q.shape[-1]), 1.0
    return attention(q, k, a.v, a.mask, a.blocks, a.note)


def _backward_adversarial(fn: Callable) -> None:
    _backward(fn, *_SKIPPED)
    _backward(
        fn,
        inputs((97, 4, 2, 16, 8), (32, 16), causal, B=2),
        "everything at once, on lengths that no tile divides",
        "some tile's share is wrong or left out: compare with one tile of 97 x 97",
    )
    _backward(
        fn,
        _first_half(inputs((8, 1, 1, 4, 4), (4, 2))),
        "where lse and delta come from, when k and v are only some of the row's keys",
        "out and lse are given, and are over all 8 keys: made again from these 4 they are other numbers. (In a ring, "
        "each rank holds only some of the keys.)",
    )
    _backward(
        fn,
        inputs((5, 1, 1, 4, 4), (2, 2), EARLIER),
        "a row that sees no key, whose lse is -inf: query 0 here",
        "s - lse is -inf - (-inf) = NaN: use 0 in place of an lse of -inf, and p is exp(-inf) = 0",
    )
    _backward(
        fn,
        _raised(inputs((12, 1, 1, 4, 4), (4, 4), causal, ", scores around 150"), 150),
        "the argument of every exp: how large can it get?",
        "exp(s) / exp(lse) overflows where exp(s - lse), which is at most 1, does not",
        tolerance=1e-3,  # float32 knows an lse of 150 to 1e-5
    )


def _backward_cost(fn: Callable) -> None:
    def arguments(S: int) -> tuple:
        q, k, v, dout, out = (numbers(seed, 1, 2, S, 16) for seed in range(5))
        return dout, q, k, v, out, 3 + numbers(5, 1, 2, S), causal

    _cost(fn, arguments, "H=2, D=16, causal")


tiled_backward = Checker(
    "2c tiled_backward", value=_backward_value, adversarial=_backward_adversarial, cost=_backward_cost
)

# ---- 2d: traffic(S, H, D, block_q, block_k, itemsize) -> bytes ------------------------------------------------------


def count_traffic(S: int, H: int, D: int, block_q: int, block_k: int, itemsize: int) -> int:
    """The loop of the tiled forward, row by row, with a count at every load and store. No formula."""
    moved = 0

    def move(rows: range, numbers: int, itemsize: int) -> None:
        nonlocal moved
        moved += sum(numbers * itemsize for _ in rows)

    for _ in range(H):
        for i in range(0, S, block_q):
            rows = range(i, min(S, i + block_q))
            move(rows, D, itemsize)  # q
            for j in range(0, S, block_k):
                columns = range(j, min(S, j + block_k))
                move(columns, D, itemsize)  # k
                move(columns, D, itemsize)  # v
            move(rows, D, itemsize)  # out
            move(rows, 1, 4)  # lse, float32
    return moved


def _traffic(fn: Callable, given: tuple[int, ...], where: str, cause: str) -> None:
    shown = "S={}, H={}, D={}, block_q={}, block_k={}, itemsize={}".format(*given)
    got = call(fn, *given, input=shown, where=where, cause=cause)
    want = count_traffic(*given)
    if isinstance(got, bool) or not isinstance(got, int | float | Tensor) or got != want:
        said = f"{got:,}" if isinstance(got, int | float) else repr(got)
        raise Wrong(f"{said} bytes, counted are {want:,}", where, cause)


_traffic_value = cases(
    _traffic,
    (
        (1, 1, 8, 1, 1, 2),
        "one token: q, k, v and out, 8 numbers of 2 bytes each, and lse, one number of 4 bytes",
        "four tensors of S * D * itemsize bytes, and S * 4 for lse, which is float32 whatever the others are",
    ),
    (
        (4, 1, 8, 4, 2, 2),
        "one block of queries, two of keys: each tensor passes exactly once",
        "q stays on the chip while the keys pass: it is not read again for each block of keys, and out is written once",
    ),
    (
        (4, 1, 8, 2, 4, 2),
        "two blocks of queries (with one you are right)",
        "each block of queries reads all of k and v: S / block_q times",
    ),
    (
        (8, 1, 8, 2, 4, 2),
        "which of the two block sizes counts",
        "k and v are read once for each block of queries; into how many pieces they are cut changes nothing",
    ),
    ((4, 3, 8, 2, 2, 2), "the heads", "each of the H heads makes the whole walk"),
    (
        (4, 1, 8, 2, 2, 4),
        "itemsize, 4 here",
        "q, k, v and out have itemsize bytes a number (lse has 4, with any itemsize)",
    ),
)
_traffic_adversarial = cases(
    _traffic,
    (
        (97, 4, 16, 32, 16, 2),
        "the last block of queries, which has one row",
        "there are ceil(97 / 32) = 4 blocks of queries, and the last reads all of k and v too; but k and v are not "
        "padded: 97 keys are read each time",
    ),
    ((10, 1, 4, 16, 16, 2), "a block that is larger than S", "there is one block then, of S rows"),
)
traffic = Checker("2d traffic", value=_traffic_value, adversarial=_traffic_adversarial)

# ---- Predictions and the quiz: the answers are computed, not written down -------------------------------------------


def _ds(p: Sequence[float], v: Sequence[float], dout: float, key: int) -> float:
    """ds of one key, by autograd."""
    s = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    out = torch.softmax(s, -1) @ torch.tensor(v, dtype=torch.float64)
    (ds,) = torch.autograd.grad(out, s, torch.tensor(dout, dtype=torch.float64))
    return round(float(ds[key]), 6)


def _exact_with_a_delta_per_block() -> str:
    """Which gradients come out right when delta is taken from each block's own out. By running it."""
    from ...flash import attend, attend_backward

    a = inputs((8, 1, 1, 4, 4), (4, 4))
    q, k, v, dout = (x.double() for x in (a.q, a.k, a.v, a.dout))
    dq, parts = torch.zeros_like(q), []
    for keys in (slice(0, 4), slice(4, 8)):
        k_b, v_b = k[:, :, keys], v[:, :, keys]
        delta = (dout * attend(q, k_b, v_b, None, 0.5).out).sum(-1)
        dq_b, *rest = attend_backward(dout, q, k_b, v_b, a.lse, delta, None, 0.5)
        dq += dq_b
        parts.append(rest)
    got = dq, *(torch.cat(blocks, 2) for blocks in zip(*parts))
    return " ".join(name for name, x, y in zip(NAMES, got, a.grads) if torch.allclose(x, y))


BUDGET = {"S": 32_768, "H": 1, "G": 1, "D": 128, "block_k": 64, "itemsize": 2}


predict_terabytes = Prediction(
    "Scores of a million tokens",
    lambda: torch.empty(1, 1, 10**6, 10**6, device="meta").nbytes // 10**12,
    "10^12 scores of 4 bytes, for one head of one layer.",
)
predict_ds = Prediction(
    "ds of the third key",
    lambda: _ds((0.5, 0.25, 0.25), (1.0, 0.0, 4.0), 2.0, key=2),
    "Key 2 gains 3/16, key 0 loses 1/8 and key 1 loses 1/16: the output rises by 5/8, and the loss by twice that.",
    tolerance=1e-6,
)
predict_exact = Prediction(
    "Still exact with a delta per block",
    _exact_with_a_delta_per_block,
    "A value gets dout times the weight of its key, without delta. A test that looks at dv alone, or at the row sums "
    "of ds, passes the mistake.",
)
predict_block = Prediction(
    "The smallest block of queries",
    lambda: next(b for b in range(1, BUDGET["S"] + 1) if costs.flash_traffic(block_q=b, **BUDGET) < 4 * 2**30),
    "4 GiB have room for 254 passes of 16 MiB beside q, out and lse: 32,768 / 254 rounded up. 129 rows just miss it.",
)

quiz = Quiz(
    "Quiz 02",
    (lambda: costs.saved_bytes(4096, 32, 128), "For each of 32 x 4,096 rows, 128 numbers of 2 bytes and an lse of 4."),
    (
        lambda: round(costs.saved_bytes(4096, 32, 128, naive=True) / costs.saved_bytes(4096, 32, 128)),
        "A row of weights is 4,096 numbers, out and lse are about 130: 31.5 times. It grows with S.",
        0.6,
    ),
    (
        lambda: costs.attention_flops(4096, 32, 128, backward=True) / costs.attention_flops(4096, 32, 128),
        "Five matrix products for two: the scores once more, dp, dv, dq, dk.",
    ),
    (lambda: _ds((0.5, 0.5), (2.0, 4.0), 3.0, key=0), "dp = (6, 12), delta = 9, and .5 x (6 - 9).", 1e-6),
    (
        lambda: round(
            costs.naive_traffic(4096, 1, 1, 64) / costs.flash_traffic(4096, 1, 1, 64, block_q=128, block_k=128),
            1,
        ),
        "Naive: 128 MiB for four times S x S numbers, and 2 MiB for q, k, v and out. Tiled: 32 MiB for 32 passes of k "
        "and v, and 1 MiB for q, out and lse. 130 / 33 is 3.9.",
        0.05,
    ),
)

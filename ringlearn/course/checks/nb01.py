"""Exercises of notebook 01, incremental softmax: 1a online_softmax, 1b merge, 1c blockwise; predictions and the quiz.

Each oracle here is written with other operations than the library's own code, in float64.
"""

from __future__ import annotations

import gc
import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import text
from ...partial import Partial, identity, merge_weights
from ...softmax import two_pass
from ...worlds.memory import LiveBytes
from .checker import Checker, Wrong, call, cases, difference, parts, show
from .mistakes import recognised
from .oracle import numbers
from .predictions import Prediction, Quiz

INF = math.inf

# ---- 1a: online_softmax(scores) -> (m, l) ---------------------------------------------------------------------------


class Stream:
    """Scores that can only be looped over, as they arrive from somewhere. Counts how often that happens."""

    def __init__(self, scores: list[float]):
        self._scores, self.reads = scores, 0

    def __iter__(self) -> Iterator[Tensor]:
        for s in self._scores:
            self.reads += 1
            yield torch.tensor(s, dtype=torch.float64)

    def __getattr__(self, name: str):
        raise AttributeError(f"the scores are a stream: all you can do is loop over them, once; no .{name}")


def _online(fn: Callable, scores: list[float], where: str, cause: str) -> None:
    """Holds fn's (m, l) against the softmax and the lse of these scores."""
    shown = f"scores = {[float(s) for s in scores]}"
    m, l = parts(call(fn, Stream(scores), input=shown, where=where, cause=cause), "m, l")
    try:
        m, l = float(m), float(l)
    except (TypeError, ValueError):
        raise Wrong(
            f"m and l are {type(m).__name__} and {type(l).__name__}, expected two numbers",
            "the return statement",
            "m and l are one number each, whatever the number of scores",
        ) from None
    x = torch.tensor(scores, dtype=torch.float64)
    want = float(torch.logsumexp(x, -1)) if scores else -INF
    if math.isnan(m) or math.isnan(l):
        raise Wrong(f"m = {m:g} and l = {l:g}", where, cause)
    lse = m + math.log(l) if l > 0 else (-INF if l == 0 else math.nan)
    if not (lse == want or abs(lse - want) <= 1e-6 * max(1.0, abs(want))):  # float32 will do
        raise Wrong(f"m + log(l) is {lse:.6g}, expected {want:.6g} (m = {m:.6g}, l = {l:.6g})", where, cause)


_online_value = cases(
    _online,
    (
        [2.0],
        "what m and l are after the first score",
        "after one score s, m = s and l = exp(s - m) = 1. A NaN here is inf * 0: the exp that multiplies l must have "
        "an argument of at most 0",
    ),
    ([3.0, 2.0, 1.0], "the new term of l", "each score adds exp(s - m) to l, with the maximum so far as m"),
    (
        [1.0, 2.0, 3.0],
        "what happens to l when a score above m arrives (on descending scores you are right)",
        "the terms already in l were taken with the old m: multiply l by exp(m_old - m_new) when m moves",
    ),
    ([0.5, -1.0, 2.0, 2.0, 0.0], "scores that repeat the maximum", "a score equal to m adds exactly 1 to l"),
)


def _online_adversarial(fn: Callable) -> None:
    check = partial(_online, fn)
    check(
        [1e4, 9999.0],
        "the argument of every exp: how large can it get?",
        "exp(1e4) overflows. Only ever take exp of a difference to the running maximum, which is at most 0",
    )
    check([9999.0, 1e4], "the argument of every exp, when m moves", "m_old - m_new is at most 0; the sign matters")
    check(
        [-1e4, -9999.0],
        "the value that m starts with",
        "m starts at 0, so it never gets down to the scores, and exp(-1e4 - 0) is 0: start at -inf",
    )
    check(
        [-1e30],
        "the value that m starts with",
        "m starts at a number that is not below every score, such as -1e9: start at -inf",
    )
    check([1.0, -INF], "a key that must not be seen: s = -inf", "exp(-inf) is 0, so l must not change")
    for scores in ([-INF], [-INF, 1.0], [-INF, -INF]):
        check(
            scores,
            "a row that has seen no key yet: m is still -inf",
            "-inf - (-inf) is NaN. While m is -inf, l is 0: skip the update, or subtract 0 in place of m",
        )
    check([], "no score at all", "m = -inf and l = 0, with which the loop starts, are the answer")


def _online_cost(fn: Callable) -> None:
    n = 4000
    shown = f"a stream of {n} scores"
    scores = [math.sin(i) for i in range(n)]
    stream = Stream(scores)
    call(fn, stream, input=shown)
    if stream.reads != n:
        raise Wrong(
            f"the values are right, but {stream.reads} scores were read where there are {n}",
            "how many loops go over the scores (max, sum and list are loops too)",
            "the maximum comes from a pass of its own. Keep a running one, and correct l when it moves",
        )

    def peak(n: int) -> int:
        gc.collect()
        tracemalloc.start()
        call(fn, Stream(scores[:n]), input=shown)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    few, many = peak(n // 10), peak(n)
    if many - few > 16 * (n - n // 10):  # a list of floats takes 8 bytes per score for its pointers and 24 for floats
        raise Wrong(
            f"memory grows with the number of scores: {many - few:,} bytes more for {n} scores than for {n // 10}",
            "what is kept from one score to the next",
            "the scores are put in a list first. Two numbers, m and l, are all that may stay",
        )


online_softmax = Checker("1a online_softmax", value=_online_value, adversarial=_online_adversarial, cost=_online_cost)

# ---- 1b: merge(a, b) -> (out, lse) ----------------------------------------------------------------------------------


def _oracle_merge(partials: list[Partial]) -> Partial:
    """Softmax over the lses, in float64: the definition, for any number of partial results at once."""
    lses = torch.stack([p.lse.double() for p in partials])
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -INF, 0.0, torch.exp(lses - torch.where(lse == -INF, 0.0, lse)))
    return Partial(sum(w.unsqueeze(-1) * p.out.double() for w, p in zip(weights, partials)), lse)


def _row(out: float, lse: float) -> Partial:
    return Partial(torch.tensor([[out]]), torch.tensor([lse]))


def _merge(fn: Callable, a: Partial, b: Partial, shown: str, where: str, cause: str) -> Partial:
    """fn's result on copies of a and b, which must not change."""
    copies = Partial(a.out.clone(), a.lse.clone()), Partial(b.out.clone(), b.lse.clone())
    got = Partial(*parts(call(fn, *copies, input=shown, where=where, cause=cause), "out, lse"))
    for name, before, after in zip("ab", (a, b), copies):
        if not (torch.equal(before.out, after.out) and torch.equal(before.lse, after.lse)):
            raise Wrong(
                f"merge changed its argument {name} in place",
                "operations whose name ends in _, and +=, *=",
                "x += y and x.mul_(y) write into x. Make new tensors: x = x + y",
            )
    return got


Mistakes = Iterable[tuple[str, str, Partial]]  # where to look, the likely cause, and the pair that it gives


def _compare(
    got: Partial, want: Partial, where: str, cause: str, tolerance: float = 1e-5, mistakes: Mistakes = ()
) -> None:
    """Raises Wrong at the first difference; a wrong shape, and an lse that is wrong alone, have causes of their own.

    mistakes: known ones, whose causes go before the given one; None in a pair stands for whatever the answer has there.
    """

    def made(known: Partial) -> bool:
        return not any(difference("", mine, given, tolerance) for mine, given in zip(got, known) if given is not None)

    for name, mine, right in (("lse", got.lse, want.lse), ("out", got.out, want.out)):
        problem = difference(name, mine, right, tolerance)
        if not problem:
            continue
        if not isinstance(mine, Tensor):
            where = f"the operations that make {name}"
            cause = "torch.exp and torch.log make tensors of tensors; math.exp, float() and .item() make one number"
        elif mine.shape != right.shape and [getattr(x, "shape", None) for x in got[::-1]] == [x.shape for x in want]:
            where, cause = "the return statement", "the pair is in the other order: `return out, lse`"
        elif mine.shape != right.shape:
            where = "the shapes: out is (..., S, D), lse is (..., S)"
            cause = "give a weight a last dim of 1, weight.unsqueeze(-1), where it multiplies out, and nowhere else"
        elif name == "lse" and not difference("out", got.out, want.out, tolerance):
            where = "the lse that is returned (out is right here)"
            cause = "total weights add: lse is log(exp(lse_a) + exp(lse_b)), over the keys of out, each counted once"
            if ((right == -INF) & (mine != -INF)).any():
                cause = "no keys, no weight: lse is -inf. A large negative number, or log(0 + epsilon), is wrong"
        else:
            where, cause = recognised(mistakes, made, (where, cause))
        raise Wrong(problem, where, cause)


def _compare_merge(fn: Callable, a: Partial, b: Partial, shown: str, where: str, cause: str, **options: Any) -> None:
    """options: as for _compare."""
    _compare(_merge(fn, a, b, shown, where, cause), _oracle_merge([a, b]), where, cause, **options)


def _merge_mistakes(a: Partial, b: Partial) -> Mistakes:
    lse = torch.logaddexp(a.lse.double(), b.lse.double())
    exchanged = sum(torch.exp(y.lse - lse).unsqueeze(-1) * x.out for x, y in ((a, b), (b, a)))
    yield (
        "which weight goes with which out",
        "the weights are exchanged: a.out counts by exp(a.lse - lse), b.out by exp(b.lse - lse)",
        Partial(exchanged, None),
    )
    yield (
        "the line that computes lse",
        "the two lses are added. They are logarithms: it is the total weights exp(lse) that add up",
        Partial(None, a.lse + b.lse),
    )


def _merge_value(fn: Callable) -> None:
    def rows(a: tuple[float, float], b: tuple[float, float], where: str, cause: str) -> None:
        shown = f"a = (out {a[0]:g}, lse {a[1]:g}), b = (out {b[0]:g}, lse {b[1]:g})"
        a, b = _row(*a), _row(*b)
        _compare_merge(fn, a, b, shown, where, cause, mistakes=_merge_mistakes(a, b))

    weights = "lse = log(exp(a.lse) + exp(b.lse)), and the two weights exp(a.lse - lse) and exp(b.lse - lse)"
    rows((1.0, 1.0), (3.0, 1.0), weights, "the weights sum to 1: partial results are averaged, never added up")
    rows(
        (1.0, 0.0),
        (5.0, math.log(3.0)),
        weights,
        "b stands for three times the weight of a: 1/4 and 3/4, not 1/2 each; lse is log(1 + 3)",
    )
    rows((5.0, math.log(3.0)), (1.0, 0.0), "which weight goes with which out", "the weights are exchanged")
    a = Partial(numbers(0, 2, 3, 4, 5), numbers(1, 2, 3, 4))
    b = Partial(numbers(2, 2, 3, 4, 5), numbers(3, 2, 3, 4))
    _compare_merge(
        fn,
        a,
        b,
        "out (2, 3, 4, 5) and lse (2, 3, 4): B=2, H=3, S=4, D=5",
        "the shapes: lse has no D",
        "a weight (B, H, S) needs a last dim of 1 to multiply out (B, H, S, D): weight.unsqueeze(-1)",
    )


_BOTH_EMPTY = "exp(-inf - -inf) is NaN: where the merged lse is -inf, both weights are 0"


def _merge_adversarial(fn: Callable) -> None:
    def grid(lses: tuple[float, ...], where: str, cause: str) -> None:
        for x, y in itertools.product(lses, repeat=2):
            out_a, out_b = (0.0 if x == -INF else 1.0), (0.0 if y == -INF else 3.0)
            shown = f"a = (out {out_a:g}, lse {x:g}), b = (out {out_b:g}, lse {y:g})"
            # At 1e4 an lse in float32 is itself only known to 1e-3, and so are weights that are taken from it.
            tolerance = 1e-5 if max(abs(x), abs(y)) < 100 or INF in (-x, -y) else 5e-3
            _compare_merge(fn, _row(out_a, x), _row(out_b, y), shown, where, cause, tolerance=tolerance)

    grid(
        (0.0, 80.0, 1e4, -1e4),
        "the argument of every exp: how large can it get?",
        "subtract the larger lse before any exp; log(1 + exp(d)) is inf from d = 89 on, exp(lse) too",
    )
    a, empty = Partial(numbers(0, 2, 3), numbers(1, 2)), identity((2, 3))
    for first, second, shown in ((a, empty, "merge(a, identity)"), (empty, a, "merge(identity, a)")):
        _compare_merge(
            fn,
            first,
            second,
            f"{shown}, with identity = (out 0, lse -inf)",
            "what a difference of lses is when one of them is -inf",
            "the weight of lse = -inf is exp(-inf - lse) = 0; any form that takes (b.lse - a.lse) gets inf or NaN",
        )
    grid((-INF,), "two rows that have seen no key: both lse are -inf", _BOTH_EMPTY)
    grid((-INF, 0.0, 80.0, 1e4, -1e4), "a row that has seen no key, beside one that has", _BOTH_EMPTY)
    _compare_merge(
        fn,
        Partial(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([-INF, 0.0, 1e4])),
        Partial(torch.tensor([[0.0], [3.0], [3.0]]), torch.tensor([-INF, 0.0, 0.0])),
        "three rows in one tensor, a.lse = [-inf, 0, 10000], b.lse = [-inf, 0, 0] (each row alone is right)",
        "what looks at the whole tensor: an `if`, all(), any(), max() or min()",
        "each row needs a maximum and a guard of its own: torch.maximum(a.lse, b.lse) and torch.where give them",
    )
    parts = [Partial(numbers(i, 2, 3), 3 * numbers(10 + i, 2)) for i in range(3)]
    want = _oracle_merge(parts)
    for order in itertools.permutations(range(3)):
        shown = "merge(merge({}, {}), {}) of three partial results".format(*("abc"[i] for i in order))
        where, cause = "the lse that comes out, which the next merge uses", "merge must return the lse of the union"
        got = parts[order[0]]
        for i in order[1:]:
            got = _merge(fn, got, parts[i], shown, where, cause)
        _compare(got, want, where, cause)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        parts = [Partial(numbers(i, 8, 16).to(dtype), numbers(50 + i, 8)) for i in range(16)]
        shown = f"16 partial results with out in {name} and lse in float32"
        where, cause = (
            "the dtype that merge returns",
            f"each merge rounds to {name}, and the errors add up: stay in float32",
        )
        got = parts[0]
        for part in parts[1:]:
            got = _merge(fn, got, part, shown, where, cause)
        if got.out.dtype != torch.float32 or got.lse.dtype != torch.float32:
            problem = f"merge returns out in {got.out.dtype} and lse in {got.lse.dtype}, expected torch.float32"
        else:
            want = _oracle_merge(parts)
            problem = difference("out", got.out, want.out, 1e-5) or difference("lse", got.lse, want.lse, 1e-5)
        if problem:
            raise Wrong(problem.replace("torch.", ""), where, cause)


def _merge_gradient(fn: Callable) -> None:
    def gradients(merge: Callable, lses: list[list[float]], shown: str, where: str, cause: str) -> list[Tensor]:
        outs = [
            numbers(i, len(lses[0]), 3).masked_fill(torch.tensor(x)[:, None] == -INF, 0) for i, x in enumerate(lses)
        ]
        leaves = [x.double().requires_grad_() for x in outs] + [
            torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in lses
        ]
        a, b = Partial(leaves[0], leaves[2]), Partial(leaves[1], leaves[3])
        out, lse = parts(call(merge, a, b, input=shown, where=where, cause=cause), "out, lse")
        dout, dlse = numbers(7, *out.shape).to(out.dtype), numbers(8, *lse.shape).to(lse.dtype)
        finite = lse != -INF
        loss = (out * dout).sum() + (lse[finite] * dlse[finite]).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * 4
        return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]

    for lses, shown, where, cause in (
        (
            [[0.5, -1.0], [1.0, 2.0]],
            "two rows, all lse finite; autograd through merge",
            "operations that cut the graph: detach, item, float, no_grad, torch.tensor(...)",
            "the weights depend on both lses, and the gradient flows through them",
        ),
        (
            [[0.5, -INF], [-INF, 2.0]],
            "two rows, each empty on one side; autograd through merge",
            "a branch that is not taken but still has NaN in its gradient",
            "torch.where(ok, f(x), 0) sends 0 * NaN = NaN back through f: make x harmless before f, not after",
        ),
        (
            [[0.5, -INF], [1.0, -INF]],
            "two rows, the second empty on both sides; autograd through merge",
            "what -inf, or a total of 0, meets before it is repaired: a difference, division, log, logaddexp, softmax",
            "there the gradient is NaN, and a repair of the value (torch.where, nan_to_num) comes too late: "
            "replace the -inf or the total of 0 before the operation, not its result afterwards",
        ),
    ):
        got = gradients(fn, lses, shown, where, cause)
        want = gradients(lambda a, b: _oracle_merge([a, b]), lses, shown, where, cause)
        for name, mine, right in zip(("a.out", "b.out", "a.lse", "b.lse"), got, want):
            right = right.nan_to_num(0.0)  # the oracle's logsumexp: where both are empty nothing depends on anything
            problem = difference(f"the gradient of {name}", mine, right, 1e-5)
            if problem:
                raise Wrong(problem, where, cause)


merge = Checker("1b merge", value=_merge_value, adversarial=_merge_adversarial, gradient=_merge_gradient)

# ---- 1c: blockwise(scores, values, sizes) -> (out, lse) -------------------------------------------------------------


def _oracle_attend(scores: Tensor, values: Tensor) -> Partial:
    """The whole row at once, in float64; rows without keys guarded."""
    scores, lse = scores.double(), torch.logsumexp(scores.double(), -1)
    p = torch.exp(scores - torch.where(lse == -INF, 0.0, lse).unsqueeze(-1))
    return Partial(p @ values.double(), lse)


_BLOCK_SHAPES = (
    "how a block is cut from scores (S, N) and from values (N, D)",
    "keys are the last dim of scores and the first of values: scores[:, block] and values[block]",
)


def _block_mistakes(scores: Tensor, values: Tensor, sizes: list[int]) -> Mistakes:
    """Slices that begin at key 0 for every block, and a phantom key."""
    for scores_too, values_too, where, cause in (
        (
            False,
            True,
            "the rows of values that are multiplied by the block's weights",
            "values[:size] is the first rows in every block: its own are values[start : start + size]",
        ),
        (True, True, "where a block begins", "every block begins at key 0: start at `start`, and move it on by size"),
        (
            True,
            False,
            "the columns of scores of a block",
            "scores[:, :size] is the first columns in every block: its own are scores[:, start : start + size]",
        ),
    ):
        pieces, start = [], 0
        for size in filter(None, sizes):
            s, v = (0 if wrong else start for wrong in (scores_too, values_too))
            pieces.append(_oracle_attend(scores[:, s : s + size], values[v : v + size]))
            start += size
        yield where, cause, _oracle_merge(pieces)
    if len(sizes) == 1:  # with several blocks, a padded one looks the same
        whole = _oracle_attend(scores, values)
        yield (
            "the result with which the loop starts",
            "an lse of 0 is a key with score 0 and value 0, not an empty result: start at rl.identity, with lse -inf",
            _oracle_merge([Partial(torch.zeros_like(whole.out), torch.zeros_like(whole.lse)), whole]),
        )


def _blocks(fn: Callable, scores: Tensor, values: Tensor, sizes: list[int], shown: str, where: str, cause: str) -> None:
    arguments = scores.clone(), values.clone(), list(sizes)
    result = call(fn, *arguments, input=shown, where=where, cause=cause, shapes=_BLOCK_SHAPES)
    got = Partial(*parts(result, "out, lse"))
    _compare(got, _oracle_attend(scores, values), where, cause, mistakes=_block_mistakes(scores, values, sizes))


def _blockwise_value(fn: Callable) -> None:
    def keys(n: int, sizes: list[int], where: str, cause: str) -> None:
        scores = torch.tensor([[float(2 * j % 5) for j in range(n)]])
        values = torch.tensor([[float(1 + j * j)] for j in range(n)])
        _blocks(fn, scores, values, sizes, f"scores = {show(scores)}, values = {show(values)}, {sizes=}", where, cause)

    keys(2, [2], "one block: the softmax of its scores, times its values", "out = p @ values, lse = logsumexp(scores)")
    keys(
        2,
        [1, 1],
        "how two blocks become one result",
        "each block is normalised by its own denominator, so results cannot be added or averaged: merge them by lse",
    )
    keys(
        4,
        [1, 1, 1, 1],
        "what the third block is merged with (with two blocks you are right)",
        "the running lse must be the merged one, not that of the last or of the first block",
    )
    keys(
        5,
        [2, 3],
        "which keys are in a block whose size differs from the others'",
        "block b starts where block b - 1 ended; and if blocks are padded, padding needs scores of -inf: exp(0) is 1",
    )


def _blockwise_adversarial(fn: Callable) -> None:
    def keys(scores: Tensor, sizes: list[int], shown: str, where: str, cause: str) -> None:
        n = scores.shape[-1]
        _blocks(fn, scores, numbers(n, n, 3), sizes, f"S={scores.shape[0]}, N={n}, {shown}", where, cause)

    keys(
        numbers(0, 2, 7),
        [3, 3, 1],
        "sizes = [3, 3, 1]",
        "the last block, shorter than the others",
        "the last keys are dropped, or padded with scores of 0 (exp(0) = 1 is a key; padding must be -inf)",
    )
    for sizes in ([2, 0, 3], [0, 5], [5, 0]):
        keys(
            numbers(0, 2, 5),
            sizes,
            f"sizes = {sizes}",
            "a block without keys",
            "a block of size 0 has no maximum: skip it, it is the identity",
        )
    masked = numbers(0, 2, 6)
    masked[0, :4], masked[1, :] = -INF, -INF
    keys(
        masked,
        [2, 2, 2],
        "sizes = [2, 2, 2]; row 0 sees the last two keys only, row 1 sees none",
        "a block in which every score of a row is -inf",
        "softmax of a row of -inf is NaN in torch: such a block has out 0 and lse -inf (rl.two_pass gives that)",
    )
    keys(
        1e4 * numbers(0, 2, 6),
        [1, 3, 2],
        "sizes = [1, 3, 2], scores around 1e4",
        "the argument of every exp",
        "subtract the block's maximum before exp, and merge with weights that do the same",
    )
    scores, values, sizes = 5 * numbers(0, 2, 9), numbers(1, 9, 3), [1, 2, 4, 2]
    pieces = list(zip(scores.split(sizes, -1), values.split(sizes, -2), sizes))
    for order in ((3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)):
        s, v, n = zip(*(pieces[i] for i in order))
        _blocks(
            fn,
            torch.cat(s, -1),
            torch.cat(v, -2),
            list(n),
            f"the blocks [1, 2, 4, 2] of N=9 keys in the order {list(order)}",
            "what is carried from block to block",
            "(out, lse) of all keys so far, both updated at every block, makes the order irrelevant",
        )


def _blockwise_cost(fn: Callable) -> None:
    s, d, size, blocks = 16, 32, 32, 64
    scores, values = numbers(0, s, size * blocks), numbers(1, size * blocks, d)
    shown = f"S={s}, D={d}, {blocks} blocks of {size} keys"
    with LiveBytes() as memory:
        call(fn, scores, values, [size] * blocks, input=shown)
    block = 4 * s * size  # the weights of one block
    result = 4 * s * (d + 1)  # one (out, lse)
    # A few tensors of a block and a few results are alive at once; a block's values may be copied, too.
    if memory.peak > 8 * block + 8 * result + 2 * 4 * size * d:
        raise Wrong(
            f"the values are right, but {memory.peak:,} bytes are alive at once; one block's weights are {block:,}, "
            f"one result is {result:,}",
            "what is still alive when the last block starts: lists, cat, stack, tensors over all keys",
            "all weights or all partial results are kept and merged at the end: merge each as it is made",
        )


blockwise = Checker("1c blockwise", value=_blockwise_value, adversarial=_blockwise_adversarial, cost=_blockwise_cost)

# ---- Predictions and the quiz: the answers are computed, not written down -------------------------------------------


def _moves() -> int:
    zen = text.zen()
    n = len(text.context_scores(zen, zen.index(b"*right*")))
    return round(sum(1 / k for k in range(1, n + 1)))


def _right_without_rescaling() -> str:
    def denominator(scores: list[float]) -> float:
        m, l = -INF, 0.0
        for s in scores:
            m = max(m, s)
            l += math.exp(s - m)
        return l

    want = sum(math.exp(s - 3.0) for s in (1.0, 2.0, 3.0))
    return "descending" if math.isclose(denominator([3.0, 2.0, 1.0]), want) else "ascending"


def _weight_of_b(a_lse: float, b_lse: float) -> float:
    weights = merge_weights(torch.tensor(a_lse, dtype=torch.float64), torch.tensor(b_lse, dtype=torch.float64))
    return round(float(weights[2]), 4)


predict_overflow = Prediction(
    "Overflow",
    lambda: next(s for s in range(1000) if torch.exp(torch.tensor(float(s))).isinf()),
    "The largest float32 is about 3.4e38, and log(3.4e38) is 88.7. Scores are not bounded: one outlier is enough.",
)
predict_moves = Prediction(
    "Moves of the maximum",
    _moves,
    "Score number k is the largest of the first k with probability 1/k, and 1 + 1/2 + ... + 1/N is 7.05 for N = 647. "
    "Nearly all scores leave m where it is: rescaling is rare.",
    tolerance=0.5,
)
predict_order = Prediction(
    "The order that hides the mistake",
    _right_without_rescaling,
    "With the maximum first, m never moves again and there is nothing to rescale. A test that runs only on such input "
    "passes a wrong program.",
)
predict_weight = Prediction(
    "Weight of b",
    lambda: _weight_of_b(0.0, math.log(3.0)),
    "The whole is 1 + 3 = 4, of which b is 3. How large the outputs are does not matter.",
    tolerance=0.005,
)


def _lse_bytes() -> int:
    return identity((1, 32, 4096, 128), device="meta").lse.nbytes


def _after_a_masked_block() -> float:
    masked = two_pass(torch.full((4,), -INF))[1]
    return round(float(merge_weights(torch.tensor(2.0), masked)[0]), 4)


quiz = Quiz(
    "Quiz 01",
    (lambda: _weight_of_b(5.0, 5.0 + math.log(9.0)), "Only the difference of the lses counts: 9 parts of 10.", 0.005),
    (_after_a_masked_block, "A block without visible keys is the identity.", 1e-6),
    (lambda: (8 - 1).bit_length(), "Each round halves the number of results: 8, 4, 2, 1."),
    (_lse_bytes, "One float32 for each of 32 x 4,096 rows: 512 KiB.", 0.0, "bytes"),
    (lambda: torch.empty(1, 32, 4096, 4096, device="meta").nbytes // _lse_bytes(), "A row has S weights and one lse."),
)

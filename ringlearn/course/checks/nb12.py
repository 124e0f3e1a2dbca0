"""Exercises of notebook 12, use it: 12a rank_bytes, 12b step_seconds, 12c my_part, 12d first_difference; and the quiz.

Oracles: the planner's components for bytes and seconds; a walk over a row in plain Python for what a rank reads; and
steps made of formulas, with a known difference, for the comparison with one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layouts import Layout, contiguous, striped, zigzag
from ...nn import IGNORE
from ...plan.constants import FITTED
from ...plan.hardware import GPUS
from ...plan.memory import kept_per_token, loss_bytes, state
from ...plan.models import Model, model
from ...plan.seconds import step_seconds as planned_seconds
from ...plan.seconds import work
from ...plan.setup import Setup
from .checker import Checker, Wrong, call, number, parts
from .mistakes import Reason, recognised
from .oracle import numbers
from .predictions import Prediction, Quiz

LLAMA, H100 = model("llama-3.1-8b"), GPUS["h100"]
TOKENS, P, R = 2**17, 8, 16  # the notebook's run: two sequences on two nodes of eight GPUs
PRODUCTS = FITTED.products_bf16 * H100.bf16  # FLOP/s of large matrix products
ATTENTION = H100.kernels["cudnn"] * H100.bf16  # and of attention

# ---- 12a: rank_bytes(m, S, P, R, anew) -> bytes of a rank when its backward begins ----------------------------------


def setup(P: int, R: int, anew: bool) -> Setup:
    """P ranks share each of R / P sequences; what is sharded is sharded over all R."""
    return Setup(dp=R // P, cp=P, recompute="full" if anew else "none")


def bytes_by_part(m: Model, S: int, P: int, R: int, anew: bool) -> dict[str, float]:
    """The planner's numbers for the three parts that the exercise counts."""
    s, tokens = setup(P, R, anew), S // P
    held = state(m, s)
    return {
        "weights and optimizer": held["weights"] + held["optimizer"],
        "kept for the backward": tokens * m.layers * kept_per_token(m, s),
        "logits": loss_bytes(m, s, tokens),
    }


def _other_bytes(m: Model, S: int, P: int, R: int, anew: bool) -> Iterator[tuple[str, str, float]]:
    """Where to look, the cause, and what a mistake gives."""
    of_state, kept, logits = bytes_by_part(m, S, P, R, anew).values()
    rest, n, theta = of_state + kept + logits, S // P, m.parameters
    first, second, third = "weights and optimizer", "what the layers keep", "the logits"
    yield first, "gradients are counted, too. When the backward begins there are none: 12 bytes, not 16", (
        rest + 4 * theta / R
    )  # fmt: skip
    yield first, "they are shared out over all R ranks, not over the P that share a sequence", (
        rest - of_state + 12 * theta / P
    )  # fmt: skip
    yield first, "FSDP shares them out over all R ranks: divide by R", rest - of_state + 12 * theta
    yield first, "both are missing", rest - of_state
    yield first, "the optimizer's two moments are missing: 8 bytes of each parameter", rest - 8 * theta / R
    yield first, "the weights are missing: 4 bytes of each parameter", rest - 4 * theta / R
    yield first, "a parameter has 4 bytes, and each of AdamW's two moments 4 more: 12", (
        rest - of_state + 6 * theta / R
    )  # fmt: skip
    yield second, "they are missing", rest - kept
    yield second, "one layer's are counted, and there are m.layers", rest - kept + kept / m.layers
    twice = "they are counted in float32; activations have 2 bytes a number"
    if anew:  # the input and its norm take as much as the input in float32
        twice = "with anew=True a layer keeps one tensor, its input. It has 2 bytes a number"
    yield second, twice, rest + kept
    yield second, "they are counted for all S tokens; this rank has S / P", rest - kept + kept * P
    whole, alone = (n * m.layers * kept_per_token(m, setup(P, R, x)) for x in (False, True))
    if anew:
        yield second, "with anew=True a layer keeps its input alone", rest - kept + whole
    else:
        yield second, "with anew=False a layer keeps all of the tensors in the table", rest - kept + alone
        q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        for change, cause in (
            (-4 * m.heads, "lse is missing: one float32 number for each query head"),
            (-2 * m.heads, "lse is counted with 2 bytes: it stays in float32"),
            (2 * 2 * (q - kv), "k and v have G heads, not H"),
            (-2 * kv, "k and v are two tensors"),
            (-2 * q, "q or out is missing: both are kept"),
            (-2 * m.width, "one of the four tensors as wide as the model is missing: two inputs and two norms"),
            (-2 * m.ffn, "gate and up are two tensors"),
            (2 * m.ffn, "the product of gate and up is not kept: the backward makes it again"),
            (2 * m.width, "a tensor as wide as the model is counted twice"),
        ):
            yield second, cause, rest + n * m.layers * change
    typed = "the text's numbers are those of Llama 3 8B: compute the bytes of a token from the sizes in m"
    yield second, typed, rest - kept + n * m.layers * kept_per_token(LLAMA, setup(P, R, anew))
    yield third, "they are missing", rest - logits
    yield third, "they take 14 bytes in all, not 2: the copies that the loss makes count, too", rest - logits * 6 / 7
    yield third, "they take 14 bytes in all, not 4: the copies that the loss makes count, too", rest - logits * 5 / 7
    yield third, "they take 14 bytes in all, not 10: their gradient counts, too", rest - logits * 4 / 14
    yield third, "they are counted for all S tokens; this rank has S / P", rest - logits + logits * P
    yield third, "they are counted in every layer; there is one output layer", rest - logits + logits * m.layers
    yield third, "they are as wide as the vocabulary, not as the model", rest - logits + 14 * n * m.width
    yield "what a rank has of the sequence", "S / P tokens: the R / P groups have sequences of their own", (
        of_state + (kept + logits) * P / R
    )  # fmt: skip
    yield "what a rank has of the sequence", "a group of P ranks computes one sequence: its tokens count once", (
        of_state + (kept + logits) * R / P
    )  # fmt: skip
    yield "the unit", "this is in GiB, and the exercise asks for bytes", rest / 2**30


_UNKNOWN_BYTES = (
    "the three parts, one by one",
    "no common mistake fits: print each part, and compare it with the numbers in the text",
)


def _bytes(fn: Callable, m: Model, S: int, P: int, R: int, anew: bool) -> None:
    shown = f"{m.name}, S = {S:,}, P = {P}, R = {R}, anew={anew}"
    said = number(call(fn, m, S, P, R, anew, input=shown), "bytes: one number")
    want = sum(bytes_by_part(m, S, P, R, anew).values())
    if abs(said - want) > 1e-6 * want:
        known = _other_bytes(m, S, P, R, anew)
        reason = recognised(known, lambda value: abs(said - value) <= 1e-6 * abs(value), _UNKNOWN_BYTES)
        raise Wrong(f"you give {said:,.6g} bytes, a rank has {want:,.6g}", *reason)


def _bytes_value(fn: Callable) -> None:
    _bytes(fn, LLAMA, TOKENS, 8, 16, True)
    _bytes(fn, LLAMA, TOKENS, 8, 16, False)


def _bytes_adversarial(fn: Callable) -> None:
    for name, S, P, R in (("llama-2-7b", 32768, 4, 4), ("llama-3.1-70b", 65536, 16, 64), ("llama-3.1-8b", 4096, 1, 1)):
        for anew in (True, False):
            _bytes(fn, model(name), S, P, R, anew)


rank_bytes = Checker("12a rank_bytes", value=_bytes_value, adversarial=_bytes_adversarial)

# ---- 12b: step_seconds(m, S, P, products, attention, anew) ----------------------------------------------------------


class _Time(NamedTuple):
    m: Model
    S: int
    P: int
    products: float
    attention: float
    anew: bool

    @property
    def pieces(self) -> tuple[float, float]:
        """Seconds of the forward: its matrix products, and its attention."""
        w = work(self.m, setup(self.P, self.P, self.anew), self.S)
        return (w.fast + w.slow + w.head) / self.products, w.scores / self.attention

    @property
    def want(self) -> float:
        return sum(seconds_by_part(*self).values())

    @property
    def shown(self) -> str:
        rates = f"products={self.products / 1e12:.0f}e12, attention={self.attention / 1e12:.0f}e12"
        return f"{self.m.name}, S = {self.S:,}, P = {self.P}, {rates}, anew={self.anew}"


def seconds_by_part(m: Model, S: int, P: int, products: float, attention: float, anew: bool) -> dict[str, float]:
    """The exercise's own answer, in its parts."""
    forward, scores = _Time(m, S, P, products, attention, anew).pieces
    found = {"matrix products": 3 * forward, "attention": 3.5 * scores}
    return found | ({"recomputed": forward + scores} if anew else {})


def _other_seconds(x: _Time) -> Iterator[tuple[str, str, float]]:
    products, attention = x.pieces
    more = int(x.anew)
    a, b = (3 + more) * products, (3.5 + more) * attention
    if x.anew:
        yield "what is recomputed", "the forward is computed once more: of both", 3 * products + 3.5 * attention
        yield "what is recomputed", "attention is computed once more, too", a + 3.5 * attention
        yield "what is recomputed", "the matrix products are computed once more, too", 3 * products + b
        yield "what is recomputed", "one forward more is a third of the products' 3, but not of attention's 3.5", (
            4 / 3 * (3 * products + 3.5 * attention)
        )  # fmt: skip
        more_attention = "one forward more makes 4.5 forwards of attention: add it once, do not double 3.5"
        yield "what is recomputed", more_attention, a + 7 * attention
        yield "what is recomputed", "one forward more makes 4 and 4.5: add it once, do not double all", (
            6 * products + 7 * attention
        )  # fmt: skip
    else:
        yield "what is recomputed", "with anew=False nothing is", 4 * products + 4.5 * attention
    yield "the operations of attention", "half of the pairs are hidden by the causal mask: S * S / 2", a + 2 * b
    yield "the operations of attention", "two products of 2 operations each: 4 for each pair and dimension", a + b / 2
    yield "the operations of attention", "a rank's queries see keys of all ranks: S * S / 2 pairs, divided by P once", (
        a + b / x.P
    )  # fmt: skip
    yield "the operations of attention", "they are those of every layer", a + b / x.m.layers
    yield "the operations of attention", "all H query heads meet the keys, not G", a + b * x.m.kv_heads / x.m.heads
    yield "the operations of attention", "they are missing", a
    for factor, cause in (
        (3.0 + more, "its backward takes 2.5 times its forward, not twice: it makes the scores once more"),
        (1.0 + more, "the backward is missing: 2.5 times the forward"),
        (2.5 + more, "the forward is missing: 1 + 2.5"),
    ):
        yield "the backward of attention", cause, a + factor * attention
    yield "the backward of matrix products", "it takes twice the forward: a gradient for each factor", (
        (1 + more) * products + b
    )  # fmt: skip
    yield "the backward of matrix products", "the forward is missing: 1 + 2", (2 + more) * products + b
    yield "the matrix products", "a parameter takes 2 operations for each token, a multiplication and an addition", (
        a / 2 + b
    )  # fmt: skip
    yield "the matrix products", "they are missing", b
    yield (
        "the matrix products",
        "the embedding is a look-up, not a product: m.parameters - m.embedding",
        a * x.m.parameters / (x.m.parameters - x.m.embedding) + b,
    )
    yield "how many GPUs share the work", "it is divided by P", x.P * (a + b)
    yield "how many GPUs share the work", "attention is divided by P, too", a + x.P * b
    yield "how many GPUs share the work", "the matrix products are divided by P, too", x.P * a + b
    yield "how many sequences", "groups compute their sequences at the same time: count one sequence", 2 * (a + b)
    yield "the rates", "products and attention are exchanged", (
        a * x.products / x.attention + b * x.attention / x.products
    )  # fmt: skip


_UNKNOWN_SECONDS = (
    "the operations of one token and one layer",
    "no common mistake fits: take sizes from m, for the text rounds them; then print each of the two parts",
)


def _seconds(fn: Callable, *given: Any) -> None:
    x = _Time(*given)
    said = number(call(fn, *x, input=x.shown), "seconds: one number")
    if abs(said - x.want) > 1e-3 * x.want:  # whether a token sees itself makes less
        reason = recognised(_other_seconds(x), lambda value: abs(said - value) <= 1e-3 * value, _UNKNOWN_SECONDS)
        raise Wrong(f"you give {said:.4g} seconds, it is {x.want:.4g}", *reason)


def _seconds_value(fn: Callable) -> None:
    for anew in (False, True):
        _seconds(fn, LLAMA, TOKENS, 8, PRODUCTS, ATTENTION, anew)


def _seconds_adversarial(fn: Callable) -> None:
    for name, S, P in (("llama-3.1-8b", 8192, 1), ("llama-2-7b", 65536, 4), ("llama-3.1-70b", 2**20, 64)):
        _seconds(fn, model(name), S, P, 500e12, 300e12, P != 4)


step_seconds = Checker("12b step_seconds", value=_seconds_value, adversarial=_seconds_adversarial)


def hidden_from(bandwidth: float, flops: float = ATTENTION, H: int = 32, G: int = 8, e: int = 2) -> float:
    """Tokens of a rank from which on a hop hides behind the attention of a step: causal, zigzag, forward."""
    return e * G / H * flops / bandwidth


# ---- 12c: my_part(rows, borders, rank, P) -> tokens, positions, targets ---------------------------------------------


class _Batch(NamedTuple):
    rows: Tensor
    borders: list[list[int]]
    P: int

    @property
    def shown(self) -> str:
        return f"rows of {self.rows.shape[1]} tokens, borders {self.borders}, P = {self.P}"


def _batch(borders: list[list[int]], P: int) -> _Batch:
    S = borders[0][-1]
    rows = torch.tensor([[(7 * p * p + 3 * p + 31 * row) % 89 + 10 for p in range(S)] for row in range(len(borders))])
    return _Batch(rows, borders, P)


def part_of(
    batch: _Batch,
    rank: int,
    *,
    layout: Layout = zigzag,
    row: Callable[[int, int, int], int] = lambda rank, P, rows: rank // P,
    place: Callable[[int, int, int], int] = lambda rank, P, rows: rank % P,
    documents: bool = True,
    ends: bool = True,
    local: bool = False,
    wrap: bool = False,
    shift: int = 1,
) -> tuple[list[int], list[int], list[int]]:
    """What a rank reads, walked token by token. The options are the mistakes."""
    S, P, count = batch.rows.shape[1], batch.P, len(batch.rows)
    mine, r = row(rank, P, count) % count, place(rank, P, count) % P
    tokens, borders = batch.rows[mine].tolist(), batch.borders[mine]
    first, last = [0] * S, [False] * S
    for a, b in zip(borders, borders[1:]):
        for p in range(a, b):
            first[p] = a
        if b > a:
            last[b - 1] = True
    own = layout.positions(S, P, r).tolist()
    target = [
        IGNORE if not 0 <= p + shift < S or (ends and last[p]) else tokens[p + shift] for p in own
    ]  # fmt: skip
    if wrap:
        target = [tokens[(p + shift) % S] for p in own]
    if local:
        here = [tokens[p] for p in own]
        target = [*here[1:], here[0] if wrap else IGNORE] if here else []
        if ends:
            target = [IGNORE if last[p] else t for p, t in zip(own, target)]
    return [tokens[p] for p in own], [p - first[p] * documents for p in own], target


def _other_parts(batch: _Batch, rank: int) -> Iterator[tuple[str, str, tuple[list[int], ...]]]:
    make = partial(part_of, batch, rank)
    row, of = "which row, and which place in it", "P neighbouring ranks share a row"
    yield row, f"{of}: row rank // P, place rank % P. Here the rows alternate from rank to rank", make(
        row=lambda rank, P, rows: rank % rows, place=lambda rank, P, rows: rank // rows
    )  # fmt: skip
    yield row, f"{of}: row rank // P. Here all ranks take row 0", make(row=lambda *_: 0)
    yield row, "the row is right, the place is not: rank % P", make(place=lambda rank, P, rows: rank // P)
    yield row, "row and place are exchanged", make(
        row=lambda rank, P, rows: rank % P, place=lambda rank, P, rows: rank // P
    )  # fmt: skip
    for other in (contiguous, striped):
        yield "which tokens of the row", f"they are those of {other}; take rl.zigzag.positions", make(layout=other)
    whole = make(documents=False)
    tokens, places, targets = make()
    positions = "the positions"
    yield positions, "they go on through the whole row. Each document begins at 0", (tokens, whole[1], targets)
    yield positions, "they are counted on this rank. A document may begin on another one", (
        tokens, list(range(len(tokens))), targets,
    )  # fmt: skip
    started: dict[int, int] = {}
    mine = []
    for position, place in zip(whole[1], places):
        mine.append(started.setdefault(position - place, len(mine)))
    mine = [i - first for i, first in enumerate(mine)]
    yield positions, "they begin at 0 with the first token of a document on this rank; it may begin on another", (
        tokens, mine, targets,
    )  # fmt: skip
    yield positions, "they are counted from 1; the first token of a document is at 0", (
        tokens, [p + 1 for p in places], targets,
    )  # fmt: skip
    what = "the targets"
    across = "the last token of a document has the next document's first one for a target. It has none: -100"
    yield what, across, (tokens, places, make(ends=False)[2])
    around = "the last token of the row has the first one for a target. The last token of a document has none: -100"
    yield what, around, (tokens, places, make(wrap=True)[2])
    shifted = "the shift was done on the rank. The next token may lie on another one: look it up in the row"
    for ends in (True, False):
        yield what, shifted, (tokens, places, make(local=True, ends=ends)[2])
    yield what, shifted, (tokens, places, make(local=True, ends=False, wrap=True)[2])
    yield what, "each token is its own target: take the next one", (tokens, places, make(shift=0)[2])
    yield what, "each token is its own target: take the next one", (tokens, places, make(shift=0, ends=False)[2])
    yield what, "they are the tokens before, not the tokens after", (tokens, places, make(shift=-1, ends=False)[2])
    yield "several things at once", "positions and targets both ignore the borders", make(documents=False, ends=False)


_UNKNOWN_PART = (
    "row, place, positions, targets, in this order",
    "no common mistake fits: make positions and targets of the whole row, and only then take this rank's",
)


def _same_lists(a: Sequence[list[int]], b: Sequence[list[int]]) -> bool:
    return list(a) == list(b)


def _part(fn: Callable, batch: _Batch) -> None:
    for rank in range(len(batch.rows) * batch.P):
        shown = f"{batch.shown}, rank {rank}"
        got = parts(
            call(fn, batch.rows, [list(b) for b in batch.borders], rank, batch.P, input=shown, where="the borders",
                 cause="a document may be empty (two equal borders), and a rank may have no token at all"),
            "tokens, positions, targets",
        )  # fmt: skip
        names = ("tokens", "positions", "targets")
        want = part_of(batch, rank)
        have = []
        for name, x, due in zip(names, got, want):
            if not isinstance(x, Tensor) or x.ndim != 1 or len(x) != len(due):
                kind = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
                raise Wrong(
                    f"{name} of rank {rank} are {kind}, expected a tensor ({len(due)},)",
                    "which tokens this rank holds",
                    f"rl.zigzag.positions(S, P, {rank % batch.P}) says which; all three have one number for each",
                )
            have.append(x.tolist())
        if not _same_lists(have, want):
            name = next(n for n, x, due in zip(names, have, want) if x != due)
            i = names.index(name)
            told = f"{name} of rank {rank} are {have[i][:8]}, expected {want[i][:8]}"
            known = _other_parts(batch, rank)
            raise Wrong(told, *recognised(known, partial(_same_lists, have), _UNKNOWN_PART))


def _part_value(fn: Callable) -> None:
    _part(fn, _batch([[0, 12], [0, 12], [0, 12]], 2))
    _part(fn, _batch([[0, 5, 12], [0, 8, 12]], 3))


def _part_adversarial(fn: Callable) -> None:
    _part(fn, _batch([[0, 4, 4, 11, 13], [0, 1, 13, 13, 13]], 4))
    _part(fn, _batch([[0, 1, 3], [0, 3, 3]], 4))
    _part(fn, _batch([[0, 0, 7]], 1))


my_part = Checker("12c my_part", value=_part_value, adversarial=_part_adversarial)

# ---- 12d: first_difference(got, want) -> (what, detail) -------------------------------------------------------------

Step = dict[str, Any]
TOLERANCE = 1e-5


def library_first_difference(got: Step, want: Step) -> tuple[str, float | int | None]:
    """The exercise's own answer: what differs first, and where or by how much."""

    def same(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).norm() <= TOLERANCE * b.norm())  # of NaN it is False

    for position, (a, b) in enumerate(zip(got["logits"], want["logits"])):
        if not same(a, b):
            return "logits", position
    if not abs(got["loss"] - want["loss"]) <= TOLERANCE * abs(want["loss"]):
        return "loss", got["loss"] / want["loss"]
    if all(same(got["gradients"][name], g) for name, g in want["gradients"].items()):
        return "nothing", None
    a, b = (torch.cat([step["gradients"][name].flatten() for name in want["gradients"]]) for step in (got, want))
    factor = float(a @ b / (b @ b))
    common = all(same(got["gradients"][name], factor * g) for name, g in want["gradients"].items())
    return "gradients", factor if common else None


@lru_cache(maxsize=1)
def _one_device() -> Step:
    """A step of one device, made of formulas: gradients of very different sizes, one of them zero."""
    sizes = {"embedding": 1.0, "q": 1e-6, "unused": 0.0, "head": 30.0}
    return {
        "logits": numbers(1, 12, 7).double(),
        "loss": 2.5,
        "gradients": {name: size * numbers(i, 4, 3).double() for i, (name, size) in enumerate(sizes.items())},
    }


def _changed(
    logits: Callable[[Tensor], Tensor] = lambda x: x,
    loss: float = 1.0,
    gradients: Callable[[str, Tensor], Tensor] = lambda name, g: g,
) -> Step:
    right = _one_device()
    changed = {name: gradients(name, g.clone()) for name, g in right["gradients"].items()}
    return {"logits": logits(right["logits"].clone()), "loss": right["loss"] * loss, "gradients": changed}


def _from(position: int, value: float = 0.01) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x[position:] += value
        return x

    return change


def _one(name: str, factor: float) -> Callable[[str, Tensor], Tensor]:
    return lambda other, g: factor * g if other == name else g


_WHERE_LOGITS = ("the logits", "the first token (row) whose logits differ: compare row by row, by relative norm")
_WHERE_LOSS = ("the loss", "compare it only if all logits agree, and give got / want")
_WHERE_FACTOR = (
    "the gradients' factor",
    "one factor for all parameters: c = <got, want> / <want, want>, not number by number, as some are zero; None if "
    "some gradient is not c times the right one",
)
_EQUAL = (
    "what is equal",
    '("nothing", None) if all three agree. A gradient may be zero: multiply by its norm, as division gives 0 / 0',
)
_NAN = ("how a difference is found", "a comparison with NaN is False: ask whether it is equal, not whether it differs")
_SMALL = ("how gradients are compared", "by the relative norm of each one: an absolute limit passes small gradients")


def _compared(fn: Callable, got: Step, about: str, reason: Reason, want: Step | None = None) -> None:
    right = _one_device() if want is None else want
    due = library_first_difference(got, right)
    said = parts(call(fn, got, right, input=about, where=reason[0], cause=reason[1]), "what, detail")
    what, detail = said
    if what != due[0]:
        raise Wrong(f"you say that {what!r} is the first to differ, it is {due[0]!r}", *reason)
    if due[1] is None or detail is None:
        same = detail is None and due[1] is None
    else:
        told = number(detail, "a number, or None", "the detail is")
        same = math.isnan(told) and math.isnan(due[1]) or abs(told - due[1]) <= 1e-4 * max(abs(due[1]), 1e-9)
    if not same:
        reason = _WHERE_FACTOR if what == "gradients" and reason is _SMALL else reason
        raise Wrong(f"{what}: you say {detail!r}, it is {due[1]!r}", *reason)


def _compare_value(fn: Callable) -> None:
    _compared(fn, _changed(), "two equal steps; the gradient of one parameter is zero", _EQUAL)
    _compared(
        fn, _changed(gradients=lambda _, g: 4 * g), "logits and loss agree, all gradients are 4 times", _WHERE_FACTOR
    )
    _compared(fn, _changed(loss=2), "logits agree, the loss is twice as large", _WHERE_LOSS)
    _compared(
        fn, _changed(_from(5), 2, lambda _, g: g / 2), "everything differs, the logits from token 5 on", _WHERE_LOGITS
    )


def _compare_adversarial(fn: Callable) -> None:
    noise = 1 + 1e-9
    _compared(
        fn,
        _changed(lambda x: x * noise, noise, lambda _, g: g * noise),
        "equal but for the last digits, by 1e-9",
        ("what counts as equal", "a relative difference of up to 1e-5 is rounding"),
    )
    nan = float("nan")

    def late(x: Tensor) -> Tensor:
        x[7, 3] = nan
        return x

    _compared(fn, _changed(late), "token 7 has a NaN among its logits", _NAN)
    _compared(fn, _changed(loss=nan), "the loss is NaN", _NAN)
    _compared(fn, _changed(gradients=_one("q", 2)), "one gradient, of size 1e-6, is twice as large", _SMALL)
    _compared(fn, _changed(gradients=lambda _, g: -g), "all gradients have the other sign", _WHERE_FACTOR)
    _compared(
        fn,
        _changed(gradients=lambda name, g: g * (0.5 if name == "head" else 2)),
        "gradients have different factors",
        _WHERE_FACTOR,
    )
    _compared(fn, _changed(gradients=_one("embedding", nan)), "a gradient is NaN", _NAN)


first_difference = Checker("12d first_difference", value=_compare_value, adversarial=_compare_adversarial)

# ---- Predictions and the quiz: computed by the library, not written down --------------------------------------------


def largest() -> str:
    """Which of the three parts of 12a takes most."""
    found = bytes_by_part(LLAMA, TOKENS, P, R, True)
    return max(found, key=found.__getitem__)


def twice() -> float:
    """How much longer a step takes if the sequence has twice the tokens."""
    times = [sum(planned_seconds(LLAMA, setup(P, R, True), S, H100).values()) for S in (TOKENS, 2 * TOKENS)]
    return round(times[1] / times[0], 1)


def across() -> float:
    """Thousands of tokens from which on a hop between nodes hides."""
    return round(hidden_from(H100.network * FITTED.links) / 1000, 1)


LAYERS, RANKS = 2, 4  # of the small model that stands in for Llama

predict_largest = Prediction(
    "The largest part",
    largest,
    "16,384 tokens of 128,256 logits each, 14 bytes a logit: 27.4 GiB. State and layers' inputs take 5.6 and 4.",
)
predict_twice = Prediction(
    "Times as long",
    twice,
    "Twice the matrix products, but four times the attention.",
    tolerance=0.2,
)
predict_across = Prediction(
    "Thousands of tokens on a GPU",
    across,
    "e G F / (H W) with 24.6 GB/s: a ring over both nodes would have 8,192 tokens on each GPU.",
    tolerance=0.6,
)
predict_calls = Prediction(
    "Calls of the attention kernel",
    lambda: LAYERS * RANKS,
    "One for each step of the ring, in each layer: zigzag needs one call a step.",
)
predict_a = Prediction(
    "What is wrong with A",
    lambda: 3,
    "Rank 0's tokens, which begin at position 0, are right; all others are turned by the wrong angle.",
)
predict_b = Prediction(
    "What is wrong with B",
    lambda: 1,
    "Every gradient is a quarter: somebody divided by the four ranks.",
)
predict_c = Prediction(
    "What is wrong with C",
    lambda: 5,
    "Three targets are missing: one at each of the three borders between four ranks.",
)


def group_and_place(rank: int, P: int) -> tuple[int, int]:
    return rank // P, rank % P


quiz = Quiz(
    "Quiz 12",
    (lambda: round(12 * LLAMA.parameters / 64 / 1e9, 1), "12 x 8.03e9 / 64.", 0.1),
    (lambda: round(14 * 32_000 * 8192 / 2**30, 1), "8,192 tokens x 32,000 words x 14 bytes.", 0.2),
    (lambda: group_and_place(21, 8)[1], "21 mod 8; it reads row 2."),
    (lambda: 32, "FSDP2 divides by all ranks that it reduces over, those that share a sequence as well."),
    (lambda: 8, "The gradient of a mean was averaged once more, over the ranks that share the sequence."),
    (lambda: 16 * 8 * 2, "16 layers x 8 steps, and once more where the backward recomputes each layer."),
)

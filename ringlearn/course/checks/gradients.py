"""What checkers of a backward share: its inputs, autograd's gradients, and what a known mistake would return.

The oracle is autograd through dense attention in float64. What a mistake would give is computed too, from what the
queries of each rank add for the keys of each rank, so that a message can say which mistake an answer looks like.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layouts import Layout, contiguous
from ...masks import Mask
from ...worlds.world import PerRank
from . import oracle, simulate
from .checker import Wrong, parts
from .mistakes import Reason, recognised
from .oracle import numbers

NAMES = ("dq", "dk", "dv")
GROUPED = "dk, dv have G heads, each the sum over its group; attend_backward does that with G-head k, v"
Table = list[list[tuple[Tensor, Tensor, Tensor]]]  # [r][b]: what the queries of rank r and the keys of block b add
Gradients = tuple[list[Tensor], list[Tensor], list[Tensor]]  # dq, dk, dv, by rank


class Given(NamedTuple):
    """One run: what the ranks are given, and what they should return."""

    case: oracle.Case
    dout: Tensor
    out: Tensor
    lse: Tensor
    want: tuple[Tensor, Tensor, Tensor]

    @property
    def args(self) -> tuple[Any, ...]:
        """dout, q, k, v, out, lse, positions, mask: what a rank program is called with; a PerRank by rank."""
        split = self.case.split
        dout, out, lse = PerRank(split(self.dout)), PerRank(split(self.out)), PerRank(split(self.lse, -1))
        return dout, *self.case.parts, out, lse, self.case.positions, self.case.mask

    def under(self, mask: Mask) -> Given:
        """The same with another mask, for a mistake."""
        return self._replace(case=self.case._replace(mask=mask))


def make(
    S: int, P: int, H: int, G: int, D: int, mask: Mask, layout: Layout = contiguous, dtype: torch.dtype = torch.float32
) -> Given:
    """Random inputs of a backward, the same on every machine: names as in ``oracle.shards``."""
    return of(oracle.shards(S, P, H, G, D, layout, dtype, seed=S + P, mask=mask))


def of(case: oracle.Case, seed: int = 99) -> Given:
    """The backward of a case, with a random dout made from the seed, and autograd's gradients."""
    dtype = case.q.dtype
    dout = numbers(seed, *case.q.shape).to(dtype)
    q, k, v = (t.double().requires_grad_() for t in (case.q, case.k, case.v))
    out, lse = oracle.dense(q, k, v, case.mask)
    want = torch.autograd.grad(out, (q, k, v), dout.double())
    kept = lse.detach().to(torch.promote_types(dtype, torch.float32))
    return Given(case, dout, out.detach().to(dtype), kept, want)


def run(
    fn: Callable, given: Given, reason: Callable[[str, Tensor | None, Tensor], Reason], **options: Any
) -> simulate.Ran:
    """Run a backward; Wrong unless each rank returns tensors of the shapes of its q, k and v.

    reason: as for ``simulate.check_shapes``.  options: as for ``simulate.run``.
    """
    case = given.case
    ran = simulate.run(fn, case.P, *given.args, input=case.input, **options)
    results = [parts(result, ", ".join(NAMES), f"rank {rank} returns") for rank, result in enumerate(ran.results)]
    for x in filter(inspect.iscoroutine, sum(results, ())):
        x.close()  # or Python warns that it was never awaited
    for rank, result in enumerate(results):
        simulate.check_shapes(rank, NAMES, result, [part[rank] for part in case.parts], reason)
    return ran


# ---- What came out --------------------------------------------------------------------------------------------------


def wrong_gradients(results: list[Any], given: Given, tolerance: float) -> dict[str, dict[int, str]]:
    """Of dq, dk, dv those that differ from autograd's, and on which ranks and how. Empty if all are right."""
    found = {}
    for i, name in enumerate(NAMES):
        got = [result[i] for result in results]
        found[name] = simulate.wrong_ranks(name, got, given.case.split(given.want[i]), tolerance)
    return {name: ranks for name, ranks in found.items() if ranks}


def symptom(wrong: dict[str, dict[int, str]], P: int, names: Sequence[str] = NAMES) -> str:
    """In words, which of the named results are wrong, and on which ranks, as ``wrong_gradients`` has found.

    >>> symptom({"dk": {0: "dk is off by 0.5", 2: "dk is off by 0.3"}}, P=3)
    'dk is wrong on ranks 0 and 2 (rank 0: dk is off by 0.5); dq and dv are right on every rank'
    """
    name, ranks = next(iter(wrong.items()))
    first = next(iter(ranks))
    right = [n for n in names if n not in wrong]
    beside = f"; {' and '.join(right)} {'are' if len(right) > 1 else 'is'} right on every rank" if right else ""
    where = "on every rank" if len(ranks) == P else f"on {simulate.who(list(ranks))}"
    verb, which = ("are", f", {name}") if len(wrong) > 1 else ("is", "")
    return f"{', '.join(wrong)} {verb} wrong{which} {where} (rank {first}: {ranks[first]}){beside}"


def check_gradients(
    results: list[Any],
    given: Given,
    mistakes: Callable[[Given], Iterable[Mistake]],
    otherwise: Reason,
    tolerance: float = 1e-5,
) -> None:
    """Wrong unless every rank returned autograd's gradients; mistakes: those that are known by what they give."""
    wrong = wrong_gradients(results, given, tolerance)
    if not wrong:
        return
    what = symptom(wrong, len(results))
    if not wrong_gradients(results, given, 0.03):
        raise Wrong(
            what,
            "the dtype of what is added up, what travels and what is returned",
            "so small an error is rounding, to bfloat16 perhaps: sums and dk, dv on the wire are float32",
        )
    raise Wrong(what, *recognised(mistakes(given), lambda grads: looks_like(results, grads, wrong), otherwise))


def against_autograd(
    run_on: Callable[[Callable, Given, str, str], simulate.Ran],
    mistakes: Callable[[Given], Iterable[Mistake]],
    where: str,
    cause: str,
) -> Callable[..., None]:
    """A check of one case, for ``cases``: run an answer on it, and hold dq, dk, dv of each rank against autograd.

    where, cause: what is said of a gradient that is wrong in no known way, unless the case says something itself.
    """

    def check(fn: Callable, sizes: tuple, of_case: str = "", cause_of_case: str = "") -> None:
        given = make(*sizes)
        ran = run_on(fn, given, of_case, cause_of_case)
        check_gradients(ran.results, given, mistakes, (of_case or where, cause_of_case or cause))

    return check


# ---- Mistakes -------------------------------------------------------------------------------------------------------


# Where to look, the likely cause, and what it returns: for each of dq, dk, dv a tensor per rank, or None for any.
Mistake = tuple[str, str, Sequence[Sequence[Tensor] | None]]


def looks_like(results: list[Any], grads: Sequence[Sequence[Tensor] | None], wrong: dict[str, Any]) -> bool:
    """Whether the ranks returned what a mistake gives; where it says nothing, nothing may be wrong."""
    for i, name in enumerate(NAMES):
        if grads[i] is None and name in wrong:
            return False
        if grads[i] is not None and simulate.wrong_ranks(name, [result[i] for result in results], grads[i], 1e-3):
            return False
    return True


def contributions(
    given: Given,
    lse_of: str = "row",
    delta_of: str = "row",
    scaled: bool = True,
    seen: Callable[[int, int], tuple[Tensor, Tensor]] | None = None,
    scale: float | None = None,
) -> Table:
    """Dense, in float64: what the queries of rank r and the keys of block b add to dq, dk, dv, at [r][b].

    lse_of, delta_of: "row" is right; "block" takes only this block into account; "none" leaves delta out; "alone" is
    delta from the out that the block has by itself, before any merge.
    seen: the positions of queries and keys that the mask is asked about, if not those of r and b.
    scale: of the scores, if not 1 / sqrt(D).
    """
    case = given.case
    reuse = case.q.shape[1] // case.k.shape[1]
    scale = case.q.shape[-1] ** -0.5 if scale is None else scale
    table = []
    for r, rows in enumerate(case.positions):
        q, dout, out = (t[:, :, rows].double() for t in (case.q, given.dout, given.out))
        lse = given.lse[..., rows].double()
        line = []
        for b, columns in enumerate(case.positions):
            k, v = (t[:, :, columns].double().repeat_interleave(reuse, 1) for t in (case.k, case.v))
            q_pos, k_pos = seen(r, b) if seen else (rows, columns)
            hidden = ~case.mask(q_pos[:, None], k_pos[None, :])
            s = (torch.einsum("bhid,bhjd->bhij", q, k) * scale).masked_fill(hidden, -torch.inf)
            own = torch.logsumexp(s, -1).nan_to_num(neginf=0.0) if len(columns) else torch.zeros_like(lse)
            p = torch.exp(s - (lse if lse_of == "row" else own).unsqueeze(-1))
            dp = torch.einsum("bhid,bhjd->bhij", dout, v)
            alone = torch.exp(s - own.unsqueeze(-1))
            delta = {
                "row": (dout * out).sum(-1),
                "block": (p * dp).sum(-1),
                "alone": (alone * dp).sum(-1),
                "none": torch.zeros_like(lse),
            }[delta_of]
            ds = p * (dp - delta.unsqueeze(-1)) * (scale if scaled else 1.0)
            dq = torch.einsum("bhij,bhjd->bhid", ds, k)
            dk, dv = torch.einsum("bhij,bhid->bhjd", ds, q), torch.einsum("bhij,bhid->bhjd", p, dout)
            dk, dv = (t.unflatten(1, (-1, reuse)).sum(2) for t in (dk, dv))
            line.append((dq, dk, dv))
        table.append(line)
    return table


def added(table: Table) -> Gradients:
    """Everything in its place: dq of each rank's queries, dk and dv of each block."""
    every = range(len(table))
    dq = [sum(table[r][b][0] for b in every) for r in every]
    dk, dv = ([sum(table[r][b][i] for r in every) for b in every] for i in (1, 2))
    return dq, dk, dv

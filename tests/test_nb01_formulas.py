"""One test for each numbered formula of notebook 01, with the library's functions where it has them, in float64."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import nbformat
import pytest
import torch

from ringlearn import text
from ringlearn.partial import Partial, identity, merge
from ringlearn.softmax import blockwise, online, running_max_and_sum, two_pass

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "01_incremental_softmax.ipynb"


@pytest.fixture
def row():
    """The notebook's row, with noise so that all scores differ, and values with three numbers."""
    zen = text.zen()
    scores = text.context_scores(zen, zen.index(b"*right*")).double()
    return scores + 0.3 * torch.randn(len(scores), dtype=torch.float64), torch.randn(
        len(scores), 3, dtype=torch.float64
    )


def close(got, want, tolerance=1e-12):
    return float((got - want).norm()) <= tolerance * float(want.norm())


def attend(scores, values):
    p, lse = two_pass(scores)
    return Partial(p @ values, lse)


def formula_1(scores, values):
    p = torch.exp(scores) / torch.exp(scores).sum()
    return p, (p.unsqueeze(-1) * values).sum(0)


def test_formula_1_softmax_attention_by_its_definition(row):
    scores, values = row
    p, out = formula_1(scores, values)
    assert close(p, torch.softmax(scores, -1)) and close(out, attend(scores, values).out)
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)


def test_formula_2_any_constant_may_be_subtracted_and_the_maximum_keeps_exponents_below_0(row):
    scores, values = row
    for m in (scores.max(), scores.max() + 5, torch.tensor(0.0)):
        e = torch.exp(scores - m)
        assert close(e / e.sum(), formula_1(scores, values)[0])
    assert float((scores - scores.max()).max()) == 0
    assert close(two_pass(12 * scores)[0], torch.softmax(12 * scores, -1))


def test_formula_3_lse_from_m_and_l_and_weights_from_lse(row):
    scores, values = row
    m, l = scores.max(), torch.exp(scores - scores.max()).sum()
    p, lse = two_pass(scores)
    assert close(lse, m + torch.log(l)) and close(lse, torch.log(torch.exp(scores).sum()))
    assert close(p, torch.exp(scores - lse)) and close(p, formula_1(scores, values)[0])


def test_formula_4_one_more_score(row):
    scores, _ = row
    m, l = torch.tensor(-torch.inf, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for n, s in enumerate(scores, start=1):
        m_new = torch.maximum(m, s)
        m, l = m_new, l * torch.exp(m - m_new) + torch.exp(s - m_new)
        assert m == scores[:n].max() and close(l, torch.exp(scores[:n] - m).sum())
    assert all(close(*pair) for pair in zip(running_max_and_sum(scores), (m, l)))
    assert close(online(scores)[0], two_pass(scores)[0])


def test_formula_5_values_carried_along(row):
    scores, values = row
    m, l, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(3)
    for s, v in zip(scores, values):
        m_new = torch.maximum(m, s)
        rescale, e = torch.exp(m - m_new), torch.exp(s - m_new)
        m, l, acc = m_new, l * rescale + e, acc * rescale + e * v
    assert close(acc / l, formula_1(scores, values)[1])


def test_formula_6_merge_of_two_disjoint_sets_of_keys(row):
    scores, values = row
    for split in (1, 300, len(scores) - 1):
        a, b = attend(scores[:split], values[:split]), attend(scores[split:], values[split:])
        lse = torch.log(torch.exp(a.lse) + torch.exp(b.lse))
        out = torch.exp(a.lse - lse) * a.out + torch.exp(b.lse - lse) * b.out
        whole = attend(scores, values)
        assert close(out, whole.out) and close(lse, whole.lse)
        assert close(merge(a, b).out, out) and close(merge(a, b).lse, lse)


def test_formula_7_commutative_associative_with_identity(row):
    scores, values = row
    a, b, c = (attend(s, v) for s, v in zip(scores.split([400, 7, 240]), values.split([400, 7, 240])))
    e = identity((3,), torch.float64)

    def same(x, y, tolerance):
        return close(x.out, y.out, tolerance) and close(x.lse, y.lse, tolerance)

    for x, y in itertools.permutations((a, b, c), 2):
        assert same(merge(x, y), merge(y, x), 0)
    assert same(merge(merge(a, b), c), merge(a, merge(b, c)), 1e-14)
    assert same(merge(a, e), a, 0) and same(merge(e, a), a, 0)
    assert merge(e, e).lse == -torch.inf


def test_formula_8_the_derivative_of_lse_is_p(row):
    scores, values = row
    p = torch.softmax(scores, -1)
    leaf = scores.clone().requires_grad_()
    for lse in (two_pass(leaf)[1], online(leaf)[1], blockwise(leaf, values, [400, 0, 7, 240]).lse):
        assert close(torch.autograd.grad(lse, leaf)[0], p)
    j, h = int(scores.argmax()), 1e-6  # and without autograd
    up, down = scores.clone(), scores.clone()
    up[j] += h
    down[j] -= h
    assert float((torch.logsumexp(up, -1) - torch.logsumexp(down, -1)) / (2 * h)) == pytest.approx(
        float(p[j]), rel=1e-6
    )


def test_the_notebook_numbers_exactly_the_formulas_that_are_tested_here():
    markdown = "\n".join(c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "markdown")
    numbers = [int(n) for n in re.findall(r"\\tag\{(\d+)\}", markdown)]
    tested = sorted(int(n) for name in globals() for n in re.findall(r"^test_formula_(\d+)_", name))
    assert numbers == tested == list(range(1, 9))

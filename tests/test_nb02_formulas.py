"""One test for each numbered formula of notebook 02, with the library's functions where it has them, in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from course import formula_tests, formulas, read

import ringlearn as rl
from ringlearn import costs
from ringlearn.course.checks.nb02 import count_traffic
from ringlearn.course.viz.flash import walk
from ringlearn.flash import attend, attend_backward

S, D, D_V = 23, 4, 3
SCALE = 1 / math.sqrt(D)


def close(got, want, tolerance=1e-12):
    return float((got - want).detach().norm()) <= tolerance * float(want.detach().norm())


@pytest.fixture
def x():
    """q, k, v, dout of one head, and out, lse and gradients by the definition."""
    q, k, v, dout = (torch.randn(1, 1, S, d, dtype=torch.float64) for d in (D, D, D_V, D_V))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    s = SCALE * q @ k.mT
    out, lse = s.softmax(-1) @ v, s.logsumexp(-1)
    grads = torch.autograd.grad(out, leaves, dout)
    q, k, v = (t.detach() for t in leaves)
    return {"q": q, "k": k, "v": v, "dout": dout, "out": out.detach(), "lse": lse.detach(), "grads": grads}


@pytest.fixture
def row():
    """One row: scores, values, dout, and ds by autograd."""
    s, v, dout = (torch.randn(shape, dtype=torch.float64) for shape in ((S,), (S, D_V), (D_V,)))
    s.requires_grad_()
    (ds,) = torch.autograd.grad(s.softmax(-1) @ v, s, dout)
    return s.detach(), v, dout, ds


def test_formula_1_the_tiles_of_a_block_of_queries_merge_to_attention(x):
    for block_q, block_k in ((5, 7), (23, 1), (1, 23)):
        for i in torch.arange(S).split(block_q):
            parts = [attend(x["q"][:, :, i], x["k"][:, :, j], x["v"][:, :, j], None, SCALE) for j in
                     torch.arange(S).split(block_k)]  # fmt: skip
            out, lse = rl.merge_all(parts)
            assert close(out, x["out"][:, :, i]) and close(lse, x["lse"][:, :, i])
    assert close(rl.flash_forward(x["q"], x["k"], x["v"], block_q=5, block_k=7).out, x["out"])


def test_formula_2_the_backward_of_a_row(row):
    s, v, dout, ds = row
    p, dp = s.softmax(-1), v @ dout
    delta = (p * dp).sum()
    assert close(p * (dp - delta), ds)
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), s)
    assert close(torch.diag(p) - torch.outer(p, p), jacobian)  # the text's reason


def test_formula_2_the_numbers_of_the_text():
    s = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().requires_grad_()
    v = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64)
    (ds,) = torch.autograd.grad(s.softmax(-1) @ v, s, torch.tensor(2.0, dtype=torch.float64))
    assert ds.tolist() == pytest.approx([-0.5, -0.75, 1.25])


def test_formula_3_delta_is_dout_times_out(row, x):
    s, v, dout, _ = row
    p = s.softmax(-1)
    assert float((p * (v @ dout)).sum()) == pytest.approx(float(dout @ (p @ v)), rel=1e-12)
    p = torch.exp(SCALE * x["q"] @ x["k"].mT - x["lse"].unsqueeze(-1))
    assert close((x["dout"] * x["out"]).sum(-1), (p * (x["dout"] @ x["v"].mT)).sum(-1), 1e-13)


def blocks_of(row, sizes=(9, 1, 13)):
    s, v, dout, _ = row
    return [rl.Partial(a.softmax(-1) @ b, a.logsumexp(-1)) for a, b in zip(s.split(sizes), v.split(sizes))]


def test_formula_4_what_a_merge_sends_to_its_blocks(row):
    _, _, dout, _ = row
    parts = [rl.Partial(out[None].requires_grad_(), lse[None].requires_grad_()) for out, lse in blocks_of(row)]
    out, lse = rl.merge_all(parts)
    grads = torch.autograd.grad(out, [t for part in parts for t in part], dout[None])
    delta = dout @ out[0]
    for part, dout_b, dlse_b in zip(parts, grads[::2], grads[1::2]):
        w = torch.exp(part.lse - lse)
        assert close(w * dout, dout_b)
        assert close(w * (part.out @ dout - delta), dlse_b)


def test_formula_5_a_blocks_two_outputs_give_ds_with_the_rows_delta(row):
    s, v, dout, ds = row
    sizes, got, by_definition = (9, 1, 13), [], []
    lse, delta = s.logsumexp(-1), dout @ (s.softmax(-1) @ v)
    for s_b, v_b, part in zip(s.split(sizes), v.split(sizes), blocks_of(row, sizes)):
        w, p_b = torch.exp(part.lse - lse), torch.exp(s_b - part.lse)
        dout_b, dlse_b = w * dout, w * (dout @ part.out - delta)
        got.append(p_b * (v_b @ dout_b - dout_b @ part.out) + p_b * dlse_b)
        by_definition.append(torch.exp(s_b - lse) * (v_b @ dout - delta))
        assert abs(float((p_b * (v_b @ dout_b - dout_b @ part.out)).sum())) < 1e-12  # the first term alone: sum 0
    assert close(torch.cat(got), ds) and close(torch.cat(by_definition), ds)


def test_formula_6_what_the_tiles_add_up_to(x):
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    delta = (dout * x["out"]).sum(-1)
    for i in torch.arange(S).split(5):
        for j in torch.arange(S).split(7):
            p = torch.exp(SCALE * q[:, :, i] @ k[:, :, j].mT - x["lse"][:, :, i, None])
            ds = p * (dout[:, :, i] @ v[:, :, j].mT - delta[:, :, i, None])
            parts = SCALE * ds @ k[:, :, j], SCALE * ds.mT @ q[:, :, i], p.mT @ dout[:, :, i]
            tile = dout[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], x["lse"][:, :, i], delta[:, :, i]
            assert all(map(close, attend_backward(*tile, None, SCALE), parts))
            dq[:, :, i] += parts[0]
            dk[:, :, j] += parts[1]
            dv[:, :, j] += parts[2]
    assert all(map(close, (dq, dk, dv), x["grads"]))


def test_formula_6_the_numbers_of_the_text():
    q, k = (torch.tensor(x, dtype=torch.float64) for x in (1.0, [math.log(2), 0.0, 0.0]))
    v = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    p = (q * k).softmax(-1)
    assert p.tolist() == pytest.approx([0.5, 0.25, 0.25])
    dq, dk, dv = torch.autograd.grad(p @ v, leaves, torch.tensor(2.0, dtype=torch.float64))
    assert round(float(dq), 2) == -0.35
    assert dk.tolist() == pytest.approx([-0.5, -0.75, 1.25]) and dv.tolist() == pytest.approx([1, 0.5, 0.5])


@pytest.mark.parametrize("block_q", [1, 32, 97, 128])
def test_formula_7_the_bytes_of_a_walk(block_q):
    S, D, e = 97, 16, 2
    by_formula = 2 * S * D * e + 4 * S + math.ceil(S / block_q) * 2 * S * D * e
    assert by_formula == count_traffic(S, 1, D, block_q, 16, e)
    assert by_formula == costs.flash_traffic(S, 1, 1, D, block_q=block_q, block_k=16, itemsize=e)
    last = walk(S, block_q, 16, D=D, itemsize=e)[-1]
    assert by_formula == last.read + last.written


@pytest.mark.parametrize("block_q", [16, 64])
def test_formula_8_operations_for_each_byte_of_keys_and_values(block_q):
    S, D, e = 128, 16, 2
    steps = walk(S, block_q, 32, D=D, itemsize=e)
    operations = sum(2 * 2 * len(step.queries) * len(step.keys) * D for step in steps)
    nbytes = steps[-1].read - S * D * e  # without q
    assert operations == costs.attention_flops(S, 1, D)
    assert operations / nbytes == 2 * block_q / e == costs.intensity(block_q, itemsize=e)


def test_the_notebook_numbers_exactly_the_formulas_that_are_tested_here():
    assert formulas(read("02")) == list(range(1, 9))
    assert formula_tests(Path(__file__)) == set(range(1, 9))

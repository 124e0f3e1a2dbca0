"""One test for each numbered formula of notebook 09, with the library's functions where it has them, in float64."""

from __future__ import annotations

import itertools
from math import ceil, gcd, lcm

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.attention.dilated.rows import Configuration, intersect
from ringlearn.flash import attend

CONFIGURATIONS = [[(8, 2)], [(8, 1), (32, 4)], [(7, 3), (20, 6)]]


def close(got, want, tolerance=1e-12):
    return float((got - want).norm()) <= tolerance * float(want.norm())


def kept_by_words(head, w, r, S):
    """Every r-th row of each segment, from the head's first one on."""
    return [list(range(begin, min(begin + w, S)))[head % r :: r] for begin in range(0, S, w)]


def views(configurations, head, S):
    """For each configuration a bool (S, S): query and key in the same kept list."""
    found = []
    for w, r in configurations:
        view = torch.zeros(S, S, dtype=torch.bool)
        for rows in kept_by_words(head, w, r, S):
            for q, k in itertools.product(rows, rows):
                view[q, k] = True
        found.append(view)
    return found


def inputs(S, H=1, D=4):
    return [torch.randn(1, H, S, D, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("w, r", [(8, 3), (7, 3), (4, 1), (16, 16), (40, 5)])
@pytest.mark.parametrize("head", [0, 1, 4, 9])
def test_formula_1_a_head_keeps_every_rth_row_of_each_segment(w, r, head):
    for S in (1, 20, 33):
        by_formula = [p for p in range(S) if p % w % r == head % r]
        assert by_formula == [p for rows in kept_by_words(head, w, r, S) for p in rows]
        assert by_formula == [p for rows in Configuration(w, r).kept(head, S) for p in rows]


@pytest.mark.parametrize("w, r", [(8, 3), (7, 3), (4, 1), (5, 5)])
def test_formula_2_the_rows_that_a_head_keeps_of_a_segment(w, r):
    for S, j in itertools.product((1, 13, 20, 31), range(2 * r)):
        lengths = [min(w, S - begin) for begin in range(0, S, w)]
        counted = [len(rows) for rows in Configuration(w, r).kept(j, S)]
        assert [ceil((length - j % r) / r) if length > j % r else 0 for length in lengths] == counted


@pytest.mark.parametrize("S, w, r", [(64, 8, 2), (4096, 512, 8), (2**20, 2048, 1)])
def test_formula_3_pairs_are_exact_where_all_divides_and_near_elsewhere(S, w, r):
    for head in range(min(r, 3)):
        assert costs.dilated_pairs(S, [w], [r], head=head) == S * w // r**2
        odd = costs.dilated_pairs(S + 5, [w + w // 8], [r], head=head) / ((S + 5) * (w + w // 8) / r**2)
        assert 0.5 < odd < 1.5


@pytest.mark.parametrize("configurations", CONFIGURATIONS[1:], ids=str)
def test_formula_4_configurations_mixed_by_their_denominators_are_merged(configurations):
    S = 45
    q, k, v = inputs(S)
    parts = [attend(q, k, v, view, 0.5) for view in views(configurations, 0, S)]
    alpha = torch.stack([p.lse for p in parts]).exp()
    total = alpha.sum(0)
    alpha = torch.where(total > 0, alpha / total, 0.0).unsqueeze(-1)
    mixed = sum(a * p.out for a, p in zip(alpha, parts))
    assert close(mixed, rl.merge(*parts).out)
    assert close(mixed, rl.dilated_attention(q, k, v, *zip(*configurations)))


@pytest.mark.parametrize("configurations", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("P", [1, 3])
def test_formula_5_softmax_with_multiplicities(configurations, P):
    S = 45
    q, k, v = inputs(S, H=3)
    out = rl.dilated_attention(*rl.SimulatedWorld(P).shard(q, k, v), *zip(*configurations)).unshard()
    for head in range(3):
        c = sum(view.double() for view in views(configurations, head, S))
        weight = c * torch.exp(q[0, head] @ k[0, head].T / 2)
        seen = c.sum(-1) > 0
        want = (weight @ v[0, head])[seen] / weight.sum(-1, keepdim=True)[seen]
        assert close(out[0, head, seen], want)
        assert bool((out[0, head, ~seen] == 0).all())


def test_formula_6_two_ranges_meet_in_a_range_whose_step_is_the_least_common_multiple():
    for a, alpha, b, r in itertools.product((0, 1, 5), (1, 2, 4, 6), (0, 3, 8), (1, 3, 4)):
        one, other = range(a, 90, alpha), range(b, 80, r)
        met, expected = intersect(one, other), sorted(set(one) & set(other))
        assert list(met) == expected
        assert bool(expected) == ((b - a) % gcd(alpha, r) == 0)
        assert not expected or met.step == lcm(alpha, r)


@pytest.mark.parametrize("configurations", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("P", [1, 2, 4])
def test_formula_7_bytes_are_those_of_kept_rows(configurations, P):
    B, G, S, D = 2, 3, 61, 4
    x = [torch.zeros(B, G, S, D) for _ in range(3)]
    world = rl.SimulatedWorld(P)
    rl.dilated_attention(*world.shard(*x, layout=rl.zigzag), *zip(*configurations))
    n = [
        [sum(any(p % w % r == j % r for w, r in configurations) for p in own) for j in range(G)]
        for own in (rl.zigzag.positions(S, P, rank).tolist() for rank in range(P))
    ]
    for rank in range(P):
        want = 2 * B * D * 4 * sum(n[(rank - t) % P][j] for t in range(P - 1) for j in range(G))
        assert world.trace.bytes_sent(rank) == want
        assert (
            costs.dilated_bytes(S, P, G, D, *zip(*configurations), B=B, itemsize=4, rank=rank, layout=rl.zigzag) == want
        )


def test_formula_8_the_gradient_of_each_lse():
    S = 40
    q, k, v = inputs(S)
    dout = torch.randn_like(q)
    parts = [attend(q, k, v, view & rl.causal.dense(S, S), 0.5) for view in views([(8, 1), (40, 2)], 0, S)]
    seen = parts[1].lse > -torch.inf
    outs = torch.stack([p.out[seen] for p in parts])
    lses = torch.stack([p.lse[seen] for p in parts]).requires_grad_()
    out = (lses.softmax(0).unsqueeze(-1) * outs).sum(0)
    (dlse,) = torch.autograd.grad(out, lses, dout[seen])
    delta = (dout[seen] * out).sum(-1)
    lses, out, delta = lses.detach(), out.detach(), delta.detach()
    for i in range(2):
        alpha = torch.exp(lses[i] - torch.logsumexp(lses, 0))
        assert close(alpha * ((dout[seen] * outs[i]).sum(-1) - delta), dlse[i])

"""One test for each numbered formula of notebook 12, against the planner, the costs of a ring, and the library."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import costs
from ringlearn.course.checks import nb12
from ringlearn.plan import Setup, memory, model, step_seconds
from ringlearn.plan.hardware import FORWARD


@pytest.mark.parametrize("name, S, P, R", [("llama-3.1-8b", 2**17, 8, 16), ("llama-3.1-70b", 2**18, 16, 64)])
def test_formula_1_bytes_when_the_backward_begins(name, S, P, R):
    m, n = model(name), S // P
    planned = memory(m, Setup(dp=R // P, cp=P, recompute="full"), S)
    of_layers = 2 * m.width * m.layers
    parts = 12 * m.parameters / R, n * of_layers, n * 14 * m.vocabulary
    assert parts == (planned["weights"] + planned["optimizer"], planned["checkpoints"], planned["logits and loss"])


@pytest.mark.parametrize("c", [0, 1])
def test_formula_2_seconds_of_a_step(c):
    m, S, P, rates = nb12.LLAMA, nb12.TOKENS, 8, (nb12.PRODUCTS, nb12.ATTENTION)
    theta, H, D = m.parameters - m.embedding, m.heads, m.head_dim
    products, attention = 2 * theta * S / rates[0] / P, 2 * H * D * S**2 * m.layers / rates[1] / P
    planned = step_seconds(m, Setup(cp=P, recompute="full" if c else "none"), S, nb12.H100)
    assert 3 * products == pytest.approx(planned["matrix products"], rel=1e-3)
    assert 3.5 * attention == pytest.approx(planned["attention"], rel=1e-3)
    if c:  # the planner: not the output layer, and attention's forward at its own rate
        layers = products - 2 * m.embedding * S / rates[0] / P
        assert layers + attention / FORWARD == pytest.approx(planned["recomputation"], rel=1e-3)


@pytest.mark.parametrize("H, G, D, P", [(32, 8, 128, 8), (8, 8, 64, 4)])
def test_formula_3_a_hop_hides_behind_a_zigzag_step(H, G, D, P):
    F, W, e = 1e12, 1e9, 2
    n = nb12.hidden_from(W, F, H, G, e)
    assert n == e * G / H * F / W
    tokens = 2 * round(n / 2)
    hop = costs.ring_bytes(tokens * P, P, G, D, itemsize=e) / (P - 1) / W
    step = 4 * H * D * tokens * tokens / 2 / F  # half of all pairs of two shards, in every step but the first
    assert hop == pytest.approx(step, rel=1e-2)


@pytest.mark.parametrize("borders", [[0, 5, 12, 24], [0, 0, 7, 7, 9]])
def test_formula_4_positions_in_packed_documents(borders):
    lengths = [b - a for a, b in zip(borders, borders[1:])]
    walked = [i for n in lengths for i in range(n)]
    assert [i - max(c for c in borders if c <= i) for i in range(borders[-1])] == walked
    assert nb12.part_of(nb12._batch([borders], 1), 0)[1] == walked


@pytest.mark.parametrize("dp, P", [(2, 2), (2, 8), (3, 4)])
def test_formula_5_groups_and_places_are_those_of_torchs_mesh(dp, P):
    mesh = torch.arange(dp * P).view(dp, P)  # what init_device_mesh(..., (dp, cp)) numbers its ranks by
    for r in range(dp * P):
        assert (mesh == r).nonzero().tolist() == [list(nb12.group_and_place(r, P))]


@pytest.mark.parametrize("factor", [0.25, 4.0, -1.0])
def test_formula_6_the_factor_of_all_gradients(factor):
    world = rl.SimulatedWorld(2)
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))

    def gradients(c):
        loss = c * rl.ring_attention(*world.shard(q, k, v)).unshard().square().sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, (q, k, v))])

    right, wrong = gradients(1.0), gradients(factor)
    assert float(wrong @ right / (right @ right)) == pytest.approx(factor, rel=1e-5)

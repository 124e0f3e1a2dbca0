"""One test for each numbered formula of notebook 10, in float64, against autograd or what a run holds."""

from __future__ import annotations

import pytest
import torch
from nn_programs import gradients, make_batch, make_model
from oracle import relative
from torch.nn import functional as F

import ringlearn as rl
from ringlearn import nn as rnn

S = 23


def split(P, batch, layout=rl.zigzag):
    return rnn.shard_tokens(rl.SimulatedWorld(P), *batch, layout=layout)


def sums_and_counts(model, x, y):
    """Each rank's sum of losses, and how many of its tokens count."""
    sums = []
    for logits, t in zip(model(x).tensors, y.tensors, strict=True):
        sums.append(F.cross_entropy(logits.flatten(0, 1), t.flatten(), reduction="sum"))
    return sums, [int((t != rnn.IGNORE).sum()) for t in y.tensors]


@pytest.mark.parametrize("ignored", ["none", "some", "all but the first", "all of one half"])
@pytest.mark.parametrize("P", [2, 3, 5])
def test_formula_1_the_loss_is_the_ranks_sums_over_the_number_of_all(ignored, P):
    model, (tokens, targets) = make_model(), make_batch(S, ignored=ignored)
    sums, counts = sums_and_counts(model, *split(P, (tokens, targets)))
    want = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())  # torch's own mean over what counts
    assert relative(sum(sums) / sum(counts), want) < 1e-12


def test_formula_2_what_a_token_weighs_in_a_mean_of_means():
    counts = [3, 5, 1]
    losses = [torch.rand(n, dtype=torch.float64, requires_grad=True) for n in counts]
    means = torch.autograd.grad(sum(x.mean() for x in losses) / 3, losses)
    mean = torch.autograd.grad(torch.cat(losses).mean(), losses)
    for n, of_means, of_all in zip(counts, means, mean, strict=True):
        assert torch.allclose(of_means, torch.tensor(1 / (3 * n), dtype=torch.float64))
        assert torch.allclose(of_all, torch.tensor(1 / sum(counts), dtype=torch.float64))


def shares_of_the_gradient(P, batch):
    """g_r of each rank: the gradient of a copy of the weights that this rank's tokens alone go through."""
    model, (x, y) = make_model(), split(P, batch)
    copies = [{n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()} for _ in range(P)]

    class EachItsOwn(torch.nn.Module):
        """Calls a module with another rank's weights, in rank order."""

        def __init__(self, module, prefix):
            super().__init__()
            self.module, self.prefix, self.calls = [module], prefix, 0

        def forward(self, *args):
            own = {n.removeprefix(self.prefix): p for n, p in copies[self.calls % P].items() if
                   n.startswith(self.prefix)}  # fmt: skip
            self.calls += 1
            return torch.func.functional_call(self.module[0], own, args)

    for name, module in list(model.named_modules()):
        if list(module.parameters(recurse=False)):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], EachItsOwn(module, name + "."))
    sums, counts = sums_and_counts(model, x, y)
    (sum(sums) / sum(counts)).backward()
    return [{n: p.grad for n, p in copy.items()} for copy in copies]


@pytest.mark.parametrize("ignored", ["some", "all of one half"])
def test_formula_3_the_gradient_is_the_sum_of_the_ranks_parts(ignored):
    batch, model = make_batch(S, ignored=ignored), make_model()
    rnn.backward(model, [batch])
    parts = shares_of_the_gradient(3, batch)
    for name, want in gradients(model).items():
        assert relative(sum(part[name] for part in parts), want) < 1e-10
        assert relative(3 * parts[0][name], want) > 1e-3  # and not three times one of them


@pytest.mark.parametrize("R", [2, 4, 6])
def test_formula_4_an_average_of_shares_times_R_is_their_sum(R):
    shares = torch.randn(R, 5, dtype=torch.float64)
    for c in (1, 2, R):
        assert torch.allclose((c * shares).mean(0), shares.sum(0)) == (c == R)


@pytest.mark.parametrize("m", [0.01, 1e3])
def test_formula_5_clipping_is_by_one_norm_over_all_parameters(m):
    model = make_model()
    rnn.backward(model, [make_batch(S)])
    before = gradients(model)
    norm = sum(float(g.pow(2).sum()) for g in before.values()) ** 0.5
    assert abs(rnn.clip(model, m) / norm - 1) < 1e-12
    for name, g in gradients(model).items():
        assert relative(g, before[name] * min(1.0, m / norm)) < 1e-5  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("block", [1, 4, 100])
def test_formula_6_blocks_of_the_sequence_change_neither_values_nor_gradients(block):
    x, targets = torch.randn(2, S, 8, dtype=torch.float64), make_batch(S)[1]
    found = []
    for blocked in (True, False):
        torch.manual_seed(0)
        layer, head = rnn.FeedForward(8).double(), torch.nn.Linear(8, 31).double()
        y = rnn.in_blocks(layer, x, block=block) if blocked else layer(x)
        loss = rnn.loss_sum(head, y, targets, block=block if blocked else S)
        (loss / 7).backward()
        found.append([y.detach(), loss.detach(), *(p.grad for p in (*layer.parameters(), *head.parameters()))])
    for got, want in zip(*found, strict=True):
        assert relative(got, want) < 1e-12


def kept(P, recompute, H, G, D, layers):
    """Numbers that a rank keeps of each token, in a run with float32 activations, less ids and positions."""
    torch.manual_seed(0)
    config = rnn.Config(31, H * D, layers, H, G, block=40, checkpoint=recompute)
    model, tokens = rnn.Transformer(config), torch.randint(31, (1, 240))
    batch = split(P, (tokens, rnn.next_tokens(tokens)))
    with rnn.Activations(model, *batch) as held:
        loss = model(*batch)
        found = held.live(0)
    del loss
    return found * P / 240 / 4 - 4


@pytest.mark.parametrize("P, H, G, D", [(1, 4, 4, 6), (1, 4, 2, 6), (2, 4, 2, 6), (3, 4, 1, 6), (3, 2, 2, 8)])
def test_formula_7_what_a_layer_keeps(P, H, G, D):
    d = H * D
    one, three = (kept(P, False, H, G, D, layers) for layers in (1, 3))
    small = H + 1 + 2 * D  # lse, the norm's scalar, sines
    assert abs((three - one) / 2 - (3 * d + d + 2 * G * D + (2 * G * D if P > 1 else 0) + 2 * d + d + small)) < 0.2


@pytest.mark.parametrize("P", [1, 3])
def test_formula_8_what_layers_keep_that_are_computed_anew(P):
    for layers in (1, 3):
        assert 0 <= kept(P, True, 4, 2, 6, layers) - 24 * (layers + 1) < 1

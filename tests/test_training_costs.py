"""What training keeps, from shapes, against what autograd keeps and what the simulated ledger counts."""

from __future__ import annotations

import pytest
import torch

import ringlearn as rl
from ringlearn import nn as rnn
from ringlearn.costs.training import kept_bytes, kept_numbers, state_bytes, weights
from ringlearn.nn import layers as blocks

SIZES = dict(layers=2, H=4, G=2, D=12, vocabulary=200)


def model_of(layers, H, G, D, vocabulary, recompute=False, block=50, dtype=torch.float32):
    torch.manual_seed(0)
    config = rnn.Config(vocabulary, H * D, layers, H, G, block=block, checkpoint=recompute)
    return rnn.Transformer(config).to(dtype)


def batch_of(S, P, B=1):
    tokens = torch.randint(200, (B, S))
    return rnn.shard_tokens(rl.SimulatedWorld(P), tokens, rnn.next_tokens(tokens), layout=rl.zigzag)


@pytest.mark.parametrize("way", ["whole", "blocks", "recompute"])
@pytest.mark.parametrize("P, B, dtype", [(1, 1, torch.float32), (2, 1, torch.float64), (4, 2, torch.float32)])
def test_kept_is_what_the_ledger_counts_after_a_forward(monkeypatch, way, P, B, dtype):
    if way == "whole":
        monkeypatch.setattr(blocks, "checkpoint", lambda fn, *xs, **_: fn(*xs))
    model, batch = model_of(**SIZES, recompute=way == "recompute", dtype=dtype), batch_of(960, P, B)
    with rnn.Activations(model, *batch) as held:
        loss = model(*batch)
        kept = [held.live(rank) for rank in range(P)]
    loss.backward()
    itemsize = torch.finfo(dtype).bits // 8
    tokens = 960 // P * (2 * B + 1) * 8  # tokens, targets, positions
    want = kept_bytes(960, P, B=B, itemsize=itemsize, way=way, **SIZES)
    for rank in range(P):
        assert want <= kept[rank] <= want + tokens + 2000, kept[rank] - want


def test_kept_is_what_autograd_keeps_on_one_device():
    model, tokens = model_of(**SIZES), torch.randint(200, (1, 960))
    with rnn.Kept(model) as kept:
        model(tokens, rnn.next_tokens(tokens)).backward()
    assert kept.nbytes == kept_bytes(960, 1, **SIZES) + 2 * 8 * 960


def peaks(P, S=1920, **options):
    model, batch = model_of(**SIZES, **options), batch_of(S, P)
    with rnn.Activations(model, *batch) as held:
        rnn.backward(model, [batch])
    assert all(held.live(rank) < 30 * S for rank in range(P))  # activations are gone
    return [held.peak(rank) for rank in range(P)]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_of_a_rank_falls_as_one_over_the_ranks(recompute):
    one, two, four, eight = (max(peaks(P, recompute=recompute)) for P in (1, 2, 4, 8))
    assert 0.5 < two / one < 0.75  # the ring holds the keys and values that came last, and messages
    assert abs(four / two - 0.5) < 0.04 and abs(eight / four - 0.5) < 0.04


def test_every_rank_of_an_even_layout_has_nearly_the_same_peak():
    found = peaks(4)
    assert max(found) < 1.04 * min(found)


def test_the_peak_contains_what_is_kept_and_what_one_block_makes():
    small, large = max(peaks(2, block=50)), max(peaks(2, block=960))
    assert kept_bytes(1920, 2, **SIZES) < small < large  # 960 x 4 d more, before and after the GELU
    assert large - small > 910 * 4 * 48 * 4


def test_a_length_that_could_hide_behind_a_weight_is_refused():
    model = model_of(**SIZES)
    with pytest.raises(ValueError, match="200 tokens of a rank"):
        rnn.Activations(model, *batch_of(400, 2))
    with pytest.raises(ValueError, match="SimulatedWorld"):
        rnn.Activations(model, torch.zeros(1, 3))


@pytest.mark.parametrize("call, words", [
    (lambda: kept_numbers(1, layers=1, H=1, G=1, D=1, way="blockwise"), "one of whole, blocks, recompute"),
    (lambda: kept_numbers(0, layers=1, H=1, G=1, D=1), "at least 1"),
])  # fmt: skip
def test_bad_input_says_what_was_expected(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_state_is_sixteen_bytes_of_a_parameter():
    model = model_of(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(200, (1, 60))
    rnn.backward(model, [(tokens, rnn.next_tokens(tokens))])
    optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert sum(t.nbytes for t in tensors) == state_bytes(sum(p.numel() for p in model.parameters()))
    assert weights(**SIZES) == sum(p.numel() for p in model.parameters())
    assert state_bytes(10, 4, fsdp=True) == 48 and state_bytes(10, 4) == 160

"""The transformer of rl.nn with a cache equals itself without one: logits, and what it generates."""

import re

import pytest
import torch
from nn_programs import LAYOUTS, generated, make_batch, make_model, uncached
from oracle import relative

import ringlearn as rl
from ringlearn import nn as rnn

S = 23


@pytest.fixture(scope="module")
def model():
    return make_model().requires_grad_(False)


@pytest.mark.parametrize("layout, ranks", [("contiguous", 1), ("zigzag", 3), ("striped", 5), ("all on rank 0", 3)])
@pytest.mark.parametrize("mask", [rl.causal, rl.causal & rl.sliding_window(6)], ids=str)
def test_logits_with_a_cache_are_those_without(layout, ranks, mask):
    """A prompt, another one behind it, then some tokens at once and one by one; in pages, too."""
    torch.manual_seed(1)
    scores = dict(sinks=True, softcap=0.5) if ranks == 3 else {}
    model = rnn.Transformer(rnn.Config(31, 16, 2, 4, 2, **scores), mask=mask).double().requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.normal_()
    tokens, world = make_batch(S)[0], rl.SimulatedWorld(ranks)
    want = model(tokens)
    cache = model.new_cache(world, 2, S, interleave=2, page=3 if ranks == 3 else None)
    got, split = [], {"layout": LAYOUTS[layout]}
    for a, b in ((0, 9), (9, 9 + ranks - 1), (9 + ranks - 1, 17)):
        got.append(model(rnn.shard_tokens(world, tokens[:, a:b], **split), cache=cache).unshard())
    for a, b in ((17, 20), *((i, i + 1) for i in range(20, S))):
        got.append(model(tokens[:, a:b], cache=cache))
    assert [c.lengths for c in cache] == [(S, S)] * 2
    assert relative(torch.cat(got, 1), want) < 1e-12


def test_an_attention_layer_with_sequences_of_different_lengths():
    torch.manual_seed(2)
    layer, x = rnn.Attention(16, 4, 2).double().requires_grad_(False), torch.randn(2, 12, 16, dtype=torch.float64)
    cache = rl.KVCache(rl.SimulatedWorld(3), 2, 2, 4, capacity=20, interleave=1, dtype=torch.float64)
    layer(x[:, :7], cache=cache)
    cache.truncate([7, 4])
    x[1] = torch.cat([x[1, :4], x[1, 7:], x[1, 4:7]])  # the second goes on from its fourth token
    out = layer(torch.stack([x[0, 7:], x[1, 4:9]]), cache=cache)
    assert relative(out[0], layer(x[:1])[0, 7:]) < 1e-12
    assert relative(out[1], layer(x[1:, :9])[0, 4:]) < 1e-12
    with pytest.raises(ValueError, match="expected sequences of one length before a prefill"):
        layer(cache.world.shard(x), cache=cache)
    with pytest.raises(ValueError, match="with cache= expected Shards, or a tensor"):
        layer(x, rnn.Split(torch.arange(12), rl.zigzag, cache.world), cache)


@pytest.mark.parametrize("length, ranks", [(S, 3), (2, 4), (1, 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generates_what_it_would_without_a_cache(model, length, ranks, temperature):
    tokens = make_batch(length)[0]
    seen = []
    out = generated(model, tokens, rl.SimulatedWorld(ranks), temperature, on_token=seen.append)
    assert torch.equal(out, uncached(model, tokens, temperature))
    assert torch.equal(torch.stack(seen, 1), out[:, length:])


def test_stops_when_all_sequences_have_ended(model):
    tokens = make_batch(S)[0]
    want = uncached(model, tokens, 0.0)
    stop = int(want[0, S + 2])
    out = model.generate(tokens, 12, rl.SimulatedWorld(2), stop=stop)
    for row, whole in zip(out, want, strict=True):
        end = next((i for i in range(S, out.shape[1]) if whole[i] == stop), out.shape[1])
        assert torch.equal(row[:end], whole[:end]) and bool((row[end:] == stop).all())
    alone = model.generate(tokens[:1], 12, rl.SimulatedWorld(2), stop=stop)
    assert torch.equal(alone[0], want[0, : S + 3])


def test_a_full_cache_loses_nothing(model):
    tokens, world = make_batch(S)[0], rl.SimulatedWorld(2)
    cache = model.new_cache(world, 2, S)
    model(tokens[:, :-1], cache=cache)
    with pytest.raises(ValueError, match="sequence 0 has 22 tokens and would have 25, the capacity is 23"):
        model(tokens[:, :3], cache=cache)
    with pytest.raises(ValueError, match="sequence 0 has 22 tokens and would have 25, the capacity is 23"):
        model(rnn.shard_tokens(world, tokens[:, :3]), cache=cache)
    assert relative(model(tokens[:, -1:], cache=cache), model(tokens)[:, -1:]) < 1e-12


def test_bad_input_says_what_was_expected(model):
    tokens, world = make_batch(S)[0], rl.SimulatedWorld(2)
    cache = model.new_cache(world, 2, S)
    for call, words in (
        (lambda: model(tokens, cache=cache[:1]), "expected a cache for each of 2 layers, got 1"),
        (lambda: model(tokens, tokens, cache=cache), "with cache= expected tokens alone"),
        (lambda: model(tokens.double(), cache=cache), "expected tokens (B, S) in int64"),
        (lambda: model.generate(tokens[:, :0], 3, world), "at least one for each sequence"),
        (lambda: model.generate(tokens, 0, world), "expected new_tokens to be an int >= 1"),
        (lambda: model.generate(tokens, 3, world, temperature=-1), "expected temperature to be a number >= 0"),
        (lambda: model.generate(tokens, 3, world, stop="x"), "expected stop to be None or a token"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    with pytest.raises(ValueError, match="alibi is not supported with a cache"):
        rnn.Transformer(rnn.Config(31, 16, 2, 4, 2, alibi=True)).generate(tokens, 3, world)
    with pytest.raises(ValueError, match="records no gradient"):
        make_model()(tokens, cache=cache)


@pytest.mark.parametrize("failure", ["no_grad was forgotten", "an interrupt in the last layer"])
def test_a_step_that_failed_can_be_made_again(failure):
    torch.manual_seed(0)
    world, tokens = rl.SimulatedWorld(2), torch.randint(256, (1, 30))
    model = rl.nn.Transformer(rl.nn.Config(width=32, layers=3, heads=4, kv_heads=2)).double()
    cache = model.new_cache(world, batch=1, capacity=64, page=4)
    with torch.no_grad():
        right = model(tokens)[:, -1:]
        model(rl.nn.shard_tokens(world, tokens[:, :-1], layout=rl.zigzag), cache=cache)
    if failure == "no_grad was forgotten":
        with pytest.raises(ValueError, match="under torch.no_grad"):
            model(tokens[:, -1:], cache=cache)
    else:
        hook = model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(tokens[:, -1:], cache=cache)
        hook.remove()
    assert [kept.lengths for kept in cache] == [(29,)] * 3
    with torch.no_grad():
        assert torch.allclose(model(tokens[:, -1:], cache=cache), right, rtol=1e-12, atol=1e-12)


def test_attention_alone_forgets_a_token_of_a_failed_step():
    torch.manual_seed(0)
    layer, x = rl.nn.Attention(32, 4, kv_heads=2).double(), torch.randn(1, 10, 32, dtype=torch.float64)
    cache = rl.KVCache(rl.SimulatedWorld(2), 1, 2, 8, 64, dtype=torch.float64)
    with torch.no_grad():
        right = layer(x)[:, -1:]
        layer(x[:, :-1], cache=cache)
    with pytest.raises(ValueError, match="under torch.no_grad"):
        layer(x[:, -1:], cache=cache)
    with torch.no_grad():
        assert cache.lengths == (9,) and torch.allclose(layer(x[:, -1:], cache=cache), right, rtol=1e-12)

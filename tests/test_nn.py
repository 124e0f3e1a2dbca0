"""The transformer over a split sequence against one written anew: dense, no blocks, one device, float64."""

import nn_programs as programs
import pytest
import torch
from kernel_cases import Largest
from nn_programs import LAYOUTS, gradients, make_batch, make_model, oracle
from oracle import dense_attention, relative
from torch.nn import functional as F

import ringlearn as rl
from ringlearn import nn as rnn
from ringlearn.attention.table import STRATEGIES, TWO_AXES
from ringlearn.costs.training import kept_bytes

P = 4
WORLD, TOKENS = rl.SimulatedWorld(2), torch.arange(16).view(2, 8)  # of calls that are refused
FILE = "tests/nn_programs.py"
IGNORED = ["none", "some", "all but the first", "all of one half"]


def expected(batches, max_norm=None, **options):
    model = make_model(**options)
    loss, count = oracle(model, batches)
    loss.backward()
    norm = None if max_norm is None else float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    return loss.item(), count, norm, gradients(model)


def check(got, want, tolerance=1e-10):
    loss, count, norm, grads = got
    assert abs(loss - want[0]) < tolerance and count == want[1]
    assert (norm is None) == (want[2] is None) and (norm is None or abs(norm / want[2] - 1) < tolerance)
    assert grads.keys() == want[3].keys()
    for name, grad in grads.items():
        assert relative(grad, want[3][name]) < tolerance, name


# Values and gradients on one device and in a simulated world


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("ignored", IGNORED)
def test_one_device_equals_the_oracle(ignored, checkpoint):
    batches = [make_batch(23, ignored=ignored)]
    model = make_model(checkpoint=checkpoint)
    loss = rnn.backward(model, batches)
    check((loss.mean, loss.tokens, None, gradients(model)), expected(batches))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ranks, S, ignored",
    [(1, 9, "none"), (2, 24, "some"), (3, 23, "all but the first"), (4, 37, "all of one half"), (5, 3, "some")],
)
def test_simulated_ranks_equal_the_oracle(layout, ranks, S, ignored):
    world, model = rl.SimulatedWorld(ranks), make_model(checkpoint=ranks == 3)
    batches = [make_batch(S, ignored=ignored), make_batch(S + 2, B=1, seed=1)]  # accumulated
    shards = [rnn.shard_tokens(world, *batch, layout=LAYOUTS[layout]) for batch in batches]
    loss = rnn.backward(model, shards)
    norm = rnn.clip(model, 0.5)
    check((loss.mean, loss.tokens, norm, gradients(model)), expected(batches, max_norm=0.5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_one_device(layout):
    model, (tokens, _) = make_model(), make_batch(23)
    shards = rnn.shard_tokens(rl.SimulatedWorld(3), tokens, layout=LAYOUTS[layout])
    assert relative(model(shards).unshard(), model(tokens)) < 1e-12


@pytest.mark.parametrize("mask", [rl.full, rl.sliding_window(4) & rl.causal, rl.documents([9, 14])], ids=str)
def test_other_masks_equal_dense_scores(mask):
    torch.manual_seed(3)
    layer, x = rnn.Attention(16, 4, 2, mask=mask).double(), torch.randn(2, 23, 16, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (layer.q, layer.k, layer.v))
    q, k = (rnn.rope(t, torch.arange(23)) for t in (q, k))
    dense = layer.out(dense_attention(q, k, v, mask)[0].transpose(1, 2).flatten(2))
    assert relative(layer(x), dense) < 1e-12
    assert relative(layer(rl.SimulatedWorld(3).shard(x, layout=rl.zigzag)).unshard(), dense) < 1e-12


def test_all_tokens_ignored_is_no_step():
    model = make_model()
    loss = rnn.backward(model, [rnn.shard_tokens(rl.SimulatedWorld(2), *make_batch(9, ignored="all"))])
    assert loss.tokens == 0 and loss.mean != loss.mean
    assert all(bool((p.grad == 0).all()) for p in model.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_that_the_training_program_offers_equals_the_oracle(strategy, layout):
    batch, model = make_batch(23, ignored="all of one half"), make_model()
    for layer in model.layers:
        layer.attention.strategy = STRATEGIES[strategy].function
    world = rl.SimulatedWorld((3, 2) if strategy in TWO_AXES else 4)
    loss = rnn.backward(model, [rnn.shard_tokens(world, *batch, layout=LAYOUTS[layout])])
    check((loss.mean, loss.tokens, None, gradients(model)), expected([batch]))


def test_the_strategy_is_a_parameter():
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return rl.ring_attention(*args, **options)

    model, batch = rnn.Transformer(programs.CONFIG, strategy=counted), make_batch(9)
    model(*batch)
    assert not calls  # one device
    model(*rnn.shard_tokens(rl.SimulatedWorld(2), *batch))
    assert calls == [{"mask": rl.causal}] * programs.CONFIG.layers


# Positions and targets


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks, S", [(1, 5), (3, 23), (4, 16), (5, 2)])
def test_next_tokens_cross_shard_borders(layout, ranks, S):
    tokens = torch.randint(100, (2, S))
    shards = rnn.shard_tokens(rl.SimulatedWorld(ranks), tokens, layout=LAYOUTS[layout])
    targets = rnn.next_tokens(shards)
    for x, y, positions in zip(shards.tensors, targets.tensors, shards.positions, strict=True):
        assert torch.equal(x, tokens[:, positions])
        padded = torch.cat([tokens, torch.full((2, 1), rnn.IGNORE)], 1)
        assert torch.equal(y, padded[:, positions + 1])


def test_rope_is_the_rotation_of_complex_numbers_and_sees_distances_only():
    x, y = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    i, p = torch.arange(4).double(), 1_000_003
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(4).double(), p * 100.0 ** (-2 * i / 8))
    assert relative(rnn.rope(x, torch.tensor([p]), 100.0), torch.cat([turned.real, turned.imag], -1)) < 1e-12

    def score(a, b):
        return (rnn.rope(x, torch.tensor([a])) * rnn.rope(y, torch.tensor([b]))).sum()

    assert relative(score(1_000_040, 1_000_000), score(40, 0)) < 1e-9
    far = rnn.rope(x.float(), torch.tensor([p])), rnn.rope(x, torch.tensor([p]))
    assert relative(*far) < 1e-6  # angles in float32 would be off by 0.06


def test_rms_norm_equals_torch():
    x, mine, theirs = torch.randn(3, 5, 16), rnn.RMSNorm(16), torch.nn.RMSNorm(16, eps=1e-6)
    with torch.no_grad():
        theirs.weight.copy_(mine.gain.normal_())
    assert relative(mine(x), theirs(x)) < 1e-6
    rounded = x.bfloat16()
    assert torch.equal(mine(rounded), mine(rounded.float()).bfloat16())  # rounded once


def test_the_loss_of_bf16_logits_is_computed_in_float32():
    x, head, targets = torch.randn(2, 9, 8).bfloat16(), torch.randn(31, 8).bfloat16(), make_batch(9)[1]
    loss = rnn.loss_sum(lambda x: x @ head.T, x, targets, block=4)
    logits = (x @ head.T).double().flatten(0, 1)
    assert loss.dtype == torch.float32
    assert relative(loss, F.cross_entropy(logits, targets.flatten(), ignore_index=rnn.IGNORE, reduction="sum")) < 1e-6


# Blockwise: what is never there


@pytest.mark.parametrize("checkpoint", [False, True])
def test_no_activation_is_as_wide_as_the_feed_forward_or_the_vocabulary(checkpoint):
    S, block, vocabulary = 1024, 32, 200
    sizes = dict(vocabulary=vocabulary, width=16, layers=2, heads=2, kv_heads=1, checkpoint=checkpoint)
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (1, S))
    largest = {}
    for b in (block, S):
        model = rnn.Transformer(rnn.Config(**sizes, block=b))
        with Largest() as seen:
            rnn.backward(model, [rnn.shard_tokens(rl.SimulatedWorld(2), tokens, rnn.next_tokens(tokens))])
        largest[b] = seen.numel
    assert largest[block] <= S * 16  # S x d; in blocks 32 x 200 and 32 x 64
    assert largest[S] >= S // 2 * vocabulary  # without blocks it is there


@pytest.mark.parametrize("ranks", [None, 2])
def test_what_is_kept_for_the_backward(ranks):
    """In units of S x d: with layers computed anew their inputs alone, else what attention wants too."""
    S, d, layers = 1024, 16, 3
    if ranks is None:  # simulated layers that are computed anew have Shards as inputs, which no hook sees
        assert programs.kept(None, S, d, layers, checkpoint=True) < layers + 1.5
    # a feed-forward that is kept adds 10 for each layer, the loss 25
    assert programs.kept(ranks and rl.SimulatedWorld(ranks), S, d, layers) < 12 * layers


def test_what_a_rank_keeps_falls_as_one_over_the_ranks(pool):
    one, one_anew = (programs.kept(None, 512, 16, 2, checkpoint=anew) for anew in (False, True))
    for two, four, two_anew, four_anew in pool.run(f"{FILE}:kept_by_a_rank"):
        assert four == two / 2 and four_anew == two_anew / 2
        assert two == (one + 2) / 2  # in each of two layers the ring keeps the keys and values that came last, too
        assert two_anew == one_anew / 2
        for P, found in ((2, two), (4, four)):  # and what shapes say, with 16 bytes for a token's id and target
            assert abs(found * 4 * 512 * 16 - kept_bytes(512, P, layers=2, H=2, G=1, D=8) - 16 * 512 / P) < 1


def test_blocks_do_not_change_the_result():
    batches = [make_batch(23)]
    for block in (1, 7, 23, 100):
        model = make_model(block=block)
        loss = rnn.backward(model, batches)
        check((loss.mean, loss.tokens, None, gradients(model)), expected(batches))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_autocast_is_as_near_as_on_one_device(layout):
    batch = make_batch(64, B=1, ignored="none")
    want = expected([batch])[3]

    def error(parts):
        model = make_model(torch.float32, block=16)
        rnn.backward(model, [parts], autocast=torch.bfloat16)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        return max(relative(grad, want[name]) for name, grad in gradients(model).items())

    one = error(batch)
    assert 1e-4 < error(rnn.shard_tokens(rl.SimulatedWorld(4), *batch, layout=LAYOUTS[layout])) < 2 * one


# Loss curves


@pytest.fixture(scope="module")
def one_device_curve():
    losses = programs.train_curve(None, None, 50, None)
    assert losses[-1] < 0.9 * losses[0]  # it learns something
    return losses


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "ranks, layout", [(1, "zigzag"), (2, "zigzag"), (4, "contiguous"), (4, "striped"), (4, "zigzag")]
)
def test_loss_curves_of_50_steps_are_equal(one_device_curve, ranks, layout):
    losses = programs.train_curve(rl.SimulatedWorld(ranks, count_memory=False), None, 50, layout)
    assert max(abs(a - b) for a, b in zip(losses, one_device_curve, strict=True)) < 1e-9


def test_loss_curve_of_gloo_processes(pool, one_device_curve):
    for losses in pool.run(f"{FILE}:curve", 8, "zigzag"):
        assert max(abs(a - b) for a, b in zip(losses, one_device_curve, strict=False)) < 1e-9


# Processes

CP_CASES = [
    (None, False, "zigzag", "some", 23, {}),
    (None, True, "striped", "all of one half", 22, {}),
    (None, True, "all on rank 0", "none", 9, {}),
    ("DDP", True, "contiguous", "all but the first", 25, {}),
    ("DDP", False, "zigzag", "some", 3, {}),  # a rank without tokens
    ("FSDP2", False, "zigzag", "all of one half", 23, {"checkpoint": True}),
    ("FSDP2", True, "striped", "some", 21, {}),
    ("FSDP2", False, "all on rank 0", "none", 9, {}),
]


def test_processes_equal_the_oracle(pool):
    results = pool.run(f"{FILE}:cp_steps", CP_CASES)
    for rank in range(P):
        for got, (_, _, _, ignored, S, _) in zip(results[rank], CP_CASES, strict=True):
            check(got, expected([make_batch(S, ignored=ignored)]))


def test_processes_generate_what_one_device_does(pool):
    want = programs.uncached(make_model(), make_batch(23)[0], 0.7)
    for out, said, lengths in pool.run(f"{FILE}:generate_on_gloo"):
        assert torch.equal(out, want) and lengths == [(23, 23)] * 2
        assert said[0].startswith("generate: values of tokens: expected the same on all ranks")
        assert said[1].startswith("Transformer: tokens: expected the same on all ranks")
        assert "sequence 0 has 23 tokens and would have 31, the capacity is 30" in said[2]


def test_dp_times_cp_with_accumulation_and_clipping_equals_the_oracle(pool):
    batches = [make_batch(23, B=4, ignored="all of one half"), make_batch(10, B=4, seed=1)]
    batches[0][1][::2, :20] = rnn.IGNORE  # the first half of dp has far fewer
    cases = [(how, batches, layout) for how, layout in
             [(None, "zigzag"), ("DDP", "striped"), ("FSDP2", "zigzag"), ("HSDP", "contiguous")]]  # fmt: skip
    want = expected(batches, max_norm=0.5)
    for result in pool.run(f"{FILE}:dp_cp_steps", cases):
        for got in result:
            check(got, want)


def test_mistakes_are_errors_on_every_rank(pool):
    for said in pool.run(f"{FILE}:mistakes"):
        assert "the same number of micro-batches" in said[0] and "[1, 1, 1, 2]" in said[0]
        assert "reduced over 2" in said[1] and "use fully_shard" in said[2]


def test_a_batch_that_is_none_on_one_rank_is_an_error_on_every_rank(pool):
    for said in pool.run(f"{FILE}:targets_on_one_rank_are_plain"):
        assert "Transformer: expected Shards alone or tensors alone, got Shards, Tensor" in said


@pytest.mark.parametrize("call, words", [
    (lambda: rnn.Attention(10, 4), "divisible"),
    (lambda: rnn.Attention(8, 4, 3), "divisible"),
    (lambda: rnn.Attention(12, 4), "even"),
    (lambda: rnn.Split.of(torch.zeros(1, 4, 8), layout=rl.zigzag), "both layout and world"),
    (lambda: rnn.Split.of(rl.SimulatedWorld(2).shard(torch.zeros(1, 4, 8)), layout=rl.zigzag), "Shards alone"),
    (lambda: rnn.Attention(8, 4, strategy="ring"), "expected strategy to be a function like rl.ring_attention"),
    (lambda: rnn.Attention(8, 0), "Attention: expected heads to be an int >= 1, got 0"),
    (lambda: rnn.Attention(8, 4)(torch.zeros(4, 8)), r"Attention: expected x of shape \(B, S, 8\), got \(4, 8\)"),
    (lambda: rnn.Attention(8, 4)(WORLD.shard(torch.zeros(1, 4, 8)), rnn.Split(torch.arange(4))), "got Shards, Tensor"),
    (lambda: rnn.Config(block=0), "Config: expected block to be an int >= 1, got 0"),
    (lambda: rnn.Config(width=16.0), "expected width to be an int >= 1, got 16.0"),
    (lambda: rnn.FeedForward(8, 0), "FeedForward: expected hidden to be an int >= 1, got 0"),
    (lambda: rnn.in_blocks(torch.exp, torch.zeros(1, 4, 8), block=0), "expected block to be an int >= 1"),
    (lambda: rnn.rope(torch.zeros(1, 1, 4, 5), torch.arange(4)), "must be even"),
    (lambda: rnn.rope(torch.zeros(1, 1, 4, 6), torch.arange(3)), r"each token, \(4,\) or \(1, 4\), got \(3,\)"),
    (lambda: rnn.rope(torch.zeros(1, 1, 4, 6), torch.arange(4), 0.0), "base to be a number > 0"),
    (lambda: rnn.loss_sum(lambda x: x, torch.zeros(1, 4, 8), TOKENS[:1, :3], block=2), r"\(1, 4\), got \(1, 3\)"),
    (lambda: rnn.next_tokens(torch.zeros(1, 4)), "next_tokens: expected token ids"),
    (lambda: rnn.next_tokens(WORLD.shard(TOKENS)), "split along their last dim, as by shard_tokens"),
    (lambda: rnn.shard_tokens(WORLD, [1, 2]), "expected tensors .*got list"),
])  # fmt: skip
def test_bad_input_says_what_was_expected(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("batch, words", [
    (lambda: (TOKENS.float(),), r"expected tokens \(B, S\) in int64, got \(2, 8\) in torch.float32"),
    (lambda: (TOKENS[0],), r"expected tokens \(B, S\) in int64, got \(8,\)"),
    (lambda: (TOKENS, TOKENS.int()), r"expected targets \(B, S\) in int64, got \(2, 8\) in torch.int32"),
    (lambda: (TOKENS, TOKENS[:, 1:]), r"a target for each token, got \(2, 8\) and \(2, 7\)"),
    (lambda: (rnn.shard_tokens(WORLD, TOKENS), TOKENS), "Shards alone or tensors alone, got Shards, Tensor"),
    (lambda: (TOKENS, rnn.shard_tokens(WORLD, TOKENS)), "Shards alone or tensors alone, got Tensor, Shards"),
    (lambda: (rnn.shard_tokens(WORLD, TOKENS), rnn.shard_tokens(rl.SimulatedWorld(2), TOKENS)), "of one world"),
    (lambda: tuple(rnn.shard_tokens(WORLD, TOKENS, layout=layout) for layout in (rl.zigzag, rl.striped)),
     "got 8 positions in layout zigzag, 8 positions in layout striped"),
])  # fmt: skip
def test_targets_of_other_tokens_are_refused(batch, words):
    """Under another layout they would be as many, and the loss a wrong number."""
    with pytest.raises(ValueError, match=f"Transformer: .*{words}"):
        rnn.Transformer(rnn.Config(width=8, layers=1, heads=2))(*batch())

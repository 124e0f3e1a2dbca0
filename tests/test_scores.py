"""Sinks, capped scores and ALiBi in kernels and layers; what every strategy makes of them is in test_strategies.py."""

import math
import warnings

import pytest
import torch
from cases import LAYOUTS, MASKS, SCORES, check_against_dense, make_inputs
from oracle import Picky, dense_attention, relative
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringlearn as rl
from ringlearn import kernels
from ringlearn.attention import strategy
from ringlearn.kernels.scores import Scores
from ringlearn.layouts import positions_of
from ringlearn.nn import Attention, Config, Transformer, next_tokens, shard_tokens
from ringlearn.partial import merge_all
from ringlearn.tiles.located import located


@pytest.fixture
def shards():
    q, k, v = (torch.randn(1, h, 30, 8) for h in (4, 2, 2))
    return rl.SimulatedWorld(2).shard(q, k, v, layout=rl.zigzag)


def test_slopes_are_those_of_the_paper():
    """Figure 3: 8 heads have 1/2, 1/4, ..., 1/256; the authors' code makes 12 of 8 and every other one of 16."""
    assert rl.alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert rl.alibi_slopes(12) == (*rl.alibi_slopes(8), *rl.alibi_slopes(16)[:8:2])
    assert rl.alibi_slopes(1) == (2.0**-8,) and len(rl.alibi_slopes(71)) == 71
    for wrong in (0, -1, 2.0, True, "8"):
        with pytest.raises(ValueError, match="expected heads, the number of query heads, to be an int >= 1, got"):
            rl.alibi_slopes(wrong)


@pytest.mark.parametrize(
    "slopes", [[0.3, 0.1, -0.2, 0.0], (1, 2, 3, 4), torch.tensor([0.5, 0.25, 0.125, 0.5])], ids=str
)
def test_slopes_may_be_numbers_or_a_tensor(shards, slopes):
    out = rl.ring_attention(*shards, mask=rl.causal, alibi=slopes).unshard()
    expected, _ = dense_attention(*(x.unshard() for x in shards), rl.causal, alibi=slopes)
    assert relative(out, expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "causal window", "documents", "own"])
def test_tiles_know_where_they_are(mask, layout):
    """Of each score that is computed, the positions of its tile are those of the query and of the key."""
    for here in layout.ranges(50, 3):
        for there in layout.ranges(50, 3):
            q_pos, k_pos = positions_of(here), positions_of(there)
            for tile in rl.plan_tiles(MASKS[mask](50), here, there):
                rows, columns = located(tile, here, there).positions()
                assert torch.equal(rows, q_pos[tile.q]) and torch.equal(columns, k_pos[tile.k])


def test_a_batch_whose_rows_have_documents_of_their_own():
    """Its rows are computed as one sequence, and distances stay those within a row."""
    q, k, v = make_inputs(20, H=4, G=2, D_k=8, D_v=8, B=2)
    mask, changes = rl.causal & rl.documents([[5, 15], [8, 12]]), SCORES["all"](4)
    needing = (q, k, v, changes["sinks"])
    out = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v, layout=rl.zigzag), mask=mask, **changes).unshard()
    rows = [
        dense_attention(*(t[b : b + 1] for t in (q, k, v)), rl.causal & rl.documents(lengths), **changes)[0]
        for b, lengths in enumerate(([5, 15], [8, 12]))
    ]
    expected, dout = torch.cat(rows), torch.randn_like(out)
    assert relative(out, expected) < 1e-12
    for got, want in zip(*(torch.autograd.grad(x, needing, dout) for x in (out, expected)), strict=True):
        assert relative(got, want) < 1e-12


@pytest.mark.parametrize("scores", ["sinks", "softcap"])
def test_dilated_attention(scores):
    """A query that no configuration keeps sees its sink alone."""
    q, k, v = make_inputs(40, H=4, G=2, D_k=8, D_v=8)
    changes = SCORES[scores](4)
    needing = [q, k, v, *(x for x in changes.values() if isinstance(x, torch.Tensor))]
    configurations = dict(segment_lengths=[7, 20], dilation_rates=[3, 4])
    world = rl.SimulatedWorld(3)
    out, lse = rl.dilated_attention(
        *world.shard(q, k, v, layout=rl.zigzag), **configurations, mask=rl.causal, return_lse=True, **changes
    )
    views, S = [], torch.arange(40)
    for w, r in zip(*configurations.values(), strict=True):
        kept = torch.stack([(S % w) % r == j % r for j in range(2)]).repeat_interleave(2, 0)  # by key/value head
        views.append(kept[:, :, None] & kept[:, None] & (S[:, None] // w == S // w) & (S[:, None] >= S))
    capped = changes.get("softcap")
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    s = q @ keys.mT * 8**-0.5
    s = s if capped is None else capped * torch.tanh(s / capped)
    s = torch.cat([s.masked_fill(~view, -torch.inf) for view in views], -1)  # a key that two of them keep counts twice
    values = torch.cat([values, values], 2)
    if "sinks" in changes:
        s = torch.cat([s, changes["sinks"][None, :, None, None].expand(1, 4, 40, 1)], -1)
        values = torch.cat([values, values.new_zeros(1, 4, 1, 8)], 2)
    seen = (s > -torch.inf).any(-1, keepdim=True)
    safe = s.where(seen, torch.zeros(()).double())
    expected, expected_lse = (
        (safe.softmax(-1) @ values) * seen,
        safe.logsumexp(-1).masked_fill(~seen[..., 0], -torch.inf),
    )
    assert relative(out.unshard(), expected) < 1e-12 and relative(lse.unshard(), expected_lse) < 1e-12
    assert bool(seen.all()) == ("sinks" in changes)
    dout = torch.randn_like(expected)
    grads = (torch.autograd.grad(x, needing, dout) for x in (out.unshard(), expected))
    for got, want in zip(*grads, strict=True):
        assert relative(got, want) < 1e-12


# --- kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask, scores, S", [("full", "all", 700), ("causal", "softcap", 700), ("own", "all", 700),
                                             ("causal", "alibi", 1030), ("documents", "all", 700),
                                             ("causal window", "all", 700)])  # fmt: skip
def test_tiles_of_several_blocks(mask, scores, S):
    variant = dict(H=2, G=1, D_k=4, D_v=4)
    check_against_dense(rl.zigzag, mask, P=1, S=S, variant=variant, kernel="reference", scores=scores)


class _Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max(self.elements, *found, 0)
        return result


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_nothing_is_as_large_as_all_scores(mask):
    q, k, v = (torch.randn(1, 2, 1600, 4, requires_grad=True) for _ in range(3))
    shards = rl.SimulatedWorld(1, count_memory=False).shard(q, k, v)
    with _Largest() as largest:
        out = rl.ring_attention(*shards, mask=MASKS[mask](1600), softcap=3.0, alibi=[0.5, 0.25]).unshard()
        out.sum().backward()
    assert largest.elements == 2 * 512 * 512  # a block of both heads


def test_a_kernel_without_a_form_for_it_is_refused_by_name(shards):
    for kernel in ("cpu_flash", "cudnn", "efficient"):
        with pytest.raises(ValueError, match=f"kernel '{kernel}' has no form for softcap; omit kernel= to have one"):
            rl.ring_attention(*shards, softcap=3.0, kernel=kernel)
    with pytest.raises(ValueError, match="kernel 'fa4' has no form for softcap and ALiBi"):
        rl.ring_attention(*shards, softcap=3.0, alibi=[1.0] * 4, kernel="fa4")

    class Own:
        name = "own"
        unsupported = forward = backward = lambda self, *args, **more: None

    with pytest.raises(ValueError, match="kernel 'own' has no form for ALiBi"):
        rl.ring_attention(*shards, alibi=[1.0] * 4, kernel=Own())
    assert kernels.with_scores(Picky(), Scores()).name == "picky"


def test_explain_says_which_kernel_takes_changed_scores_and_why_no_other():
    tensors = [torch.randn(1, 4, 30, 8)] * 3
    text = kernels.explain(*tensors, mask=rl.causal, softcap=50.0)
    assert text.splitlines()[0].endswith("kernel 'sdpa', with softcap")
    assert "FULL     reference" in text and "CAUSAL   reference" in text
    assert "  fa4         it runs on NVIDIA GPUs, got cpu tensors" in text
    assert "  cpu_flash   it has no form for softcap" in text
    assert "  fa4         it has no form for ALiBi" in kernels.explain(*tensors, alibi=[1.0] * 4)
    assert "with" not in kernels.explain(*tensors).splitlines()[0]
    for wrong in (dict(softcap=0), dict(alibi=[1.0])):
        with pytest.raises(ValueError, match="kernels.explain: expected"):
            kernels.explain(*tensors, **wrong)


def test_a_warning_says_that_the_reference_kernel_computes_it(shards):
    with pytest.warns(UserWarning, match="ring_attention: the kernel 'reference' computes this call") as noted:
        rl.ring_attention(*shards, mask=rl.causal, softcap=3.0)
    assert [warning.filename for warning in noted] == [__file__]  # the line of the caller
    with pytest.warns(UserWarning, match="kernel 'reference'") as noted:
        Attention(8, 4, softcap=3.0)(rl.SimulatedWorld(2).shard(torch.randn(1, 30, 8)))
    assert [warning.filename for warning in noted] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.ring_attention(*shards, mask=rl.causal, softcap=3.0, alibi=[1.0] * 4, kernel="reference")
        rl.ring_attention(*shards, mask=rl.causal, sinks=torch.zeros(4))
        warnings.simplefilter("default")
        with warnings.catch_warnings(record=True) as noted:
            for _ in range(3):
                rl.ring_attention(*shards, mask=rl.causal, alibi=[1.0] * 4)
        assert len(noted) == 1


def test_a_backward_in_two_calls_gives_each_head_its_slope(monkeypatch):
    """Large ones are made so where memory is short."""
    monkeypatch.setattr(strategy, "CALL_BYTES", 0)
    q, k, v = make_inputs(20, H=4, G=2, D_k=8, D_v=8)
    changes = SCORES["all"](4)
    needing = q, k, v, changes["sinks"]
    out = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v), mask=rl.causal, **changes).unshard()
    expected, _ = dense_attention(q, k, v, rl.causal, **changes)
    dout = torch.randn_like(out)
    for got, want in zip(*(torch.autograd.grad(x, needing, dout) for x in (out, expected)), strict=True):
        assert relative(got, want) < 1e-12


def test_a_spec_of_some_heads_keeps_them_between_other_shards():
    ranges, slopes = rl.contiguous.ranges(8, 2), Scores(slopes=(0.1, 0.2, 0.3, 0.4))
    spec = strategy.Spec(rl.full, ranges, ranges, 1.0, kernels.choose(), scores=slopes, sinks=torch.arange(4.0))
    for heads in (slice(0, 2), slice(2, 4)):
        some = spec.of_heads(heads).over(ranges[:1], ranges)
        assert some.scores.slopes == slopes.slopes[heads] and torch.equal(some.sinks, torch.arange(4.0)[heads])


# --- gradients of sinks --------------------------------------------------------------------------------------------


def test_sinks_merge_once():
    """Results over different keys merge, one of them with sinks, into the result over all keys with sinks."""
    q, k, v = make_inputs(30, H=4, G=2, D_k=8, D_v=8)
    sinks, world = torch.randn(4, dtype=torch.float64), rl.SimulatedWorld(2)
    halves = []
    for keys, given in ((slice(0, 11), sinks), (slice(11, 30), None)):
        parts = world.shard(q, k[:, :, keys], v[:, :, keys])
        out, lse = rl.ring_attention(*parts, sinks=given, return_lse=True)
        halves.append(rl.Partial(out.unshard(), lse.unshard()))
    expected = dense_attention(q, k, v, rl.full, sinks=sinks)
    assert all(relative(a, b) < 1e-12 for a, b in zip(merge_all(halves), expected, strict=True))


def test_sinks_alone_may_want_a_gradient(shards):
    sinks = torch.zeros(4, requires_grad=True)
    out = rl.ring_attention(*shards, mask=rl.causal, sinks=sinks)
    expected, _ = dense_attention(*(x.unshard() for x in shards), rl.causal, sinks=sinks)
    (dz,) = torch.autograd.grad(out.unshard().square().sum(), sinks, retain_graph=True)
    assert relative(dz, torch.autograd.grad(expected.square().sum(), sinks)[0]) < 1e-5
    (dz,) = torch.autograd.grad(out.unshard().sum(), sinks, create_graph=True)
    with pytest.raises(NotImplementedError, match="ring_attention: a gradient of its gradient is not supported"):
        dz.sum().backward()
    with torch.no_grad():
        assert not rl.ring_attention(*shards, sinks=sinks).unshard().requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sinks_of_another_dtype_and_in_low_precision(dtype):
    """An output is rounded twice, by half an eps at most."""
    q, k, v = (torch.randn(1, h, 60, 16).to(dtype).requires_grad_() for h in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float32).requires_grad_()
    world = rl.SimulatedWorld(3)
    out, lse = rl.ring_attention(*world.shard(q, k, v), mask=rl.causal, sinks=sinks, return_lse=True)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    expected, expected_lse = dense_attention(*exact[:3], rl.causal, sinks=exact[3])
    dout = torch.randn(1, 4, 60, 16).to(dtype)
    got = out.unshard(), lse.unshard(), *torch.autograd.grad(out.unshard(), (q, k, v, sinks), dout)
    want = expected, expected_lse, *torch.autograd.grad(expected, exact, dout.double())
    assert got[0].dtype == got[2].dtype == dtype and got[1].dtype == got[5].dtype == torch.float32
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, want, strict=True):
        assert relative(a, b) < (1e-5 if a.dtype == torch.float32 and name != "dsinks" else torch.finfo(dtype).eps), (
            name
        )


def test_sinks_that_outweigh_everything_and_nothing():
    q, k, v = make_inputs(20, H=2, G=2, D_k=8, D_v=8)
    for z in (1e4, -1e4):
        sinks = torch.full((2,), z, dtype=torch.float64, requires_grad=True)
        out, lse = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v), sinks=sinks, return_lse=True)
        expected = dense_attention(q, k, v, rl.full, sinks=sinks)
        for a, b in zip((out.unshard(), lse.unshard()), expected, strict=True):
            assert relative(a, b) < 1e-12
            for g, w in zip(
                *(torch.autograd.grad(x.sum(), (q, k, sinks), retain_graph=True) for x in (a, b)), strict=True
            ):
                assert relative(g, w) < 1e-12 and bool(g.isfinite().all())


# --- layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [dict(sinks=True), dict(softcap=0.5), dict(alibi=True, rope_base=None),
                                   dict(sinks=True, softcap=0.5, alibi=True)], ids=str)  # fmt: skip
def test_a_layer_equals_dense_attention_on_one_device_and_on_a_ring(given):
    layer, x = Attention(32, 4, 2, **given).double(), torch.randn(2, 37, 32, dtype=torch.float64)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    dout, results = torch.randn_like(x), []
    alone = Attention(32, 4, 2, rope_base=given.get("rope_base", 10000.0)).double()
    alone.load_state_dict({name: p for name, p in layer.state_dict().items() if name != "sinks"})
    alibi = rl.alibi_slopes(4) if given.get("alibi") else None
    scores = dict(sinks=layer.sinks, softcap=given.get("softcap"), alibi=alibi)
    alone.strategy, plain = None, lambda q, k, v, mask, **_: dense_attention(q, k, v, mask, **scores)[0]
    for run in (
        lambda: layer(x),
        lambda: layer(rl.SimulatedWorld(3).shard(x, layout=rl.zigzag)).unshard(),
        lambda: _with(plain, alone, x),
    ):
        layer.zero_grad(), alone.zero_grad()
        out = run()
        out.backward(dout)
        grads = {
            name: p.grad for name, p in (*alone.named_parameters(), *layer.named_parameters()) if p.grad is not None
        }
        results.append([out, *(grads[name].clone() for name, _ in layer.named_parameters())])
    for name, a, b, want in zip(("out", *dict(layer.named_parameters())), *results, strict=True):
        assert relative(a, want) < 1e-12 and relative(b, want) < 1e-12, name


def _with(attention, layer, x):
    """The layer over two ranks that a strategy makes one of again: it sees all of q, k and v."""

    def strategy(q, k, v, mask):
        out = attention(q.unshard(), k.unshard(), v.unshard(), mask)
        return q.world.shard(out, layout=q.layout)

    layer.strategy = strategy
    return layer(rl.SimulatedWorld(2).shard(x)).unshard()


def test_a_transformer_learns_its_sinks_over_ranks_as_on_one_device():
    config = Config(vocabulary=32, width=32, layers=2, heads=4, kv_heads=2, sinks=True, softcap=2.0, alibi=True)
    model, tokens = Transformer(config).double(), torch.randint(32, (2, 41))
    results = []
    for P in (None, 2, 3):
        model.zero_grad()
        batch = tokens, next_tokens(tokens)
        batch = batch if P is None else shard_tokens(rl.SimulatedWorld(P), *batch, layout=rl.zigzag)
        loss = model(*batch)
        loss.backward()
        results.append({"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()})
    one, *others = results
    assert one["layers.1.attention.sinks"].abs().min() > 0 and math.isfinite(one["loss"])
    for found in others:
        assert all(relative(found[name], one[name]) < 1e-12 for name in one)


def test_layers_refuse_a_softcap_that_is_none():
    for make in (lambda: Attention(32, 4, softcap=0.0), lambda: Config(softcap=float("nan"))):
        with pytest.raises(ValueError, match="expected softcap to be None or a finite number > 0"):
            make()

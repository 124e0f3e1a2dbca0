"""The planner: counts of real models, formulas against what runs, published figures, and what it answers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace

import measure_longest
import pytest
import torch
from course import ROOT

import ringlearn as rl
from ringlearn import costs
from ringlearn.costs.problem import Problem
from ringlearn.course.records import load
from ringlearn.nn.supported_models import learns_positions
from ringlearn.plan import GPUS, MODELS, Setup, gpu, longest_sequence, memory, model, serve, step_seconds
from ringlearn.plan import attention as strategies
from ringlearn.plan.__main__ import main
from ringlearn.plan.configs import configs
from ringlearn.plan.explain import explained, explained_serving
from ringlearn.plan.links import INSIDE, Group
from ringlearn.plan.memory import in_flight, kept_per_token, rank_parameters, state
from ringlearn.plan.models import CHECKED
from ringlearn.plan.packed import Packing
from ringlearn.plan.search import divisors, search
from ringlearn.plan.seconds import model_flops, work
from ringlearn.plan.serving import Served, cache_bytes, decode_seconds, prefill_seconds, weight_bytes
from ringlearn.plan.table import plan_table

# --- models ---------------------------------------------------------------------------------------------------------

# Of the checkpoints that were published: the sizes of their safetensors, as their indices state them.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_248_023_552,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_as_many_parameters_as_their_checkpoints(name):
    assert model(name).parameters == PARAMETERS[name]


CONFIGS = {
    "LlamaConfig": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96),
    "MistralConfig": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96),
    "Qwen2Config": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96),
    "Qwen3Config": dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, head_dim=32,
        tie_word_embeddings=True,
    ),
    "Qwen3MoeConfig": dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=48, head_dim=16,
        num_experts=4, num_experts_per_tok=2,
    ),
    "GptOssConfig": dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, head_dim=16,
        num_local_experts=4,
    ),
}  # fmt: skip


def test_names_are_also_those_of_the_hugging_face_hub():
    assert model("Qwen/Qwen3-30B-A3B") == MODELS["qwen3-30b-a3b"] and model("meta-llama/Llama-3.1-8B").layers == 32


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_of_transformers_has_the_parameters_of_the_model_that_it_makes(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(num_hidden_layers=3, vocab_size=100, **CONFIGS[kind])
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert model(config).parameters == sum(p.numel() for p in made.parameters())
    config.save_pretrained(tmp_path)
    assert replace(model(tmp_path), name="") == replace(model(config), name="")


@pytest.mark.parametrize("kind", CHECKED)
def test_checked_architectures_have_the_parameters_of_transformers(kind):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    from transformers import AutoModelForCausalLM

    if kind not in auto.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not have {kind}")
    config = auto.CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    found = model(config)
    assert found.parameters == pytest.approx(sum(p.numel() for p in made.parameters()), rel=0.02) and not found.unsure
    published = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"}
    assert model(published).tied == found.tied  # a file leaves out what is its architecture's default


def test_other_architectures_are_planned_with_a_note():
    sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=100)
    assert rl.plan(sizes, 1024).warning == ""
    assert "the architecture 'newest' was not compared" in rl.plan({"model_type": "newest"} | sizes, 1024).warning
    moe = sizes | dict(
        model_type="qwen3_moe", num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=9
    )
    assert "Note: shared_expert_intermediate_size is not read; the planner counts 0.00" in rl.plan(moe, 1024).warning
    falcon = dict(model_type="falcon", hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8)
    falcon |= dict(vocab_size=65024, multi_query=True)
    assert model(falcon | dict(new_decoder_architecture=True)).kv_heads == 8 and model(falcon).kv_heads == 1
    assert model(falcon | dict(new_decoder_architecture=True)).parameters == pytest.approx(41.3e9, rel=0.01)


@pytest.mark.parametrize("kind, options, limit, learnt", [
    ("GPT2Config", dict(n_embd=64, n_head=4, n_positions=2048), 2048, True),
    ("OPTConfig", dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=2048), 2048, True),
    ("GPTJConfig", dict(n_embd=64, n_head=4, n_positions=2048), 2048, False),
    ("LlamaConfig", dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096), 4096, False),
])  # fmt: skip
def test_learnt_positions_are_those_that_have_an_embedding_and_a_plan_beyond_them_warns(kind, options, limit, learnt):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(num_hidden_layers=2, vocab_size=100, **options)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert learns_positions(made) == learnt
    assert rl.plan(config, tokens=limit).warning == ""
    said = rl.plan(config, tokens=2 * limit).warning
    assert said.startswith("Warning: " if learnt else "Note: ") and ("cannot be run" in said) == learnt
    assert f"{limit:,} positions" in said and f"{2 * limit:,} tokens" in said
    assert rl.plan(config, lengths=[limit, limit]).warning == ""  # positions begin anew with every document


def test_the_command_warns_of_positions_in_training_and_in_serving(capsys):
    for more in ([], ["--serve"]):
        said = ["--model", "qwen3-0.6b", "--tokens", "64k", *more]
        main(said)
        text = " ".join(capsys.readouterr().out.split())
        assert "Note: qwen3-0.6b was made for 40,960 positions. It runs on 65,536 tokens" in text
        main([*said, "--json", "-"])
        assert json.loads(capsys.readouterr().out)["warning"] in text
        main([*said, "--tokens", "32k"])
        assert "positions" not in capsys.readouterr().out


def test_pairs_are_those_of_the_mask():
    oss = MODELS["gpt-oss-20b"]  # every second layer sees 128 keys
    for tokens, cached in ((1, 0), (5, 3), (128, 0), (300, 0), (40, 200), (300, 100)):
        q, k = torch.arange(cached, cached + tokens)[:, None], torch.arange(cached + tokens)[None]
        whole = int((k <= q).sum())
        inside = int(((k <= q) & (k > q - 128)).sum())
        assert oss.pairs(tokens, cached) == (whole + inside) / 2, (tokens, cached)


def test_our_own_model_is_counted_as_it_is():
    from ringlearn.nn import Config, Transformer

    made = Transformer(Config(width=1024, layers=8, heads=8, kv_heads=2))
    assert model("ringlearn").parameters == sum(p.numel() for p in made.parameters())


# --- strategies: equal to costs/ and to runs -------------------------------------------------------------------------

FUNCTIONS = {
    "ring": rl.ring_attention,
    "all-gather": rl.all_gather_attention,
    "ulysses": rl.ulysses_attention,
    "hybrid": rl.hybrid_attention,
    "double-ring": rl.double_ring_attention,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 2), (1, 5), (2, 4), (4, 8)], ids=str)
def test_bytes_and_peaks_are_those_of_a_simulated_world(strategy, shape):
    """Up to 32 ranks, evenly long shards and not, forward and backward: the rank with most, to the byte."""
    if strategy in ("hybrid", "double-ring") and shape[0] == 1:
        pytest.skip("one node: there is nothing to be split in two")
    flat = strategy in ("ring", "all-gather", "ulysses")
    P = shape[0] * shape[1]
    at = (1, P) if flat else shape
    H, G, D = 8, 4, 8
    for S in (64 * P // max(1, P // 2), 2 * P + 3):
        world = rl.SimulatedWorld(P if flat else shape)
        q, k, v = (torch.randn(1, h, S, D, requires_grad=True) for h in (H, G, G))
        shards = world.shard(q, k, v, layout=rl.zigzag)
        dout = world.shard(torch.randn(1, H, S, D), layout=rl.zigzag)
        world.memory.clear()
        out = FUNCTIONS[strategy](*shards)
        seen = []
        for backward in (False, True):
            sent = [world.trace.bytes_sent(r) for r in range(P)]
            most = [world.memory.most(r) for r in range(P)]
            seen.append((sent, most, [world.memory.peak(r) for r in range(P)]))
            world.memory.clear()
            if not backward:
                torch.autograd.backward(out.tensors, dout.tensors)
        for backward, (sent, most, peaks) in enumerate(seen):
            t = strategies.traffic(
                strategy, Problem(S, at, H, G, D, itemsize=4, backward=bool(backward), layout=rl.zigzag)
            )
            assert t.inner + t.outer >= max(
                sent
            )  # links of a node and of the network may be fullest on different ranks
            if flat:
                assert t.inner + t.outer == max(sent), (S, backward)
            if strategy == "ring":
                own = {"q", "k, v", "other inputs"}
                held = [sum(n for name, n in peak.items() if name not in own) for peak in peaks]
            else:
                held = [sum(m.get(name, 0) for name in ("in flight", "gathered")) for m in most]
            assert t.held == max(held), (S, backward)


@pytest.mark.parametrize("strategy", ["ring", "all-gather", "hybrid", "double-ring"])
@pytest.mark.parametrize("backward", [False, True])
def test_many_ranks_are_continued_as_they_would_be_counted(strategy, backward, monkeypatch):
    shape = (1, 128) if strategy in ("ring", "all-gather") else (16, 8)
    call = Problem(S=128 * 96, shape=shape, H=32, G=8, D=64, backward=backward, layout=rl.zigzag)
    strategies.traffic.cache_clear()
    continued = strategies.traffic(strategy, call)
    monkeypatch.setattr(strategies, "EXACT", 1000)
    strategies.traffic.cache_clear()
    assert strategies.traffic(strategy, call) == continued
    strategies.traffic.cache_clear()


def test_imbalance_is_what_balance_counts():
    for layout in (rl.contiguous, rl.striped, rl.zigzag):
        for P in (2, 8):
            counted = rl.ring_balance(rl.causal, 64, P, layout)
            mean = 64 * 65 / 2 / P
            found = strategies.imbalance(layout.name, 64, P)
            assert found == pytest.approx(counted.busiest / mean, rel=0.05), (layout, P)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_state_is_18_bytes_a_parameter_in_megatron_and_6_of_them_stay_when_the_optimizer_is_sharded():
    m, n = model("llama-3.1-8b"), 8_030_261_248
    whole = Setup(framework="megatron", fsdp=0)
    assert sum(state(m, whole).values()) == 18 * n
    sharded = Setup(framework="megatron", fsdp=1, dp=8)  # 6 + 12 / dp, theoretical_memory_usage.py
    assert sum(state(m, sharded).values()) == pytest.approx((6 + 12 / 8) * n)


def test_activations_are_megatrons_formula_and_context_parallelism_is_a_smaller_micro_batch():
    m = model("llama-3.1-8b")
    s = Setup(framework="megatron", recompute="selective", tp=2)
    h, ffn = 4096, 14336
    assert (
        kept_per_token(m, s) == h * (18 + 4 * ffn / h) / 2
    )  # Korthikanti et al. 2022, table 2: s b h (18 + 4 f/h) / t
    # Megatron-LM #7220: context parallelism over two ranks holds what half a micro-batch holds.
    split = memory(m, replace(s, cp=2, strategy="ulysses"), 8192)["activations"]
    assert split == memory(m, s, 4096)["activations"]


def test_published_arithmetic():
    """ALST (arXiv 2506.13996): logits of 16,000 tokens, checkpoints of 125,000; Llama 3 8B."""
    m = model("llama-3.1-8b")
    assert 16000 * m.vocabulary * 4 / 2**30 == pytest.approx(7.65, rel=0.001)  # one copy in float32
    full = Setup(framework="zero-offload", recompute="full", cp=1, tiled_loss=True)
    assert memory(m, full, 125_000)["checkpoints"] / 2**30 == pytest.approx(30.5, rel=0.001)
    assert m.cache_bytes() == 128 * 1024 and model("llama-3.1-405b").cache_bytes() == 504 * 1024


def test_recomputation_and_sharding_never_need_more():
    m = model("llama-3.1-8b")
    for fewer, more in (("full", "selective"), ("selective", "none"), ("offload", "full")):
        a, b = (sum(memory(m, Setup(dp=8, recompute=r), 32768).values()) for r in (fewer, more))
        assert a <= b, (fewer, more)
    held = [sum(state(m, Setup(dp=8, fsdp=level, framework="megatron")).values()) for level in (0, 1, 2)]
    assert held == sorted(held, reverse=True) and len(set(held)) == 3


def test_the_fullest_stage_and_its_micro_batches():
    m = model("llama-3.1-405b")  # 126 layers: 16 stages of 8, of which the first and the last have 7 and their matrix
    assert rank_parameters(m, Setup(pp=16, tp=8)) * 8 == 8 * m.layer  # the embedding is smaller than a layer
    assert rank_parameters(m, Setup(tp=8)) * 8 == m.parameters
    assert [in_flight(Setup(pp=4, microbatches=n, stages=v)) for n, v in ((1, 1), (4, 1), (9, 1), (4, 2))] == [
        1,
        4,
        4,
        5.5,
    ]


def test_the_longest_sequence_fits_and_one_step_more_does_not():
    m, s, h100 = model("ringlearn"), Setup(framework="ringlearn", recompute="none", cp=2, fsdp=0), GPUS["h100"]
    longest = longest_sequence(m, s, h100)
    assert sum(memory(m, s, longest).values()) <= h100.memory < sum(memory(m, s, longest + 1024).values())


def test_the_longest_sequences_were_trained_on_and_longer_ones_were_not():
    record = load("2026-11-29-longest-2-h200.json")
    h200 = replace(gpu("h200"), memory=int(record["memory_gib"] * 2**30))
    page = (ROOT / "docs" / "plan.md").read_text()
    for case in record["cases"]:
        shape = measure_longest.CASES[case["case"]]
        (runs, beyond), longest = case["runs"], measure_longest.planned(shape, 2, h200)
        assert case["longest"] == runs["tokens"] == longest and runs["fits"]
        assert beyond["tokens"] > 1.12 * longest and beyond["out_of_memory"]
        assert f"| {longest:,}, {shape[4]} | yes | out of memory |" in page


# --- seconds --------------------------------------------------------------------------------------------------------


def test_work_is_counted_by_hand():
    m = replace(model("ringlearn"), layers=2)
    w = work(m, Setup(recompute="none"), 4)
    d, kv, ffn = 1024, 256, 4096
    assert w.fast == 2 * 4 * 2 * (2 * d * d + 2 * d * kv + 2 * d * ffn)  # 2 operations x tokens x layers x parameters
    assert w.head == 2 * 4 * 256 * d
    assert w.scores == 4 * 10 * 8 * 128 * 2  # 4 x pairs x heads x head dim x layers
    assert model_flops(m, 4, 1) == 3 * (w.fast + w.head + w.scores) + 6 * 4 * (2 * 2 * d + d)  # and norms' gains


def test_splits_divide_the_work():
    m = model("llama-3.1-8b")
    whole = work(m, Setup(), 65536)
    for s in (
        Setup(cp=4),
        Setup(tp=4),
        Setup(cp=4, strategy="ulysses", layout="contiguous"),
        Setup(cp=4, strategy="all-gather"),
    ):
        part = work(m, s, 65536)
        assert part.scores == whole.scores / 4 and part.fast == whole.fast / 4
    uneven = work(m, Setup(cp=4, layout="contiguous"), 65536)
    assert uneven.scores == whole.scores / 4 * 7 / 4  # (2P - 1) / P


def test_a_collective_takes_the_slower_of_its_links():
    h100 = gpu("h100")
    inside, both = Group.of(h100, 8, 1, 0.5), Group.of(h100, 16, 1, 0.5)
    assert (inside.nodes, both.nodes, Group.of(h100, 16, 8, 0.5).places) == (1, 2, 1)
    assert inside.gather(8e9) == pytest.approx(7e9 / 450e9 / INSIDE + 17e-6)
    assert both.gather(16e9) == pytest.approx(15e9 / 8 / 50e9 / 0.5 + 17e-6 + 32e-6)
    assert inside.reduce(8e9) == 2 * inside.gather(8e9) and Group.of(h100, 1, 1, 0.5).gather(1e9) == 0


def test_messages_hide_behind_attention_or_are_waited_for():
    m, h100 = model("llama-3.1-8b"), gpu("h100")
    long = step_seconds(m, Setup(cp=8), 2**20, h100)
    assert "strategy" not in long  # the ring hides
    ulysses = step_seconds(m, Setup(cp=8, strategy="ulysses", layout="contiguous"), 2**20, h100)
    assert ulysses["strategy"] > 0 and ulysses["attention"] == long["attention"]
    short = step_seconds(m, Setup(cp=32, dp=1), 8192, h100)
    assert short["strategy"] > 0


def test_a_pipelines_bubble():
    m, h100 = model("llama-3.1-8b"), gpu("h100")
    bubbles = [
        step_seconds(m, Setup(pp=4, microbatches=n, stages=v, recompute="none"), 8192, h100)
        for n, v in ((4, 1), (4, 2))
    ]
    rest = [sum(t for name, t in b.items() if name not in ("pipeline", "optimizer")) for b in bubbles]
    assert [b["pipeline"] / r for b, r in zip(bubbles, rest, strict=True)] == pytest.approx(
        [3 / 4, 3 / 8], abs=0.02
    )  # and hops


# --- serving, packed batches ----------------------------------------------------------------------------------------


def test_serving_counts_weights_and_cache():
    m = model("llama-3.1-405b")
    s = Setup(tp=8, recompute="none", precision="fp8-ffn")
    ffn = 3 * 16384 * 53248 * 126
    assert weight_bytes(m, s) == (2 * m.parameters - ffn) / 8
    assert cache_bytes(m, s, 128_000) == 516_096 * 128_000 / 8
    assert cache_bytes(m, replace(s, tp=16), 1) == cache_bytes(m, s, 1)  # 8 key/value heads are not split further
    longer = [sum(decode_seconds(m, s, n, gpu("h100-96")).values()) for n in (8000, 128_000)]
    assert longer[1] - longer[0] == pytest.approx(120_000 * 516_096 / 8 / 2.4e12 / 0.89, rel=0.01)


def test_queries_travel_when_few_tokens_are_new():
    """Yang et al. 2024, equation 5: pass-Q is faster below some share of new tokens, pass-KV above it."""
    m, h100, s = model("llama-3.1-405b"), gpu("h100-96"), Setup(tp=8, cp=4, recompute="none", precision="fp8-ffn")
    faster = []
    for new in (1280, 128_000):
        by = {p: sum(prefill_seconds(m, s, new, h100, cached=128_000 - new, passing=p).values()) for p in ("kv", "q")}
        faster.append(min(by, key=by.get))
    assert faster == ["q", "kv"]


def test_packed_batches_have_the_pairs_of_their_documents():
    lengths = (5, 60, 3, 28)
    p = Packing(lengths)
    mask = rl.causal & rl.documents(list(lengths))
    at = torch.arange(96)
    assert p.density == int(mask(at[:, None], at[None]).sum()) / (96 * 97 / 2)
    for ranks in (2, 4):
        layout = {"zigzag": rl.zigzag, "zigzag per document": rl.zigzag_per_document(list(lengths))}[p.layout(ranks)]
        counted = rl.ring_balance(mask, 96, ranks, layout)
        assert p.busiest(ranks) == pytest.approx(p.density * counted.ratio)
    assert p.ranks_of_each(16) == [1, 4, 1, 2]
    short = rl.plan("llama-3.1-8b", lengths=[4096] * 8, gpus=8, batch=8).best
    one = rl.plan("llama-3.1-8b", tokens=32768, gpus=8, batch=8).best
    assert short.seconds["attention"] < one.seconds["attention"] / 7


# --- the search, and what it answers ---------------------------------------------------------------------------------


def test_everything_that_is_ranked_fits_and_uses_all_gpus():
    found = rl.plan("llama-3.1-8b", tokens="128k", gpus=12, gpu="h100")
    assert found.ranked and all(c.setup.gpus == 12 and c.bytes <= found.gpu.memory for c in found.ranked)
    rates = [c.tokens_per_second for c in found.ranked]
    assert all(b <= 1.011 * a for a, b in zip(rates, rates[1:]))
    assert len({str(c.setup) + c.setup.strategy for c in found.distinct()}) == len(found.distinct())
    assert json.loads(json.dumps(found.as_dict()))["ranked"][0]["bytes_in_all"] == found.best.bytes


def test_a_batch_is_kept():
    found = rl.plan("llama-3.1-8b", tokens="32k", gpus=16, batch=4)
    assert {c.sequences for c in found.ranked} == {4}


def test_experts_are_sharded_over_the_ranks_that_have_the_same():
    m, n = model("gpt-oss-120b"), model("gpt-oss-120b").parameters
    for ep in (1, 2, 4, 8):
        s = Setup(dp=8, ep=ep)
        assert rank_parameters(m, s, 8) * 8 == pytest.approx(n) and 8 * state(m, s)["weights"] == pytest.approx(4 * n)
        assert rank_parameters(m, s) == pytest.approx(n - m.layers * (m.experts - m.experts / ep) * m.expert)
    with pytest.raises(ValueError, match="does not fit on 8 x h100"):  # 16 bytes of 117 billion parameters
        rl.plan("gpt-oss-120b", "8k", 8, "h100")
    gathered = [step_seconds(m, Setup(dp=8, ep=ep, microbatches=1), 8192, gpu("h100"))["FSDP"] for ep in (1, 8)]
    assert gathered[0] > 4 * gathered[1] > 0


def test_ulysses_ranks_have_whole_heads():
    m = model("llama-3.1-8b")
    for cp, busiest in ((8, 1), (24, 2 * 24 / 32), (12, 3 * 12 / 32)):
        even = work(m, Setup(cp=cp), 2**20).scores
        assert work(m, Setup(cp=cp, strategy="ulysses", layout="contiguous"), 2**20).scores == pytest.approx(
            even * busiest
        )
    hybrid = Setup(cp=24, strategy="hybrid", inner=6)  # the ring is of 4
    assert work(m, hybrid, 24 * 1024).scores == pytest.approx(work(m, Setup(cp=24), 24 * 1024).scores * 6 * 6 / 32)


def test_experts_are_shared_out():
    found = rl.plan("gpt-oss-120b", tokens="32k", gpus=16, gpu="h200")
    assert any(c.setup.ep > 1 and c.seconds["experts"] > 0 for c in found.ranked)


@pytest.mark.alone
def test_a_million_tokens_on_16384_gpus_are_planned_in_seconds():
    strategies.traffic.cache_clear()
    start = time.process_time()
    found = rl.plan("llama-3.1-405b", tokens="1M", gpus=16384)
    assert time.process_time() - start < 5 and found.best.setup.gpus == 16384


def test_a_billion_tokens():
    best = rl.plan("llama-3.1-8b", tokens="1B", gpus=16384, gpu="h200", batch=1).best
    attention = 7.9e23 * 2**60 / 1e18  # operations forward and backward without the scores made again
    assert best.seconds["attention"] * 16384 * 989e12 * 0.55 == pytest.approx(attention * 3.5 / 3, rel=0.01)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(model="gemma", tokens="1M"), "there is no model 'gemma'. Known are llama-2-7b"),
        (dict(model="qwen3-30b", tokens="1M"), "there is no model 'qwen3-30b'; did you mean qwen3-30b-a3b?"),
        (dict(model="Meta-Llama-3.1-8B", tokens="1M"), "did you mean llama-3.1-8b?"),
        (dict(model="llama-3.1-8b", tokens="many"), "a number such as 8192, 128k or 1M, got 'many'"),
        (dict(model="llama-3.1-8b", tokens="inf"), "a number such as 8192, 128k or 1M, got 'inf'"),
        (dict(model="llama-3.1-8b", tokens="nan"), "a number such as 8192, 128k or 1M, got 'nan'"),
        (dict(model="llama-3.1-8b", tokens="1e30"), "a number such as 8192, 128k or 1M, got '1e30'"),
        (dict(model="llama-3.1-8b", tokens="1M", gpu="v100"), "there is no GPU 'v100'. Known are a100"),
        (dict(model="llama-3.1-8b", tokens="1M", gpus=0), "expected gpus to be a whole number of at least 1, got 0"),
        (dict(model="llama-3.1-8b", tokens="8k", gpus=8, gpu="a100", precision="fp8"), "a100 has no FP8 tensor cores"),
        (dict(model="llama-3.1-8b"), "expected tokens"),
        (dict(model="llama-3.1-8b", tokens=5, lengths=[2, 2]), "lengths are 4 tokens in all"),
        (dict(model="llama-3.1-8b", tokens="8k", framework="ringlearn"), "take 'fsdp2'"),
        (dict(model=dict(hidden_size=6, num_attention_heads=3, num_key_value_heads=2, num_hidden_layers=1,
                         vocab_size=2, intermediate_size=4), tokens=8), "num_key_value_heads, got 3 and 2"),
        (dict(model=dict(kv_lora_rank=512), tokens=8), "multi-head latent attention"),
        (dict(model="llama-3.1-405b", tokens="128k", gpus=8), "What fits:"),
        (dict(model="llama-3.1-8b", tokens="8k", gpus=8, kernel="fa9"), "expected a kernel of h100"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_input_is_answered_with_what_would_do(arguments, words):
    with pytest.raises(ValueError) as error:
        rl.plan(**arguments)
    assert words in str(error.value)


def test_what_would_fit_does():
    with pytest.raises(ValueError) as error:
        rl.plan("llama-3.1-70b", tokens="16M", gpus=32, gpu="h100")
    words = str(error.value).split("What fits: ")[1]
    tokens = int(words.split(" tokens on as many GPUs")[0].replace(",", ""))
    more = int(words.split("; or ")[1].split(" x ")[0])
    assert (
        rl.plan("llama-3.1-70b", tokens=tokens, gpus=32).ranked
        and rl.plan("llama-3.1-70b", tokens="16M", gpus=more).ranked
    )


def test_serving_that_does_not_fit_says_what_would():
    with pytest.raises(ValueError, match=r"What fits: one sequence of about 400,000 tokens; or 4 x h200\.") as refused:
        serve(model("llama-3.1-70b"), 2**20, 2, gpu("h200"))
    assert "a sequence of 1,048,576 tokens of llama-3.1-70b does not fit" in str(refused.value)
    assert serve(model("llama-3.1-70b"), 400_000, 2, gpu("h200")) and serve(
        model("llama-3.1-70b"), 2**20, 4, gpu("h200")
    )
    for name, tokens, gpus, on, precision, said in (
        ("llama-3.1-405b", 8192, 12, "h100", "bf16", "16 x h100"),  # the least that fits, and FP8 where it does
        ("llama-3.1-405b", 8192, 8, "h100", "bf16", "the same in FP8 (--precision fp8); or 16 x h100"),
        ("llama-3.1-405b", 131072, 8, "a100", "bf16", "16 x a100"),
        ("gpt-oss-120b", 131072, 1, "h100", "fp8", "2 x h100"),
    ):
        with pytest.raises(ValueError) as refused:
            serve(model(name), tokens, gpus, gpu(on), precision=precision)
        assert str(refused.value).endswith(f"What fits: {said}."), refused.value
        assert serve(model(name), tokens, int(said.split("; or ")[-1].split(" x ")[0]), gpu(on), precision=precision)
    with pytest.raises(ValueError, match="3 sequences of .* do not fit.*What fits: 1 sequence; or"):
        serve(model("llama-3.1-8b"), 2**18, 1, gpu("h100"), batch=3)


def test_a_window_bounds_what_its_layers_keep():
    m, s = model("gpt-oss-120b"), Setup()
    assert cache_bytes(m, s, 131072) == m.cache_bytes() / 36 * (18 * 131072 + 18 * 256)
    assert cache_bytes(m, s, 200) == m.cache_bytes() * 200


def test_the_plan_of_tiles_has_a_name_of_its_own_and_the_former_one_still_works():
    q, k = (range(4, 8),), (range(4),)
    assert rl.plan_tiles(rl.causal, q, k) == rl.plan(rl.causal, q, k) and rl.plan_tiles is rl.tiles.plan


def test_a_file_of_ringlearn_measure_stands_for_its_gpus(tmp_path):
    record = ROOT / "docs" / "measurements" / "2026-11-28-multi-gpu-2-h200.json"
    mine, sheet = gpu(record), gpu("h200")
    assert Group.of(mine, 2, 1, 1.0).exchange(302.9e9, 0) == pytest.approx(1, rel=0.01)  # a second, as measured
    assert mine.kernels["cudnn"] == pytest.approx(0.57, abs=0.01)
    assert (mine.memory, mine.bf16) == (sheet.memory, sheet.bf16)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="to be a file of `python -m ringlearn.measure"):
        gpu(tmp_path / "other.json")


# --- the formulas that it prints ---------------------------------------------------------------------------------


SETUPS = [  # model, tokens, what differs from Setup's defaults
    ("llama-3.1-8b", 65536, dict(cp=8)),
    ("llama-3.1-8b", 8192, dict(recompute="none", kernel="fa3")),
    ("llama-3.1-8b", 262143, dict(cp=16, strategy="hybrid", inner=8, recompute="selective", precision="fp8")),
    ("llama-3.1-8b", 131072, dict(cp=32, strategy="double-ring", inner=8, dp=2, fsdp=1, tiled_loss=True)),
    ("llama-2-7b", 2097152, dict(cp=16, strategy="ulysses", tiled_mlp=True, recompute="offload", tiled_loss=True)),
    ("llama-3.1-70b", 524288, dict(cp=64, tp=2, strategy="all-gather", precision="fp8-ffn")),
    ("llama-3.1-70b", 32768, dict(tp=16, dp=4, fsdp=2, async_tp=True)),
    ("llama-3.1-405b", 8192, dict(tp=8, pp=16, dp=4, microbatches=64, stages=2, framework="megatron", fsdp=1)),
    ("llama-3.1-405b", 262144, dict(tp=8, pp=8, cp=8, microbatches=8, async_tp=True)),
    ("llama-3.1-405b", 8192, dict(tp=8, pp=8, dp=2, sequences=2, microbatches=2, recompute="selective", fsdp=0)),
    ("qwen3-30b-a3b", 131072, dict(cp=16, dp=2, ep=8, recompute="none", precision="fp8")),
    ("gpt-oss-20b", 32768, dict(cp=4, ep=2, tp=2, layout="contiguous")),
    ("qwen3-0.6b", 4096, dict(fsdp=0, recompute="none")),
    ("llama-3.1-70b", 1000000, dict(cp=16, strategy="ulysses", recompute="offload", framework="zero-offload")),
]  # fmt: skip


def calculated(numbers):
    """With a pocket calculator: 4 x 70,553,706,496 / 64."""
    return eval(re.sub(r"(?<=\d),(?=\d{3})", "", numbers).replace(" x ", " * "), {"max": max, "ceil": math.ceil})


def recomputed(text):
    """By name, what the printed numbers give and what is printed as their result: of what goes in, and of terms."""
    whole = re.sub(r"\n {5,}", " ", text)  # lines that were wrapped
    found = {}
    for name, numbers, result in re.findall(r"^(\S+) = (?:.* = )?(.*?)(?: = (\S+))?  \(", whole, re.M):
        found[name] = calculated(numbers), calculated(result or numbers)
    for name, formula in re.findall(r"^(\S.*): .*\n    \(.*\n((?:    = .*\n?)+)", whole, re.M):
        *_, numbers, result = re.findall("= (.*)", formula)
        found[name] = calculated(numbers), calculated(result.split()[0])
    return found


def held_to(want, text):
    found = recomputed(text)
    assert set(want) <= set(found)
    for name, (value, printed) in found.items():
        assert value == pytest.approx(printed, rel=2e-4, abs=1e-7), name
    for name, number in want.items():
        assert found[name][0] == pytest.approx(number, rel=2e-4, abs=1e-7), name
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name, tokens, options", SETUPS)
def test_what_explain_prints_can_be_recomputed_and_is_what_the_plan_says(name, tokens, options):
    m, s, device = model(name), Setup(**options), gpu("h100")
    want = (
        memory(m, s, tokens) | ({"strategy": 0.0} if s.cp > 1 else {}) | step_seconds(m, s, tokens, device, density=0.9)
    )
    held_to(want, explained(m, s, tokens, device, 0.9))


@pytest.mark.parametrize("name, options", [
    ("llama-3.1-70b", dict(tp=8)), ("llama-3.1-405b", dict(tp=8, cp=4, precision="fp8-ffn")),
    ("qwen3-30b-a3b", dict(cp=4, precision="fp8")), ("gpt-oss-20b", dict()), ("llama-3.1-8b", dict(tp=16, cp=2)),
])  # fmt: skip
def test_so_is_what_it_prints_of_serving(name, options):
    m, s, device = model(name), Setup(**options, recompute="none"), gpu("h200")
    prefill, decode = prefill_seconds(m, s, 10**6, device), decode_seconds(m, s, 10**6, device, batch=3)
    first, each = explained_serving(m, device, 10**6, Served(s, 1, 3, prefill, decode, 3)).split("\n\nwhat goes in")
    held_to(prefill, first)
    held_to(decode, "what goes in" + each)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_explains_it_and_writes_data(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    said = ["--model", "llama-3.1-8b", "--tokens", "128k", "--gpus", "8", "--batch", "1"]
    main([*said, "--explain", "--config", "--json", str(out), "--plot", str(picture)])
    text = capsys.readouterr().out
    for word in ("8,030,261,248 parameters, 131,072 tokens on 8 x h100", "setups fit", "optimizer", "attention"):
        assert word in text
    for word in (
        "torchrun --standalone",
        "--context-parallel-size 8 --cp-comm-type",
        "cp_size=8",
        "context_parallel_degree 8",
    ):
        assert word in text
    found = json.loads(out.read_text())
    assert found["ranked"][0]["setup"]["cp"] == 8 and picture.stat().st_size > 10_000
    main([*said, "--json", "-"])
    assert json.loads(capsys.readouterr().out)["tokens"] == 131072
    main(["--model", "llama-3.1-8b", "--tokens", "128k", "--gpus", "2", "--serve", "--explain"])
    said = capsys.readouterr().out
    assert "first token" in said and "2 x n x" in said and "backward" not in said
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "nothing", "--tokens", "1M"])
    assert stopped.value.code == 2 and "there is no model" in capsys.readouterr().err


def test_the_options_for_ringlearn_train_are_options_that_it_knows():
    from ringlearn.train.options import parser

    found = rl.plan("llama-3.1-8b", tokens="32k", gpus=8, batch=1)
    for c in found.ranked:
        line = configs(found.model, found.gpu, c)["ringlearn.train"]
        if line.startswith("-m"):
            options = parser().parse_args(line.split("  (")[0].split()[2:])
            assert (options.tokens, options.dp, options.strategy) == (32768, c.setup.dp, c.setup.strategy)


def test_megatrons_options_are_left_out_where_they_would_not_fit():
    found = rl.plan("llama-3.1-70b", "128k", 24, "h200")
    of_fsdp = next(c for c in found.ranked if (c.setup.cp, c.setup.tp, c.setup.pp, c.setup.fsdp) == (24, 1, 1, 3))
    assert configs(found.model, found.gpu, of_fsdp)["Megatron-LM"].startswith("not this one: Megatron-LM keeps whole")


def test_the_world_for_your_model_is_one_that_its_strategy_takes():
    q = torch.randn(1, 16, 64, 4)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    found, seen = rl.plan("llama-2-7b", tokens="256k", gpus=16, batch=1), set()
    for c in found.ranked:
        line = configs(found.model, found.gpu, c)["your model"]
        if c.setup.tp > 1 or c.setup.pp > 1:
            assert line.startswith("not this one")
        elif line not in seen:
            seen.add(line)
            shape, axes, mine, strategy, layout = re.search(
                r"'cuda', (\(.*?\)), mesh_dim_names=(\(.*?\)).*mesh\[(.*?)\].*strategy=rl.(\w+), layout=rl.(\w+)", line
            ).groups()
            sizes = dict(zip(eval(axes), eval(shape), strict=True))
            assert sizes["dp"] * c.setup.cp == 16
            of = [sizes[axis] for axis in re.findall(r"\w+", mine)]
            world = rl.SimulatedWorld(tuple(of) if len(of) == 2 else of[0])
            shards = world.shard(q, q, q, layout=getattr(rl, layout))
            assert torch.allclose(getattr(rl, strategy)(*shards, mask=rl.causal).unshard(), want, atol=1e-5)
    assert any("double_ring" in line for line in seen) and any("rl.ring" in line for line in seen)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--rows", "0"], "expected --rows to be at least 1, got 0"),
        (["--serve", "--config"], "--config is for training"),
        (["--serve", "--lengths", "5"], "--lengths is for training"),
        (["--serve", "--batch", "-3"], "error: expected batch to be a whole number of at least 1, got -3"),
        (["--serve", "--gpus", "0"], "error: expected gpus to be a whole number of at least 1, got 0"),
        (["--model", "llama-3.1-70b"], "error: llama-3.1-70b with 8,192 tokens does not fit on 8 x h100: weights"),
        (["--model", "EMPTY"], "EMPTY has no config.json"),
    ],
)
def test_the_command_refuses(options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "llama-2-7b", "--tokens", "8k", "--gpus", "8", *options])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "ringlearn.plan", "--model", "mistral-7b", "--tokens", "32k", "--gpus", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("mistral-7b, 7,248,023,552"), done
    done = subprocess.run(" ".join(command) + " | true", shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""  # whoever reads it may stop


def test_equals_are_shown_once_and_the_rate_is_that_of_the_models_operations():
    found = rl.plan("llama-3.1-70b", tokens="512k", gpus=64, batch=1)
    text = plan_table(found, 8)
    rows = re.findall(r"^( *\d+ +\d+ +\d+ +\d+ ).*  3 (.*)", text, re.M)
    assert len(set(rows)) == len(rows) == 8
    m, c = found.model, found.best
    want = (6 * 524288 * (m.parameters - m.embedding) + 6 * 524288 * 524289 * 8192 * 80) / c.step / 64
    assert f"{want / 1e12:.0f} TFLOP/s per GPU, {want / 989e12:.0%}".replace("%", " %") in text


def test_search_needs_no_gpu_and_divisors_are_all():
    assert divisors(16384) == [2**n for n in range(15)]
    assert search(model("qwen3-0.6b"), 4096, 1, gpu("b200")).ranked[0].setup.gpus == 1
    assert costs.ring_bytes(4096, 4, G=2, D=64) == strategies.traffic("ring", Problem(4096, (1, 4), 8, 2, 64)).inner

"""Models of transformers over a split sequence equal the same models on one device: logits, loss and gradients."""

import re
from pathlib import Path

import pytest
import torch
from generate_programs import model_of
from generate_programs import one_device as generated_alone
from hf_programs import LAYOUTS, gradients, make_batch, make_model, one_device, packed, step
from oracle import relative
from torch.nn import functional as F

import ringlearn as rl
from ringlearn.launch.pool import Pool
from ringlearn.nn.hugging_face import split

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ringlearn[transformers]'")

ROOT = Path(__file__).parents[1]
FILE, GENERATE = "tests/hf_programs.py", "tests/generate_programs.py"


@pytest.fixture(scope="module")
def pool():
    with Pool(4, backend="gloo") as pool:
        yield pool


@pytest.fixture(scope="module")
def llama():
    return make_model()


def generated(name, case):
    return generated_alone(model_of(name), case)


def check(got, want, tolerance=1e-10):
    logits, loss, grads = want
    assert relative(got[0], logits) < tolerance and abs(got[1] - loss) < tolerance
    assert got[2].keys() == grads.keys()
    for name, grad in got[2].items():
        assert relative(grad, grads[name]) < tolerance, name


def simulated(model, P, tokens, labels, **options):
    model.zero_grad()
    logits, loss = step(model, rl.SimulatedWorld(P), tokens, labels, **options)
    return logits, loss, gradients(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("P, S", [(1, 21), (2, 21), (3, 21), (4, 21), (4, 3)])
def test_simulated_ranks_equal_one_device(llama, P, S, layout):
    batch = make_batch(S)
    want = one_device(llama, *batch)
    check(simulated(llama, P, *batch, layout=LAYOUTS[layout]), want)


def test_processes_equal_one_device(pool):
    per_rank = pool.run(f"{FILE}:cases")
    want = {S: one_device(make_model(), *make_batch(S)) for S in (3, 21)}
    model, (tokens, labels), numbers = make_model(), make_batch(21), packed(21)
    masked = labels.masked_fill(F.pad(numbers.diff(), (1, 0)) > 0, -100)
    seen = (rl.causal & rl.documents([[5, 16], [8, 13]])).dense(21, 21)
    want["packed"] = one_device(model, tokens, masked, attention_mask=seen)
    for case, (logits, _, grads) in per_rank[0].items():
        P, _, S, _ = case
        parts = [results[case][1] for results in per_rank if case in results]
        assert len(parts) == P
        check((logits, sum(parts), grads), want["packed" if case[3] == "packed" else S])
    assert set(per_rank[3]) < set(per_rank[0])
    for case, (logits, _, grads) in per_rank[3].items():
        of_one = want["packed" if case[3] == "packed" else case[2]]
        check((logits, of_one[1], grads), of_one)


MODELS = {
    "a window": ("Mistral", dict(sliding_window=5)),
    "a window in the second layer": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "two kinds of layers and RoPE": (
        "Gemma3Text",
        dict(model="Gemma3ForCausalLM", head_dim=8, sliding_window=5,
             layer_types=["sliding_attention", "full_attention"]),
    ),
    "norms of queries and keys": ("Qwen3", dict(head_dim=8)),
    "experts": ("Mixtral", dict(num_local_experts=4)),
    "its own scale": ("Granite", dict(attention_multiplier=0.7)),
    "one key/value head": ("Llama", dict(num_key_value_heads=1)),
    "a window that is wide": ("Mistral", dict(sliding_window=1_000_000)),
    "windows switched off": ("Qwen2Moe", dict(num_experts=4, moe_intermediate_size=16)),
    "a view of attention's result": ("JetMoe", dict(kv_channels=8, num_local_experts=2)),
    "learnt positions": ("GPT2", dict(model="GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4)),
}  # fmt: skip


@pytest.mark.parametrize("what", MODELS)
def test_other_models_equal_one_device(what):
    name, options = MODELS[what]
    model, batch = make_model(name, **options), make_batch(21)
    want = one_device(model, *batch)
    # Norms in float32 inside of these models: a last digit may round the other way.
    check(simulated(model, 3, *batch), want, 1e-6)


BOTH = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
CAPPED = dict(attn_logit_softcapping=0.8, query_pre_attn_scalar=8, final_logit_softcapping=5.0)
CHANGED_SCORES = {
    "sinks": ("GptOss", BOTH | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2)),
    "softcap": ("Gemma2", BOTH | CAPPED | dict(head_dim=8)),
    "softcap, heads of 256": (
        "Gemma2",
        BOTH | CAPPED | dict(head_dim=256, num_attention_heads=2, num_key_value_heads=1),
    ),
}


@pytest.mark.parametrize("P, strategy", [(2, rl.ring_attention), (3, rl.ring_attention), (3, rl.ulysses_attention)])
@pytest.mark.parametrize("what", CHANGED_SCORES)
def test_sinks_and_capped_scores_equal_one_device(what, P, strategy, monkeypatch):
    """Transformers' eager attention has both. It rounds Gemma 2's weights to float32; here it may not."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    (name, options), batch = CHANGED_SCORES[what], make_batch(21)
    model = make_model(name, **options)
    want = one_device(model, *batch, attention="eager")
    assert not what == "sinks" or min(g.abs().min() for n, g in want[2].items() if "sinks" in n) > 1e-6
    check(simulated(model, P, *batch, strategy=strategy), want)


def test_layers_that_are_computed_anew(llama):
    batch = make_batch(21)
    want = one_device(llama, *batch)
    model = make_model()
    model.gradient_checkpointing_enable()
    check(simulated(model.train(), 3, *batch), want)


def test_padding_on_the_right_is_as_if_it_were_not_there(llama):
    tokens, labels = make_batch(21)
    padding = torch.ones_like(tokens)
    padding[0, 13:] = 0
    batch = split(llama, rl.SimulatedWorld(3), tokens, tokens, padding)
    logits = llama(**batch).logits
    batch.loss(logits).backward()
    got, grads = batch.unshard(logits), gradients(llama)
    wanted = tokens.masked_fill(padding == 0, -100)
    want = one_device(llama, tokens, wanted, attention_mask=padding)
    assert batch.count == 12 + 20 and abs(batch.loss(logits).item() - want[1]) < 1e-10
    assert relative(got[0, :13], want[0][0, :13]) < 1e-10 and relative(got[1], want[0][1]) < 1e-10
    for name, grad in grads.items():
        assert relative(grad, want[2][name]) < 1e-10, name


def test_packed_documents_do_not_see_each_other(llama):
    tokens, labels = make_batch(21, B=1)
    lengths = [8, 4, 9]
    labels[:, [8, 12]] = -100  # which no token of the same document predicts
    positions = rl.positions_in_documents(torch.arange(21), lengths)[None]
    want = one_device(llama, tokens, labels, position_ids=positions)  # transformers finds the documents by positions
    alone = one_device(llama, tokens[:, 8:12], labels[:, 8:12])[0]
    assert relative(want[0][:, 8:12], alone) < 1e-10
    check(simulated(llama, 3, tokens, labels, position_ids=positions, mask=rl.documents(lengths)), want)


@pytest.mark.parametrize(
    "strategy, ranks",
    [
        (rl.all_gather_attention, 3),
        (rl.ulysses_attention, 2),
        (rl.hybrid_attention, (2, 2)),
        (rl.double_ring_attention, (3, 2)),
        (rl.ring_self_attention, 3),
    ],
)
def test_other_strategies(llama, strategy, ranks):
    batch = make_batch(21)
    want = one_device(llama, *batch)
    check(simulated(llama, ranks, *batch, strategy=strategy), want)


def test_batches_of_one_step_add_up(llama):
    (tokens, labels), (more, wanted) = make_batch(21), make_batch(13, B=2, seed=1)
    world, count = rl.SimulatedWorld(3), int((labels[:, 1:] != -100).sum() + (wanted[:, 1:] != -100).sum())
    llama.zero_grad()
    losses = [step(llama, world, *batch, count=count)[1] for batch in ((tokens, labels), (more, wanted))]
    grads = gradients(llama)
    parts = [one_device(llama, *batch) for batch in ((tokens, labels), (more, wanted))]
    shares = [int((y[:, 1:] != -100).sum()) / count for y in (labels, wanted)]
    assert abs(sum(losses) - sum(n * part[1] for n, part in zip(shares, parts))) < 1e-10
    for name, grad in grads.items():
        assert relative(grad, sum(n * part[2][name] for n, part in zip(shares, parts))) < 1e-10, name


def test_bf16_is_as_near_as_on_one_device():
    batch = make_batch(64, B=1)
    want = one_device(make_model(), *batch)
    one = one_device(make_model(dtype=torch.bfloat16), *batch)
    got = simulated(make_model(dtype=torch.bfloat16), 4, *batch)
    assert 1e-3 < relative(got[0], want[0]) < 1.5 * relative(one[0], want[0])


def test_the_page_s_program_learns_and_its_trial_finds_no_difference(pool):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your_model.md").read_text(), flags=re.S)
    found = pool.run(f"{FILE}:example", [block.replace("dist.destroy_process_group()", "") for block in blocks])
    lines = found[0][0].splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines[:20]]
    assert lines[19].startswith("step 20: loss") and losses[-1] < losses[0] - 1.5
    for said, *others in found:
        logits, grads = (float(line.rpartition(" ")[2]) for line in said.splitlines()[-2:])
        assert logits < 5e-6 and grads < 5e-6
        assert max(others) < 5e-6, others  # of the classifier, and of the model that is not of transformers


# Generation by processes; tests/test_generate.py has more of it, in one process

ON_GLOO = {  # the number of ranks: models and cases
    2: [("Llama", "sampled"), ("Mistral, a long window", "a padded batch")],
    3: [("Gemma3Text", "a padded batch"), ("Mistral", "a padded batch, sampled")],
    4: [("GptOss", "shorter than the ranks"), ("Qwen3", "one token")],
}


def test_processes_generate_what_one_device_does(pool):
    per_rank = pool.run(f"{GENERATE}:cases", ON_GLOO)
    for rank, found in enumerate(per_rank):
        assert {P for P, *_ in found} == {P for P in (2, 3, 4) if rank < P}
        for (P, name, case), out in found.items():
            assert torch.equal(out, generated(name, case)), (P, name, case)


def test_rank_0_ends_it_prints_it_and_goes_on(pool):
    """With a stop that only rank 0 knows of; a streamer everywhere; a next turn; and each rank choosing by itself."""
    found = pool.run(f"{GENERATE}:ends")
    model, want = make_model(), generated("Llama", "greedy")
    for rank, said in enumerate(found):
        assert torch.equal(said["stopped"], generated("Llama", "sampled")[:, :25])
        lines = [want[0, :21].tolist(), *([t] for t in want[0, 21:].tolist()), "end"]
        assert said["text"].splitlines() == ([str(x) for x in lines] if rank == 0 else [])
        assert torch.equal(said["plain"], want)
        assert said["compared"] == ["generate"] * (1 + want.shape[1] - 21)  # once for each token, whatever the layers
    model.set_attn_implementation("sdpa")
    longer = torch.cat([want, torch.tensor([[7, 8, 9]])], 1)
    turn = model.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=5, pad_token_id=0)
    assert all(torch.equal(said["next turn"], turn) for said in found)


def test_the_page_on_generating_runs(pool):
    program, own, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "decoding.md").read_text(), flags=re.S)
    said = pool.run(f"{FILE}:printed", [program.replace("dist.destroy_process_group()", ""), own])
    assert re.fullmatch(r"\[\d+(, \d+){19}\]\n", said[0]) and not any(said[1:])


def test_a_difference_or_a_mistake_is_an_error_on_every_rank_and_nothing_is_lost(pool):
    words = {
        "other prompts": "prefill: input_ids: expected the same on all ranks",
        "room": "prefill: new_tokens: expected the same on all ranks",
        "right": "is padded on the right, but the next token is predicted from the last one",
        "other tokens": "generate: new tokens (by their first keys and values): expected the same on all ranks",
        "other padding": "zeros at the left of sequence",
        "fewer rows": "generate: expected the batch of 3 sequences that prefill was given, got 2",
        "a pad on the right": "a new token of sequence 0 is padding",
        "dropout": "set config.attention_dropout = 0.0",
        "beams": "generate greedily or by sampling",
        "attention": "the model's attention is 'sdpa', which would see the newest tokens alone",
    }
    lengths = [20, [20, 7, 0], [(20, 7, 0)] * 2]
    for said in pool.run(f"{GENERATE}:told"):
        for name, text in words.items():
            assert said[name].startswith("ValueError") and text in said[name], (name, said[name])
        assert said["lengths"] == lengths and said["whole"] is True
        want = generated("Llama", "a padded batch")
        assert torch.equal(said["goes on"], want)
        assert "sequence 0 has 35 tokens and would have 36, the capacity is 35" in said["full"]
        assert said["full, lengths"] == [35, [35, 22, 15], [(35, 22, 15)] * 2]


# What is refused


def test_a_mistake_of_one_rank_is_an_error_on_every_rank(pool):
    words = {
        "dropout": "set config.attention_dropout = 0.0",
        "padding": "pass it to split(..., attention_mask=)",
        "dense mask": "pass masks to split(..., mask=)",
        "cache": "a KV cache",
        "count": "count: expected the same on all ranks",
        "tokens": "split: input_ids: expected the same on all ranks",
        "padding between tokens": "remove padding between tokens",
        "documents": "position_ids contradict the documents: in row 0",
        "too many": "expected input_ids below 61",
        "labels": "pass the whole labels to split(..., labels=)",
        "another attention": 'expected attn_implementation="ringlearn", got "sdpa"',
    }
    for said in pool.run(f"{FILE}:refusals"):
        assert said.keys() == words.keys()
        for name, text in said.items():
            assert text.startswith("ValueError") and words[name] in text, text


@pytest.mark.parametrize("name, options, words", [
    ("Nemotron", {}, "does not hand its arguments on to attention"),
    ("Bert", dict(model="BertLMHeadModel"), "only causal models"),
    ("Llama4Text", dict(model="Llama4ForCausalLM", head_dim=8), "layers of type chunked_attention"),
    ("Lfm2", dict(layer_types=["conv", "full_attention"]), "layers of type"),
    ("Mixtral", dict(num_local_experts=2, output_router_logits=True), "output_router_logits = False"),
    ("Llama", dict(max_position_embeddings=16, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
     "RoPE of type dynamic"),
])  # fmt: skip
def test_models_that_are_not_supported(name, options, words):
    model, (tokens, labels) = make_model(name, dtype=torch.float32, **options), make_batch(21)
    with pytest.raises(ValueError, match=words):
        model(**split(model, rl.SimulatedWorld(2), tokens, labels))


def test_positions_that_do_not_start_at_0_are_asked_for():
    model, batch = make_model("Roberta", is_decoder=True), make_batch(21)
    with pytest.raises(ValueError, match=r"position_ids as it makes them without padding, torch.arange\(1, 22\)"):
        split(model, rl.SimulatedWorld(3), *batch)
    want = one_device(model, *batch)
    logits, loss, _ = simulated(model, 3, *batch, position_ids=torch.arange(1, 22)[None])
    assert relative(logits, want[0]) < 1e-10 and abs(loss - want[1]) < 1e-10


def test_models_without_the_interface_are_refused_for_what_they_lack(llama):
    from transformers import FalconConfig, FalconForCausalLM

    model = FalconForCausalLM(FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=61))
    model.set_attn_implementation("ringlearn")
    with pytest.raises(ValueError, match="FalconForCausalLM does not use the attention interface"):
        split(model, rl.SimulatedWorld(2), make_batch(21)[0])


def test_dynamic_rope_is_fine_as_long_as_it_stays_as_it_is():
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    model, batch = make_model(max_position_embeddings=21, rope_parameters=rope), make_batch(21)
    want = one_device(model, *batch)
    check(simulated(model, 3, *batch), want)


def test_bad_input_says_what_was_expected(llama):
    world, (tokens, labels) = rl.SimulatedWorld(2), make_batch(21)
    sinks = make_model("GptOss", head_dim=8, num_local_experts=2)
    for call, words in (
        (lambda: llama(tokens), "split"),
        (lambda: llama.generate(tokens, max_new_tokens=1), "split"),
        (lambda: split(llama, 2, tokens), "SimulatedWorld"),
        (lambda: split(torch.nn.Linear(2, 2), world, tokens), "model of transformers"),
        (lambda: split(llama, world, tokens.double()), "input_ids"),
        (lambda: split(llama, world, tokens, labels[:1]), "labels like input_ids"),
        (lambda: split(llama, world, tokens, mask=None), "mask="),
        (lambda: split(llama, world, tokens, position_ids=torch.arange(20)), "position_ids"),
        (
            lambda: llama(**split(llama, world, tokens) | {"input_ids": tokens[:, 1:], "position_ids": None}),
            "21 tokens",
        ),
        (lambda: llama(**split(llama, world, tokens), output_attentions=True), "output_attentions"),
        (
            lambda: sinks(**split(sinks, world, tokens, strategy=lambda q, k, v, mask, scale: q)),
            "the model has sinks, which strategy= does not support",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    model = make_model()
    model.append = torch.nn.Conv1d(2, 2, 3)
    with pytest.raises(ValueError, match="append is a Conv1d"):
        split(model, world, tokens)

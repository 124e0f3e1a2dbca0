"""What ranks generate together with a model of transformers is, token for token, what it generates on one device."""

import re

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ringlearn[transformers]'")

from generate_programs import CASES, MODELS, NEW, Streamer, model_of, one_device, prompt_of, together
from hf_programs import make_model
from transformers import TextStreamer

import ringlearn as rl
from ringlearn.nn.hugging_face import prefill


@pytest.fixture(scope="module")
def models():
    return {name: model_of(name) for name in MODELS}


@pytest.fixture(scope="module")
def wanted(models):
    found = {}

    def ask(name, case):
        if (name, case) not in found:
            found[name, case] = one_device(models[name], case)
        return found[name, case]

    return ask


SOME = ("greedy", "a padded batch, sampled", "one token")
UNPADDED = ("greedy", "sampled")  # transformers' eager attention in float64 gives NaN for Gemma 2's padding


@pytest.mark.parametrize(
    "name, case",
    [(name, c) for name in MODELS for c in {"Llama": CASES, "Gemma2": UNPADDED}.get(name, SOME)],
)
def test_simulated_ranks_equal_one_device(models, wanted, name, case):
    out = together(models[name], rl.SimulatedWorld(3, count_memory=False), case)
    assert out.shape[1] == CASES[case][0] + NEW or (out[:, -1] == 0).all() or (out == 2).any()
    assert torch.equal(out, wanted(name, case))


def test_a_stop_token_ends_a_row_and_the_batch_goes_on(models):
    tokens, mask, more = prompt_of("a padded batch")
    model = models["Llama"]
    third = one_device(model, "a padded batch")[0, 23]
    out = together(model, rl.SimulatedWorld(2), "a padded batch", eos_token_id=int(third))
    assert torch.equal(out, one_device(model, "a padded batch", eos_token_id=int(third)))
    assert (out[0, 24:] == 0).all() and not (out[1:, 24:] == 0).all()


def test_a_window_far_longer_and_shorter_than_what_is_generated():
    """The window's cache begins anew many times, and a long next turn needs a larger one."""
    model = make_model("Mistral", sliding_window=3)
    prompt = prefill(model, rl.SimulatedWorld(2, count_memory=False), prompt_of("greedy")[0])
    plain = dict(max_new_tokens=40, pad_token_id=0, eos_token_id=None)
    turn = model.generate(**prompt, **plain)
    longer = torch.cat([turn, turn[:, 5:30]], 1)
    turn = model.generate(**prompt.followed_by(longer), **plain)
    model.set_attn_implementation("sdpa")
    assert torch.equal(turn, model.generate(longer, attention_mask=torch.ones_like(longer), **plain))


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_forward_that_broke_off_leaves_nothing_behind(models, wanted, name):
    model, world = models[name], rl.SimulatedWorld(2)
    tokens, mask, more = prompt_of("greedy")
    prompt = prefill(model, world, tokens, mask, new_tokens=NEW)
    broken = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
    try:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model.generate(**prompt, **more)
    finally:
        broken.remove()
    with pytest.raises(ValueError, match="neither be reordered nor repeated"):
        model.generate(**prompt, **more, num_beams=2)
    assert torch.equal(model.generate(**prompt, **more), wanted(name, "greedy"))


def test_the_classes_are_offered_where_prefill_is():
    from ringlearn.hugging_face import Cache, Prompt
    from ringlearn.nn import generation

    assert Cache is generation.Cache and Prompt is generation.Prompt
    with pytest.raises(ImportError):
        from ringlearn.hugging_face import Caches  # noqa: F401


def test_bad_input_says_what_was_expected(models):
    model, world, (tokens, mask, more) = models["Llama"], rl.SimulatedWorld(2), prompt_of("a padded batch")
    hole = mask.clone()
    hole[0, 4] = 0
    for call, words in (
        (lambda: prefill(model, 2, tokens), "expected a SimulatedWorld"),
        (lambda: prefill(model, world, tokens[:, :0]), "input_ids of at least one token"),
        (lambda: prefill(model, world, tokens, mask[:, 1:]), "attention_mask like input_ids"),
        (lambda: prefill(model, world, tokens, mask * 0), "only padding in row 0"),
        (lambda: prefill(model, world, tokens, mask.flip(1)), "row 1 is padded on the right"),
        (lambda: prefill(model, world, tokens, hole), "zeros between the tokens of row 0"),
        (lambda: prefill(model, world, tokens, new_tokens=0), "new_tokens to be an int >= 1"),
        (lambda: prefill(model.model, world, tokens), "expected a model that predicts the next token"),
        (lambda: prefill(model, world, tokens, layout="zigzag"), "expected a layout"),
        (lambda: prefill(model, world, tokens, streamer=TextStreamer(None)), "a TextStreamer prints one sequence"),
        (lambda: prefill(model, world, tokens).followed_by(tokens[:, :20]), "expected the 20 tokens so far"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    with pytest.raises(TypeError, match="streamer"):  # it belongs to prefill, and is not taken and forgotten here
        model.generate(**prefill(model, world, tokens, mask), streamer=Streamer(), **more)

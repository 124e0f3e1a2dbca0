"""The generating program writes the same on any number of ranks, with its own models and those of transformers."""

import pytest
import torch
from nn_programs import uncached

from ringlearn import nn as rnn
from ringlearn import text
from ringlearn.generate import __main__ as program
from ringlearn.generate.options import parse, parser
from ringlearn.generate.run import SMALL, run
from ringlearn.launch.pool import Pool
from ringlearn.train import train
from ringlearn.train.options import parse as parse_training

FILE = "tests/generate_program_ranks.py"
SHORT = ["--dtype", "float64", "--tokens", "90", "--new-tokens", "12"]


def written(*argv):
    return run(parse([*SHORT, *map(str, argv)]))


def alone(model, temperature, seed, tokens=90):
    """What the model writes without any cache, after the beginning of the standard library."""
    prompt = torch.tensor(list(text.standard_library_bytes(tokens)))[None]
    torch.manual_seed(seed)
    return uncached(model, prompt, temperature, seed=None)


def test_ranks_write_what_one_device_writes(capsys):
    torch.manual_seed(3)
    model = rnn.Transformer(SMALL).double().requires_grad_(False)
    for temperature in (0.0, 0.8):
        want = alone(model, temperature, 3)
        for more in ((), ("--simulate", 3, "--layout", "striped", "--interleave", 4)):
            assert torch.equal(written("--seed", 3, "--temperature", temperature, *more), want)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a small model with random weights, 2,885,888 parameters")
    assert "float64; 1 rank, zigzag (" in lines[0]
    assert "of a prompt of 90 tokens" not in lines[1] and "keeps 102 of 102 at most" in lines[1]
    assert any("float64; 3 simulated ranks, striped" in line for line in lines)
    assert any("keeps 36 of 102 at most" in line for line in lines)  # 102 = 8 * 12 + 6: four, and four more, on rank 0
    assert all(unit in lines[-1] for unit in ("first token after", "tokens of the prompt a second", "tokens/s"))


def test_a_model_that_was_trained_goes_on_writing(tmp_path, capsys):
    train(parse_training("--tokens 40 --width 32 --steps 3 --batch 2 --simulate 2 --save".split() + [str(tmp_path)]))
    one = written("--load", tmp_path, "--new-tokens", 30)
    assert torch.equal(written("--load", tmp_path, "--simulate", 4, "--new-tokens", 30), one)
    assert not torch.equal(one[:, 90:], written("--new-tokens", 30)[:, 90:])
    assert f"the model of {tmp_path}, step 3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="got none there"):
        written("--load", tmp_path / "step-00000003")


def test_a_model_of_transformers(tmp_path, capsys):
    pytest.importorskip("transformers", reason="needs transformers: pip install 'ringlearn[transformers]'")
    from hf_programs import make_model

    model = make_model(dtype=torch.float32, vocab_size=256, eos_token_id=None)
    model.save_pretrained(tmp_path)
    outs = [written("--model", tmp_path, "--temperature", t, *more) for t in (0, 1) for more in ((), ("--simulate", 3))]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3]) and not torch.equal(outs[0], outs[2])
    model = type(model).from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="sdpa")
    assert torch.equal(outs[0], model.generate(outs[0][:, :90], max_new_tokens=12, do_sample=False, pad_token_id=0))
    assert "which has no tokenizer, over bytes" in capsys.readouterr().out


def test_processes_write_it_together():
    with Pool(2, backend="gloo") as pool:
        found = pool.run(f"{FILE}:written", [*SHORT, "--temperature", "0.8"])
    want = written("--temperature", 0.8)
    for rank, (out, lines, said) in enumerate(found):
        assert torch.equal(out, want)
        assert ("2 ranks, zigzag (cpu)" in lines) == (rank == 0) and bool(lines) == (rank == 0)
        assert said.startswith("the command line: --seed: expected the same on all ranks")


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--tokens 0", "--tokens: expected a number > 0"),
        ("--new-tokens 0", "--new-tokens: expected a number > 0"),
        ("--interleave -1", "--interleave: expected a number > 0"),
        ("--timeout inf", "--timeout: expected a number > 0, got inf"),
        ("--temperature -1", "--temperature: expected a number >= 0"),
        ("--temperature nan", "--temperature: expected a number >= 0"),
        ("--seed -1", "--seed: expected a number from 0"),
        ("--simulate 0", "ranks >= 1"),
        ("--backend gloo", "torchrun --nproc-per-node 4 -m ringlearn.generate"),
        ("--prompt a --tokens 3", "--prompt and --tokens: expected one of them"),
        ("--load a --model b", "--load and --model: expected one of them"),
        ("--prompt=", "--prompt: expected a text"),
        ("--layout spiral", "invalid choice"),
        ("--load /no/such/folder", "expected a folder in which ringlearn.train"),
        ("--prompt-file /no/such/file", "No such file"),
        ("--tokens 1000000000", "--tokens: expected at most"),
        ("--model /no/such/folder", "/no/such/folder"),
    ],
)
def test_bad_input_ends_with_code_2_and_the_reason(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        program.main(argv.split())
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_help_says_every_default():
    said = " ".join(parser().format_help().split())
    for words in ("the most tokens to generate [64]", "before treating it as lost [60.0]", "by default 2,048"):
        assert words in said, said
    assert "None" not in said and "[False]" not in said

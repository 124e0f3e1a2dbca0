"""The sweep over the architectures of transformers, and the page that it makes."""

import re

import pytest
from course import ROOT

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ringlearn[transformers]'")

import sweep_architectures as sweeping
from hf_programs import register

import ringlearn as rl
from ringlearn.hugging_face import split

PAGE = (ROOT / "docs" / "architectures.md").read_text()
EQUAL = re.findall(r"`(\w+)`", PAGE.partition("## Equal")[2].partition("## Refused")[0])
REFUSED = re.findall(r"`(\w+)`", PAGE.partition("## Refused")[2].partition("## Not built")[0])


@pytest.mark.parametrize(
    "name",
    ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "RobertaForCausalLM", "Gemma3nForCausalLM", "MiMoV2FlashForCausalLM"],
)
def test_what_the_page_says_is_equal(name):
    register()
    assert name in EQUAL and sweeping.sweep(name) == (name, "equal", "")


@pytest.mark.parametrize("name", ["DogeForCausalLM", "Llama4ForCausalLM",
                                  "NemotronForCausalLM", "BloomForCausalLM", "ReformerModelWithLMHead"])  # fmt: skip
def test_what_the_page_says_is_refused(name):
    register()
    found = sweeping.sweep(name)
    assert name in REFUSED and found.result == "refused"
    row = next(line for line in PAGE.splitlines() if line.startswith("| ") and f"`{name}`" in line)
    assert row.startswith(f"| {sweeping._reason(found)} |")


def test_what_is_wrong_is_called_so(monkeypatch):
    """A model whose tokens see too little, and one that raises what nobody understands."""
    register()
    monkeypatch.setattr(sweeping, "split", lambda *a, **k: split(*a, **k, mask=rl.sliding_window(9)))
    assert sweeping.sweep("LlamaForCausalLM").result == "WRONG"
    monkeypatch.setattr(sweeping, "split", lambda *a, **k: {}["split"])
    assert sweeping.sweep("LlamaForCausalLM")[1:] == ("WRONG", "KeyError: 'split'")


def test_the_page_counts_what_it_lists_and_nothing_is_wrong():
    counts = dict(re.findall(r"^\| (equal|refused|not built) \| (\d+) \|$", PAGE, flags=re.M))
    assert (int(counts["equal"]), int(counts["refused"])) == (len(EQUAL), len(REFUSED)) and len(EQUAL + REFUSED) > 150
    assert "WRONG" not in PAGE and "## Wrong" not in PAGE
    ours = (ROOT / "docs" / "your_model.md").read_text()
    assert f"{counts['equal']} are equal, {counts['refused']} are refused with a reason" in ours

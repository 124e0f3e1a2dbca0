"""The measurement runs on gloo processes too; its numbers are another matter."""

from __future__ import annotations

import json

import pytest
import torch

from ringlearn.bench import multi_gpu as measure


@pytest.mark.alone
def test_on_gloo_it_measures_every_part():
    found = measure.multi_gpu(
        2, tokens=(64, 66), tokens_per_gpu=(16,), mib=(1 / 64, 1 / 16), error_tokens=64, repeats=1
    )
    assert json.loads(json.dumps(found)) == found
    assert [(row["gpus"], row["tokens"]) for row in found["scaling"]] == [(1, 64), (1, 66), (2, 64), (2, 66)]
    assert all(row["forward_backward_ms"] > 0 and row["peak_mib"] is None for row in found["scaling"])
    assert [row["mib"] for row in found["transfers"]] == [1 / 64, 1 / 16]
    step = found["overlap"][0]
    assert step.keys() == {"tokens_per_gpu", "attention_ms", "transfer_ms", "both_ms", "awaited_first_ms"}
    assert found["hardware"]["backend"] == "gloo"
    bf16_rounding = 4e-3
    assert all(0 < error < bf16_rounding for error in found["error"].values())


def test_of_the_ranks_the_slowest_counts():
    ranks = [
        {"forward_ms": 2.0, "tflops_per_gpu": 50.0, "peak_mib": None},
        {"forward_ms": 1.0, "tflops_per_gpu": 100.0, "peak_mib": None},
    ]
    assert measure._worst(ranks) == {"forward_ms": 2.0, "tflops_per_gpu": 50.0, "peak_mib": None}


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--out", "/no/such/folder/x.json"], "No such file or directory"),
        (["--gpus", "0"], "at least 2 GPUs"),
        (["--gpus", "1000"], "at most the"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(argv, words, monkeypatch, capsys):
    def started(size):
        raise RuntimeError(f"{size} processes")

    monkeypatch.setattr(measure, "Pool", started)
    monkeypatch.setattr("sys.argv", ["measure", *argv])
    with pytest.raises(SystemExit) as end:
        measure.main()
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is about a machine without GPUs")
def test_a_ring_has_two_ranks():
    with pytest.raises(ValueError, match="at least 2 GPUs"):
        measure.multi_gpu(1)

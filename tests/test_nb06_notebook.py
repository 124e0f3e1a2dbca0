"""Notebook 06 as a learner leaves it: solved with its own solutions, with guesses made, and its numbers as measured."""

from __future__ import annotations

import re

from course import markdown, printed, read
from notebook_rules import NotebookRules

from ringlearn import costs
from ringlearn.course import records
from ringlearn.course.checks import nb06

MULTI_GPU = "2026-11-28-multi-gpu-2-h200.json"


class TestNotebook(NotebookRules):
    NUMBER = "06"
    ANSWERS = [46, "same", 64, 81]
    QUIZ = [40, 14, 2500, 6000, 3]
    SPOILERS = {
        "predict-total": (r"\b46\b", r"max\(C", r"longer of the two"),
        "exercise-6a": (r"\+= ?await", r"await travelling", r"step > 0", r"last message brings"),
        "predict-dim": (r"\bcancel", r"head dim (does not|doesn't) matter"),
        "exercise-6b": (r"e ?\+ ?4", r"itemsize ?\+ ?4", r"/ ?5\b", r"1e9 / 8", r"gbit \*", r"2 n\^\*"),
        "predict-ranks": (r"\b1,200\b", r"\b64 ranks", r"only 1,024"),
        "predict-overhead": (r"\b81\b", r"\b108\b", r"8[01]% longer", r"hides? (almost )?nothing"),
        "exercise-6c": (r"sorted\(", r"uncovered", r"zip\(times", r"neighbouring instants"),
        "quiz": (r"\b40 ms", r"\b14 ms", r"\b2,?500\b", r"\b6,?000\b"),
    }


def test_the_bandwidth_at_which_the_explorers_ring_stops_hiding():
    text = markdown(read("06"))
    assert "a ring with 2,048 tokens per rank stops hiding.\n\n<details>" in text and "About 80 GB/s." in text
    operations, nbytes = costs.step_work(2048, 32, 8, 128)
    step = operations / 600e12
    assert f"computes for {1e6 * step:.0f} µs" in text and f"its {nbytes / 1e6:.2f} MB have" in text
    assert f"the other {1e6 * (step - 10e-6):.0f} µs" in text
    at = [costs.hiding_threshold(32, 8, flops=600e12, bandwidth=w * 1e9, latency=10e-6, D=128) for w in (75, 80, 85)]
    assert at[0] > 2048 > at[2] and abs(at[1] / 2048 - 1) < 0.01


def test_the_numbers_in_the_text_are_those_that_were_measured():
    text = markdown(read("06"))
    attention, message, both = (1e3 * nb06.measured_ms(2048, what) for what in ("attention", "nccl alone", "nccl"))
    assert f"attention alone takes {attention:.0f} µs, the message alone {message:.0f}." in text
    operations, nbytes = costs.step_work(2048, 32, 8, 128, causal=True)
    flops, bandwidth = operations / attention * 1e6, nbytes / message * 1e6
    assert f"{flops / 1e12:.0f} TFLOP/s and {bandwidth / 1e9:.0f} GB/s" in text
    star = costs.hiding_threshold(32, 8, flops=flops, bandwidth=bandwidth, causal=True)
    assert f"threshold $n^*$ of {star:,.0f} tokens" in text and star < 2048
    assert f"{both:.0f} µs instead of {attention:.0f}. One after the other would be {attention + message:.0f}." in text
    assert f"{both / attention - 1:.0%} longer at 2,048 tokens" in text
    nccl = [t for t in records.load(nb06.HIDING)["timelines"] if t["what"] == "nccl"]
    blocks = {(e["kind"], e["blocks"][0]) for t in nccl for e in t["events"]}
    assert blocks == {("message", 16), ("compute", 132)}
    assert "132 multiprocessors (SMs). NCCL's kernel has 16 blocks; attention's has 132" in text


def test_what_is_worked_out_by_hand_is_what_the_clock_says():
    text, shown = markdown(read("06")), printed(read("06"))
    compute, message = 4 * 64 * 64 * 16 * 8, 2 * 64 * 2 * 16 * 4
    assert f"= {compute:,}`" in text and f"= {message:,}` bytes" in text
    C, M = compute / 1e9, 1e-4 + message / 1e7
    for seconds in (3 * (C + M) + C, 4 * C):
        assert f"{1e3 * seconds:.2f} ms, simulated" in shown
    operations, nbytes = costs.step_work(975, 32, 8, 128)
    assert round(1e6 * operations / 600e12) == round(10 + 1e6 * nbytes / 250e9) == 26


def test_a_faster_kernel_needs_longer_shards():
    """FlashAttention 4 against FlashAttention-2 on one H200: "almost twice as fast"."""
    rows = re.findall(r"^(FA2|cudnn|fa4) +(\d+) +([\d,]+) +(\d+) +([\d,]+)$", printed(read("06")), re.M)
    rate, threshold = ({name: float(row[i].replace(",", "")) for name, *row in rows} for i in (0, 1))
    assert list(rate) == ["FA2", "cudnn", "fa4"] and 1.85 < rate["fa4"] / rate["FA2"] < 2
    for name in rate:
        assert abs(threshold[name] - 2 / 4 * rate[name] * 1e12 / 250e9) < 2


def test_what_the_text_says_of_the_measured_steps():
    ms = nb06.measured_ms
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    for s in lengths:  # "At no length did even half hide."
        attention, message, both = (ms(s, what) for what in ("attention", "nccl alone", "nccl"))
        assert 0 <= (attention + message - both) / min(attention, message) < 0.5
    for s in (2048, 8192, 16384):
        formula = max(ms(s, "attention"), ms(s, "nccl alone"))
        assert abs(ms(s, "priority") / ms(s, "nccl") - 1) < 0.03  # "does not help"
        assert formula <= ms(s, "copy") < ms(s, "head start") < ms(s, "nccl")
        assert ms(s, "copy") < 1.05 * formula
    assert ms(2048, "nccl", "eager_ms") > 4 * ms(2048, "nccl")  # "the GPUs mostly wait for launches"
    for s in (8192, 16384):  # "the host keeps ahead"
        assert ms(s, "nccl", "host_ms") < 0.5 * ms(s, "nccl")
        assert ms(s, "nccl", "eager_ms") < 1.1 * ms(s, "nccl")
    library = {row["tokens_per_gpu"]: row["both_ms"] for row in records.load(MULTI_GPU)["overlap"]}
    assert library[2048] > 4 * ms(2048, "nccl")
    assert all(abs(library[s] / ms(s, "nccl") - 1) < 0.2 for s in (8192, 16384))
    first = nb06.measured_events(8192, "nccl")
    message, attention = ([e[1:] for e in first if e[0] == kind] for kind in ("message", "compute"))
    assert message[0][1] < 0.3 * attention[0][1]  # "the first message runs beside attention and hides"
    assert (
        0.9 * (attention[1][1] - attention[1][0]) < message[1][0] - attention[1][0]
    )  # "when attention is nearly done"
    head_start = nb06.measured_events(8192, "head start")
    pauses = [
        a[1] - m[1] for m, a in zip(*([e for e in head_start if e[0] == k] for k in ("message", "compute")))
    ]  # fmt: skip
    assert all(8 < pause < 25 for pause in pauses)  # "some ten microseconds"

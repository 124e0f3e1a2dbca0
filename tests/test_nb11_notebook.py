"""Notebook 11 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

import pytest
import torch
from course import markdown, read, solution
from notebook_rules import NotebookRules

import ringlearn as rl
from ringlearn.attention.decoding import Ownership, local
from ringlearn.costs.decoding import tokens_to_shard, waiting_seconds
from ringlearn.course.checks import nb11
from ringlearn.course.records import load
from ringlearn.course.viz import decoding as pictures
from ringlearn.plan.hardware import GPUS
from ringlearn.worlds import PerRank


class TestNotebook(NotebookRules):
    NUMBER = "11"
    ANSWERS = [1.9, 113, 16512, 500, 9, 12, 12.5, 44]
    QUIZ = [48, 115_584, 3, 42, 38, 148]
    SPOILERS = {
        "predict-busy": (r"\b1\.94?\b", r"206 times as"),
        "predict-shortest": (r"\b113\b", r"eighth (split )?has"),
        "exercise-11a": (r"\.split\(sizes", r"logsumexp\(-1\)", r"H // G, D\)", r"\\log \\sum"),
        "predict-message": (r"16,?512", r"32 \* \(128 \+ 1\)", r"49,?536", r"48\.4"),
        "exercise-11b": (r"cat\(\[out, lse", r"merges? (them )?in rank order", r"merge_all\("),
        "predict-room": (r"\b500\b", r"1,?500 places"),
        "exercise-11c": (r"divmod", r"\\bmod \(P K\)", r"clamp", r"rank \* K", r"r K"),
        "predict-missed": (r"\b(9|nine) keys", r"misses? (9|nine)\b", r"hides? (3|three) keys"),
        "predict-hops": (r"\b12 hops", r"6 up and 6", r"log_?2 ?(P|64)"),
        "predict-share": (r"12\.5", r"2 ?G ?/ ?H", r"frac\{2 ?G\}"),
        "exercise-11d": (r"\[x\]_\+", r"max\(0, ", r"4 \* H \* D", r"\(T ?/ ?P\) \*", r"H D e\\,T"),
        "predict-pays": (r"\b4[34],\d00\b", r"\b44 thousand", r"(?<![\d.])44\b"),
        "quiz": (r"\b48 operations", r"115,?584", r"\b148 µs", r"\b38 per cent", r"owns 42\b"),
    }


def test_solutions_and_library_give_the_same():
    B, H, G, D, S, P = 2, 8, 2, 8, 50, 3
    q, k, v = torch.randn(B, H, 1, D), torch.randn(B, G, S, D), torch.randn(B, G, S, D)
    blocks = [(a, k[:, :, a : a + 20], v[:, :, a : a + 20]) for a in range(0, S, 20)]
    library = local.attend(q, blocks, torch.zeros(B, 1), torch.full((B, 1), S), D**-0.5, None, D)
    for got, want in zip(solution("11a", "split_k")(q, k, v, [20, 20, 10]), library):
        assert torch.allclose(got, want, atol=1e-6)
    own = Ownership(P, 4)
    parts = []
    for rank in range(P):
        at = own.positions(rank, S)
        parts.append(solution("11a", "split_k")(q, k[:, :, at], v[:, :, at], [len(at)]))
    world = rl.SimulatedWorld(P)
    results = world.run(solution("11b", "exchange"), PerRank(p[0] for p in parts), PerRank(p[1] for p in parts))
    cache = rl.KVCache(world, B, G, D, capacity=S, interleave=4)
    cache.append(k, v)
    for out, _ in results:
        assert torch.allclose(out, rl.decode_attention(q, cache), atol=1e-6)
    count = solution("11c", "local_len")
    assert [count(r, S, P, 4) for r in range(P)] == [cache.local_lengths(r)[0] for r in range(P)]
    found = waiting_seconds(64, 960, 4, 8, 2, 64, flops=1e12, bandwidth=1e9)
    assert solution("11d", "waits")(64, 960, 4, 8, 2, 64, 2, 4, 1e12, 1e9) == pytest.approx(tuple(found.values()))


def test_what_the_cells_print_is_what_the_text_says(solved):
    assert "lse = -inf: 'Paris. And the'" in solved and f"lse = 0.0: {'!' * 14!r}" in solved
    looks = re.findall(r"^ +(\d+) +(\d) +(\d\.\d\d)  '(.)'$", solved, re.M)
    assert [(int(n), int(empty)) for n, empty, *_ in looks] == [(53, 4), (80, 3), (96, 2), (104, 1), (128, 0)]
    assert [byte for *_, byte in looks] == ["!", "!", "P", "P", "P"]
    assert [float(total) for _, _, total, _ in looks] == [0.2, 0.25, 0.33, 0.5, 1.0]
    assert "equal to 1e-6:        True" in solved and "the same, bit by bit: False" in solved
    assert "as in (3): True" in solved and "right: False" not in solved and "as computed: False" not in solved
    assert re.findall(r"cached tokens +([\d,]+) +48.4", solved) == ["24", "384", "3,072"]
    assert "    5 tokens: on ranks 0 to 3 [5, 0, 0, 0]" in solved
    right, wrong = re.findall(r"queries 0 to 3 are off by (.*)", solved)
    assert set(right.split(", ")) == {"0.0"}
    wrong = [float(x) for x in wrong.split(", ")]
    assert wrong[3] == 0 and min(wrong[:3]) > 0.05
    assert "never saw the rejected ones, bit by bit: True" in solved
    assert "all ranks the same, bit by bit: True" in solved
    times = re.findall(r"^P = +(\d+) +(\d+) +(\d+) +(\d+)$", solved, re.M)
    faster = {(int(P), int(B)): "tree" if int(tree) < int(gather) else "all-gather" for P, B, gather, tree in times}
    assert faster[4, 1] == faster[64, 1] == "all-gather" and faster[64, 32] == "tree"
    assert "the same choice in 7 of 9; computed with your waits" in solved
    tokens = re.findall(r"^ *([\d,]+) +(\d) +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)  \|", solved, re.M)
    sums = {(int(S.replace(",", "")), int(P)): float(x) for S, P, x in tokens}
    assert sums[32768, 2] > sums[32768, 1] > 0.9 * sums[32768, 1] < sums[32768, 8]
    assert sums[131072, 8] / sums[131072, 1] == pytest.approx(2 / 3, abs=0.04) and 4 * sums[2**20, 8] < sums[2**20, 1]


def test_what_the_text_says_of_records_and_publications_is_in_them():
    times = load("2026-11-29-decoding-h200.json")["times"]
    rates = {(row["batch"], row["tokens"]): {x: row["bytes"] / s for x, s in row["seconds"].items()} for row in times}
    assert float(f"{max(x['a plain sum'] for x in rates.values()):.3g}") == nb11.READ
    for key, found in rates.items():
        if key[1] >= 131_072:
            assert max(found["SDPA cuDNN"], found["split-K"]) > 0.98 * found["a plain sum"]
    assert {row["bytes"] for row in times if (row["batch"], row["tokens"]) == (1, 131_072)} == {512 * 2**20}
    assert round(GPUS["h200"].bf16 / GPUS["h200"].bandwidth) == 206
    assert round(1e6 * 512 * 2**20 / GPUS["h200"].bandwidth) == 112
    close = [abs(kv - q) / q for T, (kv, q) in pictures.PUBLISHED.items() if (kv > q) != (pictures.predicted(T) > 0)]
    assert len(close) == 2 and max(close) < 0.015
    ways_home = 3 * 3200 * 16 * 129 * 2
    assert round(1e6 * ways_home / 26e9) == 1524 and round(ways_home / 1023e-6 / 1e9) == 39


def test_measured_steps_are_as_near_to_formula_8_as_the_text_says():
    steps = [row for row in load("2026-11-29-decode-appends-2-h200.json")["appends"] if row["graph"]]
    over = {(row["ranks"], row["cached"]): row["ms"] / row["formula_ms"] for row in steps}
    assert all(abs(x - 1) < 0.105 for (_, S), x in over.items() if S >= 131_072)
    assert all((S <= 32_768) == (x > 1.05) and (x < 1 or S <= 131_072) for (_, S), x in over.items())
    near = [row["ms"] / row["predicted_ms"] for row in steps if row["predicted_ms"]]
    assert len(near) == 8 and all(abs(x - 1) < 0.04 for x in near)
    assert {f"{1e3 * row['exchange_ms']:.1f}" for row in steps if row["ranks"] == 2} == {"5.4"}
    assert round(tokens_to_shard(2, 32, 8, 128, read=nb11.READ, bandwidth=288e9, latency=5.4e-6), -3) == 11_000


def test_the_borders_that_are_compared_with_published_ones():
    exchange, token = 21e-6, 1152
    borders = [times * exchange * GPUS["b200"].bandwidth / (token * 7 / 8) for times in (1, 2, 3)]
    assert [round(x, -3) for x in borders] == [167_000, 333_000, 500_000]
    assert round(tokens_to_shard(2, 32, 8, 128, read=nb11.READ, bandwidth=288e9, latency=21e-6) / 1000) == 43
    words = ("from 167,000 tokens on", "from 333,000 tokens on, with three from 500,000")
    assert all(x in markdown(read("11")) for x in words)

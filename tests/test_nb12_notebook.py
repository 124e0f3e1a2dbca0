"""Notebook 12 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

import pytest
from course import markdown, read, solution
from notebook_rules import NotebookRules

from ringlearn.course.checks import nb12
from ringlearn.plan import memory, plan
from ringlearn.plan.hardware import GiB
from ringlearn.plan.links import INSIDE

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ringlearn[transformers]'")


class TestNotebook(NotebookRules):
    NUMBER = "12"
    ANSWERS = ["logits", 11.1, 3.4, 8, 3, 1, 5]
    QUIZ = [1.5, 3.4, 5, 32, 8, 256]
    SPOILERS = {
        "predict-largest": (r"27\.4", r"27 GiB", r"logits take most", r"not the weights"),
        "exercise-12a": (r"12 \* m\.parameters", r"14 \* n", r"2 \* m\.ffn", r"n\\,\(2\\,d"),
        "exercise-12b": (r"m\.parameters - m\.embedding\)", r"S \* S", r"2\\,H D\\,S\^2", r"6\.39", r"\b1\.30\b"),
        "predict-across": (r"11\.1", r"\b11 thousand", r"11,1\d\d", r"24\.6e9"),
        "predict-twice": (r"3\.4\b", r"four times the attention"),
        "exercise-12c": (r"divmod", r"\.roll\(-1\)", r"\\lfloor r", r"\\max", r"rank // P"),
        "predict-calls": (r"\(4, 3\)", r"forward 8", r"one call for each", r"8 kernel"),
        "exercise-12d": (r"\(a - b\)\.norm\(\)", r"g \\cdot g", r"a @ b"),
        "predict-a": (r"A is 3", r"local positions", r"positions happen"),
        "predict-b": (r"B is 1", r"is a quarter", r"divided by the four"),
        "predict-c": (r"5: the forward", r"three targets are missing"),
        "quiz": (r"1\.5 GB", r"3\.4 GiB", r"place 5", r"256 calls", r"multiply .* by 32"),
    }


def test_the_solutions_give_what_the_checkers_have_as_theirs():
    m, S = nb12.LLAMA, nb12.TOKENS
    for anew in (True, False):
        parts = nb12.bytes_by_part(m, S, 8, 16, anew)
        assert solution("12a", "rank_bytes")(m, S, 8, 16, anew) == pytest.approx(sum(parts.values()))
        took = nb12.seconds_by_part(m, S, 8, 566e12, 544e12, anew)
        mine = solution("12b", "step_seconds")(m, S, 8, 566e12, 544e12, anew)
        assert mine == pytest.approx(sum(took.values()), rel=1e-4)
    batch = nb12._batch([[0, 4, 4, 13], [0, 13, 13, 13]], 3)
    for rank in range(6):
        found = solution("12c", "my_part")(batch.rows, batch.borders, rank, 3)
        assert tuple(x.tolist() for x in found) == nb12.part_of(batch, rank)
    for factor in (1.0, 0.25):
        step = nb12._changed(gradients=lambda _, g, factor=factor: factor * g)
        mine = solution("12d", "first_difference")(step, nb12._one_device())
        assert mine == nb12.library_first_difference(step, nb12._one_device())


def test_what_the_cells_print_is_what_the_text_says(solved):
    said = dict(re.findall(r"^(\S.*?) +by hand +([\d.]+) GiB", solved, re.M))
    assert {name: float(x) for name, x in said.items() if float(x)} == {
        "weights and optimizer": 5.6, "kept for the backward": 4.0, "logits": 27.4,
    }  # fmt: skip
    by_hand, planned = (float(x) for x in re.findall(r"in all ([\d.]+) s", solved))
    assert planned == 6.42 and abs(by_hand / planned - 1) < 0.01
    found = re.findall(r"^  ([\d.]+) s +[\d.]+ GiB  (.*)$", solved, re.M)
    assert len(found) == 4 and found[0][1].startswith("cp 16, double-ring; recompute none")
    assert "our own split: 5.17 s" in solved and "recompute selective, loss in blocks" in solved
    off = [float(x) for x in re.findall(r"^rank \d: logits off by up to ([\d.]+)$", solved, re.M)]
    assert off[0] == 0 and min(off[1:]) > 0.5
    assert not re.search(r"(equal|right|tokens as|document alone).*: *False", solved)
    assert "positions of rank 0: [0, 1, 2, 3, 4, 5, 6, 7, 56, 57, 58, 59, 60, 61, 62, 63]" in solved
    held = re.search(r"held by each rank: \[(\d+), \1, \1, \1\] of (\d+)", solved)
    assert 4 * int(held[1]) == int(held[2])
    assert solved.count("[True, True]") == 4 and "--cp-comm-type p2p" in solved
    assert "[(4, 3), (4, 3)]" in solved and solved.count("kernel calls forward 8, backward 8") == 4
    rows = re.findall(r"^(healthy|A|B|C) +(\w+) +([\d.]*) +([\d.]{7}) +(\d+)$", solved, re.M)
    assert [row[:3] for row in rows] == [
        ("healthy", "nothing", ""), ("A", "logits", "16"), ("B", "gradients", "0.25"), ("C", "loss", rows[3][2]),
    ]  # fmt: skip
    assert {f"{float(row[3]):.2f}" for row in rows} == {"5.58"} and [int(row[4]) for row in rows] == [63, 63, 63, 60]
    assert re.findall(r"^rank \d hangs: dist\.(\w+)", solved, re.M) == [
        "all_reduce",
        "barrier",
        "all_reduce",
        "all_reduce",
    ]
    assert "ranks 0, 1, 3: backward of ring_attention; rank 2: ring_attention" in solved
    served = re.findall(r"^ +(\d) +\d +\d +([\d.]+) +[\d.]+ +\d+$", solved, re.M)
    assert 1 < min(float(first) for gpus, first in served if gpus == "8") < 2


def test_numbers_of_the_text_are_those_of_the_planner():
    text, m, S = markdown(read("12")), nb12.LLAMA, nb12.TOKENS
    table = [int(n.replace(",", "")) for n in re.findall(r"^\| .* \| ([\d,]+) \|$", text, re.M)]
    whole = nb12.bytes_by_part(m, S, 8, 16, False)["kept for the backward"]
    assert sum(table) * m.layers * S // 8 == whole and "110,720 bytes" in text and sum(table) == 110_720
    assert round(whole / GiB) == 54 and sum(memory(m, nb12.setup(8, 16, False), S).values()) > nb12.H100.memory
    assert [round(x / 1e12) for x in (nb12.PRODUCTS, nb12.ATTENTION)] == [566, 544]
    assert round(nb12.hidden_from(303e9)) == 898 and round(INSIDE * nb12.H100.link / 1e9, -1) == 300
    assert 4 * m.head_dim * 65_536 * m.heads * m.layers == pytest.approx(34e9, rel=0.02)
    assert 3.5 * 34.4 / 45 > 2.5 and 6 * (m.parameters - m.embedding) == pytest.approx(45e9, rel=0.01)
    assert 27.4 / (5.6 + 4.0) == pytest.approx(3, abs=0.2)
    assert "57.2 %" in text and round(100 * nb12.FITTED.products_bf16, 1) == 57.2
    assert "49.1 %" in text and round(100 * nb12.FITTED.links, 1) == 49.1 and nb12.H100.network == 50e9
    by_hand = [sum(nb12.seconds_by_part(m, i * S, 8, nb12.PRODUCTS, nb12.ATTENTION, True).values()) for i in (1, 2)]
    assert "by hand it is 3.5" in text and round(by_hand[1] / by_hand[0], 1) == 3.5
    frames = [plan("llama-3.1-8b", 2**i, 16, "h100").best for i in range(13, 21)]
    assert {round(c.bytes / GiB, 1) for c in frames[:5]} == {57.3}
    assert all(c.setup.recompute == "none" for c in frames[:5]) and frames[-1].setup.recompute == "full"

"""Notebook 08 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

import pytest
import torch
from course import read, solutions
from notebook_rules import NotebookRules

import ringlearn as rl
from ringlearn import costs
from ringlearn.course.records import load
from ringlearn.worlds import PerRank


class TestNotebook(NotebookRules):
    NUMBER = "08"
    ANSWERS = [8, 4, 2.5, 1, "same"]
    QUIZ = [1_572_864, 8, 2.0, 5, 175, 3]
    GIVEAWAYS = {
        "predict_scores": ("GiB",),
        "predict_idle": ("12 ranks",),
        "predict_times": ("2.5",),
        "predict_even": ("1.0",),
        "predict_across": ("across",),
    }


def solution(exercise, name):
    space: dict = {}
    exec(solutions(read("08"))[exercise], space)
    return space[name]


@pytest.mark.parametrize("H, G, P", [(8, 4, 4), (6, 2, 4), (8, 8, 2)])
def test_solutions_and_library_give_the_same(H, G, P):
    world = rl.SimulatedWorld(P)
    x = [torch.randn(1, heads, 50, 8, dtype=torch.float64, requires_grad=True) for heads in (H, G, G)]
    shards = world.shard(*x, layout=rl.zigzag)
    positions, own = shards[0].positions, [PerRank([t.detach() for t in s.tensors]) for s in shards]
    library = rl.ulysses_attention(*shards, mask=rl.causal)
    outs = world.run(solution("8c", "ulysses"), *own, positions, rl.causal)
    assert all(
        float((a - b).norm()) < 1e-12 * float(b.norm()) for a, b in zip(outs, library.map(torch.Tensor.detach).tensors)
    )

    out, lse = rl.all_gather_attention(*shards, mask=rl.causal, return_lse=True)
    dout = [torch.randn_like(t) for t in out.tensors]
    wanted = torch.autograd.grad(out.tensors, [t for s in shards for t in s.tensors], dout)
    kept = [PerRank([t.detach() for t in s.tensors]) for s in (out, lse)]
    found = world.run(solution("8a", "gather_backward"), PerRank(dout), *own, *kept, positions, rl.causal)
    for i, b in enumerate(wanted):
        a = found[i % P][i // P]
        assert float((a - b).norm()) < 1e-12 * float(b.norm())


def test_what_the_cells_print_is_what_the_text_says(solved):
    ways = re.findall(r"^(\w+) +right: (\w+) ", solved, re.M)
    assert [name for name, _ in ways] == "all_gather ring_self ring ulysses hybrid double_ring".split()
    assert {is_right for _, is_right in ways} == {"True"}
    table = re.findall(r"^[48]  (?:ring|all_gather).*$", solved, re.M)
    assert len(table) == 6 and all(" True " in line for line in table)
    assert solved.count("as computed: True") == 2 + 4 and "as computed: False" not in solved
    ring, gather = ([int(x.replace(",", "")) for x in line.split()[-2:]] for line in table[3:5])
    assert (ring[0], gather[0]) == (0, 4 * ring[1])  # eight ranks: two shards in flight, eight gathered
    clocks = [list(map(float, line.split()[1:4])) for line in re.findall(r"^ +[\d,]+ .*as computed.*$", solved, re.M)]
    assert min(clocks[0]) == clocks[0][2] and all(min(row) == row[1] for row in clocks[1:])
    assert re.search(r"contiguous +full +right +causal right", solved)
    assert re.search(r"zigzag +full +right +causal WRONG", solved)
    off = [float(x) for x in re.findall(r"4 ranks: dk off by ([\d.]+)", solved)]
    assert off[:2] == [0, 0] and min(off[2:]) > 0.3


def test_what_the_text_says_of_the_measurement_is_what_the_record_says(solved):
    rows = {(row["tokens_per_rank"], row["way"]): row for row in load("2026-11-28-strategies-2-h200.json")["rows"]}
    for (s, way), row in rows.items():
        call = dict(S=2 * s, P=2, G=8, D=128, itemsize=2)
        if way == "one device":
            assert s > 2048 or row["forward_ms"] < rows[s, "ring"]["forward_ms"] / 5  # the host is what takes long
            continue
        for kind in ("forward", "backward"):
            formula = {"ring": costs.ring_bytes, "all-gather": costs.all_gather_bytes}.get(way)
            if way == "ulysses":
                formula, call["H"] = costs.ulysses_bytes, 32
            assert row[f"{kind}_bytes"] == formula(**call, backward=kind == "backward")
        if way != "ring":
            assert row["forward_backward_peak_mib"] > rows[s, "ring"]["forward_backward_peak_mib"]
        if s > 2048:
            assert (row["exposed"]["forward"] < 0.03) == (way == "ring")
    assert f"{rows[8192, 'ring']['forward_fraction']:.0%}" == "103%"
    pairs = re.findall(r"^ *[\d,]+ (?:all-gather|ulysses) +([\d.]+) ms, ([\d.]+) ms$", solved, re.M)
    assert len(pairs) == 4 and all(float(found) > float(model) for found, model in pairs)

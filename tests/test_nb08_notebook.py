"""Notebook 08 as a learner leaves it: solved with its own solutions, with guesses made; and as it is shipped."""

from __future__ import annotations

import re

import pytest
import torch
from course import markdown, read, solution
from notebook_rules import NotebookRules

import ringlearn as rl
from ringlearn import costs
from ringlearn.course.records import load
from ringlearn.worlds import PerRank


class TestNotebook(NotebookRules):
    NUMBER = "08"
    ANSWERS = [8, 4, 2.5, 1, "same"]
    QUIZ = [1_572_864, 8, 2.0, 5, 175, 3]
    SPOILERS = {
        "exercise-8a": (
            r"attend_backward\(dout, q, k, v, lse, delta, visible, q",
            r"d[kv]\.split\(",
            r"reduce_scatter\(d[kv]",
        ),
        "predict-scores": (r"\b8 GiB", r"S\^2 ?/ ?P", r"16,384 (rows|queries)"),
        "exercise-8b": (r"H \* rank // P", r"max\(first", r"divmod\(H"),
        "predict-idle": (r"P = H\b", r"ends at", r"eight ranks", r"\b4 ranks (compute|have) nothing"),
        "exercise-8c": (r"all_to_all\(\[", r"\.split\(lengths, 2\)", r"async def forward_by_heads"),
        "exercise-8d": (r"2 ?H \+ 2", r"ulysses_bytes\(", r"\\max\(G, P\)", r"2 \* H"),
        "predict-times": (r"2\.5", r"40 / 16", r"H \+ \\?max"),
        "predict-even": (r"the same (causal )?triangle", r"under any mask", r"Any layout", r"1\.00? even"),
        "predict-across": (
            r"as (much|many)[^.]{0,30} across",
            r"\\tag\{7\}",
            r"131,072 +[\d,]+ +131,072",
            r"cross(es)? once",
        ),
        "quiz": (r"5/P", r"\bfive pairs", r"\b175\b", r"one to the next node"),
    }


@pytest.mark.parametrize("H, G, P", [(8, 4, 4), (6, 2, 4), (8, 8, 2)])
def test_solutions_and_library_give_the_same(H, G, P):
    world = rl.SimulatedWorld(P)
    x = [torch.randn(1, heads, 50, 8, dtype=torch.float64, requires_grad=True) for heads in (H, G, G)]
    shards = world.shard(*x, layout=rl.zigzag)
    positions, own = shards[0].positions, [PerRank([t.detach() for t in s.tensors]) for s in shards]
    library = rl.ulysses_attention(*shards, mask=rl.causal)
    outs = world.run(solution("08c", "ulysses"), *own, positions, rl.causal)
    assert all(
        float((a - b).norm()) < 1e-12 * float(b.norm()) for a, b in zip(outs, library.map(torch.Tensor.detach).tensors)
    )

    out, lse = rl.all_gather_attention(*shards, mask=rl.causal, return_lse=True)
    dout = [torch.randn_like(t) for t in out.tensors]
    wanted = torch.autograd.grad(out.tensors, [t for s in shards for t in s.tensors], dout)
    kept = [PerRank([t.detach() for t in s.tensors]) for s in (out, lse)]
    found = world.run(solution("08a", "gather_backward"), PerRank(dout), *own, *kept, positions, rl.causal)
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


def ring_ms(tokens, transport="symmetric"):
    rows = load("2026-11-28-bench-2-h200.json")["rows"]
    (row,) = (r for r in rows if (r["way"], r["transport"], r["tokens_per_rank"]) == ("ring", transport, tokens))
    return row["forward_ms"]


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
    for s, more in ((2048, 0), (8192, 0.3), (32768, 0.05)):  # a ring that takes NCCL too is ahead
        ours, nccl, others = ring_ms(s), ring_ms(s, "nccl"), [rows[s, w] for w in ("all-gather", "ulysses")]
        assert 1.025 < nccl / ours < 1.085 and min(row["forward_ms"] for row in others) > (1 + more) * nccl
    pairs = re.findall(r"^ *[\d,]+ (?:all-gather|ulysses) +([\d.]+) ms, ([\d.]+) ms$", solved, re.M)
    assert len(pairs) == 4 and all(float(found) > float(model) for found, model in pairs)


def test_its_tables_have_as_many_cells_in_each_row():
    for block in re.findall(r"(?:^\|.*\|$\n?)+", markdown(read("08")), re.M):
        assert len({line.count("|") for line in block.splitlines()}) == 1 and "---" in block, block

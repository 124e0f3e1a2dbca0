"""bench --decode runs on gloo processes: its rows are right, and its numbers are those of their definitions."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import bench_ranks
import forked
import pytest
import torch

import ringlearn as rl
from ringlearn.attention.decoding import PASSES
from ringlearn.bench import __main__ as bench
from ringlearn.bench import appends, one_query, peers, prefill
from ringlearn.bench.cached import Sizes
from ringlearn.costs.decoding import decode_seconds, pass_kv_bytes, pass_q_bytes
from ringlearn.course.records import load

RANKS = Path(bench_ranks.__file__)
ROOT = RANKS.parents[1]
H, G, D = 4, 2, 8
COMPARED = ("one_query_gathered", "one_query_own_keys", "one_query_not_here", "one_query_prepared")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with everything in it: what it printed, and its record."""
    file = tmp_path_factory.mktemp("bench") / "decode.json"
    argv = ["--heads", H, G, D, "--cached", 40, 101, "--batch", 2, "--appends", 7, "--behind", 0, 50, "--new", 5]
    argv += ["--exchange", "all-gather", "tree", "--interleave", 4, "--graph", "--repeats", 2, "--json", file]
    argv += ["--compare", *(f"{RANKS}:{name}" for name in COMPARED), "ringlearn.bench.peers:tree_attn_decode"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "-m", "ringlearn.bench", "--decode", *map(str, argv)]
    done = forked.run(command, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(file.read_text())


def test_it_says_at_once_what_it_does_and_how_long_it_will_take(run):
    done, record = run
    said = [line for line in done.stderr.splitlines() if line.startswith(("2 ranks", "6 meas", "[1/6]", "[6/6]"))]
    assert said[0].startswith("2 ranks, 4:2 heads of 8, float32, gloo; CPUs show how it works")
    assert said[1].startswith("6 measurements, roughly ") and said[1][-1] in "sn"  # s or min
    assert said[2] == "[1/6] attention, 40 cached tokens, batch 2, 0.009766 MiB of keys and values"
    assert said[3].startswith("[6/6] prefill, 50 cached tokens, 5 new, batch 1, ") and said[3].endswith("left")
    assert record["command"].startswith("torchrun --nproc-per-node 2 -m ringlearn.bench --decode --heads 4 2 8 ")


def test_every_way_has_a_row_and_right_ones_have_no_error(run):
    done, record = run
    ways = [("a plain sum", 1), ("one device", 1), ("SDPA", 1), ("over the ranks", 2), ("over the ranks", 2)]
    ways += [(name, 2) for name in (*COMPARED, "tree_attn_decode")]
    rows = record["attention"]
    assert [(row["way"], row["ranks"], row["cached"]) for row in rows] == [(*x, S) for S in (40, 101) for x in ways]
    for row in rows:
        right = row["way"] not in ("a plain sum", "one_query_own_keys", "one_query_not_here", "tree_attn_decode")
        if right:
            assert row["error"] < 1e-6 and row["problem"] is None, row
        elif row["way"] == "one_query_own_keys":
            assert row["error"] > 0.1
        assert row["bytes"] == 2 * 2 * G * D * 4 * (row["cached"] if row["ranks"] == 1 else -(-row["cached"] // 2))
        if row["problem"] is None:
            low, high = row["range_ms"]
            assert 0 < low <= row["ms"] <= high and row["not_captured"] == "there is no GPU" and not row["graph"]
            alike = {other["way"]: other for other in rows if other["cached"] == row["cached"]}
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
            assert row["of_sum"] == pytest.approx(row["gb_per_s"] / alike["a plain sum"]["gb_per_s"])
            assert row["of_one"] == pytest.approx(row["ms"] / alike["one device"]["ms"])
    assert rows[7]["problem"] == "NotImplementedError: needs another machine"
    assert rows[9]["problem"] == "ModuleNotFoundError: No module named 'ring_attention_pytorch'"
    assert one_query.table(rows) in done.stdout and "over 2 ranks, tree, gloo: no graph: there is no GPU" in done.stdout


def test_steps_append_and_agree_and_stand_beside_the_formula(run):
    done, record = run
    rows = record["appends"]
    assert [(row["cached"], row["ranks"], row["exchange"]) for row in rows] == [
        (S, *way) for S in (40, 101) for way in ((1, None), (2, "all-gather"), (2, "tree"))
    ]
    for row in rows:
        assert row["problem"] is None and row["appends"] == 7 and row["apart"] < 1e-6, row
        reading = decode_seconds(row["cached"] + 3, row["ranks"], H, G, D, read=1e9 * row["read_gb_per_s"], itemsize=4,
                                 bandwidth=1, latency=0, interleave=4)["keys and values"]  # fmt: skip
        assert row["formula_ms"] == pytest.approx(1e3 * reading + row["exchange_ms"])
        assert (row["exchange_ms"] > 0) == (row["ranks"] > 1)
        assert row["bytes"] == 2 * G * D * 4 * -(-(row["cached"] + 3) // row["ranks"])
        assert (row["predicted_ms"] is None) == (row["ranks"] == 1)  # the two lengths of one device give the rest
    assert appends.table(rows) in done.stdout


def test_both_passes_agree_and_the_rule_is_the_librarys(run):
    done, record = run
    rows = record["prefill"]
    assert [(row["cached"], row["new"]) for row in rows] == [(0, 5), (50, 5)]
    for row in rows:
        assert row["problem"] is None and row["apart"] < 1e-6 and row["ms"].keys() == PASSES.keys()
        assert row["faster"] == prefill.faster(row["ms"])
    assert [row["chosen"] for row in rows] == [row["published"] for row in rows] == ["pass-kv", "pass-q"]
    assert prefill.table(rows) in done.stdout


def test_a_rule_is_judged_by_the_clear_cases_only():
    rows = [{"faster": a, "chosen": b, "published": "pass-q"} for a, b in product((None, "pass-kv"), PASSES)]
    assert prefill.right(rows, "chosen") == (1, 2) and prefill.right(rows, "published") == (0, 2)


@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag, rl.striped])
@pytest.mark.parametrize("P, new, cached, interleave", [(2, 5, 50, 16), (3, 16, 100, 4), (4, 33, 7, 1), (4, 8, 0, 16)])
def test_bytes_of_both_passes_are_those_of_the_formulas(P, new, cached, interleave, layout):
    """On every rank, shares uneven or not."""
    world = rl.SimulatedWorld(P)
    cache = rl.KVCache(world, 2, G, D, max(1, cached), interleave=interleave)
    cache.append(*(torch.randn(2, G, cached, D) for _ in range(2)))
    shards = world.shard(*(torch.randn(2, n, new, D) for n in (H, G, G)), layout=layout)
    for travels in PASSES:
        rl.prefill_attention(*shards, cache, travels=travels)
        sent = [world.trace.bytes_sent(r) for r in range(P)]
        how = dict(B=2, itemsize=4, layout=layout)
        if travels == "pass-kv":
            found = [pass_kv_bytes(new, cached, P, G, D, interleave=interleave, rank=r, **how) for r in range(P)]
        else:
            found = [pass_q_bytes(new, P, H, D, rank=r, **how) for r in range(P)]
        assert sent == found, travels


def test_what_needs_more_memory_than_allowed_is_left_out():
    sizes = Sizes(32, 524_288, (32, 8, 128), torch.bfloat16, 2, 48.0)
    assert sizes.nbytes(1) == 64 * 2**30 and not sizes.fits(1) and sizes.fits(2)
    assert Sizes(12, 2**20, (32, 8, 128), torch.bfloat16, 1, 48.0).fits(1)
    assert not Sizes(12, 2**20, (32, 8, 128), torch.bfloat16, 1, 48.0, new=1).fits(1)


def test_a_short_cache_is_measured_over_so_many_layers_that_no_cache_of_a_chip_holds_them():
    gpu = torch.device("cuda")
    for S, layers in ((8192, 16), (131_072, 1), (1 << 20, 1)):
        assert Sizes(1, S, (32, 8, 128), torch.bfloat16, 1, 48.0).layers(gpu) == layers


def test_the_peer_gets_what_it_expects(monkeypatch):
    """Keys and values for each query head, its shard as it is, and its Triton kernel only where it can be."""
    q, k, v = (torch.randn(2, n, s, D) for n, s in ((H, 1), (G, 30), (G, 30)))
    seen = []

    def theirs(q, k, v, eps=1e-8, shard_kv_seq=True, use_triton=None):
        assert q.shape[:2] == k.shape[:2] == v.shape[:2] and shard_kv_seq is False
        seen.append(use_triton)
        return (q @ k.mT * D**-0.5).softmax(-1).double() @ v.double()

    monkeypatch.setitem(sys.modules, "ring_attention_pytorch", SimpleNamespace(tree_attn_decode=theirs))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for function in (peers.tree_attn_decode, peers.tree_attn_decode_plain):
        out = function(q, *function.prepare(k, v, H), group=None)
        assert out.dtype == q.dtype and torch.allclose(out, expected, atol=1e-6)
    assert seen == [None, False]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--cached", "0"], "--cached: expected numbers > 0, got 0"),
        (["--behind", "-1"], "--behind: expected numbers >= 0, got -1"),
        (["--heads", "4", "3", "8"], "expected H, G, D > 0 with H divisible by G, got 4 3 8"),
        (["--appends", "0"], "--appends: expected a number > 0, got 0"),
        (["--parts", "prefill"], "--parts prefill: expected at least two ranks, since one has nobody to send to"),
        (["--compare", "math:pi"], "--compare math:pi: expected a function, got float"),
        (["--json", "no/such/folder/x.json"], "--json: expected a file that this user may write"),
    ],
)
def test_bad_arguments_are_refused(argv, says, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["--decode", *argv])
    said = capsys.readouterr()
    assert end.value.code == 2 and says in said.err and said.err.startswith("ringlearn.bench") and not said.out


def test_what_the_pages_say_of_one_gpu_is_in_the_record():
    record = load("2026-11-29-decode-h200.json")
    ours = {(row["cached"], row["graph"]): row for row in record["attention"]
            if (row["way"], row["batch"]) == ("one device", 1)}  # fmt: skip
    of_sum = [round(100 * ours[S, True]["of_sum"]) for S in (8192, 32_768, 131_072, 524_288, 1_048_576)]
    assert of_sum == [104, 101, 110, 106, 106]
    cudnn = {row["cached"]: row["ms"] for row in record["attention"]
             if (row["way"], row["batch"], row["graph"]) == ("SDPA cuDNN", 1, True)}  # fmt: skip
    assert all(abs(ms / ours[S, True]["ms"] - 1) < 0.04 for S, ms in cudnn.items())
    assert min(row["ms"] for (_, graph), row in ours.items() if not graph) == pytest.approx(0.14, abs=0.005)
    steps = {(row["cached"], row["graph"]): row for row in record["appends"]}
    over = {S: f"{row['ms'] / row['formula_ms']:.2f}" for (S, graph), row in steps.items() if graph}
    assert over.pop(8192) == "1.14" and min(over.values()) == "0.93" and max(over.values()) == "1.07"
    page = (ROOT / "docs" / "decoding.md").read_text()
    told = [f"{1e3 * steps[131_072, graph]['ms']:.0f} µs" for graph in (True, False)]
    told += [f"{steps[1_048_576, graph]['ms']:.2f} ms" for graph in (True, False)]
    assert told == ["131 µs", "274 µs", "1.00 ms", "1.16 ms"] and all(words in page for words in told)

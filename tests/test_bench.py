"""The measurement runs on gloo processes, says what it did and refuses what makes no sense; the pictures say it too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_ranks
import forked
import pytest
import torch

import ringlearn as rl
from ringlearn.attention import DOUBLE_RING, RING, hybrid
from ringlearn.attention.call import attention_over_ranks
from ringlearn.attention.inputs import Request
from ringlearn.attention.table import STRATEGIES
from ringlearn.bench import __main__ as bench
from ringlearn.bench import candidates as bench_candidates
from ringlearn.bench import options as bench_options
from ringlearn.bench import peers, rows, table, timing
from ringlearn.bench import plot as pictures
from ringlearn.bench.masks import mask_choice
from ringlearn.bench.silent import without_messages
from ringlearn.costs.balance import ring_balance
from ringlearn.costs.double_ring import double_ring_bytes
from ringlearn.costs.problem import Problem
from ringlearn.costs.ulysses import hybrid_bytes
from ringlearn.launch import command_line

RANKS = Path(bench_ranks.__file__)
ROOT = RANKS.parents[1]
SMALL = ["--tokens", "64", "128", "--heads", "4", "2", "16", "--dtype", "float32", "--repeats", "2"]


COMPARED = ("gathered", "own_keys_only", "not_on_this_machine", "of_another_shape", "values_only")


def torchrun(*argv: str) -> forked.CompletedProcess:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "-m", "ringlearn.bench", *argv]
    return forked.run(command, timeout=120, cwd=ROOT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with everything in it: what it printed, and its record."""
    file = tmp_path_factory.mktemp("bench") / "ring.json"
    functions = [f"{RANKS}:{name}" for name in COMPARED]
    layouts = ["--layouts", "zigzag", "striped"]
    done = torchrun(*SMALL, *layouts, "--overlap", "--graph", "--json", str(file), "--compare", *functions)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text()), file


def test_every_way_has_a_row_for_every_length(run):
    _, record, _ = run
    layouts = ("zigzag", "striped")
    names = [("one device", None), *(("ring", x) for x in layouts)]
    names += [(name, x) for name in COMPARED for x in layouts]
    got = [(row["tokens_per_rank"], row["way"], row["layout"]) for row in record["rows"]]
    assert got == [(s, *name) for s in (64, 128) for name in names]


def test_a_row_says_what_was_measured(run):
    _, record, _ = run
    for row in record["rows"]:
        if row["problem"]:
            continue
        for kind in ("forward", "forward_backward"):
            low, high = row[f"{kind}_range_ms"]
            assert 0 < low <= row[f"{kind}_ms"] <= high
            assert row[f"{kind}_peak_mib"] is None  # only GPUs say it
        s, both = row["tokens_per_rank"], row["ranks"] if row["way"] != "one device" else 1
        scores = s * both * (s * both + 1) / 2 / both
        assert row["forward_tflops"] == pytest.approx(4 * 4 * 16 * scores / row["forward_ms"] / 1e9)
        assert row["forward_backward_tflops"] == pytest.approx(14 * 4 * 16 * scores / row["forward_backward_ms"] / 1e9)
        assert row["graph"] is False and row["not_captured"] == "there is no GPU"
        assert not [name for name in row if name.startswith("_")]
    first = record["rows"][0]
    assert first["way"] == "one device" and first["forward_fraction"] == first["forward_backward_fraction"] == 1
    assert record["shape"] == {"H": 4, "G": 2, "D": 16, "B": 1, "dtype": "float32", "mask": "causal"}
    assert record["hardware"]["ranks"] == 2 and record["hardware"]["backend"] == "gloo"
    assert record["transports"] == {"auto": "gloo"} and record["agreement_ms"] > 0
    assert record["command"].startswith("torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 64 128 --heads 4 2 16")


def test_rings_say_what_they_send_and_what_does_not_hide(run):
    _, record, _ = run
    for row in record["rows"]:
        assert ("exposed" in row) == ("forward_bytes" in row) == (row["way"] == "ring")
        if row["way"] == "ring":
            s = row["tokens_per_rank"]
            assert row["forward_bytes"] == row["backward_bytes"] == 2 * 2 * s * 16 * 4  # k, v; dk, dv: one hop each
            assert row["exposed"].keys() == {"forward", "forward_backward"} and max(row["exposed"].values()) < 1


def test_errors_tell_right_from_wrong(run):
    _, record, _ = run
    for row in record["rows"]:
        if row["way"] == "own_keys_only":
            assert row["error"]["out"] > 0.1
        elif row["way"] == "values_only":
            assert row["error"]["dq"] == row["error"]["dk"] == 1 and row["error"]["dv"] > 0.1
        elif row["problem"] is None:
            assert row["error"].keys() == {"out", "dq", "dk", "dv"} and max(row["error"].values()) < 1e-6


def test_what_cannot_run_says_why_and_the_others_go_on(run):
    text, record, _ = run
    row = next(row for row in record["rows"] if row["way"] == "not_on_this_machine")
    assert row["problem"] == "NotImplementedError: needs another machine" and "forward_ms" not in row
    assert "not_on_this_machine, striped  NotImplementedError: needs another machine" in text
    problems = {row["problem"] for row in record["rows"] if row["way"] == "of_another_shape"}
    assert "ValueError: expected a tensor of q's shape, (1, 4, 64, 16), got (1, 4, 64, 1)" in problems


def test_the_table_is_what_is_printed(run):
    text, record, _ = run
    assert table.table(record["rows"]) in text
    assert text.count("ring, gloo, striped: no graph: there is no GPU") == 1
    assert "comparing arguments, not in these times: " in text


def test_strategies_of_two_axes_have_a_row_for_every_mesh():
    strategies = ["--strategies", "ring", "hybrid", "double-ring", "--inner", "2", "1", "2", "--overlap"]
    shape = ["--tokens", "24", "--heads", "4", "2", "8", "--dtype", "float32", "--repeats", "1"]
    found = rl.launch(bench_ranks.meshes, 4, [*shape, *strategies])
    kv = 2 * 2 * 24 * 8 * 4  # a shard of k, v
    for names, measured in found:
        assert names == ["gloo", "mesh of 2", "mesh of 1"]
        ways = [("hybrid", [2, 2]), ("hybrid", [4, 1]), ("double-ring", [2, 2]), ("double-ring", [4, 1])]
        assert [(row["way"], row["mesh"]) for row in measured] == [("one device", None), ("ring", None), *ways]
        for row in measured[1:]:
            assert row["problem"] is None and row["transport"] == "gloo" and row["error"].keys() >= {"out", "dk"}
            assert max(row["error"].values()) < 1e-6, row
            assert row["exposed"].keys() == {"forward", "forward_backward"} and max(row["exposed"].values()) < 1
        ring, hybrid, _, double, outer_only = (row["forward_bytes"] for row in measured[1:])
        assert ring == double == outer_only == 3 * kv
        # half of the heads of q, k, v to the other rank of the node, half of out and lse back; k, v to the other node
        assert hybrid == 24 * 4 * (2 * 8 + 2 * 8 + 2 * 8 + 2) + kv
    text = table.table(found[0][1])
    assert "double-ring 2 x 2, gloo" in text and "double-ring 4 x 1, gloo" in text


@pytest.mark.parametrize("what", ["rates", "overlap"])
def test_a_picture_is_drawn_from_the_files(run, what, tmp_path, capsys):
    bench.main(["--plot", str(run[2]), "--plot-what", what, "--out", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert capsys.readouterr().out == f"wrote {tmp_path / 'x.png'}\n"


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--json", "no/such/folder/x.json"], "--json: expected a file that this user may write: [Errno 2]"),
        (["--json", str(ROOT)], "--json: expected a file that this user may write: [Errno 21]"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(argv, says, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_a_full_disk_ends_no_measurement(monkeypatch, capsys):
    """The table is printed, the reason too, and the exit code is that of a failure."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)

    def exit_with(code):
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", exit_with)
    try:
        with pytest.raises(SystemExit) as end:
            bench.main([*SMALL, "--json", "/dev/full"])
    finally:
        torch.distributed.destroy_process_group()
    said = capsys.readouterr()
    assert end.value.code == 1 and "one device" in said.out
    assert "error: --json: /dev/full cannot be written: [Errno 28]" in said.err


@pytest.mark.parametrize(
    "what, out, says",
    [
        ("rates", "no/x.png", "--out: expected a file that this user may write"),
        ("memory", "x.png", "none of these files says anything about peak beyond the inputs"),
    ],
)
def test_a_picture_that_cannot_be_drawn_or_written(run, what, out, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["--plot", str(run[2]), "--plot-what", what, "--out", str(tmp_path / out)])
    assert end.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "argv, says",
    [
        (["--tokens", "0"], "--tokens: expected numbers > 0, got 0"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
        (["--heads", "4", "3", "8"], "expected H, G, D > 0 with H divisible by G, got 4 3 8"),
        (["--repeats", "0"], "--repeats: expected a number > 0, got 0"),
        (["--layouts", "spiral"], "invalid choice: 'spiral'"),
        (["--inner", "2"], "--inner: only hybrid and double-ring have an inner axis; add them to --strategies"),
        (["--strategies", "hybrid", "--inner", "1", "3"], "--inner: expected a divisor of the 2 ranks, got 3"),
        (["--strategies", "double-ring", "--inner", "0"], "--inner: expected a divisor of the 2 ranks, got 0"),
        (["--kernel", "warp"], "kernel: expected None, 'auto'"),
        (["--compare", "nothing"], "expected module:function or file.py:function, got 'nothing'"),
        (["--compare", "nowhere.py:f"], "--compare nowhere.py:f: FileNotFoundError"),
        (["--compare", "math:g"], "--compare math:g: AttributeError"),
        (["--compare", "math:pi"], "--compare math:pi: expected a function, got float"),
        (["--mask", "documents"], "--mask: expected causal, full, documents:N"),
        (["--mask", "window:0"], "window:W, or documents:N+window:W, got 'window:0'"),
        (["--mask", "window:4:equal"], "got 'window:4:equal'"),
        (
            ["--mask", "causal", "documents:3"],
            "--mask documents:3: expected the number of documents to be a multiple of the 2 ranks",
        ),
        (["--mask", "documents:66", "--tokens", "32"], "at most 64, one per token; got 66"),
        (["--plot", "nothing.json"], "--plot nothing.json: "),
    ],
)
def test_bad_arguments_are_refused_by_rank_0(argv, says, rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(command_line, "SECONDS_TO_PRINT", 0)
    with pytest.raises(SystemExit) as stopped:
        bench.main(argv)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and (says in said.err and said.err.count("\n") == 1 if rank == 0 else said.err == "")


def test_without_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bench.main([])
    assert stopped.value.code == 2 and "torchrun --nproc-per-node 2 -m ringlearn.bench" in capsys.readouterr().err


def test_under_torchrun_it_is_said_once():
    done = torchrun(*SMALL, "--transport", "symmetric")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("ringlearn.bench: error: ") == 1
    assert 'transport="symmetric" cannot be used: rank 0: it moves data between GPUs' in done.stderr
    assert "exitcode  : 2 " in done.stderr and "exitcode  : 1 " not in done.stderr


def test_help_is_printed_by_one_rank(monkeypatch, capsys):
    for rank, printed in ("0", True), ("1", False):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            bench.main(["--help"])
        assert ("--graph-compare" in capsys.readouterr().out) == printed


# ---- How it is measured ---------------------------------------------------------------------------------------------


def test_ways_take_turns_in_orders_that_change(monkeypatch):
    made = []
    monkeypatch.setattr(timing, "meet", lambda device, group: made.append("|"))
    world = SimpleNamespace(device=torch.device("cpu"), group=None)
    calls = [lambda: made.append("a"), lambda: made.append("b")]
    times = timing.in_turn(calls, [True, False], 8, world)
    first, *turns, last = "".join(made).split("|")
    rounds = {(one, other) for one, other in zip(turns[::2], turns[1::2], strict=True)}
    assert rounds == {("aa", "b"), ("b", "aa")} and first == last == ""
    assert [len(rounds) for rounds in times] == [8, 8]


def test_in_a_loop_the_first_two_calls_do_not_count(monkeypatch):
    seconds = iter([9.0, 8.0, 0.003, 0.001, 0.002])
    monkeypatch.setattr(timing, "once", lambda call, device: next(seconds))
    assert timing.in_a_loop(lambda: None, 3, torch.device("cpu")) == pytest.approx(2.0)
    assert next(seconds, None) is None


def test_the_failure_of_one_rank_is_known_to_all(monkeypatch):
    monkeypatch.setattr(timing, "everyone", lambda value, group: [value, None])
    assert timing.attempt(lambda: 1 / 0, None) == (None, "ZeroDivisionError: division by zero")
    assert timing.attempt(lambda: 7, None) == (7, None)
    monkeypatch.setattr(timing, "everyone", lambda value, group: [value, "KeyError: 'theirs'"])
    assert timing.attempt(lambda: 7, None) == (None, "KeyError: 'theirs'")

    def gone(value, group):
        raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0")

    monkeypatch.setattr(timing, "everyone", gone)
    with pytest.raises(ZeroDivisionError):  # what broke the connection, not that it is broken
        timing.attempt(lambda: 1 / 0, None)

    def broken():
        raise rl.worlds.WorldError("the ranks lost each other")

    with pytest.raises(rl.worlds.WorldError):
        timing.attempt(broken, None)


def test_a_peak_is_what_the_call_adds_to_its_inputs_with_symmetric_memory(monkeypatch):
    tensors = [SimpleNamespace(device=torch.device("cuda"), nbytes=100, grad="of the call before") for _ in range(4)]
    happened = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: happened.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    world = SimpleNamespace(reserved=64)
    seconds, peak = timing.peak(lambda: happened.append("call"), tensors, world)
    assert peak == 1000 - 400 + 64 and seconds > 0 and happened == ["reset", "call"]
    assert timing.peak(lambda: None, tensors, None)[1] == 600
    assert [t.grad for t in tensors] == [None] * 4


def test_what_the_ways_before_have_left_is_freed():
    buffers = rl.worlds.distributed.wires.Buffers()
    buffers.take(10, torch.float32, torch.device("cpu"))
    q = torch.ones(3, requires_grad=True)
    q.grad = torch.ones(3)
    timing.tidy([SimpleNamespace(_buffers=buffers)], [q])
    assert q.grad is None and not buffers._pool


def test_only_what_can_be_captured_is(monkeypatch):
    monkeypatch.setattr(bench_candidates, "fastest", lambda device, dtype: [])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    one = dict(device=torch.device("cuda"), size=2, rank=0, group=None, shape=(2,))
    worlds = {name: SimpleNamespace(**one, transport=name) for name in ("nccl", "symmetric")}
    worlds["mesh of 2"] = SimpleNamespace(**one | {"shape": (1, 2)}, transport="nccl")

    def reasons(*argv):
        argv = [*argv, "--compare", "math:sqrt", "--strategies", "ring", "ulysses", "double-ring"]
        options = bench_options.parse(argv)
        return {
            (one.name, one.transport): one.not_captured
            for one in bench_candidates.candidates(64, rows.CAUSAL, options, worlds)
        }

    expected = {
        ("one device", None): None,
        ("ring", "nccl"): "the capture of messages over nccl may hang",
        ("ring", "symmetric"): None,
        ("ulysses", "nccl"): "the capture of messages over nccl may hang",
        ("double-ring", "nccl"): "the capture of messages over nccl may hang",
        ("sqrt", None): "only with --graph-compare",
    }
    options = bench_options.parse(["--strategies", "ring", "ring-self-attention", "--kernel", "sdpa"])
    found = {one.name: one.kernel for one in bench_candidates.candidates(64, rows.CAUSAL, options, worlds)}
    assert (found["ring"], found["ring-self-attention"]) == ("sdpa", None)  # it computes scores without a kernel
    assert reasons() == expected
    assert reasons("--graph-compare") == {**expected, ("sqrt", None): None}


@pytest.mark.parametrize(
    "strategy, layout, hops",
    [
        (RING, rl.zigzag, [3, 5]),
        (RING, rl.contiguous, [3, 5]),
        (DOUBLE_RING, rl.zigzag, [3, 5]),
        (hybrid(RING), rl.zigzag, [3, 3]),  # two trades in the node, and a hop
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_strategy_without_messages_makes_the_same_kernel_calls(strategy, layout, hops):
    events = []
    for made in (strategy, without_messages(strategy)):
        world = rl.SimulatedWorld((2, 2) if strategy.axes == 2 else 4)
        q, k, v = (torch.randn(1, heads, 32, 8, requires_grad=True) for heads in (4, 2, 2))
        shards = world.shard(q, k, v, layout=layout)
        out = attention_over_ranks(Request("bench", *shards, rl.causal), lambda made=made: made).unshard()
        calls = [(e.rank, e.name, e.tile) for e in world.trace.select("compute")]
        messages = [world.trace.messages(0)]
        out.sum().backward()
        calls += [(e.rank, e.name, e.tile) for e in world.trace.select("compute")]
        events.append((sorted(calls, key=str), [*messages, world.trace.messages(0)]))
    (calls, messages), (still, silence) = events
    assert still == calls and len(calls) >= 2 * (4 if layout is rl.zigzag else 2)
    assert messages == hops and silence == [0, 0]


def test_bytes_are_those_of_the_program():
    def sent(P, backward=True):
        problem = Problem(100 * P, (1, P), 4, 2, 16, backward=backward, layout=rl.zigzag)
        return bench_candidates.sent_bytes(STRATEGIES["ring"], rows.CAUSAL, problem)

    shard = 2 * 2 * 100 * 16 * 2  # k, v of 100 tokens in two bytes
    assert sent(1) == [0, 0] and sent(4, backward=False) == [3 * shard]
    assert sent(4) == [3 * shard, 2 * shard + 3 * 2 * shard]


@pytest.mark.parametrize("name, costs", [("hybrid", hybrid_bytes), ("double-ring", double_ring_bytes)])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 2), (2, 1), (3, 2)])
def test_bytes_over_two_axes_are_those_of_the_formulas(name, costs, mesh):
    problem = Problem(100 * mesh[0] * mesh[1], mesh, 4, 2, 16, backward=True, layout=rl.zigzag)
    expected = [sum(costs(problem, backward=backward).values()) for backward in (False, True)]
    assert bench_candidates.sent_bytes(STRATEGIES[name], rows.CAUSAL, problem) == expected


MASKED = ["causal", "documents:6", "documents:4:equal+window:9", "window:20", "full"]


def test_every_mask_has_rows_whose_numbers_are_right():
    shape = ["--tokens", "50", "--heads", "4", "2", "16", "--batch", "2", "--dtype", "float32", "--repeats", "1"]
    compared = ["--compare", f"{RANKS}:own_keys_only", f"{RANKS}:masked"]
    for found in rl.launch(bench_ranks.masks, 2, [*shape, *compared, "--mask", *MASKED]):
        assert list(found) == MASKED
        for name, measured in found.items():
            one, ring, unmasked, masked = measured
            assert {r["mask"] for r in measured} == {name}
            assert max(max(r["error"].values()) for r in (one, ring, masked)) < 1e-6, name
            causal_only = "NotImplementedError: it computes only causal attention, since it takes no mask="
            assert unmasked["problem"] == (None if name == "causal" else causal_only)
            choice = mask_choice(name)
            for r, tokens in ((one, 50), (ring, 100)):
                lengths = choice.lengths(50, 2, share=tokens // 50)
                scores = int(choice.mask(lengths).dense(tokens, tokens).sum()) * 50 / tokens
                assert r["forward_tflops"] == pytest.approx(4 * 2 * 4 * 16 * scores / r["forward_ms"] / 1e9)
            assert len(lengths) == max(1, choice.documents) and sum(lengths) == 100
            assert ring["balance"] == ring_balance(choice.mask(lengths), 100, 2, rl.zigzag).ratio


def test_a_long_sequence_is_on_no_rank_as_a_whole():
    argv = ["--tokens", "48", "--heads", "2", "1", "8", "--dtype", "float32", "--repeats", "1", "--forward-only"]
    limits = ["96", "95"]
    for found in rl.launch(bench_ranks.lengths_drawn, 2, argv, limits):
        assert [(set(lengths), errors) for lengths, errors in found] == [({48, 96}, True), ({48}, False)]


def test_torchs_context_parallel_is_asked_rightly():
    for errors in rl.launch(bench_ranks.torchs_own, 2):
        assert len(errors) == 4 and max(errors.values()) < 1e-5, errors


def test_torchs_flex_context_parallel_is_asked_rightly():
    for errors in rl.launch(bench_ranks.torchs_flex, 2, ["causal", "documents:4:equal", "documents:4:equal+window:50"]):
        assert len(errors) == 9 and max(errors.values()) < 1e-5, errors


def test_torchs_context_parallel_refuses_a_layout_that_it_does_not_have():
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ValueError, match="knows the layouts zigzag and contiguous, got striped"):
        peers.torch_context_parallel(q, q, q, layout="striped", group=None)


# ---- Rows, tables, pictures: from numbers that nobody measured ------------------------------------------------------


def row(way, s, tflops, **more):
    shape = {"tokens_per_rank": s, "ranks": 2, "graph": False, "not_captured": None, "problem": None}
    shape |= {"way": way, "transport": None, "layout": None if way == "one device" else "zigzag", "kernel": "auto"}
    for kind in ("forward", "forward_backward"):
        shape |= {f"{kind}_ms": 1234.5678, f"{kind}_tflops": tflops, f"{kind}_peak_mib": 64 * s / 1024}
    return shape | more


def test_fractions_are_of_the_best_that_one_device_can_do():
    some = [row("one device", 64, 200.0), row("one device", 64, 400.0), row("ring", 64, 300.0), {"problem": "no"}]
    rows.fractions(some)
    assert [r.get("forward_fraction") for r in some] == [0.5, 1, 0.75, None]
    assert [r.get("forward_backward_fraction") for r in some] == [0.5, 1, 0.75, None]


def test_labels_say_what_differs():
    ring = row("ring", 64, 1.0, transport="nccl")
    striped, fast = {**ring, "layout": "striped"}, {**ring, "kernel": "cudnn", "graph": True}
    one = row("one device", 64, 1.0)
    assert [table.label(r, [one, ring]) for r in (one, ring)] == ["one device", "ring, nccl"]
    assert table.label(striped, [one, ring, striped]) == "ring, nccl, striped"
    assert table.label(fast, [one, ring, fast]) == "ring, nccl, cudnn, graph"
    other = {**one, "kernel": "fa4"}
    assert [table.label(r, [one, other, ring]) for r in (one, other, ring)] == [
        "one device, auto",
        "one device, fa4",
        "ring, nccl",
    ]
    packed = {**ring, "mask": "documents:8"}
    assert table.label(packed, [one, packed, {**packed, "mask": "causal"}]) == "ring, nccl, documents:8"


def test_a_table_is_in_columns():
    error = {"out": 2e-3, "dq": 1e-3, "dk": 3e-3, "dv": 2e-3}
    exposed = {"forward": 0.034, "forward_backward": -0.001}
    some = [
        row("one device", 2048, 400.0),
        row("ring", 131072, 390.0, transport="nccl", error=error, exposed=exposed, not_captured="it may hang"),
        row("other", 131072, 0.0, problem="OutOfMemoryError: CUDA out of memory"),
    ]
    rows.fractions(some)
    top, head, *lines, note = table.table(some).split("\n")
    assert top.split() == "ms TFLOP/s per rank of one device peak MiB exposed error".split()
    assert head.split() == ["tokens/rank", "way", *["fwd", "fwd+bwd"] * 5, "out", "grads"]
    assert len({len(line) for line in (head, *lines[:2])}) == 1 and len(head) < 160
    values = "1234.568 1234.568 390.0 390.0 97.5% 97.5% 8192 8192 3.4% -0.1% 2.0e-03 3.0e-03"
    assert lines[1].split() == ["131,072", "ring,", "nccl", *values.split()]
    assert lines[2].endswith("other       OutOfMemoryError: CUDA out of memory")
    assert note == "ring, nccl: no graph: it may hang"
    some[0].pop("forward_backward_tflops")
    assert "exposed" not in table.table(some[:1])


@pytest.fixture
def record():
    some = []
    for s in (2048, 32768, 1048576):
        some += [row("one device", s, 500.0), row("ring", s, 450.0, transport="nccl", exposed={"forward": 0.1})]
        some.append(row("other", s, 300.0) if s < 10**6 else {**row("other", s, 0.0), "forward_tflops": None})
    return {"rows": some, "hardware": {"device": "made up", "ranks": 2}, "agreement_ms": 1.0}


def test_rates_are_drawn(record):
    figure = pictures.rates([record])
    assert [ax.get_title() for ax in figure.axes] == ["forward", "forward and backward"]
    forward = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(forward) == ["one device", "ring, nccl", "other"]
    assert list(forward["ring, nccl"].get_xdata()) == [2048, 32768, 1048576]
    assert list(forward["ring, nccl"].get_ydata()) == [450] * 3
    assert list(forward["other"].get_xdata()) == [2048, 32768]  # what could not be measured has no point
    assert len({(line.get_color(), line.get_marker()) for line in forward.values()}) == 3
    figure.canvas.draw()
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["2k", "32k", "1M"]
    assert "made up" in figure.get_supxlabel() and figure.axes[0].get_ylim()[0] == 0


def test_memory_and_overlap_are_drawn(record):
    figure = pictures.memory([record, record])
    assert list(figure.axes[1].lines[0].get_ydata()) == [128, 128, 2048, 2048, 65536, 65536]
    assert figure.axes[0].get_yscale() == "log"
    figure = pictures.overlap([record])
    assert [line.get_label() for line in figure.axes[0].lines] == ["ring, nccl"] and len(figure.axes) == 1

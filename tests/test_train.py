"""The training program makes the same steps on any number of ranks, also when it was stopped in between."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
import train_programs
from torch.distributed.checkpoint import FileSystemReader

import ringlearn as rl
from ringlearn import nn as rnn
from ringlearn import text
from ringlearn.costs import training as training_costs
from ringlearn.costs.one_device import attention_flops
from ringlearn.launch.pool import Pool
from ringlearn.layouts import LAYOUTS
from ringlearn.train import Recall, StandardLibrary, accuracy_by_distance, checkpoint, lr_at, run, train
from ringlearn.train import __main__ as program
from ringlearn.train.options import parse, parser

ROOT = Path(train_programs.__file__).parents[1]
FILE = "tests/train_programs.py"
SMALL = ["--dtype", "float64", "--tokens", "53", "--width", "16", "--batch", "4", "--steps", "8", "--warmup", "2"]


def losses_of(*argv):
    return train(parse([*SMALL, *map(str, argv)]))


def check(got, want, tolerance=1e-9):
    assert len(got) == len(want) and max(abs(a - b) for a, b in zip(got, want)) < tolerance, (got, want)


@pytest.fixture(scope="module")
def one():
    """Eight steps on one device."""
    return losses_of()


@pytest.fixture(scope="module")
def folder(one, tmp_path_factory):
    """Saved after four steps by four processes: two sequences at once, sharded parameters."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        [*SMALL, "--dp", "2", "--fsdp", "--decay", "8", "--steps", "4", "--save", str(folder / "fsdp")],
        [*SMALL, "--layout", "striped", "--accumulate", "2", "--checkpoint-layers"],
        [*SMALL, "--steps", "4", "--decay", "8", "--strategy", "hybrid"],
        [*SMALL, "--steps", "4", "--decay", "8", "--strategy", "double-ring", "--inner", "2", "--dp", "2", "--fsdp"],
    ]
    with Pool(4, backend="gloo") as pool:
        results = pool.run(f"{FILE}:ranks", *runs)
    accumulated = losses_of("--accumulate", 2)
    for first, second, hybrid, double_ring in results:
        for losses in (first, hybrid, double_ring):
            check(losses, one[:4])
        check(second, accumulated)
    return folder


# The same steps everywhere


@pytest.mark.parametrize(
    "options",
    [
        ["--simulate", "4"],
        ["--simulate", "3", "--layout", "contiguous", "--block", "7"],
        ["--simulate", "2", "--layout", "striped", "--checkpoint-layers"],
        ["--simulate", "6", "--strategy", "double-ring"],
        ["--simulate", "2", "--strategy", "hybrid", "--inner", "2"],
    ],
    ids=" ".join,
)
def test_simulated_ranks_make_the_steps_of_one_device(one, options):
    check(losses_of(*options), one)
    assert one[-1] < one[0]


def test_saved_on_four_ranks_resumed_on_two_and_on_one(one, folder):
    for name in ("two", "one", "simulated"):
        subprocess.run(["cp", "-r", folder / "fsdp", folder / name], check=True)
    with Pool(2, backend="gloo") as pool:
        for (rest,) in pool.run(f"{FILE}:ranks", [*SMALL, "--save", str(folder / "two")]):
            check(rest, one[4:])
        for said in pool.run(f"{FILE}:folders_of_their_own", folder, SMALL):
            assert "expected a folder that all ranks share" in said
        for said in pool.run(f"{FILE}:refusals", folder, SMALL):
            for words, text in said.items():
                assert words in text, (words, text)
    check(losses_of("--save", folder / "one"), one[4:])
    check(losses_of("--save", folder / "simulated", "--simulate", 3), one[4:])
    assert losses_of("--save", folder / "one") == []  # it has made its steps


def test_bf16_autocast_is_near_and_parameters_stay_float32(tmp_path):
    options = ["--tokens", "64", "--steps", "5", "--warmup", "2", "--width", "32"]
    exact, rounded, ranks = (
        train(parse([*options, "--dtype", dtype, *more]))
        for dtype, *more in (
            ("float64",),
            ("bfloat16", "--save", str(tmp_path)),
            ("bfloat16", "--simulate", "4", "--checkpoint-layers"),
        )
    )
    for losses in (rounded, ranks):
        assert 1e-6 < max(abs(a - b) for a, b in zip(exact, losses, strict=True)) < 0.02
    saved = FileSystemReader(checkpoint.latest(tmp_path)).read_metadata().state_dict_metadata
    dtypes = {x.properties.dtype for name, x in saved.items() if name.startswith("model")}
    assert dtypes == {torch.float32}


# Interruptions


def test_a_kill_in_the_middle_of_a_save_leaves_the_last_checkpoint(one, tmp_path):
    command = [sys.executable, FILE, *SMALL, "--save", str(tmp_path), "--save-every", "3", "--simulate", "2"]
    done = forked.run(command, cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.latest(tmp_path).name == "step-00000003"
    assert (tmp_path / "step-00000006").exists()  # what it left behind
    check(losses_of("--save", tmp_path, "--save-every", 3), one[3:])
    assert checkpoint.latest(tmp_path).name == "step-00000008"
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("ranks", [0, 2])
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, ranks):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks else []
    options = [*SMALL[:-4], "--steps", "100000", "--warmup", "2", "--save", str(tmp_path / "run"), "--print-every", "1"]
    command = [sys.executable, *start, "-m", "ringlearn.train", *options, "--record", str(tmp_path / "record")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 if not ranks else process.wait(60) != 0, "".join(said)
    assert any(line.startswith("interrupted after step") for line in said), "".join(said)
    record = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    last = checkpoint.progress(tmp_path / "run")["step"]
    assert [r["step"] for r in record] == list(range(1, last + 1)) and last < 1000
    want = losses_of("--steps", last + 2, "--decay", 100000)
    rest = losses_of("--save", tmp_path / "run", "--steps", last + 2, "--decay", 100000)
    check([r["loss"] for r in record] + rest, want)


def test_random_numbers_go_on_too(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert checkpoint.load(tmp_path, model, optimizer) is None
    checkpoint.save(tmp_path, model, optimizer, {"step": 7, "row": 40})
    want = torch.rand(3)
    assert checkpoint.load(tmp_path, model, optimizer) == {"step": 7, "row": 40}
    assert torch.equal(torch.rand(3), want)


def test_a_node_is_a_host_where_there_are_several(monkeypatch):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 24), ("GROUP_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    chosen = [parse(["--strategy", "hybrid", "--batch", "24", "--dp", str(dp)]).inner for dp in (1, 2, 3, 4, 24)]
    assert chosen == [8, 6, 4, 3, 1]  # hosts of 8; 12, 8, 6 ranks and 1 that share a sequence
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert parse(["--strategy", "hybrid"]).inner == 12 and parse([]).inner is None


def test_a_run_that_has_made_its_steps_says_so(tmp_path, capsys):
    losses_of("--save", tmp_path, "--steps", 2)
    capsys.readouterr()
    assert losses_of("--save", tmp_path, "--steps", 2) == []
    said = capsys.readouterr().out
    assert f"nothing to do: {tmp_path} is already at step 2; ask for more --steps" in said


def test_a_run_that_goes_on_keeps_its_schedule_and_says_what_changes(tmp_path, capsys):
    want = losses_of("--decay", 4)
    for name in ("same", "other"):
        losses_of("--save", tmp_path / name, "--steps", 4)
    check(losses_of("--save", tmp_path / "same"), want[4:])
    said = capsys.readouterr().out
    assert "the learning rate still falls until step 4, as when the run began" in said and "from here on" not in said
    rest = losses_of("--save", tmp_path / "other", "--weight-decay", 50, "--batch", 8, "--decay", 16)
    said = capsys.readouterr().out
    for words in ("--weight-decay is 50.0; it was 0.1", "--batch is 8; it was 4", "--decay is 16; it was 4"):
        assert f"from here on {words}" in said
    assert "still falls" not in said
    losses_of("--save", tmp_path / "two", "--steps", 4, "--batch", 8, "--decay", 16)
    two = losses_of("--save", tmp_path / "two", "--batch", 8, "--decay", 16)
    assert abs(rest[-1] - two[-1]) > 0.01  # weights have decayed


def flipped(place):
    """One bit, at a place between 0 and 1."""

    def change(content):
        at = int(place * len(content))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return change


SPOILT = {
    "latest names nothing": ("latest", lambda _: b"step-00000099"),
    "latest of another program": ("latest", lambda _: b"global_step3"),
    "progress of another program": ("step-00000002/progress.json", lambda _: b'{"step": 2, "random": {}}'),
    "progress half": ("step-00000002/progress.json", lambda x: x[:50]),
    "no metadata": ("step-00000002/.metadata", None),
    "data half": ("step-00000002/__0_0.distcp", lambda x: x[: len(x) // 2]),
    "a byte of the data": ("step-00000002/__0_0.distcp", flipped(0.7)),
    "a byte of the metadata": ("step-00000002/.metadata", flipped(0.5)),
    "a byte of the random numbers": ("step-00000002/progress.json", flipped(0.5)),
    "progress of an older version": ("step-00000002/progress.json", lambda x: x.replace(b'"checksum"', b'"check sum"')),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_folder_is_refused_and_the_reason_said(tmp_path, name):
    losses_of("--save", tmp_path, "--steps", 2, "--save-every", 1)
    file, change = SPOILT[name]
    if change is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    with pytest.raises(ValueError, match="the last one cannot be read.*another folder.*step-00000001"):
        losses_of("--save", tmp_path, "--steps", 3)
    (tmp_path / "latest").write_text("step-00000001")  # what it says helps
    assert len(losses_of("--save", tmp_path, "--steps", 3)) == 2


def test_two_runs_in_one_folder_and_what_is_not_a_checkpoint_there(tmp_path, monkeypatch):
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "step-0").mkdir()
    losses_of("--save", tmp_path, "--steps", 4, "--save-every", 1)
    names = ["step-0", "step-00000003", "step-00000004", "step-by-step"]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == names

    def other(*_):
        (tmp_path / "latest").write_text("step-00000003")
        return 1.0

    monkeypatch.setattr("ringlearn.train.run.clip", other)
    with pytest.raises(ValueError, match="another run has saved .*step-00000003 here in the meantime"):
        losses_of("--save", tmp_path, "--steps", 5)


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path):
    with pytest.raises(ValueError, match="step 2: expected finite numbers, got loss .* a smaller --lr"):
        losses_of("--save", tmp_path, "--lr", 1e300)
    assert checkpoint.latest(tmp_path) is None


def test_what_cannot_be_written_is_said_before_the_first_step(tmp_path, capsys):
    (tmp_path / "file").touch()
    for argv, words in (
        (["--record", str(tmp_path)], "--record: expected a place where this user may write"),
        (["--record", "/dev/full"], "--record /dev/full: [Errno 28]"),
        (["--save", str(tmp_path / "file" / "x")], f"--save {tmp_path}/file/x: expected a new folder"),
        (["--save", "/proc/x"], "--save: expected a place where this user may write"),
    ):
        with pytest.raises(SystemExit) as end:
            program.main([*SMALL, "--steps", "1", *argv])
        said = capsys.readouterr()
        assert end.value.code == 2 and words in said.err and "step 1/" not in said.out


def test_a_second_ctrl_c_does_not_wait_for_others(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    def ended(code):
        raise RuntimeError(code)

    monkeypatch.setattr(program, "train", interrupted)
    monkeypatch.setattr("os._exit", ended)
    with pytest.raises(RuntimeError, match="130"):
        program.main([])


def test_on_known_gpus_a_line_shows_the_share_of_their_peak(monkeypatch, capsys):
    options = parse(["--tokens", "64", "--steps", "1", "--accumulate", "2", "--dtype", "bfloat16"])
    plain = train(options)
    assert "MFU" not in capsys.readouterr().out  # a CPU has no data sheet here
    # 6 FLOPs for each weight that a token is multiplied by, and attention's, with what the mask hides left out.
    sizes = dict(layers=2, H=4, G=2, D=32)
    tokens = 2 * 4 * 64
    flops = 6 * tokens * (training_costs.weights(**sizes) - 256 * 128)
    flops += 2 * 3 * 2 * attention_flops(64, 4, 32, B=4, causal=True)
    of_a_step, ticks = run._flops, iter(range(100))
    monkeypatch.setattr(run, "_flops", lambda *args: (of_a_step(*args)[0], float(flops)))
    monkeypatch.setattr(run.time, "perf_counter", lambda: 2.0 * next(ticks))
    assert train(options) == plain
    assert "  50% MFU  " in capsys.readouterr().out


def test_help_says_every_default():
    text = " ".join(parser().format_help().split())
    for words in (
        "H G numbers of query heads and of key/value heads [4 2]",
        "that share it [1024]",
        "seed for weights and data [0]",
        f"{{{','.join(LAYOUTS)}}} which tokens each rank holds [zigzag]",
        "compute each layer again in the backward",
    ):
        assert words in text, text
    assert "None" not in text and "[False]" not in text


def test_another_run_is_not_resumed(tmp_path, capsys):
    losses_of("--save", tmp_path, "--steps", 1)
    with pytest.raises(ValueError, match="holds another run: expected seed 0, got 1"):
        losses_of("--save", tmp_path, "--seed", 1)


# Data


def test_windows_of_the_library_are_shifted_by_one_and_have_numbers():
    data = StandardLibrary(50, seed=3, limit=10_000)
    tokens, targets = data.rows(range(100, 140))
    whole = text.standard_library_bytes(10_000)
    for x, y in zip(tokens, targets, strict=True):
        window = text.to_bytes(x)
        assert window in whole and text.to_bytes(y) == whole[whole.index(window) + 1 :][:50] or whole.count(window) > 1
    assert torch.equal(data.rows([117])[0], tokens[17:18])  # whoever asks
    assert not torch.equal(StandardLibrary(50, seed=4, limit=10_000).rows([117])[0], tokens[17:18])
    assert len({bytes(x.tolist()) for x in tokens}) > 35


def test_accuracy_by_distance_counts():
    data = Recall(40, seed=1)
    tokens, targets = data.rows(range(6))
    distances = data.distances(range(6))

    class Knows(torch.nn.Module):
        """Finds the record if it is at most 15 tokens back; else says value 0."""

        def __init__(self):
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens):
            right = torch.nn.functional.one_hot(targets.clamp(min=0), data.vocabulary)
            wrong = torch.nn.functional.one_hot(torch.zeros_like(targets), data.vocabulary)
            return torch.where((distances <= 15)[..., None], right, wrong)

    near, far = accuracy_by_distance(Knows(), [(tokens, targets, distances)], [0, 15, 40])
    asked = distances > 15
    assert near == (0, 15, 1.0, int(((distances > 0) & ~asked).sum()))
    assert far == (15, 40, int((targets[asked] == 0).sum()) / int(asked.sum()), int(asked.sum()))
    assert near[3] + far[3] == 6 * 8 and (targets != rnn.IGNORE).sum() == 6 * 8


def own_keys_only(q, k, v, mask, **_):
    """Attention that never leaves a rank."""
    outs = [torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
            for qkv in zip(q.tensors, k.tensors, v.tensors)]  # fmt: skip
    return rl.Shards(outs, q.world, q.layout, q.length)


@pytest.mark.parametrize("strategy", [rl.ring_attention, own_keys_only])
def test_recall_beyond_a_shard_is_learned_by_the_ring_and_not_by_local_attention(strategy):
    S, ranks, steps, batch, lr = 64, 4, 110, 16, 1e-2
    data, world = Recall(S), rl.SimulatedWorld(ranks, count_memory=False)
    config = rnn.Config(data.vocabulary, width=32, layers=1, heads=4, kv_heads=2, rope_base=1e6)
    model = rnn.Transformer(config, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        rnn.backward(model, [rnn.shard_tokens(world, *data.rows(range(step * batch, (step + 1) * batch)))])
        rnn.clip(model, 1.0)
        optimizer.param_groups[0]["lr"] = lr_at(step, lr, 20, steps)
        optimizer.step()
    numbers = range(1 << 30, (1 << 30) + 32)
    test = rnn.shard_tokens(world, *data.rows(numbers), data.distances(numbers))
    (near, far) = accuracy_by_distance(model, [test], [0, S // ranks, S])
    assert far[3] > 100
    if strategy is own_keys_only:
        assert far[2] < 0.4  # one of four values
    else:
        assert far[2] >= 0.95 and near[2] >= 0.95


def test_the_program_says_what_it_does(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        program.main(["--task", "recall", "--steps", "4", "--tokens", "32", "--width", "16", "--simulate", "2",
                      "--print-every", "2", "--save", str(tmp_path)])  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and "2 simulated ranks" in said[0]
    assert [line.split("  loss")[0] for line in said[1:3]] == ["step 2/4", "step 4/4"]
    assert all(unit in said[1] for unit in ("norm", "tokens/s", "MiB"))
    assert said[3].startswith("saved") and [line.split(":")[0] for line in said[4:]] == [
        "records 1 to 2 tokens back",
        "records 3 to 4 tokens back",
        "records 5 to 8 tokens back",
        "records 9 to 16 tokens back",
        "records 17 to 32 tokens back",
    ]


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--tokens 0", "--tokens: expected a number > 0"),
        ("--heads 3 2", "H by G"),
        ("--width 10", "divisible by 2 H"),
        ("--simulate 0", "ranks >= 1"),
        ("--lr inf", "--lr: expected a finite number"),
        ("--weight-decay -1", "--weight-decay: expected a number >= 0"),
        ("--decay 0", "--decay: expected a number > 0"),
        ("--seed 18446744073709551616", "--seed: expected a number below 2**64"),
        ("--backend gloo", "torchrun"),
        ("--fsdp", "torchrun"),
        ("--save-every 3", "--save DIR"),
        ("--record /no/such/folder/file", "there is no folder"),
        ("--layout spiral", "invalid choice"),
        ("--inner 2", "--inner: only hybrid and double-ring have an inner axis; choose one with --strategy"),
        ("--strategy hybrid --simulate 6 --inner 4", "expected a divisor of the 6 ranks that share a sequence, got 4"),
        ("--strategy double-ring --inner 0", "expected a divisor of the 1 ranks that share a sequence, got 0"),
        ("--task recall --tokens 9", "at least 16"),
        ("--tokens 1000000000", "bytes of the text"),
    ],
)
def test_bad_input_ends_with_code_2_and_the_reason(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        program.main(argv.split())
    assert end.value.code == 2 and words in capsys.readouterr().err

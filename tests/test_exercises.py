"""The torchrun exercises: solutions pass on any number of ranks, and no wrong answer hangs or goes without a message.

Most run on one pool of processes, as torchrun would start them; each file also runs once under torchrun itself.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exercise_ranks
import forked
import pytest
import torch
from exercise_ranks import FOLDER, FUNCTIONS, NAMES
from zoo.exercises import RIGHT, WRONG

from ringlearn.course.checks import model
from ringlearn.course.checks.checker import Wrong, has_blank
from ringlearn.course.checks.exercises import splits as split_exercises
from ringlearn.course.checks.exercises.messages import explain, replay
from ringlearn.course.checks.exercises.runner import Board
from ringlearn.flash import attend
from ringlearn.launch.pool import Pool

ROOT = FOLDER.parent.parent
BLANK = re.compile(r"^( *)# ---- your code[^\n]*\n(.*?)^\1# ---- end of your code ----\n", re.DOTALL | re.MULTILINE)
HANGS_AFTER_SECONDS = 2.0  # the learner's are more
LABELS = ("what happens", "where to look", "likely cause")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, backend=None) as pool:
        yield pool


def judge(pool: Pool, number: str, name: str, size: int = 4) -> tuple[str, str]:
    return pool.run(exercise_ranks.judge, number, name, size, HANGS_AFTER_SECONDS, timeout=120)[0]


def torchrun(file: Path, size: int, *options: str) -> forked.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), str(file)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return forked.run([*command, *options], timeout=150, cwd=ROOT, env=env)


def file_of(number: str, folder: str = ".") -> Path:
    return FOLDER / folder / f"{number}_{NAMES[number]}.py"


# ---- The files ------------------------------------------------------------------------------------------------------


def test_every_exercise_has_a_zoo():
    assert list(NAMES) == list(WRONG) == list(RIGHT) == [f"{i:02}" for i in range(1, len(NAMES) + 1)]


@pytest.mark.parametrize("number", NAMES)
def test_a_solution_differs_from_its_exercise_in_the_blank_only(number):
    exercise, solution = (file_of(number, folder).read_text() for folder in (".", "solutions"))
    (blank,) = BLANK.findall(exercise)
    (filled,) = BLANK.findall(solution)
    assert blank[1].strip() == "..." and "..." not in filled[1]
    assert BLANK.sub("", exercise) == BLANK.sub("", solution)


@pytest.mark.parametrize("number", NAMES)
def test_a_file_is_short_and_says_how_to_run_it(number):
    for folder in (".", "solutions"):
        text = file_of(number, folder).read_text()
        assert len(text.splitlines()) <= 80
        assert f"\n    exercises.{NAMES[number]}({FUNCTIONS.get(number, NAMES[number])}" in text
    command = f"torchrun --nproc-per-node 4 notebooks/exercises/{number}_{NAMES[number]}.py"
    assert command in text and command in (FOLDER / "README.md").read_text()
    assert text.startswith(f'"""Exercise {number}, ') and "\nGoal " in text and "\nGiven " in text


@pytest.mark.parametrize("loss", [1.5, torch.tensor(1.5), torch.tensor(1.5, requires_grad=True)])
def test_what_exercise_10_keeps_of_a_loss_warns_of_nothing(loss):
    """A warning from each rank and step would stand before the verdict."""
    (line,) = re.findall(r"losses\.append\(.*\)", file_of("10").read_text())
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(line, {"torch": torch, "losses": losses, "loss": loss})
    assert losses == [1.5]


# ---- Answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "size"),
    [(n, 4) for n in NAMES] + [(n, 1 if int(n) % 2 else 3) for n in NAMES] + [("03", 2), ("04", 2)],
)
def test_the_solution_is_correct(pool, number, size):
    status, message = judge(pool, number, "solutions", size)
    assert status == "passed", message
    title = f"{number} {NAMES[number].replace('_', ' ')}".replace("all reduce", "all-reduce")
    assert message.startswith(f"{title}: correct on {size} rank{'s' * (size > 1)} (gloo).") and "\n" not in message


@pytest.mark.parametrize(("number", "name"), [(n, fn.__name__) for n in RIGHT for fn in RIGHT[n]])
def test_a_right_answer_passes_in_whatever_words(pool, number, name):
    status, message = judge(pool, number, name, 3)
    assert status == "passed", message


def wrong_answers() -> Iterator[Any]:
    """Number, name and word of each; those that are told the same as one before are part of the full matrix only."""
    for number in WRONG:
        told = set()
        for fn, word in WRONG[number]:
            yield pytest.param(number, fn.__name__, word, marks=[pytest.mark.slow] * (word in told))
            told.add(word)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("number", "name", "word"), list(wrong_answers()))
def test_a_wrong_answer_is_rejected_with_a_message_that_helps(pool, number, name, word):
    status, message = judge(pool, number, name)
    assert status == "failed", message
    assert word in " ".join(message.split()), message
    assert all(label in message for label in LABELS) and max(map(len, message.splitlines())) <= 120
    assert "Traceback" not in message and "gloo/transport" not in message


@pytest.mark.parametrize("number", WRONG)
def test_the_zoo_has_at_least_five_wrong_answers_that_are_all_different(number):
    functions = [case[0] for case in WRONG[number]]
    assert len(set(functions)) == len(functions) >= 5


@pytest.mark.parametrize("number", NAMES)
def test_an_unfilled_blank_gives_one_calm_line(pool, number):
    status, message = judge(pool, number, ".")
    assert (status, message.count("\n")) == ("unwritten", 0)
    assert "not written yet. Fill in every `...` in " in message and file_of(number).name in message


# ---- Under torchrun -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["01", "06", "12"])  # one without a world, one with it, one with a model
def test_the_solution_under_torchrun(number):
    done = torchrun(file_of(number, "solutions"), 2, "--strict")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and ": correct on 2 ranks (gloo)." in done.stdout


def filled(number: str, code: str, folder: Path) -> Path:
    """The exercise with this code in its blank."""
    folder.mkdir(exist_ok=True)
    file = folder / file_of(number).name
    code = "".join(f"    {line}\n" for line in code.splitlines())
    file.write_text(file_of(number).read_text().replace("    ...\n", code))
    return file


def test_a_deadlock_under_torchrun_ends_in_a_message_and_no_traceback(tmp_path):
    done = torchrun(filled("01", "dist.send(token, following)\ndist.recv(arrived, previous)", tmp_path), 3)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "ChildFailed" not in done.stderr
    assert done.stdout.startswith("01 ring pass: not yet, on 3 ranks.\n  what happens   all ranks: waiting for ever in")
    assert "`dist.send(token, following)`" in done.stdout and "all ranks send first" in done.stdout


def test_a_rank_that_gloo_ends_under_torchrun_gives_a_message_and_no_traceback(tmp_path):
    code = "handles = [dist.isend(torch.cat([token, token]), following), dist.irecv(arrived, previous)]\n"
    done = torchrun(filled("01", code + "for handle in handles: handle.wait()", tmp_path), 2)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "ChildFailed" not in done.stderr
    assert "2 elements of float32" in done.stdout


def test_an_unfilled_blank_under_torchrun():
    done = torchrun(file_of("04"), 2)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == (
        "04 ring forward: not written yet. Fill in every `...` in notebooks/exercises/04_ring_forward.py, then run the "
        "same command again.\n"
    )


def test_where_a_child_cannot_do_the_work_the_process_does_it_itself(tmp_path):
    """As on other systems than Linux: there the thread that watches has to say what is found."""
    hang = filled("01", "dist.recv(arrived, previous)", tmp_path)
    raising = filled("01", "raise ValueError('on purpose')", tmp_path / "raising")
    for file, said in ((hang, "all ranks receive first"), (raising, "on purpose")):
        text = file.read_text().replace("import torch\n", 'import sys, torch\nsys.platform = "other"\n', 1)
        file.write_text(text)
        done = torchrun(file, 2)
        assert done.returncode == 0 and said in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_memory_is_counted_and_equals_the_formulas():
    async def own_rows(comm, q, k, v, positions, mask):
        rows = await comm.all_gather(k, [len(p) for p in positions])
        return attend(q, torch.cat(rows, 2), torch.cat(rows, 2), None, 1.0)

    said = split_exercises.memory_seen(own_rows)
    found = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]+\d", said)]
    others = 48 * 4 * 4 * 8  # rows of others, heads, D, bytes: of k, or of v
    assert found == [others, others, 2 * others, 2 * others, 4 * 16 * 4 * 4 * 8, 4 * 16 * 4 * 4 * 8]


def test_a_zigzag_is_balanced():
    said = split_exercises.balance(64, 4)
    assert said.endswith("520 to 520; with contiguous shards 136 to 904.")  # 1 + ... + 16, and 49 + ... + 64


def test_strict_gives_an_exit_code():
    env = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    for option, code in (("--strict", 1), ("", 0)):
        command = [sys.executable, file_of("01"), option]
        done = forked.run(command, cwd=ROOT, env=os.environ | env, timeout=60)
        assert (done.returncode, done.stdout.count("not written yet")) == (code, 1)


def test_without_torchrun_it_says_how_to_start():
    env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONPATH": str(ROOT)}
    done = forked.run([sys.executable, file_of("02")], cwd=ROOT, env=env, timeout=60)
    assert done.stdout.endswith("\n  torchrun --nproc-per-node 4 notebooks/exercises/02_all_reduce.py\n")
    assert (done.returncode, done.stderr) == (2, "")


# ---- What the checks stand on ---------------------------------------------------------------------------------------


def events(*ranks: str) -> list[list[list]]:
    """ "s1 r0": send to rank 1 and wait, then receive from rank 0 and wait; "is1 ir0 w": post both, then wait."""
    found = []
    for text in ranks:
        rank, open_ = [], []
        for word in text.split():
            if word == "w":
                rank += [["wait", n] for n in open_]
                continue
            number = sum(e[0] == "post" for e in rank)
            kind = "send" if "s" in word else "recv"
            rank.append(["post", number, kind, int(word[-1]), 8, "torch.float32"])
            rank += [] if word[0] == "i" else [["wait", number]]
            open_ += [number] * (word[0] == "i")
        found.append(rank)
    return found


def test_a_replay_counts_turns_and_finds_who_waits():
    assert replay(events("s1 r3", "r0 s2", "s3 r1", "r2 s0")) == 2
    assert replay(events("s1 r2", "r0 s2", "s0 r1")) == 3
    assert replay(events("s1 r3", "r0 s2", "r1 s3", "r2 s0")) == 4
    assert replay(events("is1 ir2 w", "is2 ir0 w", "is0 ir1 w")) == 1
    assert replay(events("", "")) == 0
    with pytest.raises(Wrong, match="rank 0 waits to send to rank 1, rank 1 waits to send to rank 0"):
        replay(events("s1 r1", "s0 r0"))


def test_messages_that_do_not_fit_are_explained():
    assert explain(events("s1 r1", "r0 s0")) is None
    assert "all ranks send first" in explain(events("s1 r1", "s0 r0")).cause
    assert "all ranks receive first" in explain(events("r1 s1", "r0 s0")).cause
    assert "rank 0's send to rank 1 was never met" in explain(events("is1 is1", "r0")).symptom
    other = events("s1", "r0")
    other[1][0][4] = 7
    assert "rank 0 sends 8 elements of float32 to rank 1, whose buffer is for 7" in explain(other).symptom


def test_dots_of_an_index_are_no_blank():
    def written(x):
        return x[..., 0] + x[..., 1:]

    def unwritten(x):
        y = x[..., 0]
        y = ...
        return y

    async def body(comm): ...

    assert not has_blank(written) and has_blank(unwritten) and has_blank(body) and not has_blank(len)


def test_the_first_outcome_of_a_rank_counts(monkeypatch):
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    board = Board()
    board.post(0, 1, {"kind": "right"})
    assert board.failed() is None and board.outcomes(0) == {1: {"kind": "right"}}
    board.post(0, 1, {"kind": "stuck"})
    board.post(0, 0, {"kind": "wrong"})
    assert board.failed() == 0 and board.outcomes(0) == {0: {"kind": "wrong"}, 1: {"kind": "right"}}


def test_the_model_sees_positions_by_their_distance():
    tiny, tokens, at = model.TinyModel(), torch.arange(7) % 5, torch.arange(7)
    logits = tiny(tokens, at, model.dense_causal)
    assert torch.allclose(logits, tiny(tokens, at + 100, model.dense_causal), atol=1e-12)
    assert not torch.allclose(logits, tiny(tokens, at % 4, model.dense_causal), atol=1e-3)
    q, k, v = torch.randn(1, 4, 7, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(model.dense_causal(q, k, v), sdpa, atol=1e-6)

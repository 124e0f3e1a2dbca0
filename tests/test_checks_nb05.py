"""The checkers of notebook 05 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import inspect
import time

import pytest
from course import read
from zoo.nb05 import RIGHT, WRONG
from zoo.rules import assert_unwritten

from ringlearn.course import rendezvous
from ringlearn.course.checks import nb05
from ringlearn.launch.pool import Pool

pytestmark = pytest.mark.alone  # it starts processes and gives them a few seconds

CHECKERS = {"5a": nb05.ring_pass, "5b": nb05.ring_exchange, "5c": nb05.ring}


@pytest.fixture(scope="module")
def pool():
    with Pool(4, backend=None) as pool:
        yield pool


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "COMPUTE_LIMIT", 1.0)


def _name(answer):
    return "-".join(fn.__name__ for fn in answer) if isinstance(answer, tuple) else answer.__name__


WRONG_CASES = [
    pytest.param(key, *case, id=f"{key}-{n}-{_name(case[0])}") for key in WRONG for n, case in enumerate(WRONG[key])
]
RIGHT_CASES = [pytest.param(key, fn, id=f"{key}-{_name(fn)}") for key in RIGHT for fn in RIGHT[key]]


@pytest.mark.parametrize(("exercise", "answer", "stage", "word"), WRONG_CASES)
def test_a_wrong_answer_is_rejected_at_its_stage_with_a_message_that_helps(exercise, answer, stage, word, pool):
    began = time.monotonic()
    result = CHECKERS[exercise](answer, pool, help=2)
    assert not result
    assert (result.status, result.stage) == ("failed", stage), result.message
    assert word in result.message, result.message
    for line in ("what happens", "smallest input", "where to look", "likely cause"):
        assert line in result.message
    assert max(map(len, result.message.splitlines())) < 300
    assert time.monotonic() - began < 15  # never a hang: a message in seconds


@pytest.mark.parametrize(("exercise", "answer"), RIGHT_CASES)
def test_a_right_answer_passes_in_whatever_words(exercise, answer, pool):
    result = CHECKERS[exercise](answer, pool)
    assert result, result.message
    assert result.message.count("\n") == 0


@pytest.mark.parametrize("exercise", CHECKERS)
def test_the_zoo_has_at_least_five_wrong_answers_that_are_all_different(exercise):
    answers = [case[0] for case in WRONG[exercise]]
    assert len(set(answers)) == len(answers) >= 5


PASS = "import torch\nimport torch.distributed as dist\n\n\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def ring_pass(x, rank, P)\n    return x\n", "line 5 is not Python"),
        ("def ringpass(x, rank, P):\n    return x\n", "no function ring_pass"),
        ("nothing\ndef ring_pass(x, rank, P):\n    return x\n", "NameError: name 'nothing' is not defined"),
        ("dist.init_process_group('gloo')\ndef ring_pass(x, rank, P):\n    return x\n", "take the call out"),
        ("def ring_pass(x, rank, P):\n    dist.send(1, 0)\n", "line 6, `dist.send(1, 0)`"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(text, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring_pass.py").write_text(PASS + text)
    result = nb05.ring_pass("ring_pass.py", help=2)
    assert (result.status, result.stage) == ("failed", "value") and word in result.message, result.message


def test_a_file_is_read_anew_each_time(tmp_path, pool):
    file = tmp_path / "ring_pass.py"
    file.write_text(PASS + "def ring_pass(x, rank, P):\n    return x\n")
    assert not nb05.ring_pass(str(file), pool)
    file.write_text(PASS + inspect.getsource(RIGHT["5a"][0]).replace("pass_solution", "ring_pass"))
    assert nb05.ring_pass(str(file), pool)


def test_no_file_and_no_function_are_told_so(tmp_path):
    with pytest.raises(ValueError, match="run the cell that writes it first"):
        nb05.ring_pass(str(tmp_path / "none.py"))
    with pytest.raises(ValueError, match="the name of your file"):
        nb05.ring_pass(3)


@pytest.mark.parametrize("exercise", CHECKERS)
def test_an_untouched_stub_prints_one_calm_line(exercise, tmp_path, capsys):
    (cell,) = (cell for cell in read("05").cells if cell.id == f"exercise-{exercise}")
    file = tmp_path / "stub.py"
    file.write_text(cell.source.partition("\n")[2])
    result = CHECKERS[exercise](str(file))
    assert_unwritten(result, capsys)

"""The checkers of notebook 05 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import inspect
import time

import pytest
from course import read
from zoo.nb05 import RIGHT
from zoo.rules import ZooRules, assert_unwritten

from ringlearn.course import rendezvous
from ringlearn.course.checks import nb05
from ringlearn.launch.pool import Pool

pytestmark = pytest.mark.alone  # it starts processes and gives them a few seconds


@pytest.fixture(scope="module")
def pool():
    with Pool(4, backend=None) as pool:
        yield pool


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "COMPUTE_LIMIT", 1.0)


class TestZoo(ZooRules):
    NUMBER = "05"

    @pytest.fixture(autouse=True)
    def on_the_pool(self, pool):
        self.pool = pool

    def check(self, exercise, fn, **options):
        began = time.monotonic()
        result = self.checkers()[exercise](fn, self.pool, **options)
        assert time.monotonic() - began < 15  # never a hang: a message in seconds
        assert max(map(len, result.message.splitlines())) < 300
        return result


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


@pytest.mark.parametrize("exercise", ["5a", "5b", "5c"])
def test_an_untouched_stub_prints_one_calm_line(exercise, tmp_path, capsys):
    (cell,) = (cell for cell in read("05").cells if cell.id == f"exercise-{exercise}")
    file = tmp_path / "stub.py"
    file.write_text(cell.source.partition("\n")[2])
    assert_unwritten(TestZoo.checkers()[exercise](str(file)), capsys)

"""A function on several processes: its values come back, and every way to fail is one error that shows every rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import programs
import pytest
import torch

import ringlearn as rl
from ringlearn.launch.pool import LaunchError, Pool

pytestmark = pytest.mark.alone  # they look at the clock

FILE = Path(programs.__file__)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, backend="gloo") as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_values_come_back_in_rank_order(pool: Pool) -> None:
    found = pool.run(programs.add, 1, torch.arange(3.0))
    assert [f["rank"] for f in found] == [0, 1]
    for f in found:
        assert torch.equal(f["sum"][0], torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(f["grad"], torch.arange(3.0).exp()) and not f["grad"].requires_grad


def test_launch_starts_and_ends_its_own_processes() -> None:
    assert rl.launch(programs.rank_and_size, 3) == [(0, 3), (1, 3), (2, 3)]


def test_a_function_in_a_file(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(f"{FILE}:rank_and_size") == [(0, 2), (1, 2)]
    file = tmp_path / "ranks.py"
    file.write_text("def f(x):\n    return x + 1\n")
    assert pool.run(f"{file}:f", 1) == [2, 2]
    file.write_text("def f(x):\n    return x + 100\n")
    os.utime(file, (1, 1))
    assert pool.run(f"{file}:f", 1) == [101, 101]  # the file as it is now, not as it was
    (tmp_path / "beside.py").write_text("x = 5\n")
    other = tmp_path / "other.py"
    other.write_text("import beside\ndef f():\n    return beside.x\n")
    assert pool.run(f"{other}:f") == [5, 5]  # it imports its neighbours


def test_what_ranks_print_is_printed_by_the_parent(pool: Pool, capfd: pytest.CaptureFixture) -> None:
    pool.run(programs.say_something)
    assert capfd.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"
    pool.run(programs.rank_and_size)
    assert capfd.readouterr().out == ""


def test_threads_are_shared_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with Pool(2) as pool:
        assert pool.run(programs.environment, "OMP_NUM_THREADS") == [str(max(1, cores // 2))] * 2


def test_without_a_backend_the_function_initialises_by_itself() -> None:
    with Pool(4, backend=None) as pool:
        for _ in range(4):  # each run has keys of its own: those of the last one lead nowhere
            assert pool.run(programs.initialise_by_hand) == [0, 1, 2, 3]


def test_a_crash_shows_every_rank(pool: Pool) -> None:
    with pytest.raises(LaunchError) as caught:
        pool.run(programs.raise_on, 1)
    text = str(caught.value)
    assert text.startswith("launch: rank 1 raised: ZeroDivisionError: on purpose")
    assert "rank 0 returned" in text
    assert 'raise ZeroDivisionError("on purpose")' in text and "in raise_on" in text
    assert "launched.py" not in text  # the user's traceback, not ours
    assert "| before the crash" in text
    zero, one = caught.value.reports
    assert (zero.status, zero.value, one.status) == ("returned", 0, "raised")


def test_after_a_failure_the_pool_goes_on(pool: Pool) -> None:
    with pytest.raises(LaunchError):
        pool.run(programs.raise_on, 0)
    assert pool.run(programs.rank_and_size) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 7"), ("kill", "killed by SIGKILL")])
def test_a_process_that_ends_is_an_error(pool: Pool, how: str, said: str) -> None:
    with pytest.raises(LaunchError, match=f"launch: rank 1 ended: {said}") as caught:
        pool.run(programs.end_on, 1, how)
    assert caught.value.reports[0].status == "returned"
    if how == "exit":
        assert "leaving" in caught.value.reports[1].output


def test_a_hang_shows_where_each_rank_is(pool: Pool) -> None:
    pool.run(programs.rank_and_size)  # so that the processes are there
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"launch: ranks \[1\] did not return within 4 s") as caught:
        pool.run(programs.hang_on, 1, True, timeout=4)  # in an endless loop
    assert time.monotonic() - start < 12
    report = caught.value.reports[1]
    assert report.status == "hangs"
    assert "in _hang_here" in report.traceback  # from the fault handler
    assert "last did run of ring_with" in report.last


def test_the_error_of_a_launch_can_be_pickled(pool: Pool) -> None:
    import pickle

    with pytest.raises(LaunchError) as caught:
        pool.run(programs.raise_on, 1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.reports[1].error == caught.value.reports[1].error


def test_a_value_that_cannot_be_sent(pool: Pool) -> None:
    with pytest.raises(LaunchError, match="the value that the function returned cannot be sent to the parent"):
        pool.run(programs.return_a_lambda)


def test_a_launch_inside_a_launch_is_refused(pool: Pool) -> None:
    with pytest.raises(LaunchError, match="called inside a launched process"):
        pool.run(programs.nested_launch)


def test_processes_of_the_processes_end_too() -> None:
    with Pool(1) as pool:
        pids = pool.run(programs.with_a_child_process) + pool.pids
        assert all(map(alive, pids))
    time.sleep(0.2)
    assert not any(map(alive, pids))


def test_what_cannot_be_imported_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def inner() -> None: ...

    for fn, said in (
        (inner, "at the top level of a file"),
        (lambda: None, "at the top level of a file"),
        ("ranks.py", 'expected a function or "path/to/file.py:function"'),
        (str(tmp_path / "none.py:f"), "there is no file"),
        (3, "got int"),
    ):
        with pytest.raises(ValueError, match="launch: ") as caught:
            rl.launch(fn, 2)
        assert said in str(caught.value)


def test_a_missing_function_of_a_file_is_named(pool: Pool) -> None:
    with pytest.raises(LaunchError, match=r"programs\.py has no function none"):
        pool.run(f"{FILE}:none")


def test_a_function_of_a_notebook_cell_is_refused_with_the_remedy() -> None:
    """A notebook's __main__ has no file, like that of python -c."""
    code = "import ringlearn as rl\ndef f(): pass\ntry: rl.launch(f, 2)\nexcept ValueError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "%%writefile ranks.py" in done.stdout and 'launch("ranks.py:f", ...)' in done.stdout, done.stderr


def test_a_function_of_a_script_needs_no_import(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist, ringlearn as rl\n"
        "def f(x): return x + dist.get_rank()\n"
        "if __name__ == '__main__': print(rl.launch(f, 2, 10))\n"
    )
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[10, 11]\n", done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_ctrl_c_or_the_end_of_the_parent_leaves_no_process_behind(tmp_path: Path, sent: signal.Signals) -> None:
    code = (
        "import signal, sys; sys.path.insert(0, 'tests')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in a shell's background ignores Ctrl-C
        "import programs; from ringlearn.launch import Pool\n"
        "pool = Pool(2); pool.run(programs.rank_and_size); print(*pool.pids, flush=True)\n"
        "pool.run(programs.hang_on, 1)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    time.sleep(1)
    parent.send_signal(sent)
    _, errors = parent.communicate(timeout=20)
    assert ("KeyboardInterrupt" in errors) == (sent == signal.SIGINT)
    end = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def test_a_process_ends_if_its_parent_was_gone_before_it_began() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    _here, there = Pipe()  # stays open, so nothing else ends the process
    command = [sys.executable, "-m", "ringlearn.launch.child", str(there.fileno()), "None", str(gone.pid)]
    child = subprocess.Popen(command, pass_fds=[there.fileno()])
    try:
        assert child.wait(timeout=60) == 1
    finally:
        child.kill()


def test_numbers_of_processes_and_backends_are_checked() -> None:
    for size in (0, -1, True, 2.0, "2"):
        with pytest.raises(ValueError, match="an int >= 1"):
            rl.launch(programs.rank_and_size, size)
    with pytest.raises(ValueError, match='backend "auto"'):
        rl.launch(programs.rank_and_size, 2, backend="mpi")
    with pytest.raises(ValueError, match=r'needs a GPU for each of the 1000 processes.*backend="gloo"'):
        rl.launch(programs.rank_and_size, np.int64(1000), backend="nccl")


@pytest.mark.parametrize("timeout", [0, -1, "60", None, True, float("inf"), float("nan"), 1e9], ids=str)
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    for call in (lambda: rl.launch(programs.rank_and_size, 2, timeout=timeout), lambda: joined_world(timeout)):
        with pytest.raises(ValueError, match="expected timeout > 0 seconds"):
            call()


def joined_world(timeout: object) -> rl.DistributedWorld:
    return rl.DistributedWorld(timeout=timeout)


def test_arguments_that_cannot_be_sent(pool: Pool) -> None:
    for argument, kind in ((rl.mask(lambda q, k: q >= k), "Custom"), (rl.SimulatedWorld(2), "SimulatedWorld")):
        with pytest.raises(ValueError, match=f"launch: argument 2 of the function, of type {kind}, cannot be sent"):
            pool.run(programs.add, 1, argument)
    with pytest.raises(LaunchError, match="launch: the arguments cannot be unpickled.*nobody has defined this"):
        pool.run(programs.raise_on, programs.Unknown())


def test_a_timeout_while_the_processes_start_says_so(slow_start: None) -> None:
    with pytest.raises(
        LaunchError, match=r"did not return within 0.1 s, and some of them were still starting"
    ) as caught:
        rl.launch(programs.rank_and_size, 2, timeout=0.1)
    assert {report.status for report in caught.value.reports} == {"starting"}


def test_the_headline_is_of_the_rank_that_knows_who_was_absent(pool: Pool) -> None:
    """And not of that rank itself, which is told by gloo that a connection was closed; a slow rank ends like this."""
    with pytest.raises(LaunchError) as caught:
        pool.run(programs.absent_while_others_meet, 1, 1.5)
    headline = str(caught.value).splitlines()[0]
    assert headline.startswith("launch: rank 0 raised: WorldError: rank 1 never entered")
    assert "the timeout is 1.5 s" in headline and "DistributedWorld(timeout=...) waits longer" in headline

"""Training on two hosts: network namespaces with addresses of their own; the cable between them is pulled."""

import json
import re
import subprocess
import time
from types import SimpleNamespace

import hosts as two_hosts
import pytest

from ringlearn.train import checkpoint, train
from ringlearn.train.options import parse

pytestmark = pytest.mark.alone  # starts many processes, and looks at the clock
if reason := two_hosts.impossible():
    pytestmark = [pytestmark, pytest.mark.skip(reason=f"no two hosts: {reason}")]

TIMEOUT = 5
OPTIONS = "--dtype float64 --tokens 53 --width 16 --batch 4 --warmup 2 --decay 1000 --print-every 1".split()


@pytest.fixture(scope="module")
def hosts():
    with two_hosts.Hosts() as hosts:
        yield hosts


def start(hosts, folder, *options):
    """The training program on both hosts, two ranks on each, and where each writes what it says."""
    options = [*OPTIONS, "--save", str(folder / "run"), "--record", str(folder / "record"), *map(str, options)]
    said = [folder / f"host{n}" for n in (1, 2)]
    processes = []
    for n, file in enumerate(said, 1):
        with file.open("w") as out:
            processes.append(hosts.torchrun(n, "-m", "ringlearn.train", *options, stdout=out, stderr=out))
    return processes, said


def steps(folder):
    file = folder / "record"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait(until, seconds):
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cut(hosts, tmp_path_factory):
    """A run whose second host is cut off after some steps; when each worker ended, and what each host said."""
    folder = tmp_path_factory.mktemp("cut")
    processes, said = start(hosts, folder, "--steps", 100_000, "--save-every", 3, "--timeout", TIMEOUT)
    wait(lambda: len(steps(folder)) >= 8 or any(p.poll() is not None for p in processes), 60)
    hosts.cut()
    at, ended = time.monotonic(), {}
    workers = {pid for n in (1, 2) for pid in hosts.workers(n)}
    while len(ended) < len(workers) and time.monotonic() < at + TIMEOUT + 25:
        alive = set(hosts.workers(1)) | set(hosts.workers(2))
        ended |= {pid: time.monotonic() - at for pid in workers - alive - ended.keys()}
        time.sleep(0.05)
    wait(lambda: processes[0].poll() is not None, 10)
    made = steps(folder)
    result = SimpleNamespace(
        folder=folder,
        workers=workers,
        ended=ended,
        code=processes[0].returncode,
        said=[file.read_text() for file in said],
        losses=[step["loss"] for step in made],
    )
    for process in processes:
        two_hosts.kill(process)
    hosts.mend()
    return result


@pytest.fixture(scope="module")
def one_device(cut):
    return train(parse([*OPTIONS, "--steps", str(len(cut.losses) + 4)]))


def check(got, want):
    assert len(got) == len(want) and max(abs(a - b) for a, b in zip(got, want)) < 1e-9, (got, want)


def test_two_hosts_make_the_steps_of_one_device(cut, one_device):
    assert "1 x 4 ranks" in cut.said[0] and len(cut.losses) >= 8
    check(cut.losses, one_device[: len(cut.losses)])


def test_a_host_that_is_cut_off_ends_every_worker_on_both_sides_in_time(cut):
    assert len(cut.workers) == 4 and cut.ended.keys() == cut.workers and cut.code == 1
    assert max(cut.ended.values()) < TIMEOUT + 6, cut.ended  # a wait, 3 s of grace, and the end of a process


def test_both_sides_name_the_ranks_that_are_lost(cut):
    here, there = cut.said
    assert re.search("rank 2 on host2 shows no sign of life.*rank 3 on host2 shows no sign of life", here), here
    assert "rank 0 on host1 shows" not in here and "rank 1 on host1 shows" not in here
    assert "no sign of life from ranks 0, 1 on host1; they are lost, or this host (host2) is cut off" in there, there
    for text, ranks in ((here, (0, 1)), (there, (2, 3))):
        assert any(f"This is rank {rank}" in text for rank in ranks)


def test_the_same_command_goes_on_from_the_checkpoint(hosts, cut, one_device):
    saved = checkpoint.progress(cut.folder / "run")["step"]
    assert 6 <= saved <= len(cut.losses)
    (cut.folder / "record").unlink()
    processes, said = start(hosts, cut.folder, "--steps", len(one_device))
    assert [p.wait(60) for p in processes] == [0, 0], [file.read_text() for file in said]
    check([step["loss"] for step in steps(cut.folder)], one_device[saved:])


def test_nothing_is_left_behind():
    with pytest.raises(KeyError), two_hosts.Hosts() as hosts:
        process = hosts.start(2, "sleep", "1000")
        assert hosts.names[1] in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        raise KeyError
    assert process.poll() is not None
    assert hosts.names[1] not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout

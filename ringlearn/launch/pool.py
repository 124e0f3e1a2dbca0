"""Run a function on several processes, from a script, a shell or a notebook cell, and return every rank's value.

Each process is started as torchrun starts it (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), so a function that works
here works under torchrun too. The parent holds the key-value store, which therefore outlives any rank, and reads in it
what each rank did last. A crash, a hang or a killed process becomes one error that shows every rank.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..fingerprint import is_timeout, whole_number
from .machine import cores

SECONDS_AFTER_A_FAILURE = 10.0  # that the other ranks are given to end
STARTED = b"started"  # the first message of a process
OUTPUT_LINES = 30  # the last lines of a rank's output, which an error shows


@dataclass
class Report:
    """How one rank ended.

    status: "returned", "raised", "ended" (the process is gone) or "hangs".  value: what it returned.
    error: what it raised, in one line.  noticed: whether it raised this because another rank had ended.
    last: its last event in a world.  output: the end of what it wrote.
    """

    rank: int
    status: str
    value: Any = None
    error: str = ""
    traceback: str = ""
    noticed: bool = False
    last: str = ""
    output: str = ""

    def __str__(self) -> str:
        lines = [f"rank {self.rank} {self.status}{': ' + self.error if self.error else ''}"]
        if self.last:
            lines.append(f"  last event: {self.last}")
        for title, text in (("traceback", self.traceback), ("output", self.output)):
            if text.strip():
                lines.append(f"  {title}:")
                lines += [f"    | {line}" for line in text.rstrip().splitlines()[-OUTPUT_LINES:]]
        return "\n".join(lines)


class LaunchError(RuntimeError):
    """A function failed on some rank.  reports: one ``Report`` per rank."""

    def __init__(self, headline: str, reports: list[Report]):
        super().__init__("\n".join([headline, *map(str, reports)]))
        self.reports = reports

    def __reduce__(self):
        return _remake, (str(self), self.reports)


def _remake(text: str, reports: list[Report]) -> LaunchError:
    error = LaunchError("", reports)
    error.args = (text,)
    return error


def launch(
    fn: Callable[..., Any] | str, world_size: int, *args: Any, backend: str | None = "auto", timeout: float = 300.0
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` new processes and return what each rank returned, in rank order.

    fn: a function that the processes can import, or "path/to/file.py:function". A function in a notebook cell cannot
    be imported: write the cell to a file with ``%%writefile``.  args: anything that can be pickled.
    backend: "gloo", "nccl", "auto" (NCCL if each process can have a GPU), or None to initialise nothing.
    timeout: seconds for the whole call, including the start of the processes.

    Tensors are returned on the CPU, without autograd history. What the ranks print is printed here, rank by rank.
    Raises ValueError for a function that cannot be imported, for arguments that cannot be sent, and for NCCL without a
    GPU for each process. Raises LaunchError, which shows each rank's last event, traceback and output, if a rank raises
    an error, hangs or dies.

    >>> from ringlearn import launch
    >>> launch("tests/programs.py:rank_and_size", 2)
    [(0, 2), (1, 2)]
    """
    with Pool(world_size, backend=backend) as pool:
        return pool.run(fn, *args, timeout=timeout)


class Pool:
    """Processes that stay for several runs, because starting them costs seconds.

    Each run starts with a fresh process group and with functions as their files are now. After a failed run the
    processes are replaced.

        with Pool(4) as pool:
            first = pool.run(fn, 1)
            second = pool.run(fn, 2)
    """

    def __init__(self, world_size: int, *, backend: str | None = "auto"):
        self._processes: list[_Process] = []  # first, for __del__
        size = whole_number(world_size)
        if size is None or size < 1:
            raise ValueError(f"launch: expected the number of processes to be an int >= 1, got {world_size!r}")
        if backend not in ("auto", "gloo", "nccl", None):
            raise ValueError(f'launch: expected backend "auto", "gloo", "nccl" or None, got {backend!r}')
        if backend == "nccl" and (gpus := torch.cuda.device_count() if dist.is_nccl_available() else 0) < size:
            raise ValueError(
                f'launch: backend="nccl" needs a GPU for each of the {size} processes, and torch finds {gpus or "no"} '
                f'GPU{"s" * (gpus > 1)} here; use backend="gloo", which runs on CPUs, or fewer processes'
            )
        if getattr(sys.modules["__main__"].__spec__, "name", "") == "ringlearn.launch.child":
            raise RuntimeError(
                "launch: called inside a launched process; if the call is in the file of the launched function, put it "
                'under `if __name__ == "__main__":`'
            )
        self.world_size, self.backend = size, backend
        self._store: Any = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.end()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any] | str, *args: Any, timeout: float = 300.0) -> list[Any]:
        """Run ``fn(*args)`` on every process; as ``launch``."""
        if not is_timeout(timeout):
            raise ValueError(f"launch: expected timeout > 0 seconds (and below 1e9), got {timeout!r}")
        task = pickle.dumps((address(fn), _pickled(args), [p or os.getcwd() for p in sys.path]))
        if not self._processes:
            self._start()
        # One store per run, as torchrun makes one per restart: the keys of the last run's groups would be in the way.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        reports: dict[int, Report] = {}
        try:
            for process in self._processes:
                process.send(self._store.port, task)
            self._collect(reports, time.monotonic() + timeout, timeout)
            self._show_output()
        except BaseException:
            for process in self._processes:
                process.kill()
            self.close()
            raise
        return [reports[rank].value for rank in range(self.world_size)]

    def _start(self) -> None:
        with contextlib.ExitStack() as undo:  # Ctrl-C while they start
            undo.callback(self.close)
            for rank in range(self.world_size):
                self._processes.append(_Process(rank, self.world_size, self.backend))
            undo.pop_all()

    def _collect(self, reports: dict[int, Report], deadline: float, timeout: float) -> None:
        """Wait until every rank has answered, or one has failed and the others have had time to notice."""
        waiting = {process.tasks: process for process in self._processes}
        first = None
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(list(waiting), max(0.0, left))
            if not ready:
                break
            for answers in ready:
                process = waiting[answers]
                report = process.report()
                if report is None:
                    continue
                del waiting[answers]
                reports[process.rank] = report
                if report.status != "returned" and first is None:
                    first, deadline = process.rank, min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
        if first is None and not waiting:
            return
        for process in waiting.values():
            started = process.started
            where = process.stacks() if started else "it was still starting: Python was importing torch and ringlearn"
            reports[process.rank] = Report(process.rank, "hangs" if started else "starting", traceback=where)
        for process in self._processes:
            report = reports[process.rank]
            report.last, report.output = self._last(process.rank), process.output()
        ordered = [reports[rank] for rank in range(self.world_size)]
        raise LaunchError(_headline(ordered, first, timeout), ordered)

    def _last(self, rank: int) -> str:
        from ..worlds.distributed.faults import say

        key = f"ringlearn/last/{rank}"
        if not self._store.check([key]):
            return ""
        return say(json.loads(self._store.get(key)))

    def _show_output(self) -> None:
        for process in self._processes:
            for line in process.printed().splitlines():
                print(f"[rank {process.rank}] {line}")


def _headline(reports: list[Report], first: int | None, timeout: float) -> str:
    """A line about the rank that says most about the cause: one that failed by itself, if there is one."""
    if first is None:
        hanging = [r.rank for r in reports if r.status in ("hangs", "starting")]
        text = f"launch: ranks {hanging} did not return within {timeout:g} s"
        if any(r.status == "starting" for r in reports):
            text += ", and some of them were still starting, which takes seconds, or longer on a busy machine"
        return f"{text}; pass a larger timeout= to give them longer"
    failed = [reports[first], *(r for r in reports if r.status in ("ended", "raised"))]
    own = [r for r in failed if not r.noticed]
    told = [
        r for r in failed if r.error.startswith("WorldError")
    ]  # which says who was lost; a closed connection does not
    cause = (own or told or failed)[0]
    return f"launch: rank {cause.rank} {cause.status}: {cause.error}"


def _pickled(args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(args)
    except Exception:
        for number, arg in enumerate(args, 1):
            try:
                pickle.dumps(arg)
            except Exception as error:
                raise ValueError(
                    f"launch: argument {number} of the function, of type {type(arg).__name__}, cannot be sent to the "
                    f"processes ({error}); pass tensors, numbers, strings, or lists and dicts of them, and create "
                    f"worlds, masks of a lambda and the like inside the function"
                ) from None
        raise


class _Process:
    """One child process, seen from the parent."""

    def __init__(self, rank: int, size: int, backend: str | None):
        self.rank = rank
        self.tasks, tasks = Pipe()
        self.out, self.err = (tempfile.TemporaryFile() for _ in range(2))
        self._shown = self._mark = 0
        self._started = False
        package = str(Path(__file__).parents[2])  # the same ringlearn as here
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, for every rank
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
        }
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // size)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ringlearn.launch.child", str(tasks.fileno()), str(backend), str(os.getpid())],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            pass_fds=[tasks.fileno()],
            start_new_session=True,  # a process group of its own, so that its children end with it
        )
        tasks.close()
        self.pid = self._process.pid

    def send(self, port: int, task: bytes) -> None:
        self._mark = os.fstat(self.err.fileno()).st_size
        self._shown = os.fstat(self.out.fileno()).st_size
        with contextlib.suppress(OSError):  # it has died; report() will say so
            self.tasks.send((port, task))

    @property
    def started(self) -> bool:
        """Whether it has started and waits for its task."""
        if not self._started and self.tasks.poll():
            self.report()
        return self._started

    def report(self) -> Report | None:
        """How it ended; None if it says that it has started."""
        try:
            answer = self.tasks.recv_bytes()
            if answer == STARTED:
                self._started = True
                return None
            status, value, error, traceback, noticed = pickle.loads(answer)
            return Report(self.rank, status, value, error, traceback, noticed)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            code = self._process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            return Report(self.rank, "ended", error=how)

    def stacks(self) -> str:
        """Where a hanging process is stuck, from its fault handler, which works without its main thread."""
        before = os.fstat(self.err.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        for _ in range(100):
            time.sleep(0.05)
            if os.fstat(self.err.fileno()).st_size > before:
                time.sleep(0.1)
                break
        return (
            _read(self.err, before)
            or "it does not respond to signals: it is stopped, or blocked in the operating system"
        )

    def output(self) -> str:
        return _read(self.out, self._shown) + _read(self.err, self._mark)

    def printed(self) -> str:
        return _read(self.out, self._shown)

    def ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self.tasks.close()

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.kill()
        self.out.close()
        self.err.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _read(file: Any, start: int) -> str:
    return os.pread(file.fileno(), 1 << 20, max(start, os.fstat(file.fileno()).st_size - (1 << 20))).decode(
        errors="replace"
    )


def address(fn: Callable[..., Any] | str) -> tuple[str, str, str]:
    """(module, file, name) by which another process finds the function.

    Raises ValueError if it cannot.
    """
    if isinstance(fn, str):
        path, _, name = fn.rpartition(":")
        if not path or not name:
            raise ValueError(f'launch: expected a function or "path/to/file.py:function", got {fn!r}')
        if not Path(path).is_file():
            raise ValueError(f"launch: there is no file {Path(path).resolve()}, which {fn!r} names")
        return "", str(Path(path).resolve()), name
    if not inspect.isfunction(fn):
        raise ValueError(f'launch: expected a function or "path/to/file.py:function", got {type(fn).__name__}')
    if "<" in fn.__qualname__:
        raise ValueError(
            f"launch: {fn.__qualname__} is a lambda or a function inside a function, which other processes cannot "
            f"import; define it with `def` at the top level of a file"
        )
    module = sys.modules.get(fn.__module__)
    file = getattr(module, "__file__", None)
    if fn.__module__ == "__main__" and (file is None or not Path(file).is_file() or Path(file).suffix != ".py"):
        raise ValueError(
            f"launch: {fn.__name__} is defined in a notebook cell or an interactive session, which other processes "
            f"cannot import. Write it to a file: put `%%writefile ranks.py` on the first line of its cell, with the "
            f'imports it needs, and call launch("ranks.py:{fn.__name__}", ...)'
        )
    return fn.__module__ if fn.__module__ != "__main__" else "", str(file), fn.__qualname__

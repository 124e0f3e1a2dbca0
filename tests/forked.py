"""Python processes that are forked from one that has imported torch: each begins in milliseconds instead of seconds.

``Popen`` and ``run`` take the place of those of ``subprocess`` for commands of Python's own. With them start the
processes of ``launch`` in all tests but those of launching (see conftest.py), torchrun, and its workers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, get_context, process, spawn
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import DEVNULL, CompletedProcess, TimeoutExpired
from typing import Any
from unittest import mock

__all__ = ["DEVNULL", "CompletedProcess", "Popen", "TimeoutExpired", "run"]  # what is used of subprocess

ROOT = Path(__file__).parent.parent
IMPORTED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.launcher.api"]
IMPORTED += ["ringlearn.launch.pool", "ringlearn.worlds.distributed.join"]


class Popen:
    """The process of a command ``[sys.executable, "-m", "module", ...]``, or with a file in place of the module."""

    def __init__(
        self,
        args: Sequence[str | os.PathLike],
        *,
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        stdin: int = DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ):
        executable, *words = map(str, args)
        assert executable == sys.executable, executable
        context = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        with contextlib.chdir(ROOT):
            forkserver._forkserver.ensure_running()
        passed = {fd: _Passed(fd) for fd in pass_fds}
        words = [passed[int(w)] if w.isdigit() and int(w) in passed else w for w in words]
        words = [_Parent() if w == str(os.getpid()) else w for w in words]
        outputs = [_Passed(1 if stdout is None else stdout.fileno()), _Passed(2 if stderr is None else stderr.fileno())]
        place = dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd())
        self._process = context.Process(target=_begin, args=(words, *place, outputs, start_new_session), daemon=True)
        with mock.patch.object(spawn, "get_preparation_data", _without_main):
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode


def run(command: Sequence[str | os.PathLike], *, timeout: float, **options: Any) -> CompletedProcess:
    """As ``subprocess.run(command, capture_output=True, text=True)``."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = Popen(command, stdout=out, stderr=err, start_new_session=True, **options)
        try:
            code = started.wait(timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, 9)
            raise
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err)]
    return CompletedProcess(command, code, *texts)


def _without_main(name: str, prepared: Any = spawn.get_preparation_data) -> dict[str, Any]:
    """What a process is told of this one; not to import its program."""
    return {key: value for key, value in prepared(name).items() if not key.startswith("init_main")}


class _Passed:
    """A file descriptor; in the other process it has another number."""

    def __init__(self, fd: int):
        self.fd = fd

    def __reduce__(self):
        return _received, (DupFd(self.fd),)


def _received(fd: Any) -> int:
    return fd.detach()


class _Parent:
    """The number of the parent, which is the server there."""

    def __reduce__(self):
        return os.getppid, ()


def _begin(words: list[Any], env: dict[str, str], cwd: str, outputs: list[int], new_session: bool) -> None:
    gc.freeze()  # what is shared with the server stays shared
    process.current_process()._config["daemon"] = False  # it may have children, of the same server
    forkserver._forkserver.ensure_running = lambda: None
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, fd in enumerate(outputs, 1):
        os.dup2(fd, number)
        os.close(fd)
    words = [str(word) for word in words]
    unbuffered = "PYTHONUNBUFFERED" in env or words[0] == "-u"
    words = words[words[0] == "-u" :]
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(write_through=unbuffered)
    module = words.pop(0) == "-m" if words[0] == "-m" else False
    sys.argv = words
    first = cwd if module else os.path.dirname(os.path.abspath(words[0]))
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.path += [str(ROOT), str(ROOT / "tests")]  # where ringlearn is installed, and this file
    if words[0] == "torch.distributed.run":
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = Popen
    code = 1
    try:
        if module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)

"""Two "machines" on one: network namespaces with addresses and names of their own, joined by a virtual cable.

    sudo .venv/bin/python tools/hosts.py -- -m ringlearn.train --steps 50
    sudo .venv/bin/python tools/hosts.py --cut 15 -- -m ringlearn.train --steps 100000 --timeout 10

starts torchrun on both, two processes on each, with what stands after ``--``. What each host prints is shown with its
name before it. ``--cut 15`` pulls the cable after 15 seconds. Linux only, as root; nothing is left behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 29400  # torchrun's own


def impossible() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces, and root of a user namespace (as_root in tools/hosts.py)"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here (Debian: apt install iproute2 util-linux hostname)"
    try:
        with Hosts():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


def as_root(*command: str) -> list[str]:
    """The command, as root of a user namespace of its own: there any user may make hosts, if the kernel lets them.

    Ubuntu lets nobody; ``sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`` changes that.
    """
    own_run = 'mount -t tmpfs tmpfs /run && exec "$@"'  # where ip keeps the names of network namespaces
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", own_run, "sh", *command]


class Hosts:
    """Two hosts, numbered 1 and 2, as long as the ``with`` lasts; then they and all their processes are gone.

    Host n has the address 10.77.0.n on the interface eth0 and the name "host n" without the blank. They share the
    file system.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        number = next(self._numbers)
        self.names = [f"ringlearn-{os.getpid()}-{number}-{n}" for n in (1, 2)]
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Hosts:
        self._remove_left_behind()
        try:
            for name in self.names:
                _ip("netns", "add", name)
            one, two = self.names
            _ip("link", "add", "name", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", two)
            for n, name in enumerate(self.names, 1):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{address(n)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            kill(process)
        for name in self.names:
            _remove(name)

    def start(self, host: int, *command: str, **options: Any) -> subprocess.Popen:
        """Run a command on a host, in a session of its own; options as for ``subprocess.Popen``."""
        enter = ["ip", "netns", "exec", self.names[host - 1], "unshare", "--uts", "sh", "-c"]
        enter += [f'hostname host{host}; exec "$@"', "sh"]
        process = subprocess.Popen([*enter, *command], start_new_session=True, **options)
        self._processes.append(process)
        return process

    def torchrun(self, host: int, *arguments: str, ranks: int = 2, **options: Any) -> subprocess.Popen:
        """torchrun on a host, as one of two: the command that real machines need as well."""
        environment = dict(os.environ) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/machines.md says why
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of every address that has no name
        return self.start(
            host,
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "ringlearn"),
            *("--rdzv-endpoint", f"{address(1)}:{PORT}", "--rdzv-conf", f"is_host={str(host == 1).lower()}"),
            *("--local-addr", address(host)),
            *arguments,
            env=environment,
            cwd=ROOT,
            **options,
        )

    def workers(self, host: int) -> list[int]:
        """The processes that torchrun has started on a host."""
        found = []
        for pid in _ip("netns", "pids", self.names[host - 1]).split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:  # it has just ended
                continue
            if "torch.distributed.run" not in command:
                found.append(int(pid))
        return found

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and no connection is closed."""
        _ip("-n", self.names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", "eth0", "up")

    @staticmethod
    def _remove_left_behind() -> None:
        """Hosts of a process that was killed."""
        for name, pid in re.findall(r"^(ringlearn-(\d+)-\d+-[12])\b", _ip("netns", "list"), flags=re.M):
            if not Path(f"/proc/{pid}").exists():
                _remove(name)


def address(host: int) -> str:
    return f"10.77.0.{host}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def kill(process: subprocess.Popen) -> None:
    """torchrun and, if it still has some, its workers. SIGKILL: an agent that is cut off outlives SIGTERM."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _remove(name: str) -> None:
    try:
        for pid in _ip("netns", "pids", name).split():  # workers have sessions of their own
            os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    except (subprocess.CalledProcessError, ProcessLookupError):
        pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of each host")
    parser.add_argument("--cut", type=float, metavar="SECONDS", help="pull the cable after so long")
    parser.add_argument("arguments", nargs="+", help="for torchrun: -m module, or a file, and its options")
    options = parser.parse_args(argv)
    if reason := impossible():
        print(f"hosts: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of __exit__
    with Hosts() as hosts:
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        both = [hosts.torchrun(n, *options.arguments, ranks=options.ranks, **pipes) for n in (1, 2)]
        for n, process in enumerate(both, 1):
            threading.Thread(target=_show, args=(n, process), daemon=True).start()
        try:
            return _follow(hosts, both, options.cut)
        except KeyboardInterrupt:
            return 130


def _show(host: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"host{host} | {line}", end="", flush=True)


def _follow(hosts: Hosts, both: list[subprocess.Popen], cut: float | None) -> int:
    """Until both have ended. After a cut the second one's torchrun does not, so its workers are waited for."""
    start = time.monotonic()
    while cut is None or time.monotonic() < start + cut:
        if all(process.poll() is not None for process in both):
            return max(abs(process.returncode) for process in both)
        time.sleep(0.1)
    hosts.cut()
    print("the cable is pulled", flush=True)
    while both[0].poll() is None or hosts.workers(2):
        time.sleep(0.1)
    time.sleep(0.5)
    print("all workers have ended", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())

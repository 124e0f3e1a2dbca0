"""Detects a rank that dies, stalls, raises or never arrives, and raises an error on every rank: who, where and why.

Each rank has a small monitor, a daemon thread. Every quarter of a second it writes into the job's key-value store that
the rank is alive and what it is doing, and reads whether a rank has posted a *cause*. The first rank that notices a
failure posts the cause; the others report that one, not the errors that follow from it ("connection closed by peer").

On CPUs a rank waits on its host, so the error is a Python exception at the wait. With NCCL the host runs ahead and
waits for nothing: there the monitor watches a CUDA event per message, reports on stderr and ends the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from .background import Background, plain, wait_for_all

BEAT = 0.25  # seconds between two signs of life
SILENCE = 1.0  # a rank that has given none for this long is called silent
SECONDS_TO_RAISE = 3.0  # for the main thread, before the monitor ends the process
STORE_TIMEOUT = 3.0  # for an answer from the key-value store


class WorldError(RuntimeError):
    """A rank died, stalled, raised an error inside a rank program or never arrived; the text names the first cause.

    The world cannot be used any more: messages of the failed call may still be on their way.
    """


def say(words: dict[str, Any]) -> str:
    """What a rank is doing, or did last, in words."""
    op, step, state, seconds = words["op"], words["step"], words["state"], words["seconds"]
    where = f"{step} of {op}" if step else op
    return {
        "new": "has made its world and called nothing yet",
        "running": f"is in {where}, computing (or blocked outside of ringlearn) for {seconds:.1f} s",
        "waiting": f"is in {where}, waiting for a message for {seconds:.1f} s",
        "done": f"last did {op}, finished {seconds:.1f} s ago",
        "failed": f"failed in {where}",
        "closed": f"has ended; it last did {op}" if op else "has ended without calling anything",
    }[state]


class Faults:
    """One rank's view of the health of its world.

    store: this world's own part of the job's key-value store (a connection of its own).  root: its root, where a
    launcher reads each process's last event.  timeout: seconds.  members: the ranks' numbers among all processes.
    hosts: of all ranks, once they are known.
    entered, left: how many ``with world.watched()`` the main thread has entered, and left.
    """

    def __init__(self, store: Any, root: Any, rank: int, size: int, timeout: float, cuda: torch.device | None = None):
        self.store, self.root, self.rank, self.size, self.timeout, self.cuda = store, root, rank, size, timeout, cuda
        self.op, self.step, self.state, self.calls = "", "", "new", 0
        self.since = time.monotonic()
        self.cause: str | None = None
        self.raised = False  # the main thread knows, or will in a moment
        self._told = False
        self.stuck: deque[tuple[Any, str, float]] = deque()  # CUDA events that have not come yet
        self._beats = 0
        self.members = list(range(size))
        self.hosts: list[str] = []
        self.entered = self.left = 0
        self._last_heard = LastHeard(self)
        self._store_thread, self._store_timeout = Background("store"), timeout
        self._stop = threading.Event()
        self._wait_thread = Background("wait")
        self.publish()
        self._store_timeout = STORE_TIMEOUT
        self._thread = threading.Thread(target=self._monitor, name="ringlearn monitor", daemon=True)
        self._thread.start()

    # What this rank is doing: plain attributes, because a store is too slow for the loop. The monitor publishes them.

    def begin(self, op: str) -> None:
        self.check()
        self.op, self.step, self.state, self.since = op, "", "running", time.monotonic()
        self.calls += 1

    def at(self, step: str, state: str) -> None:
        self.step, self.state, self.since = step, state, time.monotonic()

    def end(self) -> None:
        self.at("", "done")

    @property
    def where(self) -> str:
        return f"{self.step} of {self.op}" if self.step else self.op

    def _ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call the key-value store. Raises RuntimeError if it does not answer."""
        return self._store_thread.call(self._store_timeout, fn, *args)

    def publish(self) -> None:
        self._beats += 1
        words = {"op": self.op, "step": self.step, "state": self.state, "calls": self.calls, "beat": self._beats}
        text = json.dumps(words | {"seconds": time.monotonic() - self.since, "left": self.left})
        self._ask(self.store.set, f"rank {self.rank}", text)
        last = f"ringlearn/last/{dist.get_rank() if dist.is_initialized() else self.rank}"
        self._ask(self.root.set, last, text)

    def everyone(self) -> list[dict[str, Any]]:
        names = [f"rank {r}" for r in range(self.size)]
        return [json.loads(text) for text in self._ask(self.store.multi_get, names)]

    def why_incomplete(self, seconds: float, error: Exception) -> str:
        """The error that says why the ranks could not make this world together within so many seconds."""
        missing = [r for r in range(self.size) if not self._ask(self.store.check, [f"rank {r}"])]
        if not missing:
            return f"DistributedWorld: the ranks could not connect to each other: {plain(error)}"
        return (
            f"DistributedWorld: ranks {missing} did not come within {seconds:g} s; every rank of the group must make "
            f"the world, in the same order as other worlds"
        )

    def enter(self) -> None:
        """Note that the main thread enters ``with world.watched()``."""
        self._last_heard = LastHeard(self)
        self.entered += 1

    @property
    def watched(self) -> bool:
        return self.entered > self.left

    def leave(self) -> None:
        self.left += 1
        try:
            self.publish()
        except RuntimeError:
            pass

    # Waiting and failing, on the main thread

    def check(self) -> None:
        """Raise if a rank has posted a cause."""
        if self.cause is not None:
            earlier = "this world failed in an earlier call: " if self._told else ""
            self.raised = self._told = True
            raise WorldError(
                f"{earlier}{self.cause}\nThis is rank {self.rank}. Its world cannot be used any more: messages of the "
                f"failed call may still be on their way. End all processes, or make a new world on every rank."
            )

    def wait(self, works: Sequence[Any], step: str) -> None:
        """Wait until all is sent and received. Raises WorldError after the timeout, or when another rank has failed."""
        self.wait_for(self.start_waiting(works), step)

    def start_waiting(self, works: Sequence[Any]) -> Future:
        """Wait in the background, for ``wait_for``."""
        return self._wait_thread.submit(wait_for_all, works, self.timeout + 60)

    def wait_for(self, arrived: Future, step: str) -> None:
        """``wait``, for what ``start_waiting`` has returned."""
        self.at(step, "waiting")
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                problem = arrived.result(0.1)
                break
            except TimeoutError:
                self.check()
                if time.monotonic() > deadline:
                    self.fail_waiting(f"no message for {self.timeout:g} s")
        if problem:
            self.fail_waiting(problem)
        self.at(step, "running")

    def poll(self, works: Sequence[Any], step: str) -> None:
        """Like ``wait``, for NCCL's messages, whose own ``wait`` does not block the host."""
        self.at(step, "waiting")
        deadline = time.monotonic() + self.timeout
        try:
            while not all(work.is_completed() for work in works):
                self.check()
                if time.monotonic() > deadline:
                    self.fail_waiting(f"no message for {self.timeout:g} s")
                time.sleep(2e-5)
        except RuntimeError as error:
            if isinstance(error, WorldError):
                raise
            self.fail_waiting(plain(error))

    def fail_waiting(self, why: str) -> None:
        """Find out which rank is to blame, tell the others and raise."""
        self.raised = True  # from here on: the monitor need not end the process
        if not self._known():
            self.post(self._blame(self.where, why))
        self.check()

    def _known(self) -> bool:
        """Whether a rank has posted a cause. What this rank sees may be only the consequence."""
        try:
            if self.cause is None and self._ask(self.store.check, ["cause"]):
                self.cause = self._ask(self.store.get, "cause").decode() or None
        except RuntimeError:  # the store has ended with the process that held it, or cannot be reached
            pass
        return self.cause is not None

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank's own program has raised, so that they need not wait for it."""
        text = f": {error}" if str(error) else ""
        self.raised = self._told = True
        self.post(f"rank {self.rank} raised {type(error).__name__} in {self.where}{text}")

    def post(self, cause: str) -> None:
        """Make this the world's cause, unless another rank has been first."""
        self.state = "failed"
        try:
            self.cause = self._ask(self.store.compare_set, "cause", "", cause).decode()
            self.publish()
        except RuntimeError:
            self.cause = self.cause or cause

    def _blame(self, where: str, why: str) -> str:
        here = f"Rank {self.rank} noticed it in {where}: {why}"
        try:
            before = self.everyone()
            time.sleep(SILENCE)
            after = self.everyone()
        except RuntimeError:
            return f"{self.store_unreachable()}\n{here}"
        others = [r for r in range(self.size) if r != self.rank]
        silent = [r for r in others if before[r]["beat"] == after[r]["beat"] and after[r]["state"] != "closed"]
        behind = [r for r in others if after[r]["calls"] < self.calls]
        gone = [r for r in others if after[r]["state"] == "closed"]
        busy = [r for r in others if after[r]["state"] == "running"]
        slow = f" (the timeout is {self.timeout:g} s; if it is only slow, DistributedWorld(timeout=...) waits longer)"
        if silent:
            blame = [self.lost_text(silent, after)]
        elif behind:
            blame = [f"{self.who(r)} never entered {self.op}; it {say(after[r])}{slow}" for r in behind]
        elif busy:  # before those that have ended: a rank may be done, and end, while others still exchange messages
            blame = [f"{self.who(r)} sends nothing; it {say(after[r])}{slow}" for r in busy]
        elif gone:
            blame = [f"{self.who(r)} {say(after[r])}" for r in gone]
        else:
            blame = ["no rank sends what the others wait for: the ranks' programs do not match"]
        table = [f"  rank {r} {say(after[r])}" for r in range(self.size)]
        return "\n".join(["; ".join(blame), here, *table])

    def lost_text(self, ranks: list[int], words: list[dict[str, Any]]) -> str:
        return "; ".join(
            f"{self.who(r)} shows no sign of life: killed, stopped or cut off; it {say(words[r])}" for r in ranks
        )

    def who(self, rank: int) -> str:
        """A rank's number, its number among all processes if that differs, and its host if there are several."""
        member = "" if self.members[rank] == rank else f" (global rank {self.members[rank]})"
        return f"rank {rank}{member}" + (f" on {self.hosts[rank]}" if len(set(self.hosts)) > 1 else "")

    def store_unreachable(self) -> str:
        """What a rank that cannot reach the store can still say: which ranks are on other hosts."""
        text = "the key-value store of the job is gone, or does not answer"
        own = self.hosts[self.rank] if self.hosts else ""
        away: dict[str, list[str]] = {}
        for member, host in sorted(zip(self.members, self.hosts)):
            if host != own:
                away.setdefault(host, []).append(str(member))
        if not away:
            return f"{text}, and with it probably the process that holds it."
        lost = ", ".join(f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(r)} on {host}" for host, r in away.items())
        return f"{text}: no sign of life from {lost}; they are lost, or this host ({own}) is cut off from them."

    # The monitor, on its own thread

    def _monitor(self) -> None:
        if self.cuda is not None:
            _allow_queries_during_capture()
        progress = time.monotonic()
        while not self._stop.wait(BEAT):
            try:
                self.publish()
                self._known()
            except RuntimeError:
                if not dist.is_initialized() and not self.stuck:
                    return  # the job has ended
            while self.stuck and self.stuck[0][0].query():
                self.stuck.popleft()
                progress = time.monotonic()
            if self.stuck and self.cause is None:
                _, where, posted = self.stuck[0]
                if time.monotonic() - max(progress, posted) > self.timeout:
                    self.post(self._blame(where, f"the GPU has not got past it for {self.timeout:g} s"))
            if self.watched and self.cause is None and (cause := self._last_heard.lost()):
                self.post(cause)
            if (self.stuck or self.watched) and self.cause is not None:
                self._end_process()

    def _end_process(self) -> None:
        """End this process, whose device or main thread waits for a message that will not come and cannot be woken."""
        self._stop.wait(SECONDS_TO_RAISE)
        stuck = bool(self.stuck) and not self.stuck[0][0].query()
        if self.raised or self._stop.is_set() or not (stuck or self.watched):
            return
        where = f"stuck in {self.stuck[0][1]}" if stuck else f"which last was in {self.where or 'nothing'}"
        words = f"\nringlearn: {self.cause}\nThis is rank {self.rank}, {where}; ending it.\n"
        os.write(2, words.encode())
        os._exit(1)

    def follow(self, step: str, works: Sequence[Any]) -> None:
        """With NCCL, note that whatever follows on the current stream has waited for these messages of ``step``."""
        if torch.cuda.is_current_stream_capturing():
            return
        events = [work.done for work in works if hasattr(work, "done")]  # of copies, which record one anyway
        if len(events) < len(works):
            events = [torch.cuda.Event()]
            events[0].record()
        where, now = f"{step} of {self.op}", time.monotonic()
        self.stuck.extend([(event, where, now) for event in events])

    def close(self) -> None:
        """Say that this rank has ended, and stop the monitor."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wait_thread.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * SILENCE)
        if self.state != "failed":
            self.state = "closed"
        try:
            self.publish()
        except RuntimeError:
            pass
        self._store_thread.close()


def _allow_queries_during_capture() -> None:
    """Allow this thread to query events while the main thread captures a CUDA graph, which would break otherwise."""
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))  # cudaStreamCaptureModeRelaxed
    except (OSError, AttributeError):
        pass


class LastHeard:
    """When each rank was last heard of, by this rank's own clock."""

    def __init__(self, faults: Faults):
        self.faults = faults
        self.answered = self.next = time.monotonic()
        self.heard: dict[int, tuple[int, float]] = {}

    def lost(self) -> str | None:
        """The cause, once a rank that is still in the watched part has been silent for longer than the timeout."""
        faults, now = self.faults, time.monotonic()
        if now < self.next:
            return None
        self.next = now + max(0.25, faults.timeout / 40)
        try:
            words = faults.everyone()
        except RuntimeError:
            return f"{faults.store_unreachable()}\n{self._here}" if now - self.answered > faults.timeout else None
        self.answered = now
        for rank, said in enumerate(words):
            if rank not in self.heard or self.heard[rank][0] != said["beat"]:
                self.heard[rank] = said["beat"], now
        # A rank that has left what this one is in may well be done; one that has not is missed, entered or not.
        missed = [r for r, said in enumerate(words) if said["left"] < faults.entered and said["state"] != "closed"]
        silent = {r: now - self.heard[r][1] for r in missed if r != faults.rank}
        if max(silent.values(), default=0) > faults.timeout:
            lost = [r for r, seconds in silent.items() if seconds > faults.timeout / 2]  # one host's do not end at once
            return f"{faults.lost_text(lost, words)}\n{self._here}"
        return None

    @property
    def _here(self) -> str:
        return f"Rank {self.faults.rank} noticed it: no sign of life for {self.faults.timeout:g} s"


def is_connection_error(error: BaseException) -> bool:
    """Whether an error of torch means that another process could not be reached, rather than a mistake in this one."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search(
            r"gloo/|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|Read error|Write error", str(error)
        )
    )

"""How an exercise runs under torchrun: every rank checks its own result, and rank 0 says once what all ranks found.

An exercise's check is a row of *cases*. All ranks try a case, each posts what came out into the job's key-value store,
and the next case begins when all are right. So a mistake on one rank ends the run on every rank, and what is printed
shows them side by side.

Nothing that an answer does may end in a hang or in a page of traceback:

* An exception becomes a message that names the rank and the line.
* A thread of each rank watches its main thread. If no rank moves for ``HANGS_AFTER_SECONDS``, or if another rank has
  failed and this one waits for it, the line where it waits is posted, and the process ends.
* On Linux the answer runs in a child of the process that torchrun started. If it dies, because gloo ends a process
  that receives more bytes than its buffer holds, its parent posts that.

The exit code is 0 whatever was found, as a notebook's checker raises nothing: for any other code torchrun prints its
own traceback after the message. With ``--strict`` on the command line it is 1 unless the answer is right.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ....worlds.distributed.background import plain
from ....worlds.distributed.faults import WorldError
from ....worlds.distributed.join import backend_for_this_host, choose_interface
from ....worlds.distributed.world import DistributedWorld
from ..checker import Result, Wrong, has_blank, trying
from .messages import explain

HANGS_AFTER_SECONDS = 6.0  # in which no rank moves
HANGS_ALONE_AFTER_SECONDS = 1.5  # in which one rank does not move, once another has failed
JOINS_WITHIN_SECONDS = 60.0  # or processes do not find each other
TICK = 0.1  # seconds between two looks at the main thread
WIDTH = 110  # columns of what is printed
NOT_HERE = 113  # an exit code: the child cannot do the work
BROKEN = "losed by peer|reset by peer|Read error|Write error|Broken pipe|Timed out|remote (process|error)"
LONGER = 3  # times as long in one place of the answer, computing or not
MOST = 6  # times as long for one case in all


class Over(Exception):
    """A rank is not right: the run ends here, on every rank."""


class Board:
    """What the ranks have found, in the job's key-value store, over a connection of this thread's own."""

    def __init__(self) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOINS_WITHIN_SECONDS))
        self.store = dist.PrefixStore("ringlearn exercise", store)
        self.size = int(os.environ["WORLD_SIZE"])

    def post(self, case: int, rank: int, outcome: dict[str, Any]) -> None:
        """Keep the first outcome of this rank in this case."""
        self.store.compare_set(f"{case}/{rank}", "", json.dumps(outcome))
        if outcome["kind"] != "right":
            self.store.set("failed", str(case))

    def failed(self) -> int | None:
        """The case in which a rank has failed."""
        return int(self.store.get("failed")) if self.store.check(["failed"]) else None

    def outcomes(self, case: int) -> dict[int, dict[str, Any]]:
        """Those that are there, by rank."""
        there = [r for r in range(self.size) if self.store.check([f"{case}/{r}"])]
        return {r: json.loads(self.store.get(f"{case}/{r}")) for r in there}

    def everyone(self, case: int, seconds: float) -> dict[int, dict[str, Any]]:
        """The outcomes of all ranks; of those that came in this time."""
        keys, end = [f"{case}/{r}" for r in range(self.size)], time.monotonic() + seconds
        while not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.005)
        return self.outcomes(case)

    def note(self, case: int, rank: int, event: list[Any]) -> None:
        """Keep an event of this rank, in order."""
        self.store.append(f"{case}/{rank}/events", json.dumps(event) + "\n")

    def events(self, case: int) -> list[list[list[Any]]]:
        """The events of each rank in this case."""
        keys = [f"{case}/{r}/events" for r in range(self.size)]
        texts = [self.store.get(key).decode() if self.store.check([key]) else "" for key in keys]
        return [[json.loads(line) for line in text.splitlines()] for text in texts]


class Rank:
    """One rank of a run, as a check sees it: ``case`` runs one case, and returns if all ranks were right.

    rank, size, device, backend: of the process group, which is there from the first case on.
    """

    def __init__(self, answer: Callable, hangs_after: float, leave: Callable[[], None]):
        self._leave = leave  # how this process ends while its main thread hangs
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.backend, self.device = backend_for_this_host(), torch.device("cpu")
        self.answer, self.file = answer, answer.__code__.co_filename
        self.board, self.number = Board(), -1
        # NCCL connects two ranks at their first message.
        self.hangs_after = hangs_after * (1 + (self.backend == "nccl"))
        self._busy: tuple[int, float, float] | None = None  # the case, when it began, and its ``hangs_after``
        self._parent, self._main = os.getppid(), threading.main_thread().ident or 0
        threading.Thread(target=self._watch, name="exercise watch", daemon=True).start()
        self.case(self._join, hangs_after=JOINS_WITHIN_SECONDS)

    def _join(self) -> None:
        device = None
        if self.backend == "nccl":
            self.device = device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        store = dist.PrefixStore("group", self.board.store)
        # Longer than anything here: the watch is faster.
        limit = timedelta(seconds=JOINS_WITHIN_SECONDS + MOST * self.hangs_after)
        choose_interface()
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=limit, device_id=device
        )
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def case(self, run: Callable[[], Any], input: str = "", *, hangs_after: float | None = None) -> Any:
        """What ``run()`` returns, if it raises on no rank. Raises Over if it did.

        input: what the answer is given; that of the case before by default.  hangs_after: seconds in which no rank
        moves; those of the run by default.
        """
        if input:
            trying(input)
        self.number += 1
        self.board.store.set(f"at/{self.rank}", str(self.number))
        self._busy = (self.number, time.monotonic(), hangs_after or self.hangs_after)
        try:
            value, outcome = run(), {"kind": "right"}
        except (Exception, SystemExit) as error:
            value, outcome = None, self._described(error)
        self.board.post(self.number, self.rank, outcome)
        self._busy = None
        found = self.board.everyone(self.number, JOINS_WITHIN_SECONDS + (MOST + 1) * self.hangs_after)
        if len(found) < self.size or any(o["kind"] != "right" for o in found.values()):
            raise Over
        return value

    def world(self, group: Any = None) -> DistributedWorld:
        """A world of all ranks, or of a group. It waits longer than the watch, which knows the line."""
        return DistributedWorld(group, timeout=MOST * self.hangs_after, debug=self.backend == "nccl")

    def note(self, event: list[Any]) -> None:
        self.board.note(self.number, self.rank, event)

    def events(self) -> list[list[list[Any]]]:
        """What every rank noted in the case before this one."""
        return self.board.events(self.number - 1)

    def _described(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, Wrong):
            words = {"symptom": error.symptom, "input": error.input, "where": error.where, "cause": error.cause}
            return {"kind": "wrong", **words}
        frames, tb = [], error.__traceback__
        while tb is not None:
            frames.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno))
            tb = tb.tb_next
        line = next((n for file, n in reversed(frames) if file == self.file), None)
        text = plain(error).splitlines()[0]
        if isinstance(error, WorldError) or re.search(BROKEN, text):  # what follows from another rank's failure
            return {"kind": "told", "symptom": text, "line": line}
        name = type(error).__name__
        return {"kind": "raised", "symptom": name if text == name else f"{name}: {text}", "line": line}

    # The watch, on a thread of its own

    def _watch(self) -> None:
        """Post that this rank hangs, once nothing has moved on any rank for as long as its case allows."""
        board, place, spent = Board(), None, self._computed()
        moved = came = time.monotonic()  # when this rank or another one last moved, and when it came to this place
        count = 0
        while True:
            time.sleep(TICK)
            if os.getppid() != self._parent:  # torchrun or Ctrl-C has ended it
                os._exit(1)
            busy, now, (here, line), computed = self._busy, time.monotonic(), self._place(), self._computed()
            if busy is None or (busy[0], here) != place:
                place, came, moved = (busy and busy[0], here), now, now
            computing, spent = computed - spent > 0.05 * TICK, computed
            if busy is None:
                continue
            case, begun, hangs_after = busy
            others = [o["kind"] for r, o in board.outcomes(case).items() if r != self.rank]
            alone = not any(kind != "right" for kind in others)
            total = board.store.add("moves", int(computing or came == now))
            if computing or total != count and alone:
                moved = now
            count = total
            over = now - came > LONGER * hangs_after or now - begun > MOST * hangs_after
            if over or now - moved > (hangs_after if alone else min(hangs_after, HANGS_ALONE_AFTER_SECONDS)):
                board.post(case, self.rank, {"kind": "stuck", "line": line, "computing": computing})
                board.everyone(case, hangs_after)
                self._leave()

    def _computed(self) -> float:
        """Seconds of CPU time of the main thread. With CUDA none: there a thread that waits is busy too."""
        if not hasattr(time, "pthread_getcpuclockid") or self.device.type == "cuda":
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._main))

    def _place(self) -> tuple[Any, int | None]:
        """Where the main thread is, as something to compare, and the line of the answer's file."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        own = [f for f in frames if f.f_code.co_filename == self.file and f.f_code.co_name != "<module>"]
        return tuple((id(f), f.f_lasti) for f in own or frames), own[0].f_lineno if own else None


@dataclass(frozen=True)
class Exercise:
    """A torchrun exercise: ``exercise(answer)`` is the last line of its file.

    title: "01 ring pass".  check: runs the cases of one ``Rank``; may return a sentence for the line that says correct.
    stuck: where to look and the likely cause if ranks wait for ever.  prepare: what takes long and is no part of the
    answer, such as an import.
    """

    title: str
    check: Callable[..., str | None]
    stuck: tuple[str, str]
    prepare: Callable[[], Any] = lambda: None

    def __call__(self, answer: Callable, *given: Any) -> None:
        """Check the answer on this rank, print what all ranks found (rank 0 does), and end the process.

        given: what else of the file the check needs.
        """
        if "RANK" not in os.environ:
            file = os.path.relpath(answer.__code__.co_filename)
            print(f"{self.title}: start it on several ranks:\n  torchrun --nproc-per-node 4 {file}")
            _leave(2)
        verdict = self.verdict(answer, *given)
        if verdict is not None:
            print(verdict.message, flush=True)
        _leave(int("--strict" in sys.argv and verdict is not None and verdict.status != "passed"))

    def verdict(self, answer: Callable, *given: Any, hangs_after: float = HANGS_AFTER_SECONDS) -> Result | None:
        """On rank 0 what all ranks found, on the others None. torchrun's environment says which rank this is."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if has_blank(answer):
            file = os.path.relpath(answer.__code__.co_filename)
            text = f"{self.title}: not written yet. Fill in every `...` in {file}, then run the same command again."
            return Result(self.title, "unwritten", text) if rank == 0 else None
        self.prepare()
        server = None
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            port = int(os.environ["MASTER_PORT"])
            server = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=True, wait_for_workers=False)
        if sys.platform != "linux" or not self._in_a_child(answer, given, hangs_after):
            self._work(answer, given, hangs_after, lambda: self._give_up(answer))
        board = Board()
        verdict = self._judge(board, answer) if rank == 0 else None
        board.store.set(f"gone/{rank}", "")
        end = time.monotonic() + 5
        while (
            server is not None and time.monotonic() < end and not board.store.check([f"gone/{r}" for r in range(size)])
        ):
            time.sleep(0.01)
        return verdict

    def _give_up(self, answer: Callable) -> None:
        """The main thread hangs, and is the one that would say so."""
        if os.environ["RANK"] == "0":
            print(self._judge(Board(), answer).message, flush=True)
        _leave(0)

    def _work(self, answer: Callable, given: Sequence[Any], hangs_after: float, leave: Callable[[], None]) -> None:
        try:
            rank = Rank(answer, hangs_after, leave)
            remark = self.check(rank, answer, *given)
            rank.case(lambda: None)  # nobody leaves before all are right
            if rank.rank == 0:
                rank.board.store.set("remark", remark or "")
            rank.board.store.set("backend", rank.backend)
        except Over:
            pass

    def _in_a_child(self, answer: Callable, given: Sequence[Any], hangs_after: float) -> bool:
        """Whether it could: CUDA does not work in the child of a process that has already asked for GPUs."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
                if torch.cuda._is_in_bad_fork():
                    code = NOT_HERE
                elif os.getppid() == parent:
                    self._work(answer, given, hangs_after, lambda: _leave(0))
                    code = 0
            except KeyboardInterrupt:
                pass
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                _leave(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == NOT_HERE:
            return False
        if code:
            board, rank = Board(), int(os.environ["RANK"])
            case = int(board.store.get(f"at/{rank}")) if board.store.check([f"at/{rank}"]) else 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            board.post(case, rank, {"kind": "ended", "symptom": f"the process was ended {how}"})
        return True

    # What is said

    def _judge(self, board: Board, answer: Callable) -> Result:
        end = time.monotonic() + JOINS_WITHIN_SECONDS
        while not board.store.check(["remark"]) and board.failed() is None and time.monotonic() < end:
            time.sleep(0.01)
        case = board.failed()
        if case is None:
            if not board.store.check(["remark"]):
                return Result(self.title, "failed", f"{self.title}: the ranks did not find each other.")
            ranks = f"{board.size} rank{'s' if board.size > 1 else ''}"
            where = {"nccl": "NCCL", "gloo": "gloo"}[board.store.get("backend").decode()]
            remark = board.store.get("remark").decode()
            said = f"{self.title}: correct on {ranks} ({where})." + (f" {remark}" if remark else "")
            return Result(self.title, "passed", said)
        found = board.everyone(case, HANGS_ALONE_AFTER_SECONDS + 3)
        for r in range(board.size):
            found.setdefault(r, {"kind": "stuck"})
        return Result(self.title, "failed", self._say(found, board.events(case), answer.__code__.co_filename))

    def _say(self, found: dict[int, dict[str, Any]], events: list[list[list[Any]]], file: str) -> str:
        """Those who failed by themselves, beside each other; then those who were right, or only waited for them."""
        for kinds in (("wrong", "raised", "ended"), ("told",), ("stuck",)):
            own = [r for r, o in sorted(found.items()) if o["kind"] in kinds]
            if own:
                break
        problem = explain(events) if any(found[r]["kind"] in ("ended", "stuck", "told") for r in own) else None
        groups: dict[tuple[tuple[str, str], ...], dict[str, list[int]]] = {}
        for r in own:
            symptom, rest = self._words(found[r], problem, file)
            groups.setdefault(rest, {}).setdefault(symptom, []).append(r)
        lines = [f"{self.title}: not yet, on {len(found)} rank{'s' * (len(found) > 1)}."]
        for rest, symptoms in groups.items():
            label = "what happens"
            for symptom, ranks in symptoms.items():
                lines += _line(label, f"{_ranks(ranks, len(found))}: {symptom}")
                label = ""
            for label, text in rest:
                lines += _line(label, text)
        others = [r for r in sorted(found) if r not in own]
        right = [r for r in others if found[r]["kind"] == "right"]
        stopped = [r for r in others if r not in right]
        words = [f"{_ranks(right)}: right so far"] * bool(right)
        words += [f"{_ranks(stopped)}: stopped while waiting for a message"] * bool(stopped)
        return "\n".join(lines + (_line("the others", "; ".join(words)) if words else []))

    def _words(
        self, outcome: dict[str, Any], problem: Wrong | None, file: str
    ) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What happened to a rank, and what there is to say about it."""
        kind, line, symptom = outcome["kind"], outcome.get("line"), outcome.get("symptom", "")
        at = f"line {line}, `{linecache.getline(file, line).strip()}`" if line else ""
        first, (where, cause) = ("", ""), self.stuck
        if kind == "wrong":
            first, where, cause = ("input", outcome["input"]), outcome["where"], outcome["cause"]
        elif kind == "raised":
            where, cause = at or "the function that you wrote", "a name, a shape or an argument, as the message says"
            if ".grad" in where and "Expected parameter" in symptom:
                cause = "p.grad is None on a rank that runs no backward: each rank runs it, with or without a target"
        elif kind == "ended" and "SIG" not in symptom:
            where, cause = "the function that you wrote", "os._exit, or a crash: nothing else ends a rank like this"
        else:
            if kind == "stuck":
                doing = "computing" if outcome.get("computing") else "waiting"
                symptom = f"{doing} for ever in {at}" if at else "waiting for ever for a message to arrive"
            elif kind == "ended":
                where = "the shapes of what is sent and of what receives it"
                cause = "gloo ends a process to which more bytes are sent than its receive buffer holds"
            if outcome.get("computing"):
                where, cause = at, "a loop that does not end"
            elif problem:
                first, where, cause = ("messages", problem.symptom), problem.where, problem.cause
        rest = (first, ("where to look", where), ("likely cause", cause))
        return symptom, tuple((label, text) for label, text in rest if text)


def _ranks(ranks: list[int], size: int = 0) -> str:
    if len(ranks) == size > 1:
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _line(label: str, text: str) -> list[str]:
    """A labelled text, wrapped for a terminal."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {label:<14} ", subsequent_indent=" " * 17, break_long_words=False
    )


def _leave(code: int) -> None:
    """End the process without Python's shutdown, where gloo's threads sometimes abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


FEW = "Run it with 4 ranks too: with fewer, some mistakes do not show."


def said_of_few(rank: Rank, enough: int = 3) -> str:
    """What is added to the verdict on few ranks."""
    return FEW if rank.size < enough else ""

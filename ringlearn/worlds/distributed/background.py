"""Calls that give up: the job's key-value store waits without end for an answer from a host that is cut off.

A lost host closes no connection, so TCPStore's ``check`` and ``get`` never return, and as it serves one call at a time,
every other thread that asks waits behind them. So one thread of its own asks, and whoever wants to know waits for a
while only.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any


class Patience:
    """Runs functions one after the other on a thread of its own; ``patience(fn, *args)`` is ``fn(*args)``, or an error.

    seconds: after which a call raises RuntimeError. While the thread is stuck for longer, calls raise at once.

    >>> patience = Patience(0.05)
    >>> patience(max, 1, 2)
    2
    >>> patience(time.sleep, 0.2)
    Traceback (most recent call last):
    RuntimeError: no answer for 0.05 s
    >>> patience.close()
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._since: float | None = None  # when the thread began with what it is at
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="ringlearn store", daemon=True).start()

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        since = self._since
        if since is not None and time.monotonic() - since > self.seconds:
            raise RuntimeError(f"no answer for {self.seconds:g} s")
        answer: queue.SimpleQueue = queue.SimpleQueue()
        self._asked.put((fn, args, answer))
        try:
            value, error = answer.get(timeout=self.seconds)
        except queue.Empty:
            raise RuntimeError(f"no answer for {self.seconds:g} s") from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            fn, args, answer = asked
            self._since = time.monotonic()
            try:
                answer.put((fn(*args), None))
            except Exception as error:
                answer.put((None, error))
            self._since = None
            del asked, fn, args, answer


class Waiter:
    """Waits for gloo's messages on a thread of its own, so that the main thread can hear of failures and Ctrl-C.

    gloo's ``wait`` cannot be interrupted, and one that times out closes all connections, so it cannot be sliced either.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue = queue.SimpleQueue()
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(
            target=_wait_for, args=(self._works, self._answers), name="ringlearn wait", daemon=True
        ).start()

    def ask(self, works: Sequence[Any], timeout: float) -> None:
        self._works.put((works, timedelta(seconds=timeout)))

    def answer(self, seconds: float) -> str | None:
        """None: not yet.  "": all has arrived.  Else what went wrong."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._works.put(None)


def _wait_for(works: queue.SimpleQueue, answers: queue.SimpleQueue) -> None:
    while (asked := works.get()) is not None:
        text, work = "", None
        try:
            for work in asked[0]:
                work.wait(asked[1])
        except RuntimeError as error:
            text = plain(error)
        del asked, work  # they hold the buffers
        answers.put(text)


def plain(error: Exception) -> str:
    """gloo's message without its source line and advice."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". This is typically")[0]
    return text.strip() or type(error).__name__

"""Calls that give up: the job's key-value store waits without end for an answer from a host that is cut off.

A lost host closes no connection, so TCPStore's ``check`` and ``get`` never return, and as it serves one call at a time,
every other thread that asks waits behind them. So one thread of its own asks, and whoever wants to know waits for a
while only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
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

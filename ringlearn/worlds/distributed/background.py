"""Make calls on a separate thread, so that the thread that needs the answer can give up waiting for it.

Two calls of torch cannot be interrupted. The key-value store's ``check`` and ``get`` never return when the host that
holds it is cut off, for a lost host closes no connection; and as the store serves one call at a time, every other
thread that asks waits behind them. gloo's ``wait`` cannot be cut into slices either, since one that times out closes
all connections. An executor of ``concurrent.futures`` will not do: a process that ends waits for its threads.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any


class Background:
    """A daemon thread that makes calls, one after the other.

    >>> background = Background("example")
    >>> background.submit(max, 1, 2).result()
    2
    >>> background.call(0.05, time.sleep, 0.2)
    Traceback (most recent call last):
    RuntimeError: no answer for 0.05 s
    >>> background.close()
    """

    def __init__(self, name: str):
        self._since: float | None = None  # when the thread began the call that it is making
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"ringlearn {name}", daemon=True).start()

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future:
        """Queue a call, to be made when those before it are done."""
        future: Future = Future()
        self._calls.put((future, fn, args))
        return future

    def call(self, seconds: float, fn: Callable[..., Any], *args: Any) -> Any:
        """Return ``fn(*args)``. Raises RuntimeError after so many seconds; at once if it is stuck for longer."""
        since = self._since
        if since is None or time.monotonic() - since <= seconds:
            future = self.submit(fn, *args)
            try:
                return future.result(seconds)
            except TimeoutError:
                if future.done():  # the call's own
                    raise
        raise RuntimeError(f"no answer for {seconds:g} s")

    def close(self) -> None:
        """End the thread, once the calls that were submitted are done."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, fn, args = asked
            self._since = time.monotonic()
            try:
                future.set_result(fn(*args))
            except Exception as error:
                future.set_exception(error)
            self._since = None
            del asked, future, fn, args  # they may hold buffers


def wait_for_all(works: Sequence[Any], seconds: float) -> str:
    """Wait for gloo's messages. Returns "", or what went wrong."""
    try:
        for work in works:
            work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        return plain(error)
    return ""


def plain(error: Exception) -> str:
    """gloo's error message without its source line and advice."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". This is typically")[0]
    return text.strip() or type(error).__name__

"""The child side of ``launch``: a process that runs functions until its parent closes the connection."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ..worlds.distributed.faults import WorldError, is_connection_error
from ..worlds.distributed.join import backend_for_this_host, join
from .pool import STARTED


def serve(tasks: Connection, backend: str | None) -> None:
    loaded: dict[str, float] = {}  # file -> when it was written, as it was loaded
    while True:
        try:
            port, task = tasks.recv()
        except (EOFError, OSError):
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            (module, file, name), arguments, sys.path[:] = pickle.loads(task)
            fn = find(module, file, name, loaded)
            args = _arguments(arguments)
            if backend is not None:
                backend = backend_for_this_host() if backend == "auto" else backend
                join(backend)
                if backend == "gloo":  # a rank that is done at once must not leave while others still connect to it
                    dist.barrier()
            value = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), fn(*args))
            answer = _pickled(value)
            del fn, value, args
        except BaseException as error:
            text = "".join(traceback.format_exception(_without_this_file(error)))
            noticed = isinstance(error, WorldError) or is_connection_error(error)
            answer = pickle.dumps(("raised", None, f"{type(error).__name__}: {error}", text, noticed))
            del error
        gc.collect()  # a world that nobody holds says goodbye
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        tasks.send_bytes(answer)


def _arguments(pickled: bytes) -> tuple[Any, ...]:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise ValueError(
            f"launch: the arguments cannot be unpickled in the processes ({type(error).__name__}: {error}); a class "
            f"or a function among them must be importable there: define it at the top level of a file that can be "
            f"imported, not in a notebook or in the script that is being run"
        ) from None


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(("returned", value, "", "", False))
    except Exception as error:
        raise ValueError(
            f"launch: the value that the function returned cannot be sent to the parent ({error}); return tensors, "
            f"numbers, strings, or lists and dicts of them"
        ) from None


def find(module: str, file: str, name: str, loaded: dict[str, float]) -> Callable[..., Any]:
    """The function, from the file as it is now: the user may have edited it since the pool started."""
    written = os.path.getmtime(file) if os.path.exists(file) else 0.0
    if module:
        found = importlib.import_module(module)
        if loaded.get(file, written) != written:
            found = importlib.reload(found)
    else:
        stem = Path(file).stem
        found = sys.modules.get(stem)
        if found is None or getattr(found, "__file__", None) != file or loaded.get(file) != written:
            spec = importlib.util.spec_from_file_location(stem, file)
            if spec is None or spec.loader is None:
                raise ImportError(f"launch: expected a Python file, got {file}")
            found = importlib.util.module_from_spec(spec)
            if str(Path(file).parent) not in sys.path:
                sys.path.insert(0, str(Path(file).parent))
            sys.modules[stem] = found
            spec.loader.exec_module(found)
    loaded[file] = written
    for part in name.split("."):
        if not hasattr(found, part):
            raise AttributeError(f"launch: {file} has no function {name}")
        found = getattr(found, part)
    return found


def _without_this_file(error: BaseException) -> BaseException:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return error.with_traceback(tb)


def _end_with(parent: int) -> None:
    """If the parent is killed, before this process has begun too, end, whatever the main thread is doing."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    threading.Thread(target=_end_with, args=(int(sys.argv[3]),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(STARTED)  # from here on the fault handler answers; before, the signal would end this process
    serve(connection, None if sys.argv[2] == "None" else sys.argv[2])

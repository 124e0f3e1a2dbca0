"""Real text that is on every machine: the source files of Python's own standard library, as bytes.

A byte-level model needs no tokenizer and no download: a file is a sequence of numbers from 0 to 255. The library has
about ten million bytes of English prose and code, with names that come back thousands of bytes after they were defined,
which is what long context is about.

The files differ between Python versions. Where a result must not differ, use :func:`zen`, which is the same in every
Python 3.
"""

from __future__ import annotations

import ast
import codecs
import os
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Tests hold odd bytes on purpose, installed packages are not the library, and generated files name this machine.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"}


def _root() -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "this.py").is_file():
        raise ValueError(
            f"expected the source files of Python's standard library in {root}, found no this.py there; use a Python "
            "that was installed with its library as files (python.org, conda, apt, Colab), not one packed into a zip"
        )
    return root


@cache
def standard_library_files() -> tuple[str, ...]:
    """The library's source files as paths relative to its folder, with ``/``, sorted: the same order everywhere.

    Raises ValueError if this Python has no source files.

    >>> files = standard_library_files()
    >>> "this.py" in files, "json/decoder.py" in files, list(files) == sorted(files)
    (True, True, True)
    """
    root, files = _root(), []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]  # do not walk into site-packages
        files += [
            (Path(folder) / name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return tuple(sorted(files))


def read(name: str) -> bytes:
    r"""The bytes of one file of the standard library, with every line ending as ``\n``.

    name: a path from :func:`standard_library_files`. Raises ValueError if there is no such file.

    >>> read("this.py").startswith(b's = ')
    True
    """
    if name not in standard_library_files():
        raise ValueError(f"expected a file of the standard library such as 'json/decoder.py', got {name!r}")
    return (_root() / name).read_bytes().replace(b"\r\n", b"\n")


def standard_library_bytes(limit: int | None = None) -> bytes:
    """The library's files one after the other, in order, cut after ``limit`` bytes (None: all of them).

    Deterministic for one version of Python. Raises ValueError if limit is negative or beyond what there is.

    >>> len(standard_library_bytes(1_000_000))
    1000000
    """
    if limit is not None and limit < 0:
        raise ValueError(f"standard_library_bytes: limit must be 0 or more, got {limit}")
    pieces, length = [], 0
    for name in standard_library_files():
        if limit is not None and length >= limit:
            break
        pieces.append(read(name))
        length += len(pieces[-1])
    if limit is not None and length < limit:
        raise ValueError(f"standard_library_bytes: this Python's library has {length} bytes, got limit={limit}")
    return b"".join(pieces)[:limit]


def zen() -> bytes:
    """The Zen of Python: 856 bytes, the same in every Python 3, decoded from the library's ``this.py``.

    >>> zen()[:33], len(zen())
    (b'The Zen of Python, by Tim Peters\\n', 856)
    """
    # `import this` would print it. The file holds it as a string in rot13, its first statement.
    statement = ast.parse(read("this.py")).body[0]
    return codecs.decode(ast.literal_eval(statement.value), "rot13").encode()


def to_tensor(data: bytes, device: torch.device | str | None = None) -> Tensor:
    """The bytes as a tensor (N,) of int64 in 0..255, ready to index an embedding.

    >>> to_tensor(b"ring")
    tensor([114, 105, 110, 103])
    """
    return torch.tensor(list(data), dtype=torch.int64, device=device)


def to_bytes(tokens: Tensor) -> bytes:
    """The inverse of :func:`to_tensor`. Raises ValueError if a token is not in 0..255.

    >>> to_bytes(to_tensor(b"ring"))
    b'ring'
    """
    tokens = tokens.detach().reshape(-1).cpu()
    if tokens.numel() and not (0 <= int(tokens.min()) and int(tokens.max()) <= 255):
        raise ValueError(f"to_bytes: tokens must be in 0..255, got {int(tokens.min())} to {int(tokens.max())}")
    return bytes(tokens.tolist())


def context_scores(data: bytes, position: int, width: int = 8) -> Tensor:
    """Attention scores of one query over a text: how many bytes of its recent context each key's context shares.

    The query at ``position`` is the ``width`` bytes before it; key j is the ``width`` bytes before place ``width + j``,
    for every earlier place. Their dot product, with each byte one-hot, is the number of bytes that agree. With the byte
    *at* a key's place as its value, attention predicts the next byte from what followed similar contexts.

    Returns (position - width,) in float32, whole numbers from 0 to width. Raises ValueError if there is no such key.

    >>> context_scores(b"abcabcab", position=8, width=2)
    tensor([2., 0., 0., 2., 0., 0.])
    """
    if not 1 <= width < position <= len(data):
        raise ValueError(
            f"context_scores: expected 1 <= width < position <= {len(data)} bytes, got {width=} and {position=}"
        )
    x = to_tensor(data[:position])
    query = x[position - width :]
    keys = x.unfold(0, width, 1)[:-1]  # (N, width); the last window is the query itself
    return (keys == query).sum(-1).float()

"""Describe values as text: ranks compare such texts to find out whether they hold the same, and errors show them.

Two ranks cannot send each other a function, but they can compare what it is made of: its byte code, its constants, its
default arguments, and the variables that it has captured. ``repr`` will not do: it shortens tensors, and shows an inner
function by its address, which differs from rank to rank.
"""

from __future__ import annotations

import functools
import inspect
import operator
from hashlib import sha256
from numbers import Real
from types import CodeType
from typing import Any

import torch
from torch import Tensor


def described(x: Any, used: frozenset[str] = frozenset(), depth: int = 8) -> str:
    """A text that two processes can compare to tell whether they hold the same function.

    It covers code, constants, defaults, closures and ``functools.partial``, the numbers, strings, tensors and arrays in
    them, and those attributes of an object (``self``) that the code mentions. It does not cover globals, or anything
    nested more deeply than ``depth``.

    used: the names that occur in the code that has captured ``x``.  depth: how far to look (functions may be cyclic).

    >>> described(lambda q, k, w=4: q - k < w) == described(lambda q, k, w=5: q - k < w)
    False
    """

    def parts(*items: Any, names: frozenset[str] = used) -> str:
        return ", ".join(described(item, names, depth - 1) for item in items)

    if isinstance(x, bool | int | float | complex | str | bytes | range | slice | type(None)):
        return repr(x)
    if depth == 0:
        return type(x).__qualname__
    if isinstance(x, functools.partial):
        return f"partial({parts(x.func, x.args, x.keywords)})"
    if inspect.ismethod(x):
        names = used | frozenset(x.__func__.__code__.co_names)
        return f"method({parts(x.__func__, x.__self__, names=names)})"
    if inspect.isfunction(x):
        names = used | frozenset(x.__code__.co_names)
        around = [_contents(cell) for cell in x.__closure__ or ()]
        return f"function({parts(x.__code__, x.__defaults__, x.__kwdefaults__, *around, names=names)})"
    if isinstance(x, CodeType):
        return f"code({x.co_code!r}, {x.co_names}, {parts(*x.co_consts)})"
    if isinstance(x, Tensor):
        return f"tensor({tuple(x.shape)}, {x.dtype}, {checksum(x) if x.device.type != 'meta' else 'meta'})"
    if hasattr(x, "tobytes"):  # a NumPy array or scalar
        return f"array({getattr(x, 'shape', ())}, {sha256(x.tobytes()).hexdigest()})"
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({parts(*x)})"
    if isinstance(x, dict):
        return f"dict({parts(*x.items())})"
    call = inspect.getattr_static(type(x), "__call__", None)
    if inspect.isfunction(call):  # an object that is called like a function
        used = used | frozenset(call.__code__.co_names)
        return f"{type(x).__qualname__}({parts(call.__code__)}, {_held(x, used, depth)})"
    return f"{getattr(x, '__qualname__', type(x).__qualname__)}({_held(x, used, depth)})"


def _held(x: Any, used: frozenset[str], depth: int) -> str:
    """The attributes of an object that some code mentions."""
    held = getattr(x, "__dict__", {})
    return ", ".join(f"{name}={described(held[name], used, depth - 1)}" for name in sorted(used & held.keys()))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def checksum(tensor: Tensor) -> str:
    """The same text for the same bits, on any device, and another for others, but for a chance of 2**-64."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for chunk in flat.split(1 << 24) if flat.numel() else ():
        words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)
        weights = torch.arange(1, 2 * words.numel(), 2, device=words.device) * -7046029254386353131
        mixed = (words ^ (words >> 29)) * weights  # int64 arithmetic wraps around: exact everywhere
        total = (total * 31 + int((mixed ^ (mixed >> 32)).sum())) % (1 << 64)
    return f"{total:016x}"


def whole_number(x: object) -> int | None:
    """x as an int, if it is an integer of any kind: Python's, NumPy's, or an integer tensor of one element.

    >>> whole_number(torch.tensor(3)), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    if type(x) is int:
        return x
    if isinstance(x, bool) or isinstance(x, Tensor) and (x.dtype == torch.bool or x.numel() != 1):
        return None
    try:
        return operator.index(x)
    except (TypeError, RuntimeError):  # a float; a tensor on the meta device
        return None


def is_timeout(x: object) -> bool:
    """Whether x is a number of seconds that one can wait: above 0, and below 1e9, which is 30 years.

    >>> is_timeout(60), is_timeout("60"), is_timeout(0), is_timeout(float("inf"))
    (True, False, False, False)
    """
    return isinstance(x, Real) and not isinstance(x, bool) and 0 < x < 1e9


def shown(x: object) -> str:
    """A value as text that fits on one line; a large tensor is shown by its shape.

    >>> shown(torch.zeros(500, 500)), shown([1, 2])
    ('a tensor (500, 500) of torch.float32', '[1, 2]')
    """
    if isinstance(x, Tensor) and x.numel() > 8:
        return f"a tensor {tuple(x.shape)} of {x.dtype}"
    text = " ".join(repr(x).split())
    return text if len(text) <= 80 else f"{text[:60]}... ({type(x).__name__})"

"""What callers hand over: integers of any kind, and a short text of anything, for an error."""

from __future__ import annotations

import operator

import torch
from torch import Tensor


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


def shown(x: object) -> str:
    """A text of what came that fits into a line: of a large tensor its shape.

    >>> shown(torch.zeros(500, 500)), shown([1, 2])
    ('a tensor (500, 500) of torch.float32', '[1, 2]')
    """
    if isinstance(x, Tensor) and x.numel() > 8:
        return f"a tensor {tuple(x.shape)} of {x.dtype}"
    text = " ".join(repr(x).split())
    return text if len(text) <= 80 else f"{text[:60]}... ({type(x).__name__})"

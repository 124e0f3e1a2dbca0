"""What ``torch.compile`` is to leave alone: functions at which it breaks its graph, and which run as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Args = ParamSpec("Args")
Result = TypeVar("Result")


def uncompiled(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """Like ``torch.compiler.disable``, but without importing the compiler, which takes a second that few programs need.

    Ranks must post their messages in one order, and a compiler that looks into a rank program would only find pieces.
    """
    disabled: list[Callable[Args, Result]] = []

    @wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if not disabled:
            if "torch._dynamo" not in sys.modules:  # nobody compiles anything
                return fn(*args, **kwargs)
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # not traced into either, in the call that comes first
    return call

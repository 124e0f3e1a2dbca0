"""FlashAttention 4, an optional package: the fastest kernel on Hopper GPUs for every tile but PARTIAL ones.

``pip install 'ringlearn[fa4]'`` brings the package ``flash-attn-4``. It is written in Python: it compiles a kernel
when it is first called with tensors of a new kind, which takes some seconds, and keeps it. Its two functions are
called directly, because torch's own way to it (``torch.nn.attention.activate_flash_attention_impl``) lags behind the
package, and refuses windows in the backward.

It counts as FlashAttention 2 does: (B, S, H, D), or (rows of all sequences, H, D) with ``cu_seqlens``; a window is two
numbers of columns on either side of the diagonal that ends in the last row and column, ``Call.left, right``. Unlike
FlashAttention 2 it takes None for no limit, never limits to the number of columns, and gives out 0 and lse -inf to a
row that sees nothing. Its backward takes a gradient of lse.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..tiles import Kind, Tile
from .gpu import Gpu, capability_of, dotted
from .packing import pack, pack_lse, sequences, unpack, unpack_lse
from .scores import Scores

PACKAGE = "flash-attn-4"
CHECKED = ("4.0.0b36",)  # the versions that tests/gpu/check_kernels.py has found right
DIMS = (64, 96, 128)  # and 256. In 4.0.0b36 the backward is wrong for head dims such as 40, which are padded to these
SOFTCAP_DIMS = (64, 96, 128, 256)  # those with which softcap was checked
REMEMBERED = 4096  # calls whose kernels are known to be compiled

# The operations of a forward from which on an eager call is faster than one of the next kernel. Its kernels
# are faster than cuDNN's on an H100, but a call costs the host more, so with less work the GPU would wait. Windows and
# documents compute a part of these.
LEAST_WORK = {Kind.FULL: 1e11, Kind.CAUSAL: 1e11, Kind.SEGMENTS: 3e10}


class Fa4(Gpu):
    """FlashAttention 4, of the package flash-attn-4.

    softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2, before the mask; None leaves them as they are.
    Raises ValueError unless it is a positive number.

    >>> Fa4().name, Fa4(softcap=50).name
    ('fa4', 'fa4 softcap 50')
    """

    name = "fa4"
    oldest = (9, 0)
    takes_lse_grad = True
    forms = Kind.FULL, Kind.CAUSAL, Kind.SEGMENTS

    def __init__(self, softcap: float | None = None):
        if softcap is not None:
            if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not 0 < softcap < float("inf"):
                raise ValueError(f"Fa4: expected softcap to be a positive number, or None for none, got {softcap!r}")
            self.name = f"fa4 softcap {softcap:g}"
        self._softcap = softcap
        self._compiled: dict[tuple[Any, ...], None] = {}  # calls whose kernel is compiled
        self._launches: dict[tuple[Any, ...], Callable | None] = {}  # a forward's kernel, to be launched without asking

    def with_scores(self, scores: Scores) -> Fa4 | None:
        if scores.slopes is not None or self._softcap not in (None, scores.softcap):
            return None
        return self if self._softcap == scores.softcap else _capped(scores.softcap)

    def _refuses(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        reason = super()._refuses(q, k, v, kind)
        if reason is None and q.shape[1] != k.shape[1] and self._dims(q.shape[-1], v.shape[-1]) == (192, 128):
            reason = f"it takes D_k = 192 with D_v = 128 for as many key/value heads as query heads, got {k.shape[1]}"
        return reason or missing()

    def _refuses_dims(self, D_k: int, D_v: int, capability: tuple[int, int]) -> str | None:
        if capability[0] > 10:
            return f"it takes GPUs of compute capability 9.x and 10.x, got {dotted(capability)}"
        if self._softcap is not None and D_k not in SOFTCAP_DIMS:
            known = ", ".join(map(str, SOFTCAP_DIMS))
            return f"softcap was checked for head dims of {known}, to which smaller ones are padded, got {D_k}"
        if (D_k, D_v) == (192, 128) or D_k <= 128 or D_k == 256:
            return None
        return f"it takes head dims up to 128, of 256, or D_k = 192 with D_v = 128, got D_k = {D_k}, D_v = {D_v}"

    def passed_over(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str | None:
        capability = capability_of(q.device)
        if capability[0] != 9:
            name = f"compute capability {dotted(capability)}"
            return f"it was measured on GPUs of compute capability 9.x, got {name}; kernel='fa4' takes it all the same"
        (B, H, S_q, D_k), S_k, D_v = q.shape, k.shape[2], v.shape[-1]
        if self._softcap is not None:  # what comes next is the reference kernel
            return None
        if B * H * S_q * S_k * (D_k + D_v) < LEAST_WORK.get(kind, 0):  # a causal half of the scores
            return "a call of this size would wait for its host; as a CUDA graph, kernel='fa4' is faster all the same"
        return None

    def _dims(self, D_k: int, D_v: int) -> tuple[int, int]:
        if (D_k, D_v) == (192, 128):
            return D_k, D_v
        D, _ = super()._dims(D_k, D_v)
        D = next((checked for checked in DIMS if checked >= D), D)
        return D, D

    def _reads(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        # The copy engine reads the stride of every dim, even of one with a single index. A stride of 0 is compiled in.
        return super()._reads(shape, strides) and all(stride and stride % 8 == 0 for stride in strides[:-1])

    def _forward(self, q, k, v, tile, bias, scale):
        if tile.call is not None and not tile.call.alone:
            packed = pack(q), pack(k), pack(v)
            out, lse, *_ = self._call("_flash_attn_fwd", tile, scale, *packed, return_lse=True, **_sequences(tile, q))
            return unpack(out, q), unpack_lse(lse, q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = self._call("_flash_attn_fwd", tile, scale, q, k, v, return_lse=True)
        return out.transpose(1, 2), lse

    def _backward(self, dout, q, k, v, out, lse, tile, bias, scale, dlse=None):
        more: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled(), "dlse": dlse}
        if tile.call is not None and not tile.call.alone:
            more |= _sequences(tile, q) | {"dlse": None if dlse is None else pack_lse(dlse)}
            packed = pack(q), pack(k), pack(v), pack(out), pack(dout), pack_lse(lse)
            dq, dk, dv = self._call("_flash_attn_bwd", tile, scale, *packed, **more)
            return unpack(dq, q), unpack(dk, k), unpack(dv, v)
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        grads = self._call("_flash_attn_bwd", tile, scale, q, k, v, out, dout, lse, **more)
        return tuple(g.transpose(1, 2) for g in grads)

    def _call(self, name: str, tile: Tile, scale: float, *tensors: Tensor, **more: Any) -> tuple[Tensor, ...]:
        """Call a function of the package. Nothing is compiled while a CUDA graph is captured."""
        left, right = (tile.call.left, tile.call.right) if tile.call is not None else (None, None)
        sequences = more.get("cu_seqlens_q")
        known = (
            name,
            tile.kind,
            left is None,
            right and right > 0,  # None, 0 and more are three kernels
            more.get("dlse") is None,
            more.get("deterministic"),
            None if sequences is None else (len(sequences), more["max_seqlen_q"], more["max_seqlen_k"]),
            *((t.shape, t.dtype, t.device) for t in tensors[:3]),
        )
        exactly = known, left, right
        if (launch := self._launches.get(exactly)) is not None:
            return launch(scale, *tensors)
        if known not in self._compiled:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "kernel 'fa4': a CUDA graph is being captured, and FlashAttention 4 compiles itself when it is "
                    "first called with tensors of these shapes, which a capture cannot hold; make the same call once, "
                    "forward and backward, before you capture it"
                )
            if len(self._compiled) >= REMEMBERED:
                self._compiled.clear()
        function = getattr(_interface(), name)
        arguments = {
            "softmax_scale": scale,
            "causal": tile.kind is Kind.CAUSAL,
            "softcap": self._softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
            **more,
        }
        if name == "_flash_attn_fwd" and sequences is None and exactly not in self._launches:
            result, launch = _forward_and_launch(function, *tensors, **arguments)
            if len(self._launches) >= REMEMBERED:
                self._launches.clear()
            self._launches[exactly] = launch
        else:
            result = function(*tensors, **arguments)
        self._compiled[known] = None
        return result


class _Watched:
    """A stand-in for the package's table of compiled kernels, which remembers the kernel and what it was given."""

    def __init__(self, table: Any):
        self.table, self.kernel, self.given = table, None, ()

    def __contains__(self, key: Any) -> bool:
        return key in self.table

    def __setitem__(self, key: Any, kernel: Callable) -> None:
        self.table[key] = kernel

    def __getitem__(self, key: Any) -> Callable:
        def called(*given: Any) -> Any:
            self.kernel, self.given = self.table[key], given
            return self.kernel(*given)

        return called


def _forward_and_launch(
    forward: FunctionType, *tensors: Tensor, **arguments: Any
) -> tuple[tuple[Tensor, ...], Callable | None]:
    """Call the package's forward. Returns (out, lse), and a function that launches the same kernel on other tensors.

    The package finds its kernel again through a long piece of Python, which takes the host longer than the launch. With
    the same shapes and window, the kernel is given the same arguments behind q, k, v, out, lse and the scale. The
    second result is None if the first six are something else, or if there are tensors among the others.
    """
    watched = _Watched(forward.compile_cache)
    # A copy of the function that finds our table under its own name: other threads go on to use the package's.
    names = forward.__globals__ | {forward.__name__: SimpleNamespace(compile_cache=watched)}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    out, lse, *_ = copy(*tensors, **arguments)
    first, rest = watched.given[:6], watched.given[6:]
    expected = [*((t.data_ptr(), t.shape) for t in (*tensors, out, lse)), arguments["softmax_scale"]]
    found = [(x.data_ptr(), x.shape) if isinstance(x, Tensor) else x for x in first]
    if found != expected or any(isinstance(x, Tensor) for x in rest):
        return (out, lse), None
    kernel, dtype = watched.kernel, lse.dtype

    def launch(scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
        kernel(q.detach(), k.detach(), v.detach(), out, lse, scale, *rest)
        return out, lse

    return (out, lse), launch


@cache
def _capped(softcap: float) -> Fa4:
    """One for each softcap, because it knows what it has compiled."""
    return Fa4(softcap)


def _sequences(tile: Tile, q: Tensor) -> dict[str, Any]:
    """The arguments that say where each segment begins, and how long the longest is."""
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), sequences(tile, q), strict=True))


@cache
def missing() -> str | None:
    """Why the package cannot be used, or None if it can."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"the package {PACKAGE} is not installed; pip install 'ringlearn[fa4]' brings it"
    if found not in CHECKED:
        return f"{PACKAGE} {found} is installed, and only {', '.join(CHECKED)} was checked against dense attention"
    try:
        _interface()
    except Exception as error:  # a library that its compiler needs, a driver that is too old
        first_line = str(error).strip().split("\n")[0]
        return f"{PACKAGE} {found} cannot be imported: {type(error).__name__}: {first_line}"
    return None


@cache
def _interface() -> ModuleType:
    return importlib.import_module("flash_attn.cute.interface")

"""The exchange between GPUs of one host in one kernel: merge the splits, send to all ranks, wait for theirs, merge.

``exchange.all_gather`` takes a dozen short kernels and two copies, one after the other. Here one kernel writes this
rank's rows of (out, lse) into every rank's memory, over NVLink, and raises a flag there. Then the same kernel waits for
the flags that the others raise on this rank. In a CUDA graph on two H200 that takes 5.4 microseconds, where attention
to 32,768 tokens takes 38 on one (docs/measurements, decode-appends-2-h200 and decode-2-h200). Neither the host nor a
copy engine is involved, so a CUDA graph can contain it.

Every program of the kernel is a *channel*, which is independent of the other channels. It has some of the rows (the
same ones on every rank), a counter of its calls (its *epoch*), and in each rank's memory a flag and two boxes for each
rank that writes there.

    flag     the sender's latest epoch whose rows are in the box; it only grows
    box      one for even epochs and one for odd ones: the channel's rows of out, followed by their lse, in float32

In epoch e a channel (1) writes its rows to box e % 2 on every rank, its own included. It then (2) raises the flags to
e, with "release" semantics, so that a rank that sees the flag also sees the contents of the box. It (3) waits until all
flags on its own rank are at least e, with "acquire" semantics, and (4) merges the boxes in rank order, as ``merge_all``
does, so that all ranks end with the same bits.

Why two boxes are enough: a rank writes to the box of epoch e again in epoch e + 2. By then it has seen the flags of
e + 1 from all ranks, and a rank raises e + 1 in a later kernel than the one that read the box of e. Epochs are counted
in the GPU's memory, so a captured graph can be replayed, and calls with other shapes may come in between. The channels
of a kernel wait for each other across ranks, so all of them must run at the same time, which is why there are so few.
Flags only grow, so after a failure ``Mailboxes.release`` ends all waiting by raising them beyond every epoch.
"""

from __future__ import annotations

import torch

from ...partial import Partial
from ...partial.gpu import power_of_2
from ...partial.launch import launch
from ...worlds.distributed.mailboxes import CHANNELS, Mailboxes
from ...worlds.world import World
from . import gpu

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def mailboxes(world: World, exchange: str, rows: int, D_v: int) -> Mailboxes | None:
    """Boxes for an exchange of this many rows in one kernel; None if it takes the kernels of ``exchange.EXCHANGES``."""
    return world.mailboxes(numbers(rows, D_v)) if world.size > 1 and exchange == "all-gather" else None


def numbers(rows: int, D_v: int) -> int:
    """How many float32 numbers a box must hold for this many rows."""
    return -(-rows // CHANNELS) * (D_v + 1)


if triton is not None:

    @triton.jit
    def _box(boxes, rank, source, epoch, room, P: tl.constexpr, CHANNELS: tl.constexpr):
        """Where in a rank's memory this channel's box for a source begins: after the flags, which are int64."""
        memory = tl.load(boxes + rank).to(tl.pointer_type(tl.float32))
        return memory + 2 * P * CHANNELS + ((epoch % 2 * P + source) * CHANNELS + tl.program_id(0)) * room

    @triton.jit
    def _flag(boxes, rank, source, P: tl.constexpr):
        return tl.load(boxes + rank).to(tl.pointer_type(tl.int64)) + tl.program_id(0) * P + source

    @triton.jit(do_not_specialize=["rows", "splits"])
    def _merge_over_ranks(
        parts,
        lses,
        out,
        lse,
        boxes,
        epochs,
        rank,
        rows,
        splits,
        room,
        P: tl.constexpr,
        CHANNELS: tl.constexpr,
        D_V: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_R: tl.constexpr,
    ):
        channel, r, e = tl.program_id(0), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
        each = tl.cdiv(rows, CHANNELS)
        first = channel.to(tl.int64) * each
        last = tl.minimum(first + each, rows)
        epoch = tl.load(epochs + channel) + 1

        for start in range(first, last, BLOCK_R):
            row = start + r
            y, y_lse = gpu.merged_rows(parts, lses, row, last, splits, D_V, BLOCK_V, BLOCK_P)
            inside = (row < last)[:, None] & (e < D_V)[None, :]
            for to in tl.static_range(P):
                box = _box(boxes, to, rank, epoch, room, P, CHANNELS)
                tl.store(box + (row - first)[:, None] * D_V + e[None, :], y, mask=inside)
                tl.store(box + each * D_V + row - first, y_lse, mask=row < last)
        tl.debug_barrier()  # all threads have written before one of them raises the flags
        for to in tl.static_range(P):
            tl.atomic_max(_flag(boxes, to, rank, P), epoch, sem="release", scope="sys")
        for source in tl.static_range(P):
            while tl.atomic_add(_flag(boxes, rank, source, P), 0, sem="acquire", scope="sys") < epoch:
                pass
        tl.store(epochs + channel, epoch)

        for start in range(first, last, BLOCK_R):
            row = start + r
            inside = (row < last)[:, None] & (e < D_V)[None, :]
            total, lse_so_far = tl.zeros([BLOCK_R, BLOCK_V], tl.float32), tl.full([BLOCK_R], -float("inf"), tl.float32)
            for source in tl.static_range(P):  # as merge_all: the identity, then one rank after the other
                box = _box(boxes, rank, source, epoch, room, P, CHANNELS)
                y = tl.load(box + (row - first)[:, None] * D_V + e[None, :], mask=inside, other=0.0)
                y_lse = tl.load(box + each * D_V + row - first, mask=row < last, other=-float("inf"))
                top = tl.maximum(lse_so_far, y_lse)
                top = tl.where(top == -float("inf"), 0.0, top)
                a, b = tl.exp(lse_so_far - top), tl.exp(y_lse - top)
                empty = a + b == 0.0
                weights = tl.where(empty, 1.0, a + b)
                total = (a / weights)[:, None] * total + (b / weights)[:, None] * y
                lse_so_far = tl.where(empty, -float("inf"), top + tl.log(weights))
            tl.store(out + row[:, None] * D_V + e[None, :], total.to(out.dtype.element_ty), mask=inside)
            tl.store(lse + row, lse_so_far, mask=row < last)


def merge_over_ranks(parts: Partial, boxes: Mailboxes, dtype: torch.dtype = torch.float32) -> Partial:
    """Partial(out in a dtype, lse in float32) over all splits of all ranks, with the same bits on every rank.

    parts: this rank's splits, as ``gpu.attend`` returns them.  boxes: with room for ``numbers(rows, D_v)``.
    """
    *shape, splits, D_v = parts.out.shape
    out, lse = parts.out.new_empty(*shape, D_v, dtype=dtype), parts.lse.new_empty(shape)
    rows, together = lse.numel(), power_of_2(splits)
    each = -(-rows // CHANNELS)
    launch(
        _merge_over_ranks,
        (-(-rows // each), 1, 1),
        (*parts, out, lse, boxes.addresses, boxes.epochs),
        (boxes.rank, rows, splits, boxes.room),
        P=boxes.size,
        CHANNELS=CHANNELS,
        D_V=D_v,
        BLOCK_V=max(16, power_of_2(D_v)),
        BLOCK_P=together,
        BLOCK_R=max(1, min(power_of_2(each), 64 // together)),
    )
    boxes.used()
    return Partial(out, lse)

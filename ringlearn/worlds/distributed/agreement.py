"""Before any payload moves, the ranks compare what they are about to do.

A mismatch would otherwise be a hang (NCCL), garbage (gloo accepts a short message) or a crash. In every call each rank
sends one message of fixed size to every other rank, over a separate CPU group, and reads theirs: the name of the call,
what must be the same, what may differ, and whether the rank has found a problem in its own arguments. After that all
ranks know the same, so they raise together or go on together. It must happen in *every* call: a rank that skipped it
because it had seen the call before would leave a rank that has not waiting.

Only the backward of a ring on GPUs need not wait for what others say before it begins: the forward has settled what it
sends, and the host waits for no message. It hears them before it returns, and a difference then ends the world.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SIZE = 4096  # bytes of a message


def encode(op: str, same: Mapping[str, str], own: Mapping[str, Any], problem: Exception | None) -> Tensor:
    """What a rank says, as a message of SIZE bytes. Long texts in ``same`` are cut; their digests cover the whole.

    Raises ValueError if ``own`` alone is too long. The message must not be written: the last ones are kept.
    """
    told = problem and (type(problem).__name__, str(problem))
    return _encoded(op, tuple(same.items()), json.dumps(own, separators=(",", ":")), told)


@lru_cache(maxsize=128)
def _encoded(op: str, same: tuple[tuple[str, str], ...], own: str, told: tuple[str, str] | None) -> Tensor:
    for limit in (SIZE, 800, 400, 200, 100, 50, 20):
        record = {
            "op": _cut(op, 2 * limit),
            "same": {name: (_digest(text), _cut(text, limit)) for name, text in same},
            "own": json.loads(own),
            "problem": told and [_cut(text, 2 * limit) for text in told],
        }
        data = json.dumps(record, separators=(",", ":")).encode()
        if len(data) <= SIZE:
            return torch.frombuffer(bytearray(data.ljust(SIZE)), dtype=torch.uint8)
    raise ValueError(f"{op}: expected at most {SIZE} bytes that a rank tells the others, got {len(data)}")


def decode(message: Tensor) -> dict[str, Any]:
    """What a rank has said. The last messages are kept: most ranks say the same in every step."""
    return _decoded(ctypes.string_at(message.data_ptr(), message.numel()))


_decoded = lru_cache(maxsize=128)(json.loads)


def compare(records: list[dict[str, Any]], mine: int, problem: Exception | None) -> None:
    """Raise this rank's own problem if it has one, else another rank's, else the first difference."""
    if problem is not None:
        raise problem
    first = records[0]
    if all(r["op"] == first["op"] and r["same"] == first["same"] and not r["problem"] for r in records):
        return
    for rank, record in enumerate(records):
        if record["problem"]:
            kind, text = record["problem"]
            op = records[mine]["op"]
            raise ValueError(f"{op}: rank {rank} raised {kind}: {text.removeprefix(f'{op}: ')}")
    ops = [record["op"] for record in records]
    if len(set(ops)) > 1:
        raise ValueError(
            f"the ranks are in different calls: {_by_rank(ops)}. Every rank must make the same calls in the same "
            f"order, backward included"
        )
    for name in sorted({name for record in records for name in record["same"]}):
        said = [record["same"].get(name, ("", "nothing")) for record in records]
        if len({digest for digest, _ in said}) > 1:
            raise ValueError(
                f"{ops[0]}: {name}: expected the same on all ranks, got {_by_rank([_tell(*s, said) for s in said])}. "
                f"{_REMEDIES.get(name.split(' of ')[0], 'Pass the same on every rank')}"
            )


_REMEDIES = {
    "values": "Make them the same on every rank (torch.manual_seed), or pass src=0 to use those of rank 0",
    "input_ids": "Every rank passes the whole batch, of which split takes its part: no DistributedSampler",
    "world size": "Make the world on all ranks of the group",
    "check": "Make the world with the same arguments on every rank",
}


def _by_rank(texts: list[str]) -> str:
    """ "ranks 0, 2: causal; rank 1: full" """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in ranks.items())


def _tell(digest: str, text: str, said: list[tuple[str, str]]) -> str:
    """The text, with its digest if different texts look the same because they were cut or print alike."""
    alike = len({d for d, t in said if t == text}) > 1
    return f"{text} (digest {digest})" if alike else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"

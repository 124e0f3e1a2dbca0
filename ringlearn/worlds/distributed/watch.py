"""Who is lost, by signs of life alone: for a rank that waits where the library does not see it.

A rank that waits in one of the world's own messages notices by itself that none comes. In a collective of torch's own,
such as the sum of gradients in DDP, FSDP2 or ``rl.nn.backward``, or in a barrier of a checkpoint, it would wait for
half an hour, and then say nothing of who is missing. So its monitor thread looks after the others meanwhile.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .faults import Faults


class Watch:
    """When each rank has last been heard of, on this rank's own clock."""

    def __init__(self, faults: Faults):
        self.faults = faults
        self.answered = self.next = time.monotonic()
        self.heard: dict[int, tuple[int, float]] = {}

    def look(self) -> str | None:
        """The cause, once a rank that has not left the watched part has been silent for longer than the timeout."""
        faults, now = self.faults, time.monotonic()
        if now < self.next:
            return None
        self.next = now + max(0.25, faults.timeout / 40)
        try:
            words = faults.everyone()
        except RuntimeError:
            return f"{faults.unheard()}\n{self._here}" if now - self.answered > faults.timeout else None
        self.answered = now
        for rank, said in enumerate(words):
            if rank not in self.heard or self.heard[rank][0] != said["beat"]:
                self.heard[rank] = said["beat"], now
        # A rank that has left what this one is in may well be done; one that has not is missed, entered or not.
        missed = [r for r, said in enumerate(words) if said["left"] < faults.entered and said["state"] != "closed"]
        silent = {r: now - self.heard[r][1] for r in missed if r != faults.rank}
        if max(silent.values(), default=0) > faults.timeout:
            lost = [r for r, seconds in silent.items() if seconds > faults.timeout / 2]  # one host's do not end at once
            return f"{faults.silence(lost, words)}\n{self._here}"
        return None

    @property
    def _here(self) -> str:
        return f"Rank {self.faults.rank} noticed it: no sign of life for {self.faults.timeout:g} s"


def of_a_message(error: BaseException) -> bool:
    """Whether an error of torch means that another process could not be reached, and no mistake of this one."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search(
            r"gloo/|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|Read error|Write error", str(error)
        )
    )

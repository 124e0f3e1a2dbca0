"""Functions that the tests run on several processes; they must be importable, so they are no tests themselves."""

from __future__ import annotations

import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()

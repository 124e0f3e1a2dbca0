"""One rank in each process: the world over torch.distributed, and what keeps its ranks in step."""

from .world import DistributedWorld

__all__ = ["DistributedWorld"]

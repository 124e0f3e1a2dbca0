"""Worlds, where the ranks of a program live: one process simulates them all, or torch.distributed runs one in each."""

from .comm import Comm, Handle
from .distributed.faults import WorldError
from .distributed.world import DistributedWorld
from .memory import Memory
from .simulated import SimulatedWorld
from .trace import Event, Hardware, Trace
from .world import PerRank, Shards, World

__all__ = [
    "Comm",
    "DistributedWorld",
    "Event",
    "Handle",
    "Hardware",
    "Memory",
    "PerRank",
    "Shards",
    "SimulatedWorld",
    "Trace",
    "World",
    "WorldError",
]

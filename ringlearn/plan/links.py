"""Seconds of messages between GPUs, of which some share a node."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import GPU, INSIDE


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other: how many, and how many of them share a node.

    efficiency: the part of the network's bandwidth that messages reach.
    """

    gpu: GPU
    size: int
    places: int
    efficiency: float

    @staticmethod
    def of(gpu: GPU, size: int, stride: int, efficiency: float) -> Group:
        """Ranks r, r + stride, r + 2 stride, ...: ranks are numbered from the innermost axis outwards, through nodes.

        >>> from .hardware import gpu
        >>> Group.of(gpu("h100"), size=8, stride=2, efficiency=0.7).places
        4
        """
        return Group(gpu, size, max(1, min(size, gpu.node // stride)), efficiency)

    @property
    def nodes(self) -> int:
        return -(-self.size // self.places)

    def gather(self, nbytes: float) -> float:
        """Seconds until every rank has ``nbytes``, of which each held its share; a reduce-scatter takes as long.

        A ring of all ranks, with as many channels as a node has ranks: what a rank lacks comes over its own link, and
        into a node over the network ports of all its ranks together (nccl-tests, PERFORMANCE.md: bus bandwidth).
        """
        if self.size == 1 or not nbytes:
            return 0.0
        lacking = nbytes * (self.size - 1) / self.size
        across = lacking / self.places if self.nodes > 1 else 0.0
        return self._slower(lacking, across) + self.latency

    def reduce(self, nbytes: float) -> float:
        """Seconds of an all-reduce of ``nbytes`` on each rank: a reduce-scatter, and a gather of the sums."""
        return 2 * self.gather(nbytes)

    def exchange(self, inner: float, outer: float, messages: int = 1) -> float:
        """Seconds in which a rank sends inner bytes inside its node and outer bytes to others, side by side."""
        if self.size == 1:
            return 0.0
        return self._slower(inner, outer) + messages * (
            self.gpu.network_latency if self.nodes > 1 else self.gpu.latency
        )

    def _slower(self, inside: float, across: float) -> float:
        return max(inside / self.gpu.link / INSIDE, across / self.gpu.network / self.efficiency)

    @property
    def latency(self) -> float:
        """Seconds of a collective without bytes: a step inside the node, log2(nodes) of them between nodes."""
        return self.gpu.latency * (self.places > 1) + self.gpu.network_latency * (self.nodes - 1).bit_length()

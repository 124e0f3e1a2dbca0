"""Where a run computes: one device, ranks simulated in this process, or a mesh of processes."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..layouts import Layout
from ..nn import Transformer, shard_tokens
from ..worlds import DistributedWorld, SimulatedWorld
from ..worlds.distributed.join import backend_for_this_host, join
from ..worlds.world import World

_PROGRAM = "the command line"
_OWN = ("save", "record", "print_every")  # options that may differ from host to host


@dataclass(frozen=True)
class Place:
    """The ranks of a run, seen from this process: dp x cp of them, or dp x outer x inner.

    world: the ranks that share this process's sequences; None on one device.  group: all processes, over dp and cp;
    None if there is one.  everyone: the world of all of them, which watches over the run.
    dp, dp_rank: how many groups of ranks have sequences of their own, and which this one is.
    """

    device: torch.device
    layout: Layout
    world: World | None = None
    group: dist.ProcessGroup | None = None
    everyone: World | None = None
    mesh: DeviceMesh | None = None
    dp: int = 1
    dp_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints."""
        return self.group is None or dist.get_rank() == 0

    def __str__(self) -> str:
        if self.world is None:
            return f"one device ({self.device})"
        if self.group is None:
            return f"{self._ranks} simulated ranks, {self.layout} ({self.device})"
        names = "cp" if len(self.world.shape) == 1 else "outer x inner"
        return f"{self.dp} x {self._ranks} ranks (dp x {names}), {self.layout} ({self.device})"

    @property
    def _ranks(self) -> str:
        return " x ".join(map(str, self.world.shape))

    def own(self, rows: range) -> range:
        """The sequences of a micro-batch that this process's ranks share."""
        return rows[self.dp_rank :: self.dp]

    def split(self, *tensors: Tensor) -> Any:
        """This process's part of tensors (B, S), on its device."""
        if self.world is None:
            return tuple(t.to(self.device) for t in tensors)
        return shard_tokens(self.world, *tensors, layout=self.layout)

    def agree(self, own: str, problem: Exception | None) -> list[str]:
        """What every process says; a problem of one is raised on all, as ValueError on the others."""
        if self.everyone is not None:
            return [known["own"] for known in self.everyone.agree(_PROGRAM, {}, {"own": own}, problem)]
        if problem is not None:
            raise problem
        return [own]

    def watched(self) -> AbstractContextManager[None]:
        """Inside, the loss of any process is an error on all others."""
        return nullcontext() if self.everyone is None else self.everyone.watched()

    def shard_parameters(self, model: Transformer) -> None:
        """FSDP2, layer by layer, over all ranks of the mesh: ranks that share a sequence share parameters too."""
        for part in (*model.layers, model):
            fully_shard(part, mesh=self.mesh)


def place_of(options: argparse.Namespace, layout: Layout, launched: bool) -> Place:
    """All processes of a torchrun call this together. Raises ValueError on each if their options differ."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not launched:
        if not options.simulate:
            return Place(device, layout)
        size = (options.simulate // options.inner, options.inner) if options.inner else options.simulate
        return Place(device, layout, SimulatedWorld(size, device=device, count_memory=False))
    if not dist.is_initialized():
        join(backend_for_this_host() if options.backend == "auto" else options.backend, options.timeout)
    everyone = DistributedWorld(timeout=options.timeout)
    said = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(options).items() if name not in _OWN}
    everyone.agree(_PROGRAM, said)
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = dist.get_world_size() // options.dp
    axes = {"outer": ranks // options.inner, "inner": options.inner} if options.inner else {"cp": ranks}
    mesh = init_device_mesh(kind, (options.dp, *axes.values()), mesh_dim_names=("dp", *axes))
    whole = mesh["dp", *axes]._flatten("dp_cp")
    alone = options.dp == 1 and not options.inner
    world = everyone if alone else DistributedWorld(mesh[tuple(axes)], timeout=options.timeout)
    return Place(world.device, layout, world, whole.get_group(), everyone, whole, options.dp, mesh.get_local_rank("dp"))


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())

"""What the gloo processes of test_strategies_two_worlds.py run; the same functions run simulated in the test's own
process."""

from __future__ import annotations

from functools import partial

import ring_programs
import torch
import torch.distributed as dist
from cases import DTYPES
from ring_programs import inputs
from torch.distributed.device_mesh import init_device_mesh

import ringlearn as rl
from ringlearn.attention import ALL_GATHER, RING_SELF_ATTENTION
from ringlearn.layouts import LAYOUTS
from ringlearn.worlds.comm import AXES, empty_packed
from ringlearn.worlds.distributed.wires import NcclWire, axis_wires
from ringlearn.worlds.memory import Memory
from ringlearn.worlds.simulated import _parameters
from ringlearn.worlds.world import arguments

SHAPE = (2, 2)
RING_TOO = {name: entry.function for name, entry in rl.attention.STRATEGIES.items()} | {
    "all-gather by heads": partial(rl.all_gather_attention, heads_at_once=1),
    "hybrid over all-gather": partial(rl.hybrid_attention, outer=ALL_GATHER),
    "hybrid over ring self-attention": partial(rl.hybrid_attention, outer=RING_SELF_ATTENTION),
}
STRATEGIES = {name: attention for name, attention in RING_TOO.items() if name != "ring"}

GRID = {
    "strategy": list(STRATEGIES),
    "layout": list(LAYOUTS),
    "mask": ring_programs.GRID["mask"],
    "dtype": list(DTYPES),
    "S": [3, 64, 97],
    "heads": [(4, 4), (8, 2), (3, 1), (6, 3)],
    "lse": [False, True],
    "scores": ["plain", "sinks", "all"],
}


def attend(world, strategy, **case):
    return ring_programs.attend(world, attention=STRATEGIES[strategy], **case)


def world_of_two_axes(**options):
    return rl.DistributedWorld(init_device_mesh("cpu", SHAPE), **options)


def attend_all(cases):
    world = world_of_two_axes(timeout=60)
    torch.set_num_threads(1)
    assert (world.size, world.shape) == (4, SHAPE)
    return [attend(world, **case) for case in cases]


def over_groups_of_the_axes(names, case):
    """What some strategies give, with messages over torch.distributed's own groups as on GPUs, and which groups."""
    mesh = init_device_mesh("cpu", SHAPE)
    world, found = rl.DistributedWorld(mesh, timeout=30), {}
    world._wire = NcclWire(dist.group.WORLD, world.device, range(world.size))
    world._axes = axis_wires(mesh, world.rank, world.device)
    used: set[str] = set()
    for name, wire in ("whole", world._wire), *zip(AXES, world._axes.values()):
        wire.post = partial(_noted, wire.post, used, name)
    for name in names:
        used.clear()
        found[name] = attend(world, name, **case), sorted(used)
    return found


def _noted(post, used, name, *messages):
    used.add(name)
    return post(*messages)


MEMORY = {
    "strategy": list(RING_TOO),
    "layout": ["contiguous", "zigzag"],
    "dtype": ["f32", "bf16"],
    "S": [96, 97],
    "heads": [(4, 4), (8, 2)],
}


def held(cases):
    """The most bytes that this rank held in the forward and in the backward, every tensor that torch sees."""
    world, memory, found = world_of_two_axes(timeout=30), Memory(1), []
    torch.set_num_threads(1)
    world._labels = False  # which CPUs alone have, and for which every message is copied
    world._buffers.take = lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device)  # no pool
    run = world._run

    def counted(program, args):
        memory.register(0, _parameters(program, len(args)), arguments(args, 0, 1))
        try:
            with memory.counting(0):
                return run(program, args)
        finally:
            memory.end_run()

    world._run = counted
    for case in cases:
        layout, (full, dout) = LAYOUTS[case["layout"]], inputs(case["S"], case["heads"], case["dtype"])
        mine = layout.positions(case["S"], world.size, world.rank)
        # k and v of a rank lie one behind the other, as world.shard puts them
        k, v = empty_packed([(1, t.shape[1], len(mine), 16) for t in full[1:]], full[1].dtype, "cpu")
        for to, t in zip((k, v), full[1:], strict=True):
            to.copy_(t.detach()[:, :, mine])
        q, k, v = (t.requires_grad_() for t in (full[0].detach()[:, :, mine], k, v))
        out = RING_TOO[case["strategy"]](q, k, v, rl.causal, layout=layout, world=world)
        found.append([memory.peak_bytes(0)])
        memory.clear()
        out.backward(dout[:, :, mine])
        found[-1].append(memory.peak_bytes(0))
        memory.clear()
    return found


def held_simulated(case):
    """The same of each simulated rank."""
    layout, (full, dout) = LAYOUTS[case["layout"]], inputs(case["S"], case["heads"], case["dtype"])
    world = rl.SimulatedWorld(SHAPE)
    shards = world.shard(*full, layout=layout)
    dout = world.shard(dout, layout=layout).tensors
    world.memory.clear()
    out = RING_TOO[case["strategy"]](*shards, rl.causal)
    forward = [world.memory.peak_bytes(rank) for rank in range(world.size)]
    world.memory.clear()
    torch.autograd.backward(out.tensors, dout)
    return list(zip(forward, [world.memory.peak_bytes(rank) for rank in range(world.size)], strict=True))


def plain_tensors(strategy, check):
    """This rank's own tensors in, its own out, and a loss that uses lse on rank 2 only."""
    world = world_of_two_axes(timeout=30, check=check)
    q, k, v, dout, mine = rank_local(world.rank)
    out, lse = STRATEGIES[strategy](q, k, v, rl.causal, layout=rl.zigzag, world=world, return_lse=True)
    torch.autograd.backward(*((out, lse), (dout, torch.ones_like(lse))) if world.rank == 2 else ((out,), (dout,)))
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


def rank_local(rank):
    torch.manual_seed(0)
    mine = rl.zigzag.positions(40, 4, rank)
    q, k, v, dout = (torch.randn(1, h, 40, 8)[:, :, mine] for h in (6, 3, 3, 6))
    return *(t.requires_grad_() for t in (q, k, v)), dout, mine


def meshes():
    """Worlds of parts of a mesh: two of one row each at the same time, one axis alone, and what is refused."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "outer", "inner"))
    rows = rl.DistributedWorld(mesh["outer", "inner"], timeout=20)
    row = rl.DistributedWorld(mesh["inner"], timeout=20)
    torch.manual_seed(mesh["data"].get_local_rank())  # each row has other tensors
    q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    out = rl.hybrid_attention(*rows.shard(q, k, v), mask=rl.causal).unshard()
    same = rl.ulysses_attention(*row.shard(q, k, v), mask=rl.causal).unshard()
    try:
        rl.DistributedWorld(mesh)
    except ValueError as error:
        return out, same, rows.shape, row.shape, rows.size, str(error)


def told():
    """What every rank hears when rank 1 does something else, or makes a mistake."""
    world, heard = world_of_two_axes(timeout=20), {}
    flat = rl.DistributedWorld(timeout=20)
    odd = world.rank == 1

    def hear(name, attention, world=world, **options):
        q, k, v = world.shard(*(torch.ones(1, 2, 8, 4) for _ in range(3)))
        try:
            attention(q, k, v, **options)
        except ValueError as error:
            heard[name] = str(error)

    hear("heads at once", rl.all_gather_attention, heads_at_once=1 if odd else 2)
    hear("outer", rl.hybrid_attention, **({"outer": ALL_GATHER} if odd else {}))
    hear("strategy", rl.ulysses_attention if odd else rl.all_gather_attention)
    hear("sinks", rl.ulysses_attention, sinks=torch.zeros(2) + odd)
    hear("wrong sinks", rl.hybrid_attention, sinks=torch.zeros(3 if odd else 2))
    hear("sinks of one", rl.all_gather_attention, sinks=torch.zeros(2) if odd else None)
    hear("a gradient", rl.ulysses_attention, sinks=torch.zeros(2, requires_grad=odd))
    hear("softcap", rl.double_ring_attention, softcap=2.0 if odd else 1.0)
    hear("slopes", rl.ring_self_attention, alibi=[0.5, 0.25 + odd])
    hear("wrong slopes", rl.ring_attention, alibi=[0.5, float("inf")] if odd else [0.5, 0.25])
    hear("mistake", rl.all_gather_attention, heads_at_once=[0] if odd else None)
    hear("no strategy", rl.hybrid_attention, **({"outer": "ring"} if odd else {}))
    hear("one axis", rl.double_ring_attention, world=flat)
    return heard


def traced(strategy):
    """The messages and tiles of this rank's forward and backward, as the trace has them."""
    world = world_of_two_axes(timeout=30, trace=True)
    return record(world, strategy, world.rank)


def record(world, strategy, rank):
    q, k, v = (torch.ones(1, h, 24, 4, requires_grad=True) for h in (4, 2, 2))
    out = STRATEGIES[strategy](*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
    seen = []
    for _ in range(2):
        mine = [e for e in world.trace if e.rank == rank]
        messages = [e for e in mine if e.kind in ("send", "recv")]  # of gradients nobody asks whose they are
        seen.append(sorted((e.kind, e.name, e.nbytes, e.peer, e.made, not e.made and e.origin) for e in messages))
        seen.append([(e.name, str(e.tile), e.origin) for e in mine if e.kind == "compute"])
        out.unshard().sum().backward(retain_graph=True)
    return seen

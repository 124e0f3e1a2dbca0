"""What the gloo processes of test_dilated.py run; the same functions run simulated in the test's own process."""

from __future__ import annotations

import torch
from ring_programs import attend

import ringlearn as rl
from ringlearn.layouts import LAYOUTS


def given(configurations, **case):
    """A case as the programs of ring attention take it."""
    segments, rates = zip(*configurations)
    return case | dict(attention=rl.dilated_attention, B=2, segment_lengths=segments, dilation_rates=rates)


def attend_all(cases):
    world = rl.DistributedWorld(timeout=60)
    torch.set_num_threads(1)
    return [attend(world, **given(**case)) for case in cases]


def disagreements():
    """What each rank hears if rank 1 says something else than the others, or something that makes no sense."""
    world = rl.DistributedWorld(timeout=20)
    q, k, v = (torch.ones(1, 2, 4, 2) for _ in range(3))
    said = []
    for here, there in (
        (dict(segment_lengths=[8], dilation_rates=[2]), dict(segment_lengths=[8], dilation_rates=[4])),
        (dict(segment_lengths=[8], dilation_rates=[2]), dict(segment_lengths=[8, 4], dilation_rates=[2])),
    ):
        try:
            options = there if world.rank == 1 else here
            rl.dilated_attention(q, k, v, **options, layout=rl.contiguous, world=world)
        except ValueError as error:
            said.append(str(error))
    return said


def module(state, x, layout, train):
    """One layer of the module on a sequence that is split over the ranks: its output, and its gradients' sum."""
    world = rl.DistributedWorld(timeout=60) if torch.distributed.is_initialized() else rl.SimulatedWorld(3)
    torch.set_num_threads(1)
    layer = rl.nn.DilatedAttention(16, 4, segment_lengths=[8, 20], dilation_rates=[1, 3], kv_heads=2).double()
    layer.load_state_dict(state)
    shards = world.shard(x, layout=LAYOUTS[layout])
    out = layer(shards).unshard()
    if train:
        out.square().sum().backward()
    return out.detach(), {name: p.grad for name, p in layer.named_parameters()}

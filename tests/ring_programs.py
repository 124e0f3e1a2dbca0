"""What the gloo processes of test_two_worlds.py run; the same functions run simulated in the test's own process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import DTYPES, MASKS, SCORES

import ringlearn as rl
from ringlearn.layouts import LAYOUTS
from ringlearn.partial import accumulation_dtype

GRID = {
    "layout": list(LAYOUTS),
    "mask": ["full", "causal", "causal window", "causal documents"],
    "dtype": list(DTYPES),
    "kernel": ["reference", "sdpa"],
    "S": [3, 64, 97],
    "heads": [(4, 4), (8, 2), (3, 1)],
    "scores": ["plain", "sinks", "softcap", "all"],
}


def inputs(S, heads, dtype, B=1):
    """The same q, k, v, and gradient of out, on every rank and in every process."""
    torch.manual_seed(S)
    H, G = heads
    q, k, v = (torch.randn(B, h, S, 16, dtype=DTYPES[dtype], requires_grad=True) for h in (H, G, G))
    return (q, k, v), torch.randn(B, H, S, 16, dtype=DTYPES[dtype])


def changes(scores, H, dtype):
    """How scores are changed; sinks in a dtype in which a sum of shares is what one process computes."""
    given = SCORES[scores](H)
    if "sinks" in given:
        given["sinks"] = given["sinks"].detach().to(accumulation_dtype(dtype)).requires_grad_()
    return given


def attend(
    world, layout, mask, dtype, S, heads, attention=rl.ring_attention, lse=False, B=1, scores="plain", **options
):
    """full out and lse, and the full gradients of q, k, v, and of sinks.  lse: whether it has a part in the loss."""
    (q, k, v), dout = inputs(S, heads, dtype, B)
    options |= changes(scores, heads[0], q.dtype)
    shards = world.shard(q, k, v, layout=LAYOUTS[layout])
    out, lse_shards = attention(*shards, mask=MASKS[mask](S), return_lse=True, **options)
    out, full_lse = out.unshard(), lse_shards.unshard()
    (out * dout).sum().backward() if not lse else ((out * dout).sum() + full_lse.square().sum()).backward()
    found = [t.detach() for t in (out, full_lse, q.grad, k.grad, v.grad)]
    return [*found, sum_of_shares(options["sinks"].grad)] if "sinks" in options else found


def sum_of_shares(x):
    """Of all processes, in the order of ranks; in a simulated world there is one, which has all of it."""
    if not dist.is_initialized():
        return x
    shares = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, x)
    return sum(shares[1:], start=shares[0])


def attend_all(cases):
    world = rl.DistributedWorld(timeout=60)
    torch.set_num_threads(1)
    return [attend(world, **case) for case in cases]


def packed(world):
    """Documents dealt out one by one, under a layout that is made here."""
    lengths = [41, 0, 3, 17, 1, 35]
    (q, k, v), dout = inputs(97, (4, 2), "f32")
    shards = world.shard(q, k, v, layout=rl.zigzag_per_document(lengths))
    out = rl.ring_attention(*shards, mask=rl.causal & rl.documents(lengths)).unshard()
    (out * dout).sum().backward()
    return [t.detach() for t in (out, q.grad, k.grad, v.grad)]


def packed_in_processes():
    return packed(rl.DistributedWorld(timeout=60))


def overflowing(world, dtype="f32", sign=-1, keys=4, layout=rl.contiguous, mask=rl.full, **options):
    """Every second query is so large, and so are the first keys, that their scores are beyond float32."""
    (q, k, v), dout = inputs(8, (2, 1), dtype)
    with torch.no_grad():
        q.abs_().mul_(1e-20), k.abs_().mul_(1e-20)
        q[:, :, ::2], k[:, :, :keys] = 1e20, sign * 1e20
    shards = world.shard(q, k, v, layout=layout)
    out, lse = rl.ring_attention(*shards, mask=mask, return_lse=True, **options)
    out, lse = out.unshard(), lse.unshard()
    (out * dout).sum().backward()
    return [t.detach() for t in (q, k, v, dout, out, lse, q.grad, k.grad, v.grad)]


def overflowing_in_processes():
    return overflowing(rl.DistributedWorld(timeout=60))


def plain_tensors(cases):
    """This rank's own tensors in, its own out: as in a training loop. Gives out, dq, dk, dv of the local shard."""
    world = rl.DistributedWorld(timeout=60)
    torch.set_num_threads(1)
    return [attend_locally(world, **case) for case in cases]


def attend_locally(world, layout, mask, dtype, S, heads, attention=rl.ring_attention, B=1, scores="plain", **options):
    (q, k, v), dout = inputs(S, heads, dtype, B)
    layout, options = LAYOUTS[layout], options | changes(scores, heads[0], q.dtype)
    mine = layout.positions(S, world.size, world.rank)
    q, k, v = (t.detach()[:, :, mine].requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, mask=MASKS[mask](S), **options, layout=layout, world=world)
    assert isinstance(out, torch.Tensor)
    out.backward(dout[:, :, mine])  # a rank-local loss: its own share of the sum
    sinks = [sum_of_shares(options["sinks"].grad)] if "sinks" in options else []
    return [out.detach(), q.grad, k.grad, v.grad, *sinks]


def simulated_shards(P, layout, mask, dtype, S, heads, attention=rl.ring_attention, B=1, scores="plain", **options):
    """The same of each simulated rank."""
    (q, k, v), dout = inputs(S, heads, dtype, B)
    world, layout = rl.SimulatedWorld(P), LAYOUTS[layout]
    options |= changes(scores, heads[0], q.dtype)
    shards = [x.map(lambda t: t.detach().requires_grad_()) for x in world.shard(q, k, v, layout=layout)]
    out = attention(*shards, mask=MASKS[mask](S), **options)
    torch.autograd.backward(out.tensors, world.shard(dout, layout=layout).tensors)
    sinks = [options["sinks"].grad] if "sinks" in options else []
    return [[out.tensors[rank].detach(), *(x.tensors[rank].grad for x in shards), *sinks] for rank in range(P)]


def only_some_need_gradients():
    """Rank 1's inputs need no gradient, and it has no token of its own: its output must carry the node all the same."""
    world = rl.DistributedWorld(timeout=20)
    q, k, v = (torch.randn(1, 2, 1 if world.rank == 0 else 0, 4) for _ in range(3))
    if world.rank == 0:
        for t in (q, k, v):
            t.requires_grad_()
    layout = rl.Layout("all on rank 0", lambda S, P, rank: (range(S),) if rank == 0 else ())
    out = rl.ring_attention(q, k, v, layout=layout, world=world)
    carries = out.requires_grad
    out.sum().backward()
    return carries, None if q.grad is None else tuple(q.grad.shape)


def readme_example():
    torch.manual_seed(0)  # the same q, k, v on every rank
    q, k, v = (torch.randn(1, 8, 1000, 64, requires_grad=True) for _ in range(3))  # (B, H, S, D), any S
    world = rl.DistributedWorld()
    out = rl.ring_attention(*world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal)
    full = out.unshard()
    full.sum().backward()
    return full.detach(), q.grad, k.grad, v.grad


def modes():
    """no_grad, inference_mode, autocast and a mask of one's own, in a distributed world."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    world = rl.DistributedWorld(timeout=20)
    with torch.no_grad():
        a = rl.ring_attention(*world.shard(q, k, v)).unshard()
    with torch.inference_mode():
        b = rl.ring_attention(*world.shard(q, k, v)).unshard()
    with torch.autocast("cpu", torch.bfloat16):
        c = rl.ring_attention(*world.shard(q, k, v), mask=rl.mask(lambda q, k: (q - k) % 3 == 0)).unshard()
    return a, b.clone(), c.detach(), a.requires_grad, b.is_inference(), str(c.dtype)


def shard_what_differs(src):
    """Every rank has other numbers: an error on all, unless src says whose are used."""
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(1, 1, 6, 2)
    world = rl.DistributedWorld(timeout=20)
    try:
        return world.shard(x, src=src).unshard()
    except ValueError as error:
        return str(error)


def double_backward():
    q, k, v = (torch.ones(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    world = rl.DistributedWorld(timeout=20)
    out = rl.ring_attention(*world.shard(q, k, v)).unshard()
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    try:
        dq.sum().backward()
    except NotImplementedError as error:
        return str(error)


def trace_after_backward():
    """What world.trace holds after the README example's backward: the ring's, not what shard moved around it."""
    q, k, v = (torch.ones(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    world = rl.DistributedWorld(timeout=20, trace=True)
    rl.ring_attention(*world.shard(q, k, v)).unshard().sum().backward()
    return [(e.kind, e.name) for e in world.trace if e.kind == "compute"], world.trace.messages(world.rank)


def one_rank_records_nothing():
    """Rank 1 calls under no_grad what the others want a gradient of."""
    world = rl.DistributedWorld(timeout=20)
    q, k, v = (torch.ones(1, 1, 8, 2, requires_grad=True) for _ in range(3))
    said = []
    for call in (
        lambda: world.shard(q, k, v),
        lambda: rl.ring_attention(*(t[:, :, :2] for t in (q, k, v)), layout=rl.contiguous, world=world),
    ):
        try:
            with torch.set_grad_enabled(world.rank != 1):
                call()
        except ValueError as error:
            said.append(str(error))
    return said


def one_rank_cannot_record():
    """Rank 1 passes keys that were made under inference_mode, outside of it, and the others want a gradient."""
    world = rl.DistributedWorld(timeout=20)
    q, k, v = (torch.ones(1, 1, 2, 2, requires_grad=True) for _ in range(3))
    if world.rank == 1:
        with torch.inference_mode():
            k = torch.ones(1, 1, 2, 2)
    try:
        rl.ring_attention(q, k, v, layout=rl.contiguous, world=world)
    except ValueError as error:
        return str(error)
    return "no error"

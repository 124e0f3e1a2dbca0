"""Answers to torchrun exercise 12: wrong steps on packed rows, each with a word of its message, and right ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringlearn as rl


def _packed(
    model,
    read,
    borders,
    world,
    group,
    *,
    mask=lambda lengths: rl.causal & rl.documents(lengths),
    positions=lambda own, start: own - start,
    crosses=False,
    shifts_inside=False,
    row=None,
    whole=False,
    count="all",
    factor=1.0,
    over="all",
    idle=True,
    sends_none=False,
    told=True,
    layout=rl.zigzag,
):
    """The right step, or one with a part of it replaced."""
    row = group if row is None else row
    cuts = torch.tensor(borders[row], device=world.device)
    S, seen = int(cuts[-1]), mask(cuts.diff().tolist())

    def attention(q, k, v):
        return rl.ring_attention(q, k, v, mask=seen, layout=rl.zigzag, world=world)

    own = layout.positions(S, world.size, world.rank, world.device)
    start = cuts[torch.bucketize(own, cuts, right=True) - 1]
    goes_on = own + 1 < S if crosses else ~torch.isin(own + 1, cuts)
    tokens = read(row, torch.arange(S, device=world.device))[own] if whole else read(row, own)
    targets = torch.full_like(tokens, -100)
    if shifts_inside:
        targets[:-1] = tokens[1:]
        targets[~goes_on] = -100
    else:
        targets[goes_on] = read(row, own[goes_on] + 1)
    N = (targets != -100).sum()
    if count != "rank":
        dist.all_reduce(N, group=world.group if count == "row" else None)
    else:
        N = N.clamp(min=1)
    share = F.cross_entropy(model(tokens, positions(own, start), attention), targets, reduction="sum") / N
    if idle or (targets != -100).any():
        (factor * share).backward()
    for p in model.parameters():
        if over != "none" and (sends_none or p.grad is not None):
            dist.all_reduce(p.grad, group=world.group if over == "row" else None)
    share = share.detach()
    if told:
        dist.all_reduce(share)
    return float(share)


def _with(name, **changes):
    def answer(model, read, borders, world, group):
        return _packed(model, read, borders, world, group, **changes)

    answer.__name__ = name
    globals()[name] = answer
    return answer


def packed_without_loss(model, read, borders, world, group):
    _packed(model, read, borders, world, group)


def packed_by_walking(model, read, borders, world, group):
    """Places, positions and targets one by one; gradients and loss in one message."""
    cuts = borders[group]
    lengths = [b - a for a, b in zip(cuts, cuts[1:])]

    def attention(q, k, v):
        mask = rl.causal & rl.documents(lengths)
        return rl.ring_attention(q, k, v, mask=mask, layout=rl.zigzag, world=world)

    own = rl.zigzag.positions(cuts[-1], world.size, world.rank, world.device)
    tokens, at, targets = read(group, own), [], []
    for place in own.tolist():
        at.append(place - max(cut for cut in cuts if cut <= place))
        following = torch.tensor([place + 1], device=world.device)
        targets.append(-100 if place + 1 in cuts else int(read(group, following)))
    at, targets = (torch.tensor(x, device=world.device) for x in (at, targets))
    total = F.cross_entropy(model(tokens, at, attention), targets, reduction="sum")
    parameters = list(model.parameters())
    grads = torch.autograd.grad(total, parameters)
    flat = torch.cat([*(g.flatten() for g in grads), total.detach().view(1), (targets != -100).sum().view(1).double()])
    dist.all_reduce(flat)
    *grads, total, N = flat.split([*(p.numel() for p in parameters), 1, 1])
    for p, g in zip(parameters, grads):
        p.grad = (g / N).view_as(p)
    return (total / N).item()


WRONG = [
    (_with("packed_without_documents", mask=lambda lengths: rl.causal), "rl.documents"),
    (_with("packed_counts_on_the_rank", positions=lambda own, start: torch.arange(len(own))), "from its border"),
    (_with("packed_crosses_documents", crosses=True), "it has none"),
    (_with("packed_shifts_inside", shifts_inside=True), "read it"),
    (_with("packed_reads_row_0", row=0), "yours is `group`"),
    (_with("packed_reads_the_whole_row", whole=True), "reads its own part"),
    (_with("packed_mean_of_means", count="rank"), "its own count"),
    (_with("packed_means_of_rows", count="row"), "each group"),
    (_with("packed_averages", factor=0.25), "times too small"),
    (_with("packed_loss_times_ranks", factor=4.0), "times too large"),
    (_with("packed_sums_over_the_row", over="row"), "the rows' groups"),
    (_with("packed_keeps_its_part", over="none"), "ranks of a row"),
    (_with("packed_idle_ranks_skip_backward", idle=False), "backward"),
    (_with("packed_idle_ranks_have_no_gradient", idle=False, sends_none=True), "runs no backward"),
    (_with("packed_tells_its_share", told=False), "sum the detached shares"),
    (_with("packed_contiguous_shards", layout=rl.contiguous), "contiguous's"),
    (packed_without_loss, "no return statement"),
]
RIGHT = [
    packed_by_walking,
    _with("packed_counts_through_the_row", positions=lambda own, start: own),  # RoPE sees distances alone
]

"""Answers to torchrun exercise 10: wrong training loops, each with a word of its message, and a right one."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringlearn as rl


def _train(
    model,
    optimizer,
    steps,
    max_norm,
    world,
    dp_rank,
    *,
    zero=True,
    local=False,
    micros=slice(None),
    row=None,
    count="step",
    over="all",
    factor=1.0,
    norm="one",
    step_each=False,
    idle=True,
    mean=False,
    told=True,
    layout=rl.zigzag,
    shift=lambda targets: targets,
):
    """The right loop, or one with a part of it replaced."""

    def attention(q, k, v):
        return rl.ring_attention(q, k, v, mask=rl.causal, layout=rl.zigzag, world=world)

    def reduce(t, how):
        if how != "none":
            dist.all_reduce(t, group=world.group if how == "cp" else None)

    losses = []
    for step in steps:
        if zero:
            optimizer.zero_grad()
        parts = []
        for micro in step[micros]:
            tokens, targets = micro[dp_rank if row is None else row]
            own = layout.positions(len(tokens), world.size, world.rank, world.device)
            at = torch.arange(len(own), device=world.device) if local else own
            parts.append((tokens[own], at, shift(targets[own])))
        counts = [(targets != -100).sum() for _, _, targets in parts]
        if count == "micro":
            for n in counts:
                reduce(n, "all")
            N = counts
        else:
            total = sum(counts)
            reduce(total, {"step": "all", "group": "cp", "rank": "none"}[count])
            N = [total if count != "rank" or mean else total.clamp(min=1)] * len(parts)
        loss = torch.zeros((), dtype=torch.float64, device=world.device)
        for (tokens, own, targets), n in zip(parts, N):
            share = F.cross_entropy(model(tokens, own, attention), targets, reduction="sum") / n
            if idle or (targets != -100).any():
                (share * factor).backward()
            loss += share.detach()
            if step_each:
                optimizer.step()
        if norm == "early":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for p in model.parameters():
            reduce(p.grad, over)
        if told:
            reduce(loss, "all")
        if norm == "one":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        elif norm == "each":
            for p in model.parameters():
                torch.nn.utils.clip_grad_norm_([p], max_norm)
        if not step_each:
            optimizer.step()
        losses.append(float(loss))
    return losses


def _with(name, **changes):
    def answer(model, optimizer, steps, max_norm, world, dp_rank):
        return _train(model, optimizer, steps, max_norm, world, dp_rank, **changes)

    answer.__name__ = name
    globals()[name] = answer
    return answer


def train_no_loss(model, optimizer, steps, max_norm, world, dp_rank):
    _train(model, optimizer, steps, max_norm, world, dp_rank)


def train_as_ddp_does(model, optimizer, steps, max_norm, world, dp_rank):
    """Averaged gradients, and a loss that is multiplied by the number of ranks; all in one message."""

    def attention(q, k, v):
        return rl.ring_attention(q, k, v, mask=rl.causal, layout=rl.zigzag, world=world)

    R, losses = dist.get_world_size(), []
    for step in steps:
        pairs = [micro[dp_rank] for micro in step]
        own = rl.zigzag.positions(len(pairs[0][0]), world.size, world.rank, world.device)
        N = torch.stack([(t[own] != -100).sum() for _, t in pairs]).sum()
        dist.all_reduce(N)
        total = sum(F.cross_entropy(model(x[own], own, attention), t[own], reduction="sum") for x, t in pairs)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(total * R / N, parameters)
        flat = torch.cat([*(g.flatten() for g in grads), (total.detach() * R / N).view(1)])
        dist.all_reduce(flat)
        *grads, loss = (flat / R).split([*(p.numel() for p in parameters), 1])
        norm = torch.cat(grads).norm()
        for p, g in zip(parameters, grads):
            p.grad = g.view_as(p) * min(1.0, max_norm / float(norm))
        optimizer.step()
        losses.append(loss.item())
    return losses


WRONG = [
    (_with("train_averages", factor=0.25), "times too small"),
    (_with("train_loss_times_ranks", factor=4.0), "times too large"),
    (_with("train_sums_over_cp", over="cp"), "dp groups"),
    (_with("train_keeps_its_part", over="none"), "share a sequence"),
    (_with("train_mean_of_means", count="rank"), "its own count"),
    (_with("train_nan_on_an_idle_rank", count="rank", mean=True), "its own count"),
    (_with("train_means_of_groups", count="group"), "each dp group"),
    (_with("train_means_of_micro_batches", count="micro"), "each micro-batch"),
    (_with("train_first_micro_batch", micros=slice(1)), "only the first"),
    (_with("train_same_sequence_everywhere", row=0), "micro[dp_rank]"),
    (_with("train_local_positions", local=True), "from 0"),
    (_with("train_contiguous_shards", layout=rl.contiguous), "contiguous's"),
    (_with("train_striped_shards", layout=rl.striped), "zigzag has"),
    (_with("train_shifts_again", shift=lambda t: F.pad(t[1:], (0, 1), value=-100)), "shifted once more"),
    (_with("train_rolls_again", shift=lambda t: t.roll(-1)), "shifted once more"),
    (_with("train_never_zeroes", zero=False), "zero_grad"),
    (_with("train_without_clipping", norm="none"), "nothing is clipped"),
    (_with("train_clips_each_parameter", norm="each"), "one norm"),
    (_with("train_clips_before_the_sum", norm="early"), "sum first"),
    (_with("train_steps_for_each_micro_batch", step_each=True), "once per step"),
    (_with("train_idle_ranks_skip_backward", idle=False), "backward"),
    (_with("train_tells_its_share", told=False), "sum the shares"),
    (train_no_loss, "no return statement"),
]  # fmt: skip
RIGHT = [train_as_ddp_does]

"""Three training steps with a planted mistake each, for notebook 12. Find out what is wrong before you read this file.

Each takes a model of transformers with the ring under it, a world and tokens (1, S), and gives what the notebook's own
step gives: the logits, the loss, the gradients, and how many tokens had a target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layouts import contiguous
from ..nn.hugging_face import split
from ..nn.split import IGNORE
from ..worlds.world import World

Step = dict[str, Any]


def healthy(model: nn.Module, world: World, tokens: Tensor) -> Step:
    """The step without a mistake."""
    return _step(model, world, tokens)


def a(model: nn.Module, world: World, tokens: Tensor) -> Step:
    """Positions are counted from 0 on every rank."""
    return _step(model, world, tokens, local_positions=True)


def b(model: nn.Module, world: World, tokens: Tensor) -> Step:
    """The gradients are averaged over the ranks, and the loss is not multiplied by their number."""
    return _step(model, world, tokens, scale=1 / world.size)


def c(model: nn.Module, world: World, tokens: Tensor) -> Step:
    """Each rank shifts its own labels, so the last token of a shard has no target."""
    return _step(model, world, tokens, local_shift=True)


def _step(
    model: nn.Module,
    world: World,
    tokens: Tensor,
    *,
    local_positions: bool = False,
    local_shift: bool = False,
    scale: float = 1.0,
) -> Step:
    model.zero_grad()
    batch = split(model, world, tokens, labels=tokens, layout=contiguous)
    positions = [contiguous.positions(tokens.shape[1], world.size, rank) for rank in range(world.size)]
    lengths = [len(own) for own in positions]
    if local_positions:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    targets, count = batch.targets, batch.count
    if local_shift:
        shards = batch["input_ids"].split(lengths, 1)
        targets = torch.cat([F.pad(own[:, 1:], (0, 1), value=IGNORE) for own in shards], 1)
        count = int((targets != IGNORE).sum())
    logits = model(**batch).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum") / count
    (scale * loss).backward()
    return {
        "logits": batch.unshard(logits).detach()[0],
        "loss": loss.item(),
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
        "targets": count,
    }

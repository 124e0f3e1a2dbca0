"""A task that needs far tokens: key-value recall.

A sequence holds, at random places among filler, one record for each key: a token that says the key and its value. A
later token asks for a key, and the target there is the value of its record. All else has no target. Who looks only near
by finds nothing but filler, and guesses one value in ``VALUES``.

Source: Arora et al. 2023, "Zoology", section 4 (multi-query associative recall); here key and value are one token, so
that one layer of attention is enough.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention.inputs import parts
from ..nn.split import IGNORE
from .stdlib import random_of

KEYS, VALUES, FILLER = 8, 4, 8
# Token ids, in this order: the values, the questions, the records, the filler.
QUESTION, RECORD, FILL = VALUES, VALUES + KEYS, VALUES + KEYS + KEYS * VALUES


class Recall:
    """Sequences of the recall task. A sequence depends on its number and the seed alone.

    length: of a sequence, at least two tokens for each of the 8 keys. Raises ValueError if it is shorter.

    >>> tokens, targets = Recall(40).rows([0])
    >>> asked = (targets[0] != IGNORE).nonzero()[0]  # the first question
    >>> key, value = int(tokens[0, asked]) - QUESTION, int(targets[0, asked])
    >>> bool((tokens[0, :asked] == RECORD + key * VALUES + value).any())  # its record came before
    True
    """

    vocabulary = FILL + FILLER

    def __init__(self, length: int, seed: int = 0):
        if length < 2 * KEYS:
            raise ValueError(
                f"--tokens: expected at least {2 * KEYS} for the {KEYS} records and questions of the recall task"
            )
        self.length, self.seed = length, seed

    def rows(self, numbers: range | list[int]) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of some sequences, int64 (B, S)."""
        made = [self._row(n)[:2] for n in numbers]
        return torch.stack([tokens for tokens, _ in made]), torch.stack([targets for _, targets in made])

    def distances(self, numbers: range | list[int]) -> Tensor:
        """(B, S): for each question, how many tokens back its record is; 0 where nothing is asked."""
        return torch.stack([self._row(n)[2] for n in numbers])

    def _row(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        g = random_of(self.seed, number)
        tokens = FILL + torch.randint(FILLER, (self.length,), generator=g)
        targets, distances = torch.full_like(tokens, IGNORE), torch.zeros_like(tokens)
        places = torch.randperm(self.length, generator=g)[: 2 * KEYS].view(KEYS, 2).sort(1).values
        record, question = places.unbind(1)
        keys, values = torch.arange(KEYS), torch.randint(VALUES, (KEYS,), generator=g)
        tokens[record], tokens[question] = RECORD + keys * VALUES + values, QUESTION + keys
        targets[question], distances[question] = values, question - record
        return tokens, targets, distances


@torch.no_grad()
def accuracy_by_distance(
    model: nn.Module,
    batches: list[tuple[Any, Any, Any]],
    edges: list[int],
    group: dist.ProcessGroup | None = None,
    **where: Any,
) -> list[tuple[int, int, float, int]]:
    """How often the most likely token is the target, by distance: (from, to, accuracy, questions) for each bin.

    batches: (tokens, targets, distances), Shards or tensors.  edges: a bin is edges[i] < distance <= edges[i + 1].
    group: the processes that hold the other tokens; None if there are none. The result is the same on all of them.
    """
    device = next(model.parameters()).device
    bins = torch.zeros(len(edges) - 1, 2, dtype=torch.int64, device=device)
    for tokens, targets, distances in batches:
        logits = model(tokens, **where)
        for said, target, distance in zip(*map(parts, (logits, targets, distances)), strict=True):
            right = said.argmax(-1) == target
            for i, (low, high) in enumerate(zip(edges, edges[1:])):
                here = (target != IGNORE) & (low < distance) & (distance <= high)
                bins[i] += torch.stack([(right & here).sum(), here.sum()])
    if group is not None:
        dist.all_reduce(bins, group=group)
    return [
        (low, high, right / asked if asked else float("nan"), asked)
        for low, high, (right, asked) in zip(edges, edges[1:], bins.tolist())
    ]

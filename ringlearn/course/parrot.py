"""A toy that writes text by attention: it repeats what came after the earlier place that resembles the end of the text.

One query, whose scores are those of notebook 01: how many of the last 8 bytes agree. The keys are cut into splits, as
in decoding on a GPU, and some of them may be empty. It is no model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..partial import Partial, merge_all

SPLITS, SIZE = 8, 16  # of a kernel whose grid was fixed for a cache of 128 tokens
LIKED, BY = "!", 0.3  # what it writes when attention brings nothing that weighs more than this


def scores_and_values(text: str) -> tuple[Tensor, Tensor]:
    """Scores (S,) of the S places that have 8 bytes before them, and the byte that stands there, one-hot (S, 128)."""
    data = torch.tensor(list(text.encode()))
    windows = data.unfold(0, 8, 1)
    agree = (windows[:-1] == windows[-1]).sum(-1)
    return 2.0 * (agree - 8), one_hot(data[8:], 128).float()  # a score of 0 is the highest


def splits(text: str, empty_lse: float = -math.inf) -> list[Partial]:
    """(out, lse) of each split; empty_lse: what a split without keys says for its lse.

    >>> [round(float(part.lse), 1) for part in splits("abcdefgh" * 3)][:3]
    [0.7, -inf, -inf]
    """
    scores, values = scores_and_values(text)
    parts = []
    for start in range(0, SPLITS * SIZE, SIZE):
        s, v = scores[start : start + SIZE], values[start : start + SIZE]
        lse = s.logsumexp(0) if len(s) else torch.tensor(empty_lse)
        parts.append(Partial(s.softmax(0) @ v, lse))
    return parts


def look(text: str, empty_lse: float = -math.inf) -> tuple[int, float, str]:
    """How many splits are empty, what the weights of the bytes sum to, and the byte that it writes next."""
    parts = splits(text, empty_lse)
    out = merge_all(parts).out
    liked = out.clone()
    liked[ord(LIKED)] += BY
    empty = sum(SIZE * i >= len(text) - 8 for i in range(SPLITS))
    return empty, float(out.sum()), chr(int(liked.argmax()))


def write(text: str, count: int, empty_lse: float = -math.inf) -> str:
    """The next bytes.

    >>> write("the ring goes round, the ring goes ", 6)
    'round,'
    """
    start = len(text)
    for _ in range(count):
        text += look(text, empty_lse)[2]
    return text[start:]

"""The masks that the bench knows by name: ``--mask causal documents:64 documents:16:equal+window:1024``."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from ..layouts import LAYOUTS, Layout, zigzag_per_document
from ..masks import Mask, causal, documents, full, sliding_window

SEED = 0  # of the lengths of documents
PER_DOCUMENT = "zigzag-per-document"


@dataclass(frozen=True)
class MaskChoice:
    """A mask by its name, over any number of tokens.

    name: what was asked for.  causal: false for full attention.  documents: how many there are over all ranks, 0 for
    none.  equal: whether they are equally long; else the logarithms of their lengths are normally distributed, with a
    standard deviation of 1.  window: how many keys a query sees at most; None for all.
    """

    name: str
    causal: bool = True
    documents: int = 0
    equal: bool = False
    window: int | None = None

    def lengths(self, tokens: int, ranks: int, share: int = 1) -> list[int]:
        """Lengths of the documents over the tokens of ``ranks`` ranks, or of those of only ``share`` of the ranks.

        The documents of one rank's tokens are drawn once, and all ranks have as many of each length, in an order of
        their own. So one device can be measured with equally long documents.

        >>> choice = mask_choice("documents:8")
        >>> choice.lengths(100, 2, share=1)
        [17, 22, 42, 19]
        >>> sorted(choice.lengths(100, 2, share=2)) == sorted(2 * choice.lengths(100, 2, share=1))
        True
        """
        if not self.documents:
            return [share * tokens]
        n, numbers = self.documents // ranks, random.Random(SEED)
        weights = [1.0 if self.equal else numbers.lognormvariate(0, 1) for _ in range(n)]
        ends = [0]
        for i, upto in enumerate(accumulate(weights), 1):  # at least a token each, and all tokens in the end
            ends.append(max(ends[-1] + 1, min(tokens - n + i, round(tokens * upto / sum(weights)))))
        found = [b - a for a, b in zip(ends, ends[1:], strict=False)] * share
        if share > 1 and not self.equal:
            numbers.shuffle(found)
        return found

    def mask(self, lengths: list[int]) -> Mask:
        """The mask over documents of these lengths."""
        mask = causal if self.causal else full
        if self.window is not None:
            mask = mask & sliding_window(self.window)
        return mask & documents(lengths) if self.documents else mask

    def scores(self, lengths: list[int]) -> int:
        """How many pairs of a query and a key it leaves, which are what has to be computed.

        >>> mask_choice("causal").scores([4]), mask_choice("window:2").scores([4]), mask_choice("full").scores([4])
        (10, 7, 16)
        """
        if not self.causal:
            return sum(n * n for n in lengths)
        widths = [(n, min(n, self.window or n)) for n in lengths]
        return sum(w * (w + 1) // 2 + (n - w) * w for n, w in widths)


def layout_of(name: str, lengths: list[int]) -> Layout:
    """The layout of this name for documents of these lengths."""
    return zigzag_per_document(lengths) if name == PER_DOCUMENT else LAYOUTS[name]


def mask_choice(name: str) -> MaskChoice:
    """The mask of this name: causal, full, or documents:N, documents:N:equal, window:W, joined by +; all causal.

    Raises ValueError for another name.

    >>> mask_choice("documents:16:equal+window:1024")
    MaskChoice(name='documents:16:equal+window:1024', causal=True, documents=16, equal=True, window=1024)
    """
    if name in ("causal", "full"):
        return MaskChoice(name, causal=name == "causal")
    found: dict[str, int | bool] = {}
    for part in name.split("+"):
        kind, number, *how = part.split(":") if ":" in part else (part, "")
        if kind not in ("documents", "window") or kind in found or not number.isdecimal() or int(number) < 1:
            raise _unknown(name)
        if how and (kind, how) != ("documents", ["equal"]):
            raise _unknown(name)
        found |= {kind: int(number)} | ({"equal": True} if how else {})
    return MaskChoice(name, **found)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"--mask: expected causal, full, documents:N (N >= 1; documents:N:equal for equally long ones), window:W, or "
        f"documents:N+window:W, got {name!r}"
    )

"""Which documents a batch holds, as collators say it.

A packed batch comes in several dialects, and padding in two:

    position_ids that restart                              DataCollatorWithFlattening, TRL without padding
    attention_mask that numbers documents, 1 1 1 2 2 0     Axolotl, LLaMA-Factory ("neat packing")
    attention_mask of ones and zeros, 0 0 1 1 1            padding on the left; on the right it needs nothing, since no
                                                           token of a causal model sees what comes after it
    mask=rl.documents(lengths)                             said by hand

All of them become documents of a mask. Where two of them are there they have to say the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..masks import And, Causal, Documents, DocumentsPerRow, Full, Mask, SlidingWindow, documents, full


def with_documents(
    op: str, mask: Mask, attention_mask: Tensor | None, position_ids: Tensor | None, B: int, S: int
) -> tuple[Mask, Tensor]:
    """The mask with the documents of the batch, and where they begin: bool (B, S), on the CPU.

    attention_mask: (B, S).  position_ids: (B, S) or (1, S).  Padding between or before documents is one of its own.

    Raises ValueError if these make no sense, or contradict each other or the mask; its text begins with op.

    >>> with_documents("split", full, None, torch.tensor([[0, 1, 2, 0, 1]]), 1, 5)[0]
    documents([3, 2])
    >>> with_documents("split", full, torch.tensor([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]]), None, 2, 5)[0]
    documents([[3, 2], [2, 3]])
    """
    begins = torch.zeros(B, S, dtype=torch.bool)
    if not B or not S:
        return mask, begins
    begins[:, 0] = True
    inside = ~begins  # where a token follows another, none of them padding
    said = [_starts(part, S) for part in parts_of(mask) if isinstance(part, Documents | DocumentsPerRow)]
    known = torch.stack([x.expand(B, S) for x in said]).any(0) if said else None
    if attention_mask is not None:
        numbers = _numbers(op, attention_mask.cpu())
        tokens, changes, numbered = numbers != 0, _changes(numbers, 0), bool((numbers > 1).any())
        inside[:, 1:] = tokens[:, 1:] & tokens[:, :-1]
        if numbered and known is not None and bool(((known != changes) & inside).any()):
            raise ValueError(
                f"{op}: attention_mask numbers documents differently from mask=: "
                f"{_where(changes & inside | begins, known & inside | begins, 'attention_mask', 'mask=')}; pass only "
                f"one of them"
            )
        if numbered or bool((tokens.any(1) & ~tokens[:, 0]).any()):  # or padding on the left, which nobody may see
            mask, begins = _and(mask, changes), begins | changes
        if numbered:
            known = changes if known is None else known
    if position_ids is not None:
        anew = _changes(position_ids.cpu().expand(B, S), 1)
        breaks = anew & inside
        if known is not None:
            _check_positions(op, breaks, known & inside)
        elif breaks.any() and all(isinstance(part, _KNOWN) for part in parts_of(mask)):  # one's own may have a reason
            if attention_mask is not None:
                documents_then = _documents(breaks | begins | ~inside & _changes(tokens.long(), 0))
                raise ValueError(
                    f"{op}: position_ids restart, as those of packed documents do, but with an attention_mask of zeros "
                    f"and ones a model of transformers takes a row for one document. If they are documents, omit "
                    f"attention_mask, or pass mask=rl.{documents_then!r}"
                )
            mask, begins = _and(mask, anew), begins | anew
    return mask, begins if known is None else begins | known


def _check_positions(op: str, breaks: Tensor, starts: Tensor) -> None:
    """In each row positions either continue through all documents, or restart where one begins and nowhere else."""
    if bool(((breaks != starts).any(1) & breaks.any(1)).any()):
        wrong = breaks.any(1, keepdim=True)
        raise ValueError(
            f"{op}: position_ids contradict the documents: "
            f"{_where(breaks & wrong, starts & wrong, 'position_ids', 'mask= or attention_mask')}; where rows differ, "
            f"pass the documents of each row, rl.documents([[5, 15], [8, 12]])"
        )


_KNOWN = (Full, Causal, SlidingWindow, Documents, DocumentsPerRow)


def parts_of(mask: Mask) -> Iterator[Mask]:
    """What a mask consists of, all of which a key has to pass."""
    if isinstance(mask, And):
        yield from parts_of(mask.a)
        yield from parts_of(mask.b)
    else:
        yield mask


def _numbers(op: str, attention_mask: Tensor) -> Tensor:
    """int64 (B, S): 0 for padding, else the number of the document; each number stands in one piece of a row."""
    numbers = attention_mask.long()
    if bool((numbers != attention_mask).any() or (numbers < 0).any()):
        raise ValueError(
            f"{op}: expected attention_mask of 1 for tokens and 0 for padding, or of numbers of documents, got "
            f"{attention_mask.dtype} from {attention_mask.min().item()} to {attention_mask.max().item()}"
        )
    for row, found in enumerate(numbers):
        runs = torch.unique_consecutive(found)
        runs = runs[runs != 0]
        if runs.unique().numel() < runs.numel():
            raise ValueError(
                f"{op}: expected attention_mask with padding on one side, or with each number of a document in one "
                f"piece, got {_some(torch.unique_consecutive(found).tolist())} one after the other in row {row}; "
                f"remove padding between tokens, and number documents 1, 2, 3, ..."
            )
    return numbers


def _changes(x: Tensor, by: int) -> Tensor:
    """Where an element is not the one before plus ``by``; the first of a row always."""
    return torch.cat([torch.ones_like(x[:, :1], dtype=torch.bool), x.diff(dim=1) != by], 1)


def _starts(mask: Documents | DocumentsPerRow, S: int) -> Tensor:
    """Where the documents of a mask begin: bool (rows or 1, S)."""
    rows = mask.of_rows if isinstance(mask, DocumentsPerRow) else (mask,)
    starts = torch.zeros(len(rows), S, dtype=torch.bool)
    for row, found in zip(starts, rows, strict=True):
        row[[0, *(end for end in found.ends if end < S)]] = True
    return starts


def _documents(starts: Tensor) -> Mask:
    """Documents that begin there, of one list of lengths if they are alike in all rows."""
    S = starts.shape[1]
    rows = [torch.tensor([*row.nonzero().flatten().tolist(), S]).diff().tolist() for row in starts]
    return documents(rows[0] if all(row == rows[0] for row in rows) else rows)


def _and(mask: Mask, starts: Tensor) -> Mask:
    """The mask, and these documents unless it has them already."""
    found = _documents(starts)
    if found in tuple(parts_of(mask)):
        return mask
    return found if mask == full else mask & found


def _where(a: Tensor, b: Tensor, name: str, other: str) -> str:
    """In which row they begin differently, and where."""
    row = int((a != b).any(1).nonzero()[0])
    at, there = (_some(x[row].nonzero().flatten().tolist()) for x in (a, b))
    return f"in row {row}, {name} begins new documents at the tokens {at}, {other} at {there}"


def _some(numbers: list[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}]"

"""The text that is learned: windows of the source files of Python's own standard library, as bytes."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from .. import text


class StandardLibrary:
    """Windows of ``length`` + 1 bytes at random places: the tokens, and as targets the same bytes shifted by one.

    A window depends only on its number and the seed. So the position of a run in the data is a single number, which
    means the same on any number of ranks.  limit: how many bytes of the library to use; None for all.

    >>> data = StandardLibrary(16, seed=0, limit=100_000)
    >>> tokens, targets = data.rows(range(5, 7))
    >>> tokens.shape, torch.equal(tokens[:, 1:], targets[:, :-1]), torch.equal(tokens[1:], data.rows([6])[0])
    (torch.Size([2, 16]), True, True)
    """

    vocabulary = 256

    def __init__(self, length: int, seed: int = 0, limit: int | None = None):
        self.bytes = torch.frombuffer(bytearray(text.standard_library_bytes(limit)), dtype=torch.uint8)
        if length + 1 > len(self.bytes):
            raise ValueError(
                f"--tokens: expected fewer tokens than the {len(self.bytes)} bytes of the text, got {length}"
            )
        self.length, self.seed = length, seed

    def rows(self, numbers: range | list[int]) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of some windows, int64 (B, S)."""
        places = [self._place(n) for n in numbers]
        windows = torch.stack([self.bytes[p : p + self.length + 1] for p in places]).long()
        return windows[:, :-1], windows[:, 1:]

    def _place(self, number: int) -> int:
        return int(torch.randint(len(self.bytes) - self.length, (), generator=random_of(self.seed, number)))


def random_of(seed: int, number: int) -> torch.Generator:
    """The random numbers of one row, the same whoever asks for it, on any number of ranks and after any interruption.

    >>> torch.equal(torch.rand(2, generator=random_of(0, 5)), torch.rand(2, generator=random_of(0, 5)))
    True
    """
    # Not seed + number or the like: a generator on the CPU takes 32 bits of its seed, and rows of two seeds would meet.
    return torch.Generator().manual_seed(int.from_bytes(blake2b(f"{seed}, {number}".encode(), digest_size=4).digest()))

"""Sums of tiles: the same numbers as adding to zeros, and no memory of their own where none is needed."""

from __future__ import annotations

import random

import pytest
import torch

from ringlearn.partial import launch
from ringlearn.partial.accumulate import ALL, Sum

SHAPES = [(2, 4, 9, 5), (2, 4, 9, 3)]


def pieces(seed: int, dtype: torch.dtype) -> list[tuple[slice, slice, list[torch.Tensor]]]:
    """Some tiles: heads, rows, and what was found there for two tensors."""
    choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    found = []
    for _ in range(choose.randrange(6)):
        heads = choose.choice([ALL, slice(0, 2), slice(2, 4)])
        start = choose.randrange(9)
        rows = choose.choice([ALL, slice(0, 9), slice(start, choose.randrange(start, 10))])
        shapes = [torch.empty(shape)[:, heads, rows].shape for shape in SHAPES]
        found.append((heads, rows, [torch.randn(shape, generator=numbers, dtype=dtype) for shape in shapes]))
    return found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_adding_to_zeros(seed, dtype):
    """dtype: of what is found; the sum is in float64."""
    total, expected = Sum(SHAPES, torch.float64, "cpu"), [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
    for heads, rows, found in pieces(seed, dtype):
        for x, t in zip(expected, found, strict=True):
            x[:, heads, rows] += t
        total.add(heads, rows, *found)
    for x, want in zip(total.tensors, expected, strict=True):
        assert x.dtype == torch.float64 and x.shape == want.shape
        assert torch.allclose(x, want, rtol=1e-13, atol=1e-13)


def test_what_covers_everything_is_taken_over():
    x = torch.ones(SHAPES[0])
    total = Sum(SHAPES[:1], torch.float32, "cpu")
    total.add(ALL, slice(2, 4), torch.ones(2, 4, 2, 5))  # waits for something to be added to
    total.add(ALL, ALL, x)
    assert total.tensors[0] is x
    assert torch.equal(x[0, 0, :, 0], torch.tensor([1.0, 1, 2, 2, 1, 1, 1, 1, 1]))


def test_another_dtype_is_not_taken_over():
    x = torch.ones(SHAPES[0], dtype=torch.bfloat16)
    total = Sum(SHAPES[:1], torch.float32, "cpu")
    total.add(ALL, ALL, x)
    total.add(ALL, ALL, torch.full(SHAPES[0], 2.0**-9))
    assert total.tensors[0].dtype == torch.float32 and bool((total.tensors[0] == 1 + 2.0**-9).all())
    assert bool((x == 1).all())


def test_nothing_gives_zeros():
    for x, shape in zip(Sum(SHAPES, torch.float32, "cpu").tensors, SHAPES, strict=True):
        assert torch.equal(x, torch.zeros(shape))


def test_a_kernel_is_looked_up_once_for_arguments_that_have_as_much_in_common(monkeypatch):
    started = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: (started.append(("new", grid, args, constants)), Compiled())[1]

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: started.append(("known", grid, args))

    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch, "_COMPILED", {})
    kernel, x, other = Kernel(), torch.zeros(64), torch.zeros(64)
    for t, numbers in ((x, (0.5, 3)), (other, (0.7, 3)), (x, (0.5, 4)), (x[1:], (0.5, 3)), (x.double(), (0.5, 3))):
        launch.launch(kernel, (2, 1, 1), (t,), numbers, D=8, num_warps=4)
    # A number that is no integer, and another address of the same alignment, change nothing of what is compiled.
    assert [what for what, *_ in started] == ["new", "known", "new", "new", "new"]
    assert started[0][3] == {"D": 8, "num_warps": 4}
    assert started[1][1] == (2, 1, 1) and started[1][2][0] is other and started[1][2][1:] == (0.7, 3, 8)

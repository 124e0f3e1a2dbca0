"""Whole numbers of every kind, Python's, NumPy's and torch's, are the same number; what is none is refused by name."""

import numpy as np
import pytest
import torch

import ringlearn as rl
from ringlearn import nn

KINDS = {"numpy": np.int64, "torch": torch.tensor, "numpy int8": np.int8}
NO_NUMBERS = [4.0, np.float64(4.0), True, "4", float("nan"), torch.tensor(4.0), torch.tensor([4, 4]), 0, -1]


def attention(function, **options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 12, 4) for _ in range(3))
    return function(*rl.SimulatedWorld(2).shard(q, k, v, layout=rl.zigzag), **options).unshard()


def layer(kind, **sizes):
    torch.manual_seed(0)
    return kind(**sizes)(torch.linspace(-1, 1, 96).reshape(1, 12, 8))


def transformer(name, n):
    torch.manual_seed(0)
    sizes = {"vocabulary": 16, "width": 8, "layers": 1, "heads": 4, "kv_heads": 4, "hidden": 4, "block": 4} | {name: n}
    return nn.Transformer(nn.Config(**sizes))(torch.arange(12).remainder(4).reshape(1, 12))


def cached(n, *, truncate=False, counts=False, **sizes):
    sizes = {"batch": 4, "heads": 4, "dim": 4, "capacity": 4, "interleave": 4, "page": 4, "pages": 4} | sizes
    cache = rl.KVCache(rl.SimulatedWorld(2), **sizes)
    k = torch.ones(4, 4, 4, 4)
    cache.append(k, k, counts=[n, 4, 4, 4] if counts else None)
    cache.truncate(n if truncate else 4)
    return cache.lengths, cache.pages, repr(cache)


CALLS = {
    "SimulatedWorld": lambda n: rl.SimulatedWorld(n).ranks,
    "heads_at_once": lambda n: attention(rl.all_gather_attention, heads_at_once=n),
    "segment_lengths": lambda n: attention(rl.dilated_attention, segment_lengths=[n, 12], dilation_rates=[1, 4]),
    "dilation_rates": lambda n: attention(rl.dilated_attention, segment_lengths=[4, 12], dilation_rates=[1, n]),
    "sliding_window": lambda n: attention(rl.ring_attention, mask=rl.sliding_window(n)),
    "FeedForward width": lambda n: nn.FeedForward(n, 4).up.weight.shape,
    "FeedForward hidden": lambda n: layer(lambda n: nn.FeedForward(8, n), n=n),
    "Attention heads": lambda n: layer(nn.Attention, width=8, heads=n),
    "Attention kv_heads": lambda n: layer(nn.Attention, width=8, heads=4, kv_heads=n),
    "layers of DilatedAttention": lambda n: layer(
        nn.DilatedAttention, width=8, heads=4, segment_lengths=[6], dilation_rates=[2], layers=n
    ),
    "block": lambda n: nn.in_blocks(torch.exp, torch.ones(1, 9, 2), block=n),
    **{f"Config {name}": lambda n, name=name: transformer(name, n) for name in ("layers", "heads", "kv_heads")},
    **{f"Config {name}": lambda n, name=name: transformer(name, n) for name in ("hidden", "block")},
    **{f"KVCache {name}": lambda n, name=name: cached(4, **{name: n}) for name in ("batch", "heads", "dim", "page")},
    **{f"KVCache {name}": lambda n, name=name: cached(4, **{name: n}) for name in ("capacity", "interleave", "pages")},
    "KVCache truncate": lambda n: cached(n, truncate=True),
    "KVCache counts": lambda n: cached(n, counts=True),
}


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", CALLS)
def test_a_whole_number_of_any_kind_is_that_number(name):
    want = CALLS[name](4)
    for kind, make in KINDS.items():
        assert same(CALLS[name](make(4)), want), kind


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_whole_number_is_refused(name):
    for n in NO_NUMBERS:
        if n is NO_NUMBERS[-2] and name in ("KVCache truncate", "KVCache counts"):
            continue  # no token is a length
        with pytest.raises(ValueError, match="expected"):
            CALLS[name](n)


@pytest.mark.parametrize("several", [np.array, torch.tensor, tuple], ids=["numpy", "torch", "tuple"])
def test_lists_of_whole_numbers(several):
    options = {"segment_lengths": [4, 12], "dilation_rates": [1, 2]}
    want = attention(rl.dilated_attention, **options)
    got = attention(rl.dilated_attention, **{name: several(x) for name, x in options.items()})
    assert torch.equal(got, want)
    cache = rl.KVCache(rl.SimulatedWorld(2), batch=2, heads=1, dim=2, capacity=9)
    cache.append(torch.ones(2, 1, 5, 2), torch.ones(2, 1, 5, 2), counts=several([5, 3]))
    assert cache.lengths == (5, 3)
    cache.truncate(several([2, 1]))
    assert cache.lengths == (2, 1)

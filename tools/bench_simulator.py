"""How much the simulator adds to attention itself: a simulated ring against one SDPA call, on one CPU thread.

    python tools/bench_simulator.py [--rounds 15]

Forward and backward, B 1, H 8, D 64, float32, causal, zigzag. Both take turns, and what is printed is the median of
their ratios, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import ringlearn as rl

CASES = ((4096, 4, 1.1), (4096, 8, 1.4), (1024, 4, 1.6), (1024, 8, 2.4))  # tokens, ranks, the ratio to stay below


def seconds(call: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls


def ratios(tokens: int, ranks: int, rounds: int) -> list[float]:
    """The time of the ring, from shards to the gradients of the shards, over that of SDPA, round by round."""
    q, k, v = (torch.randn(1, 8, tokens, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 8, tokens, 64)
    world = rl.SimulatedWorld(ranks)
    shards = [x.map(lambda t: t.detach().requires_grad_()) for x in world.shard(q, k, v, layout=rl.zigzag)]
    leaves = [t for x in shards for t in x.tensors]
    douts = world.shard(dout, layout=rl.zigzag).tensors

    def ring() -> object:
        return torch.autograd.grad(rl.ring_attention(*shards, mask=rl.causal).tensors, leaves, douts)

    def sdpa() -> object:
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dout)

    calls = max(1, 4096 // tokens)
    seconds(ring, calls), seconds(sdpa, calls)  # plans are made once
    return [seconds(ring, calls) / seconds(sdpa, calls) for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often the ring and SDPA take turns (default: 15)")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for tokens, ranks, most in CASES:
        found = ratios(tokens, ranks, rounds)
        low, middle, high = statistics.quantiles(found, n=4)
        print(
            f"{tokens:,} tokens, {ranks} ranks: {middle:.2f} times SDPA (quartiles {low:.2f}, {high:.2f}); limit {most}"
        )


if __name__ == "__main__":
    main()

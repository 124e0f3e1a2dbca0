"""The library inside what torch does to models: torch.compile, activation checkpointing."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringlearn as rl


class Block(torch.nn.Module):
    def __init__(self, world):
        super().__init__()
        torch.manual_seed(0)
        self.world, self.qkv, self.o = world, torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = rl.ring_attention(*self.world.shard(q, k, v, layout=rl.zigzag), mask=rl.causal).unshard()
        return torch.nn.functional.gelu(self.o(out.transpose(1, 2).flatten(-2)))


def run(call, model, x):
    x = x.clone().requires_grad_()
    out = call(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


@pytest.fixture
def model():
    return Block(rl.SimulatedWorld(3))


def test_torch_compile_breaks_its_graph_at_the_call(model):
    x = torch.randn(2, 20, 16)
    want = run(model, model, x)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            for got, right in zip(run(compiled, model, x), want, strict=True):
                assert torch.allclose(got, right, atol=1e-6)
    traced = "\n".join(str(graph.graph) for graph in graphs)
    assert "gelu" in traced and "attention" not in traced, "the model is compiled, the library is not looked into"


def test_a_compiled_transformer_takes_shards_of_changing_lengths():
    model = rl.nn.Transformer(rl.nn.Config(width=16, layers=1, heads=2, block=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        for S in (20, 53, 7):
            tokens = torch.randint(256, (2, S))
            batch = tokens, rl.nn.next_tokens(tokens)
            shards = rl.nn.shard_tokens(rl.SimulatedWorld(2), *batch, layout=rl.zigzag)
            got, want = (
                [loss, *torch.autograd.grad(loss, list(model.parameters()))]
                for loss in (compiled(*shards), model(*batch))
            )
            for a, b in zip(got, want, strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_runs_the_ring_twice_and_changes_nothing(model):
    x = torch.randn(2, 20, 16)
    calls = []
    model.qkv.register_forward_hook(lambda *_: calls.append(1))
    want = run(model, model, x)
    got = run(lambda x: checkpoint(model, x, use_reentrant=False), model, x)
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nobody_pays_for_the_compiler_who_does_not_use_it():  # count_memory does: torch imports it for that
    code = "import sys, ringlearn as rl, torch; x = torch.ones(1, 1, 4, 2); "
    code += "w = rl.SimulatedWorld(2, count_memory=False); "
    code += "rl.ring_attention(*w.shard(x, x, x)).unshard(); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

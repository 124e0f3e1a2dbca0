"""What many tests have in common: layouts, masks and inputs to try, and results held against an oracle."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention, relative

import ringlearn as rl
from ringlearn.layouts import LAYOUTS as BY_NAME

LAYOUTS = list(BY_NAME.values())
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("out", "lse", "dq", "dk", "dv")


def answers_of_processes(program, cases):
    """A fixture: what each gloo process answers to all the cases, which it is asked once for a module."""

    @pytest.fixture(scope="module")
    def answers(pool):
        return pool.run(program, cases)

    return answers


def documents(S):
    """Uneven documents, one of them empty, that add up to S."""
    lengths = [S // 3, 0, S // 7, S // 5]
    return rl.documents([*lengths, S - sum(lengths)])


# Masks by name, from the number of keys: documents need it.
MASKS = {
    "full": lambda S: rl.full,
    "causal": lambda S: rl.causal,
    "window": lambda S: rl.sliding_window(5),
    "causal window": lambda S: rl.causal & rl.sliding_window(16),
    "window wider than S": lambda S: rl.sliding_window(1000),
    "documents": documents,
    "causal documents": lambda S: rl.causal & documents(S),
    "or": lambda S: rl.causal & (documents(S) | rl.sliding_window(4)),
    "own": lambda S: rl.mask(lambda q, k: (3 * q + 5 * k) % 7 < 4),
}

# How scores are changed, by name, from the number of query heads. Sinks are about as large as a row's lse.
SCORES = {
    "plain": lambda H: {},
    "sinks": lambda H: dict(sinks=(2 * torch.randn(H, dtype=torch.float64)).requires_grad_()),
    "softcap": lambda H: dict(softcap=0.7),
    "alibi": lambda H: dict(alibi=rl.alibi_slopes(H)),
    "all": lambda H: SCORES["sinks"](H) | SCORES["softcap"](H) | SCORES["alibi"](H),
}

# H, G, D_k, D_v, and what else is odd about the inputs.
VARIANTS = {
    "GQA": dict(H=8, G=2, D_k=8, D_v=8),
    "MQA": dict(H=4, G=1, D_k=8, D_v=8),
    "MHA, batch of 2": dict(H=3, G=3, D_k=8, D_v=8, B=2),
    "D_k != D_v": dict(H=4, G=2, D_k=12, D_v=5),
    "S_q < S_k, later": dict(H=4, G=2, D_k=8, D_v=8, shorter=0.6),
    "non-contiguous": dict(H=4, G=2, D_k=8, D_v=8, B=2, contiguous=False),
    "only q": dict(H=4, G=2, D_k=8, D_v=8, needs="q"),
    "only k": dict(H=4, G=2, D_k=8, D_v=8, needs="k"),
    "only v": dict(H=4, G=2, D_k=8, D_v=8, needs="v"),
    "scale": dict(H=2, G=2, D_k=8, D_v=8, scale=0.7),
}


def make_inputs(S, H, G, D_k, D_v, B=1, shorter=1.0, contiguous=True, needs="qkv", dtype=torch.float64, **_):
    S_q = max(1, round(S * shorter))
    if contiguous:
        q, k, v = (torch.randn(B, h, s, d, dtype=dtype) for h, s, d in ((H, S_q, D_k), (G, S, D_k), (G, S, D_v)))
    else:  # (B, S, heads, D) as a projection gives it, transposed; v expanded over the batch
        q = torch.randn(B, S_q, H, D_k, dtype=dtype).transpose(1, 2)
        k = torch.randn(B, S, G, 2 * D_k, dtype=dtype)[..., ::2].transpose(1, 2)
        v = torch.randn(1, G, S, D_v, dtype=dtype).expand(B, G, S, D_v)
    for name, t in zip("qkv", (q, k, v)):
        t.requires_grad_(name in needs)
    return q, k, v


def case_id(case):
    return " ".join(str(value).removeprefix("torch.") for value in case.values())


def assert_equal(got, want, inputs, tolerance=1e-12):
    """(out, lse) and their gradients, those of out alone and those of both, with random dout and dlse."""
    (out, lse), (expected, expected_lse) = got, want
    assert out.dtype == inputs[0].dtype and lse.dtype == torch.float64
    assert relative(out, expected) < tolerance and relative(lse, expected_lse) < tolerance
    dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill(expected_lse == -torch.inf, 0.0)
    needing = [t for t in inputs if t.requires_grad]
    for n in (1, 2) if expected_lse.requires_grad else (1,):  # v has no part in lse
        grads, wanted = (
            torch.autograd.grad(both[:n], needing, (dout, dlse)[:n], retain_graph=True)
            for both in ((out, lse), (expected, expected_lse))
        )
        for t, g, w in zip(needing, grads, wanted, strict=True):
            assert g.dtype == t.dtype and g.shape == t.shape
            assert relative(g, w) < tolerance


def check_against_dense(
    layout, mask, P, S, variant, kernel, tolerance=1e-12, attention=rl.ring_attention, scores="plain"
):
    options = VARIANTS[variant] if isinstance(variant, str) else variant
    q, k, v = make_inputs(S, **options)
    q_start = S - q.shape[2]  # the last queries of a longer context, as in chunked prefill
    mask, scale = MASKS[mask](S), options.get("scale")
    shards = rl.SimulatedWorld(P, count_memory=False).shard(q, k, v, layout=layout)
    changes = SCORES[scores](q.shape[1])
    out, lse = attention(*shards, mask, scale, kernel, q_start=q_start, return_lse=True, **changes)
    got = out.unshard(), lse.unshard()
    sinks = [changes["sinks"]] if "sinks" in changes else []
    assert_equal(got, dense_attention(q, k, v, mask, scale, q_start, **changes), (q, k, v, *sinks), tolerance)


def run_low_precision(dtype, P, scale_of_logits=1.0, kernel=None, S=256, attention=rl.ring_attention):
    """Relative errors against float64 of the attention's and of one SDPA call's out, dq, dk, dv."""
    q, k, v = (t.detach() for t in make_inputs(S, H=4, G=2, D_k=32, D_v=32))
    q, k, v = ((t * m).to(dtype) for t, m in zip((q, k, v), (scale_of_logits, 1.0, 1.0)))
    dout = torch.randn(1, 4, S, 32, dtype=torch.float64).to(dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected, _ = dense_attention(*exact, rl.causal)
    expected = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    mine = [t.clone().requires_grad_() for t in (q, k, v)]
    world = rl.SimulatedWorld(P, count_memory=False)
    out = attention(*world.shard(*mine, layout=rl.zigzag), mask=rl.causal, kernel=kernel).unshard()
    ring = [out, *torch.autograd.grad(out, mine, dout)]
    theirs = [t.clone().requires_grad_() for t in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        expanded = [theirs[0], *(t.repeat_interleave(2, 1) for t in theirs[1:])]
        once = torch.nn.functional.scaled_dot_product_attention(*expanded, is_causal=True)
    sdpa = [once, *torch.autograd.grad(once, theirs, dout)]
    assert all(r.dtype == dtype for r in ring)
    return [relative(r, e) for r, e in zip(ring, expected)], [relative(s, e) for s, e in zip(sdpa, expected)], ring


def assert_same_bits(simulated, others, names=NAMES):
    """What every rank gives in another world, by name, is what the simulated ranks give, to the last bit."""
    for rank, there in enumerate(others):
        for name, here, got in zip(names, simulated, there, strict=True):
            assert torch.equal(here, got), f"{name} of rank {rank}: off by {relative(got, here):.1e}"

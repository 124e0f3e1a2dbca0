"""FlashAttention 4 behind the library's kernels: what it is handed, what becomes of it, and when it is taken.

Its arithmetic is a double's here (fa4_double.py); tests/gpu/check_kernels.py checks the package itself.
"""

import inspect
from functools import partial

import fa4_double
import pytest
import torch
from kernel_cases import (
    BANDS,
    MASKS,
    MEMORY,
    Diagonals,
    check_gradient_of_lse,
    errors,
    exact,
    inputs,
    one_tile,
    run,
    tile_of,
)
from oracle import dense_attention, relative
from pairwise import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

import ringlearn as rl
from ringlearn import kernels
from ringlearn.kernels import fa4, gpu, sdpa
from ringlearn.kernels.fa4 import Fa4
from ringlearn.tiles import Kind, Tile

TAKEN = [name for name in MASKS if name != "blind rows"]
GRID = {
    "mask": TAKEN,
    "S": [(1, 1), (7, 7), (97, 97), (600, 600), (1, 97), (97, 7), (7, 600)],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "dims": [(16, 16), (24, 40), (33, 7), (1, 3), (80, 96), (192, 128)],
    "memory": list(MEMORY),
    "pieces": [1, 3],
}


@pytest.fixture
def kernel(monkeypatch):
    """The kernel on CPU tensors, with the double behind it."""
    fa4_double.install(monkeypatch)
    monkeypatch.setattr(Fa4, "_refuses", lambda self, q, k, v, kind: None)
    return Fa4()


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU of some compute capability, as far as tensors without memory go, and the package."""

    def make(capability=(9, 0), version=fa4.CHECKED[0]):
        fa4_double.install(monkeypatch, version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        gpu.capability_of.cache_clear()

    yield make
    gpu.capability_of.cache_clear(), fa4.missing.cache_clear(), fa4._interface.cache_clear()


def on_gpu(S=16384, D=(128, 128), dtype=torch.bfloat16, H=8, G=2):
    """q, k, v on a GPU that is not there."""
    with FakeTensorMode():
        shapes = (1, H, S, D[0]), (1, G, S, D[0]), (1, G, S, D[1])
        return tuple(torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)


# --- what it computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", pairwise(GRID), ids=lambda case: " ".join(map(str, case.values())))
def test_equals_dense_attention(case, kernel):
    S_q, S_k = case["S"]
    if case["mask"].startswith("documents") and S_q > S_k:
        pytest.skip("documents end with the keys")
    q, k, v, dout = inputs(S_q, S_k, case["heads"], case["dims"], case["memory"])
    if case["memory"] == "expanded":  # all queries' heads alike, and all keys' too: break the symmetry in one of them
        q = torch.randn_like(q)
    mask, scale = MASKS[case["mask"]](max(S_q, S_k)), q.shape[-1] ** -0.5
    got, oracle = run(kernel, q, k, v, dout, mask, scale, case["pieces"]), exact(q, k, v, dout, mask, scale)
    off = errors(got, oracle)
    assert all(error < 1e-12 for error in off.values()), off
    assert torch.equal(got["lse"] == -torch.inf, oracle["lse"] == -torch.inf)
    assert fa4_double.calls


@pytest.mark.parametrize("kind", Fa4.forms)
def test_a_tile_in_the_middle_of_the_tensors(kind, kernel):
    q, k, v, dout = inputs(50, 60, (4, 2), (16, 8))
    got, oracle = one_tile(kernel, tile_of(kind), q, k, v, dout, 0.3)
    off = errors(got, oracle)
    assert all(error < 1e-12 for error in off.values()), off
    assert [call["name"] for call in fa4_double.calls] == ["forward", "backward"]
    for call in fa4_double.calls:
        assert call["causal"] == (kind is Kind.CAUSAL)
        window = (None, 0) if kind is Kind.SEGMENTS else (None, None)
        assert (call["window_size_left"], call["window_size_right"]) == window
        assert (call["cu_seqlens_q"] is None) == (kind is not Kind.SEGMENTS)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_any_band(band, kernel):
    q, k, v, dout = inputs(37, 37, (4, 2), (16, 8))
    got, oracle = (compute(q, k, v, dout, Diagonals(*band), 0.3) for compute in (partial(run, kernel), exact))
    blind = oracle["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, blind) and not got["out"][blind].any()
    off = errors(got, oracle) if not blind.all() else {"lse": 0.0}
    assert all(error < 1e-12 for error in off.values()), off


@pytest.mark.parametrize("mask", TAKEN)
def test_softcap(mask, kernel):
    q, k, v, dout = inputs(97, 97, (4, 2), (16, 8))
    capped, mask = Fa4(softcap=0.7), MASKS[mask](97)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(2, 1) for t in leaves[1:])
    scores = 0.7 * torch.tanh(leaves[0] @ keys.mT * 0.3 / 0.7)
    out = scores.masked_fill(~mask.dense(97, 97), -torch.inf).softmax(-1) @ values
    wanted = [out, *torch.autograd.grad(out, leaves, dout)]
    got = run(capped, q, k, v, dout, mask, 0.3, pieces=3)
    off = [relative(got[name], want) for name, want in zip(("out", "dq", "dk", "dv"), wanted, strict=True)]
    assert all(error < 1e-12 for error in off), off
    assert kernels.choose(capped) is capped


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), True, "50"])
def test_a_softcap_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="expected softcap to be a positive number, or None"):
        Fa4(softcap=wrong)


@pytest.mark.parametrize("mask", TAKEN)
def test_gradient_through_lse(mask, kernel):
    check_gradient_of_lse(kernel, MASKS[mask](97), 97, (16, 8))


def test_the_backward_is_deterministic_if_torch_is_told_to_be(kernel):
    q, k, v, dout = inputs(97, 97, (4, 2), (16, 16))
    torch.use_deterministic_algorithms(True)
    try:
        run(kernel, q, k, v, dout, rl.causal, 0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    run(kernel, q, k, v, dout, rl.causal, 0.3)
    assert [call["deterministic"] for call in fa4_double.calls if call["name"] == "backward"] == [True, False]


def test_nothing_is_compiled_while_a_graph_is_captured(kernel, monkeypatch):
    q, k, v, dout = inputs(97, 97, (4, 2), (16, 16))
    capturing = lambda yes: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: yes)  # noqa: E731
    mask = rl.causal & rl.documents([50, 47])
    run(kernel, q, k, v, dout, mask, 0.3)
    capturing(True)
    run(kernel, q, k, v, dout, mask, 0.4)
    for other in (inputs(98, 98, (4, 2), (16, 16)), inputs(97, 97, (4, 1), (16, 16))):
        with pytest.raises(RuntimeError, match="make the same call once, forward and backward, before you capture it"):
            run(kernel, *other, rl.documents([50, other[0].shape[2] - 50]) & rl.causal, 0.3)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        run(kernel, q, k, v, dout, rl.full, 0.3)
    capturing(False)
    monkeypatch.setattr(fa4, "REMEMBERED", 3)
    for S in range(20, 30):
        run(kernel, *inputs(S, S, (4, 2), (16, 16)), rl.causal, 0.3)
        assert len(kernel._compiled) <= 3 and len(kernel._launches) <= 3


def test_a_second_forward_goes_to_the_compiled_kernel_at_once(kernel, monkeypatch):
    mask = rl.causal & rl.sliding_window(30)
    first, other = (inputs(97, 97, (4, 2), (16, 16), memory) for memory in ("contiguous", "last dim first"))
    run(kernel, *first, mask, 0.3)
    monkeypatch.setattr(fa4._interface(), "_flash_attn_fwd", None)
    for (q, k, v, dout), scale in ((first, 0.3), (other, 0.3), (other, 0.4)):
        off = errors(run(kernel, q, k, v, dout, mask, scale), exact(q, k, v, dout, mask, scale))
        assert all(error < 1e-12 for error in off.values()), off
    for changed in (rl.causal & rl.sliding_window(31), rl.causal):
        with pytest.raises(AttributeError, match="compile_cache"):  # they ask the package
            run(kernel, *first, changed, 0.3)


def forward(q, k, v, softmax_scale, more):
    """Like the package's, it finds the table of its kernels under its own name."""
    forward.compile_cache["kernel"] = lambda *given: None
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 97)
    forward.compile_cache["kernel"](q, k, v, out.clone() if more == "another out" else out, lse, softmax_scale, 7, more)
    return out, lse


def test_a_kernel_is_launched_at_once_only_if_it_takes_nothing_else():
    q, k, v = (t.transpose(1, 2) for t in inputs(97, 97, (4, 2), (16, 16))[:3])
    forward.compile_cache = table = {}
    launches = {}
    for more in (None, "another out", torch.zeros(1)):
        (out, lse), launches[str(more)] = fa4._forward_and_launch(forward, q, k, v, softmax_scale=0.3, more=more)
        assert forward.compile_cache is table and out.shape == q.shape and lse.shape == (2, 4, 97)
    table["kernel"] = None  # the launch asks no table
    out, lse = launches.pop("None")(0.4, q, k, v)
    assert out.shape == q.shape and lse.shape == (2, 4, 97)
    assert list(launches.values()) == [None, None]


def test_a_ring_of_it(kernel, monkeypatch):
    monkeypatch.setattr(sdpa, "FUSED", (kernel, *sdpa.FUSED))
    monkeypatch.setattr(Fa4, "passed_over", lambda self, q, k, v, kind: None)
    q, k, v = (t.requires_grad_() for t in inputs(101, 101, (4, 2), (16, 16))[:3])
    for layout in (rl.contiguous, rl.zigzag, rl.striped):
        for mask in (rl.causal, rl.causal & rl.documents([40, 61]), rl.causal & rl.sliding_window(30)):
            out = rl.ring_attention(*rl.SimulatedWorld(3).shard(q, k, v, layout=layout), mask=mask)
            expected, _ = dense_attention(q, k, v, mask)
            weights = torch.randn_like(expected)
            assert relative(out.unshard(), expected) < 1e-12
            got = torch.autograd.grad(out.unshard(), (q, k, v), weights)
            want = torch.autograd.grad(expected, (q, k, v), weights)
            assert all(relative(a, b) < 1e-12 for a, b in zip(got, want, strict=True))
    assert fa4_double.calls


# --- when it is taken ----------------------------------------------------------------------------------------------


def test_it_is_preferred_where_it_is_installed_and_was_checked(machine):
    machine()
    chosen, tensors = kernels.choose(), on_gpu()
    with torch.no_grad():
        picked = [chosen.pick(*tensors, kind).name for kind in Kind]
        assert picked == ["fa4", "fa4", "fa4", "efficient"]
        assert chosen.pick(*tensors, Kind.FULL, lse_grad=True).name == "fa4"
        assert chosen.pick(*on_gpu(dtype=torch.float32), Kind.FULL).name == "efficient"
        assert chosen.pick(*on_gpu(D=(256, 256)), Kind.CAUSAL).name == "fa4"
        assert chosen.pick(*on_gpu(D=(192, 128), G=8), Kind.CAUSAL).name == "fa4"
    text = kernels.explain(*tensors, mask=rl.causal & rl.sliding_window(1000))
    assert "SEGMENTS fa4, in 1 call a step\n" in text and "  cudnn       it takes FULL and CAUSAL tiles only\n" in text


REFUSED = {
    "on another device": ({}, [t.to("meta") for t in inputs(7, 7, (4, 2), (8, 8))[:3]], "it runs on NVIDIA GPUs"),
    "float32": ({}, {"dtype": torch.float32}, "it takes float16 and bfloat16, got torch.float32"),
    "an old GPU": ({"capability": (8, 0)}, {}, "it needs a GPU of compute capability 9.0, got 8.0"),
    "a GPU that nobody tried": ({"capability": (12, 0)}, {}, "it takes GPUs of compute capability 9.x and 10.x"),
    "large head dims": ({}, {"D": (264, 264)}, "up to 128, of 256, or .*, got D_k = 264, D_v = 264"),
    "head dims between": ({}, {"D": (160, 150)}, "up to 128, of 256, or D_k = 192 with D_v = 128, got D_k = 160"),
    "latent attention in groups": (
        {},
        {"D": (192, 128)},
        "D_v = 128 for as many key/value heads as query heads, got 2",
    ),
    "another version": (
        {"version": "4.0.0b37"},
        {},
        "flash-attn-4 4.0.0b37 is installed, and only 4.0.0b36 was checked against dense attention",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_it_does_not_take_is_refused_with_the_reason(what, machine):
    where, tensors, reason = REFUSED[what]
    machine(**where)
    q, k, v = tensors if isinstance(tensors, list) else on_gpu(**tensors)
    with torch.no_grad():
        assert kernels.choose().pick(q, k, v, Kind.FULL).name != "fa4"
        with pytest.raises(ValueError, match=f"kernel 'fa4' cannot compute this FULL tile: .*{reason}"):
            kernels.choose("fa4").forward(q, k, v, Tile(slice(0, 7), slice(0, 7), Kind.FULL), 0.3)


def test_a_package_that_is_not_there_or_broken_is_refused_with_the_reason(machine, monkeypatch):
    machine()
    tensors = on_gpu()

    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file\nand more")

    monkeypatch.setattr(fa4.importlib, "import_module", broken)
    reason = Fa4().unsupported(*tensors, Kind.FULL)
    assert (
        reason == "flash-attn-4 4.0.0b36 cannot be imported: OSError: libcudart.so.13: cannot open shared object file"
    )
    monkeypatch.undo()
    machine()
    monkeypatch.setattr(fa4, "version", lambda package: (_ for _ in ()).throw(fa4.PackageNotFoundError(package)))
    reason = Fa4().unsupported(*tensors, Kind.FULL)
    assert reason == "the package flash-attn-4 is not installed; pip install 'ringlearn[fa4]' brings it"
    assert f"  fa4         {reason}" in kernels.explain(*tensors, mask=rl.causal)


def test_a_partial_tile_is_not_for_it(machine):
    machine()
    assert Fa4().unsupported(*on_gpu(), Kind.PARTIAL) == "it takes FULL, CAUSAL and SEGMENTS tiles only"


def test_small_calls_are_left_to_kernels_that_cost_the_host_less(machine):
    """32:8 heads of 128: it beats cuDNN from 4,096 tokens on, and FlashAttention 2 under a window from 2,048 on."""
    machine()
    with torch.no_grad():
        for S, kind, name in (
            (4096, Kind.CAUSAL, "fa4"),
            (2048, Kind.CAUSAL, "cudnn"),
            (2048, Kind.FULL, "cudnn"),
            (2048, Kind.SEGMENTS, "fa4"),
            (1024, Kind.SEGMENTS, "cuda_flash"),
        ):
            tensors = on_gpu(S, H=32, G=8)
            assert kernels.choose().pick(*tensors, kind).name == name, (S, kind)
            assert kernels.choose("fa4").unsupported(*tensors, kind) is None
    text = kernels.explain(*on_gpu(2048, H=32, G=8), mask=rl.causal)
    assert "  fa4         a call of this size would wait for its host" in text


@pytest.mark.parametrize(
    "D, called", [(7, 64), (40, 64), (64, 64), (72, 96), (96, 96), (97, 128), (128, 128), (256, 256)]
)
def test_head_dims_are_padded_to_those_that_were_checked(D, called, kernel):
    q, k, v, dout = inputs(9, 9, (2, 2), (D, D))
    run(kernel, q, k, v, dout, rl.causal, 0.3)
    assert {call["q"].shape[-1] for call in fa4_double.calls} == {called}


def test_blackwell_by_name_only(machine):
    machine((10, 0))
    tensors = on_gpu()
    assert Fa4().unsupported(*tensors, Kind.FULL) is None
    with torch.no_grad():
        assert kernels.choose().pick(*tensors, Kind.FULL).name == "cudnn"
    assert "measured on GPUs of compute capability 9.x, got compute capability 10.0" in kernels.explain(*tensors)


def test_the_version_that_the_extra_brings_is_one_that_was_checked():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (needed,) = project["optional-dependencies"]["fa4"]
    assert needed.split(";")[0].strip() in [f"flash-attn-4[cu13]=={version}" for version in fa4.CHECKED]


def test_the_double_has_the_names_of_the_package():
    interface = pytest.importorskip("flash_attn.cute.interface", reason="flash-attn-4 is not installed")
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        real, double = (inspect.signature(getattr(m, name)).parameters for m in (interface, fa4_double))
        positional = [p.name for p in double.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(real)[: len(positional)] == positional
        for p in double.values():
            assert real[p.name].default == p.default, p.name

"""Kernels against dense attention in float64: every kernel that this machine has, every kind of tile, odd inputs."""

from types import SimpleNamespace

import pytest
import torch
from cases import case_id
from kernel_cases import (
    BANDS,
    MASKS,
    MEMORY,
    Diagonals,
    Largest,
    check_gradient_of_lse,
    errors,
    exact,
    inputs,
    limits,
    one_tile,
    run,
    tile_of,
)
from oracle import dense_attention, relative
from pairwise import pairwise, product_but_for
from torch.utils._python_dispatch import TorchDispatchMode

import ringlearn as rl
from ringlearn import kernels
from ringlearn.kernels import packing
from ringlearn.kernels.sdpa import CpuFlash, CudaFlash, Cudnn, Efficient
from ringlearn.tiles import BLOCK, Kind, Tile, plan

ON_CPU = ["reference", "cpu_flash", "sdpa"]
GRID = {
    "kernel": ON_CPU,
    "mask": list(MASKS),
    "S": [(1, 1), (7, 7), (97, 97), (600, 600), (1, 97), (97, 7), (7, 600)],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "dims": [(16, 16), (24, 40), (33, 7), (1, 3)],
    "memory": list(MEMORY),
    "pieces": [1, 3],
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
}


def check(case):
    S_q, S_k = case["S"]
    q, k, v, dout = inputs(S_q, S_k, case["heads"], case["dims"], case["memory"], case["dtype"])
    if case["memory"] == "expanded":  # all queries' heads alike, and all keys' too: break the symmetry in one of them
        q = torch.randn_like(q)
    before = [t.clone() for t in (q, k, v, dout)]
    mask, scale = MASKS[case["mask"]](max(S_q, S_k)), q.shape[-1] ** -0.5
    if "documents" in case["mask"] and S_q > S_k:
        pytest.skip("documents end with the keys")
    kernel = kernels.choose(case["kernel"])
    reason = kernel.unsupported(q, k, v, Kind.FULL)
    if reason:
        assert case["kernel"] == "cpu_flash" and "D_k = D_v only" in reason
        pytest.skip(reason)
    got = run(kernel, q, k, v, dout, mask, scale, case["pieces"])
    oracle = exact(q, k, v, dout, mask, scale)
    allowed = limits(q, k, v, dout, mask, scale, oracle)
    off = errors(got, oracle)
    assert all(off[name] <= allowed[name] for name in off), {n: (off[n], allowed[n]) for n in off}
    assert torch.equal(got["lse"] == -torch.inf, oracle["lse"] == -torch.inf)
    assert all(map(torch.equal, (q, k, v, dout), before)), "a kernel has written into its inputs"


@pytest.mark.parametrize("case", pairwise(GRID), ids=case_id)
def test_kernels_equal_dense_attention(case):
    check(case)


MANY = product_but_for(("heads", "memory", "pieces"), GRID)  # all of it would be 50,000 cases


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=case_id)
def test_kernels_equal_dense_attention_everywhere(case):
    check(case)


# --- one tile ------------------------------------------------------------------------------------------------------

NOTHING = rl.mask(lambda q, k: (q < 0) & (k < 0), "nothing")


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("kind", list(Kind))
def test_a_tile_in_the_middle_of_the_tensors(name, kind):
    q, k, v, dout = inputs(50, 60, (4, 2), (16, 8))
    got, oracle = one_tile(kernels.choose(name), tile_of(kind), q, k, v, dout, 0.3)
    assert got["lse"].is_contiguous() and got["lse"].dtype == torch.float64
    off = errors(got, oracle)
    assert all(error < 1e-12 for error in off.values()), off  # not max(): it would lose a NaN


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_any_band(name, band):
    """Also one whose first or last rows see nothing, and one that nobody sees."""
    q, k, v, dout = inputs(37, 37, (4, 2), (16, 8))
    kernel, mask = kernels.choose(name), Diagonals(*band)
    got, oracle = run(kernel, q, k, v, dout, mask, 0.3), exact(q, k, v, dout, mask, 0.3)
    blind = ~mask.dense(37, 37).any(-1)
    assert torch.all(got["out"][:, :, blind] == 0) and torch.all(got["lse"][..., blind] == -torch.inf)
    assert torch.equal(got["lse"] == -torch.inf, oracle["lse"] == -torch.inf)
    off = errors(got, oracle) if not blind.all() else {n: float(t.abs().sum()) for n, t in got.items() if n != "lse"}
    assert all(error < 1e-12 for error in off.values()), off


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_tile_of_several_blocks(name, mask):
    q, k, v, dout = inputs(1100, 1100, (2, 1), (4, 4), B=1)
    got = run(kernels.choose(name), q, k, v, dout, MASKS[mask](1100), 0.5)
    off = errors(got, exact(q, k, v, dout, MASKS[mask](1100), 0.5))
    assert all(error < 1e-12 for error in off.values()), off


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_see_nothing(name, dtype):
    q, k, v, dout = inputs(50, 60, (4, 2), (16, 16), dtype=dtype)
    tile, kernel = tile_of(Kind.PARTIAL, mask=NOTHING), kernels.choose(name)
    out, lse = kernel.forward(q, k, v, tile, 0.3)
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)
    grads = kernel.backward(dout, q, k, v, dout * 0, lse.new_full(q.shape[:3], -torch.inf), tile, 0.3)
    assert all(torch.all(g == 0) for g in grads)  # NaN would not be 0 either


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_tiles_reach_no_kernel(name, shape):
    """CPU flash would end the process."""
    q, k, v, dout = inputs(7, 9, (4, 2), (8, 6))
    rows, columns = shape
    tile, kernel = Tile(slice(2, 2 + rows), slice(3, 3 + columns), Kind.FULL), kernels.choose(name)
    out, lse = kernel.forward(q, k, v, tile, 0.3)
    assert out.shape == (2, 4, rows, 6) and torch.all(out == 0)
    assert lse.shape == (2, 4, rows) and torch.all(lse == -torch.inf)
    dq, dk, dv = kernel.backward(dout, q, k, v, dout, torch.zeros(2, 4, 7).double(), tile, 0.3)
    assert (dq.shape, dk.shape, dv.shape) == ((2, 4, rows, 8), (2, 2, columns, 8), (2, 2, columns, 6))
    assert all(torch.all(g == 0) for g in (dq, dk, dv))


@pytest.mark.parametrize("name", ON_CPU)
def test_empty_batch(name):
    q, k, v, dout = inputs(7, 9, (4, 2), (8, 6), B=0)
    out, lse = kernels.choose(name).forward(q, k, v, Tile(slice(0, 7), slice(0, 9), Kind.FULL), 0.3)
    assert out.shape == (0, 4, 7, 6) and lse.shape == (0, 4, 7)


def test_expanded_keys_are_the_repeated_ones_bit_for_bit():
    q, k, v, dout = inputs(97, 97, (6, 2), (16, 16), dtype=torch.float32)
    many = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    kernel = CpuFlash()
    grouped = run(kernel, q, k, v, dout, rl.causal, 0.25)
    repeated = run(kernel, q, *many, dout, rl.causal, 0.25)
    for name in ("out", "lse", "dq"):
        assert torch.equal(grouped[name], repeated[name])
    for name in ("dk", "dv"):
        assert torch.equal(grouped[name], repeated[name].unflatten(1, (2, 3)).sum(2))


def test_groups_are_summed_in_the_accumulation_dtype():
    """One rounding per query head, none for the sum."""
    q, k, v, dout = inputs(97, 97, (32, 1), (16, 16), dtype=torch.bfloat16)
    tile = Tile(slice(0, 97), slice(0, 97), Kind.FULL)
    out, lse = CpuFlash().forward(q, k, v, tile, 0.25)
    _, dk, dv = CpuFlash().backward(dout, q, k, v, out, lse, tile, 0.25)
    assert dk.dtype == dv.dtype == torch.float32


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_logits(name, mask, dtype):
    """Scores of 1e4: everything is finite, and off by no more than a few roundings of a score."""
    q, k, v, dout = inputs(97, 97, (4, 2), (16, 16), dtype=dtype)
    scale = 1e4 / float((q.double() @ k.repeat_interleave(2, 1).double().mT).abs().max())
    got = run(kernels.choose(name), q, k, v, dout, MASKS[mask](97), scale)
    oracle = exact(q, k, v, dout, MASKS[mask](97), scale)
    off = errors(got, oracle)
    assert all(error < 8 * 1e4 * torch.finfo(dtype).eps for error in off.values()), off


# --- the gradient through lse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("mask", list(MASKS))
def test_gradient_through_lse(name, mask):
    check_gradient_of_lse(kernels.choose(name), MASKS[mask](600), 600, (12, 5))


def test_fused_kernels_refuse_a_gradient_of_lse():
    q, k, v, dout = inputs(7, 7, (4, 2), (8, 8))
    assert "no gradient of lse" in CpuFlash().unsupported(q, k, v, Kind.FULL, lse_grad=True)
    with pytest.raises(ValueError, match="'cpu_flash' cannot compute this FULL tile: it takes no gradient of lse"):
        CpuFlash().backward(dout, q, k, v, dout, dout[..., 0], Tile(slice(0, 7), slice(0, 7), Kind.FULL), 0.3, dout)


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("mask", list(MASKS))
def test_no_score_matrix_anywhere(name, mask):
    S, H = 2048, 2
    q, k, v, dout = inputs(S, S, (H, 1), (8, 8), dtype=torch.float32, B=1)
    with Largest() as seen:
        run(kernels.choose(name), q, k, v, dout, MASKS[mask](S), 0.3)
    assert 0 < seen.numel <= H * BLOCK * BLOCK < S * S


# --- which kernel --------------------------------------------------------------------------------------------------


def test_the_choice():
    q, k, v, _ = inputs(7, 7, (4, 2), (8, 8))
    sdpa = kernels.choose()
    assert kernels.choose(None) is kernels.choose("auto") is kernels.choose("sdpa") is sdpa
    assert [sdpa.pick(q, k, v, kind).name for kind in Kind] == ["cpu_flash"] * 4
    assert sdpa.pick(q, k, v, Kind.FULL, lse_grad=True).name == "reference"
    meta = [t.to("meta") for t in (q, k, v)]
    assert [sdpa.pick(*meta, kind).name for kind in Kind] == ["reference"] * 4
    for name in ("reference", "cpu_flash", "cudnn", "cuda_flash", "efficient"):
        assert kernels.choose(name).name == name


def test_while_autograd_records_the_reference_kernel_computes():
    q, k, v, _ = inputs(7, 7, (4, 2), (8, 8))
    q.requires_grad_()
    tile = Tile(slice(0, 7), slice(0, 7), Kind.FULL)
    assert kernels.choose().pick(q, k, v, Kind.FULL).name == "reference"
    out, lse = kernels.choose().forward(q, k, v, tile, 0.3)
    expected = dense_attention(q, k, v, rl.full, 0.3)
    weights = torch.randn_like(out), torch.randn_like(lse)
    got, want = (torch.autograd.grad(pair, q, weights)[0] for pair in ((out, lse), expected))
    assert relative(got, want) < 1e-12
    with pytest.raises(ValueError, match="autograd is recording"):
        kernels.choose("cpu_flash").forward(q, k, v, tile, 0.3)
    with torch.no_grad():
        assert kernels.choose().pick(q, k, v, Kind.FULL).name == "cpu_flash"


def test_your_own_kernel():
    class Mine:
        name = "mine"
        unsupported = forward = backward = lambda self, *args: None

    mine = Mine()
    assert kernels.choose(mine) is mine


@pytest.mark.parametrize("wrong", ["flash", "", 3, object(), SimpleNamespace(name="half a kernel")])
def test_unknown_kernel(wrong):
    with pytest.raises(ValueError, match=r"expected None, 'auto', 'sdpa', 'cpu_flash', .*'reference', .* got"):
        kernels.choose(wrong)


@pytest.mark.parametrize("name", ["cudnn", "cuda_flash", "efficient"])
def test_a_forced_kernel_says_why_it_cannot(name):
    q, k, v, dout = inputs(7, 7, (4, 2), (8, 8))
    tile = Tile(slice(0, 7), slice(0, 7), Kind.CAUSAL)
    message = f"kernel '{name}' cannot compute this CAUSAL tile: it runs on NVIDIA GPUs, got cpu tensors"
    with pytest.raises(ValueError, match=message):
        kernels.choose(name).forward(q, k, v, tile, 0.3)
    with pytest.raises(ValueError, match=message):
        kernels.choose(name).backward(dout, q, k, v, dout, dout[..., 0], tile, 0.3)


def test_explanation():
    q, k, v, _ = inputs(7, 7, (4, 2), (8, 8), dtype=torch.float32)
    text = kernels.explain(q, k, v)
    assert repr(text) == str(text)
    lines = text.splitlines()
    assert lines[0] == "q (2, 4, 7, 8), k (2, 2, 7, 8), v (2, 2, 7, 8), float32 on cpu, kernel 'sdpa'"
    cut = "cpu_flash, cut into FULL, CAUSAL and PARTIAL tiles"
    assert lines[1:5] == ["FULL     cpu_flash", "CAUSAL   cpu_flash", f"SEGMENTS {cut}", "PARTIAL  cpu_flash"]
    assert "  cudnn       it runs on NVIDIA GPUs, got cpu tensors" in lines
    assert any(line.startswith("  reference   the slowest") for line in lines)
    assert "CAUSAL" not in kernels.explain(q, k, v, rl.full)
    assert "PARTIAL" not in kernels.explain(q, k, v, rl.causal)
    windows = kernels.explain(q, k, v, rl.causal & rl.sliding_window(3)).splitlines()
    assert windows[1:4] == [*lines[1:3], f"SEGMENTS {cut}, in up to 2 calls a step"] and not windows[4].startswith("PA")
    assert "PARTIAL  cpu_flash" in kernels.explain(q, k, v, rl.mask(lambda q, k: q > k))
    assert "FULL" not in kernels.explain(q, k, v, Kind.PARTIAL)


def test_explanation_for_meta_tensors_and_for_a_forced_kernel():
    q, k, v, _ = (t.to("meta") for t in inputs(7, 7, (4, 2), (8, 8)))
    text = kernels.explain(q, k, v, rl.full)
    assert "FULL     reference" in text and "cpu_flash   it runs on CPU tensors, got meta tensors" in text
    text = kernels.explain(q, k, v, rl.full, kernel="cpu_flash")
    assert "FULL     ValueError: cpu_flash: it runs on CPU tensors, got meta tensors" in text


def test_explanation_refuses_what_attention_refuses():
    q, k, v, _ = inputs(7, 7, (4, 2), (8, 8))
    with pytest.raises(ValueError, match=r"kernels\.explain: .* same sequence length"):
        kernels.explain(q, k[:, :, :5], v)
    with pytest.raises(ValueError, match="expected a mask"):
        kernels.explain(q, k, v, "causal")
    with pytest.raises(ValueError, match="expected None, 'auto'"):
        kernels.explain(q, k, v, kernel="flash")


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", list(Kind))
def test_meta_tensors_have_the_right_shapes(name, kind):
    q, k, v, dout = (t.to("meta") for t in inputs(50, 60, (4, 2), (16, 8), dtype=torch.bfloat16))
    kernel, tile = kernels.choose(name), tile_of(kind)
    out, lse = kernel.forward(q, k, v, tile, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 37, 8), (2, 4, 37), torch.float32)
    dq, dk, dv = kernel.backward(dout, q, k, v, dout, dout[..., 0].float(), tile, 0.3)
    assert (dq.shape, dk.shape, dv.shape) == ((2, 4, 37, 16), (2, 2, 37, 16), (2, 2, 37, 8))


# --- what GPU kernels are handed, as far as a machine without a GPU can see ------------------------------------------


class Handed(TorchDispatchMode):
    """Remembers the arguments of the fused operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.__name__:
            names = [a.name for a in func._schema.arguments]
            self.calls[func.__name__] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls", [Cudnn, CudaFlash, Efficient])
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (33, 7)])
@pytest.mark.parametrize("memory", MEMORY)
def test_gpu_kernels_are_handed_what_they_take(cls, kind, dims, memory, monkeypatch):
    if kind not in cls.forms:
        pytest.skip("it takes no such tile, or gets it cut")
    monkeypatch.setattr(cls, "_refuses", lambda self, q, k, v, kind: None)
    # `.to` would pack the tensors: strides matter here.
    made = inputs(50, 60, (4, 2), dims, memory, torch.bfloat16)
    q, k, v, dout = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in made)
    # A multiple of 8 rows in, so that only strides can be what a kernel does not take.
    kernel, tile, (D_k, D_v) = cls(), tile_of(kind, slice(8, 45), slice(8, 45)), dims
    with Handed() as handed:
        out, lse = kernel.forward(q, k, v, tile, 0.3)
        all_out, all_lse = q.new_empty(2, 4, 50, D_v, dtype=torch.float32), q.new_empty(2, 4, 50, dtype=torch.float32)
        dq, dk, dv = kernel.backward(dout, q, k, v, all_out, all_lse, tile, 0.3)
    assert (out.shape, lse.shape) == ((2, 4, 37, D_v), (2, 4, 37))
    assert lse.is_contiguous() and lse.dtype == torch.float32
    assert (dq.shape, dk.shape, dv.shape) == ((2, 4, 37, D_k), (2, 2, 37, D_k), (2, 2, 37, D_v))
    assert dk.dtype == dv.dtype == (torch.bfloat16 if kernel.grouped else torch.float32)
    assert len(handed.calls) == 2
    for call in handed.calls.values():
        assert call["scale"] == 0.3 and call.get("is_causal", False) == (kind is Kind.CAUSAL)
        window = (-1, 0) if kind is Kind.SEGMENTS else (None, None)
        assert (call.get("window_size_left"), call.get("window_size_right")) == window
        if kind is Kind.SEGMENTS:  # of two batches, 37 rows and columns each; 4 segments, and 3 between them
            assert [call[name].shape[0] for name in ("query", "key", "cum_seq_q", "cum_seq_k")] == [74, 74, 15, 15]
            assert (call["max_q"], call["max_k"]) == (10, 14)
        for name in ("query", "key", "value", "grad_out", "grad_out_", "out"):
            if name in call:
                t = call[name]
                assert t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 and t.stride(-1) == 1, name
                assert all(s % 8 == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1), name
                assert cls is not Cudnn or all(t.stride()), name
    assert list(handed.calls.values())[1]["logsumexp"].is_contiguous()
    if cls is Efficient:
        forward, backward = handed.calls.values()
        assert backward["out"].transpose(1, 2).is_contiguous()
        assert backward["logsumexp"].shape[-1] == 64
        if kind is Kind.PARTIAL:
            for bias in (forward["attn_bias"], backward["attn_bias"]):
                assert bias.shape == (4, 2, 37, 37) and bias.stride(2) % 16 == 0
    if cls is Cudnn:
        assert list(handed.calls.values())[1]["logsumexp"].shape == (2, 4, 37, 1)


def test_segments_of_a_batch_lie_one_below_the_other_and_come_back():
    tile, t, lse = tile_of(Kind.SEGMENTS), torch.randn(2, 4, 37, 8), torch.randn(2, 4, 37)
    rows, columns, *most = packing.sequences(tile, t)
    one = tile.call.starts
    for two, starts in ((rows, one.rows), (columns, one.columns)):
        assert two.tolist() == [*starts.tolist(), *(starts + 37).tolist()[1:]] and two.dtype == torch.int32
    assert most == [10, 14]
    packed, packed_lse = packing.pack(t), packing.pack_lse(lse)
    assert torch.equal(packed[37:], t[1].transpose(0, 1)) and torch.equal(packed_lse[:, 37:], lse[1])
    assert torch.equal(packing.unpack(packed, t), t) and torch.equal(packing.unpack_lse(packed_lse, t), lse)
    assert packing.pack(t[:1]).data_ptr() == t.data_ptr(), "one sequence is not copied"
    ones = plan(rl.documents([1] * 9), (range(9),), (range(9),))[0]
    assert packing.sequences(ones, t)[2] == 2, "FlashAttention mixes up the heads of lse if all sequences have one row"


@pytest.mark.parametrize("cls", [Cudnn, CudaFlash, Efficient])
def test_gpu_kernels_are_handed_aligned_tensors(cls):
    """A contiguous tensor can begin anywhere in memory: k and v arrive in one packed message."""
    packed = torch.randn(1 + 2 * 4 * 50 * 16).bfloat16()
    k = packed[1:].view(2, 4, 50, 16)
    assert k.is_contiguous() and k.data_ptr() % 16
    (q, fitted), _ = cls()._fit(k.clone(), k, k)
    assert fitted.data_ptr() % 16 == 0 and torch.equal(fitted, k)


def test_memory_efficient_attention_looks_at_the_stride_of_a_single_row_too():
    """torch 2.11 on an H200: "query is not correctly aligned (strideM)" for one row whose stride is 1."""
    q, k = torch.randn(2, 4, 64, 1).transpose(2, 3), torch.randn(2, 4, 97, 64)
    assert q.stride(2) == 1
    (fitted, _), _ = Efficient()._fit(q, k, k)
    assert fitted.stride(2) % 8 == 0 and torch.equal(fitted, q)

"""Documents and windows in a ring: one call of a kernel with variable lengths in each step, and dense attention."""

import fa2_double
import fa4_double
import pytest
import torch
from kernel_cases import ODD, errors, one_tile, segments_tile
from kernel_cases import inputs as kernel_inputs
from oracle import dense_attention, relative
from test_segments import lengths_of

import ringlearn as rl
from ringlearn import kernels
from ringlearn.kernels.fa4 import Fa4
from ringlearn.kernels.reference import Reference
from ringlearn.kernels.sdpa import CudaFlash
from ringlearn.tiles import Kind, plan_steps, starts

LAYOUTS = {"contiguous": rl.contiguous, "zigzag": rl.zigzag, "striped": rl.striped}
S = 53  # divides by nothing


def masks():
    few, many = rl.documents([20, 0, 17, 16]), rl.documents(lengths_of(S, 12, 3))
    return {
        "documents": rl.causal & few,
        "many documents": rl.causal & many,
        "documents that see all of themselves": many,
        "window": rl.causal & rl.sliding_window(8),
        "wide window": rl.causal & rl.sliding_window(30),
        "window on both sides": rl.sliding_window(6),
        "documents, window": rl.causal & few & rl.sliding_window(9),
        "many documents, window on both sides": many & rl.sliding_window(4),
        "documents of one token": rl.documents([1] * S),
    }


@pytest.fixture(params=["fa2", "fa4"])
def kernel(request, monkeypatch):
    """The kernel on CPU tensors, with its double behind it, and what the double was handed."""
    if request.param == "fa2":
        fa2_double.install(monkeypatch)
        return CudaFlash(), fa2_double.calls
    fa4_double.install(monkeypatch)
    monkeypatch.setattr(Fa4, "_refuses", lambda self, q, k, v, kind: None)
    return Fa4(), fa4_double.calls


def inputs(B=1, D_k=8, D_v=8):
    shapes = (B, 4, S, D_k), (B, 2, S, D_k), (B, 2, S, D_v)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check(world, layout, mask, kernel, q, k, v, attention=rl.ring_attention):
    """out, lse and gradients, with one through rows that see nothing."""
    out, lse = attention(*world.shard(q, k, v, layout=layout), mask=mask, kernel=kernel, return_lse=True)
    want = dense_attention(q, k, v, mask)
    dout = torch.randn_like(want[0])
    got = out.unshard()
    assert relative(got, want[0]) < 1e-12 and relative(lse.unshard(), want[1]) < 1e-12
    grads, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (got, want[0]))
    off = [relative(a, b) for a, b in zip(grads, wanted, strict=True)]
    # A query that sees one key alone has no dq and no dk but rounding.
    assert all(error < 1e-12 for error in off) or float(max(g.abs().max() for g in wanted[:2])) < 1e-14, off


@pytest.mark.sample(2)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_ring_is_dense_attention_with_one_call_a_step(layout, P, kernel):
    kernel, handed = kernel
    world, ranges = rl.SimulatedWorld(P), LAYOUTS[layout].ranges(S, P)
    # Each kernel computes every mask, but not for every number of ranks; for 8, with 64 steps, not in every layout.
    every = 2 if P < 8 else 4
    some = slice((P + (kernel.name == "fa4") + 2 * list(LAYOUTS).index(layout)) % every, None, every)
    for name, mask in list(masks().items())[some]:
        handed.clear()
        check(world, LAYOUTS[layout], mask, kernel, *inputs())
        steps = [rl.plan_tiles(mask, q, k) for q in ranges for k in ranges]
        # A window on both sides that the end of a document or of a block cuts has no edges in common with others.
        most = 3 if "both sides" in name else 2 if layout == "zigzag" else 1
        assert max(map(len, steps)) <= most, name
        calls = sum(map(len, steps))
        assert [c["name"] for c in handed] == ["forward"] * calls + ["backward"] * calls, name


@pytest.mark.parametrize("B, dims", [(2, (8, 8)), (3, (16, 8)), (1, (12, 20))])
def test_batches_and_head_dims(B, dims, kernel):
    world = rl.SimulatedWorld(2)
    for layout, name in ((rl.striped, "documents, window"), (rl.zigzag, "many documents")):
        check(world, layout, masks()[name], kernel[0], *inputs(B, *dims))
    rows = rl.causal & rl.documents([[15, 38], [30, 0, 23]])
    check(world, rl.zigzag, rows, kernel[0], *inputs(2))


@pytest.mark.parametrize("name", list(ODD))
def test_segments_that_are_tall_or_wide_or_far_apart(name, kernel):
    tile = segments_tile(slice(3, 90), slice(5, 120), **ODD[name])
    q, k, v, dout = kernel_inputs(tile.q.stop + 2, tile.k.stop + 3, (4, 2), (16, 8))
    got, oracle = one_tile(kernel[0], tile, q, k, v, dout, 0.3)
    visible = tile.visible()
    assert not got["out"][:, :, ~visible.any(-1)].any() and not got["dv"][:, :, ~visible.any(-2)].any()
    off = errors(got, oracle)
    assert all(error < 1e-12 for error in off.values()), off


@pytest.mark.parametrize("attention", [rl.all_gather_attention, rl.ulysses_attention, rl.hybrid_attention])
def test_other_strategies(attention, kernel):
    """Their queries and keys are joined shards, whose stripes are not in the order of positions."""
    world = rl.SimulatedWorld((2, 2)) if attention is rl.hybrid_attention else rl.SimulatedWorld(2)
    for layout in LAYOUTS.values():
        check(world, layout, masks()["documents, window"], kernel[0], *inputs(), attention)


def test_documents_dealt_out_one_by_one(kernel):
    lengths = lengths_of(S, 9, 5)
    layout, mask = rl.zigzag_per_document(lengths), rl.causal & rl.documents(lengths)
    for P in (2, 3):
        check(rl.SimulatedWorld(P), layout, mask, kernel[0], *inputs())
        ranges = layout.ranges(S, P)
        assert max(len(rl.plan_tiles(mask, q, k)) for q in ranges for k in ranges) <= 2


def test_rows_that_see_nothing_at_all(kernel):
    """Their lse is -inf in the backward of every step, and their dout is whatever comes."""
    q, k, v = inputs()
    world = rl.SimulatedWorld(2)
    # The queries begin so late that the last of them see only keys that are not there.
    window = rl.causal & rl.sliding_window(10)
    out, lse = rl.ring_attention(
        world.shard(q, layout=rl.striped), *world.shard(k, v, layout=rl.striped), mask=window, q_start=30,
        kernel=kernel[0], return_lse=True,
    )  # fmt: skip
    want = dense_attention(q, k, v, window, q_start=30)
    assert (want[1] == -torch.inf).any()
    got, dout = out.unshard(), torch.randn_like(want[0])
    assert torch.equal(lse.unshard() == -torch.inf, want[1] == -torch.inf)
    assert relative(got, want[0]) < 1e-12
    grads, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (got, want[0]))
    assert all(relative(a, b) < 1e-12 for a, b in zip(grads, wanted, strict=True))


# --- where segments begin, on a device ------------------------------------------------------------------------------


def test_one_copy_for_all_steps_of_a_rank_and_all_layers(monkeypatch):
    made = []
    real = starts._Uploaded.__init__

    def noted(self, calls, device, batch):
        made.append((len(calls), device.type, batch))
        real(self, calls, device, batch)

    monkeypatch.setattr(starts._Uploaded, "__init__", noted)
    mask, ranges = rl.causal & rl.documents([11, 19, 7, 16]), rl.striped.ranges(S, 3)
    for _ in range(4):  # layers
        tiles = [tile for step in plan_steps(mask, ranges[1], ranges) for tile in step]
        found = [tile.call.starts.on(torch.device("meta"), 2) for tile in tiles]
    assert made == [(3, "meta", 2)]
    for tile, (rows, columns) in zip(tiles, found, strict=True):
        assert len(rows) == len(columns) == 2 * len(tile.call.starts.rows) - 1
    on_cpu = [tile.call.starts.on(torch.device("cpu"), 2) for tile in tiles]
    for tile, two in zip(tiles, on_cpu, strict=True):
        for one, both, size in zip((tile.call.starts.rows, tile.call.starts.columns), two, tile.shape, strict=True):
            assert torch.equal(both, torch.cat([one[:-1], one + size])) and both.dtype == torch.int32


def test_a_capture_needs_a_call_before_it(monkeypatch):
    (tile,) = rl.plan_tiles(rl.causal & rl.documents([5, 6, 7]), (range(18),), (range(18),))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the same call once, forward and backward, before you capture it"):
        tile.call.starts.on(torch.device("cuda"), 1)


def test_what_is_told_of_segments(monkeypatch):
    q, k, v = (t.detach().float() for t in inputs())
    world = rl.SimulatedWorld(2)
    mask = rl.causal & rl.documents(lengths_of(S, 12, 3))
    shards = world.shard(q, k, v, layout=rl.striped)
    cut = "SEGMENTS cpu_flash, cut into FULL, CAUSAL and PARTIAL tiles, in 1 call a step"
    assert cut in kernels.explain(*shards, mask=mask)
    monkeypatch.setattr("ringlearn.tiles.BLOCK", 8)
    long = [t.repeat_interleave(20, dim=2) for t in (q, k, v)]
    mask = rl.causal & rl.documents([5] * (4 * S))
    text = kernels.explain(*world.shard(*long, layout=rl.striped), mask=mask)
    assert "times the visible scores; with layout=rl.contiguous" in text
    monkeypatch.setattr(CudaFlash, "_refuses", lambda self, q, k, v, kind: None)
    told = kernels.explain(*shards, mask=masks()["window"], kernel="cuda_flash")
    assert "SEGMENTS cuda_flash, in 1 call a step" in told
    zigzag = world.shard(q, k, v, layout=rl.zigzag)
    told = kernels.explain(*zigzag, mask=masks()["window on both sides"], kernel="cuda_flash")
    assert "SEGMENTS cuda_flash, in up to " in told and "calls a step" in told
    with pytest.raises(ValueError, match="the lengths must add up"):
        kernels.explain(q, k, v, rl.documents([5, 6]))


# --- where FlashAttention 2 is slower than cuDNN --------------------------------------------------------------------


def test_long_segments_one_by_one(monkeypatch):
    """The same scores; short documents, and what a window cuts off below, stay one tile."""
    monkeypatch.setattr("ringlearn.tiles.LONG", 200)
    n = 210
    lengths = [n, 20, 30, n + 20, 5, n, 7]
    total = sum(lengths)
    for mask, kinds in (
        (rl.causal & rl.documents(lengths), {Kind.SEGMENTS: 1, Kind.CAUSAL: 3}),
        (rl.documents(lengths), {Kind.SEGMENTS: 1, Kind.FULL: 3}),
        (rl.causal & rl.sliding_window(209), {Kind.SEGMENTS: 1, Kind.CAUSAL: 1}),
        (rl.causal & rl.documents(lengths) & rl.sliding_window(206), {Kind.SEGMENTS: 1, Kind.CAUSAL: 3}),
        (rl.causal & rl.documents([total - 9, 9]), {Kind.CAUSAL: 2}),
    ):
        (tile,) = rl.plan_tiles(mask, (range(total),), (range(total),))
        parts = tile.long_apart
        found = [part.kind for part in parts]
        assert {kind: found.count(kind) for kind in found} == kinds
        assert sum(part.area for part in parts) == tile.area
        covered = torch.zeros(tile.shape, dtype=torch.int8)
        for part in parts:
            covered[part.q, part.k] += part.visible()
        assert torch.equal(covered.bool(), tile.visible()) and int(covered.max()) == 1
    (short,) = rl.plan_tiles(rl.causal & rl.documents([50] * 20), (range(1000),), (range(1000),))
    assert short.long_apart == (short,)


def test_they_are_computed_by_the_faster_kernel(monkeypatch):
    """On a GPU of 9.0 without FlashAttention 4, for which stand two kernels that note what they are handed."""
    fa2_double.install(monkeypatch)
    from ringlearn.kernels import sdpa

    class Fast(sdpa.Cudnn):
        _refuses = lambda self, q, k, v, kind: None  # noqa: E731
        checked_forward = lambda self, *args: self._of(args[3]).forward(*args)  # noqa: E731
        checked_backward = lambda self, *args: self._of(args[6]).backward(*args)  # noqa: E731
        seen: list = []

        def _of(self, tile):
            self.seen.append(tile)
            return Reference()

    monkeypatch.setattr(sdpa, "FUSED", (Fast(), CudaFlash()))
    monkeypatch.setattr("ringlearn.tiles.LONG", 15)
    mask = rl.causal & rl.documents([20, 3, 4, 26])
    q, k, v = inputs()
    half, dout = [t.detach().bfloat16() for t in (q, k, v)], torch.randn(q.shape).bfloat16()
    (tile,) = rl.plan_tiles(mask, (range(S),), (range(S),))
    out, lse = sdpa.Sdpa().forward(*half, tile, 0.3)
    grads = sdpa.Sdpa().backward(dout, *half, out, lse, tile, 0.3)
    assert {x.dtype for x in (out, grads[0])} == {torch.bfloat16}  # dk and dv may be sums of more than two
    assert {x.dtype for x in (lse, *grads[1:])} == {torch.float32}
    whole = [t.double().requires_grad_() for t in half]
    want, want_lse = dense_attention(*whole, mask, scale=0.3)
    found = torch.autograd.grad(want, whole, dout.double())
    for mine, right in zip((out, lse, *grads), (want, want_lse, *found), strict=True):
        assert relative(mine.double(), right) < 4e-3  # rounded once, as by one call of a kernel
    Fast.seen.clear()
    fa2_double.calls.clear()
    check(rl.SimulatedWorld(1), rl.contiguous, mask, None, q, k, v)
    assert [str(t) for t in Fast.seen] == ["CAUSAL q[0:20] k[0:20]", "CAUSAL q[27:53] k[27:53]"] * 2
    assert [c["name"] for c in fa2_double.calls] == ["forward", "backward"]
    text = kernels.explain(q, k, v, mask)
    assert "SEGMENTS cuda_flash, and cudnn segments of more than" in text and "up to 3 calls a step" in text

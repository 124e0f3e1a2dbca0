"""Pictures say what the trace, the mask and the memory table say: what is drawn is read back and compared."""

import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.text import Text

import ringlearn as rl
from ringlearn.course.viz.blocks import turns
from ringlearn.course.viz.figure import RANKS, colour, tile_patch
from ringlearn.kernels.reference import Reference
from ringlearn.tiles import Kind
from ringlearn.worlds.distributed.recorder import Recorder
from ringlearn.worlds.trace import Event, Hardware, Trace

LAYOUTS = (rl.contiguous, rl.striped, rl.zigzag)
SLOW = Hardware(flops=1e9, bandwidth=1e8, latency=2e-6)  # computing and sending both take visible time


def ran(P, S=32, mask=rl.causal, layout=rl.contiguous, backward=False, hardware=SLOW, **options):
    """A world in which ring attention ran, forward or forward and backward."""
    world = rl.SimulatedWorld(P, hardware=hardware, **options)
    q, k, v = (torch.randn(1, 2, S, 8, requires_grad=backward) for _ in range(3))
    out = rl.ring_attention(*world.shard(q, k, v, layout=layout), mask=mask, kernel="reference").unshard()
    if backward:
        (out * torch.randn_like(out)).sum().backward()
    return world


def run_program(program, P, *args, S=32, layout=rl.contiguous):
    """A world in which a rank program ran on shards of q, k, v: program(comm, q, k, v, tiles, kernel, *args)."""
    world = rl.SimulatedWorld(P, hardware=SLOW)
    shards = world.shard(*(torch.randn(1, 2, S, 8) for _ in range(3)), layout=layout)
    ranges = layout.ranges(S, P)
    world.run(program, *shards, lambda rank, source: rl.plan(rl.causal, ranges[rank], ranges[source]), *args)
    return world


async def the_other_way(comm, q, k, v, tiles):
    """Ring attention that sends to rank - 1: right results, but not the ring of the course."""
    kernel = comm.traced(Reference())
    to, source = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for step in range(comm.size):
        for tile in tiles(comm.rank, (comm.rank + step) % comm.size):
            kernel.forward(q, k, v, tile, 1.0)
        if step < comm.size - 1:
            received = await comm.exchange({to: (k, v)}, {source: (k.shape, v.shape)}, name="rotate back")
            k, v = received[source]


async def forgetful(comm, q, k, v, tiles):
    """Receives the next block and goes on computing with its own."""
    kernel = comm.traced(Reference())
    travelling = k, v
    for step in range(comm.size):
        for tile in tiles(comm.rank, comm.rank):
            kernel.forward(q, k, v, tile, 1.0)
        if step < comm.size - 1:
            travelling = await comm.rotate(*travelling)


async def stacked(comm, q, k, v, tiles):
    """Sends a tensor of its own making, as a learner may."""
    kernel = comm.traced(Reference())
    both = torch.stack([k, v])
    for step in range(comm.size):
        for tile in tiles(comm.rank, (comm.rank - step) % comm.size):
            kernel.forward(q, both[0], both[1], tile, 1.0)
        if step < comm.size - 1:
            both = await comm.rotate(both)


async def says_only_how_much(comm, x):
    """A program without kernels and tiles."""
    comm.compute("thinking", 1e6 * (comm.rank + 1))
    await comm.rotate(x)
    comm.compute("thinking", 1e6)


def drawn(figure, word):
    """The patches of a picture whose gid has a word in it, by gid."""
    return [p for ax in figure.axes for p in ax.patches if p.get_gid() and word in p.get_gid().split()]


def numbers(figure):
    """What blocks_held writes into each cell: {(rank, step): number}, and which of them are bold: computed."""
    found, bold = {}, set()
    for text in figure.axes[0].texts:
        if text.get_gid():
            _, rank, _, step = text.get_gid().split()
            found[int(rank), int(step)] = text.get_text()
            if text.get_fontweight() == "bold":
                bold.add((int(rank), int(step)))
    return found, bold


def clipped(figure):
    """Texts that reach beyond the edge of the picture (but no tick labels: some are there and not drawn)."""
    figure.draw_without_rendering()
    ticks = {t for ax in figure.axes for t in (*ax.get_xticklabels(), *ax.get_yticklabels())}
    width, height = figure.bbox.size
    texts = [t for t in set(figure.findobj(Text)) - ticks if t.get_text().strip() and t.get_visible()]
    boxes = [(t, t.get_window_extent()) for t in texts]
    return [t.get_text() for t, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > width + 1 or b.y1 > height + 1]


# --- who holds what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("P", [1, 2, 4])
def test_turns_follow_the_ring(P, layout, backward):
    rows = turns(ran(P, layout=layout, backward=backward).trace)
    ranges = layout.ranges(32, P)
    assert sorted(rows) == list(range(P))
    for rank, row in rows.items():
        if backward and P == 2 and layout is rl.contiguous and rank == 0:
            assert [turn.used for turn in row] == [(0,)], "what came last is hidden, and not sent on: no trace of it"
            continue
        assert len(row) == P
        for step, turn in enumerate(row):
            source = (rank + 1 + step if backward else rank - step) % P
            assert (turn.rank, turn.step, turn.held) == (rank, step, (source,))
            tiles = rl.plan(rl.causal, ranges[rank], ranges[source])
            assert [e.tile for e in turn.computed] == list(tiles)
            assert turn.used == ((source,) if tiles else ())


@pytest.mark.parametrize("layout", [rl.contiguous, rl.zigzag], ids=str)
def test_blocks_held_draws_each_compute_event_where_it_happened(layout):
    P, world = 4, ran(4, layout=layout)
    figure = rl.viz.blocks_held(world.trace)
    found, bold = numbers(figure)
    assert found == {(r, s): str((r - s) % P) for r in range(P) for s in range(P)}
    computed = {(e.rank, (e.rank - e.origin) % P) for e in world.trace.select("compute")}
    assert bold == computed
    assert len(computed) == (10 if layout is rl.contiguous else 16)  # below the diagonal; everywhere

    patches = drawn(figure, "computes")
    events = world.trace.select("compute")
    assert len(patches) == len(events)
    for e in events:
        step = (e.rank - e.origin) % P
        gid = f"rank {e.rank} step {step} computes {e.origin} {e.tile.kind.name}"
        (patch,) = [p for p in patches if p.get_gid() == gid]
        assert patch.get_facecolor()[:3] == to_rgb(RANKS[e.origin])
        box = patch.get_path().get_extents(patch.get_patch_transform())
        share = 0.92 / 8  # of a cell, for each of 8 tokens
        expected = (step + 0.04 + share * e.tile.k.start, e.rank + 0.04 + share * e.tile.q.start)
        assert (box.x0, min(box.y0, box.y1)) == pytest.approx(expected)
        assert (box.width, abs(box.height)) == pytest.approx((share * e.tile.shape[1], share * e.tile.shape[0]))
    assert len(drawn(figure, "holds")) == P * P


def test_blocks_held_shows_a_ring_that_turns_the_other_way():
    right, wrong = ran(4), run_program(the_other_way, 4)
    found, bold = numbers(rl.viz.blocks_held(wrong.trace))
    assert found == {(r, s): str((r + s) % 4) for r in range(4) for s in range(4)}
    assert bold == {(r, s) for r in range(4) for s in range(4) if (r + s) % 4 <= r}
    assert found != numbers(rl.viz.blocks_held(right.trace))[0]


def test_blocks_held_shows_a_program_that_does_not_use_what_arrives():
    figure = rl.viz.blocks_held(run_program(forgetful, 3, S=30).trace)
    assert numbers(figure)[0] == {(r, s): str(r) for r in range(3) for s in range(3)}
    assert "holds 2" in [t.get_text() for t in figure.axes[0].texts]


def test_blocks_held_follows_a_tensor_of_the_programs_own_making_and_over_the_reference_wire():
    for world in (run_program(stacked, 3, S=30), ran(3, wire="reference")):
        found, _ = numbers(rl.viz.blocks_held(world.trace))
        assert found == {(r, s): str((r - s) % 3) for r in range(3) for s in range(3)}


def test_blocks_held_with_partial_tiles_empty_shards_and_one_rank():
    own = ran(3, S=60, mask=rl.causal & rl.mask(lambda q, k: q - k < 12))
    partial = [e for e in own.trace.select("compute") if e.tile.kind is Kind.PARTIAL]
    hatched = [p for p in drawn(rl.viz.blocks_held(own.trace), "PARTIAL") if p.get_hatch()]
    assert len(hatched) == len(partial) > 0

    figure = rl.viz.blocks_held(ran(4, S=3).trace)  # contiguous: rank 0 has no token
    assert [t.get_text() for t in figure.axes[0].texts].count("empty") == 4
    assert all((r, r) not in numbers(figure)[1] for r in range(4))

    assert numbers(rl.viz.blocks_held(ran(1).trace)) == ({(0, 0): "0"}, {(0, 0)})


def test_traces_of_several_processes_make_one_picture():
    whole = ran(3).trace
    split = [Trace(False, whole.select(rank=r)) for r in (2, 0, 1)]
    assert turns(split) == turns(whole)
    assert "measured" in rl.viz.timeline(split).axes[0].get_title(loc="left")


def test_gradients_are_told_apart_from_blocks():
    events = ran(3, backward=True).trace
    assert sum(e.made for e in events.select("recv")) == 3 * 2  # one for each rank and hop
    assert sum(not e.made for e in events.select("recv")) == 3 * 1


def test_a_real_rank_tells_them_apart_too():
    recorder = Recorder(rank=1, device=torch.device("cpu"))
    k, v = torch.zeros(2, 4)
    recorder.begin([k, {"nested": v}, "text"])
    origins = recorder.origins
    gradient, buffer = torch.zeros(4), torch.empty(8)
    assert not origins.made([k[1:], v]) and origins.made([k, gradient])
    origins.arrived(buffer, 0, made=False)
    assert not origins.made([buffer[:4]]) and origins.of(buffer[4:], 1) == 0
    origins.arrived(buffer, 1, made=True)  # the same buffer, used again
    assert origins.made([buffer])


# --- load ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_load_stacks_the_flops_of_the_trace(layout):
    trace = ran(4, layout=layout).trace
    figure = rl.viz.load(trace)
    ax = figure.axes[0]
    assert ax.get_ylabel() == "work (kFLOP)"
    tops = [
        max(b.get_y() + b.get_height() for b in ax.patches if b.get_gid().startswith(f"rank {r} ")) for r in range(4)
    ]
    totals = [trace.flops(r) / 1e3 for r in range(4)]
    assert tops == pytest.approx(totals)
    assert len(ax.patches) == len({(e.rank, e.origin) for e in trace.select("compute")})
    assert f"{max(totals) / (sum(totals) / 4):.2f} times the mean" in ax.get_title()
    if layout is rl.zigzag:
        assert max(totals) == min(totals) and " 1.00 times as long" in figure.get_supxlabel().replace("\n", " ")


# --- mask ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", [rl.full, rl.causal, rl.documents([3, 0, 9, 5]), rl.mask(lambda q, k: q + k > 7)])
def test_mask_by_rank_colours_what_is_seen_by_the_owner_of_the_row(mask, layout):
    S, P = 17, 4
    owner = {p: r for r, ranges in enumerate(layout.ranges(S, P)) for own in ranges for p in own}
    cells = rl.viz.mask_by_rank(mask, layout, S, P).axes[0].images[0].get_array()
    dense = mask.dense(S, S)
    assert cells.tolist() == [[owner[i] if dense[i, j] else -1 for j in range(S)] for i in range(S)]


@pytest.mark.parametrize("mask", [
    rl.causal & rl.sliding_window(20),
    rl.causal & rl.sliding_window(1),
    rl.documents([30, 41, 1, 28]) & rl.sliding_window(25),
    rl.causal & rl.documents([30, 40, 10, 20]),
], ids=str)  # fmt: skip
def test_blocks_held_draws_as_much_of_a_block_as_is_computed(mask):
    trace = ran(2, S=100, mask=mask).trace
    for e in trace.select("compute"):
        patch = tile_patch(e.tile, 0, 0, 2.0, 3.0)
        path = patch.get_patch_transform().transform_path(patch.get_path())
        area = sum(abs(_shoelace(p)) for p in path.to_polygons())
        assert area / 6 == pytest.approx(e.tile.area, rel=0.06, abs=0.6 * max(e.tile.shape)), e.tile


def _shoelace(points):
    return sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(points, [*points[1:], points[0]])) / 2


def test_mask_by_rank_compares_layouts():
    figure = rl.viz.mask_by_rank(rl.causal, LAYOUTS, 32, 4)
    titles = [ax.get_title() for ax in figure.axes]
    work = {
        layout: [sum(p + 1 for own in ranges for p in own) for ranges in layout.ranges(32, 4)] for layout in LAYOUTS
    }
    assert titles == [f"{x}: busiest rank {max(w) * 4 / sum(w):.2f} × the mean" for x, w in work.items()]
    text = figure.get_supxlabel().replace("\n", " ")
    assert all(f"{x}: {', '.join(map(str, w))}" in text for x, w in work.items())
    nothing = rl.viz.mask_by_rank(rl.mask(lambda q, k: q + k < 0), rl.striped, 6, 8)
    assert nothing.axes[0].get_title() == "striped: nothing to compute"


# --- timeline ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_timeline_draws_each_event_at_its_time(backward):
    trace = ran(4, backward=backward).trace
    figure = rl.viz.timeline(trace)
    (ax,) = figure.axes
    assert ax.get_title(loc="left") == "Timeline, simulated (a hardware model, not a clock)"
    assert ax.get_xlabel().endswith("(µs)")
    shown = [e for e in trace if e.kind != "wait" or e.seconds > 0]
    bars = {}
    for bar in ax.patches:
        bars.setdefault(bar.get_gid(), []).append(bar)
    assert sum(map(len, bars.values())) == len(shown)
    for e in shown:
        spans = [(b.get_x(), b.get_width()) for b in bars[f"rank {e.rank} {e.kind} {e.name}"]]
        assert any(span == pytest.approx((1e6 * e.start, 1e6 * e.seconds)) for span in spans)
    assert all((b.get_hatch() == "////") == (" wait " in gid) for gid, several in bars.items() for b in several)
    lanes = {}
    for gid, several in bars.items():
        _, rank, kind, *_ = gid.split()
        lanes.setdefault((int(rank), kind.replace("wait", "compute")), set()).update(b.get_y() for b in several)
    assert all(len(y) == 1 for y in lanes.values()) and len(set.union(*lanes.values())) == 4 * 3
    waits = [trace.seconds("wait", r) / trace.makespan() for r in range(4)]
    assert f"{sum(waits) / 4:.0%} of the run on average" in figure.get_supxlabel().replace("\n", " ")
    labels = [t.get_text() for t in ax.texts]
    assert any(label.startswith("rank 0\n") and label.endswith("KiB sent") for label in labels)


@pytest.mark.parametrize(("flops", "unit"), [(1e3, "s"), (1e6, "ms"), (1e9, "µs"), (1e12, "ns")])
def test_timeline_chooses_its_unit(flops, unit):
    trace = ran(1, hardware=Hardware(flops=flops)).trace
    assert rl.viz.timeline(trace).axes[0].get_xlabel() == f"time since the start of the run ({unit})"


def test_timeline_of_hidden_and_of_measured_messages():
    hidden = ran(4, layout=rl.zigzag, hardware=Hardware(flops=1e9, bandwidth=1e12, latency=0.0))
    figure = rl.viz.timeline(hidden.trace)
    assert "hidden entirely" in figure.get_supxlabel().replace("\n", " ") and not drawn(figure, "wait")
    measured = Trace(
        False, [Event(1, "compute", "forward", 5.0, 7.0, origin=1), Event(1, "wait", "rotate 1", 7.0, 8.0)]
    )
    figure = rl.viz.timeline(measured)
    assert figure.axes[0].get_title(loc="left") == "Timeline, measured"
    assert [(b.get_x(), b.get_width()) for b in figure.axes[0].patches] == [(0, 2), (2, 1)]  # from the first start


# --- memory --------------------------------------------------------------------------------------------------------


def test_memory_strip_stacks_the_table():
    worlds = [ran(P, S=64) for P in (1, 2, 4)]
    figure = rl.viz.memory_strip([w.memory for w in worlds])
    (ax,) = figure.axes
    assert ax.get_ylabel() == "peak memory of the rank (KiB)"
    heights = {p.get_gid(): p.get_height() * 1024 for p in ax.patches}
    expected = {
        f"P {w.size} rank {r} {name}": n for w in worlds for r in range(w.size) for name, n in w.memory.peak(r).items()
    }
    assert heights == pytest.approx(expected)
    for w in worlds:
        for r in range(w.size):
            bars = [p for p in ax.patches if p.get_gid().startswith(f"P {w.size} rank {r} ")]
            assert max(p.get_y() + p.get_height() for p in bars) * 1024 == pytest.approx(w.memory.peak_bytes(r))
    assert "scratch inside a fused kernel is not seen" in figure.get_supxlabel().replace("\n", " ")
    level = max(worlds[1].memory.peak_bytes(r) for r in range(2)) * 2 / 1024
    assert [line.get_ydata()[0] for line in ax.lines] == pytest.approx([level / 2, level / 4])


def test_memory_strip_of_one_world_and_of_many_ranks():
    world = ran(3, S=30)
    assert not rl.viz.memory_strip(world).axes[0].lines  # nothing to compare with
    other = [ran(2, S=30), ran(4, S=60)]
    assert not rl.viz.memory_strip(other).axes[0].lines  # not the same tensors
    worlds = [ran(4, S=64), ran(40, S=64)]
    figure = rl.viz.memory_strip(worlds)
    shown = {" ".join(p.get_gid().split()[:4]) for p in figure.axes[0].patches}
    fullest = [max(range(w.size), key=w.memory.peak_bytes) for w in worlds]
    assert shown == {f"P {w.size} rank {r}" for w, r in zip(worlds, fullest)}
    assert figure.axes[0].get_xlabel() == "fullest rank of each world"


# --- all of them ---------------------------------------------------------------------------------------------------


def pictures():
    for P, S, mask, layout in [
        (1, 16, rl.full, rl.contiguous),
        (3, 20, rl.causal & rl.sliding_window(6), rl.zigzag),
        (4, 3, rl.causal, rl.contiguous),
        (8, 64, rl.causal & rl.documents([20, 30, 14]), rl.striped),
        (16, 32, rl.causal, rl.zigzag),
    ]:
        world = ran(P, S, mask, layout)
        name = f"P{P}-{layout}"
        for picture in (rl.viz.blocks_held, rl.viz.load, rl.viz.timeline):
            yield f"{picture.__name__}-{name}", picture(world.trace)
        yield f"memory-{name}", rl.viz.memory_strip(world.memory)
        yield f"mask-{name}", rl.viz.mask_by_rank(mask, layout, S, P)
        yield f"masks-{name}", rl.viz.mask_by_rank(mask, LAYOUTS, S, P)
    world = run_program_without_tiles()
    yield "no tiles", rl.viz.blocks_held(world.trace)
    yield "no tiles, timeline", rl.viz.timeline(world.trace)
    yield "no tiles, load", rl.viz.load(world.trace)


def run_program_without_tiles():
    world = rl.SimulatedWorld(2)
    world.run(says_only_how_much, torch.zeros(4))
    return world


def test_every_picture_fits_has_a_caption_and_is_shown_once():
    for name, figure in pictures():
        assert figure.get_supxlabel(), name
        assert clipped(figure) == [], name
        for ax in figure.axes:
            assert ax.get_xlabel() and (ax.get_ylabel() or ax is not figure.axes[0] or "timeline" in name), name
    assert plt.get_fignums() == []  # an open figure would be shown a second time at the end of a notebook cell


def test_pictures_draw_on_given_axes():
    world = ran(3)
    figure, axes = plt.subplots(1, 2)
    try:
        assert all(call(world.trace, ax=ax) is figure for call, ax in zip((rl.viz.blocks_held, rl.viz.timeline), axes))
        assert all(ax.has_data() for ax in axes)
        assert figure.get_supxlabel() == ""  # a part of a figure does not write the caption of the whole
    finally:
        plt.close(figure)


def test_a_rank_has_one_colour_in_all_pictures():
    assert len(set(RANKS)) == 8 and [colour(r, 8) for r in range(8)] == list(RANKS)
    many = [colour(r, 20) for r in range(20)]

    def lightness(c):
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), to_rgb(c)))

    assert len(set(many)) == 20 and many == sorted(many, key=lightness)  # still in order on a grey page


@pytest.mark.parametrize("name", ["blocks_held", "load", "timeline"])
def test_traces_that_cannot_be_drawn(name):
    picture = getattr(rl.viz, name)
    for trace, message in (
        (rl.SimulatedWorld(2).trace, "expected a trace with events, got an empty one; run something first"),
        ("trace", "expected a trace, such as world.trace after a run, got list|got str"),
        (Trace(True, [Event(64, "compute", "forward", 0.0, 1.0)]), "expected at most 64 ranks.*got 65"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            picture(trace)


def test_memories_that_cannot_be_drawn():
    for memory, message in (
        (rl.SimulatedWorld(2).memory, "expected a memory with something in it, got an empty one; run something"),
        ([ran(2, count_memory=False)], "does not count its memory; make it with"),
        (3, "expected world.memory of a simulated world.*got int"),
        ([], "got an empty list"),
    ):
        with pytest.raises(ValueError, match=message):
            rl.viz.memory_strip(memory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"S": 257}, r"expected S, an int in 1\.\.256 .* got 257; draw a shorter sequence"),
        ({"S": 0}, r"expected S, an int in 1\.\.256 .* got 0"),
        ({"S": 8.0}, r"expected S, an int .* got 8\.0"),
        ({"P": 0}, r"expected P, a number of ranks in 1\.\.64, got 0"),
        ({"mask": lambda q, k: q > k}, r"expected a mask such as rl\.causal"),
        ({"layout": "zigzag"}, r"expected a layout such as rl\.zigzag"),
        ({"layout": []}, r"expected a layout such as rl\.zigzag"),
        ({"mask": rl.documents([3, 4])}, "documents: the lengths must add up"),
    ],
)
def test_masks_that_cannot_be_drawn(change, message):
    arguments = {"mask": rl.causal, "layout": rl.zigzag, "S": 8, "P": 2} | change
    with pytest.raises(ValueError, match=message):
        rl.viz.mask_by_rank(**arguments)


def test_without_matplotlib_the_error_says_what_to_install():
    program = """
import sys
import ringlearn as rl
assert rl.viz.__all__ and "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
for name in ("timeline", "softmax"):
    try:
        getattr(rl.viz, name)
    except ImportError as error:
        print(error)
print(hasattr(rl.viz, "nothing_of_this_name"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    message = "pictures need matplotlib, which is not installed: pip install 'ringlearn[plots]'"
    assert done.stdout.splitlines() == [message, message, "False"]

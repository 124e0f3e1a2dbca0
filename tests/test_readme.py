"""The README's example runs as it stands, simulated and under torchrun, and its numbers are the measured ones."""

import json
import re
import sys
from pathlib import Path

import forked
import nbformat
import pytest
from build_site import describe
from course import NOTEBOOKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "docs" / "measurements.md").read_text().partition("## One GPU and several")[0]

CHECK = """
import torch.nn.functional as F
expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
got = torch.autograd.grad((full * full).sum(), (q, k, v))
wanted = torch.autograd.grad((expected * expected).sum(), (q, k, v))
errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in zip((full, *got), (expected, *wanted))]
print(f"errors below 1e-5: {max(errors) < 1e-5}\\n", end="", flush=True)  # in one piece: ranks share a pipe
"""


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return block


def says_that_it_is_right(said: str, times: int = 1) -> bool:
    """Ranks share a pipe, so that lines of several may be mixed."""
    off = re.findall(r"off by (?:[1-9]e-0[78]|0e\+00)", said)
    return len(off) == said.count("off by") == said.count("errors below 1e-5: True\n") == times


def test_simulated(capsys):
    exec(example() + CHECK, {})
    assert says_that_it_is_right(capsys.readouterr().out)


@pytest.mark.parametrize("P", [1, 3])
def test_under_torchrun(P, tmp_path):
    line = "world = rl.SimulatedWorld(4)          # under torchrun: rl.DistributedWorld()"
    assert line in example()
    file = tmp_path / "example.py"
    # gloo's threads sometimes abort a process that ends right after a backward, without ringlearn as well (seen with
    # torch 2.13): what is tested is the example, so its processes end without Python's shutdown, and together.
    leave = "import os, time; torch.distributed.barrier(); time.sleep(1); os._exit(0)\n"
    file.write_text(example().replace(line, "world = rl.DistributedWorld()") + CHECK + leave)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(P), str(file)]
    done = forked.run(torchrun, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert says_that_it_is_right(done.stdout, times=P), done.stdout


def test_measured_numbers_are_those_of_the_record():
    record = json.loads((ROOT / "docs/measurements/2026-11-28-ring-2-h200.json").read_text())
    shown = {
        "| the README's example, float32 |": ("README example", "ring"),
        "| bf16, 32 query and 8 key/value heads, 4,096 tokens, zigzag, causal |": ("bf16, 32:8 heads", "ring"),
        "| one SDPA call in bf16, the same tensors |": ("bf16, 32:8 heads", "one SDPA call"),
        "| the same ring on 16 simulated ranks |": ("simulated, P = 16", "ring"),
    }
    for row, (case, what) in shown.items():
        numbers = [f"{error:.1e}".replace("e-0", "e-") for error in record["results"][case][what].values()]
        assert f"{row} {' | '.join(numbers)} |" in MEASURED


def record(kind: str) -> dict:
    return json.loads((ROOT / f"docs/measurements/2026-11-28-{kind}-2-h200.json").read_text())


def test_scaling_is_that_of_the_record():
    found = record("multi-gpu")
    ring = {row["tokens"]: row for row in found["scaling"] if row["gpus"] == 2}
    for one in found["plain"]:
        two = ring[one["tokens"]]
        cells = [f"{one['tokens']:,}"]
        for name, unit, form in (("forward_backward_ms", "ms", ",.1f"), ("peak_mib", "MiB", ",.0f")):
            a, b = one[name], two[name]
            cells += [f"{a:{form}} {unit}", f"{b:{form}} {unit}", f"{b / a:.2f}"]
        assert f"| {' | '.join(cells)} |" in MEASURED


@pytest.mark.parametrize(
    ("kind", "tokens"), [("bench-graph", 2048), ("bench", 8192), ("bench", 32768), ("bench-128k", 131072)]
)
def test_the_comparison_is_that_of_the_record(kind, tokens):
    rows = [row for row in record(kind)["rows"] if row["tokens_per_rank"] == tokens]
    ring = next(row for row in rows if row["way"] == "ring" and row["transport"] == "symmetric")
    others = [next(row for row in rows if row["way"] == name) for name in ("zhuzilin_zigzag", "torch_context_parallel")]
    assert ring["graph"] == (tokens == 2048)

    def three(ms):
        return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}"

    note = ", no graph" if ring["graph"] else ""
    cells = [f"{tokens:,}" + (", as a CUDA graph" if ring["graph"] else "")]
    cells += [f"{three(ring['forward_backward_ms'])} ms", f"{100 * ring['forward_backward_fraction']:.1f} %"]
    cells += [f"{three(row['forward_backward_ms'])} ms{note}" for row in others]
    cells += [", ".join(f"{row['forward_backward_peak_mib']:,.0f}" for row in (ring, *others)) + " MiB"]
    assert f"| {' | '.join(cells)} |" in MEASURED
    if tokens == 32768:  # the sentence that the README has of it, and the landing page
        percent, mib = cells[2], [f"{row['forward_backward_peak_mib']:,.0f} MiB" for row in (ring, others[0])]
        claims = [f"at {percent} of the rate", f"takes {cells[1]}", f"takes {cells[3]}", *mib]
        assert [claim for claim in claims if claim not in " ".join(README.split())] == []
        assert f"at {percent} of the rate" in " ".join((ROOT / "docs" / "index.md").read_text().split())


def test_the_time_and_rate_with_flash_attention_4():
    rows = json.loads((ROOT / "docs/measurements/2026-11-30-fa4-2-h200.json").read_text())["rows"]
    ring = next(row for row in rows if row["way"] == "ring" and row["tokens_per_rank"] == 32768)
    ms, rate = f"{ring['forward_backward_ms']:.0f} ms", f"{100 * ring['forward_backward_fraction']:.1f} %"
    said = (
        f"With FlashAttention 4 instead of cuDNN, 32,768 tokens per GPU take {ms}, at {rate} of the rate that one GPU"
    )
    assert said in " ".join(README.split())


def test_one_million_tokens_take_as_long_as_the_record_says():
    row = record("bench-1m")["rows"][1]
    assert row["way"] == "ring" and row["tokens_per_rank"] * row["ranks"] == 2**20
    seconds = f"{row['forward_backward_ms'] / 1e3:.1f} s"
    assert f"One million tokens take {seconds} on the two GPUs" in MEASURED
    assert f"One million tokens take {seconds} on the two GPUs" in " ".join(README.split())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_minutes_are_those_of_the_notebook(path):
    entry = describe(nbformat.read(path, as_version=4), path.stem)
    name = rf"\| \[{re.escape(entry.title)}\]\(notebooks/{path.name}\)"
    row = rf"{name} \| [^|]{{30,}} \| {entry.reading} min \| {entry.exercises} min \|"
    assert re.search(row, README), f"{entry.title}: reading {entry.reading}, exercises {entry.exercises}"


def test_every_exercise_is_listed():
    files = sorted((ROOT / "notebooks" / "exercises").glob("[0-9]*.py"))
    page = (ROOT / "docs" / "exercises.md").read_text()
    assert files and [path.name for path in files if f"](../notebooks/exercises/{path.name}) |" not in page] == []


def test_every_make_target_that_is_named_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"(?:^|`|\$ )make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert {"course", "test", "lab", "docs", "relink"} <= named <= targets

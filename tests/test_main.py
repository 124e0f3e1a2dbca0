"""python -m ringlearn: what it says of machines that are here and of machines that are not."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from course import NOTEBOOKS, ROOT

import ringlearn
from ringlearn import __main__ as program
from ringlearn.launch import machine

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def a_machine(gpus=0, backends=("gloo",), link="NVLink (NV18)", packages="3.11", **more):
    pairs = [{"gpus": [i, j], "link": link, "peer_access": True} for i in range(gpus) for j in range(i + 1, gpus)]
    return {
        "ringlearn": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.0",
        "cuda": "13.0" if gpus else None,
        "nccl": "2.28.9" if gpus else None,
        "gpus": [{"name": "NVIDIA H200", "memory_gib": 139.8, "capability": "9.0"}] * gpus,
        "links": pairs,
        "gpus_out_of_reach": 0,
        "cores": 8,
        "backends": [*(["nccl"] if gpus else []), *backends],
        "ranks": [*([f"NCCL with {gpus} GPUs"] if gpus > 1 else []), "simulated ranks in one process"],
        "kernels": {"bfloat16": "cudnn", "float32": "efficient"},
        "packages": dict.fromkeys(program.PACKAGES, packages),
        **more,
    }


def run(*arguments, python=(), cwd=ROOT, env=None):
    command = [sys.executable, *python, "-m", "ringlearn", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_the_notebooks_are_those_that_are_there():
    """By name and title; what is said of them is in the notebooks themselves."""
    known = {name: f"{name[:2]} {title}" for name, title, _ in program.NOTEBOOKS}
    for path in NOTEBOOKS:
        assert nbformat.read(path, as_version=4).cells[0].source.splitlines()[0] == f"# {known[path.stem]}"


def test_for_people_it_fits_on_a_screen():
    text = run()
    assert f"ringlearn {ringlearn.__version__} on this machine" in text
    assert all(name in text for name in (torch.__version__, "01 Incremental softmax", "make lab"))
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 120


def test_json_says_the_same():
    found = json.loads(run("--json"))
    assert found["torch"] == torch.__version__ and len(found["gpus"]) == torch.cuda.device_count()
    assert [book["name"] for book in found["notebooks"]] == [name for name, _, _ in program.NOTEBOOKS]
    assert found["ranks"][-1] == "simulated ranks in one process" and found["next"][0]["command"] == "make lab"


def test_it_needs_torch_alone():
    """Without the packages of the extras it says what is missing and how to get it."""
    absent = """
import sys
from importlib import metadata
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "ipywidgets", "jupyterlab", "IPython", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
version = metadata.version
def no_version(name):
    if name in ("matplotlib", "ipywidgets", "jupyterlab"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = no_version
import warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch itself says so
from ringlearn.__main__ import main
main([])
"""
    done = subprocess.run([sys.executable, "-c", absent], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "missing   matplotlib, ipywidgets, jupyterlab" in done.stdout
    assert "pip install -e '.[notebooks]'" in done.stdout


def test_two_gpus_run_the_ring_for_real(tmp_path):
    here = a_machine(2)
    text = program.report(here, clone(tmp_path))
    assert "2 x NVIDIA H200, 139.8 GiB" in text and "links     NVLink (NV18), direct\n" in text
    assert "05 Multi-GPU ring               on 2 GPUs with NCCL\n" in text
    assert "--nproc-per-node 2 notebooks/exercises/01_pass.py\n      an exercise with real processes, on 2 GPUs" in text
    assert "-m ringlearn.measure" in text
    of_books = [line for line in text.splitlines() if line[2:4].isdigit()]
    assert {line.index(book["how"]) for line, book in zip(of_books, program.notebooks(here), strict=True)} == {34}
    assert max(map(len, of_books)) <= 100
    assert {book["runs"] for book in program.notebooks(here)} == {"real"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_fewer_run_processes(gpus, tmp_path):
    text = program.report(a_machine(gpus), clone(tmp_path))
    assert "05 Multi-GPU ring               on gloo processes; results for two GPUs are from records\n" in text
    assert "--nproc-per-node 4 notebooks/exercises/01_pass.py" in text and "on 4 processes" in text
    assert "ringlearn.measure" not in text
    assert ("none; none is needed" in text) == (gpus == 0)


def test_without_any_backend_there_are_no_processes(tmp_path):
    text = program.report(a_machine(backends=()), clone(tmp_path))
    assert "torchrun" not in text and "torch.distributed.run" not in text and "on nothing" not in text


def test_an_installed_package_says_where_the_notebooks_are(monkeypatch):
    monkeypatch.setattr(program, "_repository", lambda: "https://github.com/you/course")
    steps = program.next_steps(a_machine(packages=None), None)
    assert steps[0]["command"] == "git clone https://github.com/you/course && cd course && make lab"
    assert steps[1]["command"].endswith("-m pip install 'ringlearn[notebooks]'") and len(steps) == 2


def test_gpus_that_this_torch_cannot_use_are_no_mystery(tmp_path):
    text = program.report(a_machine(gpus_out_of_reach=2), clone(tmp_path))
    assert "2, but this torch cannot use them: install a torch for CUDA" in text


def test_links_are_read_from_the_topology():
    names = machine.link_names(TOPOLOGY)
    assert names == {
        (0, 1): "NVLink (NV18)",
        (1, 0): "NVLink (NV18)",
        **{pair: "PCIe (SYS)" for pair in ((0, 2), (1, 2), (2, 0), (2, 1))},
    }
    assert machine.link_names("") == machine.link_names("no such command") == {}


def test_links_that_differ_are_told_apart():
    pairs = a_machine(3)["links"]
    assert program._link_text(pairs) == "NVLink (NV18), direct, between all"
    pairs[1].update(link="PCIe (SYS)", peer_access=False)
    assert program._link_text(pairs) == "PCIe (SYS), through the host: 0-2; NVLink (NV18), direct: the others"


@pytest.mark.parametrize(
    "visible, numbers", [(None, [0, 1]), ("3,1", [3, 1]), ("2, 5, 7", [2, 5]), ("GPU-8932f937,GPU-1", None)]
)
def test_gpus_that_were_chosen_keep_their_links(monkeypatch, visible, numbers):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine._physical_numbers(2) == numbers


def clone(folder: Path) -> Path:
    exercises = folder / "notebooks" / "exercises"
    exercises.mkdir(parents=True)
    (exercises / "01_pass.py").touch()
    return folder

"""The notebook tools, on notebooks small enough to run in a second or two."""

import subprocess
import sys
from pathlib import Path

import build_site
import execute_notebooks
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parent.parent
TOP = """\
# Pieces & wholes

[![badge](https://x/y.svg)](https://x)

A softmax *can* be computed in `pieces`.

Reading: 30-40 minutes, exercises: 45."""


def write(path: Path, *sources: str, tags: dict[int, str] | None = None) -> Path:
    cells = [new_code_cell(source) for source in sources]
    for place, tag in (tags or {}).items():
        cells[place].metadata["tags"] = [tag]
    nbformat.write(new_notebook(cells=[new_markdown_cell(TOP), *cells]), path)
    return path


def run(tool: str, *paths: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / tool, *paths], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_execute_stores_outputs_that_do_not_depend_on_run_or_machine(tmp_path):
    source = "import sys, time\nprint(1, flush=True)\ntime.sleep(0.3)\nprint(2)"
    raises = "import json\njson.loads('{')"
    path = write(tmp_path / "01_a.ipynb", source, "6 * 7", raises, tags={2: "raises-exception"})
    done = run("execute_notebooks.py", path)
    assert done.returncode == 0, done.stderr
    assert "[1/1] 01_a" in done.stdout and "3/3 cells" in done.stdout and done.stderr == ""
    once = path.read_bytes()
    nb = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2, 3]
    assert [output.text for output in nb.cells[1].outputs] == ["1\n2\n"]
    assert nb.cells[2].outputs[0].data["text/plain"] == "42"
    assert nb.cells[3].outputs[0].ename == "JSONDecodeError"
    text = once.decode()
    assert sys.prefix not in text and "iopub" not in text and "python/json/decoder.py" in text
    assert run("execute_notebooks.py", path).returncode == 0
    assert path.read_bytes() == once


def test_a_failing_notebook_names_the_cell_and_the_error(tmp_path):
    good = write(tmp_path / "01_good.ipynb", "print('fine')")
    bad = write(tmp_path / "02_bad.ipynb", "x = 1", "y = x / 0  # here", "print('never')")
    before = bad.read_bytes()
    done = run("execute_notebooks.py", good, bad)
    assert done.returncode == 1
    assert "FAILED" in done.stdout and "1/1 cells" in done.stdout
    assert "02_bad.ipynb failed in code cell 2 of 3" in done.stderr
    assert "    y = x / 0  # here" in done.stderr and "ZeroDivisionError: division by zero" in done.stderr
    assert bad.read_bytes() == before


def test_a_dead_kernel_is_a_failure_with_a_message(tmp_path):
    done = run("execute_notebooks.py", write(tmp_path / "01_a.ipynb", "import os\nos._exit(1)"))
    assert done.returncode == 1
    assert "failed in code cell 1 of 1" in done.stderr and "The kernel died" in done.stderr


def test_the_site_of_a_run_shows_what_the_notebooks_gave(tmp_path, monkeypatch, capsys):
    """`make course`: what is stored is replaced by what ran; a notebook that fails says so at its top."""
    good = write(tmp_path / "01_good.ipynb", "print('the answer is', 6 * 7)")
    bad = write(tmp_path / "02_bad.ipynb", "1 / 0")
    before, built = good.read_bytes(), {}
    monkeypatch.setattr(build_site, "stored", dict)
    monkeypatch.setattr(
        build_site, "build", lambda source, site, notebooks: built.update(notebooks, site=site.name) or 0
    )
    assert build_site.main(["--run", str(good), str(bad)]) == 1
    assert "02_bad.ipynb failed in code cell 1 of 1" in capsys.readouterr().err
    assert built["01_good"].cells[1].outputs[0].text == "the answer is 42\n" and built["site"] == "course"
    assert "failed on this machine" in built["02_bad"].cells[1].source
    assert good.read_bytes() == before
    assert build_site.main(["--run", str(tmp_path / "absent.ipynb")]) == 1
    assert "absent.ipynb" in capsys.readouterr().err


def test_what_is_said_of_a_notebook_is_read_from_its_top():
    entry = build_site.describe(new_notebook(cells=[new_markdown_cell(TOP)]), "01_a")
    told = ("01_a", "Pieces & wholes", "A softmax can be computed in pieces.", "30 to 40", "45")
    assert entry == build_site.Entry(*told)


def test_a_widget_becomes_a_player_with_what_its_call_needs(tmp_path):
    """Only what the call names is run: the cell that fails is not."""
    live = new_output("display_data", {"text/plain": "(two sliders: they show when the notebook runs live)"})
    before = ["import torch\nrow = torch.arange(6.)", "half = row / 2", "1 / 0"]
    widget = new_code_cell("# moved\nrl.viz.softmax.stepper(row, half)", outputs=[live])
    nb = new_notebook(cells=[*map(new_code_cell, before), widget])
    build_site.give_players(nb, "01_a", tmp_path)
    (output,) = nb.cells[-1].outputs
    assert output.data["text/html"].count('class="player"') == 2 and "keys read: 6" in output.data["text/html"]


def test_normalise_removes_widgets_and_timings_and_keeps_ids_and_tags():
    view = new_output(
        "display_data", {"text/plain": "IntSlider()", execute_notebooks.WIDGET_VIEW: {"model_id": "1f2e"}}
    )
    cell = new_code_cell("slider", outputs=[view], metadata={"tags": ["a"], "execution": {"x": "1"}, "collapsed": True})
    nb = new_notebook(
        cells=[cell], metadata={"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.11.7"}}
    )
    name = cell.id
    execute_notebooks.normalise(nb, "01_a")
    assert nb.cells[0].id == name and nb.cells[0].metadata == {"tags": ["a"]}
    assert nb.cells[0].outputs[0].data == {"text/plain": "IntSlider()"}
    assert set(nb.metadata) == {"kernelspec", "language_info"} and nb.metadata.language_info == {"name": "python"}


@pytest.mark.parametrize(
    "path, rest",
    [
        (f"{ROOT}/ringlearn/partial.py", "ringlearn/partial.py"),
        ("/opt/env/lib/python3.11/site-packages/torch/nn/functional.py", "site-packages/torch/nn/functional.py"),
        ("~/.pyenv/versions/3.11.7/lib/python3.11/json/decoder.py", "python/json/decoder.py"),
        ("/usr/lib/python3.13/json/decoder.py", "python/json/decoder.py"),
    ],
)
def test_tracebacks_lose_what_is_the_machines(path, rest):
    colour, plain = "\x1b[32m", "\x1b[39m"
    line = f"{colour}File {plain}{colour}{path}:12{plain}, in f(x / y)"
    assert execute_notebooks.without_machine_paths(line) == line.replace(path, rest)


def test_tracebacks_know_the_home_directory_by_its_short_name(monkeypatch):
    monkeypatch.setenv("HOME", str(ROOT.parent))
    line = f"File ~/{ROOT.name}/ringlearn/partial.py:12"
    assert execute_notebooks.without_machine_paths(line) == "File ringlearn/partial.py:12"


def test_normalise_gives_missing_and_repeated_ids_one_that_stays():
    nb = new_notebook(cells=[new_code_cell("a"), new_code_cell("b"), new_code_cell("c")])
    nb.cells[1]["id"] = nb.cells[0]["id"] = "same"
    del nb.cells[2]["id"]
    execute_notebooks.normalise(nb, "01_a")
    assert [cell.id for cell in nb.cells] == ["same", "01_a-02", "01_a-03"]
    nbformat.validate(nb)

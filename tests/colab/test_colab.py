"""The notebooks as Google Colab runs them: its versions of Jupyter and of the widgets, and no clone beside them.

    make test-colab

The environment (constraints-colab.txt) has torch but not ringlearn: the setup cell of a notebook installs it, from a
repository made of this working tree. The kernels start in an empty folder, so nothing else of the tree is in reach.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from execute_notebooks import join_streams
from nbclient import NotebookClient

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# The first lines of every notebook's setup cell, with the repository's address for {}.
SETUP = """\
try:
    import ringlearn as rl
except ImportError:  # on Colab, for example; your torch stays as it is
    %pip install --quiet git+{}
    import ringlearn as rl
"""


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> str:
    """The address of a git repository that holds this working tree, as pip takes it after git+."""
    folder = tmp_path_factory.mktemp("clone") / "ringlearn"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "this tree")
    return folder.as_uri()


def surroundings() -> dict[str, str]:
    """The environment variables without those by which a process finds this tree, or shows no figures."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MPLBACKEND")}
    return own | {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # the debugger warns of Python's frozen modules


def pip(*arguments: str) -> str:
    """What pip of this environment says, in a folder from where it cannot see the repository's egg-info."""
    command = [sys.executable, "-m", "pip", *arguments]
    options = {"cwd": sys.prefix, "env": surroundings(), "check": True, "capture_output": True, "text": True}
    return subprocess.run(command, **options).stdout


def freeze() -> set[str]:
    """What is installed, name==version or name @ address."""
    return set(pip("freeze", "--all").split("\n"))


@pytest.fixture(scope="session")
def content(tmp_path_factory) -> Path:
    """An empty folder to run in, as Colab's /content."""
    return tmp_path_factory.mktemp("content")


def run(nb, content: Path):
    """The notebook, run in a fresh kernel of this environment that cannot see the repository."""
    where = {"metadata": {"path": str(content)}}
    NotebookClient(nb, timeout=300, kernel_name="python3", resources=where).execute(env=surroundings())
    return nb


@pytest.fixture(scope="session")
def installed(repository, content):
    """ringlearn, installed by the setup cell; removed at the end. Gives what was installed before and after."""
    pip("uninstall", "--yes", "ringlearn")
    before = freeze()
    nb = nbformat.read(NOTEBOOKS[0], as_version=4)
    cell = next(cell for cell in nb.cells if cell.cell_type == "code")
    cell.source, n = re.subn(r"(?<=git\+)https://\S+", repository, cell.source)
    assert n == 1
    nb.cells = [cell]
    run(nb, content)
    yield before, freeze()
    pip("uninstall", "--yes", "ringlearn")


def test_the_versions_are_those_of_colab():
    versions = {name: metadata.version(name) for name in ("ipywidgets", "ipython", "ipykernel")}
    assert versions == {"ipywidgets": "7.7.1", "ipython": "7.34.0", "ipykernel": "6.17.1"}


def test_the_setup_cell_installs_ringlearn_and_nothing_else(installed):
    """Above all no other torch: Colab's own fits its GPU."""
    before, after = installed
    assert any(line.startswith("torch==") for line in before)
    assert before <= after
    assert [line.partition(" ")[0] for line in after - before] == ["ringlearn"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_that_setup_cell(path):
    nb = nbformat.read(path, as_version=4)
    first = next(cell for cell in nb.cells if cell.cell_type == "code")
    addresses = re.findall(r"git\+(https://\S+)", first.source)
    assert len(addresses) == 1 and first.source.startswith(SETUP.format(*addresses))


# Runs behind a cell that shows a widget: every control by itself must move what the widget shows.
MOVE = """
import ipywidgets as _w
def _all(widget):
    return [widget] + [below for child in getattr(widget, "children", ()) for below in _all(child)]
def _choices(menu):
    return [option[-1] if isinstance(option, tuple) else option for option in menu.options]
def _other(control):
    if isinstance(control, _w.FloatLogSlider):
        return control.base ** (control.min if control.value > 1 else control.max)
    if isinstance(control, _w.Checkbox):
        return not control.value
    if hasattr(control, "options"):
        return next(choice for choice in _choices(control) if choice != control.value)
    return control.max if control.value < control.max else control.min
_parts = _all(Out[max(Out)])  # not `_`, which a notebook may have assigned
_shown = [part for part in _parts if isinstance(part, (_w.HTML, _w.Image))]
_controls = [part for part in _parts if part not in _shown and hasattr(part, "value")]
_menus = [control for control in _controls if hasattr(control, "options")]
def _moves(control):
    before = [part.value for part in _shown]
    control.value = _other(control)
    return [part.value for part in _shown] != before
def _back():
    for each, value in zip(_controls, _start):
        each.value = value
_start = [control.value for control in _controls]
for _control in _controls:
    for _menu, _choice in [(menu, choice) for menu in _menus for choice in _choices(menu)]:
        if getattr(_control, "disabled", False):  # it is without effect beside what another one says
            _menu.value = _choice
    assert not getattr(_control, "disabled", False), _control
    _found = _moves(_control)
    for _each in _controls:  # a direction changes nothing at step 0, for instance
        if not _found and _each is not _control:
            _back()
            _each.value = _other(_each)
            _found = _moves(_control)
    assert _found, _control
    _back()
print(len(_controls), "controls move", len(_shown), "pictures")
"""


def visible(outputs) -> list:
    """What nbval compares: the text of streams and results. Pictures are not compared, nor is where an error was."""
    sanitize = configparser.RawConfigParser()
    sanitize.read(ROOT / "tests" / "nbval_sanitize.cfg")
    found = []
    for output in join_streams(outputs):
        if output.output_type == "error":
            texts = {"error": f"{output.ename}: {output.evalue}"}
        elif output.output_type == "stream":
            texts = {output.name: output.text}
        else:
            texts = {k: v for k, v in output.data.items() if k[:6] != "image/" and k != WIDGET_VIEW}
        for section in sanitize.sections():
            regex, new = sanitize[section]["regex"], sanitize[section]["replace"]
            texts = {k: re.sub(regex, new, v) if isinstance(v, str) else v for k, v in texts.items()}
        found.append(texts)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_says_the_same_on_colab(path, installed, content):
    stored = nbformat.read(path, as_version=4)
    nb = nbformat.read(path, as_version=4)
    widgets = [c.id for c in nb.cells if "when the notebook runs live" in str(c.get("outputs", ""))]
    for place in reversed([i for i, cell in enumerate(nb.cells) if cell.id in widgets]):
        nb.cells.insert(place + 1, nbformat.v4.new_code_cell(MOVE, id=f"move-{nb.cells[place].id}"))
    run(nb, content)
    new = {cell.id: cell for cell in nb.cells}

    differ = {
        cell.id: (visible(cell.outputs), visible(new[cell.id].outputs))
        for cell in stored.cells
        if cell.cell_type == "code" and "nbval-ignore-output" not in cell.metadata.get("tags", [])
    }
    assert {name: pair for name, pair in differ.items() if pair[0] != pair[1]} == {}
    for name in widgets:
        assert any(WIDGET_VIEW in output.get("data", {}) for output in new[name].outputs), name
        assert re.fullmatch(r"[1-9]\d* controls move [1-9]\d* pictures\n", new[f"move-{name}"].outputs[0].text)

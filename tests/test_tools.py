"""The notebook tools, on notebooks small enough to run in a second or two."""

import subprocess
import sys
from pathlib import Path

import build_course
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


@pytest.mark.parametrize("tool", ["execute_notebooks.py", "build_course.py"])
def test_a_failing_notebook_names_the_cell_and_the_error(tool, tmp_path, monkeypatch):
    good = write(tmp_path / "01_good.ipynb", "print('fine')")
    bad = write(tmp_path / "02_bad.ipynb", "x = 1", "y = x / 0  # here", "print('never')")
    before = bad.read_bytes()
    if tool == "build_course.py":
        done = run_course(tmp_path, good, bad)
    else:
        done = run(tool, good, bad)
    assert done.returncode == 1
    assert "FAILED" in done.stdout and "1/1 cells" in done.stdout
    assert "02_bad.ipynb failed in code cell 2 of 3" in done.stderr
    assert "    y = x / 0  # here" in done.stderr and "ZeroDivisionError: division by zero" in done.stderr
    assert bad.read_bytes() == before


def test_a_dead_kernel_is_a_failure_with_a_message(tmp_path):
    done = run("execute_notebooks.py", write(tmp_path / "01_a.ipynb", "import os\nos._exit(1)"))
    assert done.returncode == 1
    assert "failed in code cell 1 of 1" in done.stderr and "The kernel died" in done.stderr


def test_a_missing_notebook_is_named(tmp_path):
    done = run("build_course.py", tmp_path / "absent.ipynb")
    assert done.returncode == 1 and "absent.ipynb" in done.stderr


def run_course(folder: Path, *paths: Path) -> subprocess.CompletedProcess:
    """build_course.py with its pages under folder, so that a test leaves build/course/ alone."""
    script = (
        f"import sys, build_course, pathlib; build_course.COURSE = pathlib.Path({str(folder / 'course')!r})\n"
        f"sys.exit(build_course.main({[str(p) for p in paths]!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "tools", timeout=120
    )


def test_course_has_an_index_and_a_page_per_notebook(tmp_path):
    first = write(tmp_path / "01_a.ipynb", "print('the answer is', 6 * 7)")
    second = write(tmp_path / "02_b.ipynb", "1 / 0", tags={0: "raises-exception"})
    before = first.read_bytes()
    done = run_course(tmp_path, first, second)
    assert done.returncode == 0, done.stderr
    assert "index.html" in done.stdout and "make lab" in done.stdout
    index = (tmp_path / "course" / "index.html").read_text()
    for part in ['href="01_a.html"', "Pieces &amp; wholes", "A softmax can be computed in pieces.", "30 to 40", ">45<"]:
        assert part in index
    page = (tmp_path / "course" / "01_a.html").read_text()
    assert "the answer is 42" in page and 'href="index.html"' in page and 'href="02_b.html"' in page
    assert first.read_bytes() == before
    assert f'src="{build_course.MATHJAX}"' in page and "ajax/libs/mathjax" not in page  # formulas need no network
    assert (tmp_path / "course" / build_course.MATHJAX).is_file()


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


@pytest.mark.parametrize("end", ["\n</details>", "\n\n</details>"])
@pytest.mark.parametrize("answer", ["1. one\n2. the answer", "the answer", "```python\nthe_answer()\n```"])
def test_answers_stay_in_their_collapsed_box(answer, end):
    cell = new_markdown_cell(f"# T\n\nBefore.\n\n<details><summary>Answer</summary>\n\n{answer}{end}\n\nAfter the box.")
    nb = new_notebook(cells=[cell])
    page = build_course.page(nb, [build_course.describe(nb, "01_a")], 0)
    assert page.count("<details>") == page.count("</details>") == 1
    before, box = page.split("<details>")
    box, after = box.split("</details>")
    assert "answer" in box and "answer" not in after and "After the box." in after and "Before." in before


def test_a_picture_in_a_file_travels_with_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(build_course, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "ring.svg").write_text("<svg/>")
    assert build_course.embedded("ring.svg") == "data:image/svg+xml;base64,PHN2Zy8+"
    assert build_course.embedded("absent.svg") == "absent.svg"


def test_links_between_notebooks_become_links_between_pages():
    assert build_course.link("02_b.ipynb", {"02_b"}) == "02_b.html"
    assert build_course.link("../README.md", {"02_b"}) == f"{build_course.repository()}/blob/main/README.md"
    assert build_course.link("https://arxiv.org/abs/2310.01889", set()) == "https://arxiv.org/abs/2310.01889"

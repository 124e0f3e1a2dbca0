"""Run notebooks, each in a fresh kernel, and store their outputs in place, in a form that only changes when they do.

    python tools/execute_notebooks.py                          # all of notebooks/
    python tools/execute_notebooks.py notebooks/01*.ipynb

A notebook that fails is left as it was; the message names the cell, and the exit status is 1.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 300  # seconds; a whole notebook is meant to take less than 60

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# The start of a path in a traceback, which may stand between the codes that colour it.
PATH = r"(?:~|/)[^\s\"':\x1b]*"
KEPT_CELL_METADATA = {"tags", "jupyter", "editable", "slideshow"}


class NotebookError(Exception):
    """A notebook that did not run to its end. Its text is what a person needs to find the cell."""


class Progress:
    """One line per notebook: a bar that fills while it runs on a terminal, just the final line in a log.

    `[1/3] 01_incremental_softmax  ##########..........  12/25 cells   8 s`
    """

    width = 20

    def __init__(self, number: int, of: int, name: str):
        self.label = f"[{number}/{of}] {name}"
        self.start = time.monotonic()
        self.live = sys.stdout.isatty()

    def line(self, done: int, cells: int) -> str:
        filled = self.width * done // max(cells, 1)
        bar = "#" * filled + "." * (self.width - filled)
        return f"{self.label:32s}  {bar}  {done:2d}/{cells} cells  {time.monotonic() - self.start:3.0f} s"

    def update(self, done: int, cells: int) -> None:
        if self.live:
            print("\r" + self.line(done, cells), end="", flush=True)

    def finish(self, done: int, cells: int, verdict: str = "") -> None:
        print(("\r" if self.live else "") + self.line(done, cells) + verdict, flush=True)


def execute(path: Path, progress: Progress) -> NotebookNode:
    """The notebook at path, run from a fresh kernel in its own folder, with new outputs; the file is not touched.

    Raises NotebookError if a cell fails, takes too long or kills the kernel. Cells tagged `raises-exception` may fail.
    """
    nb = nbformat.read(path, as_version=4)
    code = [i for i, cell in enumerate(nb.cells) if cell.cell_type == "code" and cell.source.strip()]
    started: list[int] = []

    def on_start(cell, cell_index):
        if cell_index in code:
            started.append(cell_index)
            progress.update(len(started) - 1, len(code))

    client = NotebookClient(
        nb,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=on_start,
        # The kernel's own start-up warnings are for its administrator and would appear between our progress lines.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        done = max(len(started) - 1, 0)
        progress.finish(done, len(code), "  FAILED")
        raise NotebookError(explain(path, nb, started, len(code), error)) from error
    progress.finish(len(code), len(code))
    return nb


def explain(path: Path, nb: NotebookNode, started: list[int], cells: int, error: Exception) -> str:
    """Which cell of which notebook failed, its text, and the error."""
    where = f"{display_path(path)} failed"
    source = ""
    if started:
        where += f" in code cell {len(started)} of {cells}"
        source = "\n" + "\n".join("    " + line for line in nb.cells[started[-1]].source.splitlines()) + "\n"
    if isinstance(error, CellExecutionError):
        trace = re.sub(r"\x1b\[[0-9;]*m", "", error.traceback).strip()
        what = "\n".join(trace.splitlines()[-25:])
    elif isinstance(error, CellTimeoutError):
        what = f"The cell ran for more than {CELL_TIMEOUT} s."
    else:
        what = "The kernel died: out of memory, or a crash in native code."
    return f"{where}:\n{source}\n{what}"


def display_path(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def normalise(nb: NotebookNode, stem: str) -> None:
    """Take out of nb whatever differs between two runs or two machines although nothing that it says has changed.

    Out go widget state (malformed state breaks GitHub's preview), timings, interpreter versions, and paths in
    tracebacks. Execution counts and cell ids stay; a missing id becomes one made from stem and the cell's place.
    """
    nb.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    nb.nbformat, nb.nbformat_minor = 4, max(nb.nbformat_minor, 5)
    seen: set[str] = set()
    for place, cell in enumerate(nb.cells, start=1):
        if cell.get("id") in seen | {None}:
            cell["id"] = f"{stem[:40]}-{place:02d}"
        seen.add(cell["id"])
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k in KEPT_CELL_METADATA})
        if cell.cell_type == "code":
            cell.outputs = [normalise_output(output) for output in join_streams(cell.outputs)]


def join_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """How the kernel cuts a stream into messages depends on timing: make neighbours of one stream one output."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def normalise_output(output: NotebookNode) -> NotebookNode:
    if "data" in output:
        output.data.pop(WIDGET_VIEW, None)
        output.metadata.pop(WIDGET_VIEW, None)
    if output.output_type == "error":
        output.traceback = [without_machine_paths(line) for line in output.traceback]
    return output


def without_machine_paths(text: str) -> str:
    """Paths in the repository become relative, those of packages and of Python lose what stands before them."""
    home = str(Path.home())  # IPython writes ~ for it
    for root in (str(ROOT), str(ROOT).replace(home, "~", 1)):
        text = text.replace(f"{root}{os.sep}", "")
    text = re.sub(rf"{PATH}/site-packages/", "site-packages/", text)
    return re.sub(rf"{PATH}/python3\.\d+/", "python/", text)


def prepare_environment() -> None:
    """What a kernel inherits should not depend on the caller's shell."""
    os.environ.pop("MPLBACKEND", None)  # else figures would not be shown inline
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the debugger's warning would appear on our terminal


def chosen_notebooks(arguments: list[str]) -> list[Path] | None:
    """The notebooks that the command line names, or all; None if one does not exist, which is said on stderr."""
    paths = [Path(a) for a in arguments] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        print(f"no such notebook: {', '.join(missing)}", file=sys.stderr)
        return None
    return paths


def main(arguments: list[str]) -> int:
    paths = chosen_notebooks(arguments)
    if paths is None:
        return 1
    if not paths:
        print("there is no notebook in notebooks/ to run")
    prepare_environment()
    failures = []
    for number, path in enumerate(paths, start=1):
        try:
            nb = execute(path, Progress(number, len(paths), path.stem))
        except NotebookError as error:
            failures.append(str(error))
            continue
        normalise(nb, path.stem)
        nbformat.write(nb, path)
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

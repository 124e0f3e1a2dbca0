"""Reading a notebook as a test does: its cells, its collapsed solutions, and its run with exercises solved."""

from __future__ import annotations

import ast
import dis
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# The processes that a notebook starts are forked, as those of tests (see forked.py).
QUICK_START = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import forked, ringlearn.launch.pool
sys.modules["ringlearn.launch.pool"].subprocess = forked
del forked, ringlearn, sys
"""
SOLUTION = re.compile(r"<summary>(\w+), solution</summary>\s+```python\n(.*?)```", re.DOTALL)


def read(number: str):
    """The notebook whose file name starts with number, "01"."""
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith(f"{number}_"))
    return nbformat.read(path, as_version=4)


def solutions(nb) -> dict[str, str]:
    """Exercise, "1a" -> the code in its collapsed help."""
    return {
        name: code for cell in nb.cells if cell.cell_type == "markdown" for name, code in SOLUTION.findall(cell.source)
    }


def solution(exercise: str, name: str):
    """What the solution of an exercise, "11a", defines under this name."""
    space: dict = {}
    exec(solutions(read(exercise[:2]))[exercise.lstrip("0")], space)
    return space[name]


def exercises(nb) -> list[str]:
    """The exercises that have a cell to fill in, in order: a cell with the tag "exercise" and the id "exercise-1a"."""
    return [c.id.removeprefix("exercise-") for c in nb.cells if "exercise" in c.metadata.get("tags", [])]


def predictions(nb) -> list[str]:
    """The names of its predictions, "predict_overflow", in the order in which it asks."""
    code = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "code")
    return list(dict.fromkeys(re.findall(r"\bpredict_\w+", code)))


def solve(nb, guesses: dict[str, str]):
    """The notebook with its own solutions in place of its stubs, and guesses made.

    guesses: a word of the prediction's cell, "predict_overflow" -> what to guess, as Python text; for a quiz a list.
    Raises KeyError for an exercise without a solution, and ValueError for a guess that has no place or a prediction
    without a guess.
    """
    known, unused = solutions(nb), set(guesses)
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        if "exercise" in cell.metadata.get("tags", []):
            first = cell.source.splitlines()[0] if cell.source.startswith("%%") else None
            code = known[cell.id.removeprefix("exercise-")]
            cell.source = code if first is None or code.startswith("%%") else f"{first}\n{code}"
            continue
        names = [name for name in guesses if re.search(rf"\b{name}\b", cell.source)]
        for name in names:
            cell.source, n = re.subn(r"^(\w*guess(?:es)?) = .*$", rf"\1 = {guesses[name]}", cell.source, flags=re.M)
            if n == 0:
                raise ValueError(f"no guess to fill in beside {name} in:\n{cell.source}")
            unused.discard(name)
        if not names and re.search(r"^\w*guess(es)? = (None|\[None)", cell.source, re.M):
            raise ValueError(f"a prediction without a guess:\n{cell.source}")
    if unused:
        raise ValueError(f"the notebook does not ask for {sorted(unused)}")
    return nb


def run(nb) -> str:
    """Everything that a notebook prints in a fresh kernel, now that its exercises are solved.

    Only cells that ask something run, and those that define what such cells need. The others print what is stored:
    that this is true is what nbval holds.
    """
    stored, needed = nb.cells, dependent(nb)
    nb.cells = [nbformat.v4.new_code_cell(QUICK_START), *(cell for cell in stored if cell.id in needed)]
    NotebookClient(
        nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "notebooks")}}
    ).execute()
    nb.cells = stored
    return _text(nb)


def dependent(nb) -> set[str]:
    """The ids of the cells whose outputs depend on answers, by their names or by what is stored, and of what they need.

    An answer is what an exercise's cell defines, also where another cell gives it a second name.
    """
    cells = {cell.id: (cell, *_names(cell.source)) for cell in nb.cells if cell.cell_type == "code"}
    needed, answers = set(), set()
    for name, (cell, made, used) in cells.items():
        exercise = "exercise" in cell.metadata.get("tags", [])
        if exercise or used & answers or re.search(r"not written yet|\bfirst\.", _text_of(cell)):
            needed.add(name)
        if exercise:
            answers |= made
    wanted = set()
    for name, (cell, made, used) in reversed(cells.items()):
        if name in needed or made & wanted or re.search(r"^ *%", cell.source, flags=re.M):
            needed.add(name)
            wanted |= used
    return needed


def _names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell makes, outside of functions, and those that it uses."""
    tree = ast.parse(re.sub(r"^%%.*|^( *)%.*", r"\1pass", source, flags=re.M))
    code = compile(tree, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    made = {x.argval for x in dis.get_instructions(code) if x.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return made, {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Store)}


def printed(nb) -> str:
    """What the stored outputs say."""
    return _text(nb)


def told(nb, cell_id: str, after: int = 2) -> str:
    """All that a reader has met who has just been asked by a cell, and what stands in the cells right after it.

    Sources, stored outputs, captions and alternative texts count; folded boxes (``<details>``), the cell itself, the
    cell that calls its checker, and the two questions that a notebook begins with do not. Whitespace is made single.
    Raises StopIteration if there is no such cell.
    """
    at = next(number for number, cell in enumerate(nb.cells) if cell.id == cell_id)
    seen = []
    for number, cell in enumerate(nb.cells[: at + after + 1]):
        if number == at or cell.id == cell_id.replace("exercise", "check"):
            continue
        seen.append(re.sub(r"<details>.*?</details>", "", cell.source, flags=re.DOTALL))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            seen += [
                output.get("text", ""),
                data.get("text/plain", ""),
                *re.findall(r'alt="([^"]*)"', data.get("text/html", "")),
            ]
    return re.sub(r"\s+", " ", "\n".join(seen))


def _text(nb) -> str:
    return "\n".join(_text_of(cell) for cell in nb.cells if cell.cell_type == "code")


def _text_of(cell) -> str:
    """On a busy machine the kernel may send a cell's text in parts, and a part may end within a line."""
    return "".join(output.get("text", "") for output in cell.outputs)


def markdown(nb) -> str:
    return "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


def collapsed_answers(nb) -> list[str]:
    """The first word of each collapsed answer, in order: what `<summary>Answer</summary>` hides."""
    return [a.rstrip(".,:;") for a in re.findall(r"<summary>Answer</summary>\s+(\S+)", markdown(nb))]


def formulas(nb) -> list[int]:
    """The numbers of the numbered formulas, in order."""
    return [int(n) for n in re.findall(r"\\tag\{?(\d+)\}?", markdown(nb))]


def formula_tests(path: Path) -> set[int]:
    """The formulas that a test file has a test for: functions named test_formula_N_..."""
    names = (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {int(m[1]) for m in (re.match(r"test_formula_(\d+)_", name) for name in names) if m}

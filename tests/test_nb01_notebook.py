"""Notebook 01 as a learner leaves it: solved with its own solutions, with guesses made, and without ipywidgets."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "01_incremental_softmax.ipynb"
SOLUTION = re.compile(r"<summary>(\w+), solution</summary>\s+```python\n(.*?)```", re.DOTALL)


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def solutions(nb) -> dict[str, str]:
    """Exercise -> the code in its collapsed help."""
    return {
        name: code for cell in nb.cells if cell.cell_type == "markdown" for name, code in SOLUTION.findall(cell.source)
    }


def run(nb):
    NotebookClient(
        nb, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    return "\n".join(output.get("text", "") for cell in nb.cells if cell.cell_type == "code" for output in cell.outputs)


@pytest.fixture(scope="module")
def solved() -> str:
    nb = read()
    for cell in nb.cells:
        if "exercise" in cell.metadata.get("tags", []):
            cell.source = solutions(nb)[cell.id.removeprefix("exercise-")]
        for name, guess in GUESSES.items():
            if name in cell.source:
                cell.source = cell.source.replace("None, None, None, None, None", guess).replace("= None", f"= {guess}")
    return run(nb)


GUESSES = {
    "predict_overflow": "89",
    "predict_moves": "7",
    "predict_order": "'descending'",
    "predict_weight": "0.75",
    "nb01.quiz": "0.9, 2, 3, 524288, 4096",
}


def test_every_exercise_has_three_levels_of_help():
    text = "\n".join(cell.source for cell in read().cells)
    for exercise in ("1a", "1b", "1c"):
        for level in ("hint", "plan", "solution"):
            assert text.count(f"<summary>{exercise}, {level}</summary>") == 1


@pytest.mark.parametrize("exercise", ["1a online_softmax", "1b merge", "1c blockwise"])
def test_the_solutions_that_the_notebook_shows_pass_its_checkers(solved, exercise):
    assert f"{exercise}: correct" in solved


def test_right_guesses_are_told_so(solved):
    assert solved.count(": right.") == 4 + 5
    assert "Quiz 01: 5 of 5." in solved
    assert "not written yet" not in solved and "first." not in solved


def test_as_shipped_nothing_is_solved_and_no_prediction_is_given_away():
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    text = "\n".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert text.count("not written yet") == 3
    assert text.count("write your guess first") == 4 and text.count("write your answers first") == 1
    for cell in cells:
        if "predict_overflow" in cell.source:
            break
        assert "89" not in "".join(output.get("text", "") for output in cell.outputs)


def test_the_collapsed_answers_are_the_computed_ones():
    from ringlearn.checks import nb01

    markdown = "\n".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    written = re.findall(r"<summary>Answer</summary>\s+([\w.]+)", markdown)
    asked = (nb01.predict_overflow, nb01.predict_moves, nb01.predict_order, nb01.predict_weight)
    assert written == [str(prediction.answer()) for prediction in asked]


def test_the_frame_of_a_notebook():
    nb = read()
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert len(code) <= 30 and max(len(cell.source.splitlines()) for cell in code) <= 20
    markdown = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    words = len(markdown.split())
    assert 900 <= words <= 2500
    assert max(len(line) for cell in code for line in cell.source.splitlines()) <= 100


def test_without_ipywidgets_the_stepper_is_its_static_twin(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from ringlearn.viz import softmax

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    scores, values = torch.tensor([0.0, 1.0, -torch.inf, 2.0]), torch.tensor([1.0, 0.0, 5.0, 1.0])
    twin = softmax.stepper(scores, values)
    assert repr(twin) == repr(softmax.stepper_table(scores, values, [0, 1, 2, 3, 4]))
    assert "nan" not in repr(twin)


def test_the_stepper_moves_its_state_and_never_its_result():
    torch = pytest.importorskip("torch")
    pytest.importorskip("ipywidgets")
    from ringlearn.viz import softmax

    scores, values = torch.tensor([0.0, 1.0, 3.0, -torch.inf, 2.0]), torch.tensor([1.0, 0.0, 0.5, 9.0, 1.0])
    stepper = softmax.stepper(scores, values)
    seen, state, split, parts = stepper.children
    seen.value = 3
    assert "read key 2: score 3.0" in state.value and "0.1353 &nbsp;the maximum moved" in state.value
    seen.value = 4
    assert "read key 3: score -inf" in state.value and "maximum moved" not in state.value
    table = repr(softmax.stepper_table(scores, values, [2]))
    assert "  4    2.0    1.0 |    3.0   1.0000   1.5530   0.9177 |   0.5909" in table
    results = set()
    for split.value in range(6):
        results.add(re.search(r"([\d.]+) &nbsp;\(never moves\)", parts.value)[1])
        assert f"left, {split.value} keys" in parts.value
    want = float(torch.softmax(scores, -1) @ values)
    assert results == {f"{want:.4f}"}

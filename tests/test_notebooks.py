"""What the notebooks promise beyond running: nbval compares outputs, these tests look at what is stored."""

import ast
import json
import re
import sys

import nbformat
import pytest
from build_site import describe
from course import NOTEBOOKS, ROOT, exercises, formula_tests, formulas, markdown
from relink import repository

from ringlearn.course import checks

MAX_BYTES = 500_000
PROMPT = re.compile(r"write your (guess|guesses|answers) first", re.IGNORECASE)

# Where files lie on somebody's machine. In outputs any absolute path with two parts is one.
HOME = re.compile(r"(?<![\w/.:])(?:/(?:home|root|tmp|Users|private|var/folders|content)/\w|[A-Z]:\\)")
ABSOLUTE = re.compile(r"(?<![\w/.:<*)\]])(?:/[\w.-]+|~)/[\w.-]+|[A-Z]:\\\w")


def texts(output) -> list[str]:
    """Everything in an output that a reader sees as text."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return [output.ename, output.evalue, *(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in output.traceback)]
    return [v if isinstance(v, str) else json.dumps(v) for kind, v in output.data.items() if kind[:6] != "image/"]


def problems(nb, stem: str) -> list[str]:
    """Every promise that the notebook breaks, as text; [] for a notebook that is fit to be committed."""
    found = []
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("execution counts are not 1..N: an unnumbered cell is not checked")
    if nb.nbformat_minor < 5 or len({cell.id for cell in nb.cells}) != len(nb.cells):
        found.append("cell ids are missing or not unique")
    if "widgets" in nb.metadata:
        found.append("widget state is stored: GitHub cannot show such a notebook")
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel is not python3")
    for cell in code:
        found += [f"cell {cell.execution_count}: {problem}" for problem in cell_problems(cell)]
    return found + top_problems(nb, stem)


def cell_problems(cell) -> list[str]:
    found = []
    if any(line.rstrip().endswith(";") for line in cell.source.splitlines()):
        found.append("a line ends with ';', which hides output in Jupyter but not in nbval")
    if "execution" in cell.metadata:
        found.append("timing metadata is stored")
    if HOME.search(cell.source):
        found.append("a machine path in the source")
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            found.append("stderr output")
        if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
            found.append(f"an error output, {output.ename}, without the tag raises-exception")
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            found.append("a widget view is stored")
        for text in texts(output):
            if ABSOLUTE.search(text) or str(ROOT) in text or sys.prefix in text:
                found.append("a machine path in the output")
            if re.search(r"0x[0-9a-f]{6,}", text):
                found.append("an object's address in the output")
    guesses = stored_guesses(cell.source)
    if any(not unset for unset in guesses.values()):
        found.append("a prediction's answer is stored: ship `guess = None`")
    if guesses and not PROMPT.search(" ".join(text for output in cell.outputs for text in texts(output))):
        found.append("a prediction's stored output must be 'write your guess first'")
    return found


def stored_guesses(source: str) -> dict[str, bool]:
    """The predictions that a cell assigns, `guess` or `..._guess`, and whether each is still None."""
    plain = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
    assigned = {}
    for node in ast.parse(plain).body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and re.fullmatch(r"(\w+_)?guess(es)?", name.id):
                        assigned[name.id] = all(
                            leaf.value is None for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)
                        ) and not any(isinstance(leaf, ast.Call) for leaf in ast.walk(node.value))
    return assigned


def top_problems(nb, stem: str) -> list[str]:
    """The title block: what the course's index and Colab need to find there."""
    found = []
    markdown = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    right = f"{repository().replace('https://github.com', 'https://colab.research.google.com/github')}/blob/main/notebooks/{stem}.ipynb"
    colab = re.findall(r"https://colab\.research\.google\.com/github[^)\s\"'>]*", markdown)
    if not colab or set(colab) != {right}:
        found.append(f"the Colab badge must lead to {right}, not {colab or 'nowhere'}")
    entry = describe(nb, stem)
    for what, value in [("title", entry.title != stem), ("sentence", entry.sentence)]:
        if not value:
            found.append(f"no {what} at the top")
    for what, value in [("reading", entry.reading), ("exercises", entry.exercises)]:
        if not value:
            found.append(f"the top does not say '{what}: N minutes'")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_commit(path):
    assert path.stat().st_size < MAX_BYTES
    assert problems(nbformat.read(path, as_version=4), path.stem) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_frame_of_a_notebook(path):
    """Cells that fit on a screen, with help in three levels for every exercise."""
    nb = nbformat.read(path, as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert max(len(cell.source.splitlines()) for cell in code) <= 25
    assert max(len(line) for cell in code for line in cell.source.splitlines()) <= 100
    text = markdown(nb)
    assert exercises(nb)
    for exercise in exercises(nb):
        for level in ("hint", "plan", "solution"):
            assert text.count(f"<summary>{exercise}, {level}</summary>") == 1, f"{exercise}, {level}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_numbered_formula_has_a_test_of_its_number(path):
    numbers = formulas(nbformat.read(path, as_version=4))
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= 8
    assert formula_tests(ROOT / "tests" / f"test_nb{path.stem[:2]}_formulas.py") >= set(numbers)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_collapsed_quiz_answers_are_the_computed_ones(path):
    (box,) = re.findall(
        r"<summary>Quiz answers</summary>(.*?)</details>", markdown(nbformat.read(path, as_version=4)), re.DOTALL
    )
    quiz = getattr(checks, f"nb{path.stem[:2]}").quiz
    told = [float(answer) for answer in re.findall(r"^\d\. (\S+): ", box, re.MULTILINE)]
    assert told == [float(question.answer()) for question in quiz.questions]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_readme_lists_the_notebook(path):
    assert f"notebooks/{path.name})" in (ROOT / "README.md").read_text()


def sound():
    """A small notebook without a problem, for the tests of the tests."""
    base = repository().replace("https://github.com", "https://colab.research.google.com/github")
    badge = f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]({base}/blob/main/notebooks/01_a.ipynb)"
    new = nbformat.v4
    top = new.new_markdown_cell(
        f"# A title\n\n{badge}\n\nOne sentence.\n\nReading: 30 to 40 minutes. Exercises: 45 minutes."
    )
    first = new.new_code_cell(
        "print(1)", execution_count=1, outputs=[new.new_output("stream", name="stdout", text="1\n")]
    )
    guess = new.new_code_cell("guess = None\ncheck(guess)", execution_count=2)
    guess.outputs = [new.new_output("stream", name="stdout", text="Write your guess first.\n")]
    return new.new_notebook(
        cells=[top, first, guess], metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )


def test_a_sound_notebook_has_no_problem():
    assert problems(sound(), "01_a") == []


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


DEFECTS = {
    "execution counts": lambda nb: nb.cells[1].update(execution_count=None),
    "cell ids": lambda nb: nb.cells[2].update(id=nb.cells[1].id),
    "widget state": lambda nb: nb.metadata.update(widgets={}),
    "kernel": lambda nb: nb.metadata.kernelspec.update(name="venv"),
    "';'": lambda nb: nb.cells[1].update(source="f(1);\ng(2)"),
    "timing": lambda nb: nb.cells[1].metadata.update(execution={"iopub.status.busy": "2026"}),
    "path in the source": lambda nb: nb.cells[1].update(source="open('/home/me/data.txt')"),
    "path in the output": lambda nb: nb.cells[1].outputs.append(stream("saved to /srv/me/plot.png")),
    "address": lambda nb: nb.cells[1].outputs.append(stream("<object at 0x7f3a12345678>")),
    "stderr": lambda nb: nb.cells[1].outputs.append(stream("a warning", "stderr")),
    "raises-exception": lambda nb: nb.cells[1].outputs.append(nbformat.v4.new_output("error", ename="ValueError")),
    "widget view": lambda nb: nb.cells[1].outputs.append(
        nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}})
    ),
    "answer is stored": lambda nb: nb.cells[2].update(source="guess = 42\ncheck(guess)"),
    "stored output must be": lambda nb: nb.cells[2].update(outputs=[stream("It is 42.")]),
    "badge must lead": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("/01_a", "/02_b")),
    "no title": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("# A title", "")),
    "no sentence": lambda nb: nb.cells[0].update(
        source=nb.cells[0].source.replace("One sentence.\n\nReading", "* Reading")
    ),
    "reading": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("Reading: 30 to 40", "35")),
    "exercises": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("Exercises: 45", "45")),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_is_found(name):
    nb = sound()
    DEFECTS[name](nb)
    assert any(name in problem for problem in problems(nb, "01_a")), problems(nb, "01_a")


@pytest.mark.parametrize(
    "text, is_path",
    [
        ("written to /srv/data/x.json", True),
        ("(/usr/lib/python3.11/json.py)", True),
        (r"C:\Users\me", True),
        ("File ~/src/x.py:12", True),
        ("tokens/GPU/s", False),
        ("</div></td>", False),
        ("see https://github.com/ringlearn/ringlearn", False),
        ("a / b / c", False),
        ("ringlearn/partial.py", False),
    ],
)
def test_what_counts_as_a_machine_path(text, is_path):
    assert bool(ABSOLUTE.search(text)) == is_path


@pytest.mark.parametrize(
    "source, guesses",
    [
        ("guess = None", {"guess": True}),
        ("bytes_guess = None  # an integer", {"bytes_guess": True}),
        ("guess = 3 * 4", {"guess": False}),
        ("guess = compute()", {"guess": False}),
        ("guesses = (None, None)", {"guesses": True}),
        ("%pip install x\nguess, other = None, 2", {"guess": False}),
        ("answer = 3", {}),
    ],
)
def test_guesses_are_read_from_the_source(source, guesses):
    assert stored_guesses(source) == guesses

"""Write docs/wrong_answers.md: what people answer, and what the checkers say to it: python tools/wrong_answers.py

The wrong answers are those of tests/zoo/, which the tests hold the checkers to. Each is given to its checker here.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ringlearn.checks import Checker, Wrong  # noqa: E402

PAGE = ROOT / "docs" / "wrong_answers.md"
HEAD = """\
# Wrong answers that people give

What to expect in a class, exercise by exercise, and what the checker says to it. `python tools/wrong_answers.py` makes
this page from the zoo of wrong answers in [tests/zoo](../tests/zoo), each of which the tests give to its checker.
Answers with the same cause are in one row. A checker stops at the first stage that fails: value (the smallest case that
shows the idea), adversarial (inputs that break an almost right answer), gradient, cost (messages, bytes, live memory),
processes (the same on several processes).

The learner sees what happens, on which input, and where to look; the likely cause only at the second failure in a row.
"""


def checkers(module: ModuleType) -> dict[str, Checker]:
    """Exercise, "1a" -> its checker."""
    return {x.exercise.split()[0]: x for x in vars(module).values() if isinstance(x, Checker)}


def wrong(checker: Checker, fn) -> tuple[str, Wrong]:
    """The stage that rejects an answer, and why. Raises ValueError if none does."""
    for stage, run in checker.stages:
        try:
            run(fn)
        except Wrong as found:
            return stage, found
    raise ValueError(f"{checker.exercise}: {fn.__name__} is accepted")


def words(fn, cases: list) -> str:
    """online_not_rescaled -> "not rescaled": without the first word, if all answers to the exercise share it."""
    names = [case[0].__name__.strip("_").split("_") for case in cases]
    shared = len({name[0] for name in names}) == 1 and all(len(name) > 1 for name in names)
    return " ".join(fn.__name__.strip("_").split("_")[shared:])


def plain(text: str) -> str:
    """A message as one cell of a Markdown table: nothing in it is markup, but for `code`."""
    text = re.sub(r"[\d,]+ bytes more", "many bytes more", " ".join(text.split()))  # how many is the machine's business
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_\[\]<>$])", r"\\\1", part) for part in parts
    ).replace("|", "\\|")


def section(number: str, title: str, stem: str) -> str:
    """One notebook: a table for each of its exercises."""
    zoo = importlib.import_module(f"zoo.nb{number}")
    known = checkers(importlib.import_module(f"ringlearn.checks.nb{number}"))
    lines = [f"## [{title}](../notebooks/{stem}.ipynb)"]
    for exercise, cases in zoo.WRONG.items():
        rows: dict[tuple[str, str], list] = {}
        for fn, *_ in cases:
            stage, found = wrong(known[exercise], fn)
            rows.setdefault((stage, found.cause), []).append((words(fn, cases), found.symptom))
        name = known[exercise].exercise.split(maxsplit=1)[1]
        lines += [
            "",
            f"### {exercise}: `{name}`",
            "",
            "| answers | stage | what happens | likely cause |",
            "|---|---|---|---|",
        ]
        for (stage, cause), answers in rows.items():
            who = "; ".join(dict.fromkeys(name for name, _ in answers))
            lines.append(f"| {plain(who)} | {stage} | {plain(answers[0][1])} | {plain(cause)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    sections = [HEAD]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if (ROOT / "tests" / "zoo" / f"nb{path.name[:2]}.py").exists():
            title = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
            sections.append(section(path.name[:2], title, path.stem))
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

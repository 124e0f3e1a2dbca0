"""Write docs/wrong_answers.md: what people answer, and what the checkers say to it.

    python tools/wrong_answers.py       # the whole page
    python tools/wrong_answers.py 07    # the part of one notebook

The wrong answers are those of tests/zoo/, which the tests hold the checkers to. Each is given to its checker here.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import exercise_ranks  # noqa: E402

from ringlearn.course.checks.checker import STAGES, Checker  # noqa: E402
from ringlearn.launch.pool import Pool  # noqa: E402

PAGE = ROOT / "docs" / "wrong_answers.md"
HEAD = """\
# Wrong answers that people give

This page lists the wrong answers to expect in a class, exercise by exercise, and what the checker says about each.
`python tools/wrong_answers.py` makes it from the zoo of wrong answers in [tests/zoo](../tests/zoo), each of which the
tests give to its checker.
Answers with the same cause are in one row. A checker stops at the first stage that fails: value (the smallest case that
shows the idea), adversarial (inputs that break an almost right answer), gradient, cost (messages, bytes, live memory),
processes (the same on several processes).

The learner sees what happens, on which input, and where to look; the likely cause only at the second failure in a row.
The [exercises under torchrun](#exercises-under-torchrun) have no stages, and tell the likely cause at once.
"""
HANGS_AFTER_SECONDS = 2.0  # until ranks that wait for ever are noticed; the learner's are more


def checkers(module: ModuleType) -> dict[str, Checker]:
    """Exercise, "1a" -> its checker."""
    return {x.exercise.split()[0]: x for x in vars(module).values() if isinstance(x, Checker)}


def wrong(checker: Checker, answer, pool: Pool) -> tuple[str, str, str, str]:
    """The stage that rejects an answer, what happens, where to look, and the likely cause.

    Raises ValueError if the answer is not rejected.
    """
    more = {"pool": pool} if "pool" in inspect.signature(checker).parameters else {}
    with redirect_stdout(StringIO()):
        result = checker(answer, help=2, **more)
    if result.status != "failed":
        raise ValueError(f"{checker.exercise}: {names(answer)} is {result.status}")
    parts = r"\n  what happens (.*?)\n  smallest input .*\n  where to look (.*?)\n  likely cause (.*)"
    return result.stage, *re.search(parts, result.message, flags=re.S).groups()


def names(answer) -> list[str]:
    """What an answer is called in the zoo; of one that is several functions, those that are not the solution."""
    functions = answer if isinstance(answer, tuple) else (answer,)
    zoos = [module for name, module in sorted(sys.modules.items()) if name.startswith("zoo.")]
    known = {id(x): name for zoo in zoos for name, x in vars(zoo).items() if callable(x)}
    found = [known.get(id(fn), fn.__name__).strip("_") for fn in functions]
    return [name for name in found if not name.endswith("_solution")]


def called(cases: list) -> list[str]:
    """What each answer to an exercise is called, for people: online_not_rescaled -> "not rescaled".

    The first word goes if all answers to the exercise share it.
    """
    known = [names(answer) for answer, *_ in cases]
    firsts = [name.split("_") for of_answer in known for name in of_answer]
    shared = len({name[0] for name in firsts}) == 1 and all(len(name) > 1 for name in firsts)
    said = [", ".join(" ".join(name.split("_")[shared:]) for name in of_answer) for of_answer in known]
    return [name or "the solution of another" for name in said]


def plain(text: str) -> str:
    """A message as one cell of a Markdown table: nothing in it is markup, but for `code`."""
    text = re.sub(r"[\d,]+ bytes more", "many bytes more", " ".join(text.split()))  # how many is the machine's business
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_\[\]<>$])", r"\\\1", part) for part in parts
    ).replace("|", "\\|")


def headings(nb) -> dict[str, str]:
    """Exercise, "1a" -> what its heading calls it."""
    text = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return dict(re.findall(r"^### Exercise (\w+)[^:\n]*: (.+?)(?: \([^()]*\))?$", text, flags=re.M))


def section(path: Path, pool: Pool) -> str:
    """One notebook: a table for each of its exercises."""
    nb, number = nbformat.read(path, as_version=4), path.stem[:2]
    zoo = importlib.import_module(f"zoo.nb{number}")
    known, titles = checkers(importlib.import_module(f"ringlearn.checks.nb{number}")), headings(nb)
    title = nb.cells[0].source.splitlines()[0].removeprefix("# ")
    lines = [f"## [{title}](../notebooks/{path.name})"]
    for exercise, cases in zoo.WRONG.items():
        if exercise not in titles:
            raise ValueError(f"{path.name}: expected a heading '### Exercise {exercise}: ...', found none")
        rows: dict[tuple[str, str], list] = {}
        for (answer, *_), name in zip(cases, called(cases), strict=True):
            stage, *said, cause = wrong(known[exercise], answer, pool)
            rows.setdefault((stage, cause), []).append((name, *said))
        head = ["| answers | stage | what happens | where to look | likely cause |", "|---|---|---|---|---|"]
        lines += ["", f"### {exercise}: {titles[exercise]}", "", *head]
        for (stage, cause), answers in sorted(rows.items(), key=lambda row: STAGES.index(row[0][0])):
            who = "; ".join(dict.fromkeys(name for name, *_ in answers))
            lines.append(f"| {' | '.join([plain(who), stage, *map(plain, answers[0][1:]), plain(cause)])} |")
    return "\n".join(lines) + "\n"


def torchrun_section(pool: Pool) -> str:
    """The exercises under torchrun, each on four ranks."""
    lines = ["## [Exercises under torchrun](../notebooks/exercises)"]
    for number, cases in importlib.import_module("zoo.exercises").WRONG.items():
        rows: dict[str, list] = {}
        for (answer, _), name in zip(cases, called(cases), strict=True):
            status, message = pool.run(
                exercise_ranks.judge, number, answer.__name__, 4, HANGS_AFTER_SECONDS, timeout=120
            )[0]
            title, happens, cause = told(message)
            if status != "failed":
                raise ValueError(f"{title}: {answer.__name__} is {status}")
            rows.setdefault(cause, []).append((name, happens))
        file = f"{number}_{exercise_ranks.NAMES[number]}.py"
        head = ["| answers | what happens | likely cause |", "|---|---|---|"]
        lines += ["", f"### [{title}](../notebooks/exercises/{file})", "", *head]
        for cause, answers in rows.items():
            who = "; ".join(dict.fromkeys(name for name, _ in answers))
            lines.append(f"| {plain(who)} | {plain(answers[0][1])} | {plain(cause)} |")
    return "\n".join(lines) + "\n"


def told(message: str) -> tuple[str, str, str]:
    """The title of an exercise under torchrun, what happens on the first ranks that are named, and the likely cause."""
    parts = dict(re.findall(r"^  (\S+(?: \S+)*) +(.*(?:\n    .*)*)", message, flags=re.M))
    happens = re.split(r"\n +(?=ranks? \d)", parts["what happens"])[0]
    happens = re.sub(r"in line \d+, ", "in ", " ".join(happens.split()))  # a line of the zoo's
    return message.partition(":")[0], happens, " ".join(parts["likely cause"].split())


def page(number: str | None = None) -> str:
    """The whole page, or the page as it is with one notebook's part made anew.  number: the notebook's, "07"."""
    paths = sorted((ROOT / "notebooks").glob(f"{number or ''}*.ipynb"))
    with Pool(4, backend=None) as pool:
        if number is None:
            return "\n".join([HEAD, *(section(path, pool) for path in paths), torchrun_section(pool)])
        if len(paths) != 1:
            raise ValueError(f"expected the number of a notebook, such as 07, got {number!r}")
        return with_section(PAGE.read_text(encoding="utf-8"), paths[0], section(paths[0], pool))


def with_section(text: str, path: Path, made: str) -> str:
    """The text of the page with this notebook's part replaced.  Raises ValueError if it has none yet."""
    part = rf"^## \[[^\n]*\]\(\.\./notebooks/{re.escape(path.name)}\)\n.*?\n(?=\n## )"
    text, n = re.subn(part, lambda _: made, text, flags=re.M | re.S)
    if n != 1:
        raise ValueError(f"{PAGE.name} has no part for {path.name} yet; make the whole page, without a number")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(*sys.argv[1:2]), encoding="utf-8")

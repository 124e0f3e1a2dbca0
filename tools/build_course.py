"""Run the notebooks and write the course as web pages: build/course/index.html and one page per notebook.

    python tools/build_course.py                               # all of notebooks/
    python tools/build_course.py notebooks/01*.ipynb

The notebooks themselves are not changed: the pages show what this machine computed. If a notebook fails, the others are
still written, the message names the cell, and the exit status is 1.
"""

from __future__ import annotations

import base64
import html
import importlib
import mimetypes
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import nbformat
from execute_notebooks import (
    ROOT,
    WIDGET_VIEW,
    NotebookError,
    Progress,
    chosen_notebooks,
    display_path,
    execute,
    prepare_environment,
)
from nbconvert import HTMLExporter
from nbformat import NotebookNode

COURSE = ROOT / "build" / "course"
MATHJAX = "tex-svg.js"  # all of MathJax in one file beside the pages: formulas need no network
FORMULAS = f"""<script>MathJax = {{tex: {{inlineMath: [["$", "$"], ["\\\\(", "\\\\)"]]}}}}</script>
<script defer src="{MATHJAX}"></script>
<style>mjx-container[display="true"] {{ min-width: 0 !important; overflow: auto hidden; padding: 0.3em 0; }}</style>"""


@dataclass(frozen=True)
class Entry:
    """What the index says of a notebook. Minutes are text such as "30 to 40", as the notebook gives them."""

    stem: str
    title: str
    sentence: str
    reading: str
    exercises: str


def describe(nb: NotebookNode, stem: str) -> Entry:
    """Read title, sentence and minutes from the top of a notebook, where its reader finds them too.

    The title is the first `# ` heading and the sentence the first paragraph of text after it (a badge or a picture is
    not text). The minutes stand in one of the first markdown cells as `reading: 35 minutes, exercises: 45 minutes`
    or as a range, `reading 30 to 40`. What is missing is "".
    """
    top = "\n\n".join([cell.source for cell in nb.cells if cell.cell_type == "markdown"][:4])
    heading = re.search(r"^# +(.+)$", top, flags=re.MULTILINE)
    title = plain(heading[1]) if heading else stem
    after = top[heading.end() :] if heading else top
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", after)]
    sentence = next((plain(p) for p in paragraphs if p and not re.match(r"#|<|!\[|\[!\[|[-*] |\||>", p)), "")
    return Entry(stem, title, sentence, minutes(top, "reading"), minutes(top, "exercises"))


def minutes(text: str, what: str) -> str:
    found = re.search(rf"{what}[^0-9\n]{{0,20}}(\d+(?: *(?:to|-|–) *\d+)?)", text, flags=re.IGNORECASE)
    return re.sub(r" *(?:-|–) *", " to ", found[1]) if found else ""


def plain(markdown: str) -> str:
    """Markdown without its marks: links become their text, emphasis and code lose their signs."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"[`*$]|(?<!\w)_|_(?!\w)", "", text)
    return " ".join(text.split())


def page(nb: NotebookNode, entries: list[Entry], place: int) -> str:
    """One notebook as HTML, with links to the index and to its neighbours."""
    for cell in nb.cells:
        if cell.cell_type == "code":
            # A widget needs a kernel; its static twin is printed before it.
            cell.outputs = [o for o in cell.outputs if WIDGET_VIEW not in o.get("data", {})]
    # Not embed_images=True: it parses each piece of HTML alone and so closes a collapsed box before its contents.
    body, _ = HTMLExporter(template_name="lab").from_notebook_node(
        nb, resources={"metadata": {"name": entries[place].title}}
    )
    # nbconvert's MathJax comes from the web.
    body, n = re.subn(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", "", body, flags=re.S)
    assert n == 1, "nbconvert's pages name MathJax in another way now"
    body = re.sub(r'src="([^":]+)"', lambda m: f'src="{embedded(m[1])}"', body)
    pages = {entry.stem for entry in entries}
    body = re.sub(r'href="([^"#]+)(#[^"]*)?"', lambda m: f'href="{link(m[1], pages)}{m[2] or ""}"', body)
    links = ['<a href="index.html">All notebooks</a>']
    if place > 0:
        links.append(f'<a href="{entries[place - 1].stem}.html">Before: {html.escape(entries[place - 1].title)}</a>')
    if place + 1 < len(entries):
        links.append(f'<a href="{entries[place + 1].stem}.html">Next: {html.escape(entries[place + 1].title)}</a>')
    style = "max-width:60rem;margin:0.8rem auto;padding:0 1rem;font-family:system-ui,sans-serif"
    bar = f'<nav style="{style}">{" &nbsp;·&nbsp; ".join(links)}</nav>'
    start = re.search(r"<body[^>]*>", body).end()
    end = body.rindex("</body>")
    return body[:start] + bar + body[start:end] + bar + FORMULAS + body[end:]


def link(target: str, pages: set[str]) -> str:
    """Where a link in a notebook leads from its page: other notebooks to their pages, other files to the repository."""
    if re.match(r"[a-z]+:|//", target):
        return target
    if target.endswith(".ipynb") and Path(target).stem in pages:
        return f"{Path(target).stem}.html"
    inside = (ROOT / "notebooks" / target).resolve()
    return f"{repository()}/blob/main/{inside.relative_to(ROOT)}" if inside.is_relative_to(ROOT) else target


def embedded(source: str) -> str:
    """A picture that lies in a file beside the notebooks, as text that the page carries with it."""
    path = ROOT / "notebooks" / source
    if not path.is_file():
        return source
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def repository() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


INDEX = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ringlearn: ring attention, from one softmax to many GPUs</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 1.05rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
  table {{ border-collapse: collapse; width: 100%; }}
  th, td {{ text-align: left; vertical-align: top; padding: 0.6rem 0.8rem 0.6rem 0; border-bottom: 1px solid #8886; }}
  td.minutes {{ white-space: nowrap; }}
  code {{ background: #8882; padding: 0.1rem 0.3rem; border-radius: 0.2rem; }}
</style>
</head>
<body>
<h1>Ring attention, from one softmax to many GPUs</h1>
<p>These pages show the notebooks as they ran on this machine. To work through them, exercises included, open them in
JupyterLab: <code>make lab</code>.</p>
<table>
<thead><tr><th>Notebook</th><th>Reading, minutes</th><th>Exercises, minutes</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>Source: <a href="{repository}">{repository}</a></p>
</body>
</html>
"""


def row(entry: Entry, failed: bool) -> str:
    title = f"<strong>{html.escape(entry.title)}</strong>"
    name = f"{title} (failed)" if failed else f'<a href="{entry.stem}.html">{title}</a>'
    return (
        f"<tr><td>{name}<br>{html.escape(entry.sentence)}</td>"
        f'<td class="minutes">{entry.reading}</td><td class="minutes">{entry.exercises}</td></tr>'
    )


def main(arguments: list[str]) -> int:
    paths = chosen_notebooks(arguments)
    if paths is None:
        return 1
    prepare_environment()
    COURSE.mkdir(parents=True, exist_ok=True)
    for old in COURSE.glob("*.html"):
        old.unlink()  # a page must not outlive its notebook
    package = Path(importlib.import_module("sphinx-mathjax-offline").__file__).parent
    shutil.copy(package / "static" / "mathjax" / MATHJAX, COURSE / MATHJAX)
    entries = [describe(nbformat.read(path, as_version=4), path.stem) for path in paths]
    failures: dict[str, str] = {}
    for place, path in enumerate(paths):
        try:
            nb = execute(path, Progress(place + 1, len(paths), path.stem))
        except NotebookError as error:
            failures[path.stem] = str(error)
            continue
        (COURSE / f"{path.stem}.html").write_text(page(nb, entries, place), encoding="utf-8")
    rows = "\n".join(row(entry, entry.stem in failures) for entry in entries)
    index = COURSE / "index.html"
    index.write_text(INDEX.format(rows=rows, repository=repository()), encoding="utf-8")
    for failure in failures.values():
        print(f"\n{failure}", file=sys.stderr)
    print(f"\nThe course is in {display_path(index)}. Open it in a browser: {index.as_uri()}")
    print("To work through the notebooks in JupyterLab: make lab")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

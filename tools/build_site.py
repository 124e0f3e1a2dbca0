"""Write the course and its docs as one web site that needs no network.

    python tools/build_site.py                         # build/docs/: the notebooks show what is stored in them
    python tools/build_site.py --run                   # build/course/: the notebooks are run first, on this machine
    python tools/build_site.py --run notebooks/01*.ipynb   # only these are run

The pages in docs/ and the notebooks are written for the repository, where a link to `../notebooks/01_x.ipynb` or to
`../ringlearn/merge.py` works. Here they are laid out as a site is, and their links follow: to the page of a notebook,
or to the file in the repository on the web. Where a notebook has a widget, its page has a player, whose frames are
drawn here. Every warning of sphinx is an error. If a notebook fails, its page shows what is stored and says so, the
message names the cell, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import base64
import html
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import nbformat
from execute_notebooks import NotebookError, Progress, chosen_notebooks, display_path, execute, prepare_environment
from nbformat import NotebookNode
from relink import repository

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.M | re.S)
BADGE = re.compile(r"!\[([^\]]*)\]\(https://colab\.research\.google\.com/assets/[^)]*\)")
LIVE = "when the notebook runs live"  # in the stored output of every widget


# ---- What stands at the top of a notebook ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What is said of a notebook elsewhere. Minutes are text such as "30 to 40", as the notebook gives them."""

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


def path_of_the_course(notebooks: Mapping[str, NotebookNode], pictures: Path) -> str:
    """The cards of the landing page, one for each notebook: its first picture, title, sentence and minutes."""
    cards = []
    for stem, nb in sorted(notebooks.items()):
        entry = describe(nb, stem)
        (pictures / f"{stem}.png").write_bytes(thumbnail(nb))
        cards.append(
            f'<a class="card" href="notebooks/{stem}.html"><img src="_static/path/{stem}.png" alt="" loading="lazy">'
            f"<strong>{html.escape(entry.title)}</strong><span>{html.escape(entry.sentence)}</span>"
            f"<small>reading {entry.reading} min, exercises {entry.exercises} min</small></a>"
        )
    return '<div class="path">' + "\n".join(cards) + "</div>"


def thumbnail(nb: NotebookNode, width: int = 480) -> bytes:
    """The first picture that the notebook shows, in a size for a card, as a PNG file."""
    from PIL import Image

    shown = (output for cell in nb.cells if cell.cell_type == "code" for output in cell.outputs)
    found = (output.data["image/png"] for output in shown if "image/png" in output.get("data", {}))
    picture = Image.open(BytesIO(base64.b64decode(next(found)))).convert("RGB")
    picture.thumbnail((width, width), Image.Resampling.LANCZOS)
    file = BytesIO()
    picture.quantize(64).save(file, format="png", optimize=True)
    return file.getvalue()


# ---- From the repository's files to those of a site ------------------------------------------------------------------


def web_link(target: str, folder: Path, root: Path = ROOT) -> str:
    """Where a link of a page in folder leads on the site.

    Pages of docs/ and notebooks lead to pages, pictures stay beside them; any other file of the repository leads to
    the repository on the web. Links with a scheme, and to a place on the same page, stay as they are.

    >>> web_link("../notebooks/03_a.ipynb#messages", ROOT / "docs")
    'notebooks/03_a.ipynb#messages'
    >>> web_link("../docs/ring.svg", ROOT / "notebooks"), web_link("02_b.ipynb", ROOT / "notebooks")
    ('../ring.svg', '02_b.ipynb')
    """
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", path):
        return target
    file = (folder / path).resolve()
    if not file.is_relative_to(root):
        return target
    inside = file.relative_to(root)
    up = "../" if folder == root / "notebooks" else ""
    if inside == Path("README.md"):
        return f"{up}index.md{mark}{anchor}"
    if inside.suffix == ".ipynb" and inside.parts[0] == "notebooks":
        here = folder == root / "notebooks"
        return f"{inside.name if here else inside.as_posix()}{mark}{anchor}"
    if (
        inside.parts[:1] == ("docs",)
        and inside.suffix in {".md", ".svg", ".png"}
        and "measurements" not in inside.parts
    ):
        return f"{up}{inside.relative_to('docs').as_posix()}{mark}{anchor}"
    kind = "tree" if file.is_dir() else "blob"
    return f"{repository(root)}/{kind}/main/{inside.as_posix()}{mark}{anchor}"


def relinked(text: str, folder: Path) -> str:
    """Markdown whose links lead where they should on the site; code blocks are left alone.

    The Colab badge, a picture that lies elsewhere on the web, becomes its words: nothing is broken without a network.
    """
    parts, end = [], 0
    for block in [*FENCE.finditer(text), None]:
        between = text[end : block.start() if block else len(text)]
        between = BADGE.sub(r"\1", between)
        parts.append(LINK.sub(lambda m: m[1] + web_link(m[2], folder) + m[3], between))
        if block:
            parts.append(block[0])
            end = block.end()
    return "".join(parts)


def library_files() -> str:
    """A table of the files of the library, each with the first line of its docstring."""
    rows = ["| file | the idea |", "|---|---|"]
    for path in sorted((ROOT / "ringlearn").iterdir()):
        module = path / "__init__.py" if path.is_dir() else path
        if module.suffix == ".py" and module.exists() and not path.name.startswith("__"):
            idea = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))).split("\n")[0].replace("``", "`")
            rows.append(f"| [`{path.name}`](../ringlearn/{path.name}) | {idea} |")
    return "\n".join(rows)


def give_players(nb: NotebookNode, stem: str, folder: Path) -> None:
    """Put a player in the place of each widget of a notebook: the frames that it shows while one slider is moved.

    folder: where the frames that are pictures are kept.
    """
    import ringlearn as rl
    from ringlearn.course.viz.widgets import as_players

    names: dict[str, object] = {"rl": rl}
    makers: dict[str, ast.stmt] = {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        statements = ast.parse(re.sub(r"^(\s*)%.*$", r"\1pass", cell.source, flags=re.M)).body
        if any(LIVE in str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs):
            call = statements[-1].value
            make_names(call, makers, names)
            with as_players():
                player = eval(ast.unparse(call), names)
            html = player.html(lambda png, i, name=f"{stem}-{cell.id}": keep(folder / f"{name}-{i}.png", png))
            cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": html, "text/plain": "(a player)"})]
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                makers |= {(alias.asname or alias.name): statement for alias in statement.names}
            if isinstance(statement, ast.Assign):
                bound = (
                    node for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)
                )
                makers |= {node.id: statement for node in bound}


def describe_pictures(nb: NotebookNode) -> None:
    """Give each picture an alternative text: the caption in italics below it, else the last paragraph above it."""
    above = ""
    for cell, after in zip(nb.cells, [*nb.cells[1:], None]):
        if cell.cell_type == "markdown":
            above = plain(re.split(r"\n\s*\n", cell.source.strip())[-1])
        elif any("image/png" in output.get("data", {}) for output in cell.outputs):
            caption = re.match(r"\*[^*].*?\*(?=\s*\n\s*\n|\s*$)", getattr(after, "source", ""), flags=re.S)
            cell.metadata["mystnb"] = {"image": {"alt": plain(caption[0]) if caption else above}}


def make_names(code: ast.AST, makers: dict[str, ast.stmt], names: dict[str, object]) -> None:
    """Run what gives the names that code uses their values, and nothing else of the notebook."""
    for node in ast.walk(code):
        if isinstance(node, ast.Name) and node.id in makers and node.id not in names:
            make_names(makers[node.id], {name: maker for name, maker in makers.items() if name != node.id}, names)
            exec(ast.unparse(makers[node.id]), names)


def keep(file: Path, png: bytes) -> str:
    """Write a frame, and say where a notebook's page finds it."""
    file.write_bytes(png)
    return f"../_static/players/{file.name}"


def stage(source: Path, notebooks: Mapping[str, NotebookNode], players: Collection[str] | None = None) -> None:
    """Lay out docs/ and the notebooks, by their stems, as one folder of pages; players: for which of them, or all."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("measurements", "published", "__pycache__"))
    for folder in ("path", "players"):
        (source / "_static" / folder).mkdir()
    cards = path_of_the_course(notebooks, source / "_static" / "path")
    for page in source.glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("<!-- files of the library -->", library_files())
        text = relinked(text, ROOT / "docs").replace("<!-- the path of the course -->", cards)
        page.write_text(text, encoding="utf-8")
    (source / "notebooks").mkdir()
    for stem, nb in sorted(notebooks.items()):
        if players is None or stem in players:
            give_players(nb, stem, source / "_static" / "players")
        describe_pictures(nb)
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = relinked(cell.source, ROOT / "notebooks")
        nbformat.write(nb, source / "notebooks" / f"{stem}.ipynb")
    for other in [p for p in (ROOT / "notebooks").iterdir() if p.suffix in {".png", ".svg"}]:
        shutil.copy(other, source / "notebooks")


def stored() -> dict[str, NotebookNode]:
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {path.stem: nbformat.read(path, as_version=4) for path in paths}


def run_notebooks(paths: list[Path], notebooks: dict[str, NotebookNode]) -> list[str]:
    """Put what the notebooks at paths give on this machine in the place of what is stored; what went wrong, in words.

    A notebook that fails stays as it is stored, and its page says so at the top.
    """
    failures = []
    for place, path in enumerate(paths):
        try:
            notebooks[path.stem] = execute(path, Progress(place + 1, len(paths), path.stem))
        except NotebookError as error:
            failures.append(str(error))
            notebooks[path.stem] = nbformat.read(path, as_version=4)
            note = "> **It failed on this machine.** What follows is what is stored in the repository."
            notebooks[path.stem].cells.insert(1, nbformat.v4.new_markdown_cell(note))
    return failures


def build(
    source: Path, site: Path, notebooks: Mapping[str, NotebookNode], players: Collection[str] | None = None
) -> int:
    """Stage the pages in source and write the site; what sphinx returns, 0 if there was no warning."""
    from sphinx.cmd.build import main as sphinx

    sys.path.insert(0, str(ROOT))  # this clone's library, whatever is installed
    stage(source, notebooks, players)
    shutil.rmtree(site, ignore_errors=True)
    cache = source.with_name(f"{source.name}-cache")
    return sphinx(["-W", "--keep-going", "-q", "-E", "-d", str(cache), str(source), str(site)])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", action="store_true", help="run the notebooks first; the site is build/course/")
    parser.add_argument("notebooks", nargs="*", help="which ones to run, all by default")
    options = parser.parse_args(arguments)
    notebooks, failures = stored(), []
    site = ROOT / "build" / ("course" if options.run else "docs")
    if options.run:
        if (paths := chosen_notebooks(options.notebooks)) is None:
            return 1
        prepare_environment()
        failures = run_notebooks(paths, notebooks)
    status = build(site.with_name(f"{site.name}-source"), site, notebooks)
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    if status == 0:
        index = site / "index.html"
        print(f"\nThe course is in {display_path(index)}. Open it in a browser: {index.as_uri()}")
        print("To work through the notebooks in JupyterLab: make lab")
    return 1 if failures else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

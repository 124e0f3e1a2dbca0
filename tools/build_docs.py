"""Write the docs as a web site: build/docs/index.html. Nothing is executed; the notebooks show what is stored in them.

    python tools/build_docs.py            # or make docs

The pages in docs/ and the notebooks are written for the repository, where a link to `../notebooks/01_x.ipynb` or to
`../ringlearn/merge.py` works. Here they are laid out as a site is, in build/docs-source, and their links follow: to the
page of a notebook, or to the file in the repository on the web. Every warning of sphinx is an error.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

import nbformat
from relink import repository
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.M | re.S)


def web_link(target: str, folder: Path, root: Path = ROOT) -> str:
    """Where a link of a page in folder leads on the site.

    Pages of docs/ and notebooks lead to pages, pictures stay beside them; any other file of the repository leads to
    the repository on the web. Links with a scheme, and to a place on the same page, stay as they are.

    >>> web_link("../notebooks/03_a.ipynb#messages", ROOT / "docs")
    'notebooks/03_a.ipynb#messages'
    >>> web_link("docs/ring.svg", ROOT), web_link("02_b.ipynb", ROOT / "notebooks")
    ('ring.svg', '02_b.ipynb')
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
    """Markdown whose links lead where they should on the site; code blocks are left alone."""
    parts, end = [], 0
    for block in [*FENCE.finditer(text), None]:
        plain = text[end : block.start() if block else len(text)]
        parts.append(LINK.sub(lambda m: m[1] + web_link(m[2], folder) + m[3], plain))
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


def stage(source: Path) -> None:
    """Lay out docs/, the README and the notebooks as one folder of pages."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("measurements", "__pycache__"))
    for page in source.glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("<!-- files of the library -->", library_files())
        page.write_text(relinked(text, ROOT / "docs"), encoding="utf-8")
    readme = relinked((ROOT / "README.md").read_text(encoding="utf-8"), ROOT)
    (source / "README.md").write_text(readme, encoding="utf-8")
    (source / "notebooks").mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        nb = nbformat.read(path, as_version=4)
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = relinked(cell.source, ROOT / "notebooks")
        nbformat.write(nb, source / "notebooks" / path.name)
    for other in [p for p in (ROOT / "notebooks").iterdir() if p.suffix in {".png", ".svg"}]:
        shutil.copy(other, source / "notebooks")


def build(source: Path, site: Path) -> int:
    """Stage the pages in source and write the site; what sphinx returns, 0 if there was no warning."""
    stage(source)
    sys.path.insert(0, str(ROOT))  # this clone's library, whatever is installed
    shutil.rmtree(site, ignore_errors=True)
    cache = source.with_name(f"{source.name}-cache")
    return sphinx(["-W", "--keep-going", "-q", "-E", "-d", str(cache), str(source), str(site)])


def main() -> int:
    status = build(ROOT / "build" / "docs-source", ROOT / "build" / "docs")
    if status == 0:
        index = ROOT / "build" / "docs" / "index.html"
        print(f"The site is in {index.relative_to(ROOT)}. Open it in a browser: {index.as_uri()}")
    return status


if __name__ == "__main__":
    sys.exit(main())

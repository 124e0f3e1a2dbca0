"""The site: the notebooks as they are stored, and what lies beside them. tools/build_site.py calls sphinx with this."""

import importlib
import inspect
import re
import shutil
import tomllib
from pathlib import Path

import ringlearn

ROOT = Path(ringlearn.__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

project = "ringlearn"
author = "the ringlearn authors"
copyright = "the ringlearn authors, Apache-2.0"
version = release = ringlearn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
exclude_patterns = ["measurements/*", "_build"]
suppress_warnings = ["myst.nested_header"]  # the headings of boxes: "> ### Take away"

# Notebooks are shown as they were committed, and make test checks those outputs: nothing runs here.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_url_schemes = ["https", "http", "mailto"]

# Formulas without a network: one file of MathJax is copied into the site, and nothing comes from elsewhere.
mathjax_path = "tex-svg.js"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "ringlearn"
html_static_path = ["_static"]
html_css_files = ["ringlearn.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [],
    "top_of_page_buttons": [],
}


def copy_mathjax(app, error):
    if error is None and app.builder.format == "html":
        package = Path(importlib.import_module("sphinx-mathjax-offline").__file__).parent
        shutil.copy(package / "static" / "mathjax" / mathjax_path, Path(app.outdir) / "_static" / mathjax_path)


def lay_out(app, what, name, obj, options, lines):
    """Docstrings are written to be read as text: a list and a table become one on the page too.

    Lines that are indented are a table or code, and are shown as they stand. A paragraph that goes through the
    arguments, "scores: ...  sizes: ...", becomes a list of them.
    """
    out = []
    for paragraph in "\n".join(lines).split("\n\n"):
        rows = paragraph.split("\n")
        if rows[0].lstrip().startswith(">>>"):
            out += [*rows, ""]
            continue
        plain = next((i for i, row in enumerate(rows) if row.startswith(" ")), len(rows))
        if plain:
            out += [*arguments_as_list(rows[:plain], obj), ""]
        while plain < len(rows):
            end = next((i for i in range(plain, len(rows)) if not rows[i].startswith(" ")), len(rows))
            out += ["::", "", *(f"   {row}" for row in rows[plain:end]), ""]
            plain = next((i for i in range(end, len(rows)) if rows[i].startswith(" ")), len(rows))
            out += [*rows[end:plain], ""]
    lines[:] = out


def arguments_as_list(rows, obj):
    try:
        names = "|".join(map(re.escape, inspect.signature(obj).parameters))
    except (TypeError, ValueError):
        return rows
    some = rf"(?:{names})(?:,? (?:and )?(?:{names}))*"
    text = " ".join(rows)
    if not names or not re.match(rf"{some}: ", text):
        return rows
    text, end = re.match(r"(.*?)((?: (?:Returns|Raises) .*)?)$", text).groups()
    parts = re.split(rf"(?:^|(?<=[.;])\s+)({some}): ", text)[1:]
    return [*(f"* **{name}**: {said.strip()}" for name, said in zip(parts[::2], parts[1::2])), "", end.strip()]


def setup(app):
    app.connect("autodoc-process-docstring", lay_out)
    app.connect("build-finished", copy_mathjax)

"""Every link in the README, the docs and the notebooks leads to something that is there."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from course import NOTEBOOKS, ROOT
from relink import repository

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "notebooks").rglob("README.md"))
# What the course points to on the web, and no more: papers, torch, Colab, and the repository itself.
HOSTS = {"arxiv.org", "colab.research.google.com", "docs.pytorch.org", "doi.org", "github.com", "pytorch.org"}


def texts(path: Path) -> list[str]:
    if path.suffix == ".ipynb":
        return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    return [path.read_text(encoding="utf-8")]


def without_code(text: str) -> str:
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def links(path: Path) -> list[str]:
    found = []
    for text in texts(path):
        text = without_code(text)
        found += re.findall(r"\]\(([^)\s]*)\)", text)
        found += re.findall(r'(?:href|src)="([^"]*)"', text)
        found += re.findall(r"<(https?:[^>\s]*)>", text)
    return found


def anchors(path: Path) -> set[str]:
    """The places in a page that a link can lead to: its headings, as GitHub and the site name them."""
    slugs: set[str] = set()
    for text in texts(path):
        text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
        for heading in re.findall(r"^#+ +(.+?) *#*$", text, flags=re.M):
            heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slug = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")
            n = 0
            while (unique := f"{slug}-{n}" if n else slug) in slugs:
                n += 1
            slugs.add(unique)
    return slugs


def broken(path: Path) -> list[str]:
    """Each link of a page that leads nowhere, with the reason."""
    found = []
    for target in links(path):
        if re.match(r"[a-z]+:", target):
            url = urlsplit(target)
            if url.scheme != "https" or url.hostname not in HOSTS or not re.fullmatch(r"[!-~]+", target):
                found.append(f"{target}: not an https address on one of {sorted(HOSTS)}")
            elif url.hostname == "github.com" and target.startswith(repository()):
                rest = re.sub(r"^/[^/]+/[^/]+/?((blob|tree)/main/?)?", "", url.path)
                if not (ROOT / rest).exists():
                    found.append(f"{target}: no such file in the repository")
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            found.append(f"{target}: no such file")
        elif anchor and (file.suffix not in (".md", ".ipynb") or anchor not in anchors(file)):
            found.append(f"{target}: no such heading; there are {sorted(anchors(file))}")
    return found


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    assert broken(path) == []


def test_links_are_found():
    assert len(links(ROOT / "README.md")) >= 15
    assert any("colab.research" in link for link in links(NOTEBOOKS[0]))


@pytest.mark.parametrize(
    "link, reason",
    [
        ("nowhere.md", "no such file"),
        ("b.md#two", "no such heading"),
        ("#three", "no such heading"),
        ("http://arxiv.org/abs/1", "not an https"),
        ("https://example.org/x", "not an https"),
        (f"{repository()}/blob/main/no/such.py", "no such file"),
        ("b.md#one--a-1", None),
        ("b.md", None),
        (f"{repository()}/blob/main/README.md", None),
        ("https://arxiv.org/abs/2310.01889", None),
    ],
)
def test_what_is_broken_is_found(link, reason, tmp_path):
    (tmp_path / "b.md").write_text("# One ★ `a`\n\n## One: ★ a\n\n```\n# two\n```\n")
    page = tmp_path / "a.md"
    page.write_text(f"# A\n\n[text]({link}) and `[code](gone.md)`\n")
    assert len(broken(page)) == (reason is not None) and all(reason in problem for problem in broken(page))

"""A fork's links lead to the fork: tools/relink.py, on a copy."""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import relink

ROOT = Path(__file__).parent.parent
OLD, NEW = relink.repository(), "https://github.com/some-one/my.ring_course"


@pytest.fixture
def copy(tmp_path):
    """The files that links stand in, as they are."""
    root = tmp_path / "copy"
    for path in relink.files(ROOT):
        if path == Path(__file__):  # it names the new address itself
            continue
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (root / "ring.svg").write_bytes(b"not ours:\r\n" + OLD.encode() + b"-more " + OLD.encode() + b"s\r\n")
    return root


def owner(address: str) -> str:
    return address.removeprefix("https://github.com/")


def test_every_link_follows_and_nothing_else_changes(copy):
    before = {path: path.read_bytes() for path in relink.files(copy)}
    changed = relink.relink(copy, NEW)
    assert relink.repository(copy) == NEW
    assert {"pyproject.toml", "01_incremental_softmax.ipynb"} <= {path.name for path in changed}
    for path in relink.files(copy):
        after = path.read_bytes()
        if path not in changed:
            assert after == before[path]
        else:
            assert f"github.com/{owner(OLD)}".encode() not in after and f"github/{owner(OLD)}".encode() not in after
            assert after.replace(owner(NEW).encode(), owner(OLD).encode()) == before[path]
    assert relink.relink(copy, NEW) == []
    for path in relink.relink(copy, OLD):  # and back
        assert path.read_bytes() == before[path]


def test_badges_and_setup_cells_of_every_notebook_follow(copy):
    relink.relink(copy, NEW)
    for path in sorted((copy / "notebooks").glob("*.ipynb")):
        nb = nbformat.read(path, as_version=4)
        text = "\n".join(cell.source for cell in nb.cells)
        badge = f"https://colab.research.google.com/github/{owner(NEW)}/blob/main/notebooks/{path.name}"
        assert f"]({badge})" in text and f"%pip install --quiet git+{NEW}\n" in text


def test_the_forks_own_tests_of_names_pass(copy):
    relink.relink(copy, NEW)
    names = "defect or sound"  # a small notebook made with the address of pyproject.toml
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_notebooks.py", "-k", names, "-p", "no:cacheprovider"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("address", [NEW + "/", NEW + ".git", f" {NEW} "])
def test_an_address_as_it_is_copied_from_a_browser_or_from_git(address):
    assert relink.normal(address) == NEW


@pytest.mark.parametrize(
    "address", ["", "you/ringlearn", "https://gitlab.com/you/ringlearn", "http://github.com/a/b", NEW + "/tree/main"]
)
def test_what_no_badge_can_lead_to_is_refused_before_anything_changes(copy, address):
    before = (copy / "pyproject.toml").read_bytes()
    with pytest.raises(ValueError, match="expected https://github.com/owner/name"):
        relink.relink(copy, address)
    assert (copy / "pyproject.toml").read_bytes() == before


def test_without_an_address_it_says_how():
    done = subprocess.run([sys.executable, ROOT / "tools/relink.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "make relink REPOSITORY=https://github.com/you/" in done.stderr


def test_environments_and_what_is_built_are_left_alone(tmp_path):
    for name in ("venv-own/pyvenv.cfg", "venv-own/a.py", "build/a.md", ".git/a.md", "docs/a.md", ".github/a.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(OLD)
    assert [path.relative_to(tmp_path).as_posix() for path in relink.files(tmp_path)] == [".github/a.yml", "docs/a.md"]

"""The files around the library agree with each other and with what they promise."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import ringlearn

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [Requirement(r) for group in PYPROJECT["optional-dependencies"].values() for r in group]
# FlashAttention 4 needs a GPU and is no part of the tests; its one version is that of ringlearn.kernels (test_fa4.py).
ELSEWHERE = PYPROJECT["name"], "flash-attn-4"
REQUIREMENTS = [Requirement(r) for r in PYPROJECT["dependencies"]] + [r for r in EXTRAS if r.name not in ELSEWHERE]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def test_torch_is_the_only_core_dependency():
    assert [Requirement(r).name for r in PYPROJECT["dependencies"]] == ["torch"]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_pyproject_has_lower_bounds_only(requirement):
    assert [s.operator for s in requirement.specifier] == [">="]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_constraints_pin_what_pyproject_asks_for(requirement):
    pinned = dict(pin.split("==") for pin in PINS)
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_constraints_are_exact_and_of_no_machine():
    assert "torch==2.13.0" in PINS
    assert [pin for pin in PINS if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


@pytest.mark.parametrize("pin", PINS)
def test_pins_accept_the_oldest_python(pin):
    """A package may ask for 3.11.5; pip on Debian's 3.11.2 then finds no set at all, after downloading gigabytes."""
    name, _, version = pin.partition("==")
    try:
        installed = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        pytest.skip("not installed: this Python does not need it")
    if installed["Version"].partition("+")[0] != version:
        pytest.skip("another version is installed here")
    asks_for = installed.get("Requires-Python")
    assert SpecifierSet(asks_for or "").contains("3.11.0")


def test_conda_environment_has_no_exact_pin():
    lines = [line for line in (ROOT / "environment.yml").read_text().splitlines() if not line.startswith("#")]
    assert "  - python>=3.11" in lines
    assert [line for line in lines if re.search(r"(?<![<>!])=", line)] == []


def test_versions_agree():
    assert ringlearn.__version__ == PYPROJECT["version"]


def test_repository_is_named_in_one_way():
    """Other files may repeat the address, but not another one."""
    right = PYPROJECT["urls"]["Repository"]
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    for folder in ("ringlearn", "notebooks", "docs"):
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md", ".ipynb", ".toml"}]
    for path in files:
        for owner in re.findall(r"github\.com/([\w.-]+)/ringlearn\b", path.read_text(encoding="utf-8")):
            if owner != "you":  # the reader's own, where a fork is explained
                assert f"https://github.com/{owner}/ringlearn" == right, path


def core_distributions() -> set[str]:
    """ringlearn, torch, and what torch itself requires, by canonical name."""
    found, todo = {"ringlearn"}, [Requirement(r).name for r in PYPROJECT["dependencies"]]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [r.name for r in map(Requirement, requires) if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_import_needs_only_torch():
    core = core_distributions()
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in core for owner in owners)
    }
    assert {"matplotlib", "ipywidgets", "IPython", "pytest"} <= others and not {"torch", "ringlearn"} & others
    program = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(others)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch itself says so
import ringlearn
for name in ringlearn.__all__:
    getattr(ringlearn, name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr

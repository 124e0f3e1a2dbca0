"""Make a copy of this repository your own: every link to it leads to your address.

    make relink REPOSITORY=https://github.com/you/ringlearn
    python tools/relink.py https://github.com/you/ringlearn

The address stands in one place, pyproject.toml; badges, setup cells, the README and the docs repeat it. This rewrites
the one place and everything that repeats it, in the text as it stands: outputs and execution counts of notebooks stay.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"https://github\.com/([A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9_.-]+?)(?:\.git)?/?")
TEXT = {".cfg", ".ipynb", ".md", ".py", ".rst", ".svg", ".toml", ".txt", ".yaml", ".yml"}
NOT_OURS = {"build", "node_modules"}  # and everything whose name starts with a dot, but .github


def repository(root: Path = ROOT) -> str:
    """The address of the repository: "https://github.com/owner/name"."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def normal(address: str) -> str:
    """The address without a slash or .git at its end.

    Raises ValueError for one that is not https://github.com/owner/name: Colab opens notebooks of GitHub only.
    """
    match = ADDRESS.fullmatch(address.strip())
    if match is None:
        raise ValueError(
            f"expected https://github.com/owner/name (Colab opens notebooks from GitHub only), got {address!r}"
        )
    return f"https://github.com/{match[1]}"


def files(root: Path) -> list[Path]:
    """The text files of the repository; not what is built, and no environment."""
    found, todo = [], [root]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            hidden = path.name.startswith(".") and path.name != ".github"
            if hidden or path.is_symlink():
                continue
            if path.is_dir():
                if path.name not in NOT_OURS and not (path / "pyvenv.cfg").exists():
                    todo.append(path)
            elif path.suffix in TEXT or path.name == "Makefile":
                found.append(path)
    return sorted(found)


def relink(root: Path, address: str) -> list[Path]:
    """Rewrite every link to the repository; give the files that changed, pyproject.toml among them.

    Raises ValueError for an address that no badge can lead to.
    """
    new, old = (normal(a).removeprefix("https://github.com/") for a in (address, repository(root)))
    # github.com/old as a whole name, on GitHub and behind Colab's prefix: not github.com/older, nor old-style.
    pattern = re.compile(rf"(?<![\w.-])(github\.com/|colab\.research\.google\.com/github/){re.escape(old)}(?![\w-])")
    changed = []
    for path in files(root):
        text = path.read_bytes().decode("utf-8")
        rewritten = pattern.sub(lambda m: m[1] + new, text)
        if rewritten != text:
            path.write_bytes(rewritten.encode("utf-8"))
            changed.append(path)
    return changed


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not arguments[0]:
        print(
            "relink: say where your copy is: make relink REPOSITORY=https://github.com/you/ringlearn", file=sys.stderr
        )
        return 2
    before = repository()
    try:
        changed = relink(ROOT, arguments[0])
    except ValueError as error:
        print(f"relink: {error}", file=sys.stderr)
        return 2
    if not changed:
        print(f"Nothing to do: every link leads to {before} already.")
        return 0
    print(f"From {before} to {repository()}:")
    for path in changed:
        print(f"  {path.relative_to(ROOT)}")
    print("Look at it with git diff, then commit.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

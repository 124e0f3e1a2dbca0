"""What this machine has, which notebooks run on it for real, and what to do next: ``python -m ringlearn``.

    python -m ringlearn           as text
    python -m ringlearn --json    as JSON, for programs and for bug reports

It needs nothing but torch, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .launch.machine import PACKAGES, machine

# Name and title of each notebook, and how its ranks run: "none" if it has none; "simulated"; as "processes", on GPUs
# if there are two; "measured": simulated, and compared with measurements on GPUs; "both": simulated and as processes.
NOTEBOOKS = (
    ("01_incremental_softmax", "Incremental softmax", "none"),
    ("02_flash_attention", "Flash attention", "none"),
    ("03_simulated_ring", "The simulated ring", "simulated"),
    ("04_ring_backward", "Ring backward", "simulated"),
    ("05_multi_gpu_ring", "Multi-GPU ring", "processes"),
    ("06_overlap", "Overlap", "measured"),
    ("07_load_balance", "Load balance", "simulated"),
    ("08_ways_to_split", "Ways to split a sequence", "measured"),
    ("09_dilated_attention", "Dilated attention on a ring", "simulated"),
    ("10_training", "Training with long context", "both"),
    ("11_decoding", "Decoding", "simulated"),
    ("12_use_it", "Use it", "both"),
)


def notebooks(here: dict[str, Any]) -> list[dict[str, str]]:
    """How each notebook runs on a machine: ``runs`` is "real" or "partly", and ``how`` says it in words."""
    n, gloo = len(here["gpus"]), "gloo" in here["backends"]
    many = n >= 2 and "nccl" in here["backends"]
    recorded = "results for two GPUs are from records"
    processes = "on gloo processes" if gloo else "simulated"
    measured = f"timelines are simulated, then measured on {n} GPUs"
    how = {
        "none": (True, "all of it"),
        "simulated": (True, "all of it; ranks are simulated, so that you can watch them"),
        "processes": (many, f"on {n} GPUs with NCCL" if many else f"{processes}; {recorded}"),
        "both": (gloo, f"simulated{' or on gloo' if gloo else ''}; {recorded}"),
        "measured": (many, measured if many else f"timelines, simulated; {recorded}"),
    }
    found = [(name, title, *how[kind]) for name, title, kind in NOTEBOOKS]
    return [
        {"name": name, "title": f"{name[:2]} {title}", "runs": "real" if real else "partly", "how": text}
        for name, title, real, text in found
    ]


def next_steps(here: dict[str, Any], clone: Path | None) -> list[dict[str, str]]:
    """Commands to try on this machine, each with a description."""
    steps = []
    if clone is not None:
        steps.append(("make lab", "open the notebooks in JupyterLab"))
    elif url := _repository():
        get = f"git clone {url} && cd {url.rpartition('/')[2]}"
        steps.append((f"{get} && make lab", "get the notebooks and open them in JupyterLab"))
    missing = sorted({PACKAGES[name] for name, version in here["packages"].items() if version is None})
    if missing:
        what = "notebooks" if "notebooks" in missing else "plots"
        add = f"{_python()} -m pip install " + ("'ringlearn[{}]'" if clone is None else "-e '.[{}]'").format(what)
        steps.append((add, "for this Python: pictures, widgets and notebooks"))
    many = len(here["gpus"]) >= 2 and "nccl" in here["backends"]
    ranks = len(here["gpus"]) if many else 4
    exercises = sorted((clone / "notebooks" / "exercises").glob("[0-9]*.py")) if clone else []
    if exercises and here["backends"]:
        command = f"{_torchrun()} --nproc-per-node {ranks} {exercises[0].relative_to(clone)}"
        where = f"on {ranks} {'GPUs' if many else 'processes'}"
        steps.append((command, f"an exercise with real processes, {where}"))
    if many:
        steps.append((f"{_python()} -m ringlearn.measure", "what a ring costs on these GPUs"))
    return [{"command": command, "does": does} for command, does in steps]


def _clone() -> Path | None:
    """The root of the repository, if this package is in a clone of it."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "notebooks").is_dir() and (root / "pyproject.toml").is_file() else None


def _repository() -> str | None:
    """The URL of the repository, from the package's metadata."""
    try:
        urls = metadata.metadata("ringlearn").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    return dict(entry.split(", ", 1) for entry in urls).get("Repository")


def _command(path: Path) -> str | None:
    """How to call a program from the current folder: by its name if that finds it, by its path if that is below."""
    if shutil.which(path.name) == str(path):
        return path.name
    return str(path.relative_to(Path.cwd())) if path.exists() and path.is_relative_to(Path.cwd()) else None


def _python() -> str:
    return _command(Path(sys.executable)) or sys.executable


def _torchrun() -> str:
    return _command(Path(sys.executable).with_name("torchrun")) or f"{_python()} -m torch.distributed.run"


def report(here: dict[str, Any], clone: Path | None) -> str:
    """The whole report as text, in at most 100 columns unless a path is long."""
    have = [f"{name} {version}" for name, version in here["packages"].items() if version]
    missing = [name for name, version in here["packages"].items() if not version]
    torch_line = here["torch"] + (f", CUDA {here['cuda']}" if here["cuda"] else "")
    kernel = ", ".join(f"{name} for {dtype}" for dtype, name in here["kernels"].items())
    rows = [("Python", here["python"]), ("torch", torch_line), ("GPUs", _gpu_text(here))]
    if here["links"]:
        rows.append(("links", _link_text(here["links"])))
    rows += [("CPU", f"{here['cores']} core{'s' * (here['cores'] != 1)}"), ("kernels", kernel)]
    rows += [("ranks", "; ".join(here["ranks"])), ("packages", ", ".join(have) or "torch alone")]
    if missing:
        rows.append(("missing", ", ".join(missing)))
    lines = [f"ringlearn {here['ringlearn']} on this machine", ""]
    lines += [f"  {name:<9} {text}" for name, text in rows]
    lines += ["", "How the notebooks run here", ""]
    width = max(len(book["title"]) for book in notebooks(here))
    lines += [f"  {book['title']:<{width}}  {book['how']}" for book in notebooks(here)]
    lines += ["", "Next", ""]
    for step in next_steps(here, clone):
        lines += [f"  {step['command']}", f"      {step['does']}"]
    return "\n".join(lines)


def _gpu_text(here: dict[str, Any]) -> str:
    if here["gpus"]:
        each = [f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in here["gpus"]]
        return "; ".join(f"{each.count(kind)} x {kind}" for kind in dict.fromkeys(each))
    n = here["gpus_out_of_reach"]
    if n:
        return f"{n}, but this torch cannot use {'it' if n == 1 else 'them'}: install a torch for CUDA, see pytorch.org"
    return "none; none is needed"


def _link_text(pairs: Sequence[dict[str, Any]]) -> str:
    """How the GPUs are linked: one phrase if all pairs are alike."""
    kinds: dict[str, list[str]] = {}
    for pair in pairs:
        kind = f"{pair['link']}, {'direct' if pair['peer_access'] else 'through the host'}"
        kinds.setdefault(kind, []).append("-".join(map(str, pair["gpus"])))
    if len(kinds) == 1:
        return f"{next(iter(kinds))}" + (", between all" if len(pairs) > 1 else "")
    *some, last = sorted(kinds, key=lambda kind: len(kinds[kind]))
    return "; ".join([*(f"{kind}: {', '.join(kinds[kind])}" for kind in some), f"{last}: the others"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ringlearn", description=__doc__.split("\n")[0].partition(":")[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    here, clone = machine(), _clone()
    if options.json:
        print(json.dumps({**here, "notebooks": notebooks(here), "next": next_steps(here, clone)}, indent=1))
    else:
        print(report(here, clone))


if __name__ == "__main__":
    main()

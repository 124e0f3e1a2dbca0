"""Where things live: few files at the root, imports that lead downwards without a circle, and a quick import."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ringlearn as rl
from ringlearn.course.former_names import MOVED

ROOT = Path(rl.__file__).parents[1]
# Rooms of the library, and those that may use them but not be used by them.
LIBRARY, ABOVE = ("attention", "kernels", "partial", "tiles", "worlds"), ("bench", "course", "train")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in (ROOT / "ringlearn").rglob("*.py")}


def imported(module: str) -> set[str]:
    """The files that a file imports, wherever in it the import stands."""
    found, path = set(), FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{name.name}" if f"{base}.{name.name}" in FILES else base for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & FILES.keys() - {module}


IMPORTS = {module: imported(module) for module in FILES}


def circle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_root_of_the_package_holds_few_files():
    assert len(list((ROOT / "ringlearn").glob("*.py"))) <= 8


def test_imports_make_no_circle():
    assert circle(IMPORTS) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})  # what it would say


def test_the_library_imports_nothing_that_is_built_on_it():
    room = {module: (module.split(".") + [""])[1] for module in FILES}
    up = [(a, b) for a, found in IMPORTS.items() for b in found if room[a] in LIBRARY and room[b] in ABOVE]
    assert len(IMPORTS) > 100 and up == []


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_nothing_that_is_slow_to_load():
    slow = "matplotlib", "ipywidgets", "transformers", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"
    code = (
        f"import torch, sys; before = set(sys.modules); import ringlearn; print([m for m in {slow} if m in sys.modules"
    )
    assert in_a_fresh_process(f"{code} and m not in before])") == "[]"


def test_what_is_loaded_when_it_is_used_is_listed():
    names = {"checks", "hugging_face", "nn", "text", "viz", "KVCache", "decode_attention", "prefill_attention"}
    assert names <= set(dir(rl))
    code = """
import sys, ringlearn as rl
print("ringlearn.attention.decoding" in sys.modules, rl.KVCache is rl.attention.decoding.KVCache)
print("ringlearn.nn" in sys.modules, rl.hugging_face.register.__module__, rl.nn.__name__, rl.checks.nb03.__name__)
"""
    said = "False True False ringlearn.nn.hugging_face ringlearn.nn ringlearn.course.checks.nb03"
    assert in_a_fresh_process(code).split() == said.split()


def test_a_former_name_is_the_very_module():
    names = {former: MOVED[former] for former in MOVED} | {
        "ringlearn.checks.nb01": "ringlearn.course.checks.nb01",
        "ringlearn.viz.flash": "ringlearn.course.viz.flash",
    }
    code = f"""
import importlib
for former, now in {names}.items():
    a, b = importlib.import_module(former), importlib.import_module(now)  # by the former name first
    print(former, a is b and b.__name__ == b.__spec__.name == now)
"""
    assert in_a_fresh_process(code).splitlines() == [f"{former} True" for former in names]


@pytest.mark.parametrize("program", ["measure", "bench", "train", "generate"])
def test_a_program_starts_in_a_fresh_process(program):
    command = [sys.executable, "-m", f"ringlearn.{program}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"ringlearn.{program}" in done.stdout


def test_a_strategy_in_the_table_is_public():
    for name, (function, strategy, costs) in rl.attention.STRATEGIES.items():
        assert getattr(rl, function.__name__) is function and function.__name__ in rl.__all__
        assert getattr(rl.attention, name.upper().replace("-", "_")) is strategy and costs


def test_an_editor_sees_every_public_name():
    """Jedi reads the files without running them, as editors and type checkers do; IPython brings it."""
    import jedi

    seen = {x.name for x in jedi.Script("import ringlearn as rl\nrl.", project=jedi.Project(ROOT)).complete()}
    assert set(rl.__all__) - seen == set()


def test_plan_is_called_and_its_modules_are_imported():
    code = """
import inspect
import ringlearn.plan.setup as setup
import ringlearn as rl
import ringlearn.plan.hardware
print(setup.Setup is rl.plan.Setup, ringlearn.plan.hardware.GPUS is rl.plan.GPUS)
print(inspect.signature(rl.plan) == inspect.signature(rl.plan.plan))
print(rl.plan("llama-3.1-8b", tokens="32k", gpus=8).best == rl.plan.plan("llama-3.1-8b", tokens="32k", gpus=8).best)
"""
    assert in_a_fresh_process(code).split() == ["True"] * 4

"""The README's example runs as it stands: simulated, and under torchrun with the one change that its comment names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()

CHECK = """
import torch.nn.functional as F
expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
got = torch.autograd.grad((full * full).sum(), (q, k, v))
wanted = torch.autograd.grad((expected * expected).sum(), (q, k, v))
errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in zip((full, *got), (expected, *wanted))]
print("errors below 1e-5:", max(errors) < 1e-5, flush=True)
"""


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return block


def test_simulated(capsys):
    exec(example() + CHECK, {})
    assert capsys.readouterr().out == "errors below 1e-5: True\n"


@pytest.mark.parametrize("P", [1, 3])
def test_under_torchrun(P, tmp_path):
    line = "world = rl.SimulatedWorld(4)          # under torchrun: rl.DistributedWorld()"
    assert line in example()
    file = tmp_path / "example.py"
    file.write_text(example().replace(line, "world = rl.DistributedWorld()") + CHECK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(P), str(file)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "errors below 1e-5: True\n" * P

"""An ejected model is plain PyTorch: it runs where tfkit is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "gpt2.py"
RUN = """
import sys
sys.path.append(sys.argv[1])  # the packages, but no editable install: `-S` reads no .pth files
import importlib.util, runpy
assert importlib.util.find_spec("tfkit") is None
runpy.run_path(sys.argv[2], run_name="__main__")
assert "tfkit" not in sys.modules
"""


@pytest.mark.slow
def test_gpt2_runs_in_a_process_without_tfkit() -> None:
    packages = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", RUN, packages, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "124,439,808 parameters, output.shape=torch.Size([1, 16, 50257])\n"

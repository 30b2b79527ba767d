"""The core without training and without the writing of code: every core command runs, and names no run.

The files that are removed here are those that the contract "The core imports no runs" of pyproject.toml forbids to the
core, and `tools/eject`, which writes the code of models.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REMOVED = ("run", "train", "eval_", "sweep", "runs", "solve", "eject", "tokenizer", "tokens")
CONTRACT = ("__init__.py", "contract.py", "read_rows.py")
"""The files of runs that components of plugins derive from."""
POINT = re.compile(rf'^\w+ = "tfkit\.(tools\.)?({"|".join(REMOVED)})\b.*\n', re.MULTILINE)
SPEC = """\
tfkit: 1
name: small
d_model: 20
vocab_size: 260
max_len: 40
graph:
  embedding: {block: embedding, position: learned}
  decoder:
    block: decoder
    n_layers: 2
    attention: {kind: mha, n_heads: 2}
    ffn: {kind: gelu, d_ff: 36}
  logits: {block: lm_head}
"""
COMMANDS = """\
--help
list gpt2
validate small.yaml
params small.yaml
show small.yaml
show small.yaml --prose
cost small.yaml
draw small.yaml -o small.svg
diff gpt2 llama3_8b
build small.yaml -o built
generate built --tokens 3
compare built built
attention built --tokens 5,7,11 -o attention.svg
profile built --device cpu
export built -o small.ts
save built --layout tfkit -o copied
tensors built
check built --only padding --only building
check --kind ffn.swiglu --only padding
schema -o schema.json
components ffn swiglu
plugins
new plugin mine -o mine
"""
PROGRAM = """
import sys
import tfkit
from tfkit.cli import main

assert tfkit.__file__.startswith(sys.argv[1]), tfkit.__file__
for line in sys.stdin.read().splitlines():
    print("$ tfkit", line, flush=True)
    print("status", main(line.split()), flush=True)
print("imported", *sorted(name for name in sys.modules if name.startswith("tfkit.run")))
"""


def core(folder: Path) -> None:
    """Copy tfkit to a folder without what the core does not need."""
    shutil.copytree(ROOT / "tfkit", folder / "tfkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "specs", folder / "specs")
    text, count = POINT.subn("", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert count == 11  # commands, and modules with hooks
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    tools = [folder / "tfkit" / "tools" / name for name in REMOVED]
    runs = [path for path in (folder / "tfkit" / "run").iterdir() if path.name not in CONTRACT]
    for path in (*runs, *tools, *(path.with_suffix(".py") for path in tools)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def commands(folder: Path, lines: str) -> str:
    """Run command lines in one process with the core in a folder, and return what they print."""
    call = [sys.executable, "-c", PROGRAM, str(folder)]
    environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PATH": "", "HOME": str(folder)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(call, cwd=folder, env=environment, input=lines, text=True, check=False, **output).stdout


@pytest.mark.slow
def test_core_commands_run_without_training_and_code(tmp_path: Path) -> None:
    core(tmp_path)
    (tmp_path / "small.yaml").write_text(SPEC, encoding="utf-8")
    printed = commands(tmp_path, COMMANDS)
    statuses = re.findall(r"^\$ tfkit (.*)$(?:(?!^\$ ).*\n)*?^status (\d+)$", printed, re.MULTILINE)
    assert [line for line, status in statuses if status != "0"] == [], printed
    assert [line for line, _ in statuses] == COMMANDS.splitlines(), printed
    imported = printed.splitlines()[-1].split()[1:]
    assert {*imported} <= {"tfkit.run", "tfkit.run.contract", "tfkit.run.read_rows"}


@pytest.mark.slow
def test_what_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    core(tmp_path)
    (tmp_path / "small.yaml").write_text(SPEC, encoding="utf-8")
    lines = (
        "train addition",
        "validate addition",
        "build small.yaml -o built",
        "save built -o code --layout transformers",
    )
    printed = commands(tmp_path, "\n".join((*lines, "schema run")))
    assert "there is no command `train`" in printed
    assert "there is no spec named `addition`" in printed
    assert "unknown layout `transformers`" in printed
    assert "there is no type of document `run`" in printed
    assert "Traceback" not in printed

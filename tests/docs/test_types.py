"""The Python of the documentation has no type errors: `mypy --strict`, and pyright with the rules of an editor.

pyright comes from basedpyright, whose wheel has all that it needs; it runs with pyright's standard rules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .page import ROOT, blocks

BROKEN = "broken.py"
"""A file of `plugins.md` with a misspelled import, which shows the error."""
PARTLY_TYPED = ("tokenizers", "torch", "transformers")
"""Packages with functions that have no annotations."""
ABSENT = {
    "captum/attr": "",
    "datasets": "",
    "lightning": "from torch import nn\nclass LightningModule(nn.Module): ...\n",
    "nnsight": "",
    "peft": "",
    "sentence_transformers": "",
    "torchao/quantization": "",
    "trl": "",
}
"""Packages of pages that belong to another environment: all of their names are Any, except these."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the blocks of each page, its files, and the plugins of `tfkit new`; return the folder."""
    folder = tmp_path_factory.mktemp("code")
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        target = folder / "_".join(page.relative_to(ROOT).with_suffix("").parts)
        python = [block for block in blocks(page) if block.language == "python"]
        texts = {f"{target.name}/page.py": "\n".join(block.text for block in python if not block.file)}
        texts |= {f"{target.name}/{block.file}": block.text for block in python if block.file}
        for name, text in texts.items():
            if text and not name.endswith(BROKEN):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
    template = ROOT / "tfkit/tools/new/template"
    for number, root in enumerate((template, *template.glob("slots/*"))):
        for path in root.rglob("*.py"):
            if path.relative_to(root).parts[0] in ("src", "tests"):
                name = f"template{number}.py" if path.name == "__init__.py" else f"{path.stem}{number}.py"
                text = path.read_text(encoding="utf-8").replace("tfkit_template", f"template{number}")
                (folder / name).write_text(text, encoding="utf-8")
    for package, text in ABSENT.items():
        stub = folder / "absent" / package / "__init__.pyi"
        stub.parent.mkdir(parents=True)
        stub.write_text(f"from typing import Any\n{text}def __getattr__(name: str) -> Any: ...\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_mypy(code: Path) -> None:
    files = sorted(str(path.relative_to(code)) for path in code.rglob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={os.devnull}"]
    command += ["--explicit-package-bases", *(f"--untyped-calls-exclude={name}" for name in PARTLY_TYPED), *files]
    environment = os.environ | {"MYPYPATH": "absent"}
    checked = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_pyright(code: Path) -> None:
    """Sources of our plugins included."""
    sources = [str(path) for path in ROOT.glob("plugins/*/src")]
    options = {
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
        "include": [".", *sources],
        "stubPath": "absent",
    }
    (code / "pyrightconfig.json").write_text(json.dumps(options), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=code, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout

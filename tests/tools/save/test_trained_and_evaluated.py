"""`Trainer`, TRL's SFT and lm-eval on folders of `tfkit save --layout transformers`, in a process without tfkit.

TRL and lm-eval come with `pip install --group around -e .`, in an environment of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tfkit
from tfkit.spec.render import render_spec
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.common.companions import Companions
from tfkit.tools.eject.remote_code.folder import write_folder
from tfkit.tools.eject.remote_code.proof import Folders

ROOT = Path(__file__).parents[3]
TOOLS = Path(__file__).with_name("remote_tools.py")
PAGE = (ROOT / "docs" / "retention.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
"""The files of docs/retention.md."""
NAMES = ("gpt2", "deepseek_v2_lite", "retnet")
"""A built-in model, one with two plugins, and one with the attention of docs/retention.md."""


def small_model(name: str, folder: Path) -> Any:
    if name != "retnet":
        sets = ["dropout=0"] if name == "gpt2" else []
        return tfkit.build(reduced_model(tfkit.load(name, sets=sets), tfkit.load_plugins()).graph, seed=2)
    for file in ("retention.py", "retnet.yaml"):
        (folder / file).write_text(FILES[file], encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[folder])
    return tfkit.build(tfkit.load(folder / "retnet.yaml", plugins=plugins), seed=2)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, ("trl", "lm_eval"))), reason="pip install --group around -e .")
@pytest.mark.parametrize("name", NAMES)
def test_tools_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "plugin").mkdir()
    (tmp_path / "model").mkdir()
    model = small_model(name, tmp_path / "plugin").eval()
    characters = tmp_path / "chars.json"
    characters.write_text(json.dumps({"characters": "".join(map(chr, range(48, 108)))}), encoding="utf-8")
    with Folders() as process:
        spec = render_spec(model.meta["graph"].spec.model)
        write_folder(model, tmp_path / "model", spec, process, companions=Companions.read(tmp_path, None))
    rows = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(0))
    (tmp_path / "rows.json").write_text(json.dumps(rows.tolist()))
    environment = {"HF_MODULES_CACHE": str(tmp_path / "code"), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", TOOLS, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    with torch.no_grad():
        losses = F.cross_entropy(model(rows)[:, :-1].mT, rows[:, 1:], reduction="none")
    assert values["trainer"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert values["sft"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert values["lm_eval"] == pytest.approx((-losses[:, 3:].sum(1)).tolist(), abs=1e-5)

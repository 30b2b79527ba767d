"""Every block of Python in `docs/around.md` whose tools are installed, and all of `docs/tuning.md`.

`make test-around` installs those beyond torch, in an environment of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tfkit

from .page import follow, run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "around.md").read_text(encoding="utf-8")
HEAD, *SECTIONS = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
(SETUP,) = BLOCK.findall(HEAD)
BLOCKS = [
    pytest.param(block, id=f"{title} {number}", marks=[pytest.mark.slow] * (title == "torch.compile"))
    for title, text in zip(SECTIONS[::2], SECTIONS[1::2], strict=True)
    for number, block in enumerate(BLOCK.findall(text), 1)
]
NEEDED = ("captum", "lightning", "nnsight", "peft", "torchao", "transformers")
TUNING = ("accelerate", "lm_eval", "peft", "trl")
"""The tools of docs/tuning.md."""
EXTRA = {"transformers": ("accelerate",), "peft": ("transformers",)}


@pytest.fixture
def _alone() -> Iterator[None]:
    """A group of one process, in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def packages(block: str) -> list[str]:
    """What a block imports beside torch and tfkit, and what that needs; tfkit-moe for its experts."""
    named = [name for name in NEEDED if re.search(rf"^(from|import) {name}\b", block, re.MULTILINE)]
    return [
        *named,
        *[value for name in named for value in EXTRA.get(name, ())],
        *["tfkit_moe"] * ("kind: moe" in block),
    ]


def test_no_block_is_left_unread() -> None:
    assert len(BLOCKS) + 1 == TEXT.count("```") / 2
    read = {name for param in BLOCKS for name in packages(str(param.values[0]))}
    assert read >= set(NEEDED)


@pytest.mark.filterwarnings("ignore")  # of the tools, at their own use of torch
@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_does_what_it_says(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in packages(block):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install --group around -e .")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # a minute less
    file, names = tmp_path / "around.py", dict[str, Any]()
    file.write_text(f"{SETUP}\n{block}", encoding="utf-8")  # nnsight reads what it traces
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    if "answer" in names:
        assert isinstance(names["answer"], tfkit.decoding.generate.Generated)
        assert names["answer"].tokens.shape == (4, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not all(map(find_spec, TUNING)), reason="pip install --group around -e .")
def test_a_new_attention_is_tuned_divided_served_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page compares the losses, logits, texts and scores of all tools with tfkit's."""
    monkeypatch.chdir(tmp_path)
    environment = {"COLUMNS": "80", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    for name, value in (environment | {"TOKENIZERS_PARALLELISM": "false"}).items():
        monkeypatch.setenv(name, value)
    follow(ROOT / "docs" / "tuning.md", tmp_path, lambda command: run(command, capsys.readouterr))
    assert {"hub", "packed", "adapter", "tuned", "scores"} <= {file.name for file in tmp_path.iterdir()}
